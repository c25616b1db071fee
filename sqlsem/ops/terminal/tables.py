"""Tables that fit the terminal, texts of their cells, and the console on which all commands draw."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import Generic, TypeVar

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from sqlsem.insight.words import process_name, seconds_in_words
from sqlsem.util.printable import clean

__all__ = [
    "CleanConsole",
    "Column",
    "fit",
    "line",
    "local_time",
    "moment",
    "process_name",
    "seconds_in_words",
    "table",
    "tables",
]

R = TypeVar("R")

#: The least width of a column, in characters.
MIN_COLUMN_WIDTH = 6
#: The colour of a row by its state: of a request, a task, a part of a batch.
STYLES = {
    **{"waits": "yellow", "revoked": "red", "dead": "red"},
    **{"running": "green", "lost": "red", "failed": "red", "cancelled": "dim", "finished": "dim"},
}


class CleanConsole(Console):
    """A console that escapes unprintable characters in everything it draws.

    Cells of tables must be escaped before, as their width is measured; this class is a second line of defence.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render like `rich.console.Console`, and escape all but the console's own control sequences."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(clean(segment.text, keep="\n"), segment.style)


@dataclass(frozen=True, slots=True)
class Column(Generic[R]):
    """A column of a table.

    Attributes:
        head: The text above it.
        text: Returns the text of a row's cell.
        right: Its cells are aligned to the right.
        elastic: It is shortened if the table is too wide.
        shown: False leaves it out.
    """

    head: str
    text: Callable[[R], str]
    right: bool = False
    elastic: bool = False
    shown: bool = True


def local_time(moment: datetime | None) -> str:
    """Return local time, without the day if it is today."""
    if moment is None:
        return ""
    local = moment.astimezone()
    today = local.date() == datetime.now().astimezone().date()
    return local.strftime("%H:%M:%S" if today else "%m-%d %H:%M")


def moment(at: datetime | None, form: str = "%m-%d %H:%M:%S") -> str:
    """Return local time with the day; a dash for None."""
    return "-" if at is None else at.astimezone().strftime(form)


def fit(
    heads: Sequence[str], rows: Iterable[Sequence[str]], width: int, *, elastic: Collection[int], indent: int = 0
) -> list[int]:
    """Return the widths of columns with a gap of two. The widest elastic columns shrink until all fit."""
    lines = [heads, *rows]
    widths = [max(cell_len(clean(line[column])) for line in lines) for column in range(len(heads))]
    while sum(widths) + 2 * (len(widths) - 1) + indent > width:
        widest = max(elastic, key=lambda column: widths[column])
        if widths[widest] <= MIN_COLUMN_WIDTH:
            break
        widths[widest] -= 1
    return widths


class _Table:
    """A table with known widths of columns. (Rich's own tables take a second for a thousand rows.)"""

    def __init__(
        self, lines: Iterable[tuple[str, Sequence[str]]], widths: Sequence[int], right: Collection[int], indent: int
    ) -> None:
        self._lines = list(lines)  # the style of each, and its cells
        self._widths = widths
        self._right = right
        self._indent = " " * indent

    def __rich_console__(self, console: Console, _: ConsoleOptions) -> RenderResult:
        styles = {name: console.get_style(name) for name in {name for name, _ in self._lines}}
        for name, row in self._lines:
            yield Segment(self._indent)
            yield Segment(line(row, self._widths, self._right), styles[name])
            yield Segment.line()


def line(cells: Iterable[str], widths: Sequence[int], right: Collection[int]) -> str:
    """Return a line of a table. Cells of the columns in ``right`` are aligned to the right."""
    return "  ".join(
        _cell(clean(text), width, column in right)
        for column, (text, width) in enumerate(zip(cells, widths, strict=True))
    )


def _cell(text: str, width: int, right: bool) -> str:
    length = cell_len(text)
    if length > width:
        return set_cell_size(text, width - 1) + "…"
    blanks = " " * (width - length)
    return blanks + text if right else text + blanks


def tables(
    columns: Sequence[Column[R]], groups: Iterable[Iterable[R]], width: int, indent: int = 0
) -> list[RenderableType]:
    """Return a table without borders for each group of rows, at most ``width`` characters wide, with ``indent`` blanks
    before every line; all have columns of the same widths. A column STATE decides the colour of each row.
    """
    shown = [column for column in columns if column.shown]
    heads = [column.head for column in shown]
    texts = [[[column.text(row) for column in shown] for row in rows] for rows in groups]
    elastic = [number for number, column in enumerate(shown) if column.elastic]
    right = [number for number, column in enumerate(shown) if column.right]
    widths = fit(heads, chain.from_iterable(texts), width, elastic=elastic, indent=indent)

    def style(cells: Sequence[str]) -> str:
        return STYLES.get(cells[heads.index("STATE")], "") if "STATE" in heads else ""

    return [
        _Table([("dim", heads), *((style(cells), cells) for cells in rows)], widths, right, indent) for rows in texts
    ]


def table(
    columns: Sequence[Column[R]], rows: Sequence[R], width: int, indent: int = 0, *, empty: str = ""
) -> RenderableType:
    """Return one table (see `tables`); if it has no rows, the text ``empty``, unless that is empty, too."""
    return tables(columns, [rows], width, indent)[0] if rows or not empty else Text(empty)
