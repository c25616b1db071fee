"""Bad arguments are refused with a message, without an effect; SQL in arguments is only text."""

import json

import pytest

pytestmark = pytest.mark.engines("postgresql", "mssql")

BAD_NAMES = [
    (None, "is NULL"),
    ("", "is empty"),
    (" x", "white space"),
    ("x ", "white space"),
    (" ", "white space"),
    ("\tetl", "white space|control character"),
    ("e\x01tl", "control character"),
    ("a\tb", "control character"),
    ("a\x7fb", "control character"),
    ("x" * 256, "256 characters|more than 255"),
]
BAD_REQUESTS = [
    ({"limit": 0}, "limit on"),
    ({"limit": -1}, "limit on"),
    ({"limit": 2, "weight": 3}, "weight on"),
    ({"limit": 2, "weight": 0}, "weight on"),
    ({"limit": 2, "weight": None}, "weight on"),
    ({"weight": 2}, "weight on"),
    ({"access": "exclusive"}, "access is 'exclusive'; it must be write, read or stage"),
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
    ({"requesting_id": " me"}, "requesting_id .*begins"),
    ({"requesting_id": "m" * 256}, "256 characters|more than 255"),
]


@pytest.mark.parametrize("routine", ["acquire", "try", "release", "renew", "set_limit", "pause", "resume"])
def test_bad_names(session, refused, routine):
    connection = session()
    more = {"renew": (1,), "set_limit": (1,)}.get(routine, ())
    for bad, words in BAD_NAMES:
        with refused("22023", 50000, words):
            if routine in ("acquire", "try"):
                connection.acquire(bad, routine=routine)
            else:
                connection.call(routine, bad, *more)


RESERVED = [
    ("rate:{}", "take from the rate"),
    ("once:{}", "once_begin"),
    ("priority:{}", "acquire the resource itself"),
    ("tasks:{}", "choose another name"),
    ("{}:*", "is a pattern of names"),
]


@pytest.mark.parametrize("routine", ["acquire", "try"])
def test_reserved_names(session, connect, refused, name, routine):
    """Queues of rates, of runs and of priorities belong to sqlsem; its own routines use them."""
    connection, coordinator = session(), connect()
    for form, words in RESERVED:
        reserved = form.format(name)
        with refused("22023", 50000, words):
            connection.acquire(reserved, routine=routine)
        assert coordinator.admin.entries(reserved) == []
        coordinator.admin.pause(reserved)  # operators may still manage them
        coordinator.admin.resume(reserved)
    for free in (f"{name}:x", f"rates:{name}", f"{name}*x"):
        assert connection.acquire(free, routine=routine)[0] == 0
        assert connection.call("release", free) == 0
    code, position, _ = connection.acquire(name, routine="once_begin", per_seconds=3600.0)
    assert (code, connection.call("once_finish", name, position)) == (0, 0)


def test_bare_row_of_a_reserved_name_is_refused(session, database, refused, name):
    connection = session()
    for form, words in RESERVED:
        reserved = form.format(name)
        with refused("22023", 50000, words):
            connection.rows(
                f"INSERT INTO {database.schema}.ProcessControl (resource_id, requesting_id) VALUES (?, ?)",
                reserved,
                "me",
            )
        assert database.queue(name) == []


def test_task_lock_of_a_reserved_name_is_refused(session, refused, name):
    connection = session()
    for form, words in RESERVED:
        locks = json.dumps([{"resource": form.format(name), "access": "write", "limit": 1}])
        with refused("22023", 50000, words):
            if connection.tsql:
                connection.rows(f"EXEC {connection.database.schema}.check_locks ?", locks)
            else:
                connection.rows(f"SELECT {connection.database.schema}.check_locks(CAST(? AS jsonb))", locks)


@pytest.mark.parametrize("routine", ["acquire", "try"])
def test_bad_requests(session, database, refused, name, routine):
    connection = session()
    for named, words in BAD_REQUESTS:
        with refused("22023", 50000, words):
            connection.acquire(name, routine=routine, **named)
    with refused("22023", 50008, "no limit is set for"):
        connection.acquire(name, routine=routine, limit=None)
    assert database.queue(name) == []
    assert connection.acquire(name, routine=routine)[0] == 0
    assert connection.call("release", name) == 0


def test_bad_times(session, refused, name):
    connection = session()
    for bad in (-2, None, -(2**31)):
        with refused("22023", 50000, "timeout_ms must be 0 or more.* not (NULL|-2)"):
            connection.acquire(name, timeout_ms=bad)
    _, position, _ = connection.acquire(name, lease_seconds=60)
    for bad in (0, -1):
        with refused("22023", 50000, "lease_seconds must be from 0.1"):
            connection.call("renew", name, position, None, bad)
    assert connection.call("renew", name, position) == 0
    assert connection.call("release", name) == 0
    for bad in (0, -1):
        with refused("22023", 50000, "limit of .* must be 1 or more, or NULL for none"):
            connection.call("set_limit", name, bad)


def test_the_longest_names(session, database, name):
    connection = session()
    resource, requester = (str(name) + "é" * 255)[:255], "w" * 255
    code, position, _ = connection.acquire(resource, requesting_id=requester, note="n" * 1000)
    assert code == 0
    assert database.queue(name) == [(position, resource, requester)]
    assert connection.call("release", resource, position, requester) == 0


@pytest.mark.parametrize(
    "text",
    [
        "'; DROP TABLE {s}.setting; --",
        "'); DROP SCHEMA {s} CASCADE; --",
        "x'') ; EXEC {s}.reap; --",
        "]]; DELETE FROM {s}.member; --",
        "%_[a-z]{schema}{table}?@p",
        "日本語 🔒 naïve",
        "$(ESCAPE_NONE(JOBID))",
    ],
)
def test_sql_in_arguments_is_text(session, connect, database, name, text):
    first, other = session(), session()
    text = text.replace("{s}", database.schema)
    resource = f"{name} {text}"
    code, position, _ = first.acquire(resource, note=text, requesting_id=f"me {text}")
    assert code == 0
    (entry,) = connect().admin.entries(resource)
    assert (entry.resource, entry.note, entry.requesting_id) == (resource, text, f"me {text}")
    assert other.acquire(resource, routine="try")[0] == -1
    assert first.call("renew", resource, position, f"me {text}") == 0
    assert first.call("release", resource, None, f"me {text}") == 0
    assert other.acquire(resource, routine="try")[0] == 0
    assert other.call("release", resource) == 0


def test_names_differ_in_case(session, name):
    first, other = session(), session()
    assert first.acquire(name("a"))[0] == 0
    assert other.acquire(name("A"), routine="try")[0] == 0
    assert first.call("release", name("a")) == 0
    assert other.call("release", name("A")) == 0
