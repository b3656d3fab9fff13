"""CIFAR-10's download under everything that goes wrong with it, on a small archive of the same layout.

The archive is made here and served on 127.0.0.1; processes are real ones, since locks and kills only count there.
"""

import contextlib
import hashlib
import io
import json
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from helpers import CIFAR_PER_BATCH as PER_BATCH
from helpers import CIFAR_TEST_SIZE as TEST_SIZE
from helpers import small_cifar10

from lit_project.data import cifar10
from lit_project.data.cifar10 import CIFAR10
from lit_project.errors import InputError

FILENAME = "cifar-10-python.tar.gz"
FOLDER = "cifar-10-batches-py"

# a process of its own: argv[1] is the small source, argv[2] the folder, argv[3] whether to become nobody
CHILD = """
import json, os, sys
import torchvision
from lit_project.data.cifar10 import CIFAR10

source = type("Small", (torchvision.datasets.CIFAR10,), json.loads(sys.argv[1]))
data = type("SmallCIFAR10", (CIFAR10,), {"source": source})(data_dir=sys.argv[2])
if sys.argv[3] == "nobody":
    if os.geteuid() == 0:
        os.setuid(65534)
    assert not os.access(sys.argv[2], os.W_OK)
print("ready", flush=True)
sys.stdin.readline()
data.prepare_data()
data.setup("fit")
data.setup("test")
print("sizes", *(len(data.splits[split].targets) for split in ("train", "val", "test")))
"""


class Server:
    """Serves one file and counts the requests; can stop halfway through an answer until it is released."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.requests = 0
        self.release = threading.Event()
        self.release.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests += 1
                half = len(outer.content) // 2
                self.send_response(200)
                self.send_header("Content-Length", str(len(outer.content)))
                self.end_headers()
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(outer.content[:half])
                    self.wfile.flush()
                    outer.release.wait()
                    self.wfile.write(outer.content[half:])

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/{FILENAME}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.release.set()
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture(scope="module")
def archive() -> tuple[bytes, dict[str, Any]]:
    """The bytes of a small archive, and the class attributes that describe it."""
    return small_cifar10()


@pytest.fixture
def server(archive) -> Iterator[Server]:
    server = Server(archive[0])
    yield server
    server.close()


@pytest.fixture
def dead_url() -> str:
    """An address where nobody answers."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}/{FILENAME}"


@pytest.fixture
def make(archive, tmp_path) -> Callable[[str], CIFAR10]:
    """Builds the data module over the small archive, fetched from the given address."""

    def build(url: str) -> CIFAR10:
        source = type("Small", (torchvision.datasets.CIFAR10,), {**archive[1], "url": url})
        return type("SmallCIFAR10", (CIFAR10,), {"source": source})(data_dir=str(tmp_path / "data"))

    return build


class Child:
    """A process of its own that stands ready to prepare the data and goes ahead on ``go``."""

    def __init__(self, attributes: dict[str, Any], data_dir: Path, user: str, log: Path) -> None:
        self.log = log
        arguments = [json.dumps(attributes), str(data_dir), user]
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-c", CHILD, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def wait_ready(self) -> None:
        while (line := self.process.stdout.readline()) != "ready\n":
            assert line, self.log.read_text()

    def go(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def output(self) -> str:
        """What it printed after ``ready``; fails unless it succeeds."""
        output, _ = self.process.communicate()
        assert self.process.returncode == 0, self.log.read_text()
        return output


@pytest.fixture
def start(archive, tmp_path) -> Iterator[Callable[..., Child]]:
    started: list[Child] = []

    def run(url: str, data_dir: Path, user: str = "self") -> Child:
        log = tmp_path / f"child-{len(started)}.log"
        started.append(Child({**archive[1], "url": url}, data_dir, user, log))
        return started[-1]

    yield run
    for child in started:
        child.process.kill()
        child.process.communicate()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "the other process did not get there"
        time.sleep(0.01)


def contents(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"}


def put_archive(data: CIFAR10, content: bytes) -> Path:
    data.data_dir.mkdir()
    path = data.data_dir / FILENAME
    path.write_bytes(content)
    return path


def test_downloads_extracts_and_leaves_nothing_else(make, server):
    data = make(server.url)
    data.prepare_data()
    data.prepare_data()
    assert server.requests == 1
    assert contents(data.data_dir) == {FILENAME, FOLDER}
    data.setup("fit")
    assert len(data.splits["train"].targets) + len(data.splits["val"].targets) == 5 * PER_BATCH


def test_val_is_a_stratified_part_of_train_and_fit_leaves_test_alone(make, server):
    data = make(server.url)
    data.prepare_data()
    data.setup("fit")
    assert set(data.splits) == {"train", "val"}
    assert torch.bincount(data.splits["val"].targets).tolist() == [3] * 10
    everything = torchvision_images(data, train=True)
    ours = sorted(image.numpy().tobytes() for split in ("train", "val") for image in data.splits[split].images)
    assert ours == sorted(image.tobytes() for image in everything)

    data.setup("test")
    images, targets, _ = data.splits["test"]
    assert images.dtype == torch.uint8
    assert targets.dtype == torch.int64
    assert images.is_contiguous()
    np.testing.assert_array_equal(images.numpy(), torchvision_images(data, train=False))


def torchvision_images(data: CIFAR10, train: bool) -> np.ndarray:
    return data.source(data.data_dir, train=train).data


def test_archive_placed_by_hand_is_used_without_network(make, archive, dead_url):
    data = make(dead_url)
    put_archive(data, archive[0])
    data.prepare_data()
    data.setup("test")
    assert len(data.splits["test"].targets) == TEST_SIZE


def test_half_an_archive_is_named_when_there_is_no_network(make, archive, dead_url):
    data = make(dead_url)
    half = archive[0][: len(archive[0]) // 2]
    path = put_archive(data, half)
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(InputError) as error:
        data.prepare_data()
    message = str(error.value)
    assert f"{path} ({len(half):,} bytes, MD5 {hashlib.md5(half).hexdigest()})" in message
    assert archive[1]["tgz_md5"] in message
    assert dead_url in message
    assert path.read_bytes() == half


def test_half_an_archive_is_replaced_when_there_is_a_server(make, archive, server):
    data = make(server.url)
    path = put_archive(data, archive[0][: len(archive[0]) // 2])
    with pytest.warns(UserWarning, match="damaged.*fetching it again"):
        data.prepare_data()
    assert path.read_bytes() == archive[0]
    data.setup("fit")


def test_no_network_says_what_to_put_where_and_what_works_without(make, archive, dead_url):
    data = make(dead_url)
    with pytest.raises(InputError) as error:
        data.prepare_data()
    message = str(error.value)
    for part in (dead_url, archive[1]["tgz_md5"], str(data.data_dir / FILENAME), "fit --data Shapes10"):
        assert part in message
    assert contents(data.data_dir) == set()


@pytest.mark.filterwarnings("error")
def test_a_server_that_goes_silent_is_given_up(make, server, monkeypatch):
    monkeypatch.setattr(cifar10, "_TIMEOUT_SECONDS", 0.2)
    server.release.clear()
    data = make(server.url)
    with pytest.raises(InputError, match="timed out"):
        data.prepare_data()
    assert contents(data.data_dir) == set()


def test_a_page_instead_of_the_archive_is_refused(make, server):
    server.content = b"<html>please log in</html>"
    data = make(server.url)
    with pytest.raises(InputError, match=rf"sent something else.*{len(server.content)} bytes"):
        data.prepare_data()
    assert contents(data.data_dir) == set()


def test_setup_without_data_names_the_folder_and_the_files(make, dead_url):
    data = make(dead_url)
    with pytest.raises(InputError, match=rf"{FOLDER}.*data_batch_1.*Shapes10"):
        data.setup("fit")
    assert data.num_classes == 10


@pytest.mark.parametrize("damaged", ["data_batch_3", "batches.meta"])
def test_a_damaged_batch_is_extracted_again_without_network(make, archive, dead_url, damaged):
    data = make(dead_url)
    put_archive(data, archive[0])
    data.prepare_data()
    batch = data.data_dir / FOLDER / damaged
    whole = batch.read_bytes()
    batch.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=damaged) as error:
        data.setup("test")
    assert "data_batch_1" not in str(error.value)
    data.prepare_data()
    assert batch.read_bytes() == whole
    data.setup("fit")


def test_good_batches_need_neither_network_nor_writing(archive, start, dead_url):
    """As another user, in a folder that cannot be written: rights do not bind root, which may be who runs the tests."""
    folder = Path(tempfile.mkdtemp(prefix="lit-read-only-"))  # pytest's own folder is closed to other users
    try:
        with tarfile.open(fileobj=io.BytesIO(archive[0])) as tar:
            tar.extractall(folder, filter="data")
        paths = [folder, *folder.rglob("*")]
        for path in paths:
            path.chmod(0o555 if path.is_dir() else 0o444)
        before = {path: path.stat().st_mtime_ns for path in paths}
        child = start(dead_url, folder, user="nobody")
        child.wait_ready()
        child.go()
        assert child.output() == f"sizes {4.5 * PER_BATCH:.0f} {PER_BATCH // 2} {TEST_SIZE}\n"
        assert {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]} == before
    finally:
        for path in (folder, folder / FOLDER):
            path.chmod(0o755)
        shutil.rmtree(folder)


def test_a_folder_that_cannot_be_made_is_an_input_error(make, tmp_path, dead_url):
    (tmp_path / "data").write_text("a file where the folder should be")
    with pytest.raises(InputError, match=r"cannot be used.*--data.data_dir"):
        make(dead_url).prepare_data()


def test_two_processes_at_once_download_once(make, server, start):
    data = make(server.url)
    server.release.clear()
    first, second = (start(server.url, data.data_dir) for _ in range(2))
    for child in (first, second):
        child.wait_ready()
    first.go()
    wait_until(lambda: server.requests == 1)
    second.go()
    # without a lock there would be a second request, here or after the first process has finished
    wait_until(lambda: server.requests == 2 or "waiting" in second.log.read_text())
    server.release.set()
    for child in (first, second):
        assert child.output().startswith("sizes")
    assert server.requests == 1
    assert contents(data.data_dir) == {FILENAME, FOLDER}


def test_a_killed_download_is_not_mistaken_for_an_archive(make, archive, server, start):
    data = make(server.url)
    server.release.clear()
    child = start(server.url, data.data_dir)
    child.wait_ready()
    child.go()
    wait_until(lambda: any(path.stat().st_size for path in data.data_dir.rglob("*.gz")))
    child.process.kill()
    child.process.wait()
    assert not (data.data_dir / FILENAME).exists()
    assert contents(data.data_dir), "the kill must have left something for the next start to clear"

    server.release.set()
    data.prepare_data()
    assert contents(data.data_dir) == {FILENAME, FOLDER}
    assert (data.data_dir / FILENAME).read_bytes() == archive[0]
    data.setup("fit")


def test_default_folder_does_not_depend_on_where_the_run_starts(monkeypatch, tmp_path):
    monkeypatch.delenv("LIT_DATA_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert CIFAR10().data_dir == tmp_path / "cache" / "lit_project" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert CIFAR10().data_dir == tmp_path / ".cache" / "lit_project" / "data"
    monkeypatch.setenv("LIT_DATA_DIR", "~/elsewhere")
    assert CIFAR10().data_dir == tmp_path / "elsewhere"
    assert CIFAR10(data_dir="~/given").data_dir == tmp_path / "given"
    monkeypatch.chdir(tmp_path)
    assert CIFAR10(data_dir="here").data_dir == tmp_path / "here"
