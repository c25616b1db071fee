"""Tasks with locks, beside other clients that take the same locks, in any order of events.

A waiting task holds nothing, and a running task holds all its locks. No limit is exceeded. In the end all tasks ran.
"""

import itertools

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from support.state_machines import DatabaseMachine, run_in_database

from sqlsem.engines.protocol import Capability
from sqlsem.values.locks import Request
from sqlsem.values.tasks import End, NewTask, TaskLock

#: The possible requests: access and limit, by resource.
KINDS = {"mutex": [("write", 1)], "limit": [("write", 2)], "table": [("read", 1), ("write", 1)]}


class Machine(DatabaseMachine):
    wanted = st.dictionaries(st.sampled_from(sorted(KINDS)), st.integers(0, 1), min_size=1)

    @initialize()
    def begin(self):
        self.queue = f"{self.name}-{next(self.examples)}"
        self.uids = itertools.count()
        self.session = self.database.session(grace=0)
        self.me = self.session.register_member("host", 1, "outsider")
        self.workers = [self.join(), self.join()]
        self.held = []  # tickets of the outsider
        self.running = {}  # by task, its worker and attempt
        self.paused = set()
        self.key_limit = None

    def uid(self):
        return f"{self.queue}.{next(self.uids)}"

    def lock(self, kind, which):
        access, limit = KINDS[kind][which % len(KINDS[kind])]
        return TaskLock(f"{self.queue} {kind}", access, limit)

    @rule(
        wanted=wanted,
        order=st.sampled_from([0, 0, 0, 1]),
        key=st.sampled_from([None, None, "a"]),
        maximum=st.integers(1, 3),
    )
    def put(self, wanted, order, key, maximum):
        locks = tuple(self.lock(*item) for item in wanted.items())
        new = NewTask("json", "1", order, 0.0, maximum, 0.0, "continue", key=key, locks=locks)
        self.session.put_tasks(self.queue, self.uid(), [new])

    @rule(kind=st.sampled_from(sorted(KINDS)), which=st.integers(0, 1), wait=st.booleans())
    def take(self, kind, which, wait):
        lock = self.lock(kind, which)
        request = Request(lock.resource, lock.access, lock.limit)
        tickets = self.session.register(self.me, "outsider", "o", self.uid(), [request], not wait)
        self.held += tickets or []

    @rule(data=st.data())
    def give_back(self, data):
        if self.held:
            ticket = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            assert self.session.release(ticket, "released")

    @rule(slot=st.integers(0, 1))
    def claim(self, slot):
        member, session = self.workers[slot]
        claimed = session.claim_blocked(member, self.queue, "w", self.uid(), False, f"worker {member}", "w")
        if claimed is None:
            return
        assert claimed.order == self.lowest
        assert claimed.task_id not in self.running
        keys = {task.task_id: task.key for task in session.list_tasks(self.queue, "running", 1000)}
        if self.key_limit is not None and keys[claimed.task_id] == "a":
            assert list(keys.values()).count("a") <= self.key_limit
        self.running[claimed.task_id] = (slot, claimed.attempt)
        granted = {(entry.resource, entry.position) for entry in session.entries(None) if entry.member_id == member}
        assert {(lock.resource, lock.position) for lock in claimed.locks} <= granted
        assert not self.paused & {lock.resource for lock in claimed.locks}

    @property
    def lowest(self):
        opened = [
            task for task in self.session.list_tasks(self.queue, None, 1000) if task.status in ("pending", "running")
        ]
        return min((open_task.order for open_task in opened), default=None)

    @rule(data=st.data(), outcome=st.sampled_from(["finished", "failed", "returned"]))
    def end(self, data, outcome):
        if self.running:
            number = data.draw(st.sampled_from(sorted(self.running)))
            slot, attempt = self.running.pop(number)
            member, session = self.workers[slot]
            assert session.end_task(member, End(number, attempt, outcome)) is not None

    @rule(slot=st.integers(0, 1))
    def die(self, slot):
        member, session = self.workers[slot]
        session.deregister_member(member)
        session.close()
        lost = [number for number, (worker, _) in self.running.items() if worker == slot]
        assert self.session.recover_tasks(self.queue, None) == len(lost)
        for number in lost:
            del self.running[number]
        self.workers[slot] = self.join()

    @rule(data=st.data(), action=st.sampled_from(["retry", "cancel"]))
    def mend(self, data, action):
        states = {"retry": ("failed", "cancelled"), "cancel": ("pending",)}[action]
        numbers = [task.task_id for task in self.session.list_tasks(self.queue, None, 1000) if task.status in states]
        if numbers:
            assert self.session.set_task(data.draw(st.sampled_from(sorted(numbers))), action) == 0

    @rule(data=st.data())
    def revoke_one_that_waits(self, data):
        positions = [entry.position for entry in self.entries() if (entry.owner or "").startswith("task ")]
        if positions:
            assert self.session.revoke(data.draw(st.sampled_from(positions)), False) == 0

    @rule(kind=st.sampled_from(sorted(KINDS)))
    def pause(self, kind):
        resource = f"{self.queue} {kind}"
        pausing = resource not in self.paused
        self.session.set_resource(resource, "paused", int(pausing))
        (self.paused.add if pausing else self.paused.discard)(resource)

    @rule(limit=st.sampled_from([None, 1]))
    def limit(self, limit):
        self.session.set_queue(self.queue, None, "key_limit", limit)
        self.key_limit = limit

    def entries(self):
        return [entry for entry in self.session.entries(None) if entry.resource.startswith(f"{self.queue} ")]

    @invariant()
    def who_waits_holds_nothing_and_no_lock_is_passed(self):
        inside = {}
        for entry in self.entries():
            if (entry.owner or "").startswith("task "):
                assert entry.state == "waits", entry
            elif entry.state == "holds":
                inside.setdefault(entry.resource, []).append(entry)
        for resource, several in inside.items():
            if not all(holder.access == "read" for holder in several):
                assert len(several) <= (2 if resource.endswith("limit") else 1), several
        tasks = {task.task_id: task for task in self.session.list_tasks(self.queue, None, 1000)}
        assert {number for number, task in tasks.items() if task.status == "running"} == set(self.running)

    def teardown(self):
        if not hasattr(self, "workers"):
            return
        for number, (slot, attempt) in self.running.items():
            member, session = self.workers[slot]
            session.end_task(member, End(number, attempt, "returned"))
        for ticket in self.held:
            self.session.release(ticket, "released")
        for resource in self.paused:
            self.session.set_resource(resource, "paused", 0)
        self.session.set_queue(self.queue, None, "key_limit", None)
        member, session = self.workers[0]
        # A task that gave way to a lower order requests its locks again at the next poll.
        for _ in range(3 * len(self.session.list_tasks(self.queue, "pending", 1000)) + 3):
            claimed = session.claim_blocked(member, self.queue, "w", self.uid(), False, "worker", "w")
            if claimed is not None:
                session.end_task(member, End(claimed.task_id, claimed.attempt, "finished"))
        assert self.session.list_tasks(self.queue, "pending", 1000) == []
        assert self.entries() == []
        for member, session in self.workers:
            session.deregister_member(member)
            session.close()
        self.session.deregister_member(self.me)
        self.session.close()


@pytest.mark.timeout(600)
@pytest.mark.leaves_rows
def test_blocked_tasks_follow_the_model(database, name):
    if not database.make_engine().has(Capability.BLOCKED_TASKS):
        pytest.skip("this engine has no tasks with locks")
    run_in_database(
        Machine, database, name, max_examples=2 if database.engine == "mssql" else 25, stateful_step_count=30
    )


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.leaves_rows
def test_blocked_tasks_follow_the_model_for_long(database, name):
    if not database.make_engine().has(Capability.BLOCKED_TASKS):
        pytest.skip("this engine has no tasks with locks")
    run_in_database(Machine, database, name, max_examples=1500, stateful_step_count=60)
