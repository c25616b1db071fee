"""A project's configuration file: it may come with foreign code, or be in a folder that others can write to."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import socket
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.projects import SECRET, STRANGER, allow, as_root, call, posix, project, user, write

import sqlsem
from sqlsem import config
from sqlsem.config import allowing, files, reading

ROOT = Path(__file__).resolve().parents[2]
#: Each setting of a file, as a project's could have it, and whether it can do harm. A new one has to be entered here.
HARMFUL = {
    "url": 'url = "sqlite:///theirs.db"',
    "url_file": 'url_file = "theirs"',
    "password_file": 'password_file = "theirs"',
    "grace": 'grace = "24d"',
    "lease": 'lease = "24d"',
    "schema": 'schema = "theirs"',
    "table": 'table = "theirs"',
    "profiles": 'profile = "theirs"\n[profiles.theirs]\nurl = "sqlite:///theirs.db"',
}
HARMLESS = {"require_server": "require_server = true", "retry": 'retry = "1m"', "profile": 'profile = "prod"'}
#: The user's own file, in the tests of what a project can change.
OWN = 'url = "postgresql://me@db/own"\n'
PROFILES = '[profiles.prod]\nurl = "postgresql://me@db/prod"\n[profiles.test]\nurl = "postgresql://me@db/test"\n'


def refused() -> str:
    """Return the message; the configuration must be refused in Python and on the command line."""
    with pytest.raises(sqlsem.ConfigurationError) as caught:
        config.resolve()
    result = call("ls")
    assert result.exit_code == 78
    assert SECRET not in str(caught.value)
    return str(caught.value)


# -- what a file may say ----------------------------------------------------------------------------------------------


def test_every_setting_is_harmful_or_harmless() -> None:
    assert set(reading.SETTINGS) == {*HARMFUL, *HARMLESS}
    assert {name for name, setting in reading.SETTINGS.items() if setting.harm is None} == set(HARMLESS)
    assert {*sqlsem.client.options.ConnectOptions.__optional_keys__} - {"creator"} == set(reading.OPTIONS)


@pytest.mark.parametrize("name", ["sqlsem.toml", "pyproject.toml"])
@pytest.mark.parametrize("setting", HARMFUL)
def test_harmful_setting_is_refused_until_allowed(home: Path, setting: str, name: str) -> None:
    user(home, OWN)
    text = HARMFUL[setting]
    if name == "pyproject.toml":
        text = f"[tool.sqlsem]\n{text}".replace("[profiles.", "[tool.sqlsem.profiles.")
    path = project(home, text, name=name)
    write(path.parent / "theirs", "postgresql://etl@db/theirs" if setting == "url_file" else "x", 0o600)
    words = refused()
    assert str(path) in words
    assert re.search(rf"sets .*\b{setting}\b", words)
    assert f"sqlsem config allow {path}" in words
    allow(path)
    chosen = config.resolve()
    if setting in ("url", "url_file", "profiles"):
        assert "theirs" in chosen.url
    elif setting != "password_file":
        assert setting in chosen.options


@pytest.mark.parametrize("setting", HARMLESS)
def test_harmless_setting_is_followed(home: Path, setting: str) -> None:
    user(home, OWN + PROFILES)
    project(home, HARMLESS[setting])
    chosen = config.resolve()
    assert chosen.url == f"postgresql://me@db/{'prod' if setting == 'profile' else 'own'}"
    assert chosen.options == ({"retry": 60.0} if setting == "retry" else {})
    user(home, PROFILES)
    if setting == "require_server":
        with pytest.raises(sqlsem.ConfigurationError, match="server is required"):
            config.resolve()


def test_project_chooses_among_own_profiles_only(home: Path) -> None:
    own = user(home, f'profile = "prod"\n{PROFILES}')
    path = project(home, 'profile = "test"')
    chosen = config.resolve()
    assert chosen.url == "postgresql://me@db/test"
    assert chosen.source == f"profile 'test' in {own}, which {path} names"
    project(home, 'profile = "tst"')
    assert "There is no profile 'tst'" in refused()


def test_own_profile_wins_over_a_projects(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user(home, PROFILES)
    path = project(home, '[profiles.prod]\nurl = "sqlite:///theirs.db"\nschema = "theirs"\n')
    for allowed in (False, True):
        if allowed:
            allow(path)
        assert config.resolve(profile="prod").url == "postgresql://me@db/prod"
        monkeypatch.setenv("SQLSEM_PROFILE", "prod")
        chosen = config.resolve()
        assert chosen.url == "postgresql://me@db/prod"
        assert chosen.options == {}
        monkeypatch.delenv("SQLSEM_PROFILE")


@pytest.mark.parametrize("chooser", ["project", "user"])
def test_own_profile_wins_if_a_file_chooses_it(home: Path, chooser: str) -> None:
    project_profile = '[profiles.prod]\nurl = "sqlite:///theirs.db"\nschema = "theirs"\n'
    own = user(home, PROFILES if chooser == "project" else f'profile = "prod"\n{PROFILES}')
    path = project(home, f'profile = "prod"\n{project_profile}' if chooser == "project" else project_profile)
    for allowed in (False, True):
        if allowed:
            allow(path)
        chosen = config.resolve()
        assert chosen.url == "postgresql://me@db/prod"
        assert chosen.options == {}
        assert chosen.source.startswith(f"profile 'prod' in {own}")


def test_own_options_win_over_a_projects(home: Path) -> None:
    user(home, f'retry = 3\nschema = "mine"\n{OWN}')
    path = project(home, 'retry = 60\nschema = "theirs"\ngrace = 7')
    allow(path)
    assert config.resolve().options == {"retry": 3.0, "schema": "mine", "grace": 7.0}
    project(home, 'url = "postgresql://etl@db/theirs"\nschema = "theirs"')  # this is of the database that it names
    allow(path)
    assert config.resolve().options == {"retry": 3.0, "schema": "theirs"}
    assert config.resolve().url == "postgresql://etl@db/theirs"
    assert config.resolve("sqlite:///other.db").options == {}


def test_database_that_the_user_names_needs_no_allowing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user(home, PROFILES)
    for text in (*HARMFUL.values(), "not TOML = = ="):
        path = project(home, text)
        assert config.resolve("sqlite:///said.db").url == "sqlite:///said.db"
        assert config.resolve(profile="prod").url == "postgresql://me@db/prod"
        monkeypatch.setenv("SQLSEM_PROFILE", "prod")
        assert config.resolve().url == "postgresql://me@db/prod"
        monkeypatch.setenv("SQLSEM_URL", "sqlite:///env.db")
        assert config.resolve().url == "sqlite:///env.db"
        monkeypatch.delenv("SQLSEM_URL")
        monkeypatch.delenv("SQLSEM_PROFILE")
        if path.read_text().startswith("url ="):
            monkeypatch.setenv("SQLSEM_CONFIG", str(path))
            assert config.resolve().url == "sqlite:///theirs.db"
            monkeypatch.delenv("SQLSEM_CONFIG")


@pytest.mark.parametrize(
    "url",
    [
        "Driver={folder}/libtds.so;Server=127.0.0.1",
        "mssql://u@127.0.0.1/dwh?driver={folder}/libtds.so",
        "postgresql://etl:${{SQLSEM_DB_PASSWORD}}@127.0.0.1:1/x",
        "postgresql://127.0.0.1:1/x?application_name=${{SQLSEM_DASHBOARD_TOKEN}}",
        "postgresql://127.0.0.1:1/x?sslkey={folder}/key",
    ],
)
def test_project_loads_no_code_and_sends_no_secrets(home: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("SQLSEM_DB_PASSWORD", SECRET)
    monkeypatch.setenv("SQLSEM_DASHBOARD_TOKEN", SECRET)
    project(home, f'url = "{url.format(folder=home / "project")}"')
    assert "sets url" in refused()


def test_checkouts_tasks_are_not_run(home: Path) -> None:
    database = f"sqlite:///{home}/project/theirs.db"
    task = ["put", "nightly", "--shell", f"touch {home}/ran"]
    assert call("--url", database, *task).exit_code == 0
    user(home, f'url = "sqlite:///{home}/own.db"')
    project(home, f'url = "{database}"')
    result = call("work", "nightly", "--idle-exit", "0")
    assert result.exit_code == 78
    assert not (home / "ran").exists()


# -- allowing ---------------------------------------------------------------------------------------------------------


def test_file_that_has_changed_is_not_followed(home: Path) -> None:
    path = project(home, HARMFUL["url"])
    assert call("config", "allow").exit_code == 0
    assert config.resolve().url == "sqlite:///theirs.db"
    project(home, f"{HARMFUL['url']} ")
    assert f"{path} sets url, and has changed since you allowed it, so it is not followed" in refused()
    project(home, HARMFUL["url"])
    assert config.resolve().url == "sqlite:///theirs.db"
    assert "is not allowed any more" in call("config", "deny", str(path)).stdout
    assert "only if you allow it" in refused()
    assert "was not allowed" in call("config", "deny").stdout


def test_allow_of_a_pyproject_covers_the_sqlsem_table(home: Path) -> None:
    text = '[tool.sqlsem]\nurl = "sqlite:///p.db"\n'
    path = project(home, text, name="pyproject.toml")
    allow(path)
    project(home, f'[project]\nname = "other"\n{text}', name="pyproject.toml")
    assert config.resolve().url == "sqlite:///p.db"
    project(home, f'{text}schema = "other"\n', name="pyproject.toml")
    assert "has changed" in refused()


def test_allow_covers_a_single_path(home: Path) -> None:
    allow(project(home, HARMFUL["url"]))
    other = write(home / "project" / "below" / "sqlsem.toml", HARMFUL["url"], 0o644)
    assert str(other) in refused()


@posix
def test_record_of_allowed_files_belongs_to_the_user(home: Path) -> None:
    mask = os.umask(0)
    try:
        allow(project(home, HARMFUL["url"]))
    finally:
        os.umask(mask)
    (record,) = (home / "state" / "allowed").iterdir()
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    assert stat.S_IMODE(record.parent.stat().st_mode) == 0o700
    record.chmod(0o666)
    assert f"everybody can write to {record}" in refused()
    record.chmod(0o600)
    record.parent.chmod(0o777)
    assert f"everybody can write to {record.parent}" in refused()
    result = call("config", "allow")
    assert result.exit_code == 78
    assert "chmod 700" in result.stderr


@as_root
@pytest.mark.parametrize("changed", ["record", "folder"])
def test_record_of_another_user_is_not_believed(home: Path, changed: str) -> None:
    allow(project(home, HARMFUL["url"]))
    (record,) = (home / "state" / "allowed").iterdir()
    os.chown(record if changed == "record" else record.parent, STRANGER, STRANGER)
    assert f"belongs to user {STRANGER}" in refused()


@posix
def test_linked_record_of_allowed_files_is_refused(home: Path) -> None:
    allow(project(home, HARMFUL["url"]))
    (record,) = (home / "state" / "allowed").iterdir()
    moved = record.rename(home / "moved")
    record.symlink_to(moved)
    assert "is a link" in refused()


def test_config_shows_settings_without_secrets(home: Path) -> None:
    own = user(home, f'[profiles.prod]\nurl = "postgresql://etl:{SECRET}@db/dwh"\n')
    path = project(home, 'profile = "prod"\nretry = "1m"')
    shown = " ".join(call("config").stdout.split())
    assert "postgresql://etl:…@db/dwh" in shown
    assert f"profile 'prod' in {own}, which {path} names" in shown
    assert f"retry 60.0 (from: {path})" in shown
    assert "grace 5.0 (from: the default)" in shown
    assert "grace 7.0 (from: --grace) lease none (from: the default)" in " ".join(
        call("--grace", "7", "config", "show").stdout.split()
    )
    assert f"{path} (harmless)" in shown
    plain = json.loads(call("config", "show", "--json").stdout)
    assert plain["database"] == "postgresql://etl:…@db/dwh"
    assert plain["sources"]["database"] == f"profile 'prod' in {own}, which {path} names"
    assert (plain["sources"]["retry"], plain["sources"]["schema"]) == (str(path), "the default")
    project(home, f'url = "mssql://etl@db/dwh?PWD={SECRET}"')
    result = call("config")
    assert result.exit_code == 78
    assert f"{path} (not allowed: url)" in " ".join(result.stdout.split())
    allowed = call("config", "allow").stdout
    assert str(path) in allowed
    assert "url = mssql://etl@db/dwh?PWD=…" in allowed
    assert f"{path} (allowed: url)" in " ".join(call("config").stdout.split())
    assert '"database": "mssql://etl@db/dwh?PWD=…"' in call("config", "--json").stdout


@posix
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "is not there"),
        (lambda path: path.write_text("[tool.other]"), "has a setting 'tool'"),
        (lambda path: path.symlink_to("/dev/null"), "is a link"),
        (lambda path: path.mkdir(), "is a directory"),
    ],
)
def test_allow_refuses_files_that_would_be_ignored(home: Path, make: Callable[[Path], object], words: str) -> None:
    path = home / "project" / "sqlsem.toml"
    make(path)
    result = call("config", "allow", str(path))
    assert result.exit_code in (64, 78)
    assert words in result.stderr
    assert call("config", "allow", str(home / "project" / "other.toml")).exit_code == 78
    assert not (home / "state" / "allowed").exists()


@posix
def test_allow_refuses_a_folder_that_others_can_write(home: Path) -> None:
    path = project(home, HARMFUL["url"])
    path.parent.chmod(0o777)
    assert "is never followed" in call("config", "allow", str(path)).stderr
    assert "none is looked for" in call("config", "allow").stderr


# -- where a file is looked for ---------------------------------------------------------------------------------------


@posix
@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o1757, pytest.param(0o775, marks=as_root)])
@pytest.mark.parametrize("above", [False, True])
def test_folder_that_others_can_write_ends_the_search(
    home: Path, monkeypatch: pytest.MonkeyPatch, mode: int, above: bool
) -> None:
    write(home / "project" / "sqlsem.toml", "this is no TOML and = would be refused", 0o644)
    shared = home / "project" / "below"
    own_folder = shared / "mine" / "deep"
    own_folder.mkdir(parents=True)
    write(shared / "pyproject.toml", "[tool.sqlsem]\nnor = this", 0o644)
    if not above:
        write(shared / "sqlsem.toml", "nor = this", 0o644)
    if mode == 0o775:
        os.chown(shared, 0, STRANGER)
    shared.chmod(mode)
    monkeypatch.chdir(own_folder)
    chosen = config.resolve()
    assert chosen.embedded
    assert str(shared) in chosen.note
    assert call("ls").exit_code == 0
    assert str(shared) in " ".join(call("config").stdout.split())
    # A file of the user's own below that is followed, wherever it lies.
    user(home, PROFILES)
    write(own_folder.parent / "sqlsem.toml", 'profile = "prod"', 0o644)
    assert config.resolve().url == "postgresql://me@db/prod"


@as_root
def test_folder_of_another_user_ends_the_search(home: Path) -> None:
    project(home, "this is no TOML and = would be refused")
    os.chown(home / "project", STRANGER, STRANGER)
    assert f"belongs to user {STRANGER}" in config.resolve().note


def test_search_ends_at_the_home_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user(home, PROFILES)
    write(home.parent / "sqlsem.toml", 'profile = "prod"', 0o644)
    assert config.resolve().embedded
    write(home / "sqlsem.toml", 'profile = "test"', 0o644)
    assert config.resolve().url == "postgresql://me@db/test"
    (home / "sqlsem.toml").unlink()
    # Outside of it a project may lie as well.
    outside = home.parent / "outside" / "below"
    outside.mkdir(parents=True)
    monkeypatch.chdir(outside)
    assert config.resolve().url == "postgresql://me@db/prod"


@posix
def test_search_ends_at_a_home_that_is_a_link(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home.parent / "sqlsem.toml", "this is no TOML and = would be refused", 0o644)
    link = home.parent / "link"
    link.symlink_to(home)
    monkeypatch.setenv("HOME", str(link))
    monkeypatch.setenv("USERPROFILE", str(link))
    assert config.resolve().embedded


def test_user_file_is_no_projects_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user(home, OWN)
    monkeypatch.chdir(home / "config")
    assert config.resolve().url == "postgresql://me@db/own"


def test_folder_that_was_removed_has_no_project(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed = home / "gone"
    removed.mkdir()
    monkeypatch.chdir(removed)
    try:
        removed.rmdir()
    except OSError:
        pytest.skip("the current folder cannot be removed here")
    assert config.resolve().embedded


# -- what lies there --------------------------------------------------------------------------------------------------


def make_link(path: Path) -> None:
    target = path.parent / "elsewhere"
    target.write_text('[tool.sqlsem]\nprofile = "prod"' if path.name == "pyproject.toml" else 'profile = "prod"')
    path.symlink_to(target)


def make_dangling_link(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    current = Path.cwd()
    os.chdir(path.parent)  # its path may be too long for a socket
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(current)


def make_large(path: Path) -> None:
    text = '[tool.sqlsem]\nprofile = "prod"\n' if path.name == "pyproject.toml" else 'profile = "prod"\n'
    with path.open("w") as file:
        file.write(text)
        file.truncate(100_000_000)


@posix
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (make_link, "is a link, and links are not followed"),
        (make_dangling_link, "is a link, and links are not followed"),
        (Path.mkdir, "is not a regular file"),
        (make_pipe, "is not a regular file"),
        (make_socket, "is not a regular file"),
        (make_large, "is larger than 1,000,000 bytes"),
    ],
)
def test_project_file_of_another_kind_is_refused(home: Path, make: Callable[[Path], object], words: str) -> None:
    user(home, PROFILES)
    path = home / "project" / "sqlsem.toml"
    make(path)
    began = time.process_time()
    assert f"{path} {words}" in refused()
    assert time.process_time() - began < 5  # and is not read
    assert config.resolve(profile="prod").url == "postgresql://me@db/prod"


@posix
@pytest.mark.parametrize(
    ("make", "counts"),
    [
        (make_link, True),
        (make_large, True),
        (make_dangling_link, False),
        (Path.mkdir, False),
        (make_pipe, False),
        (make_socket, False),
        (lambda path: path.symlink_to(write(path.parent / "other", "[tool.other]", 0o644)), False),
    ],
)
def test_pyproject_of_another_kind_is_refused_if_ours(home: Path, make: Callable[[Path], object], counts: bool) -> None:
    make(home / "project" / "pyproject.toml")
    if counts:
        assert "pyproject.toml is " in refused()
    else:
        assert config.resolve().embedded


@posix
@pytest.mark.parametrize("kind", ["project", "user"])
def test_file_that_everybody_can_write_is_refused(home: Path, kind: str) -> None:
    path = (project if kind == "project" else user)(home, HARMFUL["url"], 0o666)
    assert f"everybody can write to {path}" in refused()
    assert f"SQLSEM_CONFIG={path}" in refused()


@as_root
@pytest.mark.parametrize("kind", ["project", "user"])
def test_file_of_another_user_is_refused(home: Path, kind: str) -> None:
    os.chown((project if kind == "project" else user)(home, HARMFUL["url"]), STRANGER, STRANGER)
    assert f"belongs to user {STRANGER}" in refused()


@posix
def test_user_file_in_a_folder_of_others_is_refused(home: Path) -> None:
    user(home, OWN)
    for mode in (0o777, 0o1777):
        (home / "config").chmod(mode)
        assert f"everybody can write to {home / 'config'}" in refused()


@posix
def test_user_file_may_be_a_link_of_the_users(home: Path) -> None:
    folder = home / "dotfiles"
    folder.mkdir()
    (home / "config" / "sqlsem.toml").symlink_to(write(folder / "sqlsem.toml", OWN, 0o600))
    assert config.resolve().url == "postgresql://me@db/own"
    folder.chmod(0o777)
    assert f"everybody can write to {folder}" in refused()


@posix
def test_user_file_of_another_kind_is_refused(home: Path) -> None:
    path = home / "config" / "sqlsem.toml"
    for make, words in ((make_pipe, "is not a regular file"), (make_large, "is larger than"), (Path.mkdir, "is not a")):
        make(path)
        assert f"{path} {words}" in refused()
        path.rmdir() if path.is_dir() else path.unlink()


# -- while it is read -------------------------------------------------------------------------------------------------


@posix
def test_trust_is_in_the_file_that_was_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that is read is a stranger's; by the time it is understood, its name leads to the administrator's."""
    path = project(home, HARMFUL["url"], 0o666)
    trusted = write(home / "trusted", HARMFUL["url"], 0o600)
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    loads = toml.loads

    def swapped(text: str) -> object:
        path.unlink(missing_ok=True)
        path.symlink_to(trusted)
        return loads(text)

    monkeypatch.setattr(toml, "loads", swapped)
    with pytest.raises(sqlsem.ConfigurationError, match="everybody can write to"):
        config.resolve()
    assert path.is_symlink()


@posix
@pytest.mark.parametrize("moment", ["judged", "above"])
def test_folder_is_the_checked_folder(home: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Another folder takes its name between the check and the read, or before the search in its parents."""
    user(home, PROFILES)
    project(home, 'profile = "prod"')
    other_folder = home / "theirs"
    other_folder.mkdir()
    write(other_folder / "sqlsem.toml", 'profile = "test"', 0o644)
    read = files.Folder.read

    def swapped(folder: files.Folder, name: str, maximum: int = files.MAX_BYTES) -> files.Content:
        if folder.path == home / "project" / ("below" if moment == "above" else "") and other_folder.exists():
            (home / "project").rename(home / "moved")
            other_folder.rename(home / "project")
        return read(folder, name, maximum)

    monkeypatch.setattr(files.Folder, "read", swapped)
    assert config.resolve().url == "postgresql://me@db/prod"
    assert not other_folder.exists()


@posix
@pytest.mark.parametrize("change", ["grows", "is rewritten", "shrinks"])
@pytest.mark.parametrize("times", [1, 1000])
def test_file_that_changes_while_it_is_read(
    home: Path, monkeypatch: pytest.MonkeyPatch, change: str, times: int
) -> None:
    user(home, PROFILES)
    path = project(home, 'profile = "prod"\n')
    real, remaining = os.read, times

    def read(fd: int, length: int) -> bytes:
        nonlocal remaining
        data = real(fd, length)
        if remaining and data.startswith(b"profile"):
            remaining -= 1
            if change == "grows":
                with path.open("a") as file:
                    file.write("# more\n")
            elif change == "shrinks":
                os.truncate(path, len(data) - 1)
            else:
                path.write_bytes(data.swapcase().swapcase())
                os.utime(path, ns=(1, time.time_ns() + times - remaining))
        return data

    monkeypatch.setattr(os, "read", read)
    if times == 1:
        assert config.resolve().url == "postgresql://me@db/prod"
    else:
        with pytest.raises(sqlsem.ConfigurationError, match="is being written; try again"):
            config.resolve()


def test_file_that_grows_without_end_is_not_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(home, "")
    total = 0

    def read(fd: int, length: int) -> bytes:
        nonlocal total
        total += length
        return b"#" * length

    with monkeypatch.context() as patched:
        patched.setattr(os, "read", read)
        with pytest.raises(sqlsem.ConfigurationError, match="is larger than"):
            config.resolve()
    assert total <= 2 * files.MAX_BYTES


# -- where tasks come from --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "subject"), [("work nightly --idle-exit 0", "tasks"), ("batch resume", "callbacks")]
)
def test_worker_says_where_its_code_comes_from(home: Path, command: str, subject: str) -> None:
    own = user(home, f'[profiles.prod]\nurl = "sqlite:///{home}/own.db"')
    path = project(home, 'profile = "prod"')
    result = call(*command.split())
    words = (
        f"sqlsem: {subject} come from SQLite file {home}/own.db, named by profile 'prod' in {own}, which {path} names\n"
    )
    assert result.stderr.startswith(words), result.output
    assert "come from" not in call("-q", *command.split()).stderr
    for file in (own, path):
        file.unlink()
    errors = call(*command.split()).stderr
    assert errors.startswith(
        f"sqlsem: {subject} come from SQLite file {home}/state/sqlsem.db, of this user and host only"
    )
    assert errors.count("no database is named") == 1


def test_every_command_that_runs_code_says_so() -> None:
    """All code of the database runs inside `same_database` here."""
    commands = {}
    for path in sorted((ROOT / "sqlsem" / "cli").glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
                names = {ast.unparse(node.func): node for node in calls}
                if "same_database" in names:
                    opened = names.get("options.coordinator")
                    commands[function.name] = opened is not None and "runs" in {
                        keyword.arg for keyword in opened.keywords
                    }
    assert commands
    assert all(commands.values()), commands


def test_allowed_states_match_config_show(home: Path) -> None:
    path = project(home, HARMFUL["schema"])
    for state, change in (
        (allowing.NOT_ALLOWED, lambda: None),
        (allowing.ALLOWED, lambda: allow(path)),
        (allowing.CHANGED, lambda: project(home, 'schema = "others"')),
    ):
        change()
        assert f"({state}: schema)" in " ".join(call("config").stdout.split())
