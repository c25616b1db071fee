"""The features that a database has, as an engine knows them, and what `sqlsem init` is to make of them.

Each statement of client.sql belongs to a feature. A statement of one that is not installed is refused with the command
that adds it, before the database is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from sqlsem.errors import ConfigurationError, SchemaError
from sqlsem.sql.features import CORE, EVERYTHING, FEATURES, chosen, from_setting, listed

__all__ = ["FeatureSelection", "Installed", "Statements"]

#: Table ``setting``; None where there are no tables, or where they cannot be read.
Settings = Mapping[str, str]


class Installed:
    """The features of one database, as table ``setting`` named them when it was read last."""

    def __init__(self, where: Callable[[], str], read: Callable[[], Settings | None]) -> None:
        self._where = where
        self._read = read
        #: None: not read yet, so nothing is refused.
        self.features: frozenset[str] | None = None

    def note(self, settings: Settings) -> None:
        """Remember the features that these settings name."""
        self.features = from_setting(settings.get("features"))

    def has(self, feature: str) -> bool:
        """True unless the database is known to lack that feature."""
        return self.features is None or feature in self.features

    def require(self, feature: str) -> None:
        """Raise `SchemaError` where the database lacks that feature, also when it is asked again. Blocks."""
        if self.has(feature):
            return
        settings = self._read()  # an operator may have added it since
        if settings is not None:
            self.note(settings)
        if not self.has(feature):
            raise SchemaError(
                f"{self._where()}: feature {feature} ({FEATURES[feature].title}) is not installed there, only "
                f"{listed(self.features or ())}; add it (locks may be held meanwhile) with: sqlsem init --add {feature}"
            )


class Statements(Mapping[str, str]):
    """The client's statements by name, for a database that may lack some of them."""

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


@dataclass(frozen=True, slots=True)
class FeatureSelection:
    """The features that ``sqlsem init`` is asked for; without any all of a new database, and of others those there."""

    only: tuple[str, ...] = ()
    add: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.only and self.add:
            raise ConfigurationError(
                "Name the features that the database shall have (--only), or those to add to the ones there (--add)"
            )
        chosen((*self.only, *self.add))  # raises for a name that there is not

    def features(self, settings: Settings | None) -> frozenset[str]:
        """Return the features of a database with these settings after the installation.

        Raises `ConfigurationError` where that is less than there is, or where there is nothing to add to.
        """
        if not settings:
            if self.add:
                raise ConfigurationError(
                    f"The sqlsem tables are not in this database, so there is nothing to add to; create them with: "
                    f"sqlsem init, or with some features only: sqlsem init --only {','.join(self.add)}"
                )
            return chosen(self.only or (EVERYTHING,))
        there = from_setting(settings.get("features"))
        if self.only and there - chosen(self.only):
            raise ConfigurationError(
                f"This database also has {listed(there - chosen(self.only))}, and init removes nothing; name all with "
                f"--only {listed(there | chosen(self.only)).replace(' ', '')}, or add some with --add"
            )
        return there | chosen((*self.only, *self.add))


def needed(asked: Iterable[str], features: Collection[str]) -> dict[str, str]:
    """Return the features that nobody asked for, each with one that needs it."""
    return {
        need: name
        for name in FEATURES
        if name in features
        for need in FEATURES[name].needs
        if need not in asked and EVERYTHING not in asked
    }
