"""Compare runs: scores, the config keys that differ, seed, commit, how each ended; on the terminal and as a page.

Given are run folders, repeat folders, or quoted globs such as "runs/fit-*". The validation metrics of a run are those
of its best epoch, by the metric that it monitored; the test metrics are of the newest test of its best checkpoint,
looked for beside it; a test from before the run replaced that checkpoint does not count. Two repeats are also told
apart, or not, by Welch's t-test: whether the difference of their means is more than the noise of training with other
seeds. The page, compare.html, is one file with the learning curves.
"""

import glob
import json
import math
import os
import statistics
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lit_project import commands
from lit_project.errors import InputError
from lit_project.files import write_atomically
from lit_project.run_folders import (
    Record,
    Row,
    best_epoch,
    flat,
    monitored,
    number,
    read_metrics,
    read_record,
    read_repeat,
    test_of,
    tests_in,
    time_taken,
)
from lit_project.tables import print_table

#: What a config says of where a run is and with which seed; the latter has a column of its own.
_OWN = {"seed_everything", "trainer.default_root_dir"}
#: Longest value of a config key that is shown whole.
_MOST_CHARACTERS = 80


class Run(NamedTuple):
    """A run, and what its folder tells of it."""

    name: str
    record: Record
    #: Of the newest test of its best checkpoint, if there is one.
    test: Record | None
    rows: list[Row]
    #: Counted from 0.
    best_epoch: int | None
    scores: dict[str, float]
    #: The position of its repeat among those compared, if it is of one.
    repeat: int | None


class Repeat(NamedTuple):
    """What ``repeat.json`` tells."""

    name: str
    #: How many runs were to be made.
    planned: int
    #: The metrics of each run that finished.
    results: list[dict[str, float]]
    statistics: dict[str, dict[str, Any]]


class Part(NamedTuple):
    """A part of the comparison: sentences, and a table below them, which may be empty."""

    title: str
    lines: list[str]
    header: list[str]
    rows: list[list[Any]]


def main(argv: list[str]) -> int:
    """Exit status 0; a mistake is an ``InputError``."""
    parser = commands.parser("compare", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, a repeat folder, or a quoted glob")
    parser.add_argument("--sort", metavar="METRIC", help="the best first; default: in the order given")
    parser.add_argument("--output", type=Path, default=Path("compare.html"), help="the page; default: compare.html")
    given = parser.parse_args(argv)
    runs, repeats, left_out = read(given.runs)
    if len(runs) < 2:
        raise InputError(
            f"compare needs two runs or more, and {' '.join(given.runs)} is {len(runs)}: add others, or give a quoted "
            "glob such as 'runs/fit-*'."
        )
    if given.sort:
        runs = sort(runs, given.sort)
    if left_out:
        print(f"Left out, as not of a fit: {', '.join(left_out)}")
    # a fault in the repeats is not to hide what can be told of the runs
    shown, fault = list(parts(runs)), ""
    try:
        for part in parts_of_repeats(repeats):
            shown.append(part)
    except InputError as error:
        fault = str(error)
    for part in shown:
        for line in part.lines:
            print(line)
        if part.rows:
            print_table(part.title, part.header, part.rows)
    try:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        text = html(runs, repeats, shown)
        write_atomically(given.output, lambda file: file.write(text.encode(errors="replace")))
    except OSError as error:
        raise InputError(f"--output {given.output} cannot be written: {error.strerror}.") from error
    print(f"The same with learning curves: {given.output}")
    if fault:
        raise InputError(fault)
    return 0


# ---- reading


def read(arguments: Sequence[str]) -> tuple[list[Run], list[Repeat], list[str]]:
    """The fits that are meant, the repeats among what was given, and the names of folders that are of neither.

    Raises:
        InputError: a glob without a match, or a folder that is not of a run.
    """
    folders: dict[Path, int | None] = {}  # each once, with the repeat it is of
    repeats: list[Repeat] = []
    left_out = []
    for folder in dict.fromkeys(folder for argument in arguments for folder in _folders(argument)):
        if (folder / "repeat.json").is_file():
            repeat, inside = _repeat_in(folder)
            folders |= dict.fromkeys(inside, len(repeats))
            repeats.append(repeat)
        elif read_record(folder).get("subcommand") == "fit":
            folders.setdefault(folder, None)
        else:
            left_out.append(folder.name)
    names = [folder.name for folder in folders]
    tests = {parent: tests_in(parent) for parent in {folder.parent for folder in folders}}
    runs = []
    for folder, repeat_number in folders.items():
        record, rows = read_record(folder), read_metrics(folder)
        epoch, scores = best_epoch(record, rows)
        test = test_of(folder, record, tests[folder.parent])
        for metric, value in sorted(test["metrics"].items()) if test else ():
            scores[metric] = float(value)  # NaN is text there
        name = folder.name if names.count(folder.name) == 1 else os.path.relpath(folder)
        runs.append(Run(name, record, test, rows, epoch, scores, repeat_number))
    return runs, repeats, left_out


def _folders(argument: str) -> list[Path]:
    path = Path(argument).expanduser()
    if path.exists() or not glob.has_magic(argument):
        if not path.is_dir():
            raise InputError(f"There is no run folder {argument} in {Path.cwd()}.")
        return [path.absolute()]
    # Path.glob takes no absolute pattern
    found = sorted(Path(name).absolute() for name in glob.glob(str(path), recursive=True))  # noqa: PTH207
    found = [folder for folder in found if (folder / "run.json").is_file() or (folder / "repeat.json").is_file()]
    if not found:
        raise InputError(f"No run folder matches {argument} in {Path.cwd()}.")
    return found


def _repeat_in(folder: Path) -> tuple[Repeat, list[Path]]:
    """The repeat, and the folders of its runs."""
    state = read_repeat(folder)
    inside = [folder / result["folder"] for result in state["results"] if result["folder"]]
    results = [result["metrics"] for result in state["results"] if result["exit"] == "finished"]
    repeat = Repeat(folder.name, len(state["results"]), results, state["statistics"])
    return repeat, [path for path in inside if path.is_dir()]


def sort(runs: list[Run], metric: str) -> list[Run]:
    """The runs with the best score first; those without one last.

    Raises:
        InputError: no run has this metric.
    """
    known = metrics_of(runs)
    if metric not in known:
        raise InputError(f"--sort {metric}: no run has this metric. There are: {', '.join(known) or 'none'}.")
    sign = 1 if lower_is_better(metric, runs) else -1

    def key(run: Run) -> float:
        value = run.scores.get(metric, math.nan)
        return math.inf if math.isnan(value) else sign * value

    return sorted(runs, key=key)


def lower_is_better(metric: str, runs: list[Run]) -> bool:
    """As a run that monitors the metric says, else whether it is a loss."""
    modes = dict(filter(None, (monitored(run.record.get("config") or {}) for run in runs)))
    return modes[metric] == "min" if metric in modes else "loss" in metric


def metrics_of(runs: list[Run]) -> list[str]:
    """The names of all scores: the monitored ones first, then those of validation, then those of tests."""
    names = dict.fromkeys(name for run in runs for name in run.scores)
    watched = {found[0] for run in runs if (found := monitored(run.record.get("config") or {}))}
    return sorted(names, key=lambda name: (name.startswith("test"), name not in watched))


# ---- what is told


def parts(runs: list[Run]) -> Iterator[Part]:
    """The tables of the runs, which are numbered from 1."""
    metrics = metrics_of(runs)
    rows = [
        [index, run.name, run.best_epoch, *(run.scores.get(name) for name in metrics)]
        for index, run in enumerate(runs, start=1)
    ]
    yield Part("Scores", list(notices(runs)), ["#", "run", "best epoch", *metrics], rows)
    facts = [
        [index, run.record.get("seed"), _commit(run.record), _duration(run.record), _ending(run)]
        for index, run in enumerate(runs, start=1)
    ]
    yield Part("How they ran", [], ["#", "seed", "commit", "duration", "ended"], facts)
    configs = [dict(flat(run.record.get("config") or {})) for run in runs]
    keys = [key for key in dict.fromkeys(key for config in configs for key in config) if key not in _OWN]
    differing = [key for key in keys if any(config.get(key) != configs[0].get(key) for config in configs)]
    if not differing:
        yield Part("Config keys that differ", ["The configs differ in nothing but the seed, if in that."], [], [])
        return
    values = [[_value(config, key) for key in differing] for config in configs]
    rows = [[index, *row] for index, row in enumerate(values, start=1)]
    header = ["#", *differing]
    if len(differing) > len(runs):  # what is more goes downwards
        rows = [[key, *(row[index] for row in values)] for index, key in enumerate(differing)]
        header = ["key", *(f"# {index}" for index in range(1, len(runs) + 1))]
    yield Part("Config keys that differ", [], header, rows)


def notices(runs: list[Run]) -> Iterator[str]:
    """What makes scores incomparable: other data, another monitored metric."""
    watched = [monitored(run.record.get("config") or {}) for run in runs]
    yield from _different("monitored metric", [found and f"{found[0]} ({found[1]})" for found in watched])
    for split in ("train", "val", "test"):
        records = [(run.test if split == "test" else run.record) or {} for run in runs]
        data = [(record.get("data") or {}).get(split) for record in records]
        yield from _different(f"{split} data", [d and f"{d['images']:,} images, {d['sha256'][:8]}" for d in data])


def _different(what: str, values: list[str | None]) -> Iterator[str]:
    kinds = [value for value in dict.fromkeys(values) if value is not None]
    if len(kinds) > 1:
        told = []
        for kind in kinds:
            numbers = [str(index) for index, value in enumerate(values, start=1) if value == kind]
            told.append(f"{kind} ({', '.join(numbers)})")
        yield f"Not comparable as they stand, as they have different {what}: {'; '.join(told)}."


def _ending(run: Run) -> str:
    reason = str(run.record["exit_reason"])
    reason = "killed, or still running" if reason == "running" else reason
    return reason if run.rows else f"{reason}; no metrics.csv"


def _commit(record: Record) -> str:
    git = record.get("git")
    return f"{git['commit'][:8]}{', changed' if git['changed'] else ''}" if git else ""


def _duration(record: Record) -> str:
    """Of all starts together; with a + where a killed one does not tell its own."""
    total, known = time_taken(record)
    return f"{total}{'' if known else ' +'}" if total or known else ""


def _value(config: dict[str, Any], key: str) -> str:
    if key not in config:
        return ""
    text = json.dumps(config[key], ensure_ascii=False) if not isinstance(config[key], str) else config[key]
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"


# ---- repeats


def parts_of_repeats(repeats: list[Repeat]) -> Iterator[Part]:
    """Mean and spread of each repeat, and whether two of them differ by more than noise.

    Raises:
        InputError: two, of which one has too few runs to tell.
    """
    if not repeats:
        return
    names = dict.fromkeys(name for repeat in repeats for name in repeat.statistics)
    rows = []
    for metric in names:
        for repeat in repeats:
            if found := repeat.statistics.get(metric):
                runs = f"{found['n']} of {repeat.planned}"
                rows.append([metric, repeat.name, runs, *(found[key] for key in ("mean", "sd", "low", "high"))])
    yield Part("Repeats", [], ["metric", "repeat", "runs", "mean", "sd", "95 % from", "95 % to"], rows)
    if len(repeats) == 2:
        yield Part("Is it more than noise?", list(verdicts(*repeats)), [], [])


def verdicts(one: Repeat, two: Repeat) -> Iterator[str]:
    """A sentence for each metric that both have."""
    for repeat in (one, two):
        if len(repeat.results) < 2:
            raise InputError(
                f"The repeat {repeat.name} has {len(repeat.results)} finished run: to tell a difference from noise "
                "takes two or more in each."
            )
    yield (
        f"{one.name} minus {two.name}, by Welch's t-test. The noise is that of training with other seeds, not that of "
        "the choice of test images; of twenty metrics that do not differ, one will seem to."
    )
    for metric in one.statistics:
        values = [[result[metric] for result in repeat.results if metric in result] for repeat in (one, two)]
        if min(map(len, values)) >= 2:
            yield f"{metric}: {verdict(*values)}"


def verdict(one: Sequence[float], two: Sequence[float]) -> str:
    """Whether the means of two samples of two values or more differ by more than noise, in words."""
    difference = statistics.fmean(one) - statistics.fmean(two)
    told = f"{statistics.fmean(one):.4f} (n = {len(one)}) against {statistics.fmean(two):.4f} (n = {len(two)})"
    if len(set(one)) == len(set(two)) == 1:  # the t statistic divides by the spread
        if one[0] == two[0]:
            return f"{told}: no difference, every run has the same."
        return f"{told}: a difference of {one[0] - two[0]:+.4f} in every run, and no noise."
    low, high, p = welch(one, two)
    judged = "more than noise" if p < 0.05 else "within noise"
    shown = f"p = {p:.3f}" if p >= 0.001 else "p < 0.001"
    return f"{told}: {judged}, the difference is {difference:+.4f}, 95 % interval {low:+.4f} to {high:+.4f}, {shown}."


def welch(one: Sequence[float], two: Sequence[float]) -> tuple[float, float, float]:
    """The 95 % interval of the difference of two means, and the p value, by Welch's t-test."""
    try:
        from scipy.stats import ttest_ind
    except ImportError as error:
        raise InputError("Comparing repeats needs SciPy, which is not installed: pip install scipy") from error
    with warnings.catch_warnings():
        # one of the samples may be constant, which is no loss of precision: its variance is 0
        warnings.filterwarnings("ignore", message="Precision loss occurred", category=RuntimeWarning)
        test = ttest_ind(one, two, equal_var=False)
        interval = test.confidence_interval(0.95)
    return float(interval.low), float(interval.high), float(test.pvalue)


# ---- the page


def html(runs: list[Run], repeats: list[Repeat], shown: list[Part]) -> str:
    """The page: what the terminal shows, and the learning curves."""
    from html import escape

    from lit_project.pages import page, require_matplotlib, table

    require_matplotlib()
    groups = [run.name if run.repeat is None else repeats[run.repeat].name for run in runs]
    colours = palette(list(dict.fromkeys(groups)))  # the runs of a repeat have one
    numbers = {name: [str(i) for i, group in enumerate(groups, start=1) if group == name] for name in colours}
    legend = "<br>".join(
        f'<b style="color:{colour}">━</b> {", ".join(numbers[name])} {escape(name)}' for name, colour in colours.items()
    )
    figures = "\n".join(curves(runs, [colours[group] for group in groups]))
    sections = [("Learning curves", f'<p>{legend}</p>\n<div class="columns">{figures}</div>')]
    for position, part in enumerate(shown):
        lines = "".join(f"<p>{escape(line)}</p>" for line in part.lines)
        body = lines + (table(part.header, part.rows, ".4f") if part.rows else "")
        sections.insert(position + (position > 0), (part.title, body))  # the scores come before the curves
    return page(f"{len(runs)} runs compared", sections)


def palette(groups: Sequence[str]) -> dict[str, str]:
    """A colour for each group, as HTML writes it; up to ten are easy to tell apart."""
    import matplotlib
    from matplotlib.colors import to_hex

    if len(groups) <= 10:
        return dict(zip(groups, map(to_hex, matplotlib.color_sequences["tab10"]), strict=False))
    places = [0.05 + 0.9 * index / (len(groups) - 1) for index in range(len(groups))]
    return {group: to_hex(matplotlib.colormaps["turbo"](place)) for group, place in zip(groups, places, strict=True)}


def curves(runs: list[Run], colours: list[str]) -> Iterator[str]:
    """A figure for each validation metric and the training loss: a line for each run, with its number at its end."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from lit_project.pages import svg

    names = [name for name in metrics_of(runs) if not name.startswith("test")]
    for metric in dict.fromkeys([*names, "train/loss"]):
        figure = Figure(figsize=(5, 3.2), layout="constrained")
        axes = figure.add_subplot()
        for index, (run, colour) in enumerate(zip(runs, colours, strict=True), start=1):
            points = [(number(row.get("epoch")), number(row.get(metric))) for row in run.rows]
            drawn = [(x, y) for x, y in points if x is not None and y is not None and math.isfinite(y)]
            if drawn:
                axes.plot(*zip(*drawn, strict=True), color=colour, linewidth=1.2, marker=".", markersize=4)
                place: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "verticalalignment": "center"}
                axes.annotate(str(index), drawn[-1], color=colour, fontsize=8, **place)
        if axes.lines:
            axes.set_title(metric, parse_math=False, fontsize=11)
            axes.set_xlabel("epoch")
            axes.grid(alpha=0.25)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            yield f"<figure>{svg(figure)}</figure>"
