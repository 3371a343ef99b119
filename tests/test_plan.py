"""The plan: what is quantized with which bits, what stays float and why, and nothing left out in silence."""

import json

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import qat
from qat import models
from qat.layers import LAYERS
from qat.planning import Plan


def net() -> nn.Sequential:
    """stem, two blocks of two convolutions, head: enough for every rule."""
    block = lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))  # noqa: E731
    model = nn.Sequential()
    model.stem, model.block1, model.block2 = nn.Conv2d(3, 4, 3), block(), block()
    model.head = nn.Sequential(nn.Flatten(), nn.LazyLinear(4))
    model(torch.randn(1, 3, 6, 6))
    return model


def bits(plan: Plan) -> dict[str, str]:
    """`w a` of every quantized layer."""
    return {e.name: f"{e.weight.format} {e.act.format}" for e in plan.quantized}


LAYER_NAMES = ["stem", "block1.0", "block1.2", "block2.0", "block2.2", "head.1"]


def q(**kwargs):
    return qat.QuantConfig(**kwargs)


def t(b):
    return qat.TensorConfig(bits=b)


def r(match, b):
    return qat.Rule(match=match, bits=b)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (q(bits=4), ["8 8", "4 4", "4 4", "4 4", "4 4", "8 8"]),
        (q(bits=4, first_last_bits=None), ["4 4"] * 6),
        (q(bits=8), ["8 8"] * 6),
        (q(bits=4, first_last_bits=2), ["4 4"] * 6),  # an exception never takes bits away
        (q(bits="w2a8", first_last_bits=4), ["4 8", *["2 8"] * 4, "4 8"]),
        (q(bits=4, first_last_bits="w8a4"), ["8 4", *["4 4"] * 4, "8 4"]),
        (q(bits="w4a8"), ["8 8", *["4 8"] * 4, "8 8"]),
        (q(bits=4, weight=t(2)), ["8 8", *["2 4"] * 4, "8 8"]),
        (q(bits=4, act=t(8), first_last_bits=None), ["4 8"] * 6),
        (q(bits="w4afloat", first_last_bits=None), ["4 float"] * 6),
        (q(bits=8, weight=t("float")), ["float 8"] * 6),
        (q(bits="bf16"), ["bf16 bf16"] * 6),
        (q(bits=4, rules=[r("block2.*", 2)]), ["8 8", "4 4", "4 4", "2 2", "2 2", "8 8"]),
        (q(bits=4, rules=[r("block*", 2), r("block1.2", 6)]), ["8 8", "2 2", "6 6", "2 2", "2 2", "8 8"]),
        (q(bits=4, rules=[r("block1.2", 6), r("block*", 2)]), ["8 8", "2 2", "2 2", "2 2", "2 2", "8 8"]),
        (q(bits=4, rules=[r("*", 3)]), ["3 3"] * 6),  # a rule is stronger than the exception for the ends
        (q(bits=4, rules=[r("stem", 2), r("head.?", "w8a2")]), ["2 2", *["4 4"] * 4, "8 2"]),
        (q(bits=4, rules=[r("*.[02]", "w2a3")]), ["8 8", *["2 3"] * 4, "8 8"]),
        (q(bits=4, rules=[r("block1.0", "float")]), ["8 8", "-", "4 4", "4 4", "4 4", "8 8"]),
        (q(bits="float", rules=[r("block1.0", 4)]), ["-", "4 4", "-", "-", "-", "-"]),
    ],
)
def test_bits(config, expected):
    got = bits(qat.plan(net(), config))
    assert [got.get(name, "-") for name in LAYER_NAMES] == expected


def test_a_rule_may_change_the_method_alone():
    plan = qat.plan(net(), q(bits=4, rules=[qat.Rule(match="block1.*", method="ste")]))
    assert [e.weight.method for e in plan.quantized] == ["lsq", "ste", "ste", "lsq", "lsq", "lsq"]
    assert bits(plan)["block1.0"] == "4 4"


def test_only_the_image_has_a_fixed_scale():
    assert [e.act.learn for e in qat.plan(net()).quantized] == [False] + [True] * 5
    assert all(e.act.learn for e in qat.plan(net(), q(learn_input_scale=True)).quantized)


@pytest.mark.parametrize(
    ("match", "message"),
    [
        ("block3.*", "'block3.*' matches no quantizable layer"),
        ("block1", r"try match='block1\.\*'"),
        ("stm", "closest: stem"),
        ("block1.1", "closest: block1"),  # a ReLU
    ],
)
def test_a_rule_that_matches_nothing(match, message):
    with pytest.raises(qat.QatError, match=message) as error:
        qat.plan(net(), q(rules=[r("stem", 4), r(match, 2)]))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("bad", [0, 9, -1, 3.5, "4bit", "w4", "int8", True, "w4a99", [4]])
def test_bad_bits(bad):
    with pytest.raises(qat.QatError, match="must be 1 to 8") as error:
        qat.plan(net(), bits=bad)
    assert "\n" not in str(error.value)


def test_config_and_bits_are_one_too_many():
    with pytest.raises(qat.QatError, match="not both"):
        qat.plan(net(), q(bits=4), bits=4)


# --- what stays float -------------------------------------------------------------------------------------------------


class Child(nn.Conv2d):
    """A subclass, which may do anything."""


class Reads(nn.Module):
    """Computes with the weight of its child; the child never runs."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({"fc": nn.Linear(4, 4)})
        self.called = nn.Linear(4, 4)

    def helper(self, x):
        return [nn.functional.linear(t, self.inner.fc.weight) for t in x]

    def forward(self, x):
        x = x.to(self.called.weight.dtype).reshape(-1, self.called.weight.shape[1])
        return self.called(self.helper(x)[0])


def replaced_forward() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: nn.functional.linear(x, layer.weight)
    return layer


STAY_FLOAT = {
    "subclass": (lambda: Child(3, 4, 3), "", "a subclass of Conv2d: add it to qat.layers.LAYERS"),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3), "", "no quantized form"),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3), "", "no quantized form"),
    "embedding": (lambda: nn.Embedding(3, 4), "", "no quantized form"),
    "lstm": (lambda: nn.LSTM(3, 4), "", "no quantized form"),
    "prelu": (lambda: nn.PReLU(), "", "no quantized form"),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), "", "computed by a parametrization"),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(3, 4)), "", "computed by a parametrization"),
    "old spectral_norm": (lambda: nn.utils.spectral_norm(nn.Linear(3, 4)), "", "a hook computes it"),
    "pruned": (lambda: prune.l1_unstructured(nn.Linear(3, 4), "weight", 0.5), "", "a hook computes it"),
    "attention": (lambda: nn.MultiheadAttention(4, 2), "out_proj", "MultiheadAttention reads its weight itself"),
    "attention itself": (lambda: nn.MultiheadAttention(4, 2), "", "no quantized form"),
    "fast path": (lambda: nn.TransformerEncoderLayer(4, 2, 8), "linear1", "TransformerEncoderLayer reads its weight"),
    "read by hand": (Reads, "inner.fc", "Reads reads its weight itself"),
    "lazy": (lambda: nn.LazyConv2d(4, 3), "", "run a batch through the model first"),
    "lazy linear": (lambda: nn.LazyLinear(4), "", "run a batch through the model first"),
    "complex": (lambda: nn.Linear(3, 4, dtype=torch.complex64), "", "a weight of complex64"),
    "own forward": (replaced_forward, "", "its forward was replaced"),
    "batch norm": (lambda: nn.BatchNorm2d(4), "", "part of the layer before it"),
    "sync batch norm": (lambda: nn.SyncBatchNorm(4), "", "part of the layer before it"),
    "layer norm": (lambda: nn.LayerNorm(4), "", "a normalization"),
}


@pytest.mark.parametrize("case", STAY_FLOAT)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature", "ignore:enable_nested_tensor")
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_stays_float_with_a_reason(case):
    """It keeps its type and its values, and the plan says why, in print too."""
    make, path, reason = STAY_FLOAT[case]
    model = nn.Sequential(nn.Linear(4, 4), make())
    name = f"1.{path}".rstrip(".")
    plan = qat.plan(model, bits=4)
    entry = next(e for e in plan.entries if e.name == name)
    assert reason in entry.reason
    assert entry.weight is None
    assert entry.act is None
    assert reason in str(plan)
    before = type(model.get_submodule(name))
    qat.quantize(model, bits=4)
    assert type(model.get_submodule(name)) is before
    assert model[0].weight_quantizer.bits == 8


def test_a_call_beside_a_read_of_metadata_is_quantized():
    assert bits(qat.plan(nn.Sequential(nn.Linear(4, 4), Reads()))).keys() == {"0", "1.called"}


def test_a_float_reason_of_the_users_own():
    plan = qat.plan(net(), q(rules=[r("block1.0", "float")]))
    assert next(e.reason for e in plan.entries if e.name == "block1.0") == "its bits are float (rule block1.0)"


@pytest.mark.parametrize("make", [nn.ReLU, lambda: nn.Sequential(nn.BatchNorm2d(3)), lambda: Child(3, 4, 3)])
def test_nothing_to_quantize(make):
    with pytest.raises(qat.QatError, match=r"nothing to quantize: \w+ has no Conv2d or Linear layer") as error:
        qat.quantize(make(), bits=4)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("thing", [nn.Linear, print, None, {}])
def test_what_is_not_a_model(thing):
    with pytest.raises(qat.QatError, match=r"expected a torch\.nn\.Module; got"):
        qat.quantize(thing, bits=4)


def test_a_caller_may_add_a_type(monkeypatch):
    class QuantChild(qat.layers.QuantConv2d, Child):
        float_type = Child

    monkeypatch.setitem(LAYERS, Child, QuantChild)
    model = qat.quantize(nn.Sequential(Child(3, 4, 3), nn.Conv2d(4, 4, 1)), bits=4)
    qat.calibrate(model, [torch.randn(2, 3, 8, 8)])
    assert isinstance(model[0], QuantChild)
    assert len(model[0].weight_quantizer(model[0].weight)[0].unique()) <= 255
    assert type(qat.dequantize(model)[0]) is Child


# --- the zoo ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", models.names())
def test_no_torchvision_model_has_silent_omissions(name):
    """Every name builds; every module that owns a parameter is in the plan, with bits or a reason to stay float."""
    with models.EmptyOnMeta():
        model, trained = models.build(name, num_classes=7)
    assert trained is False
    assert [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)][-1].weight.shape[0] == 7
    plan = qat.plan(model, bits=4)
    entries = {e.name: e for e in plan.entries}
    owners = {n: m for n, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))}
    assert entries.keys() == owners.keys()
    for n, module in owners.items():
        e = entries[n]
        assert e.reason
        assert e.type == type(module).__name__
        assert (e.weight is None) == (e.act is None)
        reads = "swin" in name and n.endswith((".attn.qkv", ".attn.proj"))  # ShiftedWindowAttention.forward
        assert (e.weight is not None) == (type(module) in (nn.Conv2d, nn.Linear) and not reads), n
    assert Plan.from_dicts(json.loads(json.dumps(plan.to_dicts()))).entries == plan.quantized


def test_a_plan_needs_no_values():
    plan = qat.plan(models.skeleton("resnet18"), bits=4)
    assert plan.coverage == "quantized: Conv2d 20/20, Linear 1/1"


def test_print():
    """One line per layer in the model's order, norms summed up, coverage last."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.PReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    model.append(nn.Conv2d(4, 2, 1))
    lines = str(qat.plan(model, bits=4)).split("\n")
    assert [line.split()[0] for line in lines] == ["layer", "0", "2", "3", "5", "2", "quantized:"]
    assert lines[1].split(maxsplit=4)[:3] == ["0", "Conv2d", "8"]
    assert "fixed scale" in lines[1]
    assert "first layer" in lines[1]
    assert "4 lsq" in lines[3]
    assert lines[5] == "2 x BatchNorm2d: float in training, part of the layer before it when deployed"
    assert lines[6] == "quantized: Conv2d 3/3, PReLU 0/1"
    assert all(len(line) == len(line.rstrip()) for line in lines)


def test_round_trip():
    config = q(
        bits=4,
        weight=qat.TensorConfig(init="minmax"),
        act=t("float"),
        rules=[r("block1.*", "bf16"), qat.Rule(match="block2.0", bits=2, method="ste")],
    )
    plan = qat.plan(net(), config)
    assert Plan.from_dicts(json.loads(json.dumps(plan.to_dicts()))).entries == plan.quantized


@pytest.mark.parametrize(
    "rows",
    [[{}], [1], "abc", [{"name": "a"}], {"a": 1}, [None], 7],
)
def test_what_is_not_a_plan(rows):
    with pytest.raises(qat.QatError, match="expected a quantization plan"):
        Plan.from_dicts(rows)


@pytest.mark.parametrize(("key", "value"), [("bits", 99), ("method", "magic"), ("granularity", "galaxy")])
def test_a_plan_of_another_version(key, value):
    rows = qat.plan(net(), bits=4).to_dicts()
    rows[2]["weight"][key] = value
    with pytest.raises(qat.QatError, match=f"{value}"):
        Plan.from_dicts(rows)


# --- shared weights ---------------------------------------------------------------------------------------------------


def tied(n: int = 4, first: int = 0, second: int = 2) -> nn.Sequential:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(n)])
    model[second].weight = model[first].weight
    return model


def test_tied_weights_with_conflicting_rules_name_both():
    with pytest.raises(qat.QatError, match="1 and 2 share one weight but not its bits") as error:
        qat.plan(tied(first=1), q(bits=4, rules=[r("2", 2)]))
    assert "2 lsq" in str(error.value)


@pytest.mark.parametrize(("first", "second"), [(0, 2), (1, 3), (0, 3)])
def test_the_exception_for_an_end_holds_for_both(first, second):
    """The weight is one: it gets the bits of the first or last layer. What enters each is its own."""
    plan = {e.name: e for e in qat.plan(tied(4, first, second), q(bits=4)).entries}
    ends = {first, second} & {0, 3}
    for i in (first, second):
        assert str(plan[str(i)].weight.format) == "8"
        assert str(plan[str(i)].act.format) == ("8" if i in ends else "4")


def test_tied_weights_may_differ_in_what_enters():
    got = bits(qat.plan(tied(first=1), q(bits=4, rules=[r("1", "w4a2"), r("2", "w4afloat")])))
    assert (got["1"], got["2"]) == ("4 2", "4 float")
    plan = qat.plan(tied(first=1), q(bits=4, weight=t("float"), rules=[r("2", "float")]))  # float weights agree too
    assert bits(plan) == {"0": "float 8", "1": "float 4", "3": "float 8"}
