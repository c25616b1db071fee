"""The files in clients/tsql, unchanged except for the schema's name and Agent's tokens."""

import re
from pathlib import Path

import pytest
from support import Stay, overlap, until

pytestmark = pytest.mark.engines("mssql")
FILES = Path(__file__).resolve().parents[2] / "clients" / "tsql"
GO = re.compile(r"^[ \t]*GO[ \t]*\r?$", re.MULTILINE | re.IGNORECASE)
TOKEN = re.compile(r"\$\(ESCAPE_(NONE|SQUOTE)\((\w+)\)\)")


def batches(database, file, **tokens):
    """Return the batches that Agent or sqlcmd would send."""
    text = TOKEN.sub(lambda match: tokens[match[2]].replace("'", "''"), (FILES / file).read_text(encoding="utf-8"))
    text = re.sub(r"\bsqlsem\.(?=\w)", f"{database.schema}.", text)
    code = re.sub(r"--.*", "", text)
    assert "$(" not in code, "a token was left over"
    return [batch for batch in GO.split(text) if batch.strip()]


def agent(step, job="0x0123456789ABCDEF0123456789ABCDEF"):
    return {"JOBID": job, "STEPID": str(step), "STRTDT": "20260131", "STRTTM": "93000"}


def run(session, texts):
    return [row for text in texts for row in session.rows(text)]


@pytest.fixture
def work(database):
    """``work(kind, name, text)`` makes an object for a file, and drops it afterwards."""
    objects = []

    def make(kind, name, text):
        drop(kind, name)
        database.rows(text)
        objects.append((kind, name))

    def drop(kind, name):
        database.rows(f"DROP {kind} IF EXISTS {name}")

    yield make
    for kind, name in reversed(objects):
        drop(kind, name)


# -- agent-job-step.sql


@pytest.mark.leaves_rows
def test_the_job_step_holds_while_it_works(session, connect, database, work):
    connection = session()
    work("TABLE", "dbo.seen", "CREATE TABLE dbo.seen (requesting_id nvarchar(255), note nvarchar(100))")
    work(
        "PROCEDURE",
        "dbo.load_warehouse",
        f"CREATE PROCEDURE dbo.load_warehouse AS INSERT INTO dbo.seen SELECT requesting_id, note "
        f"FROM {database.beside('entry')} WHERE resource_id = N'warehouse' AND granted_at IS NOT NULL",
    )
    run(connection, batches(database, "agent-job-step.sql", **agent(3)))
    ((requester, note),) = database.rows("SELECT requesting_id, note FROM dbo.seen")
    assert re.fullmatch(r"agent [0-9A-Fa-f-]{36} step 3 started 20260131 93000", requester)
    assert note == "nightly load"
    assert database.queue("warehouse") == []
    assert connect().admin.history("warehouse")[0].outcome == "released"


@pytest.mark.leaves_rows
def test_the_job_step_fails_as_its_work_does_and_gives_back(session, database, refused, work):
    connection = session()
    work("PROCEDURE", "dbo.load_warehouse", "CREATE PROCEDURE dbo.load_warehouse AS THROW 60001, N'no space', 1")
    with refused(60001, "no space"):
        run(connection, batches(database, "agent-job-step.sql", **agent(1)))
    assert database.queue("warehouse") == []


@pytest.mark.leaves_rows
def test_the_job_step_waits_for_others_and_fails_in_time(session, connect, database, refused, work):
    connection = session()
    work("PROCEDURE", "dbo.load_warehouse", "CREATE PROCEDURE dbo.load_warehouse AS RETURN 0")
    texts = batches(database, "agent-job-step.sql", **agent(1))
    holder = connect().mutex("warehouse")
    holder.acquire()
    with refused(50010, "was not free"):
        run(connection, [texts[0].replace("3600000", "300")])
    waiting = connection.later(run, connection, texts)
    until(lambda: len(database.queue("warehouse")) == 2, "the step in the queue")
    holder.release()
    assert waiting.result(30) == []
    assert database.queue("warehouse") == []


# -- guarded-load.sql


@pytest.fixture
def sales(session, database, work):
    work("TABLE", "dbo.sales", "CREATE TABLE dbo.sales (sold_on date NOT NULL, amount int NOT NULL)")
    work("TABLE", "dbo.sales_staging", "CREATE TABLE dbo.sales_staging (sold_on date NOT NULL, amount int NULL)")
    work("PROCEDURE", "dbo.load_sales", "CREATE PROCEDURE dbo.load_sales AS RETURN 0")
    connection = session()
    for _ in range(2):  # it may be run again
        run(connection, batches(database, "guarded-load.sql"))
    database.rows("INSERT INTO dbo.sales_staging VALUES ('2026-01-31', 5), ('2026-01-31', 7), ('2026-02-01', 9)")
    return connection


LOAD = "DECLARE @c int; EXEC @c = dbo.load_sales @day = ?, @timeout_ms = 300; SELECT @c"


@pytest.mark.leaves_rows
def test_the_guarded_load(sales, database, connect):
    for _ in range(2):
        assert sales.rows(LOAD, "2026-01-31") == [(0,)]
        assert database.rows("SELECT SUM(amount) FROM dbo.sales") == [(12,)]
    assert [past.outcome for past in connect().admin.history("sales 2026-01-31")] == ["released", "released"]
    with connect().mutex("sales 2026-01-31"):
        assert sales.rows(LOAD, "2026-01-31") == [(-1,)]
        assert sales.rows(LOAD, "2026-02-01") == [(0,)]
    assert database.queue("sales") == []


@pytest.mark.leaves_rows
def test_the_guarded_load_gives_back_when_it_fails(sales, database):
    import pyodbc

    sales.rows(LOAD, "2026-01-31")
    database.rows("INSERT INTO dbo.sales_staging VALUES ('2026-01-31', NULL)")
    with pytest.raises(pyodbc.Error, match=r"(?i)null"):
        sales.rows(LOAD, "2026-01-31")
    assert sales.rows("SELECT @@TRANCOUNT") == [(0,)]
    assert database.rows("SELECT SUM(amount) FROM dbo.sales") == [(12,)]  # as before
    assert database.queue("sales") == []


# -- three-of-ten.sql


@pytest.mark.leaves_rows
def test_three_of_ten(session, connect, database, work):
    work("TABLE", "dbo.steps", "CREATE TABLE dbo.steps (part int, began datetime2(6), ended datetime2(6))")
    work(
        "PROCEDURE",
        "dbo.load_part",
        "CREATE PROCEDURE dbo.load_part @part int AS BEGIN DECLARE @began datetime2(6) = SYSUTCDATETIME(); "
        # The test keeps that lock for longer than any pause between two polls of a waiter (0.8 s).
        "EXEC sp_getapplock @Resource = N'sqlsem tests keep this', @LockMode = N'Shared', @LockOwner = N'Session', "
        "@LockTimeout = 2000, @DbPrincipal = N'public'; "
        "INSERT INTO dbo.steps VALUES (@part, @began, SYSUTCDATETIME()); "
        "IF @part = 4 THROW 60001, N'part 4 is missing', 1; END",
    )
    keeper = database.raw()
    keeper.execute(
        "EXEC sp_getapplock @Resource = N'sqlsem tests keep this', @LockMode = N'Exclusive', @LockOwner = N'Session', "
        "@LockTimeout = 0, @DbPrincipal = N'public'"
    )
    operator, calls = connect(), []
    operator.admin.pause("parts")
    for step in range(1, 11):
        connection = session()
        calls.append(connection.later(run, connection, batches(database, "three-of-ten.sql", **agent(step))))
    until(lambda: len(database.queue("parts")) == 10, "all ten in the queue")
    operator.admin.resume("parts")
    failed = [step for step, call in enumerate(calls, 1) if call.exception(60) is not None]
    keeper.close()
    assert failed == [4], [call.exception() for call in calls]
    assert "part 4 is missing" in str(calls[3].exception())
    rows = database.rows("SELECT part, began, ended FROM dbo.steps ORDER BY began")
    assert sorted(row[0] for row in rows) == list(range(1, 11))
    stays = [Stay("parts", part, began.timestamp(), ended.timestamp()) for part, began, ended in rows]
    assert overlap(stays) == 3
    assert database.queue("parts") == []


# -- worker-job-step.sql


@pytest.mark.leaves_rows
def test_worker_step_runs_tasks_and_fails_with_them(session, database, refused, work):
    first, other = session(), session()
    work("TABLE", "dbo.loaded", "CREATE TABLE dbo.loaded (n int NOT NULL)")
    texts = [text.replace("= 30", "= 0") for text in batches(database, "worker-job-step.sql")]
    for n in (1, 2):
        first.rows("EXEC {s}.put N'nightly', ?, @order = 100", f"INSERT INTO dbo.loaded VALUES ({n})")
    assert run(other, texts) == []
    assert sorted(database.rows("SELECT n FROM dbo.loaded")) == [(1,), (2,)]
    first.rows("EXEC {s}.put N'nightly', N'INSERT INTO dbo.loaded VALUES (NULL)', @on_failure = N'continue'")
    first.rows("EXEC {s}.put N'nightly', N'INSERT INTO dbo.loaded VALUES (3)', @order = 1")
    with refused(50010, "1 tasks were done, and 1 attempts have failed"):
        run(other, texts)
    assert sorted(database.rows("SELECT n FROM dbo.loaded")) == [(1,), (2,), (3,)]
    assert len(first.rows("EXEC {s}.list_tasks N'nightly', N'failed'")) == 1
    assert run(other, texts) == []


def test_every_file_is_run():
    assert sorted(path.name for path in FILES.glob("*.sql")) == [
        "agent-job-step.sql",
        "guarded-load.sql",
        "three-of-ten.sql",
        "worker-job-step.sql",
    ]
