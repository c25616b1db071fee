"""Rare names and sessions: each gets a clear error or a lock, and leaves nothing behind."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.engines("mssql")

#: The text behind the test's own name, and True if the result can be the name of a resource.
NAMES = {
    "quote": ("it's", True),
    "double quote": ('"x"', True),
    "brackets": ("[x]]", True),
    "patterns": ("50%_x", True),
    "surrogate pair": ("\U0001f512", True),
    "Turkish": ("\u0130\u0131iI", True),
    "trailing blank": ("x ", False),
    "tab": ("a\tb", False),
}
SETTINGS = {
    "implicit": "SET IMPLICIT_TRANSACTIONS ON",
    "rowcount": "SET ROWCOUNT 1",
    "textsize": "SET TEXTSIZE 10",
    "quoted identifiers": "SET QUOTED_IDENTIFIER OFF",
}
USUAL = "SET IMPLICIT_TRANSACTIONS OFF; SET ROWCOUNT 0; SET TEXTSIZE 2147483647; SET QUOTED_IDENTIFIER ON"


@pytest.mark.parametrize("kind", NAMES)
def test_odd_name_is_taken_as_it_is_or_refused(session, database, name, kind, refused):
    """A difference in case, a blank or a pattern makes another resource's lock."""
    words, good = NAMES[kind]
    caller, resource = session(), f"{name}{words}"
    if good:
        got = caller.acquire(resource)
        assert got.code == 0
        assert [row[0] for row in database.queue(resource)] == [got.position]
        assert caller.call("renew", resource, got.position) == 0
        assert caller.release(resource, got.position) == 0
    else:
        with refused(50000, "sqlsem: resource"):
            caller.acquire(resource)
    assert database.queue(name) == []


@pytest.mark.parametrize("length", [255, 256, 401, 451])
def test_long_name_is_refused_and_not_cut_off(session, database, name, length, refused):
    caller, resource = session(), name + "x" * (length - len(name))
    if length == 255:
        got = caller.acquire(resource)
        assert got.code == 0
        assert caller.release(resource, got.position) == 0
    else:
        with refused(50000, "has more than 255 characters"):
            caller.acquire(resource)
    assert database.queue(name) == []


@pytest.mark.parametrize("setting", SETTINGS)
def test_session_with_odd_settings_leaves_nothing(session, database, name, setting):
    caller = session()
    caller.rows(SETTINGS[setting])
    try:
        got = caller.acquire(name)
        assert got.code == 0
        caller.rows("IF @@TRANCOUNT > 0 COMMIT TRANSACTION")
        assert caller.call("renew", name, got.position) == 0
        caller.rows("IF @@TRANCOUNT > 0 COMMIT TRANSACTION")
        assert [row[0] for row in database.queue(name)] == [got.position]
        caller.rows("EXEC {s}.release ?, ?", name, got.position)
        assert caller.rows("SELECT @@TRANCOUNT")[0][0] in (0, 1), "what the session itself began, at the most"
    finally:
        caller.rows(f"IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION; {USUAL}")
    assert database.queue(name) == []


def test_doomed_transaction_is_refused_and_takes_nothing(session, database, name):
    """In a CATCH, with a transaction that can only be rolled back."""
    caller = session()
    ((number,),) = caller.rows(
        "SET XACT_ABORT ON; DECLARE @number int; BEGIN TRY BEGIN TRANSACTION; SELECT 1 / 0 AS one; END TRY "
        "BEGIN CATCH BEGIN TRY EXEC {s}.acquire ?; END TRY BEGIN CATCH SET @number = ERROR_NUMBER(); END CATCH; "
        "IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION; END CATCH; SELECT @number",
        name,
    )[-1:]
    assert number == 50001
    assert database.queue(name) == []
