"""Bodies of tasks and of batch callbacks: SQL, a command, a function call, or JSON for programs that claim tasks.

kinds     the kinds of bodies, and their text form in the database
running   runs SQL and calls, and checks which bodies a worker may run
commands  runs commands
texts     the text form of results and errors in the database
"""

from sqlsem.bodies.commands import END_SECONDS, command_killer
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
    "command_killer",
    "encode",
    "format_error",
    "import_by_name",
    "run",
]
