"""torchvision's classifiers by name, with their float weights."""

from __future__ import annotations

import functools
import http.client
import re
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from qat.config import QatError, closest
from qat.files import read_checkpoint

__all__ = ["build", "check_input", "names", "skeleton", "without_prefix"]

PREFIX = "model."
"""Where a Lightning module keeps the model, and so how its state dict names it."""


@functools.cache
def names() -> tuple[str, ...]:
    """Names that `build` takes: torchvision's classifiers."""
    import torchvision

    return tuple(torchvision.models.list_models(module=torchvision.models))


def build(
    name: str, num_classes: int = 1000, weights: str | None = None, checkpoint: str | Path | None = None
) -> tuple[nn.Module, bool]:
    """Build a float classifier.

    Args:
        name: a torchvision name, such as `resnet18`.
        num_classes: size of the last layer.
        weights: a torchvision weights name, such as `DEFAULT` (downloaded, then cached by torch).
        checkpoint: a file with a float state dict, plain, under `state_dict`, or of an earlier float run here.

    Returns:
        The model, and whether all of it is trained: False if nothing was loaded, or the last layer has another number
        of classes than the weights.

    Raises:
        QatError: unknown name, both kinds of weights, weights that cannot be had, a checkpoint of another model.
    """
    import torchvision

    if name not in names():
        raise QatError(f"no model {name!r}{closest(name, names())}; expected a torchvision classifier")
    if weights is not None and checkpoint is not None:
        raise QatError("give model.weights or model.checkpoint, not both")
    # Their weights expect this transform; it is in no state dict, so an untrained model has it too.
    arguments = {"init_weights": True, "transform_input": True} if name in ("googlenet", "inception_v3") else {}
    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=num_classes, **arguments)
    if weights is not None:
        return model, load(model, download(name, weights), f"{name} {weights}")
    if checkpoint is not None:
        return model, load(model, read_state(checkpoint), str(checkpoint))
    return model, False


class EmptyOnMeta(TorchFunctionMode):
    """Within it `torch.empty`, which makes all parameters, takes no memory; other tensors have values as ever."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **(kwargs | {"device": "meta"} if func is torch.empty else kwargs))


def skeleton(name: str) -> nn.Module:
    """A classifier on the meta device: names, types and shapes, at once and in no memory, whatever its size.

    Raises:
        QatError: unknown name.
    """
    with EmptyOnMeta():  # under torch.device("meta") RegNets cannot be built: they compute their widths with tensors
        model, _ = build(name)
    return model.to("meta")


def download(name: str, weights: str) -> dict[str, Any]:
    """A torchvision state dict, from its cache or the network."""
    import torchvision

    known = torchvision.models.get_model_weights(name)
    if weights not in known.__members__:
        raise QatError(f"model.weights for {name} must be one of {', '.join(known.__members__)}; got {weights!r}")
    try:
        state: dict[str, Any] = known[weights].get_state_dict(progress=False, check_hash=True)
    except (OSError, RuntimeError, http.client.HTTPException) as error:
        raise QatError(
            f"could not get the {weights} weights of {name} ({type(error).__name__}: {error}); without a network, put "
            "the file somewhere and give model.checkpoint=/path/to/file.pth"
        ) from None
    return state


def read_state(path: str | Path) -> dict[str, Any]:
    """The float state dict in a file, without unpickling code.

    Raises:
        QatError: no such file, damaged, or nothing like a state dict in it.
    """
    content = read_checkpoint(path)
    state = content.get("state_dict", content.get("model", content))  # 'model': torchvision's own training script
    if not isinstance(state, dict) or not state or not all(isinstance(v, torch.Tensor) for v in state.values()):
        raise QatError(f"{path}: expected a state dict of tensors, plain or under the key 'state_dict' or 'model'")
    return state


def without_prefix(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """A state dict for the model, without the prefix of a Lightning module, with the versions torch keeps beside it."""
    own = model.state_dict()
    prefixed = all(str(key).startswith(PREFIX) for key in state) and not any(key in own for key in state)
    prefix = PREFIX if prefixed else ""
    bare: dict[str, Any] = OrderedDict((str(key).removeprefix(prefix), value) for key, value in state.items())
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        inside = {f"{key}.": value for key, value in versions.items() if f"{key}.".startswith(prefix)}
        bare._metadata = {  # type: ignore[attr-defined]
            key.removeprefix(prefix)[:-1]: value for key, value in inside.items()
        }
    return bare


DENSENET = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")
"""Keys of torchvision's DenseNet files: it has since taken the first dot out."""


def load(model: nn.Module, state: dict[str, Any], where: str) -> bool:
    """Load a float state dict; heads for another number of classes are left untrained. Returns whether all was loaded.

    Raises:
        QatError: another model's.
    """
    own = model.state_dict()
    state = without_prefix(state, model)
    given: dict[str, Any] = OrderedDict((DENSENET.sub(r"\1\2", key), value) for key, value in state.items())
    # Of a file without versions, all that is known is that it is not older than the format of the root.
    versions = getattr(state, "_metadata", None) or {"": own._metadata[""]}  # type: ignore[attr-defined]
    given._metadata = versions  # type: ignore[attr-defined]
    last = list(own)[-1]
    other = [key for key in own if last in given and is_head(own, given, key, last)]
    given.update({key: own[key] for key in other})
    try:
        missing, unknown = model.load_state_dict(given, strict=False)
    except (RuntimeError, ValueError) as error:
        lines = [line.strip() for line in str(error).split("\n")]
        raise QatError(f"{where} is not a checkpoint of this model: {' '.join(lines[1:2]) or lines[0]}") from None
    if unknown or missing:
        has = f"has {unknown[0]!r}" if unknown else f"lacks {missing[0]!r}"
        raise QatError(
            f"{where} is not a checkpoint of this model: it {has} ({len(unknown)} keys the model does not know, "
            f"{len(missing)} missing)"
        )
    if other:
        heads = ", ".join(dict.fromkeys(key.rpartition(".")[0] for key in other))
        warnings.warn(
            f"{where} was trained for {state[last].shape[0]} classes: what tells them apart, {heads}, starts untrained",
            stacklevel=3,
        )
    return not other


def is_head(own: dict[str, torch.Tensor], given: dict[str, torch.Tensor], key: str, last: str) -> bool:
    """Whether two tensors differ only in the number of classes, as those of the last layer do."""
    if key not in given or own[key].shape == given[key].shape or own[key].ndim == 0:
        return False
    classes = (own[last].shape[:1], given[last].shape[:1])
    return own[key].shape[1:] == given[key].shape[1:] and (own[key].shape[:1], given[key].shape[:1]) == classes


def check_input(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Run one blank image through the model, to find out now rather than after an hour whether it takes such images.

    Args:
        model: a float classifier.
        shape: of one image, (3, H, W).

    Raises:
        QatError: it does not.
    """
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, *shape))
    except (RuntimeError, AssertionError, ValueError) as error:
        first = str(error).strip().split("\n")[0]
        raise QatError(
            f"{type(model).__name__} does not take images of {shape[1]}x{shape[2]} ({first}); try data.image_size=224"
        ) from None
    finally:
        model.train(training)
