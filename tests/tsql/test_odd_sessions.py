"""Names and sessions as few have them: a clear error or a lock, and nothing left behind either way."""

from __future__ import annotations

import pytest

#: What follows the test's own name, and whether that can be the name of a resource.
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
    """By one case, one blank or one pattern more it would be another resource's lock."""
    words, good = NAMES[kind]
    one, resource = session(), f"{name}{words}"
    if good:
        got = one.acquire(resource)
        assert got.code == 0
        assert [row[0] for row in database.queue(resource)] == [got.position]
        assert one.call("renew", resource, got.position) == 0
        assert one.release(resource, got.position) == 0
    else:
        with refused(50000, "sqlsem: resource"):
            one.acquire(resource)
    assert database.queue(name) == []


@pytest.mark.parametrize("length", [255, 256, 401, 451])
def test_long_name_is_refused_and_not_cut_off(session, database, name, length, refused):
    one, resource = session(), name + "x" * (length - len(name))
    if length == 255:
        got = one.acquire(resource)
        assert got.code == 0
        assert one.release(resource, got.position) == 0
    else:
        with refused(50000, "has more than 255 characters"):
            one.acquire(resource)
    assert database.queue(name) == []


@pytest.mark.parametrize("setting", SETTINGS)
def test_session_with_odd_settings_leaves_nothing(session, database, name, setting):
    one = session()
    one.rows(SETTINGS[setting])
    try:
        got = one.acquire(name)
        assert got.code == 0
        one.rows("IF @@TRANCOUNT > 0 COMMIT TRANSACTION")
        assert one.call("renew", name, got.position) == 0
        one.rows("IF @@TRANCOUNT > 0 COMMIT TRANSACTION")
        assert [row[0] for row in database.queue(name)] == [got.position]
        one.rows("EXEC {s}.release ?, ?", name, got.position)
        assert one.rows("SELECT @@TRANCOUNT")[0][0] in (0, 1), "what the session itself began, at the most"
    finally:
        one.rows(f"IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION; {USUAL}")
    assert database.queue(name) == []


def test_doomed_transaction_is_refused_and_takes_nothing(session, database, name):
    """In a CATCH, with a transaction that can only be rolled back."""
    one = session()
    ((number,),) = one.rows(
        "SET XACT_ABORT ON; DECLARE @number int; BEGIN TRY BEGIN TRANSACTION; SELECT 1 / 0 AS one; END TRY "
        "BEGIN CATCH BEGIN TRY EXEC {s}.acquire ?; END TRY BEGIN CATCH SET @number = ERROR_NUMBER(); END CATCH; "
        "IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION; END CATCH; SELECT @number",
        name,
    )[-1:]
    assert number == 50001
    assert database.queue(name) == []
