"""A waiter that no lock is sure to wake polls at most twice a second, after its first polls.

A sequence counts the polls in the loop of routine `wait`; a rollback does not undo it.
"""

import contextlib
import itertools
import threading
import time

import pytest
from support import PATIENCE, STEADY, slack, until

from sqlsem import sql
from sqlsem.engines.base import Unanswered
from sqlsem.values.locks import Request

pytestmark = pytest.mark.engines("postgresql", "mssql")

#: Seconds without any change.
STILL = 5.0
#: The first polls of each waiter while its pauses grow, and one at the end of a call.
FIRST_LOOKS = 6
#: The longest pause, in seconds.
LONGEST_PAUSE = 0.8
#: The start and the end of `wait` in the script, the start of its loop's body, and the count to add there.
PARTS = {
    "postgresql": ("CREATE OR REPLACE FUNCTION {s}.wait(", "\n$$;\n", "    LOOP\n", "PERFORM nextval('{s}.looks');"),
    "mssql": (
        *("ALTER PROCEDURE {s}.wait ", "\nGO\n", "WHILE @result IS NULL\n        BEGIN\n"),
        "IF @unheld IS NULL OR @until = N'grant' SET @slice = NEXT VALUE FOR {s}.looks;",  # the passes that poll
    ),
}


@pytest.fixture
def looks(database):
    """``looks()`` returns the number of polls so far."""
    begin, end, turn, count = (part.replace("{s}", database.schema) for part in PARTS[database.engine])
    text = sql.script(database.engine, "routines", schema=database.schema)
    routine = text[text.index(begin) :].partition(end)[0] + end.replace("GO", "")
    assert turn in routine

    def run(statement):
        connection = database.raw()
        connection.execute(statement)
        connection.close()

    run(f"CREATE SEQUENCE {database.schema}.looks AS bigint START WITH 1")
    run(routine.replace(turn, f"{turn}{count}\n", 1))
    next_value = {
        "postgresql": f"SELECT nextval('{database.schema}.looks')",
        "mssql": f"SELECT NEXT VALUE FOR {database.schema}.looks",
    }[database.engine]
    calls = itertools.count(1)
    try:
        yield lambda: int(database.rows(next_value)[0][0]) - next(calls)
    finally:
        run(routine)
        run(f"DROP SEQUENCE {database.schema}.looks")


class Waiter:
    """A member whose session requests, waits and releases."""

    numbers = itertools.count()

    def __init__(self, session, opened, resource, limit):
        self.session = opened.enter_context(contextlib.closing(session))
        member = session.register_member("host", 1, "test")
        opened.callback(session.deregister_member, member)
        request = Request(resource, "write", limit, 1)
        uid = f"{member}.{next(self.numbers)}"
        (self.ticket,) = session.register(member, f"waiter {member}", "o", uid, [request], False)
        self.granted_at = None

    def wait(self):
        """Wait, slice after slice, as clients do."""
        while self.granted_at is None:
            answer = self.session.wait(self.ticket, 4.0, threading.Event())
            assert answer is not None
            if answer:
                self.granted_at = time.monotonic()

    def leave(self):
        assert self.session.release(self.ticket, "released")


@pytest.fixture
def waiting(database, name, threads):
    """``waiting(2, holders=2)`` returns the holders, and two waiters that wait in threads."""
    with contextlib.ExitStack() as opened:

        def make(engine, limit):
            while True:
                try:  # (The T-SQL server compiles routines in each session, which is slow.)
                    return Waiter(engine.connect("main"), opened, name, limit)
                except Unanswered:
                    continue

        def start(count, *, holders, **options):
            held = [make(database.make_engine(**{"grace": STEADY, **options}), holders) for _ in range(holders)]
            assert all(holder.ticket.granted for holder in held)
            engine = database.make_engine(grace=STEADY)
            waiters = [make(engine, holders) for _ in range(count)]
            for waiter in waiters:
                threads.start(waiter.wait)
            return held, waiters

        yield start


@pytest.mark.parametrize("count", [1, 4, 30])
def test_waiters_of_a_limit_look_at_most_twice_a_second(database, looks, waiting, count):
    if database.engine == "mssql" and count > 4:
        pytest.skip("the fourth one and those behind it sleep; and what speaks T-SQL here takes long to open sessions")
    holders, waiters = waiting(count, holders=2)
    before = looks()
    time.sleep(STILL)  # the time without a change under test
    polls = looks() - before
    assert polls <= count * (2 * STILL + FIRST_LOOKS)
    assert not any(waiter.granted_at for waiter in waiters)
    # The newest holder leaves; the next waiter sleeps on the lock of another row.
    left_at = time.monotonic()
    holders[-1].leave()
    until(lambda: waiters[0].granted_at, "the next one is granted")
    assert waiters[0].granted_at - left_at < LONGEST_PAUSE + slack(0.5)
    for leaving, waiter in zip([*holders[:-1], *waiters], waiters[1:], strict=False):
        leaving.leave()
        until(lambda waiter=waiter: waiter.granted_at, "each in turn")


def test_waiters_behind_a_lease_look_at_most_twice_a_second(looks, waiting):
    """A holder with a lease has no lock on which waiters could sleep."""
    holders, waiters = waiting(1, holders=2, lease=PATIENCE)
    before = looks()
    time.sleep(STILL)
    assert looks() - before <= 2 * STILL + FIRST_LOOKS
    holders[0].leave()
    until(lambda: waiters[0].granted_at, "the next one is granted")


def test_the_oldest_holder_wakes_the_next_waiter_at_once(looks, waiting):
    """A waiter is woken at once, although its pauses have grown long."""
    holders, waiters = waiting(1, holders=2)
    time.sleep(2)
    before = looks()
    holders[0].leave()
    until(lambda: waiters[0].granted_at, "the next one is granted")
    assert looks() - before <= 4
