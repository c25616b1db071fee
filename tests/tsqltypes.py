"""Types and collation labels of T-SQL, the values that `tsqlflow` computes with.

The rules are those of Microsoft's pages "Collation Precedence", "Data type precedence", "CAST and CONVERT", "Precision,
scale, and length", "CONCAT", "ISNULL", "DATEDIFF", "DATEADD", "OPENJSON" and "Collation and Unicode support". If a page
leaves a case open, the stricter reading counts: a view, a derived table or a scalar function returns a column with a
collation of its own (implicit), and CASE, COALESCE, ISNULL and UNION ALL are refused over two collations.

The collations are names, or one of these, which every database fills in for itself (`DATABASES`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

#: The database's default; that of names in the catalog; that of the server, for views of all databases.
DATABASE, CATALOG, SERVER = "DATABASE_DEFAULT", "CATALOG_DEFAULT", "the server's"
#: The collation of columns of the catalog with fixed words.
WORDS = "Latin1_General_CI_AS_KS_WS"
CP1 = "SQL_Latin1_General_CP1_CI_AS"
#: A database of each kind → what the names above stand for.
DATABASES = {
    CP1: {DATABASE: CP1, CATALOG: CP1, SERVER: CP1},
    **{
        name: {DATABASE: name, CATALOG: name, SERVER: CP1}
        for name in (
            "Latin1_General_100_CS_AS",
            "Latin1_General_100_BIN2",
            "Turkish_CI_AS",
            "Latin1_General_100_CI_AS_SC_UTF8",
        )
    },
    "Azure SQL": {DATABASE: "Latin1_General_100_CS_AS", CATALOG: CP1, SERVER: CP1},
    "a contained database": {DATABASE: CP1, CATALOG: "Latin1_General_100_CI_AS_WS_KS_SC", SERVER: CP1},
}

#: Highest first: of two types in one expression, the other one is converted to this.
PRECEDENCE = [
    "sql_variant",
    "xml",
    "datetimeoffset",
    "datetime2",
    "datetime",
    "smalldatetime",
    "date",
    "time",
    "float",
    "real",
    "decimal",
    "money",
    "smallmoney",
    "bigint",
    "int",
    "smallint",
    "tinyint",
    "bit",
    "ntext",
    "text",
    "image",
    "timestamp",
    "uniqueidentifier",
    "nvarchar",
    "nchar",
    "varchar",
    "char",
    "varbinary",
    "binary",
]
NATIONAL = {"nvarchar", "nchar", "ntext"}
STRINGS = NATIONAL | {"varchar", "char", "text"}
DATES = {"datetimeoffset", "datetime2", "datetime", "smalldatetime", "date", "time"}
BOUNDS = {
    "bigint": (-(2**63), 2**63 - 1),
    "int": (-(2**31), 2**31 - 1),
    "smallint": (-(2**15), 2**15 - 1),
    "tinyint": (0, 255),
    "bit": (0, 1),
}
NUMBERS = {"float", "real", "decimal", "money", "smallmoney", *BOUNDS}
#: The size of nvarchar(max).
MAX = 2**30


@dataclass(frozen=True)
class Type:
    name: str
    size: int = 0  # characters, bytes or digits
    scale: int = 0

    def __str__(self) -> str:
        if self.name in STRINGS or self.name in ("varbinary", "binary"):
            return f"{self.name}({'max' if self.size >= MAX else self.size})"
        return self.name

    @property
    def string(self) -> bool:
        return self.name in STRINGS

    @property
    def bytes(self) -> int:
        """Return the longest value, as a key of an index."""
        if self.name in NATIONAL:
            return 2 * self.size
        fixed = {"bigint": 8, "int": 4, "smallint": 2, "tinyint": 1, "bit": 1, "uniqueidentifier": 16, "decimal": 17}
        return self.size if self.string or "binary" in self.name else fixed.get(self.name, 8)


@dataclass(frozen=True)
class Label:
    """A collation label. rank 0: coercible-default, 1: implicit, 2: none, 3: explicit."""

    rank: int
    collation: str

    def __str__(self) -> str:
        return f"{('coercible-default', 'implicit', 'no-collation', 'explicit')[self.rank]} {self.collation}"


LITERAL = Label(0, DATABASE)


@dataclass(frozen=True)
class Value:
    """The facts about an expression; none without a type."""

    type: Type | None = None
    label: Label | None = None
    low: int | None = None
    high: int | None = None
    text: str | None = None  # of a literal
    null: bool = False
    column: bool = False
    ascii: bool = False  # True for ASCII literals, and choices between them
    deadline: bool = False  # a moment so many milliseconds (int) after now

    @property
    def string(self) -> bool:
        return self.type is not None and self.type.string

    @property
    def range(self) -> tuple[int, int] | None:
        if self.type is None or self.type.name not in BOUNDS:
            return None
        low, high = BOUNDS[self.type.name]
        return low if self.low is None else self.low, high if self.high is None else self.high

    def as_column(self) -> Value:
        """Return the value for another query: a column with an implicit label."""
        label = Label(1, self.label.collation) if self.label is not None and self.label.rank != 2 else self.label
        return replace(self, label=label, text=None, column=True)


UNKNOWN = Value()


def of(name: str, size: int = 0, scale: int = 0, low: int | None = None, high: int | None = None) -> Value:
    kind = Type(name, size, scale)
    return Value(kind, LITERAL if kind.string else None, low, high)


def differ(first: str, second: str) -> list[str]:
    """Say in which databases two collations differ."""
    return [
        name
        for name, there in DATABASES.items()
        if there.get(first, first).lower() != there.get(second, second).lower()
    ]


def combined(labels: list[Label]) -> tuple[Label | None, str]:
    """Return the label of an expression over strings, and the error, if there is one."""
    result: Label | None = None
    wrong = ""
    for label in labels:
        if result is None or label.rank > result.rank:
            if label.rank == 3 or result is None or result.rank != 2:
                result = label
        elif label.rank == result.rank and label.rank in (1, 3):
            where = differ(label.collation, result.collation)
            if where:
                wrong = f"{result.collation} and {label.collation} (in {', '.join(where)})"
                result = Label(2, "") if label.rank == 1 else result
    if result is not None and result.rank == 3:
        explicit = {label.collation for label in labels if label.rank == 3}
        if len(explicit) == 1:
            return result, ""  # it decides for all others
    if result is not None and result.rank == 2 and not wrong:
        wrong = "an expression that has no collation"
    return result, wrong


def shown(value: Value) -> int:
    """Return the largest number of characters of a value as text."""
    kind = value.type
    if kind is None:
        return 0
    if kind.string or "binary" in kind.name:
        return len(value.text) if value.text is not None else kind.size
    limits = value.range
    if limits is not None:
        return max(len(str(limit)) for limit in limits)
    if kind.name == "decimal":
        return kind.size + 2
    sizes = {"uniqueidentifier": 36, "datetime2": 20 + kind.scale, "datetime": 19, "date": 10, "time": 16}
    return sizes.get(kind.name, 30)


def merged(values: list[Value]) -> Value:
    """Return the common type of several expressions (CASE, UNION, VALUES, comparison)."""
    known = [value for value in values if not value.null]
    if not known:
        return values[0] if values else UNKNOWN
    if any(value.type is None for value in known):
        return UNKNOWN
    kinds = [value.type for value in known if value.type is not None]
    name = min((kind.name for kind in kinds), key=PRECEDENCE.index)
    size = max((kind.size for kind in kinds if kind.name == name), default=0)
    if name in STRINGS:
        size = max(shown(value) for value in known)
        if {kind.name for kind in kinds} & {"nchar", "char"} and len({kind.name for kind in kinds}) > 1:
            name = name if name.startswith(("nv", "v")) else name.replace("char", "varchar")
    kind = Type(name, size, max(kind.scale for kind in kinds if kind.name == name))
    limits = [
        value.range or ((value.low, value.high) if value.low is not None and value.high is not None else None)
        for value in known
    ]
    low, high = None, None
    if name in (*BOUNDS, "decimal", "float") and all(limits):
        low = min(limit[0] for limit in limits if limit is not None)
        high = max(limit[1] for limit in limits if limit is not None)
    label = combined([value.label for value in known if value.label is not None])[0] if name in STRINGS else None
    soon = all(value.deadline for value in known)
    return Value(
        kind,
        label or (LITERAL if name in STRINGS else None),
        low,
        high,
        deadline=soon,
        ascii=all(value.ascii for value in known),
    )


def lossy(value: Value, target: Type) -> str:
    """Return the danger of an implicit conversion of a value to a type; empty without a danger."""
    kind = value.type
    if kind is None or value.null:
        return ""
    if "sql_variant" in (kind.name, target.name):
        return "" if target.name == "sql_variant" else f"sql_variant is never converted to {target} by itself (257)"
    if target.string:
        if kind.name in NATIONAL and target.name not in NATIONAL and not value.ascii:
            return f"{kind} to {target}: other characters than those of the code page become ?"
        if kind.name in ("float", "real"):
            return f"{kind} to {target}: six digits are kept"
        if not kind.string and kind.name in DATES:
            return f"{kind} to {target} without a style"
        if kind.name not in STRINGS and shown(value) > target.size:
            return f"{kind} to {target}: it may not fit (8115)"
        return ""
    if kind.string:
        if target.name in NUMBERS:
            number = r"\s*[+-]?\d+\s*" if target.name in BOUNDS else r"\s*[+-]?\d+(\.\d*)?\s*"
            if value.text is None or not re.fullmatch(number, value.text):
                return f"{kind} to {target}: it fails when the text is no number (245)"
        elif target.name in DATES:
            plain = r"\d{8}|\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d+)?)?)?"
            if target.name in ("datetime", "smalldatetime"):
                plain = r"\d{8}|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?"
            if value.text is None or not re.fullmatch(plain, value.text):
                return f"{kind} to {target}: it depends on the session's language, and may fail (241)"
        elif "binary" in target.name:
            return f"{kind} is never converted to {target} by itself (257)"
        return ""
    if target.name in BOUNDS and target.name != "bit":
        limits, bounds = value.range, BOUNDS[target.name]
        if (
            (kind.name == "decimal" or (kind.name == "float" and kind.scale))
            and value.low is not None
            and value.high is not None
        ):
            limits = value.low, value.high  # a whole number (FLOOR), between bounds
        if limits is None and kind.name in NUMBERS:
            return f"{kind} to {target}: what is behind the point is cut off, and it may overflow"
        if limits is not None and (limits[0] < bounds[0] or limits[1] > bounds[1]):
            return f"{kind} to {target}: it may overflow (8115)"
    dates = kind.name in DATES and target.name in DATES and kind.name != target.name
    if dates and (kind.name == "datetimeoffset" or target.name != "datetime2"):
        return f"{kind} to {target}: it is rounded, or changes its meaning"
    if (kind.name in DATES and target.name in BOUNDS) or (kind.name in BOUNDS and target.name in DATES - {"datetime"}):
        return f"{kind} is never converted to {target} (206)"
    return ""
