"""Microsoft's own driver and tools against a fake server (`tdsserver`): no SQL Server is needed.

tds      ``tds(answer, …)`` starts a `tdsserver.TdsServer`, ended after the test url_of   ``url_of(server, **words)`` is
how sqlsem reaches it through Microsoft's ODBC driver reach    ``reach(server)`` opens a bare session there, closed
after the test style    the .NET client's calls: ``sync`` or ``async`` converse ``converse(answer, command, …)`` has the
.NET client do these things there: the server, and the events
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import microsoft
import pytest
import tdsserver

from clients.mixed import dotnet
from sqlsem.engines.base import Options
from sqlsem.engines.mssql import SqlServerEngine, SqlServerSession, sockets


@pytest.fixture(scope="session")
def driver() -> str:
    lacks = microsoft.odbc_lacks()
    if lacks:
        pytest.skip(f"Microsoft's ODBC driver needs {lacks}")
    return str(microsoft.odbc_driver())


@pytest.fixture
def tds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tdsserver.TdsServer]]:
    servers: list[tdsserver.TdsServer] = []
    open_sockets = sockets.open_sockets

    def clients() -> dict[int, str] | None:
        """A session identifies its socket as the new one of the process; here the server's end would be new, too."""
        ends = {number for server in servers for number in server.sockets()}
        return {number: which for number, which in (open_sockets() or {}).items() if number not in ends} or None

    monkeypatch.setattr(sockets, "open_sockets", clients)
    with contextlib.ExitStack() as stack:

        def tds(*arguments: Any, **more: Any) -> tdsserver.TdsServer:
            servers.append(stack.enter_context(tdsserver.TdsServer(*arguments, **more)))
            return servers[-1]

        yield tds


@pytest.fixture
def url_of(driver: str) -> Callable[..., str]:
    def url_of(server: tdsserver.TdsServer, **words: str) -> str:
        words = {"driver": driver, "Encrypt": "no", **words}
        return f"mssql://someone:secret99@127.0.0.1:{server.port}/books?{urllib.parse.urlencode(words)}"

    return url_of


@pytest.fixture
def engine_of(url_of: Callable[..., str]) -> Callable[..., SqlServerEngine]:
    def engine_of(
        server: tdsserver.TdsServer, *, options: dict[str, Any] | None = None, **words: str
    ) -> SqlServerEngine:
        return SqlServerEngine(url_of(server, **words), Options(**(options or {})))

    return engine_of


@pytest.fixture
def reach(engine_of: Callable[..., SqlServerEngine]) -> Iterator[Callable[..., SqlServerSession]]:
    with contextlib.ExitStack() as stack:

        def reach(server: tdsserver.TdsServer, **words: str) -> SqlServerSession:
            session = engine_of(server, **words).open_session("main")
            stack.callback(session.close)
            return session

        yield reach


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the command line of tests/clients/dotnet/Agent.cs on .NET Core."""
    lacks = microsoft.compiler_lacks()
    if lacks:
        pytest.skip(f".NET Core needs {lacks}")
    source = Path(__file__).parents[1] / "clients" / "dotnet" / "Agent.cs"
    return microsoft.compile_core((dotnet.CLIENT, source), tmp_path_factory.mktemp("core"), "agent")


@pytest.fixture(params=["sync", "async"])
def style(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def converse(
    program: list[str], tds: Callable[..., tdsserver.TdsServer], style: str
) -> Callable[..., tuple[tdsserver.TdsServer, list[Any]]]:
    def converse(answer: Any, *commands: dict[str, str], seconds: float = 150) -> tuple[tdsserver.TdsServer, list[Any]]:
        server = tds(answer)
        place = f"Data Source=127.0.0.1,{server.port};User ID=someone;Password=secret99;Pooling=False"
        spoken = "".join("\t".join(f"{key}={value}" for key, value in command.items()) + "\n" for command in commands)
        done = subprocess.run(
            [*program, "sqlclient", place, "sqlsem", style],
            input=f"{spoken}do=end\n",
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
            env={**os.environ, **microsoft.dotnet().environment},
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        assert "secret99" not in done.stdout
        return server, [json.loads(line) for line in done.stdout.splitlines()]

    return converse
