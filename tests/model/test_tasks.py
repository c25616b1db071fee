"""The work queue, checked against a model of it: after any puts, claims, ends and retries, claims return the model's
tasks. On PostgreSQL once with the usual low-water marks, and once with a new mark at every claim.
"""

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.state_machines import run_in_database

from sqlsem.values.tasks import End, NewTask

pytestmark = pytest.mark.engines("sqlite", "postgresql")

#: Instead of now and then.
AT_EVERY_CLAIM = """
CREATE OR REPLACE FUNCTION sqlsem.is_time_for_task_mark(p_mark bigint, p_task bigint, p_maximum integer) RETURNS boolean
LANGUAGE sql AS 'SELECT true'
"""


@dataclass
class Task:
    number: int
    order: int
    kind: str
    maximum: int = 1
    on_failure: str = "stop"
    status: str = "pending"
    attempt: int = 0
    failures: int = 0
    losses: int = 0
    member: int | None = None
    key: str | None = None
    asked: bool = False  # to be cancelled

    @property
    def is_open(self) -> bool:
        return self.status in ("pending", "running") or (self.status == "failed" and self.on_failure == "stop")


@dataclass
class Model:
    """The expected queue."""

    tasks: dict[int, Task] = field(default_factory=dict)

    def pending(self) -> list[Task]:
        """Return the tasks that may be claimed, in order."""
        lowest = min((task.order for task in self.tasks.values() if task.is_open), default=None)
        tasks = [task for task in self.tasks.values() if task.status == "pending" and task.order == lowest]
        return sorted(tasks, key=lambda item: item.number)

    def of_key(self, key: str) -> Task | None:
        tasks = [task for task in self.tasks.values() if task.is_open and task.key == key]
        assert len(tasks) <= 1
        return tasks[0] if tasks else None

    def group(self, maximum: int) -> list[Task]:
        alone = [item.losses > 0 or item.kind == "json" for item in self.pending()]
        fitting = (
            1 if alone[:1] == [True] else next(itertools.chain(itertools.compress(itertools.count(), alone), [maximum]))
        )
        return self.pending()[: min(maximum, fitting)]


class Machine(RuleBasedStateMachine):
    database = None
    name = "model"
    examples = itertools.count()

    orders = st.sampled_from([-1, 0, 0, 0, 0, 0, 1, 2])
    kinds = st.sampled_from(["call", "call", "call", "json"])

    @initialize()
    def begin(self):
        self.queue = f"{self.name}-{next(self.examples)}"
        self.model = Model()
        self.uids = itertools.count()
        self.session = self.database.session(grace=0)
        self.others = []  # connections with an open put: (connection, its tasks)
        self.members = [self.join(), self.join()]

    def join(self):
        session = self.database.session(grace=0)
        return session.register_member("host", 1, "model"), session

    def teardown(self):
        if not hasattr(self, "members"):
            return
        for connection, _ in self.others:
            connection.close()
        for member, session in self.members:
            session.deregister_member(member)
            session.close()
        self.session.close()

    def uid(self):
        return f"{self.queue}.{next(self.uids)}"

    # -- putting

    @rule(order=orders, kind=kinds, count=st.integers(1, 4), maximum=st.integers(1, 3), stops=st.booleans())
    def put(self, order, kind, count, maximum, stops):
        on_failure = "stop" if stops else "continue"
        new = [NewTask(kind, "1", order, 0.0, maximum, 0.0, on_failure, None)] * count
        for number in self.session.put_tasks(self.queue, self.uid(), new):
            self.model.tasks[number] = Task(number, order, kind, maximum, on_failure)

    @rule(order=orders, kind=kinds, key=st.sampled_from("ab"), how=st.sampled_from(["unique", "replace"]))
    def put_with_key(self, order, kind, key, how):
        open_task, uid = self.model.of_key(key), self.uid()
        new = [NewTask(kind, "1", order, 0.0, 1, 0.0, "stop", None, None, **{how: key})]
        (number,) = self.session.put_tasks(self.queue, uid, new)
        assert self.session.put_tasks(self.queue, uid, new) == [number]
        if how == "unique" and open_task is not None:
            assert number == open_task.number
            return
        assert number not in self.model.tasks
        if open_task is not None:
            if open_task.status == "running":
                open_task.key = None
            else:
                open_task.status = "cancelled"
        self.model.tasks[number] = Task(number, order, kind, key=key)

    @rule(order=orders, kind=kinds, isolation=st.sampled_from(["READ_COMMITTED", "REPEATABLE_READ"]))
    @precondition(lambda self: self.database.engine == "postgresql" and len(self.others) < 3)
    def begin_to_put(self, order, kind, isolation):
        import psycopg

        connection = psycopg.connect(self.database.url)
        connection.isolation_level = psycopg.IsolationLevel[isolation]
        connection.execute("SELECT 1 FROM sqlsem.task LIMIT 1")
        self.others.append((connection, []))
        self.put_more(order, kind, len(self.others) - 1)

    @rule(order=orders, kind=kinds, which=st.integers(0, 2))
    @precondition(lambda self: self.others)
    def put_more(self, order, kind, which):
        connection, tasks = self.others[which % len(self.others)]
        statement = 'SELECT sqlsem.put(%s, %s, %s, "order" => %s)'
        ((number,),) = connection.execute(statement, (self.queue, "1", kind, order)).fetchall()
        tasks.append(Task(number, order, kind))

    @rule(which=st.integers(0, 2), kept=st.booleans())
    @precondition(lambda self: self.others)
    def end_to_put(self, which, kept):
        connection, tasks = self.others.pop(which % len(self.others))
        (connection.commit if kept else connection.rollback)()
        connection.close()
        if kept:
            self.model.tasks.update((task.number, task) for task in tasks)

    # -- working

    @rule(slot=st.integers(0, 1), again=st.booleans())
    def claim(self, slot, again):
        member, session = self.members[slot]
        uid = self.uid()
        claimed = session.claim_task(member, self.queue, "model", uid, False)
        if claimed is not None and again:
            assert session.claim_task(member, self.queue, "model", uid, True) == claimed
        self.claimed(member, [] if claimed is None else [claimed], self.model.pending()[:1])

    @rule(slot=st.integers(0, 1), maximum=st.integers(2, 5), ending=st.booleans(), again=st.booleans())
    def claim_group(self, slot, maximum, ending, again):
        member, session = self.members[slot]
        uid = self.uid()
        own_tasks = [task for task in self.model.tasks.values() if task.member == member] if ending else []
        ends = [End(own_task.number, own_task.attempt, "finished") for own_task in own_tasks]
        statuses, claimed = session.next_tasks(member, ends, self.queue, "model", uid, False, maximum)
        assert statuses == ["finished"] * len(ends)
        for own_task in own_tasks:
            own_task.status, own_task.member = "finished", None
        if claimed and again:
            assert session.next_tasks(member, ends, self.queue, "model", uid, True, maximum) == (statuses, claimed)
        self.claimed(member, claimed, self.model.group(maximum))

    def claimed(self, member, claims, expected):
        assert [item.task_id for item in claims] == [item.number for item in expected]
        for item in expected:
            item.status, item.member, item.attempt = "running", member, item.attempt + 1
        assert [item.attempt for item in claims] == [item.attempt for item in expected]

    @rule(data=st.data(), outcome=st.sampled_from(["finished", "finished", "failed", "returned", "cancelled"]))
    def end(self, data, outcome):
        running = [task_row for task_row in self.model.tasks.values() if task_row.status == "running"]
        if not running:
            return
        task = data.draw(st.sampled_from(running))
        session = dict(self.members)[task.member]
        status = {"finished": "finished", "returned": "pending", "cancelled": "cancelled"}.get(outcome)
        if status is None:
            task.failures += 1
            status = "pending" if task.failures < task.maximum else "failed"
        if task.asked and status != "finished":
            status = "cancelled"
        assert session.end_task(task.member, End(task.number, task.attempt, outcome)) == status
        task.status, task.member = status, None

    @rule(slot=st.integers(0, 1))
    def die(self, slot):
        member, session = self.members[slot]
        session.deregister_member(member)
        session.close()
        lost = [task for task in self.model.tasks.values() if task.member == member]
        assert self.session.recover_tasks(self.queue, None) == len(lost)
        for lost_task in lost:
            lost_task.losses += 1
            lost_task.status, lost_task.member = "pending" if lost_task.losses < 5 else "failed", None
            if lost_task.asked:
                lost_task.status = "cancelled"
        self.members[slot] = self.join()

    @rule(slot=st.integers(0, 1))
    def lose_an_answer(self, slot):
        member, session = self.members[slot]
        uid = self.uid()
        expected = self.model.group(3)
        _, claimed = session.next_tasks(member, [], self.queue, "model", uid, False, 3)
        assert session.return_claim(member, self.queue, uid) == len(claimed) == len(expected)
        for item in expected:
            item.attempt += 1

    # -- recovery and displays

    @rule(data=st.data(), action=st.sampled_from(["retry", "retry", "cancel"]))
    def mend(self, data, action):
        fitting = {"retry": ("failed", "cancelled"), "cancel": ("pending", "failed")}[action]
        tasks = [task_row for task_row in self.model.tasks.values() if task_row.status in fitting]
        if not tasks:
            return
        task = data.draw(st.sampled_from(tasks))
        if action == "retry" and task.key is not None and self.model.of_key(task.key) not in (None, task):
            assert self.session.set_task(task.number, action) == -3
            return
        assert self.session.set_task(task.number, action) == 0
        task.status = {"retry": "pending", "cancel": "cancelled"}[action]
        if action == "retry":
            task.failures = task.losses = 0
            task.asked = False

    @rule(data=st.data())
    def cancel(self, data):
        """Cancel a task, also a running one, which is only notified."""
        tasks = [
            task_row for task_row in self.model.tasks.values() if task_row.status in ("pending", "running", "failed")
        ]
        if not tasks:
            return
        task = data.draw(st.sampled_from(tasks))
        if task.status == "running":
            assert self.session.cancel_task(task.number) == 1
            task.asked = True
            session = dict(self.members)[task.member]
            ((number, limit, by),) = session.task_controls(task.member, [task.number])
            assert (number, limit, by is not None) == (task.number, None, True)
        else:
            assert self.session.cancel_task(task.number) == 0
            task.status = "cancelled"

    @rule()
    def look(self):
        tasks = sorted(self.model.tasks.values(), key=lambda task: (task.order, task.number))
        state = self.session.queue_state(self.queue)
        assert state.pending == any(task.status == "pending" for task in tasks)
        assert state.running == any(task.status == "running" for task in tasks)
        assert state.next_pending == bool(self.model.pending())
        holding = [task.number for task in tasks if task.status == "failed" and task.is_open]
        assert state.failed == (holding[0] if holding else None)
        assert [task.task_id for task in self.session.list_tasks(self.queue, None, 1000) if task.ended_at is None] == [
            task.number for task in tasks if task.is_open and task.status != "failed"
        ]


@pytest.fixture(params=["now and then", "at every claim"])
def marked(request, engine_name, database):
    if engine_name != "postgresql":
        if request.param == "at every claim":
            pytest.skip("there are no marks")
        yield database
        return
    own = request.getfixturevalue("make_database")(request.getfixturevalue("postgres_server"))
    if request.param == "at every claim":
        execute(own, AT_EVERY_CLAIM)
    yield own


def execute(database, text, *parameters):
    import psycopg

    with psycopg.connect(database.url, autocommit=True) as connection:
        cursor = connection.execute(text, parameters or None)
        return cursor.fetchall() if cursor.description else []


@pytest.mark.timeout(600)
@pytest.mark.leaves_rows
def test_claims_follow_the_model(marked, name):
    run_in_database(Machine, marked, name, max_examples=40, stateful_step_count=40)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.leaves_rows
def test_claims_follow_the_model_for_long(marked, name):
    run_in_database(Machine, marked, name, max_examples=2000, stateful_step_count=80)
