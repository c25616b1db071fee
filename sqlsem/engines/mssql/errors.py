"""The errors of the server and the drivers: numbers, SQLSTATEs and texts, and their meaning."""

from __future__ import annotations

import re
from typing import Any

_NUMBER = re.compile(r"\((\d{2,9})\)")
#: The place of the server's number in the driver's text; an earlier number may be part of a name.
_LAST_NUMBER = re.compile(r"\((\d{2,9})\)\s*\(SQL\w+\)")
#: The numbers that sqlsem's routines raise.
OURS = range(50000, 50100)
#: Numbers that report a mistake of the caller, so that a retry fails again. (OfNumber in SqlSem.cs lists them, too.)
CONFIGURATION_NUMBERS = frozenset({50001, 50003, 50006, 50008, 50009})
#: The beginnings of the messages of these routines, for drivers without numbers.
OUR_WORDS = (
    (50002, "sqlsem: busy: "),
    (50005, "sqlsem: this member is not known here"),
    (50008, r"sqlsem: (no limit is set for|\d+ requests \(on) "),
    (50009, r"sqlsem: no (priority is named|priorities are set|waiting by priority) for "),
    (50003, "sqlsem: this connection changed sessions"),
    (50001, r"sqlsem: [\w ]+ must not be (called|started|ended|resumed|declared)? ?(inside|in) an open transaction"),
)
#: No number, or the number that other servers that speak T-SQL use for all errors: the text decides.
VAGUE = frozenset({0, 33557097})
_PREFIXES = re.compile(r"^(?:\s*\[[^\]]*\])+\s*")
LOST_STATES = frozenset(
    {"08001", "08003", "08007", "08S01", "08S02", "01002", "HYT00", "HYT01", "HY117", "HY008"}
    # The driver failed to recover an idle connection. (sqlsem disables that, but a DSN may enable it.)
    | {"IMC01", "IMC02", "IMC03", "IMC04", "IMC05", "IMC06"}
)
# clients/dotnet/SqlSem.cs has the same numbers under the same names: change both together.
#: The connection or the session is lost, or this server cannot serve the database now: a new session may succeed.
LOST_NUMBERS = frozenset(
    {20, 64, 121, 233, 596, 997, 10053, 10054, 10060, 10061, 10928, 10929, 10936, 11001, 17142, 17197, 6002, 6005}
    | {20002, 20003, 20004, 20006, 20009, 20047, 40143, 40197, 40501, 40540, 40613, 42108, 42109, 49918, 49919, 49920}
    # The database starts, is restored, changes its role, or admits only administrators.
    | {615, 904, 921, 922, 923, 924, 927, 942, 952, 954, 955, 976, 978, 979, 982, 983, 988, 4060, 4064, 4221}
    | {18401, 18451, 18461, 35250, 49510}
)
#: A statement is the victim (deadlock, no locks left, no memory for it, rows moved under a reader without locks) or has
#: waited for long: it may be repeated.
BUSY_NUMBERS = frozenset({601, 701, 1204, 1205, 1222, 8645, 8651, 50002})
#: Tables or routines are missing.
MISSING_NUMBERS = frozenset({208, 2812})
#: The login lacks a right.
DENIED_NUMBERS = frozenset({229, 230})
#: The login may call the routines, but is in none of sqlsem's roles, to which the application locks belong.
ROLE_NUMBERS = frozenset({1202})
#: The database is read-only here: a secondary replica, or a failover has just happened.
READ_ONLY_NUMBERS = frozenset({3906})
#: The login may not create or change schemas, tables, procedures or roles, as an installation does. (Python only.)
OWNER_NUMBERS = frozenset({262, 1088, 2759, 2760, 3701, 4902, 15151, 15247})
#: The server refuses the login.
LOGIN_NUMBERS = frozenset({18450, 18452, 18456, 18470, 18486, 18487, 18488})
#: Azure SQL refuses the connection: the firewall, or no such server.
BARRED_NUMBERS = frozenset({40532, 40615, 40914, 47073})
#: Texts of a failed login without a number: the database is not ready yet.
STARTING_WORDS = ("cannot open database", "script upgrade mode", "is not currently available", "availability group")
#: Texts of TLS errors that a retry cannot cure.
TLS_WORDS = ("certificate", "unsupported protocol", "no protocols", "key too small", "no shared cipher")


def details(exc: Exception) -> tuple[str, int, str]:
    """Return the SQLSTATE, the server's number (0: none) and the message in one line."""
    state, text = _state_and_text(exc)
    numbers = numbers_of(exc)
    text = text.partition("\n")[0]
    text = _PREFIXES.sub("", text.partition("DDBC Error: ")[2] or text)
    text = re.sub(r"\s*\(SQL\w+\)\s*$", "", text.strip())
    return state, numbers[-1] if numbers else 0, text


def _state_and_text(exc: Exception) -> tuple[str, str]:
    if len(exc.args) >= 2 and isinstance(exc.args[0], str) and len(exc.args[0]) == 5:
        return exc.args[0], str(exc.args[1])
    if len(exc.args) >= 2 and isinstance(exc.args[1], str) and len(exc.args[1]) == 5:
        return exc.args[1], str(exc.args[0])
    return "", str(exc)


def numbers_of(exc: Exception) -> list[int]:
    """Return the server's numbers in the driver's text."""
    if type(exc).__module__.startswith("mssql_python"):
        return []  # this driver omits numbers; one in the text is part of a name
    text = _state_and_text(exc)[1]
    return [int(number) for number in _LAST_NUMBER.findall(text) or _NUMBER.findall(text)]


def drain(cursor: Any) -> None:
    """Read the rest of a statement's answer, errors included: no other statement can be sent before."""
    for _ in range(1000):
        try:
            if not cursor.nextset():
                return
        except Exception as exc:
            if _state_and_text(exc)[0] in LOST_STATES:
                return


#: Texts of errors without a number: the connection is lost.
LOST_WORDS = (
    "communication link failure",
    "tcp provider",
    "connection is closed",
    "connection is broken",
    "closed connection",
    "write to the server failed",
    "read from the server failed",
    "unable to connect",
    "timeout expired",
    "dbprocess is dead",
    "terminating connection",
    "server closed the connection",
    "killed state",
)


def sounds_lost(text: str) -> bool:
    """Return True if a lower-case text says that the connection is lost."""
    return any(words in text for words in LOST_WORDS)
