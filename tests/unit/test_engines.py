"""The engines' announcements, refusals and statements; each engine is named in one place."""

import importlib.util
import inspect
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

import sqlsem
import sqlsem.testing
from sqlsem import engines, sql
from sqlsem.engines import borrowed
from sqlsem.engines.base import Engine, Options
from sqlsem.engines.optional import OptionalSession, Session
from sqlsem.engines.protocol import AdminSession, Capability
from sqlsem.values.locks import Request

PACKAGE = Path(sqlsem.__file__).parent
#: The engines that need no driver to load; the other drivers may be missing.
LOADED = [engines.load(name) for name in ("sqlite", "memory", "mssql")]
if importlib.util.find_spec("pymysql") is not None:
    LOADED.append(engines.load("mysql"))
#: The capabilities that they lack.
LACKS = {
    "sqlite": {Capability.GUARDED_TABLES, Capability.KEPT_LOCKS},
    "memory": set(Capability)
    - {Capability.DEADLOCKS, Capability.PRIORITIES, Capability.PERIODS, Capability.RATES, Capability.SETTINGS},
    "mssql": {Capability.KEPT_LOCKS},
    "mysql": {Capability.GUARDED_TABLES, Capability.KEPT_LOCKS},
}
#: Statements that only one of two servers has, and why.
DIFFERENT = {
    "backend": "PostgreSQL: behind a pooler it changes",
    "retake_wakeup_lock": "PostgreSQL: a wakeup lock is the session's, and so taken in a statement of its own",
    "drop_wakeup_locks": "PostgreSQL: its table of locks is of one size",
    "restore_wakeup_locks": "PostgreSQL: the same",
    "missing_wakeup_locks": "PostgreSQL: the same",
    "deadlock_rows": "PostgreSQL: the client searches among them, as it is faster than PL/pgSQL",
    "live_members": "PostgreSQL: and asks which members of a deadlock live",
    "find_deadlock": "SQL Server: the routine does it",
    "listen_for_tasks": "PostgreSQL: is told of tasks (NOTIFY)",
    "next_ready": "PostgreSQL: and so looks for what is put for later only when that is ready",
    "install_begin": "PostgreSQL: locks a table of ours, which no stranger can; SQL Server has a lock of its owner's",
    "install_end": "PostgreSQL: the same",
    "installers": "PostgreSQL: names the sessions that install",
    "is_installed": "PostgreSQL: whether that table is there",
    "kept_locks": "PostgreSQL: SQL Server shows the locks of others to its administrators alone",
    "put_tasks": "PostgreSQL: takes JSON; T-SQL that is not SQL Server's mangles quotation marks in it",
    "put_task": "SQL Server: so there is a call for each",
    "next_tasks": "PostgreSQL: as put_tasks",
    "claim_tasks": "SQL Server: so it is sent behind the calls of end_task",
    "in_transaction": "SQL Server: psycopg tells whether there is one",
    "begin": "SQL Server: psycopg does this",
    "commit": "SQL Server: the same",
    "rollback": "SQL Server: the same",
    "execute": "SQL Server: the SQL of a task, in a transaction; one string to PostgreSQL is one",
    "executed": "SQL Server: the same",
    "put_tasks_once": "PostgreSQL: SQL Server puts task by task, by put_task",
    "show_task_locks": "SQL Server: PostgreSQL's show_tasks has them in its rows",
    "last_error": "SQL Server: drivers keep numbers to themselves",
    "script_patience": "SQL Server: PostgreSQL's is set for a transaction",
    "warm_main": "SQL Server: compiles the procedures",
    "warm_wait": "SQL Server: the same",
}


def statements(name):
    return set(sql.queries(name))


def test_two_servers_send_the_same_statements():
    assert statements("postgresql") ^ statements("mssql") == set(DIFFERENT)


def test_equal_statements_have_equal_names():
    servers = statements("postgresql") | statements("mssql")
    assert statements("sqlite") & servers == {
        *("version", "settings", "set_version", "register_member", "reattach_member", "deregister_member"),
        *("pin", "prune"),
        *("entries", "past", "resources", "set_resource", "revoke"),
        *("put_task", "claim_task", "end_task", "recover_tasks", "queue_state", "task_attempts"),
        *("queue_counts", "set_queue", "queue_limits", "queue_waits", "cancel_task", "task_controls"),
        *("save_schedule", "fire_schedule", "list_schedules", "clock"),
        *("operations", "prune_operations", "resource_settings", "priorities"),
        *("once_due", "once_runs", "once_forget", "mark_once"),
        *("database_identity", "release_on_commit", "is_committed", "delete_commit_marker"),
        *(
            "next_ready",
            "prune_tasks",
            "start_part",
            "end_part",
            "claim_callback",
            "return_callback",
            "end_callback",
            "abandon_batch",
            "list_batches",
        ),
    }


@pytest.mark.parametrize("name", engines.ENGINES)
def test_no_statement_is_left_over(name):
    shared = ("statements/*.py",) if name in ("sqlite", "mysql") else ("routines.py",)
    files = [file for part in ("base.py", f"{name}/*.py", *shared) for file in (PACKAGE / "engines").glob(part)]
    code = "".join(file.read_text(encoding="utf-8") for file in files)
    composed = {"retry_task", "cancel_task", "warm_main", "warm_wait"}
    composed |= {"pause_schedule", "resume_schedule", "remove_schedule"}
    unused = {statement for statement in statements(name) if f'"{statement}"' not in code} - composed
    assert unused == set()
    for statement in composed & statements(name):
        assert re.search(rf'f"{statement.partition("_")[0]}_\{{|_{statement.partition("_")[2]}"', code)


@pytest.mark.parametrize("engine", LOADED, ids=lambda engine: engine.name)
def test_capability_is_announced_by_complete_class(engine):
    assert engine.session_class.__abstractmethods__ == frozenset()
    for capability in Capability:
        methods = [name for name in capability.methods if getattr(engine.session_class, name) != getattr(Session, name)]
        assert methods == (capability.methods if engine.has(capability) else [])
    assert {capability for capability in Capability if not engine.has(capability)} == LACKS[engine.name]


def test_call_that_may_be_missing_belongs_to_a_capability():
    """A call without a capability has a default, so that callers need not check."""
    missing = {
        name
        for kind in (*OptionalSession.__mro__, AdminSession)
        for name, method in vars(kind).items()
        if inspect.isfunction(method) and "NotImplementedError" in method.__code__.co_names
    }
    assert missing - {"wait_notification"} == {name for capability in Capability for name in capability.methods}


@pytest.mark.parametrize(
    ("ask", "match"),
    [
        (lambda locks: locks.queue("q"), "A queue needs work queues"),
        (lambda locks: locks.batch("r", ["a"], window=1), "A batch needs batches"),
        (lambda locks: locks.admin.tasks(), "needs work queues"),
        (lambda locks: locks.admin.history(), "needs history"),
        (lambda locks: locks.admin.set_stale_after("x", 1), "needs history, and what operators do"),
    ],
)
def test_missing_capability_is_refused_at_once(ask, match):
    with sqlsem.testing.memory() as locks, pytest.raises(sqlsem.ConfigurationError, match=match) as caught:
        ask(locks)
    assert "the memory of this process does not offer; name another database" in str(caught.value)


def test_an_upgrade_is_refused_and_the_reader_reads_on():
    with sqlsem.testing.memory() as locks, locks.read("x") as grant:
        with pytest.raises(sqlsem.ConfigurationError, match="needs upgrades"):
            grant.upgrade()
        with pytest.raises(sqlsem.ConfigurationError, match="no rows that a transaction could pin"):
            transaction = sqlite3.connect(":memory:", isolation_level=None).execute("BEGIN")
            grant.assert_held(transaction)
        grant.check()


def test_engines_are_named_in_a_single_place():
    """Elsewhere the names occur only in docstrings, help and advice. (Adapters use the words of other libraries.)"""
    names = re.compile(r'(?<![\w/])"(sqlite|postgresql|postgres|mssql|sqlserver)"')
    places = [
        f"{file.relative_to(PACKAGE)}:{number}"
        for file in PACKAGE.rglob("*.py")
        if file.name != "mixed.py"
        and (file.parent.name, file.name) != ("engines", "__init__.py")
        and file.parent.name != "adapters"
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if names.search(line) and not re.match(r"    name = ", line)
    ]
    assert places == []


def test_macro_expands_to_its_text():
    for name in engines.ENGINES:
        assert "-- where" not in sql.script(name, "client")
        assert "{" not in re.sub(r"--.*|'[^']*'", "", sql.script(name, "client"))
    assert sql.queries("sqlite")["clock"] == "SELECT (julianday('now') - 2440587.5) * 86400.0 AS now"


def test_stores_of_a_name_are_shared():
    with sqlsem.testing.memory("a") as first, sqlsem.testing.memory("a") as other, sqlsem.testing.memory() as third:
        with first.mutex("x"):
            assert not other.mutex("x").acquire(timeout=0)
            assert third.mutex("x").acquire(timeout=0)
        assert [entry.resource for entry in third.admin.entries()] == ["x"]
    with sqlsem.testing.memory("a") as again:
        assert again.admin.entries() == []


def test_memory_looks_at_many_at_once():
    with sqlsem.testing.memory("looks") as locks:
        session = locks.client.engine.connect("main")
        me, you = session.register_member("host", 1, "test"), session.register_member("host", 2, "test")

        def take(number, member=me):
            (ticket,) = session.register(member, "me", "thread", f"{number}", [Request("x", limit=2)], False)
            return ticket

        first, second, third, fourth = (take(number) for number in range(4))
        fifth = take(5, you)
        assert (first.granted, second.granted, third.granted) == (True, True, False)
        tickets = [fifth, fourth, third, second, first]
        granted = {first.position: True, second.position: True}
        assert session.poll(me, tickets) == {**granted, fifth.position: None}
        assert session.release(first, "released")
        assert session.poll(me, tickets[1:]) == {
            first.position: None,
            second.position: True,
            third.position: True,
        }
        assert session.poll(me, [fourth]) == {}
        assert [entry.state for entry in session.entries("x")] == ["holds", "holds", "waits", "waits"]
        session.deregister_member(me)
        session.deregister_member(you)
        assert session.entries("x") == []


FORKING = """
import os, sys
import sqlsem, sqlsem.testing

locks = sqlsem.testing.memory("a")
with locks.mutex("x"):
    child = os.fork()
    if child == 0:
        here = locks.mutex("x").acquire(timeout=5) and [entry.pid for entry in locks.admin.entries()] == [os.getpid()]
        os._exit(0 if here else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert [entry.pid for entry in locks.admin.entries()] == [os.getpid()]
sys.exit(code)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_has_a_memory_of_its_own():
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", FORKING], timeout=60, check=False).returncode == 0


def test_default_coordinator_may_be_in_memory(monkeypatch):
    monkeypatch.setenv("SQLSEM_URL", "memory://")
    sqlsem.configure()
    try:
        with sqlsem.mutex("x"):
            assert sqlsem.mutex("x").locked()
        with pytest.raises(sqlsem.ConfigurationError, match="Queue 'q' needs work queues"):
            sqlsem.queue("q").put(["x"])
    finally:
        monkeypatch.undo()
        sqlsem.configure()


def test_creator_is_not_for_memory():
    with pytest.raises(sqlsem.ConfigurationError, match="takes no creator"):
        sqlsem.connect("memory://", creator=object)


class Roleless(Engine):
    """The smallest possible definition."""

    name = "roleless"
    session_class = Session
    label = "nowhere"

    def open_session(self, purpose):
        raise NotImplementedError


def test_the_least_engine_offers_nothing_but_locks():
    engine = Roleless("roleless://", Options())
    for capability in Capability:
        with pytest.raises(sqlsem.ConfigurationError, match="nowhere does not offer"):
            engine.require(capability, "This")


class Row:
    """As pyodbc's: a sequence by its items, and not by its type."""

    def __init__(self, *values):
        self._values = values

    def __getitem__(self, number):
        return self._values[number]


@pytest.mark.parametrize(
    ("row", "values"),
    [
        ((1, "a"), [1, "a"]),
        (Row(1, "a"), [1, "a"]),
        ({"a": 1, "b": 2}, [1, 2]),
        ("text", ["text"]),
        (b"x", [b"x"]),
        (5, [5]),
    ],
)
def test_rows_of_any_driver_are_read(row, values):
    assert list(borrowed.values(row)) == values


@pytest.mark.parametrize("dialect", sorted((PACKAGE / "sql").glob("*/dialect.sql")), ids=lambda path: path.parent.name)
def test_dialect_defines_the_words_of_the_statements(dialect):
    names = ("statements/abbreviations", "statements/client", "statements/schema-1", f"{dialect.parent.name}/schema-1")
    texts = "".join((PACKAGE / "sql" / f"{name}.sql").read_text(encoding="utf-8") for name in names)
    words = set(re.findall(r"\{(\w+:?)", texts)) - {"schema", "table"}
    own = {"keep_rows", *re.findall(r"^-- where \{(\w+)\}", texts, re.MULTILINE)}
    defined = set(re.findall(r"^-- where \{(\w+:?)", dialect.read_text(encoding="utf-8"), re.MULTILINE))
    assert defined == words - own
    assert not [name for name, text in sql.queries(dialect.parent.name).items() if "{" in text]
