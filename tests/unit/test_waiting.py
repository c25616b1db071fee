"""The sessions of the waiting room: none is lost, and none is used twice."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import PATIENCE, until

import sqlsem
from sqlsem.core import acquire, verbs, waiting


@pytest.fixture
def process(tmp_path):
    with sqlsem.connect(tmp_path / "locks.db") as coordinator:
        coordinator.mutex("a").acquire()  # there are tables now
        yield coordinator.process


def test_where_there_is_no_room_idle_sessions_stay(process, monkeypatch):
    room = process.waiting_room
    with room.session(1.0) as kept:
        pass
    monkeypatch.setattr(room, "_places", 0)
    with room.session(1.0) as session:
        assert session is None
    monkeypatch.undo()
    with room.session(1.0) as session:
        assert session is kept


def test_few_are_kept(process):
    room, made = process.waiting_room, []
    with room.session(1.0) as one, room.session(1.0) as two, room.session(1.0) as three:
        made += [one, two, three]
    assert len(set(map(id, made))) == 3
    assert len(room.sessions()) == waiting.MOST_IDLE_SESSIONS


def test_one_that_failed_is_closed(process):
    room = process.waiting_room
    with pytest.raises(ZeroDivisionError), room.session(1.0) as session:
        raise ZeroDivisionError
    assert room.sessions() == []
    with room.session(1.0) as another:
        assert another is not session


@pytest.mark.parametrize(("holder", "waiters", "looks"), [("mutex", "mutex", False), ("write", "read", True)])
def test_only_those_look_who_may_be_let_in_before_the_first(tmp_path, monkeypatch, holder, waiters, looks):
    """Thousands may wait behind the first one of this process; each look is a statement."""
    for module in (acquire, verbs):
        monkeypatch.setattr(module, "SLICE_SECONDS", 0.05)
    path = tmp_path / "locks.db"
    with sqlsem.connect(path) as other, sqlsem.connect(path) as coordinator, ThreadPoolExecutor() as pool:
        assert getattr(other, holder)("a").acquire()
        coordinator.mutex("b").acquire()  # connects
        process, seen, looked = coordinator.process, Counter(), Counter()
        first, wait = process.waiting_room.first, process.member.main.session.wait

        def who_is_first(ticket):
            seen[ticket.position] += 1
            return first(ticket)

        def look(ticket, timeout, nudge):
            looked[ticket.position] += 1
            return wait(ticket, timeout, nudge)

        monkeypatch.setattr(process.waiting_room, "first", who_is_first)
        monkeypatch.setattr(process.member.main.session, "wait", look)
        lock = getattr(coordinator, waiters)("a")

        def enter():
            with lock:
                return True

        done = [pool.submit(enter) for _ in range(4)]
        until(lambda: len(seen) == 4 and min(seen.values()) > 5, "each has come round again")
        assert bool(looked) is looks
        other.process.close()
        assert all(one.result(PATIENCE) for one in done)
