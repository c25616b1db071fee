"""``sqlsem completion`` and ``sqlsem man``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import command_line, until
from support.commands import PATIENCE, ROOT

import sqlsem
from sqlsem import cli

posix = pytest.mark.skipif(os.name != "posix", reason="shells of POSIX")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a shell whose database has one name of each kind."""
    url = f"sqlite:///{tmp_path}/queue.db"
    with sqlsem.connect(url) as coordinator:
        coordinator.admin.set_limit("etl", 3)
        coordinator.admin.set_limit("etl2; touch pwned", 3)
        coordinator.queue("nightly").put({})
        coordinator.rate("api", 3, per="1h").take()
        with coordinator.once("report", "366d"):
            pass
        with coordinator.batch("loads", ["a"], window="1h").part("a"):
            pass
        coordinator.queue("nightly").schedule("@daily", {}, name="daily")
    return {**os.environ, "SQLSEM_URL": url, "PYTHONPATH": ROOT}


def complete(environment: dict[str, str], *words: str) -> tuple[list[str], str]:
    """Return the words that the shell offers for the last word, and standard error."""
    asked = {"SQLSEM_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(["sqlsem", *words])}
    process = subprocess.run(
        [sys.executable, "-m", "sqlsem"],
        env={**environment, **asked, "COMP_CWORD": str(len(words))},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    return [line.partition(",")[2] for line in process.stdout.splitlines() if line], process.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["le"], ["leader"]),
        (["tasks", "sh"], ["show"]),
        (["run", "--lim"], ["--limit"]),
        (["tasks", "show", "--js"], ["--json"]),
        (["completion", "z"], ["zsh"]),
        (["why", "e"], ["etl"]),
        (["ls", "e"], ["etl"]),
        (["set", "et"], ["etl"]),
        (["run", "--mutex", "e"], ["etl"]),
        (["run", "--limit", "e"], ["etl"]),
        (["put", "n"], ["nightly"]),
        (["work", "n"], ["nightly"]),
        (["tasks", "wait", "n"], ["nightly"]),
        (["rates", "a"], ["api"]),
        (["rates", "set", "a"], ["api"]),
        (["once", "forget", ""], ["report"]),
        (["batch", "run", "l"], ["loads"]),
        (["schedules", "pause", "d"], ["daily"]),
        (["ls", "--watch", "1", "nothing"], []),
    ],
    ids=" ".join,
)
def test_words_are_completed(words: list[str], expected: list[str], environment: dict[str, str]) -> None:
    # (The database has a second to answer, which a busy machine may take.)
    until(lambda: complete(environment, *words) == (expected, ""), "the words are offered")


def test_profiles_are_completed(environment: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[profiles.prod]\nurl = "postgresql://db/x"\n[profiles.play]\nurl = "postgresql://db/y"\n')
    file.chmod(0o600)
    assert complete({**environment, "SQLSEM_CONFIG": str(file)}, "--profile", "p") == (["play", "prod"], "")


@pytest.mark.parametrize(
    "url", ["postgresql://nobody@192.0.2.1/x?connect_timeout=60", "mssql://nowhere", "nonsense", ""]
)
def test_database_that_does_not_answer_is_no_error(url: str, environment: dict[str, str], tmp_path: Path) -> None:
    began = time.monotonic()
    folder = {"XDG_STATE_HOME": str(tmp_path / "state"), "SQLSEM_CONFIG": ""}
    assert complete({**environment, **folder, "SQLSEM_URL": url}, "ls", "e") == ([], "")
    assert time.monotonic() - began < PATIENCE / 2
    assert complete({**environment, "SQLSEM_URL": url}, "l") == (["ls", "leader"], "")


def test_completion_makes_no_file(environment: dict[str, str], tmp_path: Path) -> None:
    assert complete({**environment, "SQLSEM_URL": f"sqlite:///{tmp_path}/other.db"}, "ls", "e") == ([], "")
    assert not (tmp_path / "other.db").exists()


@posix
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_read_by_their_shells(shell: str) -> None:
    script = CliRunner().invoke(cli.main, ["completion", shell]).stdout
    assert f"SQLSEM_COMPLETE={shell}_complete" in script
    if shutil.which(shell) is None:
        return
    subprocess.run([shell, "-n"], input=script, text=True, check=True, timeout=PATIENCE)


@posix
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_with_its_script(environment: dict[str, str], tmp_path: Path) -> None:
    program = tmp_path / "sqlsem"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m sqlsem "$@"\n')
    program.chmod(0o755)
    script = CliRunner().invoke(cli.main, ["completion", "bash"]).stdout
    asks = 'COMP_WORDS=(sqlsem why e); COMP_CWORD=2; _sqlsem_completion sqlsem; printf "%s\\n" "${COMPREPLY[@]}"'
    path = f"{tmp_path}:{environment['PATH']}"
    process = subprocess.run(
        ["bash", "--norc", "-c", f"{script}\n{asks}"],
        env={**environment, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    assert process.stdout == "etl\n"


# -- the manual page --------------------------------------------------------------------------------------------------


def test_manual_has_every_command_and_option() -> None:
    page = CliRunner().invoke(cli.main, ["man"], prog_name="sqlsem").stdout.replace("\\-", "-")
    lines = page.splitlines()
    assert lines[0].startswith(".TH SQLSEM 1")
    for path, command in command_line.commands():
        assert f".SS sqlsem {' '.join(path)}" in lines
        for parameter in command.params:
            for name in parameter.opts if parameter.param_type_name == "option" else ():
                assert name in page, (path, name)
    requests = {line.split()[0] for line in lines if line.startswith((".", "'"))}
    assert requests == {".TH", ".SH", ".SS", ".PP", ".TP", ".nf", ".fi"}


@pytest.mark.skipif(shutil.which("groff") is None, reason="needs groff")
def test_manual_is_read_without_warnings() -> None:
    page = CliRunner().invoke(cli.main, ["man"], prog_name="sqlsem").stdout
    formatted = subprocess.run(
        ["groff", "-man", "-ww", "-Tutf8", "-k"], input=page.encode(), capture_output=True, check=True, timeout=PATIENCE
    )
    assert formatted.stderr == b""
