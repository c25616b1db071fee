"""Run work queues, priorities, leaders and once a period in virtual time: the search finds nothing, except for seeded
bugs.
"""

import pytest
from support.searches import found

from sqlsem.api import leader as leaders
from sqlsem.client.operations.release_on_commit import ReleaseOnCommit
from sqlsem.engines.statements.all import AllStatements
from sqlsem.engines.statements.priorities import PriorityStatements
from sqlsem.engines.statements.tasks import TaskStatements
from sqlsem.testing import simulate as simulation
from sqlsem.testing.simulate import FAULTS, departing, leading, periodic, queued, ranked, simulate

KINDS = {
    "departing": {"program": departing, "database": "sqlite", "schedules": 25},
    "queued": {"program": queued, "database": "sqlite", "schedules": 25},
    "queued, leases": {"program": queued, "database": "sqlite", "lease": 6.0, "schedules": 8},
    "ranked": {"program": ranked, "database": "sqlite", "schedules": 8},
    "periodic": {"program": periodic, "database": "sqlite", "schedules": 25},
    "queued, in memory": {"program": queued, "schedules": 40},
    # (A request that comes after the clock was set back has a better rank.)
    "ranked, in memory": {"program": ranked, "schedules": 20, "faults": [name for name in FAULTS if name != "clock"]},
    "periodic, in memory": {"program": periodic, "schedules": 40},
    "leading": {"program": leading, "schedules": 40},
    "leading, leases": {"program": leading, "lease": 6.0, "schedules": 20},
    "leading, on a file": {"program": leading, "database": "sqlite", "schedules": 8},
}
BUGS = {}


def bug(program, database="sqlite", **options):
    def note(put_in):
        BUGS[put_in.__name__] = (put_in, {"program": program, "database": database, **options})
        return put_in

    return note


@pytest.fixture(autouse=True)
def little_shortened(monkeypatch):
    monkeypatch.setattr(simulation, "SHORTEN_SECONDS", 2.0)


@pytest.mark.parametrize("kind", KINDS)
def test_search_finds_nothing(kind):
    simulate(**KINDS[kind], seconds=6)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_long_search_finds_nothing(kind):
    print(simulate(**{**KINDS[kind], "schedules": 10**9}, seconds=240, seed=10**6))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("program", [departing, queued, ranked, periodic, leading], ids=lambda value: value.__name__)
def test_search_finds_nothing_on_postgresql(program, postgres_server):
    print(simulate(program, database=postgres_server.url(), schedules=10**9, seconds=240, seed=10**6))


# -- seeded bugs -----------------------------------------------------------------------------------------------------


@bug(queued)
def claimed_by_the_first_look(patch):
    """Claim the task that was pending before the transaction. (Also proof/mutants/sqlite-claimed-by-a-look.patch.)"""
    real = TaskStatements.claim_task

    def claim_task(self, member_id, queue, owner, uid, again):
        task = None if again else self.next_pending(queue, start=True)
        with pytest.MonkeyPatch.context() as patching:
            if task is not None:
                patching.setattr(self, "next_pending", lambda queue, start=False: task)
            return real(self, member_id, queue, owner, uid, again)

    patch.setattr(TaskStatements, "claim_task", claim_task)


@bug(ranked)
def overtakes_who_holds(patch):
    """Grant the first of the queue beside a holder."""
    real = PriorityStatements.acquire_by_priority

    def acquire_by_priority(self, *arguments):
        come = type("Come", (), {"come": True, "until": None, "blocker": None})()
        with pytest.MonkeyPatch.context() as patching:
            patching.setattr(self, "admission", lambda request, position: come)
            return real(self, *arguments)

    patch.setattr(PriorityStatements, "acquire_by_priority", acquire_by_priority)


@bug(ranked)
def overtakes_who_waits(patch):
    """Let a new request ignore the queue before it."""
    patch.setattr(PriorityStatements, "_before", lambda self, request, own: None)


@bug(periodic)
def asked_once(patch):
    """Let a run that waited for another run not check again whether it is done."""
    real = AllStatements.once_due
    patch.setattr(
        AllStatements,
        "once_due",
        lambda self, name, ticket, *rest: True if ticket is not None else real(self, name, ticket, *rest),
    )


@bug(leading, database="memory")
def given_back_first(patch):
    """Start the next term before on_stopped of the last one has returned."""
    real = leaders._leave

    def leave(term, lock, exc):
        if term._may_release():
            lock.__exit__(None, None, None)
        real(term, lock, exc)

    patch.setattr(leaders, "_leave", leave)


@bug(departing)
def given_back_before_the_commit(patch):
    """Count the commit marker as soon as it is written. (Also proof/mutants/python-gone-before-the-commit.patch.)"""
    patch.setattr(ReleaseOnCommit, "_is_committed", lambda self: True)


@bug(departing)
def word_of_a_savepoint(patch):
    """Check only the last commit marker. (Also proof/mutants/python-word-of-a-savepoint.patch.)"""

    def also(self, word):
        self._words.clear()
        self._words.append(word)

    patch.setattr(ReleaseOnCommit, "add_marker", also)


#: The other searches take long.
SHORT = ("given_back_before_the_commit", "word_of_a_savepoint", "claimed_by_the_first_look", "given_back_first")


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.soak) for name in BUGS]
)
def test_search_finds_a_seeded_bug(name):
    put_in, options = BUGS[name]
    found(put_in, **options)
