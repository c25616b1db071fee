"""Bodies of tasks and of batch callbacks: SQL, a command, a function call, or JSON for programs that claim tasks.

kinds     the kinds of bodies, and the text forms of bodies, results and errors in the database
running   runs SQL and calls, and checks which bodies a worker may run
commands  runs commands
"""

from sqlsem.bodies.commands import END_SECONDS, command_killer
from sqlsem.bodies.kinds import Call, Json, Shell, Sql, arguments, as_json, encode, format_error, import_by_name
from sqlsem.bodies.running import Allowed, Stop, run

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
