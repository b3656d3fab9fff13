"""``rerun`` repeats a run, and tells the same result from another."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import cli, runs
from torch import Tensor

from lit_project.commands import rerun
from lit_project.errors import InputError


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> Path:
    """A finished run that a test may change."""
    return Path(shutil.copytree(tiny_run, tmp_path / "runs" / "fit-0"))


def change(run: Path, **values: Any) -> None:
    record = json.loads((run / "run.json").read_text()) | values
    (run / "run.json").write_text(json.dumps(record))


def test_a_run_repeated_is_bit_identical(run: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    change(run, cwd=str(tmp_path))
    done = cli(tmp_path / "elsewhere", "rerun", run)
    (new,) = (folder for folder in runs(tmp_path) if folder != run)
    last = done.stdout.splitlines()[-2:]
    assert last[0] == f"Again: {new}"
    assert last[1].startswith("Bit-identical: 18 tensors of best.ckpt, 18 tensors of last.ckpt, ")
    assert json.loads((new / "run.json").read_text())["cwd"] == str(tmp_path), "relative paths mean the same"


def other_run(run: Path) -> Path:
    return Path(shutil.copytree(run, run.with_name("fit-1")))


def compare(run: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(rerun, "run_again", lambda old, record: other)
    return rerun.main([str(run)])


def test_what_differs_is_named(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    other = other_run(run)
    assert compare(run, other, monkeypatch) == 0
    last = torch.load(other / "checkpoints" / "last.ckpt", weights_only=True)
    name = list(last["state_dict"])[3]
    last["state_dict"][name].view(-1)[0] += 0.5
    torch.save(last, other / "checkpoints" / "last.ckpt")
    (other / "checkpoints" / "best.ckpt").unlink()
    header, first, second, *rows = (other / "csv" / "metrics.csv").read_text().splitlines()
    column = header.split(",").index("train/loss_step")
    cells = second.split(",")
    before, cells[column] = cells[column], "7.0"
    (other / "csv" / "metrics.csv").write_text("\n".join([header, first, ",".join(cells), *rows, ""]))
    record = json.loads((run / "run.json").read_text())
    versions, machine = record["versions"] | {"torch": "3.0"}, record["machine"] | {"threads": 7}
    change(other, versions=versions, machine=machine, data=None, pid=1, end="later")
    (other / "diff.patch").write_text("another")
    capsys.readouterr()
    assert compare(run, other, monkeypatch) == 1
    printed = capsys.readouterr().out
    assert "best.ckpt: not written this time" in printed
    assert f"last.ckpt: 1 of 18 tensors, the first is {name} (by up to 0.5)" in printed
    assert f"metrics.csv: first in row 2 (step 3), train/loss_step: {before} before, 7.0 now" in printed
    facts = printed.split("What is recorded differs in:\n")[1].splitlines()
    assert f"  versions.torch: {record['versions']['torch']} before, 3.0 now" in facts
    assert "  machine.threads: 1 before, 7 now" in facts
    assert f"  data.train.sha256: {record['data']['train']['sha256']} before, None now" in facts
    assert "  diff.patch: what was changed since the commit" in facts


def test_a_difference_without_a_recorded_cause_is_put_down_to_the_operations(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = other_run(run)
    metrics = other / "csv" / "metrics.csv"
    metrics.write_text("\n".join([*metrics.read_text().splitlines()[:-1], ""]))
    assert compare(run, other, monkeypatch) == 1
    assert "some operation is not deterministic" in capsys.readouterr().out
    record = json.loads((run / "run.json").read_text())
    fewer = record["data"] | {"train": record["data"]["train"] | {"images": 3}}
    change(run, earlier=[record | {"data": fewer}, record | {"data": None}])
    assert compare(run, other, monkeypatch) == 1
    printed = capsys.readouterr().out
    images = record["data"]["train"]["images"]
    assert printed.splitlines()[-1] == (
        f"  data.train.images: 3 at an earlier start of the run, {images} when it was resumed"
    )


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        (torch.tensor(float("nan")), torch.tensor(float("nan")), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23]), False),
        (torch.ones(2, 3), torch.ones(3, 2).t(), True),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
        (torch.tensor([True]), torch.tensor([True]), True),
    ],
)
def test_bits_are_compared_not_values(tmp_path: Path, one: Tensor, two: Tensor, same: bool) -> None:
    for name, tensor in (("one", one), ("two", two)):
        torch.save({"state_dict": {"w": tensor}, "pytorch-lightning_version": "2"}, tmp_path / name)
    _, differences = rerun.compare_weights(tmp_path / "one", tmp_path / "two")
    assert (differences == []) == same


@pytest.mark.parametrize(
    ("subcommand", "ckpt_path", "given"),
    [
        ("fit", None, False),
        ("fit", "{run}/checkpoints/last.ckpt", False),
        ("fit", "/other.ckpt", True),
        ("test", "{run}/checkpoints/last.ckpt", True),
    ],
    ids=["anew", "went on in its folder", "from another run", "test"],
)
def test_it_starts_as_the_run_started(
    run: Path, monkeypatch: pytest.MonkeyPatch, subcommand: str, ckpt_path: str | None, given: bool
) -> None:
    """The threads are those of the run, unless the user says otherwise, since sums depend on their number.

    Beside it are runs that had the same process ID, as in containers. The record is in UTF-8 whatever the locale is.
    """
    started: dict[str, Any] = {}

    class Process:
        pid = 99

        def __init__(self, command: list[str], **options: Any) -> None:
            started.update(options, command=command)

        def wait(self) -> int:
            new = other_run(run).rename(run.with_name(f"{subcommand}-9"))
            record = json.loads((new / "run.json").read_bytes()) | {"pid": 99, "cwd": "/Bücher"}
            (new / "run.json").write_text(json.dumps(record, ensure_ascii=False), encoding="utf-8")
            return 0

    monkeypatch.setattr(rerun.subprocess, "Popen", Process)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    path = ckpt_path and ckpt_path.format(run=run)
    machine = json.loads((run / "run.json").read_text())["machine"] | {"threads": 5}
    change(run, subcommand=subcommand, ckpt_path=path, machine=machine)
    for number in range(2, 9):
        (run.parent / f"{subcommand}-{number}").mkdir()
        shutil.copy2(run / "run.json", run.parent / f"{subcommand}-{number}")
        change(run.parent / f"{subcommand}-{number}", pid=99)
    monkeypatch.setattr(io, "text_encoding", lambda encoding, *_: encoding or "ascii")
    assert rerun.run_again(run, rerun.read_record(run)) == run.with_name(f"{subcommand}-9")
    assert started["command"][3] == subcommand
    assert (f"--ckpt_path={path}" in started["command"]) == given
    assert started["env"]["OMP_NUM_THREADS"] == "5"
    assert "SLURM_RESTART_COUNT" not in started["env"], "or a requeued job would go on with what it is to repeat"


def test_at_ctrl_c_it_waits_for_the_last_checkpoint(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []

    class Process:
        def __init__(self, command: list[str], **options: Any) -> None:
            pass

        def wait(self) -> int:
            waits.append(self)
            if len(waits) == 1:
                raise KeyboardInterrupt
            return 130

    monkeypatch.setattr(rerun.subprocess, "Popen", Process)
    with pytest.raises(KeyboardInterrupt):
        rerun.run_again(run, rerun.read_record(run))
    assert len(waits) == 2


def test_only_a_run_with_a_result_can_be_repeated(run: Path) -> None:
    with pytest.raises(InputError, match=r"not the folder of a run: its run\.json"):
        rerun.main([str(run.parent)])
    change(run, exit_reason="running")
    with pytest.raises(InputError, match=r"did not finish \(running\)"):
        rerun.main([str(run)])
    change(run, exit_reason="finished", subcommand="predict")
    with pytest.raises(InputError, match="nothing to run and compare"):
        rerun.main([str(run)])
