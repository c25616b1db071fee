"""The features that a database can have, and the parts of the scripts that belong to each.

In a script the lines from ``-- feature: queue`` to ``-- end of feature: queue`` belong to that feature. They are left
out of a database that does not have it: tables in the schema script, or a few lines in a routine of another feature.
Sections may be nested. Lines of ``-- feature: any`` are never left out. Lines of ``-- feature: not queue`` are left out
of a database that has the feature.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from sqlsem.values.errors import ConfigurationError

__all__ = ["CORE", "EVERYTHING", "FEATURES", "Feature", "chosen", "compose", "from_setting", "listed", "to_setting"]


class Feature(NamedTuple):
    """A part of sqlsem that a database may have or not have."""

    title: str
    #: The features that its routines call.
    needs: tuple[str, ...] = ()
    #: The roles that it brings, without the schema's name.
    roles: tuple[str, ...] = ()


#: The feature that every database has.
CORE = "locks"
FEATURES = {
    CORE: Feature("locks, limits, readers and writers, stages, deadlocks, the history", roles=("user", "reader")),
    "operate": Feature("caps, pauses, revoking, reaping, and all locks at one instant", roles=("operator",)),
    "priorities": Feature("requests that wait by priority", ("operate",)),
    "conversions": Feature("readers that become writers, and writers that become readers"),
    "handovers": Feature("locks that are handed over to another process, or end with a transaction"),
    "guards": Feature("tables that can be written only under a lock"),
    "rates": Feature("limits on use in a window of time"),
    "once": Feature("jobs that run once per period"),
    "queue": Feature("the work queue: tasks, tasks with locks, schedules", ("rates",), ("putter", "worker")),
    "batches": Feature("batches: parts that run side by side, and their callback"),
}
#: Setting ``features`` of a database that has all features, also those of later versions.
EVERYTHING = "all"

_MARK = re.compile(r"[ \t]*-- (feature|end of feature): ((?:not )?)(\w+)")


def chosen(names: Iterable[str]) -> frozenset[str]:
    """Return the features of these names (``all``: every one), with those that they need.

    Raises `ConfigurationError` for an unknown name.
    """
    features, pending = {CORE}, list(names)
    while pending:
        name = pending.pop()
        if name == EVERYTHING:
            pending.extend(FEATURES)
        elif name not in FEATURES:
            raise ConfigurationError(f"There is no feature {name!r}; features: {', '.join(FEATURES)}, {EVERYTHING}")
        elif name not in features or name == CORE:
            features.add(name)
            pending.extend(FEATURES[name].needs)
    return frozenset(features)


def listed(features: Collection[str]) -> str:
    """Return the names in the order of `FEATURES`, for people."""
    return ", ".join(name for name in FEATURES if name in features)


def to_setting(features: Collection[str]) -> str:
    """Return the value of setting ``features`` for these features."""
    return EVERYTHING if set(features) >= set(FEATURES) else listed(features).replace(" ", "")


def from_setting(value: str | None) -> frozenset[str]:
    """Return the features that setting ``features`` names; all features without such a setting.

    Features of a later version are left out.
    """
    names = (EVERYTHING if value is None else value).replace(" ", "").split(",")
    return chosen(name for name in names if name in FEATURES or name == EVERYTHING)


def compose(text: str, features: Collection[str], feature: str = CORE) -> str:
    """Return the lines of a script for these features; lines outside of any section belong to ``feature``."""
    return "".join(line for line, needed, unwanted in sections(text, feature) if fits(needed, unwanted, features))


def fits(needed: Collection[str], unwanted: Collection[str], features: Collection[str]) -> bool:
    """Return True if a line with these sections (see `sections`) belongs in a database with these features."""
    return set(needed) <= set(features) and not set(unwanted) & set(features)


def sections(text: str, feature: str = CORE) -> Iterator[tuple[str, set[str], set[str]]]:
    """Yield each line except the marks, with the features that it needs, and the features that exclude it."""
    inside: list[tuple[str, str]] = []
    for line in text.splitlines(keepends=True):
        mark = _MARK.fullmatch(line.rstrip())
        if mark is None:
            needed = {name for negation, name in inside if not negation} if inside else {feature}
            yield line, needed - {"any"}, {name for negation, name in inside if negation}
        elif mark[1] == "feature":
            if mark[3] not in FEATURES and mark[3] != "any":
                raise ValueError(f"There is no feature {mark[3]!r}")
            inside.append((mark[2], mark[3]))
        elif not inside or inside.pop() != (mark[2], mark[3]):
            raise ValueError(f"The section of feature {mark[3]!r} ends in another one")
    if inside:
        raise ValueError(f"The section of feature {inside[-1][1]!r} has no end")
