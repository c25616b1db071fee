"""Thousands of tasks of one process wait on one resource: each is granted once, none polls meanwhile, and the two
thousandth costs no more than the hundredth.
"""

import asyncio
import time

import pytest
from support import PATIENCE

FEW, MANY = 100, 2000


@pytest.mark.engines("sqlite", "postgresql")
@pytest.mark.timeout(600)
def test_two_thousand_tasks_on_a_single_resource(connect, database, name, monkeypatch):
    holder, coordinator = connect(grace=60), connect(grace=60)
    coordinator.mutex(name("connects")).acquire()
    session, client = coordinator.client.member.main.session, coordinator.client
    polls = []
    look, wait = session.poll, session.wait
    monkeypatch.setattr(session, "poll", lambda me, tickets: polls.append(len(tickets)) or look(me, tickets))
    monkeypatch.setattr(session, "wait", lambda *of: polls.append(1) or wait(*of))

    async def main(number, resource, grant):
        inside, order = 0, []

        async def enter():
            nonlocal inside
            async with coordinator.mutex(resource) as task_grant:
                inside += 1
                assert inside == 1
                order.append(task_grant.position)
                inside -= 1

        tasks = [asyncio.create_task(enter()) for _ in range(number)]
        while len(client.waiter_queues.waiters()) < number:
            await asyncio.sleep(0.02)
        polls.clear()
        await asyncio.sleep(1)
        idle = len(polls)
        began = time.process_time()
        await asyncio.to_thread(grant.release)
        await asyncio.wait_for(asyncio.gather(*tasks), 10 * PATIENCE)
        took = time.process_time() - began
        assert order == sorted(order)
        assert len(order) == number
        assert idle == 0, "a waiter behind another waiter of its process sends no statement"
        assert sum(polls) <= number + 10, "one short look for each hand-over at the most"
        return took / number

    costs = {}
    for number in (FEW, MANY):
        lock = holder.mutex(name(number))
        assert lock.acquire()
        costs[number] = asyncio.run(main(number, str(name(number)), lock.grant))
    assert costs[MANY] < 5 * costs[FEW], costs  # code that visits all of them would cost twenty times as much
    assert database.queue(name(MANY)) == []
