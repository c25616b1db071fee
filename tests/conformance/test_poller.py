"""Views that stay open poll again and again, on each engine."""

import contextlib
import queue

import pytest
from support import PATIENCE, until

import sqlsem
from sqlsem.insight.consequences import Action
from sqlsem.ops.poller import Poller


class Recorded:
    """A session that records its calls."""

    def __init__(self, session, calls):
        self._session = session
        self._asked = calls

    def __getattr__(self, name):
        self._asked.append(name)
        return getattr(self._session, name)


@pytest.fixture
def live(connect):
    pollers = []

    def live(coordinator=None, every=0.05):
        pollers.append(Poller(coordinator or connect(), every))
        return pollers[-1]

    yield live
    for poller in pollers:
        poller.stop()


def following(poller):
    """Start the poller, and return ``until_seen(condition)``, which waits for a matching snapshot and returns it."""
    received = queue.SimpleQueue()
    poller.start(received.put)

    def until_seen(condition):
        snapshots = []

        def look():
            snapshots.append(received.get(timeout=PATIENCE))
            return condition(snapshots[-1])

        until(look, "what was waited for is seen")
        return snapshots[-1]

    return until_seen


def test_poller_sees_changes(connect, live, name):
    coordinator = connect()
    until_seen = following(live())

    def of(snapshot):
        return (
            []
            if snapshot.overview is None
            else [entry for entry in snapshot.overview.entries if entry.resource == name]
        )

    with coordinator.mutex(name, note="mine"):
        snapshot = until_seen(of)
        assert (of(snapshot)[0].state, of(snapshot)[0].note) == ("holds", "mine")
        assert snapshot.down_since is None
        assert snapshot.rights == {"operate", "retry"}
    until_seen(lambda snapshot: not of(snapshot))


def test_each_poll_runs_a_single_statement(connect, live, monkeypatch):
    coordinator = connect()
    calls, sessions = [], []
    original = coordinator.engine.connect

    def connect_recorded(purpose):
        sessions.append(purpose)
        return Recorded(original(purpose), calls)

    monkeypatch.setattr(coordinator.engine, "connect", connect_recorded)
    watcher = live(coordinator)
    watcher.poll_once()
    assert [call_name for call_name in calls if call_name != "interrupt"] == ["check_schema", "rights", "overview"]
    calls.clear()
    looks = []
    watcher.start(lambda snapshot: looks.append(snapshot))
    until(lambda: len(looks) > 3, "several looks")
    watcher.stop()
    assert set(calls) - {"interrupt", "close"} == {"overview"}
    assert sessions == ["look"]


def test_poller_polls_at_once_on_request(live):
    looks = []
    watcher = live(every=3600)
    watcher.poll_once()
    watcher.start(looks.append)
    until(lambda: len(looks) == 1, "what was seen first is told")
    watcher.poll_now()
    until(lambda: len(looks) == 2, "another look")


@pytest.mark.timing(0.1)
def test_poller_sees_operators_actions(connect, live, name):
    coordinator, other = connect(), connect()
    watcher = live(coordinator)
    watcher.poll_once()
    with pytest.raises(sqlsem.LockLost), other.limit(name, 3) as grant:
        for action, words in (
            (Action("pause", resource=name), "is paused"),
            (Action("resume", resource=name), "goes on"),
            (Action("cap", resource=name, cap=2), "has the limit 2"),
            (Action("uncap", resource=name), "has no operator's limit"),
        ):
            assert words in watcher.perform(action)
        assert all(row.cap is None for row in coordinator.admin.resources() if row.resource == name)
        assert "has been notified" in watcher.perform(Action("revoke", position=grant.position))
        until(lambda: grant.lost, "it hears of that")
    with pytest.raises(sqlsem.LockLost), other.mutex(name) as grant:
        assert "is gone" in watcher.perform(Action("revoke_now", position=grant.position))
        until(lambda: grant.lost, "it hears of that")
        with pytest.raises(sqlsem.NotHeld, match="no row"):
            watcher.perform(Action("revoke", position=grant.position))
    tasks = coordinator.queue(name)
    task_id = tasks.put(sqlsem.Shell("false"))
    coordinator.admin.cancel_task(task_id)
    assert "pending again" in watcher.perform(Action("retry", task_id=task_id))
    coordinator.admin.cancel_task(task_id)


@pytest.mark.engines("sqlite")
def test_poller_reads_a_read_only_file(database, live):
    database.coordinator().admin.entries()
    reader = sqlsem.connect(f"{database.url}?mode=ro")
    with contextlib.closing(reader):
        watcher = live(reader)
        watcher.poll_once()
        assert watcher.snapshot.rights == frozenset()
        with pytest.raises(sqlsem.ConfigurationError, match="can only be read"):
            watcher.perform(Action("pause", resource="x"))


@pytest.mark.engines("sqlite")
def test_permanent_error_is_raised_at_once(tmp_path):
    with sqlsem.connect(f"sqlite:///{tmp_path / 'none.db'}?mode=ro") as coordinator:
        live = Poller(coordinator, 1)
        with pytest.raises(sqlsem.SchemaError, match="is not there"):
            live.poll_once()


@pytest.mark.engines("sqlite")
def test_poller_survives_a_fault_of_its_own(connect, live, monkeypatch, caplog):
    coordinator = connect()
    until_seen = following(live(coordinator))
    until_seen(lambda snapshot: snapshot.overview is not None)
    session_class = type(coordinator.engine.connect("look"))
    with monkeypatch.context() as patch:
        patch.setattr(session_class, "overview", lambda self: 1 / 0)
        snapshot = until_seen(lambda snapshot: snapshot.down_since is not None)
        assert "division by zero" in snapshot.trouble
        assert snapshot.overview is not None, "what was seen last"
    until_seen(lambda snapshot: snapshot.down_since is None)
    assert "this is a fault of sqlsem's" in caplog.text


@pytest.mark.engines("postgresql")
def test_poller_reports_an_outage_and_its_end(own_postgres_server, make_database):
    database = make_database(own_postgres_server)
    with database.coordinator(retry=1) as coordinator:
        live = Poller(coordinator, 0.05)
        until_seen = following(live)
        until_seen(lambda snapshot: snapshot.overview is not None)
        own_postgres_server.stop("immediate")
        first = until_seen(lambda snapshot: snapshot.down_since is not None)
        later = until_seen(lambda snapshot: "Cannot reach" in snapshot.trouble)
        assert later.down_since == first.down_since, "since when it is away, not since the last try"
        assert later.overview is not None
        with pytest.raises(sqlsem.Unavailable):
            live.perform(Action("pause", resource="x"))
        own_postgres_server.start()
        assert until_seen(lambda snapshot: snapshot.down_since is None).trouble == ""
        live.stop()
