"""The columns of the tables that `sqlsem top` and `sqlsem dashboard` show. No I/O."""

from __future__ import annotations

from sqlsem.util.record import record

__all__ = ["BATCHES", "BLOCKERS", "MEMBERS", "QUEUES", "RATES", "TASKS", "TIMES", "Column"]


@record
class Column:
    """A column: its head, its alignment, and how a narrow screen treats it.

    Attributes:
        key: The name to sort by.
        head: The text above it.
        right: Its cells are aligned to the right.
        elastic: It is shortened first.
        extra: Narrow screens leave it out.
        falling: If a table is sorted by it, the largest comes first.
    """

    key: str
    head: str
    right: bool = False
    elastic: bool = False
    extra: bool = False
    falling: bool = False


_NAME = Column("resource", "RESOURCE", elastic=True)
_POSITION = Column("position", "POS", right=True)
_WHO = Column("who", "WHO", elastic=True)
_EXTRA = (Column("program", "PROGRAM", elastic=True, extra=True), Column("note", "NOTE", elastic=True, extra=True))


def _number(key: str, head: str, *, extra: bool = False) -> Column:
    return Column(key, head, right=True, extra=extra, falling=True)


QUEUES = (
    *(_NAME, _POSITION, Column("state", "STATE"), _number("seconds", "FOR"), Column("access", "ACCESS", elastic=True)),
    *(_WHO, Column("why", "WHY", elastic=True), Column("enters", "GRANT IN ~", right=True), *_EXTRA),
)
BLOCKERS = (
    *(_POSITION, _NAME, _number("waiters", "WAITERS"), _number("waiting", "WAITING"), _number("seconds", "FOR"), _WHO),
    *(Column("why", "MISSING", elastic=True), *_EXTRA),
)
MEMBERS = (
    *(Column("member", "MEMBER", right=True), _WHO, Column("state", "STATE"), Column("kind", "BY")),
    *(_number("missing", "MISSING"), _number("left", "LEFT"), _number("holding", "HOLDS"), _number("waiting", "WAITS")),
    *(Column("program", "PROGRAM", elastic=True), Column("login", "LOGIN", elastic=True, extra=True)),
)
TASKS = (
    *(Column("queue", "QUEUE", elastic=True), _number("pending", "PENDING"), _number("running", "RUNNING")),
    *(_number("lost", "LOST"), _number("failed", "FAILED"), _number("finished", "DONE")),
    *(_number("cancelled", "CANCELLED", extra=True), _number("oldest", "OLDEST"), _number("rate", "RATE")),
    Column("held", "HELD UP BY", elastic=True),
)
BATCHES = (
    *(Column("batch", "BATCH", right=True), Column("name", "NAME", elastic=True), Column("state", "STATE")),
    *(_number("seconds", "FOR"), Column("left", "LEFT", right=True), Column("parts", "PARTS", right=True)),
    Column("lacking", "LACKS", elastic=True),
)
TIMES = (
    *(_NAME, _number("count", "COUNT")),
    *(_number("held10", "HELD 10%"), _number("held50", "50%"), _number("held90", "90%"), _number("held99", "99%")),
    *(
        _number("waited10", "WAITED 10%"),
        _number("waited50", "50%"),
        _number("waited90", "90%"),
        _number("waited99", "99%"),
    ),
)
RATES = (
    *(Column("rate", "RATE", elastic=True), _number("window", "WINDOW"), _number("limit", "LIMIT")),
    *(_number("used", "USED"), _number("left", "LEFT"), _number("free", "ROOM IN"), _number("waiting", "WAITING")),
    *(Column("state", "STATE"), Column("idle", "LAST", right=True)),
    *(_number("taken", "TAKEN", extra=True), _number("returned", "RETURNED", extra=True)),
    _number("waits", "WAITS", extra=True),
)
