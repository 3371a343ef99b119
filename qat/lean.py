"""ReLU and max pooling of a model in training: they keep bytes for the backward, and a quantizer may take their place.

An unsigned quantizer after a ReLU is the ReLU: both cut at 0. So a ReLU notes on its output what entered it, and an
integer layer that receives that output quantizes what entered, with the mask of both. Where every consumer does so,
nothing of the ReLU is kept. Max pooling hands the note on: the largest of what is cut is what is cut of the largest.
"""

from __future__ import annotations

import operator
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.utils import _pair

from qat.functional.pool import LeanMaxPool2d
from qat.functional.relu import relu

__all__ = ["LEAN", "LeanModule", "MaxPool2d", "ReLU", "ReLU6", "before_relu", "make_lean", "undo_lean"]


class Note(NamedTuple):
    """What entered a ReLU, its limit (None without), and versions that tell whether either was overwritten since."""

    x: Tensor
    limit: float | None
    versions: tuple[int, int]


def note(y: Tensor, x: Tensor, limit: float | None) -> Tensor:
    """Remember on y = relu(x) what x was."""
    y._qat_relu = Note(x, limit, (x._version, y._version))  # type: ignore[attr-defined]
    return y


def before_relu(y: Tensor) -> tuple[Tensor | None, float | None]:
    """What entered the ReLU that made y, and its limit; (None, None) if y is not as a ReLU left it."""
    found: Note | None = getattr(y, "_qat_relu", None)
    if found is None or found.versions != (found.x._version, y._version):
        return None, None
    return found.x, found.limit


def in_training(x: Tensor) -> bool:
    """Whether x is an ordinary tensor on its way to a backward, and nothing traces or compiles."""
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.requires_grad
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
    )


# --- the modules ------------------------------------------------------------------------------------------------------


class LeanModule(nn.Module):
    """A float module of the same state and values, which keeps less for the backward; its class changes in place."""

    float_type: ClassVar[type[nn.Module]]
    alone: bool = False  # whether nothing else reads what enters, so that it need not be overwritten

    @classmethod
    def from_float(cls, module: nn.Module, alone: bool) -> Self:
        """Turn a float module into this one, in place."""
        module.__class__ = cls
        assert isinstance(module, cls)
        module.alone = alone
        return module

    def to_float(self) -> nn.Module:
        """Undo `from_float`."""
        self.__dict__.pop("alone", None)
        self.__class__ = self.float_type  # type: ignore[assignment]
        return self


class ReLU(LeanModule, nn.ReLU):
    """`nn.ReLU`, keeping a byte per element."""

    float_type = nn.ReLU

    def forward(self, x: Tensor) -> Tensor:
        """max(x, 0), of any shape; in place only where something may rely on it."""
        if not in_training(x):
            return nn.functional.relu(x, inplace=self.inplace)
        inplace = self.inplace and not self.alone
        y = relu(x, inplace)
        return y if inplace else note(y, x, None)


class ReLU6(LeanModule, nn.ReLU6):
    """`nn.ReLU6`, keeping a byte per element."""

    float_type = nn.ReLU6

    def forward(self, x: Tensor) -> Tensor:
        """min(max(x, 0), 6), of any shape; in place only where something may rely on it."""
        if not in_training(x):
            return nn.functional.relu6(x, inplace=self.inplace)
        inplace = self.inplace and not self.alone
        y = relu(x, inplace, 6.0)
        return y if inplace else note(y, x, 6.0)


class MaxPool2d(LeanModule, nn.MaxPool2d):
    """`nn.MaxPool2d`, keeping two bytes per window."""

    float_type = nn.MaxPool2d

    def forward(self, x: Tensor) -> Tensor:
        """Maxima of (N, C, H, W)."""
        if not in_training(x) or x.ndim != 4 or x.numel() == 0:
            y: Tensor = nn.MaxPool2d.forward(self, x)
            return y
        cut, limit = before_relu(x)
        source = x if cut is None else cut
        pairs = [list(_pair(v)) for v in (self.kernel_size, self.stride, self.padding, self.dilation)]
        y = LeanMaxPool2d.apply(source, *pairs, self.ceil_mode)[0]
        return y if cut is None else note(relu(y, limit=limit), y, limit)


LEAN: dict[type[nn.Module], type[LeanModule]] = {nn.ReLU: ReLU, nn.ReLU6: ReLU6, nn.MaxPool2d: MaxPool2d}
"""Float types that become lean, by exact type."""


def make_lean(model: nn.Module) -> None:
    """Make every ReLU and max pooling of a float model lean, in place."""
    found = {name: m for name, m in model.named_modules() if type(m) in LEAN}
    found = {n: m for n, m in found.items() if not (isinstance(m, nn.MaxPool2d) and m.return_indices)}
    free = alone(model) if any(getattr(m, "inplace", False) for m in found.values()) else set()
    for name, module in found.items():
        LEAN[type(module)].from_float(module, name in free)


def undo_lean(model: nn.Module) -> None:
    """Undo `make_lean`."""
    for module in list(model.modules()):
        if isinstance(module, LeanModule):
            module.to_float()


class ByModule(fx.Tracer):
    """Leaves every module without children whole, so that only the model's own code is traced."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether not to look inside."""
        return super().is_leaf_module(m, module_qualified_name) or not any(True for _ in m.children())


def alone(model: nn.Module) -> set[str]:
    """Names of the modules that, wherever they are called, are all that reads their input. None if not traceable."""
    modes = {m: m.training for m in model.modules()}
    try:
        for m in modes:
            m.training = True  # not train(), which a model may override
        graph = ByModule().trace(model)
    except Exception:  # whatever the model's own code raises on a proxy
        return set()
    finally:
        for m, mode in modes.items():
            m.training = mode
    calls: dict[str, bool] = {}
    for node in graph.nodes:
        if node.op == "call_module" and len(node.args) == 1 and isinstance(node.args[0], fx.Node):
            name = str(node.target)
            calls[name] = calls.get(name, True) and own(node.args[0], model)
    return {name for name, only in calls.items() if only}


def own(node: fx.Node, model: nn.Module) -> bool:
    """Whether a value has one reader and a memory of its own, no view of what others read."""
    if len(node.users) != 1:
        return False
    if node.op == "call_module":
        return any(True for _ in model.get_submodule(str(node.target)).parameters(recurse=False))
    if node.op == "call_function" and node.target in (operator.add, torch.add, torch.cat):
        return True
    return node.target is operator.iadd and isinstance(node.args[0], fx.Node) and own(node.args[0], model)
