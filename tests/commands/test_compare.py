"""``compare`` puts run folders side by side."""

import json
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from conftest import environment
from helpers import full_disk
from made_runs import CONFIG, made_run, made_test

from lit_project import pages
from lit_project.commands import compare
from lit_project.errors import InputError

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
#: The effect of two drugs on sleep, in hours (Student 1908, "The probable error of a mean", Biometrika 6): R's `sleep`.
DRUG_1 = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
DRUG_2 = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]


def configured(**optimizer: Any) -> dict[str, Any]:
    model = {"class_path": "Net", "init_args": {"optimizer": {"class_path": "SGD", "init_args": optimizer}}}
    return CONFIG | {"model": model}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with three runs: a finished and tested one, one that failed at once, a killed one."""
    monkeypatch.chdir(tmp_path)
    one = made_run(
        tmp_path / "runs" / "fit-1",
        {"val/acc": 0.5, "val/loss": 1.0, "train/loss": 2.0},
        {"val/acc": 0.75, "val/loss": 1.25, "train/loss": 1.0},
        config=configured(lr=0.1),
    )
    made_test(one)
    made_run(
        tmp_path / "runs" / "fit-2",
        config=configured(lr=0.2) | {"seed_everything": 5},
        best=None,
        exit_reason="failed: ValueError: <b>no</b> [red]luck",
        data=None,
        git=None,
    )
    made_run(
        tmp_path / "runs" / "fit-3",
        {"val/acc": 0.25, "val/loss": 0.5, "train/loss": 1.5},
        config=configured(lr=0.1, nesterov=True),
        exit_reason="running",
        end=None,
        git={"commit": "fedcba9876543210", "changed": True},
        earlier=[{"start": "2026-11-30T08:00:00+00:00", "end": "2026-11-30T08:00:30+00:00"}],
    )
    return tmp_path


def table(printed: str, title: str) -> list[list[str]]:
    """The cells of a printed table, header first."""
    lines = printed.splitlines()
    start = next(index for index, line in enumerate(lines) if line.strip() == title)
    end = next(index for index, line in enumerate(lines[start:], start) if line.startswith("└"))
    rows = [line for line in lines[start:end] if line[:1] in "┃│"]
    return [[cell.strip() for cell in re.split("[┃│]", row)[1:-1]] for row in rows if row]


def test_the_tables_say_what_the_folders_hold(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["runs/*"]) == 0
    printed = capsys.readouterr().out
    assert "Left out, as not of a fit: test-1\n" in printed
    assert table(printed, "Scores") == [
        ["#", "run", "best epoch", "val/acc", "val/loss", "test/acc", "test/loss"],
        ["1", "fit-1", "1", "0.7500", "1.2500", "0.5000", "1.5000"],
        ["2", "fit-2", "", "", "", "", ""],
        ["3", "fit-3", "0", "0.2500", "0.5000", "", ""],
    ]
    assert table(printed, "How they ran") == [
        ["#", "seed", "commit", "duration", "ended"],
        ["1", "0", "01234567", "1:02:03", "finished"],
        ["2", "5", "", "1:02:03", "failed: ValueError: <b>no</b> [red]luck; no metrics.csv"],
        ["3", "0", "fedcba98, changed", "0:00:30 +", "killed, or still running"],
    ]
    assert table(printed, "Config keys that differ") == [
        ["#", "model.optimizer.lr", "model.optimizer.nesterov"],
        ["1", "0.1", ""],
        ["2", "0.2", ""],
        ["3", "0.1", "true"],
    ]
    assert "Not comparable" not in printed


def test_many_keys_go_downwards_and_long_values_are_cut(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_run(folder / "runs" / "fit-4", config=configured(lr=0.2, a=[1] * 99, b=None, c="x"))
    assert compare.main(["runs/fit-1", "runs/fit-4"]) == 0
    rows = table(capsys.readouterr().out, "Config keys that differ")
    assert rows[0] == ["key", "# 1", "# 2"]
    assert rows[1] == ["model.optimizer.lr", "0.1", "0.2"]
    assert rows[2] == ["model.optimizer.a", "", f"{str([1] * 99)[:80]}…"]
    assert rows[3] == ["model.optimizer.c", "", "x"]
    assert len(rows) == 4, "null is what a key that is not there means"


@pytest.mark.parametrize(("metric", "order"), [("val/acc", "132"), ("val/loss", "312"), ("test/acc", "123")])
def test_sorted_the_best_comes_first(folder: Path, capsys: pytest.CaptureFixture[str], metric: str, order: str) -> None:
    compare.main(["runs/*", "--sort", metric])
    names = [row[1] for row in table(capsys.readouterr().out, "Scores")[1:]]
    assert "".join(name[-1] for name in names) == order


def test_other_data_and_another_monitor_are_marked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watched = {"callbacks": {"best": {"class_path": "x.ModelCheckpoint", "init_args": {"monitor": "val/loss"}}}}
    other = {"train": {"images": 10, "sha256": "train-sha256"}, "val": {"images": 1234, "sha256": "abcdefghij"}}
    run = made_run(folder / "runs" / "fit-4", {"val/acc": 0.5}, config=CONFIG | watched, data=other)
    made_test(run, "test-4", data={"test": {"images": 5, "sha256": "other-test"}})
    compare.main(["runs/fit-*"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Not comparable as they stand")]
    assert [line.partition("different ")[2] for line in lines] == [
        "monitored metric: val/acc (max) (1, 2, 3); val/loss (min) (4).",
        "val data: 10 images, val-sha2 (1, 3); 1,234 images, abcdefgh (4).",
        "test data: 20 images, test-sha (1); 5 images, other-te (4).",
    ]


def test_it_is_quick_since_it_imports_neither_torch_nor_lightning(folder: Path) -> None:
    script = (
        "import runpy, sys\nsys.argv = ['cli', 'compare', 'runs/*']\n"
        "try:\n    runpy.run_module('lit_project.cli', run_name='__main__')\nexcept SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "print([name for name in ('torch', 'lightning', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=environment(folder / "home"), capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs/fit-1", "runs/fit-9"], "There is no run folder runs/fit-9 in "),
        (["runs/fit-1", "runs"], "runs is not the folder of a run: its run.json cannot be read"),
        (["nothing/*"], "No run folder matches nothing/* in "),
        (["runs/fit-1"], "compare needs two runs or more, and runs/fit-1 is 1"),
        (["runs/fit-1", "runs/fit-1", "runs/test-1"], "runs/fit-1 runs/fit-1 runs/test-1 is 1"),
        (["runs/*", "--sort", "acc"], "--sort acc: no run has this metric. There are: val/acc, val/loss, test/acc"),
        (["runs/*", "--output", "runs"], "--output runs cannot be written: Is a directory"),
    ],
)
def test_a_mistake_is_said_in_words(folder: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        compare.main(arguments)


def test_runs_of_one_name_are_told_apart(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folder / "runs" / "fit-1", folder / "other" / "fit-1")
    compare.main(["runs/fit-1", "other/fit-1"])
    printed = capsys.readouterr().out
    names = [row[1] for row in table(printed, "Scores")[1:]]
    assert names == ["runs/fit-1", "other/fit-1"]
    assert "The configs differ in nothing but the seed, if in that." in printed


# ---- repeats


def made_repeat(folder: Path, *values: float, planned: int | None = None, metric: str = "val/acc") -> Path:
    """A repeat folder with a run for each value; runs beyond them failed."""
    results = []
    for seed in range(planned or len(values)):
        done = seed < len(values)
        config = CONFIG | {"seed_everything": seed}
        ending = {} if done else {"exit_reason": "failed: x"}
        made_run(folder / f"fit-{seed}", *([{metric: values[seed]}] if done else []), config=config, **ending)
        metrics = {metric: values[seed]} if done else {}
        ended = "finished" if done else "failed in fit: x"
        results.append({"seed": seed, "folder": f"fit-{seed}", "exit": ended, "metrics": metrics})
    results.append({"seed": 99, "folder": None, "exit": None, "metrics": {}})  # not started yet
    told = {metric: {"n": len(values), "mean": 0.5, "sd": 0.25, "low": 0.125, "high": 1.0}} if values else {}
    (folder / "repeat.json").write_text(json.dumps({"options": [], "results": results, "statistics": told}))
    return folder


def test_two_repeats_are_told_apart_or_not(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_repeat(folder / "repeat-1", *DRUG_1)
    made_repeat(folder / "repeat-2", *DRUG_2, planned=11)
    assert compare.main(["repeat-1/fit-3", "repeat-*", "repeat-2"]) == 0, "each counts once"
    printed = capsys.readouterr().out
    assert len(table(printed, "Scores")) == 1 + 10 + 11
    assert table(printed, "Repeats")[1:] == [
        ["val/acc", "repeat-1", "10 of 11", "0.5000", "0.2500", "0.1250", "1.0000"],
        ["val/acc", "repeat-2", "10 of 12", "0.5000", "0.2500", "0.1250", "1.0000"],
    ]
    assert "repeat-1 minus repeat-2, by Welch's t-test." in printed
    # R: t.test(extra ~ group, sleep)
    assert (
        "val/acc: 0.7500 (n = 10) against 2.3300 (n = 10): within noise, the difference is -1.5800, 95 % interval "
        "-3.3655 to +0.2055, p = 0.079.\n"
    ) in printed


def test_welch_is_that_of_the_textbook() -> None:
    low, high, p = compare.welch(DRUG_1, DRUG_2)
    assert (low, high, p) == pytest.approx((-3.3654832, 0.2054832, 0.07939414), rel=1e-6)


@pytest.mark.parametrize(
    ("one", "two", "told"),
    [
        ([0.9, 0.9, 0.9], [0.9, 0.9], "no difference, every run has the same."),
        ([0.9, 0.9], [0.8, 0.8], "a difference of +0.1000 in every run, and no noise."),
        # df 2, so the interval is 0.5 +- 4.302653 * sqrt(0.01 / 3)
        (
            [1.0, 1.0, 1.0],
            [0.4, 0.5, 0.6],
            "more than noise, the difference is +0.5000, 95 % interval +0.2516 to +0.7484",
        ),
        (
            [1.0, 2.0],
            [1.0, 2.0],
            "within noise, the difference is +0.0000, 95 % interval -3.0424 to +3.0424, p = 1.000.",
        ),
    ],
)
def test_a_sample_without_spread_is_no_reason_to_warn(one: list[float], two: list[float], told: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert told in compare.verdict(one, two)


def test_one_finished_run_does_not_tell_noise(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_repeat(folder / "repeat-1", 0.5, 0.6)
    made_repeat(folder / "repeat-2", 0.5, planned=3)
    with pytest.raises(
        InputError, match="The repeat repeat-2 has 1 finished run: to tell a difference from noise takes"
    ):
        compare.main(["repeat-1", "repeat-2"])
    assert len(table(capsys.readouterr().out, "Scores")) == 1 + 2 + 3, "which is shown all the same"


def test_a_repeat_json_that_is_none_is_said(folder: Path) -> None:
    (folder / "runs" / "fit-1" / "repeat.json").write_text("[]")
    with pytest.raises(InputError, match=r"repeat\.json cannot be read as what a repeat wrote"):
        compare.main(["runs/fit-1", "runs/fit-3"])


# ---- the page


def test_the_page_shows_the_same_with_curves(folder: Path) -> None:
    (folder / "runs" / "fit-1").rename(folder / "runs" / "fit-<b>1")
    compare.main(["runs/fit-*", "--output", "deep/page.html"])
    page = (folder / "deep" / "page.html").read_text()
    assert "<td>fit-&lt;b&gt;1</td>" in page
    assert "failed: ValueError: &lt;b&gt;no&lt;/b&gt; [red]luck" in page
    assert "<b>1" not in page
    for metric in ("val/acc", "val/loss", "train/loss"):
        assert f">{metric}</text>" in page
    assert not re.search(r"<script|\bsrc=|@import", page)


def test_a_write_that_fails_leaves_the_page_as_it_was(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = folder / "compare.html"
    page.write_text("old")
    with full_disk(1000), pytest.raises(InputError, match=r"compare\.html cannot be written: File too large"):
        compare.main(["runs/*"])
    assert page.read_text() == "old"


def test_without_matplotlib_the_tables_are_shown_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pages, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install matplotlib"):
        compare.main(["runs/fit-*"])
    assert len(table(capsys.readouterr().out, "Scores")) == 4
    assert not (folder / "compare.html").exists()


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser")
def test_a_browser_finds_no_fault_and_a_phone_scrolls_the_tables_alone(folder: Path) -> None:
    for repeat, values in (("repeat-<b>1", (0.5, 0.6, 0.7)), ("repeat-2", (0.5, 0.5))):
        run = made_repeat(folder / repeat, *values) / "fit-0"
        for number in range(4):
            with (run / "run.json").open("r+") as file:
                record = json.load(file)
                record["config"][f"a_rather_long_name_of_a_key_{number}"] = number
                file.seek(0)
                json.dump(record, file)
    compare.main(["repeat-*"])
    page = folder / "compare.html"
    # the page itself runs no script, so what is measured is a copy that does
    measure = (
        "<script>addEventListener('load', () => { const d = document.documentElement;"
        "d.dataset.page = d.scrollWidth - d.clientWidth;"
        "d.dataset.boxes = [...document.querySelectorAll('.wide')].filter(b => b.scrollWidth > b.clientWidth).length;"
        "})</script>"
    )
    text = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text())
    (folder / "measured.html").write_text(text.replace("</body>", f"{measure}</body>"))
    dumped = {}
    for name in ("compare", "measured"):
        done = subprocess.run(
            [
                str(CHROMIUM),
                *["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"],
                *["--enable-logging=stderr", "--v=0", "--window-size=400,800", "--dump-dom"],
                f"--user-data-dir={folder / 'profile'}",
                (folder / f"{name}.html").as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert "CONSOLE" not in done.stderr, done.stderr
        dumped[name] = done.stdout
    assert dumped["compare"].count("<svg") == 1
    assert "1, 2 repeat-2<br>" in dumped["compare"]
    assert "3, 4, 5 repeat-&lt;b&gt;1</p>" in dumped["compare"]
    assert 'data-page="0"' in dumped["measured"]
    assert int(re.findall(r'data-boxes="(\d+)"', dumped["measured"])[0]) > 0, "or nothing was wide"
