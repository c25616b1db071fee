"""Fixtures of several files.

attempt      ``attempt(lock)`` starts a thread that acquires the lock, and returns its `support.Attempt` once its
             ``rows`` are in the ``queue`` (left out, that of the test's resources). All of them leave in the end
queue        a work queue of the test; in the end it has no limits, weights or rates
session      ``session()`` opens a session of the engine; the end closes it without deregistering its member, as a
             crash does
member       ``member()`` opens such a session, and returns it with the number of a member that it registered
transaction  ``transaction()`` returns a cursor with an open transaction on the same database
"""

import contextlib

import pytest
from support import Attempt, until


@pytest.fixture
def attempt(database, name):
    attempts = []

    def start(lock, rows=1, queue=name, **options):
        before = len(database.queue(queue))
        attempts.append(Attempt(lock, **options))
        until(lambda: len(database.queue(queue)) >= before + rows or attempts[-1].settled, "the request in the queue")
        return attempts[-1]

    yield start
    for started in attempts:
        if started.inside:
            started.leave()


@pytest.fixture
def queue(connect, name, database):
    # (A long grace for an engine that compiles routines at their first run.)
    work_queue = (connect(grace=30) if database.engine == "mssql" else connect()).queue(name)
    yield work_queue
    for limit in work_queue.limits():
        if limit.task_key is not None:
            work_queue.set_limit(None, key=limit.task_key)
            work_queue.set_rate(None, key=limit.task_key)
            work_queue.set_weight(limit.task_key, None)
    work_queue.set_limit(None)
    work_queue.set_key_limit(None)
    work_queue.set_rate(None)
    work_queue.set_key_rate(None)


@pytest.fixture
def session(database):
    with contextlib.ExitStack() as stack:

        def start(**options):
            return stack.enter_context(contextlib.closing(database.session(**options)))

        yield start


@pytest.fixture
def member(session):
    def start(**options):
        connection = session(**options)
        return connection, connection.register_member("host", 1, "test")

    return start


@pytest.fixture
def transaction(writer):
    return lambda: writer().cursor()
