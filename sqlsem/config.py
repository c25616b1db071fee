"""Which database: what was said in the call, the environment, or a file; and what nobody may overlook about it.

The first of these that names a database is it, alone:

1. the argument (``sqlsem.configure(url)``, ``--url``), or the profile that it names (``profile=``, ``--profile``)
2. ``$SQLSEM_URL``, else ``$SQLSEM_PROFILE``
3. the project's file: ``sqlsem.toml``, or ``[tool.sqlsem]`` in ``pyproject.toml``, in this folder or the nearest above
4. the user's file: ``sqlsem.toml`` in the folder for configuration (on Linux ``~/.config/sqlsem``)
5. an SQLite file of this user, which nobody on another host sees; refused where ``require_server`` is set anywhere

``$SQLSEM_CONFIG`` names a file that is read in place of those of 3 and 4; empty, none is read.

A file of somebody else's, or that others can write, is not followed, as it would send our locks elsewhere: it is an
error, which says how to follow it nevertheless. From a project's file, which may have come with somebody's code, no
secrets are put into URLs: no passwords from files, and of the environment only variables named ``SQLSEM_…``.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

from sqlsem import engines
from sqlsem.errors import ConfigurationError
from sqlsem.model import check_duration, check_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Settings", "environment", "has_password", "nearest", "resolve", "writable_by_others"]

FILE = "sqlsem.toml"
#: What everybody should know of the embedded default.
EMBEDDED = (
    "which only processes of this user on this host share; to share with others set $SQLSEM_URL or write a sqlsem.toml"
)

#: What ``$SQLSEM_URL`` is for commands and tasks in place of a URL with a password: lest they lock somewhere else.
WITHHELD = "withheld: see sqlsem run --pass-url"
OPTIONS = ("grace", "lease", "retry", "schema", "table")
KEYS = ("url", "url_file", "password_file", "require_server", *OPTIONS)
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
TRUE, FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class Settings:
    """What was found."""

    url: str = field(repr=False)  # may hold a password
    source: str  # where that is from, in words
    options: Mapping[str, Any] = field(default_factory=dict)  # of `sqlsem.connect`
    embedded: bool = False  # nobody has named a database
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class _File:
    path: Path
    table: Mapping[str, Any]
    is_project: bool


def resolve(url: str | None = None, *, profile: str | None = None, named: str = "the call") -> Settings:
    """Which database it is, and how to take part.

    Args:
        url: The database, if it was given.
        profile: A profile of the configuration files, if one was named.
        named: Who gave these, for messages.

    Raises `ConfigurationError` for what contradicts itself, is not to be trusted, or cannot be understood.
    """
    if url is not None and profile is not None:
        raise ConfigurationError("Both a URL and a profile were given; which database shall it be?")
    if url is not None:
        return Settings(url, named)
    if profile is None:
        url = os.environ.get("SQLSEM_URL") or None
        if url == WITHHELD:
            raise ConfigurationError(
                "The database's URL holds a password and was not handed on to this process by sqlsem; start it by "
                "sqlsem run --pass-url (or work --pass-url), or let it name its database itself, as by a profile"
            )
        if url is not None:
            _require_server("$SQLSEM_REQUIRE_SERVER" if _flag("SQLSEM_REQUIRE_SERVER") else None, url, "$SQLSEM_URL")
            return Settings(url, "$SQLSEM_URL")
        profile = os.environ.get("SQLSEM_PROFILE") or None
        named = "$SQLSEM_PROFILE"
    return _of_files(profile, named)


def _of_files(profile: str | None, named: str) -> Settings:
    """What the files say, of a profile if ``named`` names one."""
    found = _files()
    profiles = {name: (one, table) for one in found for name, table in one.table.get("profiles", {}).items()}
    chooser: _File | None = None
    if profile is None:
        for one in found:
            if any(key in one.table for key in ("url", "url_file", "profile")):
                chooser, profile = one, one.table.get("profile")
        if profile is not None:
            assert chooser is not None
            named = str(chooser.path)
    table = {key: one.table[key] for one in found for key in OPTIONS if key in one.table}
    demanding = "$SQLSEM_REQUIRE_SERVER" if _flag("SQLSEM_REQUIRE_SERVER") else None
    for one in found:
        if one.table.get("require_server"):
            demanding = demanding or str(one.path)
    if profile is not None:
        if profile not in profiles:
            known = f"; there are {', '.join(sorted(profiles))}" if profiles else f", nor is there any in a {FILE}"
            raise ConfigurationError(
                f"There is no profile {profile!r}, which {named} names{nearest(profile, profiles)}{known}"
            )
        chooser, own = profiles[profile]
        table = {**table, **own}
        if own.get("require_server"):
            demanding = demanding or f"profile {profile!r}"
        source = f"profile {profile!r} in {chooser.path}"
    elif chooser is not None:
        table = {**table, **{key: chooser.table[key] for key in KEYS if key in chooser.table}}
        source = str(chooser.path)
    else:
        file = platformdirs.user_state_path("sqlsem") / "sqlsem.db"
        _require_server(demanding, None, "")
        return Settings(f"sqlite:///{file}", "the default, an embedded file", _options(table), embedded=True)
    warnings: list[str] = []
    url = _url(table, chooser, source, warnings)
    _require_server(demanding, url, source)
    return Settings(url, source, _options(table), warnings=tuple(warnings))


def has_password(url: str) -> bool:
    """Whether a URL or an ODBC string holds a password."""
    if "://" not in url:
        return re.search(r"(?i)(?:^|;)\s*(?:pwd|password)\s*=\s*[^;\s]", url) is not None
    netloc, _, rest = url.partition("://")[2].partition("/")
    _, colon, password = netloc.rpartition("@")[0].partition(":")
    query = urllib.parse.parse_qs(f"{netloc.partition('?')[2]}&{rest.partition('?')[2]}")
    return bool(colon and password) or any(key.lower() in ("password", "pwd", "sslpassword") for key in query)


def environment(url: str, *, hand_on: bool) -> dict[str, str]:
    """Of what is started by somebody who uses ``url``: it finds no password of ours there, unless that is wanted."""
    found = dict(os.environ)
    if hand_on:
        found["SQLSEM_URL"] = url
    elif has_password(found.get("SQLSEM_URL", "")):
        found["SQLSEM_URL"] = WITHHELD
    return found


def nearest(name: str, known: Iterable[str]) -> str:
    """Words to add to a message about a name that is not known: the one that may be meant."""
    import difflib

    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (is it {close[0]!r}?)" if close else ""


# -- files ------------------------------------------------------------------------------------------------------------


def _files() -> list[_File]:
    """The files that count, later ones before earlier ones."""
    named = os.environ.get("SQLSEM_CONFIG")
    if named is not None:
        if not named:
            return []
        table = _read(Path(named).expanduser())
        if table is None:
            raise ConfigurationError(f"$SQLSEM_CONFIG names {named!r}, which is no file; correct it")
        return [_File(Path(named), table, is_project=False)]
    found = []
    user = platformdirs.user_config_path("sqlsem") / FILE
    table = _read(user)
    if table is not None:
        _require_trust(user)
        found.append(_File(user, table, is_project=False))
    project = _project()
    if project is not None and not any(os.path.samefile(project.path, one.path) for one in found):
        _require_trust(project.path)
        found.append(project)
    return found


def _project() -> _File | None:
    """The nearest file of a project, from this folder upwards."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it was removed under us
        return None
    for folder in (here, *here.parents):
        for name in (FILE, "pyproject.toml"):
            table = _read(folder / name)
            if table is not None:
                return _File(folder / name, table, is_project=True)
    return None


def _read(path: Path) -> Mapping[str, Any] | None:
    """What a file says; None when it is not there, or says nothing of us."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except PermissionError as exc:
        if path.name == "pyproject.toml":
            return None
        raise ConfigurationError(f"{path} cannot be read ({exc.strerror}), and may say which database it is") from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigurationError(f"{path} cannot be read: {exc}") from exc
    if path.name == "pyproject.toml" and not re.search(r"tool\W{1,5}sqlsem", text):
        return None
    try:
        table: Any = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigurationError(f"{path} is not TOML: {exc}") from exc
    if path.name == "pyproject.toml":
        table = table.get("tool", {}).get("sqlsem")
        if table is None:
            return None
    _check(path, "", table, (*KEYS, "profile", "profiles"))
    for name, one in table.get("profiles", {}).items():
        _check(path, f"profile {name!r} of ", one, KEYS)
    if "profile" in table and not {"url", "url_file"}.isdisjoint(table):
        raise ConfigurationError(f"{path} names a database and a profile; which shall it be?")
    return dict(table)


def _check(path: Path, what: str, table: Any, keys: Iterable[str]) -> None:
    if not isinstance(table, dict):
        raise ConfigurationError(f"{what}{path} must be a table of settings")
    for key, value in table.items():
        if key not in keys:
            raise ConfigurationError(f"{what}{path} has a setting {key!r} that is not known{nearest(key, keys)}")
        kinds: tuple[type, ...] = (str,)
        if key == "require_server":
            kinds = (bool,)
        elif key == "profiles":
            kinds = (dict,)
        elif key in ("grace", "lease", "retry"):
            kinds = (str, int, float)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ConfigurationError(f"{key} in {what}{path} must be a {kinds[0].__name__}, not {value!r}")
    if "url" in table and "url_file" in table:
        raise ConfigurationError(f"{what}{path} has a url and a url_file; one of them is enough")


def _options(table: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `sqlsem.connect`; checked here, as there they would be blamed on the caller."""
    found = {key: table[key] for key in OPTIONS if key in table}
    for key, value in found.items():
        if key in ("schema", "table"):
            check_name(f"{key} in a {FILE}", value)
        else:
            found[key] = check_duration(f"{key} in a {FILE}", value)
    return found


# -- trust ------------------------------------------------------------------------------------------------------------


def writable_by_others(path: Path) -> str | None:
    """Who else than this user and the system's administrator decides what is in a file or folder; in words."""
    if os.name != "posix":
        return None
    me = os.geteuid()
    for one in (path, path.parent) if not path.is_dir() else (path,):
        status = one.stat()
        if status.st_uid not in (me, 0):
            return f"{one} belongs to user {_user(status.st_uid)}"
        shared = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX  # like /tmp: everybody has his own
        if status.st_mode & stat.S_IWOTH and not shared:
            return f"everybody can write to {one}"
        if status.st_mode & stat.S_IWGRP and not shared and not _private(status.st_gid, status.st_uid):
            return f"group {status.st_gid} can write to {one}"
    return None


def _user(number: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _private(gid: int, uid: int) -> bool:
    """Whether a group is a user's own, as many systems give to each."""
    import grp

    if gid == 0:
        return True
    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == _user(uid) and not set(group.gr_mem) - {_user(uid)}


def _require_trust(path: Path) -> None:
    why = writable_by_others(path.resolve())
    if why is not None:
        raise ConfigurationError(
            f"{path} says which database it is, but {why}, and so others could send the locks of this process "
            f"elsewhere; to follow it nevertheless set SQLSEM_CONFIG={path}, or name the database by $SQLSEM_URL "
            f"or --url"
        )


def _readable_by_others(path: Path) -> bool:
    return os.name == "posix" and bool(path.stat().st_mode & (stat.S_IROTH | stat.S_IRGRP))


# -- the URL ----------------------------------------------------------------------------------------------------------


def _url(table: Mapping[str, Any], file: _File, source: str, warnings: list[str]) -> str:
    for key in ("url_file", "password_file"):
        if key in table and file.is_project:
            raise ConfigurationError(
                f"{key} in {file.path}: a project's file does not reach for secrets, as it may have come with "
                f"somebody's code; keep it in your own file, {platformdirs.user_config_path('sqlsem') / FILE}"
            )
    if "url_file" in table:
        url = _secret(file, "url_file", table["url_file"], warnings)
    elif "url" in table:
        if has_password(VARIABLE.sub("", table["url"])) and _readable_by_others(file.path):
            warnings.append(
                f"{file.path} holds a password and can be read by others; run: chmod 600 {file.path}, or keep the "
                f"password apart (password_file)"
            )
        url = _interpolated(table["url"], file)
    else:
        raise ConfigurationError(f"There is no url in {source}")
    if "password_file" in table:
        if has_password(url):
            raise ConfigurationError(f"There is a password in the url and a password_file in {source}; one is enough")
        url = _with_password(url, _secret(file, "password_file", table["password_file"], warnings), source)
    return url


def _secret(file: _File, key: str, name: str, warnings: list[str]) -> str:
    """The first line of the file that a setting names."""
    path = file.path.parent / Path(name).expanduser()
    try:
        text = path.read_text(encoding="utf-8").partition("\n")[0].rstrip("\r")
        if _readable_by_others(path):
            warnings.append(f"{path} holds a password and can be read by others; run: chmod 600 {path}")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigurationError(f"{key} of {file.path} cannot be read: {path}: {exc}") from exc
    if not text:
        raise ConfigurationError(f"{key} of {file.path} is empty: {path}")
    return text


def _interpolated(template: str, file: _File) -> str:
    """``${NAME}`` stands for a variable of the environment; in the place of a password it may hold any character."""
    at = template.rfind("@") if "://" in template else -1

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if file.is_project and not name.startswith("SQLSEM_"):
            raise ConfigurationError(
                f"The url in {file.path} asks for ${{{name}}}; a project's file, which may have come with somebody's "
                f"code, is given variables named SQLSEM_… only"
            )
        if name not in os.environ:
            raise ConfigurationError(
                f"The url in {file.path} asks for ${{{name}}}, which is not set in the environment"
            )
        return urllib.parse.quote(os.environ[name], safe="") if match.start() < at else os.environ[name]

    return VARIABLE.sub(value, template)


def _with_password(url: str, password: str, source: str) -> str:
    if "://" not in url:
        return f"{url.rstrip(';')};PWD={{{password.replace('}', '}}')}}}"
    scheme, _, rest = url.partition("://")
    netloc, slash, path = rest.partition("/")
    user, at, host = netloc.rpartition("@")
    if not at:
        raise ConfigurationError(f"password_file needs a user in the url of {source}: {scheme}://user@host/database")
    return f"{scheme}://{user.rstrip(':')}:{urllib.parse.quote(password, safe='')}@{host}{slash}{path}"


# -- a server is required ---------------------------------------------------------------------------------------------


def _flag(variable: str) -> bool:
    text = os.environ.get(variable, "").strip().lower()
    if text not in (*TRUE, *FALSE):
        raise ConfigurationError(f"${variable} is {text!r}; it is one of {', '.join(TRUE + FALSE[1:])}, or not set")
    return text in TRUE


def _require_server(demanding: str | None, url: str | None, source: str) -> None:
    if demanding is None:
        return
    local = None if url is None else engines.LOCAL.get(engines.name_of_url(engines.plain(url)))
    if url is not None and local is None:
        return
    what = "no database was named" if url is None else f"{source} names {local}"
    raise ConfigurationError(
        f"A database server is required ({demanding}), but {what}; set $SQLSEM_URL, choose a profile (--profile, "
        f"$SQLSEM_PROFILE), or write a {FILE}"
    )
