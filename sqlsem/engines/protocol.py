"""The protocol between the client and an engine's session, in three parts.

`LockSession`
    the calls that every engine has.
`sqlsem.engines.optional.OptionalSession`
    calls that an engine may leave out, such as those of rates and work queues.
`AdminSession`
    the calls of operators, and the installation of tables; an engine may leave them out, too.

Callers use a session as a `sqlsem.engines.optional.Session`, which has all three. Before a call that an engine may lack
they check its `Capability`, by `Engine.require` or `Engine.has`.

All calls block. None retries: for a lost connection they raise `Disconnected`, and the caller may retry.
"""

from __future__ import annotations

import abc
import enum
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from sqlsem.util.record import record

if TYPE_CHECKING:
    from sqlsem.insight.kept import KeptLock
    from sqlsem.insight.overview import Overview
    from sqlsem.values.locks import Entry, GuardedTable, Heartbeat, Operation, Past, Request, Resource, Ticket

#: Returns the scripts for tables with these settings (empty: no tables), each with the schema version after it, if any.
Plan = Callable[[Mapping[str, str]], Iterable["tuple[int | None, str]"]]


class Capability(enum.Enum):
    """A part of the protocol that an engine may leave out. An engine has it if its session class has the methods."""

    CONVERSIONS = "upgrades and downgrades", "begin_upgrade upgrade downgrade"
    HANDOVERS = "locks that can be handed over", "hand_over adopt"
    DEADLOCKS = "a search for deadlocks", "find_deadlock"
    PRIORITIES = "priorities", "acquire_by_priority priorities"
    PERIODS = "runs once per period", "once_due mark_once once_runs once_forget"
    COMMIT_RELEASE = (
        "locks that are given back with a transaction",
        "database_identity is_committed delete_commit_marker",
    )
    RATES = "rates", "take_rate adjust_rate reset_rate set_rate rates"
    TASKS = (
        "work queues",
        "put_tasks claim_task end_task next_task next_tasks return_claim recover_tasks queue_state queue_counts "
        "list_tasks task_attempts set_task cancel_task task_controls prune_tasks execute",
    )
    BLOCKED_TASKS = "tasks with locks", "claim_blocked"
    QUEUE_LIMITS = "limits of work queues", "queue_limits queue_waits set_queue"
    SCHEDULES = (
        "schedules",
        "maintain_queue clock save_schedule fire_schedule set_schedule list_schedules",
    )
    BATCHES = (
        "batches",
        "recover_batches start_part end_part claim_callback return_callback end_callback abandon_batch list_batches",
    )
    SETTINGS = "settings of resources", "set_resource"
    ADMINISTRATION = (
        "history, and what operators do",
        "overview history operations rights revoke reap prune revoke_members",
    )
    GUARDED_TABLES = "guarded tables", "guard_table unguard_table guarded_tables"
    KEPT_LOCKS = "a list of locks that sessions keep in the database", "kept_locks"
    TABLES = "tables", "settings install diagnose"

    def __init__(self, title: str, methods: str) -> None:
        #: The name of the capability in messages.
        self.title = title
        #: The methods of a session that must not be missing; a few more have a default.
        self.methods = methods.split()


@record
class Check:
    """One line of ``sqlsem doctor``."""

    name: str
    ok: bool
    detail: str
    mend: str = ""


class EngineConnection(abc.ABC):
    """A connection that another thread can interrupt, and that a forked child can discard.

    Attributes:
        server: The server at the other end, if the engine has several.
    """

    server: str = ""

    @abc.abstractmethod
    def interrupt(self) -> None:
        """Make the running call fail soon with `Disconnected`; called from another thread."""

    def discard(self) -> None:  # noqa: B027 - most sessions hold nothing that a fork copies
        """In a forked child, close the inherited copy of the parent's session, without a message to the server."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the connection; never raises."""


class LockSession(EngineConnection):
    """One connection, used by one thread at a time. The client keeps one *main* session (for the member's beacon,
    registration, release and heartbeats), and has others to wait in.

    A call that makes a member hold something renews the member's lease in the same transaction, unless the lease is
    fresh: `register`, `claim_task`, `next_task`, `next_tasks` when it claims, `start_part` and `claim_callback`.
    `register_member`, `reattach_member` and `heartbeat` renew even a fresh one. All raise `Disconnected` for a removed
    member.
    """

    def prepare(self, purpose: str) -> None:
        """Prepare a new connection."""

    def check_schema(self) -> dict[str, str]:
        """Return table ``setting``; raise `SchemaError` if this client cannot work with the database."""
        return {}

    def has_feature(self, feature: str) -> bool:
        """True unless the database is known to lack that feature (`sqlsem.sql.features`)."""
        return True

    @property
    def usable(self) -> bool:
        """False if no further call can succeed on this session."""
        return True

    def recover(self) -> None:
        """Roll back a transaction that an exception (perhaps of a signal handler) left open."""

    # -- membership (main session) ------------------------------------------------------------------------------

    @abc.abstractmethod
    def register_member(self, host: str, pid: int, program: str) -> int:
        """Add a member whose beacon this session holds; return its number."""

    @abc.abstractmethod
    def reattach_member(self, member_id: int) -> bool:
        """Move an existing member to this new session; return False if the member was removed meanwhile."""

    @abc.abstractmethod
    def heartbeat(self, member_id: int) -> Heartbeat:
        """Renew the member's lease, and return its rows."""

    @abc.abstractmethod
    def deregister_member(self, member_id: int) -> None:
        """Remove the member and all its rows."""

    # -- requests (main session) --------------------------------------------------------------------------------

    @abc.abstractmethod
    def register(
        self, member_id: int, requesting_id: str, owner: str, uid: str, requests: Sequence[Request], only_if_free: bool
    ) -> list[Ticket] | None:
        """Add a row for each request, all in one transaction. With ``only_if_free``, add none and return None if one of
        them cannot be granted at once. Raises `ConfigurationError` for a request without a limit if no operator set it.

        Idempotent by ``uid``: a repeated call returns the rows of the first call. May raise `Busy`.
        """

    @abc.abstractmethod
    def release(self, ticket: Ticket, outcome: str) -> bool:
        """Remove a row; return False if it was removed before. May raise `Busy`."""

    @abc.abstractmethod
    def cancel(self, member_id: int, uid: str, outcome: str) -> int:
        """Remove the rows of one `register` call; return their number."""

    # -- waiting (any session) ----------------------------------------------------------------------------------

    @abc.abstractmethod
    def wait(self, ticket: Ticket, timeout: float, wakeup: threading.Event) -> bool | None:
        """Wait up to ``timeout`` seconds until ``ticket`` is granted. Return True if it is granted, False if not yet,
        None if its row was removed. Another thread sets ``wakeup`` when a poll may succeed.
        """

    @abc.abstractmethod
    def poll(self, member_id: int, tickets: Sequence[Ticket]) -> dict[int, bool | None]:
        """Poll for several waiters of this member at once, on the main session. Return by position: True (granted, now
        or before) or None (row removed, revoked or another member's). Waiters that still wait are left out.

        For each ticket this does what `wait` with timeout 0 does: it writes grants and renews the lease (`Disconnected`
        if the member was removed), and checks the head of the queue if a waiter still waits. It is one statement or
        transaction for all tickets, in any order and of any resources; it waits only for a gate (`Busy`). Idempotent.
        """

    # -- wakeup locks (main session) ----------------------------------------------------------------------------

    # A *wakeup lock* is a lock of the database on a waiting row, on which the next waiter sleeps. Most engines have
    # none.

    def drop_wakeup_locks(self, member_id: int, tickets: Sequence[Ticket]) -> None:
        """Drop the wakeup locks of these waiting rows of one resource. The waiter behind each is this member's too, so
        no waiter of another member sleeps on them. (A row before another member's waiter keeps its lock.) Idempotent.
        """

    def restore_wakeup_locks(self, member_id: int, tickets: Sequence[Ticket]) -> None:
        """Restore the wakeup locks of rows that are near the head of the queue, or are about to be removed.
        Idempotent.
        """

    # -- reading (any session) ----------------------------------------------------------------------------------

    @abc.abstractmethod
    def entries(self, resource: str | None) -> list[Entry]:
        """Return the rows of one resource or all, in order. Rows of dead members are marked, and not removed."""

    @abc.abstractmethod
    def resources(self) -> list[Resource]:
        """Return all resources that have rows or settings."""

    def require_in_place(self) -> None:
        """Raise `Replaced` if the open database file is no longer the one at its path. Each call on the main session is
        followed by this check; if it raises, the result of the call does not count. (A server needs no such check.)
        """


class AdminSession:
    """The calls of operators, and of those who install the tables."""

    def overview(self) -> Overview:
        """Return all rows at one instant. On a server this takes two statements, and time in proportion to the rows."""
        raise NotImplementedError

    def history(
        self,
        resource: str | None,
        maximum: int,
        *,
        since: float | None = None,
        until: float | None = None,
        outcome: str | None = None,
        who: str | None = None,
    ) -> list[Past]:
        """Return finished requests, newest first, that ended at most ``since`` and at least ``until`` seconds ago.
        ``who``: the request's login, host, ``host:pid``, program or id, or the login that ended it.
        """
        raise NotImplementedError

    def operations(
        self,
        name: str | None,
        maximum: int,
        *,
        since: float | None = None,
        until: float | None = None,
        action: str | None = None,
        who: str | None = None,
    ) -> list[Operation]:
        """Return operators' actions, newest first, on a resource or queue of that name, or on all."""
        raise NotImplementedError

    def rights(self) -> frozenset[str]:
        """Return this login's rights beyond reading: ``operate`` (pause, revoke and others), ``retry`` (own tasks)."""
        raise NotImplementedError

    def revoke(self, position: int, force: bool) -> int:
        """Revoke a row: 0 (removed), 1 (its live owner is notified, and has its grace) or -1 (no such row)."""
        raise NotImplementedError

    def reap(self) -> int:
        """Check all members now, and remove dead members with their rows. Return the number of removed rows."""
        raise NotImplementedError

    def prune(self, maximum: int) -> int:
        """Remove up to ``maximum`` expired rows each of history and operators' actions. Return the larger number."""
        raise NotImplementedError

    def revoke_members(self, member: int | None, login: str | None, force: bool) -> int:
        """Revoke all rows of a member, or of all members of a login, as `revoke` does. Remove the members that have no
        rows left, and return their number.
        """
        raise NotImplementedError

    def set_resource(self, resource: str, what: str, value: int | None) -> None:
        """Set ``cap``, ``stale_after`` (ms), ``ageing`` (ms; None: no priorities) or ``paused`` (1 or 0). The cap of a
        name that ends with ``*`` counts for all names with that prefix. Raises `ConfigurationError` if the removed cap
        is the only limit of a request.
        """
        raise NotImplementedError

    # -- guarded tables -------------------------------------------------------------------------------------------

    # Only transactions that have asserted a grant of the table's resource can write such a table. ``table`` is a name
    # in the engine's SQL: ``dbo.[order line]``, ``public."Ledger"``. The calls raise `ConfigurationError` if the table
    # is missing or cannot be guarded, or this login lacks the right; and `Busy` while other sessions use the table.

    def guard_table(self, table: str, resource: str) -> int:
        """Guard a table and its partitions. Return the number of triggers that were created or enabled."""
        raise NotImplementedError

    def unguard_table(self, table: str) -> int:
        """Remove the guard of a table and its partitions. Return the number of removed triggers."""
        raise NotImplementedError

    def guarded_tables(self) -> list[GuardedTable]:
        """Return the guarded tables by schema and name, without partitions."""
        raise NotImplementedError

    # -- locks of the database itself -----------------------------------------------------------------------------

    def kept_locks(self, resource: str | None) -> list[KeptLock]:
        """Return the locks that sessions keep for longer than a call needs them; of ``resource``, or all."""
        raise NotImplementedError

    # -- installation, upgrade and diagnosis of the tables --------------------------------------------------------

    def settings(self) -> dict[str, str] | None:
        """Return table ``setting``; None if the tables are missing."""
        raise NotImplementedError

    def install(self, plan: Plan) -> None:
        """Read the settings, and run the scripts that ``plan`` returns for them, under the install lock and in one
        transaction.
        """
        raise NotImplementedError

    def diagnose(self) -> list[Check]:
        """Run the engine's checks for ``sqlsem doctor``."""
        raise NotImplementedError


class AsyncSession(EngineConnection):
    """One connection of an event loop, on which tasks wait."""

    @property
    @abc.abstractmethod
    def usable(self) -> bool:
        """False if no further wait can succeed, for example after a cancellation in the middle of a call."""

    @abc.abstractmethod
    async def wait(self, ticket: Ticket, timeout: float) -> bool | None:
        """As `LockSession.wait`."""

    @abc.abstractmethod
    async def upgrade(self, ticket: Ticket, timeout: float) -> bool | None:
        """As `OptionalSession.upgrade`."""
