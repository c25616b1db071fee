"""No object in the caller's search_path shadows a name in the library's SQL (the class of CVE-2018-1058).

The names come from the scripts, so the test covers new ones: operators and functions with argument types near the
intended ones. A trap records the login that ran it.
"""

import contextlib
import functools
import os
import re
import subprocess
import sys

import psycopg
import pytest
from click.testing import CliRunner
from support import PATIENCE, Database, random_name, until
from support.databases import empty_database, through

import sqlsem
from sqlsem import cli, sql

pytestmark = pytest.mark.engines("postgresql")

#: Types for the signatures of traps: the types in the scripts, and types that convert to them or from them.
TYPES = (
    "text",
    "varchar",
    "name",
    '"char"',
    "integer",
    "bigint",
    "smallint",
    "float8",
    "float4",
    "numeric",
    "oid",
    "boolean",
)
MORE = (
    "timestamptz",
    "timestamp",
    "date",
    "interval",
    "json",
    "jsonb",
    "regclass",
    "regproc",
    "regrole",
    "bytea",
    "xid",
)
ARRAYS = ("text[]", "varchar[]", "name[]", "bigint[]", "integer[]", "anyarray", "anyelement", "anynonarray")


def texts():
    return [sql.script("postgresql", name) for name in sql.SCRIPTS if name != "drop"] + [
        "\n".join(sql.queries("postgresql", file="doctor").values())
    ]


def names_used(connection):
    """Return the functions and operators of the system that the scripts name, with their numbers of arguments."""
    words, signs = set(), set()
    for text in texts():
        text = re.sub(r"--[^\n]*", "", text)
        words |= {word.lower() for word in re.findall(r"\b([A-Za-z_][A-Za-z0-9_]*)\s*\(", text)}
        signs |= set(re.findall(r"[-+*/<>=~!@#%^&|?]+", re.sub(r"'[^']*'|=>|:=|\$\$", " ", text)))
    functions = connection.execute(
        "SELECT DISTINCT p.proname, a.n, p.prokind = 'a' FROM pg_proc p "
        "CROSS JOIN LATERAL generate_series(greatest(p.pronargs - p.pronargdefaults, 0), greatest(p.pronargs, 1)) "
        "AS a (n) "
        "WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.prokind IN ('f', 'a', 'w') AND p.proname = ANY (%s)",
        (sorted(words),),
    ).fetchall()
    operators = connection.execute(
        "SELECT DISTINCT oprname, oprkind = 'l' FROM pg_operator "
        "WHERE oprnamespace = 'pg_catalog'::regnamespace AND oprname = ANY (%s)",
        # Syntax that stands for an operator: IN, CASE … WHEN, LIKE, IS DISTINCT FROM, BETWEEN.
        (sorted(signs | {"=", "<>", "<", "<=", ">", ">=", "~~", "!~~", "-", "+"}),),
    ).fetchall()
    return functions, operators


def signatures(number):
    """Yield lists of argument types for so many arguments."""
    all_types = (*TYPES, *MORE, *ARRAYS)
    if number == 0:
        yield ()
    elif number == 1:
        yield from ((type_,) for type_ in all_types)
    elif number == 2:
        yield from (
            (left, right) for left in (*TYPES, "timestamptz", "interval", "jsonb") for right in (*TYPES, "interval")
        )
        yield from (
            (left, right) for left in MORE for right in ("text", "varchar", "integer", "float8", "anyelement", left)
        )
        yield from (
            (array, right) for array in ARRAYS for right in ("anyelement", "anyarray", "text", "integer", "text[]")
        )
    else:
        for kind in ("text", "varchar", "integer", "bigint", "float8", "anyelement", "boolean", "name"):
            yield (kind,) * number
        for first in ("text", "varchar", "integer", "bigint"):
            for rest in ("text", "varchar", "integer", "bigint", "boolean", "numeric"):
                yield (first,) + (rest,) * (number - 1)
                yield (first,) * (number - 1) + (rest,)


def make_traps(connection, schema):
    """Create traps for all of these in a schema, and return their number. A trap names its caller in an error."""
    functions, operators = names_used(connection)
    assert len(functions) > 60, "the texts were not understood"
    assert len(operators) > 12
    count = 0
    statements = []
    body = (
        "LANGUAGE plpgsql AS $t$ BEGIN RAISE EXCEPTION 'TRAP % sprung, as %', {what}, current_user "
        "USING ERRCODE = 'TRAP0'; END $t$"
    )

    def polymorphic(types):
        return any(type_.startswith("any") for type_ in types)

    for name, number, aggregate in sorted(functions):
        for types in signatures(min(number, 8)):
            result = "boolean"
            message = psycopg.sql.Literal(f"{name}({', '.join(types)})").as_string(connection)
            quoted = f'{schema}."{name}"'
            statements.append(
                f"CREATE FUNCTION {quoted}({', '.join(types)}) RETURNS {result} {body.format(what=message)}"
            )
            if aggregate and len(types) == 1 and not polymorphic(types):
                step = f'{schema}."{name}_step"'
                statements.append(
                    f"CREATE FUNCTION {step}(bigint, {types[0]}) RETURNS bigint {body.format(what=message)}"
                )
                statements.append(f"DROP FUNCTION {quoted}({types[0]})")
                statements.append(
                    f"CREATE AGGREGATE {quoted}({types[0]}) (SFUNC = {step}, STYPE = bigint, INITCOND = 0)"
                )
    for name, prefix in sorted(operators):
        for types in signatures(1 if prefix else 2):
            message = psycopg.sql.Literal(f"{name} {types}").as_string(connection)
            step = f'{schema}."op{count}"'
            count += 1
            left = f"LEFTARG = {types[0]}, RIGHTARG = {types[1]}" if len(types) == 2 else f"RIGHTARG = {types[0]}"
            statements.append(f"CREATE FUNCTION {step}({', '.join(types)}) RETURNS boolean {body.format(what=message)}")
            statements.append(f"CREATE OPERATOR {schema}.{name} (FUNCTION = {step}, {left})")
    connection.execute(
        "CREATE FUNCTION pg_temp.make(statement text) RETURNS boolean LANGUAGE plpgsql AS $$ "
        "BEGIN EXECUTE statement; RETURN true; "
        "EXCEPTION WHEN syntax_error OR invalid_function_definition OR duplicate_function OR undefined_function "
        "OR datatype_mismatch OR wrong_object_type THEN RETURN false; END $$"  # no such signature can be made
    )
    count = refused = 0
    for first in range(0, len(statements), 500):
        for (done,) in connection.execute(
            "SELECT pg_temp.make(s) FROM pg_catalog.unnest(%s::text[]) WITH ORDINALITY AS u (s, n) ORDER BY n",
            (statements[first : first + 500],),
        ):
            count, refused = count + done, refused + (not done)
    assert refused < count / 4, (count, refused)
    return count


@pytest.fixture(scope="module")
def trapped(postgres_server):
    """A database in which a login without a role filled the common schema before the installation of sqlsem."""
    with empty_database(postgres_server, "villain") as database:
        database.rows("GRANT CREATE ON SCHEMA public TO PUBLIC")
        with psycopg.connect(through(database, "villain").url, autocommit=True) as connection:
            assert make_traps(connection, "public") > 3000
        yield database


def command(database, *arguments, expected=(0,)):
    if "--" in arguments:  # it may replace or signal its process
        words = [sys.executable, "-m", "sqlsem", *arguments]
        env = {**os.environ, "SQLSEM_URL": database.url}
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False)
        code, output = done.returncode, done.stdout + done.stderr
    else:  # in this process, which has Python loaded
        result = CliRunner().invoke(cli.main, arguments, env={"SQLSEM_URL": database.url})
        code, output = result.exit_code, result.output
    assert "TRAP" not in output, (arguments, output)
    assert code in expected, (arguments, code, output)
    return output


def test_unqualified_names_spring_the_traps(trapped):
    """A statement with unqualified names runs the traps."""
    with trapped.raw() as connection:
        for careless in ("SELECT 1.5::float8 * 2", "SELECT 'a'::varchar = 'a'", "SELECT pg_advisory_xact_lock(7)"):
            with pytest.raises(psycopg.Error, match="TRAP"):
                connection.execute(careless)


@pytest.fixture(scope="module")
def logins(trapped):
    """Install the tables amid the traps, by a superuser; return logins with each of the roles, and with all of them."""
    assert "Done." in command(trapped, "init")
    command(trapped, "init")
    name = trapped.url.rpartition("/")[2]
    roles = {label: [label] for label in ("user", "putter", "worker", "operator", "reader")}
    roles["everybody"] = ["user", "putter", "worker", "operator"]
    databases = {"superuser": trapped}
    with psycopg.connect(trapped.url, autocommit=True) as connection:
        for login, granted in roles.items():
            connection.execute(f"CREATE ROLE {name}_{login} LOGIN")
            for role in granted:
                connection.execute(f"GRANT sqlsem_{role} TO {name}_{login}")
            url = trapped.server.url(name, user=f"{name}_{login}")
            databases[login] = Database("postgresql", url, {}, trapped.server)
    yield databases
    with psycopg.connect(trapped.server.url(), autocommit=True) as connection:
        for login in roles:
            connection.execute(f"DROP ROLE {name}_{login}")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("login", ["superuser", "everybody"])
def test_no_command_springs_a_trap(logins, login):
    the_commands(logins[login])


@pytest.mark.parametrize("login", ["user", "putter", "worker", "operator", "reader"])
def test_the_doctor_springs_no_trap(logins, login):
    command(logins[login], "doctor", expected=(0, 1))


@pytest.mark.parametrize("login", ["superuser", "everybody"])
def test_the_client_springs_no_trap(logins, login):
    the_client(logins[login])


@pytest.mark.parametrize("login", ["superuser", "everybody"])
def test_no_session_springs_a_trap(logins, login):
    the_sessions(logins[login])


def the_commands(database):
    command(database, "doctor")
    command(database, "run", "--mutex", "etl", "--note", "why", "--", sys.executable, "-c", "pass")
    command(database, "--lease", "30", "run", "--limit", "etl=3", "--", sys.executable, "-c", "pass")
    command(database, "run", "--read", "dim", "--mutex", "b", "--", sys.executable, "-c", "pass")
    command(database, "ls")
    command(database, "ls", "--json")
    command(database, "history")
    command(database, "set", "etl", "--limit", "2")
    command(database, "pause", "etl")
    command(database, "resume", "etl")
    command(database, "reap")
    command(database, "put", "queue", "--sql", "SELECT 1")
    command(database, "put", "queue", "--order", "2", "--", sys.executable, "-c", "pass")
    command(database, "work", "queue", "--idle-exit", "0")
    command(database, "tasks")
    number = (
        psycopg.connect(database.url)
        .execute("SELECT max(t.task_id) FROM sqlsem.list_tasks('queue') AS t")
        .fetchone()[0]
    )
    command(database, "tasks", "log", str(number), expected=(0, 1, 65))
    command(database, "tasks", "retry", str(number), expected=(0, 1, 65))
    command(database, "tasks", "cancel", str(number), expected=(0, 1, 65))
    command(database, "tasks", "wait", "queue", expected=(0, 1, 65, 70))
    command(database, "batch")
    command(database, "revoke", "999999999", expected=(0, 1, 65))


def the_client(database):
    for lease in (None, 20):
        with contextlib.closing(database.coordinator(lease=lease)) as client:
            with contextlib.closing(database.coordinator(lease=lease)) as second:
                with client.mutex("m", note="n") as grant:
                    with database.raw(autocommit=False) as connection:
                        grant.assert_held(connection.cursor())
                    assert second.mutex("m").acquire(timeout=0) is False
                    assert second.mutex("m").acquire(timeout=0.5) is False
                with client.read("c") as reader:
                    reader.upgrade()
                    reader.downgrade()
                with sqlsem.all_of(client.mutex("a"), client.limit("b", 2), client.stage("s", 1)):
                    client.admin.entries()
                queue = client.queue("q")
                queue.put({"a": [1]})
                queue.put(2, order=3)
                for task in queue.claim(wait=0):
                    with task:
                        pass
                queue.tasks()
                publish = sqlsem.Sql("SELECT 1")
                batch = sqlsem.batch("r", ["x", "y"], window=60, on_success=publish, coordinator=client)
                with batch.part("x"):
                    pass
                with batch.part("y"):
                    pass
                client.admin.history("m")
                client.admin.resources()
                client.admin.reap()


def the_sessions(database):
    with database.raw() as connection, database.raw() as second:
        for arguments in (
            "'s'",
            "'s', 3, weight => 2",
            "'s', access => 'read'",
            "'s', lease_seconds => 20, requesting_id => 'x'",
        ):
            code, position, _ = connection.execute(f"CALL sqlsem.acquire({arguments})").fetchone()
            assert code == 0
            assert second.execute("CALL sqlsem.try('s')").fetchone()[0] == -1
            assert second.execute("CALL sqlsem.acquire('s', timeout_ms => 50)").fetchone()[0] == -1
            requester = "'x'" if "requesting_id" in arguments else "NULL"
            assert connection.execute(
                f"SELECT sqlsem.renew('s'::text, {position}::bigint, {requester}::text)"
            ).fetchone() == (0,)
            with connection.transaction():
                connection.execute(f"CALL sqlsem.assert_holding('s', {position}, {requester})")
            connection.execute("SELECT state FROM sqlsem.status()")
            assert connection.execute(f"SELECT sqlsem.release('s', {position}, {requester})").fetchone() == (0,)
        assert connection.execute("CALL sqlsem.acquire('s')").fetchone()[0] == 0
        assert connection.execute("CALL sqlsem.acquire('s')").fetchone()[0] == -3
        connection.execute("SELECT sqlsem.release('s')")
        connection.execute(
            "SELECT sqlsem.put('w', 'SELECT 1', note => 'n', after_seconds => 0, backoff_seconds => 1.5)"
        )
        connection.execute("SELECT sqlsem.put('w', 'SELECT no_such_thing')")
        connection.execute("SELECT sqlsem.put('w', '{}', 'json', \"order\" => 1)")
        assert connection.execute("CALL sqlsem.work('w', 0.2)").fetchone() == (1, 1)
        connection.execute("SELECT sqlsem.batch_part_start('p', 'a', 'a, b', 60)")
        connection.execute("SELECT * FROM sqlsem.batch_part_finish('p', 'a')")
        connection.execute("SELECT sqlsem.batch_part_start('p', 'b', '[\"a\", \"b\"]', 60)")
        assert connection.execute("SELECT is_last FROM sqlsem.batch_part_finish('p', 'b')").fetchone() == (1,)
        connection.execute("SELECT sqlsem.batch_callback_ended('p')")
        connection.execute("SELECT sqlsem.batch_resume('p')")
        for text in (
            "set_limit('s', 2)",
            "set_limit('s', NULL)",
            "pause('s')",
            "resume('s')",
            "reap()",
            "revoke(1, true)",
        ):
            connection.execute(f"SELECT sqlsem.{text}")


#: A value for each type of a parameter, with which a routine does not wait long.
VALUES = {
    "bigint": "1",
    "integer": "1",
    "text": "'x'",
    "character varying": "'x'",
    "boolean": "true",
    "jsonb": "'[]'",
    "json": "'[]'",
    "double precision": "1.5",
    "timestamp with time zone": "'2020-01-01'",
    "text[]": "'{a}'",
    "character varying[]": "'{a}'",
    "bigint[]": "'{1}'",
    "integer[]": "'{1}'",
    "double precision[]": "'{1.5}'",
    "name": "'x'",
    "regclass": "'sqlsem.member'",
    "interval": "'1 second'",
    "xid8": "'1'",
    "oid": "1",
}
#: The search paths of callers: the default path, and a path that ends with the system's names.
PATHS = ('"$user", public', "public, pg_catalog")
#: Errors of calls that did not reach the routine. (A refusal by a routine itself is another matter.)
UNREACHED = (
    psycopg.errors.UndefinedFunction,
    psycopg.errors.AmbiguousFunction,
    psycopg.errors.SyntaxError,
    psycopg.errors.UndefinedTable,
    psycopg.errors.DatatypeMismatch,
)
#: Types that the SQL of routines names by a single word. Logins can make other types with these names.
TYPE_NAMES = (
    "text",
    "timestamptz",
    "jsonb",
    "name",
    "oid",
    "record",
    "bytea",
    "regclass",
    "int4",
    "int8",
    "bool",
    "float8",
)
LOGINS = ("superuser", "everybody", "user", "putter", "worker", "operator", "reader")


def session(database, path):
    """Return a session of a login under a search_path."""
    connection = psycopg.connect(database.url, autocommit=True, options="-c statement_timeout=60s")
    connection.execute(f"SET search_path = {path}")
    return connection


@pytest.fixture(scope="module")
def typed(logins, trapped):
    """Make types in the schema public, too, under the names of the system's types."""
    with psycopg.connect(trapped.server.url(trapped.url.rpartition("/")[2]), autocommit=True) as connection:
        connection.execute(
            "CREATE FUNCTION public.sprung(what pg_catalog.text) RETURNS boolean LANGUAGE plpgsql AS $t$ BEGIN "
            "RAISE EXCEPTION 'TRAP % sprung, as %', what, current_user USING ERRCODE = 'TRAP0'; END $t$"
        )
        for name in TYPE_NAMES:
            base = "text" if name == "record" else name
            connection.execute(
                f'CREATE DOMAIN public."{name}" AS pg_catalog."{base}"'
                f" CHECK (public.sprung('{name}'::pg_catalog.text))"
            )
    return logins


def routines_of(connection):
    """Return (name, kind, types, is variadic, has its own path) of each routine that is no trigger function."""
    return connection.execute(
        "SELECT p.proname::text, p.prokind::text, "
        "ARRAY(SELECT pg_catalog.format_type(t, NULL) FROM pg_catalog.unnest(p.proargtypes) AS t), "
        "p.provariadic OPERATOR(pg_catalog.<>) 0::pg_catalog.oid, "
        "EXISTS (SELECT FROM pg_catalog.unnest(p.proconfig) AS c WHERE pg_catalog.starts_with(c, 'search_path=')) "
        "FROM pg_catalog.pg_proc AS p WHERE p.pronamespace OPERATOR(pg_catalog.=) 'sqlsem'::regnamespace "
        "AND p.prorettype OPERATOR(pg_catalog.<>) 'trigger'::regtype::oid ORDER BY 1, 3"
    ).fetchall()


def reached(connection, name, kind, arguments):
    """Call a routine. Return True if the call reached it, and the error, if any."""
    try:
        connection.execute(f"{'CALL' if kind == 'p' else 'SELECT'} sqlsem.{name}({arguments})")
    except UNREACHED as exc:
        return str(exc).startswith("sqlsem: "), exc
    except psycopg.Error as exc:
        return True, exc
    return True, None


@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("login", LOGINS)
def test_routine_springs_no_trap(typed, login, path):
    """Call each routine with values for its types and with NULLs: any answer is good if it comes in time."""
    with trapless(typed) as catalogue:
        routines = routines_of(catalogue)
    assert len(routines) > 250
    untold = {
        type_
        for _, _, types, *_ in routines
        for type_ in types
        if type_ not in VALUES and not type_.startswith("sqlsem.")
    }
    assert not untold, f"parameters of new types need a value in VALUES: {untold}"
    with session(typed[login], path) as connection:
        connection.execute("SET statement_timeout = '20s'")
        for name, kind, types, is_variadic, _ in routines:
            for null in (False, True):
                values = ("NULL" if null else VALUES.get(type_, "NULL") for type_ in types)
                arguments = ", ".join(
                    f"{value}::{qualified(type_)}" for value, type_ in zip(values, types, strict=True)
                )
                arguments = f"VARIADIC {arguments}" if is_variadic else arguments
                was_reached, error = reached(connection, name, kind, arguments)
                assert "TRAP" not in str(error), (name, arguments, error)
                assert was_reached, (name, arguments, error)
                assert not isinstance(error, psycopg.errors.QueryCanceled), (
                    f"{name}({arguments}) waits: bound it in VALUES"
                )


def qualified(type_name):
    """Return a type's name with its schema, unless it is a word of the grammar."""
    base = type_name.removesuffix("[]")
    return f"pg_catalog.{type_name}" if base in ("text", "jsonb", "name", "regclass", "oid", "xid8") else type_name


@contextlib.contextmanager
def trapless(typed):
    with psycopg.connect(typed["superuser"].url, autocommit=True) as connection:
        connection.execute("SET search_path = pg_catalog")
        yield connection


# Calls of the routines without a path of their own, to their ends: each exit of each routine, also after a wait.


def called(connection, text, *values):
    return connection.execute(text, values).fetchone()


def call_acquire(start, patience):
    first, second = start(), start()
    code, position, _ = called(
        first, "CALL sqlsem.acquire('a', 2, weight => 2, lease_seconds => 20, requesting_id => 'x')"
    )
    assert code == 0
    assert called(second, "CALL sqlsem.acquire('a', timeout_ms => 100)")[0] == -1
    assert called(second, "CALL sqlsem.acquire('a', timeout_ms => 0)")[0] == -1
    waiting = patience(second, "CALL sqlsem.acquire('a', access => 'read', note => 'n')")
    waiting.begins("a")
    assert called(first, "SELECT sqlsem.release('a', %s::bigint, 'x')", position) == (0,)
    assert waiting.answer()[0] == 1
    assert called(second, "CALL sqlsem.acquire('a')")[0] == -3  # it holds it itself
    waiting = patience(first, "CALL sqlsem.acquire('a')")
    waiting.begins("a")
    first.cancel()
    with pytest.raises(psycopg.errors.QueryCanceled, match="left the queue"):
        waiting.answer()
    assert called(second, "SELECT sqlsem.release('a')") == (0,)


def call_try(start, patience):
    first, second = start(), start()
    assert called(first, "CALL sqlsem.try('t')")[0] == 0
    assert called(second, "CALL sqlsem.try('t', lease_seconds => 20)")[0] == -1
    assert called(first, "SELECT sqlsem.release('t')") == (0,)


def call_assert_holding(start, patience):
    connection = start()
    _, position, _ = called(connection, "CALL sqlsem.acquire('h')")
    with connection.transaction():
        connection.execute("CALL sqlsem.assert_holding('h', %s)", (position,))
    assert called(connection, "SELECT sqlsem.release('h')") == (0,)
    for _ in range(2):
        with pytest.raises(psycopg.Error, match="is not held"):
            with connection.transaction():
                connection.execute("CALL sqlsem.assert_holding('h', %s)", (position,))


def call_stand_alone(start, patience):
    connection = start()
    connection.execute("CALL sqlsem.require_autocommit('this')")
    assert called(connection, "CALL sqlsem.detect_transaction()") == (False,)
    with pytest.raises(psycopg.Error, match="inside an open transaction"):
        with connection.transaction():
            connection.execute("CALL sqlsem.require_autocommit('this')")
    with connection.transaction():
        assert called(connection, "CALL sqlsem.detect_transaction()") == (True,)


def call_take(start, patience):
    connection, second, tag = start(), start(), random_name()
    assert called(connection, f"CALL sqlsem.take('r{tag}', 1, 3000)")[0] == 0
    assert called(connection, f"CALL sqlsem.take('r{tag}', 1, 3000)")[0] == 1  # after a wait
    assert called(connection, f"CALL sqlsem.take('r{tag}', 1, 3000, timeout_ms => 0)")[0] == -1
    several = "more_limits => '{10}', more_per_ms => '{1000}'"
    assert called(connection, f"CALL sqlsem.take('r{tag}', 1, 3000, {several})")[0] == 1
    assert called(connection, f"CALL sqlsem.take('slow{tag}', 1, 600000)")[0] == 0
    assert called(second, f"CALL sqlsem.take('slow{tag}', 1, 600000, timeout_ms => 700)")[0] == -1
    waiting = patience(second, f"CALL sqlsem.take('slow{tag}', 1, 600000)")
    waiting.begins(f"rate:slow{tag}")
    second.cancel()
    with pytest.raises(psycopg.errors.QueryCanceled, match="left the queue"):
        waiting.answer()
    assert called(connection, f"CALL sqlsem.take('pair{tag}', 1, 6000)")[0] == 0
    waiting = patience(second, f"CALL sqlsem.take('pair{tag}', 1, 6000)")
    waiting.begins(f"rate:pair{tag}")
    assert waiting.answer()[0] == 1  # out of the queue


def call_sleep_until_due(start, patience):
    connection = start()
    connection.execute("CALL sqlsem.sleep_until_due('rate:d', 1, 1, 1)")
    connection.execute("SET statement_timeout = '300ms'")
    with pytest.raises(psycopg.errors.QueryCanceled, match="its reservation was returned"):
        connection.execute("CALL sqlsem.sleep_until_due('rate:d', 1, 1, 60000)")


def call_work(start, patience):
    connection = start()
    connection.execute("SET statement_timeout = '120s'")
    called(connection, "SELECT sqlsem.put('w', 'SELECT 1')")
    called(connection, "SELECT sqlsem.put('w', 'SELECT no_such_thing')")
    called(connection, "SELECT sqlsem.put('w', '{}', 'json')")
    done, failed = called(connection, "CALL sqlsem.work('w', 0.3)")
    assert (done, failed) == (1, 2) or (done, failed) == (1, 1), (done, failed)
    with pytest.raises(psycopg.Error, match="idle_seconds"):
        connection.execute("CALL sqlsem.work('w', -1)")


def call_hand_over(start, patience):
    first, second = start(), start()
    _, position, _ = called(first, "CALL sqlsem.acquire('o', lease_seconds => 20, requesting_id => 'x')")
    (token,) = called(first, "CALL sqlsem.hand_over('o', %s, requesting_id => 'x')", position)
    assert called(second, "CALL sqlsem.adopt(%s)", token)[:2] == ("o", position)
    assert called(second, "SELECT sqlsem.release('o')") == (0,)
    for failing in ("CALL sqlsem.hand_over('o', 1)", "CALL sqlsem.hand_over('o', 1, -1)", "CALL sqlsem.adopt('x')"):
        with pytest.raises(psycopg.Error, match="sqlsem: "):
            second.execute(failing)


def call_once_begin(start, patience):
    first, second = start(), start()
    code, position, _ = called(first, "CALL sqlsem.once_begin('daily', 86400)")
    assert code == 0
    assert called(second, "CALL sqlsem.once_begin('daily', 86400, timeout_ms => 200)")[0] == -1
    called(first, "SELECT sqlsem.once_finish('daily', %s)", position)
    assert called(second, "CALL sqlsem.once_begin('daily', 86400)")[0] == 2
    called(second, "SELECT sqlsem.once_forget('daily')")


#: The calls above for each routine that commits. The test fails for a new routine until a call here runs it to its
#: end.
SCENARIOS = {
    "acquire": call_acquire,
    "acquire_row": call_acquire,
    "try": call_try,
    "assert_holding": call_assert_holding,
    "require_autocommit": call_stand_alone,
    "detect_transaction": call_stand_alone,
    "take": call_take,
    "sleep_until_due": call_sleep_until_due,
    "work": call_work,
    "hand_over": call_hand_over,
    "adopt": call_hand_over,
    "once_begin": call_once_begin,
}


class Waiting:
    """A call in a thread of its own."""

    def __init__(self, connection, text):
        from concurrent.futures import ThreadPoolExecutor

        self._pool = ThreadPoolExecutor(1)
        self._answer = self._pool.submit(called, connection, text)

    def begins(self, resource):
        """Wait until its row is in the queue, and it sleeps: an interrupt before that may strike at a COMMIT."""
        assert self.look is not None
        until(lambda: self._answer.done() or self.look(resource))
        assert not self._answer.done(), self._answer.result()

    def answer(self):
        try:
            return self._answer.result(PATIENCE)
        finally:
            self._pool.shutdown(wait=False)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("login", ["superuser", "everybody"])
@pytest.mark.parametrize("scenario", dict.fromkeys(SCENARIOS.values()), ids=lambda value: value.__name__)
def test_call_that_commits_springs_no_trap(typed, login, path, scenario):
    with contextlib.ExitStack() as stack:
        catalogue = stack.enter_context(trapless(typed))

        def look(pid, resource):
            return catalogue.execute(
                "SELECT 1 FROM sqlsem.processcontrol WHERE resource_id = %s "
                "AND (granted_at IS NULL OR resource_id LIKE 'rate:%%') "  # (the first in a rate's queue waits, too)
                "AND EXISTS (SELECT 1 FROM pg_catalog.pg_stat_activity "
                "            WHERE pid = %s AND wait_event_type IN ('Lock', 'Timeout'))",
                (resource, pid),
            ).fetchone()

        def patience(connection, text):
            waiting = Waiting(connection, text)
            waiting.look = functools.partial(look, connection.info.backend_pid)
            return waiting

        scenario(lambda: stack.enter_context(session(typed[login], path)), patience)


def test_routine_without_path_is_called_to_its_end(typed):
    """Functions that the planner inlines have one expression, which every call reaches."""
    with trapless(typed) as catalogue:
        without = {name: kind for name, kind, _, _, has_path in routines_of(catalogue) if not has_path}
        assert {name for name, kind in without.items() if kind == "p"} == set(SCENARIOS)
        assert all(kind == "f" for name, kind in without.items() if name not in SCENARIOS)


def test_public_types_of_the_systems_names_spring(typed):
    with session(typed["superuser"], PATHS[1]) as connection, pytest.raises(psycopg.Error, match="TRAP"):
        connection.execute("SELECT 'a'::text")
