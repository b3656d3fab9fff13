"""Images without labels, prepared as the training images were."""

import glob
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lit_project.data.augment import to_float
from lit_project.data.batches import even_batch_size, keep_batch
from lit_project.data.decode import (
    IMAGE_EXTENSIONS,
    BadImageError,
    Resize,
    describe_extensions,
    extension,
    find_images,
    is_ignored,
    is_image,
    natural_key,
    read_image,
)
from lit_project.errors import InputError
from lit_project.hardware import usable_cpus
from lit_project.seeding import WorkerSeeder, global_seed

#: Images, the position of each in ``paths``, and for each what kept it from being read, or None.
PredictBatch = tuple[Tensor, Tensor, list[str | None]]

# below this, starting workers takes longer than decoding
_WORTH_WORKERS = 256


class _Files(Dataset[PredictBatch]):
    """Decodes whole batches: images uint8 ``[B, C, H, W]``, black where a file cannot be read."""

    def __init__(self, paths: list[Path], size: tuple[int, int], channels: int, resize: Resize) -> None:
        self.paths = paths
        self.size = size
        self.channels = channels
        self.resize: Resize = resize

    def __len__(self) -> int:
        return len(self.paths)

    def __getitems__(self, indices: Sequence[int]) -> PredictBatch:
        images = torch.zeros(len(indices), *self.size, self.channels, dtype=torch.uint8)
        errors: list[str | None] = []
        for row, index in enumerate(indices):
            try:
                images[row] = torch.from_numpy(read_image(self.paths[index], self.size, self.channels, self.resize))
                errors.append(None)
            except BadImageError as error:
                errors.append(error.reason)
        return images.permute(0, 3, 1, 2), torch.as_tensor(indices), errors


class ImagesToPredict(L.LightningDataModule):
    """Serves batches ``(images float32 [B, C, H, W] normalised, positions in ``paths`` int64 [B], errors)``.

    ``errors`` has a string for each image that cannot be read and otherwise ``None``; the image itself is then black,
    so that one broken file does not stop the others.

    Args:
        images: an image file, a folder (with its subfolders), a glob, or a list of these; ``~`` is the home folder.
        preprocessing: what :meth:`~lit_project.data.base.ImageDataModule.preprocessing` returned in training.
        batch_size: images a step on each device.
        num_workers: loader processes on each device. ``None`` chooses by the CPU cores and the number of images.
    """

    def __init__(
        self,
        images: str | list[str],
        preprocessing: dict[str, Any],
        batch_size: int = 128,
        num_workers: int | None = None,
    ) -> None:
        super().__init__()
        self.images = [images] if isinstance(images, str) else images
        self.preprocessing = preprocessing
        self.batch_size = batch_size
        self.num_workers = num_workers

    @cached_property
    def paths(self) -> list[Path]:
        """The files, each once, in natural order: ``2.jpg`` before ``10.jpg``.

        Raises:
            InputError: what was asked for does not exist or holds no image.
        """
        found = {path for pattern in self.images for path in _find(pattern)}
        return sorted(found, key=natural_key)

    def predict_dataloader(self) -> DataLoader[PredictBatch]:
        """Every image once, in order."""
        height, width = self.preprocessing["image_size"]
        resize = self.preprocessing.get("resize", "crop")
        dataset = _Files(self.paths, (height, width), self.preprocessing["in_channels"], resize)
        workers = self.num_workers
        if workers is None:
            workers = min(usable_cpus(), 4) if len(dataset) >= _WORTH_WORKERS else 0
        world_size = self.trainer.world_size if self.trainer is not None else 1
        return DataLoader(
            dataset,
            # Lightning deals the images out to the devices, without padding
            batch_size=even_batch_size(self.batch_size, len(dataset), world_size, "images to predict"),
            collate_fn=keep_batch,
            num_workers=workers,
            worker_init_fn=WorkerSeeder(global_seed(), 0),  # for what it does about signals: nothing is drawn
            pin_memory=self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
        )

    def on_after_batch_transfer(self, batch: PredictBatch, dataloader_idx: int) -> PredictBatch:
        """Normalise on the device, as in training."""
        images, indices, errors = batch
        mean, std = (torch.tensor(self.preprocessing[name], device=images.device) for name in ("mean", "std"))
        return to_float(images, mean, std), indices, errors


def _find(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        found, others = find_images(path)
        if not found:
            raise InputError(f"There is no image in {path.absolute()} or below. {_looked_for(others)}")
        return [Path(image) for image in found]
    if path.exists() or path.is_symlink():
        return [path]  # named by the user, so whatever its extension; and a link to nowhere gets a row with that error
    matches = [Path(match) for match in glob.glob(str(path), recursive=True)]  # noqa: PTH207 - Path.glob takes no absolute pattern
    if not matches:
        raise InputError(f"There is no file, folder or glob match {path.absolute()}.")
    first_magic = next(depth for depth, part in enumerate(path.parts) if glob.has_magic(part))
    matches = [match for match in matches if not any(map(is_ignored, match.parts[first_magic:]))]
    images = [match for match in matches if not match.is_dir() and is_image(match)]
    images += [Path(image) for match in matches if match.is_dir() for image in find_images(match)[0]]
    if not images:
        others = Counter(extension(match) for match in matches if not match.is_dir())
        raise InputError(f"There is no image among what {path.absolute()} matches. {_looked_for(others)}")
    return images


def _looked_for(others: Counter[str]) -> str:
    found = f"Found: {describe_extensions(others)}. " if others else ""
    return f"{found}Accepted are {', '.join(sorted(IMAGE_EXTENSIONS))}."
