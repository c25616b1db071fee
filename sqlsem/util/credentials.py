"""Secrets in database URLs and ODBC strings: the keywords that hold one, and the URL without them.

All code that prints, logs, withholds or refuses a URL uses this one table of keywords.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping

__all__ = ["HIDDEN", "has_secret", "hide_secrets", "hide_values", "is_secret"]

#: Replaces a secret in displayed text.
HIDDEN = "…"
#: Keywords whose values are secrets, in lower case and without ``_`` and blanks: of libpq, and of ODBC drivers.
SECRETS = frozenset(
    {
        *("password", "sslpassword", "oauthclientsecret", "scramclientkey", "scramserverkey"),
        *("pwd", "accesstoken", "clientsecret", "keystoresecret", "clientcertificate", "clientkey", "proxypassword"),
    }
)
#: Matches further keywords, such as those of future drivers, whose values are treated as secrets.
SUSPECT = re.compile(r"password|passwd|passphrase|pwd|secret|token|credential|apikey|privatekey")
#: A keyword and its value in an ODBC string. (A brace that is never closed takes all of the rest.)
_WORD = re.compile(r"([A-Za-z][\w .-]*?)(\s*=\s*)(\{(?:[^}]|\}\})*\}|\{.*|[^;]*)", re.DOTALL)
#: The same in a conninfo string of libpq.
_CONNINFO = re.compile(r"((?:^|(?<=\s))\w+)(\s*=\s*)('(?:[^'\\]|\\.)*'|[^\s;]+)", re.DOTALL)


def is_secret(keyword: str) -> bool:
    """Return True if the value of a keyword, in a URL's query or an ODBC string, is a secret."""
    plain = re.sub(r"[\s_.-]", "", keyword).lower()
    return plain in SECRETS or SUSPECT.search(plain) is not None


def has_secret(url: str) -> bool:
    """Return True if a URL or an ODBC string holds a secret, such as a password."""
    _, separator, rest = url.partition("://")
    if not separator:
        words = [*_WORD.finditer(url), *_CONNINFO.finditer(url)]
        return any(match[3].strip() and is_secret(match[1]) for match in words)
    place, _, query = rest.partition("?")
    _, colon, password = place.rpartition("@")[0].partition(":")
    if colon and password and not rest.startswith("/"):  # (such a URL has a path, and no user)
        return True
    return any(
        is_secret(keyword) or (keyword.lower() == "odbc_connect" and has_secret(value))
        for keyword, value in urllib.parse.parse_qsl(query)
    )


def hide_secrets(url: str) -> str:
    """Return a URL or an ODBC string with `HIDDEN` in the place of each secret. In doubt it hides too much.

    >>> hide_secrets("postgresql://etl:hunter2@db/dwh?sslpassword=x&sslmode=require")
    'postgresql://etl:…@db/dwh?sslpassword=…&sslmode=require'
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return _hide_words(url)
    place, *parameters = re.split(r"([?&])", rest)
    shown = place + "".join(map(_hide_parameter, parameters))
    user, at, host = shown.rpartition("@")
    name, colon, _ = user.partition(":")
    if at and colon and not rest.startswith("/"):
        shown = f"{name}:{HIDDEN}@{host}"
    return f"{scheme}://{shown}"


def hide_values(text: str, words: Mapping[str, object]) -> str:
    """Return a driver's text with `HIDDEN` in the place of the secrets among the keywords of a connection."""
    for keyword, value in words.items():
        if value and is_secret(keyword):
            text = text.replace(str(value), HIDDEN)
    return text


def _hide_parameter(parameter: str) -> str:
    keyword, equals, value = parameter.partition("=")
    name = urllib.parse.unquote_plus(keyword)
    if not equals or not value:
        return parameter
    if name.lower() == "odbc_connect":
        return f"{keyword}={_hide_words(urllib.parse.unquote_plus(value))}"
    return f"{keyword}={HIDDEN}" if is_secret(name) else parameter


def _hide_words(text: str) -> str:
    def hidden(match: re.Match[str]) -> str:
        return f"{match[1]}{match[2]}{HIDDEN}" if is_secret(match[1]) and match[3].strip() else match[0]

    return _CONNINFO.sub(hidden, _WORD.sub(hidden, text))
