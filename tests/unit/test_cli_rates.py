"""``sqlsem rates``."""

import json
import threading

from click.testing import CliRunner
from support import PATIENCE, until

import sqlsem
from sqlsem import cli
from sqlsem.model_rates import RateEntry
from sqlsem.terminal import output
from sqlsem.terminal.rates import render_rates


def call(*arguments):
    result = CliRunner().invoke(cli.main, ["rates", *arguments], prog_name="sqlsem")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_rates(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/locks.db"
    monkeypatch.setenv("SQLSEM_URL", url)
    with sqlsem.connect(url) as coordinator:
        coordinator.resources()  # the tables are there
        nothing = call()
        assert (nothing.exit_code, nothing.stdout) == (0, "There are no rates.\n")
        assert "'api'" in call("api").stdout
        windows = {"1h": 10, "1d": 1000}
        taken = coordinator.rate("api", windows, cost=7).take()
        coordinator.rate("mail", 3, per="1h").take()
        waiting = threading.Thread(target=lambda: coordinator.rate("api", windows, cost=4).take(timeout=PATIENCE))
        waiting.start()
        until(lambda: coordinator.entries("rate:api"), "somebody waits")
        heads, *lines = (line.split() for line in call().stdout.splitlines())
        taken.settle(0)
        waiting.join()
    assert heads == ["RATE", "WINDOW", "LIMIT", "USED", "LEFT", "ROOM", "IN", "WAITING", "LAST"]
    assert sorted(line[:6] for line in lines) == [
        ["api", "1d00h", "1,000", "7", "993", "1"],
        ["api", "1h00m", "10", "7", "3", "1"],
        ["mail", "1h00m", "3", "1", "2", "0"],
    ]
    found = json.loads(call("mail", "--json").stdout)
    assert [{**one, "idle": None} for one in found] == [
        {
            **{"name": "mail", "window": 3600.0, "limit": 3, "used": 1, "idle": None, "waiting": 0},
            **{"taken": 1, "returned": 0, "waits": 0, "free_in": 0.0},
        }
    ]


def test_names_that_are_long_or_hostile():
    one = RateEntry("\x1b[31m" + "x" * 200, 60.0, 100, 130, 0.0, free_in=12.0)
    console = output.console()
    with console.capture() as captured:
        console.print(render_rates([one], {one.resource: 0}, 60))
    lines = captured.get().splitlines()
    assert len(lines) == 2
    assert all(len(line) <= 60 for line in lines)
    assert "\x1b[31m" not in lines[1]
    assert lines[1].split()[-5:-2] == ["130", "0", "12s"], "less than nothing is not left"
