"""Whose turn it is in a work queue, and the limits that operators set."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sqlsem.engines.queue_limits import QueueLimitSession
from sqlsem.engines.sqlite import fork
from sqlsem.engines.sqlite.rate_usage import SqliteRateUsage
from sqlsem.engines.sqlite.values import shown, user_name
from sqlsem.model import QueueLimit, QueueWait
from sqlsem.model_rates import RateRequest, Window
from sqlsem.names import TASKS_PREFIX

#: The column of each thing that can be set, and that of its window.
_COLUMNS: dict[str, tuple[str, str | None]] = {
    "limit": ("task_limit", None),
    "key_limit": ("key_limit", None),
    "weight": ("weight", None),
    "rate": ("task_rate", "task_per"),
    "key_rate": ("key_rate", "key_per"),
}


#: Of the hash in front of a key, and how many places that makes.
HASH_DIGITS = 8
HASH_RANGE = 10**HASH_DIGITS
#: How many keys are looked for at a time, and among how many a lot is drawn at least.
KEYS_READ, KEYS_DRAWN = 64, 32


def key_hash(key: str) -> str:
    """What a key is sorted by: in no order that anyone chose, and each at its own place."""
    place = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % HASH_RANGE
    return f"{place:0{HASH_DIGITS}}{key}"


def weighted_order(
    settings: Iterable[Mapping[str, Any]], parts: Mapping[str, float], running: Mapping[str, int]
) -> list[str]:
    """Those of these keys that may have one more running: the fewest by weight first, the same share by lot.

    ``parts``: which part of all keys like it each one was taken from, as it stands for the others.
    """
    able = [
        setting
        for setting in settings
        if setting["most"] is None or running.get(setting["task_key"], 0) < setting["most"]
    ]

    def place(one: Mapping[str, Any]) -> tuple[float, float]:
        # By their weights: the least of such numbers comes first in a race.
        lot = random.expovariate(one["weight"] / parts[one["task_key"]])
        return running.get(one["task_key"], 0) / one["weight"], lot

    return [one["task_key"] for one in sorted(able, key=place)]


class SqliteFairQueueing(SqliteRateUsage, QueueLimitSession):
    """Which task comes next."""

    def uses_fair_queueing(self, queue: str) -> bool:
        """Whether the queue has limits, or tasks with keys."""
        return bool(self.row("uses_fair_queueing", {"queue": queue})["turns"])

    def next_pending(self, queue: str, *, start: bool = False) -> int | None:
        """The task that may be claimed next, if there is one. ``start``: it is claimed in the transaction that is under
        way, and counts as started.
        """
        if not self.uses_fair_queueing(queue):
            found = self.row("next_pending", {"queue": queue})
            return None if found is None else int(found["task_id"])
        if self.row("key_waits", {"queue": queue, "key": ""}) is not None:
            return None
        order, limit = self.row("order_of_turns", {"queue": queue})
        running = {row["task_key"]: row["many"] for row in self.rows("running_keys", {"queue": queue})}
        if order is None or (limit is not None and sum(running.values()) >= limit):
            return None
        for key in self._keys_in_order(queue, order, running):
            first = self.rows("first_task_of_key", {"queue": queue, "order": order, "turn": key_hash(key)})
            if not key:
                first += self.rows("first_without_key", {"queue": queue, "order": order})
            if first and (not start or self.may_start(queue, key, start=True)):
                return int(min((-task["task_priority"], task["task_id"]) for task in first)[1])
        return None

    def _keys_in_order(self, queue: str, order: int, running: dict[str, int]) -> Iterator[str]:
        """The keys that may have one more running, in turn. Of those of which nothing runs some at a time:
        who finds a task among the first ones has not looked at the others. How, stands in PostgreSQL's tasks.sql.
        """
        start = random.randrange(HASH_RANGE)
        drawn = [""] if "" not in running else []
        first = True
        for turns, place in self._walk(queue, order, start):
            drawn += [turn[HASH_DIGITS:] for turn in turns if turn[HASH_DIGITS:] and turn[HASH_DIGITS:] not in running]
            part = min(1.0, max(1, place - start) / HASH_RANGE)  # that these are of all
            if len(drawn) >= KEYS_DRAWN or part == 1:
                parts = {key: part if key else 1.0 for key in drawn}
                if first and part < 1:
                    heavy = self.rows("heavy_keys", {"queue": queue, "most": KEYS_READ})
                    parts |= {row["task_key"]: 1.0 for row in heavy if row["task_key"] not in running}
                yield from self._weighted_order(queue, parts, running)
                drawn, first = [], False
        yield from self._weighted_order(queue, dict.fromkeys(running, 1.0), running)

    def _walk(self, queue: str, order: int, start: int) -> Iterator[tuple[list[str], int]]:
        """The turns of the keys that have something pending, some at a time, once around from a place on; how far
        it has come.
        """
        begin = f"{start:0{HASH_DIGITS}}"
        for lap, (beyond, until) in enumerate(((begin, ":"), ("", begin))):  # (The colon comes after all digits.)
            there = {"queue": queue, "order": order, "until": until, "most": KEYS_READ}
            turns = [beyond] * KEYS_READ
            while len(turns) == KEYS_READ:
                turns = [row["task_hash"] for row in self.rows("next_key_hashes", {**there, "beyond": turns[-1]})]
                end = HASH_RANGE if lap == 0 else start
                yield turns, lap * HASH_RANGE + (int(turns[-1][:HASH_DIGITS]) if len(turns) == KEYS_READ else end)

    def _weighted_order(self, queue: str, parts: dict[str, float], running: dict[str, int]) -> list[str]:
        settings = self.rows("keys_in_turn", {"queue": queue, "keys": json.dumps(list(parts))})
        return weighted_order(settings, parts, running)

    def may_start(self, queue: str, key: str, *, after: int = 0, after_of_key: int = 0, start: bool = False) -> bool:
        """Whether the rates of a queue, and of this key, let one more task be started, after so many others (of all; of
        the key). ``start``: it is started, in the transaction that is under way; or it is noted that it cannot be.
        """
        now_us, used = self.now_us(), []
        for rate in self.rows("start_rates", {"queue": queue, "key": key}):
            ahead = after_of_key if rate["task_key"] else after
            waits = {"queue": queue, "key": rate["task_key"]}
            if ahead >= rate["most"] or self.row("key_waits", waits) is not None:
                return False
            whose = hashlib.sha256(f"{queue}\x1f{rate['task_key']}".encode()).hexdigest()
            state = self.rate_state(TASKS_PREFIX + whose)
            before = {ms: known.copy() for ms, known in state.windows.items()}
            wait_ms = state.take(
                RateRequest(whose, (Window(rate["ms"], rate["most"]),), 1 + ahead), now_us, declares=False
            )
            if wait_ms:
                if start:
                    self.run("put_queue_wait", {**waits, "since": now_us // 1000, "free": now_us // 1000 + wait_ms})
                return False
            used.append((TASKS_PREFIX + whose, before, state))
        if start:
            for one in used:
                self.write_rate(*one)
        return True

    def queue_limits(self, queue: str | None) -> list[QueueLimit]:
        return [shown(QueueLimit, row) for row in self.rows("queue_limits", {"queue": queue})]

    def queue_waits(self, queue: str | None) -> list[QueueWait]:
        return [shown(QueueWait, row) for row in self.rows("queue_waits", {"queue": queue})]

    def set_queue(self, queue: str, key: str | None, what: str, value: int | None, per_ms: int | None = None) -> None:
        values = {"queue": queue, "what": what, "value": value, "per_ms": per_ms, "login": user_name()}
        with fork.forks_blocked, self.writing():
            self.run("make_queue_setting", {"queue": queue})
            if key is not None:
                self.run("make_queue_key", {"queue": queue, "key": key})
            row = next(row for row in self.rows("queue_limits", {"queue": queue}) if row["task_key"] == key)
            old = _told(*(None if column is None else row[column] for column in _COLUMNS[what]))
            if key is None:
                self.run("set_queue", values)
            else:
                self.run("set_queue_key", {**values, "key": key})
                self.run("tidy_queue_key", {"queue": queue, "key": key})
            self.run("tidy_queue_setting", {"queue": queue})
            if per_ms is not None or old.endswith("ms"):
                self.run("forget_queue_waits", (queue,))  # by the new one there may be room
            new = _told(value, None if per_ms is None else per_ms / 1000)
            if old != new:
                whose = "" if key is None else f"{key}: "
                self.note_operation(what, queue=queue, old=whose + old, new=whose + new)


def _told(value: int | None, per: float | None) -> str:
    """A limit, or a rate of so many in so many seconds, as operations name it."""
    return ("" if value is None else str(value)) + ("" if per is None else f" in {round(per * 1000)} ms")
