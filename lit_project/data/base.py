"""The LightningDataModule that every image data set here derives from.

Images are kept as one uint8 array ``[N, H, W, C]``: on the device, in memory, or mapped from disk, as its size allows.
A batch is one gather from it, still uint8 (``batches.py``); augmentation and normalisation run on the whole batch, on
the device, in ``on_after_batch_transfer``. A new data set implements ``class_names``, ``image_size``, ``load`` and,
where a split is missing, ``provided_splits``; see ``shapes.py`` for the shortest example.

Which images a step gets, and how they are augmented, depends on (seed, epoch, step, rank) alone: a run that is resumed
anywhere goes on as if it had never stopped, with any number of workers.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, SequentialSampler
from torchvision.transforms import v2

from lit_project.data.augment import BatchTransform, Draw, RandomCrop, RandomHorizontalFlip, to_float
from lit_project.data.batches import (
    Arrays,
    Batch,
    BatchDataset,
    ShardedSampler,
    TrainLoader,
    even_batch_size,
    keep_batch,
)
from lit_project.errors import InputError
from lit_project.hardware import available_memory, usable_cpus
from lit_project.seeding import (
    IsolatedRandomness,
    WorkerSeeder,
    derive_seed,
    global_seed,
    keyed_generator,
    seed_everywhere,
)

SplitName = Literal["train", "val", "test"]
SPLIT_NAMES: tuple[SplitName, ...] = ("train", "val", "test")
Placement = Literal["auto", "device", "memory", "disk"]

# where neither the user nor the number of images asks for less
_BATCH_SIZE = 128

# pixels that the mean and deviation are taken from: all of CIFAR-10, and of large images enough for three digits
_STATISTICS_PIXELS = 2**26


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
        batch_size: images a step on each device. ``null``: 128, or a quarter of the training images if that is less.
        num_workers: loader processes on each device. ``null`` chooses: none while the data lies in memory, since a
            batch is then one gather and handing it to another process costs more than it saves; up to four where they
            read from disk or apply ``transforms``.
        val_fraction: share of the training data held out for each split that the data set does not bring.
        split_seed: seed of that split. Separate from ``seed_everything``, so repeats with other seeds compare on the
            same validation images.
        augment: batch transforms for training, in order. ``null``: random crop with padding 4 and horizontal flip;
            ``[]``: none.
        transforms: transforms of single images for training, before ``augment``: any of ``torchvision.transforms.v2``
            that returns uint8. They run in the workers, and many times slower than batch transforms.
        mix: ``torchvision.transforms.v2.MixUp`` or ``CutMix``, after all else; of several, each batch gets one.
        placement: where the images are kept. ``auto``: on the device where they fit into a quarter of its free memory,
            else in memory where they fit into half of what is free, else mapped from disk, if the data has a file to
            map.
    """

    #: Names of the classes; their order gives each class its index.
    class_names: list[str]
    #: Height and width of the images in pixels.
    image_size: tuple[int, int]
    in_channels: int = 3

    def __init__(
        self,
        batch_size: int | None = 128,
        num_workers: int | None = None,
        val_fraction: float = 0.1,
        split_seed: int = 0,
        augment: list[BatchTransform] | None = None,
        transforms: list[v2.Transform] | None = None,
        mix: list[v2.Transform] | None = None,
        placement: Placement = "auto",
    ) -> None:
        super().__init__()
        if batch_size is not None and batch_size < 1:
            raise InputError(f"data.batch_size is {batch_size}: it must be at least 1, or null to choose.")
        if not 0.0 < val_fraction < 1.0:
            raise InputError(f"data.val_fraction is {val_fraction}: it must lie between 0 and 1.")
        if num_workers is not None and num_workers < 0:
            raise InputError(f"data.num_workers is {num_workers}: it must be 0 or more, or null to choose.")
        if not all(isinstance(transform, v2.MixUp | v2.CutMix) for transform in mix or []):
            raise InputError("data.mix takes torchvision.transforms.v2.MixUp and CutMix; all else goes to transforms.")
        if placement == "device" and (num_workers or transforms):
            raise InputError(
                "data.placement=device leaves nothing to do for workers: drop data.num_workers and data.transforms, or "
                "choose data.placement=memory."
            )
        self.batch_size = batch_size
        self._batch_size_before: int | None = None
        self.num_workers = num_workers
        self.val_fraction = val_fraction
        self.split_seed = split_seed
        self.augment = [RandomCrop(4), RandomHorizontalFlip()] if augment is None else augment
        self.transforms = transforms or []
        self.mix = mix or []
        self.placement = placement
        self.splits: dict[SplitName, Arrays] = {}
        self._placements: dict[SplitName, Placement] = {}
        # while overfitting, where each training image was before they were shuffled
        self._order: Tensor | None = None
        #: Positions, int64 [B], of the images of the present batch in their split.
        self.batch_indices: Tensor | None = None
        self._mean_std: tuple[list[float], list[float]] | None = None
        # how splits were cut from the training images, here and for a trained model; None where none was
        self._split: dict[str, Any] | None = None
        self._trained: dict[str, Any] = {}
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

    @property
    def is_mapped(self) -> bool:
        """Whether ``load`` returns images that are mapped from a file and so take no memory of their own."""
        return False

    # ---- facts about the data, read by the command line to size the model

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def class_counts(self) -> Tensor:
        """Number of training images of each class, int64 ``[num_classes]``. Known after ``setup``."""
        return self._counts("train")

    def sample_images(self, count: int) -> Tensor:
        """About ``count`` training images spread evenly, normalised: float32 ``[N, C, H, W]``."""
        train = self.splits["train"]
        sample = train.select(train.every(len(train.targets) // count))
        return self._normalise(sample.images.permute(0, 3, 1, 2))

    def preprocessing(self) -> dict[str, Any]:
        """What is needed to feed another image to the trained model, as plain values for the checkpoint.

        Also ``split``: how splits were cut from the training images, by which later data can tell whether its own test
        images may have been trained on; None if none was cut.
        """
        mean, std = self._statistics()
        return {
            "image_size": list(self.image_size),
            "in_channels": self.in_channels,
            "mean": mean,
            "std": std,
            "class_names": list(self.class_names),
            "split": self._split,
        }

    def use_preprocessing(self, preprocessing: dict[str, Any]) -> None:
        """Normalise as a trained model's ``preprocessing`` says, whatever the statistics of this data.

        Validation and test then warn of what else differs from it: of images that are prepared in another way, and of
        splits that are cut in another way from the training images.
        """
        self._mean_std = (preprocessing["mean"], preprocessing["std"])
        self._trained = preprocessing

    def fingerprint(self) -> dict[str, Any]:
        """Number of images and SHA-256 of each loaded split: another data set, decoding, split or order is told by it.

        Of more than 1 GiB of images, evenly spaced ones are looked at.
        """
        found: dict[str, Any] = {}
        for split, arrays in self.splits.items():
            digest = hashlib.sha256(arrays.targets.cpu().numpy().data)
            for indices in torch.split(arrays.every(math.ceil(arrays.nbytes / 2**30)), 1024):
                digest.update(arrays.select(indices).images.cpu().numpy().data)
            found[split] = {"images": len(arrays.targets), "sha256": digest.hexdigest()}
        return found

    # ---- Lightning hooks

    def state_dict(self) -> dict[str, Any]:
        """The batch size, for a run that goes on when there are more images: it counts its progress in batches."""
        return {"batch_size": self.batch_size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember the batch size of the checkpoint, for when the config leaves it open."""
        self._batch_size_before = state_dict.get("batch_size")

    def setup(self, stage: str) -> None:
        """Load and split what ``stage`` needs; a second call for the same stage does nothing."""
        wanted: list[SplitName] = ["test"] if stage == "test" else ["train", "val"]
        if all(split in self.splits for split in wanted):
            return
        before = set(self.splits)
        # training images must never be used whole when a split, wanted now or later, is cut from them
        if self.provided_splits.issuperset(wanted if stage == "test" else SPLIT_NAMES):
            self.splits.update({split: self.load(split) for split in wanted})
        else:
            self._load_and_cut_train(wanted)
        new = [split for split in self.splits if split not in before]
        placement, reason = self._placement(sum(self.splits[split].nbytes for split in new))
        for split in new:
            self.splits[split] = self._placed(self.splits[split], placement)
            if split == "train" and self._overfitting:  # a few batches of sorted data would be of one class
                arrays = self.splits[split]
                self._order = torch.randperm(len(arrays.targets), generator=keyed_generator(global_seed(), 0))
                self.splits[split] = arrays.narrow(self._order.to(arrays.targets.device))
            self._placements[split] = placement
            if split in wanted:
                self._report(split, f"{placement} ({reason})")
        if stage in ("validate", "test"):
            self._compare_with_training("val" if stage == "validate" else "test")

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
        """Augment (training only) and normalise a batch on its device: what the model gets is (images, targets).

        The draws are keyed by (seed, epoch, step, rank), not carried from step to step.
        """
        images, targets, self.batch_indices = batch
        trainer = self.trainer
        if trainer is None or not trainer.training or self._overfitting:
            return self._normalise(images), targets
        # the batch that is being transferred is the one after the last that was started
        key = (global_seed(), trainer.current_epoch, trainer.fit_loop.batch_idx + 1, trainer.global_rank)
        if self.augment:
            draw = Draw(keyed_generator(*key, device=images.device), trainer.current_epoch, self.batch_indices)
            for transform in self.augment:
                images = transform(images, draw)
        images = self._normalise(images)
        if self.mix:
            with IsolatedRandomness():  # torchvision draws from the global generators
                seed_everywhere(derive_seed(*key, 2))
                mix = self.mix[int(torch.randint(len(self.mix), ()))]
                images, targets = mix(images, F.one_hot(targets, self.num_classes).float())
        return images, targets

    # ---- internals

    def _normalise(self, images: Tensor) -> Tensor:
        if self._mean_std_tensors is None or self._mean_std_tensors[0].device != images.device:
            mean, std = self._statistics()
            self._mean_std_tensors = torch.tensor(mean, device=images.device), torch.tensor(std, device=images.device)
        return to_float(images, *self._mean_std_tensors)

    @property
    def _overfitting(self) -> bool:
        return self.trainer is not None and self.trainer.overfit_batches > 0  # type: ignore[attr-defined]

    def _statistics(self) -> tuple[list[float], list[float]]:
        if self._mean_std is None:
            if "train" not in self.splits:
                self.setup("fit")
            train = self.splits["train"]
            # beyond that many pixels every k-th image will do: large data need not be read whole before the first step
            step = train.nbytes // self.in_channels // _STATISTICS_PIXELS
            sample = train.images if train.rows is None and step <= 1 else train.select(train.every(step)).images
            self._mean_std = channel_statistics(sample.cpu())
        return self._mean_std

    def _placement(self, size: int) -> tuple[Placement, str]:
        """Where ``size`` bytes of images are to be kept, and why."""
        device = self.trainer.strategy.root_device if self.trainer is not None else torch.device("cpu")
        if self.placement != "auto":
            if self.placement == "disk" and not self.is_mapped:
                raise InputError(f"data.placement is disk, but {type(self).__name__} has no file to map.")
            return self.placement, "as configured"
        shown = f"{size / 2**20:,.0f} MiB"
        if device.type == "cuda" and not self.num_workers and not self.transforms:
            free = torch.cuda.mem_get_info(device)[0]
            if size <= free / 4:
                return "device", f"{shown} fit into a quarter of the {free / 2**30:.1f} GiB free on {device}"
        if not self.is_mapped:
            return "memory", shown
        free_memory = available_memory()
        # each process on this machine keeps its own copy, and mapped pages are shared
        copies = self.trainer.num_devices if self.trainer is not None else 1
        if free_memory is None or size * copies <= free_memory / 2:
            return "memory", f"{shown} fit into half of what is free"
        return "disk", f"{copies} times {shown} do not fit into half of the {free_memory / 2**30:.1f} GiB free"

    def _placed(self, arrays: Arrays, placement: Placement) -> Arrays:
        if placement == "disk":
            return arrays
        device = self.trainer.strategy.root_device if placement == "device" and self.trainer is not None else "cpu"
        images = arrays.images if arrays.rows is None else arrays.images[arrays.rows]
        if self.is_mapped and arrays.rows is None and str(device) == "cpu":
            images = images.clone()
        return Arrays(images.to(device), arrays.targets.to(device))

    def _load_and_cut_train(self, wanted: list[SplitName]) -> None:
        """Load what is wanted; cut every split that the data set does not bring from the training data."""
        if "train" not in self.splits:
            train = self.load("train")
            self._split = {
                "cut": [name for name in SPLIT_NAMES if name not in self.provided_splits],
                "val_fraction": self.val_fraction,
                "split_seed": self.split_seed,
                "images": len(train.targets),
                "sha256": hashlib.sha256(self._identity(train.targets)).hexdigest(),
            }
            self.splits.update({name: train.narrow(indices) for name, indices in self._cut(train.targets).items()})
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
        if targets.ndim == 2:  # each set of labels counts as a class
            targets = torch.unique(targets, dim=0, return_inverse=True)[1]
        parts = stratified_split(targets, [self.val_fraction] * len(missing), self.split_seed)
        return dict(zip(["train", *missing], parts, strict=True))

    def _identity(self, targets: Tensor) -> bytes:
        """What tells the images that splits are cut from, with these ``targets``, from others: decides on the cut."""
        return targets.cpu().numpy().tobytes()

    def _compare_with_training(self, split: SplitName) -> None:
        """Warn of what makes the score of a trained model another one than is meant: see ``use_preprocessing``."""
        if not (trained := self._trained):
            return
        own = self.preprocessing()
        prepared = sorted((own.keys() & trained.keys()) - {"mean", "std", "class_names", "split"})
        if differing := [_difference(name, own, trained) for name in prepared if own[name] != trained[name]]:
            rank_zero_warn(
                f"The {split} images are prepared otherwise than the training images were: {'; '.join(differing)}. "
                "Leave that option or config out, and the checkpoint brings its own."
            )
        now = self._split
        if now is None or split in self.provided_splits or now == trained.get("split", now):
            return
        before: dict[str, Any] = {"cut": []} | (trained["split"] or {})
        settings = [name for name in ("val_fraction", "split_seed") if now[name] != before.get(name, now[name])]
        differing = [_difference(name, now, before) for name in settings]
        if now["cut"] != before["cut"]:
            cut, was_cut = (" and ".join(part["cut"]) or "nothing" for part in (now, before))
            differing.append(f"cut off is {cut}, in training {was_cut}")
        elif now["sha256"] != before["sha256"]:
            differing.append(f"they are cut from {now['images']:,} images, in training {before['images']:,} others")
        rank_zero_warn(
            f"The {split} images are cut from the training images, and not as in training, so the model may have been "
            f"trained on some of them and score too well: {'; '.join(differing)}. Leave such options and configs out "
            "(the checkpoint brings its own) and the images as they were, or give the "
            f"{split} images a place of their own, with none that was trained on."
        )

    def _counts(self, split: SplitName) -> Tensor:
        targets = self.splits[split].targets
        return targets.sum(0) if targets.ndim == 2 else torch.bincount(targets, minlength=self.num_classes)

    def _report(self, split: SplitName, where: str) -> None:
        counts = self._counts(split).cpu()
        if counts.sum() == 0:
            raise InputError(
                f"There is no {split} image: no class has enough images for the {split} data to be cut from them. Add "
                "images, or give folders of their own to the splits."
            )
        absent = [self.class_names[i] for i in (counts == 0).nonzero().flatten().tolist()]
        if absent:
            rank_zero_warn(f"The {split} data has no image of {', '.join(absent)}: these classes keep their index.")
        rank_zero_info(f"{type(self).__name__}: {len(self.splits[split].targets):,} {split} images, kept in: {where}.")

    def _loader(self, split: SplitName) -> DataLoader[Batch]:
        trainer = self.trainer
        rank, world_size = (trainer.global_rank, trainer.world_size) if trainer is not None else (0, 1)
        arrays = self.splits[split]
        train = split == "train" and not self._overfitting
        if self.batch_size is None:
            count = len(self.splits["train"].targets) // world_size if "train" in self.splits else 4 * _BATCH_SIZE
            self.batch_size = min(_BATCH_SIZE, max(1, count // 4))
            before = self._batch_size_before or self.batch_size
            if self.batch_size != before <= count:
                self.batch_size = before
                rank_zero_info(f"data.batch_size: {before}, as before.")
            elif self.batch_size < _BATCH_SIZE:
                rank_zero_info(f"data.batch_size: {self.batch_size}, as there are only {count} training images.")
        dataset = BatchDataset(arrays, self.transforms if train else (), global_seed())
        if train and len(dataset) // world_size < self.batch_size:
            raise InputError(
                f"data.batch_size is {self.batch_size}, but there are only {len(dataset)} training images"
                f"{f' for {world_size} devices' if world_size > 1 else ''}: no batch would be full. "
                f"Choose --data.batch_size={max(1, len(dataset) // world_size // 4)} or less."
            )
        batch_size = self.batch_size
        sampler: Any = ShardedSampler(dataset, rank, world_size, train=train, seed=global_seed())
        if self._overfitting:
            sampler = SequentialSampler(dataset)
        elif not train:
            batch_size = even_batch_size(batch_size, len(dataset), world_size, f"{split} images")
        workers = self.num_workers
        if workers is None:
            worth_it = self._placements.get(split) == "disk" or dataset.transforms
            workers = min(usable_cpus(), 4) if worth_it else 0
        on_device = arrays.images.device.type != "cpu"
        options: dict[str, Any] = {
            "dataset": dataset,
            "batch_size": batch_size,
            "sampler": sampler,
            "drop_last": train,
            "collate_fn": keep_batch,
            "generator": keyed_generator(global_seed()),  # or each iterator would draw from the global one
            "num_workers": workers,
            "pin_memory": trainer is not None and trainer.strategy.root_device.type == "cuda" and not on_device,
        }
        if workers:
            options |= {"persistent_workers": True, "worker_init_fn": WorkerSeeder(global_seed(), rank)}
        if train and trainer is not None:
            return TrainLoader(lambda: trainer.fit_loop.epoch_loop.batch_progress.current.ready, **options)
        return DataLoader(**options)


def _difference(name: str, now: dict[str, Any], before: dict[str, Any]) -> str:
    return f"data.{name} is {now[name]}, in training {before[name]}"
