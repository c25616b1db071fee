"""Why a request waits, as SQL tells it: the same as Python does."""

import pytest
from support import Attempt, until

from sqlsem.insight.reasons import reasons

pytestmark = pytest.mark.engines("postgresql", "mssql")


def told(database, position):
    """The codes, and the rows behind which it stands."""
    if database.engine == "mssql":
        rows = database.rows(f"EXEC {database.schema}.why ?", position)
    else:
        rows = database.rows("SELECT * FROM sqlsem.why(?)", position)
    return {row[0] for row in rows}, [row[2] for row in rows if row[2] is not None], rows


def compare(database, coordinator, name):
    """Of all who wait under such names: what SQL tells is what Python does; their codes."""
    found = coordinator.overview()
    mine = [one for one in found.entries if one.resource.startswith(name)]
    codes = []
    for one in mine:
        reason = reasons(found, only=one.position).get(one.position)
        code, behind, rows = told(database, one.position)
        if reason is None:
            assert code == {one.state}
            continue
        assert code == {reason.code}
        if reason.code == "own_earlier":
            assert set(behind) <= {other.position for other in reason.behind}
        else:
            assert behind == [other.position for other in reason.behind]
        assert rows[0][1]
        codes.append(reason.code)
    return codes


@pytest.fixture
def waiting(database, name):
    made = []

    def start(lock):
        before = len(database.queue(name))
        made.append(Attempt(lock))
        until(lambda: len(database.queue(name)) > before, "the request in the queue")

    yield start
    for one in made:
        one.granted()
        one.leave()


def test_limits_and_operators(database, connect, name, waiting):
    one, other = connect(), connect()
    with one.limit(name, 3, note="a"), one.limit(name, 3, weight=2):
        waiting(other.limit(name, 3, weight=2))
        waiting(other.limit(name, 5))
        waiting(other.mutex(name))
        assert compare(database, one, name) == ["limit"] * 3
        one.set_limit(name, 1)
        assert compare(database, one, name) == ["limit"] * 3
        one.pause(name)
        assert compare(database, one, name) == ["paused"] * 3
        _, _, rows = told(database, database.queue(name)[2][0])
        assert rows[0][1].startswith("the resource is paused by ")
        one.resume(name)
        one.set_limit(name, None)
    with one.limit(name("c"), 3, note="b"):
        one.set_limit(name("c"), 1)
        waiting(other.limit(name("c"), 3))
        waiting(other.limit(name("c"), 3, weight=2))
        assert compare(database, one, name("c")) == ["cap", "limit"]
        _, _, rows = told(database, database.queue(name("c"))[1][0])
        assert "cap of 1" in rows[0][1]
        assert rows[0][7] == "b"
        one.set_limit(name("c"), None)


def test_readers_writers_and_stages(database, connect, name, waiting):
    one, other = connect(), connect()
    with one.read(name), one.stage(name("s"), 100):
        waiting(other.write(name))
        waiting(other.read(name))
        waiting(other.stage(name("s"), 200))
        assert compare(database, one, name) == ["readers_ahead", "writer_ahead", "stage"]


def test_where_it_goes_on(database, connect, name, waiting):
    one, other, third = connect(), connect(), connect()
    with one.mutex(name("a")):
        waiting(other.all_of(other.mutex(name("b")), other.mutex(name("a"))))
        waiting(third.mutex(name("b")))
        late = database.queue(name)[-1][0]
        (row,) = told(database, late)[2]
        entries = {entry.position: entry for entry in one.entries()}
        assert entries[row[2]].resource == name("b")
        assert entries[row[9]].resource == name("a")
        (row,) = told(database, row[9])[2]
        assert row[9] is None, "the head waits for nobody"


def test_one_that_is_not_there(database):
    assert told(database, 10**12)[2] == []
