"""Data: what is read equals the files, divisions are fixed and fair, and order depends on (seed, epoch) only."""

from __future__ import annotations

import collections
import gc
import gzip
import pickle
import struct
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import sklearn.datasets
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

import qat.data
import qat.datasets
from qat.config import DataConfig, QatError
from qat.data import DataModule, EpochSampler, Loader, MemoryLoader, augmentation
from qat.datasets import MemoryImages, load_splits, stratified_order


def ready(seed: int = 0, **config: Any) -> DataModule:
    data = DataModule(DataConfig(**config), seed)
    data.setup()
    return data


def digest(loader: Loader) -> list[tuple[float, tuple[int, ...]]]:
    """What a loader yields, in little: order of labels and a sum that depends on every pixel."""
    return [(float((x.double() ** 3).sum()), tuple(y.tolist())) for x, y in loader]


def pixel_keys(images: MemoryImages) -> list[bytes]:
    return [pixels.numpy().tobytes() for pixels in images.pixels]


def refused(config: DataConfig) -> str:
    """The one line that a bad configuration or file is refused with."""
    with pytest.raises(QatError) as caught:
        load_splits(config)
    return one_line(caught.value)


def one_line(error: QatError) -> str:
    text = str(error)
    assert "\n" not in text
    assert "got" in text
    return text


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test may download, nor find what an earlier download of this user left behind."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise urllib.error.URLError("no network in tests")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "torch_home" / "hub"))


# --- files to read ----------------------------------------------------------------------------------------------------


def write_idx(path: Path, array: np.ndarray, magic: bytes | None = None) -> None:
    header = magic if magic is not None else bytes([0, 0, 8, array.ndim])
    content = header + b"".join(struct.pack(">i", n) for n in array.shape) + array.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_fashion(folder: Path, suffix: str = "", seed: int = 0) -> dict[str, np.ndarray]:
    rng, arrays = np.random.default_rng(seed), {}
    for part, count in (("train", 60), ("t10k", 20)):
        arrays[f"{part}-images-idx3-ubyte"] = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"{part}-labels-idx1-ubyte"] = rng.permutation(np.arange(count) % 10).astype(np.uint8)
    for name, array in arrays.items():
        write_idx(folder / (name + suffix), array)
    return arrays


def write_images(folder: Path, counts: dict[str, int], size: tuple[int, int] = (20, 16)) -> None:
    """One PNG per image; the first byte of every image is its number, the second its class."""
    for label, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = np.random.default_rng([label, number]).integers(0, 256, (*size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number:03}.png")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    write_images(root, {"ant": 20, "bee": 12, "cat": 8})
    return root


# --- reading, against what this project did not write -----------------------------------------------------------------


def test_digits_are_those_of_scikit_learn():
    splits = load_splits(DataConfig(name="digits", image_size=8))
    digits = sklearn.datasets.load_digits()
    wanted = collections.Counter(
        (np.rint(image * 255 / 16).astype(np.uint8).tobytes(), int(label))
        for image, label in zip(digits.images, digits.target, strict=True)
    )
    got = collections.Counter(
        (key, label)
        for images in (splits.train, splits.val, splits.test)
        for key, label in zip(pixel_keys(images), images.labels.tolist(), strict=True)
    )
    assert got == wanted
    np.testing.assert_allclose(
        [splits.mean[0], splits.std[0]], [(digits.images / 16).mean(), (digits.images / 16).std()], atol=2e-4
    )


def test_resize_is_the_antialiased_bilinear_one():
    small, large = (load_splits(DataConfig(name="digits", image_size=size)) for size in (8, 20))
    wanted = torch.nn.functional.interpolate(small.test.pixels.float(), size=(20, 20), mode="bilinear", antialias=True)
    assert (large.test.pixels.float() - wanted).abs().max() <= 1
    assert large.test.pixels.dtype == torch.uint8


@pytest.mark.skipif(not qat.datasets.DEBIAN_FASHION_MNIST.is_dir(), reason="needs Debian's dataset-fashion-mnist")
def test_fashion_mnist_of_debian_equals_its_bytes():
    splits = load_splits(DataConfig(name="fashion_mnist", image_size=28))
    raw = {
        name: np.frombuffer(gzip.decompress((qat.datasets.DEBIAN_FASHION_MNIST / f"{name}.gz").read_bytes()), np.uint8)
        for name in qat.datasets.IDX_FILES
    }
    np.testing.assert_array_equal(splits.test.pixels.flatten(), raw["t10k-images-idx3-ubyte"][16:])
    np.testing.assert_array_equal(splits.test.labels, raw["t10k-labels-idx1-ubyte"][8:])
    train = raw["train-images-idx3-ubyte"][16:].reshape(60000, 784)
    order = stratified_order(torch.from_numpy(raw["train-labels-idx1-ubyte"][8:].astype(np.int64))).numpy()
    np.testing.assert_array_equal(torch.cat([splits.val.pixels, splits.train.pixels]).reshape(60000, 784), train[order])
    assert torch.bincount(splits.val.labels).tolist() == [600] * 10
    np.testing.assert_allclose([splits.mean[0], splits.std[0]], [train.mean() / 255, train.std() / 255], atol=1e-3)
    assert splits.class_names[9] == "Ankle boot"


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("below", [".", "FashionMNIST/raw", "my files", "a/b"])
def test_fashion_mnist_is_found_in_any_folder_of_root(tmp_path: Path, suffix: str, below: str):
    write_fashion(tmp_path / "MNIST" / "raw", suffix, seed=1)  # its relatives use the same file names
    arrays = write_fashion(tmp_path / below, suffix)
    splits = load_splits(DataConfig(name="fashion_mnist", root=str(tmp_path), image_size=28))
    np.testing.assert_array_equal(splits.test.pixels[:, 0], arrays["t10k-images-idx3-ubyte"])
    np.testing.assert_array_equal(splits.test.labels, arrays["t10k-labels-idx1-ubyte"])


@pytest.mark.parametrize(("name", "label_key", "meta_key", "files"), [
    ("cifar10", "labels", "label_names", ["data_batch_1", "data_batch_2", "test_batch"]),
    ("cifar100", "fine_labels", "fine_label_names", ["train", "test"]),
])  # fmt: skip
def test_cifar_equals_its_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, label_key: str, meta_key: str, files: list[str]
):
    kind = getattr(torchvision.datasets, name.upper())
    folder, classes, rng = tmp_path / kind.base_folder, int(name[5:]), np.random.default_rng(0)
    folder.mkdir()
    for file in files:
        content = {
            "data": rng.integers(0, 256, (150, 3072), dtype=np.uint8),
            label_key: [i % classes for i in range(150)],
        }
        (folder / file).write_bytes(pickle.dumps(content))
    (folder / kind.meta["filename"]).write_bytes(pickle.dumps({meta_key: [f"class {i}" for i in range(classes)]}))
    monkeypatch.setattr(kind, "_check_integrity", lambda self: True)
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": None})
    monkeypatch.setattr(kind, "train_list", [[file, None] for file in files[:-1]])
    splits = load_splits(DataConfig(name=name, root=str(tmp_path)))
    np.testing.assert_array_equal(splits.test.pixels.reshape(150, -1), content["data"])  # R, G, B planes, row by row
    assert splits.test.labels.tolist() == content[label_key]
    assert splits.class_names[-1] == f"class {classes - 1}"
    assert len(splits.train) + len(splits.val) == 150 * (len(files) - 1)


def test_folder_images_equal_their_files(photos: Path):
    data = ready(name="imagefolder", root=str(photos), image_size=14, batch_size=3, workers=0)
    images, labels = next(iter(data.test_dataloader()))
    pipeline = v2.Compose(
        [
            v2.Resize(16),
            v2.CenterCrop(14),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    for image, label, path in zip(images, labels, data.splits.test.paths, strict=False):
        torch.testing.assert_close(image, pipeline(Image.open(path)), rtol=0, atol=1e-6, check_stride=False)
        assert data.class_names[int(label)] == Path(path).parent.name


def test_folder_with_its_own_splits(tmp_path: Path):
    for part, count in (("train", 9), ("val", 3), ("test", 2)):
        write_images(tmp_path / part, {"ant": count, "bee": count})
    data = ready(name="imagefolder", root=str(tmp_path), workers=0, limit=10)
    assert (data.train_size, data.val_size, data.test_size) == (10, 6, 4)
    data = ready(name="imagenet", root=str(tmp_path), workers=0, val_fraction=1 / 3)  # whose val/ is what is reported
    assert (data.train_size, data.val_size, data.test_size) == (12, 6, 6)
    assert all("/val/" in path for path in data.splits.test.paths)


def test_classes_may_be_called_like_splits(tmp_path: Path):
    write_images(tmp_path, {"bus": 10, "train": 10})
    assert ready(name="imagefolder", root=str(tmp_path)).class_names == ("bus", "train")


# --- divisions --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=200))
def test_every_prefix_of_the_stratified_order_has_classes_in_proportion(labels: list[int]):
    labels = torch.tensor(labels)
    order = stratified_order(labels)
    assert sorted(order.tolist()) == list(range(len(labels)))
    counts = torch.nn.functional.one_hot(labels[order], 7).cumsum(0).double()
    share = torch.arange(1, len(labels) + 1)[:, None] / len(labels) * counts[-1]
    assert (counts - share).abs().max() < 2


@pytest.mark.parametrize("name", ["digits", "synthetic"])
@pytest.mark.parametrize("fraction", [0.1, 0.25])
def test_splits_are_disjoint_sized_and_stratified(name: str, fraction: float):
    splits = load_splits(DataConfig(name=name, image_size=8, val_fraction=fraction))
    train, val, test = (set(pixel_keys(images)) for images in (splits.train, splits.val, splits.test))
    if name == "synthetic":  # digits has a few identical scans
        assert not train & val
        assert not (train | val) & test
    available = len(splits.train) + len(splits.val)
    assert len(splits.val) == round(fraction * available)
    for part in (splits.val, splits.test):
        counts = torch.bincount(part.labels).double()
        everything = torch.bincount(torch.cat([s.labels for s in (splits.train, splits.val, splits.test)])).double()
        assert (counts - everything / everything.sum() * len(part)).abs().max() < 2


def test_splits_are_the_same_for_everybody_and_every_seed():
    """A changed division silently makes all earlier accuracies incomparable."""
    assert stratified_order(torch.arange(40) % 4)[:8].tolist() == [24, 25, 38, 31, 0, 13, 26, 39]
    one, two = ready(seed=1, name="digits"), ready(seed=2, name="digits")
    for part in ("train", "val", "test"):
        assert torch.equal(getattr(one.splits, part).pixels, getattr(two.splits, part).pixels)


def test_limit_is_a_balanced_prefix_and_leaves_validation_alone():
    whole, small = (load_splits(DataConfig(name="digits", limit=limit)) for limit in (None, 100))
    assert torch.equal(small.train.pixels, whole.train.pixels[:100])
    assert torch.equal(small.val.pixels, whole.val.pixels)
    counts = torch.bincount(small.train.labels, minlength=10)
    assert counts.min() >= 9
    assert counts.max() <= 11
    assert len(load_splits(DataConfig(name="digits", limit=10**9)).train) == len(whole.train)


def test_synthetic_can_be_learned_and_only_by_looking():
    splits = load_splits(DataConfig(name="synthetic", num_classes=7))
    x, y = splits.train.pixels.flatten(1).float(), splits.train.labels
    centers = torch.stack([x[y == label].mean(0) for label in range(7)])
    predicted = torch.cdist(splits.test.pixels.flatten(1).float(), centers).argmin(1)
    assert (predicted == splits.test.labels).float().mean() > 0.95
    assert torch.bincount(splits.test.labels).float().max() / len(splits.test) < 0.2


# --- order ------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 50), st.integers(1, 60), st.booleans())
def test_every_image_once_except_a_lonely_last_training_image(size: int, batch_size: int, train: bool):
    sampler = EpochSampler(size, batch_size, train=train)
    batches = [batch.tolist() for batch in sampler]
    assert len(batches) == len(sampler)
    seen = sorted(index for batch in batches for index in batch)
    lonely = train and size > batch_size > 1 and size % batch_size == 1
    assert len(seen) == len(set(seen)) == size - lonely
    assert all(len(batch) == batch_size for batch in batches[:-1])


@given(st.integers(4, 40), st.integers(1, 4), st.integers(1, 16), st.integers(0, 3))
def test_ranks_see_disjoint_shares(size: int, world: int, batch_size: int, epoch: int):
    with pytest.MonkeyPatch.context() as patch:
        shares: dict[bool, list[list[int]]] = {True: [], False: []}
        for train in (True, False):
            for rank in range(world):
                patch.setattr(qat.data, "ranks", lambda rank=rank: (rank, world))
                sampler = EpochSampler(size, batch_size, train=train)
                sampler.set_epoch(epoch)
                shares[train].append(sampler.share().tolist())
                assert len(list(sampler)) == len(sampler)
    for train, parts in shares.items():
        seen = [index for part in parts for index in part]
        assert len(seen) == len(set(seen))
        assert len(seen) == (size // world * world if train else size)  # every test image is counted, once
    assert len({len(part) for part in shares[True]}) == 1


def test_more_processes_than_images_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(qat.data, "ranks", lambda: (0, 8))
    with pytest.raises(QatError, match="per process"):
        EpochSampler(7, 2, train=True)


@pytest.mark.parametrize("kind", ["memory", "files"])
def test_order_and_augmentation_depend_on_seed_and_epoch_only(kind: str, photos: Path):
    config: dict[str, Any] = {"name": "digits", "image_size": 8, "limit": 50, "batch_size": 16}
    if kind == "files":
        config = {"name": "imagefolder", "root": str(photos), "image_size": 8, "batch_size": 8, "workers": 0}

    def epoch(number: int, seed: int = 0) -> list[Any]:
        loader = ready(seed, **config).train_dataloader()
        loader.set_epoch(number)
        return digest(loader)

    straight = ready(**config).train_dataloader()
    epochs = []
    for number in range(3):
        straight.set_epoch(number)
        epochs.append(digest(straight))
        torch.rand(17)  # whatever else a run draws
    assert epochs == [epoch(0), epoch(1), epoch(2)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert epoch(1, seed=5) != epochs[1]


@pytest.mark.parametrize("kind", ["memory", "files", "workers"])
def test_the_global_random_state_is_left_alone(kind: str, photos: Path):
    if kind == "memory":
        data = ready(name="digits", image_size=8, limit=50)
    else:
        data = ready(name="imagefolder", root=str(photos), image_size=8, workers=int(kind == "workers"))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    for loader in (data.train_dataloader(), data.val_dataloader(), data.calibration_batches(1)):
        digest(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_change_nothing_but_speed(photos: Path):
    config: dict[str, Any] = {"name": "imagefolder", "root": str(photos), "image_size": 8, "batch_size": 8}
    alone, helped = (ready(**config, workers=workers).train_dataloader() for workers in (0, 2))
    for epoch in (0, 1):
        for loader in (alone, helped):
            loader.set_epoch(epoch)
        assert digest(alone) == digest(helped)


@pytest.mark.parametrize("fails", [False, True])
def test_workers_stop_at_once_when_nobody_needs_them(fails: bool, tmp_path: Path):
    """Torch waits 5 s per worker if its pipes are freed first, which garbage collection in a cycle may do."""
    write_images(tmp_path, {"ant": 6, "bee": 6})
    data = ready(name="imagefolder", root=str(tmp_path), image_size=8, workers=1)
    loader = data.train_dataloader()
    data.cycle = loader.cycle = [data, loader]  # as through a Trainer
    if fails:
        empty(Path(data.splits.train.paths[0]))
        with pytest.raises(QatError):
            digest(loader)
    else:
        digest(loader)
    start = time.perf_counter()
    del data, loader
    gc.collect()
    assert time.perf_counter() - start < 4


class Recorder(lightning.LightningModule):
    """Remembers the batches of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: dict[int, list[Any]] = collections.defaultdict(list)
        self.validated = 0

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        self.seen[self.current_epoch].append((float((images.double() ** 3).sum()), tuple(labels.tolist())))
        return self.layer(images.mean().reshape(1)).sum()

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.validated += len(batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(folder: Path, data: DataModule, epochs: int, resume: Path | None = None, **options: Any) -> Recorder:
    model = Recorder()
    last = lightning.pytorch.callbacks.ModelCheckpoint(folder, filename="last", save_on_train_epoch_end=True)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[last],
        **options,
    )
    trainer.fit(model, datamodule=data, ckpt_path=resume)
    return model


@pytest.mark.filterwarnings("ignore:Checkpoint directory")  # which is the point
@pytest.mark.parametrize("kind", ["memory", "workers"])
def test_a_resumed_run_sees_what_an_undisturbed_one_sees(kind: str, photos: Path, tmp_path: Path):
    config: dict[str, Any] = {"name": "digits", "image_size": 8, "limit": 40, "batch_size": 16}
    if kind == "workers":
        config = {"name": "imagefolder", "root": str(photos), "image_size": 8, "batch_size": 8, "workers": 1}
    whole = fit(tmp_path / "whole", ready(**config), 3)
    first = fit(tmp_path / "parts", ready(**config), 2)
    second = fit(tmp_path / "parts", ready(**config), 3, resume=tmp_path / "parts" / "last.ckpt")
    assert sorted(second.seen) == [2]
    assert first.seen | second.seen == whole.seen
    assert len({str(epoch) for epoch in whole.seen.values()}) == 3
    assert len(whole.seen[0]) == len(ready(**config).train_dataloader())


@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_overfitting_repeats_the_same_batches(tmp_path: Path):
    model = fit(tmp_path, ready(name="digits", image_size=8, batch_size=16), 2, overfit_batches=2)
    assert model.seen[0] == model.seen[1]


# --- what a batch is --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["digits", "synthetic", "imagefolder"])
def test_batches_are_normalized_channels_last_floats(name: str, photos: Path):
    data = ready(name=name, root=str(photos), image_size=12, batch_size=4, workers=0)
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader(), data.calibration_batches(1)):
        images, labels = next(iter(loader))
        assert images.dtype == torch.float32
        assert tuple(images.shape[1:]) == data.input_shape == (3, 12, 12)
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert labels.dtype == torch.int64
        assert labels.shape == images.shape[:1]
        assert type(images) is type(labels) is Tensor


def test_evaluation_is_the_plain_normalized_image():
    data = ready(name="digits", image_size=16, batch_size=1000)
    images, labels = next(iter(data.test_dataloader()))
    wanted = (data.splits.test.pixels.double() / 255 - data.splits.mean[0]) / data.splits.std[0]
    torch.testing.assert_close(images.double(), wanted.expand(-1, 3, -1, -1), rtol=0, atol=1e-6, check_stride=False)
    assert torch.equal(labels, data.splits.test.labels)


def test_images_of_a_batch_are_augmented_differently():
    images = MemoryImages(
        load_splits(DataConfig(name="digits")).train.pixels[:1].repeat(64, 1, 1, 1), torch.zeros(64).long()
    )
    loader = MemoryLoader(images, EpochSampler(64, 64), (0.5,), (0.5,), 32, augmentation("digits", 32))
    batch, _ = next(iter(loader))
    assert len({image.numpy().tobytes() for image in batch}) == 64 // qat.data.CHUNK


@pytest.mark.parametrize(
    ("name", "flips"), [("digits", False), ("synthetic", False), ("fashion_mnist", True), ("cifar10", True)]
)
def test_only_things_that_have_mirror_images_are_flipped(name: str, flips: bool):
    ramp = torch.arange(32, dtype=torch.uint8).mul(8).expand(4, 1, 32, 32)
    torch.manual_seed(0)
    transform = augmentation(name, 32)
    rising = [bool(out[..., 16, 8].lt(out[..., 16, 24]).all()) for out in (transform(ramp) for _ in range(30))]
    assert all(rising) != flips


def test_augment_can_be_switched_off():
    data = ready(name="digits", image_size=8, augment=False, batch_size=10)
    plain = {tuple(image.flatten().tolist()) for x, _ in data.calibration_batches(10**6) for image in x}
    seen = {tuple(image.flatten().tolist()) for x, _ in data.train_dataloader() for image in x}
    assert seen <= plain
    data = ready(name="digits", image_size=8, batch_size=10)
    assert not {tuple(image.flatten().tolist()) for x, _ in data.train_dataloader() for image in x} <= plain


@pytest.mark.parametrize("workers", [None, 0, 1])
def test_calibration_batches(workers: int | None, photos: Path):
    config: dict[str, Any] = {"name": "digits", "image_size": 8, "limit": 300}
    if workers is not None:
        config = {"name": "imagefolder", "root": str(photos), "image_size": 8, "workers": workers}
    data = ready(batch_size=6, **config)
    batches = data.calibration_batches(2)
    assert len(batches) == 2
    first = digest(batches)
    assert [len(labels) for _, labels in first] == [6, 6]
    assert first == digest(batches) == digest(ready(seed=9, batch_size=6, **config).calibration_batches(2))
    assert [label for _, labels in first for label in labels] == data.splits.train.labels[:12].tolist()
    assert len(list(data.calibration_batches(10**6))) == data.train_size // 6 + (data.train_size % 6 > 1)


def test_images_too_many_to_enlarge_are_resized_batch_by_batch(monkeypatch: pytest.MonkeyPatch):
    config: dict[str, Any] = {"name": "digits", "image_size": 24, "limit": 60}
    once = ready(**config)
    monkeypatch.setattr(qat.datasets, "MAX_RESIZED_BYTES", 1000)
    each = ready(**config)
    assert each.splits.train.pixels.shape[-1] == 8
    assert digest(once.train_dataloader()) == digest(each.train_dataloader())
    assert digest(once.test_dataloader()) == digest(each.test_dataloader())


def test_a_batch_larger_than_the_data_set():
    data = ready(name="digits", image_size=8, limit=30, batch_size=10**6)
    assert [len(y) for _, y in data.train_dataloader()] == [30]
    assert len(data.train_dataloader()) == len(data.test_dataloader()) == 1


def test_describe_is_one_true_line():
    data = ready(name="synthetic", num_classes=3, image_size=16, limit=100)
    line = data.describe()
    for fact in ("synthetic", "100 training", f"{data.val_size} validation", "512 test", "3 classes", "3x16x16"):
        assert fact in line
    assert "\n" not in line


def test_setup_reads_once(monkeypatch: pytest.MonkeyPatch):
    data = ready(name="synthetic", image_size=8)
    splits = data.splits
    for stage in ("fit", "validate", "test", None):
        data.setup(stage)
    assert data.splits is splits


def test_an_epoch_of_digits_takes_no_time():
    data = ready(name="digits")
    threads, times = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for _ in range(3):
            start = time.perf_counter()
            for _ in data.train_dataloader():
                pass
            times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    assert min(times) < 0.5  # 0.1 s on one core of a small virtual machine


@pytest.mark.gpu
def test_batches_are_made_on_the_gpu():
    on_cpu = ready(name="digits", image_size=8, limit=64)
    images = on_cpu.splits.train
    sampler = EpochSampler(len(images), 64, train=True)
    copy = MemoryImages(images.pixels, images.labels)
    loader = MemoryLoader(copy, sampler, on_cpu.splits.mean, on_cpu.splits.std, 8, augmentation("digits", 8), "cuda")
    state = torch.cuda.get_rng_state()
    x, y = next(iter(loader))
    wanted_x, wanted_y = next(iter(on_cpu.train_dataloader()))
    assert x.is_cuda
    torch.testing.assert_close(x.cpu(), wanted_x, rtol=0, atol=0.05)  # resampling rounds a gray level up or down
    assert torch.equal(y.cpu(), wanted_y)
    assert torch.equal(torch.cuda.get_rng_state(), state)


# --- bad input: one line that says what was expected, what came, what to type -----------------------------------------


@pytest.mark.parametrize("name", ["fashion_mnist", "cifar10", "cifar100", "imagenet", "imagefolder"])
@pytest.mark.parametrize("what", ["missing", "a file"])
def test_root_is_not_a_folder(name: str, what: str, tmp_path: Path):
    root = tmp_path / "nowhere"
    if what == "a file":
        root.write_text("")
    text = refused(DataConfig(name=name, root=str(root)))
    assert str(root) in text
    assert "data.root=" in text


@pytest.mark.parametrize("name", ["imagenet", "imagefolder"])
def test_folders_need_a_root(name: str):
    assert "type data.root=" in refused(DataConfig(name=name))


def no_classes(root: Path) -> str:
    Image.new("RGB", (4, 4)).save(root / "0.png")
    return str(root)


def one_class(root: Path) -> str:
    write_images(root, {"everything": 5})
    return "'everything'"


def empty_class(root: Path) -> str:
    write_images(root, {"ant": 5, "bee": 5})
    (root / "hollow").mkdir()
    return "hollow"


def class_without_images(root: Path) -> str:
    write_images(root, {"ant": 5, "bee": 5})
    (root / "words").mkdir()
    (root / "words" / "a.txt").write_text("not an image")
    return "words"


def other_classes(root: Path) -> str:
    write_images(root / "train", {"ant": 5, "bee": 5})
    write_images(root / "val", {"ant": 5, "wasp": 5})
    return "'bee'"


def few_images(root: Path) -> str:
    write_images(root, {"ant": 1, "bee": 1, "cat": 1})
    return "at least 3 training images"


def two_images(root: Path) -> str:
    write_images(root, {"ant": 1, "bee": 1})
    return "more images"


@pytest.mark.parametrize(
    "make", [no_classes, one_class, empty_class, class_without_images, other_classes, few_images, two_images]
)
def test_bad_image_folders(make: Callable[[Path], str], tmp_path: Path):
    fact = make(tmp_path)
    assert fact in refused(DataConfig(name="imagefolder", root=str(tmp_path)))


def test_imagenet_without_class_folders_in_val(tmp_path: Path):
    """The commonest mistake: the 50 000 validation images as they come, in one folder."""
    write_images(tmp_path / "train", {"n01": 5, "n02": 5})
    (tmp_path / "val").mkdir()
    no_classes(tmp_path / "val")
    assert str(tmp_path / "val") in refused(DataConfig(name="imagenet", root=str(tmp_path)))


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def text(path: Path) -> None:
    path.write_text("not an image")


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("damage", [truncated, text, empty])
def test_a_damaged_image_is_named(damage: Callable[[Path], None], workers: int, tmp_path: Path):
    write_images(tmp_path, {"ant": 5, "bee": 5})
    damage(tmp_path / "bee" / "003.png")
    data = ready(name="imagefolder", root=str(tmp_path), image_size=8, workers=workers)
    with pytest.raises(QatError) as caught:
        [digest(loader) for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader())]
    assert str(tmp_path / "bee" / "003.png") in one_line(caught.value)


def test_a_decompression_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_images(tmp_path, {"ant": 5, "bee": 5})
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    data = ready(name="imagefolder", root=str(tmp_path), image_size=8, workers=0)
    with pytest.raises(QatError, match="decompression bomb") as caught:
        digest(data.train_dataloader())
    assert str(tmp_path) in one_line(caught.value)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
@pytest.mark.parametrize("damage", ["truncated", "too long", "magic", "empty", "header only", "no images", "huge"])
def test_damaged_idx_files_are_named(tmp_path: Path, suffix: str, name: str, damage: str):
    array = write_fashion(tmp_path, suffix)[name]
    path = tmp_path / (name + suffix)
    if damage == "magic":
        write_idx(path, array, magic=bytes([0, 0, 13, array.ndim]))
    elif damage == "no images":
        write_idx(path, array[:0])
    elif suffix and damage == "truncated":
        path.write_bytes(path.read_bytes()[:-20])  # of the compressed file
    else:
        content = gzip.decompress(path.read_bytes()) if suffix else path.read_bytes()
        content = {
            "truncated": content[:-5],
            "too long": content + b"x",
            "empty": b"",
            "header only": content[:6],
            "huge": content[:4] + b"\xff" * 4 * array.ndim + content[4 + 4 * array.ndim :],
        }[damage]
        path.write_bytes(gzip.compress(content) if suffix else content)
    message = refused(DataConfig(name="fashion_mnist", root=str(tmp_path)))
    assert str(path) in message
    assert "type data.root=" in message


@pytest.mark.parametrize("labels", [np.zeros(7, np.uint8), np.full(20, 10, np.uint8)], ids=["too few", "too large"])
def test_idx_labels_that_do_not_fit(tmp_path: Path, labels: np.ndarray):
    write_fashion(tmp_path)
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", labels)
    assert "t10k-labels-idx1-ubyte" in refused(DataConfig(name="fashion_mnist", root=str(tmp_path)))


@pytest.mark.parametrize("rooted", [True, False])
@pytest.mark.parametrize("name", ["cifar10", "cifar100", "fashion_mnist"])
def test_no_network(name: str, rooted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(qat.datasets, "DEBIAN_FASHION_MNIST", tmp_path / "not installed")
    config = DataConfig(name=name, root=str(tmp_path) if rooted else None)
    message = refused(config)
    assert "no network in tests" in message
    assert "type data.root=" in message
    with pytest.raises(QatError, match="no network in tests"):
        DataModule(config).prepare_data()


@pytest.mark.parametrize("limit", [9, 0, -5])
def test_fewer_images_than_classes(limit: int):
    message = refused(DataConfig(name="digits", limit=limit))
    assert "10" in message
    assert "data.limit=10" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "digit"),
        ("batch_size", 0),
        ("image_size", 0),
        ("image_size", 10**6),
        ("val_fraction", 1.0),
        ("val_fraction", 0.9999),
        ("val_fraction", float("nan")),
        ("num_classes", 10**7),
    ],
)
def test_bad_values(key: str, value: Any):
    config = DataConfig(**{"name": "synthetic", key: value})
    assert key.split("_")[0] in refused(config) or key == "name"
