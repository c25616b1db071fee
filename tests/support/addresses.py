"""The addresses of the servers that tests use."""

from __future__ import annotations

import urllib.parse


class ServerAddress:
    """The URLs of a server, from one for its superuser.

    Attributes:
        MAINTENANCE: The database that each server has.
        PORT: The port of a URL that names none.
    """

    MAINTENANCE: str
    PORT: int
    _base: str

    def url(self, database: str | None = None, *, user: str | None = None, password: str | None = None) -> str:
        """Return the URL of a database (left out: `MAINTENANCE`), for the superuser or another login."""
        parts = urllib.parse.urlsplit(self._base)
        place = parts.netloc
        if user is not None:
            secret = f":{urllib.parse.quote(password, safe='')}" if password is not None else ""
            place = f"{user}{secret}@{place.rpartition('@')[2]}"
        path = f"/{self.MAINTENANCE if database is None else database}"
        return urllib.parse.urlunsplit((parts.scheme, place, path, parts.query, ""))

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port of its TCP listener."""
        parts = urllib.parse.urlsplit(self._base)
        return parts.hostname or "127.0.0.1", parts.port or self.PORT
