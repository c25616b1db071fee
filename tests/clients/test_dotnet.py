"""The .NET client (clients/dotnet/SqlSem.cs), compiled with Mono, beside Python processes.

On PostgreSQL through System.Data.Odbc and psqlODBC; on SQL Server through System.Data.SqlClient, where
``SQLSEM_TEST_MSSQL_ADO`` holds an ADO.NET connection string of the server that ``SQLSEM_TEST_MSSQL`` names. There it
runs on .NET Core where that can be had, or on what ``SQLSEM_TEST_DOTNET`` says (``core``, ``mono``).
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import microsoft
import pytest
import support
from support import PATIENCE, Child, Database, Stay, check_history, overlap, until

import sqlsem
from clients.mixed import dotnet

ADO = "SQLSEM_TEST_MSSQL_ADO"
LACKS = {
    "postgresql": dotnet.lacks(odbc=True),
    "mssql": dotnet.lacks(odbc=False) or (None if os.environ.get(ADO) else f"${ADO}"),
}
#: The runtime on SQL Server.
RUNTIME = os.environ.get("SQLSEM_TEST_DOTNET") or ("mono" if microsoft.compiler_lacks() else "core")
ENGINES = [engine for engine, lacks in LACKS.items() if lacks is None]
if not ENGINES:
    pytest.skip(f".NET needs {LACKS['postgresql']}", allow_module_level=True)
pytestmark = pytest.mark.engines(*ENGINES)

SOURCES = (dotnet.CLIENT, Path(__file__).parent / "dotnet" / "Agent.cs")


class Agent(Child):
    """A .NET process under remote control: tests/clients/dotnet/Agent.cs."""

    def __init__(self, program: list[str], *arguments: str) -> None:
        self._errors = tempfile.TemporaryFile("w+b")  # noqa: SIM115  (closed in `close`)
        self.process = subprocess.Popen(
            [*program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
            env={**os.environ, **(microsoft.dotnet().environment if program[0] != "mono" else {})},
        )
        self.function = "the agent"
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, **command: Any) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("\t".join(f"{key}={value}" for key, value in command.items()) + "\n")
            self.process.stdin.flush()

    def do(self, command: str, expected: str, **fields: Any) -> dict[str, Any]:
        """Send a command, and check and return its answer."""
        self.send(do=command, **fields)
        return self.expect(expected)

    def fails(self, command: str, error: str, *words: str, **fields: Any) -> str:
        """Send a command that must fail with this error and these words; return the message."""
        answer = self.do(command, "failed", **fields)
        assert answer["error"] == error, answer
        message = str(answer["message"])
        for word in words:
            assert word in message
        return message


@pytest.fixture(scope="session")
def program() -> Path:
    """Compile the agent once for all workers."""
    shared = Path(os.environ["SQLSEM_TEST_SHARED_DIRECTORY"])
    program = shared / "agent.exe"
    with filelock.FileLock(shared / "agent.lock"):
        if not program.exists():
            dotnet.compile_sources(SOURCES, program)
    return program


@pytest.fixture(scope="session")
def core_program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Compile the agent for .NET Core, and return its command line."""
    return microsoft.compile_core(SOURCES, tmp_path_factory.mktemp("core"), "agent")


@pytest.fixture(params=["sync", "async"])
def style(request: pytest.FixtureRequest) -> str:
    """Choose one of the two forms of each call for the agents."""
    return str(request.param)


@pytest.fixture
def make_agent(database: Database, style: str, request: pytest.FixtureRequest) -> Iterator[Callable[[], Agent]]:
    agents: list[Agent] = []
    lacks = LACKS[database.engine]
    if lacks:  # for a test that is marked for this engine alone
        pytest.skip(f".NET needs {lacks}")
    if database.engine == "postgresql":
        provider, text = "odbc", dotnet.odbc_of_postgres(database.url)
    else:
        provider, text = "sqlclient", os.environ[ADO]
        name = re.search(r"(?i)(?:^|;)\s*database\s*=\s*([^;]*)", database.url)
        if "://" not in database.url and name:
            text = support.with_database(text, name[1])
    core = provider == "sqlclient" and RUNTIME == "core"
    program = request.getfixturevalue("core_program") if core else ["mono", str(request.getfixturevalue("program"))]

    def make() -> Agent:
        agents.append(Agent(program, provider, text, database.schema, style))
        agents[-1].expect("ready")
        return agents[-1]

    yield make
    for agent in agents:
        agent.close()


@pytest.fixture
def agent(make_agent: Callable[[], Agent]) -> Agent:
    return make_agent()


@pytest.fixture
def python(spawn: Callable[..., Child]) -> Callable[[], Child]:
    def python() -> Child:
        child = spawn(support.session)
        child.expect("ready")
        return child

    return python


# -- together with Python -------------------------------------------------------------------------------------------


def stays(events: list[dict[str, Any]], resource: str, limit: int, access: str, holder: str) -> list[Stay]:
    """Return the stays that a process reported."""
    stays_of_holder = []
    for first, second in zip(events[::2], events[1::2], strict=True):
        assert (first["event"], second["event"]) == ("granted", "released"), (first, second)
        stays_of_holder.append(
            Stay(resource, first["position"], first["at"], second["left"], access, limit=limit, who=holder)
        )
    return stays_of_holder


@pytest.mark.parametrize(("kind", "limit"), [("limit", 3), ("limit", 1), ("readwrite", 1)], ids=str)
def test_dotnet_and_python_share_a_queue(make_agent, python, name, kind, limit):
    agents = [make_agent() for _ in range(3)]
    children = [python() for _ in range(3)]
    rounds, seconds = 4, 0.05
    access = ["write"] * 3 if kind == "limit" else ["read", "read", "write"]
    for agent, mode in zip(agents, access, strict=True):
        agent.send(
            do="work", name=name, kind="limit" if kind == "limit" else mode, limit=limit, rounds=rounds, seconds=seconds
        )
        agent.send(do="end")
    for child, mode in zip(children, access, strict=True):
        lock = {"kind": "limit", "name": name, "limit": limit} if kind == "limit" else {"kind": mode, "name": name}
        for _ in range(rounds):
            child.send(do="work", lock=lock, seconds=seconds)
        child.send(do="end")
    recorded = []
    for agent, mode in zip(agents, access, strict=True):
        recorded += stays(agent.rest(), name, limit, mode, "C#")
    for child, mode in zip(children, access, strict=True):
        recorded += stays([entry for entry in child.rest() if entry["event"] != "end"], name, limit, mode, "Python")
    assert check_history(recorded) == 6 * rounds
    if kind == "limit":
        assert overlap(recorded) == limit
    else:
        assert overlap([stay for stay in recorded if stay.access == "write"]) == 1


def test_order_of_asking_across_languages(agent, make_agent, python, name, connect):
    """A heavy request at the head holds back lighter ones behind it, in every language."""
    first = agent.do("acquire", "granted", name=name, limit=3)
    heavy, last = python(), make_agent()
    heavy.send(do="acquire", lock={"kind": "limit", "name": str(name), "limit": 3, "weight": 3})
    look = connect()
    until(lambda: len(look.admin.entries(name)) == 2)
    last.send(do="acquire", name=name, limit=3)
    until(lambda: len(look.admin.entries(name)) == 3)
    assert last.quiet(0.3)
    assert heavy.quiet(0)
    agent.do("release", "released")
    second = heavy.expect("granted")
    assert last.quiet(0.3)
    heavy.send(do="release")
    third = last.expect("granted")
    assert first["position"] < second["position"] < third["position"]
    assert third["fence"] == third["position"]
    assert third["waited"] > 0.5
    last.do("release", "released")


def test_a_limit_of_the_servers(agent, make_agent, python, connect, name):
    """A request without a limit uses the operator's cap, as in Python; the cap is raised during a wait."""
    other, child, operator = make_agent(), python(), connect()
    agent.fails("acquire", "SqlSemConfigurationException", "no limit is set", name=name, limit="server")
    operator.admin.set_limit(name, 1)
    agent.do("acquire", "granted", name=name, limit="server")
    (entry,) = operator.admin.entries(name)
    assert (entry.state, entry.limit) == ("holds", None)
    words = other.fails("acquire", "SqlSemTimeoutException", name=name, limit="server", timeout=0.2)
    assert "the server's limit" in words
    other.send(do="acquire", name=name, limit="server")
    until(lambda: len(operator.admin.entries(name)) == 2)
    assert other.quiet(0.3)
    operator.admin.set_limit(name, 2)
    other.expect("granted")
    child.send(do="acquire", lock={"kind": "limit", "name": str(name), "limit": 3})
    assert child.quiet(0.3)
    agent.do("release", "released")
    child.expect("granted")
    other.do("release", "released")
    child.send(do="release")
    until(lambda: operator.admin.entries(name) == [])
    operator.admin.set_limit(name, None)


def test_dotnet_members_are_named_in_overview(agent, connect, name):
    granted = agent.do("acquire", "granted", name=name, limit=4, weight=2, note="by hand, ünd möre")
    (entry,) = connect().admin.entries(name)
    assert (entry.state, entry.weight, entry.limit, entry.note) == ("holds", 2, 4, "by hand, ünd möre")
    assert (entry.pid, entry.program, entry.position) == (agent.pid, "agent", granted["position"])
    assert entry.requesting_id == granted["requesting_id"]
    agent.do("dispose", "disposed")
    assert connect().admin.entries(name) == []
    assert connect().admin.history(name)[0].outcome == "released"


def test_stages_wait_for_each_other(agent, make_agent, name):
    other, later = make_agent(), make_agent()
    agent.do("acquire", "granted", name=name, kind="stage", order=100)
    other.do("acquire", "granted", name=name, kind="stage", order=100)
    later.send(do="acquire", name=name, kind="stage", order=200)
    assert later.quiet(0.3)
    agent.do("release", "released")
    assert later.quiet(0.2)
    other.do("release", "released")
    later.expect("granted")
    later.do("release", "released")


def test_a_deadlock_ends_the_youngest_request(agent, make_agent, python, connect, name):
    """Two connections: the older request is granted after the other connection has cancelled and released."""
    other, look = make_agent(), connect()
    agent.do("acquire", "granted", name=name("a"))
    other.do("acquire", "granted", name=name("b"))
    agent.send(do="acquire", name=name("b"), id="second")
    until(lambda: len(look.admin.entries(name("b"))) == 2)
    message = other.fails(
        "acquire", "SqlSemDeadlockException", name("a"), "youngest request", name=name("a"), id="second"
    )
    assert message.count(" holds ") == 2
    assert len(look.admin.entries(name("a"))) == 1
    other.do("release", "released")
    agent.expect("granted")
    agent.do("release", "released", id="second")
    agent.do("release", "released")


def test_a_kept_lock_is_held_and_its_loss_reported(agent, connect, name):
    position = agent.do("acquire", "granted", name=name, keep=1, grace=4, watch=1)["position"]
    assert agent.quiet(5)
    operator = connect()
    (entry,) = operator.admin.entries(name)
    assert entry.state == "holds"
    assert operator.admin.revoke(position, force=True)
    assert agent.expect("lost")["id"] == "it"
    agent.fails("check", "SqlSemLostException", name)


# -- death ----------------------------------------------------------------------------------------------------------


def test_killed_holder_is_recovered_from(agent, python, name):
    agent.do("acquire", "granted", name=name, grace=1)
    waiter = python()
    waiter.send(do="acquire", lock={"kind": "mutex", "name": str(name)})
    assert waiter.quiet(0.2)
    checked = time.monotonic()
    agent.do("check", "held")  # its last heartbeat
    agent.kill()
    granted = waiter.expect("granted")
    assert granted["at"] - checked >= 0.9, "before the grace was over"
    waiter.send(do="release")
    waiter.expect("released")


def test_killed_dotnet_waiter_blocks_no_client(agent, make_agent, python, connect, name):
    holder = python()
    holder.send(do="acquire", lock={"kind": "mutex", "name": str(name)})
    holder.expect("granted")
    agent.send(do="acquire", name=name, grace=0)
    look = connect()
    until(lambda: len(look.admin.entries(name)) == 2)
    behind = make_agent()
    behind.send(do="acquire", name=name)
    until(lambda: len(look.admin.entries(name)) == 3)
    agent.kill()
    holder.send(do="release")
    behind.expect("granted")
    behind.do("release", "released")


@pytest.mark.engines("postgresql")
def test_a_session_that_ended_is_told(agent, database, connect, name):
    agent.do("acquire", "granted", name=name, grace=0)
    (entry,) = connect().admin.entries(name)
    database.rows(
        f"SELECT pg_terminate_backend(backend_pid) FROM {database.beside('member')} WHERE member_id = ?",
        entry.member_id,
    )
    answer = agent.do("check", "failed")
    assert answer["error"] in ("SqlSemLostException", "SqlSemUnavailableException"), answer
    agent.send(do="dispose")  # through a new session
    assert agent.expect("trouble")["error"] == "SqlSemLostException"
    assert agent.expect("disposed")["ended"] is True
    assert database.queue(name) == []
    assert "lost" in answer["message"] or "not held" in answer["message"]
    agent.do("open", "opened")
    agent.do("acquire", "granted", name=name)
    agent.do("release", "released")


# -- waits that end otherwise ---------------------------------------------------------------------------------------


@pytest.fixture
def taken(python: Callable[[], Child], name: str) -> Iterator[Child]:
    """Hold the lock until told to release it, or until the test's end."""
    holder = python()
    holder.send(do="acquire", lock={"kind": "mutex", "name": str(name)})
    holder.expect("granted")
    yield holder
    holder.send(do="end")
    holder.rest()  # which releases its locks


def test_dotnet_acquire_times_out(agent, database, connect, taken, name):
    began = time.monotonic()
    message = agent.fails("acquire", "SqlSemTimeoutException", name, "0.4 s", "sqlsem ls", name=name, timeout=0.4)
    assert time.monotonic() - began >= 0.4, message
    assert len(database.queue(name)) == 1
    assert connect().admin.history(name)[0].outcome == "timeout"
    answer = agent.do("acquire", "failed", name=name, timeout=0)
    assert answer["error"] == "SqlSemTimeoutException"
    assert answer["holders"] == 1
    assert ", held by " in answer["message"]
    agent.do("acquire", "timeout", kind="try", name=name)
    agent.do("acquire", "timeout", kind="try", name=name, timeout=0.1)
    assert len(database.queue(name)) == 1
    taken.send(do="release")
    taken.expect("released")
    agent.do("acquire", "granted", kind="try", name=name)
    agent.do("release", "released")


@pytest.mark.parametrize("lease", [None, 5], ids=["session", "lease"])
def test_dotnet_acquire_is_cancelled(agent, database, connect, taken, name, lease):
    words = {} if lease is None else {"lease": lease}
    began = time.monotonic()
    answer = agent.do("acquire", "failed", name=name, cancel=0.3, **words)
    assert "Canceled" in answer["error"], answer
    assert 0.3 <= time.monotonic() - began < 30
    assert len(database.queue(name)) == 1
    # (On a slow machine the cancellation comes before there is a row.)
    assert {hold.outcome for hold in connect().admin.history(name)} <= {"cancelled", "released"}
    answer = agent.do("acquire", "failed", name=name("other"), cancel=0, **words)
    assert "Canceled" in answer["error"], answer
    assert database.queue(name("other")) == []


def test_dotnet_waiter_is_revoked(agent, connect, taken, name):
    agent.send(do="acquire", name=name)
    operator = connect()
    waiting = until(lambda: [entry for entry in operator.admin.entries(name) if entry.state == "waits"])
    assert operator.admin.revoke(waiting[0].position)
    answer = agent.expect("failed")
    assert answer["error"] == "SqlSemLostException"
    assert name in answer["message"]
    assert "ask again" in answer["message"]


@pytest.mark.engines("postgresql")
def test_a_stopped_statement_does_not_end_the_wait(agent, database, connect, taken, name):
    """As by the server's own statement_timeout, or by an administrator."""
    agent.send(do="acquire", name=name)
    look = connect()
    until(lambda: len(look.admin.entries(name)) == 2)
    stop = """SELECT pg_cancel_backend(pid) FROM pg_stat_activity
              WHERE state = 'active' AND query LIKE 'SELECT sqlsem.wait(%%' AND pid IN (
                  SELECT backend_pid FROM sqlsem.member NATURAL JOIN {table}
                  WHERE resource_id = ? AND granted_at IS NULL)"""
    for _ in range(2):
        until(lambda: database.rows(stop, str(name)))
    assert agent.quiet(0.5)
    taken.send(do="release")
    agent.expect("granted")
    agent.do("release", "released")


@pytest.mark.engines("postgresql")
def test_failed_cleanup_is_repeated_later(agent, database, connect, taken, name):
    agent.do("execute", "executed", text="SET lock_timeout = 200")
    agent.send(do="acquire", name=name, timeout=2)
    look = connect()
    (waiting,) = until(lambda: [entry for entry in look.admin.entries(name) if entry.state == "waits"])
    keeper = database.raw(autocommit=False)
    try:
        keeper.execute("SELECT 1 FROM sqlsem.ProcessControl WHERE queue_position = %s FOR UPDATE", (waiting.position,))
        assert name in agent.expect("trouble")["message"]
        assert agent.expect("failed")["error"] == "SqlSemTimeoutException"
    finally:
        keeper.rollback()
        keeper.close()
    assert len(database.queue(name)) == 2
    agent.do("acquire", "granted", name=name("other"))
    assert [position for position, _, _ in database.queue(name) if position == waiting.position] == []
    agent.do("release", "released")


# -- refusals -------------------------------------------------------------------------------------------------------


def test_an_open_transaction_is_refused(agent, database, name):
    agent.do("begin", "begun")
    agent.fails("acquire", "SqlSemConfigurationException", name, "commit or roll back first", name=name)
    agent.do("rollback", "rolled back")
    for enrolled in (False, True):
        agent.do("execute", "executed", text="BEGIN TRANSACTION")
        agent.do("execute", "executed", text=f"SELECT count(*) FROM {database.beside('setting')}")
        agent.fails("acquire", "SqlSemConfigurationException", name, "commit or roll back first", name=name)
        # (SQL Server has rolled it back by itself.)
        rollback = "IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION" if database.engine == "mssql" else "ROLLBACK"
        agent.do("execute", "executed", text=rollback)
        assert database.queue(name) == []
        if not enrolled:
            agent.do("acquire", "granted", name=name)
            agent.do("release", "released")


def test_dotnet_refuses_invalid_requests(agent, database, name):
    for words in (
        {"null": 1},
        {"name": ""},
        {"name": f" {name}"},
        {"name": f"{name} "},
        {"name": "x" * 256},
        {"name": name, "limit": 0},
        {"name": name, "weight": 2},
        {"name": name, "limit": 3, "weight": 0},
        {"name": name, "note": "x" * 1001},
        {"name": name, "lease": 0.5},
        {"name": name, "timeout": -2},
    ):
        answer = agent.do("acquire", "failed", **words)
        assert answer["error"] in ("ArgumentException", "ArgumentOutOfRangeException"), (words, answer)
    assert database.queue(name) == []


def test_a_lock_that_would_wait_for_itself(agent, name):
    agent.do("acquire", "granted", name=name, limit=2, id="one")
    agent.do("acquire", "granted", name=name, limit=2, id="two")
    agent.fails("acquire", "SqlSemDeadlockException", name, "for ever", name=name, limit=2, id="three")
    agent.do("release", "released", id="one")
    agent.do("acquire", "granted", name=name, limit=2, id="three")
    agent.do("release", "released", id="two")
    agent.do("release", "released", id="three")


def test_a_lock_is_had_again_on_the_same_connection(agent, name, connect):
    numbers = set()
    for _ in range(3):
        agent.do("acquire", "granted", name=name)
        numbers |= {entry.member_id for entry in connect().admin.entries(name)}
        agent.do("release", "released")
        agent.do("release", "released")  # and again is harmless
        agent.do("dispose", "disposed")
    assert len(numbers) == 1, "one member a connection"


# -- losing it ------------------------------------------------------------------------------------------------------


def test_a_lock_that_was_taken_away_is_told(agent, connect, name):
    operator = connect()
    for command in ("check", "release", "renew"):
        position = agent.do("acquire", "granted", name=name)["position"]
        agent.do("check", "held")
        assert operator.admin.revoke(position, force=True)
        message = agent.fails(command, "SqlSemLostException", name, str(position), "roll back")
        assert "operator" in message
        if command != "release":
            agent.send(do="dispose")
            assert agent.expect("trouble")["error"] == "SqlSemLostException"
            agent.expect("disposed")
        agent.fails("check", "SqlSemLostException")


def test_a_blocks_own_exception_comes_through(agent, database, name):
    assert agent.do("fail", "failed", name=name)["message"] == "the block's own"
    assert database.queue(name) == []


def test_assert_held_keeps_the_lock(agent, python, connect, name):
    position = agent.do("acquire", "granted", name=name)["position"]
    waiter = python()
    waiter.send(do="acquire", lock={"kind": "mutex", "name": str(name)})
    operator = connect()
    until(lambda: len(operator.admin.entries(name)) == 2)
    agent.do("begin", "begun", on="other")
    agent.do("assert", "asserted", on="other")
    # An operator revokes it by force; no other request is granted before the transaction ends.
    taker = threading.Thread(target=lambda: operator.admin.revoke(position, force=True))
    taker.start()
    assert waiter.quiet(0.5)
    agent.do("rollback", "rolled back", on="other")
    taker.join(PATIENCE)
    assert not taker.is_alive()
    with contextlib.suppress(sqlsem.NotHeld):  # where it did not wait for the transaction
        operator.admin.revoke(position, force=True)
    waiter.expect("granted")
    agent.do("begin", "begun", on="other")
    agent.fails("assert", "SqlSemLostException", name, on="other")
    agent.do("rollback", "rolled back", on="other")
    agent.send(do="dispose")
    agent.expect("trouble")
    agent.expect("disposed")
    waiter.send(do="release")
    waiter.expect("released")


def test_assert_held_in_the_locks_own_connection(agent, name):
    agent.do("acquire", "granted", name=name)
    agent.do("begin", "begun")
    agent.do("assert", "asserted")
    # The block is left before its transaction: an error reports that, and the next call repairs it.
    agent.send(do="dispose")
    assert "commit or roll back first" in agent.expect("trouble")["message"]
    assert agent.expect("disposed")["ended"] is False
    agent.do("rollback", "rolled back")
    agent.do("acquire", "granted", name=name("next"), id="next")
    agent.do("dispose", "disposed", id="next")
    assert agent.do("dispose", "disposed")["ended"] is True


def test_a_connection_that_was_closed(agent, database, name):
    """A pool may have reset the session: it is a new member then, and its earlier locks are released."""
    agent.do("acquire", "granted", name=name, id="old")
    agent.do("close", "closed")
    agent.fails("check", "SqlSemLostException", name, "closed", id="old")
    agent.do("open", "opened")
    agent.do("acquire", "granted", name=name("b"), id="new")
    agent.do("check", "held", id="new")
    agent.fails("check", "SqlSemLostException", id="old")
    agent.send(do="dispose", id="old")
    assert agent.expect("trouble")["error"] == "SqlSemLostException"
    assert agent.expect("disposed")["ended"] is True
    agent.do("release", "released", id="new")
    assert database.queue(name) == []


# -- leases ---------------------------------------------------------------------------------------------------------


def test_a_lease_is_held_without_a_session(agent, python, name):
    waiter = python()
    agent.do("acquire", "granted", name=name, lease=5)
    agent.do("close", "closed")
    waiter.send(do="acquire", lock={"kind": "mutex", "name": str(name)})
    deadline = time.monotonic() + 6
    while time.monotonic() < deadline:  # longer than the lease
        assert waiter.quiet(0.5)
        assert agent.do("renew", "renewed")["left"] > 0
    assert agent.do("renew", "renewed", through="other")["left"] > 0
    agent.do("release", "released")
    waiter.expect("granted")
    waiter.send(do="release")
    waiter.expect("released")


def test_a_lease_that_is_not_renewed_ends(agent, python, name):
    agent.do("acquire", "granted", name=name, lease=1)
    waiter = python()
    waiter.send(do="acquire", lock={"kind": "mutex", "name": str(name)})
    waiter.expect("granted")
    agent.fails("renew", "SqlSemLostException", name, "another process may hold it")
    agent.send(do="dispose")
    agent.expect("trouble")
    agent.expect("disposed")
    waiter.send(do="release")
    waiter.expect("released")


def test_a_lease_waits_longer_than_itself(agent, taken, name):
    agent.send(do="acquire", name=name, lease=3)
    assert agent.quiet(4)
    taken.send(do="release")
    assert agent.expect("granted")["waited"] > 3
    agent.do("release", "released")


def test_a_lease_leaves_no_member(agent, database, name):
    agent.do("acquire", "granted", name=name, lease=5)
    ((member,),) = database.rows("SELECT member_id FROM {table} WHERE resource_id = ?", name)
    agent.do("release", "released")
    assert database.rows(f"SELECT 1 FROM {database.beside('member')} WHERE member_id = ?", member) == []


# -- what else may be wrong -----------------------------------------------------------------------------------------


def test_dotnet_names_missing_tables(agent, name):
    agent.fails("acquire", "SqlSemSchemaException", name, "sqlsem init", "schema nowhere", name=name, schema="nowhere")
    answer = agent.do("acquire", "failed", name=name, schema="no where")
    assert (answer["error"], "plain identifier" in answer["message"]) == ("ArgumentException", True)


def test_a_connection_that_is_not_open(agent, name):
    agent.do("close", "closed")
    agent.fails("acquire", "SqlSemConfigurationException", name, "must be open", name=name)


def test_a_gate_kept_in_an_open_transaction(agent, database, name):
    """A bare participant that does not commit its row blocks all requests; a timeout counts all the same."""
    keeper = database.raw(autocommit=False)
    try:
        database.insert_bare(keeper.cursor(), name, "keeper")
        began = time.monotonic()
        agent.fails("acquire", "SqlSemTimeoutException", name, name=name, timeout=1.5)
        assert 1.5 <= time.monotonic() - began < 30
        agent.send(do="acquire", name=name, timeout=60)
        assert agent.quiet(1.5)
    finally:
        keeper.rollback()
        keeper.close()
    agent.expect("granted")
    agent.do("release", "released")
    assert database.queue(name) == []


EXAMPLES = """
using System;
using System.Data.Common;
using System.Threading;
using System.Threading.Tasks;

public static class Examples
{
    private static readonly CancellationToken stopping = default(CancellationToken);
    private static void Load() { }
    private static Task LoadAsync(CancellationToken cancel) { return Task.FromResult(1); }
    private static void Write(string part, long fence, DbTransaction transaction) { }
"""


@pytest.mark.engines("postgresql")
def test_documented_examples_compile(make_agent, tmp_path):
    page = dotnet.CLIENT.parents[2] / "docs" / "howto" / "dotnet.md"
    examples = re.findall(r"^```csharp\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(examples) >= 3
    kinds = ["async Task" if "await " in example else "void" for example in examples]
    methods = [
        f"public static {kind} Example{n}(DbConnection connection)\n{{\n{example}}}\n"
        for n, (kind, example) in enumerate(zip(kinds, examples, strict=True))
    ]
    source = tmp_path / "Examples.cs"
    source.write_text(EXAMPLES + "\n".join(methods) + "}\n", encoding="utf-8")
    dotnet.compile_sources([dotnet.CLIENT, source], tmp_path / "Examples.dll")
