"""A database that is read-only, offline, too old, of another owner, or not to be opened; a login without rights: each
command gives the reason, and leaves nothing behind.
"""

import re
import sys

import pytest
from support.commands import output_of
from tdsserver import ERROR, done, error, failure, member, result

from sqlsem import sql
from sqlsem.engines.mssql.doctor import SqlServerDoctor

READ_ONLY = failure(3906, 'Failed to update database "books" because the database is read-only.')
OFFLINE = failure(942, "Database 'books' cannot be opened because it is offline.", 14)
#: The first words of statements that change something.
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
    """Run a command of sqlsem, and return its exit code and its output."""

    def run(server, *command):
        code, output = output_of(url_of(server), *command)
        assert "secret99" not in output
        return code, output

    return run


def committed(server):
    """Return the statements that would commit a change."""
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


# -- logins without rights, schemas of others, old levels -------------------------------------------------------------

NO_RIGHTS = {
    262: "CREATE TABLE permission denied in database 'books'.",
    2760: 'The specified schema name "sqlsem" either does not exist or you do not have permission to use it.',
    229: "The SELECT permission was denied on the object 'setting', database 'books', schema 'sqlsem'.",
    15151: "Cannot alter the role 'sqlsem_user', because it does not exist or you do not have permission.",
}


def refusing(pattern, reply):
    """Answer as a database without the sqlsem tables that refuses each statement with this pattern."""

    def answer(said):
        if "@@ERROR" in said.text:
            return result(("",), (0,))
        if said.text.startswith("SELECT COALESCE(OBJECT_ID("):
            return result(("there",), (None,))
        text = re.sub(r"--[^\n]*", "", said.text)
        return reply if re.search(pattern, text) else done()

    return answer


@pytest.mark.parametrize("number", NO_RIGHTS)
def test_init_by_a_login_without_rights_names_the_needed_login(tds, run, number):
    server = tds(refusing(r"\bCREATE (SCHEMA|TABLE)\b", failure(number, NO_RIGHTS[number], 14)))
    code, output = run(server, "init")
    assert code == 78
    assert NO_RIGHTS[number] in output
    assert "init needs a login that may create a schema in this database" in output
    assert "sqlsem sql mssql" in output
    assert "ALTER ROLE" not in output, "that is for users of the tables"
    assert committed(server) == []
    assert server.texts(r"\bROLLBACK\b")
    assert server.ended == server.accepted


@pytest.mark.parametrize("command", [("ls",), ("run", "--mutex", "x", "--", "true")], ids=lambda command: command[0])
def test_login_without_a_role_is_told_the_role(tds, run, command):
    words = "The EXECUTE permission was denied on the object 'register_member', database 'books', schema 'sqlsem'."
    refusal = failure(229, words, 14)
    server = tds(member(register_member=refusal, settings=refusal, entries=refusal, overview=refusal))
    code, output = run(server, *command)
    assert code == 78
    assert "permission was denied" in output
    assert "ALTER ROLE sqlsem_user ADD MEMBER" in output
    assert committed(server) == []


def test_doctor_names_the_role_that_a_login_lacks(tds, reach):
    check = SqlServerDoctor(reach(tds(lambda said: result(("", "", "", ""), ("someone", 1, 0, 0))))).permission()
    assert not check.ok
    assert "someone may not execute sqlsem.register" in check.detail
    assert "ALTER ROLE sqlsem_user ADD MEMBER [someone]" in check.mend


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (
            r"ALTER AUTHORIZATION",
            "sqlsem: schema sqlsem belongs to [etl], who could replace what is installed there; install as that user, "
            "or first: ALTER AUTHORIZATION ON SCHEMA::sqlsem TO dbo",
        ),
        (
            r"compatibility_level",
            "sqlsem: the compatibility level of this database is below 130; ALTER DATABASE CURRENT SET "
            "COMPATIBILITY_LEVEL = 130",
        ),
        (
            r"ProductBuild",
            "sqlsem: this is SQL Server 2016 without a service pack; install Service Pack 1 or later",
        ),
    ],
    ids=["owner", "level", "build"],
)
def test_init_refuses_another_owner_and_an_old_server(tds, run, pattern, words):
    server = tds(refusing(pattern, failure(50001, words)))
    code, output = run(server, "init")
    assert code == 78
    assert words in output
    assert committed(server) == []
    assert server.texts(r"\bROLLBACK\b")
    assert server.ended == server.accepted
    assert words.partition("belongs")[0].partition("is below")[0][:20] in server.texts(pattern)[0]


@pytest.mark.parametrize(("level", "ok"), [(120, False), (129, False), (130, True), (170, True)])
def test_doctor_refuses_a_level_below_130(tds, reach, level, ok):
    def answer(said):
        if "DATABASEPROPERTYEX" in said.text:
            return result(("", "", "", ""), ("Microsoft SQL Server 2022", "16.0.1", 3, "READ_WRITE"))
        return result(("", "", ""), (1, "DISABLED", level))

    check = SqlServerDoctor(reach(tds(answer))).compatibility()
    assert (check is None or check.ok) == ok
    if not ok:
        assert f"compatibility level is {level}" in check.detail
        assert "COMPATIBILITY_LEVEL = 130" in check.mend


@pytest.mark.parametrize(
    ("product", "edition", "ok"),
    [
        ("12.0.6024.0", 3, False),
        ("13.0.1601.5", 3, False),
        ("13.0.4001.0", 3, True),
        ("16.0.1000.6", 3, True),
        ("12.0.2000.8", 5, True),  # Azure SQL
        (None, 3, False),
    ],
)
def test_doctor_refuses_a_server_before_2016_sp1(tds, reach, product, edition, ok):
    answer = result(("", "", "", ""), ("Microsoft SQL Server", product, edition, "READ_WRITE"))
    check = SqlServerDoctor(reach(tds(lambda said: answer))).server()
    assert check.ok == ok
    assert ok or "2016 SP1" in check.mend
