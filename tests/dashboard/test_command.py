"""Run ``sqlsem top`` and ``sqlsem dashboard`` as users start them: real processes, a real server, a real terminal."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading

import psutil
import pytest
from click.testing import CliRunner
from support import PATIENCE, until

from sqlsem.cli import main, watch

try:
    import httpx2 as httpx
except ImportError:  # on Python 3.10
    import httpx

TOKEN = "correct-horse-battery-staple"


class Running:
    """A command, with its output on stderr."""

    def __init__(self, url, *arguments, **environment):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sqlsem", *arguments],
            env={**os.environ, "SQLSEM_URL": url, **environment},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            self.said += line

    def find(self, pattern):
        until(lambda: re.search(pattern, self.said) or self.process.poll() is not None, pattern)
        match = re.search(pattern, self.said)
        assert match, self.said
        return match[1]

    @property
    def home(self):
        return self.find(r"the dashboard is at http://(\S+)/ ")

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(PATIENCE)
            finally:
                self.process.kill()
        self._reader.join()
        return self.process.returncode


@pytest.fixture
def start():
    running = []

    def start(url, *arguments, **environment):
        running.append(Running(url, *arguments, **environment))
        return running[-1]

    yield start
    for process in running:
        process.end()


@pytest.mark.engines("sqlite")
def test_dashboard_serves_until_its_signal(database, connect, name, start):
    coordinator = connect()
    running = start(database.url, "dashboard", "--port", "0", "--interval", "0.2", "--allow-changes")
    home = f"http://{running.home}"
    token = running.find(r"the token: (\S+)")
    command = psutil.Process(running.process.pid).cmdline()
    assert not [word for word in command if token in word]
    with coordinator.mutex(name), httpx.Client(base_url=home, headers={"origin": home}, timeout=PATIENCE) as client:
        until(lambda: name in client.get("/").text, "the lock is seen")
        assert client.post("/login", data={"token": token}).status_code == 303
        form = client.get("/ask", params={"kind": "pause", "resource": name}).text
        csrf_token = re.search(r'name="csrf_token" value="(\w+)"', form)[1]
        answer = client.post("/do", data={"kind": "pause", "resource": name, "csrf_token": csrf_token})
        assert answer.status_code == 303
        assert [resource.paused for resource in coordinator.admin.resources() if resource.resource == name] == [True]
        coordinator.admin.resume(name)
        assert token not in running.said.replace(f"the token: {token}", "")
        with client.stream("GET", "/events") as stream:
            next(stream.iter_lines())
            assert running.end() == 130, "as of any command that Ctrl-C ends"


@pytest.mark.engines("postgresql")
def test_dashboard_survives_an_outage(own_postgres_server, make_database, start):
    url = make_database(own_postgres_server).url
    running = start(url, "dashboard", "--port", "0", "--interval", "0.2")
    home = f"http://{running.home}"
    with httpx.stream("GET", f"{home}/events", timeout=PATIENCE) as stream:
        lines = stream.iter_lines()

        def told(condition):
            until(lambda: condition(next(lines)), "it is told")

        told(lambda line: "0 resources" in line)
        own_postgres_server.stop("immediate")
        told(lambda line: "The database has not answered since" in line)
        assert httpx.get(home, timeout=PATIENCE).status_code == 200
        own_postgres_server.start()
        told(lambda line: "<table" in line or "No request holds or waits." in line)
        until(lambda: "has not answered" not in httpx.get(home, timeout=PATIENCE).text, "it has recovered")


@pytest.mark.engines("postgresql")
def test_start_during_an_outage(own_postgres_server, make_database, start):
    url = make_database(own_postgres_server).url
    own_postgres_server.stop("immediate")
    home = f"http://{start(url, 'dashboard', '--port', '0', '--interval', '0.2').home}"
    assert "There is no data yet." in httpx.get(home, timeout=PATIENCE).text
    own_postgres_server.start()
    until(lambda: "0 resources" in httpx.get(home, timeout=PATIENCE).text, "it is seen")


@pytest.mark.skipif(sys.platform == "win32", reason="has no such terminals")
@pytest.mark.engines("sqlite")
def test_top_runs_on_a_terminal(database, connect, name):
    import pty

    with connect().mutex(name):
        controller, terminal = pty.openpty()
        environment = {**os.environ, "SQLSEM_URL": database.url, "TERM": "xterm", "COLUMNS": "100", "LINES": "24"}
        process = subprocess.Popen(
            [sys.executable, "-m", "sqlsem", "top", "--interval", "0.2"],
            env=environment,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        os.close(terminal)
        shown = bytearray()

        def read():
            with contextlib.suppress(OSError):  # the terminal is closed at its end
                while chunk := os.read(controller, 65536):
                    shown.extend(chunk)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            until(lambda: name.encode() in shown, "the lock is seen")
            os.write(controller, b"q")
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
            process.wait()
            reader.join()
            os.close(controller)
        assert b"sqlsem top" in shown


def said(*arguments, **environment):
    result = CliRunner().invoke(main, list(arguments), env={"SQLSEM_URL": "sqlite:///none.db?mode=ro", **environment})
    return result.exit_code, " ".join(result.output.split())


def test_top_needs_a_terminal():
    code, output = said("top")
    assert code == 64
    assert "sqlsem ls --watch 2" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "add --tls-cert"),
        (["--host", "10.0.0.5", "--allow-changes"], "add --tls-cert"),
        (["--tls-key", __file__], "--tls-key is the key of a --tls-cert"),
        (["--interval", "0"], "too often"),
    ],
)
def test_unsafe_options_are_refused(arguments, words):
    code, output = said("dashboard", *arguments)
    assert code == 64
    assert words in output


def test_missing_database_is_reported_at_once(tmp_path):
    code, output = said("dashboard", "--port", "0", SQLSEM_URL=f"sqlite:///{tmp_path / 'none.db'}?mode=ro")
    assert code == 78
    assert "is not there" in output


@pytest.mark.parametrize(("command", "module"), [("top", "textual"), ("dashboard", "starlette")])
def test_command_names_its_missing_extra(command, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    code, output = said(command)
    assert code == 78
    assert f"pip install 'sqlsem[{command}]'" in output


def test_token_is_read_from_file_or_environment(tmp_path, monkeypatch):
    monkeypatch.delenv(watch.TOKEN, raising=False)
    token, is_new = watch._token(None)
    assert is_new
    assert len(token) > 30
    assert watch._token(None)[0] != token
    monkeypatch.setenv(watch.TOKEN, TOKEN)
    assert watch._token(None) == (TOKEN, False)
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    assert watch._token(file) == (TOKEN, False)


@pytest.mark.skipif(os.name != "posix", reason="no such permissions")
def test_readable_token_file_is_refused(tmp_path):
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o640)
    code, output = said("dashboard", "--allow-changes", "--token-file", str(file))
    assert code == 78
    assert "chmod 600" in output
    assert TOKEN not in output
    assert said("dashboard", "--private", "--token-file", str(tmp_path / "none"))[0] == 78


@pytest.mark.engines("sqlite")
def test_short_token_is_refused(database):
    code, output = said(
        *("dashboard", "--allow-changes", "--port", "0"),
        SQLSEM_URL=database.url,
        SQLSEM_DASHBOARD_TOKEN="short",
    )
    assert code == 78
    assert "at least 16" in output
    assert "short" not in output.replace("shorter", "")


@pytest.mark.engines("sqlite")
def test_taken_port_is_reported(database, start):
    first = start(database.url, "dashboard", "--port", "0")
    port = first.home.rpartition(":")[2]
    second = start(database.url, "dashboard", "--port", port)
    assert second.process.wait(PATIENCE) == 78
    second.end()
    assert "choose another with --port" in second.said
