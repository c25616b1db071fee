"""Which database it is: the call, the environment, files; and that nothing of it can pass unseen."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import platformdirs
import pytest
from click.testing import CliRunner, Result

import sqlsem
from sqlsem import chosen, cli, config

SECRET = "correct/horse@battery"
posix = pytest.mark.skipif(os.name != "posix", reason="owners and modes")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without any configuration, in a folder of a project of theirs."""
    for name in ("SQLSEM_URL", "SQLSEM_PROFILE", "SQLSEM_REQUIRE_SERVER", "SQLSEM_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    monkeypatch.setattr(platformdirs, "user_config_path", lambda *_: home / "config")
    monkeypatch.setattr(platformdirs, "user_state_path", lambda *_: home / "state")
    project = home / "project" / "below"
    project.mkdir(parents=True)
    (home / "config").mkdir()
    monkeypatch.chdir(project)
    return home


def user(home: Path, text: str, mode: int = 0o600) -> Path:
    return write(home / "config" / "sqlsem.toml", text, mode)


def project(home: Path, text: str, mode: int = 0o644, name: str = "sqlsem.toml") -> Path:
    return write(home / "project" / name, text, mode)


def write(path: Path, text: str, mode: int) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def call(*arguments: str) -> Result:
    result = CliRunner().invoke(cli.main, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert SECRET not in result.output
    return result


# -- what comes first -------------------------------------------------------------------------------------------------


def test_the_embedded_default_says_so(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = config.resolve()
    assert found.embedded
    assert found.url == f"sqlite:///{home / 'state' / 'sqlsem.db'}" == sqlsem.default_url()
    for words in (["ls"], ["run", "--mutex", "a", "--", "true"], ["put", "q", "--json-body", "1"]):
        result = call(*words)
        assert result.exit_code == 0
        assert result.stderr.count("only processes of this user on this host share") == 1
        assert "$SQLSEM_URL" in result.stderr
        assert "this host" not in result.stdout
    assert "only processes of this user on this host share" in " ".join(call("doctor").stdout.split())


def test_a_database_that_was_named_is_told_with_v_only(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQLSEM_URL", f"sqlite:///{home}/own.db")
    assert call("init").exit_code == 0
    assert call("ls").stderr == ""
    told = call("-v", "ls").stderr
    assert f"{home}/own.db" in told
    assert "from $SQLSEM_URL" in told


def test_the_nearest_project_before_the_user(home: Path) -> None:
    mine = user(home, f'url = "sqlite:///{home}/user.db"\ngrace = "30s"\nschema = "mine"\n')
    assert config.resolve().url.endswith("/user.db")
    assert config.resolve().source == str(mine)
    theirs = project(home, f'url = "sqlite:///{home}/project.db"\ngrace = 7\n')
    found = config.resolve()
    assert found.url.endswith("/project.db")
    assert found.source == str(theirs)
    assert found.options == {"grace": 7.0, "schema": "mine"}
    assert config.resolve("sqlite:///other.db").options == {}


def test_a_pyproject(home: Path) -> None:
    project(home, "[tool.other]\nx = 1\n", name="pyproject.toml")
    assert config.resolve().embedded
    project(home, f'[tool.sqlsem]\nurl = "sqlite:///{home}/p.db"\nretry = "1m"\n', name="pyproject.toml")
    found = config.resolve()
    assert found.url.endswith("/p.db")
    assert found.options == {"retry": 60.0}
    project(home, "not TOML, and none of ours = = =", name="pyproject.toml")
    assert config.resolve().embedded


def test_the_environment_before_files(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(chosen, "_coordinator", None)
    monkeypatch.setattr(chosen, "_configured", (None, None, {}))
    user(home, f'[profiles.prod]\nurl = "sqlite:///{home}/prod.db"\ngrace = "12s"\n')
    with caplog.at_level(logging.INFO, "sqlsem"):
        sqlsem.configure(profile="prod")
        assert sqlsem.default().engine.where.endswith("prod.db")
        assert sqlsem.default().engine.options.grace == 12
        sqlsem.configure()
        assert sqlsem.default().engine.where.endswith("sqlsem.db")
    sqlsem.default().close()
    assert "profile 'prod'" in caplog.text
    assert "only processes of this user on this host share" in caplog.text


def test_one_file_by_name(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user(home, 'url = "sqlite:///user.db"')
    project(home, 'url = "sqlite:///project.db"')
    other = write(home / "other.toml", 'url = "sqlite:///other.db"', 0o666)
    monkeypatch.setenv("SQLSEM_CONFIG", str(other))
    assert config.resolve().url == "sqlite:///other.db"
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
    project(home, "require_server = false")  # which takes nothing back
    with pytest.raises(sqlsem.ConfigurationError, match="server is required"):
        sqlsem.default_url()
    project(home, 'url = "sqlite:///p.db"')
    with pytest.raises(sqlsem.ConfigurationError, match="this host's only"):
        config.resolve()
    project(home, 'url = "mssql://etl@db/dwh"')
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
    ],
)
def test_what_cannot_be_is_told(home: Path, text: str, words: str) -> None:
    user(home, text)
    with pytest.raises(sqlsem.ConfigurationError) as caught:
        config.resolve()
    assert words in str(caught.value)
    assert call("ls").exit_code == 78


# -- passwords --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "has"),
    [
        ("postgresql://u:p@db/x", True),
        ("postgresql://u@db/x", False),
        ("postgresql://db/x?password=p", True),
        ("postgresql://db:5432/x", False),
        ("sqlite:////tmp/a:b@c.db", False),
        ("Driver={x};Server=db;Uid=u;Pwd=p", True),
        ("Driver={x};Server=db;PASSWORD = p;", True),
        ("Driver={x};Server=db;Trusted_Connection=yes", False),
        ("mssql://u:p@db/x?driver=y", True),
    ],
)
def test_has_password(url: str, has: bool) -> None:
    assert config.has_password(url) is has


def test_passwords_from_elsewhere(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_password_that_others_can_read_is_told(home: Path) -> None:
    mine = user(home, 'url = "postgresql://etl:secret@127.0.0.1:1/dwh"', 0o644)
    (warning,) = config.resolve().warnings
    assert f"chmod 600 {mine}" in warning
    result = call("--retry", "0", "ls")
    assert "warning:" in result.stderr
    assert "etl:secret" not in result.output
    mine.chmod(0o600)
    assert config.resolve().warnings == ()
    secret = write(home / "config" / "secret", "x", 0o640)
    user(home, 'url = "postgresql://etl@db/dwh"\npassword_file = "secret"')
    (warning,) = config.resolve().warnings
    assert str(secret) in warning


def test_a_project_does_not_reach_for_secrets(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET", "x")
    monkeypatch.setenv("SQLSEM_PASSWORD", "y z")
    project(home, 'url = "postgresql://u:${AWS_SECRET}@elsewhere/x"')
    with pytest.raises(sqlsem.ConfigurationError, match="AWS_SECRET"):
        config.resolve()
    project(home, 'url = "postgresql://u@elsewhere/x"\npassword_file = "/etc/hostname"')
    with pytest.raises(sqlsem.ConfigurationError, match="secrets"):
        config.resolve()
    project(home, 'url = "postgresql://u:${SQLSEM_PASSWORD}@db/x"')
    assert config.resolve().url == "postgresql://u:y%20z@db/x"


# -- trust ------------------------------------------------------------------------------------------------------------


@posix
@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_file_that_everybody_can_write_is_not_followed(
    home: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = project(home, 'url = "sqlite:///elsewhere.db"')
    wide = path if what == "file" else path.parent
    wide.chmod(0o777)
    result = call("ls")
    assert result.exit_code == 78
    assert f"everybody can write to {wide}" in result.stderr
    assert f"SQLSEM_CONFIG={path}" in result.stderr
    # Whoever names the database is not kept from it.
    assert config.resolve("sqlite:///said.db").url == "sqlite:///said.db"
    monkeypatch.setenv("SQLSEM_CONFIG", str(path))
    assert config.resolve().url == "sqlite:///elsewhere.db"


@posix
def test_a_file_of_somebody_else_is_not_followed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = project(home, 'url = "sqlite:///elsewhere.db"')
    me = os.geteuid()
    if me == 0:
        os.chown(path, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(sqlsem.ConfigurationError, match="belongs to user"):
        config.resolve()


@posix
def test_a_folder_like_tmp(home: Path) -> None:
    path = project(home, 'url = "sqlite:///mine.db"')
    path.parent.chmod(0o777 | stat.S_ISVTX)
    assert config.resolve().url == "sqlite:///mine.db"
