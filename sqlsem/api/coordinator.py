"""`Coordinator`: one database, as programs use it. It makes locks, rates, work queues and batches there."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from sqlsem import engines
from sqlsem.api.locks import Lock, adopt_in
from sqlsem.api.once import Once
from sqlsem.api.rates import Rate
from sqlsem.client.factories import Factories
from sqlsem.client.options import (
    BatchOptions,
    ConnectOptions,
    QueueOptions,
    check_options,
    shows_options,
)
from sqlsem.engines.protocol import Capability
from sqlsem.util import late
from sqlsem.values.errors import ConfigurationError
from sqlsem.values.locks import Duration, check_duration

if TYPE_CHECKING:
    from typing_extensions import Unpack

    # (At run time these are imported when they are first used: most programs need few of them.)
    from sqlsem.aio import AsyncLocks
    from sqlsem.api.admin import Admin
    from sqlsem.api.leader import Callback, Leader
    from sqlsem.batches import Batch
    from sqlsem.client.client import DatabaseClient
    from sqlsem.client.grants import Grant
    from sqlsem.client.held.registry import LostCallback
    from sqlsem.engines.base import Creator, Engine
    from sqlsem.tasks import Queue


class Coordinator(Factories[Lock, Rate, Once]):
    """The locks, queues and batches of one database. `sqlsem.connect` makes it. Use it in a ``with`` block, or `close`
    it; at the end of the process it closes by itself.

    >>> with sqlsem.connect("postgresql://etl@db/dwh", grace=30) as coordinator:  # doctest: +SKIP
    ...     with coordinator.mutex("nightly"):
    ...         load()
    """

    _lock = Lock
    _rate = Rate
    _once = Once

    def __init__(
        self,
        url: engines.Database,
        *,
        grace: Duration = 5.0,
        lease: Duration | None = None,
        retry: Duration = 10.0,
        schema: str = "sqlsem",
        table: str = "ProcessControl",
        creator: Creator | None = None,
    ) -> None:
        grace = check_duration("grace", grace)
        retry = check_duration("retry", retry)
        if lease is not None:
            given, lease = lease, check_duration("lease", lease)
            if lease < 1:
                raise ConfigurationError(f"A lease must be at least 1 second, not {given!r}")
        # A call that waits for a gate must not delay heartbeats for too long.
        gate_timeout = min(1.0, max(0.1, (grace or 4.0) / 4))
        # After an attempt to connect without any answer there must be time for another one within the grace.
        life = grace if lease is None else lease
        with late.importing:
            from sqlsem.client.client import DatabaseClient
            from sqlsem.engines.base import Options
        options = Options(
            grace=grace,
            lease=lease,
            schema=schema,
            table=table,
            gate_timeout=gate_timeout,
            connect_timeout=max(1.0, min(10.0, retry, life / 2 if life else 10.0)),
        )
        database_url, own_creator = engines.locate(url)
        creator = creator or own_creator
        engine = engines.of_url(database_url)(database_url, options, creator and engines.unpooled(creator))
        self._begin(DatabaseClient(engine, retry))

    def _begin(self, client: DatabaseClient) -> None:
        self.client = client
        #: As `sqlsem.on`, but only for the locks of this coordinator, including those of asyncio tasks.
        self.on = client.event_bus.on

    def __reduce__(self) -> str:
        raise ConfigurationError(
            f"{self!r} cannot be pickled, as its URL may hold a password; connect in the process that uses it"
        )

    @property
    def engine(self) -> Engine:
        """The database."""
        return self.client.engine

    @property
    def retry(self) -> float:
        """The seconds for which a call is retried while the database is out of reach."""
        return self.client.retry

    @functools.cached_property
    def admin(self) -> Admin:
        """The calls of operators, such as ``coordinator.admin.pause("etl")``; see `sqlsem.Admin`."""
        with late.importing:
            from sqlsem.api.admin import Admin
        return Admin(self.client)

    # -- locks, queues, batches ---------------------------------------------------------------------------------

    def adopt(self, token: str, *, on_lost: LostCallback | None = None) -> Grant:
        """See `sqlsem.adopt`."""
        return adopt_in(self.client, token, on_lost)

    def leader(
        self,
        name: str,
        info: str | None = None,
        *,
        on_started: Callback | None = None,
        on_stopped: Callback | None = None,
        timeout: Duration | None = None,
        handle_sigterm: bool = True,
    ) -> Leader:
        """See `sqlsem.leader`."""
        with late.importing:
            from sqlsem.api import leader
        return leader.leader(
            name,
            info,
            on_started=on_started,
            on_stopped=on_stopped,
            timeout=timeout,
            handle_sigterm=handle_sigterm,
            coordinator=self,
        )

    @shows_options(QueueOptions)
    def queue(self, name: str, **options: Unpack[QueueOptions]) -> Queue:
        """See `sqlsem.queue`."""
        check_options("queue()", options, QueueOptions.__optional_keys__)
        self.client.engine.require(Capability.TASKS, "A queue")
        with late.importing:
            from sqlsem import tasks
        return tasks.queue(name, coordinator=self, **options)

    @shows_options(BatchOptions)
    def batch(self, name: str, parts: Iterable[str], *, window: Duration, **options: Unpack[BatchOptions]) -> Batch:
        """See `sqlsem.batch`."""
        check_options("batch()", options, BatchOptions.__optional_keys__)
        self.client.engine.require(Capability.BATCHES, "A batch")
        with late.importing:
            from sqlsem import batches
        return batches.batch(name, parts, window=window, coordinator=self, **options)

    @property
    def aio(self) -> AsyncLocks:
        """The locks of this database for asyncio tasks, such as ``await coordinator.aio.mutex("x").acquire()``. See
        `sqlsem.aio`.
        """
        with late.importing:
            from sqlsem.aio import AsyncLocks
        return AsyncLocks(self.client)

    # -- the end ------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self.client.closed

    def close(self) -> None:
        """Release all locks, close the connections, end the threads.

        A thread or task that still holds a lock is notified first: the lock is lost (``on_lost``, `LockLost`).
        """
        self.client.close()

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self.client)


def coordinator_of(client: DatabaseClient) -> Coordinator:
    """Return a coordinator for an existing client. (For the package; programs have no use for it.)"""
    coordinator = Coordinator.__new__(Coordinator)
    coordinator._begin(client)
    return coordinator


@shows_options(ConnectOptions)
def connect(url: engines.Database, **options: Unpack[ConnectOptions]) -> Coordinator:
    """Return a coordinator for one database; see `Coordinator`. It connects at its first use.

    Args:
        url: A URL: ``sqlite:///file.db`` (``?mode=ro`` only reads, ``?mode=rw`` creates nothing), ``postgresql://…``,
            ``mysql://…``, ``mssql://…`` (also in SQLAlchemy's form, ``postgresql+psycopg://…``), or an ODBC string; or
            a `pathlib.Path` of an SQLite file; or an engine of SQLAlchemy.
        options: All are optional. Durations are seconds, ``"30s"`` or a `timedelta`:

            - ``grace``: How long a member without a beacon still counts as alive (default 5). With 0 a lock ends
              with its connection, and another request may be granted before the holder notices.
            - ``lease``: The length of a lease that heartbeats renew, for connections that do not keep their session
              (PgBouncer in transaction mode).
            - ``retry``: How long a call is retried while the database is out of reach, before `Unavailable`
              (default 10).
            - ``schema``: The schema of the tables (default ``sqlsem``); for SQLite, the prefix of their names.
            - ``table``: The name of the queue's table (default ``ProcessControl``).
            - ``creator``: A callable that returns a new DB-API connection; then only the scheme of the URL counts.

    Raises `ConfigurationError` if ``url`` names no database, and for invalid options.
    """
    check_options("connect()", options, ConnectOptions.__optional_keys__)
    return Coordinator(url, **options)
