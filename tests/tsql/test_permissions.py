"""Logins: who may do what, and that nobody gives back what another login holds.

Where the server runs procedures with their callers' rights (no ownership chaining), a member of the role cannot work at
all; so what the role gives is looked up there, and one login's reach into another's rows is tried with rights to the
tables granted by hand.
"""

import re
import secrets

import pytest

pytestmark = pytest.mark.engines("mssql")

USERS = {"acquire", "try", "release", "renew", "assert_holding", "enrol", "resume_member", "ping", "resign", "register",
         "register_all", "wait", "cancel", "pin", "prune", "warm_up"}  # fmt: skip
LOOKS = {"entries", "status", "past", "resources", "settings"}
OPERATORS = {"set_resource", "set_limit", "pause", "resume", "revoke", "reap"}
INTERNAL = {"remove", "let_go", "bury", "suspect", "suspect_all", "place", "check_name", "check_lease", "check_request",
            "session_name", "session_member", "doze", "release_rows"}  # fmt: skip


def procedures(database):
    found = database.rows(
        "SELECT name FROM sys.procedures WHERE schema_id = SCHEMA_ID(?) AND type = 'P'", database.schema
    )
    return {name for (name,) in found}


def test_every_procedure_is_known_here(database):
    assert procedures(database) == USERS | LOOKS | OPERATORS | INTERNAL


@pytest.fixture
def login(database, new_session):
    """``login(role)``: the words of a connection as a new login, that is a member of the role."""
    import pyodbc

    admin = database.raw()
    made = []

    def make(role):
        name, password = f"sqlsem_{secrets.token_hex(5)}", f"Aa1_{secrets.token_hex(10)}"
        try:
            admin.execute(f"CREATE LOGIN {name} WITH PASSWORD = '{password}'")
        except pyodbc.Error as exc:
            pytest.skip(f"this login may not create logins: {exc}")
        made.append(name)
        admin.execute(f"CREATE USER {name} FOR LOGIN {name}")
        admin.execute(f"ALTER ROLE {database.schema}_{role} ADD MEMBER {name}")
        return name, password

    yield make
    for name in made:
        for (spid,) in admin.execute(
            "SELECT session_id FROM sys.dm_exec_sessions WHERE login_name = ?", name
        ).fetchall():
            admin.execute(f"KILL {int(spid)}")
        admin.execute(f"DROP USER IF EXISTS {name}")
        admin.execute(f"DROP LOGIN {name}")
    admin.close()


@pytest.fixture
def as_login(database, login):
    """``as_login(role)``: a session of a new login that is a member of that role, and its name."""
    import pyodbc

    from sqlsem.engines.mssql import _join, _words_of_odbc

    made = []

    def start(role):
        user, password = login(role)
        words = _words_of_odbc(database.make_engine().odbc_string)
        words = {key: value for key, value in words.items() if key.lower() not in ("uid", "pwd", "trusted_connection")}
        made.append(pyodbc.connect(_join({**words, "UID": user, "PWD": password}), autocommit=True))
        return made[-1], user

    yield start
    for connection in made:
        connection.close()


def may(connection, database, right, names):
    cursor = connection.cursor()
    found = set()
    for name in names:
        cursor.execute("SELECT HAS_PERMS_BY_NAME(?, N'OBJECT', ?)", f"{database.schema}.[{name}]", right)
        if cursor.fetchone()[0] == 1:
            found.add(name)
    return found


TABLES = {"ProcessControl", "entry", "member", "resource", "history", "setting"}


@pytest.mark.parametrize(
    ("role", "runs", "reads"),
    [
        ("user", USERS | LOOKS, set()),
        ("operator", USERS | LOOKS | OPERATORS, TABLES),
        ("reader", LOOKS, TABLES),
    ],
)
def test_what_the_roles_give(database, as_login, role, runs, reads):
    connection, _ = as_login(role)
    assert may(connection, database, "EXECUTE", USERS | LOOKS | OPERATORS | INTERNAL) == runs
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
        if inner is None or inner[1] not in INTERNAL | TABLES:
            raise
        pytest.skip(f"this server has no ownership chaining: {exc}")
    while cursor.description is None:
        cursor.nextset()
    assert tuple(cursor.fetchone()) == (0, 0, 0)


def test_another_login_cannot_act_for_a_requester(session, database, as_login, request, name):
    """Even with every right to the tables, and knowing all the words, the routines do not serve it."""
    one = session()
    held = one.acquire(name, requesting_id="package")
    leased = one.acquire(name("lease"), requesting_id="package", lease_seconds=60)
    stranger, user = as_login("user")
    everything = {
        "EXECUTE": procedures(database),
        "SELECT": TABLES,
        "INSERT": TABLES,
        "UPDATE": TABLES,
        "DELETE": TABLES,
    }
    rights = [f"{right} ON {database.schema}.[{one}]" for right, names in everything.items() for one in names]
    request.addfinalizer(lambda: [database.rows(f"REVOKE {right} FROM {user}") for right in rights])
    for right in rights:
        database.rows(f"GRANT {right} TO {user}")

    def call(text, *parameters):
        cursor = stranger.cursor()
        cursor.execute(f"DECLARE @c int; EXEC @c = {database.schema}.{text}; SELECT @c", parameters)
        while cursor.description is None:
            cursor.nextset()
        return cursor.fetchone()[0]

    for resource, answer in ((name, held), (name("lease"), leased)):
        assert call("release ?, ?, N'package'", resource, answer.position) == -1
        assert call("release ?, @requesting_id = N'package'", resource) == -1
        assert call("renew ?, ?, N'package'", resource, answer.position) == -1
    assert len(database.queue(name)) == 2
    assert call("try ?, @lease_seconds = 60", name("own")) == 0
    assert call("release ?", name("own")) == 0
    assert one.release(name, requesting_id="package") == 0
    assert one.release(name("lease"), requesting_id="package") == 0
