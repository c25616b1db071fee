"""Tasks put in the caller's own transaction: they commit with its data, or not at all."""

import contextlib

import pytest
from psycopg import rows
from support import until

import sqlsem
from sqlsem.tasks import Json
from sqlsem.values.errors import ConfigurationError


def bodies(queue):
    return [task.body for task in queue.tasks()]


@pytest.mark.parametrize("commit", [True, False])
def test_task_appears_with_the_callers_commit(connect, transaction, name, commit):
    queue = connect().queue(name)
    cursor = transaction()
    task_id = queue.put({"n": 1}, cursor=cursor, note="one", order=7)
    more = queue.put_many([{"n": n} for n in range(2, 5)], cursor=cursor, max_attempts=3)
    assert len({task_id, *more}) == 4
    assert queue.tasks() == [], "seen before the commit"
    if commit:
        cursor.connection.commit()
        with queue.try_claim() as task:
            assert task.body == {"n": 2}
        assert [
            (task_row.task_id, task_row.note, task_row.order) for task_row in queue.tasks() if task_row.order == 7
        ] == [(task_id, "one", 7)]
    else:
        cursor.connection.rollback()
        assert queue.tasks() == []
        assert queue.try_claim() is None


def test_locks_of_a_task_are_requested_after_commit(connect, transaction, name):
    coordinator = connect(grace=30)
    queue = coordinator.queue(name)
    cursor = transaction()
    queue.put(1, cursor=cursor, locks=[sqlsem.mutex(name)])
    assert coordinator.admin.entries(name) == []
    cursor.connection.commit()
    with queue.try_claim() as task:
        assert task.grant.resource == str(name)


def test_all_kinds_and_options(connect, transaction, name):
    queue = connect().queue(name)
    cursor = transaction()
    queue.put(sqlsem.Sql("SELECT 1"), cursor=cursor, time_limit=5, backoff="3s", on_failure="continue")
    queue.put(sqlsem.Call("json:dumps", "ä'\"\n"), cursor=cursor, after="1h")
    cursor.connection.commit()
    assert [task.kind for task in queue.tasks()] == ["sql", "call"]


def test_keys_count_in_the_callers_transaction(connect, transaction, name):
    queue = connect().queue(name)
    first = queue.put(Json("a"), unique="k")
    cursor = transaction()
    assert queue.put(Json("b"), unique="k", cursor=cursor) == first
    second = queue.put(Json("c"), replace="k", cursor=cursor)
    assert second != first
    cursor.connection.rollback()
    assert [(task.task_id, task.status) for task in queue.tasks()] == [(first, "pending")]
    second = queue.put(Json("c"), replace="k", cursor=cursor)
    cursor.connection.commit()
    assert {task.task_id: task.status for task in queue.tasks()} == {second: "pending", first: "cancelled"}


def test_put_commits_with_the_callers_transaction(connect, database, transaction, name):
    """An outbox: an order and the task that ships it commit together."""
    queue = connect().queue(name)
    table = database.beside(f"orders_{name}")
    with contextlib.closing(database.raw()) as connection:
        connection.execute(f"CREATE TABLE {table} (id integer)")
    try:
        cursor = transaction()
        cursor.execute(f"INSERT INTO {table} VALUES (1)")
        queue.put({"order": 1}, cursor=cursor)
        cursor.connection.rollback()
        assert queue.tasks() == []
        cursor.execute(f"INSERT INTO {table} VALUES (2)")
        queue.put({"order": 2}, cursor=cursor)
        cursor.connection.commit()
        assert bodies(queue) == ['{"order": 2}'] or bodies(queue) == [{"order": 2}]
        cursor.execute(f"SELECT id FROM {table}")
        assert [row[0] for row in cursor.fetchall()] == [2]
        cursor.connection.commit()
    finally:
        with contextlib.closing(database.raw()) as connection:
            connection.execute(f"DROP TABLE {table}")


def test_a_waiting_worker_takes_it_up_after_the_commit(connect, transaction, name, threads):
    queue = connect().queue(name)
    claimed = []

    def work():
        for task in queue.claim(wait=60):
            with task:
                claimed.append(task.body)
            return

    threads.start(work)
    cursor = transaction()
    queue.put(Json("late"), cursor=cursor)
    assert claimed == []
    cursor.connection.commit()
    until(lambda: claimed == ["late"])
    threads.join()


def test_autocommit_is_refused(connect, database, name):
    queue = connect().queue(name)
    with contextlib.closing(database.raw()) as connection:
        with pytest.raises(ConfigurationError, match="transaction"):
            queue.put(1, cursor=connection.cursor())
    assert queue.tasks() == []


@pytest.mark.engines("postgresql", "sqlite")
def test_sqlalchemy(connect, database, name):
    sqlalchemy = pytest.importorskip("sqlalchemy")
    orm = pytest.importorskip("sqlalchemy.orm")
    queue = connect().queue(name)
    url = database.url.replace("postgresql://", "postgresql+psycopg://")
    engine = sqlalchemy.create_engine(url)
    with engine.begin() as connection:
        queue.put(1, cursor=connection)
        assert queue.tasks() == []
    with orm.Session(engine) as session:
        queue.put(2, cursor=session)
        session.rollback()
        queue.put(3, cursor=session)
        session.commit()
    assert sorted(int(body) for body in bodies(queue)) == [1, 3]
    engine.dispose()


@pytest.mark.engines("mysql")
def test_put_accepts_a_cursor_of_dictionaries(connect, database, name):
    from pymysql.cursors import DictCursor

    queue = connect().queue(name)
    with contextlib.closing(database.raw(autocommit=False)) as connection, connection.cursor(DictCursor) as cursor:
        first = queue.put(1, cursor=cursor)
        connection.commit()
    assert [task.task_id for task in queue.tasks()] == [first]


@pytest.mark.engines("postgresql")
def test_a_cursor_that_is_awaited_is_refused(connect, database, name):
    import asyncio

    import psycopg

    queue = connect().queue(name)

    async def put():
        async with await psycopg.AsyncConnection.connect(database.url) as connection, connection.cursor() as cursor:
            with pytest.raises(ConfigurationError, match="await"):
                queue.put(1, cursor=cursor)

    asyncio.run(put())
    assert queue.tasks() == []


@pytest.mark.engines("postgresql")
def test_put_accepts_any_row_factory(connect, database, name):
    queue = connect().queue(name)
    for makes in (rows.tuple_row, rows.dict_row, rows.namedtuple_row, rows.scalar_row):
        with database.raw(autocommit=False) as connection:
            number = queue.put(Json("x"), cursor=connection.cursor(row_factory=makes))
            connection.commit()
        assert [task.task_id for task in queue.tasks()][-1] == number
