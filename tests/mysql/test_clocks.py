"""The nodes of a cluster have clocks of their own. Here each session stands for a client of another node, and its time
is set by the test.
"""

import contextlib
import itertools
import secrets
import threading

import pytest

from sqlsem.engines.mysql.connection import CLUSTER_MARGIN
from sqlsem.values.locks import Request
from sqlsem.values.rates import RateRequest, RateStatus, Window

pytestmark = pytest.mark.engines("mysql")

NOW, LEASE = 1_800_000_000.0, 6.0
#: The seconds that the clock of the second node is ahead.
AHEAD = (0.4, CLUSTER_MARGIN)


class Node:
    """A session on a node of a cluster. Its clock is ``ahead`` seconds ahead of the real time."""

    def __init__(self, database, ahead):
        self.session, self.ahead = database.session(lease=LEASE), ahead
        self.session.clock_margin = CLUSTER_MARGIN

    def at(self, seconds):
        """Set the time, in real seconds since the test began."""
        self.session.execute_text(f"SET TIMESTAMP = {NOW + seconds + self.ahead:.6f}")
        return self.session


@pytest.fixture(params=AHEAD)
def nodes(database, request):
    with contextlib.ExitStack() as stack:
        nodes = [Node(database, ahead) for ahead in (0.0, request.param)]
        for node in nodes:
            stack.callback(node.session.close)
        yield nodes


def most_in_a_window(times, seconds):
    """Return the largest number of times within a window that begins with one of them."""
    return max(sum(start <= other < start + seconds for other in times) for start in times)


@pytest.mark.parametrize("burst", [None, 2])
def test_rate_holds_for_requests_of_both_nodes(nodes, name, burst):
    """Requests go to the nodes in turn, ten a second to each. The first node's clock would free the use that the second
    one has recorded, and the second one's clock that of the first.
    """
    request = RateRequest(name, (Window(1000, 3),), burst=burst)
    taken = []
    for step, node in zip(range(100), itertools.cycle(nodes), strict=False):
        answer = node.at(step * 0.05).take_rate(request, None)
        if answer.status is RateStatus.TAKEN:
            taken.append((step * 0.05, answer.times[0] / 1000))
    by_the_database = [at for _, at in taken]
    assert by_the_database == sorted(by_the_database)
    assert most_in_a_window(by_the_database, 1) <= 3
    # (By the real time the first window may end early, as the second node's clock is ahead.)
    assert most_in_a_window([at for at, _ in taken if at >= 1], 1) <= 3
    assert len(taken) >= 0.5 * 3 * 5, "requests are granted all the time"


def test_rate_of_starts_holds_for_claims_on_both_nodes(nodes, name):
    nodes[0].session.set_queue(name, None, "rate", 3, 1000)
    started = []
    for step, node in zip(range(100), itertools.cycle(nodes), strict=False):
        session = node.at(step * 0.05)
        with session.transaction():
            if session.may_start(name, "", start=True):
                started.append(step * 0.05)
    assert most_in_a_window([at for at in started if at >= 1], 1) <= 3
    assert len(started) >= 0.5 * 3 * 5
    nodes[0].session.set_queue(name, None, "rate", None)


def test_rate_goes_on_when_a_clock_was_set_back(nodes, name):
    """A node whose clock is ahead by more than the margin, and is set right, stops nothing."""
    request, node = RateRequest(name, (Window(1000, 1),)), nodes[0]
    answers = [node.at(at).take_rate(request, None) for at in (3600.0, 0.0, 1.1)]
    assert [answer.status for answer in answers] == [RateStatus.TAKEN, RateStatus.TOO_EARLY, RateStatus.TAKEN]
    assert answers[1].seconds < 1.1


def test_period_is_run_once_on_both_nodes(nodes, name):
    resource, runs = f"once:{name}", []
    members = [node.session.register_member("host", 1, "program") for node in nodes]
    for step in range(60):
        node, member = nodes[step % 2], members[step % 2]
        session = node.at(step * 0.1)
        (ticket,) = session.register(member, "owner", "owner", f"{step}", [Request(resource)], True)
        assert ticket.granted
        if session.once_due(name, ticket, 2000, 0):
            runs.append(int((NOW + step * 0.1 + node.ahead) // 2))
            assert session.mark_once(name, ticket)
        session.release(ticket, "released")
    assert runs == sorted(set(runs))
    assert len(runs) >= 3
    nodes[0].session.once_forget(name)
    for node, member in zip(nodes, members, strict=True):
        node.session.deregister_member(member)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["to the clock ahead", "to the clock behind"])
def test_lease_of_a_grant_lasts_as_its_owner_expects(nodes, name, order):
    """The owner renews its lease on one node, and is granted a lock on another one. From the beginning of that call on
    it relies on seven eighths of its lease.
    """
    first, second = (nodes[number] for number in order)
    latest = max(node.ahead for node in nodes)
    for tenths in range(0, 45, 3):
        member = first.at(0).register_member("host", 1, "program")
        granting = second.at(tenths / 10)
        (ticket,) = granting.register(member, "owner", "owner", f"{tenths}", [Request(name)], False)
        assert ticket.granted
        until = granting.row("member", (member,))["lease_until"] - NOW - latest  # in real seconds, by the fastest clock
        assert until - tenths / 10 >= LEASE * 7 / 8 - 1e-4, tenths
        granting.deregister_member(member)


def test_revoked_row_keeps_its_grace_on_each_node(nodes, name):
    behind, ahead = nodes
    member = behind.at(0).register_member("host", 1, "program")
    other = ahead.at(0).register_member("host", 2, "program")
    (ticket,) = behind.session.register(member, "owner", "owner", "a", [Request(name)], False)
    assert behind.session.revoke(ticket.position, False) == 1
    grace = behind.session.row("member", (member,))["grace_ms"] / 1000
    behind.session.execute_text(f"UPDATE sqlsem_member SET lease_until = {NOW + 1000}")
    for seconds in (0.0, grace - 0.1):
        assert not ahead.at(seconds).check_owner(name, ticket.position, member)
    assert ahead.at(grace + CLUSTER_MARGIN + 0.1).check_owner(name, ticket.position, member)
    for session, number in ((behind.session, member), (ahead.session, other)):
        session.deregister_member(number)
    assert behind.at(0).wait(ticket, 0, threading.Event()) is None


def test_handed_over_lock_waits_for_its_whole_time(nodes, name):
    behind, ahead = nodes
    member = behind.at(0).register_member("host", 1, "program")
    tickets = behind.session.register(member, "owner", "owner", "a", [Request(name)], False)
    token = secrets.token_hex(16)
    assert behind.session.hand_over(member, tickets, token, 3.0, None)
    other = ahead.at(0).register_member("host", 2, "program")
    request = Request(name)
    assert not ahead.at(2.9).check_blockers(request, tickets[0].position + 1, other)
    assert ahead.at(3.1 + CLUSTER_MARGIN).check_blockers(request, tickets[0].position + 1, other)
    for session, number in ((behind.session, member), (ahead.session, other)):
        session.deregister_member(number)
