"""A folder is decoded once: what has it done again and what has not; kills, crowds, damage and full disks."""

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter, namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from PIL import Image

from lit_project.data import cache
from lit_project.data.cache import Decoded, decode_once
from lit_project.data.decode import BadImageError, find_images, read_image
from lit_project.errors import InputError

SIZE = (5, 7)


def draw(path: Path, value: int) -> Path:
    """A noisy image that only ``value`` makes. As .bmp, its size in bytes says nothing about the pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(value).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty images of two classes, in more than one chunk."""
    for number in range(40):
        draw(tmp_path / "pictures" / "train" / "ab"[number % 2] / f"{number:02}.bmp", number)
    return tmp_path / "pictures" / "train"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The path of each file that is decoded, as it happens."""
    paths: list[str] = []

    def read(path: str, **options: Any) -> np.ndarray:
        paths.append(path)
        return read_image(path, **options)

    monkeypatch.setattr(cache, "read_image", read)
    return paths


def decoded(folder: Path, size: tuple[int, int] = SIZE, channels: int = 3, resize: Any = "crop") -> Decoded:
    return decode_once(folder, find_images(folder)[0], size, channels, resize, folder.parents[1] / "cache")


def direct(folder: Path, *options: Any) -> np.ndarray:
    return np.stack([read_image(path, *(options or (SIZE, 3))) for path in find_images(folder)[0]])


def entries(folder: Path) -> list[Path]:
    """What is kept of ``folder``, whole or not."""
    return [path for path in (folder.parents[1] / "cache").glob(f"{folder.name}-*/*") if path.name != "lock"]


# ---- what is kept


def test_the_images_are_those_of_decoding_directly(folder: Path):
    for _ in ("first", "second"):
        images, bad = decoded(folder)
        assert images.dtype == torch.uint8
        assert images.is_contiguous()
        assert np.array_equal(images.numpy(), direct(folder))
        assert bad == {}


def test_nothing_is_decoded_twice(folder: Path, reads: list[str], tmp_path: Path):
    decoded(folder)
    assert Counter(reads) == Counter(find_images(folder)[0])
    assert np.array_equal(decoded(folder)[0].numpy(), direct(folder))
    (tmp_path / "link").symlink_to(folder)
    linked = decode_once(tmp_path / "link", find_images(tmp_path / "link")[0], SIZE, 3, "crop", tmp_path / "cache")
    assert linked[0].shape == (40, *SIZE, 3)
    assert len(reads) == 40


def change_pixels(folder: Path) -> None:
    path = folder / "a" / "00.bmp"
    status = path.stat()
    draw(path, 99)
    assert path.stat().st_size == status.st_size
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def change_size_only(folder: Path) -> None:
    path = folder / "a" / "00.bmp"
    status = path.stat()
    path.write_bytes(path.read_bytes() + b"\0")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def add(folder: Path) -> None:
    draw(folder / "b" / "new.png", 77)


def remove(folder: Path) -> None:
    (folder / "a" / "02.bmp").unlink()


def rename_class(folder: Path) -> None:
    (folder / "a").rename(folder / "c")


def swap_two(folder: Path) -> None:
    first, second = folder / "a" / "00.bmp", folder / "a" / "02.bmp"
    os.utime(second, ns=(0, first.stat().st_mtime_ns + 1))
    first.rename(folder / "x")
    second.rename(first)
    (folder / "x").rename(second)


@pytest.mark.parametrize("change", [change_pixels, change_size_only, add, remove, rename_class, swap_two])
def test_any_change_of_the_files_has_them_decoded_again(folder: Path, reads: list[str], change: Callable[[Path], None]):
    old = decoded(folder)[0]
    before = old.clone()
    change(folder)
    reads.clear()
    images = decoded(folder)[0]
    assert Counter(reads) == Counter(find_images(folder)[0])
    assert np.array_equal(images.numpy(), direct(folder))
    assert len(entries(folder)) == 1, "what it was before does not fill the disk"
    if os.name == "posix":
        assert torch.equal(old, before), "a process that is still using that keeps it"


def test_other_options_are_kept_side_by_side(folder: Path, reads: list[str]):
    options = [(SIZE, 3, "crop"), ((7, 5), 3, "crop"), (SIZE, 1, "crop"), (SIZE, 3, "pad"), (SIZE, 3, "stretch")]
    for _ in ("first", "second"):
        for some in options:
            assert np.array_equal(decoded(folder, *some)[0].numpy(), direct(folder, *some))
    assert len(reads) == 40 * len(options)


def test_pixels_of_an_older_program_are_not_used(folder: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch):
    decoded(folder)
    monkeypatch.setattr(cache, "_VERSION", cache._VERSION + 1)
    decoded(folder)
    assert len(reads) == 80
    assert len(entries(folder)) == 1


def test_the_result_is_a_mapping_that_may_be_written_to(folder: Path):
    images = decoded(folder)[0]
    if sys.platform == "linux":
        assert str(entries(folder)[0] / "images.bin") in Path("/proc/self/maps").read_text()
    images.zero_()
    assert np.array_equal(decoded(folder)[0].numpy(), direct(folder)), "the file is as it was"


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the size of the memory")
def test_a_file_larger_than_the_memory_can_be_mapped(tmp_path: Path):
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rows = 2 * memory // 2**20
    with (tmp_path / "images.bin").open("wb") as file:
        file.truncate(rows * 2**20)  # without taking room on the disk
    images = cache.map_images(tmp_path / "images.bin", (rows, 2**10, 2**10, 1))
    assert images[-1, -1, -1].item() == 0


# ---- files that cannot be read


def test_broken_files_are_left_out_and_told_each_time(folder: Path, reads: list[str]):
    paths = find_images(folder)[0]
    broken = [paths[3], paths[39]]
    for path in broken:
        Path(path).write_bytes(b"<html>")
    expected = np.stack([read_image(path, SIZE) for path in paths if path not in broken])
    for _ in ("first", "second"):
        images, bad = decoded(folder)
        assert np.array_equal(images.numpy(), expected)
        assert sorted(bad) == [3, 39]
        assert str(broken[1]) in str(bad[39])
        assert "not an image but text" in bad[39].reason
    assert Counter(reads[40:]) == Counter(broken), "the others are not decoded again"


def test_a_file_that_can_be_read_again_is_taken_in(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A permission that is given, or a network drive that is back, changes neither the file's size nor its time."""

    def refuse(path: str, **options: Any) -> np.ndarray:
        if path.endswith("04.bmp"):
            raise BadImageError(path, "no permission to read it")
        return read_image(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(cache, "read_image", refuse)
        assert len(decoded(folder)[1]) == 1
    images, bad = decoded(folder)
    assert bad == {}
    assert np.array_equal(images.numpy(), direct(folder))


def test_of_nothing_but_broken_files_nothing_is_kept(folder: Path):
    for path in find_images(folder)[0]:
        Path(path).write_bytes(b"")
    images, bad = decoded(folder)
    assert images.shape == (0, *SIZE, 3)
    assert len(bad) == 40
    assert entries(folder) == []


# ---- what is kept is damaged


def damage_nothing_written(entry: Path) -> None:
    (entry / "images.bin").write_bytes(b"")


def damage_cut_short(entry: Path) -> None:
    os.truncate(entry / "images.bin", 1000)


def damage_no_pixels(entry: Path) -> None:
    (entry / "images.bin").unlink()


def damage_no_index(entry: Path) -> None:
    (entry / "index.json").unlink()


def damage_garbage(entry: Path) -> None:
    (entry / "index.json").write_bytes(b"\0\xff" * 40)


def damage_half_an_index(entry: Path) -> None:
    text = (entry / "index.json").read_text()
    (entry / "index.json").write_text(text[: len(text) // 2])


def damage_other_index(entry: Path) -> None:
    (entry / "index.json").write_text("[1, 2]")


def damage_position(entry: Path) -> None:
    index = json.loads((entry / "index.json").read_text())
    (entry / "index.json").write_text(json.dumps(index | {"bad": [4000]}))


def damage_shape(entry: Path) -> None:
    index = json.loads((entry / "index.json").read_text())
    index["shape"][1:3] = index["shape"][2:0:-1]
    (entry / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("damage", [value for name, value in list(globals().items()) if name.startswith("damage_")])
def test_what_is_damaged_is_made_anew(folder: Path, reads: list[str], damage: Callable[[Path], None]):
    decoded(folder)
    (entry,) = entries(folder)
    damage(entry)
    assert np.array_equal(decoded(folder)[0].numpy(), direct(folder))
    assert len(reads) == 80
    decoded(folder)
    assert len(reads) == 80
    assert entries(folder) == [entry]


# ---- several processes


PROGRAM = """
    import sys, time
    from pathlib import Path
    from lit_project.data import cache
    from lit_project.data.decode import find_images, read_image

    folder, log, stop_after = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])

    def read(path, **options):
        with log.open("a") as file:
            file.write(f"{path}\\n")
        if len(log.read_text().splitlines()) > stop_after:
            time.sleep(600)
        return read_image(path, **options)

    cache.read_image = read
    images, bad = cache.decode_once(folder, find_images(folder)[0], (5, 7), 3, "crop", folder.parents[1] / "cache")
    print("sum", images.sum().item(), flush=True)
"""


def start(folder: Path, log: Path, stop_after: int = 1000) -> subprocess.Popen[str]:
    """Decode in another process, which writes each path to ``log`` and after some files never comes to an end."""
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(folder), str(log), str(stop_after)]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def read_until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return
    raise AssertionError(f"the process ended without saying: {words}")


def test_of_two_processes_one_decodes_and_the_other_waits(folder: Path, reads: list[str], tmp_path: Path):
    decoded(folder)
    (entry,) = entries(folder)
    for file in entry.iterdir():
        file.unlink()
    reads.clear()
    log = tmp_path / "log"
    log.touch()
    with ThreadPoolExecutor(1) as pool:
        with FileLock(entry.parent / "lock"):  # until both have found that there is something to do
            process = start(folder, log)
            read_until(process, f"Waiting for another process that is decoding the images of {folder}")
            here = pool.submit(decoded, folder)
            time.sleep(0.2)
        assert np.array_equal(here.result()[0].numpy(), direct(folder))
    output = process.communicate()[0]
    assert output.splitlines()[-1] == f"sum {direct(folder).sum(dtype=int)}"
    assert Counter(reads + log.read_text().splitlines()) == Counter(find_images(folder)[0])


def test_what_a_killed_process_leaves_is_not_used_and_removed(folder: Path, reads: list[str], tmp_path: Path):
    log = tmp_path / "log"
    process = start(folder, log, stop_after=35)
    read_until(process, "Decoding the 40 images")
    while not log.exists() or len(log.read_text().splitlines()) <= 35:
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (leftover,) = entries(folder)
    assert leftover.name.endswith(".decoding")
    assert np.array_equal(decoded(folder)[0].numpy(), direct(folder))
    assert len(reads) == 40
    (entry,) = entries(folder)
    assert entry.name.endswith(".decoded")


def test_an_exception_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(path: str, **options: Any) -> np.ndarray:
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "read_image", interrupt)
    with pytest.raises(KeyboardInterrupt):
        decoded(folder)
    assert entries(folder) == []


# ---- the disk


def test_the_image_folder_is_only_read(folder: Path, reads: list[str]):
    everything = [folder, *folder.rglob("*")]
    before = {path: path.stat().st_mtime_ns for path in everything}
    for path in everything:
        path.chmod(0o555 if path.is_dir() else 0o444)
    for _ in ("first", "second"):
        assert np.array_equal(decoded(folder)[0].numpy(), direct(folder))
    assert len(reads) == 40
    assert {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]} == before
    for path in everything:
        path.chmod(0o755)


def test_a_cache_of_another_user_is_used_without_writing(
    folder: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
):
    decoded(folder)

    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(os, "mkdir", refuse)
    monkeypatch.setattr("lit_project.files.FileLock", refuse)
    assert np.array_equal(decoded(folder)[0].numpy(), direct(folder))
    assert len(reads) == 40


def test_a_cache_folder_that_cannot_be_written(folder: Path, reads: list[str]):
    (folder.parents[1] / "cache").write_text("a file where the folder should be")
    with pytest.raises(InputError) as caught:
        decoded(folder)
    for words in (
        str(folder),
        str(folder.parents[1] / "cache"),
        "--data.cache_dir",
        "LIT_CACHE_DIR",
    ):
        assert words in str(caught.value)
    assert reads == []


def test_too_little_room_is_said_before_decoding(folder: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: usage(2**40, 2**40, 40 * 5 * 7 * 3 - 1))
    with pytest.raises(InputError) as caught:
        decoded(folder)
    for words in (
        "40 images",
        str(folder),
        "5x7",
        "GiB",
        "--data.cache_dir",
        "LIT_CACHE_DIR",
        "--data.image_size",
    ):
        assert words in str(caught.value)
    assert reads == []
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: usage(2**40, 2**40, 40 * 5 * 7 * 3))
    assert len(decoded(folder)[0]) == 40


def test_a_disk_that_fills_up_while_decoding(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(InputError, match="No space left on device"):
        decoded(folder)
    assert entries(folder) == []


def test_what_no_run_has_used_for_a_month_goes(folder: Path, tmp_path: Path):
    for size in ((2, 2), (3, 3)):
        decoded(folder, size)
    small, large = sorted(entries(folder), key=lambda path: "3x3" in path.name)
    stranger = tmp_path / "cache" / "notes-1" / "old"
    stranger.mkdir(parents=True)
    (stranger / "index.json").write_text("{}")
    for path in (small, large, stranger):
        os.utime(path, (0, 0))
    decoded(folder, (3, 3))  # using it counts
    draw(tmp_path / "pictures" / "test" / "a" / "0.bmp", 0)
    decoded(tmp_path / "pictures" / "test")
    assert entries(folder) == [large]
    assert stranger.exists(), "only what this file has made"


# ---- what is said


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "ecod" in record.getMessage()]


@pytest.mark.parametrize(("seconds", "lines"), [(3600, 0), (-1, 3)])
def test_without_a_terminal_a_line_now_and_then(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, seconds: int, lines: int
):
    monkeypatch.setattr(cache, "_SECONDS_BETWEEN_LINES", seconds)
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    with caplog.at_level(logging.INFO):
        decoded(folder)
        assert f"Decoding the 40 images of {folder}, once" in said(caplog)[0]
        assert str(entries(folder)[0]) in said(caplog)[0]
        assert said(caplog)[1:] == [f"Decoded {done} of 40 images." for done in (16, 32, 40)][:lines]
        caplog.clear()
        decoded(folder)
        assert said(caplog) == []


def test_on_a_terminal_there_is_a_bar(folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    decoded(folder)
    assert "Decoding images" in capfd.readouterr().err
