"""The choice of the database: the call, the environment, files; no setting is ignored silently."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.projects import SECRET, allow, call, posix, project, user, write

import sqlsem
from sqlsem import config
from sqlsem.api import default

# -- precedence -------------------------------------------------------------------------------------------------------


def test_embedded_file_is_named_in_a_single_line(home: Path) -> None:
    chosen = config.resolve()
    assert chosen.embedded
    assert chosen.url == f"sqlite:///{home / 'state' / 'sqlsem.db'}" == sqlsem.default_url()
    for words in (["ls"], ["run", "--mutex", "a", "--", "true"], ["put", "q", "--json-body", "1"]):
        result = call(*words)
        assert result.exit_code == 0
        (line,) = result.stderr.splitlines()
        assert f"{home / 'state' / 'sqlsem.db'}, of this user and host only, as no database is named" in line
        assert "this host" not in result.stdout
        assert call("-q", *words).stderr == ""
    assert "only processes of this user on this host share" in " ".join(call("doctor").stdout.split())


@posix
def test_embedded_file_is_told_once_in_a_terminal(home: Path) -> None:
    code = f"import sys; sys.path[:0] = {sys.path!r}; from sqlsem.cli import main; main(sys.argv[1:])"
    script = write(home / "main.py", code, 0o600)
    environment = {**os.environ, "XDG_STATE_HOME": str(home / "xdg"), "XDG_CONFIG_HOME": str(home / "xdg")}
    command = f"{shlex.quote(sys.executable)} {shlex.quote(str(script))} ls"

    def said_in_a_session() -> str:
        terminal, end = os.openpty()
        try:
            subprocess.run(
                ["sh", "-c", f"{command}; {command}; {command}; exit"],  # `exit`: no shell becomes its last command
                start_new_session=True,
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=end,
                env=environment,
                timeout=120,
            )
        finally:
            os.close(end)
        output = b""
        with contextlib.suppress(OSError):  # no process has the other end open any more
            while part := os.read(terminal, 10_000):
                output += part
        os.close(terminal)
        return output.decode()

    # (The first command of all makes the folder that stores which messages were shown.)
    assert 1 <= said_in_a_session().count("no database is named") <= 2
    assert said_in_a_session().count("no database is named") == 1


@pytest.mark.parametrize("by", ["nothing", "code", "file"])
def test_python_warns_once_of_the_embedded_file(
    home: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr(default, "_coordinator", None)
    monkeypatch.setattr(default, "_configured", (None, None, {}))
    file = home / "state" / "sqlsem.db"
    if by == "code":
        sqlsem.configure(f"sqlite:///{file}")
    elif by == "file":
        user(home, f'url = "sqlite:///{file}"')
    for _ in range(2):
        with sqlsem.mutex("a"):
            pass
        sqlsem.default().close()
    records = [record for record in caplog.records if record.levelno >= logging.WARNING]
    if by != "nothing":
        assert records == []
        return
    (record,) = records
    assert str(file) in record.getMessage()
    assert "$SQLSEM_URL" in record.getMessage()
    assert f"sqlsem.configure('sqlite:///{file}')" in record.getMessage()


def test_python_warns_on_standard_error_without_logging(home: Path) -> None:
    environment = {**os.environ, "XDG_STATE_HOME": str(home / "xdg"), "XDG_CONFIG_HOME": str(home / "xdg")}
    code = f"import sys; sys.path[:0] = {sys.path!r}; import sqlsem\nfor name in 'ab':\n with sqlsem.mutex(name): pass"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stderr.count("No database was named") == 1, done.stderr


def test_named_database_is_shown_with_v_only(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQLSEM_URL", f"sqlite:///{home}/own.db")
    assert call("init").exit_code == 0
    assert call("ls").stderr == ""
    errors = call("-v", "ls").stderr
    assert f"{home}/own.db" in errors
    assert "from $SQLSEM_URL" in errors


def test_environment_wins_over_files(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user(
        home,
        f'profile = "b"\n[profiles.a]\nurl = "sqlite:///{home}/a.db"\n[profiles.b]\nurl = "sqlite:///{home}/b.db"\n',
    )
    assert config.resolve().url.endswith("/b.db")
    monkeypatch.setenv("SQLSEM_PROFILE", "a")
    assert config.resolve().url.endswith("/a.db")
    assert "profile 'a'" in config.resolve().source
    monkeypatch.setenv("SQLSEM_URL", "sqlite:///env.db")
    assert config.resolve().url == "sqlite:///env.db"
    assert config.resolve(profile="b").url.endswith("/b.db")
    assert config.resolve("sqlite:///said.db").url == "sqlite:///said.db"
    with pytest.raises(sqlsem.ConfigurationError, match="which database"):
        config.resolve("sqlite:///said.db", profile="b")


def test_profiles_on_the_command_line(home: Path) -> None:
    user(home, f'grace = 9\n[profiles.prod]\nurl = "sqlite:///{home}/prod.db"\nschema = "locks"\n')
    assert call("--profile", "prod", "run", "--mutex", "a", "--", "true").exit_code == 0
    assert "prefix locks_" in call("--profile", "prod", "init").stdout
    assert "prefix mine_" in call("--profile", "prod", "--schema", "mine", "init", "--dry-run").stdout
    assert "profile 'prod' in" in call("--profile", "prod", "doctor").stdout
    wrong = call("--profile", "prdo", "ls")
    assert wrong.exit_code == 78
    assert "is it 'prod'?" in wrong.stderr


def test_profiles_in_python(home: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default, "_coordinator", None)
    monkeypatch.setattr(default, "_configured", (None, None, {}))
    user(home, f'[profiles.prod]\nurl = "sqlite:///{home}/prod.db"\ngrace = "12s"\n')
    with caplog.at_level(logging.INFO, "sqlsem"):
        sqlsem.configure(profile="prod")
        assert sqlsem.default().engine.label.endswith("prod.db")
        assert sqlsem.default().engine.options.grace == 12
        sqlsem.configure()
        assert sqlsem.default().engine.label.endswith("sqlsem.db")
    sqlsem.default().close()
    assert "profile 'prod'" in caplog.text
    assert "No database was named" in caplog.text


def test_single_file_by_name(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user(home, 'url = "sqlite:///user.db"')
    project(home, 'profile = "of nobody"')
    other = write(home / "other.toml", 'url = "sqlite:///other.db"', 0o666)
    monkeypatch.setenv("SQLSEM_CONFIG", str(other))
    chosen = config.resolve()
    assert chosen.url == "sqlite:///other.db"
    if os.name == "posix":
        assert f"everybody can write to {other}" in chosen.warnings[0]
    monkeypatch.setenv("SQLSEM_CONFIG", "")
    assert config.resolve().embedded
    monkeypatch.setenv("SQLSEM_CONFIG", str(home / "nowhere.toml"))
    with pytest.raises(sqlsem.ConfigurationError, match="no file"):
        config.resolve()


# -- a server is required ---------------------------------------------------------------------------------------------


def test_a_server_is_required_by_the_environment(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQLSEM_REQUIRE_SERVER", "1")
    result = call("run", "--mutex", "a", "--", "true")
    assert result.exit_code == 78
    assert "A database server is required ($SQLSEM_REQUIRE_SERVER)" in result.stderr
    assert "$SQLSEM_URL" in result.stderr
    assert not (home / "state").exists()
    monkeypatch.setenv("SQLSEM_URL", "sqlite:///x.db")
    with pytest.raises(sqlsem.ConfigurationError, match="this host's only"):
        config.resolve()
    monkeypatch.setenv("SQLSEM_URL", "postgresql://etl@db/dwh")
    assert config.resolve().url == "postgresql://etl@db/dwh"
    assert config.resolve("sqlite:///said.db").url == "sqlite:///said.db"
    monkeypatch.setenv("SQLSEM_REQUIRE_SERVER", "maybe")
    with pytest.raises(sqlsem.ConfigurationError, match="maybe"):
        config.resolve()


def test_a_server_is_required_by_a_file(home: Path) -> None:
    user(home, "require_server = true")
    project(home, "require_server = false")  # which undoes nothing
    with pytest.raises(sqlsem.ConfigurationError, match="server is required"):
        sqlsem.default_url()
    path = project(home, 'url = "sqlite:///p.db"')
    allow(path)
    with pytest.raises(sqlsem.ConfigurationError, match="this host's only"):
        config.resolve()
    project(home, 'url = "mssql://etl@db/dwh"')
    allow(path)
    assert config.resolve().url == "mssql://etl@db/dwh"


# -- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("require_sever = true", "is it 'require_server'?"),
        ("url = 3", "must be a str"),
        ("require_server = 1", "must be a bool"),
        ("grace = true", "must be a str"),
        ('grace = "soon"\nurl = "sqlite:///x"', "not a duration"),
        ("url = ", "not TOML"),
        ('url = "sqlite:///x"\nprofile = "a"', "which shall it be"),
        ('profile = "a"', "There is no profile 'a'"),
        ('profile = "a"\n[profiles.a]\ngrace = 1', "There is no url"),
        ("[profiles]\na = 3", "must be a table"),
        ('[profiles.a]\nurl = "x"\nprofile = "b"', "not known"),
        ('url = "postgresql://u:${NOT_SET}@db/x"', "NOT_SET"),
        ('url = "postgresql://db/x"\npassword_file = "secret"', "cannot be read"),
        ('url_file = "secret"', "cannot be read"),
        ('url = "x"\nurl_file = "secret"', "one of them"),
        (f'url = ["postgresql://u:{SECRET}@db/x"]', "must be a str, not a list"),
    ],
)
def test_invalid_settings_are_reported(home: Path, text: str, words: str) -> None:
    user(home, text)
    with pytest.raises(sqlsem.ConfigurationError) as caught:
        config.resolve()
    assert words in str(caught.value)
    assert call("ls").exit_code == 78


# -- passwords --------------------------------------------------------------------------------------------------------


def test_password_comes_from_environment_or_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quoted = "postgresql://etl:correct%2Fhorse%40battery@db/dwh"
    monkeypatch.setenv("PG_SECRET", SECRET)
    user(home, 'url = "postgresql://etl:${PG_SECRET}@db/dwh"')
    assert config.resolve().url == quoted
    assert SECRET not in repr(config.resolve())
    assert "horse" not in repr(config.resolve())
    write(home / "config" / "secret", f"{SECRET}\nsecond line", 0o600)
    user(home, 'url = "postgresql://etl@db/dwh"\npassword_file = "secret"', 0o644)
    assert config.resolve().url == quoted
    assert config.resolve().warnings == ()
    user(home, 'url = "Driver={ODBC Driver 18 for SQL Server};Server=db;Uid=etl"\npassword_file = "secret"')
    assert config.resolve().url.endswith(f";PWD={{{SECRET}}}")
    write(home / "config" / "secret", quoted, 0o600)
    user(home, 'url_file = "secret"')
    assert config.resolve().url == quoted


@posix
def test_readable_password_file_is_warned_of(home: Path) -> None:
    own_file = user(home, 'url = "postgresql://etl:secret@127.0.0.1:1/dwh"', 0o644)
    (warning,) = config.resolve().warnings
    assert f"chmod 600 {own_file}" in warning
    result = call("--retry", "0", "ls")
    assert "warning:" in result.stderr
    assert "etl:secret" not in result.output
    own_file.chmod(0o600)
    assert config.resolve().warnings == ()
    secret = write(home / "config" / "secret", "x", 0o640)
    user(home, 'url = "postgresql://etl@db/dwh"\npassword_file = "secret"')
    (warning,) = config.resolve().warnings
    assert str(secret) in warning
