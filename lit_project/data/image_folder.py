"""The user's own images, one folder a class."""

import math
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lit_project.data.base import SPLIT_NAMES, ImageDataModule, SplitName
from lit_project.data.batches import Arrays
from lit_project.data.decode import (
    IMAGE_EXTENSIONS,
    BadImageError,
    decode_all,
    describe_extensions,
    extension,
    find_images,
    image_dimensions,
    is_ignored,
    is_image,
)
from lit_project.errors import InputError

_LAYOUT = "Expected ROOT/train/CLASS/*.jpg with, optionally, ROOT/val and ROOT/test alike; or just ROOT/CLASS/*.jpg."
# folders of ROOT that are splits, in lower case; where there is none, every folder is a class
_SPLIT_FOLDERS: dict[SplitName, tuple[str, ...]] = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}
# files whose headers are read to find the size that all images share
_SAMPLED = 64


class _Files(NamedTuple):
    """What one split's folder holds."""

    by_class: dict[str, list[Path]]
    #: Files that are not images, by extension.
    others: Counter[str]
    #: Images outside any class folder.
    loose: list[Path]


class ImageFolder(ImageDataModule):
    """Images in one folder a class, under ``root/train``, ``root/val`` and ``root/test``, or directly under ``root``.

    Splits without a folder are cut from the training images. The sorted names of the training folders number the
    classes, for all splits. Hidden files and folders are ignored; folders within a class and links are followed. What
    the pixels of a file are is said in ``decode.py``.

    Args:
        root: the folder; ``~`` is the home folder.
        image_size: side in pixels, or ``[height, width]``; images are scaled and cropped at the centre to fit.
            ``null``: the size they have, if it is the same for all.
        grayscale: read one channel instead of three.
        on_bad_image: what to do when images cannot be read: ``error`` stops and lists them, ``skip`` warns, lists them
            and trains without them.
        **kwargs: see :class:`~lit_project.data.base.ImageDataModule`.
    """

    def __init__(
        self,
        root: str,
        image_size: int | list[int] | None = None,
        grayscale: bool = False,
        on_bad_image: Literal["error", "skip"] = "error",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        sides = [image_size, image_size] if isinstance(image_size, int) else image_size
        if sides is not None and (len(sides) != 2 or min(sides) < 1):
            raise InputError(f"data.image_size is {image_size}: give a side in pixels, or [height, width].")
        self.root = Path(root).expanduser().absolute()
        self.in_channels = 1 if grayscale else 3
        self.on_bad_image = on_bad_image
        self._given_size = sides
        # the files that were decoded, in order; the training images before others are cut from them
        self._loaded: dict[SplitName, tuple[list[Path], torch.Tensor]] = {}

    @cached_property
    def class_names(self) -> list[str]:  # type: ignore[override]
        """Names of the training folders, sorted.

        Raises:
            InputError: ``root`` is not laid out as expected; the message says where.
        """
        return list(self._files["train"].by_class)

    @cached_property
    def image_size(self) -> tuple[int, int]:  # type: ignore[override]
        """Height and width: as given, or as a sample of the training images has it.

        Raises:
            InputError: no size was given and two images differ.
        """
        if self._given_size is not None:
            return self._given_size[0], self._given_size[1]
        paths = [path for paths in self._files["train"].by_class.values() for path in paths]
        first: tuple[Path, tuple[int, int]] | None = None
        for path in paths[:: math.ceil(len(paths) / _SAMPLED)]:
            try:
                size = image_dimensions(path)
            except BadImageError:
                continue  # decoding lists all of them
            first = first or (path, size)
            if size != first[1]:
                raise InputError(
                    f"The images differ in size: {first[0]} is {_pixels(first[1])}, {path} is {_pixels(size)}. Give "
                    f"one size for all, such as --data.image_size=64 for the small CNN or --data.image_size=224 for "
                    f"a torchvision network."
                )
        if first is None:
            raise InputError(f"None of the images sampled in {self._folders['train']} can be read, {path} among them.")
        return first[1]

    @cached_property
    def provided_splits(self) -> set[SplitName]:
        """The splits that have a folder."""
        return set(self._folders)

    def load(self, split: SplitName) -> Arrays:
        """Decode a split's files."""
        files = self._files[split]
        if files.others:
            rank_zero_info(f"{self._folders[split]}: ignored, since not images: {describe_extensions(files.others)}.")
        if files.loose:
            rank_zero_warn(f"{_some(files.loose)} in no class folder, and ignored.")
        paths = [path for name in self.class_names for path in files.by_class.get(name, [])]
        counts = torch.tensor([len(files.by_class.get(name, [])) for name in self.class_names])
        images, kept = decode_all(paths, self.image_size, self.in_channels, self.on_bad_image)
        targets = torch.arange(len(counts)).repeat_interleave(counts)[kept]
        self._loaded[split] = [paths[position] for position in kept], targets
        return Arrays(images, targets)

    def paths(self, split: SplitName) -> list[Path]:
        """The file of each image of ``splits[split]``, in the same order. Known after ``setup``."""
        if split in self.provided_splits and split != "train":
            return self._loaded[split][0]
        paths, targets = self._loaded["train"]
        return [paths[position] for position in self._cut(targets)[split].tolist()]

    # ---- what lies in the folders; looked at when first asked for, so that making the object costs nothing

    @cached_property
    def _folders(self) -> dict[SplitName, Path]:
        """The folder of each split; just ``root`` as ``train`` where no folder has a split's name."""
        if not self.root.is_dir():
            raise InputError(f"data.root: there is no folder {self.root}. {_LAYOUT}")
        found: dict[SplitName, Path] = {}
        for split in SPLIT_NAMES:
            folders = [path for path in _subfolders(self.root) if path.name.lower() in _SPLIT_FOLDERS[split]]
            if len(folders) > 1:
                names = " and ".join(path.name for path in folders)
                raise InputError(f"{self.root} has {names}: which is the {split} data? Rename or remove one.")
            if folders:
                found[split] = folders[0]
        if found and "train" not in found:
            raise InputError(
                f"{self.root} has {' and '.join(path.name for path in found.values())}, but no folder train. {_LAYOUT} "
                f"Should these be classes, put all classes into {self.root / 'train'}."
            )
        return found or {"train": self.root}

    @cached_property
    def _files(self) -> dict[SplitName, _Files]:
        found = {split: _scan(folder) for split, folder in self._folders.items()}
        folder, classes = self._folders["train"], found["train"].by_class
        if len(classes) == 1:
            raise InputError(f"{folder} has one class only, {next(iter(classes))}: there is nothing to tell apart.")
        for name, paths in classes.items():
            if not paths:
                others = find_images(folder / name)[1]
                raise InputError(
                    f"Class {name} has no image: {folder / name} holds {describe_extensions(others) or 'no file'}. "
                    f"Put images in ({_accepted()}) or delete the folder."
                )
        for split, files in found.items():
            if not any(files.by_class.values()):
                raise InputError(
                    f"{self._folders[split]} holds no image: put some in, or delete it and have it cut from train."
                )
            unknown = [str(self._folders[split] / name) for name in files.by_class if name not in classes]
            if unknown:
                raise InputError(
                    f"The training data has no class of the name of {', '.join(unknown)}. "
                    f"Its classes, from {folder}, are {', '.join(classes)}: rename the folder or delete it."
                )
        return found


def _scan(folder: Path) -> _Files:
    """Find a split's images by class, classes sorted by name."""
    files = [path for path in folder.iterdir() if path.is_file() and not is_ignored(path)]
    loose = sorted(path for path in files if is_image(path))
    others = Counter(extension(path) for path in files if not is_image(path))
    by_class = {}
    for class_folder in _subfolders(folder):
        by_class[class_folder.name], ignored = find_images(class_folder)
        others += ignored
    if not by_class:
        holds = f"but {_some(loose)} directly in it" if loose else "nor any image"
        raise InputError(
            f"{folder} has no class folder, {holds}. {_LAYOUT} Images of unknown class are for `predict --images`."
        )
    return _Files(by_class, others, loose)


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not is_ignored(path))


def _some(paths: list[Path]) -> str:
    return f"{len(paths):,} images such as {paths[0]} lie" if len(paths) > 1 else f"the image {paths[0]} lies"


def _pixels(size: tuple[int, int]) -> str:
    return f"{size[1]} pixels wide and {size[0]} high"


def _accepted() -> str:
    return ", ".join(sorted(IMAGE_EXTENSIONS))
