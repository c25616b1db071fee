"""Callers with all kinds of settings and rights. Checks 3, 13, 16, 17, 18 and 19."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from sqlsem.certify.bench import PATIENCE, Bench
from sqlsem.certify.registry import check
from sqlsem.certify.results import Failed, Notes, NotPossible
from sqlsem.certify.sessions import Session, code_of, later, server_words
from sqlsem.errors import Unavailable

__all__: list[str] = []

SESSIONS_ONLY = "SQLite has no routines for sessions, and no logins: only the library takes locks there"
#: For each role, which of the calls it may make (`may`) and which it may not.
RIGHTS = {
    "user": ({"acquire"}, {"set_limit"}),
    "reader": ({"status"}, {"acquire", "set_limit"}),
    "operator": ({"acquire", "set_limit", "status"}, set[str]()),
    "putter": (set[str](), {"acquire", "set_limit"}),
    "worker": (set[str](), {"acquire", "set_limit"}),
}
#: Seconds in which somebody who has nothing to do with a pin must get a lock.
OTHERS_SECONDS = 10.0


@check(3, "the table hints work together", "hinted_number", elsewhere="only SQL Server has table hints")
def hints(bench: Bench, notes: Notes) -> None:
    """Pass by a locked row: in this database, and in ones with and without row versions, at an old level."""
    if not bench.session().value("is_sql_server"):
        raise NotPossible("this server speaks T-SQL, and reads no table hints")
    _hints(bench, notes, "this database")
    for what, change in (("row versions", "rows_are_versioned"), ("no row versions", "rows_are_not_versioned")):
        try:
            with bench.database("", change, "oldest_level") as other:
                _hints(other, notes, f"{what}, level 130")
        except NotPossible as exc:
            notes.skip(f"{what}: {exc}")


def _hints(bench: Bench, notes: Notes, where: str) -> None:
    writer, reader = bench.session(), bench.session()
    notes.require(reader.value("hinted_number") is not None, f"{where}: a free row is not seen")
    with writer.transaction():
        writer.rows("write_counter", 1)
        notes.require(reader.value("hinted_number") is None, f"{where}: a row that is locked is not passed by")
    notes.note(where)


@check(13, "APPLOCK_MODE outside of a transaction", "applock_mode", elsewhere="only SQL Server has it")
def applock_mode(bench: Bench, notes: Notes) -> None:
    """Ask for a transaction's lock where there is no transaction: NoLock, and no error."""
    mode = bench.session().value("applock_mode")
    notes.require(mode == "NoLock", f"APPLOCK_MODE(…, 'Transaction') outside of a transaction is {mode}, not NoLock")
    notes.note("NoLock")


@check(16, "each role may do what it should, and no more", "create_user", elsewhere=SESSIONS_ONLY)
def rights(bench: Bench, notes: Notes) -> None:
    """Make a user for each role, and one without; call as each."""
    denied = str(bench.session().value("denied"))
    for role, (may, may_not) in (*RIGHTS.items(), ("", (set[str](), {"acquire", "set_limit"}))):
        user = f"{bench.schema}_x{len(role)}{role[:1]}"
        session = bench.admin_session()
        try:
            session.rows("create_user", user=user)
        except Exception as exc:
            why = server_words(exc, bench.engine)
            raise NotPossible(f"this login may not create users ({why}); name one with --admin-url") from exc
        bench.made(session.texts["drop_user"].replace("certify_user", user), f"user {user}")
        if role:
            session.rows("add_member", role=f"{bench.schema}_{role}", user=user)
        session.rows("as_user", user=user)
        for call in sorted(may | may_not):
            words = _call_as(bench, session, call, denied)
            if call in may:
                notes.require(words is None, f"{role}: {call} was refused: {words}")
            else:
                notes.require(words is not None, f"{role or 'a user without a role'}: {call} was not refused")
        session.rows("as_before")
    notes.note(f"{len(RIGHTS)} roles, and a user without one")


def _call_as(bench: Bench, session: Session, call: str, denied: str) -> str | None:
    """Make a call; the words of the server when it is denied. Other errors are raised."""
    resource = bench.name()
    try:
        if call == "acquire":
            session.rows("acquire_as", resource)
            session.rows("release_as", resource)
        elif call == "status":
            session.rows("status")
        else:
            session.rows(call, resource)
    except Exception as exc:
        if code_of(session, exc) == denied or "permission" in str(exc).lower():
            return server_words(exc, bench.engine)
        raise
    return None


@check(17, "callers may set their sessions as they like", "callers_settings", elsewhere=SESSIONS_ONLY)
def settings(bench: Bench, notes: Notes) -> None:
    """Take, wait and give back under each setting; and the setting stays."""
    asked = [str(row[0]) for row in bench.session().rows("callers_settings")]
    holder, held = bench.session(), bench.name()
    holder.acquire(held)
    skipped = []
    for setting in asked:
        session, resource = bench.session(), bench.name()
        try:
            session.run(setting)
        except Exception as exc:
            skipped.append(f"{setting} ({server_words(exc, bench.engine)})")
            session.close()
            continue
        try:
            before = session.rows("shown_settings")
            codes = [
                session.acquire(resource).code,
                session.acquire(held, timeout_ms=50).code,
                session.release(resource),
                session.acquire(resource, timeout_ms=0).code,
                session.release(resource),
            ]
            after = session.rows("shown_settings")
        except Exception as exc:
            raise Failed(f"after {setting}: {server_words(exc, bench.engine)}") from exc
        notes.require(codes == [0, -1, 0, 0, 0], f"after {setting} the answers were {codes}, not [0, -1, 0, 0, 0]")
        notes.require(before == after, f"after {setting} a call has changed {before} to {after}")
        session.close()
    holder.release(held)
    notes.note(f"{len(asked) - len(skipped)} settings")
    for words in skipped:
        notes.skip(words)
    notes.require(len(skipped) < len(asked), "this server takes none of the settings")


@check(18, "guarded tables refuse writes without the lock", "create_guarded", elsewhere=SESSIONS_ONLY)
def guards(bench: Bench, notes: Notes) -> None:
    """Write into a guarded table without the lock, and with it."""
    session = bench.session()
    with _guarded_table(bench, session):
        writes = [name for name in ("insert", "update", "delete", "truncate") if session.has(f"{name}_guarded")]
        for write in writes:
            words = _refusal(session, f"{write}_guarded", bench)
            notes.require(
                words is not None and "needs the lock" in words, f"{write} without the lock: {words or 'done'}"
            )
        position = session.acquire("certify-guarded").position
        with session.transaction():
            session.rows("assert_holding", "certify-guarded", position)
            for write in writes:
                words = _refusal(session, f"{write}_guarded", bench)
                notes.require(words is None, f"{write} with the lock: {words}")
        notes.note(f"{', '.join(writes)} are refused without the lock, and done with it")
        if session.has("output_guarded"):
            words = _refusal(session, "output_guarded", bench)
            notes.note(f"OUTPUT without INTO: {words or 'done'}")
            notes.require(words is not None, "INSERT … OUTPUT went past the guard")
        session.release("certify-guarded")


@contextlib.contextmanager
def _guarded_table(bench: Bench, session: Session) -> Iterator[None]:
    session.rows("create_guarded")
    try:
        session.rows("guard")
        yield
        session.rows("unguard")
    finally:
        bench.session().rows("drop_guarded")


def _refusal(session: Session, name: str, bench: Bench) -> str | None:
    try:
        session.rows(name)
    except Exception as exc:
        return server_words(exc, bench.engine)
    return None


@check(19, "a lock that a transaction has asserted stays until that ends", "assert_holding", elsewhere=SESSIONS_ONLY)
def pins(bench: Bench, notes: Notes) -> None:
    """Revoke what an open transaction has asserted: it waits, and nobody else does."""
    session, looking, other = bench.session(), bench.session(), bench.session()
    operator = bench.coordinator(grace=10)
    operator.reap()  # connects
    other.acquire(bench.name())
    resource = bench.name()
    position = session.acquire(resource).position
    assert position is not None
    with session.transaction():
        session.rows("assert_holding", resource, position)
        revoking = later(lambda: operator.revoke(position, force=True))
        began = time.monotonic()
        free = bench.name()
        code = other.acquire(free).code
        other.release(free)
        took = time.monotonic() - began
        notes.require(code == 0, f"beside a pin somebody else's free lock was answered with {code}")
        notes.require(took < OTHERS_SECONDS, f"beside a pin somebody else's free lock took {took:.1f} s")
        with contextlib.suppress(TimeoutError, Unavailable):
            revoking.result(2.0)
        there = len(looking.rows("positions", resource))
        notes.require(there == 1, "a lock was taken away while a transaction had asserted it")
    with contextlib.suppress(Unavailable):  # it gave up in time
        revoking.result(PATIENCE)
    if looking.rows("positions", resource):
        operator.revoke(position, force=True)
    bench.until(lambda: not looking.rows("positions", resource), "the end of a row that was revoked", PATIENCE)
    notes.note(f"revoked after the commit; somebody else's pair took {took * 1000:.0f} ms meanwhile")
