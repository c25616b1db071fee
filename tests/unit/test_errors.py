"""Errors keep their class, message and attributes when they are pickled, copied or raised again."""

import copy
import pickle

import pytest

import sqlsem
from sqlsem.engines.base import Busy, Disconnected

ERRORS = [
    sqlsem.SqlsemError,
    sqlsem.Timeout,
    sqlsem.LockLost,
    sqlsem.Deadlock,
    sqlsem.NotHeld,
    sqlsem.TaskFailed,
    sqlsem.BatchFailed,
    sqlsem.ConfigurationError,
    sqlsem.SchemaError,
    sqlsem.Unavailable,
    Busy,
    Disconnected,
]


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_errors_can_be_pickled(kind, protocol):
    error = kind("what happened to 'etl'; do this", resource="etl")
    back = pickle.loads(pickle.dumps(error, protocol))
    assert type(back) is kind
    assert (str(back), back.args, back.resource) == (str(error), error.args, "etl")


def test_attributes_of_errors():
    task = pickle.loads(pickle.dumps(sqlsem.TaskFailed("x", resource="q", task_id=7)))
    assert (task.resource, task.task_id) == ("q", 7)
    of_batch = pickle.loads(pickle.dumps(sqlsem.BatchFailed("x", resource="r", batch_id=3, failed={"a": "why"})))
    assert (of_batch.resource, of_batch.batch_id, of_batch.failed) == ("r", 3, {"a": "why"})


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_can_be_copied(kind):
    error = kind("text")
    for back in (copy.copy(error), copy.deepcopy(error)):
        assert (type(back), str(back), back.resource) == (kind, "text", None)


@pytest.mark.parametrize("kind", ERRORS)
def test_all_errors_share_a_base(kind):
    assert issubclass(kind, sqlsem.SqlsemError)
    assert str(kind()) == ""


@pytest.mark.parametrize(
    ("kind", "also"),
    [
        (sqlsem.Timeout, TimeoutError),
        (sqlsem.Deadlock, RuntimeError),
        (sqlsem.NotHeld, RuntimeError),
        (sqlsem.TaskFailed, RuntimeError),
        (sqlsem.BatchFailed, RuntimeError),
        (sqlsem.ConfigurationError, ValueError),
        (sqlsem.Unavailable, ConnectionError),
    ],
)
def test_errors_derive_from_pythons_errors(kind, also):
    assert issubclass(kind, also)
