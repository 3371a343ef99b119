"""Files: whole or not at all, never code, and a folder per run."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qat.config import Config, OptimConfig, QatError, QuantConfig, RecipeConfig, Rule
from qat.files import (
    CLAIM,
    FREE_TO_CHANGE,
    find_run,
    flatten,
    prune,
    read_checkpoint,
    resume_point,
    run_folder,
    write_checkpoint,
    write_text,
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- writing ----------------------------------------------------------------------------------------------------------


def test_a_failed_write_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "x.ckpt"
    write_checkpoint({"a": torch.ones(2)}, path)
    old = path.read_bytes()
    with pytest.raises(Exception, match="pickle"):
        write_checkpoint({"a": torch.zeros(2), "b": lambda: None}, path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]  # nor does a part of the new one stay


def test_written_files_have_usual_permissions(tmp_path: Path):
    write_text("x", tmp_path / "ours")
    (tmp_path / "usual").write_text("x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "usual").stat().st_mode


# --- reading ----------------------------------------------------------------------------------------------------------


class Attack:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def saved(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


GOOD = saved({"state_dict": {"weight": torch.ones(1000)}})

BAD_FILES = {
    "empty": b"",
    "zeros": bytes(1000),
    "text": b"hello",
    "a zip of something else": GOOD[:4] + bytes(100),
    "half": GOOD[: len(GOOD) // 2],
    "short": GOOD[:-1],
    "flipped": GOOD[:200] + bytes([GOOD[200] ^ 255]) + GOOD[201:],
    "a tensor": saved(torch.ones(2)),
    "a list": saved([1, 2]),
    "old pickle": pickle.dumps({"a": 1}),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_checkpoints(tmp_path: Path, name: str):
    path = tmp_path / "x.ckpt"
    path.write_bytes(BAD_FILES[name])
    with pytest.raises(QatError) as caught:
        read_checkpoint(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@given(content=st.binary(max_size=40), start=st.sampled_from([b"", b"\x80\x02", b"PK\x03\x04"]))
def test_any_bytes(content: bytes, start: bytes):
    """As a file of torch's own kinds or of none: a dict, or one line, and never another error."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(start + content)
        file.flush()
        try:
            assert isinstance(read_checkpoint(file.name), dict)
        except QatError as error:
            assert "\n" not in str(error)  # noqa: PT017  bytes may be a dict by chance


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path):
    for number, content in enumerate([saved({"a": Attack(tmp_path / "ran")}), pickle.dumps(Attack(tmp_path / "ran"))]):
        (tmp_path / str(number)).write_bytes(content)
        with pytest.raises(QatError, match=r"is not a plain checkpoint|damaged"):
            read_checkpoint(tmp_path / str(number))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir], ids=["absent", "folder"])
def test_no_checkpoint(tmp_path: Path, make: Any):
    make(tmp_path / "x.ckpt")
    with pytest.raises(QatError, match="no checkpoint at"):
        read_checkpoint(tmp_path / "x.ckpt")


# --- folders ----------------------------------------------------------------------------------------------------------


def test_a_run_keeps_its_folder(here: Path):
    with run_folder(here / "outputs" / "m" / "now") as folder:
        write_text("bits: 4\n", folder / CLAIM)
    assert folder == here / "outputs" / "m" / "now"
    assert (folder / CLAIM).read_text() == "bits: 4\n"


@pytest.mark.parametrize("error", [None, QatError, KeyboardInterrupt])
def test_a_folder_in_which_nothing_was_saved_goes(here: Path, error: type[BaseException] | None):
    (here / "outputs" / "other").mkdir(parents=True)
    try:
        with run_folder(here / "outputs" / "m" / "now"):
            if error is not None:
                raise error
    except BaseException as caught:
        assert type(caught) is error  # noqa: PT017  whatever ended the run goes on
    assert not (here / "outputs" / "m").exists()
    assert (here / "outputs" / "other").exists()


def test_pruning_ends_at_the_working_directory(here: Path):
    (here / "work" / "outputs" / "m").mkdir(parents=True)
    os.chdir(here / "work")
    prune(here / "work" / "outputs" / "m")
    assert list((here / "work").iterdir()) == []
    assert (here / "work").exists()


def test_runs_of_the_same_second_have_folders_of_their_own(here: Path):
    folders, errors = [], []
    barrier = threading.Barrier(8)

    def run() -> None:
        try:
            barrier.wait()
            with run_folder(here / "outputs" / "now") as folder:
                folders.append(folder)
                barrier.wait()
                if len(folders) % 2:
                    write_text("bits: 4\n", folder / CLAIM)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(set(folders)) == 8
    assert {folder.name.partition("__")[0] for folder in folders} == {"now"}


def test_an_existing_run_is_not_touched(here: Path):
    old = here / "outputs" / "now"
    old.mkdir(parents=True)
    (old / CLAIM).write_text("bits: 4\n")
    (old / "best.ckpt").write_text("precious")
    with run_folder(old) as folder:
        assert folder != old
    assert sorted(path.name for path in old.iterdir()) == ["best.ckpt", CLAIM]


def test_distributed_processes_share_the_folder(here: Path, monkeypatch: pytest.MonkeyPatch):
    with run_folder(here / "now") as first:
        monkeypatch.setenv("LOCAL_RANK", "1")
        with run_folder(here / "now") as second:
            assert first == second
        assert (first / CLAIM).exists()


# --- resuming ---------------------------------------------------------------------------------------------------------


def make_run(folder: Path, config: Config | None = None, stage: str = "quantized", epoch: int = 4) -> Path:
    folder.mkdir(parents=True)
    about = {"stage": stage, "results": {}, "config": dataclasses.asdict(config or Config(recipe=RecipeConfig(5, 5)))}
    write_checkpoint({"epoch": epoch, "state_dict": {}, "qat": about}, folder / "last.ckpt")
    return folder


def test_last_is_the_latest_that_can_be_resumed(here: Path):
    for name in ("2026-01-02", "2026-01-03", "2026-01-03__2"):
        make_run(here / "outputs" / name)
    (here / "outputs" / "2026-01-04").mkdir()  # ended before its first checkpoint
    assert find_run(here / "outputs", "last").name == "2026-01-03__2"
    with run_folder(here / "outputs" / "2026-01-05", "last") as folder:
        assert folder.name == "2026-01-03__2"
    assert not (here / "outputs" / "2026-01-05").exists()


@pytest.mark.parametrize("suffix", ["", "/", "/last.ckpt", "/best.ckpt"])
def test_resume_takes_a_folder_or_a_checkpoint_in_it(here: Path, suffix: str):
    make_run(here / "run")
    assert find_run(here / "outputs", f"run{suffix}") == Path("run")


@pytest.mark.parametrize("resume", ["last", "", "nowhere", "nowhere/last.ckpt", "empty", "LAST"])
def test_nothing_to_resume(here: Path, resume: str):
    (here / "empty").mkdir()
    with pytest.raises(QatError, match="nothing to resume: ") as caught:
        find_run(here / "outputs", resume)
    assert "resume=" in str(caught.value)


def test_resume_point(here: Path):
    config = Config(recipe=RecipeConfig(5, 5), quant=QuantConfig(rules=[Rule("fc", 2)]))
    assert resume_point(config, make_run(here / "run", config, epoch=2))["epoch"] == 2


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"seed": 1}, "seed=0; got seed=1"),
        ({"quant": QuantConfig(rules=[Rule("fc", 2)])}, "quant.rules=[]"),
        ({"optim": OptimConfig(lr=0.5)}, "optim.lr=0.01; got optim.lr=0.5"),
        ({"recipe": RecipeConfig(5, 5, 2)}, "recipe.calibration_batches=8"),
    ],
)
def test_resuming_another_experiment(here: Path, change: dict[str, Any], key: str):
    folder = make_run(here / "run", epoch=2)
    with pytest.raises(QatError) as caught:
        resume_point(dataclasses.replace(Config(recipe=RecipeConfig(5, 5)), **change), folder)
    assert key in str(caught.value)


def test_what_may_change_is_in_the_configuration():
    keys = flatten(dataclasses.asdict(Config(trainer={"x": 1})))
    assert all(any(key.startswith(free) for key in keys) for free in FREE_TO_CHANGE)


def test_a_complete_run_is_not_resumed(here: Path):
    folder = make_run(here / "run")
    assert resume_point(Config(recipe=RecipeConfig(5, 5)), folder)  # killed before it wrote its metrics
    (folder / "metrics.json").write_text("{}")
    with pytest.raises(QatError, match=r"is complete.*raise recipe.epochs"):
        resume_point(Config(recipe=RecipeConfig(5, 5)), folder)
    assert resume_point(Config(recipe=RecipeConfig(5, 9)), folder)


def test_a_run_of_no_quantized_epochs_goes_on_with_some(here: Path):
    folder = make_run(here / "run", Config(recipe=RecipeConfig(5, 0)), stage="float")
    (folder / "metrics.json").write_text("{}")
    assert resume_point(Config(recipe=RecipeConfig(5, 3)), folder)["epoch"] == 4


@pytest.mark.parametrize("content", [{}, {"qat": {}}, {"qat": 3}, {"qat": {"stage": "float"}}], ids=repr)
def test_a_checkpoint_that_train_did_not_write(here: Path, content: dict[str, Any]):
    folder = make_run(here / "run")
    write_checkpoint(content | {"state_dict": {}}, folder / "last.ckpt")
    with pytest.raises(QatError, match=r"nothing to resume: expected a checkpoint of train\.py"):
        resume_point(Config(), folder)
