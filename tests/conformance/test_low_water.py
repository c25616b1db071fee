"""Low-water marks of the lock queue on PostgreSQL: reads miss no row below a mark."""

import contextlib
import itertools
import threading

import psycopg
import pytest
from support import until

from sqlsem.values.locks import Request
from sqlsem.values.tasks import End

pytestmark = [pytest.mark.engines("postgresql"), pytest.mark.leaves_rows]

#: Write a mark at every call instead of now and then.
AT_EVERY_CALL = """
CREATE OR REPLACE FUNCTION sqlsem.is_time_for_row_mark() RETURNS boolean LANGUAGE sql VOLATILE AS 'SELECT true'
"""


class Party:
    """A member without a coordinator."""

    numbers = itertools.count()

    def __init__(self, database, member=None, **options):
        self.database = database
        self.session = database.session(**{"grace": 0, **options})
        self.told = []  # the server's notices
        self.session.connection.add_notice_handler(lambda notice: self.told.append(notice.message_primary))
        if member is None:
            member = self.session.register_member("host", 1, "test")
        else:
            assert self.session.reattach_member(member)
        self.member = member

    def ask(self, resource, access="write", limit=1, only_if_free=False, weight=1):
        """Return the ticket of a new request, or None if a try was refused."""
        uid = f"{self.member}.{next(self.numbers)}"
        request = Request(resource, access, limit, weight, None)
        tickets = self.session.register(self.member, "party", "party", uid, [request], only_if_free)
        return tickets[0] if tickets else None

    def release(self, *tickets):
        for ticket in tickets:
            assert self.session.release(ticket, "released")


@pytest.fixture
def party(make_database, postgres_server):
    database = make_database(postgres_server)
    with psycopg.connect(database.url, autocommit=True) as connection:
        connection.execute(AT_EVERY_CALL)
    with contextlib.ExitStack() as opened:

        def make(**options):
            participant = Party(database, **options)
            opened.callback(participant.session.close)
            return participant

        make.database = database
        yield make


def test_rows_that_are_put_back_below_a_mark_are_seen(party):
    """A backup restores the queue table alone, with its numbers; the newer marks stay."""
    holder, other = party(), party()
    held = holder.ask("r")
    database = party.database
    database.rows("CREATE TABLE public.kept AS SELECT * FROM {table}")
    holder.release(held)
    for _ in range(5):
        holder.release(holder.ask("r"))
    database.rows("INSERT INTO {table} SELECT * FROM public.kept")
    database.rows(
        "SELECT setval(pg_get_serial_sequence('{table}', 'queue_position'), ?)".replace("{table}", database.table),
        held.position,
    )
    late = other.ask("r", only_if_free=True)
    assert late is None
    late = other.ask("r")
    assert not late.granted
    holder.session.deregister_member(holder.member)  # the member's own marks are above that row
    until(lambda: other.session.wait(late, 0.3, None), timeout=10)


def test_a_dead_holder_behind_many_others_is_found(party):
    """A dead holder is found behind many bare rows, which no session proves dead or alive."""
    database = party.database
    waiter, dead = party(), party()
    with database.raw() as connection:
        cursor = connection.cursor()
        for number in range(40):
            database.insert_bare(cursor, "r", f"bare {number}", concurrency_limit=50)
    assert dead.ask("r", limit=50).granted
    dead.session.close()
    for _ in range(9):
        assert waiter.ask("r", limit=50).granted
    late = waiter.ask("r", limit=50)
    assert not late.granted
    until(lambda: waiter.session.wait(late, 0.3, None), timeout=10)


def test_a_dead_holder_behind_many_leases_is_found(party):
    waiter, dead = party(), party()
    for _ in range(33):
        assert party(lease=60).ask("r", limit=35).granted
    assert dead.ask("r", limit=35).granted
    dead.session.close()
    assert waiter.ask("r", limit=35).granted
    late = waiter.ask("r", limit=35)
    assert not late.granted
    until(lambda: waiter.session.wait(late, 0.3, None), timeout=10)


def test_an_orphan_that_the_marks_of_its_member_pass_by(party):
    waiter, dead = party(), party()
    held = dead.ask("r")
    database = party.database
    database.rows(
        "INSERT INTO sqlsem.low_water VALUES (sqlsem.member_key(?), ?, '{}')", dead.member, held.position + 1000
    )
    dead.session.deregister_member(dead.member)
    assert len(database.queue("r")) == 1
    late = waiter.ask("r")
    assert not late.granted
    until(lambda: waiter.session.wait(late, 0.3, None), timeout=10)


def test_tasks_that_are_put_back_below_a_mark_are_seen(party):
    """Restored task rows below a mark are claimed; a backup of the table's data puts such rows back."""
    worker, database = party(), party.database
    database.rows(
        "CREATE OR REPLACE FUNCTION sqlsem.is_time_for_task_mark(p_mark bigint, p_task bigint, p_maximum integer) "
        "RETURNS boolean LANGUAGE sql AS 'SELECT true'"
    )
    database.rows("SELECT sqlsem.put('q', 'a', 'call')")
    database.rows("CREATE TABLE public.kept AS SELECT * FROM sqlsem.task")

    def work():
        task = worker.session.claim_task(worker.member, "q", "test", f"{worker.member}.{next(worker.numbers)}", False)
        assert worker.session.end_task(worker.member, End(task.task_id, task.attempt, "finished")) == "finished"
        return task.body

    assert work() == "a"
    for body in "bcd":
        database.rows("SELECT sqlsem.put('q', ?, 'call')", body)
        assert work() == body
    database.rows("DELETE FROM sqlsem.task_log")
    database.rows("DELETE FROM sqlsem.task WHERE body = 'a'")
    database.rows("INSERT INTO sqlsem.task OVERRIDING SYSTEM VALUE SELECT * FROM public.kept")
    assert work() == "a"


def test_kept_put_lock_blocks_for_a_bounded_time(party):
    with party.database.raw() as keeper, party.database.raw(autocommit=False) as putter:
        keeper.execute("SELECT pg_advisory_lock(sqlsem.lock_class(6), hashtext('q'))")
        putter.execute("SET LOCAL lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            putter.execute("SELECT sqlsem.put('q', 'a', 'call')")
        putter.rollback()
        keeper.execute("SELECT pg_advisory_unlock_all()")
        putter.execute("SELECT sqlsem.put('q', 'a', 'call')")
        assert putter.execute("SHOW lock_timeout").fetchone() == ("0",)


def test_member_rows_have_a_single_index(party):
    """With a second index the planner might choose it, and read every dead row that an old snapshot keeps."""
    indexes = party.database.rows(
        "SELECT split_part(indexdef, ' USING btree ', 2) FROM pg_indexes "
        "WHERE schemaname = 'sqlsem' AND tablename = 'processcontrol' AND strpos(indexdef, '(member_id') > 0"
    )
    assert indexes == [("(member_id, queue_position)",)]


#: The rows ahead of a waiter as (access, limit), and whether an operator has paused the resource.
BEFORE = {
    "holder": ([("write", 1)], False),
    "holder and waiter": ([("write", 1), ("write", 1)], False),
    "as many as may be": ([("write", 2), ("write", 2)], False),
    "readers": ([("read", 1), ("read", 1)], False),
    "nobody, paused": ([], True),
    "holder, paused": ([("write", 1)], True),
    "nobody any more": None,
}


@pytest.mark.kept
@pytest.mark.parametrize("before", BEFORE)
def test_gate_is_free_while_waiters_sleep(party, before, threads):
    """Marks are written under the gate; a waiter that writes one frees the gate before it sleeps."""
    holder, other = party(), party()
    database = party.database
    ahead, paused = BEFORE[before] or ([("write", 1)], False)
    tickets = [holder.ask("r", access, limit) for access, limit in ahead]
    for _ in range(3):
        other.release(other.ask("r"))  # leaves rows for a mark to cover
    if paused:
        holder.session.set_resource("r", "paused", 1)
    if BEFORE[before] is None:
        # The holder's row leaves between two polls of the waiter.
        database.rows(
            "CREATE OR REPLACE FUNCTION sqlsem.is_time_for_row_mark() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN"
            f" DELETE FROM {database.table} WHERE queue_position = {tickets[0].position}; RETURN true; END $$"
        )
    waits = other.ask("r", limit=2 if before == "as many as may be" else 1)
    pid = other.session.backend()
    answers = []
    thread = threads.start(lambda: answers.append(other.session.wait(waits, 3, threading.Event())))
    gate = (
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = ? AND classid::int = sqlsem.lock_class(0)"
    )
    asleep = "SELECT count(*) FROM pg_stat_activity WHERE pid = ? AND wait_event IN ('advisory', 'PgSleep')"
    until(lambda: not thread.is_alive() or database.rows(asleep, pid) == [(1,)], "it sleeps")
    held = database.rows(gate, pid)
    sleeps = database.rows(asleep, pid) == [(1,)]
    threads.join()
    assert held == [(0,)] or not sleeps
    assert answers == [BEFORE[before] is None]


def test_adopted_row_stays_above_the_mark(party):
    """A waiter may write a mark in its own session before the adopter's session has committed."""
    holder, giver, me = (party(grace=60) for _ in range(3))
    token = "token" * 9
    party.database.rows(AT_EVERY_CALL.replace("true", "false"))
    handed_over = giver.ask("given")
    holder.ask("r")
    own_ticket = me.ask("r")
    assert giver.session.hand_over(giver.member, [handed_over], token, 60, None)
    party.database.rows(AT_EVERY_CALL)
    with psycopg.connect(party.database.url) as slow:
        assert slow.execute("SELECT sqlsem.wait('r', %s, 1000)", (own_ticket.position,)).fetchall() == [(1,)]
        ((_, ticket),) = me.session.adopt(me.member, "me", "me", "adopting", token)
    assert ticket.position == handed_over.position
    assert me.session.heartbeat(me.member).positions == {handed_over.position, own_ticket.position}
