"""The work queue, checked against a model of it: after any actions of workers, claims return the model's tasks.

A state machine drives engine sessions directly (no threads, no waiting), so that every answer is determined.
"""

import functools
import itertools
import secrets
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sqlsem.engines.base import Session
from sqlsem.values.tasks import End, NewTask


@dataclass
class ModelTask:
    """An expected task."""

    number: int
    order: int
    maximum: int
    on_failure: str
    kind: str = "json"
    status: str = "pending"
    attempt: int = 0
    failures: int = 0
    losses: int = 0
    worker: int | None = None

    @property
    def open(self):
        return self.status in ("pending", "running") or (self.status == "failed" and self.on_failure == "stop")


class Machine(RuleBasedStateMachine):
    database = None
    name = "model"
    examples = itertools.count()

    @initialize()
    def begin(self):
        self.queue = f"{self.name}-{next(self.examples)}"
        self.model_tasks: list[ModelTask] = []
        self.operator = self.database.session(grace=0)
        self.workers = {}
        self.outcomes: dict[int, list[str]] = {}
        for slot in range(3):
            self.join(slot)

    def join(self, slot):
        session = self.database.session(grace=0)
        self.workers[slot] = (session, session.register_member("host", slot, "model"))

    def running(self, slot=None):
        return [
            model_task
            for model_task in self.model_tasks
            if model_task.status == "running" and slot in (None, model_task.worker)
        ]

    @rule(
        order=st.sampled_from([-1, 0, 0, 1]),
        maximum=st.integers(1, 2),
        on_failure=st.sampled_from(["stop", "continue"]),
        kinds=st.lists(st.sampled_from(["call", "call", "sql", "json", "shell"]), min_size=1, max_size=4),
    )
    def put(self, order, maximum, on_failure, kinds):
        new = [NewTask(kind, "1", order, 0.0, maximum, 0.0, on_failure) for kind in kinds]
        numbers = self.operator.put_tasks(self.queue, secrets.token_hex(8), new)
        for number, kind in zip(numbers, kinds, strict=True):
            self.model_tasks.append(ModelTask(number, order, maximum, on_failure, kind))

    def expected(self, maximum=1):
        orders = [model_task.order for model_task in self.model_tasks if model_task.open]
        ready = [
            model_task
            for model_task in self.model_tasks
            if model_task.status == "pending" and model_task.order == min(orders)
        ]
        group = sorted(ready, key=lambda item: item.number)[:maximum]
        alone = [place for place, item in enumerate(group) if item.losses or item.kind not in ("call", "sql")]
        return group[: max(alone[0], 1)] if alone else group

    def check_claim(self, slot, claimed):
        self.check_claims(slot, [] if claimed is None else [claimed], self.expected())

    def check_claims(self, slot, claimed, expected):
        for model_task in expected:
            model_task.status, model_task.attempt, model_task.worker = "running", model_task.attempt + 1, slot
        assert [(row.task_id, row.order, row.kind, row.attempt) for row in claimed] == [
            (item.number, item.order, item.kind, item.attempt) for item in expected
        ]

    @rule(slot=st.integers(0, 2), repeat=st.booleans())
    def claim(self, slot, repeat):
        session, member = self.workers[slot]
        uid = secrets.token_hex(8)
        claimed = session.claim_task(member, self.queue, "w", uid, False)
        self.check_claim(slot, claimed)
        if repeat and claimed is not None:
            assert session.claim_task(member, self.queue, "w", uid, True) == claimed

    def check_end(self, model_task, outcome, status):
        self.outcomes.setdefault(model_task.number, []).append(outcome)
        model_task.worker = None
        if outcome == "failed":
            model_task.failures += 1
        if outcome == "finished":
            model_task.status = "finished"
        else:
            model_task.status = (
                "pending" if outcome == "returned" or model_task.failures < model_task.maximum else "failed"
            )
        assert status == model_task.status

    @precondition(lambda self: self.running())
    @rule(data=st.data(), outcome=st.sampled_from(["finished", "finished", "failed", "returned"]), repeat=st.booleans())
    def end(self, data, outcome, repeat):
        model_task = data.draw(st.sampled_from(self.running()))
        session, member = self.workers[model_task.worker]
        end = End(model_task.number, model_task.attempt, outcome, error="why" if outcome == "failed" else None)
        self.check_end(model_task, outcome, session.end_task(member, end))
        if repeat:
            assert session.end_task(member, end) == model_task.status

    @precondition(lambda self: self.running())
    @rule(data=st.data(), outcome=st.sampled_from(["finished", "failed"]))
    def end_and_claim(self, data, outcome):
        model_task = data.draw(st.sampled_from(self.running()))
        slot = model_task.worker
        session, member = self.workers[slot]
        uid = secrets.token_hex(8)
        status, claimed = session.next_task(
            member, End(model_task.number, model_task.attempt, outcome), self.queue, "w", uid, False
        )
        self.check_end(model_task, outcome, status)
        self.check_claim(slot, claimed)

    @rule(
        data=st.data(),
        slot=st.integers(0, 2),
        maximum=st.sampled_from([0, 1, 2, 3, 100]),
        repeat=st.booleans(),
        singly=st.booleans(),
    )
    def end_some_and_claim_some(self, data, slot, maximum, repeat, singly):
        session, member = self.workers[slot]
        next_tasks = session.next_tasks
        if singly or type(session).next_tasks is Session.next_tasks:  # as engines without groups do
            next_tasks, maximum = functools.partial(Session.next_tasks, session), min(maximum, 1)
        mine = self.running(slot)
        ended = data.draw(st.lists(st.sampled_from(mine), unique_by=id)) if mine else []
        outcomes = ["finished", "finished", "failed", "returned"]
        ends = [End(item.number, item.attempt, data.draw(st.sampled_from(outcomes)), error="why") for item in ended]
        others = [item for item in self.running() if item.worker != slot]
        theirs = [End(item.number, item.attempt, "finished") for item in others[:1]]
        arguments = (member, [*ends, *theirs], self.queue, "w", secrets.token_hex(8))
        statuses, claimed = next_tasks(*arguments, False, maximum)
        assert statuses[len(ends) :] == [None] * len(theirs), "another's"
        for model_task, end, status in zip(ended, ends, statuses, strict=False):
            self.check_end(model_task, end.outcome, status)
        self.check_claims(slot, claimed, self.expected(maximum))
        if repeat and (claimed or not maximum):
            again, found = next_tasks(*arguments, True, maximum)
            assert found == claimed
            assert [answer is None for answer in again] == [answer is None for answer in statuses]

    @precondition(lambda self: self.running())
    @rule(data=st.data(), slot=st.integers(0, 2), late=st.integers(0, 1))
    def nobody_else_ends_it(self, data, slot, late):
        model_task = data.draw(st.sampled_from(self.running()))
        session, member = self.workers[slot]
        if slot != model_task.worker or late:
            assert session.end_task(member, End(model_task.number, model_task.attempt + late, "finished")) is None

    @precondition(lambda self: self.model_tasks)
    @rule(data=st.data(), action=st.sampled_from(["retry", "cancel"]))
    def operate(self, data, action):
        model_task = data.draw(st.sampled_from(self.model_tasks))
        code = self.operator.set_task(model_task.number, action)
        if model_task.status == "running":
            assert code == 1
        elif action == "retry" and model_task.status in ("failed", "cancelled"):
            assert code == 0
            model_task.status, model_task.failures, model_task.losses = "pending", 0, 0
        elif action == "cancel" and model_task.status in ("failed", "pending"):
            assert code == 0
            model_task.status = "cancelled"
        else:
            assert code == -2

    @rule(slot=st.integers(0, 2), leaves=st.booleans())
    def a_worker_goes(self, slot, leaves):
        session, member = self.workers[slot]
        if leaves:
            session.deregister_member(member)
        session.close()
        self.join(slot)
        # Its session ends a moment after its client.
        lost = self.running(slot)
        back = 0
        while back < len(lost):
            back += self.operator.recover_tasks(self.queue, None)
        for model_task in lost:
            self.outcomes.setdefault(model_task.number, []).append("lost")
            model_task.worker = None
            model_task.losses += 1
            model_task.status = "pending" if model_task.losses < 5 else "failed"

    @rule(slot=st.integers(0, 2))
    def the_living_are_left_alone(self, slot):
        assert self.operator.recover_tasks(self.queue, None) == 0
        session, member = self.workers[slot]
        assert session.recover_tasks(self.queue, member) == 0

    @invariant()
    def the_queue_is_the_models(self):
        if not hasattr(self, "operator"):
            return
        found = {
            task.task_id: (task.order, task.status, task.attempt, task.failures, task.losses)
            for task in self.operator.list_tasks(self.queue, None, 1000)
        }
        assert found == {
            model_task.number: (
                model_task.order,
                model_task.status,
                model_task.attempt,
                model_task.failures,
                model_task.losses,
            )
            for model_task in self.model_tasks
        }
        state = self.operator.queue_state(self.queue)
        assert state.pending == any(model_task.status == "pending" for model_task in self.model_tasks)
        assert state.running == bool(self.running())
        assert state.next_pending == bool(self.expected())
        blocking = [model_task for model_task in self.model_tasks if model_task.status == "failed" and model_task.open]
        first = min(blocking, key=lambda item: (item.order, item.number), default=None)
        assert state.failed == (first.number if first else None)

    def teardown(self):
        if not hasattr(self, "operator"):
            return
        for number, outcomes in self.outcomes.items():
            log = self.operator.task_attempts(number)
            assert [attempt.outcome for attempt in log if attempt.outcome != "running"] == outcomes
        for session, member in self.workers.values():
            session.deregister_member(member)
            session.close()
        self.operator.close()


def run(database, name, **options):
    machine = type("Machine", (Machine,), {"database": database, "name": str(name), "examples": itertools.count()})
    options = {"deadline": None, "print_blob": True, "suppress_health_check": list(HealthCheck), **options}
    run_state_machine_as_test(machine, settings=settings(**options))


@pytest.mark.timeout(600)
def test_the_engine_follows_the_model(database, name):
    # Shrinking would take minutes; the long run does it.
    run(database, name, max_examples=25, stateful_step_count=40, phases=[Phase.explicit, Phase.reuse, Phase.generate])


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_engine_follows_the_model_for_long(database, name):
    run(database, name, max_examples=1500, stateful_step_count=60)
