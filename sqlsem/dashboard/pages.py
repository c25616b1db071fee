"""How the pages are drawn. Their texts were cleaned before (`sqlsem.printable`), and Jinja escapes them."""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass
from typing import Any

import jinja2

from sqlsem.insight.board import ORDER, VIEWS, Listing, Row, listing, offered_views, summary
from sqlsem.insight.consequences import Action, Kind
from sqlsem.live import Seen
from sqlsem.printable import clean

__all__ = ["MOST_ROWS", "Asked", "Pages"]

#: Rows on a page; filters find the others.
MOST_ROWS = 2000
#: The longest text that is looked for.
MOST_WORDS = 200

#: What the actions are called on a button.
LABELS: dict[Kind, str] = {
    "pause": "Pause the resource",
    "resume": "Resume the resource",
    "cap": "Cap it",
    "uncap": "Lift the cap",
    "revoke": "Revoke the request",
    "revoke_now": "Revoke it at once",
    "retry": "Retry the failed task",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a page is asked to show: a view, how it is sorted, words that must stand in its rows."""

    view: str
    sort: str
    words: str

    @classmethod
    def of(cls, query: Any) -> Asked:
        """From the query of a URL; what is not known is left out."""
        view = query.get("view", "")
        view = view if view in VIEWS else next(iter(VIEWS))
        sort = query.get("sort", "")
        return cls(view, sort if sort in VIEWS[view].sorts else ORDER, clean(query.get("q", ""))[:MOST_WORDS])

    def url(self, path: str = "/", **others: str) -> str:
        """A URL that asks for the same, but for ``others``."""
        values = {"view": self.view, "sort": self.sort, "q": self.words, **others}
        values = {name: value for name, value in values.items() if value and (name, value) != ("sort", ORDER)}
        return f"{path}?{urllib.parse.urlencode(values)}"


class Pages:
    """Draws; ``where`` is the database in words, ``every`` how often it is looked at."""

    def __init__(self, where: str, every: float) -> None:
        self._environment = jinja2.Environment(
            loader=jinja2.PackageLoader("sqlsem.dashboard"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.globals |= {"where": clean(where), "every": every, "views": VIEWS, "labels": LABELS}

    def draw(self, template: str, **values: Any) -> str:
        """A page."""
        return self._environment.get_template(template).render(values)

    def board(self, seen: Seen, asked: Asked) -> str:
        """The part of the page that changes."""
        return self.draw("board.html", **self.values(seen, asked))

    def values(self, seen: Seen, asked: Asked) -> dict[str, Any]:
        """What the board is drawn from."""
        found = None if seen.overview is None else listing(seen.overview, seen.why, asked.view, asked.sort, asked.words)
        return {
            "seen": seen,
            "asked": asked,
            "found": found,
            "offered": offered_views(seen.overview, asked.view),
            "rows": () if found is None else found.rows[:MOST_ROWS],
            "left": 0 if found is None else max(0, len(found.rows) - MOST_ROWS),
            "summary": "" if seen.overview is None else summary(seen.overview),
        }


def row_of(seen: Seen, asked: Asked, key: str) -> tuple[Listing, Row] | None:
    """A row, wherever it stands by now."""
    if seen.overview is None:
        return None
    found = listing(seen.overview, seen.why, asked.view, asked.sort)
    return next(((found, row) for row in found.rows if row.key == key), None)


def action_of(values: Any) -> Action | None:
    """The action that a query or a form names; None where it is none."""
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
