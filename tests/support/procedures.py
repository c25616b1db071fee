"""The T-SQL procedures, as text without comments."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from sqlsem import sql

SCRIPTS = sql.rerunnable("mssql")


@functools.cache
def text_of(name: str) -> str:
    return re.sub(r"--[^\n]*", "", sql.script("mssql", name))


def procedures() -> Iterator[tuple[str, str]]:
    for name in SCRIPTS:
        for part in re.split(r"(?m)^CREATE OR ALTER PROCEDURE ", text_of(name))[1:]:
            match = re.match(r"sqlsem\.\[?(\w+)", part)
            assert match is not None
            yield match[1], re.split(r"(?m)^GO$", part)[0]


PROCEDURES = dict(procedures())


def granted() -> dict[str, str]:
    """Return for each routine the letters of the roles that may run it."""
    text = text_of("permissions").partition("INSERT INTO @right")[2].partition("UNION ALL")[0]
    return dict(re.findall(r"\(N'(\w+)', N'([upwor]+)'\)", text))
