"""Work with models from a shell: `python -m qat <command> key=value ...`; `--help` lists the commands.

A command is a function of this file with a row in `COMMANDS`: its parameters are the keys, its docstring the help.
"""

from __future__ import annotations

import inspect
import json as json_
import os
import sys
from collections.abc import Callable, Sequence

from qat.config import QatError, QuantConfig, closest
from qat.models import skeleton
from qat.planning import plan as plan_

__all__ = ["COMMANDS", "main"]


def plan(model: str, bits: str = "4", method: str = "lsq", json: bool = False) -> None:
    """Print what would be quantized in a torchvision model, and why."""
    todo = plan_(skeleton(model), QuantConfig(bits=bits, method=method))
    print(json_.dumps(todo.to_dicts(), indent=2) if json else todo)


def graph(model: str, layer: str, bits: str = "4", method: str = "lsq", out: str = "graph.svg") -> None:
    """Draw the autograd graph of one quantized layer, and what it saves: .svg, .png, .pdf or .dot."""
    from qat.report.graph import check_path, draw_layer, save_graph

    check_path(out)
    print(save_graph(draw_layer(model, layer, QuantConfig(bits=bits, method=method)), out))


COMMANDS: dict[str, Callable[..., None]] = {"plan": plan, "graph": graph}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; a mistake in it ends as one line and exit code 1."""
    try:
        run(list(sys.argv[1:] if arguments is None else arguments))
    except QatError as error:
        raise SystemExit(f"error: {error}") from None
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails once more


def run(arguments: list[str]) -> None:
    """Parse and call."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(usage())
        return
    name, *words = arguments
    if name not in COMMANDS:
        raise QatError(f"no command {name!r}{closest(name, COMMANDS)} (python -m qat --help lists all)")
    keys = inspect.signature(COMMANDS[name]).parameters
    given: dict[str, str | bool] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise QatError(f"expected key=value, got {word!r} (python -m qat --help)")
        if key not in keys:
            raise QatError(f"{name} has no key {key!r}{closest(key, keys)}; it takes {', '.join(keys)}")
        given[key] = boolean(key, value) if isinstance(keys[key].default, bool) else value
    for key, parameter in keys.items():
        if parameter.default is parameter.empty and key not in given:
            raise QatError(f"{name} needs {key}= (python -m qat --help)")
    COMMANDS[name](**given)


def boolean(key: str, value: str) -> bool:
    """True or false as YAML spells them."""
    if value.lower() not in ("true", "false"):
        raise QatError(f"{key} must be true or false; got {value!r}")
    return value.lower() == "true"


def usage() -> str:
    """One screen: every command, what it does, its keys with their defaults."""
    lines = ["python -m qat <command> key=value ...", ""]
    for name, function in COMMANDS.items():
        keys = inspect.signature(function).parameters
        shown = " ".join(f"{k}={'...' if p.default is p.empty else str(p.default).lower()}" for k, p in keys.items())
        lines += [f"  {name:8s}{(function.__doc__ or '').strip().splitlines()[0]}", f"          {shown}", ""]
    return "\n".join(
        [*lines, "for example: python -m qat plan model=resnet18 bits=w4a8", "to train: python train.py --help"]
    )


if __name__ == "__main__":
    main()
