"""Operators' actions are recorded in the transaction that performs them."""

import os

import pytest
from support import Attempt, until

import sqlsem

pytestmark = pytest.mark.engines("sqlite", "postgresql", "mssql")


@pytest.fixture
def operator(connect):
    return connect()


def done(operator, name, **filters):
    return [
        (operation.action, operation.old, operation.new)
        for operation in reversed(operator.admin.operations(name, **filters))
    ]


def test_settings(operator, name):
    operator.admin.set_limit(name, 3)
    operator.admin.set_limit(name, 3)  # changes nothing, so no operation is recorded
    operator.admin.set_limit(name, 1)
    operator.admin.pause(name)
    operator.admin.pause(name)
    operator.admin.set_stale_after(name, 90)
    operator.admin.resume(name)
    operator.admin.resume(name)
    operator.admin.set_limit(name, None)
    operator.admin.set_stale_after(name, None)
    assert done(operator, name) == [
        ("cap", None, "3"),
        ("cap", "3", "1"),
        ("pause", None, None),
        ("stale_after", None, "90000"),
        ("resume", None, None),
        ("cap", "1", None),
        ("stale_after", "90000", None),
    ]
    newest = operator.admin.operations(name, maximum=1)[0]
    assert newest.action == "stale_after"
    assert newest.resource == name
    assert newest.login
    assert newest.host
    assert newest.program
    assert newest.pid == os.getpid()
    assert newest.as_dict()["action"] == "stale_after"


def test_operation_names_its_login(operator, name):
    operator.admin.pause(name)
    operator.admin.set_limit(name, 2)
    (row,) = [resource for resource in operator.admin.resources() if resource.resource == name]
    (same,) = [resource for resource in operator.admin.overview().resources if resource.resource == name]
    assert row.paused_by == row.cap_by == same.paused_by == same.cap_by
    assert row.paused_by == operator.admin.operations(name)[0].login
    assert row.paused_at == same.paused_at
    operator.admin.resume(name)
    (row,) = [resource for resource in operator.admin.resources() if resource.resource == name]
    assert (row.paused_at, row.paused_by, row.cap_by is None) == (None, None, False)
    operator.admin.set_limit(name, None)
    assert all(resource.resource != name for resource in operator.admin.resources())


@pytest.mark.timing(0.1)
def test_rows_taken_away(operator, connect, database, name):
    other = connect()
    with pytest.raises(sqlsem.LockLost), other.mutex(name) as grant:
        late = Attempt(other.mutex(name))
        until(lambda: len(database.queue(name)) == 2)
        waiting = database.queue(name)[1][0]
        assert operator.admin.revoke(waiting)
        until(lambda: late.settled)
        assert done(operator, name) == [("revoke", "waits", None)]
        operator.admin.revoke(grant.position, force=True)
        with pytest.raises(sqlsem.NotHeld):
            operator.admin.revoke(grant.position)
        newest = operator.admin.operations(name)[0]
        assert (newest.old, newest.new, newest.position) == ("holds", "force", grant.position)
        until(grant.lost_event.is_set)


@pytest.mark.leaves_rows
def test_tasks(operator, name):
    queue = operator.queue(name)
    number = queue.put(1)
    operator.admin.cancel_task(number)
    operator.admin.retry_task(number)
    operator.admin.cancel_task(number)
    with pytest.raises(sqlsem.NotHeld):
        operator.admin.cancel_task(number)
    ended = ("cancel", "pending", None)
    assert done(operator, name) == [ended, ("retry", "cancelled", None), ended]
    newest = operator.admin.operations(name)[0]
    assert (newest.queue, newest.task_id, newest.resource) == (name, number, None)


def test_filters(operator, name):
    operator.admin.set_limit(name, 3)
    operator.admin.pause(name)
    login = operator.admin.operations(name)[0].login
    assert done(operator, name, action="pause") == [("pause", None, None)]
    assert len(operator.admin.operations(name, who=login)) == 2
    assert operator.admin.operations(name, who=f"{login}-") == []
    assert len(operator.admin.operations(name, since="1h")) == 2
    assert operator.admin.operations(name, until="1h") == []
    assert {operation.resource for operation in operator.admin.operations()} >= {name}
    operator.admin.set_limit(name, None)
    operator.admin.resume(name)


def test_history_names_the_login(operator, name):
    with operator.mutex(name):
        pass
    (past,) = operator.admin.history(name)
    for participant in (past.login, past.host, f"{past.host}:{past.pid}", past.program, past.requesting_id):
        assert operator.admin.history(name, who=participant) == [past]
    assert operator.admin.history(name, who="nobody") == []
    assert operator.admin.history(name, who=past.host, outcome="timeout") == []


def test_expired_operations_are_pruned(operator, database, name):
    session = database.session()
    settings = database.beside("setting")
    try:
        for number in range(1, 6):
            operator.admin.set_limit(name, number)
        database.rows(f"UPDATE {settings} SET value = '2' WHERE name = 'history_rows'")
        while session.prune(3):
            pass
        if database.engine != "mssql":  # other clients may have pruned there, too
            assert [operation.new for operation in operator.admin.operations()] == ["5", "4"]
        database.rows(f"UPDATE {settings} SET value = '1000000' WHERE name = 'history_rows'")
        database.rows(f"UPDATE {settings} SET value = '-1' WHERE name = 'history_days'")
        while session.prune(3):
            pass
        assert operator.admin.operations() == []
    finally:
        database.rows(f"UPDATE {settings} SET value = '1000000' WHERE name = 'history_rows'")
        database.rows(f"UPDATE {settings} SET value = '30' WHERE name = 'history_days'")
        session.close()
        operator.admin.set_limit(name, None)


@pytest.mark.engines("postgresql")
def test_the_routines_for_sessions_write_it_down_too(database, operator, name):
    with database.raw() as session:
        session.execute("SELECT sqlsem.set_limit(%s, 2)", (name,))
        session.execute("SELECT sqlsem.pause(%s)", (name,))
        session.execute("SELECT sqlsem.resume(%s)", (name,))
        session.execute("SELECT sqlsem.set_limit(%s, NULL)", (name,))
    assert [action for action, *_ in done(operator, name)] == ["cap", "pause", "resume", "cap"]


@pytest.mark.engines("postgresql")
def test_rolled_back_operation_leaves_no_trace(database, operator, name):
    with database.raw(autocommit=False) as session:
        session.execute("SELECT sqlsem.pause(%s)", (name,))
        session.rollback()
    assert operator.admin.operations(name) == []


@pytest.mark.engines("postgresql")
def test_client_names_are_escaped(database, operator, name):
    with database.raw() as session:
        session.execute("SELECT set_config('sqlsem.client', E'h\\nnine\\n\\x1b[31mred', false)")
        session.execute("SELECT sqlsem.pause(%s)", (name,))
        session.execute("SELECT sqlsem.resume(%s)", (name,))
    operation = operator.admin.operations(name)[0]
    assert operation.host == "h"
    assert operation.pid is not None
    assert "\x1b" not in operation.program
