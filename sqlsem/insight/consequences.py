"""Say in words what an operator's action would do, before it is done: which requests it grants, and which wait on."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Literal

from sqlsem.insight.overview import Overview
from sqlsem.insight.totals import QueueTotals
from sqlsem.insight.words import counted, requester, seconds_in_words
from sqlsem.util.printable import clean
from sqlsem.util.record import record
from sqlsem.values.locks import Entry, Resource

__all__ = ["OPERATE", "RETRY", "Action", "Consequence", "consequence", "grantable"]

#: The rights that actions need, by their names in `AdminSession.rights`.
OPERATE, RETRY = "operate", "retry"
#: Name at most this many granted requests.
NAMED = 3
#: The states of a holder. Actions on its resource do not end its hold.
INSIDE = ("holds", "revoked")

Kind = Literal["pause", "resume", "cap", "uncap", "revoke", "revoke_now", "retry"]


@record
class Action:
    """An operator's action on a resource, a position or a task. (``revoke_now`` is ``revoke`` with force.)"""

    kind: Kind
    resource: str | None = None
    position: int | None = None
    task_id: int | None = None
    cap: int | None = None

    @property
    def right(self) -> str:
        """The right that it needs."""
        return RETRY if self.kind == "retry" else OPERATE

    @property
    def command(self) -> str:
        """The command that does the same."""
        words: dict[Kind, list[str]] = {
            "pause": ["pause", str(self.resource)],
            "resume": ["resume", str(self.resource)],
            "cap": ["set", str(self.resource), "--limit", "N" if self.cap is None else str(self.cap)],
            "uncap": ["set", str(self.resource), "--no-limit"],
            "revoke": ["revoke", str(self.position)],
            "revoke_now": ["revoke", str(self.position), "--force"],
            "retry": ["tasks", "retry", str(self.task_id)],
        }
        return clean(shlex.join(["sqlsem", *words[self.kind]]))


@record
class Consequence:
    """The outcome of an action.

    Attributes:
        action: The action.
        question: The question to confirm it; or if it is not possible, the reason.
        lines: The effects, one sentence each.
        possible: True if it can be done now.
        admitted: The positions that it would grant at once.
    """

    action: Action
    question: str
    lines: tuple[str, ...] = ()
    possible: bool = True
    admitted: tuple[int, ...] = ()


def grantable(entries: Iterable[Entry], cap: int | None, paused: bool) -> list[Entry]:
    """Return the waiters of one resource's queue, in order, that the rule (`Request.fits`) grants at once.

    Dead rows ahead do not count: the waiter behind them checks and removes them.
    """
    ahead = QueueTotals(cap, paused)
    granted = []
    for entry in entries:
        if entry.state == "dead":
            continue
        kind = entry.access, entry.limit, entry.weight
        if entry.state == "waits" and ahead.fits(*kind):
            granted.append(entry)
        ahead.add(*kind)
    return granted


def consequence(overview: Overview, action: Action) -> Consequence:
    """Return what ``action`` would do, given ``overview``.

    >>> result = consequence(overview, Action("resume", resource="etl"))  # doctest: +SKIP
    >>> result.question, result.lines  # doctest: +SKIP
    ("Resume 'etl'?", ('Grants 4 (db1:811) and 5 (db2:77), then 6.',))
    """
    if action.kind == "retry":
        return _retry(overview, action)
    if action.kind in ("revoke", "revoke_now"):
        return _revoke(overview, action)
    name = str(action.resource)
    queue = [entry for entry in overview.entries if entry.resource == name]
    resource = next((candidate for candidate in overview.resources if candidate.resource == name), None)
    if resource is None:
        return Consequence(action, f"{clean(name)!r} is not there any more", possible=False)
    result = {"pause": _pause, "resume": _resume, "cap": _cap, "uncap": _cap}[action.kind](action, resource, queue)
    return replace(result, question=clean(result.question))


def _pause(action: Action, resource: Resource, queue: Sequence[Entry]) -> Consequence:
    if resource.paused:
        return Consequence(action, f"{resource.resource!r} is paused already", possible=False)
    lines = [_holders_stay(queue), f"No request is granted until it is resumed; {_waiting(queue)}."]
    blocked = grantable(queue, resource.cap, False)
    if blocked:
        lines.append(f"Blocks {_names(blocked)}.")
    return Consequence(action, f"Pause {resource.resource!r}?", tuple(filter(None, lines)))


def _resume(action: Action, resource: Resource, queue: Sequence[Entry]) -> Consequence:
    if not resource.paused:
        return Consequence(action, f"{resource.resource!r} is not paused", possible=False)
    admitted = grantable(queue, resource.cap, False)
    lines = (_grants(admitted, queue),)
    return Consequence(action, f"Resume {resource.resource!r}?", lines, admitted=_positions(admitted))


def _cap(action: Action, resource: Resource, queue: Sequence[Entry]) -> Consequence:
    name, cap = resource.resource, action.cap if action.kind == "cap" else None
    if cap == resource.cap:
        reason = "has no operator's limit" if cap is None else f"has the limit {cap} already"
        return Consequence(action, f"{name!r} {reason}", possible=False)
    if cap is None and resource.pattern is not None:
        reason = f"{name!r} has no cap of its own, but that of {resource.pattern!r}: change that one, or cap this one"
        return Consequence(action, reason, possible=False)
    was = "" if resource.cap is None else f" (now {resource.cap})"
    question = f"Remove the limit of {name!r}{was}?" if cap is None else f"Limit {name!r} to {cap}{was}?"
    before = _positions(grantable(queue, resource.cap, resource.paused))
    after = grantable(queue, cap, resource.paused)
    lines = []
    load = sum(entry.weight for entry in queue if entry.state in INSIDE)
    if cap is not None and load > cap:
        lines.append(f"{_holders_stay(queue)} No request is granted until a weight of {load - cap} and more has left.")
    if cap is None and any(entry.limit is None and entry.member_id is not None for entry in queue):
        lines.append("Requests there name no limit and count on it: it can be changed, not lifted.")
    if cap is not None:
        lines += [
            f"{entry.position} asks for a weight of {entry.weight}: under this cap it can never be granted, and "
            f"conflicting requests behind it wait as well."
            for entry in queue
            if entry.state == "waits" and entry.weight > cap
        ][:1]
    if resource.paused:
        lines.append("It is paused: nothing is granted until it is resumed.")
    else:
        blocked = [entry for entry in grantable(queue, resource.cap, False) if entry.position not in _positions(after)]
        if blocked:
            lines.append(f"Blocks {_names(blocked)}.")
        lines.append(_grants([entry for entry in after if entry.position not in before], queue))
    return Consequence(action, question, tuple(lines), admitted=_positions(after))


def _revoke(overview: Overview, action: Action) -> Consequence:
    entry = next((row for row in overview.entries if row.position == action.position), None)
    if entry is None:
        return Consequence(action, f"Position {action.position} is gone already", possible=False)
    resource = next((row for row in overview.resources if row.resource == entry.resource), None)
    cap, paused = (resource.cap, resource.paused) if resource else (None, False)
    queue = [row for row in overview.entries if row.resource == entry.resource]
    remaining = [row for row in queue if row.position != entry.position]
    before = _positions(grantable(queue, cap, paused))
    after = [row for row in grantable(remaining, cap, paused) if row.position not in before]
    process = clean(requester(entry))
    verb = "Revoke at once" if action.kind == "revoke_now" else "Revoke"
    question = f"{verb} {entry.position} of {clean(entry.resource)!r} ({process})?"
    effects = _effects_on(entry, force=action.kind == "revoke_now")
    grants = "The resource is paused: this grants nothing." if paused else _grants(after, remaining)
    return Consequence(action, question, (*effects, grants), admitted=_positions(after))


def _effects_on(entry: Entry, *, force: bool) -> Iterable[str]:
    duration = f"It {'has held' if entry.state in INSIDE else 'has waited'} for {seconds_in_words(entry.seconds)}"
    note = f", for {clean(entry.note)!r}." if entry.note else "."
    yield duration + note
    if entry.state == "dead":
        yield "Its process is dead: the row is removed."
    elif entry.state == "waits":
        yield "It leaves the queue; its program is told that it was revoked."
    elif force:
        yield "Others may be granted before its program knows, and run beside it."
    elif entry.state == "revoked":
        yield "Its holder has been told already, and is removed when its grace is over."
    elif entry.member_id is None:
        yield "No living process owns the row: it is removed at once."
    else:
        grace = "its grace" if entry.grace is None else f"its grace ({seconds_in_words(entry.grace)})"
        yield f"Its holder is told, and has {grace} to stop; then it is removed."


def _retry(overview: Overview, action: Action) -> Consequence:
    queue = next((candidate for candidate in overview.queues if candidate.blocked_by == action.task_id), None)
    question = f"Retry task {action.task_id}?"
    lines = ["It is pending again, and the next free worker takes it."]
    if queue is not None:
        waits = counted(queue.pending, "pending task")
        lines.append(f"It has failed, and blocks later orders of {clean(queue.queue)!r} ({waits} there).")
        lines.append("If it succeeds, they start; if it fails again, they stay blocked.")
    return Consequence(action, question, tuple(lines))


# -- words ----------------------------------------------------------------------------------------------------------


def _positions(entries: Iterable[Entry]) -> tuple[int, ...]:
    return tuple(entry.position for entry in entries)


def _name(entry: Entry) -> str:
    return clean(f"{entry.position} ({requester(entry)})")


def _names(entries: Sequence[Entry]) -> str:
    """Return a list as ``4 (db1:811), 5 (db2:77) and 12 more``."""
    shown = [_name(entry) for entry in entries[:NAMED]]
    if len(entries) > NAMED:
        shown.append(f"{len(entries) - NAMED} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _grants(admitted: Sequence[Entry], queue: Iterable[Entry]) -> str:
    """Say which requests are granted at once, and which comes next."""
    waiting = [entry for entry in queue if entry.state == "waits"]
    after = _after(waiting, {entry.position for entry in admitted})
    if not admitted:
        return f"Grants nothing at once; next is {_name(after)}." if after else "No request waits."
    then = f", then {after.position}" if after else "; no request waits behind"
    return f"Grants {_names(admitted)}{then}."


def _after(waiting: Iterable[Entry], admitted: Collection[int]) -> Entry | None:
    """Return the first request that still waits."""
    return next((entry for entry in waiting if entry.position not in admitted), None)


def _holders_stay(queue: Iterable[Entry]) -> str:
    inside = sum(entry.state in INSIDE for entry in queue)
    if not inside:
        return "Nothing is held."
    return "The holder stays." if inside == 1 else f"The {inside} holders stay."


def _waiting(queue: Iterable[Entry]) -> str:
    waiting = sum(entry.state == "waits" for entry in queue)
    return "no request waits" if not waiting else "one waits" if waiting == 1 else f"{waiting} wait"
