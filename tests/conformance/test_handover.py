"""Locks that one client hands over and another adopts, with one owner at every moment."""

import itertools
import threading
import time

import pytest
from support import Channel, slack, until

import sqlsem
from sqlsem.engines.base import Busy
from sqlsem.values.errors import ConfigurationError, LockLost, NotHeld
from sqlsem.values.locks import Ticket

pytestmark = pytest.mark.faces("sync", "aio")


@pytest.fixture
def pair(connect):
    """Two coordinators, which the database takes for two processes."""
    return connect(), connect()


def adopt(coordinator, token, **options):
    return coordinator.adopt(token, **options)


def test_handover_keeps_the_position(database, pair, name):
    giver, taker = pair
    with giver.mutex(name, note="the load") as grant:
        token = grant.hand_over()
        (row,) = giver.admin.entries(name)
        assert (row.position, row.state, row.note) == (grant.position, "holds", "the load")
        assert row.owner.startswith("handed over by ")
        with pytest.raises(NotHeld, match="handed over"):
            grant.release()
        with pytest.raises(NotHeld, match="handed over"):
            grant.check()
    adopted = adopt(taker, token)
    assert (adopted.position, adopted.fence) == (grant.position, grant.fence)
    assert adopted.resource == name
    adopted.check()
    (after,) = giver.admin.entries(name)
    assert after.position == row.position
    assert after.member_id != row.member_id
    assert not after.owner.startswith("handed over")
    adopted.release()
    assert database.queue(name) == []


def test_handover_lets_no_waiter_in_between(pair, connect, name, threads):
    """A waiting client is granted when the adopter releases, not before."""
    giver, taker = pair
    third = connect()
    entered = threading.Event()

    def wait():
        with third.mutex(name):
            entered.set()

    with giver.mutex(name) as grant:
        threads.start(wait)
        assert not entered.wait(0.3)
        token = grant.hand_over()
    assert not entered.wait(0.5), "granted while the lock was in transit"
    adopted = adopt(taker, token)
    assert not entered.wait(0.5), "granted beside the adopter"
    adopted.release()
    assert entered.wait(slack(10))
    threads.join()


def test_waiters_of_the_givers_own_process_go_on(pair, name, threads):
    """Local waiters go on after a hand-over, although their own process never releases the lock."""
    giver, taker = pair
    order = []
    with giver.mutex(name) as grant:

        def wait():
            with giver.mutex(name):
                order.append("waiter")

        threads.start(wait)
        while len(giver.admin.entries(name)) < 2:
            time.sleep(0.01)
        token = grant.hand_over()
    adopted = adopt(taker, token)
    order.append("adopter")
    adopted.release()
    threads.join()
    assert order == ["adopter", "waiter"]


def test_a_token_can_be_used_once(pair, connect, name):
    giver, taker = pair
    with giver.mutex(name) as grant:
        token = grant.hand_over()
    adopted = adopt(taker, token)
    for other in (connect(), taker, giver):
        with pytest.raises(NotHeld, match=r"was used .* ago"):
            adopt(other, token)
    adopted.check()
    adopted.release()
    with pytest.raises(NotHeld, match=r"was used"):
        adopt(giver, token)


@pytest.mark.parametrize("token", ["", "sqlsem-" + "0" * 48, "x" * 201, "tök", "a\nb", None, 7])
def test_adopt_refuses_an_invalid_token(connect, name, token):
    with pytest.raises((NotHeld, ConfigurationError)) as raised:
        adopt(connect(), token)
    assert str(token) not in str(raised.value) or token == ""


def test_expired_token_frees_the_lock(database, pair, connect, name):
    giver, taker = pair
    with giver.mutex(name) as grant:
        token = grant.hand_over(ttl=1)
    # The lock is free once the token has expired, for waiters and for new requests.
    began = time.monotonic()
    with connect().mutex(name, timeout=slack(15)) as next_one:
        assert time.monotonic() - began < slack(6)
        assert next_one.fence > grant.fence
        with pytest.raises(NotHeld, match="Too late"):
            adopt(taker, token)
    outcomes = [past.outcome for past in giver.admin.history(name)]
    assert sorted(outcomes) == ["handed_over", "reaped", "released"]


def test_adopt_refuses_an_expired_unreaped_token(pair, name, database):
    giver, taker = pair
    with giver.mutex(name) as grant:
        token = grant.hand_over(ttl=1)
    time.sleep(1.2)
    with pytest.raises(NotHeld, match="Too late"):
        adopt(taker, token)
    with taker.mutex(name, timeout=slack(15)):  # the lock is free
        pass


@pytest.mark.parametrize("ttl", [0, 0.5, -1, "later", float("nan"), float("inf"), None])
def test_times_that_cannot_be(connect, name, ttl):
    with connect().mutex(name) as grant:
        with pytest.raises(ConfigurationError, match="ttl"):
            grant.hand_over(ttl=ttl)
        grant.check()


def test_group_is_handed_over_as_a_whole(database, pair, name):
    giver, taker = pair
    a, b, c = name("a"), name("b"), name("c")
    with sqlsem.all_of(giver.mutex(a), giver.limit(b, 3, weight=2), giver.read(c)) as grant:
        token = grant.hand_over()
    adopted = adopt(taker, token)
    assert adopted.positions == grant.positions
    shapes = [(row.access, row.limit, row.weight) for resource in (a, b, c) for row in giver.admin.entries(resource)]
    assert shapes == [("write", 1, 1), ("write", 3, 2), ("read", 1, 1)]
    adopted.release()
    assert all(giver.admin.entries(resource) == [] for resource in (a, b, c))


def test_a_reader_that_was_adopted_upgrades(pair, name):
    giver, taker = pair
    with giver.read(name) as grant:
        token = grant.hand_over()
    adopted = adopt(taker, token)
    adopted.upgrade(timeout=slack(10))
    assert not giver.mutex(name).acquire(blocking=False)
    adopted.downgrade()
    with giver.read(name, timeout=slack(10)):
        pass
    adopted.release()


def test_handover_of_reentrant_hold_is_refused(connect, name):
    lock = connect().mutex(name, reentrant=True)
    with lock as grant:
        with lock, pytest.raises(ConfigurationError, match="held 2 times"):
            grant.hand_over()
        grant.check()


def test_lock_passes_through_several_owners(pair, connect, name):
    """A lock passes through several owners: its fence stays, and each token is valid once."""
    giver, taker = pair
    with giver.mutex(name) as grant:
        token = grant.hand_over()
    tokens = {token}
    for adopter in (taker, giver, connect(), taker):
        adopted = adopt(adopter, token)
        assert adopted.fence == grant.fence
        token = adopted.hand_over()
        assert token not in tokens
        tokens.add(token)
    adopt(giver, token).release()


def test_giver_may_adopt_its_own_token(connect, name):
    coordinator = connect()
    with coordinator.mutex(name) as grant:
        token = grant.hand_over()
        again = adopt(coordinator, token)
        again.release()
    assert grant.fence == again.fence


def test_handover_to_another_login_is_refused(connect, name, engine_name):
    giver = connect()
    if engine_name == "memory":
        pytest.skip("one process has one login")
    with giver.mutex(name) as grant:
        if engine_name == "postgresql":
            with pytest.raises(ConfigurationError, match="no such login"):
                grant.hand_over(to="nobody-of-this-name")
            grant.check()
            return
        token = grant.hand_over(to="somebody-else")
    adopt(giver, token).release()  # (the giver's own login may adopt it)


@pytest.mark.parametrize("first", ["refused", "done"])
def test_handover_refused_after_expiry_loses_the_lock(connect, name, monkeypatch, first):
    """A refused hand-over after the expiry reports the lock as lost, and removes the row.

    The same holds if the row is in transit already because only the answer of a first attempt was lost.
    """
    giver, other = connect(), connect()
    lock = giver.mutex(name)
    lock.acquire()
    grant, session_class = lock.grant, type(giver.client.member.main.session)
    real, attempts = session_class.hand_over, []

    def refuse(session, *arguments):
        attempts.append(arguments)
        if first == "done":
            real(session, *arguments)
        else:
            until(lambda: grant.lost)
        raise Busy("somebody keeps its row")

    monkeypatch.setattr(session_class, "hand_over", refuse)
    with pytest.raises(LockLost):
        grant.hand_over(ttl=2)
    assert attempts
    with pytest.raises(LockLost):
        lock.release()
    with other.mutex(name, timeout=slack(10)):
        pass


def test_handover_refused_in_time_keeps_the_lock(connect, name, monkeypatch):
    giver, other = connect(retry=0), connect()
    with giver.mutex(name) as grant:
        session_class = type(giver.client.member.main.session)

        def refuse(session, *arguments):
            raise Busy("somebody keeps its row")

        monkeypatch.setattr(session_class, "hand_over", refuse)
        with pytest.raises(Busy):
            grant.hand_over(ttl=20)
        grant.check()
        assert not other.mutex(name).acquire(timeout=0)


@pytest.mark.engines("sqlite", "postgresql", "mssql")
def test_late_release_does_not_end_an_adopted_row(database, pair, name):
    """A late or repeated release by the giver must not end a row that another client has adopted."""
    giver, taker = pair
    with giver.mutex(name) as grant:
        (row,) = giver.admin.entries(name)
        old = Ticket(name, row.position, row.requesting_id, True)
        token = grant.hand_over()
        session = database.session()
        assert not session.release(old, "released")
        adopted = adopt(taker, token)
        assert not session.release(old, "released")
        session.close()
    adopted.check()
    adopted.release()


def test_revoke_in_transit_invalidates_the_token(database, pair, name):
    giver, taker = pair
    with giver.mutex(name) as grant:
        token = grant.hand_over()
    taker.admin.revoke(grant.position, force=True)
    with pytest.raises(NotHeld, match="Too late"):
        adopt(taker, token)
    with taker.mutex(name, timeout=slack(10)):
        pass


def test_handover_of_a_lost_lock_is_refused(connect, name):
    coordinator = connect()
    lock = coordinator.mutex(name)
    lock.acquire()
    grant = lock.grant
    coordinator.admin.revoke(grant.position, force=True)
    with pytest.raises(LockLost):
        grant.check()
    with pytest.raises(LockLost):
        grant.hand_over()
    with pytest.raises(LockLost):
        lock.release()


def test_concurrent_adopts_use_a_token_once(pair, connect, name, threads):
    giver = pair[0]
    takers = [connect() for _ in range(4)]
    for taker in takers:
        taker.admin.entries(name)
    with giver.mutex(name) as grant:
        token = grant.hand_over()
    grants, refused = [], []

    def try_it(taker):
        try:
            grants.append(adopt(taker, token))
        except NotHeld as exc:
            refused.append(str(exc))

    for taker in takers:
        threads.start(try_it, taker)
    threads.join()
    assert (len(grants), len(refused)) == (1, 3)
    grants[0].check()
    grants[0].release()


def test_adopted_grant_releases_after_its_block(pair, name, database):
    giver, taker = pair
    with giver.mutex(name) as grant:
        token = grant.hand_over()
    adopted = adopt(taker, token)
    with pytest.raises(ZeroDivisionError):
        with adopted:
            raise ZeroDivisionError
    assert database.queue(name) == []


# -- by real processes ----------------------------------------------------------------------------------------------


def carrier(channel: Channel, url, options, resource, grace=5.0):
    """A child process that acquires, adopts, hands over or releases on command, and reports each with its time."""
    coordinator = sqlsem.connect(url, **options, grace=grace)
    coordinator.admin.entries("none")
    channel.tell("ready")
    grant = None
    while (command := channel.ask())["do"] != "end":
        try:
            if command["do"] == "acquire":
                lock = coordinator.mutex(resource)
                assert lock.acquire(timeout=command.get("timeout", 60))
                grant = lock.grant
                channel.tell("in", fence=grant.fence)
            elif command["do"] == "adopt":
                grant = coordinator.adopt(command["token"])
                channel.tell("in", fence=grant.fence)
            elif command["do"] == "give":
                left_at = time.monotonic()
                token = grant.hand_over(ttl=command.get("ttl", 60))
                channel.tell("out", left=left_at, token=token)
            elif command["do"] == "release":
                left_at = time.monotonic()
                grant.release()
                channel.tell("out", left=left_at)
        except sqlsem.SqlsemError as exc:
            channel.tell("failed", error=type(exc).__name__, message=str(exc))
    coordinator.close()


@pytest.mark.faces("sync")
@pytest.mark.parametrize("step", ["giver after", "giver before", "taker after"])
def test_handover_survives_a_killed_process(spawn, connect, name, step, engine_name):
    """A lock in transit survives a kill -9 of the giver, and can be adopted.

    After a kill of the giver before the hand-over, or of the adopter, the lock is free within the grace.
    """
    giver, taker = (spawn(carrier, resource=name, grace=1.0) for _ in range(2))
    for child in (giver, taker):
        child.expect("ready")
    fence = giver.call("in", do="acquire")["fence"]
    if step == "giver before":
        giver.kill()
    else:
        token = giver.call("out", do="give")["token"]
        if step == "giver after":
            giver.kill()
            time.sleep(1.5)  # longer than the grace: the giver's death must not end the transit
        assert taker.call("in", do="adopt", token=token)["fence"] == fence
        if step == "taker after":
            taker.kill()
        else:
            taker.call("out", do="release")
    with connect(grace=1.0).mutex(name, timeout=slack(30)) as grant:
        assert grant.fence > fence


@pytest.mark.faces("sync")
def test_handover_history_has_a_single_owner(spawn, connect, database, name):
    """The history of a lock that passes through many processes, some of them killed, while others compete for it.

    No two owners overlap, and no fence is used by two at a time.
    """
    children = [spawn(carrier, resource=name) for _ in range(4)]
    for child in children:
        child.expect("ready")
    held = []  # (from, to, fence)
    hands = itertools.cycle(children)
    children[3].send(do="acquire")
    competitor_in = None
    inside = children[3].expect("in")
    current = children[3]
    others = [child for child in children if child is not current]
    rival = others.pop()
    rival.send(do="acquire")
    hands = itertools.cycle([*others, current])
    for _ in range(12):
        out = current.call("out", do="give")
        held.append((inside["at"], out["left"], inside["fence"]))
        nxt = next(hands)
        current, inside = nxt, nxt.call("in", do="adopt", token=out["token"])
        assert inside["fence"] == held[-1][2]
    killed = current.kill()
    held.append((inside["at"], killed, inside["fence"]))
    competitor_in = rival.expect("in")
    held.append((competitor_in["at"], rival.call("out", do="release")["left"], competitor_in["fence"]))
    for (_, to, _), (since, _, _) in itertools.pairwise(sorted(held)):
        assert to <= since, "two were inside at one moment"
    assert [fence for *_, fence in held] == sorted(fence for *_, fence in held)
    assert len({fence for *_, fence in held}) == 2
    from sqlsem.insight.audit import audit

    coordinator = connect()
    past = coordinator.admin.history(name)
    assert not audit(past, []).findings
    assert sum(row.outcome == "handed_over" for row in past) == 12
