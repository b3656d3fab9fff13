"""Decoded images on disk: a folder is decoded once, and every later run and every other process maps the same file.

Below the cache folder lies:

    train-5c0e19d2a7b3f846/                a folder of images: its name, and a digest of its full path
        lock                               held while decoding
        91f2…-32x32x3-crop.decoded/        a digest of the files in it, and how they were decoded
            images.bin                     uint8 [N, H, W, C], nothing else
            index.json                     its shape, and the positions of the files that cannot be read
        ….decoding/                        being written, or left by a process that was killed

An entry gets its name once it is complete and on the disk, so whatever has a name can be used. Each time that something
is decoded, what is of no more use is deleted: entries of the same folder from before its files changed, what a killed
process left, and every entry that no run has opened for 30 days. Other sizes of the same images stay. Deleting any of
it by hand costs the time to decode it again, nothing else.
"""

import hashlib
import json
import math
import mmap
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from lit_project.data.decode import BadImageError, Pixels, Resize, decode_in_order, read_image
from lit_project.errors import InputError
from lit_project.files import locked

#: Images uint8 ``[N, H, W, C]``; and what is wrong with each file that is not among them, by its position.
Decoded = tuple[Tensor, dict[int, BadImageError]]

# to be raised whenever decode.py makes other pixels of the same file
_VERSION = 2
_UNUSED_SECONDS = 30 * 24 * 3600
# where there is no terminal for a progress bar
_SECONDS_BETWEEN_LINES = 10
# lets a mapping be larger than the memory; not every Python has a name for it
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def decode_once(
    folder: Path, paths: Sequence[str], size: tuple[int, int], channels: int, resize: Resize, cache_dir: Path
) -> Decoded:
    """Decode the files of a folder, or map what an earlier run or another process made of them.

    That is used as long as every file has the name, size and modification time it had. Files that could not be read
    are tried again each time. Of several processes one decodes, the others wait for it.

    Args:
        folder: the folder that all of ``paths`` lie in, at any depth; only read from.
        paths: the files.
        size: height and width of every image.
        channels: 3 for RGB, 1 for greyscale.
        resize: how images of another size are brought to ``size``, see :data:`~lit_project.data.decode.Resize`.
        cache_dir: where to keep the result; made if need be. Machines that share it must see the same files in
            ``folder``, or each will delete what the other made.

    Returns:
        The images that can be read, in the order of ``paths``. The tensor is a mapping of the file: a page is read
        when an image on it is first used, and is in memory once for all processes. What is written to it is seen by
        this process only.

    Raises:
        InputError: ``cache_dir`` cannot be written, or its disk has too little room.
    """
    read = partial(read_image, size=size, channels=channels, resize=resize)
    shape = (*size, channels)
    real = folder.resolve()
    home = cache_dir / f"{real.name}-{_digest(str(real))}"
    entry = home / f"{_digest(_listing(folder, paths))}-{'x'.join(map(str, shape))}-{resize}.decoded"
    found = _open(entry, paths, shape, read)
    if found is not None:
        return found
    try:
        home.mkdir(parents=True, exist_ok=True)
        with locked(home / "lock", f"Waiting for another process that is decoding the images of {folder}."):
            return _open(entry, paths, shape, read) or _build(entry, folder, paths, shape, read)
    except OSError as error:
        raise InputError(
            f"The decoded images of {folder} cannot be kept in {cache_dir}: {error.strerror or error}. Choose another "
            f"folder with --data.cache_dir or $LIT_CACHE_DIR."
        ) from error


def _digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:16]


def _listing(folder: Path, paths: Sequence[str]) -> str:
    """Names, sizes and times: what cannot stay the same when an image changes."""
    lines = [f"version {_VERSION}"]
    below = len(str(folder))
    for path in paths:
        try:
            status = os.stat(path)  # noqa: PTH116 - tens of thousands of them at every start
            lines.append(f"{path[below:]}\0{status.st_size}\0{status.st_mtime_ns}")
        except OSError:
            lines.append(path[below:])  # a link to nowhere
    return "\n".join(lines)


def _open(entry: Path, paths: Sequence[str], shape: tuple[int, ...], read: Callable[[str], Pixels]) -> Decoded | None:
    """What ``entry`` holds; None if it is missing or damaged, or if a file it lacks can be read by now."""
    bad = {}
    try:
        index = json.loads((entry / "index.json").read_text())
        for position in index["bad"]:
            try:
                read(paths[position])
            except BadImageError as error:
                bad[position] = error
            else:
                return None  # neither size nor time tells that permission was given
        if index["shape"] != [len(paths) - len(bad), *shape]:
            return None
        images = map_images(entry / "images.bin", index["shape"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
    with suppress(OSError):  # another user's entry can be used, not changed
        os.utime(entry)
    return images, bad


def _build(
    entry: Path, folder: Path, paths: Sequence[str], shape: tuple[int, ...], read: Callable[[str], Pixels]
) -> Decoded:
    """Decode all files and make ``entry`` of them. Called with the lock held."""
    _remove_outdated(entry)
    needed, free = len(paths) * math.prod(shape), shutil.disk_usage(entry.parent).free
    if needed > free:
        raise InputError(
            f"Decoded to {shape[0]}x{shape[1]} pixels, the {len(paths):,} images of {folder} take {needed / 2**30:.1f} "
            f"GiB, but only {free / 2**30:.1f} GiB are free in {entry.parent}. Make room, choose another folder with "
            f"--data.cache_dir or $LIT_CACHE_DIR, or lower --data.image_size."
        )
    rank_zero_info(f"Decoding the {len(paths):,} images of {folder}, once: they are kept in {entry}.")
    bad: dict[int, BadImageError] = {}
    with TemporaryDirectory(suffix=".decoding", prefix="", dir=entry.parent) as scratch:
        new = Path(scratch, "new")  # a folder of its own, as the outer one is private to this user
        new.mkdir()
        with (new / "images.bin").open("wb") as file:
            for images, errors in _with_progress(decode_in_order(paths, read), len(paths)):
                for image in images:
                    file.write(image.data)
                bad.update(errors)
            file.flush()
            os.fsync(file.fileno())
        if len(bad) == len(paths):
            return torch.empty(0, *shape, dtype=torch.uint8), bad
        kept = [len(paths) - len(bad), *shape]
        index = {"shape": kept, "bad": sorted(bad), "folder": str(folder)}
        with (new / "index.json").open("wb") as file:
            file.write(json.dumps(index).encode())
            file.flush()
            os.fsync(file.fileno())
        new.rename(entry)
    return map_images(entry / "images.bin", kept), bad


class MappedImages(Tensor):
    """Images over a whole file, which are pickled as its name: a worker that is spawned maps it again.

    A plain tensor would be handed to it with all its data, that is as a copy of the file in memory.
    """

    path: Path
    # what is computed from it is a plain tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return map_images, (self.path, tuple(self.shape))

    def __deepcopy__(self, memo: dict[int, Any]) -> "MappedImages":
        return map_images(self.path, self.shape)


def map_images(path: Path, shape: Sequence[int]) -> MappedImages:
    """A uint8 tensor of ``shape`` over a file, copied where it is written to.

    Neither ``torch.from_file`` nor ``numpy.memmap`` will do: Linux refuses them a file that is larger than the memory,
    as they have it reserve what a complete copy would take.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has another number of bytes.
    """
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size != math.prod(shape):
            raise ValueError(f"{path} is damaged")
        if sys.platform == "linux":
            flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
            mapping = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        else:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    images = torch.frombuffer(mapping, dtype=torch.uint8).view(*shape).as_subclass(MappedImages)
    images.path = path
    return images


def _remove_outdated(entry: Path) -> None:
    """Delete what the top of this file says. What cannot be deleted stays until the next time."""
    home, content = entry.parent, entry.name.split("-")[0]
    for old in [*home.glob("*.decoded"), *home.glob("*.decoding")]:
        # the lock is ours: who was writing is dead; and what has the entry's own name is damaged
        if not old.name.startswith(content) or old == entry:
            shutil.rmtree(old, ignore_errors=True)
    for old in [*home.parent.glob("*/*.decoded"), *home.parent.glob("*/*.decoding")]:
        with suppress(OSError):  # another process may be faster
            if time.time() - old.stat().st_mtime > _UNUSED_SECONDS:
                shutil.rmtree(old, ignore_errors=True)


def _with_progress(
    chunks: Iterable[tuple[list[Pixels], dict[int, BadImageError]]], total: int
) -> Iterator[tuple[list[Pixels], dict[int, BadImageError]]]:
    """Hand chunks through and show how far they are: with a bar, or without a terminal a line now and then."""
    terminal = sys.stderr.isatty()
    done, said = 0, time.monotonic()
    with Progress(console=Console(stderr=True), transient=True, disable=not terminal) as progress:
        task = progress.add_task("Decoding images", total=total)
        for images, bad in chunks:
            yield images, bad
            done += len(images) + len(bad)
            progress.update(task, completed=done)
            if not terminal and time.monotonic() - said > _SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                rank_zero_info(f"Decoded {done:,} of {total:,} images.")
