"""Queues with keys, priorities, limits and rates, checked against a model of them: no limit and no rate is exceeded.

The key with the fewest running tasks for its weight comes next; within a key, the priority counts, then the number.
"""

import itertools
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from support.state_machines import DatabaseMachine, run_in_database

from sqlsem.values.tasks import End, NewTask

#: The window of all rates here, in ms: so long that no use leaves it.
WINDOW = 3_600_000


@dataclass
class Task:
    number: int
    order: int
    key: str | None  # '': none, put while the queue used fair queueing
    priority: int
    maximum: int
    status: str = "pending"
    attempt: int = 0
    failures: int = 0
    losses: int = 0
    member: int | None = None

    @property
    def is_open(self) -> bool:
        return self.status in ("pending", "running", "failed")


@dataclass
class Model:
    tasks: dict[int, Task] = field(default_factory=dict)
    limit: int | None = None
    key_limit: int | None = None
    limits: dict[str, int] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    rate: int | None = None
    key_rate: int | None = None
    rates: dict[str, int] = field(default_factory=dict)
    started: Counter[str] = field(default_factory=Counter)  # by key with a rate; '': of all keys

    def of(self, status: str) -> list[Task]:
        return sorted((task for task in self.tasks.values() if task.status == status), key=lambda task: task.number)

    def is_limited(self) -> bool:
        return (self.limit, self.key_limit, self.rate, self.key_rate) != (None,) * 4 or bool(
            self.limits or self.weights or self.rates
        )

    def in_turns(self) -> bool:
        return self.is_limited() or any(item.key is not None for item in self.of("pending"))

    def room(self, key: str, running: Counter[str]) -> bool:
        maximum, rate = self.limits.get(key, self.key_limit), self.rates.get(key, self.key_rate)
        return key == "" or ((maximum is None or running[key] < maximum) and (rate is None or self.started[key] < rate))

    def start(self, key: str) -> None:
        if self.rate is not None:
            self.started[""] += 1
        if key and self.rates.get(key, self.key_rate) is not None:
            self.started[key] += 1

    def next(self) -> set[int]:
        """Return the tasks that the next claim may choose from."""
        lowest = min((task.order for task in self.tasks.values() if task.is_open), default=None)
        pending = [item for item in self.of("pending") if item.order == lowest]
        if not self.in_turns() or not pending:
            return {item.number for item in pending[:1]}
        running = Counter(item.key or "" for item in self.of("running"))
        if self.limit is not None and running.total() >= self.limit:
            return set()
        if self.rate is not None and self.started[""] >= self.rate:
            return set()
        heads: dict[str, Task] = {}
        for item in sorted(pending, key=lambda item: (-item.priority, item.number)):
            heads.setdefault(item.key or "", item)
        shares = {key: running[key] / self.weights.get(key, 1) for key in heads if self.room(key, running)}
        return {heads[key].number for key, share in shares.items() if share == min(shares.values())}


class Machine(DatabaseMachine):
    keys = st.sampled_from(["a", "b", "c", None])
    limits = st.sampled_from([None, 0, 1, 2, 3])

    @initialize()
    def begin(self):
        self.queue = f"{self.name}-{next(self.examples)}"
        self.model = Model()
        self.uids = itertools.count()
        self.session = self.database.session(grace=0)
        self.members = [self.join(), self.join()]

    def teardown(self):
        if hasattr(self, "members"):
            for key in ("a", "b", "c"):
                self.session.set_queue(self.queue, key, "limit", None)
                self.session.set_queue(self.queue, key, "weight", None)
                self.session.set_queue(self.queue, key, "rate", None)
            for setting in ("limit", "key_limit", "rate", "key_rate"):
                self.session.set_queue(self.queue, None, setting, None)
            assert self.session.queue_limits(self.queue) == []
            for member, session in self.members:
                session.deregister_member(member)
                session.close()
            self.session.close()

    def uid(self):
        return f"{self.queue}.{next(self.uids)}"

    @rule(
        key=keys,
        order=st.sampled_from([0, 0, 0, 1]),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        count=st.integers(1, 3),
        maximum=st.integers(1, 2),
    )
    def put(self, key, order, priority, count, maximum):
        # (SQL Server finds keys by their order.)
        fellow = any(item.key is not None and item.order == order for item in self.model.of("pending"))
        turns = self.model.is_limited() or fellow or (self.database.engine != "mssql" and self.model.in_turns())
        new = [NewTask("call", "1", order, 0.0, maximum, 0.0, key=key, priority=priority)] * count
        for number in self.session.put_tasks(self.queue, self.uid(), new):
            task_key = key or ("" if turns or priority else None)
            self.model.tasks[number] = Task(number, order, task_key, priority, maximum)

    @rule(limit=limits)
    def set_limit(self, limit):
        self.session.set_queue(self.queue, None, "limit", limit)
        self.model.limit = limit

    @rule(limit=limits)
    def set_key_limit(self, limit):
        self.session.set_queue(self.queue, None, "key_limit", limit)
        self.model.key_limit = limit

    @rule(key=st.sampled_from("ab"), setting=st.sampled_from(["limit", "weight"]), value=limits)
    def set_key(self, key, setting, value):
        if setting == "weight" and value == 0:
            return
        self.session.set_queue(self.queue, key, setting, value)
        settings = self.model.limits if setting == "limit" else self.model.weights
        if value is None:
            settings.pop(key, None)
        else:
            settings[key] = value

    @rule(key=st.sampled_from(["a", "b", None, "each"]), value=st.sampled_from([None, 1, 2, 5, 9]))
    def set_rate(self, key, value):
        setting = "key_rate" if key == "each" else "rate"
        task_key = None if key == "each" else key
        self.session.set_queue(self.queue, task_key, setting, value, None if value is None else WINDOW)
        if key == "each":
            self.model.key_rate = value
        elif key is None:
            self.model.rate = value
        elif value is None:
            self.model.rates.pop(key, None)
        else:
            self.model.rates[key] = value

    @rule()
    def look(self):
        limits = {limit.task_key: limit for limit in self.session.queue_limits(self.queue)}
        if self.model.is_limited():
            assert (limits[None].task_limit, limits[None].key_limit) == (self.model.limit, self.model.key_limit)
            assert (limits[None].task_rate, limits[None].key_rate) == (self.model.rate, self.model.key_rate)
        assert {
            key: settings.task_rate for key, settings in limits.items() if key and settings.task_rate
        } == self.model.rates
        assert {
            key: settings.task_limit for key, settings in limits.items() if key and settings.task_limit is not None
        } == self.model.limits
        assert {
            key: settings.weight for key, settings in limits.items() if key and settings.weight is not None
        } == self.model.weights
        for task in self.session.list_tasks(self.queue, None, 1000):
            assert (task.key, task.priority) == (
                self.model.tasks[task.task_id].key or None,
                self.model.tasks[task.task_id].priority,
            )

    @rule(slot=st.integers(0, 1), again=st.booleans(), group=st.booleans())
    def claim(self, slot, again, group):
        member, session = self.members[slot]
        uid = self.uid()
        expected = self.model.next()
        turns = self.model.in_turns()
        if group:
            _, claimed = session.next_tasks(member, [], self.queue, "model", uid, False, 3)
            if claimed and again:
                assert session.next_tasks(member, [], self.queue, "model", uid, True, 3) == ([], claimed)
        else:
            claim = session.claim_task(member, self.queue, "model", uid, False)
            claimed = [] if claim is None else [claim]
            if claimed and again:
                assert session.claim_task(member, self.queue, "model", uid, True) == claim
        assert bool(claimed) == bool(expected)
        if claimed:
            assert claimed[0].task_id in expected
            assert len(claimed) == 1 or not turns
        for claim in claimed:
            task = self.model.tasks[claim.task_id]
            assert task.status == "pending"
            self.model.start(task.key or "")
            task.status, task.member, task.attempt = "running", member, task.attempt + 1

    @rule(data=st.data(), outcome=st.sampled_from(["finished", "finished", "failed", "returned"]))
    def end(self, data, outcome):
        running = self.model.of("running")
        if not running:
            return
        task = data.draw(st.sampled_from(running))
        status = {"finished": "finished", "returned": "pending"}.get(outcome)
        if status is None:
            task.failures += 1
            status = "pending" if task.failures < task.maximum else "failed"
        session = dict(self.members)[task.member]
        assert session.end_task(task.member, End(task.number, task.attempt, outcome)) == status
        task.status, task.member = status, None

    @rule(slot=st.integers(0, 1))
    def die(self, slot):
        member, session = self.members[slot]
        session.deregister_member(member)
        session.close()
        lost = [lost_task for lost_task in self.model.of("running") if lost_task.member == member]
        assert self.session.recover_tasks(self.queue, None) == len(lost)
        for lost_task in lost:
            lost_task.losses += 1
            lost_task.status, lost_task.member = "pending" if lost_task.losses < 5 else "failed", None
        self.members[slot] = self.join()

    @rule(data=st.data(), action=st.sampled_from(["retry", "cancel"]))
    def mend(self, data, action):
        tasks = [
            task_row
            for task_row in self.model.tasks.values()
            if task_row.status in {"retry": ("failed",), "cancel": ("pending", "failed")}[action]
        ]
        if not tasks:
            return
        task = data.draw(st.sampled_from(tasks))
        assert self.session.set_task(task.number, action) == 0
        task.status = {"retry": "pending", "cancel": "cancelled"}[action]
        if action == "retry":
            task.failures = task.losses = 0


@pytest.mark.kept
@pytest.mark.timeout(600)
@pytest.mark.leaves_rows
def test_turns_follow_the_model(database, name):
    run_in_database(
        Machine, database, name, max_examples=3 if database.engine == "mssql" else 40, stateful_step_count=40
    )


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.leaves_rows
def test_turns_follow_the_model_for_long(database, name):
    run_in_database(Machine, database, name, max_examples=2000, stateful_step_count=80)
