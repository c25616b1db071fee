"""PostgreSQL's low-water marks: below a mark only its survivors live, and readers pass no dead rows.

Here every registration and every grant writes a mark, instead of one in forty.
"""

import collections
import itertools
import random
import threading
import time

import psycopg
import pytest
from hypothesis import Phase
from model.test_rule import NEVER, Machine
from support import PATIENCE, have_postgres, pages, until
from support.state_machines import run_in_database

from sqlsem.values.errors import SqlsemError
from sqlsem.values.locks import Request, Ticket, Upgrading

pytestmark = pytest.mark.skipif(not have_postgres(), reason="PostgreSQL only")


def mark_always(database):
    database.rows(
        "CREATE OR REPLACE FUNCTION sqlsem.is_time_for_row_mark() RETURNS boolean LANGUAGE sql AS 'SELECT true'"
    )
    return database


@pytest.fixture(scope="module")
def marking(make_database, postgres_server):
    return mark_always(make_database(postgres_server))


def low_water(database, key):
    return database.rows("SELECT mark, survivors FROM sqlsem.low_water WHERE resource_id = ? ORDER BY mark", key)


def assert_marks_are_true(database):
    """Check every mark, of resources and of members."""
    with psycopg.connect(database.url) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        marks = connection.execute("SELECT resource_id, mark, survivors FROM sqlsem.low_water").fetchall()
        rows = connection.execute("SELECT resource_id, member_id, queue_position FROM sqlsem.ProcessControl").fetchall()
    living = collections.defaultdict(set)
    for resource, member, position in rows:
        living[resource].add(position)
        living[f"\tmember {member}"].add(position)
    for key, mark, survivors in marks:
        assert len(survivors) <= 200
        below = {position for position in living[key] if position < mark}
        assert below <= set(survivors), f"{key!r}: {sorted(below)} live below {mark}, of {survivors}"


class MarkedMachine(Machine):
    def teardown(self):
        if hasattr(self, "operator"):
            assert_marks_are_true(self.database)
        super().teardown()


@pytest.mark.timeout(300)
def test_the_rule_holds_with_marks_everywhere(marking, name):
    run_in_database(MarkedMachine, marking, name, max_examples=12, stateful_step_count=30, phases=[Phase.generate])


KINDS = ["limit", "limit", "limit", "write", "read", "read", "stage:1", "stage:2"]


def any_request(resource, maximum=4):
    kind, limit = random.choice(KINDS), random.randint(1, maximum)
    if kind == "limit":
        return Request(resource, limit=limit, weight=random.randint(1, limit))
    return Request(resource, kind)


@pytest.mark.parametrize(("rows", "maximum"), [(12, 4), (260, 6), (30, 40)])
def test_rows_of_a_long_queue_match_the_model(marking, name, rows, maximum):
    """Some rows survive many marks, some are bare, some leave from the middle; caps come and go."""
    random.seed(rows)
    operator, session = marking.session(grace=0), marking.session(grace=0)
    member = session.register_member("host", 1, "churn")
    raw = marking.raw()
    bare = raw.cursor()
    cap, alive = None, {}
    for step in range(rows * 3):
        if len(alive) >= rows or (alive and random.random() < 0.3):
            position = random.choice(sorted(alive)[rows // 4 :] or sorted(alive))
            ticket, _ = alive.pop(position)
            if ticket is None:
                bare.execute("DELETE FROM sqlsem.ProcessControl WHERE queue_position = %s", (position,))
            else:
                assert session.release(ticket, "released")
        elif random.random() < 0.15:
            limit = random.choice([None, 1, 3])
            request = Request(name, limit=limit) if limit else Request(name, limit=None)
            alive[marking.insert_bare(bare, name, f"bare {step}", concurrency_limit=limit)] = None, request
        else:
            request = any_request(name, maximum)
            (ticket,) = session.register(member, "me", "owner", f"{name}.{step}", [request], False)
            assert ticket.granted is request.fits([ahead for _, ahead in alive.values()], cap)
            alive[ticket.position] = ticket, request
        if random.random() < 0.05:
            cap = random.choice([None, 1, 2, 5])
            operator.set_resource(name, "cap", cap)
    entries = operator.entries(name)
    assert [entry.position for entry in entries] == sorted(alive)
    assert_marks_are_true(marking)
    assert low_water(marking, name)[-1][0] > min(alive), "the survivors were put to the test"
    judged = dict(
        raw.execute(
            "SELECT queue_position, eligible FROM sqlsem.ProcessControl AS t, sqlsem.eligibility(t.resource_id,"
            " t.queue_position, t.access_type, t.concurrency_limit, t.weight, NULL) WHERE t.resource_id = %s",
            (name,),
        ).fetchall()
    )
    for number, entry in enumerate(entries):
        assert judged[entry.position] is alive[entry.position][1].fits(entries[:number], cap)
    tickets = [ticket for ticket, _ in alive.values() if ticket is not None]
    due = {ticket.position for ticket in tickets if judged[ticket.position] or ticket.granted} | {
        entry.position for entry in entries if entry.granted_at is not None
    }
    # One call for all rows gives the same answers, also for rows that have left meanwhile.
    removed = Ticket(name, tickets[0].position + 10**9, "me", False)
    assert session.poll(member, [*tickets, removed]) == {
        **dict.fromkeys(due & {t.position for t in tickets}, True),
        removed.position: None,
    }
    session.deregister_member(member)
    bare.execute("DELETE FROM sqlsem.ProcessControl WHERE resource_id = %s", (name,))
    operator.set_resource(name, "cap", None)
    for opened in (operator, session, raw):
        opened.close()


@pytest.mark.parametrize("how", ["register", "bare"])
def test_numbers_that_go_back_take_the_marks_with_them(marking, name, how):
    """After a restore by hand, or a change of the sequence, rows below a mark must be seen."""
    session = marking.session(grace=0)
    member = session.register_member("host", 1, "restored")
    for number in range(20):
        (ticket,) = session.register(member, "me", "owner", f"{name}.{number}", [Request(name)], False)
        assert session.release(ticket, "released")
    ((sequence,),) = marking.rows("SELECT pg_get_serial_sequence('sqlsem.ProcessControl', 'queue_position')")
    assert low_water(marking, name)[-1] == (ticket.position, [])
    marking.rows("SELECT setval(?, ?)", sequence, ticket.position - 15)
    raw = marking.raw()
    if how == "bare":
        first = marking.insert_bare(raw.cursor(), name, "bare")
    else:
        (first_ticket,) = session.register(member, "me", "owner", f"{name}.first", [Request(name)], False)
        assert first_ticket.granted
        first = first_ticket.position
        assert session.heartbeat(member).positions == {first}
    assert first < ticket.position
    for number in range(30):  # also after they have passed the old mark
        assert session.register(member, "me", "owner", f"{name}.again{number}", [Request(name)], True) is None
        (waits,) = session.register(member, "me", "owner", f"{name}.on{number}", [Request(name)], False)
        assert not waits.granted
        assert session.wait(waits, 0, NEVER) is False
        assert session.release(waits, "cancelled")
    assert waits.position > ticket.position
    assert_marks_are_true(marking)
    raw.execute("DELETE FROM sqlsem.ProcessControl WHERE resource_id = %s", (name,))
    raw.close()
    session.deregister_member(member)
    session.close()


def test_uncommitted_older_registration_is_found_later(marking, name):
    """Its number is below the numbers of later registrations, and no session sees its row before the commit."""
    old, session = marking.raw(autocommit=False), marking.session(grace=0)
    member = session.register_member("host", 1, "two sessions")
    ((position,),) = old.execute(
        "SELECT queue_position FROM sqlsem.register(%s, 'me', 'owner', %s, false, %s, 'write', 1, 1, NULL)",
        (member, f"{name}.lost", name("other")),
    ).fetchall()
    for number in range(3):
        (ticket,) = session.register(member, "me", "owner", f"{name}.{number}", [Request(name)], False)
        assert ticket.position > position
        assert session.release(ticket, "released")
    assert session.heartbeat(member).positions == set()
    old.commit()
    assert session.heartbeat(member).positions == {position}
    assert session.cancel(member, f"{name}.lost", "cancelled") == 1
    old.close()
    session.deregister_member(member)
    session.close()


def test_restore_leaves_no_old_marks(postgres_server, make_database):
    database = mark_always(make_database(postgres_server))
    if not postgres_server.mine:
        pytest.skip("needs pg_dump of the server")
    session = database.session(grace=60)
    member = session.register_member("host", 1, "held")
    (held,) = session.register(member, "me", "owner", "held", [Request("r")], False)
    dump = postgres_server.dump(database.url)
    assert session.release(held, "released")
    for number in range(10):
        (ticket,) = session.register(member, "me", "owner", f"{number}", [Request("r")], False)
        assert ticket.granted
        assert session.release(ticket, "released")
    session.close()
    postgres_server.restore(dump, database.url)
    assert_marks_are_true(database)
    # Tables restored from a dump without the marks are new tables, so the marks of the old tables go.
    database.rows("INSERT INTO sqlsem.low_water VALUES ('r', 1000, '{}')")
    other = database.session(grace=60)
    second = other.register_member("host", 2, "after")
    assert low_water(database, "r") == []
    assert other.register(second, "me", "owner", "after", [Request("r")], True) is None
    other.close()


@pytest.mark.timeout(240)
def test_marks_are_true_after_crashes(own_postgres_server, make_database):
    database = mark_always(make_database(own_postgres_server))
    stopping = threading.Event()

    def churn(number):
        while not stopping.is_set():
            try:
                session = database.session(grace=0)
                member = session.register_member("host", number, "churn")
                held = collections.deque()
                for step in itertools.takewhile(lambda _: not stopping.is_set(), itertools.count()):
                    request = any_request(f"r{step % 2}")
                    (ticket,) = session.register(member, "me", "owner", f"{member}.{step}", [request], False)
                    session.wait(ticket, 0, NEVER)
                    held.append(ticket)
                    if len(held) > 10:
                        held.rotate(random.randint(0, 3))
                        session.release(held.popleft(), "released")
            except (SqlsemError, psycopg.Error):
                time.sleep(0.05)

    workers = [threading.Thread(target=churn, args=[number], daemon=True) for number in range(3)]
    for worker in workers:
        worker.start()
    for _ in range(3):
        until(lambda: len(database.rows("SELECT mark FROM sqlsem.low_water")) >= 4, "marks were written")
        time.sleep(0.7)
        own_postgres_server.restart("immediate")
        assert_marks_are_true(database)
    stopping.set()
    for worker in workers:
        worker.join()
    assert_marks_are_true(database)


@pytest.mark.timeout(120)
def test_marks_hold_under_concurrent_operations(marking, name):
    """Registrations, grants, releases, upgrades and polls of several sessions on the same resources."""
    stopping, failures, inside = threading.Event(), [], {}

    def work(number):
        try:
            session = marking.session(grace=0)
            member = session.register_member("host", number, "beside")
            for step in itertools.count():
                if stopping.is_set():
                    break
                resource = name(step % 2)
                request = random.choice([Request(resource), Request(resource, "read"), Request(resource, "read"),
                                     Request(resource, limit=2)])  # fmt: skip
                (ticket,) = session.register(member, "me", "owner", f"{member}.{step}", [request], False)
                granted = ticket.granted
                while not granted:
                    granted = (
                        session.poll(member, [ticket]).get(ticket.position, False)
                        if random.random() < 0.5
                        else session.wait(ticket, 0.2, NEVER)
                    )
                    assert granted is not None
                if request.access == "read" and random.random() < 0.3:
                    if session.begin_upgrade(ticket, True) is Upgrading.DONE:
                        inside[resource, "writer"] = ticket.position
                        time.sleep(0.001)
                        assert inside.pop((resource, "writer")) == ticket.position
                elif request.limit == 1 and request.access == "write":
                    assert (resource, "writer") not in inside
                    inside[resource, "writer"] = ticket.position
                    assert inside.pop((resource, "writer")) == ticket.position
                assert session.release(ticket, "released")
            session.deregister_member(member)
            session.close()
        except BaseException as exc:
            failures.append(exc)
            raise

    workers = [threading.Thread(target=work, args=[number]) for number in range(4)]
    for worker in workers:
        worker.start()
    end = time.monotonic() + 4
    while time.monotonic() < end and not failures:
        assert_marks_are_true(marking)
    stopping.set()
    for worker in workers:
        worker.join()
    assert not failures
    assert_marks_are_true(marking)


# -- the purpose ------------------------------------------------------------------------------------------------------

PAIRS = """
CREATE PROCEDURE pairs(p_member bigint, p_resource varchar, p_number integer) LANGUAGE plpgsql AS $$
DECLARE
    v_position bigint;
BEGIN
    SET plan_cache_mode = force_generic_plan;
    FOR n IN 1..p_number LOOP
        SELECT queue_position INTO STRICT v_position FROM sqlsem.register(
            p_member, 'me', 'owner', p_member || '.' || p_resource || '.' || n, false, p_resource, 'write', 5, 1, NULL);
        COMMIT;
        PERFORM sqlsem.release(p_resource, v_position, 'me'::varchar, 'released'::varchar);
        COMMIT;
    END LOOP;
END $$"""


def test_an_old_snapshot_costs_nothing(postgres_server, make_database):
    """By count, not by the clock: 3,000 pairs under a snapshot leave 3,000 dead entries ahead of each poll."""
    database = make_database(postgres_server)  # with marks as rare as in production
    session = database.session(grace=600)
    member = session.register_member("host", 1, "pairs")
    (ticket,) = session.register(member, "me", "owner", "kept", [Request("r", limit=5)], False)
    (waits,) = session.register(member, "me", "owner", "waits", [Request("mutex")], False)
    report, raw = database.raw(autocommit=False), database.raw()
    report.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    report.execute("SELECT count(*) FROM sqlsem.ProcessControl")
    raw.execute(PAIRS)
    for _ in range(3):
        raw.execute("CALL pairs(%s, 'r', 1000)", (member,))
        raw.execute("CALL pairs(%s, 'free', 1000)", (member,))
    (last,) = session.register(member, "me", "owner", "last", [Request("r")], False)
    assert not last.granted
    raw.execute("SET plan_cache_mode = force_generic_plan")
    count = itertools.count()

    def registering(resource, trying):
        return pages(
            raw,
            f"SELECT * FROM sqlsem.register(%s, 'me', 'owner', 'more {next(count)}' || random(), {trying},"
            f" '{resource}', 'write', 1, 1, NULL)",
            member,
        )

    costs = {
        "a try in vain": registering("r", True),
        "a registration that waits": registering("r", False),
        "a wait": pages(raw, "SELECT sqlsem.wait('r', %s, 0)", last.position),
        "a look at all": pages(
            raw, "SELECT sqlsem.poll_waiters(%s, ARRAY['r'], ARRAY[%s::bigint])", member, last.position
        ),
        "a ping": pages(raw, "SELECT * FROM sqlsem.member_rows(%s)", member),
        "the rule": pages(raw, "SELECT * FROM sqlsem.eligibility('r', %s, 'write', 1, 1, NULL)", last.position),
        "the rule, where all is free": pages(
            raw, "SELECT * FROM sqlsem.eligibility('free', 10000000000, 'write', 1, 1, NULL)"
        ),
        "a cancel": pages(raw, "SELECT sqlsem.cancel(%s, 'nothing', 'cancelled')", member),
    }
    report.rollback()
    print(costs)
    assert max(costs.values()) < 500, costs
    assert ticket.granted
    assert waits.granted
    session.deregister_member(member)
    for opened in (session, report, raw):
        opened.close()


def test_poll_does_not_read_uses_of_tasks(postgres_server, make_database):
    """Starts of tasks store their uses in the same tables as rates, perhaps for thousands of keys."""
    database = make_database(postgres_server)
    raw = database.raw()
    costs = []
    for resource, number in (("rate:r", 5), ("tasks:few", 2000), ("tasks:many", 20000)):
        raw.execute(
            "INSERT INTO sqlsem.rate_window (resource_id, window_ms, rate_limit, seen_ms)"
            " SELECT %s || n, 60000, 9, sqlsem.clock_ms() FROM generate_series(1, %s::integer) AS n",
            (resource, number),
        )
        raw.execute(
            "INSERT INTO sqlsem.rate_slot (resource_id, window_ms, slot, login, used) SELECT resource_id, window_ms,"
            " seen_ms / 600 + 50, session_user, 1 FROM sqlsem.rate_window WHERE resource_id LIKE %s || '%%'",
            (resource,),
        )
        raw.execute("ANALYZE sqlsem.rate_window, sqlsem.rate_slot")
        assert len(raw.execute("SELECT sqlsem.overview_rates()").fetchone()[0]) == 5
        costs.append(pages(raw, "SELECT sqlsem.overview_rates()"))
    raw.close()
    print(costs)
    assert costs[2] < costs[1] * 1.5 + 30, costs


def test_a_registration_reads_no_more_than_decides(postgres_server, make_database):
    database = make_database(postgres_server)
    session = database.session(grace=600)
    member = session.register_member("host", 1, "many")
    raw = database.raw()
    raw.execute("SET plan_cache_mode = force_generic_plan")
    costs = {}
    for number in (50, 1000):
        raw.execute(
            "INSERT INTO sqlsem.ProcessControl (resource_id, requesting_id, concurrency_limit, member_id, request_uid)"
            " SELECT 'r', 'me', 3, %s, 'many ' || %s || '.' || n FROM generate_series(1, %s) AS n",
            (member, number, number),
        )
        ((last,),) = raw.execute("SELECT max(queue_position) FROM sqlsem.ProcessControl").fetchall()
        costs[number] = {
            "try": pages(
                raw, "SELECT * FROM sqlsem.register(%s, 'me', 'o', 'x', true, 'r', 'write', 3, 1, NULL)", member
            ),
            "wait": pages(raw, "SELECT sqlsem.wait('r', %s, 0)", last),
            "rule": pages(raw, "SELECT * FROM sqlsem.eligibility('r', %s, 'write', 3, 1, NULL)", last),
        }
    print(costs)
    for call_name, cost in costs[50].items():
        assert costs[1000][call_name] < cost * 1.3 + 10, (call_name, costs)
    session.deregister_member(member)
    session.close()
    raw.close()


def test_dead_holder_among_many_is_found(marking, name):
    """The row that leaves is neither the oldest, for which the next waiter waits, nor the last."""
    sessions = [marking.session(grace=0.5) for _ in range(4)]
    members = [session.register_member("host", number, "inside") for number, session in enumerate(sessions)]
    tickets = [
        session.register(member, "me", "owner", f"{name}.{member}", [Request(name, limit=3)], False)[0]
        for session, member in zip(sessions, members, strict=True)
    ]
    sessions[1].close()
    began = time.monotonic()
    while not (granted := sessions[3].wait(tickets[3], 4, NEVER)) and time.monotonic() - began < PATIENCE:
        for number in (0, 2, 3):
            sessions[number].heartbeat(members[number])
    assert granted
    for number in (0, 2, 3):
        sessions[number].deregister_member(members[number])
        sessions[number].close()
