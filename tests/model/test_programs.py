"""Random programs of the public API: on every engine each call must have the outcome that the model expects.

A program is a sequence of steps of four threads, two of each of two coordinators. A step ends, raises, or waits until a
later step lets it go on; the queue shows which. After each step the whole queue is compared, too. Only the model
decides what must happen, so where two engines differ, at least one of them fails.

A failure prints the seed, and a shorter program that fails as well. ``SQLSEM_TEST_SEED=N ./test.sh -m soak
tests/model/test_programs.py`` runs one seed again.
"""

import itertools
import os
import random
import time
from concurrent import futures
from typing import NamedTuple

import pytest
from support.patience import PATIENCE
from support.programs import LOST, NO_FEATURE, WAITS, Acquisition, Model, Pending, Request

import sqlsem

ACTORS = 4
PRIORITIZED = "p"
HOWS = ["try", "zero", "wait", "wait", "wait", "block", "block that waits"]


class Spec(NamedTuple):
    """A lock that a program makes."""

    resource: str
    kind: str
    limit: int | None
    weight: int
    order: int
    priority: int | None
    reentrant: bool

    def request(self, name):
        resource = f"{name}-{self.resource}"
        if self.kind in ("read", "stage"):
            return Request(resource, "read" if self.kind == "read" else f"stage:{self.order}", 1, 1, self.priority)
        if self.kind == "limit":
            return Request(resource, "write", self.limit, self.weight, self.priority)
        return Request(resource, "write", 1, 1, self.priority)

    def make(self, coordinator, name, **options):
        resource = f"{name}-{self.resource}"
        if self.priority is not None:
            options["priority"] = self.priority
        if self.reentrant:
            options["reentrant"] = True
        if self.kind == "limit":
            arguments = () if self.limit is None else (self.limit,)
            return coordinator.limit(resource, *arguments, weight=self.weight, **options)
        if self.kind == "stage":
            return coordinator.stage(resource, self.order, **options)
        return getattr(coordinator, self.kind)(resource, **options)


class Bench:
    """The coordinators and threads of the programs on one database."""

    def __init__(self, database):
        self.database = database
        self.open()

    def open(self):
        options = {"grace": PATIENCE, "retry": PATIENCE}
        self.coordinators = [self.database.coordinator(**options) for _ in range(3)]
        self.operator = self.coordinators[-1].admin
        self.session = self.database.session()  # reads the queue (`Admin.entries` connects anew each time)
        self.threads = [futures.ThreadPoolExecutor(1, f"actor-{number}") for number in range(ACTORS)]

    def coordinator(self, actor):
        return self.coordinators[actor // 2]

    def close(self):
        for coordinator in self.coordinators:  # (calls that wait end with an error)
            coordinator.close()
        self.session.close()
        for thread in self.threads:
            thread.shutdown(wait=False)

    def renew(self):
        self.close()
        self.open()


def outcome_of(call):
    """Return the outcome of a call: its result, or the class and code of its error."""
    try:
        return call()
    except sqlsem.SqlsemError as exc:
        return type(exc).__name__, exc.code


def shown_queue(entries):
    """Return the queue of each resource, as an operator sees it."""
    queues = {}
    for entry in sorted(entries, key=lambda entry: entry.position):
        name = entry.resource
        if name.startswith("priority:"):
            queues.setdefault(name, set()).add(entry.note)
        else:
            row = (entry.note, entry.access, entry.limit, entry.weight, entry.state)
            queues.setdefault(name, []).append(row)
    return queues


class Run:
    """One run of a program. Each kind of step is a method; a step that cannot be made now does nothing."""

    def __init__(self, bench, prefix):
        self.bench, self.prefix = bench, prefix
        self.notes = itertools.count(1)
        self.model = Model(complete=bench.database.engine != "memory", prioritized=f"{prefix}-{PRIORITIZED}")
        bench.operator.set_priorities(self.model.prioritized, "1h")
        self.live, self.ended, self.tokens = [], [], []

    # -- steps

    def idle(self, actor):
        return all(waiter.actor != actor for waiter in self.model.pending)

    def entries(self):
        return [entry for entry in self.bench.session.entries(None) if self.prefix in entry.resource.split(":")[-1]]

    def waits(self, note):
        """True if the queue shows that the call with this note waits."""
        return any(
            entry.note == note
            and (entry.state == "waits" or entry.access == "upgrade" or entry.resource.startswith("priority:"))
            for entry in self.entries()
        )

    def observe(self, actor, call, note):
        """Start a call in the thread of an actor; return the call, and its outcome so far."""
        future = self.bench.threads[actor].submit(outcome_of, call)
        deadline = time.monotonic() + PATIENCE
        while not future.done():
            if note is not None and self.waits(note):
                return future, WAITS
            assert time.monotonic() < deadline, "the call neither ends nor waits in the queue"
            futures.wait([future], 0.005)
        return future, future.result()

    def run_in(self, actor, call):
        return self.observe(actor, call, None)[1]

    def settle(self):
        """Wait for all calls that end now, and compare the queue with the model's."""
        for waiter, hold in self.model.settle():
            is_upgrade = waiter.hold is not None
            outcome = waiter.call.result(PATIENCE)
            assert outcome == (None if is_upgrade else True), (waiter, outcome)
            if not is_upgrade:
                self.keep(hold, waiter.acquisition)
        deadline = time.monotonic() + PATIENCE
        while True:
            entries = self.entries()
            shown, expected = shown_queue(entries), self.expected_queue(entries)
            if shown == expected:
                break
            assert time.monotonic() < deadline, f"the queue is\n{shown}\nand not\n{expected}"
            time.sleep(0.005)
        assert not any(waiter.call.done() for waiter in self.model.pending), "a call has ended that should wait"

    def expected_queue(self, entries):
        """Return the same as the model has it. Rows that may be granted or not are as the database has them."""
        granted = {(entry.note, entry.resource) for entry in entries if entry.state == "holds"}
        for waiter in self.model.pending:
            for row in waiter.rows if len(waiter.rows) > 1 else ():
                if (row.note, row.request.resource) in granted and self.model.fits(row.request, row):
                    row.granted = True
        queues = {}
        for row in self.model.rows:
            state = "holds" if row.granted else "waits"
            shown = (row.note, row.access, row.request.limit, row.request.weight, state)
            queues.setdefault(row.request.resource, []).append(shown)
        for waiter in self.model.pending:
            if waiter.rank is not None:
                queues.setdefault(f"priority:{waiter.rows[0].request.resource}", set()).add(waiter.note)
        return queues

    def keep(self, hold, acquisition):
        acquisition.hold = hold
        hold.tokens.append(acquisition)
        self.live.append(acquisition)

    # -- acquire

    def acquire(self, actor, spec, how):
        self.acquire_all(actor, [spec], how, spec.reentrant)

    def acquire_two(self, actor, one, other, how):
        if {one.resource, other.resource} == {"a", "b"} and one.priority is other.priority is None:
            self.acquire_all(actor, [one, other], how, False)

    def acquire_all(self, actor, specs, how, reentrant):
        if not self.idle(actor):
            return
        requests = [spec.request(self.prefix) for spec in specs]
        waits = "wait" in how
        expected = self.model.outcome(actor, requests, reentrant, waits)
        if expected == WAITS and self.model.keeps(actor):  # else there might be a deadlock
            how, waits = "try" if how == "wait" else "block", False
            expected = self.model.outcome(actor, requests, reentrant, waits)
        note = f"{next(self.notes)}"
        coordinator, is_block = self.bench.coordinator(actor), how.startswith("block")
        options = {"timeout": 0} if how == "block" else {}
        if len(specs) == 1:
            lock = specs[0].make(coordinator, self.prefix, note=note, **options)
        else:
            lock = coordinator.all_of(*(spec.make(coordinator, self.prefix, note=note) for spec in specs), **options)
        acquisition = Acquisition(None, is_block, lock)

        def call():
            if is_block:
                acquisition.grant = lock.__enter__()
                return True
            arguments = {"try": {"blocking": False}, "zero": {"timeout": 0}, "wait": {"timeout": None}}[how]
            granted = lock.acquire(**arguments)
            acquisition.grant = lock.grant if granted else None
            return granted

        future, outcome = self.observe(actor, call, note)
        if is_block and expected is False:
            expected = ("Timeout", "timeout")
        assert outcome == expected, f"{outcome}, and not {expected}"
        unowned = len(specs) == 1 and specs[0].kind == "limit" and not reentrant and not is_block
        if outcome is True:
            self.keep(self.model.acquire(actor, requests, note, reentrant, unowned), acquisition)
        elif outcome == WAITS:
            waiter = self.model.wait(actor, requests, note, unowned)
            waiter.call, waiter.acquisition = future, acquisition

    def locked(self, actor, spec):
        request = spec.request(self.prefix)
        if self.idle(actor) and spec.resource != PRIORITIZED and spec.limit is not None:
            lock = spec.make(self.bench.coordinator(actor), self.prefix)
            assert self.run_in(actor, lock.locked) is not self.model.fits(request)

    # -- grants

    def pick(self, number, acquisitions):
        """Return an acquisition whose thread does not wait."""
        able = [acquisition for acquisition in acquisitions if self.idle(acquisition.hold.actor)]
        return able[number % len(able)] if able else None

    def release(self, number):
        acquisition = self.pick(number, self.live)
        if acquisition is not None:
            self.leave(acquisition)

    def leave(self, acquisition):
        """End an acquisition by its lock, its block, or its grant if it was adopted."""
        lock, block = acquisition.lock, acquisition.block
        expected = self.model.end(acquisition, any_token=lock is None)
        call = acquisition.grant.release if lock is None else lock.release
        if block:
            call = lambda: lock.__exit__(None, None, None)  # noqa: E731
        outcome = self.run_in(acquisition.hold.actor, call)
        assert outcome == expected, f"{outcome}, and not {expected}"
        hold = acquisition.hold
        # (The grant of an adoption ends the latest acquisition, which may be another one.)
        if lock is not None or acquisition not in hold.tokens or hold.state == "handed over":
            self.live.remove(acquisition)
            self.ended.append(acquisition)

    def release_grant(self, number):
        """Release by the grant, in its thread."""
        acquisition = self.pick(number, [*self.live, *self.ended[-2:]])
        if acquisition is not None:
            expected = self.model.end(acquisition, any_token=True)
            outcome = self.run_in(acquisition.hold.actor, acquisition.grant.release)
            assert outcome == expected, f"{outcome}, and not {expected}"

    def release_elsewhere(self, number, actor, by_grant):
        """Release in another thread, by the lock or the grant."""
        acquisition = self.pick(number, self.live)
        if acquisition is None or not self.idle(actor) or acquisition.lock is None or acquisition.block:
            return
        hold = acquisition.hold
        if actor == hold.actor or len(hold.tokens) != 1 or acquisition not in hold.tokens or hold.state != "held":
            return
        expected = self.model.end(acquisition) if by_grant or hold.unowned else ("NotHeld", "not-held")
        outcome = self.run_in(actor, acquisition.grant.release if by_grant else acquisition.lock.release)
        assert outcome == expected, f"{outcome}, and not {expected}"

    def check(self, number):
        acquisition = self.pick(number, [*self.live, *self.ended[-2:]])
        if acquisition is not None:
            assert self.run_in(acquisition.hold.actor, acquisition.grant.check) == acquisition.hold.refusal

    def upgrade(self, number, waits):
        acquisition = self.pick(number, [*self.live, *self.ended[-1:]])
        if acquisition is None or self.model.unsettled(acquisition.hold.rows[0].request.resource):
            return
        hold, grant = acquisition.hold, acquisition.grant
        row = hold.rows[0]
        # A reader that waits may wait for what it holds itself, and one that cannot begin is not seen in the queue.
        waits = waits and self.model.keeps(hold.actor) == [hold] and row.request.priority is None
        waits = waits and not (row in self.model.rows and self.model.free_readers(row))
        expected = self.model.upgrade(hold, waits)
        call = lambda: grant.upgrade(timeout=None if waits else 0)  # noqa: E731
        future, outcome = self.observe(hold.actor, call, row.note if waits else None)
        assert outcome == expected, f"{outcome}, and not {expected}"
        if outcome == WAITS:
            row.access = "upgrade"
            self.model.pending.append(Pending(hold.actor, row.note, [], hold, call=future))

    def downgrade(self, number):
        acquisition = self.pick(number, [*self.live, *self.ended[-1:]])
        if acquisition is not None:
            expected = self.model.downgrade(acquisition.hold)
            outcome = self.run_in(acquisition.hold.actor, acquisition.grant.downgrade)
            assert outcome == expected, f"{outcome}, and not {expected}"

    def hand_over(self, number):
        acquisition = self.pick(number, [*self.live, *self.ended[-1:]])
        if acquisition is not None:
            hold = acquisition.hold
            expected = self.model.hand_over(hold)
            outcome = self.run_in(hold.actor, acquisition.grant.hand_over)
            if isinstance(outcome, str):
                self.tokens.append((outcome, hold))
                outcome = None
            assert outcome == expected, f"{outcome}, and not {expected}"

    def adopt(self, number, actor):
        if self.tokens and self.idle(actor):
            self.adopt_one(*self.tokens[number % len(self.tokens)], actor)

    def adopt_one(self, token, hold, actor):
        """Adopt a token. The grant of its former holder stays as it is; the rows get a new one."""
        acquisition = Acquisition(None)

        def call():
            acquisition.grant = self.bench.coordinator(actor).adopt(token)
            return True

        outcome = self.run_in(actor, call)
        is_free = hold in self.model.holds and all(row in self.model.rows for row in hold.rows)
        expected = True if is_free else ("NotHeld", "handover")
        assert outcome == expected, f"{outcome}, and not {expected}"
        if is_free:
            self.model.holds.remove(hold)
            adopted = type(hold)(actor, hold.rows)
            self.model.holds.append(adopted)
            self.keep(adopted, acquisition)

    # -- operators

    def pause(self, resource, paused):
        full = f"{self.prefix}-{resource}"
        if not self.model.unsettled(full):
            (self.bench.operator.pause if paused else self.bench.operator.resume)(full)
            (self.model.paused.add if paused else self.model.paused.discard)(full)

    def set_limit(self, resource, limit):
        full = f"{self.prefix}-{resource}"
        if not any(self.model.unsettled(f"{self.prefix}-{each}") for each in "ab"):
            expected = self.model.set_limit(full, limit)
            outcome = outcome_of(lambda: self.bench.operator.set_limit(full, limit))
            assert outcome == expected, f"{outcome}, and not {expected}"

    def revoke(self, number):
        """Revoke a grant, a request that waits, or a lock that is handed over."""
        rows = [row for row in self.model.rows if not any(row in group.rows for group in self.groups())]
        if not rows:
            return
        self.revoke_row(rows[number % len(rows)])

    def revoke_row(self, row):
        position = next(
            entry.position
            for entry in self.entries()
            if (entry.note, entry.resource) == (row.note, row.request.resource)
        )
        outcome = outcome_of(lambda: self.bench.operator.revoke(position, force=True))
        assert outcome == (True if self.model.complete else NO_FEATURE), outcome
        if outcome is True:
            self.lose(row)

    def groups(self):
        return [waiter for waiter in self.model.pending if len(waiter.rows) > 1]

    def lose(self, row):
        """Wait until the owner of a revoked row knows of its loss."""
        self.model.rows.remove(row)
        for waiter in list(self.model.pending):
            if row in waiter.rows or (waiter.hold is not None and row in waiter.hold.rows):
                self.model.pending.remove(waiter)
                assert waiter.call.result(PATIENCE) == LOST
        for hold in list(self.model.holds):
            if row in hold.rows and hold.state == "held":
                hold.state = "lost"
                assert outcome_of(hold.tokens[-1].grant.check) == LOST
            elif row in hold.rows and hold.state == "handed over" and len(hold.rows) == 1:
                self.model.holds.remove(hold)

    # -- end

    def end_all(self):
        """Let all calls end, and release everything: no row may be left."""
        operator = self.bench.operator
        for resource in list(self.model.paused):
            operator.resume(resource)
        self.model.paused.clear()
        for resource in self.model.caps:
            operator.set_limit(resource, 99)
            self.model.caps[resource] = 99
        self.settle()
        rounds = itertools.count()
        while self.model.rows or self.model.pending:
            assert next(rounds) < 50, f"still there: {self.model.rows}, {self.model.pending}"
            for row in [row for hold in self.model.holds if hold.state == "handed over" for row in hold.rows]:
                if row in self.model.rows:
                    self.revoke_row(row)
            for acquisition in [each for each in self.live if self.idle(each.hold.actor)]:
                self.leave(acquisition)
            self.settle()
        for resource in self.model.caps:
            operator.set_limit(resource, None)
        operator.set_priorities(self.model.prioritized, None)
        assert self.entries() == []


#: How often a program has each kind of step.
WEIGHTS = {
    **{"acquire": 14, "acquire_two": 4, "release": 7, "release_grant": 1, "release_elsewhere": 1, "locked": 1},
    **{"check": 1, "upgrade": 4, "downgrade": 2, "hand_over": 2, "adopt": 2, "pause": 2, "set_limit": 2, "revoke": 1},
}


def random_spec(chance):
    """Return a lock that a program may make: most of them on one resource."""
    resource = chance.choice("aaabbp")
    limit = chance.choice([1, 2, 3, 3, 4, None if resource != PRIORITIZED else 2])
    return Spec(
        resource,
        chance.choice(["mutex", "limit", "limit", "limit", "read", "read", "read", "write", "stage"]),
        limit,
        min(chance.choice([1, 1, 2, 3]), limit or 3),
        chance.randint(1, 2),
        chance.choice([0, 3, 7, 7, None] if resource == PRIORITIZED else [None] * 20 + [3]),
        chance.random() < 0.3,
    )


def random_step(chance):
    """Return a step: the name of a method of `Run`, and its arguments."""
    kind = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    number, actor, coin = chance.randrange(60), chance.randrange(ACTORS), chance.random() < 0.5
    arguments = {
        "acquire": (actor, random_spec(chance), chance.choice(HOWS)),
        "acquire_two": (actor, random_spec(chance), random_spec(chance), chance.choice(HOWS)),
        "release_elsewhere": (number, actor, coin),
        "locked": (actor, random_spec(chance)),
        "upgrade": (number, coin),
        "adopt": (number, actor),
        "pause": (chance.choice("abp"), chance.random() < 0.4),
        "set_limit": (chance.choice("aabp*"), chance.choice([None, 1, 2, 3, 4])),
    }
    return (kind, *arguments.get(kind, (number,)))


def run_program(bench, prefix, program):
    """Run a program, end all that it has begun, and check that nothing is left."""
    try:
        run = Run(bench, prefix)
        for name, *arguments in program:
            getattr(run, name)(*arguments)
            run.settle()
        run.end_all()
    except BaseException:
        bench.renew()  # its threads may wait for ever
        raise


def shrunk(fails, program):
    """Return a program without steps that its failure does not need: parts are left out, each half as long."""
    size = len(program) // 2
    while size:
        begin = 0
        while begin < len(program):
            shorter = program[:begin] + program[begin + size :]
            if fails(shorter):
                program = shorter
            else:
                begin += size
        size //= 2
    return program


def run_seeds(bench, name, seeds, steps):
    """Run the program of each seed. After a failure show the seed and a shorter program that fails, too."""
    numbers = itertools.count(1)

    def failure(program):
        try:
            run_program(bench, f"{name}-{next(numbers)}", program)
        except Exception as exc:
            return exc
        return None

    for seed in seeds:
        chance = random.Random(seed)
        program = [random_step(chance) for _ in range(steps)]
        if failure(program) is not None:
            program = shrunk(failure, program)
            listed = "\n".join(f"    {step!r}," for step in program)
            print(f"The program of SQLSEM_TEST_SEED={seed} fails; so do these steps:\n[\n{listed}\n]")
            run_program(bench, f"{name}-{next(numbers)}", program)
            pytest.fail("this failure does not happen each time")


@pytest.fixture
def bench(database, timing):
    timing(0.05)
    bench = Bench(database)
    yield bench
    bench.close()


#: The programs of the default run: more of them where a step is fast.
SEEDS = {"memory": 40, "sqlite": 12, "postgresql": 6, "mysql": 4, "mssql": 4}
#: The steps of a program.
LENGTH = 60


@pytest.mark.kept
@pytest.mark.locks
@pytest.mark.leaves_rows
def test_random_programs_have_the_models_outcomes(bench, name):
    run_seeds(bench, name, range(SEEDS[bench.database.engine]), LENGTH)


@pytest.mark.soak
@pytest.mark.locks
@pytest.mark.leaves_rows
@pytest.mark.timeout(7200)
def test_many_random_programs_have_the_models_outcomes(bench, name):
    seed = os.environ.get("SQLSEM_TEST_SEED")
    seeds = [int(seed)] if seed else random.sample(range(10**9), 50 * SEEDS[bench.database.engine])
    run_seeds(bench, name, seeds, LENGTH)
