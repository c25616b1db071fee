"""Finds and reads the configuration files; knows which settings of a project's file the user has to allow.

A project's file may come from someone else. Its folder must belong to this user or the administrator, and must not be
writable by others; the search ends at the first folder that is, and at the home folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sqlsem.config import files
from sqlsem.util import late
from sqlsem.util.credentials import hide_secrets
from sqlsem.values.errors import ConfigurationError

FILE = "sqlsem.toml"
#: The names of a project's files, in the order of precedence.
NAMES = (FILE, "pyproject.toml")


class Setting(NamedTuple):
    """A setting of a file."""

    kinds: tuple[type, ...]
    #: The harm that a project's file can do with this setting, as text; None: it is harmless.
    harm: str | None


_DURATION = (str, int, float)
_DEATH = "decides for how long a process that has died keeps its locks"
_OBJECTS = "names tables and routines, and so the code that runs in the database"
#: All settings of a file. Each says whether it can do harm.
SETTINGS: Mapping[str, Setting] = {
    "url": Setting((str,), "names a host, files, a driver's library, or variables of the environment"),
    "url_file": Setting((str,), "names a file"),
    "password_file": Setting((str,), "names a file"),
    "require_server": Setting((bool,), None),  # refuses what would be done without it
    "grace": Setting(_DURATION, _DEATH),
    "lease": Setting(_DURATION, _DEATH),
    "retry": Setting(_DURATION, None),
    "schema": Setting((str,), _OBJECTS),
    "table": Setting((str,), _OBJECTS),
    "profile": Setting((str,), None),  # of the user's own file
    "profiles": Setting((dict,), "names a host, files, a driver's library, or variables of the environment"),
}
#: The options of `sqlsem.connect`.
OPTIONS = ("grace", "lease", "retry", "schema", "table")
#: The settings of a profile.
_OF_PROFILE = tuple(key for key in SETTINGS if key not in ("profile", "profiles"))


@dataclass(frozen=True)
class File:
    """A configuration file that was read."""

    content: files.Content
    table: Mapping[str, Any] = field(repr=False)
    is_project: bool

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self.content.path

    @property
    def profiles(self) -> Mapping[str, Mapping[str, Any]]:
        """Its profiles, by name."""
        found: Mapping[str, Mapping[str, Any]] = self.table.get("profiles", {})
        return found

    @property
    def digest(self) -> str:
        """The digest of the file; of a ``pyproject.toml``, of its ``[tool.sqlsem]``."""
        data = self.content.data
        if self.path.name == "pyproject.toml":
            data = json.dumps(self.table, sort_keys=True).encode()
        with late.importing:
            import hashlib
        return hashlib.sha256(data).hexdigest()

    def harmful(self, profile: str | None) -> list[str]:
        """Name the settings that can do harm, of those that are followed with this profile of the file or with none."""
        found = [key for key in self.table if key != "profiles" and SETTINGS[key].harm is not None]
        return found if profile is None else [*found, f"profiles.{profile}"]

    def shown(self) -> list[tuple[str, str]]:
        """List the settings that can do harm, with their values for people."""
        tables = {"": self.table, **{f"profiles.{name}.": table for name, table in self.profiles.items()}}
        return [
            (f"{prefix}{key}", hide_secrets(str(value)))
            for prefix, table in tables.items()
            for key, value in table.items()
            if key != "profiles" and SETTINGS[key].harm is not None
        ]


class Search(NamedTuple):
    """The result of the search for a project's file."""

    file: File | None
    #: Why the search ended early; None: it did not.
    ended: str | None = None


def user_path() -> Path:
    """The path of the user's own file."""
    with late.importing:
        import platformdirs
    return platformdirs.user_config_path("sqlsem") / FILE


def find_user_file() -> File | None:
    """Return the user's own file, if there is one."""
    path = user_path()
    try:
        content = files.read(path)
        others = files.writable_by_others(path.parent) or content.others
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        raise _unreadable(path, exc) from exc
    _refuse_others(path, others)
    table = _parse(path, content.data)
    return None if table is None else File(content, table, is_project=False)


def find_named_file(name: str) -> File | None:
    """Return the file that ``$SQLSEM_CONFIG`` names, wherever it lies; None if that is empty."""
    if not name:
        return None
    path = Path(name).expanduser()
    try:
        content = files.read(path)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigurationError(f"$SQLSEM_CONFIG names {name!r}, which is no file; correct it") from None
    except OSError as exc:
        raise _unreadable(path, exc) from exc
    table = _parse(path, content.data)
    if table is None:
        raise ConfigurationError(f"$SQLSEM_CONFIG names {name!r}, which has no [tool.sqlsem]; correct it")
    return File(content, table, is_project=False)


def find_project_file(besides: File | None = None) -> Search:
    """Search for a project's file from this folder upwards. The file ``besides`` does not count."""
    home = None
    with contextlib.suppress(OSError):
        home = os.stat(os.path.expanduser("~"))
    with contextlib.ExitStack() as opened:
        try:
            folder = opened.enter_context(files.Folder(Path.cwd()))
        except OSError:  # the folder was removed, or is not accessible
            return Search(None)
        while True:
            if folder.others is not None:
                return Search(None, folder.others)
            for name in NAMES:
                file = _in_folder(folder, name)
                if file is not None and not (besides and os.path.samestat(file.content.status, besides.content.status)):
                    return Search(file)
            if folder.path == folder.path.parent or (home and os.path.samestat(folder.status, home)):
                return Search(None)
            try:
                folder = opened.enter_context(files.Folder(folder.path.parent, folder))
            except OSError:
                return Search(None)


def project_file(path: Path) -> File:
    """Return the project's file at a path. Raises `ConfigurationError` if it would never be followed."""
    if path.name not in NAMES:
        raise ConfigurationError(f"{path} is no project's file; that is a {' or a '.join(NAMES)}")
    try:
        with files.Folder(Path(os.path.realpath(path.parent))) as folder:
            if folder.others is not None:
                raise ConfigurationError(
                    f"{path} is never followed, as {folder.others}; close the folder, or set SQLSEM_CONFIG={path}"
                )
            file = _in_folder(folder, path.name)
    except OSError as exc:
        raise _unreadable(path, exc) from exc
    if file is None:
        raise ConfigurationError(f"{path} is not there, or has no [tool.sqlsem]")
    return file


def _in_folder(folder: files.Folder, name: str) -> File | None:
    """Return the project's file of a name; None if it is not there, or a ``pyproject.toml`` without our table."""
    path = folder.path / name
    try:
        content = folder.read(name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except files.Unfit as exc:
        if name != FILE and not _names_us(path):
            return None
        raise ConfigurationError(f"{exc}; make it a plain file, or set SQLSEM_CONFIG={path}") from exc
    except PermissionError as exc:
        if name != FILE:
            return None
        raise _unreadable(path, exc) from exc
    except OSError as exc:
        raise _unreadable(path, exc) from exc
    table = _parse(path, content.data)
    if table is None:
        return None
    _refuse_others(path, content.others)
    return File(content, table, is_project=True)


def _names_us(path: Path) -> bool:
    """Return True if a ``pyproject.toml`` that cannot be followed may have our table: then it must not be ignored."""
    try:
        return _has_table(files.read(path).data.decode("utf-8-sig", errors="replace"))
    except (OSError, ConfigurationError):
        return path.is_file()  # e.g. too large to read


def _refuse_others(path: Path, others: str | None) -> None:
    if others is not None:
        raise ConfigurationError(
            f"{path} says which database it is, but {others}, and so others could send the locks of this process "
            f"elsewhere; to follow it nevertheless set SQLSEM_CONFIG={path}, or name the database by $SQLSEM_URL "
            f"or --url"
        )


def _unreadable(path: Path, exc: OSError) -> ConfigurationError:
    return ConfigurationError(f"{path} cannot be read ({exc.strerror}), and may say which database it is")


# -- contents ---------------------------------------------------------------------------------------------------------


def _has_table(text: str) -> bool:
    return re.search(r"tool\W{1,5}sqlsem", text) is not None


def _parse(path: Path, data: bytes) -> Mapping[str, Any] | None:
    """Return the settings of a file; None for a ``pyproject.toml`` without our table."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise ConfigurationError(f"{path} cannot be read: {exc}") from exc
    whole = path.name == "pyproject.toml"
    if whole and not _has_table(text):
        return None
    with late.importing:
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
    try:
        table: Any = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as exc:
        raise ConfigurationError(f"{path} is not TOML: {exc}") from exc
    if whole:
        tools = table.get("tool")
        table = tools.get("sqlsem") if isinstance(tools, dict) else None
        if table is None:
            return None
    _check(path, "", table, SETTINGS)
    for name, profile in table.get("profiles", {}).items():
        _check(path, f"profile {name!r} of ", profile, _OF_PROFILE)
    if "profile" in table and not {"url", "url_file"}.isdisjoint(table):
        raise ConfigurationError(f"{path} names a database and a profile; which shall it be?")
    return dict(table)


def _check(path: Path, what: str, table: Any, keys: Iterable[str]) -> None:
    if not isinstance(table, dict):
        raise ConfigurationError(f"{what}{path} must be a table of settings")
    for key, value in table.items():
        if key not in keys:
            raise ConfigurationError(f"{what}{path} has a setting {key!r} that is not known{nearest(key, keys)}")
        kinds = SETTINGS[key].kinds
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ConfigurationError(  # without the value, which may hold a password
                f"{key} in {what}{path} must be a {kinds[0].__name__}, not a {type(value).__name__}"
            )
    if "url" in table and "url_file" in table:
        raise ConfigurationError(f"{what}{path} has a url and a url_file; one of them is enough")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a suggestion for an unknown name, to add to a message; empty if there is none."""
    import difflib

    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (is it {close[0]!r}?)" if close else ""
