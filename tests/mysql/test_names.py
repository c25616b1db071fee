"""Names that differ in any character are different: resources, keys, queues. (Many collations would mix them.)"""

import secrets
import unicodedata

import pytest

from sqlsem.tasks import Json

pytestmark = pytest.mark.engines("mysql")

PAIRS = {
    "case": ("Straße", "straße"),
    "accent": ("resume", "résumé"),
    "sharp-s": ("strasse", "straße"),
    "normalization": (unicodedata.normalize("NFC", "é"), unicodedata.normalize("NFD", "é")),
    "emoji": ("a🔒", "a🔓"),
    "ignorable": ("a", "a\u200b"),
    "width": ("\uff41", "a"),
    "blank": ("a b", "a  b"),
    "backslash": ("a\\b", "ab"),
    "percent": ("a%", "a%%"),
    "quote": ("a'b", "a''b"),
    "underscore": ("a_b", "axb"),
    "the-longest": ("ä" * 200, "ä" * 199 + "Ä"),
}


@pytest.fixture(params=sorted(PAIRS))
def pair(request):
    mark = secrets.token_hex(5)
    return [f"{mark}{text}" for text in PAIRS[request.param]]


def test_resources_that_differ_are_different(connect, pair):
    coordinator, other = connect(), connect()
    with coordinator.mutex(pair[0]) as grant, other.mutex(pair[1], timeout=30) as beside:
        assert [entry.resource for entry in coordinator.admin.entries(pair[0])] == [pair[0]]
        assert [entry.resource for entry in coordinator.admin.entries(pair[1])] == [pair[1]]
        assert grant.position != beside.position
        assert not other.mutex(pair[0]).acquire(timeout=0)
    coordinator.admin.set_limit(pair[0], 2)
    limits = {resource.resource: resource.cap for resource in coordinator.admin.resources()}
    assert limits[pair[0]] == 2
    assert limits.get(pair[1]) is None
    coordinator.admin.set_limit(pair[0], None)


def test_queues_that_differ_are_different(connect, pair):
    first, second = (connect().queue(name) for name in pair)
    number = first.put(Json(1))
    assert second.try_claim() is None
    assert [task.task_id for task in first.tasks()] == [number]
    assert second.tasks() == []
    with first.try_claim() as task:
        assert task.id == number


def test_keys_that_differ_are_different(connect, name, pair):
    queue = connect().queue(name)
    numbers = {queue.put(Json(1), unique=key, key=key) for key in pair}
    assert len(numbers) == 2
    assert {queue.put(Json(1), unique=key) for key in pair} == numbers
    for key in pair:
        queue.set_limit(1, key=key)
    with queue.try_claim() as first, queue.try_claim() as second:
        assert {first.id, second.id} == numbers


def test_runs_that_differ_are_different(connect, pair):
    coordinator = connect()
    for name in pair:
        with coordinator.once(name, "366d") as run:
            assert run is not None
        with coordinator.once(name, "366d") as run:
            assert run is None
