"""A release grants the next row in its own transaction, if it is sure that the row may be granted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

pytestmark = pytest.mark.engines("mssql")


class Queue:
    """Rows of several members, all of them registered by one session."""

    def __init__(self, session: Any, name: str) -> None:
        self.session, self.name, self._uid = session, name, count()
        self.members: list[int] = []

    def register(self, access: str = "write", limit: int = 1, weight: int = 1, attended_ms: int | None = None) -> int:
        self.members.append(
            self.session.rows(
                "DECLARE @m bigint; EXEC {s}.register_member N'host', 1, N'test', 60000, NULL, @m OUTPUT; SELECT @m"
            )[0][0]
        )
        uid = f"{self.name} {next(self._uid)}"
        ((position, _),) = self.session.rows(
            "EXEC {s}.register ?, ?, N'owner', ?, 0, ?, ?, ?, ?, NULL, 1000, NULL, NULL, 1, "
            + ("NULL" if attended_ms is None else str(attended_ms)),
            *(self.members[-1], "me", uid, self.name, access, limit, weight),
        )
        return int(position)

    def release(self, position: int, outcome: str = "released") -> None:
        assert self.session.rows("EXEC {s}.release ?, ?, N'me', ?, 1", self.name, position, outcome) == [(0,)]

    def granted(self) -> list[int]:
        rows = self.session.rows(
            "SELECT queue_position FROM {s}.entry WHERE resource_id = ? AND granted_at IS NOT NULL "
            "ORDER BY queue_position",
            self.name,
        )
        return [row[0] for row in rows]

    def wait(self, position: int) -> int:
        return int(self.session.rows("EXEC {s}.wait ?, ?, 0, 1", self.name, position)[0][0])


@pytest.fixture
def queue(session: Callable[[], Any], name: str) -> Iterator[Queue]:
    new_queue = Queue(session(), name)
    yield new_queue
    for member in new_queue.members:
        new_queue.session.rows("EXEC {s}.deregister_member ?", member)


def test_release_grants_the_next_row(queue: Queue) -> None:
    first, second, third = queue.register(), queue.register(), queue.register()
    queue.release(first)
    assert queue.granted() == [second]
    assert queue.wait(second) == 0
    assert queue.wait(third) == -1
    queue.release(second)
    assert queue.granted() == [third]


def test_release_of_a_waiting_row_grants_none(queue: Queue) -> None:
    first, second, third = queue.register(), queue.register(), queue.register()
    queue.release(second, "timeout")
    assert queue.granted() == [first]
    queue.release(first)
    assert queue.granted() == [], "its row stood behind another one"
    assert queue.wait(third) == 0


@pytest.mark.parametrize(("access", "limit"), [("read", 1), ("write", 2)])
def test_release_beside_another_holder_grants_none(queue: Queue, access: str, limit: int) -> None:
    first, second = queue.register(access, limit), queue.register(access, limit)
    waiter = queue.register()
    queue.release(second)
    assert queue.granted() == [first]
    assert queue.wait(waiter) == -1
    queue.release(first)
    assert queue.wait(waiter) == 0


def test_release_leaves_a_session_to_itself(queue: Queue) -> None:
    """The session's caller may have been disconnected during its wait: its row goes when the lease is over."""
    first, session = queue.register(), queue.register(attended_ms=60_000)
    queue.release(first)
    assert queue.granted() == []
    assert queue.wait(session) == 0


def test_release_while_paused_grants_none(queue: Queue) -> None:
    first, second = queue.register(), queue.register()
    queue.session.rows("EXEC {s}.set_resource ?, N'paused', 1", queue.name)
    queue.release(first)
    assert queue.granted() == []
    assert queue.wait(second) == -1
    queue.session.rows("EXEC {s}.set_resource ?, N'paused', 0", queue.name)
    assert queue.wait(second) == 0


def test_release_does_not_grant_a_revoked_row(queue: Queue) -> None:
    first, second = queue.register(), queue.register()
    queue.session.rows(
        "UPDATE {s}.entry SET revoked_at = SYSUTCDATETIME() WHERE resource_id = ? AND queue_position = ?",
        queue.name,
        second,
    )
    queue.release(first)
    assert queue.granted() == []
    assert queue.wait(second) == -2


def test_grant_that_a_crash_undid_keeps_others_out(queue: Queue) -> None:
    """A crash may lose the time of a grant, but not its row, for which others wait."""
    first, second = queue.register(), queue.register()
    queue.release(first)
    assert queue.wait(second) == 0
    third = queue.register()
    queue.session.rows("UPDATE {s}.entry SET granted_at = NULL WHERE resource_id = ?", queue.name)
    assert queue.wait(third) == -1
    queue.release(second)
    assert queue.wait(third) == 0


def test_release_that_a_crash_undid_is_done_again(
    database: Any, connect: Callable[..., Any], session: Callable[[], Any], name: str
) -> None:
    """The server restarts with the row; its owner reconnects, and does not know the row."""
    rows = session().rows
    coordinator = connect()
    columns = (
        "queue_position, resource_id, requesting_id, access_type, concurrency_limit, weight, member_id, owner, "
        "request_uid, requested_at, granted_at"
    )
    with coordinator.mutex(name):
        (row,) = rows(f"SELECT {columns} FROM {{s}}.entry WHERE resource_id = ?", name)
    assert database.queue(name) == []
    rows(
        f"SET IDENTITY_INSERT {{s}}.entry ON; INSERT INTO {{s}}.entry ({columns}) "
        f"VALUES ({', '.join('?' * len(row))}); SET IDENTITY_INSERT {{s}}.entry OFF",
        *row,
    )
    assert len(database.queue(name)) == 1
    coordinator.client.member.heartbeat()
    assert database.queue(name) == []


def mark_of(queue: Queue) -> int:
    rows = queue.session.rows("SELECT mark FROM {s}.low_water WHERE resource_id = ?", queue.name)
    return int(rows[0][0]) if rows else 0


def test_mark_stands_below_the_first_row(queue: Queue) -> None:
    first = queue.register("read")
    second = queue.register("read")
    queue.session.rows("EXEC {s}.advance_low_water_mark ?", queue.name)
    assert mark_of(queue) == first - 1
    queue.release(first)
    queue.session.rows("EXEC {s}.advance_low_water_mark ?", queue.name)
    assert mark_of(queue) == second - 1
    writer = queue.register()
    assert queue.wait(writer) == -1
    queue.release(second)
    assert queue.wait(writer) == 0


def test_release_raises_the_mark_now_and_then(queue: Queue) -> None:
    queue.session.rows("EXEC {s}.advance_low_water_mark ?", queue.name)
    for _ in range(1000):  # once in 33
        position = queue.register()
        queue.release(position)
        if mark_of(queue) > 0:
            break
    assert mark_of(queue) == position
    assert queue.granted() == []
    holder, waiter = queue.register(), queue.register()
    assert queue.granted() == [holder]
    assert queue.wait(waiter) == -1


def test_numbers_that_went_back_are_refused(queue: Queue, refused: Callable[[int, Callable[..., Any]], Any]) -> None:
    """No session would see a row below the mark."""
    position = queue.register()
    queue.release(position)
    queue.session.rows("INSERT INTO {s}.low_water (resource_id, mark) VALUES (?, ?)", queue.name, position + 1_000_000)
    with refused(50002, "numbers of the queue went back"):
        queue.register()
    holder, waiter = queue.register(), queue.register()
    assert queue.granted() == [holder]
    assert queue.wait(waiter) == -1
