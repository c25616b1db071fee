"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import platformdirs
import pytest
from support.commands import Bench

import sqlsem
from sqlsem.api import default


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder of a user without any configuration, in a folder of a project. See `support.projects`."""
    for name in ("SQLSEM_URL", "SQLSEM_PROFILE", "SQLSEM_REQUIRE_SERVER", "SQLSEM_CONFIG", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    monkeypatch.setattr(platformdirs, "user_config_path", lambda *_: home / "config")
    monkeypatch.setattr(platformdirs, "user_state_path", lambda *_: home / "state")
    monkeypatch.setattr(default, "_warned_of_embedded", False)
    project = home / "project" / "below"
    project.mkdir(parents=True)
    (home / "config").mkdir()
    monkeypatch.chdir(project)
    return home


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database of the test; commands in this process use it."""
    url = f"sqlite:///{tmp_path}/queue.db"
    monkeypatch.setenv("SQLSEM_URL", url)
    monkeypatch.delenv("COLUMNS", raising=False)
    return url


@pytest.fixture
def coordinator(url: str) -> Iterator[sqlsem.Coordinator]:
    """A coordinator on this database, which is the one of the ``bench``, too."""
    with sqlsem.connect(url) as coordinator:
        coordinator.admin.resources()  # the tables are there
        yield coordinator


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A database of the test, and `sqlsem` processes that are all ended afterwards."""
    bench = Bench(tmp_path)
    yield bench
    bench.close()
