"""Bare participants: three plain statements, as written in 2009 (docs/reference/protocol.md)."""

from __future__ import annotations

import contextlib
import random
import time
from typing import Any

import sqlsem
from support.databases import Database
from support.histories import Recorder, Stay
from support.patience import PATIENCE


def delete_bare(database: Database, cursor: Any, position: int) -> None:
    cursor.execute(database.sql("DELETE FROM {table} WHERE queue_position = ?"), (position,))


def bare_worker(
    database: Database, resource: str, rounds: int, seed: int, recorder: Recorder, autocommit: bool = True
) -> None:
    """Hold a mutex again and again, with small pauses; without autocommit also between a number and its commit."""
    chance = random.Random(seed)
    me = f"bare-{seed}"
    ahead = database.sql("SELECT count(*) FROM {table} WHERE resource_id = ? AND queue_position < ?")
    with contextlib.closing(database.raw(autocommit=autocommit)) as connection:
        cursor = connection.cursor()

        def commit() -> None:
            if not autocommit:
                connection.commit()

        for _ in range(rounds):
            position = database.insert_bare(cursor, resource, me, concurrency_limit=1)
            if not autocommit:
                time.sleep(chance.random() * 0.003)  # the number is assigned, the row is not visible yet
            commit()
            deadline = time.monotonic() + PATIENCE
            while True:
                cursor.execute(ahead, (resource, position))
                is_first = cursor.fetchone()[0] == 0
                commit()
                if is_first:
                    break
                assert time.monotonic() < deadline
                time.sleep(0.001)
            entered = time.monotonic()
            time.sleep(chance.random() * 0.002)
            left_at = time.monotonic()
            delete_bare(database, cursor, position)
            commit()
            recorder.add(Stay(resource, position, entered, left_at, who=me))


def member_worker(coordinator: sqlsem.Coordinator, resource: str, rounds: int, seed: int, recorder: Recorder) -> None:
    """Hold the same mutex as a program does."""
    chance = random.Random(seed)
    lock = coordinator.mutex(resource)
    for _ in range(rounds):
        with recorder.stay(lock):
            time.sleep(chance.random() * 0.002)
