"""Converts databases' answers into values and errors. All engines use it. No I/O."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sqlsem.util import late
from sqlsem.util.printable import clean
from sqlsem.values.errors import ConfigurationError, Deadlock, NotHeld, SqlsemError
from sqlsem.values.locks import UPGRADE, Entry, Request, Ticket

#: The rights that `AdminSession.rights` may return, in the order in which the databases return them.
RIGHTS = ("operate", "retry")


#: The codes of errors (docs/reference/errors.md) that a server's routines raise: by the SQLSTATE of PostgreSQL or the
#: number of SQL Server; and by the beginning of the message, where several kinds of errors have one number.
_CODES: dict[str | int | None, str] = {"25001": "transaction", 50001: "transaction", "42501": "rights", 50006: "rights"}
_CODES_BY_TEXT = (
    ("priority", re.compile(r"sqlsem: no (priority is named|priorities are set|waiting by priority) for ")),
    (
        "rate",
        re.compile(
            r"sqlsem: (this rate has |(no limit is set for |programs have declared \d+ windows for )?[E ]*'rate:)"
        ),
    ),
    ("session", re.compile(r"sqlsem: this (connection changed sessions|session gave its beacon up)")),
)
#: The codes of refusals that concern a resource of the call.
_ABOUT_RESOURCES = ("configuration", "priority", "rate")


def refusal_code(number: str | int | None, text: str) -> str | None:
    """Return the code for an error that a server's routine raises, as the engines without routines raise it; None: that
    of `ConfigurationError`. ``number``: the SQLSTATE of PostgreSQL, or the number of SQL Server.

    >>> refusal_code("22023", "sqlsem: no limit is set for 'rate:api'"), refusal_code(50006, "sqlsem: not your task")
    ('rate', 'rights')
    """
    return next((code for code, words in _CODES_BY_TEXT if words.match(text)), _CODES.get(number))


def name_resource(exc: SqlsemError, resources: Sequence[str], *, in_text: bool = False) -> None:
    """Set the attribute ``resource`` of a refusal, unless it is set: a server's refusal names the resource in its text
    only. ``resources``: those of the call. Of several, the first in the text is the one that was refused.
    ``in_text``: a refusal whose text has none of them is about something else.

    >>> exc = ConfigurationError("sqlsem: no limit is set for 'it''s b', and the request names none")
    >>> name_resource(exc, ["b", "it's b"])
    >>> exc.resource
    "it's b"
    """
    if exc.resource is not None or exc.code not in _ABOUT_RESOURCES:
        return
    if len(resources) == 1 and not in_text:
        exc.resource = resources[0]
        return
    text = str(exc)
    found = []
    for name in resources:
        # (PostgreSQL doubles quotation marks and backslashes, SQL Server does not.)
        for form in {f"'{name}'", "'" + name.replace("'", "''").replace("\\", "\\\\") + "'"}:
            if form in text:
                found.append((text.index(form), -len(form), name))
    if found:
        exc.resource = min(found)[2]


@contextlib.contextmanager
def naming_resource(*resources: str, in_text: bool = False) -> Iterator[None]:
    """Set the attribute ``resource`` of refusals in the block, by `name_resource`."""
    try:
        yield
    except ConfigurationError as exc:
        name_resource(exc, resources, in_text=in_text)
        raise


def already_upgrading(entries: Iterable[Entry], ticket: Ticket) -> Deadlock:
    """Return the error for a reader that cannot upgrade because another reader of ``entries`` is upgrading."""
    other = "another reader"
    for entry in entries:
        if entry.access.startswith(UPGRADE) and entry.position != ticket.position:
            other = f"{entry.host}:{entry.pid} ({entry.owner}) at {entry.position}"
    return Deadlock(
        f"{other} is upgrading on {ticket.resource!r} already: it waits until the reader at {ticket.position} "
        f"releases, and that one would wait for it; release this reader, then acquire the lock for writing",
        resource=ticket.resource,
    )


def granted_rights(answers: Iterable[object]) -> frozenset[str]:
    """Return the names of the rights that a login has. ``answers``: one for each of `RIGHTS`, in order."""
    return frozenset(name for name, granted in zip(RIGHTS, answers, strict=True) if granted)


#: The databases' codes for a token that cannot be adopted.
UNKNOWN, USED, TOO_LATE, OTHER_LOGIN = -1, -2, -3, -4


def not_adopted(
    code: int, where: str, who: str | None, seconds: float | None, resource: str | None, position: int | None
) -> SqlsemError:
    """Return the error for a token that cannot be adopted. ``where``: the database. ``who``: the process that used the
    token, or the login that it is for. ``seconds``: the age of the hand-over.
    """
    lock = f"the lock on {resource!r} (position {position})"
    ago = f"{seconds or 0.0:.1f} s ago"
    kind: type[SqlsemError] = NotHeld
    if code == UNKNOWN:
        text = (
            f"This token is not known in {where}: it is not a token, belongs to another database, or expired more than "
            f"a day ago; have the lock handed over again"
        )
    elif code == USED:
        text = (
            f"This token was used {ago}: {who} adopted {lock}. A token can be used once; have the lock handed over "
            f"again"
        )
    elif code == OTHER_LOGIN:
        kind = ConfigurationError
        text = (
            f"T{lock[1:]} was handed over to login {who}, which this is not; connect as that login, or have it "
            f"handed over with to= this one"
        )
    else:
        text = (
            f"Too late to adopt {lock}, which was handed over {ago}: no client did in time, or an operator revoked it; "
            f"acquire it, or have it handed over again, for longer (ttl=)"
        )
    return kind(text, resource=resource, code="handover")


def adopted(rows: Sequence[Sequence[Any]], requesting_id: str, where: str) -> list[tuple[Request, Ticket]]:
    """Return the adopted requests from a server's rows: code, who, seconds, resource, position, access, limit, weight,
    note. Raises the error of `not_adopted` for a code other than 0.
    """
    result = []
    for code, who, seconds, resource, position, access, limit, weight, note in rows:
        if code != 0:
            raise not_adopted(code, where, who, seconds, resource, position)
        result.append(
            (Request(resource, access, limit, weight, note), Ticket(resource, int(position), requesting_id, True))
        )
    return result


def hash_of(token: str) -> str:
    """Return the hash under which a database stores a token."""
    with late.importing:
        import hashlib
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def name_sessions(rows: Iterable[Sequence[Any]]) -> str:
    """Return a description of the sessions in the rows of statement ``blockers``: number, login, program, host, state,
    and since when.
    """
    descriptions = [
        f"session {number} of login {login} ({', '.join(filter(None, (program, host))) or 'no name'}), "
        f"{state or 'at work'} since {since or 'a time that this login may not see,'} UTC"
        for number, login, program, host, state, since in rows
    ]
    return clean("; ".join(descriptions)) or "a session that has ended since, or too much traffic"
