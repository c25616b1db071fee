"""clients/psql: shell scripts and SQL that need only psql."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psycopg
import pytest
import support
from support import PATIENCE, slack, until

CLIENTS = Path(__file__).resolve().parents[2] / "clients" / "psql"
WITH_LOCK = CLIENTS / "with-lock"


def find_psql():
    program = shutil.which("psql")
    if program is None and support.have_postgres() and not os.environ.get("SQLSEM_TEST_POSTGRES"):
        path = support.postgres.binaries() / "psql"
        program = str(path) if path.exists() else None
    return program


PSQL = find_psql()
pytestmark = [
    pytest.mark.engines("postgresql"),
    pytest.mark.skipif(PSQL is None or shutil.which("bash") is None, reason="needs psql and bash"),
]


@pytest.fixture
def start(database):
    """``start(script, …)`` runs a script in a process of its own, which is killed at the end."""
    started = []

    def start(*arguments, **options):
        environment = {**os.environ, "SQLSEM_URL": database.url, "PSQL": PSQL, **options.pop("env", {})}
        process = subprocess.Popen(
            [str(argument) for argument in arguments],
            env=environment,
            stdin=options.pop("stdin", subprocess.DEVNULL),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


def done(process):
    output, errors = process.communicate(timeout=PATIENCE)
    return process.returncode, output, errors


def test_a_command_under_a_lock(database, start, name):
    code, output, errors = done(
        start(
            WITH_LOCK,
            "-m",
            "why",
            name,
            "--",
            "sh",
            "-c",
            'echo "$SQLSEM_RESOURCE $SQLSEM_POSITION $SQLSEM_FENCE"; exit 7',
        )
    )
    assert (code, errors) == (7, "")
    resource, position, fence = output.split()
    assert resource == name
    assert position == fence
    assert database.queue(name) == []
    assert database.rows("SELECT note, outcome FROM sqlsem.history WHERE queue_position = ?", int(position)) == [
        ("why", "released")
    ]


def test_the_command_has_our_input(start, name):
    process = start(WITH_LOCK, name, "cat", stdin=subprocess.PIPE)
    output, _ = process.communicate("through\n", timeout=PATIENCE)
    assert output == "through\n"


def test_script_holds_while_its_command_runs(database, connect, start, name):
    process = start(WITH_LOCK, name, "cat", stdin=subprocess.PIPE)
    until(lambda: database.queue(name))
    lock = connect().mutex(name)
    assert lock.acquire(timeout=0) is False
    late = support.Attempt(lock)
    assert late.waits(4)  # longer than the script's interval of heartbeats
    process.stdin.close()
    late.granted()
    late.leave()
    assert process.wait(PATIENCE) == 0


def test_script_times_out(connect, start, name):
    with connect().mutex(name):
        code, output, errors = done(start(WITH_LOCK, "-t", "0.3", name, "echo", "never"))
    assert (code, output) == (75, "")
    assert f"'{name}' was not free within 0.3 s" in errors


def test_split_answer_is_read_whole(start, tmp_path, name):
    """A read that times out has taken the beginning of the line: "-", and then "1" is not a grant."""
    slow = tmp_path / "psql"
    slow.write_text("#!/bin/sh\nprintf -- -\nsleep 0.5\nprintf '1||\\n'\nexec cat > /dev/null\n")
    slow.chmod(0o755)
    code, output, _ = done(start(WITH_LOCK, name, "echo", "never", env={"PSQL": str(slow)}))
    assert (code, output) == (75, "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "0", "NAME", "true"], "concurrency_limit"),
        (["-a", "exclusive", "NAME", "true"], "write, read or stage"),
        (["-n", "three", "NAME", "true"], "invalid input syntax"),
        (["", "true"], "resource is empty"),
    ],
)
def test_refusals_of_the_database_in_psql(start, name, arguments, words):
    code, _, errors = done(start(WITH_LOCK, *(name if argument == "NAME" else argument for argument in arguments)))
    assert code == 69
    assert words in errors


def test_wrong_usage(start, name):
    for arguments in ([], [name], ["-x", name, "true"], [name, "--"]):
        code, _, errors = done(start(WITH_LOCK, *arguments))
        assert code == 64
        assert "RESOURCE" in errors


def test_no_database(start, name):
    code, output, errors = done(
        start(WITH_LOCK, name, "echo", "never", env={"SQLSEM_URL": f"postgresql://127.0.0.1:{support.free_port()}/x"})
    )
    assert (code, output) == (69, "")
    assert "no lock on" in errors


@pytest.mark.parametrize(
    "evil", ["'; DROP SCHEMA sqlsem CASCADE; --", '"$(touch x)`touch y`', ":'schema' \\! touch z", "%s {} $1"]
)
def test_odd_names_are_only_names(database, start, tmp_path, name, evil):
    code, output, errors = done(
        start(WITH_LOCK, "-m", evil, f"{name}{evil}", "printenv", "SQLSEM_RESOURCE", cwd=tmp_path)
    )
    assert (code, output, errors) == (0, f"{name}{evil}\n", "")
    assert database.queue(name) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_lock_ends_with_a_killed_script(database, start, name, signal_number):
    process = start(WITH_LOCK, name, "sh", "-c", "echo started; exec sleep 30")
    assert process.stdout.readline() == "started\n"
    began = time.monotonic()
    process.send_signal(signal_number)
    with psycopg.connect(database.url, autocommit=True) as connection:
        code, _, _ = connection.execute("CALL sqlsem.acquire(%s, timeout_ms => 20000)", (name,)).fetchone()
        assert code in (0, 1)
        assert time.monotonic() - began < slack(5)
    process.wait(PATIENCE)


def test_signal_ends_a_waiting_script(database, connect, start, name):
    with connect().mutex(name):
        process = start(WITH_LOCK, name, "echo", "never")
        until(lambda: len(database.queue(name)) == 2)
        process.terminate()
        code, output, _ = done(process)
        assert (code, output) == (128 + signal.SIGTERM, "")
        until(lambda: database.rows("SELECT count(*) FROM sqlsem.status(?)", str(name)) in ([(1,)], [(2,)]))
    with connect().mutex(name, timeout=20):
        pass
    assert database.queue(name) == []


@pytest.mark.parametrize("cause", ["session", "operator"])
def test_the_command_is_ended_when_the_lock_is_lost(database, start, name, cause):
    process = start(WITH_LOCK, name, "sh", "-c", "echo started; exec sleep 60")
    assert process.stdout.readline() == "started\n"
    ((position, _, _),) = database.queue(name)
    if cause == "session":
        database.rows(
            "SELECT pg_terminate_backend(m.backend_pid) FROM sqlsem.member m JOIN {table} t USING (member_id) "
            "WHERE queue_position = ?",
            position,
        )
    else:
        database.rows("SELECT sqlsem.revoke(?, true)", position)
    code, _, errors = done(process)
    assert code == 76
    assert f"the lock on '{name}' is lost" in errors


def test_script_runs_three_at_a_time(database, start, tmp_path, name):
    loader = tmp_path / "load.sh"
    loader.write_text(f"#!/bin/sh\ncd {tmp_path}\necho x > in.$1\nls in.* | wc -l >> seen\nsleep 0.3\nrm in.$1\n")
    loader.chmod(0o755)
    code, _, errors = done(start(CLIENTS / "three-at-a-time", loader, *"abcdefg"))
    assert (code, errors) == (0, "")
    counts = [int(line) for line in (tmp_path / "seen").read_text().split()]
    assert len(counts) == 7
    assert 2 <= max(counts) <= 3


def psql(start, database, *arguments):
    return done(start(PSQL, "-X", "-q", "-A", "-t", "-d", database.url, *arguments))


def test_the_sql_example(database, start, name):
    for _ in range(2):
        code, output, errors = psql(start, database, "-v", f"resource={name}", "-f", CLIENTS / "guarded-load.sql")
        assert (code, output.strip()) == (0, "0"), errors
    assert database.rows("SELECT count(DISTINCT fence) FROM loaded") == [(2,)]
    assert database.queue(name) == []
    database.rows("DROP TABLE loaded")


def test_sql_example_in_a_single_transaction_is_refused(database, start, name):
    code, _, errors = psql(start, database, "-1", "-v", f"resource={name}", "-f", CLIENTS / "guarded-load.sql")
    assert code != 0
    assert "must not be called inside an open transaction" in errors
