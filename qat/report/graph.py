"""A picture of the autograd graph of one quantized layer."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from qat.config import QatError, QuantConfig, closest
from qat.models import skeleton
from qat.planning import Plan, plan
from qat.quantizers import Observer, Quantizer
from qat.swap import apply_plan

__all__ = ["FORMATS", "check_path", "draw_layer", "save_graph"]

FORMATS = ("svg", "png", "pdf", "dot")


def draw_layer(name: str, layer: str, config: QuantConfig | None = None) -> Any:
    """Draw what the backward of one quantized layer of a torchvision model goes through, and what it keeps.

    Drawn is the float path, where each tensor has a Function of its own; on integers all of them are one.
    The model is built without memory, for the shape of the layer's input; the layer alone is real, with random weights.

    Args:
        name: a torchvision classifier.
        layer: dotted name of one of its layers, as `qat.plan` prints it.
        config: how to quantize; None for 4 bits.

    Returns:
        A `graphviz.Digraph`; blue are leaves, orange what is saved for the backward, green the output.

    Raises:
        QatError: no such model or layer, the layer stays float, torchviz is not installed.
    """
    model = skeleton(name)
    todo = plan(model, config)
    entries = {e.name: e for e in todo.entries}
    if layer not in entries:
        raise QatError(f"{name} has no layer {layer!r}{closest(layer, entries)}; `python -m qat plan` prints all")
    entry = entries[layer]
    if entry.weight is None:
        reason = "its bits are float" if entry.reason == "default" else entry.reason
        raise QatError(f"{layer} of {name} is not quantized: {reason}")
    shape = input_shape(model, layer)
    real = model.get_submodule(layer).to_empty(device="cpu")
    real.reset_parameters()  # type: ignore[operator]
    quantized = apply_plan(real, Plan([replace(entry, name="", forward="fake")])).train()
    x = torch.randn(shape)
    if layer != next(e.name for e in todo.quantized):  # not the image: as after a ReLU, with layers before it
        x = x.relu_().requires_grad_()
    calibrate_input(quantized, x.detach())
    y = quantized(x)
    named = {"input": x, "output": y, **dict(quantized.named_parameters()), **residues(y.grad_fn)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torchviz compares versions with distutils
        dot = torchviz().make_dot(y, params=named, show_saved=True)
    title = f"{name} {layer}: weight {entry.weight}, input {entry.act}"
    dot.attr(label=f"{title}\\lblue: leaf, orange: saved for backward, green: output\\l", labelloc="t", labeljust="l")
    return dot


def input_shape(model: nn.Module, layer: str) -> tuple[int, ...]:
    """Shape of what enters a layer for two images, found on the meta device."""
    shapes: list[tuple[int, ...]] = []
    hook = model.get_submodule(layer).register_forward_pre_hook(lambda m, args: shapes.append(tuple(args[0].shape)))
    size = 299 if type(model).__name__ == "Inception3" else 224
    try:
        model.train()(torch.empty(2, 3, size, size, device="meta"))  # in training, so that auxiliary heads run
    finally:
        hook.remove()
    if not shapes:
        raise QatError(f"{layer} does not run: what it belongs to uses its weight without calling it")
    return shapes[0]


def residues(node: Any) -> dict[str, Tensor]:
    """What our Functions saved in bytes, by name, from a node of the graph on."""
    found: dict[str, Tensor] = {}
    nodes, seen = [node], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for t in getattr(node, "saved_tensors", ()):
            if t.element_size() == 1:
                number = f" {len(found) + 1}" if found else ""
                found[f"residue{number}, {str(t.dtype).removeprefix('torch.')}"] = t
        nodes += [following for following, _ in node.next_functions]
    return found


def calibrate_input(layer: nn.Module, x: Tensor) -> None:
    """Set the input scale from x alone."""
    quantizer = layer.input_quantizer
    if isinstance(quantizer, Quantizer):
        observer = Observer()
        observer.update(x)
        quantizer.calibrate(observer)


def torchviz() -> Any:
    """The package, if it is there."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            import torchviz
    except ModuleNotFoundError as error:
        raise QatError(f"drawing needs {error.name}: pip install 'qat[graph]'") from None
    return torchviz


def check_path(path: str | Path) -> str:
    """The format that the suffix of `path` asks for.

    Raises:
        QatError: another suffix, or graphviz's program `dot` is missing (not needed for a .dot file).
    """
    path = Path(path)
    kind = path.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise QatError(f"out must end in {', '.join('.' + f for f in FORMATS)}; got {str(path)!r} (try out=graph.svg)")
    if kind != "dot" and shutil.which("dot") is None:
        raise QatError(
            f"a picture needs the program dot of graphviz (on Debian: apt-get install graphviz); without it, "
            f"out={path.with_suffix('.dot')} writes its text"
        )
    return kind


def save_graph(dot: Any, path: str | Path) -> Path:
    """Write a drawing as svg, png, pdf or dot, by the suffix of `path`; raises as `check_path`."""
    path, kind = Path(path), check_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "dot":
        path.write_text(dot.source)
    else:
        path.write_bytes(cast(bytes, dot.pipe(format=kind)))
    return path
