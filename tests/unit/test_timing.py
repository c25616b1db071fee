"""The times of a client: the documented ones by default, one argument for all of them, and safe at each scale."""

import re
import threading
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path

import pytest

import sqlsem.testing
from sqlsem import sql
from sqlsem.client.connection import membership
from sqlsem.engines.base import Options
from sqlsem.util import timing
from sqlsem.util.timing import DEFAULT, Timing

DOCS = Path(__file__).resolve().parents[2] / "docs"
#: Sentences of users' pages with the value of a time.
SENTENCES = {
    ("explanation/how-it-works.md", r"A waiter wakes every ([\d.]+) s at the latest"): "slice",
    ("explanation/security.md", r"a waiter polls again after ([\d.]+) s at most"): "slice",
    ("contributing/write-a-client.md", r"Python's client calls it every ([\d.]+) s"): "deadlock_check",
}


def documented():
    """Yield the names and values of the table in the page for contributors."""
    table = (
        (DOCS / "contributing" / "architecture.md")
        .read_text(encoding="utf-8")
        .partition("## Times")[2]
        .partition("\n## ")[0]
    )
    for names, values in re.findall(r"^\| (`.+) \| ([\d./, ]+) \|", table, re.MULTILINE):
        numbers = [float(Fraction(value)) for value in values.split(", ")]
        yield from zip(re.findall(r"`(\w+)`", names), numbers, strict=True)


def test_default_times_are_the_documented_ones():
    assert dict(documented()) == {field.name: getattr(DEFAULT, field.name) for field in fields(Timing)}


@pytest.mark.parametrize(("page", "pattern"), SENTENCES)
def test_pages_name_the_default_times(page, pattern):
    text = " ".join((DOCS / page).read_text(encoding="utf-8").split())
    values = re.findall(pattern, text)
    assert list(map(float, values)) == [getattr(DEFAULT, SENTENCES[page, pattern])]


def test_sql_has_the_documented_waiter_lease():
    """The waiting row of a session that polls no more is removed after this time."""
    page = " ".join((DOCS / "reference" / "protocol.md").read_text(encoding="utf-8").split())
    (seconds,) = map(int, re.findall(r"the next waiter removes it after (\d+) s", page))
    routine = sql.script("postgresql", "public").partition("FUNCTION sqlsem.renew_waiter_lease")[2].partition("$$;")[0]
    assert re.findall(r"interval '(\d+) seconds'", routine) == [str(seconds)]
    procedures = sql.script("mssql", "public")
    added = re.findall(r"(?:@pause|@slice) \+ (\d+)|@attended_ms = (\d+)|OUTPUT, 0, (\d+);", procedures)
    assert {int(number) for numbers in added for number in numbers if number} == {1000 * seconds}


def test_clients_have_the_times_of_their_beginning():
    shorter = DEFAULT.scaled(0.25)
    with sqlsem.testing.memory() as before, timing.use(shorter):
        with sqlsem.testing.memory() as client:
            assert client.client.timing == client.client.engine.options.timing == shorter
            assert client.client.member.timing == shorter
        assert before.client.timing == DEFAULT
    assert Options().timing == DEFAULT


def test_block_gives_its_times_to_all_threads():
    found = []
    with timing.use(replace(DEFAULT, slice=1.0)):
        thread = threading.Thread(target=lambda: found.append(Options().timing.slice))
        thread.start()
        thread.join()
    assert found == [1.0]


@pytest.mark.parametrize("factor", [0, -1, 1.1, float("nan")])
def test_impossible_scale_is_refused(factor):
    with pytest.raises(ValueError, match="factor"):
        DEFAULT.scaled(factor)


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.01])
@pytest.mark.parametrize("options", [{"grace": 5.0}, {"grace": 0.5}, {"lease": 1.0}, {"grace": 5.0, "lease": 60.0}])
def test_heartbeats_fit_into_each_life(scale, options):
    """The watchdog acts before the database does, and there are at least two heartbeats before."""
    with timing.use(DEFAULT.scaled(scale)), sqlsem.testing.memory(**options) as coordinator:
        member = coordinator.client.member
        life = options.get("lease", options["grace"] if "lease" not in options else None)
        assert member._certain_seconds < life
        assert 2 * member._heartbeat_interval <= member._certain_seconds


def test_watchdog_wakes_when_a_heartbeat_is_due():
    """Later it may be too late: a stuck thread has to be replaced before the last heartbeat is too old."""
    with sqlsem.testing.memory(grace=60.0) as coordinator:
        member = coordinator.client.member
        now = member.clock()
        member.clock = lambda: now
        interval, heartbeat = member._heartbeat_interval, member.heartbeat_thread
        for until_due, pause in [(0.5, 0.5), (2 * interval, interval), (0.001, 0.01), (-1, interval)]:
            heartbeat.due = now + until_due
            assert membership._watchdog_pause(member) == pytest.approx(pause)
