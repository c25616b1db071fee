"""The .NET client on .NET Core with System.Data.SqlClient, against a server of ours: what it makes of what that says.

With a real queue behind it, it is tested in tests/clients/test_dotnet.py, where $SQLSEM_TEST_MSSQL_ADO is set.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import microsoft
import pytest
from tdsserver import COUNT, CUT, MORE, done, failure, result, rows, warning

from clients.mixed import dotnet

SOURCES = (dotnet.CLIENT, Path(__file__).parents[1] / "clients" / "dotnet" / "Agent.cs")


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    lacks = microsoft.compiler_lacks()
    if lacks:
        pytest.skip(f".NET Core needs {lacks}")
    return microsoft.compile_core(SOURCES, tmp_path_factory.mktemp("core"), "agent")


@pytest.fixture
def agent(program, tds):
    """Have the client do these things on a server that answers so; what it told."""

    def agent(answer, *commands):
        server = tds(answer)
        place = f"Data Source=127.0.0.1,{server.port};User ID=someone;Password=secret99;Pooling=False"
        spoken = "".join("\t".join(f"{key}={value}" for key, value in one.items()) + "\n" for one in commands)
        done = subprocess.run(
            [*program, "sqlclient", place, "sqlsem"],
            input=f"{spoken}do=end\n",
            capture_output=True,
            text=True,
            check=False,
            timeout=150,
            env={**os.environ, **microsoft.dotnet().environment},
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        return server, [json.loads(one) for one in done.stdout.splitlines()]

    return agent


ACQUIRE = {"do": "acquire", "name": "books", "timeout": "5"}


def test_it_starts(agent):
    server, told = agent(lambda _: done())
    assert [one["event"] for one in told] == ["ready"]
    assert server.accepted == 1


@pytest.mark.parametrize("before", [b"", warning(8153, "Warning: Null value is eliminated")], ids=["alone", "warned"])
@pytest.mark.parametrize(
    ("number", "text", "words"),
    [
        (2812, "Could not find stored procedure 'sqlsem.enrol'.", "sqlsem init"),
        (229, "The EXECUTE permission was denied on the object 'enrol'.", "permission was denied"),
        (40613, "Database 'books' is not currently available.", "not currently available"),
    ],
)
def test_errors(agent, number, text, words, before):
    def answer(said):
        if "enrol" in said.text or "register" in said.text or "acquire" in said.text:
            return before + failure(number, text)
        return result(("",), (0,)) if "SELECT" in said.text else done()

    _, told = agent(answer, ACQUIRE)
    assert told[1]["event"] == "failed"
    assert told[1]["error"] == "SqlSemException"
    assert words in told[1]["message"]


def test_a_cut_line(agent):
    _, told = agent(lambda _: CUT, ACQUIRE)
    assert told[1]["event"] == "failed"
    assert "secret99" not in told[1]["message"]


def test_an_error_after_rows(agent):
    def answer(said):
        del said
        return rows(("a",), (1,)) + done(COUNT | MORE, 1) + failure(50006, "sqlsem: you may not")

    _, told = agent(answer, ACQUIRE)
    assert (told[1]["event"], "you may not" in told[1]["message"]) == ("failed", True)
