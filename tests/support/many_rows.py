"""Rows for all tables of an installation on PostgreSQL: a few for objects that have few, and any number for others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_TEXTS = re.split(
    r"^-- name: (\w+)\n", Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"), flags=re.MULTILINE
)
_STATEMENTS = dict(zip(_TEXTS[1::2], _TEXTS[2::2], strict=True))
FEW = _STATEMENTS.pop("few")
#: By table, the statement that inserts rows {low} to {high}.
MANY = _STATEMENTS
#: Tables that have a few rows only, whatever an installation does.
SMALL = frozenset(["guard_key", "installer", "setting"])
#: Conditions for the rows of FEW, by table.
KEPT = {
    "member": "program <> 'program'",
    "processcontrol": "queue_position < 1000",
    "resource": "resource_id NOT LIKE '%-%'",
    "limit_pattern": "prefix NOT LIKE '%-%'",
    "history": "resource_id = 'mine'",
    "rate_window": "resource_id NOT LIKE '%-%'",
    "rate_slot": "resource_id = 'rate:mine'",
    "once_run": "once_name = 'mine'",
    "commit_marker": "marker = 'mine'",
    "handover": "member_id = 500001",
    "task": "task_id < 1000",
    "task_log": "task_id < 1000",
    "queue_proxy": "queue_name NOT LIKE '%-%'",
    "schedule": "schedule_name = 'mine'",
    "batch": "batch_id < 1000",
    "batch_part": "batch_id = 11",
}


def insert(connection: Any, low: int, high: int) -> None:
    """Insert rows ``low`` to ``high`` of each table."""
    _run(connection, [text.format(low=low, high=high) for text in MANY.values()])


def insert_few(connection: Any, member: int) -> None:
    _run(connection, [FEW.format(member=member)])


def delete_many(connection: Any) -> None:
    """Delete the rows of `insert`."""
    _run(connection, [f"DELETE FROM sqlsem.{table} WHERE NOT ({KEPT.get(table, 'false')})" for table in MANY])


def advance_numbers(connection: Any) -> None:
    """Let new rows have greater numbers than all rows here."""
    for table, column in (
        ("processcontrol", "queue_position"),
        ("task", "task_id"),
        ("batch", "batch_id"),
        ("member", "member_id"),
    ):
        connection.execute(f"SELECT setval(pg_get_serial_sequence('sqlsem.{table}', '{column}'), 1000000000)")


def _run(connection: Any, statements: list[str]) -> None:
    with connection.transaction():
        connection.execute("SET LOCAL session_replication_role = replica")  # (without triggers)
        for statement in statements:
            connection.execute(statement)
