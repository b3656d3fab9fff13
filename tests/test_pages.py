import re
from typing import TYPE_CHECKING

import pytest

from lit_project.pages import page, svg, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

matplotlib = pytest.importorskip("matplotlib.figure")


def figure(label: str) -> "Figure":
    drawn = matplotlib.Figure(figsize=(4, 3))
    axes = drawn.add_subplot()
    axes.plot([0, 1], [1, 2], marker="o", color="black")
    axes.set_title(label, parse_math=False)
    return drawn


def test_a_figure_is_text_that_does_not_change_and_loads_nothing() -> None:
    drawn = svg(figure("a <b> & $x$ costs $2"))
    assert drawn == svg(figure("a <b> & $x$ costs $2")), "no dates, no random ids"
    assert drawn.startswith('<svg viewBox="0 0 288 216" width="100%"')
    assert drawn.endswith("</svg>")
    assert ">a &lt;b&gt; &amp; $x$ costs $2</text>" in drawn
    assert "http" not in drawn
    assert "stroke: currentColor" in drawn
    assert "#000000" not in drawn
    assert "#ffffff" not in drawn


def test_figures_of_a_page_share_no_id_and_find_their_own() -> None:
    drawn = [svg(figure("one")), svg(figure("two"))]
    ids = [set(re.findall(r'\bid="([^"]+)"', text)) for text in drawn]
    used = [set(re.findall(r'(?:url\(#|href="#)([^")]+)', text)) for text in drawn]
    assert not ids[0] & ids[1]
    assert all(wanted and wanted <= own for own, wanted in zip(ids, used, strict=True))


def test_a_page_is_whole_and_takes_no_title_for_markup() -> None:
    text = page("<b>&", [("A & B", "<p>body</p>"), ("C", "")])
    assert text.startswith("<!DOCTYPE html>")
    assert "<title>&lt;b&gt;&amp;</title>" in text
    assert "<h2>A &amp; B</h2>\n<p>body</p>" in text
    assert not re.search(r'<script|\bsrc=|href="(?!#|data:)|@import|url\(', text)


def test_a_table_escapes_and_aligns() -> None:
    text = table(["name", "value"], [["<b>&", 0.25], ["x", None]])
    assert '<td>&lt;b&gt;&amp;</td><td class="number">0.25</td>' in text
    assert '<td class="number"></td>' in text
