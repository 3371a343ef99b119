"""Float model -> quantize -> calibrate -> train -> evaluate, top to bottom.

    python train.py model=resnet18 bits=4
    python train.py --help

The only file that knows Hydra: past `main` there are the plain dataclasses of `qat.config`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors come to the end of this file, where they become one line

import hydra
import lightning as L
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import qat
from qat import models
from qat.callbacks import Calibrate, History
from qat.config import Config, QatError, bits_name, check_arguments
from qat.data import DataModule
from qat.files import read_checkpoint, write_text
from qat.report import float_bytes, quantized_bytes
from qat.training import Classifier, keep_freed_memory

CONFIGS = Path(__file__).parent / "configs"


def train(config: Config, folder: Path) -> dict[str, Any]:
    """Run one experiment in `folder` and return its metrics."""
    started = time.perf_counter()
    L.seed_everything(config.seed, workers=True, verbose=False)
    resumed = resume_point(config, folder)
    stage: str = resumed["qat"]["stage"] if resumed else "float"
    results: dict[str, Any] = dict(resumed["qat"]["results"]) if resumed else {}

    # Data, float model, plan: whatever is wrong with them is found before any training
    data = DataModule(config.data, seed=config.seed)
    data.prepare_data()
    data.setup()
    builder: dict[str, Any] = {"name": config.model.name, "num_classes": data.num_classes}
    source: dict[str, Any] = {"weights": config.model.weights, "checkpoint": config.model.checkpoint}
    model, trained = models.build(**builder, **({} if resumed else source))
    models.check_input(model, data.input_shape)
    model = model.to(memory_format=torch.channels_last)
    plan = None if name_of(config) == "float" else qat.plan(model, config.quant)
    size_float = float_bytes(model)
    trainer = make_trainer(config, folder, data, stage)
    if trainer.is_global_zero:
        write_text(OmegaConf.to_yaml(OmegaConf.create(plain(config))), folder / "config.yaml")
        write_text(f"{plan or 'bits=float: nothing is quantized'}\n", folder / "plan.txt")
        print(f"model     {config.model.name}, {size_float / 1e6:.1f} MB as float32")
        print(f"data      {data.describe()}")
        print(f"bits      {name_of(config)}; {plan.coverage if plan else 'nothing is quantized'}")
        print(f"device    {trainer.strategy.root_device}, precision {trainer.precision}")
        print(f"folder    {folder}" + (f", resumed in the {stage} stage" if resumed else ""), flush=True)

    # Float stage, unless the model came trained
    if stage == "float":
        lit = Classifier(model, data.num_classes, config.optim, "float", builder)
        if not trained:
            trainer.fit(lit, data, ckpt_path=folder / "last.ckpt" if resumed else None, weights_only=True)
        load_best(trainer, lit, folder / "float.ckpt")
        results["float_accuracy"] = test(trainer, lit, data)
        trainer = make_trainer(config, folder, data, "quantized")
        del lit  # and with it the float stage's optimizer

    # Quantize, calibrate (a callback of the trainer's does), train
    if plan:
        model = qat.quantize(model, config.quant)
    lit = Classifier(model, data.num_classes, config.optim, "quantized", builder)
    lit.results = results
    if stage == "float":
        results["calibrated_accuracy"] = test(trainer, lit, data)
    trainer.fit(lit, data, ckpt_path=folder / "last.ckpt" if stage == "quantized" else None, weights_only=True)
    load_best(trainer, lit, folder / "best.ckpt")

    # Result
    metrics = {
        "model": config.model.name,
        "data": config.data.name,
        "bits": name_of(config),
        "seed": config.seed,
        **results,
        "quantized_accuracy": test(trainer, lit, data),
        "size_float_bytes": size_float,
        "size_quantized_bytes": quantized_bytes(model),
        "seconds": round(time.perf_counter() - started, 1),
    }
    if trainer.is_global_zero:
        write_text(json.dumps(metrics, indent=2) + "\n", folder / "metrics.json")
        print(summary(metrics, folder), flush=True)
    return metrics


# --- the parts of it --------------------------------------------------------------------------------------------------


def make_trainer(config: Config, folder: Path, data: DataModule, stage: str) -> L.Trainer:
    """A Trainer for one stage, which keeps its best epoch (on the validation images) and its last."""
    terminal = sys.stdout.isatty()
    best = ModelCheckpoint(
        folder, filename={"float": "float", "quantized": "best"}[stage], monitor="val/acc", mode="max", **OVERWRITE
    )
    last = ModelCheckpoint(folder, filename="last", save_on_train_epoch_end=True, **OVERWRITE)
    callbacks: list[L.Callback] = [
        best,
        last,
        Calibrate(lambda: data.calibration_batches(config.recipe.calibration_batches)),
        History(folder / "metrics.csv", show=not terminal),
    ]
    if terminal:
        callbacks.append(TQDMProgressBar(refresh_rate=10, leave=False))
    board = config.logger.name == "tensorboard"
    options: dict[str, Any] = {
        "max_epochs": config.recipe.float_epochs if stage == "float" else config.recipe.epochs,
        "logger": TensorBoardLogger(folder, name="", version="tensorboard") if board else False,
        "default_root_dir": folder,
        "enable_progress_bar": terminal,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    options |= config.trainer
    if options.get("precision") is None:
        gpu = torch.cuda.is_available() and options.get("accelerator") in ("auto", "gpu", "cuda")
        options["precision"] = "bf16-mixed" if gpu else "32-true"
    if options.pop("tune_allocator", True):
        keep_freed_memory()
    try:
        return L.Trainer(callbacks=callbacks, **options)
    except (TypeError, ValueError, MisconfigurationException, ModuleNotFoundError) as error:
        raise QatError(f"trainer: {one_line(error)}") from None


OVERWRITE: dict[str, Any] = {"enable_version_counter": False}  # best.ckpt, never best-v1.ckpt


def load_best(trainer: L.Trainer, lit: Classifier, path: Path) -> None:
    """Load the stage's best epoch; if there was none (nothing trained), the model as it is becomes it."""
    if path.exists():
        lit.load_state_dict(read_checkpoint(path)["state_dict"])
    else:
        trainer.strategy.connect(lit)
        trainer.save_checkpoint(path)


def test(trainer: L.Trainer, lit: Classifier, data: DataModule) -> float:
    """Accuracy on the test images, in percent."""
    return round(trainer.test(lit, data, verbose=False)[0]["test/acc"], 3)


def name_of(config: Config) -> str:
    """The bits as in the folder's name: `w4a4`."""
    return bits_name(config.quant.bits, config.quant.weight.bits, config.quant.act.bits)


def summary(metrics: dict[str, Any], folder: Path) -> str:
    """The table at the end."""
    smaller = metrics["size_float_bytes"] / metrics["size_quantized_bytes"]
    rows = [
        ("float", f"{metrics['float_accuracy']:.2f} %", f"{metrics['size_float_bytes'] / 1e6:.2f} MB"),
        ("calibrated", f"{metrics['calibrated_accuracy']:.2f} %", ""),
        (
            f"{metrics['bits']} trained",
            f"{metrics['quantized_accuracy']:.2f} %",
            f"{metrics['size_quantized_bytes'] / 1e6:.2f} MB ({smaller:.1f}x smaller)",
        ),
    ]
    lines = [f"{metrics['model']} on {metrics['data']}".ljust(24) + "accuracy   size"]
    lines += [f"  {name:22s}{accuracy:>8s}   {size}".rstrip() for name, accuracy, size in rows]
    return "\n".join(["", *lines, f"{metrics['seconds']:.0f} s; all of it is in {folder}"])


# --- folders and files ------------------------------------------------------------------------------------------------

FREE_TO_CHANGE = ("resume", "trainer", "logger", "recipe.epochs", "recipe.float_epochs", "data.root", "data.workers")
"""What may differ between a run and its resumption."""


def run_folder(config: Config, folder: Path) -> Path:
    """The folder to work in: Hydra's new one, or with `resume=` the one of the run to go on with."""
    if config.resume is None:
        return folder
    if config.resume == "last":
        runs = sorted(p.parent for p in folder.parent.glob("*/last.ckpt"))
        if not runs:
            raise QatError(
                f"nothing to resume: no run with a last.ckpt in {folder.parent} (leave out resume= to start one)"
            )
        found = runs[-1]
    else:
        found = Path(config.resume)
        found = found.parent if found.suffix == ".ckpt" else found
        if not (found / "last.ckpt").is_file():
            raise QatError(
                f"nothing to resume: resume= takes `last` or a run folder with a last.ckpt; got {config.resume!r}"
            )
    return found


def resume_point(config: Config, folder: Path) -> dict[str, Any] | None:
    """The last checkpoint of the run to go on with, checked to be of the same experiment; None for a new run."""
    if config.resume is None:
        return None
    content = read_checkpoint(folder / "last.ckpt")
    if not isinstance(content.get("qat"), dict) or "stage" not in content["qat"]:
        raise QatError(f"{folder / 'last.ckpt'} was not written by train.py: nothing to resume")
    before, now = (flatten(c) for c in (OmegaConf.to_container(OmegaConf.load(folder / "config.yaml")), plain(config)))
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key) and not key.startswith(FREE_TO_CHANGE):
            raise QatError(
                f"{folder} was run with {key}={before.get(key)}, now it is {key}={now.get(key)}: "
                "repeat the run's own values with resume=, or start a new run without it"
            )
    done = content["qat"]["stage"] == "quantized" and content["epoch"] + 1 >= config.recipe.epochs
    if done and (folder / "metrics.json").exists():
        raise QatError(f"nothing to resume: {folder} is complete; to train longer, raise recipe.epochs")
    return content


def plain(config: Config) -> dict[str, Any]:
    """The configuration as plain dicts, for files."""
    return dataclasses.asdict(config)


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{'a': {'b': 1}} -> {'a.b': 1}."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, sub in tree.items():
        flat |= flatten(sub, f"{prefix}.{key}" if prefix else str(key))
    return flat


def one_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return str(error).strip().split("\n")[0]


# --- Hydra ------------------------------------------------------------------------------------------------------------


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(cfg: DictConfig) -> float:
    """Compose the configuration, choose the folder, train."""
    new = Path(HydraConfig.get().runtime.output_dir)
    try:
        config: Config = OmegaConf.to_object(cfg)  # type: ignore[assignment]
        config.check()
        if HydraConfig.get().mode == RunMode.MULTIRUN and config.trainer.get("devices") not in (1, "1", "auto"):
            raise QatError("a sweep (-m) trains on one device per job: trainer.devices=1, or start the jobs one by one")
        metrics = train(config, run_folder(config, new))
        return float(metrics["quantized_accuracy"])
    finally:
        # Nothing was saved: leave no empty folder behind.
        if new.is_dir() and not any(new.iterdir()):
            new.rmdir()


def register() -> None:
    """Make the schema, the resolver and a `model` choice for every torchvision classifier known to Hydra."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for name in models.names():
        if not (CONFIGS / "model" / f"{name}.yaml").exists():
            store.store(group="model", name=name, node={"name": name})
    OmegaConf.register_new_resolver("bits_name", bits_name, replace=True)


def quiet() -> None:
    """Our own messages in one line each; none of the tips and notices of the libraries."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    warnings.filterwarnings("ignore", module="lightning|torch")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)


def explain(error: BaseException) -> str | None:
    """The line to print for an error that the user can mend; None for a defect of ours."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, QatError):
            return one_line(cause)
        cause = cause.__cause__ or cause.__context__
    return one_line(error) if isinstance(error, HydraException | OmegaConfBaseException) else None


if __name__ == "__main__":
    quiet()
    try:
        trainer_keys = {str(key) for path in (CONFIGS / "trainer").glob("*.yaml") for key in OmegaConf.load(path)}
        check_arguments(sys.argv[1:], models.names(), sorted(trainer_keys))
        register()
        main()
    except Exception as error:
        if (line := explain(error)) is None:
            raise
        raise SystemExit(f"error: {line}") from None
