"""Tasks that wait for their locks without a process that waits. See the comments of PostgreSQL's blocked_tasks.sql."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from sqlsem.engines.statements.fair_queueing import FairQueueingStatements
from sqlsem.engines.statements.locks import LockStatements
from sqlsem.values.locks import Request
from sqlsem.values.tasks import Claimed, TaskLock

#: Seconds: the lease of the member that owns the lock requests of blocked tasks, and the age at which it is renewed.
LEASE, RENEW = 60.0, 7.5
#: The maximum number of tasks whose lock requests one transaction inserts.
MAX_ENQUEUED = 100
#: Seconds between two liveness checks of the owners that block the blocked tasks of a queue.
TEST_EVERY = 1.0


class BlockedTaskStatements(LockStatements, FairQueueingStatements):
    """Blocked tasks, polled by the workers that claim."""

    _tested_at = 0.0

    def claim_blocked(
        self, member_id: int, queue: str, owner: str, uid: str, again: bool, requesting_id: str, row_owner: str
    ) -> Claimed | None:
        # (Reads take no lock, so a poll without a result delays no other session.)
        if not again and self.row("has_blocked_tasks", {"queue": queue}) is None:
            return None
        if not again and not self._is_due(queue):
            self.require_member(member_id)
            self._check_blocking_owners(queue)
            return None
        with self.forks_blocked, self.transaction():
            self.renew_lease(member_id, known=True)
            values = {"queue": queue, "member": member_id, "uid": uid}
            claimed = self.row("claimed_before", values) if again else None
            if claimed is not None:
                return self._blocked_task_claim(claimed["task_id"])
            self.require_member(member_id)
            task_id = self._next_blocked_task(queue)
            if task_id is None or not self.may_start(queue, self.row("key_of", (task_id,))["task_key"], start=True):
                return None
            mine = {"member": member_id, "requesting_id": requesting_id, "owner": row_owner, "anew": True}
            for number, lock in enumerate(self.rows("locks_of", (task_id,)), 1):
                key = {"resource": lock["resource"], "position": lock["position"]}
                self.run("move_row", {**key, **mine, "uid": f"{uid}.{number}"})
            self.run("claim_task", {"task": task_id, "member": member_id, "owner": owner, "uid": uid})
            return self._blocked_task_claim(task_id)

    def _blocked_task_claim(self, task_id: int) -> Claimed:
        locks = tuple(
            TaskLock(row["resource"], row["access"], row["limit"], row["weight"], row["position"])
            for row in self.rows("locks_of", (task_id,))
        )
        return Claimed(*(*self.row("claimed", (task_id,)), locks))

    def _is_due(self, queue: str) -> bool:
        """Return True if a poll has something to write: a lock may be granted, a task may start or enqueue its locks,
        or the lease is due.
        """
        proxy = self.row("queue_proxy", {"queue": queue})
        if proxy is None or proxy["left"] is None or proxy["left"] < LEASE - RENEW:
            return True
        key = {"queue": queue}
        return (
            self.row("enqueued_blocked_tasks", key) is not None
            or next(self._grantable_rows(queue), None) is not None
            or next(self._tasks_to_enqueue(queue), None) is not None
        )

    def _next_blocked_task(self, queue: str) -> int | None:
        """Grant locks to blocked tasks, and return the first task that may start, if any. A task that has all its locks
        but may not start leaves the queues of its locks.
        """
        proxy = self._proxy_member(queue)
        for last in (False, True):
            for row in list(self._grantable_rows(queue)):
                self.run("turn_has_come", {"task": row["task_id"], "number": row["number"]})
                self.run("one_lock_less", (row["task_id"],))
            task_id = self._startable_task(queue, proxy)
            if task_id is not None or last or not self._enqueue_locks(queue, proxy):
                return task_id
        return None

    def _grantable_rows(self, queue: str) -> Iterator[Any]:
        """Yield the waiting rows that may be granted. If a row may not, equal requests behind it may not either."""
        rows = self.rows("waiting_locks", {"queue": queue})
        for _, equal_rows in groupby(rows, lambda row: (row["resource"], row["access"], row["weight"], row["limit"])):
            for row in equal_rows:
                if not self._may_enter(row):
                    break
                yield row

    def _may_enter(self, row: Any) -> bool:
        request = Request(row["resource"], row["access"], row["limit"], row["weight"])
        return self.admission(request, row["position"]).allowed

    def _startable_task(self, queue: str, proxy: int) -> int | None:
        order = self.row("order_of_turns", {"queue": queue})["task_order"]
        for task in self.rows("enqueued_blocked_tasks", {"queue": queue}):
            task_id = int(task["task_id"])
            locks = self.rows("locks_of", (task_id,))
            waiting = sum(self._is_proxy_row(lock, proxy) for lock in locks)
            if waiting < len(locks) or task["task_order"] != order or not self._has_room(queue, task["task_key"]):
                self._leave_queues(task_id, proxy)
            elif not all(self._may_enter(lock) for lock in locks):  # a resource was paused, or has another limit now
                self.run("all_locks_wait", (task_id,))
                self.run("locks_pending", {"task": task_id, "left": len(locks)})
            else:
                return task_id
        return None

    def _is_proxy_row(self, lock: Any, proxy: int) -> bool:
        row = self.row("row", {"resource": lock["resource"], "position": lock["position"]})
        return row is not None and row["member_id"] == proxy and row["revoked_at"] is None

    def _leave_queues(self, task_id: int, proxy: int) -> None:
        for lock in self.rows("locks_of", (task_id,)):
            row = self.row("row", {"resource": lock["resource"], "position": lock["position"]})
            if row is not None and row["member_id"] == proxy:
                self.remove(lock["resource"], lock["position"], None, "cancelled")
        self.run("no_locks_wait", (task_id,))
        self.run("locks_pending", {"task": task_id, "left": None})

    def _enqueue_locks(self, queue: str, proxy: int) -> int:
        """Insert the lock requests of the tasks that could run if they had their locks; return the number of tasks."""
        count = 0
        for task in self._tasks_to_enqueue(queue):
            task_id = task["task_id"]
            locks = self.rows("locks_of", (task_id,))
            if any(lock["limit"] is None and self.server_limit(lock["resource"]) is None for lock in locks):
                continue  # until an operator sets a limit
            owner = {"requesting_id": f"task {task_id}", "member": proxy, "owner": f"task {task_id} of {queue}"[:255]}
            for lock in locks:
                request = {name: lock[name] for name in ("resource", "access", "limit", "weight")}
                uid = f"blocked {task_id}.{lock['number']}"
                values = {**owner, **request, "uid": uid, "granted": False, "note": task["note"]}
                position = self.insert(values)
                self.run("lock_waits", {"task": task_id, "number": lock["number"], "position": position})
            self.run("locks_pending", {"task": task_id, "left": len(locks)})
            count += 1
            if count == MAX_ENQUEUED:
                break
        return count

    def _tasks_to_enqueue(self, queue: str) -> Iterator[Any]:
        """Yield the tasks that could run if they had their locks. The caller enqueues or skips each task before it
        takes the next.
        """
        full = set()  # keys without room
        for task in self.rows("unqueued_blocked_tasks", {"queue": queue}):
            key = task["task_key"]
            if key in full:
                continue
            if self._has_room(queue, key, asked=True):
                yield task
            elif not self._has_room(queue, "", asked=True):
                return
            else:
                full.add(key)

    def _has_room(self, queue: str, key: str | None, *, asked: bool = False) -> bool:
        """Return True if the limits and rates of a queue, and of this key, permit one more task. ``asked``: also count
        the tasks whose lock requests wait.
        """
        found = self.row("has_room", {"queue": queue, "key": key, "asked": asked})
        return bool(found["room"]) and self.may_start(
            queue, key or "", after=found["ask"], after_of_key=found["ask_of_key"]
        )

    def _proxy_member(self, queue: str) -> int:
        """Return the member that owns the lock requests of a queue's blocked tasks, after renewing its lease."""
        proxy = self.row("queue_proxy", {"queue": queue})
        if proxy is not None and proxy["left"] is not None:
            self.run("renew", (proxy["member_id"],))
            return int(proxy["member_id"])
        member_id = self.run("register_proxy", {"lease": int(LEASE * 1000)}).lastrowid
        assert member_id is not None
        self.run("set_proxy", {"queue": queue, "member": member_id})
        # The rows of the previous member were removed with it.
        self.run("forget_lines", {"queue": queue})
        self.run("forget_asked", {"queue": queue})
        return member_id

    def _check_blocking_owners(self, queue: str) -> None:
        """Check whether the owners of the first blockers are alive: a blocked task has no process that would check
        them.
        """
        now = time.monotonic()
        if now - self._tested_at < TEST_EVERY:
            return
        self._tested_at = now
        rows = self.rows("waiting_locks", {"queue": queue})
        for resource, resource_rows in groupby(rows, lambda row: row["resource"]):
            first = next(resource_rows)
            self.check_blockers(
                Request(resource, first["access"], first["limit"], first["weight"]), first["position"], None
            )
