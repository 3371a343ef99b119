"""How images are batched: order, augmentation, normalization, and the Lightning DataModule around them.

Two promises. Everything random is a function of (seed, epoch) alone, so a run that resumes at epoch e sees what an
undisturbed run sees; and nothing here touches the global random state. `qat.datasets` says which images there are.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import lightning
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets.folder import default_loader
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from qat.config import DataConfig, QatError
from qat.datasets import FileImages, Images, MemoryImages, Splits, download, load_splits, one_line, resize

__all__ = ["DataModule", "EpochSampler", "FileLoader", "Loader", "MemoryLoader"]

Batch = tuple[Tensor, Tensor]
Transform = Callable[[Tensor], Tensor]

CHUNK = 8  # images that share one draw of augmentation


def derive_seed(*parts: int) -> int:
    """Mix integers into a seed of 32 bits, the same on every machine (all that torch's CPU generator reads)."""
    return zlib.crc32("/".join(str(part) for part in parts).encode())


def ranks() -> tuple[int, int]:
    """Return (rank, world size) of this process; (0, 1) when torch.distributed is not in use."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


# --- order ------------------------------------------------------------------------------------------------------------


class EpochSampler:
    """Batches of indices, in an order that depends on (seed, epoch) only.

    Lightning calls `set_epoch` before each epoch on a loader's `sampler`; other loops call it themselves.
    Under torch.distributed each rank gets its own share. Training: equal shares, since a rank without a batch would
    hang the others; up to world size - 1 images, others each epoch, are left out. Evaluation: all images, once each.

    The last, incomplete training batch is kept, unless it is a single image beside full batches: batch norm cannot
    train on one value per channel.

    Args:
        size: number of images.
        batch_size: images per batch and rank.
        train: shuffle, equal shares, no single last image.
        seed: of the run.
        shuffle: defaults to `train`.
        shared: divide among the ranks; otherwise every rank sees all.
        batches: at most so many.

    Example:
        >>> sampler = EpochSampler(5, 2)
        >>> [batch.tolist() for batch in sampler]
        [[0, 1], [2, 3], [4]]

    Raises:
        QatError: fewer training images than ranks.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        train: bool = False,
        seed: int = 0,
        shuffle: bool | None = None,
        shared: bool = True,
        batches: int | None = None,
    ) -> None:
        self.size, self.batch_size, self.train, self.seed = size, batch_size, train, seed
        self.shuffle = train if shuffle is None else shuffle
        self.shared, self.batches, self.epoch = shared, batches, 0
        if shared and train and size < ranks()[1]:
            raise QatError(f"expected at least one training image per process ({ranks()[1]}); got {size}")

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration."""
        self.epoch = epoch

    def share(self) -> Tensor:
        """Return this rank's indices for the epoch, in order: int64 (M,)."""
        order = torch.arange(self.size)
        if self.shuffle:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, self.epoch))
            order = torch.randperm(self.size, generator=generator)
        if not self.shared:
            return order
        rank, world = ranks()
        return order[rank::world][: self.size // world] if self.train else order[rank::world]

    def __len__(self) -> int:
        rank, world = ranks() if self.shared else (0, 1)
        size = self.size // world if self.train else len(range(rank, self.size, world))
        full, rest = divmod(size, self.batch_size)
        count = full if rest == 0 or (rest == 1 and full and self.train) else full + 1
        return count if self.batches is None else min(count, self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.share().split(self.batch_size)[: len(self)]


# --- augmentation and normalization -----------------------------------------------------------------------------------


def augmentation(name: str, size: int) -> Transform:
    """The random transform of a data set's training images (N, C, size, size) in memory."""
    if name == "digits":  # no flip: a mirrored 2 is not a digit
        bilinear = v2.InterpolationMode.BILINEAR
        return v2.RandomAffine(10, translate=(0.08, 0.08), scale=(0.9, 1.1), interpolation=bilinear)
    crop = v2.RandomCrop(size, padding=max(1, size // 8))  # 4 pixels at 32
    return crop if name == "synthetic" else v2.Compose([crop, v2.RandomHorizontalFlip()])


def augment(pixels: Tensor, transform: Transform, seed: int) -> Tensor:
    """Transform a batch (N, C, H, W), reproducibly and without a trace in the global random state.

    A v2 transform draws its parameters once per call, so a whole batch would get the same shift and flip. One call per
    image reads five to six times slower than one per 8 images (10 and 60 thousand Fashion-MNIST images/s on a core), so
    chunks of 8 share a draw; the shuffle puts other images together each epoch. The parameters are drawn on the CPU
    wherever the images are, hence only that generator is set and restored (torch.manual_seed resets GPUs too).
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return torch.cat([transform(chunk) for chunk in pixels.split(CHUNK)])


def normalize(pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Make network input: uint8 (N, 1 or 3, H, W) to float32 (N, 3, H, W), channels_last, (pixel/255 - mean) / std."""
    images = F.normalize(F.to_dtype(pixels, torch.float32, scale=True), list(mean), list(std), inplace=True)
    return images.expand(-1, 3, -1, -1).contiguous(memory_format=torch.channels_last)


# --- loaders ----------------------------------------------------------------------------------------------------------


class Loader:
    """A sized iterable of (images float32 (N, 3, H, W) channels_last, labels int64 (N,)), on `device`.

    Not a torch DataLoader on purpose. Lightning calls iter() on a loader before it says which epoch it is, and a
    DataLoader with workers fixes its order at that moment, so that a resumed run would repeat the order of epoch 0.
    Here `__iter__` is a generator: it looks at the epoch when the first batch is asked for.
    """

    batch_sampler = None  # Lightning reads it from whatever has a `sampler`

    def __init__(
        self, sampler: EpochSampler, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device | str = "cpu"
    ) -> None:
        self.sampler, self.mean, self.std, self.device = sampler, mean, std, torch.device(device)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order and the augmentation of the next iteration."""
        self.sampler.set_epoch(epoch)

    def read(self) -> Iterator[Batch]:
        """Yield (uint8 pixels (N, C, H, W), labels) of the epoch, augmented."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        for pixels, labels in self.read():
            # Bytes travel to the device, floats are made there.
            pixels, labels = (tensor.to(self.device, non_blocking=True) for tensor in (pixels, labels))
            yield normalize(pixels, self.mean, self.std), labels


class MemoryLoader(Loader):
    """Batches of images in memory: no worker processes, no Python per image.

    Example:
        >>> images = MemoryImages(torch.zeros(5, 1, 8, 8, dtype=torch.uint8), torch.zeros(5, dtype=torch.int64))
        >>> loader = MemoryLoader(images, EpochSampler(5, 2), (0.5,), (0.5,), size=8)
        >>> [tuple(x.shape) for x, y in loader]
        [(2, 3, 8, 8), (2, 3, 8, 8), (1, 3, 8, 8)]
    """

    def __init__(
        self,
        images: MemoryImages,
        sampler: EpochSampler,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        size: int,
        transform: Transform | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(sampler, mean, std, device)
        self.size, self.transform = size, transform
        # In place: the splits of a small data set move to the device once, and all loaders share them there.
        images.pixels, images.labels = images.pixels.to(self.device), images.labels.to(self.device)
        self.images = images

    def read(self) -> Iterator[Batch]:
        """Yield (uint8 pixels (N, C, size, size), labels) of the epoch, augmented."""
        (rank, _), epoch = ranks(), self.sampler.epoch
        for number, batch in enumerate(self.sampler):
            pixels = resize(self.images.pixels[batch], self.size)
            if self.transform is not None:
                pixels = augment(pixels, self.transform, derive_seed(self.sampler.seed, epoch, number, rank))
            yield pixels, self.images.labels[batch]


class FileDataset(Dataset[tuple[Tensor, int]]):
    """Decode one image file per key (index, augmentation seed): uint8 (3, size, size), label.

    The seed comes with the key because worker processes outlive an epoch: their own random state depends on all that
    they did before, and on how many they are.
    """

    def __init__(self, images: FileImages, size: int, random: bool) -> None:
        self.images = images
        if random:
            self.transform = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), v2.ToImage()])
        else:  # torchvision's own evaluation: 256 to 224
            self.transform = v2.Compose([v2.Resize(round(size * 256 / 224)), v2.CenterCrop(size), v2.ToImage()])

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        index, seed = key
        path = self.images.paths[index]
        try:
            image = default_loader(path)
        except Exception as error:  # whatever a decoder says about a damaged file, or a decompression bomb
            raise QatError(f"expected an image: {path}; got {one_line(error)}; replace or remove the file") from None
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return self.transform(image).as_subclass(Tensor), int(self.images.labels[index])


class KeySampler:
    """An EpochSampler's batches as lists of FileDataset's keys."""

    def __init__(self, sampler: EpochSampler) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        seed, epoch = self.sampler.seed, self.sampler.epoch
        for batch in self.sampler:
            yield [(index, derive_seed(seed, epoch, index)) for index in batch.tolist()]


class FileLoader(Loader):
    """Batches of image files, decoded and augmented by `workers` processes (0: by this one)."""

    def __init__(
        self,
        images: FileImages,
        sampler: EpochSampler,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        size: int,
        augment: bool = False,
        workers: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(sampler, mean, std, device)
        self.images, self.size, self.augment, self.workers = images, size, augment, workers
        # A Trainer and its data module refer to each other, so Python frees them and their loaders in any order; torch
        # then finds the pipes to its workers closed and waits 5 s for each of them. The finalizer, which comes first
        # and also runs at exit, drops the DataLoader while all is still in place.
        self.loaders: list[DataLoader[Any]] = []  # none or one
        weakref.finalize(self, self.loaders.clear)

    def read(self) -> Iterator[Batch]:
        """Yield (uint8 pixels (N, 3, size, size), labels) of the epoch, augmented."""
        if not self.loaders:
            self.loaders.append(
                DataLoader(
                    FileDataset(self.images, self.size, self.augment),
                    batch_sampler=KeySampler(self.sampler),
                    num_workers=self.workers,
                    persistent_workers=self.workers > 0,
                    pin_memory=torch.cuda.is_available(),
                    generator=torch.Generator(),  # else each epoch draws from the global random state
                )
            )
        try:
            yield from self.loaders[0]
            return
        except QatError as error:  # from a worker it arrives with the worker's traceback as its text
            message = str(error).rpartition("QatError: ")[2].strip()
            error.__traceback__ = None  # it holds on to the workers, which are to stop now
        self.loaders.clear()
        raise QatError(message)


# --- the data module --------------------------------------------------------------------------------------------------


class DataModule(lightning.LightningDataModule):
    """All images of an experiment.

    With a Trainer on a GPU, batches are made on that GPU; otherwise on the CPU.

    Args:
        config: which images, and how they are batched.
        seed: order and augmentation; the division into training, validation and test images does not depend on it.

    Attributes:
        splits: the images; available after `setup()`, like all that follows.
        num_classes, class_names: of the labels 0..num_classes-1.
        train_size, val_size, test_size: numbers of images.
        input_shape: (3, H, W).

    Example:
        >>> data = DataModule(DataConfig(name="digits"), seed=1)
        >>> data.setup()
        >>> images, labels = next(iter(data.train_dataloader()))
        >>> tuple(images.shape), data.num_classes
        ((64, 3, 32, 32), 10)
    """

    splits: Splits

    def __init__(self, config: DataConfig, seed: int = 0) -> None:
        super().__init__()
        self.config, self.seed = config, seed

    def prepare_data(self) -> None:
        """Download what is missing. Lightning calls it in one process per machine, before `setup` in all."""
        download(self.config)

    def setup(self, stage: str | None = None) -> None:
        """Read and divide the images, once, whatever the stage.

        Raises:
            QatError: see `qat.datasets.load_splits`.
        """
        if hasattr(self, "splits"):
            return
        self.splits = splits = load_splits(self.config)
        self.class_names, self.num_classes = splits.class_names, len(splits.class_names)
        self.train_size, self.val_size, self.test_size = len(splits.train), len(splits.val), len(splits.test)
        self.input_shape = (3, self.config.image_size, self.config.image_size)

    def train_dataloader(self) -> Loader:
        """Training images: shuffled and augmented anew each epoch."""
        fixed = getattr(self.trainer, "overfit_batches", 0) > 0  # which asks for the same few batches every time
        sampler = EpochSampler(self.train_size, self.config.batch_size, train=True, seed=self.seed, shuffle=not fixed)
        return self.loader(self.splits.train, sampler, self.config.augment and not fixed)

    def val_dataloader(self) -> Loader:
        """Validation images, in a fixed order."""
        return self.loader(self.splits.val, EpochSampler(self.val_size, self.config.batch_size))

    def test_dataloader(self) -> Loader:
        """Test images, in a fixed order."""
        return self.loader(self.splits.test, EpochSampler(self.test_size, self.config.batch_size))

    def calibration_batches(self, n: int) -> Loader:
        """The first `n` batches of training images (fewer if there are no more), without augmentation.

        The same for every seed, and on every rank, so that all ranks calibrate alike. All classes are in proportion.
        """
        sampler = EpochSampler(
            self.train_size, self.config.batch_size, train=True, shuffle=False, shared=False, batches=n
        )
        return self.loader(self.splits.train, sampler)

    def describe(self) -> str:
        """Say in one line what there is.

        Example:
            >>> data = DataModule(DataConfig(name="digits"))
            >>> data.setup()
            >>> data.describe()
            'digits: 1294 training, 144 validation, 359 test images, 10 classes, 3x32x32, batches of 64'
        """
        sizes = f"{self.train_size} training, {self.val_size} validation, {self.test_size} test images"
        shape = "x".join(str(extent) for extent in self.input_shape)
        return f"{self.config.name}: {sizes}, {self.num_classes} classes, {shape}, batches of {self.config.batch_size}"

    def loader(self, images: Images, sampler: EpochSampler, augment: bool = False) -> Loader:
        """Batch `images` in the sampler's order, on the Trainer's GPU if it has one."""
        device = torch.device("cpu") if self.trainer is None else self.trainer.strategy.root_device
        device = device if device.type == "cuda" else torch.device("cpu")
        config, mean, std = self.config, self.splits.mean, self.splits.std
        if isinstance(images, FileImages):
            return FileLoader(images, sampler, mean, std, config.image_size, augment, config.workers, device)
        transform = augmentation(config.name, config.image_size) if augment else None
        return MemoryLoader(images, sampler, mean, std, config.image_size, transform, device)
