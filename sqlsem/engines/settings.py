"""What operators set for resources, as a capability of a session (see `sqlsem.engines.protocol`)."""

from __future__ import annotations

import abc
import re
from collections.abc import Mapping
from typing import ClassVar

from sqlsem import sql
from sqlsem.errors import SchemaError

__all__ = ["SettingSession", "checked", "setting_number"]


class SettingSession(abc.ABC):
    """Limits that the server owns, and pauses."""

    offers: ClassVar[str] = "settings of resources"

    @abc.abstractmethod
    def set_resource(self, resource: str, what: str, value: int | None) -> None:
        """Set ``cap``, ``stale_after`` (ms), ``ageing`` (ms; None: no priorities) or ``paused`` (1, 0). The cap of a
        name that ends with ``*`` is that of all that begin so. `ConfigurationError` where a cap is lifted on which
        requests count that name no limit.
        """


def setting_number(settings: Mapping[str, str], name: str) -> int:
    """Of the table ``setting``, one that must be a number; `SchemaError` when it is none."""
    value = settings.get(name)
    if value is None or not re.fullmatch(r"[0-9]{1,9}", str(value)):
        raise SchemaError(
            f"The sqlsem tables say {name} = {value!r}, which is no number: somebody has changed table setting. "
            f"Correct it there (this client's version is {sql.LATEST})"
        )
    return int(value)


def checked(settings: dict[str, str] | None) -> dict[str, str]:
    """The settings, when this client can work with tables that have them; else `SchemaError` with the remedy."""
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
