"""The work queue, checked against a model of it: after any puts, claims, ends and retries, claims return the model's
tasks. On PostgreSQL once with the usual low-water marks, and once with a new mark at every claim."""

import itertools
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from support.state_machines import DatabaseMachine, run_in_database

from sqlsem.values.tasks import End, NewTask

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
    outcomes: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))

    def running(self, member: int | None = None) -> list[Task]:
        return [task for task in self.tasks.values() if task.status == "running" and member in (None, task.member)]

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
        """Return the tasks that a claim of up to so many returns. A risky task comes alone."""
        tasks = self.pending()[:maximum]
        alone = [place for place, item in enumerate(tasks) if item.losses or item.kind not in ("call", "sql")]
        return tasks[: max(alone[0], 1)] if alone else tasks

    def end(self, task: Task, outcome: str) -> str:
        """End a running task, and return its status then."""
        task.failures += outcome == "failed"
        if outcome == "finished" or task.asked:
            task.status = "finished" if outcome == "finished" else "cancelled"
        elif outcome == "failed":
            task.status = "pending" if task.failures < task.maximum else "failed"
        else:
            task.status = {"returned": "pending", "cancelled": "cancelled"}[outcome]
        task.member = None
        self.outcomes[task.number].append(outcome)
        return task.status


class Machine(DatabaseMachine):
    orders = st.sampled_from([-1, 0, 0, 0, 0, 0, 1, 2])
    kinds = st.sampled_from(["call", "call", "sql", "sql", "json", "shell"])
    ends = st.sampled_from(["finished", "finished", "failed", "returned", "cancelled"])

    @initialize()
    def begin(self):
        self.queue = f"{self.name}-{next(self.examples)}"
        self.model = Model()
        self.uids = itertools.count()
        self.session = self.database.session(grace=0)
        self.others = []  # connections with an open put: (connection, its tasks)
        self.members = [self.join(), self.join()]

    def teardown(self):
        if not hasattr(self, "members"):
            return
        for connection, _ in self.others:
            connection.close()
        for number, outcomes in self.model.outcomes.items():
            log = self.session.task_attempts(number)
            assert [attempt.outcome for attempt in log if attempt.outcome != "running"] == outcomes
        for member, session in self.members:
            session.deregister_member(member)
            session.close()
        self.session.close()

    def uid(self):
        return f"{self.queue}.{next(self.uids)}"

    # -- putting

    @rule(
        order=orders,
        several=st.lists(kinds, min_size=1, max_size=4),
        maximum=st.integers(1, 3),
        on_failure=st.sampled_from(["stop", "continue"]),
    )
    def put(self, order, several, maximum, on_failure):
        new = [NewTask(kind, "1", order, 0.0, maximum, 0.0, on_failure) for kind in several]
        for number, kind in zip(self.session.put_tasks(self.queue, self.uid(), new), several, strict=True):
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

    @rule(
        data=st.data(),
        slot=st.integers(0, 1),
        maximum=st.sampled_from([0, 1, 2, 3, 100]),
        again=st.booleans(),
    )
    def end_some_and_claim_some(self, data, slot, maximum, again):
        member, session = self.members[slot]
        mine = self.model.running(member)
        ended = data.draw(st.lists(st.sampled_from(mine), unique_by=id)) if mine else []
        ends = [End(item.number, item.attempt, data.draw(self.ends), error="why") for item in ended]
        others = [item for item in self.model.running() if item.member != member]
        theirs = [End(item.number, item.attempt, "finished") for item in others[:1]]
        arguments = (member, [*ends, *theirs], self.queue, "model", self.uid())
        statuses, claimed = session.next_tasks(*arguments, False, maximum)
        expected = [self.model.end(task, end.outcome) for task, end in zip(ended, ends, strict=True)]
        assert statuses == expected + [None] * len(theirs), "the last is another's"
        self.claimed(member, claimed, self.model.group(maximum))
        if again and (claimed or not maximum):
            repeated, found = session.next_tasks(*arguments, True, maximum)
            assert found == claimed
            assert [answer is None for answer in repeated] == [answer is None for answer in statuses]

    @precondition(lambda self: self.model.running())
    @rule(data=st.data(), outcome=ends)
    def end_and_claim(self, data, outcome):
        task = data.draw(st.sampled_from(self.model.running()))
        member, session = task.member, dict(self.members)[task.member]
        end = End(task.number, task.attempt, outcome)
        status, claimed = session.next_task(member, end, self.queue, "model", self.uid(), False)
        assert status == self.model.end(task, outcome)
        self.claimed(member, [] if claimed is None else [claimed], self.model.pending()[:1])

    def claimed(self, member, claims, expected):
        for item in expected:
            item.status, item.member, item.attempt = "running", member, item.attempt + 1
        assert [(item.task_id, item.order, item.kind, item.attempt) for item in claims] == [
            (item.number, item.order, item.kind, item.attempt) for item in expected
        ]

    @precondition(lambda self: self.model.running())
    @rule(data=st.data(), outcome=ends, again=st.booleans())
    def end(self, data, outcome, again):
        task = data.draw(st.sampled_from(self.model.running()))
        member, session = task.member, dict(self.members)[task.member]
        end = End(task.number, task.attempt, outcome, error="why" if outcome == "failed" else None)
        assert session.end_task(member, end) == self.model.end(task, outcome)
        if again:
            assert session.end_task(member, end) == task.status

    @precondition(lambda self: self.model.running())
    @rule(data=st.data(), slot=st.integers(0, 1), late=st.integers(0, 1))
    def nobody_else_ends_it(self, data, slot, late):
        task = data.draw(st.sampled_from(self.model.running()))
        member, session = self.members[slot]
        if member != task.member or late:
            assert session.end_task(member, End(task.number, task.attempt + late, "finished")) is None

    @rule(slot=st.integers(0, 1), leaves=st.booleans())
    def die(self, slot, leaves):
        member, session = self.members[slot]
        if leaves:
            session.deregister_member(member)
        session.close()
        lost = self.model.running(member)
        back = 0
        while back < len(lost):  # the session ends a moment after its client
            back += self.session.recover_tasks(self.queue, None)
        for lost_task in lost:
            lost_task.losses += 1
            lost_task.status, lost_task.member = "pending" if lost_task.losses < 5 else "failed", None
            if lost_task.asked:
                lost_task.status = "cancelled"
            self.model.outcomes[lost_task.number].append("lost")
        self.members[slot] = self.join()

    @rule(slot=st.integers(0, 1))
    def the_living_are_left_alone(self, slot):
        assert self.session.recover_tasks(self.queue, None) == 0
        member, session = self.members[slot]
        assert session.recover_tasks(self.queue, member) == 0

    @rule(slot=st.integers(0, 1))
    def lose_an_answer(self, slot):
        member, session = self.members[slot]
        uid = self.uid()
        expected = self.model.group(3)
        _, claimed = session.next_tasks(member, [], self.queue, "model", uid, False, 3)
        assert session.return_claim(member, self.queue, uid) == len(claimed) == len(expected)
        for item in expected:
            item.attempt += 1
            self.model.outcomes[item.number].append("returned")

    # -- recovery and displays

    @precondition(lambda self: self.model.tasks)
    @rule(data=st.data(), action=st.sampled_from(["retry", "retry", "cancel"]))
    def mend(self, data, action):
        task = data.draw(st.sampled_from(list(self.model.tasks.values())))
        code = self.session.set_task(task.number, action)
        if task.status == "running":
            assert code == 1
        elif task.status not in {"retry": ("failed", "cancelled"), "cancel": ("pending", "failed")}[action]:
            assert code == -2
        elif action == "retry" and task.key is not None and self.model.of_key(task.key) not in (None, task):
            assert code == -3
        else:
            assert code == 0
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

    @invariant()
    def the_queue_is_the_models(self):
        tasks = sorted(self.model.tasks.values(), key=lambda task: (task.order, task.number))
        state = self.session.queue_state(self.queue)
        assert state.pending == any(task.status == "pending" for task in tasks)
        assert state.running == any(task.status == "running" for task in tasks)
        assert state.next_pending == bool(self.model.pending())
        holding = [task.number for task in tasks if task.status == "failed" and task.is_open]
        assert state.failed == (holding[0] if holding else None)
        listed = self.session.list_tasks(self.queue, None, 1000)
        assert [task.task_id for task in listed if task.ended_at is None] == [
            task.number for task in tasks if task.is_open and task.status != "failed"
        ]
        assert {
            task.task_id: (task.order, task.status, task.attempt, task.failures, task.losses) for task in listed
        } == {task.number: (task.order, task.status, task.attempt, task.failures, task.losses) for task in tasks}


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
    examples = 3 if marked.engine == "mssql" else 40
    run_in_database(Machine, marked, name, max_examples=examples, stateful_step_count=40)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.leaves_rows
def test_claims_follow_the_model_for_long(marked, name):
    run_in_database(Machine, marked, name, max_examples=2000, stateful_step_count=80)
