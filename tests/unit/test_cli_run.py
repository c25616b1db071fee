"""``sqlsem run`` with real processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import ERASE, LISTENER, PATIENCE, RAW_ERASE, Bench, alive, call, lines, pids, until

import sqlsem

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and process groups")

#: Ignores SIGTERM, and has a child that ignores it, too.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 3:
    subprocess.Popen([sys.executable, "-c", open(sys.argv[2]).read(), sys.argv[1]])
with open(sys.argv[1], "a") as file: file.write(f"pid {os.getpid()}\\n")
while True: time.sleep(0.1)
"""
#: Starts a daemon as they do it: forked twice, in a session of its own.
DAEMON = """
import os, sys, time
def told():
    with open(sys.argv[1], "a") as file: file.write(f"pid {os.getpid()}\\n")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: told()
    else: os._exit(0)
else:
    os.wait()
    told()
while True: time.sleep(0.1)
"""


# -- exit codes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -KILL $$", 137), ("kill $$", 143)])
def test_the_commands_status_is_returned(bench: Bench, script: str, code: int) -> None:
    assert bench.run("run", "--mutex", "x", "--", "sh", "-c", script) == (code, "", "")
    assert bench.entries() == []


def test_command_gets_its_position_in_environment(bench: Bench) -> None:
    script = "import os, json; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('SQLSEM_')}))"
    code, out, _ = bench.run("run", "--mutex", "x", "--", sys.executable, "-c", script)
    variables = json.loads(out)
    assert code == 0
    assert variables["SQLSEM_RESOURCE"] == "x"
    assert int(variables["SQLSEM_POSITION"]) > 0
    assert variables["SQLSEM_FENCE"] == variables["SQLSEM_POSITION"]


WITH_PASSWORD = "postgresql://etl:correct-horse@nowhere/db"


@pytest.mark.parametrize("pass_url", [False, True])
def test_password_is_passed_only_with_pass_url(bench: Bench, pass_url: bool) -> None:
    show = [sys.executable, "-c", "import os; print(os.environ.get('SQLSEM_URL'))"]
    use = [sys.executable, "-c", "import sqlsem; sqlsem.mutex('y').acquire()"]
    bench.environment["SQLSEM_URL"] = WITH_PASSWORD
    option = ["--pass-url"] if pass_url else []
    code, out, _ = bench.run("--url", bench.url, "run", "--mutex", "x", *option, "--", *show)
    assert code == 0
    assert "correct-horse" not in out
    assert out.startswith(bench.url if pass_url else "withheld")
    code, out, err = bench.run("--url", bench.url, "run", "--mutex", "x", *option, "--", *use)
    assert (code == 0) is pass_url
    if not pass_url:
        # It does not lock in another database instead.
        assert "ConfigurationError" in err
        assert "--pass-url" in err


def test_url_without_a_password_is_passed(bench: Bench) -> None:
    show = [sys.executable, "-c", "import os; print(os.environ.get('SQLSEM_URL'))"]
    assert bench.run("run", "--mutex", "x", "--", *show)[1] == f"{bench.url}\n"


def test_run_on_a_terminal_names_the_database(bench: Bench) -> None:
    controller, terminal = os.openpty()
    process = bench.start("run", "--mutex", "x", "--", "true", stderr=terminal)
    os.close(terminal)
    try:
        assert process.wait(PATIENCE) == 0
        assert f"locking 'x' in SQLite file {bench.folder}/queue.db" in os.read(controller, 10000).decode()
    finally:
        os.close(controller)


def test_run_on_a_terminal_names_the_holder_while_it_waits(bench: Bench) -> None:
    """In a line that is redrawn in place, and that is gone before the command starts."""
    with sqlsem.connect(bench.url) as coordinator:
        for _ in range(6):  # enough holds for an estimate
            with coordinator.mutex("x"):
                pass
    holder = bench.listen("run", "--mutex", "x", "--note", "orders")
    say = [sys.executable, "-c", "import sys; sys.stderr.write('it runs\\n')"]
    with bench.on_terminal("run", "--mutex", "x", "--", *say) as (process, screen):
        line = rf"{ERASE}sqlsem: waiting for 'x' for [0-9.]+s, likely granted in 00:\d\d, behind \S+:{holder.pid} \("
        until(lambda: len(re.findall(line, screen.read())) > 1, "a line that is redrawn")
        assert screen.read().count("\n") == 1  # the line that names the database
        holder.terminate()
        assert process.wait(PATIENCE) == 0
        until(lambda: screen.read().endswith(f"{RAW_ERASE}it runs\r\n"), "the end of the line")


def test_run_that_times_out_leaves_no_line_on_the_terminal(bench: Bench) -> None:
    bench.listen("run", "--mutex", "x")
    with bench.on_terminal("run", "--mutex", "x", "--timeout", "2", "--", "true") as (process, screen):
        assert process.wait(PATIENCE) == 75
        until(lambda: "not granted within 2 s" in screen.read(), "the reason")
        assert "sqlsem: waiting for 'x'" in screen.read()
        assert re.search(rf"{ERASE}sqlsem: not granted within 2 s in [^\r]*\r\n$", screen.read())


@pytest.mark.parametrize("option", ["-q", "-v"])
def test_run_draws_no_line_if_it_is_quiet_or_logs(bench: Bench, option: str) -> None:
    bench.listen("run", "--mutex", "x")
    with bench.on_terminal(option, "run", "--mutex", "x", "--timeout", "2", "--", "true") as (process, screen):
        assert process.wait(PATIENCE) == 75
        until(lambda: "not granted within 2 s" in screen.read(), "the reason")
        assert RAW_ERASE not in screen.read()


def test_command_on_a_terminal_shows_how_long_it_goes_on_trying(bench: Bench) -> None:
    with socket.socket() as unused:  # bound, so that no other program gets its number; nobody listens
        unused.bind(("127.0.0.1", 0))
        url = f"postgresql://me@127.0.0.1:{unused.getsockname()[1]}/db"
        with bench.on_terminal("--url", url, "--retry", "4", "ls") as (process, screen):
            assert process.wait(PATIENCE) == 69
            until(lambda: "sqlsem: error: " in screen.read(), "the error")
            line = rf"{ERASE}sqlsem: trying \((\d+) s left\): no connection to PostgreSQL"
            tries = [int(left) for left in re.findall(line, screen.read())]
            assert tries == sorted(tries, reverse=True)
            assert len(set(tries)) > 1
            assert f"{RAW_ERASE}sqlsem: error: " in screen.read()


def test_several_locks_are_held_at_once(bench: Bench) -> None:
    process = bench.listen(
        *("run", "--mutex", "a", "--limit", "b=5:2", "--read", "c", "--write", "d", "--stage", "e=-7"),
        *("--note", "hello"),
    )
    holds = {(e.resource, e.state, e.access, e.limit, e.weight, e.note) for e in bench.entries()}
    assert holds == {
        ("a", "holds", "write", 1, 1, "hello"),
        ("b", "holds", "write", 5, 2, "hello"),
        ("c", "holds", "read", 1, 1, "hello"),
        ("d", "holds", "write", 1, 1, "hello"),
        ("e", "holds", "stage:-7", 1, 1, "hello"),
    }
    process.terminate()
    assert process.wait(PATIENCE) == 5
    assert bench.entries() == []


def test_run_times_out_with_its_reason(bench: Bench) -> None:
    with sqlsem.connect(bench.url) as coordinator, coordinator.mutex("x"):
        code, out, err = bench.run("run", "--mutex", "x", "--timeout", "0", "--", "true")
        assert (code, out) == (75, "")
        # Why: where, who, for how long.
        assert re.fullmatch(
            rf"sqlsem: not granted within 0 s in .*queue.db: 'x' is held by .*:{os.getpid()} .* since "
            r"[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:]{8} \(for [0-9.]+s\)\n",
            err,
        )
        assert bench.run("run", "--mutex", "x", "--timeout", "50ms", "-E", "0", "--", "false") == (0, "", "")
        code, _, err = bench.run("-v", "run", "--limit", "x=2:2", "--timeout", "1", "-E", "9", "--", "true")
        assert code == 9
        assert "Waiting for 'x'" in err
        assert "behind " in err
    assert bench.run("run", "--mutex", "x", "--timeout", "0", "--", "true")[0] == 0


def test_verbose_run_tells_each_thing_once(bench: Bench) -> None:
    """The wait, the grant and the start: one line each, of one style."""
    with sqlsem.connect(bench.url) as coordinator:
        with coordinator.mutex("x") as grant:
            process = bench.start("-v", "run", "--mutex", "x", "--", "sleep", "0.1")
            until(lambda: len(bench.entries()) == 2, "it waits")
            grant.release()
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    messages = [line for line in err.splitlines() if "'x'" in line]
    events = [re.sub(r"^.*?((Still )?[Ww]aiting for|Granted|[Hh]ad|Started).*", r"\1", line) for line in messages]
    assert [event for event in events if event != "Still waiting for"] == ["Waiting for", "Granted", "Started"], err


def test_unstartable_command_is_reported(bench: Bench) -> None:
    plain = bench.folder / "plain"
    plain.write_text("not a program")
    broken = bench.folder / "broken"
    broken.write_text("#!/nowhere/at/all\n")
    broken.chmod(0o755)
    assert bench.run("run", "--mutex", "x", "--", "no-such-command")[0] == 127
    assert bench.run("run", "--mutex", "x", "--", bench.folder / "nothing")[0] == 127
    assert bench.run("run", "--mutex", "x", "--", plain)[0] == 126
    code, _, err = bench.run("run", "--mutex", "x", "--", broken)
    assert code == 127
    assert err.startswith("sqlsem: error: ")
    assert len(err.splitlines()) == 1
    assert bench.entries() == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "Say which lock"),
        (["--mutex", " x"], "white space"),
        (["--limit", "x=2:3"], "can never fit"),
        (["--limit", "x=0"], "from 1 to"),
        (["--stage", "x=first"], "is not NAME=ORDER"),
        (["--mutex", "x", "--read", "x"], "names 'x' twice"),
        (["--mutex", "x", "--timeout", "soon"], "not a duration"),
        (["--mutex", "x", "--no-such-option"], "No such option"),
        (["--rate", "api=5"], "is not NAME"),
        (["--rate", "=5/1m"], "is not NAME"),
        (["--rate", "api=0/1m"], "from 1 to"),
        (["--rate", "api=5/x"], "not a duration"),
        (["--rate", "api=5/0s"], "above 0"),
        (["--rate", "api=5/1m,6/60s"], "one window twice"),
        (["--rate", "api=5/1m:6"], "can never fit"),
        (["--rate", "api=5/1m:0"], "from 1 to"),
        (["--mutex", "x", "--priority", "100"], "not in the range"),
        (["--mutex", "x", "--read", "y", "--priority", "1"], "goes with one lock"),
        (["--join", "--priority", "1"], "goes with one lock"),
        (["--join", "--mutex", "x"], "cannot be combined"),
        (["--adopt"], "takes the token from $SQLSEM_TOKEN"),
        (["--adopt", "--mutex", "x"], "cannot be combined"),
        (["--leader", "a", "--mutex", "b"], "cannot be combined"),
        (["--leader", "a", "--once-per", "b=1d"], "cannot be combined"),
        (["--leader", "a", "--join"], "cannot be combined"),
        (["--leader", "a", "--timeout", "5"], "without --timeout"),
        (["--leader", " a"], "white space"),
        (["--leader", ""], "is empty"),
        (["--once-per", "1d"], "--once-per NAME=DURATION"),
        (["--once-per", "1d", "--mutex", "a", "--mutex", "b"], "--once-per NAME=DURATION"),
        (["--once-per", "a=0"], "above 0"),
        (["--once-per", "a=0.2"], "at least 1 second"),
        (["--once-per", "a=nan"], "not a duration"),
        (["--once-per", "a=400d"], "at most"),
        (["--once-per", "=1d"], "is empty"),
        (["--once-per", "a=1d", "--offset", "1d"], "less than per"),
        (["--mutex", "a", "--offset", "1h"], "--once-per"),
        (["--once-per", "a=1d", "--join"], "cannot be combined"),
        (["--once-per", "a=1d", "--mutex", "once:a"], "choose another name"),
    ],
)
def test_wrong_usage(url: str, options: list[str], words: str) -> None:
    result = call("run", *options, "--", "true")
    assert (result.exit_code, result.stdout) == (64, "")
    assert words in " ".join(result.stderr.split())


def test_missing_command_is_wrong_usage(url: str) -> None:
    assert call("run", "--mutex", "x").exit_code == 64


def test_run_reports_an_unreachable_database(bench: Bench) -> None:
    nowhere = bench.folder / "file"
    nowhere.write_text("")
    code, _, err = bench.run(
        "--url", f"sqlite:///{nowhere}/queue.db", "--retry", "0", "run", "--mutex", "x", "--", "true"
    )
    assert code == 69
    assert err.startswith("sqlsem: error: ")
    assert len(err.splitlines()) == 1


def test_run_leaves_the_commands_options_alone(bench: Bench) -> None:
    code, out, _ = bench.run("run", "--mutex", "x", "echo", "--timeout", "-v", "--", "--help")
    assert (code, out) == (0, "--timeout -v -- --help\n")


def test_descriptors_and_standard_input_are_passed_on(bench: Bench) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"from a descriptor")
    os.close(writer)
    script = f"import os, sys; print(sys.stdin.read(), os.read({reader}, 100).decode())"
    process = bench.start(
        *("run", "--mutex", "x", "--", sys.executable, "-c", script), stdin=subprocess.PIPE, pass_fds=[reader]
    )
    os.close(reader)
    assert process.communicate("from standard input", timeout=PATIENCE)[0] == "from standard input from a descriptor\n"


# -- signals ----------------------------------------------------------------------------------------------------------


def test_signals_are_forwarded_once(bench: Bench) -> None:
    process = bench.listen("run", "--mutex", "x")
    for number, name in enumerate(["SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGINT", "SIGTERM"], 2):
        process.send_signal(getattr(signal, name))
        until(lambda number=number: len(lines(bench.told)) >= number, name)
    assert process.wait(PATIENCE) == 5
    assert lines(bench.told)[1:] == ["SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGINT", "SIGTERM"]
    assert bench.entries() == []


def test_signal_reaches_the_whole_process_tree(bench: Bench) -> None:
    script = bench.folder / "listener.py"
    script.write_text(LISTENER)
    shell = f"{sys.executable} {script} {bench.told}; true"
    process = bench.hold("run", "--mutex", "x", command=["sh", "-c", shell])
    process.terminate()
    assert process.wait(PATIENCE) == 143
    until(lambda: not any(map(alive, pids(bench.told))), "the end of what the shell started")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"])
def test_signal_ends_a_waiting_run(bench: Bench, name: str) -> None:
    with sqlsem.connect(bench.url) as coordinator, coordinator.mutex("x"):
        process = bench.start("run", "--mutex", "x", "--", "touch", bench.folder / "never")
        until(lambda: len(bench.entries()) == 2, "the wait")
        process.send_signal(getattr(signal, name))
        out, err = process.communicate(timeout=PATIENCE)
        assert (process.returncode, out, err) == (128 + getattr(signal, name), "", "")
        assert len(bench.entries()) == 1
        (past,) = coordinator.admin.history("x")
        assert past.outcome == "cancelled"
    assert not (bench.folder / "never").exists()


def test_ignored_signals_stay_ignored(bench: Bench) -> None:
    process = bench.start(
        *("run", "--mutex", "x", "--", "sh", "-c", f"echo pid $$ >> {bench.told}; read line; exit 3"),
        stdin=subprocess.PIPE,
        prefix=["sh", "-c", "trap '' HUP; exec \"$@\"", "sh"],
    )
    until(lambda: pids(bench.told), "the command's start")
    process.send_signal(signal.SIGHUP)
    process.communicate("go on\n", timeout=PATIENCE)
    assert process.returncode == 3


#: Makes standard input the controlling terminal, and runs a command.
TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@contextlib.contextmanager
def with_terminal(bench: Bench, *arguments: str | Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start `sqlsem` with a controlling terminal, of which the other end is returned, too."""
    controller, terminal = os.openpty()
    process = bench.start(*arguments, prefix=[sys.executable, "-c", TAKE_TERMINAL], stdin=terminal)
    os.close(terminal)
    try:
        yield process, controller
    finally:
        os.close(controller)


def test_ctrl_c_on_a_terminal_is_sent_once(bench: Bench) -> None:
    command = ("run", "--mutex", "x", "--", sys.executable, "-c", LISTENER, bench.told)
    with with_terminal(bench, *command) as (process, controller):
        until(lambda: pids(bench.told), "the command's start")
        for number in (2, 3):
            os.write(controller, b"\x03")
            until(lambda number=number: len(lines(bench.told)) >= number, "Ctrl-C")
        process.send_signal(signal.SIGUSR1)  # delivered after any SIGINT that was forwarded wrongly
        until(lambda: "SIGUSR1" in lines(bench.told), "SIGUSR1")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 5
        assert lines(bench.told)[1:] == ["SIGINT", "SIGINT", "SIGUSR1", "SIGTERM"]


@pytest.mark.skipif(sys.platform != "linux", reason="descendants are found through /proc")
def test_stubborn_command_on_a_terminal_is_killed(bench: Bench) -> None:
    script = bench.folder / "stubborn.py"
    script.write_text(STUBBORN)
    command = ("--grace", "1", "run", "--mutex", "x", "--", sys.executable, script, bench.told, script)
    with with_terminal(bench, *command) as (process, _):
        until(lambda: len(pids(bench.told)) == 2, "the start")
        bench.run("revoke", "--force", str(bench.entries()[0].position))
        assert process.wait(PATIENCE) == 76
        until(lambda: not any(map(alive, pids(bench.told))), "the end")


# -- losing the lock --------------------------------------------------------------------------------------------------


def test_command_ends_when_its_lock_is_revoked(bench: Bench) -> None:
    process = bench.listen("--grace", "1", "run", "--mutex", "x")
    code, out, _ = bench.run("revoke", str(bench.entries()[0].position))
    assert code == 0
    assert "has been told" in out
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 76
    assert err.startswith("sqlsem: error: The lock on 'x'")
    assert len(err.splitlines()) == 1
    assert lines(bench.told)[1:] == ["SIGTERM"]
    assert bench.entries() == []


def test_command_ends_on_forced_revoke(bench: Bench) -> None:
    process = bench.listen("--grace", "1", "run", "--mutex", "x", "--lost-exit-code", "3")
    _, out, _ = bench.run("revoke", "--force", str(bench.entries()[0].position))
    assert "is gone" in out
    assert process.wait(PATIENCE) == 3
    assert lines(bench.told)[1:] == ["SIGTERM"]


def test_stubborn_command_tree_is_killed_before_next_grant(bench: Bench) -> None:
    script = bench.folder / "stubborn.py"
    script.write_text(STUBBORN)
    # A grace that is longer than the command needs to end.
    process = bench.hold(
        *("--grace", "4", "run", "--mutex", "x", "--kill-after", "0.2"),
        command=[sys.executable, script, bench.told, script],
    )
    until(lambda: len(pids(bench.told)) == 2, "the child's start")
    first, second = pids(bench.told)
    bench.run("revoke", str(bench.entries()[0].position))
    files = [f"/proc/{pid}/cmdline" for pid in (first, second)]
    # The next holder finds no command at work.
    check = f"import os, sys; sys.exit(any(os.path.exists(f) and open(f).read() for f in {files}))"
    assert bench.run("run", "--mutex", "x", "--", sys.executable, "-c", check)[0] == 0
    assert process.wait(PATIENCE) == 76
    assert not alive(first)
    assert not alive(second)


@pytest.mark.skipif(sys.platform != "linux", reason="found through /proc")
@pytest.mark.parametrize(
    ("ending", "environment"), [("lost", "inherited"), ("lost", "cleared"), ("killed", "inherited")]
)
def test_daemon_is_killed_with_the_lock(bench: Bench, ending: str, environment: str) -> None:
    script = bench.folder / "daemon.py"
    script.write_text(DAEMON)
    prefix = ["env", "-i"] if environment == "cleared" else []
    process = bench.hold(
        *("--grace", "1", "run", "--mutex", "x"), command=[*prefix, sys.executable, script, bench.told]
    )
    until(lambda: len(pids(bench.told)) == 2, "the daemon's start")
    command, daemon = sorted(pids(bench.told), key=lambda pid: os.getsid(pid) == pid, reverse=True)
    assert all(map(alive, (command, daemon)))
    if ending == "lost":
        bench.run("revoke", "--force", str(bench.entries()[0].position))
        assert process.wait(PATIENCE) == 76
        # Before the next grant, were it not forced.
        assert not alive(daemon)
    else:
        process.kill()
    until(lambda: not alive(daemon) and not alive(command), "the daemon's end")


@pytest.mark.skipif(sys.platform != "linux", reason="the parent of orphans")
def test_background_children_outlive_the_command(bench: Bench) -> None:
    """Orphans of a command that still runs are collected."""
    script = """
import os, psutil, subprocess, sys, time
for _ in range(3):
    subprocess.run(["sh", "-c", "(sleep 0.05; exit 3) & exit 0"])
while len(psutil.Process(os.getppid()).children()) != 2:  # this one and the killer
    time.sleep(0.01)
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True, **quiet)
with open(sys.argv[1], "a") as file: file.write(f"pid {left.pid}\\n")
"""
    assert bench.run("run", "--mutex", "x", "--", sys.executable, "-c", script, bench.told)[0] == 0
    (child,) = pids(bench.told)
    assert alive(child)


@pytest.mark.parametrize("script", [LISTENER, STUBBORN], ids=["willing", "stubborn"])
def test_command_ends_with_a_killed_sqlsem(bench: Bench, script: str) -> None:
    process = bench.hold("run", "--mutex", "x", command=[sys.executable, "-c", script, bench.told])
    (pid,) = pids(bench.told)
    process.kill()
    until(lambda: not alive(pid), "the command's end")


def test_revoked_waiting_run_exits_with_76(bench: Bench) -> None:
    with sqlsem.connect(bench.url) as coordinator, coordinator.mutex("x"):
        process = bench.start("run", "--mutex", "x", "--", "true")
        position = until(lambda: [e.position for e in bench.entries() if e.state == "waits"], "the wait")[0]
        bench.run("revoke", str(position))
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 76
    assert err.startswith("sqlsem: error: ")


# -- rates ------------------------------------------------------------------------------------------------------------


def test_run_takes_from_a_rate_without_holding_it(bench: Bench) -> None:
    words = ("run", "--rate", "api=2/1h", "--timeout", "0", "--", "sh", "-c", "echo ran${SQLSEM_RESOURCE}")
    assert [bench.run(*words) for _ in range(2)] == [(0, "ran\n", "")] * 2
    code, out, err = bench.run(*words)
    assert (code, out) == (75, "")
    assert "not granted within 0 s" in err
    assert "all of rate 'api' was used" in err
    assert bench.run("run", "--rate", "b=5/1m,3/1s:3", "--", "true") == (0, "", "")
    assert bench.run("run", "--rate", "b=5/1m,3/1s:3", "--timeout", "0", "-E", "0", "--", "true") == (0, "", "")
    assert bench.entries() == []


def test_run_takes_a_rate_beside_a_lock(bench: Bench) -> None:
    words = ("run", "--mutex", "m", "--rate", "api=1/1h", "--timeout", "0", "--", "sh", "-c", "echo $SQLSEM_RESOURCE")
    assert bench.run(*words) == (0, "m\n", "")
    assert bench.run(*words)[0] == 75
    # All or nothing: the use of the first rate is returned.
    second = ("run", "--rate", "other=1/1h", "--rate", "api=1/1h", "--timeout", "0", "--", "true")
    assert bench.run(*second)[0] == 75
    assert bench.run("run", "--rate", "other=1/1h", "--timeout", "0", "--", "true")[0] == 0


def test_rate_without_numbers_needs_an_operators_limit(bench: Bench) -> None:
    code, _, errors = bench.run("run", "--rate", "api", "--", "true")
    assert (code, "No limit is set for rate 'api'" in errors) == (78, True)
