"""torchvision's classifiers by name, with their float weights."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from qat.config import QatError, closest
from qat.files import read_checkpoint

__all__ = ["build", "check_input", "names", "skeleton"]


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
    arguments: dict[str, Any] = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
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
    except (OSError, RuntimeError) as error:
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
    state = content.get("state_dict", content)
    if not isinstance(state, dict) or not state or not all(isinstance(v, torch.Tensor) for v in state.values()):
        raise QatError(f"{path}: expected a state dict of tensors, plain or under the key 'state_dict'")
    return {str(key).removeprefix("model."): value for key, value in state.items()}


def load(model: nn.Module, state: dict[str, Any], where: str) -> bool:
    """Load a float state dict; a head of another size is left untrained. Returns whether everything was loaded."""
    own = model.state_dict()
    unknown = [key for key in state if key not in own]
    missing = [key for key in own if key not in state]
    if unknown or missing:
        key = (unknown or missing)[0]
        what = "does not know" if unknown else "lacks"
        raise QatError(
            f"{where} is not a checkpoint of this model: it {'has' if unknown else 'lacks'} {key!r} "
            f"({len(unknown)} keys the model {what}, {len(missing)} missing)"
        )
    other = [key for key in own if own[key].shape != state[key].shape]
    head = list(own)[-1].rpartition(".")[0]
    strange = [key for key in other if key.rpartition(".")[0] != head]
    if strange:
        key = strange[0]
        raise QatError(
            f"{where} is not a checkpoint of this model: {key!r} has shape {tuple(state[key].shape)}, "
            f"expected {tuple(own[key].shape)}"
        )
    model.load_state_dict({key: own[key] if key in other else value for key, value in state.items()})
    if other:
        warnings.warn(
            f"{where} was trained for {state[other[-1]].shape[0]} classes: the last layer, {head}, starts untrained",
            stacklevel=3,
        )
    return not other


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
