"""The console on which all commands draw tables."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from sqlsem.util.printable import clean

__all__ = ["CleanConsole"]


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
