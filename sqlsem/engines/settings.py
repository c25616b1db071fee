"""Operators' settings of resources: a capability of sessions (see `sqlsem.engines.protocol`)."""

from __future__ import annotations

import abc
import re
from collections.abc import Mapping
from typing import ClassVar

from sqlsem import sql
from sqlsem.errors import SchemaError

__all__ = ["SettingSession", "checked", "setting_number"]


class SettingSession(abc.ABC):
    """Operators' settings of resources: caps, pauses, ageing and others."""

    offers: ClassVar[str] = "settings of resources"

    @abc.abstractmethod
    def set_resource(self, resource: str, what: str, value: int | None) -> None:
        """Set ``cap``, ``stale_after`` (ms), ``ageing`` (ms; None: no priorities) or ``paused`` (1 or 0). The cap of a
        name that ends with ``*`` counts for all names with that prefix. Raises `ConfigurationError` if the removed cap
        is the only limit of a request.
        """


def setting_number(settings: Mapping[str, str], name: str) -> int:
    """Return a value of table ``setting`` as a number; raise `SchemaError` if it is not a number."""
    value = settings.get(name)
    if value is None or not re.fullmatch(r"[0-9]{1,9}", str(value)):
        raise SchemaError(
            f"The sqlsem tables say {name} = {value!r}, which is no number: table setting was changed by hand. "
            f"Correct it there (this client's version is {sql.LATEST})"
        )
    return int(value)


def checked(settings: dict[str, str] | None) -> dict[str, str]:
    """Return the settings; raise `SchemaError` if this client cannot work with tables of their version."""
    if settings is None:
        raise SchemaError("The sqlsem tables are not in this database; create them with: sqlsem init")
    version, oldest = setting_number(settings, "schema_version"), setting_number(settings, "oldest_client")
    if version < sql.LATEST:
        raise SchemaError(
            f"The sqlsem tables are version {version}, this client needs {sql.LATEST}; "
            f"upgrade them (locks may be held meanwhile) with: sqlsem init"
        )
    if oldest > sql.LATEST:
        raise SchemaError(
            f"The sqlsem tables are version {version} and need a client of version {oldest} or later, "
            f"this one is {sql.LATEST}; upgrade it with: pip install --upgrade sqlsem"
        )
    return settings
