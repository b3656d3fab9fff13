"""``report.html``: that it is there however a run ends, that it tells the truth, and that a browser shows it."""

import csv
import html
import json
import re
import shutil
import signal
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from conftest import TINY, cli, read_csv, runs
from helpers import QUIET, TESTS
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from report_helpers import ODD_NAMES, OddNames, Scripted
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from lit_project.callbacks import LastCheckpoint, RunRecord, TestReport
from lit_project.callbacks import report as callback_module
from lit_project.callbacks.full_disk import tolerate_full_disk
from lit_project.callbacks.report import Report
from lit_project.checkpoints import SaveError
from lit_project.commands import report as command
from lit_project.data import Shapes10
from lit_project.errors import InputError
from lit_project.loggers import CSVLogger, ResumableTensorBoardLogger
from lit_project.module import ImageClassifier
from lit_project.report import _Curves, read_data, write_report
from lit_project.results import Results, judge

pytest.importorskip("matplotlib")

REPORT = "--callbacks.report=lit_project.callbacks.report.Report"
NUM_VAL = 40
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def cells(text: str, heading: str) -> list[list[str]]:
    """The rows of the table whose first column has this heading."""
    table = re.search(rf"<thead><tr><th[^>]*>{heading}</th>.*?</table>", text, re.DOTALL)
    assert table is not None, heading
    rows = re.findall(r"<tr>(.*?)</tr>", table[0], re.DOTALL)
    return [[html.unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)] for row in rows]


def data(run: Path) -> Any:
    return torch.load(run / "report.pt", weights_only=True)


# ---- one run of the command line


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    options = [
        REPORT,
        "--data=report_helpers.OddNames",
        "--trainer.max_epochs=2",
    ]
    done = cli(folder, "fit", *TINY, *options, PYTHONPATH=TESTS)
    assert "could not" not in done.stdout + done.stderr
    return runs(folder)[0]


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return (run / "report.html").read_text(encoding="utf-8")


def test_the_numbers_are_those_of_metrics_csv(run: Path, page: str) -> None:
    header, *rows = cells(page, "epoch")
    logged = [row for row in read_csv(run / "csv" / "metrics.csv") if row["val/loss"]]
    assert len(rows) == len(logged) == 2
    assert {"train/loss", "val/loss", "train/acc", "val/acc", "val/f1", "val/auroc"} < set(header)
    assert rows == [[row[name] for name in header] for row in logged]
    record = json.loads((run / "run.json").read_text())
    best = max(float(row["val/acc"]) for row in logged)
    assert f"<dt>best val/acc</dt><dd>{best:.4f}</dd>" in page
    assert record["exit_reason"] == "finished"
    assert "The run finished." in page
    assert html.escape(record["start"]) in page


def test_it_is_of_the_best_checkpoint_image_by_image(run: Path, page: str) -> None:
    found = data(run)
    best = run / "checkpoints" / "best.ckpt"
    checkpoint = torch.load(best, weights_only=True)
    assert (found["best"], found["step"], found["split"]) == (True, checkpoint["global_step"], "val")
    module = ImageClassifier.load_from_checkpoint(best, map_location="cpu").eval()
    shapes = OddNames(num_train=256, num_val=129, num_test=131)
    shapes.setup("fit")
    with torch.inference_mode():
        images = shapes._normalise(shapes.splits["val"].images.permute(0, 3, 1, 2))
        probabilities = module(images).softmax(1)
    results = Results(**found["results"])
    assert results.positions.tolist() == list(range(129))
    assert torch.equal(results.targets.long(), shapes.splits["val"].targets)
    expected = probabilities.gather(1, results.targets.long()[:, None]).squeeze(1)
    torch.testing.assert_close(results.true_probability, expected, atol=0.02, rtol=0)  # it ran in bfloat16
    assert f"<dd>{results.calibration_error():.4f}</dd>" in page
    matrix = results.confusion_matrix(10)
    pairs = {(true, predicted): int(count) for true, predicted, count, _ in cells(page, "true")[1:]}
    for (true, predicted), count in pairs.items():
        assert matrix[ODD_NAMES.index(true), ODD_NAMES.index(predicted)] == count
    assert max(pairs.values()) == matrix.fill_diagonal_(0).max()
    worst = found["worst"]
    images = shapes.splits["val"].images[results.positions[worst["indices"]].long()]
    assert torch.equal(worst["images"], images)


def test_names_are_no_markup_and_no_formulas(page: str) -> None:
    assert "<b>" not in page
    assert html.escape("<b>&") in page
    for name in ODD_NAMES:
        assert (
            re.search(
                rf">{re.escape(name.replace('&', '&amp;').replace('<', '&lt;').replace('>', '&gt;'))}</text>", page
            )
            or len(name) > 14
        )
    assert not re.search(r'<script|\bsrc="(?!data:)|\bhref="(?!#|data:)|@import|url\((?!#)', page), "nothing is loaded"


def test_it_can_be_made_anew_from_the_folder(run: Path, page: str, tmp_path: Path) -> None:
    copy = tmp_path / run.name
    shutil.copytree(run, copy)
    (copy / "report.html").unlink()
    assert command.main([str(copy)]) == 0
    assert (copy / "report.html").read_text() == page
    # of a run that was killed there is the last checkpoint, which has no images
    (copy / "report.pt").unlink()
    command.main([str(copy)])
    again = (copy / "report.html").read_text()
    assert cells(again, "true") == cells(page, "true")
    assert "images themselves are not kept" in again
    (copy / "run.json").unlink()
    with pytest.raises(InputError, match="not the folder of a run"):
        command.main([str(copy)])


@pytest.mark.parametrize("name", ["report.pt", "checkpoints/last.ckpt"])
def test_a_damaged_file_is_named_with_what_to_do(run: Path, tmp_path: Path, name: str) -> None:
    copy = tmp_path / run.name
    shutil.copytree(run, copy)
    (copy / name).write_bytes((copy / name).read_bytes()[:1000])
    with pytest.raises(InputError, match=rf"{name} cannot be read: it is damaged.* Move it elsewhere"):
        command.main([str(copy)])
    (copy / name).write_bytes(b"")
    with pytest.raises(InputError, match=rf"{name} cannot be read"):
        command.main([str(copy)])
    (copy / name).unlink()
    command.main([str(copy)])


def test_a_folder_that_cannot_be_written_to_is_an_error_of_one_line(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("lit_project.report.write_atomically", refuse)
    with pytest.raises(InputError, match=r"report\.html cannot be written: Permission denied\."):
        command.main([str(run)])


def test_tensorboard_has_pictures_hyper_parameters_and_the_graph(run: Path) -> None:
    reader = EventAccumulator(str(run / "tensorboard"))
    reader.Reload()
    tags = reader.Tags()
    assert set(tags["images"]) == {"first batch", "confusion matrix", "worst mistakes"}
    assert tags["graph"]
    assert "_hparams_/session_start_info" in reader.summary_metadata
    record = json.loads((run / "run.json").read_text())
    (best, *_) = reversed(reader.Scalars("best/val/acc"))
    assert best.value == pytest.approx(record["best"]["score"])


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium or google-chrome")
def test_a_browser_shows_it_on_a_phone(run: Path, page: str, tmp_path: Path) -> None:
    """Within a frame, since Chromium's own window cannot be that narrow."""
    measure = """onload = () => {
      const page = document.getElementById("phone").contentDocument, wide = [];
      for (const details of page.querySelectorAll("details")) details.open = true;
      for (const element of page.body.querySelectorAll("*"))
        if (element.getBoundingClientRect().right > 375.5 && !element.closest(".wide, pre, svg"))
          wide.push(element.outerHTML);
      const found = {width: page.documentElement.scrollWidth, wide: wide, text: page.body.textContent,
        broken: [...page.images].filter(image => !image.naturalWidth).length, images: page.images.length,
        svgs: [...page.querySelectorAll("svg")].map(svg => svg.getBoundingClientRect().width)};
      document.body.innerHTML = "<pre></pre>"; document.querySelector("pre").textContent = JSON.stringify(found);
    }"""
    frame = f'<iframe id="phone" style="width:375px;height:800px;border:0" srcdoc="{html.escape(page)}"></iframe>'
    (tmp_path / "phone.html").write_text(f'<meta charset="utf-8"><body>{frame}<script>{measure}</script>', "utf-8")
    assert CHROMIUM is not None
    arguments = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
    arguments += ["--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}"]
    arguments += ["--enable-logging=stderr", "--dump-dom", (tmp_path / "phone.html").as_uri()]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr
    found = json.loads(html.unescape(re.search(r"<pre>(.*)</pre>", done.stdout, re.DOTALL)[1]))  # type: ignore[index]
    assert found["width"] == 375
    assert found["wide"] == []
    assert len(found["svgs"]) == 7
    assert all(300 < width < 375 for width in found["svgs"])
    assert (found["images"], found["broken"]) == (48, 0)
    for row in read_csv(run / "csv" / "metrics.csv"):
        assert all(row[name] in found["text"] for name in row if name.startswith(("val/", "train/a")))


# ---- fits in the test's own process


def fit(
    folder: Path,
    *callbacks: Callback,
    module: ImageClassifier | None = None,
    epochs: int = 1,
    ckpt_path: Path | None = None,
    loggers: list[Logger] | None = None,
) -> None:
    options: dict[str, Any] = {"enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks)}
    trainer = L.Trainer(
        **QUIET | options | {"logger": [CSVLogger(str(folder / "csv"))] if loggers is None else loggers},
        max_epochs=epochs,
        log_every_n_steps=1,
        num_sanity_val_steps=1,
        default_root_dir=folder,
        callbacks=[*callbacks, RunRecord({"seed_everything": 0})],
    )
    shapes = Shapes10(num_train=64, num_val=NUM_VAL, batch_size=16)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*workers.*")
        trainer.fit(module or Scripted([10]), datamodule=shapes, ckpt_path=ckpt_path, weights_only=True)


class Raise(Callback):
    def __init__(self, exception: BaseException, epoch: int = 0) -> None:
        self.exception, self.epoch = exception, epoch

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step % 4 == 2 and trainer.current_epoch == self.epoch:
            raise self.exception


def checkpoints(folder: Path) -> list[Callback]:
    best = ModelCheckpoint(folder / "checkpoints", "best", monitor="val/acc", mode="max", enable_version_counter=False)
    return [LastCheckpoint(str(folder / "checkpoints" / "last.ckpt")), best, Report()]


def num_right(run: Path) -> int:
    results = Results(**data(run)["results"])
    assert len(results.targets) == NUM_VAL, "neither the sanity check nor another epoch is in it"
    return int((results.targets == results.predicted).sum())


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_the_best_epoch_is_known_after_a_resume(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="stop"):
        fit(tmp_path, *checkpoints(tmp_path), Raise(RuntimeError("stop"), 3), module=Scripted([5, 30, 7, 0]), epochs=5)
    assert (num_right(tmp_path), data(tmp_path)["epoch"], data(tmp_path)["step"]) == (30, 1, 8)
    assert "The run did not finish: failed: RuntimeError: stop" in (tmp_path / "report.html").read_text()
    (tmp_path / "report.pt").unlink()  # it is not taken from there
    last = tmp_path / "checkpoints" / "last.ckpt"
    fit(tmp_path, *checkpoints(tmp_path), module=Scripted([0, 0, 0, 20, 30]), epochs=5, ckpt_path=last)
    assert (num_right(tmp_path), data(tmp_path)["epoch"], data(tmp_path)["best"]) == (30, 1, True)
    assert "in epoch 2, after 8 steps" in (tmp_path / "report.html").read_text()
    fit(tmp_path, *checkpoints(tmp_path), module=Scripted([0] * 5 + [31, 2]), epochs=7, ckpt_path=last)
    assert (num_right(tmp_path), data(tmp_path)["epoch"]) == (31, 5)
    newest = torch.load(last, weights_only=True)
    newest["best_results"] |= {"epoch": 6, "step": 28, "results": Results(**data(tmp_path)["results"])._asdict()}
    torch.save(newest, last)  # as a run that went on once more leaves it when it is killed
    assert "in epoch 7, after 28 steps" in write_report(tmp_path).read_text()
    found = read_data(tmp_path)
    assert "worst" not in found, "the images of other mistakes"
    assert "first_batch" in found


def test_a_best_checkpoint_that_could_not_be_written_is_not_reported(tmp_path: Path) -> None:
    class Full(Callback):
        """No room for the best checkpoint of the second epoch."""

        def setup(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
            tolerate_full_disk(trainer)
            save = trainer.save_checkpoint

            def save_if_there_is_room(path: Any, *arguments: Any, **options: Any) -> None:
                if "best" in str(path) and trainer.current_epoch == 1:
                    trainer._checkpoint_connector.dump_checkpoint()  # that far it comes
                    raise SaveError(28, "No space left on device", str(path))
                save(path, *arguments, **options)

            trainer.save_checkpoint = save_if_there_is_room  # type: ignore[method-assign]

    with pytest.warns(UserWarning, match="No space left"), pytest.raises(InputError, match="could not be written"):
        fit(tmp_path, Full(), *checkpoints(tmp_path), module=Scripted([5, 30, 1]), epochs=3)
    assert (num_right(tmp_path), data(tmp_path)["epoch"]) == (5, 0)
    assert read_data(tmp_path)["epoch"] == 0, "nor does last.ckpt say so"


def test_a_crash_in_the_first_epoch_leaves_a_report(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="<b>mine</b>"):
        fit(tmp_path, Report(), Raise(ZeroDivisionError("<b>mine</b>")))
    text = (tmp_path / "report.html").read_text()
    assert 'class="alert">The run did not finish: failed: ZeroDivisionError: &lt;b&gt;mine' in text
    assert "No evaluation of images with one class each was completed" in text
    assert "train, single steps" in text, "what there is of a learning curve"
    assert text.count("<img") == 16
    assert json.loads((tmp_path / "run.json").read_text())["exit_reason"].startswith("failed: ZeroDivisionError")


def test_without_anything_there_is_no_report(tmp_path: Path) -> None:
    class Refuse(Callback):
        def on_train_start(self, *_: Any) -> None:
            raise InputError("not like this")

    with pytest.raises(InputError):
        fit(tmp_path, Report(), Refuse())
    assert not (tmp_path / "report.html").exists()
    assert "failed: InputError: not like this" in write_report(tmp_path).read_text(), "but one can be made"


@pytest.mark.parametrize(
    ("logits", "target"), [(1, 1), (10, -100), (10, 10)], ids=["one output", "ignored", "no such class"]
)
def test_what_is_no_class_of_the_outputs_ends_no_run(tmp_path: Path, logits: int, target: int) -> None:
    class Other(Scripted):
        def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            batch[1][-1] = target
            self.log("val/acc", 0.5)
            return torch.zeros(len(batch[1]), logits)

        def on_validation_epoch_end(self) -> None: ...

    fit(tmp_path, Report(), module=Other([0]), epochs=2)
    text = (tmp_path / "report.html").read_text()
    assert "The run finished." in text
    assert "nothing can be said of classes" in text
    assert "results" not in data(tmp_path)


@pytest.mark.parametrize("fault", [None, RuntimeError("out of memory")], ids=["no class", "error"])
def test_a_process_that_cannot_judge_still_takes_part_in_what_the_others_wait_for(
    monkeypatch: pytest.MonkeyPatch, fault: Exception | None
) -> None:
    gathered = []

    def gather(parts: list[Any], mine: Any) -> None:
        gathered.append(mine)
        parts[:] = [mine, ([judge(torch.zeros(2, 10), torch.tensor([3, 4]), None)], True, 10)]

    def fail(*_: Any) -> None:
        raise fault or AssertionError

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setattr(callback_module, "judge", fail)
    report, trainer = Report(), L.Trainer(**QUIET)
    monkeypatch.setattr(L.Trainer, "world_size", 2)
    report.on_validation_start(trainer, Scripted([0]))
    batch = torch.zeros(2, 3, 8, 8), torch.tensor([0, 1 if fault else 77])
    report.on_validation_batch_end(trainer, Scripted([0]), torch.zeros(2, 10), batch, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report.on_validation_end(trainer, Scripted([0]))
    assert len(gathered) == 1
    assert [str(fault) in str(warning.message) for warning in caught] == [True] * (fault is not None)
    assert report._latest is None, "half of the images would be no evaluation"


def test_labels_are_listed_unless_they_are_shares() -> None:
    names = ["red", "green", "blue"]
    labels = [callback_module._label(torch.tensor(target), names) for target in ([1.0, 1, 1], [0.0, 1, 0], [0.0, 0, 0])]
    assert labels == ["red, green, blue", "green", "no label"]
    assert callback_module._label(torch.tensor([0.7, 0.0, 0.3]), names) == "red 70% and blue 30%"


def test_a_report_that_fails_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no ink")

    monkeypatch.setattr(callback_module, "write_report", fail)
    with pytest.warns(UserWarning, match=r"report\.html could not be made: ValueError: no ink"):
        fit(tmp_path, Report())
    with pytest.warns(UserWarning, match="no ink"), pytest.raises(RuntimeError, match="its own"):
        fit(tmp_path, Report(), Raise(RuntimeError("its own")))


def test_without_matplotlib_a_line_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(callback_module, "find_spec", lambda name: None)
    monkeypatch.setattr("lit_project.pages.find_spec", lambda name: None)
    with caplog.at_level("INFO"):
        fit(tmp_path, Report())
    (line,) = (message for message in caplog.messages if "matplotlib" in message)
    assert f"pip install matplotlib && python -m lit_project.cli report {tmp_path}" in line
    assert num_right(tmp_path) == 10, "so that the report can be made then"
    with pytest.raises(InputError, match="pip install matplotlib"):
        write_report(tmp_path)


class Pictures(Logger):
    """A logger of somebody else's."""

    name = version = ""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[str, int, int | None, list[str]]] = []

    @property
    @rank_zero_experiment
    def experiment(self) -> None: ...

    def log_metrics(self, *_: Any, **__: Any) -> None: ...

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    def log_image(self, key: str, images: list[Any], step: int | None = None, caption: Any = ()) -> None:
        assert not caption or len(caption) == len(images)
        self.logged.append((key, len(images), step, list(caption)))


def test_any_logger_of_images_gets_the_pictures(tmp_path: Path) -> None:
    logger = Pictures()
    fit(tmp_path, Report(), loggers=[logger], module=Scripted([39]))
    first, matrix, worst = logger.logged
    assert (first[:3], matrix[:3]) == (("first batch", 16, 0), ("confusion matrix", 1, 4))
    assert worst[:3] == ("worst mistakes", 1, 4)
    assert worst[3] == ["circle 85.8%, is hourglass 1.6%"], "the last of 40 images that take turns"


def test_weights_are_the_same_bit_by_bit_with_and_without(tmp_path: Path) -> None:
    class Keep(Callback):
        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.weights = {name: value.clone() for name, value in pl_module.state_dict().items()}

    kept = []
    for name in ("with", "without"):
        torch.manual_seed(0)
        layers = [nn.AvgPool2d(4), nn.Flatten(), nn.BatchNorm1d(192), nn.Dropout(), nn.Linear(192, 10)]
        module = ImageClassifier(nn.Sequential(*layers))
        keep, folder = Keep(), tmp_path / name
        extra = [Report()] if name == "with" else []
        graph = name == "with"
        logger = ResumableTensorBoardLogger(str(folder), log_graph=graph, name="tensorboard", version="")
        fit(folder, *extra, keep, module=module, epochs=2, loggers=[logger])
        assert (folder / "report.html").is_file() == graph
        kept.append(keep.weights)
    assert kept[0].keys() == kept[1].keys()
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])


@pytest.mark.slow
def test_two_processes_count_each_image_once(tmp_path: Path) -> None:
    options = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.strategy=ddp", "--data.num_val=41"]
    cli(tmp_path, "fit", *TINY, REPORT, *options)
    (run,) = runs(tmp_path)
    results = Results(**data(run)["results"])
    assert results.positions.tolist() == list(range(41))
    assert results.targets.tolist() == [position % 10 for position in range(41)]
    (row,) = (row for row in read_csv(run / "csv" / "metrics.csv") if row["val/acc"])
    right = (results.targets == results.predicted).double().mean().item()
    assert right == pytest.approx(float(row["val/acc"]), abs=1e-6)
    assert "Of the 41 val images" in (run / "report.html").read_text()


def test_a_test_run_is_reported_with_its_own_images(tmp_path: Path) -> None:
    loggers = [CSVLogger(str(tmp_path / "csv"))]
    record = RunRecord({}, {"subcommand": "test"})
    options: dict[str, Any] = QUIET | {"logger": loggers, "default_root_dir": tmp_path}
    trainer = L.Trainer(**options, callbacks=[Report(), TestReport(), record])
    shapes = Shapes10(num_train=64, num_val=NUM_VAL, num_test=131, batch_size=50)
    trainer.test(Scripted([0]), datamodule=shapes, verbose=False)
    text = (tmp_path / "report.html").read_text()
    assert "Of the 131 test images" in text
    assert "Learning curves" not in text
    with (tmp_path / "confusion_matrix.csv").open(newline="") as file:
        matrix = [[int(cell) for cell in row[1:]] for row in list(csv.reader(file))[1:]]
    assert Results(**data(tmp_path)["results"]).confusion_matrix(10).tolist() == matrix
    (logged,) = read_csv(tmp_path / "csv" / "metrics.csv")
    assert f"<dt>test/acc</dt><dd>{float(logged['test/acc']):.4f}</dd>" in text


def test_a_thousand_classes_stay_readable(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(5000, dtype=torch.int32) % 1000
    predicted = torch.where(torch.rand(5000, generator=generator) < 0.7, targets, (targets * 7 + 1) % 1000)
    half = torch.full((5000,), 0.5)
    results = Results(targets, predicted, half, half, torch.arange(5000, dtype=torch.int32))
    names = [f"class number {number}" for number in range(1000)]
    content = {"results": results._asdict(), "class_names": names, "split": "val", "epoch": 0, "step": 9, "best": True}
    torch.save(content, tmp_path / "report.pt")
    (tmp_path / "run.json").write_text(json.dumps({"exit_reason": "finished"}))
    write_report(tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert len(text) < 1_000_000
    assert text.count("<text") < 200
    assert "The 40 classes with the lowest F1 of 1,000" in text
    assert len(cells(text, "class")) == 1001


# ---- what is read from metrics.csv and run.json


def folder_of(path: Path, metrics: str, **record: Any) -> Path:
    (path / "csv").mkdir()
    (path / "csv" / "metrics.csv").write_text(metrics)
    (path / "run.json").write_text(json.dumps({"exit_reason": "finished", **record}))
    return path


def curves_of(rows: list[dict[str, Any]]) -> Any:
    names = dict.fromkeys(["epoch", "step", *(name for row in rows for name in row)])
    return _Curves([{name: str(row.get(name, "")) for name in names} for row in rows])


def test_x_is_the_epoch_whatever_is_logged_in_each_step() -> None:
    rows = [{"epoch": step // 4, "step": step, "train/loss": 9 - step} for step in range(8)]
    for step, loss in ((1, 8), (3, 6), (5, 4), (7, 2)):  # two validations an epoch
        rows[step]["val/loss"] = loss
    curves = curves_of(rows)
    assert (curves.unit, curves.last_epoch) == ("epoch", 1)
    assert curves.of("train", "loss")[0].tolist() == [0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2]
    assert [part.tolist() for part in curves.of("val", "loss")] == [[0.5, 1, 1.5, 2], [8, 6, 4, 2]]


def test_a_run_from_an_earlier_checkpoint_begins_at_its_epoch() -> None:
    curves = curves_of([{"epoch": epoch, "step": 4 * epoch + 3, "val/acc": 0.5} for epoch in (5, 6, 7)])
    assert curves.of("val", "acc")[0].tolist() == [6, 7, 8]
    assert curves.position(7 * 4 + 1) == 7.5
    rows = [{"step": 20, "lr-SGD": 1}, {"epoch": 5, "step": 23, "val/acc": 0.5}]
    assert curves_of(rows).unit == "step", "how long an epoch is, nobody knows"
    assert curves_of(rows).of("val", "acc")[0].tolist() == [24]


def test_names_with_an_underscore_are_drawn_too(tmp_path: Path) -> None:
    header = "epoch,step,train_loss_step,train_loss_epoch,val_loss,val_acc,lr-SGD\n"
    folder = folder_of(tmp_path, f"{header}0,3,2.5,2,3,0.5,0.1\n1,7,1.5,1,2,0.75,0.1\n")
    text = write_report(folder).read_text()
    assert text.count("<svg") == 2
    assert text.index(">loss</text>") < text.index(">acc</text>")
    assert text.count(">train, single steps</text>") == 1
    assert "<dt>last val_loss</dt><dd>2.0000</dd>" in text
    assert cells(text, "epoch")[1] == ["0", "3", "3", "2", "0.5", "0.1"]


def test_what_has_no_stage_is_not_said_to_be_nothing(tmp_path: Path) -> None:
    text = write_report(folder_of(tmp_path, "epoch,step,accuracy\n0,3,0.5\n")).read_text()
    assert "Nothing was logged" not in text
    assert "train/loss or val_acc" in text


@pytest.mark.parametrize(
    ("end", "expected"), [("2026-11-30T10:00:00+00:00", "1 h 30 min"), (None, "more than 30 min 00 s")]
)
def test_all_starts_take_time(tmp_path: Path, end: str | None, expected: str) -> None:
    earlier = [{"start": "2026-11-30T09:00:00+00:00", "end": end}]
    last = {"start": "2026-11-30T11:00:00+00:00", "end": "2026-11-30T11:30:00+00:00"}
    folder = folder_of(tmp_path, "epoch,step\n", **last, earlier=earlier)
    assert f"<dt>took</dt><dd>{expected}</dd>" in write_report(folder).read_text()
