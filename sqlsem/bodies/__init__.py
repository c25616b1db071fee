"""What a task does, or the callback of a batch: SQL, a command, a call or nothing (JSON, for code that claims).

kinds     what a body is, and how it is kept as text
running   carrying it out: SQL, calls, and which bodies a worker carries out at all
commands  carrying out commands
texts     what is kept of results and errors
"""

from sqlsem.bodies.commands import END_SECONDS, guarded
from sqlsem.bodies.kinds import Call, Json, Shell, Sql, arguments, encode, import_by_name
from sqlsem.bodies.running import Allowed, Stop, run
from sqlsem.bodies.texts import as_json, format_error

__all__ = [
    "END_SECONDS",
    "Allowed",
    "Call",
    "Json",
    "Shell",
    "Sql",
    "Stop",
    "arguments",
    "as_json",
    "encode",
    "format_error",
    "guarded",
    "import_by_name",
    "run",
]
