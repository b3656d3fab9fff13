"""The figures of a report: matplotlib's for the page, and sheets of small pictures for the loggers.

matplotlib is imported only when something is drawn. Names come from outside, so none is read as a formula.
"""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Both are seen on white and on black.
BLUE, ORANGE, GREY = "#3b82c4", "#e07b39", "#8a949e"
#: Nearly white, so that the page does not take it for its paper: see ``pages.svg``.
_WHITE = "#fefefe"
#: More classes than this are not told apart in a matrix; of more rows than that only the sum of blocks is shown.
_NAMED, _COUNTED, _ROWS = 30, 15, 200
_WIDTH = 4.8

Curve = tuple[NDArray[np.float64], NDArray[np.float64]]


def learning_curves(
    metric: str,
    curves: Mapping[str, Curve],
    faint: Curve | None,
    rates: Mapping[str, Curve],
    best: float | None,
    x: str,
) -> "Figure":
    """A metric of several stages on one axis, and below it the learning rate.

    Args:
        metric: its name.
        curves: x and y of each stage, by its name.
        faint: x and y of single steps.
        rates: x and y of each learning rate, by its name.
        best: x of the best checkpoint.
        x: what x is.
    """
    from matplotlib.ticker import MaxNLocator

    figure = _figure(_WIDTH, 4.0 if rates else 3.0)
    grid = figure.add_gridspec(2, 1, height_ratios=[3, 1]) if rates else figure.add_gridspec(1, 1)
    upper = figure.add_subplot(grid[0])
    if faint is not None:
        upper.plot(*faint, color=BLUE, alpha=0.35, linewidth=0.8, label="train, single steps")
    for (name, curve), colour in zip(curves.items(), (BLUE, ORANGE, GREY), strict=False):
        upper.plot(*curve, color=colour, label=name, marker="o" if len(curve[0]) < 30 else None, markersize=3)
    if best is not None:
        upper.axvline(best, color=GREY, linewidth=0.8, linestyle=":", label="best checkpoint")
    upper.set_ylabel(metric, parse_math=False)
    upper.legend(frameon=False, fontsize=8)
    _plain(upper)
    if not rates:
        upper.set_xlabel(x)
        upper.xaxis.set_major_locator(MaxNLocator(integer=True))
        return figure
    lower = figure.add_subplot(grid[1], sharex=upper)
    for name, curve in rates.items():
        lower.plot(*curve, linewidth=1.2, color=GREY if len(rates) == 1 else None, label=name)
    if 1 < len(rates) <= 4:
        lower.legend(frameon=False, fontsize=7)
    lower.set_ylabel("learning rate", fontsize=8)
    lower.set_xlabel(x)
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    upper.tick_params(labelbottom=False)
    _plain(lower)
    return figure


def confusion_matrix(matrix: Tensor, names: Sequence[str]) -> "Figure":
    """How the images of each class (rows) were classified (columns); the colour is the share of the row.

    Up to 30 classes are named; of more than 200, neighbours are taken together.

    Args:
        matrix: int64 ``[num_classes, num_classes]``, rows true, columns predicted.
        names: the class names.
    """
    counts = matrix.double().numpy()
    block = -(-len(counts) // _ROWS)
    if block > 1:
        starts = np.arange(0, len(counts), block)
        counts = np.add.reduceat(np.add.reduceat(counts, starts, axis=0), starts, axis=1)
    share = counts / counts.sum(1, keepdims=True).clip(1)
    # transparent where there is nothing, so that it fits the paper; a single one of many must still be seen
    alpha = np.where(counts > 0, 0.15 + 0.85 * share, 0.0)
    wrong = ~np.eye(len(counts), dtype=bool)
    colours = np.empty((*counts.shape, 4))
    colours[..., :3] = np.where(wrong[..., None], _rgb(ORANGE), _rgb(BLUE))
    colours[..., 3] = alpha
    figure = _figure(_WIDTH, _WIDTH)
    axes = figure.add_subplot()
    # the corners are named, or the last block would reach beyond the last class
    axes.imshow(colours, interpolation="none", extent=(0, len(matrix), len(matrix), 0))
    if len(matrix) <= _NAMED:
        middle = np.arange(len(names)) + 0.5
        shown = [shorten(name, 14) for name in names]
        size = 8 if len(names) <= _COUNTED else 6
        axes.set_xticks(middle, shown, rotation=90, fontsize=size, parse_math=False)
        axes.set_yticks(middle, shown, fontsize=size, parse_math=False)
        axes.tick_params(length=0)
    if len(matrix) <= _COUNTED:
        for row, column in np.argwhere(counts > 0).tolist():
            colour = _WHITE if alpha[row, column] > 0.6 else "black"
            text = f"{counts[row, column]:.0f}"
            axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=8, color=colour)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    return figure


def class_bars(names: Sequence[str], precision: Sequence[float], recall: Sequence[float]) -> "Figure":
    """Precision and recall of each class as bars, from above."""
    figure = _figure(_WIDTH, 0.7 + 0.3 * len(names))
    axes = figure.add_subplot()
    rows = np.arange(len(names))
    axes.barh(rows - 0.19, precision, 0.36, color=BLUE, label="precision")
    axes.barh(rows + 0.19, recall, 0.36, color=ORANGE, label="recall")
    axes.set_yticks(rows, [shorten(name, 22) for name in names], parse_math=False)
    axes.set_xlim(0, 1)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)
    _plain(axes)
    axes.grid(axis="y", visible=False)
    return figure


def reliability(counts: Tensor, confidence: Tensor, accuracy: Tensor) -> "Figure":
    """The accuracy in each bin of confidence beside what it should be, and below it how many images are in it.

    Args: as returned by ``Results.reliability``.
    """
    figure = _figure(_WIDTH, 4.6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    edges = np.linspace(0, 1, len(counts) + 1)
    filled = counts.numpy() > 0
    width = edges[1] * 0.92
    middle = ((edges[:-1] + edges[1:]) / 2)[filled]
    upper.bar(middle, accuracy.numpy()[filled], width, color=BLUE, label="accuracy")
    upper.plot(
        confidence.numpy()[filled], accuracy.numpy()[filled], "o", color=ORANGE, markersize=3.5, label="mean confidence"
    )
    upper.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1, label="calibrated")
    upper.set_ylim(0, 1)
    upper.set_xlim(0, 1)
    upper.set_ylabel("accuracy")
    upper.legend(frameon=False, fontsize=8, loc="upper left")
    lower.bar(middle, counts.numpy()[filled], width, color=GREY)
    lower.set_ylabel("images")
    lower.set_xlabel("confidence")
    _plain(upper)
    _plain(lower)
    return figure


def pixels(figure: "Figure") -> NDArray[np.uint8]:
    """A figure on white, as loggers take it: uint8 ``[H, W, 3]``."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120)
    return np.asarray(Image.open(file).convert("RGB"))


def contact_sheet(images: Sequence[NDArray[np.uint8]], captions: Sequence[str], columns: int = 6) -> NDArray[np.uint8]:
    """Small pictures in rows, each with lines of text below it, as one: uint8 ``[H, W, 3]``.

    Args:
        images: uint8 ``[H, W, C]`` each.
        captions: the text below each.
        columns: pictures in a row.
    """
    side, gap, line = 128, 8, 14
    height = side + line * max(caption.count("\n") + 1 for caption in captions) + gap
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * (side + gap) + gap, rows * height + gap), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(11)
    for number, (image, caption) in enumerate(zip(images, captions, strict=True)):
        left, top = gap + number % columns * (side + gap), gap + number // columns * height
        picture = picture_of(image)
        scale = side / max(picture.size)
        size = tuple(max(1, round(length * scale)) for length in picture.size)
        resample = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
        sheet.paste(picture.resize((size[0], size[1]), resample), (left, top))
        text = "\n".join(shorten(part, 22) for part in caption.split("\n"))
        draw.multiline_text((left, top + side + 1), text, fill="black", font=font, spacing=2)
    return np.asarray(sheet)


def picture_of(image: NDArray[np.uint8]) -> Image.Image:
    """An image of any number of channels, uint8 ``[H, W, C]``, as one that can be shown."""
    return Image.fromarray(image[..., 0] if image.shape[-1] < 3 else image[..., :3]).convert("RGB")


def shorten(name: str, length: int) -> str:
    """At most ``length`` characters of a name, its end and its beginning."""
    return name if len(name) <= length else f"{name[: length - 5]}…{name[-4:]}"


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _plain(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=GREY, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


def _rgb(colour: str) -> tuple[float, float, float]:
    from matplotlib.colors import to_rgb

    return to_rgb(colour)
