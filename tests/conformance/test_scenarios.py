"""The control table's scenarios, with real processes. (`faults/test_kill` has those in which one is killed.)"""

import pytest
from support import Stay, check_history, overlap, session, until


def stay(granted, released, **kind):
    name, position = next(iter(granted["positions"].items()))
    return Stay(name, position, granted["at"], released["left"], **kind)


pytestmark = [pytest.mark.faces("sync", "aio"), pytest.mark.quiet]


@pytest.fixture
def sessions(spawn, face):
    """``sessions(3)`` starts three processes that await commands."""

    def start(number, **arguments):
        children = [spawn(session, face=face, **arguments) for _ in range(number)]
        for child in children:
            child.expect("ready")
        return children

    return start


def waiting(database, name, number):
    until(lambda: len(database.queue(name)) == number, f"{number} rows in the queue")


def finish(*children):
    for child in children:
        child.send(do="end")
    for child in children:
        child.rest()


def test_two_sessions_take_turns(sessions, database, name):
    children = sessions(2)
    for child in children:
        child.send(do="work", lock={"kind": "mutex", "name": name}, seconds=0.3)
    stays = [stay(child.expect("granted"), child.expect("released")) for child in children]
    first, second = sorted(stays, key=lambda holding: holding.position)
    check_history(stays)
    assert second.entered >= first.left
    assert second.entered - first.left < 10
    finish(*children)
    assert database.queue(name) == []


def test_six_sessions_three_at_a_time(sessions, database, name):
    children = sessions(6)
    lock = {"kind": "limit", "name": name, "limit": 3}
    granted = {}
    for number, child in enumerate(children, 1):
        child.send(do="acquire", lock=lock)
        waiting(database, name, number)
    for child in children[:3]:
        granted[child] = child.expect("granted")
    assert all(child.quiet(0.1) for child in children[3:])
    stays = []
    for place, child in enumerate(children):
        stays.append(stay(granted[child], child.call("released", do="release"), limit=3))
        if place < 3:
            granted[children[place + 3]] = children[place + 3].expect("granted")
            assert all(other.quiet(0.05) for other in children[place + 4 :])
    assert [holding.position for holding in stays] == sorted(holding.position for holding in stays)
    check_history(stays)
    assert overlap(stays) == 3
    finish(*children)


def test_readers_and_a_writer(sessions, database, name):
    reader_1, reader_2, writer, reader_3 = children = sessions(4)
    read, write = {"kind": "read", "name": name}, {"kind": "write", "name": name}
    entries, stays = {}, []

    def leave(child, **kind):
        stays.append(stay(entries[child], child.call("released", do="release"), **kind))

    for child in (reader_1, reader_2):
        entries[child] = child.call("granted", do="acquire", lock=read)  # both readers hold at the same time
    writer.send(do="acquire", lock=write)
    waiting(database, name, 3)
    reader_3.send(do="acquire", lock=read)
    waiting(database, name, 4)
    leave(reader_1, access="read")
    assert writer.quiet(0.2)
    assert reader_3.quiet(0.0001), "a reader overtook the writer that waits"
    leave(reader_2, access="read")
    entries[writer] = writer.expect("granted")
    assert reader_3.quiet(0.2)
    leave(writer)
    entries[reader_3] = reader_3.expect("granted")
    leave(reader_3, access="read")
    check_history(stays)
    assert overlap(stays) == 2
    finish(*children)
