"""Say in words why a request or a task waits: which part of the rule blocks it, and which rows are in its way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlsem.insight.chains import Blocked, WaitGraph, is_upgrading
from sqlsem.insight.estimates import Estimate, estimates
from sqlsem.insight.overview import Overview
from sqlsem.insight.task_estimates import task_estimates
from sqlsem.insight.totals import number
from sqlsem.insight.words import by_login, clock, process_name, requester, seconds_in_words, span_in_words
from sqlsem.util.record import record
from sqlsem.values.locks import READ, UPGRADE, WRITE, Entry
from sqlsem.values.names import access_in_words
from sqlsem.values.rates import Window
from sqlsem.values.tasks import QueueLimit, QueueWait, TaskEntry

__all__ = ["Reason", "TaskReason", "reasons", "task_reasons", "wait_in_words"]

#: Name at most this many owners.
NAMED = 3


@record
class Reason:
    """The reason why a request waits.

    ``code`` is one of ``limit`` (all of the limit, or of a mutex, is taken), ``cap`` (only the operator's cap blocks
    it), ``paused``, ``writer_ahead``, ``readers_ahead``, ``stage``, ``upgrading`` (a reader waits until it is alone),
    ``own_earlier`` (it waits for its own row), ``turn_now`` (nothing blocks it: its process has not noticed yet).
    """

    code: str
    words: str  # a sentence
    short: str  # a few words, for a column
    behind: tuple[Entry, ...]  # the rows that block it, from the head of the queue on
    waiters: int  # the number of waiters ahead that block it, too
    head: Entry | None  # the row at the end of the chain, which waits for no other
    enters: Estimate | None  # when it will be granted; None if too little is known

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values; rows as their positions."""
        return {
            "code": self.code,
            "words": self.words,
            "behind": [entry.position for entry in self.behind],
            "waiters": self.waiters,
            "head": None if self.head is None else self.head.position,
            "enters": None if self.enters is None else self.enters.as_dict(),
        }


def described(entry: Entry) -> str:
    """Return the requester with program and note: ``etl1:4711 (load.py, "orders")``."""
    known = [entry.program, f'"{entry.note}"' if entry.note else None]
    details = ", ".join(text for text in known if text)
    return f"{requester(entry)} ({details})" if details else requester(entry)


def wait_in_words(entry: Entry, reason: Reason | None, since: float = 0.0) -> str:
    """Return one line about a request that waits: for how long, behind which row, and when it is likely to be granted.
    ``since``: the seconds since the rows were read.
    """
    words = f"waiting for {entry.resource!r} for {seconds_in_words(entry.seconds + since)}"
    if reason is None:
        return words
    if reason.enters is not None:
        words += f", likely granted in {clock(reason.enters.likely - since)}"
    if reason.code == "paused" or not reason.behind:
        words += f": {reason.short}"
    else:
        first, others = reason.behind[0], len(reason.behind) - 1
        state = "waits, too" if first.state == "waits" else f"has held it for {seconds_in_words(first.seconds + since)}"
        words += f", behind {described(first)}, which {state}{f', and {others} more' if others else ''}"
    return words


def _describe_state(entry: Entry) -> str:
    """Say what a row that blocks others does, and for how long."""
    since = seconds_in_words(entry.seconds)
    if entry.state == "waits":
        return f"{described(entry)}, which waits itself for {since}"
    holder = f"{described(entry)}, which has held it for {since}"
    if entry.state == "dead":
        return f"{described(entry)}, which is dead; the next waiter that checks removes it"
    if entry.state == "revoked":
        return f"{holder} and has been asked to stop"
    if entry.in_transit:
        return f"{described(entry)}, which handed it over {since} ago; nobody has adopted it yet"
    if entry.missing_for is not None:
        left = "" if entry.grace is None else f" of its grace of {seconds_in_words(entry.grace)}"
        return f"{holder} and cannot be found for {seconds_in_words(entry.missing_for)}{left}"
    return holder


def _list(names: Sequence[str]) -> str:
    shown = list(names[:NAMED])
    if len(names) > NAMED:
        shown.append(f"{len(names) - NAMED} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _several(entries: Sequence[Entry]) -> str:
    return _describe_state(entries[0]) if len(entries) == 1 else _list([described(entry) for entry in entries])


def _binding_limit(blocked: Blocked) -> int:
    """Return the lowest limit: of its own, the cap, and the limits that the rows in its way declare."""
    cap = None if _is_above_cap(blocked) else blocked.setting.cap
    limits = [number(blocked.entry.limit), cap, *(number(row.limit) for row in blocked.behind)]
    return min((limit for limit in limits if limit is not None), default=0)


def _is_above_cap(blocked: Blocked) -> bool:
    return blocked.setting.cap is not None and (number(blocked.entry.weight) or 0) > blocked.setting.cap


def _code(blocked: Blocked) -> str:
    entry = blocked.entry
    if is_upgrading(entry):
        return "upgrading"
    if blocked.setting.paused:
        return "paused"
    if blocked.fits:
        return "turn_now"
    if blocked.fits_uncapped:
        return "cap"
    if blocked.own:
        return "own_earlier"
    labels = {row.access for row in blocked.behind}
    if entry.access != WRITE and any(label == WRITE or label.startswith(UPGRADE) for label in labels):
        return "writer_ahead"
    kinds = {label.partition(":")[0] for label in labels}
    if kinds == {"stage"}:
        return "stage"
    return "readers_ahead" if kinds and kinds <= {READ, UPGRADE} else "limit"


def _stages(entries: Iterable[Entry]) -> str:
    orders = {entry.access.partition(":")[2] for entry in entries}
    return _list([f"stage {order}" for order in sorted(orders)])


def _phrases(code: str, blocked: Blocked) -> tuple[str, str]:
    """Return the reason as a sentence, and in a few words."""
    entry, setting, behind = blocked.entry, blocked.setting, blocked.behind
    first = requester(behind[0]) if behind else ""
    others = f" +{len(behind) - 1}" if len(behind) > 1 else ""
    if code == "upgrading":
        if not behind:
            return "it is alone and becomes the writer in a moment", "its turn"
        return f"it becomes the writer when the others have left: {_several(behind)}", f"readers: {first}{others}"
    if code == "paused":
        by = by_login(setting.paused_by)
        since = "" if setting.paused_at is None else f" since {setting.paused_at.astimezone():%Y-%m-%d %H:%M:%S}"
        also = f"; then it is still behind {_several(behind)}" if behind else ""
        return f"the resource is paused{by}{since}: nothing is granted until: sqlsem resume{also}", f"paused{by}"
    if code == "turn_now":
        return "nothing blocks it any more: it is granted as soon as its process polls", "its turn"
    if code == "cap":
        by = setting.whose_cap
        short = f"cap {setting.cap}{by}"
        if not behind:
            above = f"its weight of {entry.weight} is above the operator's cap of {setting.cap}{by}"
            return f"{above}: it waits until that is raised", short
        return f"the operator's cap of {setting.cap}{by} is reached: {_several(behind)}", short
    if code == "own_earlier":
        return f"it waits for its own earlier row at {blocked.own[0].position}, and so for itself", "itself"
    if code == "writer_ahead":
        writer = next(row for row in behind if row.access == WRITE or row.access.startswith(UPGRADE))
        return f"a writer is ahead: {_describe_state(writer)}", f"writer {requester(writer)}"
    if code == "readers_ahead":
        return f"it waits for the readers to leave: {_several(behind)}", f"readers: {first}{others}"
    if code == "stage":
        return f"all of {_stages(behind)} that came before it have to leave: {_several(behind)}", _stages(behind)
    room = _binding_limit(blocked)
    if room <= 1:
        return f"it is behind {_several(behind)}", f"behind {first}"
    return f"the limit of {room} is full: {_several(behind)}", f"limit {room} full: {first}{others}"


def _reason(blocked: Blocked, waits: WaitGraph, enters: Estimate | None) -> Reason:
    code = _code(blocked)
    words, short = _phrases(code, blocked)
    if _is_above_cap(blocked) and code not in ("cap", "paused"):
        words += f"; besides, its weight of {blocked.entry.weight} is above the operator's cap of {blocked.setting.cap}"
    before = blocked.waiters - sum(row.state == "waits" for row in blocked.behind)
    if before > 0 and code != "turn_now":
        words += f"; {before} more wait{'s' if before == 1 else ''} before it"
    if blocked.waiters and code in ("limit", "writer_ahead", "readers_ahead", "cap"):
        short += f", {blocked.waiters} before"
    head = waits.head(blocked.entry.position)
    chain = (
        "" if head is None or head in blocked.behind else f"; in the end for {_describe_state(head)} ({head.resource})"
    )
    estimate = ""
    if enters is not None:
        usual = span_in_words(enters.held_low, enters.held_high)
        estimate = (
            f"; such locks usually take {usual}: it is granted in about {clock(enters.likely)} ({enters.between})"
        )
    behind = blocked.own if code == "own_earlier" else blocked.behind
    return Reason(code, f"{words}{chain}{estimate}", short, behind, blocked.waiters, head, enters)


def reasons(overview: Overview, *, only: int | None = None, waits: WaitGraph | None = None) -> dict[int, Reason]:
    """Return why each waiter waits, by position; or only the waiter at ``only``. A granted request has no reason.

    >>> reasons(coordinator.admin.overview())[4711].words  # doctest: +SKIP
    'it is behind etl1:4711 (load.py, "orders"), which has held it for 12m03s'
    """
    waits = waits or WaitGraph(overview)
    expected = estimates(overview, None if only is None else (only,))
    return {
        position: _reason(blocked, waits, expected.get(position))
        for position, blocked in waits.blocked.items()
        if only is None or position == only
    }


@record
class TaskReason:
    """The reason why a pending task does not run.

    ``code`` is ``order_open`` (tasks of a lower order are not done), ``not_ready`` (it, or its retry, has a start
    time), ``queue_limit`` (its queue runs as many tasks as it may), ``key_limit`` (its key does), ``rate`` (its queue
    has started as many tasks recently as it may), ``key_rate`` (its key has), ``locks`` (it waits for its locks) or
    ``turn_now`` (the next free worker takes it, or another task of its kind first).
    """

    code: str
    words: str
    short: str
    behind: tuple[TaskEntry, ...]  # the task that blocks it, if it is known
    ready_in: float | None = None  # seconds
    starts: Estimate | None = None  # when it will be started; None if too little is known

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values; tasks as their numbers."""
        return {
            "code": self.code,
            "words": self.words,
            "behind": [task.task_id for task in self.behind],
            "ready_in": self.ready_in,
            "starts": None if self.starts is None else self.starts.as_dict(),
        }


class _TaskLimits:
    """The limits and rates of queues and keys that can block a task, beside its order."""

    def __init__(self, tasks: Sequence[TaskEntry], limits: Iterable[QueueLimit], waits: Iterable[QueueWait]) -> None:
        self._waits = {(wait.queue, wait.task_key): wait.seconds for wait in waits}
        self._settings = {(limit.queue, limit.task_key): limit for limit in limits}
        running = [task for task in tasks if task.status in ("running", "lost")]
        self._of_queue = Counter(task.queue for task in running)
        self._of_key = Counter((task.queue, task.key) for task in running)
        self._fair_queues = {queue for queue, _ in self._settings} | {
            task.queue for task in tasks if (task.key is not None or task.priority) and task.status == "pending"
        }

    def has(self, queue: str) -> bool:
        """Return True if the queue has limits or keys."""
        return queue in self._fair_queues

    def full(self, task: TaskEntry) -> TaskReason | None:
        """Return the reason if a limit or a rate of the task is reached, else None."""
        queue, key = self._settings.get((task.queue, None)), self._settings.get((task.queue, task.key))
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
        limit = own if own is not None or queue is None else queue.key_limit
        runs = self._of_key[task.queue, task.key]
        if limit is None or runs < limit:
            return None
        words = f"its key {task.key!r} has {runs} of {limit} running"
        return TaskReason("key_limit", words, f"{runs} of {limit} of {task.key}", ())

    def before(self, task: TaskEntry, pending: Sequence[TaskEntry]) -> str:
        """Say which tasks of its order come first."""
        if not self.has(task.queue):
            ahead = sum(other.task_id < task.task_id for other in pending)
            return f" after {ahead} before it" if ahead else ""
        ahead = sum(
            other.key == task.key and (-other.priority, other.task_id) < (-task.priority, task.task_id)
            for other in pending
        )
        whose = "without a key" if task.key is None else f"of key {task.key!r}"
        ahead_text = f" after {ahead} {whose} before it" if ahead else ""
        return f"{ahead_text}, when it is the turn of tasks {whose} ({self._of_key[task.queue, task.key]} running)"


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
    """Return why each pending task does not run, by task number.

    Args:
        tasks: All open tasks of one queue or several, and their last ended tasks, for the estimates. Only these can be
            named as blocking.
        taken_at: The database's clock.
        limits: The settings of these queues.
        requests: The reasons why requests for locks wait, by position.
        waits: The rates that are used up, and when they have room again.
    """
    opened = sorted(tasks, key=lambda task: (task.queue, task.order, task.task_id))
    task_limits = _TaskLimits(opened, limits, waits)
    # (The estimate assumes first come, first served.)
    starts = task_estimates([task for task in opened if not task_limits.has(task.queue)], taken_at)
    by_order: dict[tuple[str, int], list[TaskEntry]] = {}
    for task in opened:
        by_order.setdefault((task.queue, task.order), []).append(task)
    results: dict[int, TaskReason] = {}
    held_up: TaskReason | None = None
    before = ""
    for (queue, _), members in by_order.items():
        held_up = held_up if queue == before else None
        before = queue
        pending = [member for member in members if member.status == "pending"]
        for task in pending:
            results[task.task_id] = held_up or _own_reason(task, pending, task_limits, taken_at, requests or {})
        if held_up is None or held_up.behind[0].status != "failed":
            held_up = _order_reason([member for member in members if _is_open(member)]) or held_up
    return {number: _starting(reason, starts.get(number)) for number, reason in results.items()}


def _starting(reason: TaskReason, starts: Estimate | None) -> TaskReason:
    """Return this reason, with the estimated start."""
    if starts is None:
        return reason
    usual = span_in_words(starts.held_low, starts.held_high)
    estimate = f"such tasks usually take {usual}: it starts in about {clock(starts.likely)} ({starts.between})"
    short = ", ".join(filter(None, (reason.short, f"~{clock(starts.likely)}")))
    return replace(reason, words=f"{reason.words}; {estimate}", short=short, starts=starts)


def _is_open(task: TaskEntry) -> bool:
    return task.status in ("pending", "running", "lost") or (task.status == "failed" and task.on_failure == "stop")


def _order_reason(opened: Sequence[TaskEntry]) -> TaskReason | None:
    """Return why the open tasks of one order block later orders."""
    if not opened:
        return None
    failed = next((task for task in opened if task.status == "failed"), None)
    if failed is not None:
        words = f"order {failed.order} is open because task {failed.task_id} failed; retry or cancel it"
        return TaskReason("order_open", words, f"task {failed.task_id} failed", (failed,))
    first = next((task for task in opened if task.status != "pending"), opened[0])
    ran = ""
    if first.status != "pending":
        process = process_name(first.host, first.pid, "a worker")
        ran = f", which {process} has run for {seconds_in_words(first.seconds or 0.0)}"
    others = f", and {len(opened) - 1} more" if len(opened) > 1 else ""
    words = f"order {first.order} is open: task {first.task_id}{ran}{others}"
    return TaskReason("order_open", words, f"after order {first.order}", (first,))


def _own_reason(
    task: TaskEntry,
    pending: Sequence[TaskEntry],
    task_limits: _TaskLimits,
    taken_at: datetime,
    requests: Mapping[int, Reason],
) -> TaskReason:
    """Return the reason why a task does not run that no task of a lower order blocks."""
    seconds = (task.ready_at - taken_at).total_seconds()
    if seconds > 0:
        again = f"attempt {task.attempt + 1} of {task.max_attempts}" if task.failures else "it"
        return TaskReason(
            "not_ready", f"{again} is due in {clock(seconds)}", f"in {seconds_in_words(seconds)}", (), seconds
        )
    if task.blocked:
        return task_limits.full(task) or _blocked_reason(task, requests)
    words = f"the next free worker takes it{task_limits.before(task, pending)}"
    return task_limits.full(task) or TaskReason("turn_now", words, "", ())


def _blocked_reason(task: TaskEntry, requests: Mapping[int, Reason]) -> TaskReason:
    """Return the reason of a task that waits only for its locks."""
    names = ", ".join(f"{access_in_words(lock.access, lock.limit)} on {lock.resource!r}" for lock in task.locks)
    if any(lock.position is None for lock in task.locks):
        words = f"it will join the queues of its locks ({names}) as soon as a worker of its queue polls"
        return TaskReason("locks", words, "not in its queues yet", ())
    blocked = [
        (lock, requests[lock.position])
        for lock in task.locks
        if lock.position is not None and lock.position in requests
    ]
    if not blocked:
        words = f"it waits in the queues of its locks ({names}); when all are granted, the next free worker takes it"
        return TaskReason("locks", words, f"for {task.locks[0].resource}", ())
    requests_text = "; ".join(f"at {lock.position} for {lock.resource!r}: {reason.words}" for lock, reason in blocked)
    words = f"it waits for its locks, without a worker: {requests_text}"
    return TaskReason("locks", words, f"for {blocked[0][0].resource}", ())
