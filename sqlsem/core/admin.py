"""The calls of operators (`sqlsem.Admin`): read all queues, tasks and members, and change what others own.

It needs no membership: each call opens a connection, and closes it. The database checks the role of the login.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from sqlsem.core.client import DatabaseClient
from sqlsem.engines.base import Session
from sqlsem.engines.guarded_tables import GuardedTableSession
from sqlsem.engines.kept_locks import KeptLockSession
from sqlsem.engines.priorities import PRIORITY_QUEUE_PREFIX, PrioritySession, why_no_priorities
from sqlsem.engines.protocol import AdminSession, TaskSession
from sqlsem.engines.queue_limits import QueueLimitSession
from sqlsem.engines.rates import RateSession
from sqlsem.engines.settings import SettingSession
from sqlsem.errors import ConfigurationError, NotHeld
from sqlsem.insight.kept import KeptLock
from sqlsem.insight.overview import Overview
from sqlsem.insight.patterns import is_pattern
from sqlsem.model import (
    MAX_INT,
    MAX_NAME,
    Attempt,
    Duration,
    Entry,
    GuardedTable,
    Operation,
    Past,
    QueueCounts,
    QueueLimit,
    QueueWait,
    Resource,
    TaskEntry,
    check_count,
    check_duration,
    check_id,
    check_name,
    check_some,
)
from sqlsem.model_rates import RateEntry, RateRequest, Windows, windows_of
from sqlsem.names import RATE_PREFIX

__all__ = ["BaseAdmin"]

T = TypeVar("T")

#: What an engine answers for a task that cannot be changed because it runs.
RUNS = 1


class AdminViews:
    """The calls that only read. They need no membership."""

    def __init__(self, client: DatabaseClient) -> None:
        #: For the package; programs have no use for it.
        self.client = client

    def entries(self, resource: str | None = None) -> list[Entry]:
        """The queue as it is now: who holds and who waits, one or all resources."""
        check_some("The resource name", resource)
        return self.client.with_connection(lambda session: session.entries(resource))

    def overview(self) -> Overview:
        """All that is there at one instant: queues, members, work queues, open batches, and how long locks were held of
        late. Raises `Unavailable` when the database is out of reach.

        >>> coordinator.admin.overview().members[0].host  # doctest: +SKIP
        'etl1'
        """
        return self.client.with_connection(lambda session: session.overview(), AdminSession)

    def kept_locks(self, resource: str | None = None) -> list[KeptLock]:
        """Return the locks inside the database that a session keeps for longer than a call needs them: whose session it
        is, what waits for it, and the statement that ends it. Of one resource, or all; only PostgreSQL tells.

        >>> for kept in coordinator.admin.kept_locks("etl"):  # doctest: +SKIP
        ...     print(kept.words, kept.remedy)
        """
        check_some("The resource name", resource)
        if not self.client.engine.has(KeptLockSession):
            return []
        return self.client.with_connection(lambda session: session.kept_locks(resource), KeptLockSession)

    def history(
        self,
        resource: str | None = None,
        *,
        most: int = 100,
        since: Duration | None = None,
        until: Duration | None = None,
        outcome: str | None = None,
        who: str | None = None,
    ) -> list[Past]:
        """Finished requests, newest first.

        Args:
            resource: Of this one only.
            most: So many at the most.
            since: That ended no longer ago than this (``"24h"``), by the database's clock.
            until: That ended no shorter ago than this.
            outcome: That ended so: ``"released"``, ``"timeout"``, ``"cancelled"``, ``"reaped"``, ``"revoked"`` or
                ``"lost"``.
            who: Of this login, host, ``host:pid``, program or id; or ended by this login.
        """
        check_some("The resource name", resource)
        check_count("most", most, 0)
        wanted = _wanted(since, until, outcome=outcome, who=who)
        return self.client.with_connection(lambda session: session.history(resource, most, **wanted), AdminSession)

    def operations(
        self,
        name: str | None = None,
        *,
        most: int = 100,
        since: Duration | None = None,
        until: Duration | None = None,
        action: str | None = None,
        who: str | None = None,
    ) -> list[Operation]:
        """What operators did, newest first: who paused, capped, revoked, retried, cancelled.

        Args:
            name: To this resource or work queue only.
            most: So many at the most.
            since: No longer ago than this (``"24h"``), by the database's clock.
            until: No shorter ago than this.
            action: Only this: ``"pause"``, ``"resume"``, ``"cap"``, ``"stale_after"``, ``"ageing"``, ``"revoke"``,
                ``"revoke_members"``, ``"reap"``, ``"retry"``, ``"cancel"``; ``"forget"`` of a periodic run, ``"reset"``
                and ``"rate_limit"`` of a rate; of a work queue ``"limit"``, ``"key_limit"``, ``"rate"``,
                ``"key_rate"`` or ``"weight"``.
            who: Of this login, host, ``host:pid`` or program.

        >>> coordinator.admin.operations("etl", action="pause")[0].login  # doctest: +SKIP
        'anna'
        """
        check_some("The name", name)
        check_count("most", most, 0)
        wanted = _wanted(since, until, action=action, who=who)
        return self.client.with_connection(lambda session: session.operations(name, most, **wanted), AdminSession)


class BaseAdmin(AdminViews):
    """`sqlsem.Admin` without its calls on schedules, which know the package of tasks."""

    def rates(self, name: str | None = None) -> list[RateEntry]:
        """Every window of one rate or all, and how much of it is used just now."""
        check_some("The rate's name", name)
        resource = None if name is None else RATE_PREFIX + name
        return self.client.with_connection(lambda session: session.rates(resource), RateSession)

    def set_rate(self, name: str, limit: int | Windows | None, per: Duration | None = None) -> None:
        """Set the most that may be used of a rate in a window, whatever programs declare; `sqlsem.rate` without numbers
        goes by it. It counts at once, for what was used before, too.

        Args:
            name: The rate's.
            limit: As of `sqlsem.rate`, also several windows; None lifts the limit of the window ``per``.
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
            self.client.with_connection(partial(_set_rate, resource, window_ms, number), RateSession)

    def reset_rate(self, name: str) -> bool:
        """Begin a rate anew: forget all use of it, debts, and the limits that programs have declared. False where
        nothing is known of it. An operator's limits stay. Programs may use the whole limit once more at once.
        """
        resource = RateRequest(name, ()).resource
        return self.client.with_connection(lambda session: session.reset_rate(resource), RateSession)

    def resources(self) -> list[Resource]:
        """All resources that have rows or settings."""
        return self.client.with_connection(lambda session: session.resources())

    def set_limit(self, resource: str, limit: int | None) -> None:
        """Set the limit of a resource: those who declare one get no more than this, whatever they declare, and those
        who declare none (``limit("etl")``) get this. Raised or lowered, it counts at once; those inside stay inside.

        Args:
            resource: A name; or ``"tenant:*"``: all that begin so and have none of their own (of several patterns the
                longest counts; ``"*"`` is for all).
            limit: From 1; None lifts it.

        Raises:
            ConfigurationError: It would be lifted while requests count on it that declare none.

        >>> coordinator.admin.set_limit("tenant:*", 4)  # doctest: +SKIP
        """
        name = check_name("The resource name", resource)
        if limit is not None:
            check_count("The limit", limit)
        self.client.with_connection(lambda session: session.set_resource(name, "cap", limit), SettingSession)

    def set_stale_after(self, resource: str, seconds: Duration | None) -> None:
        """Remove rows of bare participants (that have no beacon and no lease) at this age; None: never."""
        name = check_name("The resource name", resource)
        value = None
        if seconds is not None:
            value = max(1, int(check_duration("stale_after", seconds, zero=False) * 1000))
        self.client.with_connection(lambda session: session.set_resource(name, "stale_after", value), AdminSession)

    def set_priorities(self, resource: str, ageing: Duration | None = 60.0) -> None:
        """Let requests of a resource wait by priority: each must then name one (``mutex("etl", priority=5)``), and a
        higher one goes before lower ones that wait. Those inside stay inside. Requests of before go first; requests
        without a priority are refused from now on, with `ConfigurationError`.

        Args:
            resource: Its name, of up to 246 characters; no pattern, and none that begins with ``rate:``, ``once:`` or
                ``priority:``, whose queues are always first come, first served.
            ageing: The time of waiting that one step of priority is worth, from a millisecond: a request is overtaken
                only by those that come less than (difference in priority) times this after it, so that nobody starves.
                None ends it: those who wait by priority then get `ConfigurationError`.

        >>> coordinator.admin.set_priorities("etl", "5m")  # doctest: +SKIP
        """
        name, value = check_name("The resource name", resource), None
        if ageing is not None:
            check_name("The name of a resource with priorities", name, MAX_NAME - len(PRIORITY_QUEUE_PREFIX))
            if is_pattern(name):
                raise ConfigurationError(f"Priorities are set for one resource, not for a pattern: {name!r}")
            if (wrong := why_no_priorities(name)) is not None:
                raise ConfigurationError(wrong, resource=name)
            value = max(1, int(check_duration("ageing", ageing, zero=False) * 1000))
        self.client.engine.require(PrioritySession, "A priority")
        self.client.with_connection(lambda session: session.set_resource(name, "ageing", value), SettingSession)

    def pause(self, resource: str) -> None:
        """Let nobody else in until `resume`. Those inside stay inside; requests keep their place."""
        name = check_name("The resource name", resource)
        self.client.with_connection(lambda session: session.set_resource(name, "paused", 1), SettingSession)

    def resume(self, resource: str) -> None:
        """Undo `pause`."""
        name = check_name("The resource name", resource)
        self.client.with_connection(lambda session: session.set_resource(name, "paused", 0), SettingSession)

    def revoke(self, position: int, *, force: bool = False) -> bool:
        """Take a row away from its owner. True when it is gone, False when a living holder has been told and gets its
        grace to notice (``force=True`` does not wait for that). Raises `NotHeld` when there is no such row.
        """
        check_id("The position", position)
        code = self.client.with_connection(lambda session: session.revoke(position, bool(force)), AdminSession)
        if code < 0:
            raise NotHeld(f"There is no row at position {position}; see: sqlsem ls")
        return code == 0

    def revoke_members(self, *, member: int | None = None, login: str | None = None, force: bool = False) -> int:
        """Take all rows away from a member, or from all members of a login, as `revoke` does, and remove the members. A
        living holder is told first, and its member stays until it has given up its rows, unless ``force``. The number
        of members removed.

        Args:
            member: The member's number.
            login: The login; name one of the two.
            force: Do not wait for living holders.
        """
        if (member is None) == (login is None):
            raise ConfigurationError("Name either a member or a login whose members are removed")
        if member is not None:
            check_count("The number of a member", member, most=2**63 - 1)
        if login is not None:
            check_name("The login", login)
        return self.client.with_connection(lambda session: session.revoke_members(member, login, force), AdminSession)

    def reap(self) -> int:
        """Test every owner now and remove what the dead left behind; the number of rows removed."""
        return self.client.with_connection(lambda session: session.reap(), AdminSession)

    def guard_table(self, table: str, resource: str) -> int:
        """Let nobody write into a table whose transaction has not asserted a grant of ``resource`` that may write
        (`Grant.assert_held`, `Grant.session`). PostgreSQL and SQL Server; the table must be in the same database.

        Args:
            table: As SQL of the database names it: ``dbo.ledger``, ``public."Order line"``.
            resource: The lock's name.

        Returns how many triggers were made, those of partitions included; 0 where they were there already. Raises
        `ConfigurationError`: no such table, it is guarded by another resource, this login may not.

        >>> coordinator.admin.guard_table("public.ledger", "ledger")  # doctest: +SKIP
        1
        """
        name = check_name("The resource name", resource)
        check_name("The table", table)
        return self._guarding(lambda session: session.guard_table(table, name))

    def unguard_table(self, table: str) -> int:
        """Take the guard off a table, with its partitions; the number of triggers that there were."""
        check_name("The table", table)
        return self._guarding(lambda session: session.unguard_table(table))

    def guarded_tables(self) -> list[GuardedTable]:
        """The tables that are guarded, and what is not in order with them."""
        return self._guarding(lambda session: session.guarded_tables())

    def _guarding(self, call: Callable[[Session], T]) -> T:
        engine = self.client.engine
        if not engine.has(GuardedTableSession):
            raise ConfigurationError(
                f"{engine.label} cannot guard tables: it has no triggers that run once for a statement; there "
                f"grant.assert_held(cursor) in each transaction says whether the lock is held"
            )
        return self.client.with_connection(call, GuardedTableSession)

    def queues(self, queue: str | None = None) -> list[QueueCounts]:
        """One work queue, or all: how many tasks are in which state, the oldest, the rate, what holds it up.

        Reads all tasks that are kept (``history_days``). Raises `Unavailable` when the database is out of reach.

        >>> [(one.queue, one.pending) for one in coordinator.admin.queues()]  # doctest: +SKIP
        """
        check_some("The queue's name", queue)
        return self.client.with_connection(lambda session: session.queue_counts(queue), TaskSession)

    def queue_limits(self, queue: str | None = None) -> list[QueueLimit]:
        """What is set of one work queue, or all: how many tasks run at a time, of each key, rates, weights; see
        `Queue.set_limit`.
        """
        check_some("The queue's name", queue)
        return self.client.with_connection(lambda session: session.queue_limits(queue), QueueLimitSession)

    def queue_waits(self, queue: str | None = None) -> list[QueueWait]:
        """Which work queues, and which keys of them, wait for their rate, as far as a worker has found that used up; of
        one queue or all; see `Queue.set_rate`.

        >>> [(one.task_key, one.seconds) for one in coordinator.admin.queue_waits("mails")]  # doctest: +SKIP
        """
        check_some("The queue's name", queue)
        return self.client.with_connection(lambda session: session.queue_waits(queue), QueueLimitSession)

    def tasks(
        self, queue: str | None = None, status: str | None = None, *, most: int = 100, skip: int = 0
    ) -> list[TaskEntry]:
        """Tasks of one or all queues: open ones in the order in which they will run, then the ended, newest first.

        ``skip`` leaves out the first ones: a page is ``most=100, skip=200``.
        """
        check_some("The queue's name", queue)
        check_some("The status", status)
        check_count("most", most, 0)
        check_count("skip", skip, 0)
        return self.client.with_connection(lambda session: session.list_tasks(queue, status, most, skip), TaskSession)

    def attempts(self, task_id: int) -> list[Attempt]:
        """Every attempt at a task: who, when, how long, how it ended."""
        check_id("The task's number", task_id)
        return self.client.with_connection(lambda session: session.task_attempts(task_id), TaskSession)

    def retry_task(self, task_id: int) -> None:
        """Make a failed or cancelled task pending again. Raises `NotHeld` when it is neither."""
        check_id("The task's number", task_id)

        def change(session: Session) -> int:
            code = session.set_task(task_id, "retry")
            if code == RUNS:
                # Its worker may be dead, without anybody having looked.
                with contextlib.suppress(ConfigurationError):  # not everybody may look
                    if session.recover_tasks(None, None):
                        code = session.set_task(task_id, "retry")
                        # It is pending again by that.
                        return 0 if code < RUNS else code
            return code

        code = self.client.with_connection(change, TaskSession)
        if code != 0:
            raise _cannot("retry", task_id, code, "failed or cancelled")
        self.client.queue_changes.notify()

    def cancel_task(self, task_id: int) -> bool:
        """Cancel a task. One that is pending or has failed is out of its queue at once: True. Of one that runs its
        worker is told, which ends its SQL or command, or interrupts its function; then it is cancelled: False.

        Raises `NotHeld` when there is no such task, or it has ended.

        >>> coordinator.admin.cancel_task(17)  # doctest: +SKIP
        """
        check_id("The task's number", task_id)
        code = self.client.with_connection(lambda session: session.cancel_task(task_id), TaskSession)
        if code < 0:
            raise _cannot("cancel", task_id, code, "pending, running or failed")
        self.client.queue_changes.notify()
        return code != RUNS


def _set_rate(resource: str, window_ms: int, limit: int | None, session: RateSession) -> bool:
    return session.set_rate(resource, window_ms, limit)


def _wanted(since: Duration | None, until: Duration | None, **others: Any) -> dict[str, Any]:
    """What is asked for, of ages and others."""
    ages = {"since": since, "until": until}
    for name, value in others.items():
        check_some(name, value)
    asked = {name: check_duration(name, age, most=MAX_INT) for name, age in ages.items() if age is not None}
    return asked | {name: value for name, value in others.items() if value is not None}


def _cannot(what: str, task_id: int, code: int, states: str) -> NotHeld:
    why = {RUNS: "it runs", -1: "there is no such task", -3: "another one with its key is open"}
    return NotHeld(f"Cannot {what} task {task_id}: {why.get(code, f'it is not {states}')}; see: sqlsem tasks")
