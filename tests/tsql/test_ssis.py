"""docs/howto/ssis.md: every statement on the page is run, with the parameters of the page's table.

OLE DB's go through pyodbc, with variables for the output, as that driver has no output parameters. ADO.NET's go through
sp_executesql, as SqlClient sends them. As in SSIS, a variable of a number or a text takes no NULL.
"""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.engines("mssql")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "ssis.md"
CONNECTIONS = ("OLE DB", "ADO.NET")
FENCE = re.compile(r"^```sql\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
PARAMETERS = "| parameter | variable | direction | ADO.NET | OLE DB |"
#: A placeholder of OLE DB, with the parameter of the procedure. Behind SELECT it is the position, else the return code.
PLACEHOLDER = re.compile(r"(?:(@\w+) = |(SELECT ))?\?")
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
    text: str


def table(text, head):
    """Return the cells of the rows below a head."""
    rows = text.partition(f"{head}\n")[2].partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in rows]


def read_page():
    page = PAGE.read_text(encoding="utf-8")
    sections = re.split(r"^##+ ", page, flags=re.MULTILINE)[1:]
    statements = [
        Statement(section.partition("\n")[0], text) for section in sections for text in FENCE.findall(section)
    ]
    assert len(statements) == page.count("```sql")
    return statements, {name: cells for name, *cells in table(page, PARAMETERS)}


PAGE_STATEMENTS, PAGE_PARAMETERS = read_page()


def statement(heading):
    (match,) = [candidate for candidate in PAGE_STATEMENTS if candidate.heading == heading]
    return match.text.strip()


def parameters_of(text, connection):
    """Return the parameters of a statement for OLE DB, in their order."""
    parameters = []
    for match in PLACEHOLDER.finditer(text):
        name = match[1] or ("@position" if match[2] else "@code")
        variable, _, ado_net, ole_db = PAGE_PARAMETERS[name]
        is_output = not match[1] or text[match.end() :].startswith(" OUTPUT")
        kind = ole_db if connection == "OLE DB" else ado_net
        parameters.append(Parameter(name, "Output" if is_output else "Input", variable, kind))
    return parameters


# -- two ways to send


def with_ole_db(session, text, parameters, values):
    backwards = iter(parameters)
    declared, arguments = [], []

    def mark(match):
        backward = next(backwards)
        if backward.direction == "Input":
            arguments.append(values[backward.variable])
            return match[0]
        declared.append(backward)
        return match[0].replace("?", f"@o{len(declared)}")

    text = PLACEHOLDER.sub(mark, text)
    if not declared:
        session.rows(text, *arguments)
        return {}
    names = ", ".join(f"@o{number} {SQL_TYPES[parameter.type]}" for number, parameter in enumerate(declared, 1))
    shown = ", ".join(f"@o{number}" for number in range(1, len(declared) + 1))
    (row,) = session.rows(f"DECLARE {names}; {text}; SELECT {shown}", *arguments)
    return {declaration.variable: value for declaration, value in zip(declared, row, strict=True)}


def with_ado_net(session, text, parameters, values):
    names = iter(parameter.name for parameter in parameters)
    text = PLACEHOLDER.sub(lambda match: match[0].replace("?", next(names)), text)
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


# -- the package


class Package:
    """Run the page's statements over one connection, as a package does if its connection manager retains it."""

    def __init__(self, session, connection, name, **variables):
        self.session = session
        self.connection = connection
        self.values = {
            "System::ExecutionInstanceGUID": f"{{2B5C8E1A-0F3D-4C66-9A57-{id(self):012X}}}",
            "User::Resource": name,
            "User::TimeoutMs": 300,
            "User::Limit": 1,
            "User::LeaseSeconds": 60.0,
            **variables,
        }

    def run(self, heading, connection=None):
        """Run a statement, and return its code, if any."""
        text = statement(heading)
        kind = connection or self.connection
        send = with_ole_db if kind == "OLE DB" else with_ado_net
        back = send(
            self.session,
            text.replace("sqlsem.", f"{self.session.database.schema}."),
            parameters_of(text, kind),
            self.values,
        )
        for variable, value in back.items():
            assert value is not None, f"The type of the value (DBNull) being assigned to variable {variable} differs"
        self.values.update(back)
        return back.get("User::Code")


@pytest.fixture
def package(session, name):
    return lambda connection, **variables: Package(session(), connection, name, **variables)


@pytest.mark.parametrize("connection", CONNECTIONS)
def test_a_lock_of_the_session(package, session, database, name, connection):
    first, other = package(connection), session()
    assert first.run("Acquire") == 0
    (row,) = database.queue(name)
    assert row[2] == first.values["System::ExecutionInstanceGUID"]
    assert other.acquire(name, routine="try").code == -1
    first.run("Release")
    assert database.queue(name) == []
    first.run("Release")  # may be repeated
    assert other.acquire(name).code == 0
    assert first.run("Acquire") == -1
    other.release(name)


@pytest.mark.parametrize("connection", CONNECTIONS)
def test_a_lease(package, session, database, name, connection):
    first, other = package(connection), session()
    assert first.run("A lease") == 0
    assert first.values["User::Position"] == database.queue(name)[0][0]
    task = package(connection, **first.values)  # the next task, with a session of its own
    for kind in CONNECTIONS:
        assert task.run("Renew", kind) == 0
    assert other.acquire(name, routine="try").code == -1
    late = package(connection)
    assert late.run("A lease") == -1
    assert late.values["User::Position"] == 0
    for kind in CONNECTIONS:
        assert late.run("Renew", kind) == -1
    task.run("Release")
    assert other.acquire(name, routine="try").code == 0
    other.release(name)
    for kind in CONNECTIONS:
        assert task.run("Renew", kind) == -1


@pytest.mark.parametrize("connection", CONNECTIONS)
def test_a_handler_ends_the_transaction_and_releases(package, database, refused, name, connection):
    instance = package(connection)
    assert instance.run("Acquire") == 0
    instance.session.rows("BEGIN TRANSACTION")
    with refused(50001, "release must not be called inside an open transaction"):
        instance.run("Release")
    instance.session.rows(statement("When something fails"))
    instance.run("Release")
    assert instance.session.rows("SELECT @@TRANCOUNT") == [(0,)]
    assert database.queue(name) == []
    instance.session.rows(statement("When something fails"))  # nothing open: nothing to do


@pytest.mark.parametrize("connection", CONNECTIONS)
def test_a_loop_with_a_limit(package, database, name, connection):
    turns = [package(connection, **{"User::Limit": 3}) for _ in range(4)]
    assert [turn.run("Acquire") for turn in turns] == [0, 0, 0, -1]
    turns[1].run("Release")
    assert turns[3].run("Acquire") == 0
    for turn in turns:
        turn.run("Release")
    assert database.queue(name) == []


def test_every_statement_of_the_page_is_run():
    headings = sorted(statement.heading for statement in PAGE_STATEMENTS)
    assert headings == ["A lease", "Acquire", "Release", "Renew", "When something fails"]
    known = {"User::Code", "User::Position", *Package(None, "", "x").values}
    assert {variable for variable, *_ in PAGE_PARAMETERS.values()} == known
    for connection in CONNECTIONS:
        for text in map(statement, headings):
            assert all(parameter.type in SQL_TYPES for parameter in parameters_of(text, connection))
