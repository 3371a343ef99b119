"""torchvision's classifiers by name: building, float weights from files and servers, heads of another size; sizes."""

import copy
import http.client
import re
import urllib.error
from collections import OrderedDict

import pytest
import torch
import torchvision
from torch import nn

import qat
from qat import models
from qat.config import QatError
from qat.report import float_bytes, quantized_bytes


def test_names_are_torchvisions_classifiers():
    assert len(models.names()) >= 80
    assert {"resnet18", "vit_b_16", "swin_v2_t", "maxvit_t", "googlenet"} <= set(models.names())
    assert not any("rcnn" in name or "deeplab" in name or "raft" in name for name in models.names())


@pytest.mark.parametrize(
    ("name", "near"), [("resnet19", "resnet18"), ("ResNet18", "resnet18"), ("vit", None), ("", None)]
)
def test_unknown_names(name, near):
    with pytest.raises(QatError, match=f"no model '{name}'") as error:
        models.build(name)
    assert near is None or near in str(error.value)
    assert "\n" not in str(error.value)


def test_weights_and_checkpoint_are_one_too_many(tmp_path):
    with pytest.raises(QatError, match=r"model\.weights or model\.checkpoint, not both"):
        models.build("resnet18", weights="DEFAULT", checkpoint=tmp_path / "x")


def test_unknown_weights_name_the_known():
    with pytest.raises(QatError, match="must be one of IMAGENET1K_V1, DEFAULT; got 'V9'"):
        models.build("resnet18", weights="V9")


@pytest.mark.parametrize(
    "failure",
    [
        urllib.error.URLError("Temporary failure in name resolution"),
        TimeoutError("timed out"),
        http.client.IncompleteRead(b""),
        RuntimeError('invalid hash value (expected "f37072fd", got "e3b0c442")'),
        PermissionError(13, "Permission denied"),
    ],
)
def test_weights_that_cannot_be_had(monkeypatch, failure):
    """One line that says how to do without."""

    def fail(*_, **__):
        raise failure

    monkeypatch.setattr(torchvision.models._api, "load_state_dict_from_url", fail)
    with pytest.raises(QatError, match=r"could not get the DEFAULT weights of resnet18.*model\.checkpoint=") as error:
        models.build("resnet18", weights="DEFAULT")
    assert "\n" not in str(error.value)


# --- files as torchvision and others write them -----------------------------------------------------------------------


def old_densenet(state):
    """Keys as in torchvision's files: a dot more."""
    return OrderedDict((re.sub(r"(denselayer.*(norm|conv))(\d)\.", r"\1.\3.", k), v) for k, v in state.items())


def old_vit(state):
    return OrderedDict(
        (k.replace("mlp.0", "mlp.linear_1").replace("mlp.3", "mlp.linear_2"), v) for k, v in state.items()
    )


def plain(state):
    return dict(state.items())


FORMATS = {
    "squeezenet1_1": [copy.copy, plain, lambda s: {"state_dict": s}, lambda s: {"model": s, "epoch": 3}],
    "mnasnet0_5": [copy.copy, plain],
    "densenet121": [old_densenet, copy.copy],
    "vit_b_16": [old_vit, copy.copy],
    "googlenet": [copy.copy],
}


@pytest.fixture
def small_vit(monkeypatch):
    """A ViT of two narrow layers in place of the twelve wide ones, to be quick."""
    full = torchvision.models.VisionTransformer

    def small(num_classes=1000, **_):
        return full(32, 8, 2, 4, 32, 64, num_classes=num_classes)

    monkeypatch.setattr(torchvision.models.vision_transformer, "VisionTransformer", small)


@pytest.mark.usefixtures("small_vit")
@pytest.mark.parametrize(
    ("name", "form"), [pytest.param(n, f, id=f"{n}-{i}") for n, forms in FORMATS.items() for i, f in enumerate(forms)]
)
def test_float_checkpoints(tmp_path, name, form):
    """Old names and plain dicts included; heads for another number of classes start untrained, with a warning."""
    source, _ = models.build(name, num_classes=5)
    torch.save(form(source.state_dict()), tmp_path / "float.pth")
    other = source.state_dict()

    model, trained = models.build(name, num_classes=5, checkpoint=tmp_path / "float.pth")
    assert trained is True
    assert all(torch.equal(v, other[k]) for k, v in model.state_dict().items())

    with pytest.warns(UserWarning, match="was trained for 5 classes: what tells them apart, .*, starts untrained"):
        model, trained = models.build(name, num_classes=9, checkpoint=tmp_path / "float.pth")
    assert trained is False
    heads = {k for k, v in model.state_dict().items() if not torch.equal(v, other[k])}
    names = {"googlenet": {"fc", "aux1.fc2", "aux2.fc2"}, "vit_b_16": {"heads.head"}}
    assert {k.rpartition(".")[0] for k in heads} == names.get(name, {list(other)[-1].rpartition(".")[0]})


def test_downloaded_weights(monkeypatch):
    """What torchvision gets, with its old names, for 1000 classes and for fewer."""
    source = torchvision.models.densenet121(num_classes=1000)
    monkeypatch.setattr(
        torchvision.models._api, "load_state_dict_from_url", lambda *_, **__: old_densenet(source.state_dict())
    )
    model, trained = models.build("densenet121", weights="DEFAULT")
    assert trained is True
    assert torch.equal(model.classifier.weight, source.classifier.weight)
    with pytest.warns(UserWarning, match="densenet121 IMAGENET1K_V1 was trained for 1000 classes"):
        model, trained = models.build("densenet121", 10, weights="IMAGENET1K_V1")
    assert trained is False
    assert torch.equal(model.features.conv0.weight, source.features.conv0.weight)


def test_models_whose_weights_expect_a_transformed_image_have_it(monkeypatch):
    """It is in no state dict, so a model that is rebuilt from its checkpoint must have it too."""
    source = torchvision.models.googlenet(init_weights=False)
    monkeypatch.setattr(torchvision.models._api, "load_state_dict_from_url", lambda *_, **__: source.state_dict())
    reference = torchvision.models.googlenet(weights="DEFAULT").eval()
    model, _ = models.build("googlenet", weights="DEFAULT")
    again, _ = models.build("googlenet")
    again.load_state_dict(model.state_dict())
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(model.eval()(x), reference(x))
    assert torch.equal(again.eval()(x), reference(x))


def other_width(state):
    return state | {"layer1.0.conv1.weight": torch.zeros(32, 64, 3, 3)}


BAD = {
    "another model": (lambda s: torchvision.models.resnet34().state_dict(), "it has 'layer1.2.conv1.weight'"),
    "a deeper model is wanted": (lambda s: {k: v for k, v in s.items() if "layer4" not in k}, "it lacks 'layer4.0"),
    "another width": (other_width, "size mismatch for layer1.0.conv1.weight"),
    "not tensors": (lambda s: {"a": 1}, "expected a state dict of tensors"),
    "nothing": (lambda s: {}, "expected a state dict of tensors"),
    "a quantized one": (
        lambda s: qat.quantize(models.build("resnet18", 5)[0], bits=4).state_dict(),
        "it has 'conv1.weight_quantizer.scale'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_checkpoints_of_another_model(tmp_path, case):
    change, message = BAD[case]
    torch.save(change(models.build("resnet18", 5)[0].state_dict()), tmp_path / "x.pth")
    with pytest.raises(QatError, match=message) as error:
        models.build("resnet18", 5, checkpoint=tmp_path / "x.pth")
    assert "x.pth" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None])
def test_damaged_checkpoints(tmp_path, content):
    if content is not None:
        (tmp_path / "x.pth").write_bytes(content)
    with pytest.raises(QatError, match=r"x\.pth") as error:
        models.build("resnet18", checkpoint=tmp_path / "x.pth")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "size"), [("alexnet", 16), ("vit_b_16", 64)])
@pytest.mark.usefixtures("small_vit")
def test_image_sizes_are_tried_out(name, size):
    """One line now rather than a traceback after an hour; the model is left in its mode."""
    with torch.device("meta"):
        model, _ = models.build(name, 3)
    with pytest.raises(QatError, match=r"does not take images of .*try data\.image_size=224") as error:
        models.check_input(model, (3, size, size))
    assert "\n" not in str(error.value)
    assert model.training


def test_an_image_size_that_fits():
    model, _ = models.build("squeezenet1_1", 3)
    before = copy.deepcopy(model.state_dict())
    models.check_input(model.eval(), (3, 32, 32))
    assert not model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_sizes_in_closed_form():
    """Packed codes, a float32 scale per channel, a scale and a zero point per activation, a bias per norm."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Conv2d(8, 5, 3, groups=1), nn.Flatten(), nn.Linear(7, 3)
    )
    parameters = 8 * 27 + 2 * 8 + 5 * 72 + 5 + 7 * 3 + 3
    assert float_bytes(model) == 4 * (parameters + 2 * 8)  # and running mean and variance
    assert quantized_bytes(model) == 4 * (parameters - 2 * 8 + 8)
    qat.quantize(model, bits=3)
    assert float_bytes(model) == 4 * (parameters + 2 * 8)
    expected = (8 * 27) + 4 * 8  # first layer at 8 bits, and its scales
    expected += 4 * 8  # what is left of the norm
    expected += -(-5 * 72 * 3 // 8) + 4 * 5 + 4 * 5  # codes rounded up to bytes, scales, bias
    expected += 7 * 3 + 4 * 3 + 4 * 3
    expected += 3 * 5
    assert quantized_bytes(model) == expected


def test_sizes_of_shared_and_reused_layers():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16, bias=False))
    alone = quantized_bytes(qat.quantize(copy.deepcopy(model), bits=8))
    model[1].weight = model[0].weight
    model.append(model[0])
    assert float_bytes(model) == 4 * (256 + 16)
    assert quantized_bytes(qat.quantize(model, bits=8)) == alone - 256 - 4 * 16


@pytest.mark.parametrize(("bits", "ratio"), [(8, 4), (4, 8), (2, 16), (1, 32), ("bf16", 2), ("fp8", 4), ("float", 1)])
def test_ratios(bits, ratio):
    """Of a model that is nearly all weights."""
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(3)])
    whole = float_bytes(model)
    qat.quantize(model, qat.QuantConfig(bits=bits, first_last_bits=None))
    assert whole / quantized_bytes(model) == pytest.approx(ratio, rel=0.15)
