"""Draws the pages of the dashboard. Texts are clean already (`sqlsem.util.printable`), and Jinja escapes them."""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass
from typing import Any

import jinja2

from sqlsem.insight.board import ORDER, VIEWS, Listing, Row, listing, offered_views, summary
from sqlsem.insight.consequences import Action, Kind
from sqlsem.ops.poller import Snapshot
from sqlsem.util.printable import clean

__all__ = ["MAX_ROWS", "PageQuery", "Pages"]

#: The number of rows on a page; filters find the others.
MAX_ROWS = 2000
#: The longest text of a filter.
MAX_FILTER_LENGTH = 200

#: The texts of the buttons.
LABELS: dict[Kind, str] = {
    "pause": "Pause the resource",
    "resume": "Resume the resource",
    "cap": "Set its limit",
    "uncap": "Remove its limit",
    "revoke": "Revoke the request",
    "revoke_now": "Revoke it at once",
    "retry": "Retry the failed task",
}


@dataclass(frozen=True, slots=True)
class PageQuery:
    """The query of a page's URL: the view, its sort column, and words that rows must contain."""

    view: str
    sort: str
    words: str

    @classmethod
    def of(cls, query: Any) -> PageQuery:
        """Return the `PageQuery` of a URL's query; unknown values are ignored."""
        view = query.get("view", "")
        view = view if view in VIEWS else next(iter(VIEWS))
        sort = query.get("sort", "")
        return cls(view, sort if sort in VIEWS[view].sorts else ORDER, clean(query.get("q", ""))[:MAX_FILTER_LENGTH])

    def url(self, path: str = "/", **others: str) -> str:
        """Return the URL of this query, changed by ``others``."""
        values = {"view": self.view, "sort": self.sort, "q": self.words, **others}
        values = {name: value for name, value in values.items() if value and (name, value) != ("sort", ORDER)}
        return f"{path}?{urllib.parse.urlencode(values)}"


class Pages:
    """Draws pages. ``where``: the database's name for people; ``every``: seconds between two polls."""

    def __init__(self, where: str, every: float) -> None:
        self._environment = jinja2.Environment(
            loader=jinja2.PackageLoader("sqlsem.ops.dashboard"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.globals |= {"where": clean(where), "every": every, "views": VIEWS, "labels": LABELS}

    def draw(self, template: str, **values: Any) -> str:
        """Return a page as HTML."""
        return self._environment.get_template(template).render(values)

    def board(self, snapshot: Snapshot, query: PageQuery) -> str:
        """Return the part of the page that changes, as HTML."""
        return self.draw("board.html", **self.values(snapshot, query))

    def values(self, snapshot: Snapshot, query: PageQuery) -> dict[str, Any]:
        """Return the values for the template of the board."""
        board = None
        if snapshot.overview is not None:
            board = listing(snapshot.overview, snapshot.why, query.view, query.sort, query.words)
        return {
            "snapshot": snapshot,
            "query": query,
            "listing": board,
            "offered": offered_views(snapshot.overview, query.view),
            "rows": () if board is None else board.rows[:MAX_ROWS],
            "left": 0 if board is None else max(0, len(board.rows) - MAX_ROWS),
            "summary": "" if snapshot.overview is None else summary(snapshot.overview),
        }


def row_of(snapshot: Snapshot, query: PageQuery, key: str) -> tuple[Listing, Row] | None:
    """Return a row by its key, with its listing; None if it is gone."""
    if snapshot.overview is None:
        return None
    board = listing(snapshot.overview, snapshot.why, query.view, query.sort)
    return next(((board, row) for row in board.rows if row.key == key), None)


def action_of(values: Any) -> Action | None:
    """Return the action that a query or a form names; None if it is invalid."""
    kind = values.get("kind", "")
    if kind not in LABELS:
        return None
    try:
        numbers = {name: _number(values.get(name, "")) for name in ("position", "task_id", "cap")}
    except ValueError:
        return None
    action = Action(kind, resource=values.get("resource") or None, **numbers)
    needed = {"revoke": "position", "revoke_now": "position", "retry": "task_id"}.get(kind, "resource")
    if getattr(action, needed) is None or (kind == "cap" and action.cap is None):
        return None
    return action


def _number(text: str) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) > 0):
        raise ValueError(text)
    return int(text)
