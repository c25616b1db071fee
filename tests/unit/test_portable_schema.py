"""The tables of MariaDB have the columns, keys and checks of SQLite's: the same statements use both."""

import re
from pathlib import Path

from support.sql_text import parts

from sqlsem import sql

SCRIPTS = Path(sql.__file__).parent
#: Only MariaDB has these: its gate, a key for a table without one, and a column in place of a partial index.
OWN = {("gate", None), ("history", "history_id"), ("task", "open_key")}
#: Column types and what a time has by default, in both.
WORDS = (
    ("{now}", "REAL NOT NULL DEFAULT clock"),
    ("{time}", "REAL"),
    ("((julianday('now') - 2440587.5) * 86400.0)", "clock"),
)


def checks(text):
    """Yield the conditions of a CHECK of a column or a table, divided at AND, without outer parentheses."""
    for match in re.finditer(r"\bCHECK \(", text):
        condition, depth = "", 1
        for character in text[match.end() :]:
            depth += (character == "(") - (character == ")")
            if depth == 0:
                break
            condition += character
        if " BETWEEN " in condition:
            yield condition
            continue
        for part in parts(condition, " AND "):
            whole = re.fullmatch(r"\((.*)\)", part)
            yield (whole[1] if whole and not re.match(r"\(\w+ IS NULL\)", part) else part).replace("TRIM(", "trim(")


def tables(engine):
    """Return the tables of an engine: the columns with what they have beside a type, the primary keys, the checks."""
    text = re.sub(r"--.*", "", (SCRIPTS / engine / "schema-1.sql").read_text(encoding="utf-8"))
    for word, meaning in WORDS:
        text = text.replace(word, meaning)
    found = {}
    for name, body in re.findall(r"CREATE TABLE (?:IF NOT EXISTS )?(\S+) \((.*?)\n\)", text, re.DOTALL):
        table = name.replace("{schema}_", "")
        columns, keys, conditions = {}, set(), set()
        for item in parts(body):
            conditions |= set(checks(item))
            if key := re.match(r"PRIMARY KEY \((.*)\)", item):
                keys |= set(key[1].split(", "))
            if re.match(r"(PRIMARY|CHECK|INDEX|UNIQUE|FOREIGN)\b", item):
                continue
            column, _, rest = item.partition(" ")
            if (table, column) in OWN:
                continue
            if "PRIMARY KEY" in rest:
                keys.add(column)
            default = re.search(r"DEFAULT (clock|'[^']*'|-?\d+)", rest)
            columns[column] = ("NOT NULL" in rest or column in keys, default and default[1])
        for column in keys & set(columns):
            columns[column] = (True, columns[column][1])
        found[table] = (columns, keys, conditions)
    return {table: parts for table, parts in found.items() if (table, None) not in OWN}


def test_mysql_has_the_tables_of_sqlite():
    ours, theirs = tables("sqlite"), tables("mysql")
    assert set(ours) == set(theirs)
    assert len(ours) > 20
    assert ours["queue_setting"][2] > {"task_limit >= 0", "(task_rate IS NULL) = (task_ms IS NULL)"}
    for table in ours:
        (columns, keys, conditions), (other_columns, other_keys, other_conditions) = ours[table], theirs[table]
        conditions -= {"length(resource_id) <= 255"}  # by its type
        if table == "schedule":
            columns["options"] = (True, None)  # (a LONGTEXT has no default before MySQL 8.0.13)
        if table == "{table}":
            columns["queue_position"] = (True, "0")  # the trigger gives the number
        assert columns == other_columns, table
        assert table == "history" or keys == other_keys, table
        assert conditions == other_conditions, table
