"""Access checks of the dashboard: host names, origins, sessions and the token; and the security headers.

Another site's page may make a browser send requests here. So

- every request must name one of the server's own hosts (which stops DNS rebinding), and
- a request that changes anything must come from one of the server's own pages (origin), in a session that has shown
  the token, with the CSRF token that only pages of that session have.
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
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sqlsem.ops.hosts import Hosts
from sqlsem.values.errors import ConfigurationError

log = logging.getLogger("sqlsem")

__all__ = ["HostFilter", "Sessions", "cookie_of", "is_cross_site", "read_form"]

#: How long a session lasts, in seconds.
SESSION_SECONDS = 12 * 3600.0
#: The number of sessions; above it the oldest ones end.
MAX_SESSIONS = 100
#: Above this number of wrong tokens within a minute the response is 429, which is logged once.
MAX_FAILURES = 10
#: The shortest token that is accepted: shorter ones can be guessed.
MIN_TOKEN_LENGTH = 16
#: The longest form, in bytes.
MAX_FORM_BYTES = 10_000

HEADERS = {
    # Only our own files; no inline scripts and styles.
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


class HostFilter:
    """Refuses requests that name none of the server's own hosts, and adds the headers to every response."""

    def __init__(self, app: ASGIApp, hosts: Hosts) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
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
            message = "This dashboard is not known by that name; start it with --name if it should be.\n"
            await PlainTextResponse(message, 421)(scope, receive, send_with_headers)
            return
        with contextlib.suppress(ClientDisconnect):  # the client closed the connection
            await self._app(scope, receive, send_with_headers)


def cookie_of(request: Request) -> str:
    """Return the name of the session's cookie, with the port: browsers send cookies to all ports of a host."""
    return f"sqlsem-{request.url.port or request.url.scheme}"


def is_cross_site(request: Request, *, strict: bool) -> bool:
    """Return True if a page of another site has sent this request. ``strict``: also if the origin is unknown."""
    site = request.headers.get("sec-fetch-site", "same-origin")
    if site not in ("same-origin", "none"):
        return True
    origin = request.headers.get("origin")
    if origin is None:
        return strict
    # `HostFilter` has checked the host.
    return origin not in {f"{scheme}://{request.headers['host']}" for scheme in ("http", "https")}


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form. Raises `HTTPException` if the request has no valid one."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/x-www-form-urlencoded":
        raise HTTPException(400, "This is no form.")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_FORM_BYTES:
            raise HTTPException(400, "This form is too long.")
    try:
        return dict(urllib.parse.parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=20))
    except ValueError as exc:
        raise HTTPException(400, f"{exc}.") from exc


@dataclass
class Session:
    """A browser that has shown the token."""

    until: float
    notice: str = ""  # a message for its next page


@dataclass
class Sessions:
    """The sessions of browsers that have shown the token.

    Attributes:
        token: The secret that a browser has to show; None: no browser can change anything.
    """

    token: str | None
    _sessions: OrderedDict[str, Session] = field(default_factory=OrderedDict)
    _failures: deque[float] = field(default_factory=deque)
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))

    def __post_init__(self) -> None:
        if self.token is not None and (len(self.token) < MIN_TOKEN_LENGTH or not self.token.isascii()):
            raise ConfigurationError(
                f"The dashboard's token must have at least {MIN_TOKEN_LENGTH} characters, all of them ASCII; one is "
                f"made when none is given"
            )

    def too_many_failures(self) -> bool:
        """Return True if more than `MAX_FAILURES` wrong tokens were shown within the last minute."""
        return len(self._failures) > MAX_FAILURES

    def log_in(self, token: str) -> str | None:
        """Return the id of a new session; None if the token is wrong.

        The right token is accepted however many wrong ones came before: otherwise any client that reaches the port
        could lock the owner out. A token is too long to be guessed (`MIN_TOKEN_LENGTH`).
        """
        if self.token is None:
            return None
        if not hmac.compare_digest(token.encode(errors="surrogatepass"), self.token.encode()):
            self._count_failure()
            return None
        name = secrets.token_urlsafe(32)
        self._sessions[name] = Session(time.monotonic() + SESSION_SECONDS)
        while len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return name

    def _count_failure(self) -> None:
        now = time.monotonic()
        while self._failures and now - self._failures[0] > 60:
            self._failures.popleft()
        if len(self._failures) == MAX_FAILURES:
            log.warning("More than %d wrong tokens were shown to the dashboard within a minute", MAX_FAILURES)
        if not self.too_many_failures():  # (the deque needs only one more than are allowed)
            self._failures.append(now)

    def session(self, request: Request) -> Session | None:
        """Return the session of a request; None if it has none, or it has expired."""
        name = request.cookies.get(cookie_of(request), "")
        session = self._sessions.get(name)
        if session is not None and session.until < time.monotonic():
            del self._sessions[name]
            return None
        return session

    def log_out(self, request: Request) -> None:
        """End the session of a request."""
        self._sessions.pop(request.cookies.get(cookie_of(request), ""), None)

    def csrf_token(self, request: Request) -> str:
        """Return the CSRF token of a session: its forms contain it, and no other site can know it."""
        name = request.cookies.get(cookie_of(request), "")
        return hmac.new(self._secret, name.encode(), hashlib.sha256).hexdigest()

    def may_change(self, request: Request, csrf_token: str) -> bool:
        """Return True if a form comes from one of the server's own pages, in a session that has shown the token."""
        return (
            not is_cross_site(request, strict=True)
            and self.session(request) is not None
            and hmac.compare_digest(csrf_token.encode(), self.csrf_token(request).encode())
        )
