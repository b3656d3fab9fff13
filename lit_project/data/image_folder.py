"""The user's own images, one folder a class."""

import math
import os
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lit_project.data.base import SPLIT_NAMES, ImageDataModule, SplitName
from lit_project.data.batches import Arrays
from lit_project.data.cache import decode_once
from lit_project.data.decode import (
    IMAGE_EXTENSIONS,
    BadImageError,
    Resize,
    describe_bad_images,
    describe_extensions,
    extension,
    find_images,
    image_dimensions,
    is_ignored,
    is_image,
)
from lit_project.errors import InputError
from lit_project.files import user_folder

_LAYOUT = "Expected ROOT/train/CLASS/*.jpg with, optionally, ROOT/val and ROOT/test alike; or just ROOT/CLASS/*.jpg."
# folders of ROOT that are splits, in lower case; where there is none, every folder is a class
_SPLIT_FOLDERS: dict[SplitName, tuple[str, ...]] = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}
# files whose headers are read to find the size that all images share
_SAMPLED = 2000


class _Files(NamedTuple):
    """What one split's folder holds."""

    by_class: dict[str, list[str]]
    #: Files that are not images, by extension.
    others: Counter[str]
    #: Images outside any class folder.
    loose: list[Path]


class _Decoded(NamedTuple):
    """What one split's images are: ``images`` and ``targets`` as in ``Arrays``, and the file of each."""

    images: Tensor
    targets: Tensor
    paths: list[str]


class ImageFolder(ImageDataModule):
    """Images in one folder a class, under ``root/train``, ``root/val`` and ``root/test``, or directly under ``root``.

    Splits without a folder are cut from the training images. The sorted names of the training folders number the
    classes, for all splits. Files and folders that are hidden, or made by an operating system or a network drive, are
    ignored; folders within a class and links are followed. What the pixels of a file are is said in ``decode.py``. A
    folder is decoded once, until one of its files changes; how the result is kept is said in ``cache.py``.

    Args:
        root: the folder, only read from; ``~`` is the home folder.
        image_size: side in pixels, or ``[height, width]``. ``null``: the size they have, if it is the same for all.
        resize: how images of another size are brought to ``image_size``. ``crop``: scaled until they just cover it,
            and cropped at the centre. ``pad``: scaled until they just fit in, with black around them. ``stretch``:
            whatever their proportions.
        grayscale: read one channel instead of three.
        class_names: the classes in order, of which each split has some. ``null``: the training folders. A checkpoint
            brings those it was trained on, so that a ``root`` with a test folder alone can be tested.
        on_bad_image: what to do when images cannot be read: ``error`` stops and lists them, ``skip`` warns, lists them
            and trains without them. Either way they are looked at again each time.
        cache_dir: folder for the decoded images, of which there must be ``height * width * channels`` bytes an image.
            ``null``: ``$LIT_CACHE_DIR``, else ``lit_project/images`` in the user's cache folder.
        **kwargs: see :class:`~lit_project.data.base.ImageDataModule`.
    """

    def __init__(
        self,
        root: str,
        image_size: int | list[int] | None = None,
        resize: Resize = "crop",
        grayscale: bool = False,
        class_names: list[str] | None = None,
        on_bad_image: Literal["error", "skip"] = "error",
        cache_dir: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        sides = [image_size, image_size] if isinstance(image_size, int) else image_size
        if sides is not None and (len(sides) != 2 or min(sides) < 1):
            raise InputError(f"data.image_size is {image_size}: give a side in pixels, or [height, width].")
        if class_names is not None and not 1 < len(class_names) == len(set(class_names)):
            raise InputError(f"data.class_names is {class_names}: give two names or more, each once.")
        self.root = Path(root).expanduser().absolute()
        self.resize: Resize = resize
        self.in_channels = 1 if grayscale else 3
        self.on_bad_image = on_bad_image
        self.cache_dir = user_folder(cache_dir, "LIT_CACHE_DIR", "images")
        self._given_size = sides
        self._given_names = class_names
        # the training images are those before others are cut from them
        self._decoded: dict[SplitName, _Decoded] = {}

    @cached_property
    def class_names(self) -> list[str]:  # type: ignore[override]
        """As given, or the names of the training folders, sorted.

        Raises:
            InputError: ``root`` is not laid out as expected; the message says where.
        """
        found = self._files
        return self._given_names or list(found["train"].by_class)

    @cached_property
    def image_size(self) -> tuple[int, int]:  # type: ignore[override]
        """Height and width: as given, or as a sample of the images has it.

        Raises:
            InputError: no size was given and two images differ.
        """
        if self._given_size is not None:
            return self._given_size[0], self._given_size[1]
        split, files = next(iter(self._files.items()))
        paths = [path for paths in files.by_class.values() for path in paths]
        first: tuple[str, tuple[int, int]] | None = None
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
            raise InputError(f"None of the images sampled in {self._folders[split]} can be read, {path} among them.")
        return first[1]

    @cached_property
    def provided_splits(self) -> set[SplitName]:
        """The splits that have a folder."""
        return set(self._folders)

    def prepare_data(self) -> None:
        """Decode what the stage needs. Lightning has one process a node do this, and the others wait."""
        testing = self.trainer is not None and self.trainer.state.fn == TrainerFn.TESTING
        wanted: list[SplitName] = ["test"] if testing else ["train", "val"]
        for split in wanted:
            self._decode(split if split in self.provided_splits else "train")

    @property
    def is_mapped(self) -> bool:
        return True

    def load(self, split: SplitName) -> Arrays:
        """Map a split's decoded files; decode them if that has not been done."""
        decoded = self._decode(split)
        return Arrays(decoded.images, decoded.targets)

    def paths(self, split: SplitName) -> list[Path]:
        """The file of each image of ``splits[split]``, in the same order. Known after ``setup``."""
        if split in self.provided_splits and split != "train":
            return [Path(path) for path in self._decoded[split].paths]
        train = self._decoded["train"]
        positions = self._cut(train.targets)[split]
        if split == "train" and self._order is not None:
            positions = positions[self._order]
        return [Path(train.paths[position]) for position in positions.tolist()]

    def preprocessing(self) -> dict[str, Any]:
        return super().preprocessing() | {"resize": self.resize}

    def _identity(self, targets: Tensor) -> bytes:
        # their names, too: of the same number of images in each class, the seed may take others
        below = len(str(self._folders["train"]))
        return os.fsencode("\0".join(path[below:] for path in self._decoded["train"].paths))

    def _decode(self, split: SplitName) -> _Decoded:
        if split in self._decoded:
            return self._decoded[split]
        if split not in self._files:
            raise InputError(f"{self.root} has no folder {split}. {_LAYOUT}")
        folder, files = self._folders[split], self._files[split]
        if files.others:
            rank_zero_info(f"{folder}: ignored, since not images: {describe_extensions(files.others)}.")
        if files.loose:
            rank_zero_warn(f"{_some(files.loose)} in no class folder, and ignored.")
        paths = [path for paths in files.by_class.values() for path in paths]
        images, bad = decode_once(folder, paths, self.image_size, self.in_channels, self.resize, self.cache_dir)
        if bad:
            message = describe_bad_images(bad, len(paths))
            if self.on_bad_image == "error" or len(bad) == len(paths):
                raise InputError(
                    f"{message}Repair or delete them, or leave such files out with --data.on_bad_image=skip."
                )
            rank_zero_warn(f"{message}They are left out.")
        labels = torch.tensor([self.class_names.index(name) for name in files.by_class])
        counts = torch.tensor([len(paths) for paths in files.by_class.values()])
        kept = [position for position in range(len(paths)) if position not in bad]
        targets = labels.repeat_interleave(counts)[kept]
        self._decoded[split] = _Decoded(images, targets, [paths[position] for position in kept])
        return self._decoded[split]

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
        if found and "train" not in found and not self._given_names:
            raise InputError(
                f"{self.root} has {' and '.join(path.name for path in found.values())}, but no folder train. {_LAYOUT} "
                f"Should these be classes, put all classes into {self.root / 'train'}. To test a model on them, name "
                f"its classes in order with --data.class_names."
            )
        return found or {"train": self.root}

    @cached_property
    def _files(self) -> dict[SplitName, _Files]:
        found = {split: _scan(folder) for split, folder in self._folders.items()}
        classes = found["train"].by_class if "train" in found else {}
        if len(classes) == 1 and not self._given_names:
            raise InputError(
                f"{self._folders['train']} has one class only, {next(iter(classes))}: there is nothing to tell apart."
            )
        for name, paths in classes.items():
            if not paths:
                folder = self._folders["train"] / name
                others = find_images(folder)[1]
                raise InputError(
                    f"Class {name} has no image: {folder} holds {describe_extensions(others) or 'no file'}. "
                    f"Put images in ({_accepted()}) or delete the folder."
                )
        known = self._given_names or list(classes)
        source = "data.class_names or the checkpoint" if self._given_names else str(self._folders["train"])
        for split, files in found.items():
            if not any(files.by_class.values()):
                raise InputError(
                    f"{self._folders[split]} holds no image: put some in, or delete it and have it cut from train."
                )
            unknown = [str(self._folders[split] / name) for name in files.by_class if name not in known]
            if unknown:
                raise InputError(
                    f"There is no class of the name of {', '.join(unknown)}. The classes, from {source}, are "
                    f"{', '.join(known)}: rename the folder or delete it."
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
