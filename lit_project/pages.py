"""Web pages in one file, and matplotlib's figures as part of them: no script, nothing that would have to be loaded."""

import io
import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from html import escape
from importlib.util import find_spec
from typing import TYPE_CHECKING

from lit_project.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
:root { color-scheme: light dark;
  --ink: #1c2024; --quiet: #5f6b76; --paper: #ffffff; --tint: #f3f5f7; --line: #d5dbe1; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ec; --quiet: #9aa6b2; --paper: #15191d; --tint: #1f252b; --line: #38414a; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0.5rem 0 1rem; }
h2 { font-size: 1.15rem; line-height: 1.3; margin: 2.5rem 0 0.75rem; padding-top: 0.75rem;
  border-top: 1px solid var(--line); }
p { margin: 0.5rem 0; max-width: 46rem; }
nav { font-size: 0.9rem; }
nav a { margin-right: 1rem; white-space: nowrap; }
a { color: inherit; }
svg { display: block; max-width: 100%; height: auto; }
svg text { fill: currentColor; font-family: inherit !important; }
svg image { image-rendering: pixelated; }
figure { margin: 0; min-width: 0; }
figcaption, .quiet { color: var(--quiet); font-size: 0.85rem; line-height: 1.4; }
.columns { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
.tiles { display: grid; gap: 0.75rem; grid-template-columns: repeat(auto-fill, minmax(6.6rem, 1fr)); }
@media (min-width: 48rem) { .tiles { grid-template-columns: repeat(auto-fill, minmax(8.2rem, 1fr)); } }
.tiles img { display: block; width: 100%; background: var(--tint); }
.tiles img.small { image-rendering: pixelated; }
dl.facts { display: grid; gap: 0.75rem; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr));
  margin: 0.5rem 0; }
dl.facts div { background: var(--tint); padding: 0.5rem 0.75rem; }
dt { color: var(--quiet); font-size: 0.8rem; }
dd { margin: 0; font-size: 1.1rem; font-variant-numeric: tabular-nums; }
.alert { border-left: 4px solid #d0483e; padding-left: 0.75rem; }
.wide { max-width: 100%; overflow-x: auto; overflow-wrap: normal; }
table { border-collapse: collapse; font-size: 0.85rem; line-height: 1.35; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.75rem 0.25rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
th { font-weight: 600; }
td.number, th.number { text-align: right; white-space: nowrap; }
pre { overflow-x: auto; background: var(--tint); padding: 0.75rem; font-size: 0.8rem; }
details { margin: 0.5rem 0; }
summary { cursor: pointer; }
"""


def page(title: str, sections: Iterable[tuple[str, str]]) -> str:
    """A page of its own: one HTML5 file that loads nothing and runs nothing, for phones and desks, light and dark.

    The style has these classes: ``columns`` sets figures side by side where there is room, ``tiles`` small pictures in
    rows, ``wide`` scrolls what is wider than the screen, ``facts`` is for a ``dl`` of short values, ``alert`` and
    ``quiet`` are for what is important and what is not.

    Args:
        title: the title, as plain text.
        sections: the heading of each section, as plain text, and what is below it, as HTML.
    """
    parts = [(f"section-{number}", escape(heading), body) for number, (heading, body) in enumerate(sections)]
    links = "\n".join(f'<a href="#{name}">{heading}</a>' for name, heading, _ in parts)
    bodies = "\n".join(
        f'<section id="{name}">\n<h2>{heading}</h2>\n{body}\n</section>' for name, heading, body in parts
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<nav>
{links}
</nav>
{bodies}
</body>
</html>
"""


def table(header: Sequence[str], rows: Iterable[Sequence[object]], floats: str = ".7g") -> str:
    """A table as HTML. Numbers are set flush right, and None is an empty cell.

    Args:
        header: the names of the columns.
        rows: their cells.
        floats: the format of fractional numbers; seven digits are those of ``metrics.csv``.
    """
    lines = [list(row) for row in rows]
    numeric = [all(isinstance(row[i], int | float | None) for row in lines) for i in range(len(header))]
    kinds = [' class="number"' if is_numeric else "" for is_numeric in numeric]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for kind, name in zip(kinds, header, strict=True))
    body = "\n".join(
        "<tr>"
        + "".join(f"<td{kind}>{_cell(value, floats)}</td>" for kind, value in zip(kinds, row, strict=True))
        + "</tr>"
        for row in lines
    )
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def svg(figure: "Figure") -> str:
    """A figure as an ``<svg>`` element for a page, as wide as what it is in, its text as text.

    The same figure gives the same characters, and ids differ between figures, so that several go into one page. Black
    and white become the page's ink and paper, which change places in the dark. Make figures with
    ``matplotlib.figure.Figure`` (``pyplot`` keeps them for ever and may look for a display), and names that come from
    outside with ``parse_math=False``, since a ``$`` begins a formula.
    """
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lit_project"}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    drawn = text.getvalue()
    drawn = drawn[drawn.index("<svg") :]  # without the prolog, which names a file on the web
    opening, rest = drawn.split(">", 1)
    box = re.search(r'viewBox="([^"]*)"', opening)
    assert box is not None, "matplotlib writes one"
    prefix = f"s{sha256(rest.encode()).hexdigest()[:8]}-"
    rest = re.sub(r'\bid="', f'id="{prefix}', rest)
    rest = re.sub(r'\bhref="#', f'href="#{prefix}', rest).replace("url(#", f"url(#{prefix}")
    rest = re.sub(r"\b(fill|stroke): #000000", r"\1: currentColor", rest)
    rest = re.sub(r"\b(fill|stroke): #ffffff", r"\1: var(--paper)", rest)
    return f'<svg viewBox="{box[1]}" width="100%" role="img">{rest.rstrip()}'


def _cell(value: object, floats: str) -> str:
    if value is None:
        return ""
    return format(value, floats) if isinstance(value, float) else escape(str(value))


def require_matplotlib() -> None:
    """Do nothing if matplotlib is installed.

    Raises:
        InputError: it is not; the message says how to get it.
    """
    if find_spec("matplotlib") is None:
        raise InputError("Drawing needs matplotlib, which is not installed: pip install matplotlib")
