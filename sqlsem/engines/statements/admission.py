"""The rule, as statements: whether a request may be granted, and which rows block it.

A request reads the rows ahead of it, the oldest first, until they exceed its limit. Behind n granted readers a reader
would read n rows. So readers and stages begin further back, at a row that proves that no row before it conflicts:

    If a row with a shared access and a limit of 1 is granted, no row ahead of it conflicts with that access, except a
    row whose access is ``upgrade``.

- The rule granted it, and each row weighs at least 1, so no row ahead conflicted at that moment. (A poll reads outside
  of the gate and writes the grant later. The next points are true of the time in between, too.)
- New rows come only behind it. Limits and weights never change.
- The access of a row ahead changes only by a conversion. A reader becomes ``upgrade``, which is the exception, and
  perhaps a reader again. It becomes the writer only when no other row is granted: then the granted row has left. (A
  reader that fits, but has not written its grant, is granted when the upgrade begins.) A writer that becomes a reader
  was no row ahead: it would have conflicted.
- If the granted row was a writer itself, no row was ahead of it.
- A hand-over, an adoption, a pause, a cap, a revocation and the death of a member change nothing in this. A bare
  participant writes no grant, so its row proves nothing.

The statement that reads the rows also checks that the row is still granted and that no reader upgrades. So its answer
is true of one moment, and the position from which it reads may come from anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlsem.engines.statements.members import MemberStatements
from sqlsem.engines.statements.session import StatementEngine
from sqlsem.values.locks import Request

#: The number of blockers at which a waiter stops counting, and the number of rows among which it searches for them.
FAR = 256
#: The maximum number of blockers that a session stores.
MAX_BLOCKERS = 1000
LAST = 2**63 - 1


class Admission(NamedTuple):
    """The answer of `AdmissionStatements.admission`. ``allowed``: the request may be granted. ``granted``: it is
    granted already. ``last_blocker``: of the first rows that together exceed the limit, the position of the last one;
    None if they do not.
    """

    allowed: bool
    granted: bool
    last_blocker: int | None


class AdmissionStatements(MemberStatements):
    """Reads the rows ahead of requests."""

    def __init__(self, engine: StatementEngine) -> None:
        super().__init__(engine)
        # By resource and access: the row that blocked the last request with that shared access.
        self._blockers: dict[tuple[str, str], int] = {}

    def admission(self, request: Request, position: int) -> Admission:
        """Return whether a request at ``position`` may be granted now."""
        key, row = (request.resource, request.access), None
        if _one_blocks(request) and self._blockers.get(key, position) < position:
            row = self._fits(request, position, self._blockers[key])
        if row is None or row["fits"]:
            first = self._granted_before(request, position)
            row = self._fits(request, position, first)
            if row["fits"] and not _is_proved(row, first):
                row = self._fits(request, position, 0)
        edge: int | None = row["edge"]
        if edge is not None and row["upgrading"] is not None:
            edge = min(edge, row["upgrading"])
        if _one_blocks(request) and edge is not None:
            if len(self._blockers) >= MAX_BLOCKERS:
                self._blockers.clear()
            self._blockers[key] = edge
        granted = bool(row["let_in"])
        return Admission(granted or bool(row["fits"] and not row["paused"]), granted, edge)

    def ready_sharers(self, request: Request, positions: Sequence[int]) -> list[int]:
        """Return the positions, of these in order, at which a request may be granted. It shares its access, and its
        limit is 1.
        """
        if not self.admission(request, positions[0]).allowed:
            return []
        first = self._granted_before(request, positions[0])
        row = self._fits(request, positions[-1], first)
        if not _is_proved(row, first):
            row = self._fits(request, positions[-1], 0)
        if row["paused"]:
            return []
        return [position for position in positions if row["edge"] is None or position < row["edge"]]

    def _granted_before(self, request: Request, position: int) -> int:
        """Return a position from which statement ``fits`` may read on; 0 if it must read all rows."""
        if not request.shared:
            return 0
        values = {"resource": request.resource, "position": position, "access": request.access}
        first: int = self.row("granted_before", values)["first"]
        return first

    def _fits(self, request: Request, position: int, first: int) -> Any:
        """Return the row of statement ``fits``."""
        values = {"resource": request.resource, "position": position, "access": request.access}
        limit = request.limit or self.row("places", values)["places"]
        return self.row("fits", {**values, "weight": request.weight, "places": limit, "first": first})

    def server_limit(self, resource: str) -> int | None:
        """Return the limit that an operator has set for a resource, if any."""
        limit: int | None = self.row("cap", {"resource": resource})["cap"]
        return limit

    def conflicting(self, request: Request, first: int, position: int, maximum: int, *, reach: int = LAST) -> list[Any]:
        """Return the first rows at positions from ``first`` to before ``position`` that conflict with a request, at
        most ``maximum``, and only of the first ``reach`` rows there.
        """
        values = {"resource": request.resource, "first": first, "position": position}
        rows = self.rows("rows_between", {**values, "reach": reach if request.shared else maximum})
        if not request.shared:
            return rows
        return [row for row in rows if row["access"] != request.access][:maximum]

    def blockers(self, request: Request, position: int, maximum: int) -> list[Any]:
        """Return the first rows that conflict with a request at ``position``, at most ``maximum``."""
        if not _one_blocks(request):
            return self.conflicting(request, 0, position, maximum)
        first = self.admission(request, position).last_blocker
        return [] if first is None else self.conflicting(request, first, position, maximum, reach=2 * maximum)

    def last_row_ahead(self, request: Request, position: int, last_blocker: int | None) -> int | None:
        """Return the last row that conflicts with a request at ``position``; or else ``last_blocker``."""
        values = {"resource": request.resource, "position": position, "access": request.access}
        values["reach"] = FAR if request.shared else 1
        ahead: int | None = self.row("row_ahead", values)["ahead"]
        return last_blocker if ahead is None else ahead


def _one_blocks(request: Request) -> bool:
    """Return True if the request shares its access, and one row that conflicts blocks it."""
    return request.shared and request.limit == 1


def _is_proved(row: Any, first: int) -> bool:
    """Return True if no row before ``first`` conflicts."""
    return first == 0 or bool(row["granted_first"] and row["upgrading"] is None)
