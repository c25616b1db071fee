"""A session that waits on SQL Server keeps a worker thread: it takes a slot first (setting `max_server_waiters`).

A scan of the T-SQL finds each place where a session sleeps for as long as its caller likes. A new one fails until it is
here, with a slot or with the reason why it needs none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from support.procedures import PROCEDURES

#: Sleeps for which a slot is taken in the same transaction: the procedure and its call.
WITH_A_SLOT = {("wait", "backoff_sleep"), ("wait", "@left"), ("client_sleep", "WAITFOR")}
#: Sleeps without a slot, with the reason.
WITHOUT = {
    ("wait_until_lock_free", "@timeout_ms"): "its callers say how long",
    ("backoff_sleep", "wait_until_lock_free"): "its callers take a slot",
    ("upgrade", "backoff_sleep"): "it holds a lock, for which others wait",
    ("upgrade", "wait_until_lock_free"): "it holds a lock, for which others wait",
    ("register", "@patience"): "a gate is held for the length of one registration",
    ("register_all", "@patience"): "a gate is held for the length of one registration",
    ("acquire_by_priority", "@patience"): "a gate is held for the length of one registration",
    ("begin_upgrade", "@patience"): "a gate is held for the length of one registration",
    ("lock_batch", "@patience"): "held for the length of one decision",
    ("hand_over_rows", "@patience"): "for a pin, and the caller is a holder",
    ("release", "pin"): "what it gives back is what others wait for",
    ("downgrade", "pin"): "what it gives back is what others wait for",
}
#: The longest fixed wait, in milliseconds, for locks that are held only for a moment.
LONGEST = 60_000


def sleeps(procedures: dict[str, str]) -> Iterator[tuple[str, str, int]]:
    """Yield (procedure, its way to sleep, position) of each sleep that no literal bounds."""
    for name, text in procedures.items():
        for call in re.finditer(r"sys\.sp_getapplock ([^;]*);", text):
            words = " ".join(call[1].split())
            timeout = re.search(r"@LockTimeout = (@?\w+)", words) or re.match(r"@\w+, N'\w+', [^,]+, (@?\w+),", words)
            if timeout is None:
                yield (
                    name,
                    re.sub(r"\W", "", words.partition(",")[0].partition("= ")[2] or words.partition(",")[0]),
                    call.start(),
                )
            elif timeout[1].startswith("@"):
                yield name, timeout[1], call.start()
            else:
                assert int(timeout[1]) <= LONGEST, (name, words)
        for call in re.finditer(
            r"EXEC (?:@\w+ = )?sqlsem\.(backoff_sleep|wait_until_lock_free) ([^;]*)|(WAITFOR)", text
        ):
            if not re.search(r", \d+$", (call[2] or "").strip()):
                yield name, call[3] or call[1], call.start()


def unslotted(procedures: dict[str, str]) -> list[tuple[str, str]]:
    """Return the sleeps that lack their slot, and the sleeps that are in no table."""
    waits = []
    for name, wait, at in sleeps(procedures):
        transaction = procedures[name][:at].rpartition("BEGIN TRANSACTION")[2]
        slotted = (
            "sqlsem.take_waiter_slot" in transaction and "COMMIT" not in transaction.partition("take_waiter_slot")[0]
        )
        if (name, wait) in WITHOUT:
            continue
        if not slotted or (name, wait) not in WITH_A_SLOT:
            waits.append((name, wait))
    return waits


def test_each_sleep_has_a_slot_or_a_reason() -> None:
    assert unslotted(PROCEDURES) == []


def test_tables_of_sleeps_name_existing_sleeps_only() -> None:
    assert {(name, wait) for name, wait, _ in sleeps(PROCEDURES)} == WITH_A_SLOT | set(WITHOUT)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("wait", "EXEC @slot = sqlsem.take_waiter_slot;", ""),
        ("client_sleep", "EXEC @slot = sqlsem.take_waiter_slot;", ""),
        ("acquire", "EXEC sqlsem.client_sleep @pause", "WAITFOR DELAY '00:00:05'"),
        ("acquire", "EXEC sqlsem.client_sleep @pause", "EXEC @code = sqlsem.wait_until_lock_free @name, @left"),
    ],
)
def test_a_sleep_without_a_slot_is_found(name: str, old: str, new: str) -> None:
    assert old in PROCEDURES[name]
    assert name in {procedure for procedure, _ in unslotted({**PROCEDURES, name: PROCEDURES[name].replace(old, new)})}


def test_a_session_that_finds_no_slot_does_not_sleep() -> None:
    """`wait` returns 2 before each of its sleeps."""
    parts = PROCEDURES["wait"].split("EXEC @slot = sqlsem.take_waiter_slot;")[1:]
    assert len(parts) == 2
    for part in parts:
        assert re.match(r"\s*IF @slot (= 0|< 0)\s", part)
        assert "SET @result = 2" in part
