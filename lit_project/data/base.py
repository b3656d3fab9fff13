"""The LightningDataModule that every image data set here derives from.

Images are kept as one uint8 array ``[N, H, W, C]``. A batch is one gather from it, still uint8; augmentation and
normalisation run on the whole batch, on the device, in ``on_after_batch_transfer``. A new data set implements
``class_names``, ``image_size``, ``load`` and, where a split is missing, ``provided_splits``; see ``shapes.py`` for the
shortest example.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lit_project.data.augment import BatchTransform, RandomCrop, RandomHorizontalFlip, to_float
from lit_project.errors import InputError
from lit_project.seeding import WorkerSeeder, global_seed, keyed_generator

SplitName = Literal["train", "val", "test"]
SPLIT_NAMES: tuple[SplitName, ...] = ("train", "val", "test")
Batch = tuple[Tensor, Tensor]


class Arrays(NamedTuple):
    """One split: ``images`` uint8 ``[N, H, W, C]`` and ``targets`` int64 ``[N]``, values ``0..num_classes - 1``."""

    images: Tensor
    targets: Tensor

    def select(self, indices: Tensor) -> "Arrays":
        """The rows at ``indices`` (int64), as a copy."""
        return Arrays(self.images[indices], self.targets[indices])


class BatchDataset(Dataset[Batch]):
    """Serves whole batches of ``arrays``: ``__getitems__`` is one gather, and the result is already channels last."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays.targets)

    def __getitem__(self, index: int) -> Batch:
        images, targets = self.__getitems__([index])
        return images[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        images, targets = self.arrays.select(torch.as_tensor(indices))
        return images.permute(0, 3, 1, 2), targets


def keep_batch(batch: Any) -> Any:
    """``collate_fn`` for a dataset that returns whole batches."""
    return batch


class ShardedSampler(DistributedSampler[Batch]):
    """Deals the indices out to ``world_size`` ranks: shards are disjoint and together complete.

    Deriving from ``DistributedSampler`` tells Lightning that sharding is done, and has it call ``set_epoch``.
    For training every rank gets the same number of samples, in an order keyed by (seed, epoch). For evaluation nothing
    is padded: a sample counts exactly once, so metrics are those of the whole split (PyTorch's own sampler repeats
    samples to even the shards out).
    """

    def __init__(self, dataset: BatchDataset, rank: int, world_size: int, *, train: bool, seed: int = 0) -> None:
        super().__init__(dataset, num_replicas=world_size, rank=rank, shuffle=train, seed=seed, drop_last=train)
        self.size = len(dataset)
        if not train:
            self.num_samples = len(range(rank, self.size, world_size))

    def __iter__(self) -> Any:
        if not self.shuffle:
            return iter(range(self.rank, self.size, self.num_replicas))
        order = torch.randperm(self.size, generator=keyed_generator(self.seed, self.epoch))
        return iter(order[: self.total_size][self.rank :: self.num_replicas].tolist())


def stratified_split(targets: Tensor, fractions: Sequence[float], seed: int) -> list[Tensor]:
    """Split indices so that every class is divided in the given proportions.

    Args:
        targets: int64 ``[N]``, the class of each sample.
        fractions: the share of each split but the first, each more than 0, together less than 1.
        seed: the only source of randomness; the same seed gives the same split in every process and stage.

    Returns:
        One sorted int64 index tensor a split, ``len(fractions) + 1`` in all; the first holds what the others leave.
        A class with at least ``len(fractions) + 1`` samples has at least one in each split; a smaller one is whole in
        the first.
    """
    generator = keyed_generator(seed)
    parts: list[list[Tensor]] = [[] for _ in range(len(fractions) + 1)]
    for label in torch.unique(targets):
        members = (targets == label).nonzero().flatten()
        members = members[torch.randperm(len(members), generator=generator)]
        size = len(members) if len(members) > len(fractions) else 0
        for number, fraction in enumerate(fractions, start=1):
            # one sample at least, and one left for each split that is still to come
            count = min(max(round(size * fraction), 1), len(members) - len(fractions) + number - 1) if size else 0
            parts[number].append(members[:count])
            members = members[count:]
        parts[0].append(members)
    return [torch.cat(part).sort().values for part in parts]


def channel_statistics(images: Tensor) -> tuple[list[float], list[float]]:
    """Exact per-channel mean and standard deviation, in 0..1, of uint8 images ``[N, H, W, C]``.

    Counted from 256-bin histograms, so that no float copy of the data is made. A constant channel gets deviation 1.
    """
    values = torch.arange(256, dtype=torch.float64) / 255
    mean, std = [], []
    for channel in images.unbind(-1):
        counts = torch.zeros(256, dtype=torch.float64)
        for chunk in torch.split(channel, 4096):
            counts += torch.bincount(chunk.flatten(), minlength=256)
        weights = counts / counts.sum()
        centre = (weights * values).sum()
        spread = (weights * (values - centre) ** 2).sum().sqrt()
        mean.append(round(centre.item(), 6))
        std.append(round(spread.item(), 6) or 1.0)
    return mean, std


class ImageDataModule(L.LightningDataModule):
    """Base class: splits, seeded loaders, batched augmentation and normalisation.

    Args:
        batch_size: images a step on each device.
        num_workers: loader processes on each device. ``null`` chooses: none while the data lies in memory, since a
            batch is then one gather and handing it to another process costs more than it saves.
        val_fraction: share of the training data held out for each split that the data set does not bring.
        split_seed: seed of that split. Separate from ``seed_everything``, so repeats with other seeds compare on the
            same validation images.
        augment: batch transforms for training, in order. ``null``: random crop with padding 4 and horizontal flip;
            ``[]``: none.
    """

    #: Names of the classes; their order gives each class its index.
    class_names: list[str]
    #: Height and width of the images in pixels.
    image_size: tuple[int, int]
    in_channels: int = 3

    def __init__(
        self,
        batch_size: int = 128,
        num_workers: int | None = None,
        val_fraction: float = 0.1,
        split_seed: int = 0,
        augment: list[BatchTransform] | None = None,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise InputError(f"data.batch_size is {batch_size}: it must be at least 1.")
        if not 0.0 < val_fraction < 1.0:
            raise InputError(f"data.val_fraction is {val_fraction}: it must lie between 0 and 1.")
        if num_workers is not None and num_workers < 0:
            raise InputError(f"data.num_workers is {num_workers}: it must be 0 or more, or null to choose.")
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.val_fraction = val_fraction
        self.split_seed = split_seed
        self.augment = [RandomCrop(4), RandomHorizontalFlip()] if augment is None else augment
        self.splits: dict[SplitName, Arrays] = {}
        self._mean_std: tuple[list[float], list[float]] | None = None
        # the same on the device: copying them anew each step would have the device wait
        self._mean_std_tensors: tuple[Tensor, Tensor] | None = None

    # ---- what a data set implements

    def load(self, split: SplitName) -> Arrays:
        """Return one of ``provided_splits``. Called once a split and only when the stage needs it."""
        raise NotImplementedError

    @property
    def provided_splits(self) -> set[SplitName]:
        """The splits the data set brings; those missing are cut from ``train``, stratified by class."""
        return {"train", "val", "test"}

    # ---- facts about the data, read by the command line to size the model

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def class_counts(self) -> Tensor:
        """Number of training images of each class, int64 ``[num_classes]``. Known after ``setup``."""
        return torch.bincount(self.splits["train"].targets, minlength=self.num_classes)

    def preprocessing(self) -> dict[str, Any]:
        """What is needed to feed another image to the trained model, as plain values for the checkpoint."""
        mean, std = self._statistics()
        return {
            "image_size": list(self.image_size),
            "in_channels": self.in_channels,
            "mean": mean,
            "std": std,
            "class_names": list(self.class_names),
        }

    def use_preprocessing(self, preprocessing: dict[str, Any]) -> None:
        """Normalise as a trained model's ``preprocessing`` says, whatever the statistics of this data."""
        self._mean_std = (preprocessing["mean"], preprocessing["std"])

    def fingerprint(self) -> dict[str, Any]:
        """Number of images and SHA-256 of each loaded split: another data set, decoding, split or order is told by it.

        Of more than 1 GiB of images, evenly spaced ones are looked at.
        """
        found: dict[str, Any] = {}
        for split, (images, targets) in self.splits.items():
            digest = hashlib.sha256(targets.numpy().tobytes())
            for chunk in torch.split(images[:: max(1, math.ceil(images.nbytes / 2**30))], 1024):
                digest.update(chunk.numpy().tobytes())
            found[split] = {"images": len(targets), "sha256": digest.hexdigest()}
        return found

    # ---- Lightning hooks

    def setup(self, stage: str) -> None:
        """Load and split what ``stage`` needs; a second call for the same stage does nothing."""
        wanted: list[SplitName] = ["test"] if stage == "test" else ["train", "val"]
        if all(split in self.splits for split in wanted):
            return
        # training images must never be used whole when a split, wanted now or later, is cut from them
        if self.provided_splits.issuperset(wanted if stage == "test" else SPLIT_NAMES):
            self.splits.update({split: self.load(split) for split in wanted})
        else:
            self._load_and_cut_train(wanted)
        for split in wanted:
            self._report(split)

    def train_dataloader(self) -> DataLoader[Batch]:
        """Shuffled, sharded, without the last short batch."""
        return self._loader("train")

    def val_dataloader(self) -> DataLoader[Batch]:
        """Every validation image once."""
        # overfitting asks whether the model can learn these very batches, so they are also what it is scored on
        return self._loader("train" if self._overfitting else "val")

    def test_dataloader(self) -> DataLoader[Batch]:
        """Every test image once."""
        return self._loader("test")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Augment (training only) and normalise a batch on its device.

        The draws are keyed by (seed, epoch, step, rank), not carried from step to step.
        """
        images, targets = batch
        trainer = self.trainer
        if trainer is not None and trainer.training and not self._overfitting and self.augment:
            # the batch that is being transferred is the one after the last that was started
            step = trainer.fit_loop.batch_idx + 1
            generator = keyed_generator(
                global_seed(), trainer.current_epoch, step, trainer.global_rank, device=images.device
            )
            for transform in self.augment:
                images = transform(images, generator)
        if self._mean_std_tensors is None or self._mean_std_tensors[0].device != images.device:
            mean, std = self._statistics()
            self._mean_std_tensors = torch.tensor(mean, device=images.device), torch.tensor(std, device=images.device)
        return to_float(images, *self._mean_std_tensors), targets

    # ---- internals

    @property
    def _overfitting(self) -> bool:
        return self.trainer is not None and self.trainer.overfit_batches > 0  # type: ignore[attr-defined]

    def _statistics(self) -> tuple[list[float], list[float]]:
        if self._mean_std is None:
            if "train" not in self.splits:
                self.setup("fit")
            self._mean_std = channel_statistics(self.splits["train"].images)
        return self._mean_std

    def _load_and_cut_train(self, wanted: list[SplitName]) -> None:
        """Load what is wanted; cut every split that the data set does not bring from the training data."""
        if "train" not in self.splits:
            train = self.load("train")
            self.splits.update({name: train.select(indices) for name, indices in self._cut(train.targets).items()})
        for name in wanted:
            if name not in self.splits:
                self.splits[name] = self.load(name)

    def _cut(self, targets: Tensor) -> dict[SplitName, Tensor]:
        """Positions in the loaded training data of what stays ``train`` and of each split that is cut from it."""
        missing = [name for name in SPLIT_NAMES if name not in self.provided_splits]
        if self.val_fraction * len(missing) >= 1:
            raise InputError(
                f"data.val_fraction is {self.val_fraction}, and {' and '.join(missing)} are both cut from the training "
                "data: nothing would be left to train on. Choose less than 0.5."
            )
        parts = stratified_split(targets, [self.val_fraction] * len(missing), self.split_seed)
        return dict(zip(["train", *missing], parts, strict=True))

    def _report(self, split: SplitName) -> None:
        counts = torch.bincount(self.splits[split].targets, minlength=self.num_classes)
        if counts.sum() == 0:
            raise InputError(
                f"There is no {split} image: no class has enough images for the {split} data to be cut from them. Add "
                "images, or give folders of their own to the splits."
            )
        absent = [self.class_names[i] for i in (counts == 0).nonzero().flatten().tolist()]
        if absent:
            rank_zero_warn(f"The {split} data has no image of {', '.join(absent)}: these classes keep their index.")
        rank_zero_info(f"{type(self).__name__}: {len(self.splits[split].targets):,} {split} images.")

    def _loader(self, split: SplitName) -> DataLoader[Batch]:
        dataset = BatchDataset(self.splits[split])
        trainer = self.trainer
        rank, world_size = (trainer.global_rank, trainer.world_size) if trainer is not None else (0, 1)
        train = split == "train" and not self._overfitting
        if train and len(dataset) // world_size < self.batch_size:
            raise InputError(
                f"data.batch_size is {self.batch_size}, but there are only {len(dataset)} training images"
                f"{f' for {world_size} devices' if world_size > 1 else ''}: no batch would be full. "
                f"Choose --data.batch_size={max(1, len(dataset) // world_size // 4)} or less."
            )
        sampler: Any = ShardedSampler(dataset, rank, world_size, train=train, seed=global_seed())
        if self._overfitting:
            sampler = SequentialSampler(dataset)
        workers = self.num_workers or 0
        options: dict[str, Any] = {}
        if workers:
            options = {"persistent_workers": True, "worker_init_fn": WorkerSeeder(global_seed(), rank)}
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            sampler=sampler,
            drop_last=train,
            collate_fn=keep_batch,
            num_workers=workers,
            pin_memory=trainer is not None and trainer.strategy.root_device.type == "cuda",
            **options,
        )
