"""Bad arguments are refused in words, with 50000, and nothing is done; what looks like SQL is only text."""

import pytest

pytestmark = pytest.mark.engines("mssql")

BAD_NAMES = [
    (None, "is NULL"),
    ("", "is empty"),
    (" x", "white space"),
    ("x ", "white space"),
    ("x\u3000", "white space"),
    ("\u00a0x", "white space"),
    (" ", "white space"),
    ("a\tb", "control character"),
    ("a\x7fb", "control character"),
    ("x" * 256, "has more than 255"),
]
BAD_REQUESTS = [
    ({"limit": 0}, "limit on"),
    ({"limit": -1}, "limit on"),
    ({"limit": None}, "limit on"),
    ({"limit": 2, "weight": 3}, "weight on"),
    ({"limit": 2, "weight": 0}, "weight on"),
    ({"limit": 2, "weight": None}, "weight on"),
    ({"weight": 2}, "weight on"),
    ({"access": "exclusive"}, "access is 'exclusive'"),
    ({"access": ""}, "access is ''"),
    ({"access": None}, "access is NULL"),
    ({"access": "write "}, "access is 'write '"),
    ({"access": "stage:"}, "stage:<whole number>"),
    ({"access": "stage:1.5"}, "stage:<whole number>"),
    ({"access": "stage:07"}, "stage:<whole number>"),
    ({"access": "stage:x"}, "stage:<whole number>"),
    ({"access": "read", "limit": 2}, "limit goes with access write"),
    ({"access": "stage:1", "limit": 2}, "limit goes with access write"),
    ({"lease_seconds": 0}, "lease_seconds must be from 0.1"),
    ({"lease_seconds": 0.09}, "lease_seconds must be from 0.1"),
    ({"lease_seconds": -3}, "lease_seconds must be from 0.1"),
    ({"lease_seconds": 3e9}, "lease_seconds must be from 0.1"),
    ({"requesting_id": ""}, "requesting_id is empty"),
    ({"requesting_id": " me"}, "requesting_id ' me' begins"),
    ({"requesting_id": "m" * 256}, "requesting_id has more than 255"),
]


@pytest.mark.parametrize("routine", ["acquire", "try", "release", "renew", "set_limit", "pause", "resume"])
def test_bad_names(session, refused, name, routine):
    one = session()
    more = {"renew": (1,), "set_limit": (1,)}.get(routine, ())
    for bad, words in BAD_NAMES:
        with refused(50000, words):
            one.call(routine, bad, *more)


@pytest.mark.parametrize("routine", ["acquire", "try"])
def test_bad_requests(session, database, refused, name, routine):
    one = session()
    for words, told in BAD_REQUESTS:
        with refused(50000, told):
            one.acquire(name, routine=routine, **words)
    assert database.queue(name) == []
    assert one.acquire(name, routine=routine).code == 0
    one.release(name)


def test_bad_times(session, database, refused, name):
    one = session()
    for bad in (-2, None, -(2**31)):
        with refused(50000, "timeout_ms must be 0 or more"):
            one.acquire(name, timeout_ms=bad)
    position = one.acquire(name, lease_seconds=60).position
    for bad in (0, -1):
        with refused(50000, "lease_seconds must be from 0.1"):
            one.call("renew", name, position, lease_seconds=bad)
    assert one.call("renew", name, position) == 0
    one.release(name)
    for bad in (0, -1):
        with refused(50000, "limit of"):
            one.call("set_limit", name, bad)


@pytest.mark.parametrize(
    "text",
    [
        "EXEC {s}.acquire ?, @limit = N'three'",
        "EXEC {s}.acquire ?, @weight = N'heavy'",
        "EXEC {s}.acquire ?, @timeout_ms = N'soon'",
        "EXEC {s}.acquire ?, @lease_seconds = N'long'",
        "EXEC {s}.acquire ?, @limit = 99999999999",
        "EXEC {s}.acquire ?, @no_such_parameter = 1",
        "EXEC {s}.acquire",
        "EXEC {s}.renew ?",
        "EXEC {s}.release ?, N'x'",
    ],
)
def test_wrong_types(session, database, name, text):
    import pyodbc

    one = session()
    with pytest.raises(pyodbc.Error):
        one.rows(text, *([name] if "?" in text else []))
    assert one.rows("SELECT @@TRANCOUNT") == [(0,)]
    assert database.queue(name) == []


def test_the_longest_names(session, database, name):
    one = session()
    resource, who = (str(name) + "é" * 255)[:255], "w" * 255
    got = one.acquire(resource, requesting_id=who, note="n" * 1000)
    assert got.code == 0
    assert database.queue(name) == [(got.position, resource, who)]
    assert one.release(resource, got.position, who) == 0


@pytest.mark.parametrize(
    "text",
    [
        "'; DROP TABLE {s}.entry; --",
        "x'') ; EXEC {s}.reap; --",
        "]]; DELETE FROM {s}.member; --",
        "%_[a-z]{schema}{table}?@p",
        "日本語 🔒 naïve",
        "$(ESCAPE_NONE(JOBID))",
    ],
)
def test_what_looks_like_sql_is_text(session, connect, database, name, text):
    one, other = session(), session()
    text = text.replace("{s}", database.schema)
    resource = f"{name} {text}"
    got = one.acquire(resource, note=text, requesting_id=f"me {text}")
    assert got.code == 0
    (entry,) = connect().entries(resource)
    assert (entry.resource, entry.note, entry.requesting_id) == (resource, text, f"me {text}")
    assert other.acquire(resource, routine="try").code == -1
    assert one.call("renew", resource, got.position, f"me {text}") == 0
    assert one.release(resource, requesting_id=f"me {text}") == 0
    assert other.acquire(resource, routine="try").code == 0
    other.release(resource)


def test_names_differ_in_case(session, name):
    one, other = session(), session()
    assert one.acquire(name("a")).code == 0
    assert other.acquire(name("A"), routine="try").code == 0
    one.release(name("a"))
    other.release(name("A"))
