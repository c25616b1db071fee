"""The options and requests of a lock, as both APIs share them.

`Terms` are immutable and checked when they are made. They rely on `client_of` for the default coordinator, which is
looked up at each use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from sqlsem.core.callers import Caller
from sqlsem.core.client import DatabaseClient
from sqlsem.core.defaults import client_of
from sqlsem.core.effects import Effects
from sqlsem.core.grant_registry import LostCallback
from sqlsem.core.options import (
    GroupOptions,
    LockOptions,
    ModuleLockOptions,
    ModuleRateOptions,
    RateOptions,
    check_options,
)
from sqlsem.core.timeout_details import blockers
from sqlsem.errors import ConfigurationError, Timeout
from sqlsem.insight.blockers import in_words
from sqlsem.model import READ, WRITE, Duration, Request, check_call, check_count, check_duration
from sqlsem.model_rates import RateRequest, Windows, windows_of
from sqlsem.names import check_free

__all__ = [
    "Ask",
    "HasTerms",
    "Name",
    "Terms",
    "all_of",
    "limit",
    "mutex",
    "own_mutex",
    "rate",
    "read",
    "stage",
    "write",
]

#: A request for a lock or of a rate.
Ask = Request | RateRequest

#: A resource's name, or a function that computes it from the arguments of a decorated function's call.
Name = str | Callable[..., str]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request whose name may still have to be computed."""

    name: Name
    request: Ask  # complete when the name is a string

    def resolve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ask:
        """Return the request for a call with these arguments."""
        if isinstance(self.name, str):
            return self.request
        name = self.name(*args, **kwargs)
        if isinstance(self.request, RateRequest):
            return replace(self.request, name=name)
        found = replace(self.request, resource=name)
        check_free(name)
        return found


class Terms:
    """The requests of one lock, its database, and its options."""

    def __init__(
        self,
        asked: Sequence[Asked],
        client: DatabaseClient | None,
        *,
        timeout: Duration | None = None,
        reentrant: bool = False,
        on_lost: LostCallback | None = None,
        cancel_on_lost: bool = False,
        semaphore: bool = False,
    ) -> None:
        self.asked = tuple(asked)
        self.given_client = client
        self.timeout = None if timeout is None else check_duration("timeout", timeout)
        self.reentrant = reentrant
        if on_lost is not None:
            check_call("on_lost", on_lost)
        self.on_lost = on_lost
        self.cancel_on_lost = cancel_on_lost
        # As with `threading.Semaphore`, a grant outside of a block may be released by any thread.
        self.semaphore = semaphore and not reentrant
        # Resolved once, unless a name must be computed.
        is_complete = all(isinstance(asked.name, str) for asked in self.asked)
        self._requests = tuple(asked.request for asked in self.asked) if is_complete else None

    def __reduce__(self) -> tuple[Any, ...]:
        if self.given_client is not None:
            raise ConfigurationError(
                f"<Lock {self}> is of a coordinator, whose URL may hold a password, and cannot be pickled; make the "
                f"lock in the process that uses it, or choose the database there by sqlsem.configure or $SQLSEM_URL"
            )
        options = {
            "timeout": self.timeout,
            "reentrant": self.reentrant,
            "on_lost": self.on_lost,
            "cancel_on_lost": self.cancel_on_lost,
            "semaphore": self.semaphore,
        }
        return _unpickled, (self.asked, options, self.client.engine.label)

    @property
    def client(self) -> DatabaseClient:
        """In the database of its coordinator, or of the default one."""
        return self.given_client or client_of(None)

    @property
    def requests(self) -> Sequence[Ask]:
        """Return the requests. Raises `ConfigurationError` if they depend on the arguments of a call."""
        if self._requests is None:
            raise ConfigurationError(
                "The name of this lock is computed from a call's arguments, so it can only decorate functions; "
                "use a string here"
            )
        return self._requests

    def requests_of(self, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Ask]:
        """Return the requests for the call of a decorated function."""
        # A name is computed from all that the function is given, self or cls included.
        given = args if instance is None else (instance, *args)
        return self._requests or [asked.resolve(given, kwargs) for asked in self.asked]

    def seconds(self, blocking: bool, timeout: Duration | None) -> float | None:
        """Return the timeout of ``acquire(blocking, timeout)``."""
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

    def too_late(self, requests: Sequence[Ask], caller: Caller, timeout: float | None = None) -> Effects[Timeout]:
        """Return the error for requests that were not granted in time; it names the holders. The caller raises it."""
        seconds = self.timeout if timeout is None else timeout
        names = ", ".join(request.describe() for request in requests)
        found = yield from blockers(self.client, requests, caller)
        words = in_words(found)
        return Timeout(
            f"Did not get {names} within {seconds:g} s{f': {words}' if words else ''}; see the queue with: sqlsem ls",
            resource=requests[0].resource,
            holders=[holder for blocker in found for holder in blocker.holders],
        )

    def __str__(self) -> str:
        names = [asked.request.describe() if isinstance(asked.name, str) else "computed name" for asked in self.asked]
        return ", ".join(names)


class HasTerms(Protocol):
    """A lock of either API."""

    @property
    def terms(self) -> Terms:
        """The lock's terms."""


def _unpickled(asked: Sequence[Asked], options: dict[str, Any], where: str) -> Terms:
    here = client_of(None).engine.label
    if here != where:
        raise ConfigurationError(
            f"A lock was pickled where the default database was {where}, and here it is {here}: that would be another "
            f"lock; call sqlsem.configure in this process too (multiprocessing: initializer=), or set $SQLSEM_URL"
        )
    return Terms(asked, None, **options)


# -- the kinds of locks; `sqlsem.locks` documents them. A coordinator passes its client. ------------------------------


def mutex(name: Name, options: LockOptions, client: DatabaseClient | None = None) -> Terms:
    """One at a time."""
    return _terms_of("mutex", name, WRITE, 1, options, client)


def own_mutex(name: str, options: LockOptions, client: DatabaseClient | None = None) -> Terms:
    """Return the terms of a mutex on a resource whose name users cannot take (`RESERVED`)."""
    return _terms_of("mutex", name, WRITE, 1, options, client, own=True)


def limit(
    name: Name, limit: int | None, weight: int, options: LockOptions, client: DatabaseClient | None = None
) -> Terms:
    """Return the terms of a limit; None: the server's limit applies."""
    if limit is not None:
        check_count("The limit", limit)
    return _terms_of("limit", name, WRITE, limit, options, client, weight)


def read(name: Name, options: LockOptions, client: DatabaseClient | None = None) -> Terms:
    """Return the terms of a read lock."""
    return _terms_of("read", name, READ, 1, options, client)


def write(name: Name, options: LockOptions, client: DatabaseClient | None = None) -> Terms:
    """Return the terms of a write lock."""
    return _terms_of("write", name, WRITE, 1, options, client)


def stage(name: Name, order: int, options: LockOptions, client: DatabaseClient | None = None) -> Terms:
    """Return the terms of a stage lock."""
    if isinstance(order, bool) or not isinstance(order, int):
        raise ConfigurationError(f"The order of a stage must be a whole number, not {order!r}")
    return _terms_of("stage", name, f"stage:{order}", 1, options, client)


def all_of(locks: Sequence[HasTerms], options: GroupOptions, client: DatabaseClient | None = None) -> Terms:
    """Return the terms of several locks as one."""
    check_options("all_of()", options, GroupOptions.__optional_keys__)
    if not locks:
        raise ConfigurationError("all_of needs at least one lock")
    for lock in locks:
        if not isinstance(getattr(lock, "terms", None), Terms):
            raise ConfigurationError(
                f"all_of takes locks, not {lock!r}; write all_of(sqlsem.mutex('a'), sqlsem.limit('b', 2))"
            )
    if all(isinstance(part.request, RateRequest) for lock in locks for part in lock.terms.asked):
        raise ConfigurationError("all_of needs a lock beside its rates; without one, take one rate after the other")
    given = locks[0].terms.given_client
    if any(lock.terms.given_client is not given for lock in locks):
        raise ConfigurationError("all_of takes locks of one database only: several cannot be asked in one transaction")
    if client is not None and given is not client:
        raise ConfigurationError(f"{locks[0]!r} is not of {client!r}; make its locks by this coordinator's methods")
    asked = [part for lock in locks for part in lock.terms.asked]
    if len(asked) > 1 and any(getattr(part.request, "priority", None) is not None for part in asked):
        raise ConfigurationError(
            "A request with a priority is of one resource alone, and cannot be part of all_of; acquire it first, and "
            "the others under it"
        )
    names = [part.request.resource for part in asked if isinstance(part.name, str)]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"all_of names {name!r} twice; ask for it once, with a weight", resource=name)
    if options.get("reentrant") and any(isinstance(part.request, RateRequest) for part in asked):
        raise ConfigurationError("all_of with a rate cannot be reentrant: what is taken of a rate is not held")
    return Terms(asked, given, **options)


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
    known_name = name if isinstance(name, str) or not callable(name) else "computed"
    request = RateRequest(known_name, windows_of(limit, per), cost, burst, note)
    return Terms([Asked(name, request)], client if coordinator is None else client_of(coordinator), **others)


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
    # With a substitute for a computed name, all other arguments are checked at once.
    resource = name if isinstance(name, str) or not callable(name) else "computed"
    request = Request(resource, access, limit, weight, note, priority)
    if not own:
        check_free(resource)
    given = client if coordinator is None else client_of(coordinator)
    return Terms([Asked(name, request)], given, semaphore=kind == "limit", **others)
