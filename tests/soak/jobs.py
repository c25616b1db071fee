"""The jobs of a crowd, each thread one kind, again and again; and their records.

All processes write to one `Journal`. A job records what it finds wrong by itself as ``wrong``; `checks` finds the rest,
from the records of all processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support import Channel, Database
from support.journals import Journal

import sqlsem
from soak.kernel_locks import KernelLocks
from soak.paces import Pace

#: The limit of limits; the amount of the rate, in how many seconds; the period of once.
PLACES, RATE, WINDOW, PERIOD = 3, 60, 2.0, 3.0
#: The longest wait, seconds: rather do something else than wait behind a dead member.
PATIENCE = 2.0
#: A token's time to live; seconds between two instants at which all jobs ask at once; the longest delay of a writer.
TTL, RUSH, DAWDLE = 4.0, 0.05, 0.03
#: Resources that are asked for in a rush before the first comes again: by then no member refers to it any more.
RUSHES = 1000
#: The errors that faults may cause in a call, by its contract.
TROUBLE = (sqlsem.LockLost, sqlsem.Unavailable, sqlsem.TaskFailed, sqlsem.Timeout)


class Jobs:
    """The jobs of one process. Each method but `__init__` and the helpers is a kind: one round of it."""

    def __init__(
        self, database: Database, coordinator: sqlsem.Coordinator, name: str, folder: str, seed: int, pace: Pace
    ) -> None:
        self.database, self.coordinator, self.name, self.folder = database, coordinator, name, Path(folder)
        self.pace = pace
        self.rng = random.Random(seed)
        self.book = Journal(self.folder / "book")
        self.kernel_locks = KernelLocks(self.folder / "kernel_locks", self.book)
        self._lines = threading.local()

    # -- helpers

    def resource(self, kind: str) -> str:
        return f"{self.name}-{kind}-{self.rng.randrange(self.pace.resources)}"

    def wrong(self, words: str) -> None:
        self.book.note(what="wrong", words=words, at=time.monotonic())

    @contextlib.contextmanager
    def stay(
        self,
        grant: Any,
        resource: str,
        asked: float,
        *,
        what: str = "stay",
        access: str = "write",
        limit: int | None = 1,
        **more: Any,
    ) -> Iterator[None]:
        """Hold the lock. Read the clock before checking for a loss: a process that sleeps in between did hold it."""
        words = {"position": grant.positions[resource], "fence": grant.fence, "access": access, "limit": limit, **more}
        entered = time.monotonic()
        with self.kernel_locks.enter(resource, access=access, places=limit or 1):
            yield
        left = time.monotonic()
        times = {"asked": asked, "entered": entered, "left": left, "lost": grant.lost}
        self.book.note(what=what, resource=resource, **words, **times)

    def inside(self, lock: sqlsem.Lock, resource: str, **words: Any) -> None:
        requested = time.monotonic()
        with lock as grant, self.stay(grant, resource, requested, **words):
            grant.lost_event.wait(self.rng.uniform(0, self.pace.stay))

    def line(self) -> Any:
        """Return this thread's own connection to the database, in manual commit; see `drop_line`."""
        connection = getattr(self._lines, "line", None)
        if connection is None:
            connection = self._lines.line = self.database.raw(autocommit=False)
        return connection

    def drop_line(self) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, self.errors):
            self.book.note(what="trouble", error=f"the driver's {type(error).__name__}")
        connection = self._lines.__dict__.pop("line", None)
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.close()

    @contextlib.contextmanager
    def using_line(self) -> Iterator[None]:
        """Drop this thread's connection after any error in the body, and suppress the driver's own errors."""
        try:
            yield
        except BaseException as exc:
            self.drop_line()
            if not isinstance(exc, self.errors):
                raise

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """The errors of the driver; only for jobs that use a connection of their own."""
        if self.database.engine == "sqlite":
            import sqlite3

            return (sqlite3.Error,)
        if self.database.engine == "postgresql":
            import psycopg

            return (psycopg.Error,)
        import pyodbc

        return (pyodbc.Error,)

    def execute(self, cursor: Any, text: str, *parameters: Any) -> None:
        cursor.execute(self.database.sql(text), parameters)

    # -- locks

    def mutex(self) -> None:
        resource = self.resource("mutex")
        self.inside(self.coordinator.mutex(resource, timeout=PATIENCE), resource)

    def limit(self) -> None:
        resource = self.resource("limit")
        self.inside(self.coordinator.limit(resource, PLACES, timeout=PATIENCE), resource, limit=PLACES)

    def table(self) -> None:
        """Use readers and writers."""
        self._share(self.resource("table"))

    def _share(self, resource: str) -> None:
        access = self.rng.choice(["read", "read", "write"])
        lock = getattr(self.coordinator, access)(resource, timeout=PATIENCE)
        self.inside(lock, resource, access=access, limit=None)

    def several(self) -> None:
        """Hold two mutexes at once."""
        first, second = self.rng.sample([f"{self.name}-mutex-{number}" for number in range(self.pace.resources)], 2)
        requested = time.monotonic()
        locks = [self.coordinator.mutex(resource) for resource in (first, second)]
        with sqlsem.all_of(*locks, timeout=PATIENCE) as grant:
            with self.stay(grant, first, requested), self.stay(grant, second, requested):
                grant.lost_event.wait(self.rng.uniform(0, self.pace.stay))

    def rush(self) -> None:
        """Ask at one instant, in all processes, for a resource without rows: their registrations are under way at the
        same time.
        """
        number = int(time.monotonic() / RUSH) + 1
        time.sleep(max(0.0, number * RUSH - time.monotonic()))
        kind, resource = number % 3, f"{self.name}-rush-{number % RUSHES}"
        if kind == 0:
            self.inside(self.coordinator.mutex(resource, timeout=PATIENCE), resource)
        elif kind == 1:
            self.inside(self.coordinator.limit(resource, PLACES, timeout=PATIENCE), resource, limit=PLACES)
        else:
            self._share(resource)

    def ranked(self) -> None:
        resource = f"{self.name}-ranked"
        lock = self.coordinator.limit(resource, PLACES, priority=self.rng.randrange(3), timeout=PATIENCE)
        self.inside(lock, resource, limit=PLACES)

    def tasks_of_a_loop(self) -> None:
        """Run some tasks of asyncio, for a while."""

        async def one() -> None:
            for _ in range(20):
                resource = self.resource("mutex")
                requested = time.monotonic()
                with contextlib.suppress(*TROUBLE):
                    async with self.coordinator.aio.mutex(resource, timeout=PATIENCE) as grant:
                        with self.stay(grant, resource, requested):
                            await asyncio.sleep(self.rng.uniform(0, self.pace.stay))

        async def all_of_them() -> None:
            await asyncio.gather(*[one() for _ in range(3)])

        asyncio.run(all_of_them())

    # -- work

    def work(self) -> None:
        queue = self.coordinator.queue(f"{self.name}-work")
        if self.rng.random() < 0.5:
            queue.put(self.rng.random(), max_attempts=100)
        task = queue.try_claim()
        if task is None:
            return
        with task:
            entered = time.monotonic()
            task.lost_event.wait(self.rng.uniform(0, self.pace.stay))
            left_at = time.monotonic()
            words = {"entered": entered, "left": left_at, "lost": task.lost}
            self.book.note(what="attempt", task=task.id, attempt=task.attempt, **words)

    def blocked_tasks(self) -> None:
        queue, resource = self.coordinator.queue(f"{self.name}-blocked"), f"{self.name}-shared"
        locks = [self.coordinator.mutex(resource), self.coordinator.limit(f"{self.name}-other", PLACES)]
        asked = time.monotonic()
        queue.put(self.rng.random(), locks=locks, max_attempts=100)
        for task in queue.claim(wait=0.5):
            with task, self.stay(task.grant, resource, asked):
                task.lost_event.wait(self.rng.uniform(0, self.pace.stay))
            break

    def shared(self) -> None:
        """Hold the locks that tasks with locks also need."""
        resource = f"{self.name}-shared"
        self.inside(self.coordinator.mutex(resource, timeout=PATIENCE), resource)

    def rate(self) -> None:
        began = time.monotonic()
        grant = self.coordinator.rate(f"{self.name}-rate", RATE, per=WINDOW).take(timeout=PATIENCE)
        if grant is not None:
            self.book.note(what="take", entered=began, left=time.monotonic())

    def once(self) -> None:
        requested = time.monotonic()
        with self.coordinator.once(f"{self.name}-once", per=PERIOD, timeout=PATIENCE) as run:
            if run:
                with self.stay(run.grant, f"once:{self.name}-once", requested):
                    run.grant.lost_event.wait(self.rng.uniform(0, self.pace.stay))
                return
        time.sleep(0.05)

    # -- locks that are handed over

    def travel(self) -> None:
        """Adopt a lock that another process has handed over, and hand it on; else begin a chain. Now and then two
        processes try a token at once.
        """
        post = self.folder / "post"
        letter = next(iter(sorted(post.glob("*.token"))), None)
        if letter is None:
            resource = self.resource("travel")
            requested = time.monotonic()
            with self.coordinator.mutex(resource, timeout=PATIENCE) as grant:
                self._hop(grant, resource, requested, 0, self.pace.stay)
            return
        own_letter = letter.with_suffix(f".{secrets.token_hex(4)}")
        shared = self.rng.random() < 0.3
        try:
            if shared:
                os.link(letter, own_letter)  # it stays for the others, which must not get anything
            else:
                letter.rename(own_letter)
        except FileNotFoundError:
            return  # another process took it
        token, resource, position, hop = own_letter.read_text().split("\n")
        requested = time.monotonic()
        try:
            grant = self.coordinator.adopt(token)
        except (sqlsem.NotHeld, sqlsem.ConfigurationError):
            letter.unlink(missing_ok=True)  # its time was up, or another process had it
            return
        with grant:
            if grant.positions != {resource: int(position)}:
                self.wrong(f"{resource} at {position} was adopted as {grant.positions}")
            self._hop(grant, resource, requested, int(hop), 0.3 if shared else self.pace.stay)

    def _hop(self, grant: sqlsem.Grant, resource: str, requested: float, hop: int, longest: float) -> None:
        with self.stay(grant, resource, requested, what="hop", hop=hop):
            grant.lost_event.wait(self.rng.uniform(0, longest))
        if self.rng.random() < 0.75:
            token = grant.hand_over(ttl=TTL)
            draft = self.folder / "post" / secrets.token_hex(8)
            draft.write_text("\n".join([token, resource, str(grant.positions[resource]), str(hop + 1)]))
            draft.rename(draft.with_suffix(".token"))

    # -- leaders

    def leader(self) -> None:
        """Lead for one term, with writes that carry its fence."""
        resource = f"{self.name}-leader"
        stack = contextlib.ExitStack()

        def started(term: sqlsem.Term) -> None:
            stack.enter_context(self.kernel_locks.enter(resource))
            self.book.note(what="started", resource=resource, fence=term.fence, at=time.monotonic())

        def stopped(term: sqlsem.Term) -> None:
            stack.close()
            at = time.monotonic()
            self.book.note(what="stopped", resource=resource, fence=term.fence, at=at, lost=term.lost)

        leader = self.coordinator.leader(resource, on_started=started, on_stopped=stopped, timeout=PATIENCE)
        with leader as term:
            for _ in range(self.rng.randrange(1, 4)):
                self._write(term, resource, term.fence)
                if term.ending.wait(self.rng.uniform(0, 0.05)):
                    break

    def pinned(self) -> None:
        """Assert the lock in a transaction, and delay before the write."""
        resource = f"{self.name}-pinned-{self.rng.randrange(PLACES)}"
        with self.coordinator.mutex(resource, timeout=PATIENCE) as grant:
            self._write(grant, resource, grant.fence, grant.position)

    def revoke(self) -> None:
        """As an operator, revoke one of these locks with force: its row must stay until its transaction has ended. (Its
        holder is not notified before others, so the table decides.)
        """
        time.sleep(self.rng.uniform(0, DAWDLE))
        for entry in self.coordinator.admin.entries(f"{self.name}-pinned-{self.rng.randrange(PLACES)}"):
            if entry.state == "holds":
                with contextlib.suppress(sqlsem.NotHeld):  # released by now
                    self.coordinator.admin.revoke(entry.position, force=True)

    def _write(self, held: Any, resource: str, fence: int, pinned: int | None = None) -> None:
        """Work in a transaction that asserts the lock. ``pinned``: the position of the row that must stay until its
        end.
        """
        with self.using_line():
            cursor = self.line().cursor()
            if self.database.engine == "sqlite":
                cursor.execute("BEGIN IMMEDIATE")
            held.assert_held(cursor)
            if pinned is not None:
                time.sleep(self.rng.uniform(0, DAWDLE))
            self.execute(
                cursor, "INSERT INTO soak_write (resource, fence, pid) VALUES (?, ?, ?)", resource, fence, os.getpid()
            )
            if pinned is not None:
                self.execute(cursor, "SELECT count(*) FROM {table} WHERE queue_position = ?", pinned)
                if cursor.fetchone()[0] != 1:
                    self.wrong(f"the row at {pinned} went, though a transaction that is still open has asserted it")
            self.line().commit()

    # -- guarded tables, and transactions

    def guarded(self) -> None:
        """Write into a guarded table. Now and then the lock is revoked with force: then it must not write any more.
        (Its holder is not notified before others, so the table decides.)
        """
        resource = f"{self.name}-guarded"
        zombie = False
        lock = self.coordinator.mutex(resource, timeout=PATIENCE)
        # (ConfigurationError: the connection broke inside a transaction.)
        with contextlib.suppress(sqlsem.ConfigurationError), self.using_line():
            with lock as grant, grant.session(self.line()):
                for _ in range(self.rng.randrange(1, 4)):
                    cursor = self.line().cursor()
                    text = "INSERT INTO soak_guarded (resource, fence, pid) VALUES (?, ?, ?)"
                    self.execute(cursor, text, resource, grant.fence, os.getpid())
                    self.line().commit()
                    if zombie:
                        self.wrong(f"a zombie wrote under the fence {grant.fence}")
                    if self.rng.random() < 0.1:
                        with contextlib.suppress(sqlsem.NotHeld):  # it is lost already
                            self.coordinator.admin.revoke(grant.position, force=True)
                        zombie = True

    def departure(self) -> None:
        """Use a lock that goes with a transaction, which is committed or not."""
        resource = self.resource("departure")
        requested = time.monotonic()
        commits = self.rng.random() < 0.6

        def told(grant: sqlsem.Grant) -> None:  # the thread that waits for the database hears it, and cannot leave
            self.book.note(what="told", resource=resource, position=grant.position, at=time.monotonic())

        try:
            with self.using_line(), self.coordinator.mutex(resource, timeout=PATIENCE, on_lost=told) as grant:
                try:
                    self._depart(grant, resource, requested, commits)
                except BaseException:
                    self._note_releasing(grant.position)  # by leaving the block
                    raise
        except sqlsem.NotHeld as exc:
            self.wrong(f"a lock went though its transaction was rolled back: {exc}")

    def _depart(self, grant: sqlsem.Grant, resource: str, requested: float, commits: bool) -> None:
        position = grant.position
        with self.stay(grant, resource, requested):
            cursor = self.line().cursor()
            if self.database.engine == "sqlite":
                cursor.execute("BEGIN IMMEDIATE")
            self.execute(cursor, "INSERT INTO soak_done (position) VALUES (?)", position)
            self.book.note(what="leaving", position=position)
            grant.release_on_commit(cursor)
            if not commits:
                self.line().rollback()
                self.book.note(what="rolled back", position=position)
                grant.lost_event.wait(self.rng.uniform(0, self.pace.stay))
                grant.check()
        if commits:
            self.line().commit()
            self.book.note(what="committed", position=position)
            self._gone(resource, position)
        else:
            self._note_releasing(position)

    def _note_releasing(self, position: int) -> None:
        self.book.note(what="releasing", position=position, at=time.monotonic())

    def _gone(self, resource: str, position: int) -> None:
        """Wait until the row has gone, which takes milliseconds when nothing is wrong."""
        began = time.monotonic()
        while any(entry.position == position for entry in self.coordinator.admin.entries(resource)):
            if time.monotonic() > began + 60:
                self.wrong(f"the lock at {position} is still there, a minute after its transaction committed")
                return
            time.sleep(0.005)

    # -- participants without the library

    def routine(self) -> None:
        """Use a session that calls the routines of the database."""
        resource = self.resource("sql")
        postgres, schema = self.database.engine == "postgresql", self.database.schema
        requested = time.monotonic()
        with self.using_line():  # a bare session learns no more about its lock than that the session has ended
            line = self.line()
            line.autocommit = True
            cursor = line.cursor()
            if postgres:
                text = f"CALL {schema}.acquire(%s, timeout_ms => 2000)"
            else:
                text = (
                    "DECLARE @code int, @position bigint; "
                    f"EXEC @code = {schema}.acquire @resource = ?, @timeout_ms = 2000, @position = @position OUTPUT; "
                    "SELECT @code, @position"
                )
            cursor.execute(text, (resource,))
            code, position, *_ = cursor.fetchone()
            if code not in (0, 1):
                return
            entered = time.monotonic()
            with self.kernel_locks.enter(resource):
                time.sleep(self.rng.uniform(0, self.pace.stay))
            left_at = time.monotonic()
            release = f"DECLARE @code int; EXEC @code = {schema}.release @resource = ?; SELECT @code"
            cursor.execute(f"SELECT {schema}.release(%s)" if postgres else release, (resource,))
            was_held = cursor.fetchone()[0] == 0
            self._foreign(resource, position, requested, entered, left_at, held=was_held)

    def bare(self) -> None:
        """Use three statements: insert a row in the queue, poll, delete the row. (The poll and the delete can be
        retried.)
        """
        resource = self.resource("sql")
        me = f"bare-{os.getpid()}-{secrets.token_hex(4)}"
        requested = time.monotonic()
        try:
            line = self.line()
            if self.database.engine != "sqlite":
                line.autocommit = True
            cursor = line.cursor()
            position = self.database.insert_bare(cursor, resource, me, concurrency_limit=1)
            line.commit()
        except self.errors:
            self.drop_line()
            self._end_bare(me)
            return
        try:
            deadline = time.monotonic() + PATIENCE
            ahead = "SELECT count(*) FROM {table} WHERE resource_id = ? AND queue_position < ?"
            query = "SELECT count(*) FROM {table} WHERE queue_position = ? AND requesting_id = ?"
            while True:
                self.execute(cursor, ahead, resource, position)
                if cursor.fetchone()[0] == 0:
                    break
                if time.monotonic() > deadline:
                    return
                time.sleep(0.01)
            entered = time.monotonic()
            with self.kernel_locks.enter(resource):
                time.sleep(self.rng.uniform(0, self.pace.stay))
            left_at = time.monotonic()
            self.execute(cursor, query, position, me)
            held = cursor.fetchone()[0] == 1
            line.rollback()
            self._foreign(resource, position, requested, entered, left_at, held=held)
        except self.errors:
            self.drop_line()
        finally:
            self._end_bare(me)

    def _foreign(
        self, resource: str, position: int, requested: float, entered: float, left_at: float, *, held: bool
    ) -> None:
        words = {"position": position, "fence": position, "access": "write", "limit": 1, "lost": not held}
        self.book.note(what="stay", resource=resource, asked=requested, entered=entered, left=left_at, **words)

    def _end_bare(self, me: str) -> None:
        """Delete the row, however long it takes: no other process does, while this one lives."""
        while True:
            try:
                line = self.line()
                self.execute(line.cursor(), "DELETE FROM {table} WHERE requesting_id = ?", me)
                line.commit()
                return
            except self.errors:
                self.drop_line()
                time.sleep(0.1)


#: The kinds of each engine.
EVERYWHERE = (
    "mutex",
    "limit",
    "table",
    "several",
    "ranked",
    "tasks_of_a_loop",
    "rush",
    "work",
    "blocked_tasks",
    "shared",
    "rate",
    "once",
    "travel",
    "leader",
    "pinned",
    "revoke",
    "departure",
    "bare",
)
KINDS = {
    "sqlite": EVERYWHERE,
    "postgresql": (*EVERYWHERE, "guarded", "routine"),
    "mssql": (*EVERYWHERE, "guarded", "routine"),
}


def chosen(engine: str, pace: Pace) -> list[str]:
    """Return the kinds of a night: the requested kinds that the engine has."""
    return [kind for kind in pace.kinds or KINDS[engine] if kind in KINDS[engine]]


def take_part(
    channel: Channel,
    engine: str,
    url: str,
    options: dict[str, Any],
    settings: dict[str, Any],
    name: str,
    folder: str,
    seed: int,
    kinds: list[str],
    pace: dict[str, Any],
) -> None:
    """Run a process of the crowd: a thread for each kind, until it is killed or asked to end."""
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s.%(msecs)03d %(threadName)s %(levelname)s %(message)s"
    )
    if "FAKETIME_TIMESTAMP_FILE" in os.environ:  # its sleeps on the monotonic clock are wrong, as Python calls them
        time.sleep = lambda seconds: select.select([], [], [], seconds) and None
    database = Database(engine, url, options)
    coordinator = sqlsem.connect(url, **options, **settings)
    jobs = Jobs(database, coordinator, name, folder, seed, Pace(**pace))

    def go_on(job: Callable[[], None]) -> None:
        while True:
            try:
                job()
            except sqlsem.Timeout:
                pass
            except TROUBLE as exc:
                channel.tell("trouble", error=f"{type(exc).__name__}: {exc}")
                time.sleep(0.02)
            except BaseException as exc:
                logging.exception("a job failed")
                channel.tell("failed", error=f"{type(exc).__name__}: {exc}")
                return

    channel.tell("ready")
    for kind in kinds:
        threading.Thread(target=go_on, args=(getattr(jobs, kind),), name=kind, daemon=True).start()
    channel.ask()
    os._exit(0)
