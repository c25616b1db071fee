"""The rights of logins: no login releases another login's locks.

Where the server runs procedures with their callers' rights (no ownership chaining), a member of the role cannot work at
all. So the rights of the role are looked up there, and one login's reach into another's rows is tried with rights to
the tables granted by hand.
"""

import contextlib
import re
import secrets

import pytest

import sqlsem
from sqlsem import batches

pytestmark = pytest.mark.engines("mssql")

MEMBERS = {"register_member", "reattach_member", "heartbeat", "deregister_member", "warm_up", "prune",
           "prune_tasks", "prune_operations", "settings", "overview"}  # fmt: skip
LOCKS = {"acquire", "try", "release", "renew", "assert_holding", "register", "register_all", "wait",
         "poll_waiters", "acquire_by_priority", "cancel", "pin", "find_deadlock", "begin_upgrade",
         "upgrade", "downgrade", "recover_batches", "start_part", "end_part", "claim_callback",
         "return_callback", "end_callback", "batch_part_start", "batch_part_finish", "batch_part_fail",
         "batch_resume", "batch_callback_ended", "hand_over_rows", "adopt_rows", "hand_over", "adopt",
         "take_rate", "adjust_rate", "take", "adjust", "once_begin", "once_finish", "once_due", "mark_once",
         "once_forget", "release_on_commit", "is_committed", "delete_commit_marker"}  # fmt: skip
LOOKS = {"entries", "may_enter", "status", "past", "resources", "list_batches", "resource_settings",
         "operations", "why", "estimate", "guarded_tables", "rates", "priorities", "once_runs"}  # fmt: skip
PUTS = {"put", "put_task", "save_schedule"}
WORKS = {"work", "claim_task", "claim_tasks", "claim_blocked", "end_task", "next_task", "return_claim",
         "task_controls", "fire_schedule"}  # fmt: skip
TASKS = {"queue_state", "queue_counts", "list_tasks", "show_tasks", "queue_limits", "queue_waits",
         "task_attempts", "list_schedules", "show_task_locks"}  # fmt: skip
HELD = {
    "release",
    "pin",
    "hand_over_rows",
    "release_on_commit",
    "is_committed",
    "delete_commit_marker",
    "entries",
    "may_enter",
}  # with tasks
GUARDS = {"guard_table", "unguard_table", "session_entry"}
ASKED = {"check_guard"}  # of the triggers of guarded tables
OPERATORS = {"set_queue", "set_resource", "set_limit", "pause", "resume", "revoke", "reap",
             "abandon_batch", "revoke_members", "set_rate", "reset_rate"}  # fmt: skip
INTERNAL = {"session_acquire_by_priority", "require_priority", "remove", "release_session_lock",
            "delete_member_rows", "check_if_dead", "reap_dead_members", "check_name", "check_not_reserved",
            "check_lease", "check_request", "session_name", "session_member", "client_sleep",
            "release_rows", "check_liveness", "take_task", "session_claim", "session_end",
            "recover_session_tasks", "lock_batch", "store_callback", "parts_in", "raise_error",
            "escape_control_chars", "touch_member", "may_run_callback", "take_beacon",
            "check_grace_or_lease", "touch_worker", "sees_all", "session_part_end", "convert_row",
            "rotate_wakeup_lock", "wait_until_lock_free", "backoff_sleep", "check_registration",
            "check_period", "check_work", "put_task_by", "ages_to_times", "pick_fair_task", "find_table",
            "check_locks", "check_may_lock", "store_task_locks", "block_task", "end_task_rows", "leave_lock_queues",
            "proxy_member", "has_room", "enqueue_locks", "poll_lock_queues", "next_blocked_task",
            "check_lock_holders", "check_rate", "check_rate_name", "use_rate", "begin_window", "take_tokens",
            "drop_future_slots", "check_task_options", "check_due", "check_members", "task_may_start", "simulate_queue",
            "take_waiter_slot", "poll_pause", "advance_low_water_mark", "check_origin", "set_numbers"}  # fmt: skip
TENDS = {"recover_tasks", "maintain_queue"}
CHANGES = {"set_task", "cancel_task", "set_schedule"}
EVERY = MEMBERS | LOCKS | LOOKS | PUTS | WORKS | TASKS | OPERATORS | TENDS | CHANGES | GUARDS | ASKED


def procedures(database):
    rows = database.rows(
        "SELECT name FROM sys.procedures WHERE schema_id = SCHEMA_ID(?) AND type = 'P'", database.schema
    )
    return {name for (name,) in rows}


def functions(database):
    rows = database.rows(
        "SELECT name FROM sys.objects WHERE schema_id = SCHEMA_ID(?) AND type IN ('FN', 'IF')", database.schema
    )
    return {name for (name,) in rows}


def tables(database):
    rows = database.rows(
        "SELECT name FROM sys.objects WHERE schema_id = SCHEMA_ID(?) AND type IN ('U', 'V')", database.schema
    )
    return {name for (name,) in rows}


def test_every_procedure_is_known_here(database):
    assert procedures(database) == EVERY | INTERNAL


@pytest.fixture
def login(database, new_session):
    """``login(role)``: the words of a connection as a new login, that is a member of the role."""
    import pyodbc

    admin = database.raw()
    logins = []

    def make(role):
        name, password = f"sqlsem_{secrets.token_hex(5)}", f"Aa1_{secrets.token_hex(10)}"
        try:
            admin.execute(f"CREATE LOGIN {name} WITH PASSWORD = '{password}'")
        except pyodbc.Error as exc:
            pytest.skip(f"this login may not create logins: {exc}")
        logins.append(name)
        admin.execute(f"CREATE USER {name} FOR LOGIN {name}")
        admin.execute(f"ALTER ROLE {database.schema}_{role} ADD MEMBER {name}")
        return name, password

    yield make
    for name in logins:
        for (spid,) in admin.execute(
            "SELECT session_id FROM sys.dm_exec_sessions WHERE login_name = ?", name
        ).fetchall():
            with contextlib.suppress(pyodbc.Error):  # its session must have ended before the login is dropped
                admin.execute(f"KILL {int(spid)}")
        admin.execute(f"DROP USER IF EXISTS {name}")
        admin.execute(f"DROP LOGIN {name}")
    admin.close()


@pytest.fixture
def as_login(database, login):
    """``as_login(role)``: a session of a new login that is a member of that role, and its name."""
    import pyodbc

    from sqlsem.engines.mssql.odbc import join, words_of_odbc

    connections = []

    def start(role):
        user, password = login(role)
        words = words_of_odbc(database.make_engine().odbc_string)
        words = {key: value for key, value in words.items() if key.lower() not in ("uid", "pwd", "trusted_connection")}
        connections.append(pyodbc.connect(join({**words, "UID": user, "PWD": password}), autocommit=True))
        return connections[-1], user

    yield start
    for connection in connections:
        connection.close()


def may(connection, database, right, names):
    cursor = connection.cursor()
    allowed = set()
    for name in names:
        cursor.execute("SELECT HAS_PERMS_BY_NAME(?, N'OBJECT', ?)", f"{database.schema}.[{name}]", right)
        if cursor.fetchone()[0] == 1:
            allowed.add(name)
    return allowed


TABLES = {"ProcessControl", "entry", "member", "resource", "history", "setting", "task", "task_log",
          "batch", "batch_part", "operation", "schedule", "handover", "queue_setting", "queue_key",
          "queue_wait", "once_run", "rate_window", "rate_slot", "task_lock", "queue_proxy"}  # fmt: skip


@pytest.mark.parametrize(
    ("role", "runs", "reads"),
    [
        ("user", MEMBERS | LOCKS | LOOKS | GUARDS | ASKED, set()),
        ("putter", MEMBERS | PUTS | TASKS | TENDS | CHANGES | ASKED, set()),
        ("worker", MEMBERS | WORKS | TASKS | TENDS | ASKED | HELD, set()),
        (
            "operator",
            MEMBERS | LOCKS | LOOKS | TASKS | OPERATORS | TENDS | CHANGES | GUARDS | ASKED,
            TABLES,
        ),
        ("reader", {"settings", "overview"} | ASKED | LOOKS | TASKS, TABLES),
    ],
)
def test_roles_grant_the_documented_rights(database, as_login, role, runs, reads):
    connection, _ = as_login(role)
    assert may(connection, database, "EXECUTE", EVERY | INTERNAL) == runs
    assert may(connection, database, "SELECT", TABLES) == reads
    for right in ("INSERT", "UPDATE", "DELETE"):
        assert may(connection, database, right, TABLES) == set()


@pytest.mark.parametrize(
    "text",
    [
        "SELECT * FROM {s}.entry",
        "DELETE FROM {s}.entry",
        "INSERT INTO {s}.ProcessControl (resource_id, requesting_id) VALUES ('x', 'y')",
        "UPDATE {s}.member SET lease_until = NULL",
        "EXEC {s}.pause N'x'",
        "EXEC {s}.set_limit N'x', 1",
        "EXEC {s}.reap",
        "EXEC {s}.[revoke] 1",
        "EXEC {s}.remove N'x', 1, N'x'",
        "SELECT * FROM {s}.task",
        "UPDATE {s}.task SET body = N'DROP TABLE x'",
        "EXEC {s}.set_task 1, N'retry'",
        "EXEC {s}.take_task 1, N'x', N'x', N'x', 0, NULL",
        "EXEC {s}.put N'x', N'1', N'json'",
        "EXEC {s}.work N'x', 0",
        "EXEC {s}.claim_task 1, N'x', N'x', N'x'",
        "EXEC {s}.list_tasks",
    ],
)
def test_a_user_is_refused_the_rest(database, as_login, text):
    import pyodbc

    connection, _ = as_login("user")
    with pytest.raises(pyodbc.Error, match=r"(?i)permission"):
        connection.execute(text.replace("{s}", database.schema))


def test_the_user_role_is_enough(database, as_login, refused, name):
    import pyodbc

    connection, _ = as_login("user")
    text = (
        f"DECLARE @a int, @b int, @c int, @p bigint, @s nvarchar(255) = ?; "
        f"EXEC @a = {database.schema}.acquire @s, @position = @p OUTPUT; EXEC @b = {database.schema}.renew @s, @p; "
        f"BEGIN TRANSACTION; EXEC {database.schema}.assert_holding @s, @p; COMMIT; "
        f"EXEC @c = {database.schema}.release @s; SELECT @a, @b, @c"
    )
    try:
        cursor = connection.execute(text, name)
    except pyodbc.Error as exc:
        inner = re.search(r"permission denied for \w+ (\w+)", str(exc))
        if inner is None or inner[1] not in INTERNAL | tables(database) | functions(database):
            raise
        pytest.skip(f"this server has no ownership chaining: {exc}")
    while cursor.description is None:
        cursor.nextset()
    assert tuple(cursor.fetchone()) == (0, 0, 0)


def grant_all(database, user, request):
    """Grant all rights to the tables and routines, for as long as the test lasts.

    For servers without ownership chaining. (SQL Server has it, and no right EXECUTE on inline functions.)
    """
    if database.rows("SELECT 1 WHERE @@VERSION LIKE N'Microsoft SQL %'"):
        return
    everything = {
        "EXECUTE": procedures(database) | functions(database),
        "SELECT": tables(database),
        "INSERT": tables(database),
        "UPDATE": tables(database),
        "DELETE": tables(database),
    }
    rights = [f"{right} ON {database.schema}.[{name}]" for right, names in everything.items() for name in names]
    rights.append(f"UPDATE ON {database.schema}.beacon")

    def change(word, direction):
        connection = database.raw()  # one for all: connecting is what takes long
        for right in rights:
            connection.execute(f"{word} {right} {direction} {user}")
        connection.close()

    request.addfinalizer(lambda: change("REVOKE", "FROM"))
    change("GRANT", "TO")


def first_value(connection, text, *parameters):
    """The first value of the first row that a batch answers with."""
    cursor = connection.cursor()
    cursor.execute(text, parameters)
    while cursor.description is None:
        cursor.nextset()
    return cursor.fetchone()[0]


def test_roles_bound_the_kinds_of_tasks(session, database, as_login, request, name):
    """Code runs with the worker's rights: only putters put it, whatever other rights a login has."""
    import pyodbc

    text = f"EXEC {database.schema}.put ?, N'1', @kind = ?"
    plain, user = as_login("user")
    grant_all(database, user, request)
    plain.execute(text, name, "json")
    for kind in ("sql", "shell", "call", "SQL"):
        with pytest.raises(pyodbc.Error, match=f"{user} may put JSON tasks only.*{database.schema}_putter") as caught:
            plain.execute(text, name, kind)
        assert "(50006)" in str(caught.value)
    putter, putting = as_login("putter")
    grant_all(database, putting, request)
    for kind in ("sql", "shell", "call", "json"):
        putter.execute(text, name, kind)
    rows = session().rows("EXEC {s}.list_tasks ?", name)
    assert [row[3] for row in rows] == ["json", "sql", "shell", "call", "json"]


def test_schedule_is_changed_by_its_owner_or_operators(database, as_login, request, name):
    """A schedule may put only the tasks that its owner may put."""
    import pyodbc

    save = f"EXEC {database.schema}.save_schedule ?, N'q', N'0 2 * * *', N'UTC', ?, N'1', ?, N'2026-01-01T02:00:00'"
    change = f"DECLARE @c int; EXEC @c = {database.schema}.set_schedule ?, ?, N'2099-01-01T02:00:00'; SELECT @c"
    shown = f"EXEC {database.schema}.list_schedules ?"
    (owner, owner_login), (other, other_login), (operator, chief) = (
        as_login("putter"),
        as_login("putter"),
        as_login("operator"),
    )
    plain, users = as_login("user")
    for user in (owner_login, other_login, chief, users):
        grant_all(database, user, request)
    owner.execute(save, name, "sql", "{}")
    with pytest.raises(pyodbc.Error, match=f"schedule {name} is of login {owner_login}") as caught:
        other.execute(save, name, "sql", "{}")
    assert "(50006)" in str(caught.value)
    with pytest.raises(pyodbc.Error, match=f"{users} may put JSON tasks only"):
        plain.execute(save, name("users"), "sql", "{}")
    with pytest.raises(pyodbc.Error, match="a JSON object"):
        owner.execute(save, name("worse"), "sql", "1")
    assert first_value(other, change, name, "pause") == -1
    assert other.execute(shown, name).fetchall() == []
    assert first_value(operator, change, name, "pause") == 0
    assert operator.execute(shown, name).fetchone().paused_by == chief
    assert first_value(owner, change, name, "resume") == 0
    with pytest.raises(pyodbc.Error, match="pause, resume or remove"):
        first_value(owner, change, name, "begin")
    owner.execute(save, name, "sql", '{"note": "again"}')
    assert owner.execute(shown, name).fetchone().options == '{"note": "again"}'
    assert first_value(owner, change, name, "remove") == 0
    assert first_value(owner, change, name, "remove") == -1


def test_tasks_run_with_the_workers_rights(session, database, as_login, request, name):
    import pyodbc

    worker, user = as_login("worker")
    grant_all(database, user, request)
    table = f"{database.schema}.secret_{name}"
    database.rows(f"CREATE TABLE {table} (who nvarchar(128))")
    request.addfinalizer(lambda: database.rows(f"DROP TABLE {table}"))
    connection = session()

    def put(order):
        connection.rows("EXEC {s}.put ?, ?, @order = ?", name, f"INSERT INTO {table} VALUES (ORIGINAL_LOGIN())", order)

    def work():
        cursor = worker.cursor()
        cursor.execute(f"EXEC {database.schema}.work ?, 0", name)
        while cursor.nextset():
            pass

    put(0)
    with contextlib.suppress(pyodbc.Error):  # from an engine where TRY does not catch it
        work()
    ((status, attempt),) = ((row[6], row[8]) for row in connection.rows("EXEC {s}.list_tasks ?", name))
    assert attempt == 1
    assert status != "finished"
    assert database.rows(f"SELECT who FROM {table}") == []
    database.rows(f"GRANT INSERT ON {table} TO {user}")
    put(-1)
    work()
    assert database.rows(f"SELECT who FROM {table}") == [(user,)]


def test_another_login_cannot_act_for_a_worker(session, database, as_login, request, name):
    import pyodbc

    connection = session()
    connection.rows("EXEC {s}.put ?, N'1'", name)
    connection.rows("EXEC {s}.put ?, N'2'", name)
    ((member, task),) = connection.rows(
        "DECLARE @m int, @t bigint; EXEC {s}.session_claim ?, N'me', @m OUTPUT, @t OUTPUT; SELECT @m, @t", name
    )
    stranger, user = as_login("user")
    grant_all(database, user, request)
    text = f"EXEC {database.schema}.end_task ?, ?, 1, N'finished', @answer = 1"
    assert first_value(stranger, text, member, task) is None
    with pytest.raises(pyodbc.Error, match="belongs to another login"):
        stranger.execute(f"EXEC {database.schema}.claim_task ?, ?, N'me', N'uid'", member, name)
    rows = {row[0]: row[6] for row in connection.rows("EXEC {s}.list_tasks ?", name)}
    assert sorted(rows.values()) == ["pending", "running"]
    assert rows[task] == "running"
    assert connection.rows("EXEC {s}.end_task ?, ?, 1, N'finished', @answer = 1", member, task) == [("finished",)]


def test_another_login_cannot_act_for_a_part(session, database, as_login, request, name):
    """Another login cannot take over a living member's callback, nor leave a callback that runs with other rights."""
    import pyodbc

    connection = session()
    ((number,),) = connection.rows("EXEC {s}.batch_part_start ?, N'a', N'a, b', 60", name)
    parts = f"SELECT member_id, start_uid FROM {database.beside('batch_part')} WHERE batch_id = ? AND part = N'a'"
    ((member, uid),) = database.rows(parts, number)
    stranger, user = as_login("user")
    grant_all(database, user, request)

    def call(text, *parameters):
        return first_value(stranger, f"EXEC {database.schema}.{text}, @answer = 1", *parameters)

    enrolled = call("register_member N'host', 1, N'program', 60000")
    for member_id in (member, enrolled):
        assert call("end_part ?, ?, N'a', ?, N'succeeded', NULL, N'me'", member_id, name, uid) == "lost"
    with pytest.raises(pyodbc.Error, match="another login"):
        call("start_part ?, ?, N'b', N'a\nb', 60000, N'me', N'uid'", member, name)
    assert call("start_part ?, ?, N'a', N'a\nb', 60000, N'me', N'uid'", enrolled, name) == "running"
    text = "start_part ?, ?, N'b', N'a\nb', 60000, N'me', N'uid', N'sql', N'DROP TABLE x'"
    assert call(text, enrolled, name) == "started"
    text = "end_part ?, ?, N'b', N'uid', N'succeeded', NULL, N'me', N'shell', N'rm'"
    assert call(text, enrolled, name) == "succeeded"
    assert connection.rows("EXEC {s}.batch_part_finish ?, N'a'", name) == [(1, "succeeded")]
    columns = "callback_status, callback_kind, callback_body, callback_attempt"
    then = f"SELECT {columns} FROM {database.beside('batch')} WHERE batch_id = ?"
    assert database.rows(then, number) == [("running", "local", None, 1)]
    assert call("end_callback ?, ?, 1", member, number) == 0
    assert call("return_callback ?, ?", member, uid) == 0
    with pytest.raises(pyodbc.Error, match="another login"):
        call("claim_callback ?, ?, NULL, N'me', ?, 1", member, name, uid)
    stranger.execute(f"EXEC {database.schema}.claim_callback ?, NULL, ?, N'me', N'uid', 1", enrolled, number)
    assert database.rows(then, number) == [("running", "local", None, 1)]
    assert connection.rows("EXEC {s}.batch_callback_ended ?", name) == [(number,)]


def test_user_does_not_undo_an_operators_hold(database, as_login, request, connect, name):
    batch = batches.batch(name, ["a", "b", "c"], window=60, coordinator=connect(), on_success=sqlsem.Sql("SELECT 1"))
    with batch.part("a"):
        pass
    plain, user = as_login("user")
    grant_all(database, user, request)

    def call(text, *parameters):
        return first_value(plain, f"EXEC {database.schema}.{text}, @answer = 1", *parameters)

    member = call("register_member N'host', 1, N'program', 60000")
    text = "start_part ?, ?, N'b', N'a\nb\nc', 60000, N'me', N'uid', N'shell', N'rm'"
    assert call(text, member, name) == "started"
    text = "end_part ?, ?, N'b', N'uid', N'succeeded', NULL, N'me', N'shell', N'rm'"
    assert call(text, member, name) == "succeeded"
    entry = batch.entry()
    assert (entry.callback_kind, entry.callback_body) == ("sql", "SELECT 1")
    with batch.part("c"):
        pass
    assert batch.entry().callback_status == "finished"
    plain.execute(f"EXEC {database.schema}.deregister_member ?", member)


def test_another_login_cannot_act_for_a_requester(session, database, as_login, request, name):
    """The routines refuse another login even if it has all rights to the tables, and knows all ids."""
    import pyodbc

    connection = session()
    held = connection.acquire(name, requesting_id="package")
    leased = connection.acquire(name("lease"), requesting_id="package", lease_seconds=60)
    stranger, user = as_login("user")
    grant_all(database, user, request)

    def call(text, *parameters):
        return first_value(stranger, f"DECLARE @c int; EXEC @c = {database.schema}.{text}; SELECT @c", *parameters)

    for resource, answer in ((name, held), (name("lease"), leased)):
        assert call("release ?, ?, N'package'", resource, answer.position) == -1
        assert call("release ?, @requesting_id = N'package'", resource) == -1
        assert call("renew ?, ?, N'package'", resource, answer.position) == -1
    assert call("wait ?, ?, 0", name, held.position) == -2
    assert call("begin_upgrade ?, ?, N'package', 0", name, held.position) == -2
    assert call("upgrade ?, ?, N'package', 0", name, held.position) == -2
    assert call("downgrade ?, ?, N'package'", name, held.position) == -1
    ((access,),) = database.rows("SELECT access_type FROM {table} WHERE queue_position = ?", held.position)
    assert access == "write"
    assert len(database.queue(name)) == 2
    # Nor for the wakeup lock, which any login could take: a lease has none.
    entry = f"entry.sqlsem.{database.schema}.{leased.position}"
    stranger.execute("EXEC sp_getapplock ?, N'Exclusive', N'Session', 0, N'public'", entry)
    assert call("release ?, ?, N'package'", name("lease"), leased.position) == -1
    stranger.execute("EXEC sp_releaseapplock ?, N'Session', N'public'", entry)
    stranger.execute("BEGIN TRANSACTION")
    with pytest.raises(pyodbc.Error, match=r"another login's.*\(50006\)"):
        stranger.execute(f"EXEC {database.schema}.pin ?, ?, N'package'", name, held.position)
    stranger.execute("IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION")
    assert call("try ?, @lease_seconds = 60", name("own")) == 0
    assert call("release ?", name("own")) == 0
    assert connection.release(name, requesting_id="package") == 0
    assert connection.release(name("lease"), requesting_id="package") == 0


def test_a_putter_has_its_own_tasks_alone(session, database, as_login, request, name):
    caller = session()
    caller.rows("EXEC {s}.put ?, N'SELECT 1'", name)
    putter, user = as_login("putter")
    grant_all(database, user, request)
    putter.execute(f"EXEC {database.schema}.put ?, N'SELECT 2'", name)

    def seen(connection):
        cursor = connection.execute(f"EXEC {database.schema}.list_tasks ?", name)
        while cursor.description is None:
            cursor.nextset()
        return [(row[0], row[4], row[23]) for row in cursor.fetchall()]

    ((own, body, put_by),) = seen(putter)
    assert (body, put_by) == ("SELECT 2", user)
    every = seen(caller.connection)
    assert [body for _, body, _ in every] == ["SELECT 1", "SELECT 2"]
    others = every[0][0]
    text = "set_task ?, N'cancel', @answer = 1"
    assert first_value(putter, f"EXEC {database.schema}.{text}", others) == -1
    assert first_value(putter, f"EXEC {database.schema}.{text}", own) == 0
    assert caller.rows("EXEC {s}." + text, others) == [(0,)]


def test_old_grants_are_taken_back_and_roles_can_be_made_again(database, as_login):
    from sqlsem import sql

    connection, _ = as_login("user")
    assert may(connection, database, "EXECUTE", {"work", "put"}) == set()
    database.rows(f"GRANT EXECUTE ON {database.schema}.[work] TO {database.schema}_user")
    assert may(connection, database, "EXECUTE", {"work", "put"}) == {"work"}
    if not database.rows("SELECT TOP (1) 1 FROM sys.database_permissions"):
        pytest.skip("this server lists no permissions, so the script cannot see any")
    admin = database.raw()
    for batch in re.split(r"(?m)^GO$", sql.script("mssql", "permissions", schema=database.schema)):
        if batch.strip():
            admin.execute(batch)
    admin.close()
    assert may(connection, database, "EXECUTE", EVERY | INTERNAL) == MEMBERS | LOCKS | LOOKS | GUARDS | ASKED
