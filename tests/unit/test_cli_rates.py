"""``sqlsem rates``."""

import json
import threading

from support import PATIENCE, commands, until

import sqlsem
from sqlsem.ops.terminal import output
from sqlsem.ops.terminal.lists import render_rates
from sqlsem.values.rates import RateEntry


def call(*arguments):
    return commands.call("rates", *arguments)


def test_rates_command_lists_windows(coordinator):
    nothing = call()
    assert (nothing.exit_code, nothing.stdout) == (0, "There are no rates.\n")
    assert "'api'" in call("api").stdout
    windows = {"1h": 10, "1d": 1000}
    grant = coordinator.rate("api", windows, cost=7).take()
    coordinator.rate("mail", 3, per="1h").take()
    waiting = threading.Thread(target=lambda: coordinator.rate("api", windows, cost=4).take(timeout=PATIENCE))
    waiting.start()
    until(lambda: coordinator.admin.entries("rate:api"), "a request waits")
    heads, *lines = (line.split() for line in call().stdout.splitlines())
    grant.adjust(0)
    waiting.join()
    assert heads == ["RATE", "WINDOW", "LIMIT", "USED", "LEFT", "ROOM", "IN", "WAITING", "LAST"]
    assert sorted(line[:6] for line in lines) == [
        ["api", "1d00h", "1,000", "7", "993", "1"],
        ["api", "1h00m", "10", "7", "3", "1"],
        ["mail", "1h00m", "3", "1", "2", "0"],
    ]
    rates = json.loads(call("mail", "--json").stdout)
    assert [{**entry, "idle": None} for entry in rates] == [
        {
            **{"name": "mail", "window": 3600.0, "limit": 3, "used": 1, "idle": None, "waiting": 0},
            **{"taken": 1, "returned": 0, "waits": 0, "free_in": 0.0, "cap": None},
        }
    ]


def test_rate_names_are_escaped_and_shortened():
    rate_entry = RateEntry("\x1b[31m" + "x" * 200, 60.0, 100, 130, 0.0, free_in=12.0)
    console = output.console()
    with console.capture() as captured:
        console.print(render_rates([rate_entry], {rate_entry.resource: 0}, 60))
    lines = captured.get().splitlines()
    assert len(lines) == 2
    assert all(len(line) <= 60 for line in lines)
    assert "\x1b[31m" not in lines[1]
    assert lines[1].split()[-5:-2] == ["130", "0", "12s"], "less than nothing is not left"


def test_rates_are_set_and_reset(coordinator):
    assert call("set", "api", "3/1h").stdout == "Rate api: 3 in 3600 s.\n"
    assert coordinator.rate("api", 10, per="1h", cost=3).take(False) is not None
    assert coordinator.rate("api").take(False) is None
    assert call("set", "api", "--clear").stdout == "Rate api: no limit of an operator's.\n"
    assert call("reset", "api").stdout == "Rate api begins anew.\n"
    assert coordinator.rate("api", 10, per="1h", cost=10).take(False) is not None
    assert call("reset", "other").exit_code == 1
    assert "set" in call("--name", "set").stdout
    assert call("set", "api", "many/1h").exit_code == call("set", "api").exit_code == 64
    done = [(operation.action, operation.old, operation.new) for operation in coordinator.admin.operations("rate:api")]
    assert done == [
        ("reset", "3", None),
        ("rate_limit", "3 in 3600000 ms", None),
        ("rate_limit", None, "3 in 3600000 ms"),
    ]


def test_windows_of_a_rate_are_replaced(coordinator):
    assert call("set", "api", "5/1m", "100/1h").stdout == "Rate api: 5 in 60 s, 100 in 3600 s.\n"
    assert call("set", "api", "7/1m").stdout == "Rate api: 7 in 60 s, 100 in 3600 s.\n"
    assert call("set", "api", "--clear", "9/1d", "8/1h").stdout == "Rate api: 8 in 3600 s, 9 in 86400 s.\n"


def test_members_are_removed_by_number_and_by_login(url, coordinator):
    with sqlsem.connect(url) as other:
        lock = coordinator.mutex("etl")
        lock.acquire()
        other.mutex("dwh").acquire()
        member = next(entry for entry in coordinator.admin.entries("etl")).member_id
        result = commands.call("revoke", "--member", str(member))
        assert result.stdout.startswith("0 members are gone; members that still hold something have been told")
        until(lambda: lock.grant is None or lock.grant.lost, "the holder is notified")
        login = other.admin.overview().members[0].login
        result = commands.call("revoke", "--login", login, "--force")
        assert result.stdout.endswith("members are gone, with their rows.\n")
        assert other.admin.entries() == []
        assert commands.call("revoke", "1", "--login", login).exit_code == 64


def test_why_shows_a_rate_without_waiters(coordinator):
    coordinator.rate("api", 3, per="1h", burst=3, cost=3).take().adjust(1000)
    assert commands.done("why", "rate:api").startswith(
        "Nobody waits for the rate 'api': 1,000 of 3 used in 1h00m, room in "
    )
