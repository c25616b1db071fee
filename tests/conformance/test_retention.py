"""The retention of the history: by days, and by rows."""

import pytest
from support import until


@pytest.fixture
def setting(database):
    """Return a function that changes a setting; the test's end restores all settings."""
    before = dict(database.rows(f"SELECT name, value FROM {database.beside('setting')}"))

    def change(name, value):
        database.rows(f"UPDATE {database.beside('setting')} SET value = ? WHERE name = '{name}'", value)

    yield change
    for name, value in before.items():
        change(name, value)


def positions(database):
    rows = database.rows(f"SELECT queue_position FROM {database.beside('history')} ORDER BY queue_position")
    return [row[0] for row in rows]


def prune_all(session):
    while session.prune(7):
        pass


def test_the_newest_rows_are_kept(database, connect, name, setting):
    lock = connect().mutex(name)
    done = []
    for _ in range(40):
        with lock as grant:
            done.append(grant.position)
    setting("history_rows", "10")
    session = database.session()
    assert session.prune(7) == 7
    prune_all(session)
    session.close()
    assert positions(database) == done[-10:]


def test_short_recent_history_is_kept(database, connect, name, setting):
    lock = connect().mutex(name)
    for _ in range(5):
        with lock:
            pass
    before = positions(database)
    setting("history_rows", str(max(before) - min(before) + 1))
    session = database.session()
    assert session.prune(1000) == 0
    session.close()
    assert positions(database) == before


def test_old_rows_go_however_few_they_are(database, connect, name, setting):
    lock = connect().mutex(name)
    for _ in range(5):
        with lock:
            pass
    setting("history_days", "-1")  # prunes all rows that ended before tomorrow
    session = database.session()
    prune_all(session)
    session.close()
    assert positions(database) == []


def test_large_history_is_pruned_by_heartbeats(database, connect, name, setting):
    """Heartbeats prune the history without any call by the program."""
    setting("history_rows", "100")
    lock = connect(grace=1.0).mutex(name)

    def few():
        for _ in range(50):
            with lock:
                pass
        return len(positions(database)) <= 200 and max(positions(database)) > 800

    for _ in range(20):
        few()
    until(few, "history of about a hundred rows")
