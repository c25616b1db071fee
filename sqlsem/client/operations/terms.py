"""The options and requests of a lock, which both APIs share.

`Terms` are immutable, and are checked when they are made. Terms without a coordinator find the default one at each use
(`client_of`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sqlsem.client.defaults import client_of
from sqlsem.client.operations.timeout_details import timeout_error
from sqlsem.client.options import (
    GroupOptions,
    LockOptions,
    ModuleLockOptions,
    ModuleRateOptions,
    RateOptions,
    check_options,
)
from sqlsem.util.record import record
from sqlsem.values.errors import ConfigurationError, Timeout
from sqlsem.values.locks import READ, WRITE, Duration, Request, check_call, check_count, check_duration
from sqlsem.values.names import check_free
from sqlsem.values.rates import RateRequest, Windows, windows_of

if TYPE_CHECKING:
    from sqlsem.client.callers import Caller
    from sqlsem.client.client import DatabaseClient
    from sqlsem.client.effects import Effects
    from sqlsem.client.held.registry import LostCallback
    from sqlsem.client.options import AnyLock

__all__ = [
    "AnyRequest",
    "Name",
    "Terms",
    "all_of",
    "limit",
    "lock",
    "own_mutex",
    "rate",
    "stage",
]

#: A request for a lock or of a rate.
AnyRequest = Request | RateRequest

#: A resource's name, or a function that computes it from the arguments of a decorated function's call.
Name = str | Callable[..., str]


@record
class RequestTemplate:
    """A request whose name may depend on the arguments of a call."""

    name: Name
    request: AnyRequest  # complete if the name is a string

    def resolve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AnyRequest:
        """Return the request for a call with these arguments."""
        if isinstance(self.name, str):
            return self.request
        name = self.name(*args, **kwargs)
        if isinstance(self.request, RateRequest):
            return replace(self.request, name=name)
        request = replace(self.request, resource=name)
        check_free(name)
        return request


class Terms:
    """The requests of one lock, its database, and its options."""

    def __init__(
        self,
        templates: Sequence[RequestTemplate],
        client: DatabaseClient | None,
        *,
        timeout: Duration | None = None,
        reentrant: bool = False,
        on_lost: LostCallback | None = None,
        cancel_on_lost: bool = False,
        semaphore: bool = False,
    ) -> None:
        self.templates = tuple(templates)
        self.given_client = client
        self.timeout = None if timeout is None else check_duration("timeout", timeout)
        self.reentrant = reentrant
        if on_lost is not None:
            check_call("on_lost", on_lost)
        self.on_lost = on_lost
        self.cancel_on_lost = cancel_on_lost
        # As with `threading.Semaphore`, any thread may release a grant that was acquired outside of a block.
        self.semaphore = semaphore and not reentrant
        kinds = [template.request for template in self.templates]
        self.has_rates = any(isinstance(request, RateRequest) for request in kinds)
        self.has_priority = any(isinstance(request, Request) and request.priority is not None for request in kinds)
        # The requests are known, unless a name must be computed.
        is_complete = all(isinstance(template.name, str) for template in self.templates)
        self._requests = tuple(kinds) if is_complete else None

    def __reduce__(self) -> tuple[Any, ...]:
        if self.given_client is not None:
            raise ConfigurationError(
                f"<Lock {self}> is of a coordinator, whose URL may hold a password, and cannot be pickled; make the "
                f"lock in the process that uses it, or choose the database there by sqlsem.configure or $SQLSEM_URL"
            )
        names = ("timeout", "reentrant", "on_lost", "cancel_on_lost", "semaphore")
        options = {name: getattr(self, name) for name in names}
        return _unpickled, (self.templates, options, self.client.engine.label)

    @property
    def client(self) -> DatabaseClient:
        """The client of the lock's coordinator, or of the default one."""
        return self.given_client or client_of(None)

    @functools.cached_property
    def requests(self) -> Sequence[AnyRequest]:
        """The requests. Raises `ConfigurationError` if they depend on the arguments of a call."""
        if self._requests is None:
            raise ConfigurationError(
                "The name of this lock is computed from a call's arguments, so it can only decorate functions; "
                "use a string here"
            )
        return self._requests

    def requests_of(self, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[AnyRequest]:
        """Return the requests for the call of a decorated function."""
        # A name is computed from all arguments of the function, including self or cls.
        given = args if instance is None else (instance, *args)
        return self._requests or [template.resolve(given, kwargs) for template in self.templates]

    def seconds(self, blocking: bool, timeout: Duration | None) -> float | None:
        """Return the timeout of ``acquire(blocking, timeout)`` in seconds; None: for ever; 0: only try."""
        if not blocking:
            if timeout is not None and timeout != -1:
                raise ConfigurationError("A call that does not block takes no timeout")
            return 0.0
        if timeout == -1:
            return self.timeout
        return None if timeout is None else check_duration("timeout", timeout)

    def check_number(self, n: int) -> int:
        """Check the number of ``release(n)``, and return it."""
        if n != 1 and not self.semaphore:
            raise ConfigurationError(
                f"<Lock {self}> is released once for each time that it was acquired; n is for limits"
            )
        return check_count("The number to release", n)

    def timeout_error(
        self, requests: Sequence[AnyRequest], caller: Caller, timeout: float | None = None
    ) -> Effects[Timeout]:
        """Return the error to raise for requests that were not granted in time. It names the holders."""
        seconds = self.timeout if timeout is None else timeout
        names = ", ".join(request.describe() for request in requests)
        message = f"Did not get {names} within {seconds:g} s"
        return (yield from timeout_error(self.client, requests, caller, message))

    def __str__(self) -> str:
        names = [
            template.request.describe() if isinstance(template.name, str) else "computed name"
            for template in self.templates
        ]
        return ", ".join(names)


def _unpickled(templates: Sequence[RequestTemplate], options: dict[str, Any], database: str) -> Terms:
    default = client_of(None).engine.label
    if default != database:
        raise ConfigurationError(
            f"A lock was pickled where the default database was {database}, and here it is {default}: that would be "
            f"another lock; call sqlsem.configure in this process too (multiprocessing: initializer=), or set "
            f"$SQLSEM_URL"
        )
    return Terms(templates, None, **options)


# -- the kinds of locks (documented in `sqlsem.api.locks`); a coordinator passes its client ----------------------------


def lock(kind: str, name: Name, options: LockOptions, client: DatabaseClient | None = None) -> Terms:
    """Return the terms of a lock with one argument: ``mutex``, ``read`` or ``write``."""
    return _terms_of(kind, name, READ if kind == "read" else WRITE, 1, options, client)


def own_mutex(name: str, options: LockOptions, client: DatabaseClient | None = None) -> Terms:
    """Return the terms of a mutex on a resource whose name is reserved for the package (`RESERVED`)."""
    return _terms_of("mutex", name, WRITE, 1, options, client, own=True)


def limit(
    name: Name, limit: int | None, weight: int, options: LockOptions, client: DatabaseClient | None = None
) -> Terms:
    """Return the terms of a limit; None: the server's limit applies."""
    if limit is not None:
        check_count("The limit", limit)
    return _terms_of("limit", name, WRITE, limit, options, client, weight)


def stage(name: Name, order: int, options: LockOptions, client: DatabaseClient | None = None) -> Terms:
    """Return the terms of a stage lock."""
    if isinstance(order, bool) or not isinstance(order, int):
        raise ConfigurationError(f"The order of a stage must be a whole number, not {order!r}")
    return _terms_of("stage", name, f"stage:{order}", 1, options, client)


def all_of(locks: Sequence[AnyLock], options: GroupOptions, client: DatabaseClient | None = None) -> Terms:
    """Return the terms of several locks as one."""
    check_options("all_of()", options, GroupOptions.__optional_keys__)
    if not locks:
        raise ConfigurationError("all_of needs at least one lock")
    for lock in locks:
        if not isinstance(getattr(lock, "terms", None), Terms):
            raise ConfigurationError(
                f"all_of takes locks, not {lock!r}; write all_of(sqlsem.mutex('a'), sqlsem.limit('b', 2))"
            )
    if all(isinstance(part.request, RateRequest) for lock in locks for part in lock.terms.templates):
        raise ConfigurationError("all_of needs a lock beside its rates; without one, take one rate after the other")
    given = locks[0].terms.given_client
    if any(lock.terms.given_client is not given for lock in locks):
        raise ConfigurationError("all_of takes locks of one database only: several cannot be asked in one transaction")
    if client is not None and given is not client:
        raise ConfigurationError(f"{locks[0]!r} is not of {client!r}; make its locks by this coordinator's methods")
    templates = [part for lock in locks for part in lock.terms.templates]
    if len(templates) > 1 and any(getattr(part.request, "priority", None) is not None for part in templates):
        raise ConfigurationError(
            "A request with a priority is of one resource alone, and cannot be part of all_of; acquire it first, and "
            "the others under it"
        )
    names = [part.request.resource for part in templates if isinstance(part.name, str)]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"all_of names {name!r} twice; ask for it once, with a weight", resource=name)
    if options.get("reentrant") and any(isinstance(part.request, RateRequest) for part in templates):
        raise ConfigurationError("all_of with a rate cannot be reentrant: what is taken of a rate is not held")
    return Terms(templates, given, **options)


def rate(
    name: Name,
    limit: int | Windows | None,
    per: Duration | None,
    cost: int,
    burst: int | None,
    options: RateOptions,
    client: DatabaseClient | None = None,
) -> Terms:
    """Return the terms of a rate."""
    known = ModuleRateOptions if client is None else RateOptions
    check_options("rate()", options, known.__optional_keys__)
    others: dict[str, Any] = {**options}
    note, coordinator = others.pop("note", None), others.pop("coordinator", None)
    checked_name = name if isinstance(name, str) or not callable(name) else "computed"
    request = RateRequest(checked_name, windows_of(limit, per), cost, burst, note)
    return Terms([RequestTemplate(name, request)], client if coordinator is None else client_of(coordinator), **others)


def _terms_of(
    kind: str,
    name: Name,
    access: str,
    limit: int | None,
    options: LockOptions,
    client: DatabaseClient | None,
    weight: int = 1,
    own: bool = False,
) -> Terms:
    known = ModuleLockOptions if client is None else LockOptions
    check_options(f"{kind}()", options, known.__optional_keys__)
    others: dict[str, Any] = {**options}
    note, coordinator = others.pop("note", None), others.pop("coordinator", None)
    priority = others.pop("priority", None)
    # (A substitute for a computed name: so the other arguments are checked now.)
    resource = name if isinstance(name, str) or not callable(name) else "computed"
    request = Request(resource, access, limit, weight, note, priority)
    if not own:
        check_free(resource)
    given = client if coordinator is None else client_of(coordinator)
    return Terms([RequestTemplate(name, request)], given, semaphore=kind == "limit", **others)
