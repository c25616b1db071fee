"""Fair queueing between the keys of a work queue, and the limits that operators set."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sqlsem.engines.statements.rates import RateUsageStatements
from sqlsem.engines.statements.values import shown
from sqlsem.values.names import TASKS_PREFIX
from sqlsem.values.rates import RateRequest, Window
from sqlsem.values.tasks import QueueLimit, QueueWait

#: The column of each setting, and the column of its window.
_COLUMNS: dict[str, tuple[str, str | None]] = {
    "limit": ("task_limit", None),
    "key_limit": ("key_limit", None),
    "weight": ("weight", None),
    "rate": ("task_rate", "task_per"),
    "key_rate": ("key_rate", "key_per"),
}


#: The number of digits of a key's hash, and the number of hashes.
HASH_DIGITS = 8
HASH_RANGE = 10**HASH_DIGITS
#: The number of keys that are read at a time, and the least number of keys among which one is drawn.
KEYS_READ, KEYS_DRAWN = 64, 32


def key_hash(key: str) -> str:
    """Return the sort value of a key: its hash, then the key, so that no client can choose its order."""
    number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % HASH_RANGE
    return f"{number:0{HASH_DIGITS}}{key}"


def weighted_order(
    settings: Iterable[Mapping[str, Any]], parts: Mapping[str, float], running: Mapping[str, int]
) -> list[str]:
    """Return the keys that may have one more running task. Keys with the fewest running tasks per weight come first;
    the order of equal ones is drawn by lot, in proportion to their weights.

    ``parts``: for each key, the share of all keys that it was drawn from, and so represents.
    """
    eligible = [
        setting
        for setting in settings
        if setting["maximum"] is None or running.get(setting["task_key"], 0) < setting["maximum"]
    ]

    def rank(setting: Mapping[str, Any]) -> tuple[float, float]:
        # The least of exponential numbers is drawn in proportion to the weights.
        lot = random.expovariate(setting["weight"] / parts[setting["task_key"]])
        return running.get(setting["task_key"], 0) / setting["weight"], lot

    return [setting["task_key"] for setting in sorted(eligible, key=rank)]


class FairQueueingStatements(RateUsageStatements):
    """The choice of the next task of a queue, and its limits."""

    def uses_fair_queueing(self, queue: str) -> bool:
        """Return True if the queue has limits, or tasks with keys."""
        return bool(self.row("uses_fair_queueing", {"queue": queue})["turns"])

    def next_pending(self, queue: str, *, start: bool = False) -> int | None:
        """Return the task that may be claimed next, if any. ``start``: the caller claims it in the current transaction,
        so count it as started.
        """
        if not self.uses_fair_queueing(queue):
            task = self.row("next_group", {"queue": queue, "maximum": 1})
            return None if task is None else int(task["task_id"])
        if self.row("key_waits", {"queue": queue, "key": ""}) is not None:
            return None
        order, limit = self.row("order_of_turns", {"queue": queue})
        running = {row["task_key"]: row["many"] for row in self.rows("running_keys", {"queue": queue})}
        if order is None or (limit is not None and sum(running.values()) >= limit):
            return None
        for key in self._keys_in_order(queue, order, running):
            first = self.rows("first_task_of_key", {"queue": queue, "order": order, "turn": key_hash(key)})
            if not key:
                first += self.rows("next_group", {"queue": queue, "maximum": 1})
            if first and (not start or self.may_start(queue, key, start=True)):
                return int(min((-task["task_priority"], task["task_id"]) for task in first)[1])
        return None

    def _keys_in_order(self, queue: str, order: int, running: dict[str, int]) -> Iterator[str]:
        """Yield the keys that may have one more running task, in their order. Keys without running tasks come first,
        read in portions: a caller that finds a task in the first portion reads no further. PostgreSQL's tasks.sql
        explains the order.
        """
        start = random.randrange(HASH_RANGE)
        drawn = [""] if "" not in running else []
        first = True
        for turns, place in self._walk(queue, order, start):
            drawn += [turn[HASH_DIGITS:] for turn in turns if turn[HASH_DIGITS:] and turn[HASH_DIGITS:] not in running]
            part = min(1.0, max(1, place - start) / HASH_RANGE)  # the share of all keys that these keys represent
            if len(drawn) >= KEYS_DRAWN or part == 1:
                parts = {key: part if key else 1.0 for key in drawn}
                if first and part < 1:
                    heavy = self.rows("heavy_keys", {"queue": queue, "maximum": KEYS_READ})
                    parts |= {row["task_key"]: 1.0 for row in heavy if row["task_key"] not in running}
                yield from self._weighted_order(queue, parts, running)
                drawn, first = [], False
        yield from self._weighted_order(queue, dict.fromkeys(running, 1.0), running)

    def _walk(self, queue: str, order: int, start: int) -> Iterator[tuple[list[str], int]]:
        """Yield the hashes of the keys with pending tasks, in portions, from ``start`` to the end and from the
        beginning to ``start``. Each portion comes with the distance from ``start`` so far.
        """
        begin = f"{start:0{HASH_DIGITS}}"
        for lap, (beyond, until) in enumerate(((begin, ":"), ("", begin))):  # (The colon comes after all digits.)
            values = {"queue": queue, "order": order, "until": until, "maximum": KEYS_READ}
            turns = [beyond] * KEYS_READ
            while len(turns) == KEYS_READ:
                turns = [row["task_hash"] for row in self.rows("next_key_hashes", {**values, "beyond": turns[-1]})]
                end = HASH_RANGE if lap == 0 else start
                yield turns, lap * HASH_RANGE + (int(turns[-1][:HASH_DIGITS]) if len(turns) == KEYS_READ else end)

    def _weighted_order(self, queue: str, parts: dict[str, float], running: dict[str, int]) -> list[str]:
        settings = self.rows("keys_in_turn", {"queue": queue, "keys": json.dumps(list(parts))})
        return weighted_order(settings, parts, running)

    def may_start(self, queue: str, key: str, *, after: int = 0, after_of_key: int = 0, start: bool = False) -> bool:
        """Return True if the rates of a queue and of this key allow one more start, after ``after`` others of the queue
        and ``after_of_key`` of the key. ``start``: count the start in the current transaction, or record the wait.
        """
        used = []
        for rate in self.rows("start_rates", {"queue": queue, "key": key}):
            ahead = after_of_key if rate["task_key"] else after
            waits = {"queue": queue, "key": rate["task_key"]}
            if ahead >= rate["maximum"] or self.row("key_waits", waits) is not None:
                return False
            rate_name = hashlib.sha256(f"{queue}\x1f{rate['task_key']}".encode()).hexdigest()
            state = self.rate_state(TASKS_PREFIX + rate_name)
            now_us = self.now_us(state)
            wait_ms = state.take(
                RateRequest(rate_name, (Window(rate["ms"], rate["maximum"]),), 1 + ahead), now_us, declares=False
            )
            if wait_ms:
                if start:
                    self.run("put_queue_wait", {**waits, "since": now_us // 1000, "free": now_us // 1000 + wait_ms})
                return False
            used.append((TASKS_PREFIX + rate_name, state))
        if start:
            for rate_use in used:
                self.write_rate(*rate_use)
        return True

    def queue_limits(self, queue: str | None) -> list[QueueLimit]:
        return [shown(QueueLimit, row) for row in self.rows("queue_limits", {"queue": queue})]

    def queue_waits(self, queue: str | None) -> list[QueueWait]:
        return [shown(QueueWait, row) for row in self.rows("queue_waits", {"queue": queue})]

    def set_queue(self, queue: str, key: str | None, what: str, value: int | None, per_ms: int | None = None) -> None:
        values = {"queue": queue, "what": what, "value": value, "per_ms": per_ms, "login": self.login()}
        with self.forks_blocked, self.transaction():
            self.run("make_queue_setting", {"queue": queue})
            if key is not None:
                self.run("make_queue_key", {"queue": queue, "key": key})
            row = next(row for row in self.rows("queue_limits", {"queue": queue}) if row["task_key"] == key)
            old = _in_words(*(None if column is None else row[column] for column in _COLUMNS[what]))
            if key is None:
                self.run("set_queue", values)
            else:
                self.run("set_queue_key", {**values, "key": key})
                self.run("tidy_queue_key", {"queue": queue, "key": key})
            self.run("tidy_queue_setting", {"queue": queue})
            if per_ms is not None or old.endswith("ms"):
                self.run("forget_queue_waits", (queue,))  # the new rate may have room
            new = _in_words(value, None if per_ms is None else per_ms / 1000)
            if old != new:
                prefix = "" if key is None else f"{key}: "
                self.note_operation(what, queue=queue, old=prefix + old, new=prefix + new)


def _in_words(value: int | None, per: float | None) -> str:
    """Return a limit or a rate in words, for the record of an operator's action."""
    return ("" if value is None else str(value)) + ("" if per is None else f" in {round(per * 1000)} ms")
