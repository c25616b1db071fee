"""The frozen values, and what they refuse."""

import dataclasses
import json
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sqlsem
from sqlsem.model import MAX_NAME, Entry, Request, check_duration, check_name


@given(st.text(max_size=300))
def test_a_name_is_taken_as_it_is_or_refused(text):
    try:
        assert check_name("The name", text) == text
    except sqlsem.ConfigurationError:
        return
    assert text == text.strip() != ""
    assert len(text.encode("utf-16-le")) // 2 <= MAX_NAME
    assert "\x00" not in text


@given(st.one_of(st.integers(), st.none(), st.floats(), st.booleans(), st.text(max_size=3)), st.integers(-3, 2**33))
def test_a_request_keeps_the_rule_possible(limit, weight):
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
        (Request("a"), "mutex on 'a'"),
        (Request("a", limit=3), "limit 3 on 'a'"),
        (Request("a", "read"), "read on 'a'"),
        (Request("a", "stage:200"), "stage:200 on 'a'"),
        (Request("a", limit=None), "no limit on 'a'"),
    ],
)
def test_describe(request_, words):
    assert request_.describe() == words
    assert request_.shared == (request_.access != "write")


def test_an_entry_as_json():
    at = datetime(2024, 1, 2, tzinfo=timezone.utc)
    fields = {field.name: None for field in dataclasses.fields(Entry)}
    entry = Entry(**{**fields, "resource": "a", "requested_at": at})
    assert json.loads(json.dumps(entry.as_dict()))["requested_at"] == "2024-01-02T00:00:00+00:00"
