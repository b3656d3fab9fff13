"""Image files to uint8 arrays: the one place that decides what the pixels of a file are.

Training, prediction and serving all read through :func:`read_image`, so a file is the same image everywhere:

* EXIF rotation is applied;
* transparent pixels show white;
* 16-bit and floating-point greyscale are scaled to 8 bits, not cut off at 255;
* of an animation, the first frame counts.

A file that ends too early is never half an image, also where it was closed again as a whole JPEG. What cannot be told
from an image is a JPEG with other bytes in its middle, such as a block of zeros that a disk put there: some of those
decode without an error, to wrong pixels from there on.
"""

import io
import os
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from lit_project.errors import InputError
from lit_project.hardware import usable_cpus

Pixels = NDArray[np.uint8]
#: How an image gets a given size. ``crop``: scaled until it just covers it, and what stands out is cut off evenly on
#: both sides. ``pad``: scaled until it just fits in, black around it. ``stretch``: its proportions change.
Resize = Literal["crop", "pad", "stretch"]

# those users have, among all that Pillow reads; a Pillow built without a library lacks its format
_COMMON = {".avif", ".bmp", ".gif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg"}
_COMMON |= {".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"}
_FORMATS = {extension: name for extension, name in Image.registered_extensions().items() if extension in _COMMON}
#: File name endings that are read as images, in lower case; case does not matter.
IMAGE_EXTENSIONS = frozenset(_FORMATS)
# the only formats tried, whatever a file is called: in turn, so the frequent ones first
_TRIED = sorted({*_FORMATS.values()}, key=lambda name: (name not in ("JPEG", "PNG"), name))

# left behind by macOS, Windows, Linux, and network drives of Synology and QNAP; in lower case
_JUNK = frozenset({"__macosx", "thumbs.db", "desktop.ini", "$recycle.bin", "system volume information", "lost+found"})
_JUNK |= {"@eadir", "#recycle", "#snapshot", "@recycle", "@__thumb"}
# goes on after the data of a JPEG as if there were more of its blocks; without the byte that begins a marker
_MORE_BLOCKS = bytes(range(1, 255))
# how many files one message names
_MAX_LISTED = 20
# files a thread decodes before it hands them over
_CHUNK = 16


class BadImageError(InputError):
    """An image file that cannot be read; the message has its full path and the reason."""

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        super().__init__(f"{Path(path).absolute()}: {reason}")
        self.reason = reason


def is_ignored(path: str | os.PathLike[str]) -> bool:
    """Whether a file or folder is by its own name none of the user's: hidden, or made by an operating system."""
    name = os.path.basename(path)  # noqa: PTH119 - called for every file there is, and several times faster
    return name.startswith(".") or name.lower() in _JUNK


def is_image(path: str | os.PathLike[str]) -> bool:
    """Whether a file has one of ``IMAGE_EXTENSIONS`` and is not ignored."""
    return os.path.splitext(path)[1].lower() in IMAGE_EXTENSIONS and not is_ignored(path)  # noqa: PTH122 - as above


def find_images(folder: str | os.PathLike[str]) -> tuple[list[str], Counter[str]]:
    """Walk a folder, through links and all levels.

    Returns:
        The paths of the image files, sorted, and how many files with each other extension were passed over. Ignored
        files and folders (see :func:`is_ignored`) are in neither. The paths are strings, since making a ``Path`` of
        each takes longer than finding them.

    Raises:
        InputError: a folder cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise InputError(f"The folder {error.filename} cannot be listed: {error.strerror}.")

    images: list[str] = []
    others: Counter[str] = Counter()
    visited: set[str] = set()
    for parent, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(parent)
        if real in visited:
            folders.clear()  # a link to a folder above itself would never end
            continue
        visited.add(real)
        folders[:] = [name for name in folders if not is_ignored(name)]
        for name in files:
            if is_image(name):
                images.append(os.path.join(parent, name))  # noqa: PTH118 - as above
            elif not is_ignored(name):
                others[extension(name)] += 1
    return sorted(images), others


def extension(path: str | os.PathLike[str]) -> str:
    """A file's extension in lower case, for messages."""
    return Path(path).suffix.lower() or "no extension"


def natural_key(path: str | os.PathLike[str]) -> tuple[list[str | int], str]:
    """Sort key that compares the numbers in a path as numbers."""
    parts: list[str | int] = list(re.split(r"(\d+)", str(path)))
    parts[1::2] = [int(digits) for digits in parts[1::2]]
    return parts, str(path)


def describe_extensions(counts: Counter[str]) -> str:
    """``5 .txt, 2 .heic``: the most frequent first."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.most_common())


def image_dimensions(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Height and width of an image as it will be decoded, from its header alone.

    Raises:
        BadImageError: the header cannot be read.
    """
    try:
        with Image.open(path, formats=_TRIED) as image:
            width, height = image.size
            # Pillow has already turned a TIFF's size, and looks for a PNG's EXIF data behind all of its pixels
            if image.format != "TIFF" and (image.format != "PNG" or "exif" in image.info):
                orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
                if orientation in (5, 6, 7, 8):
                    width, height = height, width
            return height, width
    except Exception as error:
        raise BadImageError(path, _reason(path, error)) from error


def read_image(
    path: str | os.PathLike[str], size: tuple[int, int] | None = None, channels: int = 3, resize: Resize = "crop"
) -> Pixels:
    """Decode one image file.

    Args:
        path: the file.
        size: height and width; scaling to them is antialiased. ``None`` leaves the image as large as it is.
        channels: 3 for RGB, 1 for greyscale.
        resize: how an image of another size is brought to ``size``, see :data:`Resize`.

    Returns:
        uint8 ``[H, W, channels]``.

    Raises:
        BadImageError: the file cannot be read, for whatever reason; a file that is cut short is never half an image.
    """
    try:
        with Image.open(path, formats=_TRIED) as image:
            if image.format == "JPEG":
                # a photo many times too large is decoded at a fraction of its size, still twice what is needed
                enough = (2 * max(size), 2 * max(size)) if size is not None else image.size
                image.draft(None, enough)
                if _ends_early(path, image, enough):
                    raise OSError("truncated before its last pixels")
            ImageOps.exif_transpose(image, in_place=True)
            picture = _to_mode(image, "RGB" if channels == 3 else "L")
            if size is not None and picture.size != (size[1], size[0]):
                picture = _resize(picture, *size, resize)
            return np.array(picture).reshape(picture.height, picture.width, channels)
    except Exception as error:  # damaged files make Pillow raise nearly anything
        raise BadImageError(path, _reason(path, error)) from error


def decode_in_order(
    paths: Sequence[str], read: Callable[[str], Pixels]
) -> Iterator[tuple[list[Pixels], dict[int, BadImageError]]]:
    """Decode many files, in parallel, and hand them over a few at a time, so that they are never all in memory.

    Args:
        paths: the files.
        read: decodes one, such as :func:`read_image`.

    Yields:
        Of the next few files, the images of those that can be read, in order; and of the others what is wrong, by
        their position in ``paths``.
    """

    def decode(start: int) -> tuple[list[Pixels], dict[int, BadImageError]]:
        images, bad = [], {}
        for position in range(start, min(start + _CHUNK, len(paths))):
            try:
                images.append(read(paths[position]))
            except BadImageError as error:
                bad[position] = error
        return images, bad

    pool = ThreadPoolExecutor(usable_cpus())  # Pillow decodes outside Python's lock
    running: deque[Future[tuple[list[Pixels], dict[int, BadImageError]]]] = deque()
    try:
        for start in range(0, len(paths), _CHUNK):
            running.append(pool.submit(decode, start))
            if len(running) > 2 * usable_cpus():
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C does not wait for the rest of the files


def describe_bad_images(bad: dict[int, BadImageError], total: int) -> str:
    """How many of ``total`` images are bad, and the first of them with path and reason."""
    listed = "\n  ".join(str(bad[position]) for position in sorted(bad)[:_MAX_LISTED])
    more = f"\n  and {len(bad) - _MAX_LISTED:,} more" if len(bad) > _MAX_LISTED else ""
    return f"{len(bad):,} of {total:,} images cannot be read:\n  {listed}{more}\n"


def _ends_early(path: str | os.PathLike[str], image: Image.Image, enough: tuple[int, int]) -> bool:
    """Whether the data of a JPEG end before its last pixels, which decoding then fills with one colour, without error.

    More data change such an image, while a complete one has no use for them.
    """
    corner = np.asarray(image.crop((max(image.width - 8, 0), image.height - 1, image.width, image.height)))
    if (corner != corner[:, :1]).any():
        return False
    data = Path(path).read_bytes()
    end = data.rfind(b"\xff\xd9")  # the marker after the last block
    try:
        with Image.open(io.BytesIO(data[:end] + _MORE_BLOCKS + data[end:]), formats=["JPEG"]) as longer:
            longer.draft(None, enough)
            return longer.tobytes() != image.tobytes()
    except OSError:
        return True


def _to_mode(image: Image.Image, mode: Literal["RGB", "L"]) -> Image.Image:
    """``image`` in 8 bits a channel, with everything transparent over white."""
    if image.mode == "F" or image.mode.startswith("I"):
        image = _to_8_bits(image)
    elif image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image if image.mode == mode else image.convert(mode)


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Scale greyscale of more than 8 bits, whose range no file states: by what the kind of number suggests."""
    values = np.asarray(image, dtype=np.float64)
    low, high = values.min(), values.max()
    # integers are 16-bit; Pillow opens some of them as 32-bit. Floats are shares of white, or else 8-bit levels
    white = 65535 if image.mode != "F" else 1 if high <= 1 else 255
    if not (low >= 0 and high <= white):  # also when a value is not a number
        raise ValueError(f"its values go from {low:g} to {high:g}, expected 0 to {white}: convert it to 8 or 16 bits")
    return Image.fromarray((values * (255 / white)).round().astype(np.uint8))


def _resize(image: Image.Image, height: int, width: int, resize: Resize) -> Image.Image:
    """Bring ``image`` to ``height`` x ``width`` in one resampling."""
    if resize == "stretch":
        return image.resize((width, height), Image.Resampling.BILINEAR)
    if resize == "pad":
        scale = min(height / image.height, width / image.width)
        inner_width, inner_height = max(1, round(image.width * scale)), max(1, round(image.height * scale))
        inner = image.resize((inner_width, inner_height), Image.Resampling.BILINEAR)
        canvas = Image.new(image.mode, (width, height))
        canvas.paste(inner, ((width - inner_width) // 2, (height - inner_height) // 2))
        return canvas
    scale = max(height / image.height, width / image.width)
    source_width, source_height = min(width / scale, image.width), min(height / scale, image.height)
    left, top = (image.width - source_width) / 2, (image.height - source_height) / 2
    if scale == 1:  # whole pixels only: half a pixel's shift would blur for nothing
        left, top = int(left), int(top)
    box = (left, top, left + source_width, top + source_height)
    return image.resize((width, height), Image.Resampling.BILINEAR, box=box)


def _reason(file: str | os.PathLike[str], error: Exception) -> str:
    """Why a file cannot be read, for someone who does not know Pillow."""
    path = Path(file)
    match error:
        case FileNotFoundError():
            return "there is no such file" if not path.is_symlink() else "a link to a file that does not exist"
        case PermissionError():
            return "no permission to read it"
        case IsADirectoryError():
            return "a folder, not a file"
        case UnidentifiedImageError():
            start = _first_bytes(path)
            if not start:
                return "the file is empty (0 bytes)"
            if start.lstrip().startswith(b"<"):
                return f"not an image but text, such as a web page: it begins with {start!r}"
            return f"not an image, damaged, or of a kind that cannot be read: it begins with {start!r}"
        case Image.DecompressionBombError():
            return f"too many pixels to be decoded safely ({error})"
        case OSError() if "truncated" in str(error):
            return f"the file is cut short ({error})"
        case ValueError() if "its values go from" in str(error):
            return str(error)
    return f"the file is damaged ({type(error).__name__}: {error})"


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(16)
