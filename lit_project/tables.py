"""Tables on the terminal, and durations in words."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Rows = Sequence[Sequence[object]]


def print_table(title: str, header: Sequence[str], rows: Rows, summary: Rows = ()) -> None:
    """Print a table, with ``summary`` below a line of its own; in a file or a pipe, lines are as wide as they need be.

    Floats have four digits after the point, None is an empty cell, columns of numbers are flush right.
    """
    table = Table(title=escape(title))
    for number, name in enumerate(header):
        numeric = all(isinstance(row[number], int | float | None) for row in rows)
        table.add_column(escape(name), justify="right" if numeric else "left", overflow="fold")
    for part in (rows, summary):
        for row in part:
            table.add_row(*map(_cell, row))
        table.add_section()
    console = Console()
    if not console.is_terminal:
        console.width = 100_000
    console.print(table)


def duration(seconds: float) -> str:
    """Seconds, minutes and seconds, or hours and minutes: ``25 h 01 min``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if isinstance(value, float) else escape(str(value))
