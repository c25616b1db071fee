"""The work queue from SQL alone: put and work, by psql or a scheduled job, beside the Python client's workers."""

import contextlib
import threading

import psycopg
import pytest
from psycopg import errors
from support import PATIENCE, until

import sqlsem
from sqlsem.tasks import Worker

pytestmark = pytest.mark.engines("postgresql")


def work(database, name, idle=0.3, results=None):
    with database.raw() as connection:
        found = connection.execute("CALL sqlsem.work(%s, %s)", (name, idle)).fetchone()
        if results is not None:
            results.append(found)


def test_two_sessions_and_ten_tasks(database, connect, name, threads):
    """Five pairs, each of which starts together; nothing polled, nothing twice; the log tells who ran what when."""
    with database.raw() as connection:
        numbers = [
            connection.execute("SELECT sqlsem.put(%s, %s)", (name, f"SELECT pg_sleep(0.4) -- {n}")).fetchone()[0]
            for n in range(10)
        ]
    results = []
    for _ in range(2):
        threads.start(work, database, name, 0.5, results)
    queue = connect().queue(name)
    queue.join(PATIENCE)
    threads.join()
    assert sorted(results) == [(5, 0), (5, 0)]
    attempts = [attempt for number in numbers for attempt in queue.log(number)]
    assert [(one.task_id, one.outcome, one.attempt) for one in attempts] == [
        (number, "finished", 1) for number in numbers
    ]
    assert len({one.session_id for one in attempts}) == 2
    assert all(one.owner.startswith(f"pid {one.session_id} ") for one in attempts)
    attempts.sort(key=lambda one: one.started_at)
    for one, other in zip(attempts[::2], attempts[1::2], strict=True):
        assert one.session_id != other.session_id
        assert other.started_at < one.ended_at, "a pair runs side by side"


def test_keys(database, connect, name):
    def put(body, **options):
        named = "".join(f", {option} => '{value}'" for option, value in options.items())
        return database.rows(f"SELECT sqlsem.put('{name}', '{body}'{named})")[0][0]

    first = put("SELECT 1", unique_key="k")
    assert put("SELECT 2", unique_key="k") == first
    second = put("SELECT 3", replace_key="k")
    queue = connect().queue(name)
    assert {one.task_id: (one.status, one.body) for one in queue.tasks()} == {
        first: ("cancelled", "SELECT 1"),
        second: ("pending", "SELECT 3"),
    }
    assert queue.put(sqlsem.Sql("SELECT 4"), unique="k") == second
    with pytest.raises(errors.InvalidParameterValue, match="one key"):
        put("x", unique_key="k", replace_key="k")
    with pytest.raises(errors.InvalidParameterValue, match="key"):
        put("x", unique_key=" ")


def test_another_login_does_not_replace_it(database, login, name):
    putter = login("sqlsem_putter")
    database.rows(f"SELECT sqlsem.put('{name}', 'SELECT 1', unique_key => 'k')")
    with pytest.raises(errors.InsufficientPrivilege, match="another login"):
        putter.rows(f"SELECT sqlsem.put('{name}', 'SELECT 2', replace_key => 'k')")


def test_a_session_that_dies_in_its_task(database, connect, name):
    queue = connect().queue(name)
    first = queue.put(sqlsem.Sql("SELECT pg_sleep(60)"))
    ended = threading.Event()

    def doomed():
        with contextlib.suppress(psycopg.OperationalError):
            work(database, name, 10)
        ended.set()

    threading.Thread(target=doomed, daemon=True).start()
    (running,) = until(lambda: queue.tasks("running"))
    (attempt,) = queue.log(first)
    database.rows("SELECT pg_terminate_backend(?)", attempt.session_id)
    assert ended.wait(PATIENCE)
    for task in queue.claim(wait=PATIENCE):
        with task:
            assert (task.id, task.attempt) == (running.task_id, 2)
        break
    assert [one.outcome for one in queue.log(first)] == ["lost", "finished"]


def test_an_error_ends_neither_the_session_nor_the_queue(database, connect, name):
    table = f"made_by_{name}"
    database.rows(f"CREATE TABLE {table} (n integer)")
    queue = connect().queue(name, on_failure="continue")
    bad = queue.put(sqlsem.Sql(f"INSERT INTO {table} VALUES (1); SELECT 1 / 0"), max_attempts=2, backoff=0.1)
    other = queue.put(sqlsem.Shell("true"))
    good = queue.put(sqlsem.Sql(f"INSERT INTO {table} VALUES (2); INSERT INTO {table} VALUES (3)"))
    results = []
    work(database, name, 1, results)
    assert results == [(1, 3)]
    assert sorted(database.rows(f"SELECT n FROM {table}")) == [(2,), (3,)], "what failed left nothing"
    entries = {entry.task_id: entry for entry in queue.tasks()}
    assert entries[bad].error.splitlines()[0] == "22012: division by zero"
    assert [one.outcome for one in queue.log(bad)] == ["failed", "failed"]
    assert "use sqlsem work" in entries[other].error
    assert entries[good].status == "finished"
    database.rows(f"DROP TABLE {table}")


def test_a_call_that_is_broken_off_leaves_nothing_running(database, connect, name):
    queue = connect().queue(name)
    slow = queue.put(sqlsem.Sql("SELECT pg_sleep(60)"), max_attempts=2, backoff=0)
    with database.raw() as session:
        session.execute("SET statement_timeout = '500ms'")
        with pytest.raises(errors.QueryCanceled, match=f"task {slow} was broken off"):
            session.execute("CALL sqlsem.work(%s, 0)", (name,))
        session.execute("SET statement_timeout = 0")
        assert [one.outcome for one in queue.log(slow)] == ["failed"]
        # And were it broken off just after its claim:
        claimed = session.execute("SELECT task_id FROM sqlsem.session_claim(%s)", (name,)).fetchone()
        assert claimed == (slow,)
        assert session.execute("CALL sqlsem.work(%s, 0)", (name,)).fetchone() == (0, 0)
    assert [(one.outcome, one.error) for one in queue.log(slow)][1:] == [("failed", "it was broken off by its client")]


def test_what_strikes_only_at_the_end_is_the_tasks_fault(database, connect, name):
    table = f"made_by_{name}"
    database.rows(f"CREATE TABLE {table} (n integer UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    queue = connect().queue(name, on_failure="continue")
    queue.put(sqlsem.Sql(f"INSERT INTO {table} VALUES (1), (1)"))
    queue.put(sqlsem.Sql("SET ROLE pg_read_all_data"))
    queue.put(sqlsem.Sql(f"INSERT INTO {table} VALUES (2)"))
    results = []
    work(database, name, 0, results)
    assert results == [(1, 2)]
    assert sorted(entry.error.partition(":")[0] for entry in queue.tasks("failed")) == ["23505", "42501"]
    assert database.rows(f"SELECT n FROM {table}") == [(2,)]
    database.rows(f"DROP TABLE {table}")


def test_what_a_session_does_that_was_given_up_is_undone(database, connect, name, threads):
    """Its text frees the session's locks, so that it looks dead."""
    table = f"made_by_{name}"
    database.rows(f"CREATE TABLE {table} (n integer)")
    queue = connect().queue(name)
    number = queue.put(
        sqlsem.Sql(f"INSERT INTO {table} VALUES (1); SELECT pg_advisory_unlock_all(); SELECT pg_sleep(3)")
    )
    results = []
    threads.start(work, database, name, 0, results)
    until(lambda: queue.tasks("running") or queue.tasks("lost"))
    for task in queue.claim(wait=PATIENCE):
        with task:
            assert (task.id, task.attempt) == (number, 2)
        break
    threads.join()
    assert results == [(0, 1)]
    assert database.rows(f"SELECT n FROM {table}") == []
    assert [one.outcome for one in queue.log(number)] == ["lost", "finished"]
    database.rows(f"DROP TABLE {table}")


def test_put_belongs_to_the_callers_transaction(database, connect, name):
    queue = connect().queue(name)
    with database.raw(autocommit=False) as connection:
        connection.execute("SELECT sqlsem.put(%s, 'SELECT 1', note => 'gone')", (name,))
        assert queue.try_claim() is None
        connection.rollback()
        connection.execute(
            "SELECT sqlsem.put(%s, '[7]', kind => 'json', \"order\" => 3, note => 'kept', max_attempts => 2)", (name,)
        )
        connection.commit()
    with queue.try_claim() as task:
        assert (task.body, task.order, task.note) == ([7], 3, "kept")


def test_work_inside_a_transaction_is_refused(database, name):
    with database.raw(autocommit=False) as connection, pytest.raises(errors.ActiveSqlTransaction, match="work"):
        connection.execute("CALL sqlsem.work(%s, 0)", (name,))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("SELECT sqlsem.put(NULL, 'x')", "queue is NULL"),
        ("SELECT sqlsem.put('', 'x')", "queue is empty"),
        ("SELECT sqlsem.put(' q', 'x')", "white space"),
        ("SELECT sqlsem.put('q', NULL)", "body of a task is NULL"),
        ("SELECT sqlsem.put('q', 'x', kind => 'java')", "task_kind_check"),
        ("SELECT sqlsem.put('q', 'x', max_attempts => 0)", "max_attempts"),
        ("SELECT sqlsem.put('q', 'x', on_failure => 'ignore')", "on_failure"),
        ("CALL sqlsem.work('q', -1)", "idle_seconds"),
        ("CALL sqlsem.work('', 0)", "queue is empty"),
    ],
)
def test_bad_arguments(database, call, words):
    with database.raw() as connection, pytest.raises(psycopg.Error, match=words):
        connection.execute(call)
    assert database.rows("SELECT count(*) FROM sqlsem.task WHERE queue_name IN ('q', '', ' q')") == [(0,)]


def test_who_may_put_and_who_may_run(login, user, connect, name):
    """Putters have workers run code, workers run it; who takes locks, and who operates, does neither."""
    putter, worker, operator = login("sqlsem_putter"), login("sqlsem_worker"), login("sqlsem_operator")
    for other in (user, worker, operator, login("sqlsem_reader")):
        with other.raw() as connection, pytest.raises(errors.InsufficientPrivilege):
            connection.execute("SELECT sqlsem.put(%s, '1', 'json')", (name,))
    for other in (user, putter, operator, login("sqlsem_reader")):
        with other.raw() as connection:
            for text in ("CALL sqlsem.work(%s, 0)", "SELECT * FROM sqlsem.claim_task(1, %s, 'o', 'u', false)"):
                with pytest.raises(errors.InsufficientPrivilege):
                    connection.execute(text, (name,))
    with putter.raw() as connection:
        for kind in ("sql", "shell", "call"):
            connection.execute("SELECT sqlsem.put(%s, 'SELECT 1', %s, \"order\" => 5)", (name, kind))
        connection.execute("SELECT sqlsem.put(%s, '1', 'json')", (name,))
        with pytest.raises(errors.InsufficientPrivilege):
            connection.execute("SELECT * FROM sqlsem.task")
    with contextlib.closing(worker.coordinator()) as theirs:
        with theirs.queue(name).try_claim() as task:
            assert task.body == 1
    # What it runs, it runs with the worker's rights.
    queue = connect().queue(name("b"))
    queue.put(sqlsem.Sql("SELECT * FROM sqlsem.task"))
    results = []
    work(worker, name("b"), 0, results)
    assert results == [(0, 1)]
    (failed,) = queue.tasks("failed")
    assert failed.error.startswith("42501: permission denied for table task\nCONTEXT: ")
    assert failed.login == psycopg.conninfo.conninfo_to_dict(worker.url)["user"]


def test_who_sees_what_a_task_is(login, user, connect, name):
    """Bodies may hold secrets: who only puts sees its own tasks, and who takes locks none."""
    putter, other = login("sqlsem_putter"), login("sqlsem_putter")
    (number,) = putter.rows("SELECT sqlsem.put(?, 'SELECT 1')", name)[0]
    listing, attempts = (
        "SELECT task_id, body, put_by FROM sqlsem.list_tasks(?)",
        "SELECT * FROM sqlsem.task_attempts(?)",
    )
    mine = [(number, "SELECT 1", psycopg.conninfo.conninfo_to_dict(putter.url)["user"])]
    for sees in (putter, login("sqlsem_worker"), login("sqlsem_operator"), login("sqlsem_reader")):
        assert sees.rows(listing, name) == mine
        sees.rows(attempts, number)
    assert other.rows(listing, name) == []
    for text in (listing, attempts):
        with pytest.raises(errors.InsufficientPrivilege):
            user.rows(text, name if text is listing else number)
    # What others have put is not theirs to cancel either; an operator's it is.
    assert other.rows("SELECT sqlsem.set_task(?, 'cancel')", number) == [(-1,)]
    assert login("sqlsem_operator").rows("SELECT sqlsem.set_task(?, 'cancel')", number) == [(0,)]
    assert putter.rows("SELECT sqlsem.set_task(?, 'retry')", number) == [(0,)]
    assert putter.rows("SELECT sqlsem.set_task(?, 'cancel')", number) == [(0,)]


def test_a_worker_ends_only_its_own_tasks(login, connect, name):
    connect().queue(name).put(1)
    mine = connect()
    task = mine.queue(name).try_claim()
    with login("sqlsem_worker").raw() as connection:
        stolen = "SELECT sqlsem.end_task(%s, %s, %s, 'finished', NULL, NULL)"
        assert connection.execute(stolen, (mine.process.member.member_id, task.id, task.attempt)).fetchone() == (None,)
        with pytest.raises(errors.NoDataFound):
            connection.execute(
                "SELECT * FROM sqlsem.claim_task(%s, %s, 'x', 'u', false)", (mine.process.member.member_id, name)
            )
        connection.execute("SELECT sqlsem.return_claim(%s, %s, %s)", (mine.process.member.member_id, name, task._uid))
    task.finish()


@pytest.mark.parametrize(
    "arguments",
    [
        "'SELECT 1', after_seconds => -1e11",
        "'SELECT 1', after_seconds => 1e12",
        "'SELECT 1', after_seconds => 'nan'",
        "'SELECT 1', backoff_seconds => -1",
        "'SELECT 1', max_attempts => 0",
        "NULL",
        "'no json', 'json'",
        "repeat('[', 5000) || repeat(']', 5000), 'json'",
    ],
)
def test_what_no_client_could_read_is_refused(database, name, arguments):
    with pytest.raises(errors.InvalidParameterValue, match="sqlsem: "):
        database.rows(f"SELECT sqlsem.put('{name}', {arguments})")
    assert database.rows("SELECT count(*) FROM sqlsem.list_tasks(?)", name) == [(0,)]


def test_deep_and_odd_json_is_kept(database, connect, name):
    for body in ("[" * 100 + "]" * 100, '{"a": "[[[[[[[[\\"]]]]{{{{"}', '"' + "[" * 500 + '"', "1e400"):
        database.rows("SELECT sqlsem.put(?, ?, 'json')", name, body)
    assert len(connect().queue(name).tasks()) == 4


def test_a_row_that_cannot_be_read_does_not_hide_the_others(database, connect, name):
    queue = connect().queue(name)
    numbers = [queue.put(1), queue.put(2), queue.put(3)]
    for number, time in zip(numbers, ("-infinity", "20000-01-01"), strict=False):
        database.rows("UPDATE sqlsem.task SET ready_at = ?::timestamptz WHERE task_id = ?", time, number)
    assert [one.task_id for one in queue.tasks()] == numbers
    for number in numbers:
        connect().cancel_task(number)


def test_an_error_is_kept_in_full(database, connect, name):
    text = "DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = 'P0123', DETAIL = 'why', HINT = 'mend it'; END $$"
    queue = connect().queue(name)
    for way in ("session", "client"):
        number = queue.put(sqlsem.Sql(text))
        if way == "session":
            assert database.rows("CALL sqlsem.work(?, 0)", name) == [(0, 1)]
        else:
            Worker(queue, idle_exit=0).run()
        error = queue.log(number)[-1].error
        assert error.startswith(
            "P0123: no\nDETAIL: why\nHINT: mend it\nCONTEXT: PL/pgSQL function inline_code_block line 1"
        )
        assert "Traceback" not in error
        assert "Unavailable" not in error
        connect().cancel_task(number)
