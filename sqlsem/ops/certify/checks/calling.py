"""Calls with the settings and the rights that sessions can have: checks 3, 13, 16, 17, 18 and 19."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlsem.ops.certify.bench import PATIENCE, Bench
from sqlsem.ops.certify.registry import check
from sqlsem.ops.certify.results import Failed, Notes, NotPossible
from sqlsem.ops.certify.sessions import Session, code_of, later, server_words
from sqlsem.values.errors import Unavailable

__all__: list[str] = []

SESSIONS_ONLY = "there are no routines for sessions, and no roles: only the library takes locks here"
#: For each role: the calls that it may make, and calls that it may not make.
RIGHTS = {
    "user": ({"acquire"}, {"set_limit"}),
    "reader": ({"status"}, {"acquire", "set_limit"}),
    "operator": ({"acquire", "set_limit", "status"}, set[str]()),
    "putter": (set[str](), {"acquire", "set_limit"}),
    "worker": (set[str](), {"acquire", "set_limit"}),
}
#: While a transaction has asserted a lock, a request for another free lock may take so long, in seconds.
OTHER_LOCK_SECONDS = 10.0


@check(3, "the table hints work together", "hinted_number", elsewhere="only SQL Server has table hints")
def hints(bench: Bench, notes: Notes) -> None:
    """Skip a locked row: in this database, and in databases of an old compatibility level with and without row
    versions.
    """
    if not bench.session().value("is_sql_server"):
        raise NotPossible("this server speaks T-SQL, but ignores table hints")
    _hints(bench, notes, "this database")
    for what, change in (("row versions", "rows_are_versioned"), ("no row versions", "rows_are_not_versioned")):
        try:
            with bench.database("", change, "oldest_level") as other:
                _hints(other, notes, f"{what}, level 130")
        except NotPossible as exc:
            notes.skip(f"{what}: {exc}")


def _hints(bench: Bench, notes: Notes, where: str) -> None:
    writer, reader = bench.session(), bench.session()
    notes.require(reader.value("hinted_number") is not None, f"{where}: a free row was not read")
    with writer.transaction():
        writer.rows("write_counter", 1)
        notes.require(reader.value("hinted_number") is None, f"{where}: a locked row was not skipped")
    notes.note(where)


@check(13, "APPLOCK_MODE outside of a transaction", "applock_mode", elsewhere="only SQL Server has it")
def applock_mode(bench: Bench, notes: Notes) -> None:
    """Query a lock of the transaction outside of a transaction: this must return NoLock, without an error."""
    mode = bench.session().value("applock_mode")
    notes.require(mode == "NoLock", f"APPLOCK_MODE(…, 'Transaction') outside of a transaction is {mode}, not NoLock")
    notes.note("NoLock")


@check(16, "each role has exactly its rights", "create_user", elsewhere=SESSIONS_ONLY)
def rights(bench: Bench, notes: Notes) -> None:
    """Create a user for each role and one without a role, and make calls as each of them."""
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
    _role_in_role(bench, notes, denied)
    _group(bench, notes, denied)


def _role_in_role(bench: Bench, notes: Notes, denied: str) -> None:
    """Create a role that is a member of sqlsem's role, and a user of the former; make a call as that user."""
    group, user, session = f"{bench.schema}_xg", f"{bench.schema}_xu", bench.admin_session()
    for name, what in ((group, "group"), (user, "user")):
        session.rows(f"create_{what}", user=name)
        bench.made(session.texts[f"drop_{what}"].replace("certify_user", name), f"user {name}")
    session.rows("add_member", role=f"{bench.schema}_user", user=group)
    session.rows("add_member", role=group, user=user)
    session.rows("as_user", user=user)
    words = _call_as(bench, session, "acquire", denied)
    session.rows("as_before")
    notes.require(words is None, f"a user of a role that is in {bench.schema}_user was refused: {words}")
    notes.note("a user of a role in that role")


def _group(bench: Bench, notes: Notes, denied: str) -> None:
    """Make a Windows or Entra group of this login a member of sqlsem's role, and make a call."""
    session, admin = bench.session(), bench.admin_session()
    if not session.has("groups"):
        return
    try:
        groups = [str(row[0]) for row in session.rows("groups")]
        if not groups:
            notes.skip(
                "a Windows or Entra group: this login belongs to none that is a user but no owner of this database; "
                "log in by such a group, and name an administrator with --admin-url"
            )
            return
        admin.rows("join_group", groups[0])
    except Exception as exc:
        notes.skip(f"a Windows or Entra group: {server_words(exc, bench.engine)}")
        return
    try:
        member = bench.session()
        notes.require(member.value("is_user") == 1, "IS_MEMBER does not know the role of a Windows or Entra group")
        words = _call_as(bench, member, "acquire", denied)
        notes.require(words is None, f"a member of a Windows or Entra group was refused: {words}")
    finally:
        admin.rows("leave_group", groups[0])
    notes.note("a Windows or Entra group")


def _call_as(bench: Bench, session: Session, call: str, denied: str) -> str | None:
    """Make a call. Return the server's message if it denies the call, else None; raise other errors."""
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
    """Acquire, wait and release under each setting. No call may change the setting."""
    callers_settings = [str(row[0]) for row in bench.session().rows("callers_settings")]
    shown = _shown_here(bench, notes)
    holder, held = bench.session(), bench.name()
    holder.acquire(held)
    refused = 0
    for setting in callers_settings:
        session = bench.session()
        try:
            session.run(setting)
        except Exception as exc:
            refused += 1
            notes.skip(f"{setting} ({server_words(exc, bench.engine)})")
        else:
            _call_under(bench, notes, session, setting, held, shown)
        session.close()
    notes.require(refused < len(callers_settings), "this server refuses all of the settings")
    notes.note(f"{len(callers_settings) - refused} settings")
    if bench.session().has("agent_setting"):
        _agent(bench, notes, held, shown)
        _mars(bench, notes, held, shown)
    holder.release(held)


def _shown_here(bench: Bench, notes: Notes) -> list[str]:
    """Return the expressions that show a setting on this server."""
    session, expressions = bench.session(), []
    for (expression,) in session.rows("shown_settings"):
        try:
            session.run(f"SELECT {expression}")
        except Exception as exc:
            notes.skip(f"whether a call changes {expression} ({server_words(exc, bench.engine)})")
            session = bench.session()
        else:
            expressions.append(str(expression))
    return expressions


def _values(session: Session, expressions: list[str]) -> list[Any]:
    return [session.run(f"SELECT {expression}")[0][0] for expression in expressions]


def _call_under(bench: Bench, notes: Notes, session: Session, setting: str, held: str, shown: list[str]) -> None:
    """Acquire, wait and release in a session that has this setting. Another session holds the resource ``held``."""
    resource = bench.name()
    try:
        before = _values(session, shown)
        codes = [
            session.acquire(resource).code,
            session.acquire(held, timeout_ms=50).code,
            session.release(resource),
            session.acquire(resource, timeout_ms=0).code,
            session.release(resource),
        ]
        after = _values(session, shown)
    except Exception as exc:
        raise Failed(f"after {setting}: {server_words(exc, bench.engine)}") from exc
    notes.require(codes == [0, -1, 0, 0, 0], f"after {setting} the answers were {codes}, not [0, -1, 0, 0, 0]")
    notes.require(before == after, f"after {setting} a call has changed {before} to {after}")


def _agent(bench: Bench, notes: Notes, held: str, shown: list[str]) -> None:
    """Make calls as the step of a job does: with its program's name and its settings."""
    session = bench.session(APP="SQLAgent - TSQL JobStep (Job 0x00 : Step 1)")
    setting = str(session.value("agent_setting"))
    try:
        session.run(setting)
    except Exception as exc:
        notes.skip(f"a session as SQL Server Agent has it ({server_words(exc, bench.engine)})")
        return
    _call_under(bench, notes, session, setting, held, shown)
    notes.note("a session as SQL Server Agent has it")


def _mars(bench: Bench, notes: Notes, held: str, shown: list[str]) -> None:
    """Make calls in a session with several results at a time (MARS), also while it reads another result."""
    what = "several results at a time (MARS)"
    try:
        session = bench.session(MARS_Connection="yes")
        pending = session.wire.connection.cursor()
        pending.execute(session.texts["many_rows"])
        pending.fetchone()
        session.run("SELECT 1")
    except Exception as exc:  # a driver without MARS raises only here
        notes.skip(f"{what}: {server_words(exc, bench.engine)}")
        return
    resource = bench.name()
    try:
        code = session.acquire(resource).code
        words = f"answered with {code}"
        notes.require(code == 0, f"{what}: a free lock was {words} while another result was being read")
        session.release(resource)
    except Failed:
        raise
    except Exception as exc:
        words = f"refused ({server_words(exc, bench.engine)[:120]})"
    pending.close()
    observer = bench.session()
    bench.until(lambda: not observer.rows("positions", resource), f"{what}: the end of a request's row")
    _call_under(bench, notes, session, "MARS_Connection=yes", held, shown)
    notes.note(f"{what}; beside a result that is being read a request is {words}")


@check(18, "guarded tables refuse writes without the lock", "create_guarded", elsewhere=SESSIONS_ONLY)
def guards(bench: Bench, notes: Notes) -> None:
    """Write into a guarded table without the lock and with it, by each statement of the server that writes."""
    session = bench.session()
    with _guarded_table(bench, session), _file() as file:
        writes = [_Write(name) for name in ("insert", "update", "delete", "truncate") if session.has(f"{name}_guarded")]
        more = [_Write("merge"), _Write("bulk", {"file": file})]
        without = {write.name: write.refusal(bench, session) for write in (*writes, *more)}
        position = session.acquire("certify-guarded").position
        with session.transaction():
            session.rows("assert_holding", "certify-guarded", position)
            for write in writes:
                words = write.refusal(bench, session)
                notes.require(words is None, f"{write.name} with the lock: {words}")
        for write in writes:
            words = without[write.name]
            notes.require(_is_from_guard(words), f"{write.name} without the lock: {words or 'done'}")
        names = [write.name for write in writes]
        for write in more:
            with session.transaction():
                session.rows("assert_holding", "certify-guarded", position)
                words, before = write.refusal(bench, session), without[write.name]
            notes.require(before is not None, f"{write.name} without the lock: done")
            if _is_from_guard(before):
                notes.require(words is None, f"{write.name} with the lock: {words}")
                names.append(write.name)
            else:
                notes.require(words is not None, f"{write.name} without the lock: {before}, with it: done")
                notes.skip(f"{write.name} ({before})")
        notes.note(f"{', '.join(names)} are refused without the lock, and done with it")
        session.release("certify-guarded")
        if session.has("output_guarded"):
            words = _Write("output").refusal(bench, session)
            notes.note(f"OUTPUT without INTO: {words or 'done'}")
            notes.require(words is not None, "INSERT … OUTPUT bypassed the guard")
        _guard_in_snapshot(bench, notes)
        _past_guard(bench, notes, session, file)


@dataclass(frozen=True)
class _Write:
    """A statement that writes into the guarded table."""

    name: str
    words: Mapping[str, object] = field(default_factory=dict)

    def refusal(self, bench: Bench, session: Session) -> str | None:
        """Write. Return the server's message if it refuses, else None."""
        try:
            session.rows(f"{self.name}_guarded", **self.words)
        except Exception as exc:
            return server_words(exc, bench.engine)
        return None


def _is_from_guard(words: str | None) -> bool:
    return words is not None and "needs the lock" in words


@contextlib.contextmanager
def _file() -> Iterator[Path]:
    """Yield a file with a number, which a server on this host can read."""
    with tempfile.TemporaryDirectory(prefix="sqlsem-certify-") as folder:
        file = Path(folder, "number.txt")
        file.write_bytes(b"9\n")
        with contextlib.suppress(OSError):
            Path(folder).chmod(0o755)
            file.chmod(0o644)
        yield file


def _guard_in_snapshot(bench: Bench, notes: Notes) -> None:
    """Write in a transaction that reads an old snapshot; if this database allows none, in a new database."""
    what = "SNAPSHOT isolation"
    try:
        if _snapshot(bench, notes):
            notes.note(what)
        elif bench.session().has("snapshot_allowed"):
            with bench.database("", "snapshot_allowed") as other:
                with _guarded_table(other, other.session()):
                    notes.require(_snapshot(other, notes), "a database that allows SNAPSHOT isolation refuses it")
            notes.note(f"{what}, in a new database")
    except NotPossible as exc:
        notes.skip(f"{what}: this database does not allow it, and {exc}")


def _snapshot(bench: Bench, notes: Notes) -> bool:
    """Write in snapshots with and without the lock. Return False if this database has no snapshots."""
    insert = _Write("insert")
    with contextlib.closing(bench.session()) as session:  # an open transaction would block the removal of the table
        position = session.acquire("certify-guarded").position
        try:
            session.rows("old_snapshot")
            session.rows("read_counter")  # begins the snapshot
        except Exception:
            return False
        words = insert.refusal(bench, session)
        notes.require(_is_from_guard(words), f"insert under SNAPSHOT without the lock: {words or 'done'}")
        session.rows("rollback")
        session.rows("old_snapshot")
        session.rows("assert_holding", "certify-guarded", position)
        words = insert.refusal(bench, session)
        notes.require(words is None, f"insert under SNAPSHOT with the lock: {words}")
        session.rows("rollback")
    return True


def _past_guard(bench: Bench, notes: Notes, session: Session, file: Path) -> None:
    """Write by the statements that fire no trigger, as the documentation says. The guard must remain."""
    for name, words in (("switch", {}), ("bulk", {"file": file})):
        if not session.has(f"{name}_past_guard"):
            continue
        try:
            session.rows(f"{name}_past_guard", **words)
        except Exception as exc:
            notes.skip(f"{name} that bypasses the guard ({server_words(exc, bench.engine)})")
        else:
            notes.note(f"{name} bypasses the guard, as documented")
        session.rows("empty_guarded")
        after = _Write("insert").refusal(bench, session)
        notes.require(_is_from_guard(after), f"insert without the lock, after {name}: {after or 'done'}")


@contextlib.contextmanager
def _guarded_table(bench: Bench, session: Session) -> Iterator[None]:
    session.rows("create_guarded")
    try:
        session.rows("guard")
        yield
        session.rows("unguard")
    finally:
        bench.session().rows("drop_guarded")


@check(
    19,
    "a lock that a transaction has asserted stays until that transaction ends",
    "assert_holding",
    elsewhere=SESSIONS_ONLY,
)
def pins(bench: Bench, notes: Notes) -> None:
    """Revoke a lock that an open transaction has asserted. The revocation must wait; other requests must not."""
    session, observer, other = bench.session(), bench.session(), bench.session()
    operator = bench.coordinator(grace=10)
    operator.admin.reap()  # connects
    other.acquire(bench.name())
    resource = bench.name()
    position = session.acquire(resource).position
    assert position is not None
    with session.transaction():
        session.rows("assert_holding", resource, position)
        revoking = later(lambda: operator.admin.revoke(position, force=True))
        began = time.monotonic()
        free = bench.name()
        code = other.acquire(free).code
        other.release(free)
        took = time.monotonic() - began
        notes.require(code == 0, f"beside a pinned lock, a request for a free one was answered with {code}")
        notes.require(took < OTHER_LOCK_SECONDS, f"beside a pinned lock, a request for a free one took {took:.1f} s")
        with contextlib.suppress(TimeoutError, Unavailable):
            revoking.result(2.0)
        row_count = len(observer.rows("positions", resource))
        notes.require(row_count == 1, "a lock was revoked while a transaction had asserted it")
    with contextlib.suppress(Unavailable):  # the revocation timed out
        revoking.result(PATIENCE)
    if observer.rows("positions", resource):
        operator.admin.revoke(position, force=True)
    bench.until(lambda: not observer.rows("positions", resource), "the end of a row that was revoked", PATIENCE)
    notes.note(f"revoked after the commit; a pair on another lock took {took * 1000:.0f} ms meanwhile")
