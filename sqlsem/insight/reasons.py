"""Why somebody waits: the rule that holds it back, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlsem.insight.chains import Blocked, Waits, is_upgrading
from sqlsem.insight.estimates import Estimate, estimates
from sqlsem.insight.overview import Overview
from sqlsem.insight.passing import number
from sqlsem.insight.task_estimates import task_estimates
from sqlsem.insight.words import clock, seconds_in_words, span_in_words, who_is
from sqlsem.model import READ, UPGRADE, WRITE, Entry, QueueLimit, QueueWait, TaskEntry
from sqlsem.model_rates import Window
from sqlsem.names import access_in_words

__all__ = ["Reason", "TaskReason", "reasons", "task_reasons"]

#: So many people are named at the most.
NAMED = 3


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a request waits.

    ``code`` is one of ``limit`` (all of the limit is taken, or of a mutex), ``cap`` (the operator's cap is all that
    holds it back), ``paused``, ``writer_ahead``, ``readers_ahead``, ``stage``, ``upgrading`` (a reader waits until it
    is alone), ``own_earlier`` (it waits for its own row), ``turn_now`` (nothing holds it back: its process has not
    noticed yet).
    """

    code: str
    words: str  # a sentence
    short: str  # a few words, for a column
    behind: tuple[Entry, ...]  # the rows that hold it back, from the head of the queue on
    waiters: int  # how many wait before it and hold it back, too
    head: Entry | None  # at the end of the chain: who waits for nobody
    enters: Estimate | None  # when it will go in, where enough is known

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON-ready values; rows by their positions."""
        return {
            "code": self.code,
            "words": self.words,
            "behind": [one.position for one in self.behind],
            "waiters": self.waiters,
            "head": None if self.head is None else self.head.position,
            "enters": None if self.enters is None else self.enters.as_dict(),
        }


def person(entry: Entry) -> str:
    """Who it is: ``etl1:4711``."""
    return who_is(entry.host, entry.pid, entry.requesting_id)


def introduced(entry: Entry) -> str:
    """The same, with what it does: ``etl1:4711 (load.py, "orders")``."""
    known = [entry.program, f'"{entry.note}"' if entry.note else None]
    told = ", ".join(one for one in known if one)
    return f"{person(entry)} ({told})" if told else person(entry)


def _standing(entry: Entry) -> str:
    """What a row that is in the way does, and for how long."""
    since = seconds_in_words(entry.seconds)
    if entry.state == "waits":
        return f"{introduced(entry)}, which waits itself for {since}"
    told = f"{introduced(entry)}, which has held it for {since}"
    if entry.state == "dead":
        return f"{introduced(entry)}, which is dead and gives way to the next who looks"
    if entry.state == "revoked":
        return f"{told} and has been told to stop"
    if entry.in_transit:
        return f"{introduced(entry)}, which handed it over {since} ago; nobody has adopted it yet"
    if entry.missing_for is not None:
        left = "" if entry.grace is None else f" of its grace of {seconds_in_words(entry.grace)}"
        return f"{told} and cannot be found for {seconds_in_words(entry.missing_for)}{left}"
    return told


def _list(names: Sequence[str]) -> str:
    shown = list(names[:NAMED])
    if len(names) > NAMED:
        shown.append(f"{len(names) - NAMED} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _several(entries: Sequence[Entry]) -> str:
    return _standing(entries[0]) if len(entries) == 1 else _list([introduced(entry) for entry in entries])


def _room(one: Blocked) -> int:
    """The limit that binds: the lowest of its own, the cap, and those that the rows in its way declare."""
    cap = None if _is_above_cap(one) else one.setting.cap
    limits = [number(one.entry.limit), cap, *(number(row.limit) for row in one.behind)]
    return min((limit for limit in limits if limit is not None), default=0)


def _is_above_cap(one: Blocked) -> bool:
    return one.setting.cap is not None and (number(one.entry.weight) or 0) > one.setting.cap


def _code(one: Blocked) -> str:
    entry = one.entry
    if is_upgrading(entry):
        return "upgrading"
    if one.setting.paused:
        return "paused"
    if one.fits:
        return "turn_now"
    if one.fits_uncapped:
        return "cap"
    if one.own:
        return "own_earlier"
    labels = {row.access for row in one.behind}
    if entry.access != WRITE and any(label == WRITE or label.startswith(UPGRADE) for label in labels):
        return "writer_ahead"
    kinds = {label.partition(":")[0] for label in labels}
    if kinds == {"stage"}:
        return "stage"
    return "readers_ahead" if kinds and kinds <= {READ, UPGRADE} else "limit"


def _stages(entries: Iterable[Entry]) -> str:
    found = {entry.access.partition(":")[2] for entry in entries}
    return _list([f"stage {order}" for order in sorted(found)])


def _told(code: str, one: Blocked) -> tuple[str, str]:
    """A sentence, and a few words."""
    entry, setting, behind = one.entry, one.setting, one.behind
    first = person(behind[0]) if behind else ""
    others = f" +{len(behind) - 1}" if len(behind) > 1 else ""
    if code == "upgrading":
        if not behind:
            return "it is alone and becomes the writer in a moment", "its turn"
        return f"it becomes the writer when the others have left: {_several(behind)}", f"readers: {first}{others}"
    if code == "paused":
        by = f" by {setting.paused_by}" if setting.paused_by else ""
        since = "" if setting.paused_at is None else f" since {setting.paused_at.astimezone():%Y-%m-%d %H:%M:%S}"
        also = f"; then it is still behind {_several(behind)}" if behind else ""
        return f"the resource is paused{by}{since}: nobody is let in until: sqlsem resume{also}", f"paused{by}"
    if code == "turn_now":
        return "nothing holds it back any more: it goes in as soon as its process looks", "its turn"
    if code == "cap":
        by = setting.whose_cap
        short = f"cap {setting.cap}{by}"
        if not behind:
            above = f"its weight of {entry.weight} is above the operator's cap of {setting.cap}{by}"
            return f"{above}: it waits until that is raised", short
        return f"the operator's cap of {setting.cap}{by} is reached: {_several(behind)}", short
    if code == "own_earlier":
        return f"it waits for its own earlier row at {one.own[0].position}, and so for itself", "itself"
    if code == "writer_ahead":
        writer = next(row for row in behind if row.access == WRITE or row.access.startswith(UPGRADE))
        return f"a writer is ahead: {_standing(writer)}", f"writer {person(writer)}"
    if code == "readers_ahead":
        return f"it waits until those have left who read: {_several(behind)}", f"readers: {first}{others}"
    if code == "stage":
        return f"all of {_stages(behind)} that came before it have to leave: {_several(behind)}", _stages(behind)
    room = _room(one)
    if room <= 1:
        return f"it is behind {_several(behind)}", f"behind {first}"
    return f"the limit of {room} is full: {_several(behind)}", f"limit {room} full: {first}{others}"


def _reason(one: Blocked, waits: Waits, enters: Estimate | None) -> Reason:
    code = _code(one)
    words, short = _told(code, one)
    if _is_above_cap(one) and code not in ("cap", "paused"):
        words += f"; besides, its weight of {one.entry.weight} is above the operator's cap of {one.setting.cap}"
    before = one.waiters - sum(row.state == "waits" for row in one.behind)
    if before > 0 and code != "turn_now":
        words += f"; {before} more wait{'s' if before == 1 else ''} before it"
    if one.waiters and code in ("limit", "writer_ahead", "readers_ahead", "cap"):
        short += f", {one.waiters} before"
    head = waits.head(one.entry.position)
    chain = "" if head is None or head in one.behind else f"; in the end for {_standing(head)} ({head.resource})"
    told = ""
    if enters is not None:
        usual = span_in_words(enters.held_low, enters.held_high)
        told = f"; such locks usually take {usual}: it goes in in about {clock(enters.likely)} ({enters.between})"
    behind = one.own if code == "own_earlier" else one.behind
    return Reason(code, f"{words}{chain}{told}", short, behind, one.waiters, head, enters)


def reasons(overview: Overview, *, only: int | None = None, waits: Waits | None = None) -> dict[int, Reason]:
    """Why each of those waits who wait, by position; or only why one does. Who has been let in has no reason.

    >>> reasons(coordinator.overview())[4711].words  # doctest: +SKIP
    'it is behind etl1:4711 (load.py, "orders"), which has held it for 12m03s'
    """
    waits = waits or Waits(overview)
    found = estimates(overview, None if only is None else (only,))
    return {
        position: _reason(one, waits, found.get(position))
        for position, one in waits.blocked.items()
        if only is None or position == only
    }


@dataclass(frozen=True, slots=True)
class TaskReason:
    """Why a pending task does not run.

    ``code`` is ``order_open`` (tasks of a lower order are not done), ``not_ready`` (it has a time, or its retry has),
    ``queue_limit`` (as many of its queue run as may), ``key_limit`` (as many of its key do), ``rate`` (as many of its
    queue were started of late as may), ``key_rate`` (as many of its key were), ``locks`` (it waits for its locks) or
    ``turn_now`` (the next worker that is free takes it, or another one of its kind first).
    """

    code: str
    words: str
    short: str
    behind: tuple[TaskEntry, ...]  # the task that holds it up, where it is known
    ready_in: float | None = None  # seconds
    starts: Estimate | None = None  # when it will be started, where enough is known

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON-ready values; tasks by their numbers."""
        return {
            "code": self.code,
            "words": self.words,
            "behind": [one.task_id for one in self.behind],
            "ready_in": self.ready_in,
            "starts": None if self.starts is None else self.starts.as_dict(),
        }


class _Turns:
    """What holds a task back that its order does not: the limits and rates of its queue and of its key."""

    def __init__(self, tasks: Sequence[TaskEntry], limits: Iterable[QueueLimit], waits: Iterable[QueueWait]) -> None:
        self._waits = {(wait.queue, wait.task_key): wait.seconds for wait in waits}
        self._set = {(limit.queue, limit.task_key): limit for limit in limits}
        running = [task for task in tasks if task.status in ("running", "lost")]
        self._of_queue = Counter(one.queue for one in running)
        self._of_key = Counter((one.queue, one.key) for one in running)
        self._in_turns = {queue for queue, _ in self._set} | {
            task.queue for task in tasks if (task.key is not None or task.priority) and task.status == "pending"
        }

    def has(self, queue: str) -> bool:
        """Whether the queue has limits or keys."""
        return queue in self._in_turns

    def full(self, task: TaskEntry) -> TaskReason | None:
        """The limit that is reached."""
        queue, key = self._set.get((task.queue, None)), self._set.get((task.queue, task.key))
        runs = self._of_queue[task.queue]
        if queue is not None and queue.task_limit is not None and runs >= queue.task_limit:
            words = f"{runs} of {queue.task_limit} tasks of its queue are running, as {queue.set_by} has set"
            return TaskReason("queue_limit", words, f"limit {queue.task_limit} of the queue", ())
        if (wait := self._waits.get((task.queue, None))) is not None and queue is not None:
            return _used_up("rate", "of its queue", queue.task_rate, queue.task_per, wait)
        if task.key is None:
            return None
        if (wait := self._waits.get((task.queue, task.key))) is not None and queue is not None:
            limit, per = queue.key_rate, queue.key_per
            if key is not None and key.task_rate is not None:
                limit, per = key.task_rate, key.task_per
            return _used_up("key_rate", f"of its key {task.key!r}", limit, per, wait)
        own = None if key is None else key.task_limit
        most = own if own is not None or queue is None else queue.key_limit
        runs = self._of_key[task.queue, task.key]
        if most is None or runs < most:
            return None
        words = f"its key {task.key!r} has {runs} of {most} running"
        return TaskReason("key_limit", words, f"{runs} of {most} of {task.key}", ())

    def before(self, task: TaskEntry, pending: Sequence[TaskEntry]) -> str:
        """Which of those of its order come first, in words."""
        if not self.has(task.queue):
            ahead = sum(one.task_id < task.task_id for one in pending)
            return f" after {ahead} before it" if ahead else ""
        ahead = sum(
            one.key == task.key and (-one.priority, one.task_id) < (-task.priority, task.task_id) for one in pending
        )
        whose = "without a key" if task.key is None else f"of key {task.key!r}"
        told = f" after {ahead} {whose} before it" if ahead else ""
        return f"{told}, when it is the turn of those {whose} ({self._of_key[task.queue, task.key]} running)"


def _used_up(code: str, whose: str, limit: int | None, per: float | None, seconds: float) -> TaskReason:
    rate = "" if limit is None or per is None else f", {Window(round(per * 1000), limit)},"
    words = f"the rate {whose}{rate} is used up; there is room in {clock(seconds)}"
    return TaskReason(code, words, f"rate, in {seconds_in_words(seconds)}", (), seconds)


def task_reasons(
    tasks: Iterable[TaskEntry],
    taken_at: datetime,
    limits: Iterable[QueueLimit] = (),
    requests: Mapping[int, Reason] | None = None,
    waits: Iterable[QueueWait] = (),
) -> dict[int, TaskReason]:
    """Why those of these tasks that are pending do not run, by number. What holds one up is looked for among these,
        too: they are all that are open, of one queue or several, and what has ended of late, from which it follows when
    ``taken_at`` is the database's clock; ``limits``: what is set of these queues;
        ``requests``: why requests for locks wait, by position; ``waits``: whose rate is used up.
    """
    opened = sorted(tasks, key=lambda task: (task.queue, task.order, task.task_id))
    turns = _Turns(opened, limits, waits)
    # (The estimate knows of first come first served alone.)
    starts = task_estimates([one for one in opened if not turns.has(one.queue)], taken_at)
    by_order: dict[tuple[str, int], list[TaskEntry]] = {}
    for one in opened:
        by_order.setdefault((one.queue, one.order), []).append(one)
    found: dict[int, TaskReason] = {}
    held_up: TaskReason | None = None
    before = ""
    for (queue, _), members in by_order.items():
        held_up = held_up if queue == before else None
        before = queue
        pending = [member for member in members if member.status == "pending"]
        for one in pending:
            found[one.task_id] = held_up or _by_itself(one, pending, turns, taken_at, requests or {})
        if held_up is None or held_up.behind[0].status != "failed":
            held_up = _holding_up([member for member in members if _is_open(member)]) or held_up
    return {number: _starting(reason, starts.get(number)) for number, reason in found.items()}


def _starting(reason: TaskReason, starts: Estimate | None) -> TaskReason:
    """The same, with when that will be."""
    if starts is None:
        return reason
    usual = span_in_words(starts.held_low, starts.held_high)
    told = f"such tasks usually take {usual}: it starts in about {clock(starts.likely)} ({starts.between})"
    short = ", ".join(filter(None, (reason.short, f"~{clock(starts.likely)}")))
    return replace(reason, words=f"{reason.words}; {told}", short=short, starts=starts)


def _is_open(task: TaskEntry) -> bool:
    return task.status in ("pending", "running", "lost") or (task.status == "failed" and task.on_failure == "stop")


def _holding_up(opened: Sequence[TaskEntry]) -> TaskReason | None:
    """What the open tasks of one order are to those of later ones."""
    if not opened:
        return None
    failed = next((one for one in opened if one.status == "failed"), None)
    if failed is not None:
        words = f"order {failed.order} is open because task {failed.task_id} failed; retry or cancel it"
        return TaskReason("order_open", words, f"task {failed.task_id} failed", (failed,))
    first = next((one for one in opened if one.status != "pending"), opened[0])
    ran = ""
    if first.status != "pending":
        who = who_is(first.host, first.pid, "a worker")
        ran = f", which {who} has run for {seconds_in_words(first.seconds or 0.0)}"
    others = f", and {len(opened) - 1} more" if len(opened) > 1 else ""
    words = f"order {first.order} is open: task {first.task_id}{ran}{others}"
    return TaskReason("order_open", words, f"after order {first.order}", (first,))


def _by_itself(
    task: TaskEntry, pending: Sequence[TaskEntry], turns: _Turns, taken_at: datetime, requests: Mapping[int, Reason]
) -> TaskReason:
    """Of one that no other order holds up."""
    left = (task.ready_at - taken_at).total_seconds()
    if left > 0:
        again = f"attempt {task.attempt + 1} of {task.max_attempts}" if task.failures else "it"
        return TaskReason("not_ready", f"{again} is due in {clock(left)}", f"in {seconds_in_words(left)}", (), left)
    if task.parked:
        return turns.full(task) or _parked(task, requests)
    told = f"the next worker that is free takes it{turns.before(task, pending)}"
    return turns.full(task) or TaskReason("turn_now", told, "", ())


def _parked(task: TaskEntry, requests: Mapping[int, Reason]) -> TaskReason:
    """Of one that could run but for its locks."""
    names = ", ".join(f"{access_in_words(lock.access, lock.limit)} on {lock.resource!r}" for lock in task.locks)
    if any(lock.position is None for lock in task.locks):
        words = f"it will stand in the lines of its locks ({names}) as soon as a worker of its queue looks"
        return TaskReason("locks", words, "not in line yet", ())
    blocked = [
        (lock, requests[lock.position])
        for lock in task.locks
        if lock.position is not None and lock.position in requests
    ]
    if not blocked:
        words = f"it stands in the lines of its locks ({names}); in its turn the next worker that is free takes it"
        return TaskReason("locks", words, f"for {task.locks[0].resource}", ())
    told = "; ".join(f"at {one.position} for {one.resource!r}: {reason.words}" for one, reason in blocked)
    words = f"it waits for its locks, without a worker: {told}"
    return TaskReason("locks", words, f"for {blocked[0][0].resource}", ())
