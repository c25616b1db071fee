"""Low-water marks of the work queue on PostgreSQL: claims stay cheap beside old snapshots, and miss no task."""

import contextlib
import itertools
import json

import pytest
from support import pages

from sqlsem.values.tasks import End, NewTask

pytestmark = [pytest.mark.engines("postgresql"), pytest.mark.leaves_rows]

#: Write a mark at every claim instead of now and then.
AT_EVERY_CLAIM = """
CREATE OR REPLACE FUNCTION sqlsem.is_time_for_task_mark(p_mark bigint, p_task bigint, p_maximum integer) RETURNS boolean
LANGUAGE sql AS 'SELECT true'
"""


class Bench:
    """A member that puts, claims and ends tasks of a queue, without a coordinator."""

    def __init__(self, database, queue):
        self.database, self.queue = database, queue
        self.session = database.session(grace=0)
        self.member = self.session.register_member("host", 1, "test")
        self.uids = itertools.count()

    def uid(self):
        return f"{self.queue}.{self.member}.{next(self.uids)}"

    def put(self, count=1, order=0, **options):
        new = NewTask("call", "1", order, 0.0, options.get("maximum", 1), 0.0, "stop", None)
        return self.session.put_tasks(self.queue, self.uid(), [new] * count)

    def claim(self):
        return self.session.claim_task(self.member, self.queue, "test", self.uid(), False)

    def end(self, task, outcome="finished"):
        return self.session.end_task(self.member, End(task.task_id, task.attempt, outcome))

    def work(self, count):
        """Claim and finish ``count`` tasks, one by one; return their numbers."""
        done = []
        for _ in range(count):
            task = self.claim()
            assert self.end(task) == "finished"
            done.append(task.task_id)
        return done

    def marks(self):
        """Return (order, mark, survivors) of each mark, newest first."""
        statement = (
            "SELECT task_order, mark, survivors FROM sqlsem.task_low_water WHERE queue_name = ? ORDER BY serial DESC"
        )
        return self.database.rows(statement, self.queue)


@pytest.fixture
def bench(make_database, postgres_server, name):
    import psycopg

    database = make_database(postgres_server)
    with psycopg.connect(database.url, autocommit=True) as connection:
        connection.execute(AT_EVERY_CLAIM)
    created = Bench(database, str(name))
    yield created
    created.session.close()


@contextlib.contextmanager
def transaction(bench, isolation="READ_COMMITTED"):
    """Open a transaction with its own snapshot."""
    import psycopg

    with psycopg.connect(bench.database.url) as connection:
        connection.isolation_level = psycopg.IsolationLevel[isolation]
        connection.execute("SELECT count(*) FROM sqlsem.task")
        yield connection


def put_in(connection, bench, order=0):
    statement = "SELECT sqlsem.put(%s, '1', 'call', \"order\" => %s)"
    return connection.execute(statement, (bench.queue, order)).fetchone()[0]


# -- tasks that no claim may miss -------------------------------------------------------------------------------------


def test_a_mark_follows_the_claims(bench):
    numbers = bench.put(50)
    assert bench.work(40) == numbers[:40]
    assert bench.marks() == [(0, numbers[39], [])]


def test_task_of_a_long_transaction_is_not_skipped(bench):
    first = bench.put(20)
    with transaction(bench) as connection:
        late = put_in(connection, bench)
        second = bench.put(20)
        assert bench.work(30) == first + second[:10]
        connection.commit()
    assert bench.work(2) == [late, second[10]]


def test_task_inserted_by_hand_is_not_passed_by(bench):
    """An INSERT outside of a put takes no put lock, so the table's trigger takes that lock."""
    first = bench.put(20)
    with transaction(bench) as connection:
        insert = "INSERT INTO sqlsem.task (queue_name, kind, body) VALUES (%s, 'call', '1') RETURNING task_id"
        late = connection.execute(insert, (bench.queue,)).fetchone()[0]
        second = bench.put(20)
        assert bench.work(30) == first + second[:10]
        connection.commit()
    assert bench.work(2) == [late, second[10]]


@pytest.mark.parametrize("isolation", ["READ_COMMITTED", "REPEATABLE_READ"])
def test_a_lower_order_comes_first(bench, isolation):
    with transaction(bench, isolation) as connection:
        higher = bench.put(20, order=1)
        assert bench.work(10) == higher[:10]
        lower = [put_in(connection, bench), put_in(connection, bench)]
        assert bench.work(1) == higher[10:11]
        connection.commit()
    assert bench.work(3) == [*lower, higher[11]]
    assert bench.marks() == [(1, higher[11], [])]


def test_two_lower_orders_that_come_at_once(bench):
    higher = bench.put(20, order=5)
    assert bench.work(10) == higher[:10]
    with transaction(bench) as first_transaction, transaction(bench) as other:
        third, second = put_in(first_transaction, bench, 3), put_in(other, bench, 2)
        other.commit()
        first_transaction.commit()
    assert bench.work(3) == [second, third, higher[10]]


@pytest.mark.parametrize("outcome", ["returned", "failed"])
def test_returned_task_comes_first(bench, outcome):
    numbers = bench.put(60, maximum=2)
    held = bench.claim()
    assert bench.work(20) == numbers[1:21]
    assert bench.marks() == [(0, numbers[20], [numbers[0]])]
    assert bench.work(20) == numbers[21:41], "the survivor is one of the next mark's, too"
    assert bench.end(held, outcome) == "pending"
    assert bench.work(2) == [numbers[0], numbers[41]]


def test_survivor_blocks_later_tasks(bench):
    numbers, later = bench.put(30), bench.put(3, order=1)
    held = bench.claim()
    assert bench.work(29) == numbers[1:]
    assert bench.claim() is None
    assert bench.end(held, "failed") == "failed"
    assert bench.claim() is None
    assert bench.session.set_task(numbers[0], "cancel") == 0
    assert bench.work(3) == later
    assert bench.session.set_task(numbers[0], "retry") == 0
    assert bench.work(1) == numbers[:1]


def test_retried_task_counts_as_survivor(bench):
    numbers = bench.put(60)
    assert bench.work(30) == numbers[:30]
    held = [bench.claim()]
    assert bench.end(held[0], "failed") == "failed"
    assert bench.work(5) == numbers[31:36]
    assert bench.session.set_task(numbers[30], "cancel") == 0
    assert bench.work(5) == numbers[36:41]
    assert bench.session.set_task(numbers[30], "retry") == 0
    held = bench.claim()
    assert held.task_id == numbers[30]
    assert bench.work(10) == numbers[41:51]
    assert bench.end(held, "returned") == "pending"
    assert bench.work(2) == [numbers[30], numbers[51]]


def test_more_than_can_be_named(bench):
    numbers = bench.put(700)
    held = [bench.claim() for _ in range(300)]
    assert bench.work(300) == numbers[300:600]
    ((_, _, survivors),) = bench.marks()
    assert len(survivors) <= 200
    for task in held:
        assert bench.end(task, "returned") == "pending"
    assert bench.work(400) == numbers[:300] + numbers[600:]


def test_marks_survive_a_dump(bench, make_database, postgres_server, name):
    if not postgres_server.mine:
        pytest.skip("the server's programs are not there")
    numbers = bench.put(30)
    assert bench.work(20) == numbers[:20]
    other = make_database(postgres_server)
    postgres_server.restore(postgres_server.dump(bench.database.url), other.url)
    restored = Bench(other, bench.queue)
    late = restored.put(1)
    assert restored.work(11) == numbers[20:] + late
    restored.session.close()


# -- the cost of a claim ----------------------------------------------------------------------------------------------


def costs(bench, held):
    """Return the number of pages that each call reads."""
    bench.session.heartbeat(bench.member)
    end = json.dumps([{"task": held.task_id, "attempt": held.attempt, "outcome": "finished"}])
    claim = "SELECT * FROM sqlsem.claim_task(%s, %s, 'test', 'uid', %s)"
    group = "SELECT * FROM sqlsem.next_tasks(%s, %s, %s, 'test', 'uid', %s, %s)"
    member, queue, task = bench.member, bench.queue, held.task_id
    calls = {
        "claim": (claim, member, queue, False),
        "claim again": (claim, member, queue, True),
        "group": (group, member, "[]", queue, False, 20),
        "end": ("SELECT sqlsem.end_task(%s, %s, 1, 'finished', NULL, NULL)", member, task),
        "end of a group": (group, member, end, queue, False, 0),
        "recovery": ("SELECT sqlsem.recover_tasks(%s, %s)", queue, member),
        "what a lost claim left": ("SELECT sqlsem.return_claim(%s, %s, 'x')", member, queue),
    }
    with contextlib.closing(bench.database.raw()) as raw:
        return {call_name: pages(raw, *call) for call_name, call in calls.items()}


@pytest.mark.parametrize("often", [True, False], ids=["every claim", "now and then"])
def test_an_old_snapshot_makes_nothing_dearer(bench, often):
    if not often:
        bench.database.install()  # restores the usual routine
    bench.put(3200)
    with transaction(bench, "REPEATABLE_READ"):
        bench.work(90)
        held = bench.claim()
        bench.work(10)
        before = costs(bench, held)
        open_tasks = 2900
        while open_tasks > 0:
            _, claimed = bench.session.next_tasks(bench.member, [], bench.queue, "test", bench.uid(), False, 50)
            ends = [End(task.task_id, task.attempt, "finished") for task in claimed]
            bench.session.next_tasks(bench.member, ends, bench.queue, "test", bench.uid(), False, 0)
            open_tasks -= len(claimed)
            bench.work(10)
            open_tasks -= 10
            if open_tasks < 1000:  # lets the planner know that few tasks are open and none runs
                bench.database.rows("ANALYZE sqlsem.task")
        after = costs(bench, held)
    # Ended tasks leave some 6,000 entries in the index of open tasks. Between two marks there are some 200, by
    # chance some hundreds more.
    assert {call_name: number for call_name, number in after.items() if number > 1.3 * before[call_name] + 1500} == {}
