"""Against the real wandb: what it leaves on disk offline, and what it sends to a server on this machine."""

import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import wandb
import yaml
from conftest import TINY, RunCLI, cli, environment, read_csv, runs, start
from helpers import QUIET, TESTS
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image
from wandb.sdk.lib import wbauth

from lit_project.callbacks.last_checkpoint import Stopped
from lit_project.checkpoints import read_checkpoint
from lit_project.errors import InputError
from lit_project.provenance import git_state
from lit_project.wandb_logger import WandbLogger, read_log

WANDB = "--config=configs/logger/wandb.yaml"
KEY = "0123456789" * 4
STEP = "trainer/global_step"


# ---- what was logged


def logs(run: Path) -> list[Path]:
    """The transaction logs of a run's folder, oldest first."""
    wandb.teardown()  # which waits until wandb's process has written them
    return sorted(run.glob("wandb/*run-*/*.wandb"), key=lambda path: path.stat().st_mtime)


def records(log: Path, kind: str) -> list[Any]:
    return [getattr(record, kind) for _, record in read_log(log) if record.WhichOneof("record_type") == kind]


def values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def rows(log: Path) -> list[dict[str, Any]]:
    """The history, without wandb's own columns."""
    own = ("_step", "_timestamp", "_runtime")
    return [
        {name: value for name, value in values(history.item).items() if name not in own}
        for history in records(log, "history")
    ]


def exit_code(log: Path) -> int | None:
    """With which status the run was closed; None if it was not."""
    return next((record.exit_code for record in records(log, "exit")), None)


# ---- a server


class Server:
    """A W&B server, as far as a run needs one: it keeps what it is sent.

    Args:
        refused: a query that it answers with an error.
        status: the HTTP status of every answer.
    """

    def __init__(self, refused: str = "", status: int = 200) -> None:
        self.refused, self.status = refused, status
        self.queries: list[tuple[str, dict[str, Any]]] = []
        self.credentials: set[str] = set()
        self.rows: list[dict[str, Any]] = []
        self.exit_codes: list[int] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                answer = json.dumps(server.answer(self.path, self.headers.get("Authorization", ""), body)).encode()
                self.send_response(server.status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_PUT = do_POST  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def answer(self, path: str, credentials: str, body: bytes) -> dict[str, Any]:
        if path.endswith("/file_stream"):
            sent = json.loads(body)
            history = sent.get("files", {}).get("wandb-history.jsonl", {"content": []})
            self.rows += map(json.loads, history["content"])
            self.exit_codes += [sent["exitcode"]] if sent.get("complete") else []
        if path != "/graphql":
            return {}
        self.credentials.add(credentials)
        query = json.loads(body)
        name, variables = query["operationName"], query.get("variables") or {}
        self.queries.append((name, variables))
        if name == self.refused:
            return {"errors": [{"message": f"{name} is refused"}]}
        if name == "Viewer":
            user = {"id": "1", "entity": "team", "username": "user", "email": "", "flags": "{}", "teams": {"edges": []}}
            return {"data": {"viewer": user}}
        run = {"id": "1", "name": variables.get("name"), "displayName": variables.get("name"), "config": "{}"}
        project = {"id": "1", "name": variables.get("project"), "entity": {"id": "1", "name": "team"}}
        if name == "UpsertBucket":
            return {"data": {"upsertBucket": {"bucket": {**run, "project": project}, "inserted": not self.rows}}}
        if name == "RunResumeStatus" and self.rows:
            last = json.dumps(self.rows[-1])
            run |= {"summaryMetrics": last, "historyTail": json.dumps([last]), "historyLineCount": len(self.rows)}
            run |= {"eventsTail": "[]", "eventsLineCount": 0, "logLineCount": 0, "wandbConfig": '{"t": 1}', "tags": []}
            return {"data": {"model": {**project, "bucket": run}}}
        if name == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{self.url}/upload"} for file in variables["files"]]
            return {"data": {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}}
        return {"data": {"model": None}}

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server() -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def make(**options: Any) -> Server:
        made.append(Server(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()


# ---- in this process


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the logger says to a newcomer: an empty home, no WANDB_ variables, and a wandb that has read nothing yet."""
    for name in os.environ.keys() - environment(tmp_path / "home").keys():
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    monkeypatch.setattr("lit_project.wandb_logger.rank_zero_info", lines.append)
    yield lines
    wandb.teardown()
    wbauth.unauthenticate_session(update_settings=False)


class Logging(BoringModel):
    """Logs its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        step = super().training_step(batch, batch_idx)
        self.log("loss", step["loss"])
        return step


def begin(folder: Path, **options: Any) -> Any:
    """Begin and end a run; its first record."""
    logger = WandbLogger(str(folder), id=folder.name, **options)
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.finalize("success")
    return records(logs(folder)[-1], "run")[0]


def fit(folder: Path, *callbacks: Callback, **options: Any) -> None:
    logger = WandbLogger(str(folder), id=folder.name, **options)
    given = QUIET | {"logger": logger, "enable_checkpointing": True, "callbacks": [*callbacks]}
    L.Trainer(**given, max_epochs=1, limit_train_batches=8, log_every_n_steps=4).fit(Logging())


class Ends(Callback):
    """Ends the process in a way, once ``step`` steps are done."""

    def __init__(self, way: str, step: int = 6) -> None:
        self.way, self.step = way, step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step != self.step:
            return
        if self.way == "error":
            raise RuntimeError("as planned")
        if self.way == "Stopped":
            raise Stopped(143, "by SIGTERM")
        if self.way == "time is up":
            raise Stopped(0, "as its time is up")
        if self.way == "Ctrl-C":
            raise KeyboardInterrupt
        time.sleep(0.5)  # longer than wandb takes to write a row
        os.kill(os.getpid(), signal.SIGKILL)


# ---- a run of the command line


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[str]]:
    """Two runs started in the same second, without another logger, with standard input closed; and their outputs."""
    folder = tmp_path_factory.mktemp("wandb")
    environ = environment(
        folder / "home",
        WANDB_ENTITY="our-team",
        WANDB_PROJECT="from the environment",
        WANDB_RUN_GROUP="the group",
        WANDB_TAGS="first,second",
    )
    options = [WANDB, "--loggers.csv=null", "--loggers.tensorboard=null", "--loggers.wandb.log_model=true"]
    command = [
        sys.executable,
        "-m",
        "lit_project.cli",
        "fit",
        *TINY,
        *options,
        "--loggers.wandb.project=explicit",
    ]
    processes = [
        subprocess.Popen(
            ["sh", "-c", 'exec "$@" <&-', "sh", *command, f"--seed_everything={seed}"],
            cwd=folder,
            env=environ,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in (1, 2)
    ]
    outputs = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    return runs(folder), outputs


def test_two_runs_are_two_and_each_says_in_one_line_that_it_is_offline(two_runs: tuple[list[Path], list[str]]) -> None:
    folders, outputs = two_runs
    for run in folders:
        (log,) = logs(run)
        assert log.name == f"run-{run.name}.wandb"
        checkpoint = read_checkpoint(run / "checkpoints" / "last.ckpt")
        assert checkpoint["config"] == yaml.safe_load((run / "config.yaml").read_text())
    seeds = {values(records(logs(run)[0], "run")[0].config.update)["seed_everything"] for run in folders}
    assert seeds == {1, 2}
    for output in outputs:
        (line,) = (line for line in output.splitlines() if "wandb" in line.lower() or "w&b" in line.lower())
        assert line.startswith("W&B: offline, as there is no API key")
        assert line.rsplit(" ", 1)[1] in {f"runs/{run.name}/wandb" for run in folders}
        assert "wandb sync" in line


def test_all_of_a_run_is_in_its_log(two_runs: tuple[list[Path], list[str]]) -> None:
    run = two_runs[0][0]
    (log,) = logs(run)
    (begun,) = records(log, "run")
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert {name: value for name, value in values(begun.config.update).items() if name != "_wandb"} == config
    assert (begun.run_id, begun.display_name, begun.resume) == (run.name, run.name, True)
    assert (begun.project, begun.entity, begun.run_group) == ("explicit", "our-team", "the group")
    assert list(begun.tags) == ["first", "second"]

    git = git_state()
    assert begun.git.commit == (git.commit if git else "")
    files = {file.path for record in records(log, "files") for file in record.files}
    assert ("diff.patch" in files) == bool(git and git.patch)

    history = rows(log)
    assert [row[STEP] for row in history] == [1, 1, 3, 3, 3, 3]
    by_step = {step: {name: row[name] for row in history if row[STEP] == step for name in row} for step in (1, 3)}
    assert by_step[1].keys() == {"lr-SGD", "train/loss_step", "train/grad_norm", "epoch", STEP}
    stages = {f"{stage}/{name}" for stage in ("train", "val") for name in ("loss", "acc", "f1", "auroc")}
    assert by_step[3].keys() == by_step[1].keys() | stages
    assert by_step[3]["epoch"] == 0
    summary = {name: value for record in records(log, "summary") for name, value in values(record.update).items()}
    assert summary["val/acc"] == by_step[3]["val/acc"]

    assert "memory_percent" in values(records(log, "stats")[0].item), "the machine's load"
    (artifact,) = records(log, "artifact")
    assert artifact.type == "model"
    assert set(artifact.aliases) == {"best", "latest"}
    assert artifact.manifest.contents[0].size == (run / "checkpoints" / "best.ckpt").stat().st_size
    assert exit_code(log) == 0


def test_no_key_and_no_setting_is_written(two_runs: tuple[list[Path], list[str]]) -> None:
    home = two_runs[0][0].parents[1] / "home"
    assert home.is_dir()
    assert not (home / ".netrc").exists()
    assert not (home / ".config" / "wandb").exists()


def test_images_come_with_their_captions(said: list[str], tmp_path: Path) -> None:
    logger = WandbLogger(str(tmp_path / "run"), id="run")
    picture = Image.fromarray(np.arange(8 * 6 * 3, dtype=np.uint8).reshape(8, 6, 3))
    logger.log_image("worst mistakes", [picture, picture.rotate(180)], 4, caption=["ring 0.9, is dot", "dot 0.8"])
    logger.log_image("confusion matrix", [picture], 4)
    logger.finalize("success")
    (log,) = logs(tmp_path / "run")
    mistakes, matrix = rows(log)
    assert mistakes[STEP] == matrix[STEP] == 4
    assert mistakes["worst mistakes/captions"] == ["ring 0.9, is dot", "dot 0.8"]
    assert (mistakes["worst mistakes/width"], mistakes["worst mistakes/height"]) == (6, 8)
    files = [*mistakes["worst mistakes/filenames"], *matrix["confusion matrix/filenames"]]
    shown = [np.asarray(Image.open(log.parent / "files" / file)) for file in files]
    assert [(pixels == picture).all() for pixels in shown] == [True, False, True]


# ---- how a run ends


@pytest.mark.parametrize(
    ("way", "code"), [("error", 1), ("Stopped", 143), ("time is up", 0), ("Ctrl-C", 1)], ids=lambda value: str(value)
)
def test_a_run_ends_with_the_status_of_its_process(
    said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, code: int
) -> None:
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises((RuntimeError, SystemExit)) as ending:
        fit(tmp_path / "run", Ends(way))
    signal.signal(signal.SIGINT, handler)  # Lightning ignores it from the first on
    if isinstance(ending.value, SystemExit):
        assert ending.value.code == code
    (log,) = logs(tmp_path / "run")
    assert exit_code(log) == code
    assert wandb.run is None, "nothing is left for a later run in this process"


def test_fit_and_test_with_one_logger_are_one_run(said: list[str], tmp_path: Path) -> None:
    logger = WandbLogger(str(tmp_path / "run"), id="both")
    trainer = L.Trainer(**QUIET | {"logger": logger}, max_epochs=1, limit_train_batches=2)
    trainer.fit(BoringModel())
    trainer.test(BoringModel(), verbose=False)
    first, second = logs(tmp_path / "run")
    assert [record.run_id for log in (first, second) for record in records(log, "run")] == ["both", "both"]
    assert [exit_code(log) for log in (first, second)] == [0, 0]


# ---- going on


def test_a_run_that_goes_on_without_a_new_best_uploads_the_one_before(said: list[str], tmp_path: Path) -> None:
    file = tmp_path / "run" / "best.ckpt"

    def train(*callbacks: Callback, ckpt_path: Path | None = None) -> None:
        logger = WandbLogger(str(tmp_path / "run"), id="run", log_model=True)
        best = ModelCheckpoint(file.parent, file.stem, monitor="epoch", mode="min")  # the first stays the best
        given = QUIET | {"logger": logger, "enable_checkpointing": True, "callbacks": [best, *callbacks]}
        L.Trainer(**given, max_epochs=2, limit_train_batches=2).fit(Logging(), ckpt_path=ckpt_path)

    with pytest.raises(Stopped):
        train(Ends("Stopped", step=3))
    train(ckpt_path=file)
    first, second = logs(tmp_path / "run")
    assert records(first, "artifact") == []
    (artifact,) = records(second, "artifact")
    assert set(artifact.aliases) == {"best", "latest"}
    assert artifact.manifest.contents[0].size == file.stat().st_size


KILLED = """
import os, signal, sys, time
from pathlib import Path
from lit_project.wandb_logger import WandbLogger, read_log
logger = WandbLogger("run", id="run")
assert "wandb" not in sys.modules, "it is imported when the run begins, by one rank"
for step in range(6):
    logger.log_metrics({"lr": 0.1}, step)
    if step < 5:
        logger.log_metrics({"loss": step, "epoch": 0}, step)
(log,) = Path("run/wandb").glob("offline-run-*/*.wandb")
while sum(record.HasField("history") for _, record in read_log(log)) < 11:
    time.sleep(0.05)
os.kill(os.getpid(), signal.SIGKILL)
"""


def go_on(folder: Path, first: int) -> None:
    logger = WandbLogger(str(folder), id="run")
    logger.resume_at(first)
    for step in range(first, 8):
        logger.log_metrics({"lr": 0.1}, step)
        logger.log_metrics({"loss": step, "epoch": 0}, step)
    logger.finalize("success")


def test_a_killed_run_goes_on_in_the_same_run_with_nothing_twice_and_nothing_lost(
    said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Callable[..., Server]
) -> None:
    """And ``wandb sync`` of the folder makes one history of the parts."""
    assert subprocess.run([sys.executable, "-c", KILLED], check=False).returncode == -signal.SIGKILL
    go_on(tmp_path / "run", first=3)
    first, second = logs(tmp_path / "run")
    assert exit_code(first) is None
    assert exit_code(second) == 0
    assert [record.run_id for log in (first, second) for record in records(log, "run")] == ["run", "run"]

    def logged(history: list[dict[str, Any]]) -> list[tuple[int, str]]:
        return [(row[STEP], name) for row in history for name in ("lr", "loss") if name in row]

    whole = [(step, name) for step in range(8) for name in ("lr", "loss")]
    assert logged(rows(first)) + logged(rows(second)) == whole
    there = server()
    monkeypatch.setenv("WANDB_BASE_URL", there.url)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    subprocess.run([sys.executable, "-m", "wandb", "sync", "run/wandb"], check=True, capture_output=True, timeout=60)
    assert logged(there.rows) == whole
    assert [row["_step"] for row in there.rows] == list(range(16))
    assert there.exit_codes == [1, 0], "killed, then finished"


def test_what_is_logged_again_with_other_values_replaces_what_was_not_sent(said: list[str], tmp_path: Path) -> None:
    """As after a resume with another schedule; what was sent stays, and one line says so."""

    def log(folder: Path, first: int, factor: int, **options: Any) -> None:
        logger = WandbLogger(str(folder), id="run", **options)
        logger.resume_at(first)
        for step in range(first, 6):
            values = {"a nan": float("nan"), "inf": float("inf"), "flag": True, "long": "x" * 9_000}
            logger.log_metrics(values | {"loss": float(step * factor)}, step)
        logger.finalize("success")

    def losses(folder: Path) -> list[list[float]]:
        return [[row["loss"] for row in rows(log) if "loss" in row] for log in logs(folder)]

    local, sent = tmp_path / "local", tmp_path / "sent"
    for folder in (local, sent):
        log(folder, 0, factor=1)
    log(local, 3, factor=10, mode="disabled")  # which does not log it again
    assert losses(local) == [[0, 1, 2, 3, 4, 5]]
    log(local, 3, factor=10)
    assert losses(local) == [[0, 1, 2], [30, 40, 50]]

    Path(f"{logs(sent)[0]}.synced").touch()  # as wandb sync does
    said.clear()
    log(sent, 3, factor=10)
    assert losses(sent) == [[0, 1, 2, 3, 4, 5], []]
    (line,) = (line for line in said if "offline" not in line)
    assert "up to step 5 the server keeps" in line
    assert "loss of step 3 was 3.0, is 30.0" in line


def test_what_was_written_but_not_sent_is_sent_when_the_run_goes_on(
    said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Callable[..., Server]
) -> None:
    before = WandbLogger(str(tmp_path / "run"), id="run")
    for step in range(6):
        before.log_metrics({"loss": step, "epoch": 0}, step)
    before.finalize("failed")
    wandb.teardown()  # another process goes on, with its own environment
    there = server()
    there.rows.append({"_step": 0, STEP: 0, "lr": 0.1})
    monkeypatch.setenv("WANDB_BASE_URL", there.url)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    go_on(tmp_path / "run", first=3)
    assert [row[STEP] for row in there.rows if "loss" in row] == [3, 4, 5, 6, 7]


def test_a_log_is_read_to_where_it_breaks_off(said: list[str], tmp_path: Path) -> None:
    logger = WandbLogger(str(tmp_path / "run"), id="run")
    logger.log_metrics({"long": "x" * 70_000}, 0)  # longer than two blocks
    for step in range(1, 20):
        logger.log_metrics({"loss": step}, step)
    logger.finalize("success")
    (log,) = logs(tmp_path / "run")
    whole = [record for _, record in read_log(log)]
    assert [row[STEP] for row in rows(log)] == list(range(20))
    data = log.read_bytes()
    torn = tmp_path / "torn.wandb"
    for cut in (3, 5_000, 40_000, len(data) - 100):
        for content in (data[:cut], data[:cut] + bytes(len(data) - cut)):
            torn.write_bytes(content)
            read = [record for _, record in read_log(torn)]
            assert read == whole[: len(read)]
            assert len(read) < len(whole)


# ---- online or offline


def test_with_a_key_and_a_server_the_run_is_online(
    said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Callable[..., Server]
) -> None:
    """The key lies in a .netrc file; the server is one's own."""
    there = server()
    netrc = tmp_path / "home" / ".netrc"
    netrc.write_text(f"machine {there.url.removeprefix('http://')}\n  login user\n  password {KEY}\n")
    before = netrc.read_text()
    monkeypatch.setenv("WANDB_BASE_URL", there.url)
    fit(tmp_path / "run", ModelCheckpoint(tmp_path / "run"), log_model=False, tags=["one"])
    assert said == []
    assert there.exit_codes == [0]
    assert [row[STEP] for row in there.rows if "loss" in row] == [3, 7]
    assert any(variables.get("tags") == ["one"] for name, variables in there.queries if name == "UpsertBucket")
    assert len(there.credentials) == 1
    assert netrc.read_text() == before
    assert not (tmp_path / "home" / ".config" / "wandb" / "settings").exists()


def test_a_connection_that_is_refused_or_never_answered_or_a_wrong_key_is_offline(
    said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Callable[..., Server]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with socket.socket() as silent, socket.socket() as closed:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        closed.bind(("127.0.0.1", 0))  # and does not listen
        urls = [f"http://127.0.0.1:{one.getsockname()[1]}" for one in (silent, closed)]
        for url, reason in (
            (urls[0], "has not answered within 0.5 s"),
            (urls[1], "has not answered within 0.5 s"),  # wandb would try again
            (server(status=401).url, "does not accept the API key"),
        ):
            monkeypatch.setenv("WANDB_BASE_URL", url)
            begin(tmp_path / "run", timeout=0.5)
            wandb.teardown()  # which reads the environment anew
            assert f"W&B: offline, as {url} {reason}" in said[-1]
            assert "\n" not in said[-1]
    assert len(said) == len(logs(tmp_path / "run")) == 3
    monkeypatch.setenv("WANDB_API_KEY", "short")
    begin(tmp_path / "run")
    assert "API key must have 40+ characters" in said[-1]


def test_a_run_that_the_server_refuses_is_offline_unless_it_was_to_be_online(
    said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Callable[..., Server]
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", server(refused="UpsertBucket").url)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with pytest.raises(InputError, match=r"to be online, but .*UpsertBucket is refused"):
        begin(tmp_path / "told", mode="online")
    begin(tmp_path / "run")
    (line,) = said
    assert "UpsertBucket is refused" in line
    (log,) = (path for path in logs(tmp_path / "run") if path.parent.name.startswith("offline"))
    assert rows(log) == [{"loss": 1.0, STEP: 0}]


def test_a_connection_that_is_lost_does_not_keep_the_run_from_ending(
    said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Callable[..., Server]
) -> None:
    there = server()
    monkeypatch.setenv("WANDB_BASE_URL", there.url)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    logger = WandbLogger(str(tmp_path / "run"), id="run")
    assert logger.experiment.settings.finish_timeout == 300
    logger.finalize("success")
    wandb.teardown()
    monkeypatch.setenv("WANDB_FINISH_TIMEOUT", "1")
    logger.log_metrics({"loss": 1.0}, 0)
    there.close()
    logger.finalize("success")
    assert rows(logs(tmp_path / "run")[-1]) == [{"loss": 1.0, STEP: 0}], "to be uploaded later"


def test_told_to_be_online_without_a_key_is_an_error(
    said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(InputError, match="no API key"):
        begin(tmp_path / "run")
    begin(tmp_path / "run", mode="offline")  # explicit wins
    assert said == ["W&B: offline. To upload the run later: wandb sync run/wandb"]


def test_disabled_logs_and_says_nothing(said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "diff.patch").touch()
    fit(tmp_path / "run", ModelCheckpoint(tmp_path / "run"), log_model=True)
    assert said == []
    assert not (tmp_path / "run" / "wandb").exists()
    assert wandb.run is None


def test_explicit_wins_over_environment_wins_over_settings_file_wins_over_default(
    said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def project(**options: Any) -> str:
        wandb.teardown()
        return str(begin(tmp_path / "run", **options).project)

    assert project() == "lit-project"
    (tmp_path / "home" / ".config" / "wandb").mkdir(parents=True)
    file = tmp_path / "home" / ".config" / "wandb" / "settings"
    file.write_text("[default]\nproject = file\nanonymous = allow\n")
    before = file.read_text()
    assert project() == "file"
    monkeypatch.setenv("WANDB_PROJECT", "environment")
    assert project() == "environment"
    assert project(project="explicit") == "explicit"
    assert file.read_text() == before


def test_without_a_config_the_hyper_parameters_are_the_config(said: list[str], tmp_path: Path) -> None:
    logger = WandbLogger(str(tmp_path / "run"))
    logger.log_hyperparams({"lr": 0.1})
    logger.finalize("success")
    (log,) = logs(tmp_path / "run")
    (config,) = records(log, "config")
    assert values(config.update) == {"lr": 0.1}


def test_other_ranks_begin_nothing(said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger = WandbLogger(str(tmp_path / "run"))
    logger.resume_at(0)
    logger.experiment.log({"loss": 1})
    logger.log_metrics({"loss": 1}, 0)
    logger.finalize("success")
    assert wandb.run is None
    assert not (tmp_path / "run").exists()


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match="pip install 'wandb"):
        WandbLogger(str(tmp_path))


# ---- the whole way


@pytest.mark.slow
def test_two_processes_make_one_run(run_cli: RunCLI, tmp_path: Path) -> None:
    ddp = ["--config=configs/trainer/ddp.yaml", "--trainer.accelerator=cpu", "--trainer.devices=2"]
    done = run_cli("fit", *TINY, *ddp, WANDB)
    (run,) = runs(tmp_path)
    (log,) = logs(run)
    assert exit_code(log) == 0
    assert [row[STEP] for row in rows(log) if "val/acc" in row] == [1]
    assert done.stderr.count("W&B: offline") == 1


@pytest.mark.slow
def test_a_run_that_is_killed_or_stopped_and_goes_on_has_each_row_once(run_cli: RunCLI, tmp_path: Path) -> None:
    plan = ["fit", *TINY, "--trainer.max_epochs=3", "--trainer.log_every_n_steps=1", WANDB]
    ends = ["--trainer.callbacks+=test_wandb_logger.Ends", "--trainer.callbacks.way=SIGKILL"]
    assert run_cli(*plan, *ends, check=False, PYTHONPATH=TESTS).returncode == -signal.SIGKILL
    started = start(
        tmp_path, "-m", "lit_project.cli", "fit", "--ckpt_path=last", "--trainer.callbacks=helpers.Sleep",
        "--trainer.callbacks.seconds=1", PYTHONPATH=TESTS,
    )  # fmt: skip
    assert started.stdout is not None
    while "sleeping" not in started.stdout.readline():
        pass
    started.terminate()
    assert started.wait() == 143
    cli(tmp_path, "fit", "--ckpt_path=last", "--trainer.callbacks=null", PYTHONPATH=TESTS)
    (run,) = runs(tmp_path)
    parts = logs(run)
    assert [exit_code(log) for log in parts] == [None, 143, 0]
    history = [row for log in parts for row in rows(log)]
    assert [row[STEP] for row in history if "train/loss_step" in row] == list(range(12))
    assert [row[STEP] for row in history if "lr-SGD" in row] == list(range(12))
    assert [row["epoch"] for row in history if "val/acc" in row] == [0, 1, 2]
    local = {row["step"]: row["train/loss_step"] for row in read_csv(run / "csv" / "metrics.csv")}
    for row in history:
        if "train/loss_step" in row:
            assert row["train/loss_step"] == pytest.approx(float(local[str(row[STEP])]), rel=1e-6)
