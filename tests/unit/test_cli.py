"""The command line, in this process where that will do."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import command_line, forget_engine, overviews
from support.commands import call, done, drawn
from support.overviews import NOW

import sqlsem
from sqlsem import cli, sql
from sqlsem.api.admin import Admin
from sqlsem.cli import options
from sqlsem.insight.overview import Overview
from sqlsem.ops.terminal.queues import by_resource, render_history, render_queues
from sqlsem.ops.terminal.tables import seconds_in_words
from sqlsem.values.locks import Entry, Past, Resource

#: A password that no output may contain.
SECRET = "correct-horse"


def test_init_refuses_the_table_of_another_schema(coordinator: sqlsem.Coordinator) -> None:
    result = call("--schema", "other", "init")
    assert (result.exit_code, "choose another name with --table" in result.output) == (78, True)
    done("--schema", "other", "--table", "OtherQueue", "init")
    with coordinator.mutex("a"):
        assert done("--schema", "other", "--table", "OtherQueue", "ls", "--json") == "[]\n"


# -- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [(), *(path for path, _ in command_line.commands())], ids=" ".join)
def test_help_has_examples_and_exit_codes(path: tuple[str, ...]) -> None:
    text = done(*path, "--help")
    assert text.startswith(f"Usage: {' '.join(('sqlsem', *path))} ")
    assert "Example" in text
    assert max(map(len, text.splitlines())) <= 80
    if path in ((), ("init",), ("run",), ("revoke",), ("doctor",), ("demo",), ("batch", "resume")) or (
        path[0] == "tasks" and path[-1] in ("retry", "cancel", "wait")
    ):
        assert "Exit codes" in text


def test_command_imports_only_its_needs() -> None:
    code = "import sys; from sqlsem.cli import main; main.commands['ls']; print(*sys.modules)"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert "sqlsem.cli.locks" in loaded
    others = {"textual", "starlette", "uvicorn", "plotly", "prometheus_client", "psycopg", "pyodbc", "asyncio"}
    assert not loaded & {*others, "sqlsem.cli.run", "sqlsem.cli.nights", "sqlsem.insight.replay", "sqlsem.ops.demo"}


def test_commands_are_listed_by_headings() -> None:
    """Each command once, in one whole line, and the minimal core first."""
    text = done("--help")
    lines = text[text.index("\nCore:\n") : text.index("\n  Examples:")].splitlines()
    groups: dict[str, list[str]] = {}
    for line in filter(None, lines):
        if line.endswith(":"):
            names = groups.setdefault(line.removesuffix(":"), [])
        else:
            match = re.fullmatch(r"  ([a-z]+) +[A-Z].*[^.]\.", line)
            assert match, line
            names.append(match[1])
    assert groups == {heading: list(names) for heading, names in cli.COMMANDS.items()}
    assert list(cli.main.commands) == [name for names in groups.values() for name in names]
    assert {"init", "doctor", "run", "ls", "why", "set", "pause", "resume", "revoke"} <= set(groups["Core"])


def test_version() -> None:
    assert done("--version").strip() == f"sqlsem, version {sqlsem.__version__}"


def test_as_a_module(coordinator: sqlsem.Coordinator) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "sqlsem", "ls"],
        env={**os.environ, "PYTHONPATH": str(Path(sqlsem.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout == "No request holds or waits.\n"


#: Commands about one thing that must be there, and one that SQLite cannot do; all others that list exit with 0.
NOT_THERE = {("why",): 1, ("tasks", "show"): 1, ("guard",): 78}


@pytest.mark.parametrize("as_json", [False, True])
def test_listings_exit_0_when_empty(coordinator: sqlsem.Coordinator, as_json: bool) -> None:
    """Enumerated: every command that has --json and changes nothing."""
    coordinator.admin.resources()
    listing = [
        path
        for path, command in command_line.commands()
        if any("--json" in parameter.opts for parameter in command.params) and path != ("put",)
    ]
    assert {("ls",), ("queues",), ("rates",), ("tasks", "log"), *NOT_THERE} <= set(listing)
    for path in listing:
        result = call(*path, *command_line.examples()[path], *["--json"] * as_json)
        assert result.exit_code == NOT_THERE.get(path, 0), (path, result.output)
        if as_json and result.exit_code == 0:
            assert json.loads(result.stdout) is not None


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [("etl=3", ("etl", 3, 1)), ("etl=3:2", ("etl", 3, 2)), ("a=b=3", ("a=b", 3, 1)), ("a:1=3", ("a:1", 3, 1))],
)
def test_limit_option_accepts_weights(text: str, parts: tuple[str, int, int]) -> None:
    assert options.limited(text) == parts


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0.0s"), (9.94, "9.9s"), (9.96, "10s"), (59.6, "1m00s"), (185, "3m05s"), (3599.6, "1h00m"), (273600, "3d04h")],
)
def test_seconds_in_words(seconds: float, words: str) -> None:
    assert seconds_in_words(seconds) == words


# -- displays ---------------------------------------------------------------------------------------------------------


def entry(position: int, state: str = "holds", **other: object) -> Entry:
    return overviews.entry(position, state, **{"host": "etl01", "pid": 4000 + position, "seconds": 12.3, **other})


QUEUES = [
    (
        Resource("etl", 2, True, 7200.0, 2, 2),
        [
            entry(41, note="orders"),
            entry(42, seconds=185, weight=2, host="a-server-with-quite-a-long-name.example.com"),
            entry(
                43, "waits", note="everything since the beginning of the year, in one go, and slowly", missing_for=3.2
            ),
            entry(44, "revoked", access="stage:200", note="evil\x1b[2J\nnote", program="a_program_with_a_long_name.py"),
        ],
    ),
    (
        Resource("nightly", None, False, None, 1, 0),
        [entry(9000000000, limit=1, host=None, requesting_id="an id", program=None)],
    ),
]


def test_ls_fits_80_columns() -> None:
    lines = drawn(render_queues(QUEUES, 80), 80)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80
    assert len(lines) == 10  # no row was broken in two
    assert lines[0].split("  ") == ["etl", "2 holding, 2 waiting", "PAUSED", "limit set to 2", "stale after 2h00m"]
    for word in (
        "41",
        "holds",
        "waits",
        "revoked",
        "3m05s",
        "limit 3 x2",
        "stage 200",
        "write",
        "etl01:4041",
        "orders",
    ):
        assert word in text
    assert "[missing" in text
    assert "\x1b" not in text


def test_ls_says_everything_where_there_is_room() -> None:
    text = "\n".join(drawn(render_queues(QUEUES, 300), 300))
    assert "a-server-with-quite-a-long-name.example.com:4042" in text
    assert "[missing for 3.2s] everything since the beginning of the year, in one go, and slowly" in text


@pytest.mark.parametrize("width", [20, 40, 60])
def test_ls_on_a_narrow_terminal_still_draws(width: int) -> None:
    assert "41" in "\n".join(drawn(render_queues(QUEUES, width), width))


def test_ls_and_json(coordinator: sqlsem.Coordinator) -> None:
    assert done("ls") == "No request holds or waits.\n"
    assert done("ls", "x") == "Nobody holds or waits for 'x'.\n"
    assert json.loads(done("ls", "--json")) == []
    note = "a note that is far too long for eighty columns, " * 3
    with coordinator.limit("x", 3, weight=2, note=note.strip()), coordinator.mutex("y"):
        text = done("ls")
        assert note.strip() in text  # into a pipe, nothing is cut off
        assert not any(line.endswith(" ") for line in text.splitlines())
        assert "limit 3 x2" in text
        assert "y  1 holding, 0 waiting" in text
        assert "x" not in [line.split()[0] for line in done("ls", "y").splitlines()]
        queues = json.loads(done("ls", "--json"))
    assert [queue["resource"] for queue in queues] == ["x", "y"]
    assert queues[0]["holding"] == 1
    assert queues[0]["waiting"] == 0
    assert queues[0]["entries"][0]["weight"] == 2
    assert queues[0]["entries"][0]["pid"] == os.getpid()
    assert datetime.fromisoformat(queues[0]["entries"][0]["granted_at"]).tzinfo is not None


def test_history(coordinator: sqlsem.Coordinator) -> None:
    assert done("history") == "Nothing has finished yet.\n"
    assert json.loads(done("history", "--json")) == []
    for name in "abc":
        with coordinator.mutex(name, note=f"note {name}"):
            pass
    assert [line.split()[1] for line in done("history").splitlines()] == ["RESOURCE", "c", "b", "a"]
    assert [entry["resource"] for entry in json.loads(done("history", "-n", "2", "--json"))] == ["c", "b"]
    (entry,) = json.loads(done("history", "a", "--json"))
    assert (entry["outcome"], entry["note"]) == ("released", "note a")


def test_history_fits_80_columns() -> None:
    past = Past(
        "a long name " * 5, 7, "write", 1, "id", "t", "a long note " * 9, NOW, None, NOW, 90.0, None, "cancelled"
    )
    lines = drawn(render_history([past], 80), 80)
    assert len(lines) == 2
    assert max(map(len, lines)) <= 80


# -- operating --------------------------------------------------------------------------------------------------------


def test_pattern_limit_is_shown_in_set_and_ls(coordinator: sqlsem.Coordinator) -> None:
    output = done("set", "tenant:*", "--limit", "2")  # no --allow-new: a pattern is no name that could be misspelt
    assert re.search(r"^tenant:\*: not paused, limit set to 2 by \S+, ", output)
    with coordinator.limit("tenant:7"):
        shown = done("ls", "tenant:7")
        assert re.search(r"tenant:7  1 holding, 0 waiting  limit set to 2 by \S+, for tenant:\*", shown)
        assert json.loads(done("ls", "tenant:7", "--json"))[0]["pattern"] == "tenant:*"
        assert done("run", "--limit", "tenant:7", "--", "true") == ""
    done("set", "tenant:*", "--no-limit")
    assert coordinator.admin.resources() == []


def test_set_pause_resume(coordinator: sqlsem.Coordinator) -> None:
    output = done("set", "x", "--limit", "2", "--stale-after", "2h", "--allow-new")
    assert re.search(r"limit set to 2 by \S+, rows stale after 2h00m", output)
    (resource,) = coordinator.admin.resources()
    by = resource.cap_by
    assert by
    assert done("pause", "x").startswith(f"x: paused by {by}, limit set to 2 by {by}")
    (resource,) = coordinator.admin.resources()
    assert resource == Resource("x", 2, True, 7200.0, 0, 0, resource.paused_at, by, by)
    shown = done("ls")
    assert re.fullmatch(
        rf"x  0 holding, 0 waiting  PAUSED by {by} since \S+  limit set to 2 by {by}  stale after 2h00m\n", shown
    )
    assert done("resume", "x").startswith("x: not paused")
    assert "no limit set, rows never stale" in done("set", "x", "--no-limit", "--no-stale-after")
    assert coordinator.admin.resources() == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["set", "x"],
        ["set", "x", "--limit", "0"],
        ["set", "x", "--limit", "2", "--no-limit"],
        ["set", "x", "--stale-after", "0"],
        ["set", "x", "--priorities", "0"],
        ["set", "x", "--priorities", "1m", "--no-priorities"],
        ["set", " x", "--limit", "2"],
        ["pause", ""],
        ["revoke", "zero"],
        ["history", "-n", "0"],
        ["--grace", "some", "ls"],
        ["sql", "oracle"],
        ["sql", "sqlite", "nothing"],
        ["nonsense"],
    ],
)
def test_wrong_usage(url: str, arguments: list[str]) -> None:
    assert call(*arguments).exit_code == 64


@pytest.mark.parametrize("option", [["--schema", "not a name"], ["--table", "x;y"], ["--lease", "0"]])
def test_wrong_configuration(url: str, option: list[str]) -> None:
    result = call(*option, "ls")
    assert result.exit_code == 78
    assert result.stderr.startswith("sqlsem: error: ")
    assert len(result.stderr.splitlines()) == 1


def test_unused_name_is_reported(coordinator: sqlsem.Coordinator) -> None:
    with coordinator.mutex("nightly"):
        pass
    for words in (["pause", "nigtly"], ["resume", "nigtly"], ["set", "nigtly", "--limit", "2"]):
        result = call(*words)
        assert result.exit_code == 78
        assert "Nobody uses 'nigtly', nor has lately (is it 'nightly'?)" in result.stderr
        assert coordinator.admin.resources() == []
        assert done(*words, "--allow-new").startswith("nigtly: ")
        coordinator.admin.resume("nigtly")
        coordinator.admin.set_limit("nigtly", None)
    assert done("pause", "nightly").startswith("nightly: paused")


@pytest.mark.parametrize(
    "words",
    [
        *(["ls"], ["history"], ["tasks"], ["tasks", "log", "1"], ["tasks", "wait", "q"], ["tasks", "cancel", "1"]),
        *(["batch"], ["reap"], ["revoke", "1"], ["pause", "x"], ["resume", "x"], ["set", "x", "--limit", "2"]),
    ],
    ids=" ".join,
)
def test_reading_commands_create_no_file(tmp_path: Path, words: list[str]) -> None:
    result = call("--url", f"sqlite:///{tmp_path}/misspelt/queue.db", *words)
    assert result.exit_code == 78
    assert f"SQLite file {tmp_path}/misspelt/queue.db is not there" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_ls_watch_prints_again(coordinator: sqlsem.Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    for often in ("0", "0.05", "0s"):
        result = call("ls", "--watch", often)
        assert result.exit_code == 64
        assert "too often" in result.stderr

    class Enough(KeyboardInterrupt):
        pass

    looks: list[object] = []
    see = Admin.overview

    def overview(self: Admin) -> Overview:
        looks.append(self)
        if len(looks) == 2:
            raise sqlsem.Unavailable("gone fishing")
        if len(looks) == 4:
            raise Enough
        return see(self)

    monkeypatch.setattr(Admin, "overview", overview)
    with coordinator.mutex("x"):
        result = call("ls", "--watch", "100ms")
        assert result.exit_code == 130
        frames = re.split(r"(?m)^-- \d{4}-\d\d-\d\d \d\d:\d\d:\d\d$", result.stdout)
        assert [frame.strip()[:1] for frame in frames] == ["", "x", "x"]
        assert "sqlsem: error: gone fishing; trying again" in result.stderr
        looks.clear()
        result = call("ls", "--watch", "100ms", "--json")
        decoder, text, times = json.JSONDecoder(), result.stdout, []
        while text.strip():
            listing, end = decoder.raw_decode(text)
            times.append(datetime.fromisoformat(listing["at"]))
            assert [queue["resource"] for queue in listing["queues"]] == ["x"]
            text = text[end:].lstrip()
        assert len(times) == 2
        looks.clear()
        drawn = CliRunner().invoke(
            cli.main, ["ls", "--watch", "100ms"], env={"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "100"}
        )
        assert "gone fishing" in drawn.stdout
        assert drawn.stdout.count("x") >= 2


def test_history_filters(coordinator: sqlsem.Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    from sqlsem.engines.sqlite import SqliteSession

    calls: list[object] = []

    def history(self: object, resource: str | None, maximum: int, **filters: object) -> list[Past]:
        calls.append((resource, maximum, filters))
        return []

    monkeypatch.setattr(SqliteSession, "history", history)
    done("history", "x", "--since", "24h", "--until", "90", "--outcome", "reaped", "-n", "5")
    done("history")
    assert calls == [("x", 5, {"since": 86400.0, "until": 90.0, "outcome": "reaped"}), (None, 20, {})]
    assert call("history", "--outcome", "odd").exit_code == 64


def test_history_shows_owner_and_limit() -> None:
    past = Past(
        *("etl", 7, "write", 1, "an id", "t", None, NOW, None, NOW, 90.0, 3.0, "revoked"),
        **{"limit": 3, "host": "etl01", "pid": 4711, "program": "load.py", "ended_by": "ops"},
    )
    line = drawn(render_history([past], 120), 120)[1]
    for words in ("limit 3", "etl01:4711", "load.py", "revoked by ops"):
        assert words in line


def test_ls_marks_dead_and_missing_members() -> None:
    dead = entry(5, "dead", granted_at=NOW, missing_for=12.0, grace=5.0, note="daily")
    missing = entry(6, missing_for=2.0)
    session = entry(7, host="127.0.0.1", pid=None)
    ((resource, entries),) = by_resource([dead, missing, session], [], None)
    assert (resource.holding, resource.waiting) == (2, 0)
    lines = drawn(render_queues([(resource, entries)], 120), 120)
    assert "2 holding, 0 waiting, 1 dead" in lines[0]
    assert "dead" in lines[2].split()
    assert "[missing for 12s] daily" in lines[2]
    assert "[missing for 2.0s]" in lines[3]
    assert "127.0.0.1  " in lines[4]
    assert "None" not in lines[4]


def test_ls_does_not_wrap_a_long_name() -> None:
    resource = Resource("a long name " * 20, None, True, None, 0, 0)
    (line,) = drawn(render_queues([(resource, [])], 80), 80)
    assert len(line) <= 80


def test_doctor_leaves_a_single_line_in_the_history(coordinator: sqlsem.Coordinator) -> None:
    done("doctor")
    assert len(coordinator.admin.history()) == 1


def test_revoke_reports_each_outcome(coordinator: sqlsem.Coordinator) -> None:
    result = call("revoke", "123456")
    assert result.exit_code == 1
    assert result.stderr.startswith("sqlsem: error: There is no row")
    lock = coordinator.mutex("x")
    assert lock.acquire()
    position = lock.grant.position
    assert "has been told" in done("revoke", str(position))
    with pytest.raises(sqlsem.LockLost):
        lock.grant.check()
    assert lock.grant.lost
    other = coordinator.mutex("y")
    assert other.acquire()
    text = done("revoke", "--force", str(other.grant.position))
    assert re.fullmatch(rf"Position \d+ of y \(.*:{os.getpid()}\) is gone\.\n", text)
    with pytest.raises(sqlsem.LockLost):
        other.grant.check()


def test_reap_leaves_the_living_alone(coordinator: sqlsem.Coordinator) -> None:
    with coordinator.mutex("x") as grant:
        assert done("reap") == "0 dead members and 0 rows removed.\n"
        grant.check()


def leave_dead(url: str, uses: str, **options: float) -> None:
    """Run a process that uses a lock, and ends without a word."""
    script = f"import os, sqlsem; lock = sqlsem.connect({url!r}, **{options}).mutex('x'); {uses}; os._exit(0)"
    environment = {**os.environ, "PYTHONPATH": str(Path(sqlsem.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)


def test_reap_counts_members_without_rows(url: str) -> None:
    for _ in range(2):
        leave_dead(url, "lock.acquire(); lock.release()", grace=0)
    assert done("reap") == "2 dead members and 0 rows removed.\n"


def test_reap_removes_the_dead(url: str) -> None:
    leave_dead(url, "lock.acquire()")
    for code in ("1 dead member and 1 row", "0 dead members and 0 rows"):
        assert done("reap") == f"{code} removed.\n"
    assert done("ls") == "No request holds or waits.\n"


# -- scripts and tables -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["sqlite", "postgresql", "postgres"])
def test_sql_command_prints_scripts(url: str, engine: str) -> None:
    text = done("--schema", "locks", "--table", "Queue", "sql", engine)
    assert "Queue" in text
    assert "{schema}" not in text
    assert "ProcessControl" not in text
    assert "CREATE TABLE" in text
    assert "DROP" not in done("sql", engine, "schema"), "nothing is thrown away"
    assert "DROP" in done("sql", engine, "drop")


def test_sql_has_the_routines_for_sessions(url: str) -> None:
    whole = done("sql", "postgresql")
    places = [
        whole.index(statement)
        for statement in (
            "CREATE TABLE",
            "FUNCTION sqlsem.register_member",
            "PROCEDURE sqlsem.acquire",
            "GRANT EXECUTE",
        )
    ]
    assert places == sorted(places), "the order in which to run them"
    assert "PROCEDURE sqlsem.acquire" in done("sql", "postgresql", "public")
    result = call("sql", "sqlite", "public")
    assert result.exit_code != 0


def test_sql_for_sqlcmd_is_a_single_transaction_in_ascii() -> None:
    """`sqlcmd` reads files in the code page of its host, and goes on with the next batch after an error."""
    whole = done("sql", "mssql")
    assert whole.isascii()
    assert "sqlcmd -b -I -f 65001" in whole.partition("GO\n")[0]
    batches = [batch for batch in re.split(r"(?m)^GO$", whole) if batch.strip()]
    assert re.search(r"(?m)^SET XACT_ABORT ON;$", batches[0])
    depth = 0
    for number, batch in enumerate(batches):
        words = re.findall(r"(?m)^(BEGIN|COMMIT) TRANSACTION\b", batch)
        depth += words.count("BEGIN") - words.count("COMMIT")
        assert not re.search(r"(?m)^ROLLBACK\b", batch)
        assert (depth == 0) == (number == len(batches) - 1), batch
    assert "BEGIN TRANSACTION" not in done("sql", "mssql", "drop"), "a script alone is as it is in the folder"


def test_sql_of_the_urls_engine_needs_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQLSEM_URL", f"postgresql://someone:{SECRET}@nowhere/db")
    monkeypatch.setitem(sys.modules, "psycopg", None)
    forget_engine(monkeypatch, "postgresql")
    assert "GRANT" in done("sql", "permissions")
    assert SECRET not in done("sql")


def test_init_dry_run_changes_nothing(url: str, tmp_path: Path) -> None:
    text = done("init", "--dry-run")
    assert f"not there yet → {sql.LATEST}" in text
    assert "would run: schema-1.sql" in text
    assert ", routines.sql, permissions.sql" in text
    assert list(tmp_path.iterdir()) == []
    text = done("--schema", "locks", "--table", "Queue", "init")
    assert f"{tmp_path}/queue.db, prefix locks_, table Queue" in text
    assert f"not there yet → {sql.LATEST}" in text
    assert text.endswith("Done.\n")
    text = done("--schema", "locks", "--table", "Queue", "init", "--dry-run")
    assert "up to date" in text
    assert "would run again: routines.sql, permissions.sql" in text
    assert done("--schema", "locks", "--table", "Queue", "init").endswith("Done.\n")


def test_table_version_that_is_no_number_is_reported(url: str, tmp_path: Path) -> None:
    done("init")
    with contextlib.closing(sqlite3.connect(tmp_path / "queue.db")) as connection, connection:
        connection.execute("UPDATE sqlsem_setting SET value = 'three' WHERE name = 'schema_version'")
    for words in (["init"], ["init", "--dry-run"], ["ls"], ["tasks"]):
        result = call(*words)
        assert result.exit_code == 78
        assert "'three', which is no number" in result.stderr


def test_init_never_downgrades(url: str, tmp_path: Path) -> None:
    done("init")
    with sqlite3.connect(tmp_path / "queue.db") as connection:
        connection.execute("UPDATE sqlsem_setting SET value = '99' WHERE name = 'schema_version'")
    connection.close()
    for arguments in (["init", "--dry-run"], ["init"]):
        result = call(*arguments)
        assert result.exit_code == 78
        assert f"version 99, newer than this client's {sql.LATEST}" in result.stderr
    assert done("ls") == "No request holds or waits.\n"  # which it may, as the tables allow clients of version 1


def test_tables_for_newer_clients_only(url: str, tmp_path: Path) -> None:
    done("init")
    with sqlite3.connect(tmp_path / "queue.db") as connection:
        connection.execute("UPDATE sqlsem_setting SET value = '99'")
    connection.close()
    result = call("ls")
    assert result.exit_code == 78
    assert "pip install --upgrade sqlsem" in result.stderr
    assert call("run", "--mutex", "x", "--", sys.executable, "-c", "").exit_code == 78
    result = call("doctor", "--json")
    assert result.exit_code == 1
    (failed,) = [check for check in json.loads(result.stdout)["checks"] if not check["ok"]]
    assert failed["name"] == "schema"
    assert "pip install" in failed["mend"]


# -- doctor -----------------------------------------------------------------------------------------------------------


def test_doctor_reports_ok(url: str) -> None:
    text = done("doctor")
    assert text.endswith("Everything is in order.\n")
    assert "FAIL" not in text
    report = json.loads(done("doctor", "--json"))
    assert report["ok"] is True
    names = [check["name"] for check in report["checks"]]
    assert names[:3] == ["url", "connect", "schema"]
    assert {"driver", "journal", "writable", "beacon", "disk", "round trip"} <= set(names)
    assert done("ls") == "No request holds or waits.\n"


def test_memory_url_is_refused_by_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQLSEM_URL", "memory://")
    assert [check["name"] for check in json.loads(done("doctor", "--json"))["checks"]] == [
        "url",
        "connect",
        "round trip",
    ]
    for words in ("init", "ls", "history", "tasks", "batch", "put q --sql x", "run --mutex x -- true"):
        result = call(*words.split())
        assert result.exit_code == 78
        assert "does not offer; name another database" in result.stderr


@pytest.mark.parametrize(
    ("kind", "ok"), [("nfs4", False), ("cifs", False), ("fuse.sshfs", False), ("ext4", True), ("fuse.overlayfs", True)]
)
def test_doctor_knows_network_file_systems(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, ok: bool
) -> None:
    place = str(tmp_path.resolve()).replace(" ", "\\040")
    mounts = f"dev / xfs rw 0 0\nserver:/x {place} {kind} rw 0 0\n"
    read_text = Path.read_text

    def read(path: Path, *arguments: object, **options: object) -> str:
        return mounts if str(path) == "/proc/self/mounts" else read_text(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", read)
    result = call("doctor", "--json")
    (check,) = [check for check in json.loads(result.stdout)["checks"] if check["name"] == "file system"]
    assert check["ok"] is ok
    assert kind in check["detail"]
    assert bool(check["mend"]) is not ok


def test_doctor_reports_a_missing_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQLSEM_URL", f"postgresql://someone:{SECRET}@nowhere/db")
    monkeypatch.setitem(sys.modules, "psycopg", None)
    forget_engine(monkeypatch, "postgresql")
    result = call("doctor")
    assert result.exit_code == 1
    assert "FAIL" in result.stdout
    assert "pip install 'sqlsem[postgres]'" in result.stdout
    assert SECRET not in result.output


def test_doctor_reports_a_file_that_is_no_database(url: str, tmp_path: Path) -> None:
    (tmp_path / "queue.db").write_text("this is something else altogether " * 100)
    result = call("doctor", "--json")
    assert result.exit_code == 1
    (check,) = [check for check in json.loads(result.stdout)["checks"] if not check["ok"]]
    assert check["name"] == "connect"
    assert check["mend"] == "Name another file"


# -- passwords --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["option", "environment"])
@pytest.mark.parametrize("verbose", [[], ["-vv"]])
@pytest.mark.parametrize(
    "place",
    [
        f"postgresql://someone:{SECRET}@127.0.0.1:1/db",
        f"postgresql://someone:{SECRET}@[nowhere/db",
        f"postgresql://127.0.0.1:1/db?password={SECRET}&nonsense={SECRET}",
        f"oracle://someone:{SECRET}@nowhere/db",
        f"{SECRET}@nowhere",
    ],
)
@pytest.mark.parametrize(
    "command",
    [["ls"], ["doctor"], ["init"], ["sql"], ["run", "--mutex", "x", "--", sys.executable, "-c", ""]],
    ids=lambda c: c[0],
)
def test_password_is_never_printed(
    monkeypatch: pytest.MonkeyPatch, by: str, verbose: list[str], place: str, command: list[str]
) -> None:
    if place.startswith("postgresql"):
        pytest.importorskip("psycopg")
    monkeypatch.setenv("SQLSEM_URL", place if by == "environment" else "sqlite:///nowhere")
    option = ["--url", place] if by == "option" else []
    # -vv asks for tracebacks, so these are no fault here.
    result = CliRunner().invoke(cli.main, [*option, *verbose, "--retry", "0", *command])
    assert isinstance(result.exception, SystemExit) or command == ["sql"]
    assert SECRET not in result.output
    assert result.exit_code in ((1,) if command == ["doctor"] else (0, 64, 78) if command == ["sql"] else (69, 78))


# -- demo -------------------------------------------------------------------------------------------------------------


def test_demo_keeps_the_limit(url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = done("demo", "--seconds", "4", "--workers", "4", "--limit", "2")
    assert capfd.readouterr().err == "", "nothing went wrong in any of the processes"
    assert "never more than 2 at a time" in " ".join(text.split())
    assert list(tmp_path.iterdir()) == []  # the user's own database is left alone


def test_priorities(coordinator: sqlsem.Coordinator) -> None:
    assert "by priority (a step is worth 1m00s of waiting)" in done("set", "x", "--priorities", "--allow-new")
    assert "a step is worth 5m00s" in done("set", "x", "--priorities", "5m")
    (resource,) = coordinator.admin.resources()
    assert resource.ageing == 300
    assert "ageing 60000 → 300000 ms" in done("history", "--operations")
    done("run", "--mutex", "x", "--priority", "9", "--", sys.executable, "-c", "pass")
    assert [past.resource for past in coordinator.admin.history("x")] == ["x"]
    assert "priority" not in done("set", "x", "--no-priorities")
    assert coordinator.admin.resources() == []
