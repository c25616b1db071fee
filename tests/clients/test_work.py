"""The work queue from SQL alone: put and work, by psql or a scheduled job, beside the Python client's workers."""

import contextlib
import threading

import psycopg
import pytest
from psycopg import errors
from support import PATIENCE, until
from support.databases import name_of_login

import sqlsem
from sqlsem.tasks import Worker

pytestmark = pytest.mark.engines("postgresql")


MEETING = "public.begun_tasks"
#: The body of a task that ends when so many have begun.
MEET = f"""
DO $$
BEGIN
    PERFORM nextval('{MEETING}');
    FOR look IN 1..6000 LOOP
        EXIT WHEN (SELECT last_value FROM {MEETING}) >= {{begun}};
        PERFORM pg_sleep(0.01);
    END LOOP;
END $$
"""


def work(database, name, idle=0.3, results=None):
    with database.raw() as connection:
        row = connection.execute("CALL sqlsem.work(%s, %s)", (name, idle)).fetchone()
    if results is not None:
        results.append(row)
    return row


def cancel_asleep(database, pid):
    """Cancel the statement of a session that sleeps; earlier, the cancel might strike at a COMMIT between two steps."""
    until(lambda: database.rows("SELECT 1 FROM pg_stat_activity WHERE pid = ? AND wait_event = 'PgSleep'", pid))
    assert database.rows("SELECT pg_cancel_backend(?)", pid) == [(True,)]


def test_two_sessions_and_ten_tasks(database, connect, name, threads):
    """Five pairs of tasks, each pair at the same time, without polls and repetitions; the log shows all runs.

    Each task ends when the other one of its pair has begun. (A sequence belongs to no transaction.)
    """
    database.rows(f"CREATE SEQUENCE {MEETING}")
    with database.raw() as connection:
        numbers = [
            connection.execute("SELECT sqlsem.put(%s, %s)", (name, MEET.format(begun=n // 2 * 2 + 2))).fetchone()[0]
            for n in range(10)
        ]
    results = []
    for _ in range(2):
        threads.start(work, database, name, 0.5, results)
    queue = connect().queue(name)
    queue.wait(PATIENCE)
    threads.join()
    assert sorted(results) == [(5, 0), (5, 0)]
    attempts = [attempt for number in numbers for attempt in queue.log(number)]
    assert [(run.task_id, run.outcome, run.attempt) for run in attempts] == [
        (number, "finished", 1) for number in numbers
    ]
    database.rows(f"DROP SEQUENCE {MEETING}")
    assert len({run.session_id for run in attempts}) == 2
    assert all(run.owner.startswith(f"pid {run.session_id} ") for run in attempts)
    attempts.sort(key=lambda run: run.started_at)
    for run, other in zip(attempts[::2], attempts[1::2], strict=True):
        assert run.session_id != other.session_id
        assert other.started_at < run.ended_at


def test_sql_put_respects_unique_and_replace_keys(database, connect, name):
    def put(body, **options):
        named = "".join(f", {option} => '{value}'" for option, value in options.items())
        return database.rows(f"SELECT sqlsem.put('{name}', '{body}'{named})")[0][0]

    first = put("SELECT 1", unique_key="k")
    assert put("SELECT 2", unique_key="k") == first
    second = put("SELECT 3", replace_key="k")
    queue = connect().queue(name)
    assert {task.task_id: (task.status, task.body) for task in queue.tasks()} == {
        first: ("cancelled", "SELECT 1"),
        second: ("pending", "SELECT 3"),
    }
    assert queue.put(sqlsem.Sql("SELECT 4"), unique="k") == second
    with pytest.raises(errors.InvalidParameterValue, match="one key"):
        put("x", unique_key="k", replace_key="k")
    with pytest.raises(errors.InvalidParameterValue, match="key"):
        put("x", unique_key=" ")


def test_locks_are_held_while_a_session_runs_the_task(database, connect, name, threads):
    locks = f'[{{"resource": "{name}", "limit": 1}}, {{"resource": "{name} 2", "access": "read", "limit": 1}}]'
    with database.raw() as connection:
        text = f"SELECT count(*) FROM sqlsem.entries('{name}') WHERE state = 'holds' HAVING count(*) <> 1"
        body = f"DO $$ BEGIN IF EXISTS ({text}) THEN RAISE 'not held'; END IF; PERFORM pg_sleep(0.5); END $$"
        for _ in range(2):
            connection.execute("SELECT sqlsem.put(%s, %s, locks => %s)", (name, body, locks))
    coordinator, results = connect(), []
    with coordinator.mutex(name):
        for _ in range(2):
            threads.start(work, database, name, 1.5, results)
        until(lambda: len(coordinator.admin.entries(name)) == 3)
    threads.join()
    assert sum(done for done, _ in results) == 2
    assert sum(failed for _, failed in results) == 0
    assert coordinator.admin.entries(name) == []
    released = [hold for hold in coordinator.admin.history(name) if hold.granted_at is not None]
    first, second = sorted(released, key=lambda row: row.granted_at)[-2:]
    assert first.ended_at <= second.granted_at


@pytest.mark.parametrize(
    ("locks", "words"),
    [
        ("{}", "JSON list"),
        ("[]", "JSON list"),
        ("[1]", "JSON list"),
        ('[{"resource": ""}]', "resource is empty"),
        ('[{"resource": "a", "access": "upgrade", "limit": 1}]', "access is"),
        ('[{"resource": "a", "limit": 0}]', "cannot be"),
        ('[{"resource": "a", "limit": 2, "weight": 3}]', "cannot be"),
        ('[{"resource": "a", "access": "read", "limit": 2}]', "cannot be"),
        ('[{"resource": "a", "limit": 1}, {"resource": "a", "limit": 1}]', "twice"),
        ('[{"resource": "nobody has set a limit for this"}]', "no limit is set"),
    ],
)
def test_locks_that_cannot_be(database, name, locks, words):
    with database.raw() as connection, pytest.raises(errors.InvalidParameterValue, match=words):
        connection.execute("SELECT sqlsem.put(%s, 'SELECT 1', locks => %s)", (name, locks))


def test_putter_without_user_role_puts_no_locks(login, connect, name):
    putter, worker = login("sqlsem_putter"), login("sqlsem_worker")
    locks = f'[{{"resource": "{name}", "limit": 1}}]'
    with putter.raw() as connection, pytest.raises(errors.InsufficientPrivilege, match="may not take locks"):
        connection.execute("SELECT sqlsem.put(%s, '1', 'json', locks => %s)", (name, locks))
    connect().queue(name).put(1, locks=[sqlsem.mutex(name)])
    with contextlib.closing(worker.coordinator()) as workers_tasks:
        with workers_tasks.queue(name).try_claim() as task:
            assert task.grant.resource == str(name)
    assert connect().admin.entries(name) == []


def test_another_login_does_not_replace_it(database, login, name):
    putter = login("sqlsem_putter")
    database.rows(f"SELECT sqlsem.put('{name}', 'SELECT 1', unique_key => 'k')")
    with pytest.raises(errors.InsufficientPrivilege, match="another login"):
        putter.rows(f"SELECT sqlsem.put('{name}', 'SELECT 2', replace_key => 'k')")


def test_killed_sessions_task_is_returned(database, connect, name):
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
    assert [run.outcome for run in queue.log(first)] == ["lost", "finished"]


def test_an_error_ends_neither_the_session_nor_the_queue(database, connect, name, table):
    made = table()
    queue = connect().queue(name, on_failure="continue")
    bad = queue.put(sqlsem.Sql(f"INSERT INTO {made} VALUES (1); SELECT 1 / 0"), max_attempts=2, backoff=0.1)
    other = queue.put(sqlsem.Shell("true"))
    good = queue.put(sqlsem.Sql(f"INSERT INTO {made} VALUES (2); INSERT INTO {made} VALUES (3)"))
    assert work(database, name, 1) == (1, 3)
    assert sorted(database.rows(f"SELECT a FROM {made}")) == [(2,), (3,)], "what failed left nothing"
    entries = {entry.task_id: entry for entry in queue.tasks()}
    assert entries[bad].error.splitlines()[0] == "22012: division by zero"
    assert [run.outcome for run in queue.log(bad)] == ["failed", "failed"]
    assert "use sqlsem work" in entries[other].error
    assert entries[good].status == "finished"


def test_a_call_that_is_broken_off_leaves_nothing_running(database, connect, name):
    queue = connect().queue(name)
    slow = queue.put(sqlsem.Sql("SELECT pg_sleep(60)"), max_attempts=2, backoff=0)
    with database.raw() as session:
        session.execute("SET statement_timeout = '500ms'")
        with pytest.raises(errors.QueryCanceled, match=f"task {slow} was broken off"):
            session.execute("CALL sqlsem.work(%s, 0)", (name,))
        session.execute("SET statement_timeout = 0")
        assert [run.outcome for run in queue.log(slow)] == ["failed"]
        # And after an interrupt just after its claim:
        claimed = session.execute("SELECT task_id FROM sqlsem.session_claim(%s)", (name,)).fetchone()
        assert claimed == (slow,)
        assert session.execute("CALL sqlsem.work(%s, 0)", (name,)).fetchone() == (0, 0)
    assert [(run.outcome, run.error) for run in queue.log(slow)][1:] == [("failed", "it was broken off by its client")]


def test_a_call_that_is_cancelled_says_so_of_its_task(database, connect, name, threads):
    """An administrator cancels the session's statement, and so the whole call."""
    queue = connect().queue(name)
    slow = queue.put(sqlsem.Sql("SELECT pg_sleep(60)"), max_attempts=2, backoff=0)
    after = queue.put(sqlsem.Sql("SELECT 1"), order=1)
    ended = []

    def call():
        with database.raw() as session:
            with pytest.raises(errors.QueryCanceled, match=f"task {slow} was broken off: canceling statement"):
                session.execute("CALL sqlsem.work(%s, 0)", (name,))
            ended.append(session.info.transaction_status)
            # The session goes on with the other tasks.
            session.execute("UPDATE sqlsem.task SET body = 'SELECT 2' WHERE task_id = %s", (slow,))
            ended.append(session.execute("CALL sqlsem.work(%s, 0)", (name,)).fetchone())

    threads.start(call)
    (running,) = until(lambda: queue.tasks("running"))
    assert running.task_id == slow
    cancel_asleep(database, queue.log(slow)[0].session_id)
    threads.join()
    assert ended == [psycopg.pq.TransactionStatus.IDLE, (2, 0)]
    first, second = queue.log(slow)
    assert (first.outcome, second.outcome) == ("failed", "finished")
    assert first.error.startswith("57014: canceling statement due to user request")
    assert [run.outcome for run in queue.log(after)] == ["finished"]


def test_idle_session_is_cancelled(database, connect, name, threads):
    """A cancel between two tasks affects no task."""
    queue = connect().queue(name)

    def call():
        with database.raw() as session:
            with pytest.raises(errors.QueryCanceled):
                session.execute("CALL sqlsem.work(%s, 60)", (name,))
            assert session.info.transaction_status == psycopg.pq.TransactionStatus.IDLE

    done = queue.put(sqlsem.Sql("SELECT 1"))
    threads.start(call)
    until(lambda: [run.outcome for run in queue.log(done)] == ["finished"])
    database.rows("SELECT pg_cancel_backend(?)", queue.log(done)[0].session_id)
    threads.join()
    assert [run.outcome for run in queue.log(done)] == ["finished"]


@contextlib.contextmanager
def granted_to_owner(database, role):
    """Give the role that installed the tables another role for the block."""
    owner = f"{database.rows('SELECT current_database()')[0][0]}_owner"
    database.rows(f"GRANT {role} TO {owner}")
    yield
    database.rows(f"REVOKE {role} FROM {owner}")


@pytest.fixture
def may_signal(database):
    """True if the installing role may cancel sessions of others, except superusers."""
    with granted_to_owner(database, "pg_signal_backend"):
        yield


@pytest.mark.usefixtures("may_signal")
def test_a_task_of_a_session_has_a_time_limit(database, login, connect, name, threads):
    """Any other worker of the queue enforces it, also another session. This session goes on with the next task."""
    queue = connect().queue(name, on_failure="continue")
    slow = queue.put(sqlsem.Sql("SELECT pg_sleep(60)"), time_limit=1, max_attempts=2, backoff=0)
    last = queue.put(sqlsem.Sql("SELECT 1"), order=1)
    worker = login("sqlsem_worker")
    results = []
    for _ in range(2):
        threads.start(work, worker, name, 5, results)
    threads.join()
    assert [sum(counts) for counts in zip(*results, strict=True)] == [1, 2]
    assert [run.outcome for run in queue.log(last)] == ["finished"]
    assert [run.outcome for run in queue.log(slow)] == ["failed", "failed"]
    for attempt in queue.log(slow):
        assert attempt.error == "It ran for longer than its time limit of 1 s, and was ended"
        assert attempt.seconds >= 1


@pytest.mark.usefixtures("may_signal")
def test_a_worker_keeps_the_time_limits_of_sessions(database, login, connect, name, threads):
    queue = connect().queue(name, on_failure="continue")
    slow = queue.put(sqlsem.Sql("SELECT pg_sleep(60)"), time_limit=0.5)
    results = []
    threads.start(work, login("sqlsem_worker"), name, 0, results)
    until(lambda: queue.tasks("running"))
    worker = Worker(queue)
    threads.start(worker.run)
    until(lambda: results)
    worker.stop()
    threads.join()
    assert results == [(0, 1)]
    assert queue.log(slow)[0].error.startswith("It ran for longer than its time limit of 0.5 s")


def test_without_the_right_to_signal_a_session_runs_on(database, login, connect, name, threads):
    queue = connect().queue(name)
    slow = queue.put(sqlsem.Sql("SELECT pg_sleep(1)"), time_limit=0.1)
    results = []
    for _ in range(2):
        threads.start(work, login("sqlsem_worker"), name, 2, results)
    threads.join()
    assert sorted(results) == [(0, 0), (1, 0)]
    assert [run.outcome for run in queue.log(slow)] == ["finished"]


@pytest.mark.usefixtures("may_signal")
def test_a_task_that_is_ended_is_told_of_once(database, login, connect, name, threads):
    """However many sessions check the deadline, a body that ignores the cancel gets a single attempt to end it."""
    queue = connect().queue(name)
    text = """DO $$ DECLARE n integer := 0; til timestamptz := clock_timestamp() + '2 s'; BEGIN
        WHILE clock_timestamp() < til LOOP
            BEGIN PERFORM pg_sleep(0.01); EXCEPTION WHEN query_canceled THEN n := n + 1; END;
        END LOOP;
        RAISE '% times', n; END $$"""
    slow = queue.put(sqlsem.Sql(text), time_limit=0.2)
    threads.start(work, login("sqlsem_worker"), name, 0)
    until(lambda: queue.tasks("running"))
    while queue.tasks("running"):
        database.rows("SELECT sqlsem.recover_tasks(?, NULL)", name)
    threads.join()
    assert "1 times" in queue.log(slow)[0].error


def test_an_end_that_is_cancelled_too_is_told_all_the_same(database, connect, name, threads):
    """The second cancel comes while the session records that the first one ended its task."""
    queue = connect().queue(name)
    slow = queue.put(sqlsem.Sql("SELECT pg_sleep(60)"))

    def call():
        with (
            database.raw() as session,
            pytest.raises(errors.QueryCanceled, match=f"task {slow} was broken off: canceling statement"),
        ):
            session.execute("CALL sqlsem.work(%s, 0)", (name,))

    threads.start(call)
    until(lambda: queue.tasks("running"))
    pid = queue.log(slow)[0].session_id
    rests = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND wait_event_type = %s"
    with database.raw(autocommit=False) as other, database.raw() as looker:
        other.execute("SELECT FROM sqlsem.task WHERE task_id = %s FOR UPDATE", (slow,))
        for wait_event in ("Timeout", "Lock"):
            until(lambda wait_event=wait_event: looker.execute(rests, (pid, wait_event)).fetchone() == (1,))
            looker.execute("SELECT pg_cancel_backend(%s)", (pid,))
        # The cancel struck while it recorded the end; it tries again, and waits for the row's lock again.
        until(lambda: looker.execute(rests, (pid, "Lock")).fetchone() == (1,))
        other.rollback()
    threads.join()
    assert [run.outcome for run in queue.log(slow)] == ["failed"]
    assert queue.tasks("running") == []


@pytest.fixture
def may_see(database):
    """True if the installing role sees the statements of other sessions."""
    with granted_to_owner(database, "pg_read_all_stats"):
        yield


@pytest.mark.usefixtures("may_signal", "may_see")
def test_session_is_left_alone_after_its_call(database, login, connect, name, threads):
    queue = connect().queue(name)
    queue.put(sqlsem.Sql("SELECT 1"), time_limit=0.01)
    notified = threading.Event()

    def tend():
        notified.wait(PATIENCE)
        with database.raw() as looker:
            asleep = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND query = %s"
            until(lambda: looker.execute(asleep, ("SELECT pg_sleep(1), 2",)).fetchone() is not None)
            looker.execute("SELECT sqlsem.recover_tasks(%s, NULL)", (name,))
            (task,) = queue.tasks("running")
            connect().admin.cancel_task(task.task_id)

    threads.start(tend)
    with login("sqlsem_worker").raw() as session:
        session.execute("SELECT sqlsem.session_claim(%s)", (name,))
        notified.set()
        assert session.execute("SELECT pg_sleep(1), 2").fetchone() == ("", 2)
        threads.join()
        session.execute("CALL sqlsem.work(%s, 0)", (name,))
    assert [task.status for task in queue.tasks()] == ["cancelled"]


def test_time_is_counted_from_the_claim(database, connect, name, threads):
    """By the sessions that end the task, and by the session that gets the cancel."""
    queue = connect().queue(name, on_failure="continue")
    slow = queue.put(sqlsem.Sql("SELECT pg_sleep(60)"), time_limit=600)
    results = []
    threads.start(work, database, name, 0, results)
    until(lambda: queue.tasks("running"))
    database.rows("UPDATE sqlsem.task SET claimed_at = claimed_at - interval '1 hour' WHERE task_id = ?", slow)
    cancel_asleep(database, queue.log(slow)[0].session_id)
    threads.join()
    assert results == [(0, 1)]
    assert queue.log(slow)[0].error == "It ran for longer than its time limit of 600 s, and was ended"


def test_deferred_error_fails_the_task(database, connect, name, table):
    made = table()
    database.rows(f"ALTER TABLE {made} ADD UNIQUE (a) DEFERRABLE INITIALLY DEFERRED")
    queue = connect().queue(name, on_failure="continue")
    queue.put(sqlsem.Sql(f"INSERT INTO {made} VALUES (1), (1)"))
    queue.put(sqlsem.Sql("SET ROLE pg_read_all_data"))
    queue.put(sqlsem.Sql(f"INSERT INTO {made} VALUES (2)"))
    assert work(database, name, 0) == (1, 2)
    assert sorted(entry.error.partition(":")[0] for entry in queue.tasks("failed")) == ["23505", "42501"]
    assert database.rows(f"SELECT a FROM {made}") == [(2,)]


def test_work_of_an_expired_session_is_rolled_back(database, connect, name, threads, table):
    """Its body frees the session's locks, so that the session looks dead."""
    made = table()
    queue = connect().queue(name)
    number = queue.put(
        sqlsem.Sql(f"INSERT INTO {made} VALUES (1); SELECT pg_advisory_unlock_all(); SELECT pg_sleep(3)")
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
    assert database.rows(f"SELECT a FROM {made}") == []
    assert [run.outcome for run in queue.log(number)] == ["lost", "finished"]


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


def test_roles_for_putting_and_running(login, user, connect, name):
    """Putters put code, and workers run it; users of locks and operators may do neither."""
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
    with contextlib.closing(worker.coordinator()) as workers_tasks:
        with workers_tasks.queue(name).try_claim() as task:
            assert task.body == 1
    # It runs the code with the worker's rights.
    queue = connect().queue(name("b"))
    queue.put(sqlsem.Sql("SELECT * FROM sqlsem.task"))
    assert work(worker, name("b"), 0) == (0, 1)
    (failed,) = queue.tasks("failed")
    assert failed.error.startswith("42501: permission denied for table task\nCONTEXT: ")
    assert failed.login == name_of_login(worker)


def test_roles_that_see_task_bodies(login, user, connect, name):
    """Bodies may hold secrets: a putter sees its own tasks, a user of locks none."""
    putter, other = login("sqlsem_putter"), login("sqlsem_putter")
    (number,) = putter.rows("SELECT sqlsem.put(?, 'SELECT 1')", name)[0]
    listing, attempts = (
        "SELECT task_id, body, put_by FROM sqlsem.list_tasks(?)",
        "SELECT * FROM sqlsem.task_attempts(?)",
    )
    expected = [(number, "SELECT 1", name_of_login(putter))]
    for sees in (putter, login("sqlsem_worker"), login("sqlsem_operator"), login("sqlsem_reader")):
        assert sees.rows(listing, name) == expected
        sees.rows(attempts, number)
    assert other.rows(listing, name) == []
    for text in (listing, attempts):
        with pytest.raises(errors.InsufficientPrivilege):
            user.rows(text, name if text is listing else number)
    # Putters cannot cancel other logins' tasks, but operators can.
    assert other.rows("SELECT sqlsem.set_task(?, 'cancel')", number) == [(-1,)]
    assert login("sqlsem_operator").rows("SELECT sqlsem.set_task(?, 'cancel')", number) == [(0,)]
    assert putter.rows("SELECT sqlsem.set_task(?, 'retry')", number) == [(0,)]
    assert putter.rows("SELECT sqlsem.set_task(?, 'cancel')", number) == [(0,)]


def test_a_worker_ends_only_its_own_tasks(login, connect, name):
    connect().queue(name).put(1)
    owner = connect()
    task = owner.queue(name).try_claim()
    with login("sqlsem_worker").raw() as connection:
        stolen = "SELECT sqlsem.end_task(%s, %s, %s, 'finished', NULL, NULL)"
        assert connection.execute(stolen, (owner.client.member.member_id, task.id, task.attempt)).fetchone() == (None,)
        with pytest.raises(errors.NoDataFound):
            connection.execute(
                "SELECT * FROM sqlsem.claim_task(%s, %s, 'x', 'u', false)", (owner.client.member.member_id, name)
            )
        connection.execute("SELECT sqlsem.return_claim(%s, %s, %s)", (owner.client.member.member_id, name, task._uid))
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
def test_unreadable_values_are_refused(database, name, arguments):
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
    assert [task.task_id for task in queue.tasks()] == numbers
    for number in numbers:
        connect().admin.cancel_task(number)


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
        connect().admin.cancel_task(number)
