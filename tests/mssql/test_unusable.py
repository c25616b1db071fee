"""A database that is read-only, offline or not to be opened: each command says so, and leaves nothing behind."""

import os
import re
import subprocess
import sys

import pytest
from tdsserver import ERROR, done, error, failure, member, result

from sqlsem import sql
from sqlsem.engines.mssql.doctor import SqlServerDoctor

READ_ONLY = failure(3906, 'Failed to update database "books" because the database is read-only.')
OFFLINE = failure(942, "Database 'books' cannot be opened because it is offline.", 14)
#: Words that a statement which changes something begins with.
WRITES = re.compile(r"\b(CREATE|ALTER|INSERT|UPDATE|DELETE|DROP|GRANT|DENY|REVOKE)\b")


def refusal(number, text):
    """The answer to a login that a database refuses."""
    return error(number, text, 11) + error(18456, "Login failed for user 'someone'.", 14) + done(ERROR)


REFUSALS = {
    4060: 'Cannot open database "books" requested by the login. The login failed.',
    942: "Database 'books' cannot be opened because it is offline.",
    924: "Database 'books' is already open and can only have one user at a time.",
    927: "Database 'books' cannot be opened. It is in the middle of a restore.",
    945: "Database 'books' cannot be opened due to inaccessible files or insufficient memory or disk space.",
}


def read_only(there):
    """Answer as a database that is read-only; ``there``: with the sqlsem tables."""
    others = member(register=READ_ONLY, register_member=READ_ONLY)

    def answer(said):
        if "@@ERROR" in said.text:
            return result(("",), (3906,))
        if "DATABASEPROPERTYEX" in said.text:
            return result(("", "", "", ""), ("Microsoft SQL Server 2022", "16.0.1", 3, "READ_ONLY"))
        if said.text.startswith("SELECT COALESCE(OBJECT_ID("):
            return result(("there",), (1 if there else None,))
        if said.text.startswith("SELECT name, value FROM"):
            return result(("name", "value"), ("schema_version", str(sql.LATEST)), ("features", "all"))
        if not said.text.startswith("EXEC ") and WRITES.search(re.sub(r"--[^\n]*|'[^']*'", "", said.text)):
            return READ_ONLY
        return others(said)

    return answer


@pytest.fixture
def run(url_of):
    """Run a command of sqlsem: its exit code, and all that it says."""

    def run(server, *command):
        child = subprocess.run(
            [sys.executable, "-m", "sqlsem", "--retry", "0.5", *command],
            env={**os.environ, "SQLSEM_URL": url_of(server)},
            capture_output=True,
            text=True,
            check=False,
        )
        output = " ".join((child.stdout + child.stderr).split())
        assert "Traceback" not in output, output
        assert "secret99" not in output
        return child.returncode, output

    return run


def committed(server):
    """The statements that would make something last."""
    return [text for text in server.texts() if re.search(r"\bCOMMIT\b", text)]


@pytest.mark.parametrize("there", [False, True])
def test_init_says_that_the_database_is_read_only(tds, run, there):
    server = tds(read_only(there))
    code, output = run(server, "init")
    assert code == 69
    assert "is read-only" in output
    assert "(3906)" in output
    assert "READ_WRITE" in output, "what to do"
    assert committed(server) == []
    assert server.ended == server.accepted


def test_doctor_says_that_the_database_is_read_only(tds, reach):
    check = SqlServerDoctor(reach(tds(read_only(True)))).primary()
    assert not check.ok
    assert "read-only" in check.detail
    assert "primary replica" in check.mend
    assert "READ_WRITE" in check.mend


def test_acquire_says_that_the_database_is_read_only(tds, run):
    server = tds(read_only(True))
    code, output = run(server, "run", "--mutex", "x", "--", sys.executable, "-c", "print('inside')")
    assert code == 69
    assert "is read-only" in output
    assert "inside" not in output
    assert committed(server) == []


@pytest.mark.parametrize("number", REFUSALS)
@pytest.mark.parametrize(
    "command", [("init",), ("doctor",), ("ls",), ("run", "--mutex", "x", "--", "true")], ids=lambda command: command[0]
)
def test_database_that_cannot_be_opened_is_named(tds, run, number, command):
    server = tds(member(), login=lambda: refusal(number, REFUSALS[number]))
    code, output = run(server, *command)
    assert code == (1 if command[0] == "doctor" else 69)
    assert REFUSALS[number].partition(".")[0] in output
    assert "books" in output
    assert server.texts() == []


@pytest.mark.parametrize("command", ["init", "doctor", "ls"])
def test_database_that_goes_offline_is_named(tds, run, command):
    server = tds(lambda said: result(("",), (942,)) if "@@ERROR" in said.text else OFFLINE)
    code, output = run(server, command)
    assert code == (1 if command == "doctor" else 69)
    assert "because it is offline" in output
    assert committed(server) == []
