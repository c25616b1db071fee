"""A table widget that draws only its visible lines, so a long table costs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.events import Click, Resize
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from sqlsem.insight.board import Listing, Row
from sqlsem.ops.terminal.tables import STYLES, fit, line

__all__ = ["Grid"]

#: Below this width columns marked `extra` are hidden.
WIDE = 110
#: The mark before the line under the cursor (colours may be off).
MARK, NO_MARK = "> ", "  "


class Grid(ScrollView, can_focus=True):
    """The rows of a `Listing`, with a cursor that stays on its row when other rows come and go."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home,g", "to(0)", "First", show=False),
        Binding("end,G", "to(-1)", "Last", show=False),
    ]

    class Moved(Message):
        """The cursor is on another row, or its row has changed."""

    def __init__(self) -> None:
        super().__init__()
        self._listing: Listing | None = None
        self._cursor = 0
        self._columns: list[int] = []  # the numbers of the columns that are shown
        self._right: set[int] = set()
        self._widths: list[int] = []

    @property
    def row(self) -> Row | None:
        """The row under the cursor."""
        rows = self._listing.rows if self._listing is not None else ()
        return rows[self._cursor] if self._cursor < len(rows) else None

    def show(self, listing: Listing, *, new_view: bool = False) -> None:
        """Show other rows. ``new_view``: put the cursor on the first one."""
        before = self.row
        self._listing = listing
        keys = {row.key: number for number, row in enumerate(listing.rows)}
        if new_view:
            self._cursor = 0
        elif before is not None:
            self._cursor = keys.get(before.key, min(self._cursor, max(0, len(keys) - 1)))
        self._lay_out()
        self._follow()

    def _lay_out(self) -> None:
        """Compute the widths of the columns."""
        if self._listing is None:
            return
        width = self.size.width or 80
        columns = self._listing.columns
        self._columns = [number for number, column in enumerate(columns) if width >= WIDE or not column.extra]
        heads = [columns[number].head for number in self._columns]
        cells = [[row.cells[number] for number in self._columns] for row in self._listing.rows if not row.heading]
        self._right = {at for at, number in enumerate(self._columns) if columns[number].right}
        elastic = [at for at, number in enumerate(self._columns) if columns[number].elastic]
        self._widths = fit(heads, cells, width, elastic=elastic, indent=len(MARK))
        self.virtual_size = Size(width, len(self._listing.rows) + 1)
        self.refresh()

    def _follow(self) -> None:
        """Scroll to the cursor. (The heads in the first line do not scroll.)"""
        room = max(1, self.size.height - 1)
        top = round(self.scroll_y)
        if self._cursor < top or (self._cursor == 1 and top == 1):
            self.scroll_to(y=0 if self._cursor <= 1 else self._cursor, animate=False, force=True)
        elif self._cursor >= top + room:
            self.scroll_to(y=self._cursor - room + 1, animate=False, force=True)
        self.post_message(self.Moved())

    def on_resize(self, event: Resize) -> None:
        """Compute the widths again."""
        self._lay_out()
        self._follow()

    def on_click(self, event: Click) -> None:
        """Move the cursor to the row that was clicked."""
        if event.y > 0:
            self._go_to(round(self.scroll_y) + event.y - 1)

    def action_move(self, by: int) -> None:
        """Move the cursor by rows."""
        self._go_to(self._cursor + by)

    def action_page(self, by: int) -> None:
        """Move the cursor by screens."""
        self._go_to(self._cursor + by * max(1, self.size.height - 1))

    def action_to(self, at: int) -> None:
        """Move the cursor to the first row, or to the last one (-1)."""
        self._go_to(at if at >= 0 else len(self._listing.rows if self._listing else ()) - 1)

    def _go_to(self, at: int) -> None:
        rows = self._listing.rows if self._listing is not None else ()
        self._cursor = max(0, min(at, len(rows) - 1))
        self._follow()
        self.refresh()

    # -- drawing ------------------------------------------------------------------------------------------------

    def render_line(self, y: int) -> Strip:
        """Draw a visible line."""
        width = self.size.width
        listing = self._listing
        if listing is None or y == 0:
            heads = "" if listing is None else NO_MARK + self._text([column.head for column in listing.columns])
            return self._strip(heads, Style(bold=True, underline=True), width)
        number = round(self.scroll_y) + y - 1
        if not listing.rows:
            message = "No row has these words in it." if listing.total else listing.view.empty_text
            return self._strip(NO_MARK + message if y == 1 else "", Style(), width)
        if number >= len(listing.rows):
            return self._strip("", Style(), width)
        row = listing.rows[number]
        is_current = number == self._cursor
        style = Style.parse(STYLES.get(row.state, "")) + Style(bold=row.heading or None, reverse=is_current or None)
        text = row.cells[0] if row.heading else self._text(row.cells)
        return self._strip((MARK if is_current else NO_MARK) + text, style, width)

    def _text(self, cells: Sequence[str]) -> str:
        return line([cells[number] for number in self._columns], self._widths, self._right)

    def _strip(self, text: str, style: Style, width: int) -> Strip:
        """Return a line as wide as the widget, in the widget's colours if the style has none."""
        return Strip([Segment(text, self.rich_style + style)]).adjust_cell_length(width, self.rich_style + style)
