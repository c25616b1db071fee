"""Resolve limits that the server sets: a pattern sets one limit for all resources whose names begin alike.

A pattern is a name that ends with ``*``. The longest pattern that matches counts, and a resource's own limit comes
before all patterns.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sqlsem.values.locks import Resource

__all__ = ["Patterns", "counted_on", "is_pattern", "no_limit_set", "with_settings"]


class Pattern(NamedTuple):
    """``tenant:*``, its limit, and the login that set it."""

    name: str
    cap: int
    cap_by: str | None = None


def is_pattern(name: str) -> bool:
    """Return True if a name stands for all names that begin like it.

    >>> is_pattern("tenant:*"), is_pattern("tenant:7")
    (True, False)
    """
    return name.endswith("*")


class Patterns:
    """The patterns that operators have set, looked up by a resource's name.

    >>> patterns = Patterns([("*", 9, "anna"), ("tenant:*", 4, "bert"), ("etl", 2, "anna")])
    >>> patterns.of("tenant:7")
    Pattern(name='tenant:*', cap=4, cap_by='bert')
    """

    def __init__(self, settings: Iterable[tuple[str, int | None, str | None]]) -> None:
        """Select the patterns among these settings: each a name, its cap, and the login that set it."""
        self._by_prefix = {
            name[:-1]: Pattern(name, cap, by)
            for name, cap, by in settings
            if cap is not None and isinstance(name, str) and is_pattern(name)
        }
        self._lengths = sorted({len(prefix) for prefix in self._by_prefix}, reverse=True)

    def of(self, resource: str) -> Pattern | None:
        """Return the longest pattern that a name matches."""
        if not isinstance(resource, str):  # written by hand, into a table of SQLite that accepts any type
            return None
        for length in self._lengths:
            pattern = self._by_prefix.get(resource[:length])
            if pattern is not None and length <= len(resource):
                return pattern
        return None

    def cap_of(self, resource: str) -> int | None:
        """Return the limit that a pattern sets for the resource."""
        pattern = self.of(resource)
        return None if pattern is None else pattern.cap


def no_limit_set(resource: str) -> str:
    """Return the error text for a request without a limit, if the server has none for it either."""
    return (
        f"No limit is set for {resource!r}, and the request names none; an operator sets one with: "
        f"sqlsem set {shlex.quote(resource)} --limit N --allow-new"
    )


def counted_on(number: int, resource: str) -> str:
    """Return the error text for a limit that cannot be lifted, because requests rely on it."""
    return (
        f"{number} requests (on {resource!r} first) name no limit and count on this one: it can be changed, not "
        f"lifted, until they have ended; see who they are: sqlsem ls"
    )


def with_settings(
    resources: Iterable[Resource], settings: Mapping[str, Sequence[Any]], ageing: Mapping[str, float]
) -> list[Resource]:
    """Return resources with their settings.

    ``settings`` has a row for each resource or pattern, by name: resource, cap, paused_at, stale_after, paused_by,
    cap_by. ``ageing`` has the ageing of each resource with priorities.
    """
    patterns = Patterns((row[0], row[1], row[5]) for row in settings.values())
    results = []
    for resource in resources:
        own = settings.get(resource.resource, (resource.resource, None, None, None, None, None))
        cap, by, name = own[1], own[5], None
        if cap is None and (pattern := patterns.of(resource.resource)) is not None:
            name, cap, by = pattern
        results.append(
            dataclasses.replace(
                resource,
                cap=cap,
                cap_by=by,
                pattern=name,
                paused=own[2] is not None,
                paused_at=own[2],
                stale_after=own[3],
                paused_by=own[4],
                ageing=ageing.get(resource.resource),
            )
        )
    return results
