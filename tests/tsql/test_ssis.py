"""docs/howto/ssis.md: every statement on the page is run, with the parameters of its section's table.

ODBC's statements go through ODBC itself, with the return code. OLE DB's go through pyodbc, with variables for the
output, as that driver has no output parameters. ADO.NET's go through sp_executesql, as SqlClient sends them.
"""

import ctypes
import ctypes.util
import re
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.engines("mssql")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "ssis.md"
CONNECTIONS = ("OLE DB", "ADO.NET", "ODBC")
FENCE = re.compile(r"(?:^(OLE DB|ODBC|ADO\.NET)\b[^\n]*:\n\n)?^```sql\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
TYPES = "| type | OLE DB | ADO.NET | ODBC |"
PARAMETERS = "| variable | direction | type | OLE DB | ADO.NET | ODBC |"
SQL_TYPES = {
    # by the page's name: for a T-SQL declaration
    "LONG": "int",
    "LARGE_INTEGER": "bigint",
    "DOUBLE": "float",
    "NVARCHAR": "nvarchar(255)",
    "Int32": "int",
    "Int64": "bigint",
    "Double": "float",
    "String": "nvarchar(255)",
}


class Parameter(NamedTuple):
    name: str
    direction: str
    variable: str
    type: str


class Statement(NamedTuple):
    heading: str
    connection: str
    text: str
    parameters: list


def table(text, head):
    """Return the cells of the rows below a head, if the text has such a table."""
    rows = text.partition(f"{head}\n")[2].partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def read_page():
    page = PAGE.read_text(encoding="utf-8")
    types = {name: dict(zip(CONNECTIONS, of_connections, strict=True)) for name, *of_connections in table(page, TYPES)}
    statements = []
    for section in re.split(r"^##+ ", page, flags=re.MULTILINE)[1:]:
        heading = section.partition("\n")[0]
        for connection, text in FENCE.findall(section):
            parameters = []
            for variable, direction, kind, *names in table(section, PARAMETERS) if connection else []:
                name = dict(zip(CONNECTIONS, names, strict=True))[connection]
                if direction == "Return code":
                    direction = "Output" if connection == "ADO.NET" else "ReturnValue"
                if name:
                    parameters.append(Parameter(name, direction, variable, types[kind][connection]))
            statements.append(Statement(heading, connection, text, parameters))
    assert len(statements) == page.count("```sql")
    return statements


PAGE_STATEMENTS = read_page()


def statement(heading, connection):
    (match,) = [
        candidate
        for candidate in PAGE_STATEMENTS
        if candidate.heading == heading and candidate.connection == connection
    ]
    return match


# -- three ways to send


def with_ole_db(session, text, parameters, values):
    assert [parameter.name for parameter in parameters] == [str(number) for number in range(text.count("?"))]
    backwards = iter(parameters)
    declared, arguments = [], []

    def mark(match):
        backward = next(backwards)
        if backward.direction == "Input":
            arguments.append(values[backward.variable])
            return "?"
        declared.append(backward)
        return f"@o{backward.name}"

    text = re.sub(r"\?", mark, text)
    if not declared:
        session.rows(text, *arguments)
        return {}
    names = ", ".join(f"@o{declaration.name} {SQL_TYPES[declaration.type]}" for declaration in declared)
    shown = ", ".join(f"@o{declaration.name}" for declaration in declared)
    (row,) = session.rows(f"DECLARE {names}; {text}; SELECT {shown}", *arguments)
    return {declaration.variable: value for declaration, value in zip(declared, row, strict=True)}


def with_ado_net(session, text, parameters, values):
    used = set(re.findall(r"@\w+", re.sub(r"@\w+ =(?= @)", "", text.replace("EXEC @code =", "EXEC @code"))))
    assert used == {parameter.name for parameter in parameters}
    back = [parameter for parameter in parameters if parameter.direction == "Output"]
    inputs = [parameter for parameter in parameters if parameter.direction == "Input"]
    signature = ", ".join(f"{p.name} {SQL_TYPES[p.type]}{' OUTPUT' if p in back else ''}" for p in parameters)
    declare = "".join(f"DECLARE @o{p.name[1:]} {SQL_TYPES[p.type]}; " for p in back)
    arguments = "".join(f", {p.name} = " + (f"@o{p.name[1:]} OUTPUT" if p in back else "?") for p in parameters)
    shown = f"; SELECT {', '.join(f'@o{p.name[1:]}' for p in back)}" if back else ""
    quoted = text.replace("'", "''")
    rows = session.rows(
        f"{declare}EXEC sp_executesql N'{quoted}', N'{signature}'{arguments}{shown}",
        *[values[p.variable] for p in inputs],
    )
    return {p.variable: value for p, value in zip(back, rows[0], strict=True)} if back else {}


#: For each type of the page: ODBC's number of the SQL type and of the C type, and the variable.
ODBC_TYPES = {
    "SQL_INTEGER": (4, -16, ctypes.c_int32),
    "SQL_BIGINT": (-5, -25, ctypes.c_int64),
    "SQL_WVARCHAR": (-9, -8, None),
}


class Odbc:
    """The part of ODBC that calls a procedure and returns its code."""

    def __init__(self, string):
        name = ctypes.util.find_library("odbc") or ctypes.util.find_library("odbc32")
        assert name, "pyodbc works, so there is an ODBC driver manager; but it was not found"
        self.odbc = ctypes.CDLL(name)
        self.environment, self.connection = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.odbc.SQLAllocHandle(1, None, ctypes.byref(self.environment)), 1, self.environment)
        self.check(self.odbc.SQLSetEnvAttr(self.environment, 200, ctypes.c_void_p(3), 0), 1, self.environment)
        self.check(self.odbc.SQLAllocHandle(2, self.environment, ctypes.byref(self.connection)), 1, self.environment)
        text = string.encode("utf-16-le") + b"\0\0"
        self.check(self.odbc.SQLDriverConnectW(self.connection, None, text, -3, None, 0, None, 0), 2, self.connection)

    def check(self, code, kind, handle):
        if code in (0, 1, 100):
            return
        state, text = ctypes.create_string_buffer(12), ctypes.create_string_buffer(2048)
        number, length = ctypes.c_int32(), ctypes.c_int16()
        self.odbc.SQLGetDiagRecW(kind, handle, 1, state, ctypes.byref(number), text, 1000, ctypes.byref(length))
        raise AssertionError(f"ODBC {code}: {number.value} {text.raw[: 2 * length.value].decode('utf-16-le')}")

    def rows(self, text, *parameters):
        """Run a `call` with pairs of `Parameter` and value, and return the values of the output parameters."""
        handle = ctypes.c_void_p()
        self.check(self.odbc.SQLAllocHandle(3, self.connection, ctypes.byref(handle)), 2, self.connection)
        buffers = []
        for number, (parameter, value) in enumerate(parameters, 1):
            sql_type, kind, c_type = ODBC_TYPES[parameter.type]
            direction = 1 if parameter.direction == "Input" else 4
            if c_type is None:
                raw = str(value).encode("utf-16-le")
                buffer = ctypes.create_string_buffer(raw, len(raw) + 2)
                size, indicator = 255, ctypes.c_ssize_t(len(raw))
            else:
                buffer = c_type(value if value is not None else -99)
                size, indicator = 0, ctypes.c_ssize_t(0)
            buffers.append((buffer, indicator))
            self.check(
                self.odbc.SQLBindParameter(
                    handle, ctypes.c_ushort(number), ctypes.c_short(direction), ctypes.c_short(kind),
                    ctypes.c_short(sql_type), ctypes.c_size_t(size), ctypes.c_short(0), ctypes.byref(buffer),
                    ctypes.c_ssize_t(ctypes.sizeof(buffer)), ctypes.byref(indicator),
                ),
                3,
                handle,
            )  # fmt: skip
        self.check(self.odbc.SQLExecDirectW(handle, text.encode("utf-16-le") + b"\0\0", -3), 3, handle)
        while True:
            code = self.odbc.SQLMoreResults(handle)
            self.check(code, 3, handle)
            if code == 100:  # no more results; now the output parameters are set
                break
        outputs = {
            parameter.variable: buffer.value
            for (parameter, _), (buffer, _) in zip(parameters, buffers, strict=True)
            if parameter.direction != "Input"
        }
        self.odbc.SQLFreeHandle(3, handle)
        return outputs

    def close(self):
        self.odbc.SQLDisconnect(self.connection)
        self.odbc.SQLFreeHandle(2, self.connection)
        self.odbc.SQLFreeHandle(1, self.environment)


def with_odbc(odbc, text, parameters, values):
    assert [parameter.name for parameter in parameters] == [str(number) for number in range(1, text.count("?") + 1)]
    return odbc.rows(text.strip(), *[(parameter, values.get(parameter.variable)) for parameter in parameters])


# -- the package


class Package:
    """Run the page's statements over one connection, as a package does if its connection manager retains it."""

    def __init__(self, session, connection, name, **variables):
        self.session = session
        self.connection = connection
        self.odbc = None
        self.values = {
            "System::ExecutionInstanceGUID": f"{{2B5C8E1A-0F3D-4C66-9A57-{id(self):012X}}}",
            "System::PackageName": "Load",
            "User::Resource": name,
            "User::TimeoutMs": 300,
            "User::Limit": 1,
            "User::Access": "write",
            "User::Weight": 1,
            "User::LeaseSeconds": 60.0,
            "User::FileName": "a.csv",
            **variables,
        }

    def run(self, heading, connection=None):
        """Run a statement, and return its code, if any."""
        chosen = statement(heading, connection or self.connection)
        text = chosen.text.strip().replace("sqlsem.", f"{self.session.schema}.")
        kind = connection or self.connection
        if kind == "ODBC":
            if self.odbc is None:
                # Application locks belong to a session, so this is another one.
                self.odbc = Odbc(self.session.database.make_engine().odbc_string)
            back = with_odbc(self.odbc, text, chosen.parameters, self.values)
        else:
            send = with_ole_db if kind == "OLE DB" else with_ado_net
            back = send(self.session, text, chosen.parameters, self.values)
        self.values.update(back)
        return back.get("User::Code")

    def close(self):
        if self.odbc is not None:
            self.odbc.close()


@pytest.fixture
def package(session, name):
    packages = []

    def package(connection, **variables):
        packages.append(Package(session(), connection, name, **variables))
        return packages[-1]

    yield package
    for opened in packages:
        opened.close()


@pytest.mark.parametrize("connection", ["OLE DB", "ODBC", "ADO.NET"])
def test_a_lock_of_the_session(package, session, database, connect, name, connection):
    first, other = package(connection), session()
    assert first.run("Acquire") == 0
    (row,) = database.queue(name)
    assert row[2] == first.values["System::ExecutionInstanceGUID"]
    assert connect().admin.entries(name)[0].note == ("Load" if connection == "ODBC" else None)
    assert other.acquire(name, routine="try").code == -1
    first.run("Release")
    assert database.queue(name) == []
    first.run("Release")  # may be repeated
    assert other.acquire(name).code == 0
    assert first.run("Acquire") == -1
    other.release(name)


@pytest.mark.parametrize("connection", ["OLE DB", "ADO.NET"])
def test_a_lease(package, session, database, name, connection):
    first, other = package(connection), session()
    assert first.run("A lease") == 0
    assert first.values["User::Position"] == database.queue(name)[0][0]
    task = package(connection, **first.values)  # the next task, with a session of its own
    for kind in ("OLE DB", "ODBC", "ADO.NET"):
        assert task.run("Renew", kind) == 0
    assert other.acquire(name, routine="try").code == -1
    task.run("Release")
    assert other.acquire(name, routine="try").code == 0
    other.release(name)
    for kind in ("OLE DB", "ODBC", "ADO.NET"):
        assert task.run("Renew", kind) == -1


@pytest.mark.parametrize("connection", ["OLE DB", "ADO.NET"])
def test_a_handler_ends_the_transaction_and_releases(package, database, refused, name, connection):
    instance = package(connection)
    assert instance.run("Acquire") == 0
    instance.session.rows("BEGIN TRANSACTION")
    with refused(50001, "release must not be called inside an open transaction"):
        instance.run("Release")
    instance.session.rows(statement("When something fails", "").text)
    instance.run("Release")
    assert instance.session.rows("SELECT @@TRANCOUNT") == [(0,)]
    assert database.queue(name) == []
    instance.session.rows(statement("When something fails", "").text)  # nothing open: nothing to do


@pytest.mark.parametrize("connection", ["OLE DB", "ADO.NET"])
def test_a_loop_with_a_limit(package, session, database, connect, name, connection):
    words = {"User::Limit": 3}
    turns = [package(connection, **words, **{"User::FileName": f"{number}.csv"}) for number in range(4)]
    heading = "A Foreach loop with a limit"
    assert [turn.run(heading) for turn in turns] == [0, 0, 0, -1]
    text = statement(heading, "").text
    assert "N'files'" in text
    rows = turns[3].session.rows(text.replace("sqlsem.", "{s}.").replace("files", name))
    assert [row[12] for row in rows] == ["0.csv", "1.csv", "2.csv"]
    turns[1].run("Release")
    assert turns[3].run(heading) == 0
    for turn in turns:
        turn.run("Release")
    assert database.queue(name) == []


def test_every_statement_of_the_page_is_run():
    statements = [(statement.heading, statement.connection) for statement in PAGE_STATEMENTS]
    assert sorted(statements) == sorted(
        [(heading, kind) for heading in ("Acquire", "Release", "Renew") for kind in ("OLE DB", "ODBC", "ADO.NET")]
        + [("A lease", kind) for kind in ("OLE DB", "ADO.NET")]
        + [("A Foreach loop with a limit", kind) for kind in ("OLE DB", "ADO.NET", "")]
        + [("When something fails", "")]
    )
    known = {"User::Code", "User::Position", *Package(None, "", "x").values}
    for statement in PAGE_STATEMENTS:
        assert {parameter.variable for parameter in statement.parameters} <= known
