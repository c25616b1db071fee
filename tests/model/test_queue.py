"""The work queue, checked against a model of it: whatever workers do, the engine hands out what the model hands out.

A state machine drives engine sessions directly (no threads, no waiting), so that every answer is determined.
"""

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

from sqlsem.model import End, NewTask


@dataclass
class Thing:
    """A task as it should be."""

    number: int
    order: int
    most: int
    on_failure: str
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
        self.things: list[Thing] = []
        self.operator = self.database.session(grace=0)
        self.workers = {}
        self.outcomes: dict[int, list[str]] = {}
        for slot in range(3):
            self.join(slot)

    def join(self, slot):
        session = self.database.session(grace=0)
        self.workers[slot] = (session, session.enrol("host", slot, "model"))

    def running(self, slot=None):
        return [one for one in self.things if one.status == "running" and slot in (None, one.worker)]

    @rule(
        order=st.sampled_from([-1, 0, 0, 1]),
        most=st.integers(1, 2),
        on_failure=st.sampled_from(["stop", "continue"]),
        count=st.integers(1, 3),
    )
    def put(self, order, most, on_failure, count):
        new = [NewTask("json", "1", order, 0.0, most, 0.0, on_failure) for _ in range(count)]
        for number in self.operator.put_tasks(self.queue, secrets.token_hex(8), new):
            self.things.append(Thing(number, order, most, on_failure))

    def expected(self):
        orders = [one.order for one in self.things if one.open]
        ready = [one for one in self.things if one.status == "pending" and one.order == min(orders)]
        return min(ready, key=lambda one: one.number, default=None)

    def check_claim(self, slot, claimed):
        thing = self.expected()
        if thing is None:
            assert claimed is None
            return
        assert claimed is not None, thing
        thing.status, thing.attempt, thing.worker = "running", thing.attempt + 1, slot
        assert (claimed.task_id, claimed.order, claimed.attempt) == (thing.number, thing.order, thing.attempt)

    @rule(slot=st.integers(0, 2), repeat=st.booleans())
    def claim(self, slot, repeat):
        session, member = self.workers[slot]
        uid = secrets.token_hex(8)
        claimed = session.claim_task(member, self.queue, "w", uid, False)
        self.check_claim(slot, claimed)
        if repeat and claimed is not None:
            assert session.claim_task(member, self.queue, "w", uid, True) == claimed

    def check_end(self, thing, outcome, status):
        self.outcomes.setdefault(thing.number, []).append(outcome)
        thing.worker = None
        if outcome == "failed":
            thing.failures += 1
        if outcome == "finished":
            thing.status = "finished"
        else:
            thing.status = "pending" if outcome == "returned" or thing.failures < thing.most else "failed"
        assert status == thing.status

    @precondition(lambda self: self.running())
    @rule(data=st.data(), outcome=st.sampled_from(["finished", "finished", "failed", "returned"]), repeat=st.booleans())
    def end(self, data, outcome, repeat):
        thing = data.draw(st.sampled_from(self.running()))
        session, member = self.workers[thing.worker]
        end = End(thing.number, thing.attempt, outcome, error="why" if outcome == "failed" else None)
        self.check_end(thing, outcome, session.end_task(member, end))
        if repeat:
            assert session.end_task(member, end) == thing.status

    @precondition(lambda self: self.running())
    @rule(data=st.data(), outcome=st.sampled_from(["finished", "failed"]))
    def end_and_claim(self, data, outcome):
        thing = data.draw(st.sampled_from(self.running()))
        slot = thing.worker
        session, member = self.workers[slot]
        uid = secrets.token_hex(8)
        status, claimed = session.next_task(
            member, End(thing.number, thing.attempt, outcome), self.queue, "w", uid, False
        )
        self.check_end(thing, outcome, status)
        self.check_claim(slot, claimed)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), slot=st.integers(0, 2), late=st.integers(0, 1))
    def nobody_else_ends_it(self, data, slot, late):
        thing = data.draw(st.sampled_from(self.running()))
        session, member = self.workers[slot]
        if slot != thing.worker or late:
            assert session.end_task(member, End(thing.number, thing.attempt + late, "finished")) is None

    @precondition(lambda self: self.things)
    @rule(data=st.data(), what=st.sampled_from(["retry", "cancel"]))
    def operate(self, data, what):
        thing = data.draw(st.sampled_from(self.things))
        code = self.operator.set_task(thing.number, what)
        if thing.status == "running":
            assert code == 1
        elif what == "retry" and thing.status in ("failed", "cancelled"):
            assert code == 0
            thing.status, thing.failures, thing.losses = "pending", 0, 0
        elif what == "cancel" and thing.status in ("failed", "pending"):
            assert code == 0
            thing.status = "cancelled"
        else:
            assert code == -2

    @rule(slot=st.integers(0, 2), leaves=st.booleans())
    def a_worker_goes(self, slot, leaves):
        session, member = self.workers[slot]
        if leaves:
            session.resign(member)
        session.close()
        self.join(slot)
        # Its session ends a moment after its client.
        lost = self.running(slot)
        back = 0
        while back < len(lost):
            back += self.operator.recover_tasks(self.queue, None)
        for thing in lost:
            self.outcomes.setdefault(thing.number, []).append("lost")
            thing.worker = None
            thing.losses += 1
            thing.status = "pending" if thing.losses < 5 else "failed"

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
            one.task_id: (one.order, one.status, one.attempt, one.failures, one.losses)
            for one in self.operator.list_tasks(self.queue, None, 1000)
        }
        assert found == {
            one.number: (one.order, one.status, one.attempt, one.failures, one.losses) for one in self.things
        }
        state = self.operator.queue_state(self.queue)
        assert state.pending == any(one.status == "pending" for one in self.things)
        assert state.running == bool(self.running())
        assert state.next_pending == (self.expected() is not None)
        blocking = [one for one in self.things if one.status == "failed" and one.open]
        first = min(blocking, key=lambda one: (one.order, one.number), default=None)
        assert state.failed == (first.number if first else None)

    def teardown(self):
        if not hasattr(self, "operator"):
            return
        for number, outcomes in self.outcomes.items():
            log = self.operator.task_attempts(number)
            assert [one.outcome for one in log if one.outcome != "running"] == outcomes
        for session, member in self.workers.values():
            session.resign(member)
            session.close()
        self.operator.close()


def run(database, name, **options):
    machine = type("Machine", (Machine,), {"database": database, "name": str(name), "examples": itertools.count()})
    options = {"deadline": None, "print_blob": True, "suppress_health_check": list(HealthCheck), **options}
    run_state_machine_as_test(machine, settings=settings(**options))


@pytest.mark.timeout(600)
def test_the_engine_follows_the_model(database, name):
    # Shrinking would take minutes; the long run does it.
    run(database, name, max_examples=100, stateful_step_count=40, phases=[Phase.explicit, Phase.reuse, Phase.generate])


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_engine_follows_the_model_for_long(database, name):
    run(database, name, max_examples=1500, stateful_step_count=60)
