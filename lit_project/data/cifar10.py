"""CIFAR-10: 50,000 training and 10,000 test images of 32x32 pixels in ten classes.

torchvision knows the address, the file names, their MD5s and the format. Fetching is done here, because torchvision
downloads straight to the final name: a killed download looks finished, and two processes write over each other.
"""

import shutil
import sys
import tarfile
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import torch
import torchvision
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from rich.console import Console
from rich.progress import wrap_file
from torchvision.datasets.utils import calculate_md5, check_integrity

from lit_project.data.base import ImageDataModule, SplitName
from lit_project.data.batches import Arrays
from lit_project.errors import InputError
from lit_project.files import locked, user_folder

# for connecting, and for each read from a connection: a server that has gone silent must not hold up the run
_TIMEOUT_SECONDS = 20.0


class CIFAR10(ImageDataModule):
    """CIFAR-10, downloaded once. The validation images are cut from the training data; the test data is left alone.

    Args:
        data_dir: folder that holds ``cifar-10-batches-py``; it is downloaded into it if need be, and only read from
            otherwise. ``null``: ``$LIT_DATA_DIR``, else ``lit_project/data`` in the user's cache folder, so that
            starting from another directory does not download a second copy.
        **kwargs: see :class:`~lit_project.data.base.ImageDataModule`.

    Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009,
    https://www.cs.toronto.edu/~kriz/cifar.html
    """

    class_names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    image_size = (32, 32)
    #: Where the data comes from and how it is checked.
    source = torchvision.datasets.CIFAR10

    def __init__(self, data_dir: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.data_dir = user_folder(data_dir, "LIT_DATA_DIR", "data")

    @property
    def provided_splits(self) -> set[SplitName]:
        return {"train", "test"}

    def prepare_data(self) -> None:
        """Download and extract what is missing; with good batches in place, read them and write nothing.

        May be killed at any point and may run in several processes at once.

        Raises:
            InputError: the data cannot be fetched, or ``data_dir`` cannot be used.
        """
        try:
            if not self._bad_batches():
                return
            self.data_dir.mkdir(parents=True, exist_ok=True)
            waiting = f"CIFAR10: waiting for another process that is fetching {self._archive}."
            with locked(Path(f"{self._archive}.lock"), waiting):
                if self._bad_batches():
                    self._fetch_and_extract()
        except OSError as error:
            raise InputError(
                f"CIFAR10: {self.data_dir} cannot be used: {error}. Choose another folder with --data.data_dir or "
                f"$LIT_DATA_DIR."
            ) from error

    def load(self, split: SplitName) -> Arrays:
        """Read a split from the extracted batches."""
        try:
            dataset = self.source(self.data_dir, train=split == "train")
        except RuntimeError as error:
            raise InputError(
                f"CIFAR10: missing or damaged in {self.data_dir / self.source.base_folder}: "
                f"{', '.join(self._bad_batches())}. {self._advice()}"
            ) from error
        return Arrays(torch.from_numpy(np.ascontiguousarray(dataset.data)), torch.tensor(dataset.targets))

    @property
    def _archive(self) -> Path:
        return self.data_dir / self.source.filename

    def _bad_batches(self) -> list[str]:
        """The extracted files that are missing or do not have their MD5."""
        files = [*self.source.train_list, *self.source.test_list]
        files.append([self.source.meta["filename"], self.source.meta["md5"]])
        folder = self.data_dir / self.source.base_folder
        return [name for name, md5 in files if not check_integrity(folder / name, md5)]

    def _fetch_and_extract(self) -> None:
        """Put good batches in place, by way of a scratch folder beside them. Called with the lock held."""
        prefix = f"{self.source.filename}.part-"
        for leftover in self.data_dir.glob(f"{prefix}*"):
            # the lock is ours, so whoever made it is dead
            shutil.rmtree(leftover)
        with TemporaryDirectory(prefix=prefix, dir=self.data_dir) as scratch:
            if not check_integrity(self._archive, self.source.tgz_md5):
                if self._archive.exists():
                    rank_zero_warn(f"CIFAR10: {_describe(self._archive)} is damaged: fetching it again.")
                self._download(Path(scratch) / self.source.filename)
            with tarfile.open(self._archive) as archive:
                archive.extractall(scratch, filter="data")
            folder = self.data_dir / self.source.base_folder
            folder.mkdir(exist_ok=True)
            for file in (Path(scratch) / self.source.base_folder).iterdir():
                file.replace(folder / file.name)

    def _download(self, temporary: Path) -> None:
        """Download the archive to ``temporary`` and move it to its name once its MD5 is right."""
        rank_zero_info(f"CIFAR10: downloading {self.source.url} to {self._archive}.")
        request = Request(self.source.url, headers={"User-Agent": "lit_project"})
        try:
            with urlopen(request, timeout=_TIMEOUT_SECONDS) as response, temporary.open("wb") as file:
                progress = wrap_file(
                    response,
                    total=response.length or 0,
                    description=self.source.filename,
                    console=Console(stderr=True),
                    disable=not sys.stderr.isatty(),
                )
                with progress as stream:
                    shutil.copyfileobj(stream, file)
        except (OSError, HTTPException) as error:
            raise InputError(f"CIFAR10: downloading {self.source.url} failed: {error!r}. {self._advice()}") from error
        if not check_integrity(temporary, self.source.tgz_md5):
            raise InputError(
                f"CIFAR10: {self.source.url} sent something else than {self.source.filename}: "
                f"{_describe(temporary)}. {self._advice()}"
            )
        temporary.replace(self._archive)

    def _advice(self) -> str:
        """What is wrong with the archive on disk, and what to do where there is no network."""
        found = ""
        if self._archive.exists() and not check_integrity(self._archive, self.source.tgz_md5):
            found = f"The archive in place is damaged: {_describe(self._archive)}. "
        return (
            f"{found}Without a network, fetch {self.source.url} (MD5 {self.source.tgz_md5}) elsewhere and put it at "
            f"{self._archive}; or train on the embedded shapes, which need no download: "
            f"`python -m lit_project.cli fit --data Shapes10`."
        )


def _describe(file: Path) -> str:
    return f"{file} ({file.stat().st_size:,} bytes, MD5 {calculate_md5(file)})"
