"""Who may ask, and from where: hosts, origins, the token, and what browsers are told not to do.

A browser that somebody uses for other things as well may be led to send requests here. So a request counts only

- when it names a host that we are called by (a foreign name that was made to lead here, DNS rebinding, does not), and
- if it changes anything, when it comes from a page of ours (origin), with a session that was opened by the token, and
  with the word that only pages of that session have.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import secrets
import time
import urllib.parse
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sqlsem.errors import ConfigurationError
from sqlsem.hosts import Hosts

log = logging.getLogger("sqlsem")

__all__ = ["Doors", "Guard", "cookie_of", "from_elsewhere", "read_form"]

#: Seconds after which a session has to show the token again.
SESSION_SECONDS = 12 * 3600.0
#: Sessions at the same time; the oldest give way.
MOST_SESSIONS = 100
#: More wrong tokens than this within a minute are answered by 429, and logged once.
MOST_FAILURES = 10
#: The shortest token that somebody may choose: shorter ones can be guessed.
SHORTEST_TOKEN = 16
#: The longest form, bytes.
MOST_BYTES = 10_000

HEADERS = {
    # Nothing but our own files, and nothing that stands in the page itself.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}


class Guard:
    """Refuses requests that do not name a host of ours, and adds the headers to every answer."""

    def __init__(self, app: ASGIApp, hosts: Hosts) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        if not self._hosts.accept(HTTPConnection(scope).headers.getlist("host")):
            told = "This dashboard is not known by that name; start it with --name if it should be.\n"
            await PlainTextResponse(told, 421)(scope, receive, send_with_headers)
            return
        with contextlib.suppress(ClientDisconnect):  # nobody is left to be answered, and it is no fault of ours
            await self._app(scope, receive, send_with_headers)


def cookie_of(request: Request) -> str:
    """What the session's cookie is called. (Browsers send cookies to all ports of a host: two dashboards would take
    each other's.)
    """
    return f"sqlsem-{request.url.port or request.url.scheme}"


def from_elsewhere(request: Request, *, strict: bool) -> bool:
    """Whether another site's page has sent this. ``strict``: it must say that it was ours."""
    site = request.headers.get("sec-fetch-site", "same-origin")
    if site not in ("same-origin", "none"):
        return True
    origin = request.headers.get("origin")
    if origin is None:
        return strict
    # The host is one of ours: `Guard` has seen to that.
    return origin not in {f"{scheme}://{request.headers['host']}" for scheme in ("http", "https")}


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a form that was sent. Raises `ValueError` for what is none."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/x-www-form-urlencoded":
        raise ValueError("This is no form")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BYTES:
            raise ValueError("This form is too long")
    return dict(urllib.parse.parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=20))


@dataclass
class Session:
    """A browser that has shown the token."""

    until: float
    said: str = ""  # what to tell it on its next page


@dataclass
class Doors:
    """Who has shown the token.

    Attributes:
        token: What has to be shown; None: nobody can change anything.
    """

    token: str | None
    _sessions: OrderedDict[str, Session] = field(default_factory=OrderedDict)
    _failures: deque[float] = field(default_factory=deque)
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))

    def __post_init__(self) -> None:
        if self.token is not None and (len(self.token) < SHORTEST_TOKEN or not self.token.isascii()):
            raise ConfigurationError(
                f"The dashboard's token must have at least {SHORTEST_TOKEN} characters, all of them ASCII; one is made "
                f"when none is given"
            )

    def too_many_failures(self) -> bool:
        """True if more wrong tokens than usual were shown within the last minute."""
        return len(self._failures) > MOST_FAILURES

    def enter(self, shown: str) -> str | None:
        """Return the id of a new session, if that is the token.

        The token always opens one, however many wrong ones were shown before: otherwise anybody who reaches the port
        could lock its owner out. A token is too long to be guessed (`SHORTEST_TOKEN`).
        """
        if self.token is None:
            return None
        if not hmac.compare_digest(shown.encode(errors="surrogatepass"), self.token.encode()):
            self._count_failure()
            return None
        name = secrets.token_urlsafe(32)
        self._sessions[name] = Session(time.monotonic() + SESSION_SECONDS)
        while len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return name

    def _count_failure(self) -> None:
        now = time.monotonic()
        while self._failures and now - self._failures[0] > 60:
            self._failures.popleft()
        if len(self._failures) == MOST_FAILURES:
            log.warning("More than %d wrong tokens were shown to the dashboard within a minute", MOST_FAILURES)
        if not self.too_many_failures():  # one more than are allowed is all that has to be known
            self._failures.append(now)

    def session(self, request: Request) -> Session | None:
        """The session that a request has."""
        name = request.cookies.get(cookie_of(request), "")
        found = self._sessions.get(name)
        if found is not None and found.until < time.monotonic():
            del self._sessions[name]
            return None
        return found

    def leave(self, request: Request) -> None:
        """The session is over."""
        self._sessions.pop(request.cookies.get(cookie_of(request), ""), None)

    def word(self, request: Request) -> str:
        """What the forms of a session carry, and no other site can know."""
        name = request.cookies.get(cookie_of(request), "")
        return hmac.new(self._secret, name.encode(), hashlib.sha256).hexdigest()

    def may_change(self, request: Request, word: str) -> bool:
        """Whether a form comes from a page of ours, of a session that has shown the token."""
        return (
            not from_elsewhere(request, strict=True)
            and self.session(request) is not None
            and hmac.compare_digest(word.encode(), self.word(request).encode())
        )
