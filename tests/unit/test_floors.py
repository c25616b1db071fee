"""The lowest allowed versions contain the fixes of known faults."""

import lowest
import pytest

#: Of each package: the first version without the last known fault that matters here, and the fault.
FIXED = {
    "click": ("8.2.1", "8.2.0 did not complete some arguments; before it, tests had no stderr apart"),
    "cronsim": ("2.7", "backwards from a time at which a schedule was due, it passed that time over"),
    "filelock": ("3.20.3", "it followed links"),
    "h11": ("0.16", "CVE-2025-43859: requests smuggled in chunked bodies"),
    "jinja2": ("3.1.6", "CVE-2025-27516: a sandbox that could be left"),
    "psycopg": ("3.2.5", "CVE-2025-1094 in the libpq that it brings (17.2 before, 17.4 since)"),
    "pymysql": (
        "1.2.4",
        "before 1.2, no TLS unless asked for; before this, an error where the URL verifies the server",
    ),
    "starlette": ("1.3.1", "CVE-2025-62727 (Range), CVE-2026-48818 (UNC paths), CVE-2026-54282 (request.url)"),
    "textual": ("4.0", "its notifications knew no `markup`: each message of sqlsem top was a TypeError"),
    "uvicorn": ("0.32.1", "before it, a stream did not end when its browser had gone"),
    "vl-convert-python": ("1.8", "the Vega-Lite that it brought was older than the timeline's specification"),
    "wrapt": ("1.17", "a decorated builtin got the object that it belongs to as an argument"),
}
#: Packages of the extra `dashboard`, which read strangers' requests: each must be in the table.
READ_REQUESTS = {"h11", "jinja2", "starlette", "uvicorn"}


def number(version):
    return tuple(int(part) for part in version.split("."))


@pytest.mark.parametrize("name", FIXED)
def test_floors_have_no_known_fault(name):
    versions = [version for package, version in lowest.floors(groups=True) if package == name]
    assert versions, f"{name} is not required any more: take it out of the table"
    for version in versions:  # of the tests, too: they run with these versions
        assert number(version) >= number(FIXED[name][0]), FIXED[name][1]


def test_packages_that_read_requests_are_in_the_table():
    dashboard = lowest.PROJECT.read_text(encoding="utf-8").split("\ndashboard = [")[1].split("]")[0]
    assert {part.strip(' "').partition(">=")[0] for part in dashboard.split(",")} == READ_REQUESTS
    assert set(FIXED) >= READ_REQUESTS


def test_floors_are_all_known():
    floors = dict(lowest.floors())
    assert {"click", "psycopg", "starlette", "textual"} <= set(floors)
    assert all(number(version) for version in floors.values())
