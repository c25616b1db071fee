"""Return the type and the collation label of T-SQL's built-in functions (for `tsqlflow`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tsqltypes import (
    BOUNDS,
    CATALOG,
    LITERAL,
    MAX,
    NATIONAL,
    NUMBERS,
    SERVER,
    UNKNOWN,
    WORDS,
    Label,
    Type,
    Value,
    combined,
    merged,
    of,
    shown,
)

NAME = of("nvarchar", 128)
#: No table has more rows than that, no text more characters.
COUNT = of("int", low=0, high=10**9)
#: Functions with the same result for all arguments.
FIXED = {
    "ORIGINAL_LOGIN SUSER_SNAME SUSER_NAME USER_NAME HOST_NAME APP_NAME DB_NAME OBJECT_NAME OBJECT_SCHEMA_NAME "
    "SCHEMA_NAME TYPE_NAME COL_NAME ERROR_PROCEDURE": NAME,
    "OBJECT_ID SCHEMA_ID DATABASE_PRINCIPAL_ID OBJECTPROPERTY INDEXPROPERTY TYPE_ID USER_ID SUSER_ID CHECKSUM "
    "ERROR_NUMBER ERROR_STATE ERROR_SEVERITY ERROR_LINE COL_LENGTH GROUPING": of("int"),
    "HAS_PERMS_BY_NAME IS_ROLEMEMBER IS_MEMBER IS_SRVROLEMEMBER ISNUMERIC ISDATE ISJSON": of("int", low=0, high=1),
    "COUNT DATALENGTH": COUNT,
    "UNICODE": of("int", low=0, high=1_114_111),
    "ASCII": of("int", low=0, high=255),
    "DATEPART DAY MONTH YEAR": of("int", low=0, high=1_000_000_000),
    "DATEDIFF": of("int"),
    "DATEDIFF_BIG": of("bigint"),
    "COUNT_BIG ROWCOUNT_BIG ROW_NUMBER RANK DENSE_RANK NTILE": of("bigint", low=0, high=10**9),
    "DB_ID XACT_STATE APPLOCK_TEST CURSOR_STATUS": of("smallint"),
    "SESSION_CONTEXT SERVERPROPERTY DATABASEPROPERTYEX CONNECTIONPROPERTY SQL_VARIANT_PROPERTY": of("sql_variant"),
    "GETDATE GETUTCDATE": of("datetime"),
    "SYSUTCDATETIME SYSDATETIME": of("datetime2", scale=7),
    "SYSDATETIMEOFFSET TODATETIMEOFFSET SWITCHOFFSET": of("datetimeoffset", scale=7),
    "NEWID NEWSEQUENTIALID": of("uniqueidentifier"),
    "HASHBYTES CRYPT_GEN_RANDOM": of("varbinary", 8000),
    "RAND SQRT LOG LOG10 EXP PI": of("float"),
    "APPLOCK_MODE": of("nvarchar", 32),
    "ERROR_MESSAGE FORMAT": of("nvarchar", 4000),
    "FORMATMESSAGE": of("nvarchar", 2047),
    "DATENAME": of("nvarchar", 30),
    "STR": of("varchar", 30),
    "NCHAR": of("nvarchar", 1),
    "CHAR": of("char", 1),
    "SCOPE_IDENTITY IDENT_CURRENT": of("bigint"),  # (decimal(38) by type; the columns of sqlsem have bigint)
}
RESULTS = {name: value for names, value in FIXED.items() for name in names.split()}
#: @@…
GLOBALS = {
    "@@ROWCOUNT": COUNT,
    "@@TRANCOUNT": COUNT,
    "@@SPID": of("smallint"),
    "@@PROCID": of("int"),
    "@@ERROR": of("int"),
    "@@FETCH_STATUS": of("int"),
    "@@LOCK_TIMEOUT": of("int"),
    "@@NESTLEVEL": COUNT,
    "@@OPTIONS": of("int"),
    "@@VERSION": of("nvarchar", 300),
    "@@SERVERNAME": NAME,
    "@@IDENTITY": of("decimal", 38),
}
#: Functions that return their first argument, as a whole or a part of it.
SAME = {"UPPER", "LOWER", "LTRIM", "RTRIM", "REVERSE"}
FIRST = {"ABS", "FLOOR", "CEILING", "ROUND", "POWER", "LAG", "LEAD", "FIRST_VALUE", "LAST_VALUE"}
#: Functions that compare, or join, all their texts.
SENSITIVE = {"CONCAT", "CHARINDEX", "PATINDEX", "REPLACE", "STUFF", "CONCAT_WS", "TRANSLATE", "DIFFERENCE"}


def national(values: list[Value]) -> str:
    return "nvarchar" if any(value.type is not None and value.type.name in NATIONAL for value in values) else "varchar"


def text(size: int, values: list[Value]) -> Value:
    """Return a string that is made of others."""
    name = national(values)
    if any(value.string and value.type is not None and value.type.size >= MAX for value in values):
        size = MAX
    elif size < MAX:
        size = min(size, 4000 if name == "nvarchar" else 8000)
    label = combined([value.label for value in values if value.label is not None])[0]
    return Value(Type(name, size), label or LITERAL)


def part(values: list[Value], number: int) -> Value:
    """LEFT, RIGHT, SUBSTRING, REPLICATE: the count is an argument."""
    whole, count = values[0], values[number].range if len(values) > number else None
    if whole.type is None:
        return UNKNOWN
    size = shown(whole)
    if count is not None:
        size = min(size, max(count[1], 0))
    name = national(values[:1]) if whole.string else ("varbinary" if "binary" in whole.type.name else "varchar")
    return Value(Type(name, size), whole.label if whole.string else (LITERAL if name == "varchar" else None))


def replaced(values: list[Value]) -> Value:
    if any(value.type is None for value in values) or len(values) < 3:
        return UNKNOWN
    whole, old, new = values[:3]
    size = shown(whole)
    if old.text and new.text is not None:
        size = size * max(1, -(-len(new.text) // len(old.text)))
    elif shown(new) > 1:
        size = MAX
    result = text(min(size, MAX), values)
    if result.type is not None and size >= MAX and whole.type is not None and whole.type.size < MAX:
        return replace(result, type=Type(result.type.name, 4000 if result.type.name == "nvarchar" else 8000))
    return result


def returned(name: str, values: list[Value]) -> Value:
    """Return the result of a built-in function; `UNKNOWN` for a function that is not here."""
    first = values[0] if values else UNKNOWN
    if name == "HASHBYTES" and first.text is not None:
        return of("varbinary", {"SHA2_256": 32, "SHA2_512": 64, "SHA1": 20, "MD5": 16}.get(first.text.upper(), 8000))
    special: dict[str, Callable[[], Value]] = {
        "CONCAT": lambda: text(sum(shown(value) for value in values), values),
        "LEFT": lambda: part(values, 1),
        "RIGHT": lambda: part(values, 1),
        "SUBSTRING": lambda: part(values, 2),
        "STUFF": lambda: text(shown(first) - (values[2].low or 0) + shown(values[3]), [first, values[3]]),
        "REPLACE": lambda: replaced(values),
        "QUOTENAME": lambda: Value(Type("nvarchar", 258), first.label or LITERAL),
        "PARSENAME": lambda: Value(Type("nvarchar", 128), first.label or LITERAL),
        "ISNULL": lambda: first if not first.null else values[1],
        "IIF": lambda: merged(values[1:]),
        "CHOOSE": lambda: merged(values[1:]),
        "DATEADD": lambda: of("datetime") if values[-1].string else values[-1],
        "DATEFROMPARTS": lambda: of("date"),
        "DATETIME2FROMPARTS": lambda: of("datetime2", scale=7),
        "JSON_VALUE": lambda: Value(Type("nvarchar", 4000), first.label or LITERAL),
        "JSON_QUERY": lambda: Value(Type("nvarchar", MAX), first.label or LITERAL),
        "MIN": lambda: replace(first, text=None, column=False),
        "MAX": lambda: replace(first, text=None, column=False),
    }
    if name in RESULTS:
        return RESULTS[name]
    if name in ("LEN", "CHARINDEX", "PATINDEX"):
        whole = values[1] if name != "LEN" and len(values) > 1 else first
        if whole.type is None:
            return UNKNOWN
        return of("bigint" if whole.type.size >= MAX else "int", low=0, high=min(shown(whole), 2**31 - 1))
    if name == "SPACE" or name == "REPLICATE":
        return Value(Type("varchar" if name == "SPACE" else national(values[:1]), 4000), first.label or LITERAL)
    if name in SAME:
        return part(values, 9) if first.type is not None else UNKNOWN
    if name == "SIGN":
        return replace(first, low=-1, high=1)
    if name in ("FLOOR", "CEILING", "ROUND") and first.type is not None and first.type.name in ("float", "real"):
        return replace(first, type=Type("float", scale=1), column=False)  # a whole number
    if name in FIRST:
        limits = first.range
        if limits is not None and name == "ABS":
            return replace(first, low=0, high=max(abs(limits[0]), abs(limits[1])), column=False)
        return replace(first, low=None, high=None, column=False)
    if name in ("SUM", "AVG"):
        if first.type is None or first.type.name not in NUMBERS:
            return UNKNOWN
        if first.type.name in BOUNDS:
            kind = "bigint" if first.type.name == "bigint" else "int"
            low, high = first.range or BOUNDS[kind]
            rows = 10**9 if name == "SUM" else 1
            return of(kind, low=max(low * rows, BOUNDS[kind][0]), high=min(high * rows, BOUNDS[kind][1]))
        return of("float") if first.type.name in ("float", "real") else of("decimal", 38)
    return special[name]() if name in special else UNKNOWN


def of_catalog(table: str, column: str, kind: Type) -> Value:
    """A column of a system view."""
    if not kind.string:
        return Value(kind, column=True)
    if column in ("permission_name", "state", "type") or column.endswith(("_desc", "_option")):
        collation = WORDS
    else:
        collation = SERVER if table.startswith("dm_") or table == "databases" else CATALOG
    return Value(kind, Label(1, collation), column=True)
