"""Wakeup locks on PostgreSQL: very many waiters of a process do not fill the server's lock table, and all are woken."""

import asyncio
import contextlib
import threading
import time

import pytest
from conformance import test_low_water as low_water
from support import PATIENCE, until

from sqlsem.client.waiters import queues
from sqlsem.values.errors import ConfigurationError, SchemaError

pytestmark = [pytest.mark.engines("postgresql"), pytest.mark.leaves_rows]


class Party(low_water.Party):
    """A member that drops the wakeup locks of its own rows."""

    def __init__(self, database, member=None, **options):
        super().__init__(database, member, grace=60, **options)

    def spare(self, tickets):
        self.session.drop_wakeup_locks(self.member, tickets)

    def keep(self, tickets):
        self.session.restore_wakeup_locks(self.member, tickets)


@pytest.fixture
def party(database):
    with contextlib.ExitStack() as opened:

        def make(*member, **options):
            participant = Party(database, *member, **options)
            opened.callback(participant.session.close)
            return participant

        yield make


@pytest.fixture
def locked(database):
    """Return a function that tells which tickets have a wakeup lock."""

    def locked(tickets):
        rows = database.rows(
            "SELECT objid::bigint FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock' AND granted"
            " AND classid::bigint = sqlsem.lock_class(2)"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        keys = {key for (key,) in rows}
        return [ticket.position in keys for ticket in tickets]

    return locked


def test_wakeup_lock_is_dropped_before_a_row_of_the_member(party, locked, name):
    first, other = party(), party()
    before = [first.ask(name) for _ in range(5)]
    between = other.ask(name)
    behind = [first.ask(name) for _ in range(3)]
    every = [*before, between, *behind]
    first.spare([*before, *behind])
    # The holder's row, the row before another member's, and the last row keep their wakeup locks.
    assert locked(every) == [True, False, False, False, True, True, False, False, True]
    first.spare([*before, *behind])
    first.spare([between])
    assert locked([between]) == [True], "another member's"
    first.keep(before)
    first.keep([*before, *behind])
    assert all(locked(every))
    first.release(*before, *behind)
    assert locked(every) == [ticket is between for ticket in every], "each was taken once"
    assert first.told == [], "nothing was freed twice"


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({}, {"limit": 2}),
        ({"limit": 2}, {"limit": 2, "weight": 2}),
        ({}, {"access": "read"}),
        ({"access": "read"}, {"access": "read"}),
    ],
)
def test_wakeup_lock_is_kept_before_other_access(party, locked, name, first, then):
    """Rows before a different access keep their locks: a waiter may need only one of them, or share with it."""
    participant = party()
    holder = participant.ask(name, "write", 2, weight=2)
    waiters = [participant.ask(name, **first), participant.ask(name, **then)]
    participant.spare([holder, *waiters])
    assert locked([holder, *waiters]) == [True] * 3


def test_release_without_wakeup_lock_logs_nothing(party, locked, name):
    """No release frees a missing lock, for which the server would log a warning."""
    participant = party()
    several = [participant.ask(name) for _ in range(4)]
    participant.spare(several)
    participant.release(several[2])
    participant.session.restore_wakeup_locks(participant.member, [several[1]])
    participant.release(several[1], several[0], several[3])
    assert locked(several) == [False] * 4
    assert participant.told == []


def test_returning_member_restores_its_wakeup_locks(party, database, locked, name):
    number = queues.MAX_WAKEUP_LOCKS + 100
    participant = party()
    several = [participant.ask(name) for _ in range(number)]
    participant.spare(several)
    participant.session.close()
    until(lambda: not any(locked(several)), "the session has ended")
    again = party(participant.member)
    assert locked(several) == [True] * queues.MAX_WAKEUP_LOCKS + [False] * 99 + [True]
    again.release(*several)
    assert again.told == []
    assert not any(locked(several))


@pytest.mark.parametrize("why", ["older routines", "older rights"])
def test_wakeup_locks_are_kept_by_older_routines(party, locked, name, monkeypatch, why):
    """Locks work although another installation upgraded the tables, but not with the latest routines."""
    participant = party()
    several = [participant.ask(name) for _ in range(4)]
    queries = {"restore_wakeup_locks": "SELECT sqlsem.not_there(%s, %s)"}
    if why == "older routines":
        queries["drop_wakeup_locks"] = "SELECT sqlsem.not_there(%s, %s, %s)"
    else:
        participant.session.connection.execute("SET ROLE pg_monitor")
    monkeypatch.setattr(participant.session, "queries", {**participant.session.queries, **queries})
    with pytest.raises((SchemaError, ConfigurationError)):
        participant.spare(several)
    participant.session.connection.execute("RESET ROLE")
    assert all(locked(several))
    participant.release(*several)
    assert not any(locked(several))
    assert participant.told == []


def test_end_of_a_run_wakes_the_waiters_behind(party, name, threads):
    """The waiter behind a run of rows is woken, also if rows in the middle have given up."""
    first, other = party(), party()
    several = [first.ask(name) for _ in range(6)]
    first.spare(several)
    last = other.ask(name)
    answers = []

    def wait():
        answers.append(other.session.wait(last, PATIENCE, threading.Event()))

    threads.start(wait)
    first.release(several[5], several[2])
    first.keep(several[3:5])
    first.release(several[0], several[1], several[3])
    assert answers == []
    first.release(several[4])
    threads.join()
    assert answers == [True]


def test_waiter_behind_row_without_wakeup_lock_sleeps(party, database, name):
    """The waiter sleeps although the oldest row ahead belongs to a lease: its wakeup lock is always free."""
    leased, participant = party(lease=60), party()
    leased.ask(name, limit=3)
    participant.ask(name, limit=3)
    participant.ask(name, limit=3, weight=2)  # waits without a client that renews its lease
    other = party()
    ticket = other.ask(name, limit=3)
    execute = other.session.connection.execute
    execute("SET track_functions = 'pl'")
    assert other.session.wait(ticket, 1.0, threading.Event()) is False
    execute("SELECT pg_stat_force_next_flush()")
    ((calls,),) = execute(
        "SELECT sum(calls) FROM pg_stat_user_functions WHERE funcname IN ('wait_until_lock_free', 'check_if_dead')"
    )
    assert (calls or 0) < 200, "it looks from time to time, and does not spin"


#: The wakeup lock of this row is free at the second check, as the row leaves just before it.
LEAVES = """
CREATE OR REPLACE FUNCTION sqlsem.is_free(p_class integer, p_key integer) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF p_class = sqlsem.lock_class(2) AND p_key = {position} THEN
        IF current_setting('test.asked_{position}', true) IS NULL THEN
            PERFORM set_config('test.asked_{position}', 'once', false);
            RETURN false;
        END IF;
        DELETE FROM {table} WHERE queue_position = {position};
        RETURN true;
    END IF;
    RETURN CASE WHEN pg_try_advisory_lock_shared(p_class, p_key)
                THEN pg_advisory_unlock_shared(p_class, p_key) ELSE false END;
END $$
"""


def test_limit_waiter_sees_release_just_before_sleep(make_database, postgres_server):
    """A limit waiter that has waited long sees a release just before its sleep, and does not sleep for 0.1 s."""
    database, took = make_database(postgres_server), []
    with contextlib.ExitStack() as opened:
        holder, other = (Party(database) for _ in range(2))
        opened.callback(holder.session.close)
        opened.callback(other.session.close)
        for number in range(3):
            first, _ = (holder.ask(f"r{number}", limit=2) for _ in range(2))
            ticket = other.ask(f"r{number}", limit=2)
            database.rows(
                "UPDATE {table} SET requested_at = requested_at - interval '1 hour',"
                " granted_at = granted_at - interval '1 hour'"
            )
            database.rows(LEAVES.format(position=first.position, table=database.table))
            began = time.monotonic()
            assert other.session.wait(ticket, PATIENCE, threading.Event()) is True
            took.append(time.monotonic() - began)
            assert database.rows("SELECT count(*) FROM {table} WHERE queue_position = ?", first.position) == [(0,)]
    assert min(took) < 0.07, took


def test_crowd_of_a_process_takes_few_wakeup_locks(connect, database, name, locked):
    """A crowd is granted in the order of its requests with few wakeup locks, though many of them give up."""
    number, maximum = 1200, queues.MAX_WAKEUP_LOCKS + 16
    holder, coordinator = connect(grace=60), connect(grace=60)
    with coordinator.mutex(name):  # opens the connections
        pass
    notices = []
    main = coordinator.client.member.main.session
    main.connection.add_notice_handler(lambda notice: notices.append(notice.message_primary))

    def counted():
        rows = database.rows("SELECT queue_position FROM {table} WHERE resource_id = ?", str(name))
        tickets = [type("Row", (), {"position": position}) for (position,) in rows]
        return sum(locked(tickets))

    async def main_task(grant):
        order = []

        async def enter():
            async with coordinator.mutex(name) as mutex_grant:
                order.append(mutex_grant.position)

        tasks = [asyncio.create_task(enter()) for _ in range(number)]
        while len(coordinator.client.waiter_queues.waiters()) < number:
            await asyncio.sleep(0.02)
        assert counted() <= maximum
        for task in tasks[10:-1:2]:
            task.cancel()
        await asyncio.wait(tasks[10:-1:2], timeout=10 * PATIENCE)
        assert counted() <= maximum
        await asyncio.to_thread(grant.release)
        done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10 * PATIENCE)
        cancelled = [result for result in done if isinstance(result, asyncio.CancelledError)]
        assert len(cancelled) == len(tasks[10:-1:2])
        assert len(order) == number - len(cancelled)
        assert order == sorted(order)

    lock = holder.mutex(name)
    assert lock.acquire()
    asyncio.run(main_task(lock.grant))
    assert notices == []
    assert database.queue(name) == []
    assert counted() == 0
