"""`python -m qat`: its commands, its one-line errors, and the picture of an autograd graph."""

import importlib
import inspect
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import qat
from qat import models
from qat.__main__ import COMMANDS, main
from qat.config import QatError, QuantConfig
from qat.planning import Plan
from qat.report.graph import draw_layer, save_graph

ROOT = Path(__file__).resolve().parents[1]


def shell(command):
    return subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)


def error_of(*arguments):
    """The line that a command ends with."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    line = str(stopped.value)
    assert line.startswith("error: ")
    assert "\n" not in line
    return line


# --- the command line -------------------------------------------------------------------------------------------------


def test_help_is_one_screen_and_loads_nothing_heavy():
    run = shell(
        f'{sys.executable} -c \'import sys; from qat.__main__ import main; main(["--help"]); '
        'print(*sorted({m.split(".")[0] for m in sys.modules}), file=sys.stderr)\''
    )
    assert run.returncode == 0, run.stderr
    assert not {"torchvision", "torchviz", "graphviz", "lightning", "hydra"} & set(run.stderr.split())
    lines = run.stdout.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120
    for name, function in COMMANDS.items():
        assert any(line.startswith(f"  {name} ") for line in lines)
        assert all(f"{key}=" in run.stdout for key in inspect.signature(function).parameters)


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"], ["plan", "--help"]])
def test_help(arguments, capsys):
    main(arguments)
    assert "python -m qat <command> key=value" in capsys.readouterr().out


def test_the_shell_sees_one_line_and_exit_code_1():
    run = shell(f"{sys.executable} -m qat plan model=resnet18 bit=4")
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == "error: plan has no key 'bit' (closest: bits); it takes model, bits, method, json\n"


def test_a_closed_pipe_is_no_error():
    run = shell(f"set -o pipefail; {sys.executable} -m qat plan model=densenet121 json=true | head -1")
    assert (run.returncode, run.stdout, run.stderr) == (0, "[\n", "")


def test_installed_as_a_script():
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["qat"]
    module, _, name = script.partition(":")
    assert getattr(importlib.import_module(module), name) is main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pln"], "no command 'pln' (closest: plan) (python -m qat --help lists all)"),
        (["export"], "no command 'export'"),
        (["plan"], "plan needs model= (python -m qat --help)"),
        (["graph", "model=resnet18"], "graph needs layer="),
        (["plan", "resnet18"], "expected key=value, got 'resnet18'"),
        (["plan", "model=resnt18"], "no model 'resnt18' (closest: resnet18"),
        (["plan", "model=resnet18", "bits=9"], "bits must be 1 to 8, w<bits>a<bits> such as w4a8"),
        (["plan", "model=resnet18", "bits="], "bits must be 1 to 8"),
        (["plan", "model=resnet18", "method=lqs"], "quant.method must be one of"),
        (["plan", "model=resnet18", "json=1"], "json must be true or false; got '1'"),
        (["graph", "model=resnt18", "layer=conv1", "out=a.dot"], "no model 'resnt18' (closest: resnet18"),
        (["graph", "model=resnet18", "layer=layer1.0.conv", "out=a.dot"], "(closest: layer1.0.conv"),
        (["graph", "model=resnet18", "layer=bn1", "out=a.dot"], "bn1 of resnet18 is not quantized: float in training"),
        (["graph", "model=resnet18", "layer=conv1", "bits=float", "out=a.dot"], "its bits are float"),
        (
            ["graph", "model=resnet18", "layer=conv1", "out=a.gif"],
            "out must end in .svg, .png, .pdf, .dot; got 'a.gif'",
        ),
        (["graph", "model=resnet18", "layer=conv1", "out=graph"], "(try out=graph.svg)"),
    ],
)
def test_mistakes_end_in_one_line(arguments, message):
    assert message in error_of(*arguments)


# --- plan -------------------------------------------------------------------------------------------------------------


def test_plan_prints_what_quantize_does(capsys):
    main(["plan", "model=efficientnet_b0", "bits=w4a8", "method=ste"])
    model, _ = models.build("efficientnet_b0")
    assert capsys.readouterr().out == f"{qat.plan(model, QuantConfig(bits='w4a8', method='ste'))}\n"


def test_plan_as_json(capsys):
    main(["plan", "model=resnet18", "bits=2", "json=true"])
    rows = json.loads(capsys.readouterr().out)
    assert Plan.from_dicts(rows).to_dicts() == rows
    assert [row["weight"]["bits"] for row in rows[:2]] == ["8", "2"]


@pytest.mark.parametrize("name", ["resnet18", "regnet_x_400mf", "googlenet", "swin_t"])
def test_skeleton_is_the_model_without_its_weights(name):
    model, _ = models.build(name)
    skeleton = models.skeleton(name)
    own = skeleton.state_dict()
    assert all(t.is_meta for t in own.values())
    assert {k: v.shape for k, v in own.items()} == {k: v.shape for k, v in model.state_dict().items()}


# --- graph ------------------------------------------------------------------------------------------------------------

needs_torchviz = pytest.mark.skipif(importlib.util.find_spec("torchviz") is None, reason="needs torchviz")
needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="needs the program dot of graphviz")


@needs_torchviz
def test_graph_shows_functions_leaves_and_what_is_saved(tmp_path, capsys):
    out = tmp_path / "new folder" / "graph.dot"
    main(["graph", "model=resnet18", "layer=layer1.0.conv1", f"out={out}"])
    assert capsys.readouterr().out == f"{out}\n"
    source = out.read_text()
    nodes = [line for line in source.splitlines() if "Backward" in line and "->" not in line]
    assert sorted(n.split("label=")[1].rstrip("]") for n in nodes) == ["ConvolutionBackward0", *["LSQBackward"] * 2]
    for name in ("weight", "weight_quantizer.scale", "input_quantizer.scale", "input", "output", "residue, int8"):
        assert f'label="{name}\n' in source
    assert "resnet18 layer1.0.conv1: weight 4 lsq, input 4 lsq" in source


@needs_torchviz
@pytest.mark.parametrize(
    ("name", "layer", "config", "expected"),
    [
        # the image needs no gradient and its scale is fixed: the input's Function keeps nothing
        ("resnet18", "conv1", QuantConfig(), {"ConvolutionBackward0", "LSQBackward"}),
        (
            "resnet18",
            "fc",
            QuantConfig(method="pact"),
            {"AddmmBackward0", "PACTBackward", "DoReFaBackward", "TBackward0"},
        ),
        ("vit_b_16", "encoder.layers.encoder_layer_0.mlp.0", QuantConfig(bits="bf16"), {"MixedPrecisionBackward"}),
        ("googlenet", "aux1.conv.conv", QuantConfig(method="tqt"), {"ConvolutionBackward0", "TQTBackward"}),
        ("mobilenet_v2", "features.1.conv.0.0", QuantConfig(bits=1), {"BinaryBackward"}),
    ],
    ids=["first", "linear", "bf16", "auxiliary", "one-bit"],
)
def test_graph_of_other_layers(name, layer, config, expected):
    source = draw_layer(name, layer, config).source
    assert all(f"label={function}]" in source for function in expected)


@needs_torchviz
@needs_dot
@pytest.mark.parametrize(("suffix", "start"), [("svg", b"<?xml"), ("PNG", b"\x89PNG"), ("pdf", b"%PDF")])
def test_graph_as_a_picture(tmp_path, suffix, start):
    path = save_graph(draw_layer("resnet18", "layer1.0.conv1"), tmp_path / f"graph.{suffix}")
    assert path.read_bytes().startswith(start)
    if suffix == "svg":
        assert path.read_text().count("LSQBackward") == 2


@needs_torchviz
def test_graph_without_the_program_dot(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    line = error_of("graph", "model=resnet18", "layer=conv1", f"out={tmp_path / 'a.svg'}")
    assert "apt-get install graphviz" in line
    assert f"out={tmp_path / 'a.dot'}" in line
    main(["graph", "model=resnet18", "layer=conv1", f"out={tmp_path / 'a.dot'}"])
    assert (tmp_path / "a.dot").read_text().startswith("digraph")


@pytest.mark.parametrize("missing", ["torchviz", "graphviz"])
def test_graph_without_the_extra(missing, monkeypatch):
    for name in ("torchviz", "torchviz.dot"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(QatError, match=rf"drawing needs {missing}: pip install 'qat\[graph\]'"):
        draw_layer("resnet18", "layer1.0.conv1")
