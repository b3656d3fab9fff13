import csv
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_only
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import Tensor, nn

from lit_project.loggers import CSVLogger, ResumableTensorBoardLogger


def log(logger: CSVLogger, *entries: tuple[int, dict[str, float]]) -> None:
    """As Lightning does: each entry is followed by a save."""
    for step, metrics in entries:
        logger.log_metrics({"epoch": 0, **metrics}, step)
        logger.save()


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(None not in (*row, *row.values()) for row in rows), "each row has all columns"
    return rows


def test_what_a_step_logs_in_turns_is_one_row(tmp_path: Path) -> None:
    logger = CSVLogger(str(tmp_path / "csv"))
    log(logger, (0, {"lr": 0.1}), (0, {"loss": 2.0}), (1, {"lr": 0.0625}), (1, {"loss": 1.0}))
    assert table(tmp_path / "csv") == [
        {"epoch": "0", "step": "0", "lr": "0.1", "loss": "2"},
        {"epoch": "0", "step": "1", "lr": "0.0625", "loss": "1"},
    ]


def test_a_shorter_value_leaves_nothing_of_the_longer_one_before(tmp_path: Path) -> None:
    logger = CSVLogger(str(tmp_path))
    log(logger, (0, {"loss": 0.1234567}), (0, {"loss": 2}))
    assert table(tmp_path) == [{"epoch": "0", "step": "0", "loss": "2"}]


def test_a_metric_that_appears_later_gets_a_column_at_the_end(tmp_path: Path) -> None:
    logger = CSVLogger(str(tmp_path))
    log(logger, (0, {"loss": 3}), (1, {"loss": 2}), (1, {"val/acc": 0.5, "an": 7}), (2, {"loss": 1}))
    rows = table(tmp_path)
    assert list(rows[0]) == ["epoch", "step", "loss", "an", "val/acc"]
    assert [row["loss"] for row in rows] == ["3", "2", "1"]
    assert [row["val/acc"] for row in rows] == ["", "0.5", ""]


def test_a_resumed_run_drops_what_it_will_log_again(tmp_path: Path) -> None:
    log(CSVLogger(str(tmp_path)), *((step, {"loss": step}) for step in range(5)))
    resumed = CSVLogger(str(tmp_path))
    resumed.resume_at(3)
    assert [row["step"] for row in table(tmp_path)] == ["0", "1", "2"]
    log(resumed, (3, {"loss": 30}), (4, {"other": 40}))
    assert [(row["step"], row["loss"], row["other"]) for row in table(tmp_path)] == [
        ("0", "0", ""),
        ("1", "1", ""),
        ("2", "2", ""),
        ("3", "30", ""),
        ("4", "", "40"),
    ]


@pytest.mark.parametrize("cut", [1, 4, 8])
def test_a_row_that_was_being_written_in_a_crash_is_dropped(tmp_path: Path, cut: int) -> None:
    log(CSVLogger(str(tmp_path)), (0, {"loss": 1, "lr": 0.1}), (17, {"loss": 2, "lr": 0.1}))
    file = tmp_path / "metrics.csv"
    file.write_bytes(file.read_bytes()[: -len("0,17,2,0.1\r\n") + cut])  # "0", "0,17", "0,17,2,0"
    resumed = CSVLogger(str(tmp_path))
    resumed.resume_at(17)
    log(resumed, (17, {"loss": 3, "lr": 0.2}))
    assert [(row["step"], row["loss"]) for row in table(tmp_path)] == [("0", "1"), ("17", "3")]


def test_a_crash_while_columns_are_added_leaves_the_file_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = CSVLogger(str(tmp_path))
    log(logger, (0, {"loss": 1}), (1, {"loss": 2}))
    before = table(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(csv.DictWriter, "writerows", full)
        with pytest.raises(OSError, match="No space"):
            log(logger, (1, {"new": 5}))
        assert table(tmp_path) == before
    log(logger, (2, {"loss": 3}))  # there is room again
    assert [(row["loss"], row["new"]) for row in table(tmp_path)] == [("1", ""), ("2", "5"), ("3", "")]


def test_another_runs_file_is_replaced(tmp_path: Path) -> None:
    log(CSVLogger(str(tmp_path)), (0, {"theirs": 1}), (1, {"theirs": 1}))
    log(CSVLogger(str(tmp_path)), (1, {"loss": 2}))
    assert table(tmp_path) == [{"epoch": "0", "step": "1", "loss": "2"}]


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log(CSVLogger(str(tmp_path)), (0, {"loss": 1}))
    before = (tmp_path / "metrics.csv").read_bytes()
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger = CSVLogger(str(tmp_path))
    logger.resume_at(0)
    log(logger, (5, {"loss": 2}))
    logger.finalize("success")
    assert (tmp_path / "metrics.csv").read_bytes() == before


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    def logger() -> ResumableTensorBoardLogger:
        return ResumableTensorBoardLogger(str(tmp_path), name="tensorboard", version="")

    def write(to: ResumableTensorBoardLogger, steps: range, value: float) -> None:
        for step in steps:
            to.log_metrics({"loss": value}, step)
        to.finalize("success")

    write(logger(), range(6), 1.0)
    resumed = logger()
    resumed.resume_at(3)
    write(resumed, range(3, 8), 2.0)
    reader = EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=True)
    reader.Reload()
    shown = [(event.step, event.value) for event in reader.Scalars("loss")]
    assert shown == [(step, 1.0 if step < 3 else 2.0) for step in range(8)]


def test_the_hparams_tab_has_the_best_score_also_after_a_resume(tmp_path: Path) -> None:
    def session(resume_at: int | None, saves: dict[int, float], end: int) -> None:
        """Validate after every fourth step; ``saves`` has the steps after which a checkpoint is the best so far."""
        logger = ResumableTensorBoardLogger(str(tmp_path), name="tensorboard", version="")
        if resume_at is not None:
            logger.resume_at(resume_at)
        logger.log_hyperparams({"lr": 0.5, "network": {"class_path": "CNN"}})  # as Lightning does at the start
        checkpoint = ModelCheckpoint(monitor="val/acc", mode="max")
        for done in range((resume_at or 0) + 4, end + 1, 4):
            logger.log_metrics({"val/acc": 0.1}, done - 1)
            if done in saves:
                checkpoint.best_model_score = torch.tensor(saves[done])
                logger.after_save_checkpoint(checkpoint)
        logger.finalize("success")

    session(None, {4: 0.25, 8: 0.5, 12: 0.75}, 12)
    session(8, {}, 16)  # killed before the checkpoint at step 12 was written, and going on from that at 8
    reader = EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=True)
    reader.Reload()
    assert [(event.step, event.value) for event in reader.Scalars("best/val/acc")] == [(3, 0.25), (7, 0.5)]
    start = HParamsPluginData.FromString(
        reader.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    ).session_start_info
    assert start.hparams["lr"].number_value == 0.5
    assert start.hparams["network/class_path"].string_value == "CNN"
    experiment = HParamsPluginData.FromString(reader.summary_metadata["_hparams_/experiment"].plugin_data.content)
    assert [info.name.tag for info in experiment.experiment.metric_infos] == ["best/val/acc"]


@pytest.mark.parametrize(
    ("metrics", "status", "shown"),
    [
        ({"val/acc": 0.5, "train/acc": 0.6, "lr-SGD": 0.1}, "success", ["last/val/acc"]),
        ({"train/acc": 0.6, "lr-SGD": 0.1}, "success", ["last/train/acc"]),
        ({"train/acc": 0.6}, "failed", []),  # goes on, and then has a best score: only the first metrics are shown
    ],
)
def test_the_hparams_tab_has_the_last_metrics_where_there_is_no_best(
    tmp_path: Path, metrics: dict[str, float], status: str, shown: list[str]
) -> None:
    logger = ResumableTensorBoardLogger(str(tmp_path), name="tensorboard", version="")
    logger.log_hyperparams({"lr": 0.5})
    logger.log_metrics(dict.fromkeys(metrics, 0.0), 3)
    logger.log_metrics(metrics, 7)
    logger.after_save_checkpoint(ModelCheckpoint())  # which monitors nothing
    logger.finalize(status)
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    for name in shown:
        assert [(event.step, event.value) for event in reader.Scalars(name)] == [
            (7, pytest.approx(metrics[name.removeprefix("last/")]))
        ]
    found = reader.summary_metadata.get("_hparams_/experiment")
    infos = HParamsPluginData.FromString(found.plugin_data.content).experiment.metric_infos if found else []
    assert [info.name.tag for info in infos] == shown


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, images: Tensor) -> Tensor:
        raise RuntimeError("not while tracing\nmore")


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (nn.Linear(4, 2), None),
        (Untraceable(), "no graph of the network: RuntimeError: not while tracing."),
        (nn.Sequential(*(nn.Identity() for _ in range(400)), nn.Linear(4, 2)), "401 modules|402 modules"),
        (nn.Linear(4, 2), "it is compiled"),
    ],
    ids=["small", "failing", "large", "compiled"],
)
def test_the_graph(
    tmp_path: Path,
    network: nn.Module,
    said: str | None,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if said == "it is compiled":
        network.compile()
    trainer = SimpleNamespace(
        state=SimpleNamespace(fn="fit"),
        strategy=SingleDeviceStrategy("cpu"),
        datamodule=SimpleNamespace(sample_images=lambda count: torch.ones(count, 4)),
    )
    logger = ResumableTensorBoardLogger(str(tmp_path), name="tensorboard", version="")
    with caplog.at_level("INFO"):
        logger.log_graph(SimpleNamespace(trainer=trainer, network=network))  # type: ignore[arg-type]
    logger.finalize("success")
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    assert reader.Tags()["graph"] == (said is None)
    assert [bool(re.search(said or "", message)) for message in caplog.messages] == [True] * (said is not None)
    assert capsys.readouterr().out == "", "torch prints what it raises"
