"""Unique tasks, and tasks that replace another one."""

import threading

import pytest

import sqlsem
from sqlsem.api.admin import Admin
from sqlsem.tasks import Json


@pytest.fixture
def queue(connect, name):
    return connect().queue(name)


def states(queue):
    return {entry.task_id: entry.status for entry in queue.tasks(maximum=1000)}


def test_open_task_with_key_is_not_put_again(connect, queue, name):
    number = queue.put(Json("report"), unique="report")
    assert queue.put(Json("report"), unique="report", order=-5) == number
    other = queue.put(Json("x"), unique="Report")
    elsewhere = connect().queue(name("b")).put(Json("report"), unique="report")
    assert len({number, other, elsewhere}) == 3, "keys are told apart exactly, and by queue"
    (entry,) = [task_row for task_row in queue.tasks() if task_row.task_id == number]
    assert (entry.unique, entry.order) == ("report", 0)
    task = queue.try_claim()
    assert task.id == number
    assert queue.put(Json("report"), unique="report") == number, "while it runs, too"
    task.finish()
    again = queue.put(Json("report"), unique="report")
    assert again not in (number, other, elsewhere)
    assert queue.put(Json("without")) not in (number, again)


def test_failed_task_that_blocks_its_key_is_open(queue):
    number = queue.put(1, unique="x")
    queue.try_claim().fail("no")
    assert queue.put(1, unique="x") == number
    ended = queue.put(1, unique="y", on_failure="continue", order=-1)
    queue.try_claim().fail("no")
    assert queue.put(1, unique="y") != ended


def test_later_task_replaces_the_earlier(queue):
    first = queue.put(Json("old"), replace="index", order=3)
    before = queue.put(Json("other"))
    second = queue.put(Json("new"), replace="index", note="again")
    assert states(queue) == {first: "cancelled", before: "pending", second: "pending"}
    (replaced,) = queue.tasks("cancelled")
    assert replaced.error == f"replaced by task {second}"
    other = queue.try_claim()  # keeps a reference: a dropped task may be returned
    assert other.body == "other", "it takes the key, not the place in the queue"
    task = queue.try_claim()
    assert task.id == second
    third = queue.put(Json("newer"), replace="index")
    assert states(queue)[second] == "running", "a running task is not replaced"
    assert queue.put(Json("newer"), unique="index") == third
    task.finish()
    fourth = queue.put(Json("newest"), replace="index")
    assert (states(queue)[third], states(queue)[fourth]) == ("cancelled", "pending")
    queue.try_claim().fail("no")
    fifth = queue.put(Json("the last"), replace="index")
    assert (states(queue)[fourth], states(queue)[fifth]) == ("cancelled", "pending")
    assert queue.state().failed is None


def test_retry_does_not_duplicate_a_key(queue):
    number = queue.put(1, unique="x")
    operators = Admin(queue.claiming.client)
    operators.cancel_task(number)
    other = queue.put(2, unique="x")
    with pytest.raises(sqlsem.NotHeld, match=f"Cannot retry task {number}: another task with its key is open"):
        operators.retry_task(number)
    operators.cancel_task(other)
    operators.retry_task(number)
    assert states(queue) == {number: "pending", other: "cancelled"}


def test_put_repeated_after_a_lost_answer_adds_no_task(queue):
    """A repeated put finds the task of the first call, and does not replace it."""
    from sqlsem.values.tasks import NewTask

    client = queue.claiming.client
    queue.put(0, replace="k")
    task = [NewTask("json", "1", replace="k")]
    call = lambda session, _: session.put_tasks(queue.name, "uid-of-" + queue.name, task)  # noqa: E731
    first = client.member.call("put", call)
    assert client.member.call("put", call) == first
    assert sorted(states(queue).values()) == ["cancelled", "pending"]


@pytest.mark.parametrize("option", ["unique", "replace"])
def test_concurrent_puts_keep_a_single_open_task(connect, name, threads, option):
    """After many concurrent puts one task is open, and each put has returned a task's number."""
    coordinators = [connect() for _ in range(4)]
    numbers, start = [], threading.Barrier(4)

    def put(coordinator):
        queue = coordinator.queue(name)
        start.wait(30)
        for _ in range(10):
            numbers.append(queue.put(Json("x"), **{option: "k"}))

    for coordinator in coordinators:
        threads.start(put, coordinator)
    threads.join()
    status_of = states(coordinators[0].queue(name))
    assert set(numbers) == set(status_of)
    assert len(numbers) == 40
    if option == "unique":
        assert status_of == {numbers[0]: "pending"}
    else:
        assert sorted(status_of.values()) == ["cancelled"] * 39 + ["pending"]
        assert status_of[max(numbers)] == "pending"


def test_invalid_key_is_refused(queue):
    for options, words in (
        ({"unique": ""}, r"The key \(unique\) is empty"),
        ({"replace": "a\nb"}, "control character"),
        ({"unique": "x" * 300}, "at most 255"),
        ({"unique": 5}, "must be a string"),
        ({"unique": "a", "replace": "a"}, "not both"),
    ):
        with pytest.raises(sqlsem.ConfigurationError, match=words):
            queue.put(1, **options)
    with pytest.raises(sqlsem.ConfigurationError, match="these are 2"):
        queue.put_many([1, 2], unique="x")
    assert queue.put_many([], unique="x") == []
    assert queue.tasks() == []
