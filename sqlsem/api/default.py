"""The database of the module-level functions: from `configure`, else from the environment or a file."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sqlsem.api.coordinator import Coordinator, connect
from sqlsem.client import defaults
from sqlsem.client.monitors import lock_order
from sqlsem.client.options import ConnectOptions, check_options, shows_options
from sqlsem.util import late

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sqlsem import config
    from sqlsem.engines import Database

log = logging.getLogger("sqlsem")

_guard = threading.Lock()
_configured: tuple[Database | None, str | None, ConnectOptions] = (None, None, {})
_coordinator: Coordinator | None = None
_warned_of_embedded = False


def _unlock_in_child() -> None:
    """Replace the guard in a forked child: another thread of the parent may have held it at the fork."""
    global _guard
    _guard = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_in_child)


def default_url() -> str:
    """Return the URL of the default database: ``$SQLSEM_URL``, a profile, a configuration file, or an SQLite file.

    It may hold a password. See `sqlsem.config`.
    """
    return _resolve(None, None).url


@shows_options(ConnectOptions)
def configure(
    url: Database | None = None,
    *,
    profile: str | None = None,
    debug: bool | None = None,
    **options: Unpack[ConnectOptions],
) -> None:
    """Choose the database of the module-level functions, before the first lock is acquired.

    Args:
        url: As for `connect`; left out, the profile's or `default_url`.
        profile: A profile of the configuration files (``sqlsem.toml``).
        debug: True watches the order in which locks are acquired, in all databases, and gives a `LockOrderWarning` if
            two places could wait for each other; False ends that. Alone it changes nothing else.
        options: As for `connect`: ``grace``, ``lease``, ``retry``, ``schema``, ``table``, ``creator``.

    Raises `ConfigurationError` for invalid options. Closes a default coordinator that is in use, which releases its
    locks.

    >>> sqlsem.configure("postgresql://etl@db/dwh", grace=30)  # doctest: +SKIP
    """
    global _configured, _coordinator
    check_options("configure()", options, ConnectOptions.__optional_keys__ | {"url", "profile", "debug"})
    if debug is not None:
        lock_order.configure(debug)
        if url is None and profile is None and not options:
            return
    new = _connect(url, profile, options)  # finds faults at once; connects only when used
    with _guard:
        replaced, _coordinator = _coordinator, new
        _configured = (url, profile, options)
    if replaced is not None:
        replaced.close()


def default() -> Coordinator:
    """Return the coordinator of the module-level functions; make it at the first use, and again after it was closed."""
    global _coordinator
    current = _coordinator
    if current is not None and not current.closed:
        return current
    with _guard:
        if _coordinator is None or _coordinator.closed:
            _coordinator = _connect(*_configured)
        return _coordinator


@contextlib.contextmanager
def configured(url: str, **options: Unpack[ConnectOptions]) -> Iterator[None]:
    """Configure another database until the block ends; then the earlier one applies again."""
    global _configured
    before = _configured
    configure(url, **options)
    try:
        yield
    finally:
        default().close()
        _configured = before


defaults.provide(default)


def _resolve(url: str | None, profile: str | None) -> config.Settings:
    with late.importing:
        from sqlsem import config  # a program that names its database by `sqlsem.connect` reads no files
    return config.resolve(url, profile=profile)


def _connect(url: Database | None, profile: str | None, options: ConnectOptions) -> Coordinator:
    if url is not None and not isinstance(url, str):
        return connect(url, **options)
    settings = _resolve(url, profile)
    merged: ConnectOptions = {**settings.options, **options}  # type: ignore[typeddict-item]  # checked by connect
    coordinator = connect(settings.url, **merged)
    for warning in settings.warnings:
        log.warning("%s", warning)
    if settings.embedded:
        _warn_of_embedded(coordinator, settings)
    else:
        log.info("Locks are kept in %s, from %s", coordinator.engine.label, settings.source)
    return coordinator


def _warn_of_embedded(coordinator: Coordinator, settings: config.Settings) -> None:
    """Warn once in a process that its locks are in a file of this user and host, which may be unintended."""
    global _warned_of_embedded
    log.log(
        logging.DEBUG if _warned_of_embedded else logging.WARNING,
        "No database was named, so locks are kept in %s, which only processes of this user on this host share%s. "
        "To share them with others set $SQLSEM_URL or write a sqlsem.toml; if this file is meant, say so: "
        "sqlsem.configure(%r)",
        coordinator.engine.label,
        f" ({settings.note})" if settings.note else "",
        settings.url,
    )
    _warned_of_embedded = True
