"""A worker's outcomes, counts and log agree with the record, whichever calls were cut off."""

import threading
from collections import Counter

import pytest
from support import PATIENCE, until

import sqlsem
from sqlsem.tasks import Json, Worker
from sqlsem.tasks.claiming import Claiming

#: Functions that a running task calls.
meanwhile = []


@pytest.fixture
def queue(connect, name):
    meanwhile.clear()
    return connect().queue(name)


def finish():
    for call in meanwhile:
        call()


def fail():
    finish()
    raise RuntimeError("no")


def put_all(queue):
    """Put a task that finishes, one that fails, and one that fails twice."""
    queue.put(finish)
    queue.put(fail, on_failure="continue")
    queue.put(fail, max_attempts=2, backoff=0, on_failure="continue")


class PublishedOutcomes:
    """The events that a worker publishes by `on_task`."""

    def __init__(self, queue, **options):
        self.outcomes = Counter()
        self.worker = Worker(queue, on_task=self, idle_exit=0.5, outlast=True, **options)

    def __call__(self, task, outcome, error):
        if outcome is not None:
            self.outcomes[task.id, task.attempt, outcome] += 1


def check(queue, reports):
    """Check that published and recorded outcomes are the same, except for tasks returned before they began."""
    recorded = Counter(
        (run.task_id, run.attempt, run.outcome)
        for task in queue.tasks()
        for run in queue.log(task.task_id)
        if run.outcome != "returned"
    )
    assert reports.outcomes == recorded
    status = Counter(task.status for task in queue.tasks())
    assert (reports.worker.finished, reports.worker.failed) == (status["finished"], status["failed"])
    assert (
        reports.worker.retried == sum(outcome == "failed" for _, _, outcome in recorded.elements()) - status["failed"]
    )


def thought_lost(queue, monkeypatch):
    """Mark all claims lost in this process, as after an outage; the database still has them."""
    meanwhile.append(lambda: queue.claiming.client.mark_lost(None, "nothing was heard"))


def away(queue, monkeypatch):
    """Let the first call that ends tasks not reach the database."""
    ends_once(monkeypatch, lambda call: None)


def answer_lost(queue, monkeypatch):
    """Let the first call that ends tasks reach the database, but lose its answer."""
    ends_once(monkeypatch, lambda call: call())


def answer_lost_and_thought_lost(queue, monkeypatch):
    def cut(call):
        call()
        queue.claiming.client.mark_lost(None, "nothing was heard")

    ends_once(monkeypatch, cut)


def away_and_thought_lost(queue, monkeypatch):
    ends_once(monkeypatch, lambda call: queue.claiming.client.mark_lost(None, "nothing was heard"))


def asked_as_another_member(queue, monkeypatch):
    """Make `next_tasks` report no results, so that only the log of attempts knows those of an earlier call."""
    answer_lost(queue, monkeypatch)
    kind = type(queue.claiming.client.member.call("look", lambda session, _: session))
    plain = kind.next_tasks

    def next_tasks(self, member, ends, *arguments):
        statuses, claimed = plain(self, member, ends, *arguments)
        return [None] * len(statuses), claimed

    monkeypatch.setattr(kind, "next_tasks", next_tasks)


def ends_once(monkeypatch, cut):
    """Cut the first call that ends each task."""
    plain, sent = Claiming.end_and_claim, set()

    def end_and_claim(self, ends, maximum, **options):
        new = {(end.task_id, end.attempt) for end in ends} - sent
        sent.update(new)
        if new:
            cut(lambda: plain(self, ends, 0, **options))
            raise sqlsem.Unavailable("out of reach")
        return plain(self, ends, maximum, **options)

    monkeypatch.setattr(Claiming, "end_and_claim", end_and_claim)


FAULTS = [
    *(thought_lost, away, answer_lost, answer_lost_and_thought_lost, away_and_thought_lost, asked_as_another_member),
]


@pytest.mark.kept
@pytest.mark.timing(0.1)
@pytest.mark.parametrize("group", [True, False])
@pytest.mark.parametrize("fault", [None, *FAULTS], ids=lambda value: "nothing" if value is None else value.__name__)
def test_worker_tells_outcomes_as_recorded(queue, monkeypatch, caplog, fault, group):
    put_all(queue)
    if fault is not None:
        fault(queue, monkeypatch)
    reports = PublishedOutcomes(queue, group=group)
    reports.worker.run()
    monkeypatch.undo()
    check(queue, reports)
    assert "somebody else" not in caplog.text
    assert Counter(task.status for task in queue.tasks()) == {"finished": 1, "failed": 2}


def test_worker_tells_a_claim_taken_away_as_lost(database, queue, caplog):
    """A task whose claim was taken away while it ran is reported as lost."""
    number = queue.put(finish)
    table = database.beside("task")
    claim_taken = threading.Event()

    def take():
        if not claim_taken.is_set():
            claim_taken.set()
            database.rows(f"UPDATE {table} SET status = 'pending', member_id = NULL WHERE task_id = ?", number)

    meanwhile.append(take)
    reports = PublishedOutcomes(queue)
    reports.worker.run()
    assert reports.outcomes == {(number, 1, "lost"): 1, (number, 2, "finished"): 1}
    assert (reports.worker.finished, reports.worker.failed) == (1, 0)
    assert f"The claim of task {number} was lost" in caplog.text


def test_worker_warns_of_ends_that_are_not_recorded(queue, monkeypatch, caplog):
    """A worker that stops without the database warns of results that are not recorded."""
    number = queue.put(finish)

    def cut(call):
        queue.claiming.client.engine.open_session = lambda purpose: (_ for _ in ()).throw(
            sqlsem.engines.base.Disconnected("cut")
        )
        for session in [queue.claiming.client.member.main.session]:
            session.interrupt()
            session.close()
        reports.worker.stop()

    reports = PublishedOutcomes(queue)
    plain = queue.claiming.end_and_claim

    def end_and_claim(ends, maximum, **options):
        if ends:
            cut(None)
            raise sqlsem.Unavailable("out of reach")
        return plain(ends, maximum, **options)

    monkeypatch.setattr(queue.claiming, "end_and_claim", end_and_claim)
    monkeypatch.setattr(queue.claiming.client.member, "defer", lambda call: None)
    reports.worker.run()
    assert reports.worker.finished == 0
    assert f"Task {number} has finished, which is not recorded yet" in caplog.text


def test_task_ends_well_when_its_end_is_recorded(queue):
    """A claim is thought lost while its end is under way: the recorded end counts."""
    number = queue.put(Json("x"))
    task = queue.try_claim()
    plain = type(queue.claiming.client.member).call

    def call(self, call_name, *arguments, **options):
        result = plain(self, call_name, *arguments, **options)
        if call_name == "end of a task":
            task.lose("nothing was heard")
        return result

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(queue.claiming.client.member), "call", call)
        with task:
            pass
    until(lambda: queue.tasks("finished"), timeout=PATIENCE)
    assert [run.outcome for run in queue.log(number)] == ["finished"]
