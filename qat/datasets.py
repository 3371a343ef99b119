"""Which images: find a data set, read it, and divide it into training, validation and test images.

Plain functions over tensors and paths; nothing here shuffles per epoch, augments or normalizes (`qat.data` does).
Every division is fixed: it depends on the labels only, never on the seed of a run, so two runs are comparable.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from qat.config import Config, DataConfig, QatError

__all__ = ["FileImages", "MemoryImages", "Splits", "download", "load_splits", "stratified_order"]

SPLIT_SEED = 20_240_229  # any constant: it makes the divisions arbitrary, yet the same for everybody
TEST_FRACTION = 0.2  # for data sets without a test set of their own
MAX_IMAGE_SIZE = 2048  # a batch of 64 is then 3 GiB; more is a typing mistake
MAX_RESIZED_BYTES = 2**28  # a set that would grow beyond this stays as it is and is resized batch by batch
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # where Debian's dataset-fashion-mnist puts its files
IDX_FILES = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
IDX_ADVICE = "type data.root=<folder with the four IDX files>"


@dataclass
class MemoryImages:
    """Images held in memory as one tensor.

    Attributes:
        pixels: uint8 (N, C, H, W); C is 1 for gray images (expanded to 3 batch by batch), otherwise 3.
        labels: int64 (N,).
    """

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, indices: Tensor) -> MemoryImages:
        """Copy the images at `indices`, int64 (M,), in that order."""
        return MemoryImages(self.pixels[indices], self.labels[indices])


@dataclass
class FileImages:
    """Images that stay on disk until a batch needs them.

    Attributes:
        paths: one file per image.
        labels: int64 (N,).
    """

    paths: list[str]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.paths)

    def subset(self, indices: Tensor) -> FileImages:
        """Name the files at `indices`, int64 (M,), in that order."""
        return FileImages([self.paths[i] for i in indices.tolist()], self.labels[indices])


Images = MemoryImages | FileImages


@dataclass(frozen=True)
class Splits:
    """A data set, divided.

    Attributes:
        train: in an order whose every prefix has all classes in proportion (see `stratified_order`).
        val: chooses the best checkpoint; never trained on.
        test: reported once.
        class_names: by label.
        mean, std: per channel, of pixels in 0..1; one channel for gray images.
    """

    train: Images
    val: Images
    test: Images
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]


def load_splits(config: DataConfig) -> Splits:
    """Read the data set that `config` names (downloading it where that is possible and needed) and divide it.

    The test set is the data set's own; `digits` and a plain folder of class folders have none, and give a stratified
    20 %. The validation set is a stratified `val_fraction` of the training images, taken before `limit` caps them, so
    that runs with different limits are judged by the same images. A folder's own `val/` beside a `test/` replaces it.

    Example:
        >>> splits = load_splits(DataConfig(name="digits", image_size=8))
        >>> len(splits.train), len(splits.val), len(splits.test), tuple(splits.train.pixels.shape[1:])
        (1294, 144, 359, (1, 8, 8))

    Raises:
        QatError: a bad value in `config`; files that are missing, empty or damaged; no network; too few images.
    """
    Config(data=config).check()
    if config.image_size > MAX_IMAGE_SIZE:
        raise QatError(f"data.image_size must be at most {MAX_IMAGE_SIZE}; got {config.image_size}")
    source = READERS[config.name](config)
    train, val, test = source.train, source.val, source.test
    if test is None:
        test, train = divide(train, TEST_FRACTION, "test images")
    if val is None:
        val, train = divide(train, config.val_fraction, f"validation images (data.val_fraction={config.val_fraction})")
    else:
        train = train.subset(stratified_order(train.labels))
    if config.limit is not None and config.limit < len(train):
        train = train.subset(torch.arange(max(config.limit, 0)))
    classes = len(source.class_names)
    if len(train) < classes:
        advice = "less data.val_fraction or more images" if config.limit is None else f"data.limit={classes} or more"
        raise QatError(f"expected at least {classes} training images, one per class; got {len(train)}; give {advice}")
    train, val, test = (resize_once(images, config.image_size) for images in (train, val, test))
    return Splits(train, val, test, source.class_names, source.mean, source.std)


def stratified_order(labels: Tensor) -> Tensor:
    """Shuffle so that every prefix has each class in proportion, to about one image: a prefix is a stratified sample.

    The k-th image of a class of n (after a fixed shuffle) is placed at (k + 1/2) / n of the way.

    Args:
        labels: int64 (N,), not negative.

    Returns:
        A permutation of 0..N-1, int64 (N,), the same on every call.

    Example:
        >>> labels = torch.tensor([0, 0, 0, 0, 1, 1])
        >>> labels[stratified_order(labels)].tolist()
        [0, 1, 0, 0, 1, 0]
    """
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    by_class = shuffled[torch.argsort(labels[shuffled], stable=True)]
    counts = torch.bincount(labels)
    own = labels[by_class]
    place_in_class = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[own]
    return by_class[torch.argsort((place_in_class.double() + 0.5) / counts[own], stable=True)]


def divide(images: Images, fraction: float, what: str) -> tuple[Images, Images]:
    """Take a stratified `fraction` of `images`; return it and the rest."""
    order, size = stratified_order(images.labels), max(1, round(fraction * len(images)))
    if size >= len(images):
        raise QatError(f"expected more images than the {size} {what}; got {len(images)}; give more images (data.root=)")
    return images.subset(order[:size]), images.subset(order[size:])


def resize(pixels: Tensor, size: int) -> Tensor:
    """Resize uint8 images (N, C, H, W) to (N, C, size, size), bilinear and antialiased."""
    return F.resize(pixels, [size, size], antialias=True) if pixels.shape[-2:] != (size, size) else pixels


def resize_once(images: Images, size: int) -> Images:
    """Resize images in memory, unless the result is too large to keep; then the loader resizes each batch."""
    if isinstance(images, FileImages) or len(images) * images.pixels.shape[1] * size**2 > MAX_RESIZED_BYTES:
        return images
    # Piecewise, because the resize works in float32: four times the bytes of what it makes.
    return MemoryImages(torch.cat([resize(part, size) for part in images.pixels.split(2048)]), images.labels)


# --- readers: one function per data set, from DataConfig to what the data set itself provides -------------------------


@dataclass(frozen=True)
class Source:
    """What a data set comes with; None is a split that it does not have."""

    train: Images
    val: Images | None
    test: Images | None
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]


def read_digits(config: DataConfig) -> Source:
    """1797 handwritten digits, 8x8, that come with scikit-learn."""
    from sklearn.datasets import load_digits  # here: a second to import, and the other data sets do not need it

    digits = load_digits()
    pixels = (torch.from_numpy(digits.images) * (255 / 16)).round().to(torch.uint8)[:, None]  # 17 gray levels
    images = MemoryImages(pixels, torch.from_numpy(digits.target).long())
    return Source(images, None, None, tuple(str(name) for name in digits.target_names), (0.3053,), (0.3760,))


def read_synthetic(config: DataConfig) -> Source:
    """A random smooth pattern per class under uniform noise: made in milliseconds, the same every time, learnable."""
    classes, size = config.num_classes, min(config.image_size, 32)
    if classes > 1000:
        raise QatError(f"data.num_classes must be at most 1000 for data=synthetic; got {classes}")
    generator = torch.Generator().manual_seed(SPLIT_SEED)
    coarse = torch.randint(0, 128, (classes, 3, 4, 4), dtype=torch.uint8, generator=generator)
    patterns = resize(coarse, size)

    def make(count: int) -> MemoryImages:
        labels = torch.arange(count) % classes
        noise = torch.randint(0, 128, (count, 3, size, size), dtype=torch.uint8, generator=generator)
        return MemoryImages(patterns[labels] + noise, labels)

    train, test = make(max(2048, 8 * classes)), make(max(512, 2 * classes))
    return Source(train, None, test, tuple(str(label) for label in range(classes)), (0.5,) * 3, (0.19,) * 3)


def read_fashion_mnist(config: DataConfig) -> Source:
    """Fashion-MNIST from IDX files, plain or gzipped, wherever they are."""
    folder = find_fashion_mnist(config)
    if folder is None:
        download(config)
        folder = find_fashion_mnist(config)
    if folder is None:
        raise QatError(f"expected IDX files in {home(config)} after the download; got none; type data.root=<folder>")

    def read(prefix: str) -> MemoryImages:
        pixels = read_idx(folder, f"{prefix}-images-idx3-ubyte", 3)[:, None]
        labels = read_idx(folder, f"{prefix}-labels-idx1-ubyte", 1).long()
        if len(pixels) != len(labels) or (labels > 9).any():
            raise QatError(
                f"expected one label from 0 to 9 per image in {prefix}-labels-idx1-ubyte of {folder}; "
                f"got {len(labels)} labels up to {int(labels.max())} for {len(pixels)} images; {IDX_ADVICE}"
            )
        return MemoryImages(pixels, labels)

    names = tuple(torchvision.datasets.FashionMNIST.classes)
    return Source(read("train"), None, read("t10k"), names, (0.2860,), (0.3530,))


def read_cifar(config: DataConfig) -> Source:
    """CIFAR-10 or CIFAR-100 through torchvision, which downloads what is missing."""
    hundred = config.name == "cifar100"
    kind = torchvision.datasets.CIFAR100 if hundred else torchvision.datasets.CIFAR10

    def read(train: bool) -> tuple[MemoryImages, tuple[str, ...]]:
        data = torchvision_set(config, kind, train=train)
        pixels = torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous()
        return MemoryImages(pixels, torch.tensor(data.targets)), tuple(data.classes)

    (train, names), (test, _) = read(True), read(False)
    mean = (0.5071, 0.4865, 0.4409) if hundred else (0.4914, 0.4822, 0.4465)
    std = (0.2673, 0.2564, 0.2762) if hundred else (0.2470, 0.2435, 0.2616)
    return Source(train, None, test, names, mean, std)


def read_folder(config: DataConfig) -> Source:
    """Class folders: `train/<class>/` with `val/` and/or `test/` beside it, or (not for imagenet) `<class>/` alone."""
    if config.root is None:
        raise QatError(f"expected a folder of class folders for data={config.name}; got none; type data.root=<folder>")
    root = home(config)
    found = {part: root / part for part in ("train", "val", "test") if is_split(root / part)}
    if config.name == "imagenet":
        for part in ("train", "val"):
            if part not in found:
                raise QatError(f"expected class folders in {root / part}; got none; type data.root=<imagenet folder>")
        found.pop("test", None)  # ImageNet's test labels are not public
    train, names = scan(found.get("train", root))
    parts: dict[str, Images | None] = {"val": None, "test": None}
    for part in parts:
        if "train" in found and part in found:
            parts[part], seen = scan(found[part])
            if seen != names:
                odd = sorted(set(seen) ^ set(names))[0]
                raise QatError(
                    f"expected the same class folders in {found['train']} and {found[part]}; "
                    f"got {odd!r} in only one of them; add or remove it"
                )
    if parts["test"] is None:  # a val/ alone is the only set that nobody has trained on: it is the one to report
        parts = {"val": None, "test": parts["val"]}
    return Source(train, parts["val"], parts["test"], names, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


READERS: dict[str, Callable[[DataConfig], Source]] = {
    "digits": read_digits,
    "fashion_mnist": read_fashion_mnist,
    "cifar10": read_cifar,
    "cifar100": read_cifar,
    "imagenet": read_folder,
    "imagefolder": read_folder,
    "synthetic": read_synthetic,
}


# --- files ------------------------------------------------------------------------------------------------------------


def home(config: DataConfig) -> Path:
    """Return the folder of a data set: `data.root`, which must exist, or `datasets` beside torch hub's own folder."""
    if config.root is None:
        return Path(torch.hub.get_dir()).parent / "datasets"
    root = Path(config.root).expanduser()
    if not root.is_dir():
        state = "a file" if root.exists() else "nothing there"
        raise QatError(f"expected data.root to be a folder; got {config.root!r} ({state}); type data.root=<folder>")
    return root


def download(config: DataConfig) -> None:
    """Fetch a data set that torchvision can fetch and that is not there yet; otherwise do nothing.

    Raises:
        QatError: no network, or a folder that cannot be written.
    """
    if config.name.startswith("cifar"):
        torchvision_set(config, getattr(torchvision.datasets, config.name.upper()), train=False)
    elif config.name == "fashion_mnist" and find_fashion_mnist(config) is None:
        torchvision_set(config, torchvision.datasets.FashionMNIST, train=False)


def torchvision_set(config: DataConfig, kind: Callable[..., Any], train: bool) -> Any:
    """Build one of torchvision's downloadable data sets, with its many kinds of failure turned into one."""
    root = home(config)
    try:
        return kind(root, train=train, download=True)
    except (OSError, RuntimeError, EOFError, zlib.error) as error:
        raise QatError(
            f"expected {config.name} in {root}, or a network to download it; got {one_line(error)}; "
            f"type data.root=<folder that holds it>, or data=digits, which needs no download"
        ) from None


def find_fashion_mnist(config: DataConfig) -> Path | None:
    """Return the folder with Fashion-MNIST's IDX files: in `data.root` if given, else the usual places; None if none.

    MNIST and its other relatives use the same file names, so folders that are called so are passed over.
    """
    root = home(config)
    folders = [root, root / "FashionMNIST" / "raw", *sorted(root.glob("*/")), *sorted(root.glob("*/*/"))]
    folders = [f for f in folders if not {"MNIST", "EMNIST", "KMNIST", "QMNIST"} & set(f.relative_to(root).parts)]
    if config.root is None:
        folders.append(DEBIAN_FASHION_MNIST)

    def complete(folder: Path) -> bool:  # the last of an interrupted download's files are missing
        return all((folder / name).is_file() or (folder / f"{name}.gz").is_file() for name in IDX_FILES)

    return next((folder for folder in folders if complete(folder)), None)


def read_idx(folder: Path, name: str, dimensions: int) -> Tensor:
    """Read one IDX file of bytes, `name` or `name`.gz, into a uint8 tensor.

    Raises:
        QatError: not readable, not an IDX file of bytes with so many dimensions, or not as long as its header says.
    """
    path = folder / name if (folder / name).is_file() else folder / f"{name}.gz"
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            header, content = file.read(4 + 4 * dimensions), file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise QatError(f"expected a readable IDX file: {path}; got {one_line(error)}; {IDX_ADVICE}") from None
    magic = bytes([0, 0, 8, dimensions])  # 8: unsigned bytes
    if header[:4] != magic:
        raise QatError(f"expected magic {magic.hex()} at the start of {path}; got {header[:4].hex()!r}; {IDX_ADVICE}")
    shape = [int.from_bytes(header[i : i + 4], "big") for i in range(4, len(header), 4)]
    if len(header) < 4 + 4 * dimensions or not content or len(content) != math.prod(shape):
        wanted = "x".join(str(extent) for extent in shape)
        raise QatError(f"expected {wanted} bytes after the header of {path}; got {len(content)}; {IDX_ADVICE}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(shape)


def is_split(folder: Path) -> bool:
    """Tell a folder of class folders from a class that happens to be called `train`, `val` or `test`."""
    return folder.is_dir() and any(entry.is_dir() for entry in folder.iterdir())


def scan(folder: Path) -> tuple[FileImages, tuple[str, ...]]:
    """List the images of the class folders in `folder`, and the names of the classes."""
    advice = "type data.root=<folder of class folders>"
    try:
        found = torchvision.datasets.ImageFolder(folder)
    except OSError as error:
        raise QatError(f"expected class folders with images in {folder}; got: {one_line(error)}; {advice}") from None
    if len(found.classes) < 2:
        raise QatError(f"expected at least 2 class folders in {folder}; got only {found.classes[0]!r}; {advice}")
    return FileImages([path for path, _ in found.samples], torch.tensor(found.targets)), tuple(found.classes)


def one_line(error: BaseException) -> str:
    """Squeeze an exception of another library into one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
