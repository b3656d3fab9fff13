"""From arrays of images to the batches of a loader: gather, shard, shuffle, and start anywhere."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from lit_project.errors import InputError
from lit_project.seeding import IsolatedRandomness, derive_seed, keyed_generator, seed_everywhere

#: What a loader yields: images uint8 ``[B, C, H, W]``, targets int64 ``[B]``, and each image's position in its split.
Batch = tuple[Tensor, Tensor, Tensor]


class Arrays(NamedTuple):
    """One split: ``images`` uint8 ``[M, H, W, C]`` and ``targets`` int64 ``[N]``, values ``0..num_classes - 1``.

    Where an image may have several labels, ``targets`` is int64 ``[N, num_classes]``: 1 for each it has, else 0.
    ``rows``, int64 ``[N]``, says which images belong to it; ``None``: all of them, in order.
    """

    images: Tensor
    targets: Tensor
    rows: Tensor | None = None

    def narrow(self, indices: Tensor) -> "Arrays":
        """The samples at ``indices`` (int64) without touching a pixel."""
        return Arrays(self.images, self.targets[indices], indices if self.rows is None else self.rows[indices])

    def select(self, indices: Tensor) -> "Arrays":
        """The samples at ``indices`` (int64) as a copy."""
        rows = indices if self.rows is None else self.rows[indices]
        return Arrays(self.images[rows], self.targets[indices])

    def every(self, step: int) -> Tensor:
        """Evenly spaced positions, int64: those of every ``step``-th sample, and of each with a step of 0."""
        return torch.arange(0, len(self.targets), max(1, step), device=self.targets.device)

    @property
    def nbytes(self) -> int:
        """Size of the split's pixels."""
        return len(self.targets) * self.images[0].numel()


class BatchDataset(Dataset[Batch]):
    """Serves whole batches of ``arrays``: ``__getitems__`` is one gather, and the result is already channels last.

    Args:
        arrays: the samples.
        transforms: applied to each image, a uint8 tensor ``[C, H, W]``, in turn, with torch's, NumPy's and Python's
            random generators seeded for this image in this epoch.
        seed: the seed of those.
    """

    def __init__(self, arrays: Arrays, transforms: Sequence[Callable[[Tensor], Tensor]] = (), seed: int = 0) -> None:
        self.arrays = arrays
        self.transforms = transforms
        self.seed = seed

    def __len__(self) -> int:
        return len(self.arrays.targets)

    def __getitem__(self, key: int) -> Batch:
        images, targets, indices = self.__getitems__([key])
        return images[0], targets[0], indices[0]

    def __getitems__(self, keys: Sequence[int]) -> Batch:
        """Gather a batch.

        Args:
            keys: ``epoch * len(self) + index`` of each sample: a worker learns the epoch with the batch it is asked
                for, so that it cannot be mistaken about it.
        """
        keyed = torch.as_tensor(keys)
        indices = keyed % len(self)
        images, targets, _ = self.arrays.select(indices.to(self.arrays.targets.device))
        images = images.permute(0, 3, 1, 2)
        if self.transforms:
            epochs = torch.div(keyed, len(self), rounding_mode="floor").tolist()
            with IsolatedRandomness():
                images = torch.stack(
                    [self._transform(*sample) for sample in zip(images, epochs, indices.tolist(), strict=True)]
                ).contiguous(memory_format=torch.channels_last)
        return images, targets, indices

    def _transform(self, image: Tensor, epoch: int, index: int) -> Tensor:
        seed_everywhere(derive_seed(self.seed, epoch, index, 0, 1))
        for transform in self.transforms:
            image = transform(image)
        if not isinstance(image, Tensor) or image.dtype != torch.uint8 or image.ndim != 3:
            found = f"{image.dtype} {list(image.shape)}" if isinstance(image, Tensor) else type(image).__name__
            raise InputError(
                f"data.transforms turn an image into {found}; expected torch.uint8 [C, H, W]. Leave out conversion and "
                "normalisation: they are done for the whole batch, after data.augment."
            )
        return image


def keep_batch(batch: Any) -> Any:
    """``collate_fn`` for a dataset that returns whole batches."""
    return batch


class ShardedSampler(DistributedSampler[Batch]):
    """Deals the samples out to ``world_size`` ranks: shards are disjoint and together complete.

    Yields keys as :class:`BatchDataset` takes them, from the ``start``-th of its shard on. Deriving from
    ``DistributedSampler`` tells Lightning that sharding is done, and has it call ``set_epoch``.
    For training every rank gets the same number of samples, in an order keyed by (seed, epoch). For evaluation nothing
    is padded: a sample counts exactly once, so metrics are those of the whole split (PyTorch's own sampler repeats
    samples to even the shards out). Shards then differ by up to one sample; see :func:`even_batch_size`.
    """

    def __init__(self, dataset: BatchDataset, rank: int, world_size: int, *, train: bool, seed: int = 0) -> None:
        super().__init__(dataset, num_replicas=world_size, rank=rank, shuffle=train, seed=seed, drop_last=train)
        self.size = len(dataset)
        self.start = 0
        if not train:
            self.num_samples = len(range(rank, self.size, world_size))

    def __iter__(self) -> Any:
        if not self.shuffle:
            return iter(range(self.rank, self.size, self.num_replicas))
        order = torch.randperm(self.size, generator=keyed_generator(self.seed, self.epoch))
        shard = order[: self.total_size][self.rank :: self.num_replicas][self.start :]
        return iter((shard + self.epoch * self.size).tolist())


def even_batch_size(batch_size: int, num_samples: int, world_size: int, what: str) -> int:
    """The batch size with which every rank has the same number of batches to evaluate.

    Shards that are not padded differ by up to one sample, and that one must not be a batch of its own: FSDP gathers the
    weights from all ranks in each forward pass, of an evaluation too, and would wait for those that are already done.
    DDP shares its buffers in the first pass alone, so it takes one batch on each rank.

    Args:
        batch_size: the one asked for. It is returned if it will do, else the next smaller that does; where it is a few
            there may be none, and it is the next larger.
        num_samples: number of samples of all ranks together.
        world_size: number of ranks.
        what: what the samples are, for the message.

    Raises:
        InputError: there are fewer samples than ranks.
    """
    if num_samples < world_size:
        raise InputError(
            f"There are only {num_samples} {what} for {world_size} devices, and each needs one. Run on {num_samples} "
            "or fewer, with --trainer.devices and --trainer.num_nodes."
        )
    smallest_shard, remainder = divmod(num_samples, world_size)
    if not remainder:
        return batch_size
    return next(size for size in chain(range(batch_size, 1, -1), count(batch_size + 1)) if smallest_shard % size)


class TrainLoader(DataLoader[Batch]):
    """A ``DataLoader`` that begins where the trainer is, and not before it is asked for the first batch.

    Lightning makes a loader's iterator before it has restored a checkpoint; with workers, the first epoch after a
    resume then repeats epoch 0 (https://github.com/Lightning-AI/pytorch-lightning/issues/21960). Nothing needs to be
    saved for it: the trainer's own progress says how many batches of the epoch are done.

    Args:
        position: says how many batches of the present epoch are done.
        **options: the arguments of ``DataLoader``; ``sampler`` is a :class:`ShardedSampler`.
    """

    def __init__(self, position: Callable[[], int], **options: Any) -> None:
        super().__init__(**options)
        self.position = position

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        # a generator: nothing below runs before the first `next`
        assert self.batch_size is not None
        position = self.position()
        if 0 < len(self) <= position:
            raise InputError(
                f"The run stopped after batch {position} of an epoch that now has {len(self)}: training images were "
                "removed. Put them back, or start a new run without --ckpt_path."
            )
        self.sampler.start = position * self.batch_size  # type: ignore[attr-defined]
        yield from super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Nothing; its presence tells Lightning that the loader can be resumed in mid-epoch."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing, as above."""
