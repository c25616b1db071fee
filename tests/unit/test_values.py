"""The frozen values, and the arguments that they refuse."""

import dataclasses
import json
import re
import time
from datetime import datetime, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sqlsem
from sqlsem.insight.overview import MemberEntry
from sqlsem.util import runtime
from sqlsem.values.locks import (
    MAX_LABEL,
    MAX_NAME,
    MAX_NOTE,
    MAX_SECONDS,
    Entry,
    Request,
    check_duration,
    check_name,
    monotonic,
)


@given(st.text(max_size=300))
def test_name_is_kept_unchanged_or_refused(text):
    try:
        assert check_name("The name", text) == text
    except sqlsem.ConfigurationError:
        return
    assert text == text.strip() != ""
    assert len(text.encode("utf-16-le")) // 2 <= MAX_NAME
    assert "\x00" not in text


CLEF = "\N{MUSICAL SYMBOL G CLEF}"  # two units of UTF-16

#: Values at a limit, and values just beyond it.
TAKEN = {
    "the longest name": {"resource": "a" * MAX_NAME},
    "the longest name in other units": {"resource": "a" + CLEF * 127},
    "what nobody sees": {"resource": "a\N{ZERO WIDTH JOINER}b"},
    "a space inside": {"resource": "a\N{NO-BREAK SPACE}b"},
    "the longest label": {"access": "l" * MAX_LABEL},
    "the lowest priority": {"priority": 0},
    "the highest priority": {"priority": 99},
    "the longest name that has a line": {"resource": "a" * (MAX_NAME - 9), "priority": 1},
    "the longest note": {"note": "n" * MAX_NOTE},
    "the longest note in other units": {"note": CLEF * (MAX_NOTE // 2)},
    "an empty note": {"note": ""},
    "the largest limit": {"limit": 2**31 - 1, "weight": 2**31 - 1},
}
REFUSED = {
    "too long a name": {"resource": "a" * (MAX_NAME + 1)},
    "too long a name in other units": {"resource": CLEF * 128},
    "half a pair": {"resource": "a\ud834"},
    "a control character": {"resource": "a\tb"},
    "one after what is not printable": {"resource": "\N{ZERO WIDTH JOINER}\x7f"},
    "no text": {"resource": 5},
    "too long a label": {"access": "l" * (MAX_LABEL + 1)},
    "no priority": {"priority": -1},
    "too high a priority": {"priority": 100},
    "a priority in words": {"priority": "high"},
    "too long a name for a line": {"resource": "a" * (MAX_NAME - 8), "priority": 1},
    "too long a note": {"note": "n" * (MAX_NOTE + 1)},
    "too long a note in other units": {"note": CLEF * (MAX_NOTE // 2) + "n"},
    "half a pair in a note": {"note": "a\udd1e"},
    "NUL in a note": {"note": "a\x00"},
    "a note that is none": {"note": 5},
    "too large a limit": {"limit": 2**31},
    "a limit of nothing": {"limit": 0},
    "a limit that is true": {"limit": True},
    "a limit with a point": {"limit": 1.0},
    "a limit in words": {"limit": "3"},
    "no weight": {"weight": 0},
    "a weight that is true": {"weight": True},
    "a weight above its limit": {"limit": 3, "weight": 4},
}


@pytest.mark.parametrize("fields", TAKEN.values(), ids=TAKEN)
def test_valid_request_is_accepted(fields):
    request = Request(**{"resource": "a", **fields})
    assert {name: getattr(request, name) for name in fields} == fields


@pytest.mark.parametrize("fields", REFUSED.values(), ids=REFUSED)
def test_invalid_request_is_refused(fields):
    with pytest.raises(sqlsem.ConfigurationError):
        Request(**{"resource": "a", **fields})


def test_rows_of_a_label_never_exclude_each_other():
    reader, heavy = Request("a", "read", limit=3), Request("a", "read", limit=3, weight=3)
    assert not heavy.excludes(reader)
    assert heavy.excludes(Request("a", "stage:1", limit=3))
    assert heavy.excludes(Request("a"))
    assert not reader.excludes(Request("a", "stage:1", limit=None))
    assert not Request("a", limit=None).excludes(Request("a", limit=None))


def test_the_longest_duration():
    assert check_duration("timeout", MAX_SECONDS) == MAX_SECONDS
    assert check_duration("timeout", 10.0, maximum=10) == 10
    for value in (MAX_SECONDS + 1, f"{MAX_SECONDS}s1ms", "x1s", "1s1"):
        with pytest.raises(sqlsem.ConfigurationError):
            check_duration("timeout", value)


@given(st.one_of(st.integers(), st.none(), st.floats(), st.booleans(), st.text(max_size=3)), st.integers(-3, 2**33))
def test_accepted_request_fits_its_limit(limit, weight):
    try:
        request = Request("a", limit=limit, weight=weight)
    except sqlsem.ConfigurationError:
        return
    assert 1 <= request.weight < 2**31
    assert request.limit is None or 1 <= request.weight <= request.limit < 2**31


@given(st.floats())
def test_seconds(value):
    try:
        assert 0 <= check_duration("timeout", value) < 2**31 / 1000
    except sqlsem.ConfigurationError:
        assert not 0 <= value <= 2147483


def test_requests_are_frozen():
    request = Request("a")
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.limit = 2


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request("a"), "write on 'a'"),
        (Request("a", limit=3), "limit 3 on 'a'"),
        (Request("a", "read"), "read on 'a'"),
        (Request("a", "stage:200"), "stage 200 on 'a'"),
        (Request("a", limit=None), "limit on 'a'"),
    ],
)
def test_describe(request_, words):
    assert request_.describe() == words
    assert request_.shared == (request_.access != "write")


def test_access_is_worded_in_a_single_place():
    """A list and a message call a row by the same word."""
    own = re.compile(
        r"""replace\("stage:|["']mutex["'] if|["'](mutex|no limit)["'] (if|else)|f["']limit \{(\w+\.)*limit\}["']"""
    )
    root = Path(sqlsem.__file__).parent
    modules = {path.name for path in root.rglob("*.py") if own.search(path.read_text(encoding="utf-8"))}
    assert modules == {"names.py"}


def test_an_entry_as_json():
    at = datetime(2024, 1, 2, tzinfo=timezone.utc)
    fields = {field.name: None for field in dataclasses.fields(Entry)}
    entry = Entry(**{**fields, "resource": "a", "requested_at": at})
    assert json.loads(json.dumps(entry.as_dict()))["requested_at"] == "2024-01-02T00:00:00+00:00"


@pytest.mark.parametrize("clock", [monotonic, runtime.THREADS.monotonic], ids=["the module's", "a client's"])
def test_our_own_clock_is_not_the_time_of_day(clock, monkeypatch):
    before = clock()
    assert abs(before - time.time()) > 86400, "it does not count from 1970"
    monkeypatch.setattr(time, "time", lambda: before - 3600)
    assert clock() >= before


@pytest.mark.parametrize(
    ("missing_for", "grace_left", "holding", "waiting", "missed"),
    [
        (None, None, 1, 0, False),  # it lives
        (2.0, 3.0, 0, 0, True),  # within its grace: it may reconnect
        (9.0, -4.0, 1, 0, True),  # dead, with a row left
        (9.0, 0.0, 0, 1, True),
        (9.0, -4.0, 0, 0, False),  # dead, without rows
        (None, 5.0, 0, 0, False),  # a running lease
    ],
)
def test_member_is_missed_while_it_matters(missing_for, grace_left, holding, waiting, missed):
    now = datetime(2026, 1, 1, tzinfo=timezone.utc)
    member = MemberEntry(1, "h", 1, "p", "l", now, "beacon", missing_for, 5.0, grace_left, holding, waiting)
    assert member.is_missed is missed
