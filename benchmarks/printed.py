"""Print figures in tables; a figure that misses its target is red."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

__all__ = ["ENGINES", "ahead", "console", "judged", "table"]

ENGINES = {"postgresql": "PostgreSQL", "mssql": "SQL Server", "sqlite": "SQLite", "mysql": "MariaDB"}
console = Console(highlight=False)
if not console.is_terminal:
    console.width = 150


def table(title: str, *columns: str) -> Table:
    """Return an empty table; all columns but the first are numbers."""
    new_table = Table(title=title, title_justify="left", title_style="bold", show_edge=False)
    for number, column in enumerate(columns):
        new_table.add_column(column, justify="right" if number else "left")
    return new_table


def judged(value: float | None, target: float, form: str = ".2f", *, minimum: bool = False) -> str:
    """Return a figure, and its target: at most, or at ``least``."""
    if value is None:
        return "-"
    good = value >= target if minimum else value <= target
    return f"[{'green' if good else 'red'}]{value:{form}}[/] ({'≥' if minimum else '≤'} {target:g})"


def ahead(ratio: float) -> str:
    """Return our figure as a multiple of the peer's."""
    return f"[{'green' if ratio > 1 else 'red'}]{ratio:.2f}[/]"
