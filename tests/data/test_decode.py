"""What the pixels of a file are, and what is said when there are none. The files are real ones, written by Pillow."""

import io
import os
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageFile, features

from lit_project.data import decode
from lit_project.data.decode import (
    IMAGE_EXTENSIONS,
    BadImageError,
    decode_in_order,
    describe_bad_images,
    find_images,
    image_dimensions,
    is_ignored,
    read_image,
)
from lit_project.errors import InputError
from lit_project.hardware import usable_cpus

RED, WHITE = (200, 0, 0), (255, 255, 255)


def save(image: Image.Image, path: Path, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def jpeg_bytes(image: Image.Image, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **options)
    return buffer.getvalue()


def rotated(path: Path, orientation: int, kind: str | None = None) -> Path:
    """40 wide, 20 high as stored, the left half red; ``orientation`` says how to turn it for viewing."""
    image = Image.new("RGB", (40, 20), "blue")
    image.paste(RED, (0, 0, 20, 20))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return save(image, path, format=kind, exif=exif)


# ---- pixels


def test_rgb_is_returned_as_it_is(tmp_path: Path):
    image = noise(12, 17)
    pixels = read_image(save(image, tmp_path / "a.png"))
    assert pixels.dtype == np.uint8
    assert np.array_equal(pixels, np.asarray(image))


def test_a_jpeg_of_the_right_size_is_not_resampled(tmp_path: Path):
    path = save(noise(32, 32), tmp_path / "a.jpg")
    assert np.array_equal(read_image(path, (32, 32)), np.asarray(Image.open(path)))


# name, image, expected colour of pixel (0, 0), expected colour of pixel (1, 0)
def modes() -> dict[str, tuple[Image.Image, tuple[int, int, int], tuple[int, int, int]]]:
    rgba = Image.new("RGBA", (2, 2), (*RED, 255))
    rgba.putpixel((0, 0), (*RED, 0))
    half = Image.new("RGBA", (2, 2), (*RED, 255))
    half.putpixel((0, 0), (0, 0, 0, 128))
    la = Image.new("LA", (2, 2), (100, 255))
    la.putpixel((0, 0), (100, 0))
    palette = Image.new("P", (2, 2), 1)
    palette.putpalette([0, 0, 255, *RED])
    palette.putpixel((0, 0), 0)
    bilevel = Image.new("1", (2, 2), 0)
    bilevel.putpixel((1, 0), 1)
    deep = Image.fromarray(np.array([[0, 65535], [32896, 257]], dtype=np.uint16))
    return {
        "L.png": (Image.new("L", (2, 2), 100), (100,) * 3, (100,) * 3),
        "LA.png": (la, WHITE, (100,) * 3),
        "P.png": (palette, (0, 0, 255), RED),
        "RGBA.png": (rgba, WHITE, RED),
        "RGBA-half.png": (half, (127,) * 3, RED),
        "RGBA.tif": (rgba, WHITE, RED),
        "CMYK.tif": (Image.new("CMYK", (2, 2), (0, 255, 255, 0)), (255, 0, 0), (255, 0, 0)),
        "1.png": (bilevel, (0,) * 3, WHITE),
        "I16.png": (deep, (0,) * 3, WHITE),
        "I16.tif": (deep, (0,) * 3, WHITE),
        "I.tif": (Image.fromarray(np.array([[0, 65535]] * 2, dtype=np.int32)), (0,) * 3, WHITE),
        "F-unit.tif": (Image.fromarray(np.array([[0.5, 1.0]] * 2, dtype=np.float32)), (128,) * 3, WHITE),
        "F-bytes.tif": (Image.fromarray(np.array([[100.0, 255.0]] * 2, dtype=np.float32)), (100,) * 3, WHITE),
    }


@pytest.mark.parametrize("name", modes())
def test_every_mode_becomes_rgb_with_transparency_over_white(tmp_path: Path, name: str):
    image, first, second = modes()[name]
    pixels = read_image(save(image, tmp_path / name))
    assert pixels.shape == (2, 2, 3)
    assert tuple(pixels[0, 0]) == first
    assert tuple(pixels[0, 1]) == second


def test_transparent_palette_and_cmyk_jpeg(tmp_path: Path):
    palette = Image.new("P", (2, 2), 1)
    palette.putpalette([0, 0, 255, *RED])
    palette.putpixel((0, 0), 0)
    for name in ("a.png", "a.gif"):
        pixels = read_image(save(palette, tmp_path / name, transparency=0))
        assert tuple(pixels[0, 0]) == WHITE, "the hidden colour, blue, must not show"
        assert tuple(pixels[1, 1]) == RED
    cmyk = read_image(save(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), tmp_path / "a.jpg"))
    assert np.abs(cmyk.astype(int) - (255, 0, 0)).max() < 8, "Adobe's inverted inks would be cyan"


def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path):
    levels = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    pixels = read_image(save(Image.fromarray(levels), tmp_path / "a.png"), channels=1)
    assert np.array_equal(pixels[..., 0].flatten(), np.arange(256))


@pytest.mark.parametrize("values", [[[0, 70_000]], [[-1, 3]]])
def test_numbers_without_a_known_range_are_refused(tmp_path: Path, values: list[list[int]]):
    for dtype in (np.int32, np.float32):
        path = save(Image.fromarray(np.array(values, dtype=dtype)), tmp_path / "a.tif")
        with pytest.raises(BadImageError, match="its values go from"):
            read_image(path)


def test_greyscale_is_one_channel_whatever_the_file(tmp_path: Path):
    for name, (image, _, _) in modes().items():
        assert read_image(save(image, tmp_path / name), (3, 4), channels=1).shape == (3, 4, 1)
    grey = read_image(save(Image.new("RGB", (2, 2), (0, 255, 0)), tmp_path / "green.png"), channels=1)
    assert grey[0, 0, 0] == 150, "luminance, not one of the channels"


@pytest.mark.parametrize("kind", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize(
    ("orientation", "shape", "red"),
    [(1, (20, 40), np.s_[:, :18]), (3, (20, 40), np.s_[:, 22:]), (6, (40, 20), np.s_[:18]), (8, (40, 20), np.s_[22:])],
)
def test_exif_rotation_is_applied_once(
    tmp_path: Path, kind: str, orientation: int, shape: tuple[int, int], red: tuple[slice, ...]
):
    path = rotated(tmp_path / f"a.{kind}", orientation)
    pixels = read_image(path).astype(int)
    assert pixels.shape == (*shape, 3)
    assert image_dimensions(path) == shape
    assert np.abs(pixels[red] - RED).max() < 40
    assert (pixels[red][..., 2] < 60).all()
    assert (pixels[..., 2] > 128).any(), "the other half is blue"


def test_resize_covers_then_crops_the_centre(tmp_path: Path):
    image = Image.new("RGB", (80, 20), "black")
    image.paste(RED, (30, 0, 50, 20))
    pixels = read_image(save(image, tmp_path / "a.png"), (10, 10))
    assert (pixels[:, 1:-1] == RED).all(), "the middle quarter, and nothing of the black sides but at the edge"
    tall = read_image(save(image.transpose(Image.Transpose.ROTATE_90), tmp_path / "b.png"), (10, 10))
    assert np.array_equal(tall, pixels.swapaxes(0, 1)[::-1])
    assert read_image(tmp_path / "a.png", (5, 30)).shape == (5, 30, 3)


def test_padding_keeps_the_whole_image_and_its_proportions(tmp_path: Path):
    image = Image.new("RGB", (80, 20), RED)
    pixels = read_image(save(image, tmp_path / "a.png"), (40, 40), resize="pad")
    expected = np.zeros((40, 40, 3), dtype=np.uint8)
    expected[15:25] = RED
    assert np.array_equal(pixels, expected)
    tall = read_image(save(image.rotate(90, expand=True), tmp_path / "b.png"), (40, 40), resize="pad")
    assert np.array_equal(tall, expected.swapaxes(0, 1))
    assert read_image(save(Image.new("L", (5000, 1), 9), tmp_path / "c.png"), (8, 8), 1, "pad").max() == 9


def test_stretching_fills_the_size_with_the_whole_image(tmp_path: Path):
    image = Image.new("RGB", (80, 20), "black")
    image.paste(RED, (40, 0, 80, 20))
    pixels = read_image(save(image, tmp_path / "a.png"), (10, 10), resize="stretch")
    assert (pixels[:, :4] == 0).all()
    assert (pixels[:, 6:] == RED).all()


def test_cropping_without_scaling_copies_pixels(tmp_path: Path):
    image = noise(32, 41)
    pixels = read_image(save(image, tmp_path / "a.png"), (32, 32))
    assert np.array_equal(pixels, np.asarray(image)[:, 4:36])


def test_shrinking_is_antialiased(tmp_path: Path):
    stripes = Image.fromarray(np.tile(np.array([0, 255], dtype=np.uint8), (64, 32)))
    pixels = read_image(save(stripes, tmp_path / "a.png"), (8, 8), channels=1)
    assert np.abs(pixels.astype(int) - 127).max() < 40, "without antialiasing stripes would come out black or white"


def test_a_large_photo_is_close_to_its_full_decoding(tmp_path: Path):
    gradient = np.add.outer(np.arange(600), np.arange(900)) // 6
    photo = Image.fromarray(np.stack([gradient, 255 - gradient, gradient // 2], -1).astype(np.uint8))
    path = save(photo, tmp_path / "a.jpg", quality=95)
    whole = Image.open(path).resize((48, 32), Image.Resampling.BILINEAR).crop((8, 0, 40, 32))
    assert np.abs(read_image(path, (32, 32)).astype(int) - np.asarray(whole)).max() <= 4


def test_a_thin_image_does_not_grow_beyond_its_crop(tmp_path: Path):
    # scaled as a whole it would be 224 x 1,120,000 pixels
    pixels = read_image(save(Image.new("L", (5000, 1), 9), tmp_path / "a.png"), (224, 224))
    assert (pixels == 9).all()


def test_an_animation_counts_by_its_first_frame(tmp_path: Path):
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    path = save(frames[0], tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert tuple(read_image(path)[0, 0]) == (255, 0, 0)


# ---- broken files


def broken(folder: Path) -> dict[str, Path]:
    """One of each kind, by the words that must tell it."""
    folder.mkdir(exist_ok=True)
    data = jpeg_bytes(noise(64, 64))
    png = io.BytesIO()
    noise(64, 64).save(png, "PNG")
    contents = {
        "cut short": ("half.jpg", data[: len(data) // 2]),
        "0 bytes": ("empty.png", b""),
        "not an image but text": ("page.jpg", b"<!DOCTYPE html><html>not found</html>"),
        "not an image, damaged, or of a kind": ("noise.jpg", bytes(range(7, 200))),
        "damaged": ("scratched.png", png.getvalue()[:200] + bytes(400) + png.getvalue()[600:]),
    }
    paths = {}
    for words, (name, content) in contents.items():
        paths[words] = folder / name
        paths[words].write_bytes(content)
    paths["no such file"] = folder / "nowhere.jpg"
    paths["link to a file that does not exist"] = folder / "link.jpg"
    paths["link to a file that does not exist"].symlink_to(folder / "gone.jpg")
    paths["a folder"] = folder / "folder.jpg"
    paths["a folder"].mkdir()
    return paths


def test_a_broken_file_is_named_with_its_full_path_and_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for words, path in broken(Path("files")).items():
        with pytest.raises(BadImageError) as caught:
            read_image(path, (32, 32))
        assert str(tmp_path / path) in str(caught.value)
        assert words in str(caught.value)
        assert isinstance(caught.value, InputError)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(tmp_path: Path):
    path = save(noise(8, 8), tmp_path / "a.png")
    path.chmod(0)
    with pytest.raises(BadImageError, match="no permission"):
        read_image(path)


def test_permission_and_bombs_are_put_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = save(noise(30, 30), tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    for function in (read_image, image_dimensions):
        with pytest.raises(BadImageError, match=r"a\.png: too many pixels"):
            function(path)

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Image, "open", refuse)
    with pytest.raises(BadImageError, match="no permission to read it"):
        read_image(path)


def test_half_an_image_is_never_accepted(tmp_path: Path):
    assert not ImageFile.LOAD_TRUNCATED_IMAGES
    data = jpeg_bytes(noise(64, 64))
    for share in (0.3, 0.6, 0.9):
        path = tmp_path / f"{share}.jpg"
        path.write_bytes(data[: int(len(data) * share)])
        with pytest.raises(BadImageError):
            read_image(path, (64, 64))


@pytest.mark.parametrize("size", [(64, 64), (16, 24), None])
@pytest.mark.parametrize(
    "options", [{}, {"subsampling": 0}, {"optimize": True}, {"restart_marker_rows": 1}], ids=lambda o: "".join(o)
)
def test_a_jpeg_that_was_closed_too_early_is_not_half_grey(
    tmp_path: Path, size: tuple[int, int] | None, options: dict[str, Any]
):
    """libjpeg fills up what is missing, and Pillow does not pass its warning on. A blank end alone is no damage."""
    blank = noise(480, 320)
    blank.paste("white", (0, 200, 320, 480))
    for image in (noise(480, 320), blank, blank.convert("L"), Image.new("RGB", (64, 64), "white")):
        data = jpeg_bytes(image, **options)
        path = tmp_path / "a.jpg"
        path.write_bytes(data + b"what some cameras add \xff\xd9")
        assert read_image(path, size).any()
        start = data.find(b"\xff\xda") + 20
        for share in (0.0, 0.25, 0.5):
            path.write_bytes(data[: start + int((len(data) - start) * share)].rstrip(b"\xff") + b"\xff\xd9")
            with pytest.raises(BadImageError, match=r"a\.jpg: the file is cut short"):
                read_image(path, size)


def test_a_page_of_postscript_is_not_opened_let_alone_run_through_ghostscript(tmp_path: Path):
    path = tmp_path / "a.jpg"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n")
    for function in (read_image, image_dimensions):
        with pytest.raises(BadImageError, match="not an image"):
            function(path)


# ---- many files


def test_files_are_handed_over_in_order(tmp_path: Path):
    paths = [str(save(noise(16, 16, seed), tmp_path / f"{seed}.jpg")) for seed in range(100)]
    images = [image for some, bad in decode_in_order(paths, read_image) for image in some if not bad]
    assert len(images) == 100
    for image, path in zip(images, paths, strict=True):
        assert np.array_equal(image, read_image(path))


def test_broken_files_are_told_by_their_position(tmp_path: Path):
    bad = [str(path) for path in broken(tmp_path).values()]
    good = [str(save(noise(8, 8, seed), tmp_path / f"good{seed}.png")) for seed in range(80)]
    paths = [bad[0], *good[:40], *bad[1:], *good[40:]]
    chunks = list(decode_in_order(paths, read_image))
    errors = {position: error for _, found in chunks for position, error in found.items()}
    assert sorted(errors) == [0, *range(41, 40 + len(bad))]
    assert all(str(error).startswith(f"{paths[position]}: ") for position, error in errors.items())
    images = np.stack([image for some, _ in chunks for image in some])
    assert np.array_equal(images, np.stack([read_image(path) for path in good]))


def test_decoding_does_not_run_ahead_of_what_is_taken(tmp_path: Path):
    """Else all images would be in memory whenever the disk is slower than the processor."""
    path = str(save(noise(4, 4), tmp_path / "a.png"))
    read: list[str] = []

    def count(path: str) -> np.ndarray:
        read.append(path)
        return read_image(path)

    chunks = decode_in_order([path] * 10_000, count)
    next(chunks)
    time.sleep(0.2)
    assert len(read) <= (2 * usable_cpus() + 1) * 16 < 10_000
    chunks.close()


def test_a_long_list_of_broken_files_is_cut():
    bad = {number: BadImageError(f"missing{number:02}.jpg", "gone") for number in range(1250)}
    message = describe_bad_images(bad, 4000)
    assert "1,250 of 4,000 images cannot be read" in message
    assert message.count("missing") == 20
    assert str(Path("missing00.jpg").absolute()) in message
    assert "and 1,230 more" in message


# ---- finding files


def test_dimensions_come_from_the_header(tmp_path: Path):
    # the pixels are missing, so whoever needs them fails
    for name in ("a.jpg", "a.png"):
        path = save(noise(300, 200), tmp_path / name)
        path.write_bytes(path.read_bytes()[:3000])
        assert image_dimensions(path) == (300, 200)
    (tmp_path / "b.jpg").write_bytes(b"")
    with pytest.raises(BadImageError, match="0 bytes"):
        image_dimensions(tmp_path / "b.jpg")


@pytest.mark.parametrize(
    "name",
    [
        *(".DS_Store", "._a.jpg", ".ipynb_checkpoints", "__MACOSX", "Thumbs.db", "thumbs.db", "desktop.ini"),
        *("@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information", "lost+found"),
    ],
)
def test_junk_is_ignored(name: str):
    assert is_ignored(Path("/data/train") / name)
    assert not is_ignored(Path("/home/.cache/train/a.jpg")), "only the file's own name counts"


def test_find_images_walks_links_and_levels_once(tmp_path: Path):
    image = noise(4, 4)
    elsewhere = save(image, tmp_path / "elsewhere" / "linked.png").parent
    root = tmp_path / "root"
    for name in ("10.JPG", "2.jpg", "sub/deep/1.png", ".hidden/x.png", "__MACOSX/y.png"):
        save(image, root / name)
    (root / "._2.jpg").write_bytes(b"\0\5\26\7")
    (root / ".DS_Store").write_bytes(b"x")
    for name in ("notes.txt", "photo.HEIC", "sub/more.txt", "LICENSE"):
        (root / name).write_text("x")
    (root / "link").symlink_to(elsewhere)
    (root / "sub" / "loop").symlink_to(root)
    images, others = find_images(root)
    assert images == [str(root / name) for name in ("10.JPG", "2.jpg", "link/linked.png", "sub/deep/1.png")]
    assert others == Counter({".txt": 2, ".heic": 1, "no extension": 1})


def test_natural_order_of_odd_names():
    names = ["a10.png", "a2.png", "a²3.png", "1/b.png", "10/a.png", "2/z.png", "b.png"]
    paths = sorted(map(Path, names), key=decode.natural_key)
    assert [str(path) for path in paths[:3]] == ["1/b.png", "2/z.png", "10/a.png"]
    assert str(paths[3]) == "a2.png"


def test_accepted_extensions_can_be_read(tmp_path: Path):
    assert {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"} <= IMAGE_EXTENSIONS
    assert (".webp" in IMAGE_EXTENSIONS) == features.check("webp")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for extension in sorted(IMAGE_EXTENSIONS):
            pixels = read_image(save(Image.new("L", (16, 16), 99), tmp_path / f"a{extension}"))
            assert np.abs(pixels.astype(int) - 99).max() <= 4, extension
