"""The times by which a client polls: one `Timing`, an argument of each client.

A client gets the default one, unless its options name another (`sqlsem.engines.base.Options.timing`). There is no
setting and no environment variable for it: tests replace the default (`use`), so that they wait for shorter times.

Any scale is safe. Grants, gates and the proof of death go by the database's clock and by the member's own grace or
lease, which the member writes into its row. These times decide only how soon a client asks again. A client that asks
more seldom than others learns later that it is granted; it keeps nobody out for longer than its grace or lease.

Not here: how long a client waits for an answer, or for a thread (a scale makes no machine faster), pauses below 0.1 s,
and bounds of what callers may ask for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import fields, replace

from sqlsem.util.record import record

__all__ = ["DEFAULT", "Timing", "current", "use"]


@record
class Timing:
    """The times of one client, in seconds; ``heartbeat_share`` is a number.

    Attributes:
        slice: The longest single wait in the database. With 4 s a waiter costs less than one statement a second,
            heartbeats included. With a longer one, an operator's new limit, which no notification announces, would
            count later.
        suspect_slice: The same for an operation that may be in a deadlock: a victim cannot be interrupted while it
            waits.
        longest_poll: The longest pause between two polls of a waiter without a connection, and the sleep of polled
            waiters that do not poll for others.
        blocked_locally: The longest sleep of a waiter that others of its process block, or that a notification wakes.
            They wake it, so this only repairs an error.
        rate_poll: The longest sleep of a request to a rate, so that an operator's change counts.
        paused_rate_poll: The same while a rate is paused, or others are first.
        deadlock_check: The interval in which a process searches for deadlocks while its waiters may be part of one.
        deadlock_recheck: The time in which the search goes on after it has found a cycle that may be gone already.
        contention_check: The interval in which a process looks for requests behind its grants.
        cancellation_check: The interval in which a process reads cancel requests for its tasks.
        uncancelled_run: The time for which a task runs before its cancel requests are read: most tasks are shorter.
        heartbeat_share: The interval of heartbeats, as a share of the grace or lease: a third, so that two heartbeats
            may fail.
        shortest_heartbeat: The shortest interval of heartbeats.
        idle_heartbeat: The interval of heartbeats of a member that holds nothing and waits for nothing: it keeps the
            connection open.
        idle_file_heartbeat: The same for a database file, so that a deleted file is noticed soon.
        notification_retry: The pause before the listener for notifications connects again.
        unnotified_poll: The longest pause between two polls of a work queue without notifications.
        unchanged_poll: The same with notifications, if none has come.
        shortest_recovery: The shortest pause between two searches for dead workers, else 2/5 of the grace.
        longest_recovery: The longest such pause.
        blocked_task_check: The shortest pause between two checks of the tasks that wait for their locks.
        queue_poll: The longest pause between two polls of `sqlsem.Queue.wait`.
        maintenance: The interval in which an idle worker maintains its queue.
        reconnect: The pause of a worker after an error of the database.
        batch_recovery: The interval in which a waiter for a batch searches for dead processes.
    """

    slice: float = 4.0
    suspect_slice: float = 0.5
    longest_poll: float = 4.0
    blocked_locally: float = 30.0
    rate_poll: float = 4.0
    paused_rate_poll: float = 0.5
    deadlock_check: float = 0.75
    deadlock_recheck: float = 0.5
    contention_check: float = 1.0
    cancellation_check: float = 1.0
    uncancelled_run: float = 0.5
    heartbeat_share: float = 1 / 3
    shortest_heartbeat: float = 0.2
    idle_heartbeat: float = 60.0
    idle_file_heartbeat: float = 5.0
    notification_retry: float = 1.0
    unnotified_poll: float = 1.0
    unchanged_poll: float = 4.0
    shortest_recovery: float = 0.25
    longest_recovery: float = 2.0
    blocked_task_check: float = 0.2
    queue_poll: float = 0.5
    maintenance: float = 2.0
    reconnect: float = 0.5
    batch_recovery: float = 1.0

    def scaled(self, factor: float) -> Timing:
        """Return the times multiplied by ``factor``."""
        if not 0 < factor <= 1:
            raise ValueError(f"a factor must be more than 0 and at most 1, not {factor!r}")
        return replace(self, **{field.name: getattr(self, field.name) * factor for field in fields(self)})


DEFAULT = Timing()
_current = DEFAULT


def current() -> Timing:
    """Return the times of new clients."""
    return _current


@contextlib.contextmanager
def use(timing: Timing) -> Iterator[None]:
    """Give these times to the clients that are made in the block, in any thread. For tests."""
    global _current
    before, _current = _current, timing
    try:
        yield
    finally:
        _current = before
