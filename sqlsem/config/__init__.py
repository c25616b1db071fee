"""Find the database that this process uses: in the call, the environment, or a configuration file.

The first of these that names a database is it, alone:

1. the argument (``sqlsem.configure(url)``, ``--url``), or the profile that it names (``profile=``, ``--profile``)
2. ``$SQLSEM_URL``, else ``$SQLSEM_PROFILE``
3. the project's file: ``sqlsem.toml``, or ``[tool.sqlsem]`` in ``pyproject.toml``, in this folder or the nearest above
4. the user's file: ``sqlsem.toml`` in the folder for configuration (on Linux ``~/.config/sqlsem``)
5. an SQLite file of this user, which other hosts do not see; an error if ``require_server`` is set anywhere

``$SQLSEM_CONFIG`` names a file that is read in place of those of 3 and 4; if it is empty, no file is read.

A project's file may come from someone else, and would decide where locks are kept and whose tasks are run. By itself it
can choose a profile of the user's own file, and set harmless options (`reading.SETTINGS`). For anything else the user
must have allowed its present content (``sqlsem config allow``). If not, that is an error: ignoring the file would keep
the locks in another place than the project's programs expect. The user's own profiles and options come before the
project's, and a profile that the user names is followed without the project's file.
"""

from __future__ import annotations

import os
import re
import shlex
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlsem import engines
from sqlsem.config import allowing, files, reading
from sqlsem.config.reading import FILE, OPTIONS, File, nearest
from sqlsem.util import late
from sqlsem.util.credentials import has_secret
from sqlsem.values.errors import ConfigurationError
from sqlsem.values.locks import check_duration, check_name

__all__ = ["EMBEDDED", "Settings", "environment", "nearest", "resolve"]

#: A warning about the embedded default, as the end of a sentence.
EMBEDDED = (
    "which only processes of this user on this host share; to share with others set $SQLSEM_URL or write a sqlsem.toml"
)

#: The value of ``$SQLSEM_URL`` for commands and tasks in place of a URL with a password: with no value at all, they
#: would use another database.
WITHHELD = "withheld: see sqlsem run --pass-url"
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
TRUE, FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class Settings:
    """The database that this process uses, and the options of `sqlsem.connect`."""

    url: str = field(repr=False)  # may contain a password
    source: str  # the origin of the URL, as text
    options: Mapping[str, Any] = field(default_factory=dict)  # of `sqlsem.connect`
    embedded: bool = False  # True: the default file, as no database is named
    warnings: tuple[str, ...] = ()
    note: str = ""  # why the search for a project's file ended early
    sources: Mapping[str, str] = field(default_factory=dict)  # the origin of each option, as text


def resolve(url: str | None = None, *, profile: str | None = None, named: str = "the call") -> Settings:
    """Return the database and the options to use.

    Args:
        url: The database, if the caller names it.
        profile: A profile of the configuration files, if the caller names one.
        named: The source of the URL or profile, for messages.

    Raises `ConfigurationError` for settings that are contradictory, untrusted or invalid.
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
    """Resolve by the configuration files; ``profile`` was given by ``named``."""
    variable = os.environ.get("SQLSEM_CONFIG")
    user = reading.find_user_file() if variable is None else reading.find_named_file(variable)
    own = {} if user is None else user.profiles
    search = reading.Search(None)
    if variable is None and (profile is None or profile not in own):
        search = reading.find_project_file(user)
    project = search.file

    chooser: File | None = None
    if profile is None:
        for file in (project, user):
            if file is not None and not {"url", "url_file", "profile"}.isdisjoint(file.table):
                chooser, profile = file, file.table.get("profile")
                named = str(file.path)
                break
    if project is not None:
        theirs = profile is not None and profile not in own and profile in project.profiles
        _require_allowed(project, project.harmful(profile if theirs else None))

    table: dict[str, Any] = {}
    sources: dict[str, str] = {}
    demanding = "$SQLSEM_REQUIRE_SERVER" if _flag("SQLSEM_REQUIRE_SERVER") else None
    for file in (project, user):
        if file is not None:
            table.update((key, file.table[key]) for key in OPTIONS if key in file.table)
            sources.update((key, str(file.path)) for key in OPTIONS if key in file.table)
            if file.table.get("require_server"):
                demanding = demanding or str(file.path)
    warnings = _written_by_others(user)
    if profile is not None:
        holder = next((file for file in (user, project) if file is not None and profile in file.profiles), None)
        if holder is None:
            raise ConfigurationError(_unknown_profile(profile, named, user, project))
        table.update(holder.profiles[profile])
        if holder.profiles[profile].get("require_server"):
            demanding = demanding or f"profile {profile!r}"
        source = f"profile {profile!r} in {holder.path}"
        sources.update((key, source) for key in OPTIONS if key in holder.profiles[profile])
        if chooser not in (None, holder):
            source += f", which {named} names"
    elif chooser is not None:
        holder = chooser
        table.update((key, value) for key, value in holder.table.items() if key not in ("profile", "profiles"))
        sources.update((key, str(holder.path)) for key in OPTIONS if key in holder.table)
        source = str(holder.path)
    else:
        with late.importing:
            import platformdirs
        path = platformdirs.user_state_path("sqlsem") / "sqlsem.db"
        _require_server(demanding, None, "")
        note = f"{search.ended}: there and above no project's file is looked for" if search.ended else ""
        return Settings(
            f"sqlite:///{path}", "the default, an embedded file", _options(table), True, tuple(warnings), note, sources
        )
    url = _url(table, holder, source, warnings)
    _require_server(demanding, url, source)
    return Settings(url, source, _options(table), warnings=tuple(warnings), sources=sources)


def _require_allowed(project: File, harmful: list[str]) -> None:
    """Refuse a project's file that the user has not allowed, if it says anything that can do harm."""
    state = allowing.state(project) if harmful else allowing.ALLOWED
    if state == allowing.ALLOWED:
        return
    what = f"{project.path} sets {', '.join(harmful)}"
    if state == allowing.CHANGED:
        why = f"{what}, and has changed since you allowed it, so it is not followed"
    else:
        why = f"{what}, which a project's file, as it may come with other people's code, does only if you allow it"
    raise ConfigurationError(
        f"{why}; read it, then: sqlsem config allow {shlex.quote(str(project.path))}, or name the database yourself: "
        f"by --url, $SQLSEM_URL, or a profile of your own file, {reading.user_path()}"
    )


def _unknown_profile(profile: str, named: str, user: File | None, project: File | None) -> str:
    profiles = {name for file in (user, project) if file is not None for name in file.profiles}
    known = f"; there are {', '.join(sorted(profiles))}" if profiles else f", nor is there any in a {FILE}"
    return f"There is no profile {profile!r}, which {named} names{nearest(profile, profiles)}{known}"


def _written_by_others(named: File | None) -> list[str]:
    """Return a warning if ``$SQLSEM_CONFIG`` names a file that others can write. (Other such files are refused.)"""
    others = None if named is None else named.content.others
    return [] if named is None or others is None else [f"{named.path} says which database it is, but {others}"]


def environment(url: str, *, hand_on: bool) -> dict[str, str]:
    """Return the environment of a command or task of a process that uses ``url``: with the URL if ``hand_on``, and
    otherwise without its password.
    """
    found = dict(os.environ)
    if hand_on:
        found["SQLSEM_URL"] = url
    elif has_secret(found.get("SQLSEM_URL", "")):
        found["SQLSEM_URL"] = WITHHELD
    return found


def _options(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `sqlsem.connect`. They are checked here, as there the message would blame the caller."""
    found = {key: table[key] for key in OPTIONS if key in table}
    for key, value in found.items():
        if key in ("schema", "table"):
            check_name(f"{key} in a {FILE}", value)
        else:
            found[key] = check_duration(f"{key} in a {FILE}", value)
    return found


# -- the URL ----------------------------------------------------------------------------------------------------------


def _url(table: Mapping[str, Any], file: File, source: str, warnings: list[str]) -> str:
    if "url_file" in table:
        url = _secret(file, "url_file", table["url_file"], warnings)
    elif "url" in table:
        if has_secret(VARIABLE.sub("", table["url"])) and file.content.readable_by_others:
            warnings.append(
                f"{file.path} holds a password and can be read by others; run: chmod 600 {file.path}, or keep the "
                f"password apart (password_file)"
            )
        url = _interpolated(table["url"], file)
    else:
        raise ConfigurationError(f"There is no url in {source}")
    if "password_file" in table:
        if has_secret(url):
            raise ConfigurationError(f"There is a password in the url and a password_file in {source}; one is enough")
        url = _with_password(url, _secret(file, "password_file", table["password_file"], warnings), source)
    return url


def _secret(file: File, key: str, name: str, warnings: list[str]) -> str:
    """Return the first line of the file that a setting names."""
    path = file.path.parent / Path(name).expanduser()
    try:
        content = files.read(path)
        text = content.data.decode("utf-8").partition("\n")[0].rstrip("\r")
    except (OSError, UnicodeDecodeError, ConfigurationError) as exc:
        raise ConfigurationError(f"{key} of {file.path} cannot be read: {path}: {exc}") from exc
    if not text:
        raise ConfigurationError(f"{key} of {file.path} is empty: {path}")
    if key == "url_file" and content.others is not None:
        raise ConfigurationError(f"{key} of {file.path} says which database it is, but {content.others}; close it")
    if content.readable_by_others:
        warnings.append(f"{path} holds a password and can be read by others; run: chmod 600 {path}")
    return text


def _interpolated(template: str, file: File) -> str:
    """Replace each ``${NAME}`` by the environment variable; before the ``@``, special characters are escaped."""
    at = template.rfind("@") if "://" in template else -1

    def value(match: re.Match[str]) -> str:
        name = match[1]
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
