"""Airflow 3: operators that wait for their lock in the triggerer, where a waiting task costs no worker slot.

The triggerer asks for the lock. Once granted, it hands the lock, with its position, over to the worker that resumes the
task (`sqlsem.Grant.hand_over`), so no other request is granted in between. Workers and triggerers find the database by
``$SQLSEM_URL``, or another way that `sqlsem.configure` describes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from typing import Any

from airflow.sdk import BaseOperator
from airflow.triggers.base import BaseTrigger, TriggerEvent

import sqlsem
from sqlsem import aio
from sqlsem.client.operations.terms import RequestTemplate, Terms
from sqlsem.values.errors import ConfigurationError, NotHeld
from sqlsem.values.locks import Duration, Request, check_duration

__all__ = ["LockTrigger", "Locked"]


class Locked(BaseOperator):
    """A mixin before an operator's class: the operator runs under a lock, and waits for it in the triggerer.

    A free lock is acquired at once, without the triggerer. The lock is held for each try of the task. Its ``timeout``
    limits the wait: after it, Airflow fails the task as it does any deferred task. Without a note, the lock has the
    names of the task and its run, for ``sqlsem ls``. The mixin is for operators that do their work in ``execute``; an
    operator that defers itself would release the lock when it does.

    Args:
        lock: The lock: `sqlsem.limit`, `sqlsem.mutex`, `sqlsem.all_of` …, of the default database.
        handover_ttl: How long the lock waits for a worker that resumes the task. If the worker takes longer, the task
            requests the lock again, at the end of the queue.
        handover_to: The login of the workers in the database; left out, that of the triggerer.
        kwargs: The operator's own arguments.

    Raises `sqlsem.ConfigurationError` for a lock of a coordinator (the triggerer does not know its database), or with a
    computed name.

    >>> class LockedBash(Locked, BashOperator):  # doctest: +SKIP
    ...     pass
    >>> LockedBash(task_id="load", lock=sqlsem.limit("warehouse", 3), bash_command="load.sh")  # doctest: +SKIP
    """

    def __init__(
        self, *, lock: sqlsem.Lock, handover_ttl: Duration = "15m", handover_to: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if lock.terms.given_client is not None:
            raise ConfigurationError(
                f"{lock!r} is of a coordinator, and the triggerer would not know its database; make it by "
                f"sqlsem.limit, sqlsem.mutex …, and set $SQLSEM_URL for workers and triggerers"
            )
        self.lock = lock
        self.requests = tuple(lock.terms.requests)
        self.handover_ttl = check_duration("handover_ttl", handover_ttl)
        self.handover_to = handover_to

    def execute(self, context: Any) -> Any:
        """Do the operator's work under the lock, now or when the triggerer has it."""
        if self.lock.acquire(blocking=False):
            with self.lock.grant:
                return super().execute(context)
        task = context["ti"]
        note = f"{task.dag_id}/{task.task_id} {task.run_id}"
        trigger = LockTrigger(
            [asdict(request if request.note is not None else replace(request, note=note)) for request in self.requests],
            ttl=self.handover_ttl,
            to=self.handover_to,
        )
        return self.defer(trigger=trigger, method_name="execute_locked", timeout=self.lock.terms.timeout)

    def execute_locked(self, context: Any, event: dict[str, str]) -> Any:
        """Resume with the lock that the triggerer has handed over."""
        try:
            grant = sqlsem.adopt(event["token"])
        except NotHeld as exc:
            self.log.warning("The lock can no longer be adopted, and is requested again: %s", exc)
            return self.execute(context)
        with grant:
            return super().execute(context)


class LockTrigger(BaseTrigger):
    """Waits for a lock, hands it over, and fires with its token: ``{"token": …}``, for `sqlsem.adopt`.

    The request keeps its place in the queue as long as its triggerer runs. Another triggerer that takes over requests
    anew, at the end. The token is good once, for one login and for ``ttl`` seconds; Airflow keeps it in its own
    database meanwhile.

    Args:
        requests: The locks, as ``dataclasses.asdict`` of `sqlsem.values.locks.Request` gives them.
        ttl: How long the lock waits to be adopted.
        to: The login that may adopt it; left out, the triggerer's own.
    """

    def __init__(self, requests: list[dict[str, Any]], ttl: float, to: str | None = None) -> None:
        super().__init__()
        self.requests, self.ttl, self.to = requests, ttl, to

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class and the arguments with which the triggerer builds it again."""
        return "sqlsem.adapters.airflow.LockTrigger", {"requests": self.requests, "ttl": self.ttl, "to": self.to}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait for the lock, hand it over, and fire with its token."""
        requests = [Request(**request) for request in self.requests]
        async with aio.Lock(Terms([RequestTemplate(request.resource, request) for request in requests], None)) as grant:
            token = await grant.hand_over(ttl=self.ttl, to=self.to)
        yield TriggerEvent({"token": token})
