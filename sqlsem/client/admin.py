"""The calls of operators (`sqlsem.Admin`): read all queues, tasks and members, and change rows of other members.

The calls need no membership: each opens a connection, and closes it. The database checks the role of the login.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from sqlsem.client.client import DatabaseClient
from sqlsem.engines.answers import naming_resource
from sqlsem.engines.base import Session
from sqlsem.engines.priorities import why_no_priorities
from sqlsem.engines.protocol import Capability
from sqlsem.insight.kept import KeptLock
from sqlsem.insight.overview import Overview
from sqlsem.insight.patterns import is_pattern
from sqlsem.values.errors import ConfigurationError, NotHeld
from sqlsem.values.locks import (
    MAX_INT,
    MAX_NAME,
    Duration,
    Entry,
    GuardedTable,
    Operation,
    Past,
    Resource,
    check_count,
    check_duration,
    check_id,
    check_name,
    check_some,
)
from sqlsem.values.names import PRIORITY_PREFIX, RATE_PREFIX
from sqlsem.values.rates import RateEntry, RateRequest, Windows, windows_of
from sqlsem.values.tasks import Attempt, QueueCounts, QueueLimit, QueueWait, TaskEntry

__all__ = ["BaseAdmin"]

T = TypeVar("T")

#: How many tasks one statement reads in the search for one of them.
TASKS_OF_A_PAGE = 1000
#: The engine's code for a task that cannot be changed now because a worker runs it.
RUNS = 1


class AdminViews:
    """The calls that only read. They need no membership."""

    def __init__(self, client: DatabaseClient) -> None:
        #: For the package; programs have no use for it.
        self.client = client

    def entries(self, resource: str | None = None) -> list[Entry]:
        """Return the current holders and waiters of one resource, or of all."""
        check_some("The resource name", resource)
        return self.client.with_connection(lambda session: session.entries(resource))

    def overview(self) -> Overview:
        """Return the whole state at one instant: queues, members, work queues, open batches, and for how long locks
        were held recently. Raises `Unavailable` if the database is out of reach.

        >>> coordinator.admin.overview().members[0].host  # doctest: +SKIP
        'etl1'
        """
        return self.client.with_connection(lambda session: session.overview(), Capability.ADMINISTRATION)

    def kept_locks(self, resource: str | None = None) -> list[KeptLock]:
        """Return the locks inside the database that a session keeps for longer than its calls need them, of one
        resource or all. Each entry names the session, the requests that wait for the lock, and the statement that ends
        the session. Only PostgreSQL reports such locks.

        >>> for kept in coordinator.admin.kept_locks("etl"):  # doctest: +SKIP
        ...     print(kept.words, kept.remedy)
        """
        check_some("The resource name", resource)
        if not self.client.engine.has(Capability.KEPT_LOCKS):
            return []
        return self.client.with_connection(lambda session: session.kept_locks(resource), Capability.KEPT_LOCKS)

    def history(
        self,
        resource: str | None = None,
        *,
        maximum: int = 100,
        since: Duration | None = None,
        until: Duration | None = None,
        outcome: str | None = None,
        who: str | None = None,
    ) -> list[Past]:
        """Return finished requests, newest first.

        Args:
            resource: Only requests for this resource.
            maximum: At most this many.
            since: Only requests that ended no longer ago than this (``"24h"``), by the database's clock.
            until: Only requests that ended at least this long ago.
            outcome: Only requests with this outcome: ``"released"``, ``"timeout"``, ``"cancelled"``, ``"reaped"``,
                ``"revoked"`` or ``"lost"``.
            who: Only requests of this login, host, ``host:pid``, program or id, or ended by this login.
        """
        check_some("The resource name", resource)
        check_count("maximum", maximum, 0)
        criteria = _criteria(since, until, outcome=outcome, who=who)
        return self.client.with_connection(
            lambda session: session.history(resource, maximum, **criteria), Capability.ADMINISTRATION
        )

    def operations(
        self,
        name: str | None = None,
        *,
        maximum: int = 100,
        since: Duration | None = None,
        until: Duration | None = None,
        action: str | None = None,
        who: str | None = None,
    ) -> list[Operation]:
        """Return the operators' actions, newest first: pauses, limits, revocations, retries, cancellations and others.

        Args:
            name: Only actions on this resource or work queue.
            maximum: At most this many.
            since: Only actions no longer ago than this (``"24h"``), by the database's clock.
            until: Only actions at least this long ago.
            action: Only this action: ``"pause"``, ``"resume"``, ``"cap"``, ``"stale_after"``, ``"ageing"``,
                ``"revoke"``, ``"revoke_members"``, ``"reap"``, ``"retry"``, ``"cancel"``; ``"forget"`` of a periodic
                run, ``"reset"`` and ``"rate_limit"`` of a rate; of a work queue ``"limit"``, ``"key_limit"``,
                ``"rate"``, ``"key_rate"`` or ``"weight"``.
            who: Only actions of this login, host, ``host:pid`` or program.

        >>> coordinator.admin.operations("etl", action="pause")[0].login  # doctest: +SKIP
        'anna'
        """
        check_some("The name", name)
        check_count("maximum", maximum, 0)
        criteria = _criteria(since, until, action=action, who=who)
        return self.client.with_connection(
            lambda session: session.operations(name, maximum, **criteria), Capability.ADMINISTRATION
        )


class BaseAdmin(AdminViews):
    """All calls of `sqlsem.Admin` except those on schedules, which `sqlsem.tasks` adds."""

    def rates(self, name: str | None = None) -> list[RateEntry]:
        """Return every window of one rate, or of all, with its current use."""
        check_some("The rate's name", name)
        resource = None if name is None else RATE_PREFIX + name
        return self.client.with_connection(lambda session: session.rates(resource), Capability.RATES)

    def set_rate(self, name: str, limit: int | Windows | None, per: Duration | None = None) -> None:
        """Set the limit of a rate in a window. It takes precedence over the limit that programs declare, and
        `sqlsem.rate` without numbers uses it. The limit counts at once, and earlier use counts toward it.

        Args:
            name: The name of the rate.
            limit: The limit, or the limits of several windows, as for `sqlsem.rate`; None lifts the limit of the window
                ``per``.
            per: The window.

        >>> coordinator.admin.set_rate("api", 100, per="1m")  # doctest: +SKIP
        """
        resource = RateRequest(name, ()).resource
        if limit is None:
            (window,) = windows_of(1, per)
            changes: list[tuple[int, int | None]] = [(window.ms, None)]
        else:
            changes = [(window.ms, window.limit) for window in windows_of(limit, per)]
        for window_ms, number in changes:
            with naming_resource(resource):
                self.client.with_connection(partial(_set_rate, resource, window_ms, number), Capability.RATES)

    def reset_rate(self, name: str) -> bool:
        """Reset a rate: delete its use, its debts, and the limits that programs have declared. Operators' limits stay.
        Programs may then use the whole limit at once. Return False if the database has no record of the rate.
        """
        resource = RateRequest(name, ()).resource
        return self.client.with_connection(lambda session: session.reset_rate(resource), Capability.RATES)

    def resources(self) -> list[Resource]:
        """Return all resources that have rows or settings."""
        return self.client.with_connection(lambda session: session.resources())

    def set_limit(self, resource: str, limit: int | None) -> None:
        """Set the limit of a resource. Requests that declare a higher limit get this one, and so do requests that
        declare none (``limit("etl")``). A change counts at once; holders keep their grants.

        Args:
            resource: A name; or a pattern such as ``"tenant:*"``, for all names that begin with ``tenant:`` and have no
                limit of their own. The longest of several matching patterns counts; ``"*"`` matches all names.
            limit: From 1; None removes the limit.

        Raises:
            ConfigurationError: The limit cannot be removed while requests use it that declare none.

        >>> coordinator.admin.set_limit("tenant:*", 4)  # doctest: +SKIP
        """
        name = check_name("The resource name", resource)
        if limit is not None:
            check_count("The limit", limit)
        with naming_resource(name):
            self.client.with_connection(lambda session: session.set_resource(name, "cap", limit), Capability.SETTINGS)

    def set_stale_after(self, resource: str, seconds: Duration | None) -> None:
        """Set the age at which rows of bare participants (without beacon and lease) are removed; None: never."""
        name = check_name("The resource name", resource)
        value = None
        if seconds is not None:
            value = max(1, int(check_duration("stale_after", seconds, zero=False) * 1000))
        self.client.with_connection(
            lambda session: session.set_resource(name, "stale_after", value), Capability.ADMINISTRATION
        )

    def set_priorities(self, resource: str, ageing: Duration | None = 60.0) -> None:
        """Make requests for a resource wait by priority. Each request must then name a priority
        (``mutex("etl", priority=5)``), and is granted before waiting requests of lower priority. Holders keep their
        grants, and earlier requests go first. New requests without a priority raise `ConfigurationError`.

        Args:
            resource: The name, up to 246 characters; no pattern. Queues of names that begin with ``rate:``, ``once:``
                or ``priority:`` are always first come, first served.
            ageing: The time of waiting that one step of priority is worth, from a millisecond. A later request
                overtakes an earlier one only if it comes less than (difference in priority) times ``ageing`` after it,
                so no request starves. None ends priorities: requests that wait by priority then raise
                `ConfigurationError`.

        >>> coordinator.admin.set_priorities("etl", "5m")  # doctest: +SKIP
        """
        name, value = check_name("The resource name", resource), None
        if ageing is not None:
            check_name("The name of a resource with priorities", name, MAX_NAME - len(PRIORITY_PREFIX))
            if is_pattern(name):
                raise ConfigurationError(
                    f"Priorities are set for one resource, not for a pattern: {name!r}", code="priority"
                )
            if (wrong := why_no_priorities(name)) is not None:
                raise ConfigurationError(wrong, resource=name)
            value = max(1, int(check_duration("ageing", ageing, zero=False) * 1000))
        self.client.engine.require(Capability.PRIORITIES, "A priority")
        self.client.with_connection(lambda session: session.set_resource(name, "ageing", value), Capability.SETTINGS)

    def pause(self, resource: str) -> None:
        """Grant no further requests until `resume`. Holders keep their grants, and waiters their positions."""
        name = check_name("The resource name", resource)
        self.client.with_connection(lambda session: session.set_resource(name, "paused", 1), Capability.SETTINGS)

    def resume(self, resource: str) -> None:
        """Undo `pause`."""
        name = check_name("The resource name", resource)
        self.client.with_connection(lambda session: session.set_resource(name, "paused", 0), Capability.SETTINGS)

    def revoke(self, position: int, *, force: bool = False) -> bool:
        """Revoke a request or grant by its position. Return True if its row is removed; False if a live holder is
        notified and has its grace to react. ``force=True`` removes the row at once. Raises `NotHeld` if there is no
        such row.
        """
        check_id("The position", position)
        code = self.client.with_connection(
            lambda session: session.revoke(position, bool(force)), Capability.ADMINISTRATION
        )
        if code < 0:
            raise NotHeld(f"There is no row at position {position}; see: sqlsem ls")
        return code == 0

    def revoke_members(self, *, member: int | None = None, login: str | None = None, force: bool = False) -> int:
        """Revoke all rows of a member, or of all members of a login, as `revoke` does, and remove the members. Return
        the number of removed members. A live holder is notified first, and its member stays until the holder has
        released its rows, unless ``force``.

        Args:
            member: The member's number.
            login: The login; name one of the two.
            force: Do not wait for live holders.
        """
        if (member is None) == (login is None):
            raise ConfigurationError("Name either a member or a login whose members are removed")
        if member is not None:
            check_count("The number of a member", member, maximum=2**63 - 1)
        if login is not None:
            check_name("The login", login)
        return self.client.with_connection(
            lambda session: session.revoke_members(member, login, force), Capability.ADMINISTRATION
        )

    def reap(self) -> int:
        """Test now whether each owner is alive, and remove the rows of dead owners. Return their number."""
        return self.client.with_connection(lambda session: session.reap(), Capability.ADMINISTRATION)

    def guard_table(self, table: str, resource: str) -> int:
        """Guard a table: the database then refuses writes in transactions that have not asserted a write grant of
        ``resource`` (`Grant.assert_held`, `Grant.session`). For PostgreSQL and SQL Server; the table must be in the
        same database.

        Args:
            table: The table's name in the database's SQL: ``dbo.ledger``, ``public."Order line"``.
            resource: The name of the lock.

        Returns the number of triggers created, including those of partitions; 0 if they exist already. Raises
        `ConfigurationError` if there is no such table, another resource guards it, or this login lacks the rights.

        >>> coordinator.admin.guard_table("public.ledger", "ledger")  # doctest: +SKIP
        1
        """
        name = check_name("The resource name", resource)
        check_name("The table", table)
        return self._guarding(lambda session: session.guard_table(table, name))

    def unguard_table(self, table: str) -> int:
        """Remove the guard of a table and its partitions. Return the number of removed triggers."""
        check_name("The table", table)
        return self._guarding(lambda session: session.unguard_table(table))

    def guarded_tables(self) -> list[GuardedTable]:
        """Return the guarded tables, each with the problems of its guard."""
        return self._guarding(lambda session: session.guarded_tables())

    def _guarding(self, call: Callable[[Session], T]) -> T:
        engine = self.client.engine
        if not engine.has(Capability.GUARDED_TABLES):
            raise ConfigurationError(
                f"{engine.label} cannot guard tables: it has no triggers that run once for a statement; there "
                f"grant.assert_held(cursor) in each transaction says whether the lock is held",
                code="feature",
            )
        return self.client.with_connection(call, Capability.GUARDED_TABLES)

    def queues(self, queue: str | None = None) -> list[QueueCounts]:
        """Return for one work queue, or each: tasks by state, the oldest task, the throughput, and why it stands still.

        Reads all tasks that the database keeps (``history_days``). Raises `Unavailable` if the database is out of
        reach.

        >>> [(counts.queue, counts.pending) for counts in coordinator.admin.queues()]  # doctest: +SKIP
        """
        check_some("The queue's name", queue)
        return self.client.with_connection(lambda session: session.queue_counts(queue), Capability.TASKS)

    def queue_limits(self, queue: str | None = None) -> list[QueueLimit]:
        """Return the settings of one work queue, or of all: the limits of tasks at a time (in all, and of each key),
        the rates and the weights. See `Queue.set_limit`.
        """
        check_some("The queue's name", queue)
        return self.client.with_connection(lambda session: session.queue_limits(queue), Capability.QUEUE_LIMITS)

    def queue_waits(self, queue: str | None = None) -> list[QueueWait]:
        """Return the work queues and keys that wait because their rate is used up, of one queue or all. See
        `Queue.set_rate`.

        >>> [(wait.task_key, wait.seconds) for wait in coordinator.admin.queue_waits("mails")]  # doctest: +SKIP
        """
        check_some("The queue's name", queue)
        return self.client.with_connection(lambda session: session.queue_waits(queue), Capability.QUEUE_LIMITS)

    def tasks(
        self, queue: str | None = None, status: str | None = None, *, maximum: int = 100, skip: int = 0
    ) -> list[TaskEntry]:
        """Return tasks of one queue, or all: open tasks in the order in which they will run, then ended ones, newest
        first.

        ``skip`` leaves out the first tasks: ``most=100, skip=200`` is the third page.
        """
        check_some("The queue's name", queue)
        check_some("The status", status)
        check_count("maximum", maximum, 0)
        check_count("skip", skip, 0)
        return self.client.with_connection(
            lambda session: session.list_tasks(queue, status, maximum, skip), Capability.TASKS
        )

    def task(self, task_id: int) -> TaskEntry | None:
        """Return a task by its number; None if there is no such task, or this login may not see it. Reads the tasks of
        the database page by page.

        >>> coordinator.admin.task(17).body  # doctest: +SKIP
        'CALL load_customers()'
        """
        check_id("The task's number", task_id)
        for _ in range(2):  # once more, as a task that ends meanwhile moves to a page that was read
            skip = 0
            while page := self.tasks(maximum=TASKS_OF_A_PAGE, skip=skip):
                for entry in page:
                    if entry.task_id == task_id:
                        return entry
                skip += len(page)
        return None

    def attempts(self, task_id: int) -> list[Attempt]:
        """Return every attempt at a task: its worker, time, duration and outcome."""
        check_id("The task's number", task_id)
        return self.client.with_connection(lambda session: session.task_attempts(task_id), Capability.TASKS)

    def retry_task(self, task_id: int) -> None:
        """Make a failed or cancelled task pending again. Raises `NotHeld` if it is neither."""
        check_id("The task's number", task_id)

        def change(session: Session) -> int:
            code = session.set_task(task_id, "retry")
            if code == RUNS:
                # Its worker may be dead, without any client having noticed.
                with contextlib.suppress(ConfigurationError):  # not every login may recover tasks
                    if session.recover_tasks(None, None):
                        code = session.set_task(task_id, "retry")
                        # The recovery itself may have made it pending again.
                        return 0 if code < RUNS else code
            return code

        code = self.client.with_connection(change, Capability.TASKS)
        if code != 0:
            raise _cannot("retry", task_id, code, "failed or cancelled")
        self.client.queue_changes.notify()

    def cancel_task(self, task_id: int) -> bool:
        """Cancel a task. Return True if it was pending or failed: it leaves its queue at once. Return False if it runs:
        its worker reads the request, stops the task's SQL, command or function, and then the task is cancelled.

        Raises `NotHeld` if there is no such task, or it has ended.

        >>> coordinator.admin.cancel_task(17)  # doctest: +SKIP
        """
        check_id("The task's number", task_id)
        code = self.client.with_connection(lambda session: session.cancel_task(task_id), Capability.TASKS)
        if code < 0:
            raise _cannot("cancel", task_id, code, "pending, running or failed")
        self.client.queue_changes.notify()
        return code != RUNS


def _set_rate(resource: str, window_ms: int, limit: int | None, session: Session) -> bool:
    return session.set_rate(resource, window_ms, limit)


def _criteria(since: Duration | None, until: Duration | None, **others: Any) -> dict[str, Any]:
    """Return the given filters by name, with ages in seconds."""
    ages = {"since": since, "until": until}
    for name, value in others.items():
        check_some(name, value)
    given_ages = {name: check_duration(name, age, maximum=MAX_INT) for name, age in ages.items() if age is not None}
    return given_ages | {name: value for name, value in others.items() if value is not None}


def _cannot(action: str, task_id: int, code: int, states: str) -> NotHeld:
    why = {RUNS: "it runs", -1: "there is no such task", -3: "another task with its key is open"}
    return NotHeld(
        f"Cannot {action} task {task_id}: {why.get(code, f'it is not {states}')}; see: sqlsem tasks", code="task"
    )
