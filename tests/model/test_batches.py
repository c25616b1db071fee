"""Batches, checked against a model of them: parts are started, succeed, fail, die and are repeated in any order.

Repeating the failed parts of a batch finishes it, and its callback succeeds once.
"""

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from support.state_machines import DatabaseMachine, run_in_database

pytestmark = pytest.mark.engines("sqlite", "postgresql", "mysql")

PARTS = ("a", "b", "c")
WINDOW = 3600.0
LOCAL, NOTHING = ("local", None), (None, None)


@dataclass
class Part:
    status: str = "expected"
    attempt: int = 0
    uid: str | None = None
    member: int | None = None
    is_last: bool = False


@dataclass
class Batch:
    number: int
    parts: dict[str, Part]
    status: str = "open"
    is_over: bool = False  # its window
    kept: bool = False
    callback_status: str = "none"
    callback_attempt: int = 0
    callback_member: int | None = None
    callback_uid: str | None = None
    finished: int = 0  # the number of times that its callback has succeeded

    def close(self) -> None:
        states = {part.status for part in self.parts.values()}
        if self.status == "open" and not states & {"expected", "running"}:
            self.status = "failed" if "failed" in states else "succeeded"


@dataclass
class Model:
    """The expected batches, and the living members."""

    batches: list[Batch] = field(default_factory=list)
    living: set[int] = field(default_factory=set)

    @property
    def newest(self) -> Batch | None:
        return self.batches[-1] if self.batches else None

    def joins(self, name: str, parts: tuple[str, ...]) -> str:
        """Return what a start finds: 'joins', 'new', or why it is refused."""
        newest = self.newest
        if newest is None or newest.status in ("expired", "abandoned"):
            return "new"
        same, part = set(newest.parts) == set(parts), newest.parts.get(name)
        if newest.status == "succeeded":
            runs = newest.callback_status == "running" and newest.callback_member in self.living
            was_last = part is not None and part.is_last and same and not newest.is_over
            return "joins" if was_last and not runs and newest.callback_status not in ("none", "finished") else "new"
        if newest.is_over:
            return "new"
        if not same:
            return "differs"
        assert part is not None
        return "running" if part.status == "running" and part.member in self.living else "joins"


class Machine(DatabaseMachine):
    callbacks = st.sampled_from(["well", "badly", "dies", "goes on"])

    @initialize()
    def begin(self):
        self.of = f"{self.name}-{next(self.examples)}"
        self.model = Model()
        self.uids = itertools.count()
        self.watch = self.database.session(grace=0)
        self.members = [self.join(), self.join()]

    def join(self):
        member, session = super().join()
        self.model.living.add(member)
        return member, session

    def teardown(self):
        if not hasattr(self, "members"):
            return
        for member, session in self.members:
            session.deregister_member(member)
            session.close()
        self.watch.recover_batches(self.of, None)
        self.watch.close()

    def uid(self):
        return f"{self.of}.{next(self.uids)}"

    # -- parts

    @rule(
        slot=st.integers(0, 1),
        part=st.sampled_from(PARTS),
        then=st.sampled_from([LOCAL, LOCAL, NOTHING]),
        again=st.booleans(),
    )
    def start(self, slot, part, then, again):
        self.begin_part(slot, part, PARTS, then, again)

    @rule(slot=st.integers(0, 1), part=st.sampled_from("ab"))
    def start_with_other_parts(self, slot, part):
        self.begin_part(slot, part, ("a", "b"), NOTHING, False)

    def begin_part(self, slot, name, parts, then, again):
        member, session = self.members[slot]
        uid, expected, newest = self.uid(), self.model.joins(name, parts), self.model.newest
        began = session.start_part(member, self.of, name, parts, WINDOW, "me", uid, then)
        if again and began.code == "started":
            assert session.start_part(member, self.of, name, parts, WINDOW, "me", uid, then) == began
        assert began.code == ("started" if expected in ("joins", "new") else expected)
        if began.code != "started":
            return began
        if expected == "new":
            assert newest is None or began.batch_id > newest.number
            expires = newest is not None and newest.status in ("open", "failed")
            assert began.previous == (newest.number if expires else None)
            if expires:
                newest.status = "expired"
            newest = Batch(began.batch_id, {part: Part() for part in parts})
            self.model.batches.append(newest)
        else:
            assert began.batch_id == newest.number
            newest.status, newest.callback_status = "open", "none"
        state = newest.parts[name]
        newest.parts[name] = Part("running", state.attempt + 1, uid, member)
        assert began.attempt == state.attempt + 1
        newest.kept |= then != NOTHING
        return began

    def running(self):
        return [
            (batch, name)
            for batch in self.model.batches
            for name, part in batch.parts.items()
            if part.status == "running" and part.member in self.model.living
        ]

    @rule(data=st.data(), error=st.sampled_from([None, None, "bad"]), then=st.sampled_from([LOCAL, NOTHING]))
    @precondition(lambda self: self.running())
    def end(self, data, error, then):
        model_batch, name = data.draw(st.sampled_from(self.running()))
        self.end_part(model_batch, name, error, then, again=data.draw(st.booleans()))

    def end_part(self, model_batch, name, error, then, *, again=False):
        part = model_batch.parts[name]
        session = dict(self.members)[part.member]
        arguments = (part.member, self.of, name, part.uid, error, "me", then)
        counts = error is not None or (model_batch.status == "open" and not model_batch.is_over)
        ended = session.end_part(*arguments)
        if again:
            assert session.end_part(*arguments) == ended
        part.status = "succeeded" if error is None and counts else "failed"
        model_batch.kept |= then != NOTHING
        was_open = model_batch.status == "open"
        model_batch.close()
        part.is_last = was_open and model_batch.status == "succeeded"
        if part.is_last and model_batch.kept:
            model_batch.callback_status = "pending"
            if then != NOTHING:
                self.take(model_batch, part.member, part.uid)
        assert ended.code == (part.status if counts else "late")
        assert (ended.batch_id, ended.is_last, ended.batch_status) == (
            model_batch.number,
            part.is_last,
            model_batch.status,
        )
        assert (ended.callback is not None) == (part.is_last and model_batch.callback_status == "running")
        return ended

    # -- callbacks

    def take(self, model_batch, member, uid):
        model_batch.callback_status, model_batch.callback_member, model_batch.callback_uid = "running", member, uid
        model_batch.callback_attempt += 1

    @rule(slot=st.integers(0, 1), again=st.booleans())
    def claim(self, slot, again):
        member, session = self.members[slot]
        uid = self.uid()
        claimed = session.claim_callback(member, self.of, None, "me", uid, True)
        if claimed is not None and again:
            assert session.claim_callback(member, self.of, None, "me", uid, True) == claimed
        expected = next((batch for batch in self.model.batches if batch.callback_status == "pending"), None)
        assert (claimed and claimed.batch_id) == (expected and expected.number)
        if expected is not None:
            self.take(expected, member, uid)
            assert claimed.attempt == expected.callback_attempt

    def continuing(self):
        return [
            batch
            for batch in self.model.batches
            if batch.callback_status == "running" and batch.callback_member in self.model.living
        ]

    @rule(data=st.data(), how=st.sampled_from(["well", "badly", "returned"]))
    @precondition(lambda self: self.continuing())
    def end_callback(self, data, how):
        model_batch = data.draw(st.sampled_from(self.continuing()))
        session = dict(self.members)[model_batch.callback_member]
        if how == "returned":
            assert session.return_callback(model_batch.callback_member, model_batch.callback_uid)
            model_batch.callback_status = "pending"
            return
        self.finish_callback(model_batch, "bad" if how == "badly" else None)

    def finish_callback(self, model_batch, error):
        session = dict(self.members)[model_batch.callback_member]
        assert session.end_callback(
            model_batch.callback_member, model_batch.number, model_batch.callback_attempt, error
        )
        model_batch.callback_status = "failed" if error else "finished"
        model_batch.finished += error is None

    # -- failures

    @rule(slot=st.integers(0, 1))
    def die(self, slot):
        member, session = self.members[slot]
        session.deregister_member(member)
        session.close()
        self.model.living.discard(member)
        self.members[slot] = self.join()

    @rule()
    def recover(self):
        recovered = set(self.watch.recover_batches(self.of, None))
        expected = set()
        for batch in self.model.batches:
            for part in batch.parts.values():
                if part.status == "running" and part.member not in self.model.living:
                    part.status = "failed"
                    expected.add(batch.number)
            batch.close()
            if batch.callback_status == "running" and batch.callback_member not in self.model.living:
                batch.callback_status = "pending"
        assert recovered == expected

    @rule()
    @precondition(lambda self: self.model.batches)
    def window_ends(self):
        newest = self.model.newest
        earlier = "opened_at - interval '1 hour'" if self.database.engine == "postgresql" else "opened_at - 3600"
        table = self.database.beside("batch")
        self.database.rows(f"UPDATE {table} SET opened_at = {earlier} WHERE batch_id = ?", newest.number)
        newest.is_over = True

    @rule()
    def abandon(self):
        newest = self.model.newest
        number = self.watch.abandon_batch(self.of, None)
        if newest is not None and (
            newest.status in ("open", "failed")
            or (newest.status == "succeeded" and newest.callback_status in ("pending", "failed"))
        ):
            assert number == newest.number
            newest.status = "abandoned"
            if newest.callback_status == "pending":
                newest.callback_status = "failed"
        else:
            assert number is None

    # -- invariants

    @invariant()
    def the_record_is_the_models(self):
        entries = {batch.batch_id: batch for batch in self.watch.list_batches(self.of, None, 100)}
        assert entries.keys() == {batch.number for batch in self.model.batches}
        for batch in self.model.batches:
            entry = entries[batch.number]
            assert (entry.status, entry.callback_status) == (batch.status, batch.callback_status)
            assert entry.callback_attempt == batch.callback_attempt
            assert {part.part: (part.status, part.attempt, part.is_last) for part in entry.parts} == {
                name: (part.status, part.attempt, part.is_last) for name, part in batch.parts.items()
            }
            assert batch.finished <= 1, "what comes after it has ended well once"
        assert sum(batch.status in ("open", "failed") for batch in self.model.batches) <= 1
        assert all(batch.status not in ("open", "failed") for batch in self.model.batches[:-1])

    @rule(order=st.permutations(PARTS), repeated=st.sets(st.sampled_from(PARTS)), how=callbacks)
    @precondition(lambda self: self.model.batches)
    def repeat_what_failed(self, order, repeated, how):
        """Repeat the parts in any order, as schedulers do; repeat some succeeded parts, too."""
        newest, batches = self.model.newest, len(self.model.batches)
        if newest.status not in ("open", "failed") or newest.is_over:
            return
        for name in order:
            if name not in newest.parts:
                continue
            part = newest.parts[name]
            if part.status == "running" and part.member in self.model.living:
                self.end_part(newest, name, None, LOCAL)
            elif part.status != "succeeded" or (name in repeated and newest.status != "succeeded"):
                self.begin_part(0, name, tuple(newest.parts), LOCAL, False)
                self.end_part(newest, name, None, LOCAL)
        assert len(self.model.batches) == batches, "no other batch has begun"
        assert newest.status == "succeeded"
        assert newest.callback_status == "running"
        self.go_on(newest, how)

    def go_on(self, model_batch, how):
        """Choose the outcome of a callback that has just been started."""
        if how in ("well", "badly"):
            self.finish_callback(model_batch, "bad" if how == "badly" else None)
        elif how == "dies":
            self.die([member for member, _ in self.members].index(model_batch.callback_member))

    @rule(how=callbacks)
    @precondition(lambda self: self.model.batches)
    def repeat_the_last_part(self, how):
        """Repeat the last part: its process failed as the callback did, or died in it."""
        newest, batches = self.model.newest, len(self.model.batches)
        last = next((name for name, part in newest.parts.items() if part.is_last), None)
        dead = newest.callback_member not in self.model.living
        if (
            newest.status != "succeeded"
            or newest.is_over
            or not (newest.callback_status in ("pending", "failed") or (newest.callback_status == "running" and dead))
        ):
            return
        self.begin_part(1, last, tuple(newest.parts), LOCAL, False)
        ended = self.end_part(newest, last, None, LOCAL)
        assert ended.callback is not None
        assert len(self.model.batches) == batches, "no other batch has begun"
        self.go_on(newest, how)


def test_batches_follow_the_model(database, name):
    run_in_database(Machine, database, name, max_examples=60, stateful_step_count=40)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_batches_follow_the_model_for_long(database, name):
    run_in_database(Machine, database, name, max_examples=2000, stateful_step_count=80)
