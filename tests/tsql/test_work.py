"""The work queue from T-SQL alone: put, and work in several sessions, as Agent jobs call it."""

import itertools
import time

import pytest
from support import PATIENCE, remains, until

pytestmark = pytest.mark.engines("mssql")


@pytest.fixture
def put(session, name):
    """``put(body, …)`` puts a task, and returns its number."""
    connection = session()

    def put(body, *, by=connection, queue=name, **named):
        marks = "".join(f", @{key} = ?" for key in named)
        ((task,),) = by.rows(
            f"DECLARE @t bigint; EXEC {{s}}.put ?, ?{marks}, @task_id = @t OUTPUT; SELECT @t",
            queue,
            body.replace("{s}", by.database.schema),
            *named.values(),
        )
        return task

    return put


def work(session, queue, idle_seconds=0.0):
    """Run ``work`` to its end, and return the numbers of finished and failed tasks."""
    *_, last = session.rows(
        "DECLARE @d int, @f int; EXEC {s}.work ?, ?, @d OUTPUT, @f OUTPUT; SELECT @d, @f", queue, idle_seconds
    )
    return last


def state(session, queue):
    return {row[0]: row for row in session.rows("EXEC {s}.list_tasks ?, NULL, 1000", queue)}


def statuses(session, queue):
    """Return the tasks' states, in the order in which they were put."""
    return [row[6] for _, row in sorted(state(session, queue).items())]


def attempts(session, task):
    """Return (outcome, error) of every attempt."""
    return [(row[2], row[11]) for row in session.rows("EXEC {s}.task_attempts ?", task)]


@pytest.fixture
def notes(database, name):
    """Make a table for the notes of tasks, ``n`` in the order of ``at``, and return its name."""
    table = f"{database.schema}.notes_{name}"
    database.rows(f"CREATE TABLE {table} (at int IDENTITY PRIMARY KEY, n int NOT NULL)")
    yield table
    database.rows(f"DROP TABLE {table}")


def written(database, notes):
    return [n for (n,) in database.rows(f"SELECT n FROM {notes} ORDER BY at")]


def note(notes, n):
    return f"INSERT INTO {notes} (n) VALUES ({n})"


def note_and_await(notes, n, other):
    """Return the body of a task that ends when another note is there."""
    return f"{note(notes, n)}; WHILE NOT EXISTS (SELECT 1 FROM {notes} WHERE n = {other}) EXEC {{s}}.client_sleep 10"


# -- several sessions -----------------------------------------------------------------------------------------------


def test_ten_tasks_two_at_a_time(session, database, put, notes, name):
    """Each task ends only when its pair has begun; so they do run two at a time, and never three."""
    tasks = []
    for n in range(10):
        both = n // 2 * 2 + 2
        tasks.append(
            put(
                f"{note(notes, n)}; WHILE (SELECT COUNT(*) FROM {notes}) < {both} EXEC {{s}}.client_sleep 5",
                note=f"no {n}",
            )
        )
    connection, other, looker = session(), session(), session()
    workers = [connection.later(work, connection, name, 0.5), other.later(work, other, name, 0.5)]
    done = [worker.result(PATIENCE) for worker in workers]
    assert sum(count for count, _ in done) == 10
    assert [count for _, count in done] == [0, 0]
    assert sorted(written(database, notes)) == list(range(10))
    assert statuses(looker, name) == ["finished"] * 10
    spans, spids = [], set()
    for task in tasks:
        ((_, attempt, outcome, member, owner, host, _, spid, started, ended, seconds, error, *_),) = looker.rows(
            "EXEC {s}.task_attempts ?", task
        )
        assert (attempt, outcome, error) == (1, "finished", None)
        assert member is not None
        assert owner.startswith(f"spid {spid} 20")
        assert seconds == pytest.approx((ended - started).total_seconds(), abs=0.001)
        assert host == looker.rows("SELECT HOST_NAME()")[0][0]
        spids.add(spid)
        spans.append((started, ended))
    assert spids == {connection.pid, other.pid}
    for pair in range(0, 10, 2):
        (began, over), (began_too, over_too) = spans[pair], spans[pair + 1]
        assert max(began, began_too) <= min(over, over_too)
    for began, _ in spans:
        assert sum(start <= began < end for start, end in spans) <= 2


def test_no_task_twice(session, database, put, notes, name):
    for n in range(200):
        put(note(notes, n), order=n // 100)
    sessions = [session() for _ in range(4)]
    workers = [client.later(work, client, name, 0.3) for client in sessions]
    done = [worker.result(PATIENCE) for worker in workers]
    assert sum(count for count, _ in done) == 200
    assert sum(count for _, count in done) == 0
    numbers = written(database, notes)
    assert sorted(numbers) == list(range(200))
    assert all(n < 100 for n in numbers[:100]), "an order began before the one below it had ended"


def test_the_task_of_a_killed_session_runs_again_elsewhere(session, new_session, database, put, notes, name):
    task = put(note_and_await(notes, 1, 0))
    victim, connection = new_session(), session()
    doomed = victim.later(work, victim, name)
    until(lambda: written(database, notes) == [1], "the task running")
    waiting = connection.later(work, connection, name, 8)
    remains(lambda: written(database, notes) == [1], 0.5, "a live session keeps its task")
    killer = session()
    killer.rows(f"KILL {victim.pid}")
    with pytest.raises(Exception):  # noqa: B017  (drivers differ in what they make of it)
        doomed.result(PATIENCE)
    left_at = time.monotonic()
    until(lambda: written(database, notes) == [1, 1], "the task running again")
    assert time.monotonic() - left_at < 5
    database.rows(note(notes, 0))
    assert waiting.result(PATIENCE) == (1, 0)
    assert attempts(killer, task) == [("lost", "its worker died"), ("finished", None)]


def test_recovery_leaves_a_reclaimed_task(session, new_session, database, put, name, held_member):
    """The recovery has to wait between its read of the queue and its decision."""
    task = put("SELECT 1")
    victim, connection, live = new_session(), session(), session()
    claim = "DECLARE @m int, @t bigint; EXEC {s}.session_claim ?, N'me', @m OUTPUT, @t OUTPUT; SELECT @m, @t"
    ((dead, claimed),) = victim.rows(claim, name)
    assert claimed == task
    ((member, none),) = live.rows(claim, name)
    assert none is None
    with held_member(dead):
        victim.die()
        recovering = connection.later(connection.call, "recover_tasks", name, None)
        remains(lambda: not recovering.done(), 1, "the recovery waits for the member's row")
        database.rows(
            f"UPDATE {database.beside('task')} SET attempt = attempt + 1, member_id = ? WHERE task_id = ?", member, task
        )
    assert recovering.result(PATIENCE) == 0
    until(
        lambda: connection.call("recover_tasks", name, None) == 0 and not members(database, dead), "the dead one gone"
    )
    (row,) = state(connection, name).values()
    assert (row[6], row[8], row[10], row[17]) == ("running", 2, 0, member)
    assert live.rows("EXEC {s}.end_task ?, ?, 2, N'finished', @answer = 1", member, task) == [("finished",)]


def members(database, member):
    return database.rows(f"SELECT member_id FROM {database.beside('member')} WHERE member_id = ?", member)


def test_task_lost_while_running_is_not_counted_as_done(session, database, put, notes, name):
    task = put(
        f"IF NOT EXISTS (SELECT 1 FROM {notes}) DELETE FROM {database.beside('member')} WHERE session_id = @@SPID; "
        f"{note(notes, 1)}"
    )
    connection = session()
    assert work(connection, name, 1) == (1, 1)
    assert attempts(connection, task) == [("lost", "its worker died"), ("finished", None)]
    assert written(database, notes) == [1, 1]


@pytest.mark.parametrize("how", ["work", "reap"])
def test_the_task_of_a_closed_session_runs_again_elsewhere(session, new_session, put, name, how):
    task = put("SELECT 1")
    victim, connection = new_session(), session()
    ((claimed,),) = victim.rows(
        "DECLARE @m int, @t bigint; EXEC {s}.session_claim ?, N'me', @m OUTPUT, @t OUTPUT; SELECT @t", name
    )
    assert claimed == task
    assert work(connection, name) == (0, 0)
    connection.call("reap")
    assert statuses(connection, name) == ["running"]
    victim.close()
    if how == "reap":
        until(
            lambda: connection.call("reap") >= 0 and statuses(connection, name) == ["pending"],
            "the task being pending again",
        )
        assert work(connection, name) == (1, 0)
    else:
        assert work(connection, name, 2) == (1, 0)
    assert attempts(connection, task) == [("lost", "its worker died"), ("finished", None)]


def test_task_fails_after_five_dead_workers(session, database, put, name):
    task = put("SELECT 1")
    connection = session()
    for _ in range(5):
        database.rows(
            f"UPDATE {database.beside('task')} SET status = 'running', member_id = -1, attempt = attempt + 1, "
            f"claimed_at = SYSUTCDATETIME() WHERE task_id = ?",
            task,
        )
        assert connection.call("recover_tasks", name, None) == 1
    assert work(connection, name) == (0, 0)
    assert statuses(connection, name) == ["failed"]
    assert state(connection, name)[task][21] == "its worker died five times"
    assert [outcome for outcome, _ in attempts(connection, task)] == ["lost"] * 5


# -- what tasks do wrong --------------------------------------------------------------------------------------------


def test_errors_are_kept_and_the_work_goes_on(session, database, put, notes, name):
    failed_tasks = [
        put("SELECT 1 / 0", on_failure="continue"),
        put("THROW 51000, N'out of customers', 1", on_failure="continue"),
        put(f"BEGIN TRANSACTION; {note(notes, 1)}", on_failure="continue"),
        put(f"BEGIN TRANSACTION; {note(notes, 2)}; THROW 51000, N'halfway', 1", on_failure="continue"),
        put("SET XACT_ABORT ON; BEGIN TRANSACTION; SELECT 1 / 0", on_failure="continue"),
        put('{"any": "value"}', kind="json", on_failure="continue"),
        put(note(notes, 3)),
    ]
    connection = session()
    assert work(connection, name) == (1, 6)
    assert connection.rows("SELECT @@TRANCOUNT") == [(0,)]
    attempts_of = [attempts(connection, task) for task in failed_tasks]
    assert [[outcome for outcome, _ in rows] for rows in attempts_of] == [["failed"]] * 6 + [["finished"]]
    errors = [rows[0][1] for rows in attempts_of]
    assert errors[0].startswith("8134: ")
    assert errors[1].startswith("51000: out of customers")
    assert errors[2] == "it left a transaction open, which was rolled back; commit at its end"
    assert errors[3].startswith("51000: halfway")
    assert errors[4].startswith("8134: ")
    assert errors[5] == "a database session runs SQL, not kind json; use sqlsem work"
    assert written(database, notes) == [3], "what was not committed is undone"
    assert [state(connection, name)[task][21] for task in failed_tasks] == errors


def test_attempts_and_their_pauses(session, database, put, notes, name):
    task = put(
        f"{note(notes, 1)}; IF (SELECT COUNT(*) FROM {notes}) < 3 THROW 51000, N'not yet', 1",
        max_attempts=3,
        backoff_seconds=0.4,
    )
    connection = session()
    assert work(connection, name, 2) == (1, 2)
    rows = connection.rows("EXEC {s}.task_attempts ?", task)
    assert [row[2] for row in rows] == ["failed", "failed", "finished"]
    first, second = ((late[8] - early[9]).total_seconds() for early, late in itertools.pairwise(rows))
    assert 0.19 < first < 0.4 + 2
    assert 0.39 < second < 0.8 + 2
    row = state(connection, name)[task]
    assert (row[6], row[8], row[9], row[10]) == ("finished", 3, 2, 0)


def test_failed_attempts_end(session, put, name):
    task = put("THROW 51000, N'never', 1", max_attempts=2, backoff_seconds=0)
    connection = session()
    assert work(connection, name, 0.2) == (0, 2)
    assert [outcome for outcome, _ in attempts(connection, task)] == ["failed", "failed"]
    assert statuses(connection, name) == ["failed"]
    assert work(connection, name) == (0, 0)


@pytest.mark.parametrize(
    "text",
    [
        "SET XACT_ABORT ON; SET LOCK_TIMEOUT 17; SET NOCOUNT ON",
        "SET NOCOUNT OFF; SET DATEFIRST 3; SET DEADLOCK_PRIORITY LOW",
        "SET IMPLICIT_TRANSACTIONS ON",
        "SET ROWCOUNT 1",
        "SET NOEXEC ON",
        "USE tempdb",
        "DECLARE kept CURSOR LOCAL FOR SELECT 1; OPEN kept",
        "RETURN",
    ],
)
def test_set_options_of_a_task_end_with_it(session, database, put, notes, name, text):
    connection = session()
    look = "SELECT @@OPTIONS, @@LOCK_TIMEOUT, @@TRANCOUNT, DB_ID(), @@DATEFIRST"
    before = connection.rows(look)
    options = (
        f"INSERT INTO {notes} (n) SELECT n FROM ({look}) AS s (a, b, c, d, e) "
        f"CROSS APPLY (VALUES (a), (b), (c), (d), (e)) AS v (n)"
    )
    for body in (options, text, text, options):
        put(body)
    assert work(connection, name) == (4, 0)
    values = written(database, notes)
    assert len(values) == 10
    assert values[5:] == values[:5]
    assert connection.rows(look) == before
    assert connection.rows("SELECT n FROM (VALUES (1), (2)) AS v (n)") == [(1,), (2,)]


def test_a_transaction_that_a_setting_begins(session, database, put, notes, name):
    connection = session()
    task = put(f"SET IMPLICIT_TRANSACTIONS ON; {note(notes, 1)}", on_failure="continue")
    put(f"SET IMPLICIT_TRANSACTIONS ON; {note(notes, 2)}; COMMIT TRANSACTION")
    assert work(connection, name) == (1, 1)
    assert written(database, notes) == [2]
    ((outcome, error),) = attempts(connection, task)
    assert outcome == "failed"
    assert "left a transaction open" in error


def test_the_sessions_own_settings_do_no_harm(new_session, session, database, put, notes, name):
    """The settings of a driver in manual commit, or of a script that limits its rows."""
    connection, tasks = new_session(), [put(note(notes, n)) for n in range(3)]
    with_settings = f"SET ROWCOUNT 1; SET IMPLICIT_TRANSACTIONS ON; EXEC {{s}}.work N'{name}', 0"
    after = "; SELECT @@OPTIONS & 2, @@TRANCOUNT; SELECT n FROM (VALUES (1), (2)) AS v (n)"
    database.rows(
        f"UPDATE {database.beside('task')} SET status = 'running', member_id = -1, attempt = 1, "
        f"claimed_at = SYSUTCDATETIME() WHERE queue_name = ?",
        name,
    )
    connection.rows("SET ROWCOUNT 1")
    assert connection.call("recover_tasks", name, None) == 3
    assert connection.rows(with_settings + after) == [(2, 0), (1,)]
    connection.rows("SET ROWCOUNT 0; SET IMPLICIT_TRANSACTIONS OFF")
    assert sorted(written(database, notes)) == [0, 1, 2]
    assert [attempts(connection, task)[-1] for task in tasks] == [("finished", None)] * 3
    database.rows(
        f"UPDATE {database.beside('task')} SET ended_at = DATEADD(day, -31, ended_at) WHERE queue_name = ?", name
    )
    connection.rows("SET ROWCOUNT 1")
    until(lambda: connection.call("prune_tasks", 100) == 0, "all of them being pruned")
    connection.rows("SET ROWCOUNT 0")
    assert [attempts(connection, task) for task in tasks] == [[]] * 3


def test_a_task_may_put_tasks_and_work(session, database, put, notes, name):
    ((age,),) = session().rows(
        "EXEC {s}.client_sleep 300; EXEC (N'SELECT DATEDIFF_BIG(millisecond, last_request_start_time, GETDATE()) "
        "FROM sys.dm_exec_sessions WHERE session_id = @@SPID')"
    )
    if age < 200:
        pytest.skip("to this server a request begins anew with each EXEC of a text")
    inner = put(note(notes, 2), queue=name("inner"))
    outer = put(
        f"EXEC {{s}}.put N'{name}', N'{note(notes, 3)}'; EXEC {{s}}.work N'{name('inner')}', 0; "
        f"EXEC {{s}}.work N'{name}', 0; {note(notes, 1)}"
    )
    connection = session()
    assert work(connection, name) == (1, 0)
    assert written(database, notes) == [2, 3, 1]
    assert attempts(connection, inner) == attempts(connection, outer) == [("finished", None)]


@pytest.mark.parametrize("other", ["", "other"])
def test_next_call_ends_a_cancelled_calls_claim(session, put, name, other):
    """Also by a call for another queue."""
    connection, looker = session(), session()
    task = put("SELECT 1", max_attempts=2, backoff_seconds=0)
    connection.rows("DECLARE @m int, @t bigint; EXEC {s}.session_claim ?, N'me', @m OUTPUT, @t OUTPUT", name)
    assert work(looker, name) == (0, 0)
    until(lambda: work(connection, name(other) if other else name) and statuses(looker, name) != ["running"], "its end")
    assert work(looker, name) == ((1, 0) if other else (0, 0))
    (outcome, error), last = attempts(connection, task)
    assert outcome == "failed"
    assert "broken off by its client" in error
    assert last == ("finished", None)


@pytest.mark.parametrize(
    "left",
    [
        "SET IMPLICIT_TRANSACTIONS ON",
        "SET ROWCOUNT 1",
        "SET NOCOUNT ON",
        "SET NOEXEC ON",
        "SET FMTONLY ON",
        "USE tempdb",
    ],
)
def test_worker_commits_despite_set_options_of_the_text(connect, database, notes, left):
    connect().client.run_sql(f"{note(notes, 1)}; {left}", lambda session: None)
    assert written(database, notes) == [1]


def test_a_text_that_is_only_parsed_has_an_end(connect):
    connect().client.run_sql("SET PARSEONLY ON", lambda session: None)


# -- orders ---------------------------------------------------------------------------------------------------------


def test_orders_are_barriers(session, database, put, notes, name):
    put(note(notes, 5), order=5)
    put(note_and_await(notes, 1, 0), order=-1)
    first, other = session(), session()
    working = first.later(work, first, name, 1)
    until(lambda: written(database, notes) == [1], "the first order running")
    assert work(other, name, 0.3) == (0, 0)
    put(note(notes, 2), order=-2)
    assert work(other, name) == (1, 0), "a later task of a lower order is next"
    assert written(database, notes) == [1, 2]
    database.rows(note(notes, 0))
    assert working.result(PATIENCE) == (2, 0)
    assert written(database, notes) == [1, 2, 0, 5]


def test_first_come_first_served_within_an_order(session, database, put, notes, name):
    for n in (3, 1, 2):
        put(note(notes, n), order=1)
    for n in (9, 7, 8):
        put(note(notes, n))
    assert work(session(), name) == (6, 0)
    assert written(database, notes) == [9, 7, 8, 3, 1, 2]


def test_a_failed_task_holds_up_later_orders(session, database, put, notes, name):
    connection = session()
    bad = put("THROW 51000, N'bad', 1", order=1)
    put(note(notes, 1), order=1)
    put(note(notes, 2), order=2)
    assert work(connection, name) == (1, 1)
    assert written(database, notes) == [1]
    ((pending, running, next_pending, failed, error),) = connection.rows("EXEC {s}.queue_state ?", name)
    assert (pending, running, next_pending, failed) == (True, False, False, bad)
    assert error.startswith("51000: bad")
    assert connection.call("set_task", bad, "retry") == 0
    assert work(connection, name) == (0, 1)
    assert connection.call("set_task", bad, "cancel") == 0
    assert connection.call("set_task", bad, "cancel") == -2
    assert work(connection, name) == (1, 0)
    assert written(database, notes) == [1, 2]
    assert statuses(connection, name) == ["cancelled", "finished", "finished"]
    assert connection.rows("EXEC {s}.queue_state ?", name) == [(False, False, False, None, None)]


def test_failed_task_with_continue_blocks_no_order(session, database, put, notes, name):
    connection = session()
    put("THROW 51000, N'bad', 1", order=1, on_failure="continue")
    put(note(notes, 2), order=2)
    assert work(connection, name) == (1, 1)
    assert written(database, notes) == [2]
    assert statuses(connection, name) == ["failed", "finished"]


def test_delayed_task_runs_when_due(session, put, name):
    connection = session()
    put("SELECT 1", queue=name("later"), after_seconds=3600)
    assert work(connection, name("later"), 0.2) == (0, 0)
    put("SELECT 1", after_seconds=1.5)
    assert work(connection, name, 5) == (1, 0)
    (row,) = connection.rows("EXEC {s}.list_tasks ?", name)
    put_at, ready_at, claimed_at = row[12:15]
    assert (ready_at - put_at).total_seconds() == pytest.approx(1.5, abs=0.01)
    assert claimed_at >= ready_at


# -- calls ----------------------------------------------------------------------------------------------------------


def test_a_clock_that_steps_back_holds_nothing_up(session, database, put, name):
    """As if the clock had stepped back by an hour since the puts."""
    connection = session()
    put("SELECT 1")
    put("SELECT 2", after_seconds=0.2)
    failed = put("THROW 51000, N'bad', 1", order=-1)
    assert work(connection, name) == (0, 1)
    assert connection.call("set_task", failed, "retry") == 0
    database.rows(
        f"UPDATE {database.beside('task')} SET put_at = DATEADD(hour, 1, put_at), "
        f"ready_at = DATEADD(hour, 1, ready_at) WHERE queue_name = ?",
        name,
    )
    assert work(connection, name) == (0, 1), "what was told to be done again is ready, too"
    assert connection.call("set_task", failed, "cancel") == 0
    assert work(connection, name, 0.5) == (1, 0)
    assert statuses(connection, name) == ["finished", "pending", "cancelled"]
    assert all(row[13] >= row[12] for row in state(connection, name).values()), "shown as ready since it was put"


def test_put_is_part_of_the_callers_transaction(session, new_session, put, name):
    connection, putter = session(), new_session()
    putter.rows("BEGIN TRANSACTION")
    put("SELECT 1", by=putter)
    putter.rows("ROLLBACK TRANSACTION")
    assert work(connection, name) == (0, 0)
    assert statuses(connection, name) == []
    putter.rows("BEGIN TRANSACTION")
    put("SELECT 1", by=putter)
    putter.rows("COMMIT TRANSACTION")
    assert work(connection, name) == (1, 0)


def test_a_refused_put_leaves_the_transaction_alone(session, put, refused, notes, database, name):
    connection = session()
    connection.rows(f"BEGIN TRANSACTION; {note(notes, 1)}")
    with refused(50000, "max_attempts"):
        put("SELECT 1", by=connection, max_attempts=0)
    connection.rows("COMMIT TRANSACTION")
    assert written(database, notes) == [1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"kind": "python"}, "kind is 'python'; it must be sql, shell, call or json"),
        ({"kind": None}, "kind is NULL"),
        ({"kind": "sql "}, "kind is 'sql '"),
        ({"order": None}, "order is NULL"),
        ({"after_seconds": -1}, "after_seconds must be from 0"),
        ({"after_seconds": 1e300}, "after_seconds must be from 0"),
        ({"after_seconds": None}, "after_seconds must be from 0"),
        ({"max_attempts": 0}, "max_attempts must be 1 or more, not 0"),
        ({"max_attempts": None}, "max_attempts must be 1 or more, not NULL"),
        ({"backoff_seconds": -0.5}, "backoff_seconds must be from 0"),
        ({"backoff_seconds": 1e15}, "backoff_seconds must be from 0"),
        ({"on_failure": "explode"}, "on_failure is 'explode'; it must be stop or continue"),
        ({"queue": ""}, "queue is empty"),
        ({"queue": " x"}, "begins or ends with white space"),
        ({"queue": "x" * 256}, "queue has more than 255 characters"),
    ],
)
def test_bad_arguments_of_put(put, refused, session, name, words, message):
    with refused(50000, message):
        put("SELECT 1", **words)
    assert statuses(session(), name) == []


def test_task_without_a_body_is_refused(session, refused, name):
    with refused(50000, "the body of a task is NULL"):
        session().rows("EXEC {s}.put ?, NULL", name)


def test_bad_arguments_of_work(session, refused, name):
    connection = session()
    for idle in (-1, None):
        with refused(50000, "idle_seconds must be 0 or more"):
            work(connection, name, idle)
    with refused(50000, "queue is empty"):
        work(connection, "")
    connection.rows("BEGIN TRANSACTION")
    with refused(50001, "work must not be called in an open transaction"):
        work(connection, name)
    assert connection.rows("SELECT @@TRANCOUNT") == [(1,)]
    connection.rows("ROLLBACK TRANSACTION")
    with refused(50000, "a task can be told to retry or cancel"):
        connection.call("set_task", 1, "stop")


def test_kinds_and_words_are_normalised(put, session, name):
    put("[1]", kind="JSON", on_failure="Continue", note="by hand", order=7)
    ((*_, kind, body, words, _, on_failure),) = [row[:8] for row in session().rows("EXEC {s}.list_tasks ?", name)]
    assert (kind, body, words, on_failure) == ("json", "[1]", "by hand", "continue")


def test_a_big_body(put, session, database, notes, name):
    put(f"{note(notes, 1)} -- {'é' * 1_000_000}")
    assert work(session(), name) == (1, 0)
    assert written(database, notes) == [1]


def test_a_put_that_is_repeated_finds_its_task(session, name):
    connection = session()
    text = "EXEC {s}.put_task ?, ?, N'json', N'1', @answer = 1"
    first = connection.rows(text, name, f"{name}.1")
    assert connection.rows(text, name, f"{name}.1") == first
    assert connection.rows(text, name, f"{name}.2") != first
    assert statuses(connection, name) == ["pending"] * 2


def test_old_tasks_are_pruned_with_their_log(session, database, put, name):
    connection = session()
    old, young = put("SELECT 1"), put("SELECT 2")
    assert work(connection, name) == (2, 0)
    database.rows(f"UPDATE {database.beside('task')} SET ended_at = DATEADD(day, -31, ended_at) WHERE task_id = ?", old)
    assert connection.call("prune_tasks", 100) == 1
    assert list(state(connection, name)) == [young]
    assert attempts(connection, old) == []
    assert attempts(connection, young) == [("finished", None)]


def test_list_tasks_shows_each_task(session, put, name):
    connection = session()
    done = put("SELECT 1")
    failed = put("THROW 51000, N'bad', 1", on_failure="continue")
    assert work(connection, name) == (1, 1)
    late, early = put("SELECT 1", order=2), put("SELECT 1", order=1)
    rows = connection.rows("EXEC {s}.list_tasks ?", name)
    assert [row[0] for row in rows] == [early, late, failed, done]
    assert [row[0] for row in connection.rows("EXEC {s}.list_tasks ?, N'failed'", name)] == [failed]
    assert [row[0] for row in connection.rows("EXEC {s}.list_tasks ?, NULL, 3", name)] == [early, late, failed]
    assert [row[16] is None for row in rows] == [True, True, False, False]
    assert {row[0] for row in connection.rows("EXEC {s}.list_tasks NULL, NULL, 1000")} >= {early, late, failed, done}


def test_locks_are_held_while_a_session_runs_the_task(session, put, name):
    first, other = session(), session()
    locks = f'[{{"resource": "{name}", "access": "write", "limit": 1}}]'
    held = f"IF (SELECT COUNT(*) FROM {{s}}.entry WHERE resource_id = N'{name}' AND granted_at IS NOT NULL) <> 1"
    task = put(held + " THROW 50000, N'not held', 1", locks=locks)
    other.rows("EXEC {s}.acquire ?", name)
    assert work(first, name) == (0, 0)
    ((waiting,),) = first.rows("SELECT COUNT(*) FROM {s}.entry WHERE resource_id = ? AND granted_at IS NULL", name)
    assert waiting == 1
    other.rows("EXEC {s}.release ?", name)
    assert work(first, name, 1.0) == (1, 0)
    assert attempts(first, task) == [("finished", None)]
    ((rows_left,),) = first.rows("SELECT COUNT(*) FROM {s}.entry WHERE resource_id = ?", name)
    assert rows_left == 0
