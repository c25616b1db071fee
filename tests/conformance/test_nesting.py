"""``sqlsem run`` and programs under ``sqlsem run``: no command waits for a lock that its parent holds until its end."""

import asyncio
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import threading
from datetime import datetime, timezone

import pytest
from support import PATIENCE, until

import sqlsem
from sqlsem.client.monitors import parent_locks
from sqlsem.values.locks import Entry, Resource

pytestmark = [
    pytest.mark.engines("sqlite", "postgresql", "mssql"),
    pytest.mark.skipif(os.name != "posix", reason="shells"),
]
#: A program that acquires a lock with the library, and prints the outcome.
PROGRAM = """
import sys, sqlsem
try:
    with sqlsem.connect(sys.argv[1], schema=sys.argv[2], grace=30).mutex(sys.argv[3]):
        print("had")
except sqlsem.Deadlock as exc:
    print("refused", exc)
    raise SystemExit(75)
"""


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.delenv(parent_locks.HELD, raising=False)
    return {**os.environ, "COLUMNS": "300"}


@pytest.fixture
def run(database, environment):
    """``run("--mutex", "x", "--", …)`` starts such a command; ``run.words(…)`` returns its words."""
    started = []

    def words(*arguments):
        options = [word for key, value in database.options.items() for word in (f"--{key}", str(value))]
        return [sys.executable, "-m", "sqlsem", "--url", database.url, "--grace", "30", *options, "run", *arguments]

    def start(*arguments, env=environment):
        started.append(
            subprocess.Popen(words(*arguments), env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
        return started[-1]

    start.words = words
    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def program(database):
    """``program("x")`` returns the words of a program that acquires that mutex."""
    return lambda name: [
        sys.executable, "-c", PROGRAM, database.url, database.options.get("schema", "sqlsem"), name
    ]  # fmt: skip


def ended(process):
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, " ".join((out + err).split())


def test_the_same_lock_is_refused_at_once(run, name, program):
    code, output = ended(run("--mutex", name, "--", *run.words("--mutex", name, "--", "true")))
    assert code == 75
    assert f"runs under 'sqlsem run', which holds write on '{name}' (position " in output
    code, output = ended(run("--read", name, "--", *run.words("--write", name, "--", "true")))
    assert (code, "until it ends" in output) == (75, True)
    code, output = ended(run("--mutex", name, "--", *program(name)))
    assert (code, "refused This process runs under" in output) == (75, True)
    code, output = ended(
        run("--mutex", name, "--", *run.words("--mutex", name, "--timeout", "0", "-E", "9", "--", "true"))
    )
    assert (code, "runs under" in output) == (9, False)


def test_nested_limit_with_room_is_granted(run, name, program):
    inner = run.words("--limit", f"{name}=3", "--", *run.words("--read", name("b"), "--", "echo", "inside"))
    assert ended(run("--limit", f"{name}=3", "--read", name("b"), "--", *inner)) == (0, "inside")
    assert ended(run("--mutex", name, "--", *program(name("b")))) == (0, "had")


def test_limit_filled_by_parent_locks_is_a_deadlock(run, name):
    """The search finds that the innermost of three runs waits for locks of its own parents."""
    third = run.words("--limit", f"{name}=2", "--", "true")
    code, output = ended(run("--limit", f"{name}=2", "--", *run.words("--limit", f"{name}=2", "--", *third)))
    assert code == 75
    assert "Deadlock: " in output
    assert " under " in output


@pytest.mark.parametrize("kind", ["run", "program"])
def test_opposite_orders(run, name, program, tmp_path, kind):
    def side(resource_held, other, number):
        inner = run.words("--mutex", other, "--", "true") if kind == "run" or number else program(other)
        wait = f"touch {tmp_path}/{number}; while [ ! -e {tmp_path}/{1 - number} ]; do sleep 0.01; done; "
        return run("--mutex", resource_held, "--", "sh", "-c", wait + shlex.join(inner))

    sides = [side(name("x"), name("y"), 0), side(name("y"), name("x"), 1)]
    outcomes = sorted(map(ended, sides))
    assert [code for code, _ in outcomes] == [0, 75]
    output = outcomes[1][1]
    assert "Deadlock: " in output
    for resource in ("x", "y"):
        assert f"holds '{name(resource)}' at " in output
        assert f"waits for '{name(resource)}' at " in output


@pytest.mark.parametrize("younger", ["thread", "run"])
def test_a_thread_of_another_program_in_the_circle(run, connect, name, database, tmp_path, younger):
    """Such a thread has no parent locks, so the nested waiter gives up, whichever is younger."""
    coordinator = connect()
    wait = f"touch {tmp_path}/first; while [ ! -e {tmp_path}/go ]; do sleep 0.01; done; "
    inner = shlex.join(run.words("--mutex", name("y"), "--", "true"))
    command = run("--mutex", name("x"), "--", "sh", "-c", wait + inner)
    until((tmp_path / "first").exists, "the outer lock")
    with coordinator.mutex(name("y")):
        if younger == "thread":
            (tmp_path / "go").touch()
            until(lambda: len(database.queue(name)) == 3, "the inner request")
        else:
            threading.Timer(0.5, (tmp_path / "go").touch).start()
        with coordinator.mutex(name("x"), timeout=PATIENCE):  # acquired once the command has ended
            pass
    code, output = ended(command)
    assert (code, "Deadlock: " in output) == (75, True)


def test_process_that_outlives_its_parent_may_acquire(run, name, environment, program, tmp_path):
    """The environment of such a process still names its parents' locks, which are released."""
    environment_file = tmp_path / "environment"
    code, _ = ended(run("--mutex", name, "--", "sh", "-c", f'printf %s "${parent_locks.HELD}" > {environment_file}'))
    assert code == 0
    (held,) = json.loads(environment_file.read_text())
    assert held[0] == name
    later = {**environment, parent_locks.HELD: environment_file.read_text()}
    assert ended(run("--mutex", name, "--", "echo", "free", env=later)) == (0, "free")


def test_in_a_process_under_a_run(connect, database, name, monkeypatch):
    """Threads and tasks have the parents' locks; locks in another database do not matter."""
    outer = connect().mutex(name)
    outer.acquire()
    elsewhere = parent_locks.Held(name("b"), "write", 1, 1, 1, "somebody:1:2")
    monkeypatch.setenv(
        parent_locks.HELD,
        json.dumps(
            [*json.loads(parent_locks.environment_value(outer.grant.state, {})), dataclasses.astuple(elsewhere)]
        ),
    )
    inner = connect()
    with pytest.raises(sqlsem.Deadlock, match="runs under"):
        inner.mutex(name).acquire()
    assert inner.mutex(name).acquire(blocking=False) is False
    with inner.mutex(name("b")):
        assert inner.admin.entries(name("b"))[0].owner.endswith(f" under {outer.grant.position}")

    async def main():
        with pytest.raises(sqlsem.Deadlock, match="runs under"):
            async with inner.mutex(name):
                pass

    asyncio.run(main())
    outer.release()
    with inner.mutex(name):
        pass


@pytest.mark.parametrize(
    "text", ["x", "5", "[5]", '[["a"]]', '[["a", "write", 1, 1, 2, 3, 4]]', '[["a", "write", 0, 1, 2, "r"]]']
)
def test_an_environment_that_is_not_ours(connect, name, monkeypatch, caplog, text):
    monkeypatch.setenv(parent_locks.HELD, text)
    with connect().mutex(name):
        pass
    assert "does not have the format of sqlsem run" in caplog.text


# -- the search, by rows


NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


class Queue:
    """A session that lists given rows (position, resource, member, owner, granted), mutexes by default."""

    def __init__(self, *rows, caps=None, limit=1):
        self.caps = caps or {}
        self.rows = [
            Entry(
                resource, position, "holds" if granted else "waits", "write", limit, 1, f"r{position}", member, owner,
                f"host{member}", member, "p", None, NOW, NOW if granted else None, 1.0, None,
            )
            for position, resource, member, owner, granted in rows
        ]  # fmt: skip

    def entries(self, resource):
        return self.rows

    def resources(self):
        return [Resource(name, cap, False, None, 0, 0) for name, cap in self.caps.items()]

    def found(self):
        return [
            (member, deadlock.victim, [(step.ahead, step.position, step.behind) for step in deadlock.steps])
            for member in range(1, 10)
            if (deadlock := parent_locks.find_deadlock(self, member)) is not None
        ]


def test_the_search():
    # Member 1 holds x, and its command 2 waits for y. Member 3 holds y, and its command 4 waits for x.
    rows = [
        (1, "x", 1, "run#1", True),
        (2, "y", 3, "run#1", True),
        (3, "y", 2, "run#1 under 1", False),
        (4, "x", 4, "run#1 under 2", False),
    ]
    assert Queue(*rows).found() == [(4, 4, [(2, 4, 1), (1, 3, 2)])]
    assert Queue(*rows[:3]).found() == []
    text = sqlsem.values.deadlocks.message(parent_locks.find_deadlock(Queue(*rows), 4))
    assert "host4:4 (run#1 under 2) holds 'y' at 2, waits for 'x' at 4 behind 1" in text
    # The cycle leads through a command that waits only for its own child.
    middle = [rows[0], rows[1], (5, "z", 5, "run#1 under 1", True), (6, "y", 6, "run#1 under 5", False), rows[3]]
    assert Queue(*middle).found() == [(6, 6, [(1, 6, 2), (2, 4, 1)])]
    # One waiter has no parent: the nested waiter gives up, though it is older.
    other = [rows[0], (2, "y", 7, "T#1", True), rows[2], (8, "x", 7, "T#1", False)]
    assert Queue(*other).found() == [(2, 3, [(1, 3, 2), (2, 8, 1)])]


def test_no_false_alarm():
    # A deadlock without parent locks is left to the usual search.
    plain = [(1, "x", 1, "a#1", True), (2, "y", 2, "b#1", True), (3, "y", 1, "a#1", False), (4, "x", 2, "b#1", False)]
    assert Queue(*plain, (5, "z", 3, "run#1", True), (6, "x", 4, "run#1 under 5", False)).found() == []
    # No deadlock if the parent's row is gone, or another thread of the nested process still works.
    assert Queue((2, "y", 3, "run#1", True), (3, "y", 2, "run#1 under 1", False)).found() == []
    busy = [
        (1, "x", 1, "run#1", True),
        (2, "y", 2, "A#1 under 1", True),
        (3, "y", 2, "B#2 under 1", False),
    ]
    assert Queue(*busy).found() == [], "A will leave"
    # Two holders of a limit, one of them without a nested waiter.
    limit = [
        (1, "x", 1, "run#1", True),
        (2, "x", 2, "T#1", True),
        (3, "x", 3, "run#1 under 1", False),
    ]
    assert Queue(*limit, limit=2).found() == []
    assert Queue(*limit, limit=2, caps={"x": 1}).found() == [(3, 3, [(1, 3, 1)])]
    # A suspect member does not block others for long.
    queue = Queue((1, "x", 1, "run#1", True), (3, "x", 2, "run#1 under 1", False))
    assert len(queue.found()) == 1
    queue.rows[0] = dataclasses.replace(queue.rows[0], missing_for=1.0)
    assert queue.found() == []
