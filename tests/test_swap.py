"""quantize, dequantize and set_bits: the same model, Parameters, names, hooks; nothing half done."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import Tensor, nn

import qat
from qat.config import QatError
from qat.layers import QuantConv2d, QuantLayer, QuantLinear
from qat.quantizers import MixedPrecisionQuantizer, Quantizer


def net() -> nn.Sequential:
    """Every kind of thing once: bias or none, groups, norm, in-place activation, linear."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, groups=4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 16, 4),
    )


def images() -> Tensor:
    return torch.randn(5, 3, 6, 6)


def ready(bits=4, model=None, x=None) -> nn.Module:
    """A quantized and calibrated model."""
    model = qat.quantize(net() if model is None else model, bits=bits)
    qat.calibrate(model, [images() if x is None else x])
    return model


def snapshot(model: nn.Module) -> tuple:
    """All that a failed call must not change."""
    return (
        [(n, type(m), m.training, id(m)) for n, m in model.named_modules()],
        {n: (id(p), p.requires_grad) for n, p in model.named_parameters()},
        {n: t.clone() for n, t in model.state_dict().items()},
        len(model._load_state_dict_pre_hooks),
        [q.bits for q in model.modules() if isinstance(q, Quantizer)],
    )


def assert_untouched(model: nn.Module, before: tuple) -> None:
    after = snapshot(model)
    assert after[0] == before[0]
    assert after[1] == before[1]
    assert after[2].keys() == before[2].keys()
    assert all(torch.equal(after[2][key], before[2][key]) for key in before[2])
    assert after[3:] == before[3:]


# --- what stays -------------------------------------------------------------------------------------------------------


def test_same_model_parameters_and_names():
    model = net()
    modules, parameters, keys = dict(model.named_modules()), dict(model.named_parameters()), list(model.state_dict())
    assert qat.quantize(model, bits=4) is model
    assert all(model.get_submodule(name) is module for name, module in modules.items())
    now = dict(model.named_parameters())
    assert all(now[name] is p for name, p in parameters.items())
    assert [key for key in model.state_dict() if "quantizer" not in key] == keys
    assert {key for key in model.state_dict() if "quantizer" in key} == {
        f"{layer}.{what}_quantizer.{state}"
        for layer in (0, 3, 6)
        for what in ("weight", "input")
        for state in ("scale", "signed", "zero_point", "calibrated")
    }
    assert [type(model[i]) for i in (0, 3, 6)] == [QuantConv2d, QuantConv2d, QuantLinear]
    assert isinstance(model[0], nn.Conv2d)
    assert isinstance(model[6], nn.Linear)


def test_state_has_its_final_shape_at_once():
    """Optimizers, DDP and checkpoints may come before calibration."""
    model = qat.quantize(net(), bits=4)
    before = {key: value.shape for key, value in model.state_dict().items()}
    parameters = {name: id(p) for name, p in model.named_parameters()}
    qat.calibrate(model, [images()])
    model(images()).sum().backward()
    assert {key: value.shape for key, value in model.state_dict().items()} == before
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    assert model[3].weight_quantizer.scale.shape == (8,)
    assert model[3].input_quantizer.scale.shape == (1,)


def note(calls, name):
    return lambda module, *_, **__: calls.append((name, module))


HOOKS = {
    "forward": lambda m, calls: m.register_forward_hook(note(calls, "forward")),
    "forward always": lambda m, calls: m.register_forward_hook(note(calls, "forward always"), always_call=True),
    "forward kwargs": lambda m, calls: m.register_forward_hook(note(calls, "forward kwargs"), with_kwargs=True),
    "pre": lambda m, calls: m.register_forward_pre_hook(note(calls, "pre")),
    "backward": lambda m, calls: m.register_full_backward_hook(note(calls, "backward")),
    "pre backward": lambda m, calls: m.register_full_backward_pre_hook(note(calls, "pre backward")),
    "state": lambda m, calls: m.register_state_dict_post_hook(note(calls, "state")),
    "pre state": lambda m, calls: m.register_state_dict_pre_hook(note(calls, "pre state")),
    "load": lambda m, calls: m.register_load_state_dict_post_hook(note(calls, "load")),
    "pre load": lambda m, calls: m.register_load_state_dict_pre_hook(note(calls, "pre load")),
}


@pytest.mark.parametrize("there_and_back", [False, True])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_survive(kind, there_and_back):
    """They run once per use with the module of the model as argument, and their handles still remove them."""
    model, calls, x = net(), [], images()
    handle = HOOKS[kind](model[3], calls)
    ready(model=model, x=x)
    if there_and_back:
        qat.dequantize(model)
    gc.collect()

    def use():
        calls.clear()
        model(x).sum().backward()
        model.load_state_dict(model.state_dict())
        return list(calls)

    assert use() == [(kind, model[3])]
    handle.remove()
    assert use() == []


def test_tensor_hooks_and_frozen_weights_survive():
    model, seen = net(), []
    model[3].weight.register_hook(seen.append)
    model[6].weight.requires_grad_(False)
    ready(model=model)(images()).sum().backward()
    assert len(seen) == 1
    assert not model[6].weight.requires_grad
    assert model[6].weight.grad is None
    assert model[6].weight_quantizer.scale.grad is not None


class Holds(nn.Module):
    """Reaches its layers by every way but registration."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(2, 2, 3, padding=1, bias=False) for _ in range(5))
        self.plain = [self.convs[1]]
        self.table = {"conv": self.convs[2]}
        self.closure = lambda x, conv=self.convs[3]: conv(x)
        self.bound = self.convs[4].__call__

    def forward(self, x):
        return self.bound(self.closure(self.table["conv"](self.plain[0](self.convs[0](x)))))


def test_whoever_holds_a_layer_holds_the_quantized_one():
    """Not registered again by the swap, yet none of them computes in float: each output has few levels per weight."""
    model, x = Holds(), torch.randn(4, 2, 6, 6)
    ready(model=model, x=x)  # an unreached quantizer would warn
    for conv in model.convs:
        conv.weight_quantizer.scale.data.fill_(2.0**-55)  # every weight becomes 0 or so, if it is quantized
    assert model(x).abs().max() < 1e-6


def test_in_place_models():
    """`x += skip` and in-place activations on what a quantized layer returned or will get."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)

        def forward(self, x):
            y = self.a(x)
            y += x
            y.relu_()
            y = self.b(y)
            y += x
            return y.relu_()

    class OutOfPlace(Net):
        def forward(self, x):
            return (self.b((self.a(x) + x).relu()) + x).relu()

    model, x = Net(), torch.randn(4, 2, 6, 6)
    ready(model=model, x=x)
    reference = OutOfPlace()
    qat.quantize(reference, bits=4)
    reference.load_state_dict(model.state_dict())
    for m in (model, reference):
        m(x).square().sum().backward()
    assert torch.equal(model(x), reference(x))
    for p, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert (p.grad is None and expected.grad is None) or torch.equal(p.grad, expected.grad)


# --- shapes of models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [nn.Conv2d(3, 4, 3), nn.Linear(6, 4)])
def test_the_root_may_be_a_layer(layer):
    kind, x = type(layer), images()
    before, weight = layer(x), layer.weight
    assert qat.quantize(layer, bits=4) is layer
    assert layer.weight is weight
    assert layer.input_quantizer.name == "input_quantizer"
    assert qat.plan is not None
    qat.calibrate(layer, [x])
    assert not torch.equal(layer(x), before)
    assert qat.dequantize(layer) is layer
    assert type(layer) is kind
    assert torch.equal(layer(x), before)


def test_a_layer_called_twice_and_under_two_names():
    """One layer, one pair of quantizers, whose scale sees what enters at both places."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = self.first

        def forward(self, x):
            return self.second(100 * self.first(x))

    model, x = Twice(), torch.randn(16, 4)
    with torch.no_grad():
        inner = 100 * model.first(x)
    qat.quantize(model, qat.QuantConfig(bits=8, act=qat.TensorConfig(init="minmax")))
    qat.calibrate(model, [x])
    assert model.first is model.second
    assert len([m for m in model.modules() if isinstance(m, Quantizer)]) == 2
    q = model.first.input_quantizer
    largest = torch.maximum(inner.max() / q.qmax, inner.min() / q.qmin)
    torch.testing.assert_close(q.step, largest.reshape(1), rtol=1e-3, atol=0)
    assert {k.split(".")[0] for k in model.state_dict()} == {"first", "second"}
    model.load_state_dict(model.state_dict())
    qat.dequantize(model)
    assert type(model.second) is nn.Linear


def test_tied_weights_share_one_quantizer():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[1].weight
    x = torch.randn(8, 4)
    ready(model=model, x=x)
    assert model[1].weight is model[2].weight
    assert model[1].weight_quantizer is model[2].weight_quantizer
    assert model[1].input_quantizer is not model[2].input_quantizer
    model.load_state_dict(model.state_dict())
    assert copy.deepcopy(model)[1].weight_quantizer is not model[1].weight_quantizer
    qat.dequantize(model)
    assert model[1].weight is model[2].weight


def test_quantize_twice_is_an_error():
    model = ready()
    before = snapshot(model)
    for again in (model, nn.Sequential(nn.Conv2d(3, 3, 1), model), copy.deepcopy(model)):
        with pytest.raises(QatError, match=r"already quantized: change it with qat\.set_bits"):
            qat.quantize(again, bits=2)
    assert_untouched(model, before)


def test_quantize_after_use_and_for_a_part():
    model, x = net(), images()
    model(x).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    qat.quantize(model, bits=4)
    assert all(dict(model.named_parameters())[name].grad is grad for name, grad in grads.items())
    part = nn.Sequential(net(), nn.Linear(4, 2))
    qat.quantize(part[0], bits=4)
    assert type(part[1]) is nn.Linear
    qat.calibrate(part, [x])
    part(x)


@pytest.mark.parametrize("mode", [True, False])
def test_the_training_mode_stays(mode):
    model = qat.quantize(net().train(mode), bits=4)
    assert {m.training for m in model.modules()} == {mode}
    assert {m.training for m in qat.dequantize(model).modules()} == {mode}


def test_under_inference_mode():
    """Quantize, calibrate and set_bits may run under inference_mode; training works later."""
    model, x = net(), images()
    with torch.inference_mode():
        qat.quantize(model, bits=4)
        qat.calibrate(model, [images()])
        qat.set_bits(model, 3)
        model(x)
    assert not any(t.is_inference() for t in [*model.parameters(), *model.buffers()])
    model(x).sum().backward()
    assert model[0].weight_quantizer.scale.grad is not None


def test_on_meta():
    with torch.device("meta"):
        model = net()
    assert len(qat.plan(model, bits=4).quantized) == 3
    qat.quantize(model, bits=4)
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
    model.to_empty(device="cpu").load_state_dict(ready().state_dict())
    model(images()).sum().backward()


@pytest.mark.xfail(reason="the scale has torch's default dtype", strict=False)
def test_default_dtype_double():
    torch.set_default_dtype(torch.float64)
    try:
        model, x = net(), images()
        ready(model=model, x=x)
        assert model(x).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(q.scale.dtype == torch.float32 for q in model.modules() if isinstance(q, Quantizer))


# --- optimizers -------------------------------------------------------------------------------------------------------


def test_an_older_optimizer_is_told():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.warns(UserWarning, match=r"AdamW was made before qat\.quantize") as caught:
        qat.quantize(model, bits=4)
    assert caught[0].filename == __file__
    del optimizer


def test_other_optimizers_are_not():
    """Of another model, garbage, or made after the swap: no warning (which would be an error here)."""
    other = net()
    theirs = torch.optim.SGD(other.parameters(), 0.1)
    model = net()
    dead = torch.optim.SGD(model.parameters(), 0.1)
    dead.itself = dead  # only the garbage collector can free it
    del dead
    qat.quantize(model, bits=4)
    mine = torch.optim.SGD(model.parameters(), 0.1)
    qat.dequantize(model)
    del mine, theirs
    qat.quantize(model, bits=4)


# --- nothing half done ------------------------------------------------------------------------------------------------


def poison(model):
    model[6].weight.data[1, 2] = float("nan")


@pytest.mark.parametrize(
    ("prepare", "config", "message"),
    [
        (None, qat.QuantConfig(rules=[qat.Rule(match="nothing", bits=2)]), "matches no quantizable layer"),
        (None, qat.QuantConfig(bits=12), "must be 1 to 8"),
        (None, qat.QuantConfig(rules=[qat.Rule(match="6", bits="w4a3b")]), "must be 1 to 8"),
        (None, qat.QuantConfig(method="lsk"), "closest: lsq"),
        (poison, qat.QuantConfig(bits=4), r"6\.weight_quantizer: the weight has NaN"),
    ],
)
def test_a_failure_leaves_the_model_untouched(prepare, config, message):
    model = net()
    if prepare:
        prepare(model)
        model[6].weight.data.nan_to_num_(nan=torch.inf)  # NaN differs from itself
    before = snapshot(model)
    with pytest.raises(QatError, match=message) as error:
        qat.quantize(model, config)
    assert "\n" not in str(error.value)
    assert_untouched(model, before)


def test_distributed_models_are_refused(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(net())
        with pytest.raises(QatError, match="before DistributedDataParallel"):
            qat.quantize(wrapped, bits=4)
    finally:
        torch.distributed.destroy_process_group()


# --- dequantize -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 4, "w4afloat", "bf16", "fp8"])
def test_dequantize_gives_the_float_model_back(bits):
    """Types, attributes, keys, hooks and outputs; then once more around."""
    model, x = net(), images()
    expected, before = model.eval()(x), snapshot(model)
    attributes = [set(vars(m)) for m in model.modules()]
    for _ in range(2):
        qat.quantize(model, bits=bits)
        qat.calibrate(model, [x])
        assert qat.dequantize(model) is model
        assert_untouched(model, before)
        assert [set(vars(m)) for m in model.modules()] == attributes
        assert torch.equal(model(x), expected)
    assert not model._load_state_dict_post_hooks


def test_dequantize_keeps_what_was_trained():
    model = ready()
    torch.optim.SGD(qat.param_groups(model, lr=0.1), lr=0.1).step(lambda: model(images()).square().sum().backward())
    trained = {n: p.detach().clone() for n, p in model.named_parameters() if "quantizer" not in n}
    qat.dequantize(model)
    assert all(torch.equal(p, trained[n]) for n, p in model.named_parameters())
    fresh = net()
    fresh.load_state_dict(model.state_dict())


def test_dequantize_through_a_wrapper_and_of_a_float_model():
    inner = ready()
    wrapper = nn.ModuleDict({"m": inner})
    qat.dequantize(wrapper)
    assert not inner._load_state_dict_pre_hooks
    assert not any(isinstance(m, QuantLayer) for m in wrapper.modules())
    assert qat.dequantize(wrapper) is wrapper


def test_dequantize_a_layer_parametrized_since():
    model = ready()
    nn.utils.parametrizations.weight_norm(model[3])
    model(images()).sum().backward()  # its computed weight is quantized
    before = snapshot(model)
    with pytest.raises(QatError, match="remove_parametrizations"):
        qat.dequantize(model)
    assert_untouched(model, before)
    nn.utils.parametrize.remove_parametrizations(model[3], "weight")
    assert type(qat.dequantize(model)[3]) is nn.Conv2d


# --- set_bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["lsq", "ste", "pact", "lsq_plus", "tqt", "ewgs", "dorefa"])
def test_set_bits(method):
    """New ranges, positive finite scales, the ends left at 8; outputs near those of the same bits from the start."""
    x = images()
    model = qat.quantize(net(), qat.QuantConfig(bits=4, method=method))
    qat.calibrate(model, [x])
    for bits in (2, 8, 3, 5):
        plan = qat.set_bits(model, bits)
        assert [(e.weight.format.bits, e.act.format.bits) for e in plan.entries] == [(8, 8), (bits, bits), (8, 8)]
        q = model[3].weight_quantizer
        assert (q.bits, q.qmax) == (bits, 2 ** (bits - 1) - 1) or not q.integer or method in ("dorefa", "pact")
        for q in model.modules():
            if isinstance(q, Quantizer):
                assert (q.step > 0).all()
                assert q.step.isfinite().all()
        assert model(x).isfinite().all()


def test_set_bits_moves_the_scale_as_lsq_would():
    """By sqrt(qmax before / qmax after), as 2 mean|v| / sqrt(qmax) does: quantizing anew gives the same."""
    model = net()
    state = copy.deepcopy(model.state_dict())
    config = qat.QuantConfig(bits=3, first_last_bits=None, weight=qat.TensorConfig(init="lsq"))
    qat.quantize(model, config)
    qat.set_bits(model, 5)
    other = net()
    other.load_state_dict(state)
    config.bits = 5
    qat.quantize(other, config)
    for i in (0, 3, 6):
        torch.testing.assert_close(model[i].weight_quantizer.step, other[i].weight_quantizer.step)


@pytest.mark.parametrize(("match", "changed"), [("3", [3]), ("[06]", [0, 6]), ("*", [0, 3, 6]), (None, [3])])
def test_set_bits_match(match, changed):
    model = ready()
    qat.set_bits(model, "w2a3", match)
    got = {i: (model[i].weight_quantizer.bits, model[i].input_quantizer.bits) for i in (0, 3, 6)}
    default = {0: (8, 8), 3: (4, 4), 6: (8, 8)}
    assert got == {i: (2, 3) if i in changed else default[i] for i in (0, 3, 6)}


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (net, (4,), r"not quantized: call qat\.quantize"),
        (ready, (4, "layer9"), "'layer9' matches no quantized layer"),
        (ready, (9,), "must be 1 to 8"),
        (ready, ("float",), "integers to integers"),
        (ready, ("w4abf16",), "integers to integers"),
        (ready, (1,), "has 2 to 8 bits"),
        (lambda: ready("bf16"), (4,), "integers to integers"),
        (lambda: ready("w4afloat"), (4,), "integers to integers"),
    ],
)
def test_set_bits_errors_change_nothing(make, arguments, message):
    model = make()
    before = snapshot(model)
    with pytest.raises(QatError, match=message) as error:
        qat.set_bits(model, *arguments)
    assert "\n" not in str(error.value)
    assert_untouched(model, before)


def test_set_bits_of_shared_weights():
    """A weight has one width: a glob takes all who share it or none; an exception keeps it for all."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    model[2].weight = model[0].weight
    x = torch.randn(8, 4)
    ready(model=model, x=x)
    before = snapshot(model)
    with pytest.raises(QatError, match="2 and 0 share one weight"):
        qat.set_bits(model, 2, "2")
    assert_untouched(model, before)
    qat.set_bits(model, 2)
    assert [m.weight_quantizer.bits for m in model] == [8, 2, 8, 8]
    qat.set_bits(model, 3, "[02]")
    assert [m.weight_quantizer.bits for m in model] == [3, 2, 3, 8]
    assert model(x).isfinite().all()


# --- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("bits", [4, "bf16", "fp8", 1])
def test_copies_are_whole_and_apart(duplicate, bits):
    x = images()
    model = ready(bits, x=x).eval()
    model(x).sum().backward()  # a copy after use
    twin = duplicate(model)
    expected = model(x)
    assert torch.equal(twin(x), expected)
    assert not {id(p) for p in model.parameters()} & {id(p) for p in twin.parameters()}
    twin.load_state_dict(net().state_dict())  # its loading hooks are its own
    for p in twin.parameters():
        p.data.zero_()
    assert torch.equal(model(x), expected)
    qat.dequantize(twin)
    assert not twin._load_state_dict_pre_hooks
    assert isinstance(model[0], QuantConv2d)


def test_a_shallow_copy():
    """Shares all modules, so it is quantized with the original, and outlives it."""
    model = ready()
    twin = copy.copy(model)
    assert twin[0] is model[0]
    x = images()
    assert torch.equal(twin.eval()(x), model.eval()(x))


def test_no_reference_cycle_keeps_a_model_alive():
    model = ready()
    gone = weakref.ref(model[0].weight_quantizer)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_threads():
    """Two threads train their own models, and evaluate one together."""
    shared, x = ready(), images()
    shared.eval()
    with torch.no_grad():
        expected = shared(x)
    models = [ready(), ready()]
    results, errors = [], []

    def work(model):
        try:
            for _ in range(5):
                model(x).sum().backward()
                with torch.no_grad():
                    results.append(torch.equal(shared(x), expected))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(m,)) for m in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert results == [True] * 10


def test_mixed_precision_has_no_state():
    model = ready("bf16")
    assert isinstance(model[3].input_quantizer, MixedPrecisionQuantizer)
    assert list(model.state_dict()) == list(net().state_dict())
