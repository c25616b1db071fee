"""The features that a database has, as far as an engine knows, and the features that `sqlsem init` installs.

Each statement of client.sql belongs to a feature. If the feature is not installed, the statement is refused without a
call of the database; the message names the command that adds the feature.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from sqlsem import sql
from sqlsem.sql.features import CORE, EVERYTHING, FEATURES, chosen, from_setting, listed
from sqlsem.util.record import record
from sqlsem.values.errors import ConfigurationError, SchemaError

#: The content of table ``setting``.
Settings = Mapping[str, str]


class Installed:
    """The features of one database, from the last read of table ``setting``."""

    def __init__(self, where: Callable[[], str], read: Callable[[], Settings | None]) -> None:
        self._where = where
        self._read = read
        #: None: not read yet, so no statement is refused.
        self.features: frozenset[str] | None = None

    def note(self, settings: Settings) -> None:
        """Store the features that these settings name."""
        self.features = from_setting(settings.get("features"))

    def has(self, feature: str) -> bool:
        """Return True unless the database is known to lack the feature."""
        return self.features is None or feature in self.features

    def require(self, feature: str) -> None:
        """Raise `SchemaError` if the database lacks the feature. Before that, read the settings again. Blocks."""
        if self.has(feature):
            return
        settings = self._read()  # an operator may have added the feature since
        if settings is not None:
            self.note(settings)
        if not self.has(feature):
            raise SchemaError(
                f"{self._where()}: feature {feature} ({FEATURES[feature].title}) is not installed there, only "
                f"{listed(self.features or ())}; add it (locks may be held meanwhile) with: "
                f"sqlsem init --add {feature}",
                code="feature",
            )


class Statements(Mapping[str, str]):
    """The client's statements by name, for a database that may lack some features."""

    def __init__(self, texts: Mapping[str, str], feature_of: Mapping[str, str], installed: Installed) -> None:
        self._texts = texts
        self._feature_of = feature_of
        self._installed = installed

    def __getitem__(self, name: str) -> str:
        feature = self._feature_of[name]
        if feature != CORE:
            self._installed.require(feature)
        return self._texts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


@record
class FeatureSelection:
    """The features that ``sqlsem init`` is to install. Without a choice: in a new database all, in others those that
    they have.
    """

    only: tuple[str, ...] = ()
    add: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.only and self.add:
            raise ConfigurationError(
                "Name the features that the database shall have (--only), or those to add to the ones there (--add)",
                code="tables",
            )
        chosen((*self.only, *self.add))  # raises for an unknown name

    def features(self, settings: Settings | None) -> frozenset[str]:
        """Return the features of a database with these settings after the installation.

        Raises `ConfigurationError` if the choice lacks a feature that is installed, or if there are no tables to add
        to.
        """
        if not settings:
            if self.add:
                raise ConfigurationError(
                    f"The sqlsem tables are not in this database, so there is nothing to add to; create them with: "
                    f"sqlsem init, or with some features only: sqlsem init --only {','.join(self.add)}",
                    code="tables",
                )
            return chosen(self.only or (EVERYTHING,))
        present = from_setting(settings.get("features"))
        if self.only and present - chosen(self.only):
            raise ConfigurationError(
                f"This database also has {listed(present - chosen(self.only))}, and init removes nothing; name all "
                f"with --only {listed(present | chosen(self.only)).replace(' ', '')}, or add some with --add",
                code="tables",
            )
        return present | chosen((*self.only, *self.add))


def needed(selected: Iterable[str], features: Collection[str]) -> dict[str, str]:
    """Return the features that were not selected, each with a feature that needs it."""
    return {
        need: name
        for name in FEATURES
        if name in features
        for need in FEATURES[name].needs
        if need not in selected and EVERYTHING not in selected
    }


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
