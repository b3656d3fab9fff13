"""``report.html``: what lies in a run folder as one page, with pictures, that needs no service and no network.

The curves come from ``csv/metrics.csv``, the facts from ``run.json``. What is said of single images comes from
``report.pt``, which the callback ``Report`` keeps, or, of a run that was killed, from ``last.ckpt``, if that is newer.
"""

import base64
import io
import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from torch import Tensor

from lit_project import figures
from lit_project.errors import InputError
from lit_project.files import write_atomically
from lit_project.metrics import per_class
from lit_project.pages import page, require_matplotlib, svg, table
from lit_project.results import Results
from lit_project.run_folders import read_metrics, read_record, time_taken
from lit_project.tables import duration

DATA_FILE, REPORT_FILE = "report.pt", "report.html"
#: Under this name each checkpoint has the results of the best epoch.
CHECKPOINT_KEY = "best_results"
#: More classes than this are not all drawn, and more rows than that not all listed.
_MOST_BARS, _MOST_CONFUSIONS, _MOST_ROWS = 40, 15, 500
#: Larger images are made smaller for the page; up to this size they are shown pixel by pixel.
_SIDE, _SMALL = 192, 64

Rows = list[dict[str, str]]


def write_report(folder: Path) -> Path:
    """Write ``report.html`` to a run folder, from what lies there; return its path.

    Raises:
        InputError: no run folder, a damaged file in it, no permission to write, or matplotlib is not installed.
    """
    require_matplotlib()
    record = read_record(folder)
    rows: Rows = [row for row in read_metrics(folder) if row["step"] and None not in row.values()]
    data = read_data(folder)
    text = page(f"{folder.resolve().name}", _sections(record, rows, data))
    path = folder / REPORT_FILE
    try:
        write_atomically(path, lambda file: file.write(text.encode(errors="replace")))
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}.") from error
    return path


def read_data(folder: Path) -> dict[str, Any]:
    """What is kept of single images; empty if nothing is.

    Raises:
        InputError: a damaged file.
    """
    data = _load(folder / DATA_FILE)
    kept = _load(folder / "checkpoints" / "last.ckpt").get(CHECKPOINT_KEY)
    # a run that went on after its report, and was killed, has a newer best epoch than that tells of
    if kept and ("results" not in data or kept["step"] > data["step"]):
        first = {"first_batch": data["first_batch"]} if "first_batch" in data else {}
        return {**first, **kept, "best": True}
    return data


def _load(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        # weights, of which nothing is needed, stay on the disk
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return dict(content)
    except Exception as error:  # damage comes to light in many ways
        reason = str(error).split("\n")[0] or type(error).__name__
        raise InputError(
            f"{path} cannot be read: it is damaged or of another kind ({reason}). Move it elsewhere, and the report is "
            "made of what is left."
        ) from error


def caption(names: Sequence[str], results: Results, index: int) -> str:
    """A mistake in three lines: what it was taken for, how confidently, and what it is."""
    predicted, true = (names[int(column[index])] for column in (results.predicted, results.targets))
    confidence, probability = (float(column[index]) for column in (results.confidence, results.true_probability))
    return f"{predicted} {confidence:.1%}\nis {true} {probability:.1%}"


# ---- the page


def _sections(record: dict[str, Any], rows: Rows, data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    results = Results(**data["results"]) if "results" in data else None
    curves = _Curves(rows)
    yield "Result", _result(record, rows, curves, data, results)
    if record.get("subcommand", "fit") == "fit":
        best = data.get("step") if data.get("best") else None
        yield "Learning curves", _learning_curves(curves, best) + _epoch_table(rows)
    if results is not None:
        names: list[str] = data["class_names"]
        of = f"the {len(results.targets):,} {escape(data['split'])} images"
        matrix = results.confusion_matrix(len(names))
        yield "Confusion matrix", _confusions(matrix, names, of)
        yield "Classes", _classes(matrix, names)
        yield "Worst mistakes", _mistakes(results, names, data)
        yield "Calibration", _calibration(results)
    if first := data.get("first_batch"):
        yield "First training batch", _first_batch(first)
    yield "Run record", _run_record(record)


def _result(
    record: dict[str, Any], rows: Rows, curves: "_Curves", data: dict[str, Any], results: Results | None
) -> str:
    reason = record.get("exit_reason", "unknown")
    best = record.get("best") or {}
    facts: dict[str, str] = {}
    if isinstance(best.get("score"), float):
        facts[f"best {best['monitor']}"] = f"{best['score']:.4f}"
    final = {name: _last(rows, name) for name in _columns(rows)}
    last = "last " if record.get("subcommand", "fit") == "fit" else ""
    facts |= {f"{last}{name}": f"{float(final[name]):.4f}" for name in sorted(final, key=_importance)[:4]}
    if curves.last_epoch is not None and record.get("subcommand", "fit") == "fit":
        facts["last epoch"] = f"{curves.last_epoch + 1}"
    if results is not None:
        facts["calibration error"] = f"{results.calibration_error():.4f}"
    facts["took"] = _duration(record)
    git = record.get("git") or {}
    if git.get("commit"):
        facts["commit"] = git["commit"][:10] + (" and changes" if git.get("changed") else "")
    tiles = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    ended = "" if reason == "finished" else ' class="alert"'
    text = f"<p>{escape(_what(record))}</p>\n<p{ended}>{escape(_ending(reason))}</p>\n"
    text += f'<dl class="facts">{tiles}</dl>'
    if results is None:
        missing = "No evaluation of images with one class each was completed, so nothing can be said of classes."
        return f"{text}\n<p>{missing}</p>"
    if data["split"] != "test" and "epoch" in data:
        which = "that of the best checkpoint" if data["best"] else "the last one"
        text += (
            f"\n<p>What is said below of classes and single images is of one evaluation, {which}: "
            f"in epoch {data['epoch'] + 1}, after {data['step']:,} steps.</p>"
        )
    return text


def _learning_curves(curves: "_Curves", best_step: int | None) -> str:
    names = curves.names()
    if not names:
        return (
            "<p>csv/metrics.csv has nothing to draw a curve of: that is what was logged under a name that begins with "
            "train or val, such as train/loss or val_acc.</p>"
        )
    best = None if best_step is None else float(curves.position(np.array([best_step - 1]))[0])
    drawn = []
    for name in names:
        stages = {stage: curve for stage in ("train", "val") if len((curve := curves.of(stage, name))[0])}
        faint = curves.of("train", name, of_steps=True)
        figure = figures.learning_curves(
            name, stages, faint if len(faint[0]) else None, curves.rates(), best, curves.unit
        )
        drawn.append(f"<figure>{svg(figure)}</figure>")
    return f'<div class="columns">{"".join(drawn)}</div>'


def _epoch_table(rows: Rows) -> str:
    names = sorted((name for name, column in _columns(rows).items() if not column.of_steps), key=_importance)
    names += [name for name in (rows[-1] if rows else {}) if _is_rate(name)]
    lines = [row for row in rows if any(row[name] for name in names if not _is_rate(name))]
    if not lines:
        return ""
    every = -(-len(lines) // _MOST_ROWS)
    note = f"<p class='quiet'>Every {every}th of {len(lines):,} rows.</p>" if every > 1 else ""
    header = ["epoch", "step", *names]
    cells = [
        [*(_whole(row[name]) for name in header[:2]), *(_number(row[name]) for name in names)] for row in lines[::every]
    ]
    return (
        "<details><summary>The numbers, as in csv/metrics.csv (epochs and steps count from 0)</summary>"
        f"{note}{table(header, cells)}</details>"
    )


def _confusions(matrix: Tensor, names: list[str], of: str) -> str:
    wrong = matrix.clone().fill_diagonal_(0)
    counts, places = wrong.flatten().sort(descending=True, stable=True)
    pairs = []
    for count, place in zip(counts[:_MOST_CONFUSIONS].tolist(), places.tolist(), strict=False):
        if count:
            true, predicted = divmod(place, len(names))
            pairs.append([names[true], names[predicted], count, f"{count / matrix[true].sum().item():.1%}"])
    remark = f"Of {of}. Rows are the true classes, columns the predicted ones; colour is the share of the row"
    remark += ", mistakes in orange." if len(names) <= 200 else ", mistakes in orange. Neighbouring classes are summed."
    most = table(["true", "taken for", "images", "of its class"], pairs) if pairs else "<p>No image was mistaken.</p>"
    return (
        f'<div class="columns"><figure>{svg(figures.confusion_matrix(matrix, names))}'
        f"<figcaption>{remark}</figcaption></figure>\n"
        f"<div><p>Most frequent mistakes</p>{most}</div></div>"
    )


def _classes(matrix: Tensor, names: list[str]) -> str:
    scores = per_class(matrix, names)
    shown = scores
    remark = ""
    if len(scores) > _MOST_BARS:
        # a class without images has no score to be worse by
        present = [row for row in scores if row["images"]]
        shown = sorted(present, key=lambda row: float(row["f1"]))[:_MOST_BARS]
        remark = (
            f"<figcaption>The {_MOST_BARS} classes with the lowest F1 of {len(scores):,}, worst first.</figcaption>"
        )
    precision, recall = ([float(row[name]) for row in shown] for name in ("precision", "recall"))
    drawn = svg(figures.class_bars([str(row["class"]) for row in shown], precision, recall))
    rows = [list(row.values()) for row in scores]
    listed = table(list(scores[0]), rows, floats=".4f")
    if len(scores) > _MOST_BARS:
        listed = f"<details><summary>All {len(scores):,} classes</summary>{listed}</details>"
    return f'<div class="columns"><figure>{drawn}{remark}</figure><div>{listed}</div></div>'


def _mistakes(results: Results, names: list[str], data: dict[str, Any]) -> str:
    wrong = int((results.predicted != results.targets).sum())
    if not wrong:
        return "<p>There is none: every image was classified rightly.</p>"
    indices = data["worst"]["indices"] if "worst" in data else results.worst(24)
    images = data.get("worst", {}).get("images")
    paths = data.get("worst", {}).get("paths")
    tiles = []
    for number, index in enumerate(indices.tolist()):
        text = "<br>".join(escape(line) for line in caption(names, results, index).split("\n"))
        position = int(results.positions[index])
        where = escape(paths[number]) if paths else f"{escape(data['split'])} image {position}"
        picture = _img(images[number]) if images is not None else ""
        tiles.append(f"<figure>{picture}<figcaption>{text}<br>{where}</figcaption></figure>")
    remark = f"{wrong:,} of {len(results.targets):,} images are classified wrongly. "
    remark += "These are the worst: the model gave their true class the lowest probability."
    if images is None:
        remark += " The images themselves are not kept in this folder, as the run was killed or its data had none."
    return f'<p class="quiet">{remark}</p><div class="tiles">{"".join(tiles)}</div>'


def _calibration(results: Results) -> str:
    right = (results.predicted == results.targets).double().mean().item()
    confidence = results.confidence.double().mean().item()
    kind = "overconfident" if confidence > right else "underconfident"
    bins = results.reliability()
    rows = [
        [f"{number / len(bins[0]):.2f} to {(number + 1) / len(bins[0]):.2f}", int(count), mean, accuracy]
        for number, (count, mean, accuracy) in enumerate(zip(*(column.tolist() for column in bins), strict=True))
        if count
    ]
    text = (
        f"<p>Expected calibration error, {len(bins[0])} bins: <strong>{results.calibration_error():.4f}</strong>. "
        f"The mean confidence is {confidence:.4f} and the accuracy {right:.4f}: on the whole the model is {kind}.</p>"
    )
    return (
        f'{text}<div class="columns"><figure>{svg(figures.reliability(*bins))}</figure>'
        f"<div>{table(['confidence', 'images', 'mean confidence', 'accuracy'], rows, floats='.4f')}</div></div>"
    )


def _first_batch(first: dict[str, Any]) -> str:
    tiles = "".join(
        f"<figure>{_img(image)}<figcaption>{escape(label)}</figcaption></figure>"
        for image, label in zip(first["images"], first["labels"], strict=True)
    )
    remark = f"As the network was given them, after augmentation, in step {first['step'] + 1:,} of the run."
    return f'<p class="quiet">{remark}</p><div class="tiles">{tiles}</div>'


def _run_record(record: dict[str, Any]) -> str:
    apart = {"config": record.get("config"), "versions": record.get("versions"), "earlier": record.get("earlier")}
    rows = list(_flat({key: value for key, value in record.items() if key not in apart}))
    parts = [table(["", ""], rows)]
    for name, value in apart.items():
        if value:
            text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
            parts.append(f"<details><summary>{name}</summary><pre>{escape(text)}</pre></details>")
    return "\n".join(parts)


# ---- what it is made of


class _Curves:
    """The columns of ``metrics.csv`` as curves over epochs, or over steps where a single epoch is known."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.columns = _columns(rows)
        ends: dict[int, float] = {}
        for row in rows:
            if row["epoch"]:  # what is handed directly to a logger has none
                ends[int(float(row["epoch"]))] = float(row["step"]) + 1
        #: Counted from 0.
        self.last_epoch = max(ends, default=None)
        if self.last_epoch is not None:
            ends.pop(self.last_epoch)  # whether it is over, nobody knows
        #: How many steps and epochs were done when an epoch was over; a run may have begun from an earlier checkpoint.
        self.steps, self.epochs = [0.0, *ends.values()], [0, *(epoch + 1 for epoch in ends)]
        self.unit = "epoch" if ends else "step"

    def names(self) -> list[str]:
        """What was measured in training and validation, without the stage, the most important first."""
        # of single steps only those of training are drawn
        drawn = {
            column.metric
            for column in self.columns.values()
            if column.stage == "train" or (column.stage == "val" and not column.of_steps)
        }
        return sorted(drawn, key=_importance)

    def of(self, stage: str, metric: str, of_steps: bool = False) -> figures.Curve:
        """x and y of a metric, without empty cells."""
        wanted = _Column(stage, metric, of_steps)
        return self._of(next((name for name, column in self.columns.items() if column == wanted), ""))

    def rates(self) -> dict[str, figures.Curve]:
        """The learning rates, by their columns."""
        return {name: self._of(name) for name in (self.rows[-1] if self.rows else {}) if _is_rate(name)}

    def position(self, steps: Any) -> Any:
        """Where steps, counted from 0, are on the x axis."""
        done = steps + 1
        if self.unit == "step":
            return done
        length = (self.steps[-1] - self.steps[-2]) / (self.epochs[-1] - self.epochs[-2])
        beyond = np.clip(done - self.steps[-1], 0, None) / max(1, length)
        return np.interp(done, self.steps, self.epochs) + beyond

    def _of(self, name: str) -> figures.Curve:
        pairs = [(float(row["step"]), float(row[name])) for row in self.rows if row.get(name)]
        steps, values = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
        return self.position(steps), values


class _Column(NamedTuple):
    """What a column of ``metrics.csv`` is of."""

    stage: str
    metric: str
    #: Whether it has single steps, beside a column of whole epochs.
    of_steps: bool


def _columns(rows: Rows) -> dict[str, _Column]:
    """The columns that a stage has: ``train/loss``, or ``train_loss``; not what only tells how the training goes."""
    found = {}
    for name in rows[-1] if rows else {}:
        # the endings are Lightning's, of what is logged both for each step and for each epoch
        match = re.fullmatch(r"(train|val|test)[/_]([^/]+?)(_step|_epoch)?", name)
        if match and name != "train/grad_norm":
            found[name] = _Column(match[1], match[2], match[3] == "_step")
    return found


def _is_rate(name: str) -> bool:
    return name.startswith("lr-") and not name.endswith(("-momentum", "-weight_decay"))


def _importance(name: str) -> tuple[bool, int, str, bool]:
    """Loss and accuracy first, validation before training, single steps last; of a column or a metric."""
    metric = re.sub(r"^(train|val|test)[/_]|_(step|epoch)$", "", name)
    known = ["loss", "acc", "f1", "auroc"]
    place = known.index(metric) if metric in known else len(known)
    return name.endswith("_step"), place, metric, name.startswith("train")


def _last(rows: Rows, name: str) -> str:
    return next((row[name] for row in reversed(rows) if row[name]), "nan")


def _number(text: str) -> float | None:
    return float(text) if text else None


def _whole(text: str) -> int | None:
    return int(float(text)) if text else None


def _ending(reason: str) -> str:
    if reason == "running":
        return "The run was going on when this was written, or it was killed."
    return "The run finished." if reason == "finished" else f"The run did not finish: {reason}"


def _what(record: dict[str, Any]) -> str:
    """What was trained or tested on what, in a sentence; empty where the config does not say."""
    config = record.get("config") or {}
    model, data = (config.get(name) or {} for name in ("model", "data"))
    network = ((model.get("init_args") or {}).get("network") or {}).get("class_path") or model.get("class_path")
    if not network or not data.get("class_path"):
        return ""
    sizes = [f"{part['images']:,} {split}" for split, part in (record.get("data") or {}).items()]
    images = f" ({' and '.join(sizes)} images)" if sizes else ""
    return f"{_name(network)} on {_name(data['class_path'])}{images}, seed {record.get('seed')}."


def _name(class_path: str) -> str:
    return class_path.rsplit(".", 1)[-1]


def _duration(record: dict[str, Any]) -> str:
    """Of all starts together."""
    total, known = time_taken(record)
    if not total and not known:
        return "unknown"
    text = duration(total.total_seconds())
    return text if known else f"more than {text}"


def _flat(value: Any, name: str = "") -> Iterator[list[str]]:
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from _flat(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        yield [name, " ".join(map(str, value))]
    else:
        yield [name, "" if value is None else str(value)]


def _img(image: Tensor) -> str:
    """An image, uint8 ``[H, W, C]``, within the page."""
    picture = figures.picture_of(image.numpy())
    small = max(picture.size) <= _SMALL
    picture.thumbnail((_SIDE, _SIDE))
    file = io.BytesIO()
    picture.save(file, "PNG" if small else "JPEG", quality=85)
    kind = ("png", ' class="small"') if small else ("jpeg", "")
    return f'<img{kind[1]} alt="" src="data:image/{kind[0]};base64,{base64.b64encode(file.getvalue()).decode()}">'
