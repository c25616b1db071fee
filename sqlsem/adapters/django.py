"""Django: locks in the database of the settings, and transactions that end before their lock does."""

from __future__ import annotations

import contextlib
import threading
import urllib.parse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import sqlsem
from sqlsem.client.options import ConnectOptions, shows_options
from sqlsem.values.errors import ConfigurationError

if TYPE_CHECKING:
    from typing_extensions import Unpack


__all__ = ["atomic", "coordinator"]

_guard = threading.Lock()
_known: dict[str, sqlsem.Coordinator] = {}


@shows_options(ConnectOptions)
def coordinator(using: str = "default", **options: Unpack[ConnectOptions]) -> sqlsem.Coordinator:
    """Return the coordinator of one of ``DATABASES``; one for each alias and process.

    It has connections of its own, made by Django with the settings of that database. They are neither in a transaction
    of a request nor closed with it. Tests that Django wraps in a transaction see the same queue as all other processes.

    Args:
        using: The alias in ``DATABASES``.
        options: As for `sqlsem.connect`; those of the first call count.

    Raises `sqlsem.ConfigurationError` for a database that sqlsem has no engine for.

    >>> from sqlsem.adapters import django as locks  # doctest: +SKIP
    >>> with locks.coordinator().limit("reports", 3):  # doctest: +SKIP
    ...     make_report()
    """
    with _guard:
        existing = _known.get(using)
        if existing is None or existing.closed:
            existing = _known[using] = _connect(using, options)
        return existing


@contextlib.contextmanager
def atomic(lock: sqlsem.Lock, using: str = "default") -> Iterator[sqlsem.Grant]:
    """Run a transaction inside a lock: no other request is granted before it is committed or rolled back.

    In the usual order, a lock inside ``transaction.atomic()``, the lock is released before the commit, and the next
    holder reads the old data. Here the lock comes first. The transaction proves before its first statement that the
    lock is still held, and keeps it held until its end (`sqlsem.Grant.assert_held`).

    Raises ``RuntimeError`` (Django's) inside another ``atomic()`` block, or with ``ATOMIC_REQUESTS``: the commit would
    come after the release. Otherwise as for ``with lock``. The lock must be of the same database.

    >>> with atomic(coordinator().mutex(f"account:{number}")):  # doctest: +SKIP
    ...     account = Account.objects.get(pk=number)
    ...     account.balance -= 1
    ...     account.save()
    """
    from django.db import connections, transaction

    with lock as grant, transaction.atomic(using, durable=True):
        with connections[using].cursor() as cursor:
            grant.assert_held(cursor)
        yield grant


def _connect(using: str, options: ConnectOptions) -> sqlsem.Coordinator:
    from django.db import connections

    wrapper: Any = connections[using]
    kind = wrapper.vendor
    if kind == "sqlite":
        return sqlsem.connect(f"sqlite:///{urllib.parse.quote(str(wrapper.settings_dict['NAME']))}", **options)
    driver = getattr(getattr(wrapper, "Database", None), "__name__", "")
    if kind not in ("postgresql", "microsoft") or driver == "psycopg2":
        raise ConfigurationError(
            f"The database {using!r} of Django's settings is {kind} by {driver or 'no driver'}; sqlsem can use sqlite, "
            f"postgresql by psycopg (version 3) and microsoft; for another database call sqlsem.connect(url)"
        )

    def create() -> Any:
        # (Not this thread's connection, which Django closes with the request.)
        fresh: Any = connections.create_connection(using)
        return fresh.get_new_connection(fresh.get_connection_params())

    options.setdefault("creator", create)
    return sqlsem.connect("postgresql://" if kind == "postgresql" else "mssql://", **options)
