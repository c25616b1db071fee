"""The pages of the dashboard and their actions, as a Starlette application.

Every change is confirmed on a page that shows its consequences, and needs a session that has shown the token.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from sqlsem.insight.consequences import Action, consequence
from sqlsem.ops.dashboard.access import HostFilter, Sessions, cookie_of, is_cross_site, read_form
from sqlsem.ops.dashboard.feed import Feed
from sqlsem.ops.dashboard.pages import PageQuery, Pages, action_of, row_of
from sqlsem.ops.hosts import Hosts
from sqlsem.ops.poller import Poller, one_line
from sqlsem.util.permits import Permit
from sqlsem.util.printable import clean
from sqlsem.values.errors import SqlsemError
from sqlsem.values.locks import MAX_INT

__all__ = ["Dashboard"]

Handler = Callable[[Request], Awaitable[Response]]
ONLY_SHOWS = "This dashboard only shows; start it with --allow-changes."
STATIC = Path(__file__).parent / "static"


class Dashboard:
    """The application.

    Args:
        poller: Polls the database; started and stopped with the application.
        hosts: The host names that requests may use.
        token: The secret that a browser has to show; None: none is needed, and nothing can be changed.
        allow_changes: A browser that has shown the token may make changes.
        private: The token is needed for reading, too.
    """

    def __init__(
        self,
        poller: Poller,
        hosts: Hosts,
        token: str | None = None,
        *,
        allow_changes: bool = False,
        private: bool = False,
    ) -> None:
        self._poller = poller
        self._sessions = Sessions(token)
        self._changes = allow_changes and token is not None
        self._private = private
        self._pages = Pages(poller.where, poller.every)
        self.feed = Feed(poller)
        self.app = Starlette(
            routes=[
                Route("/", self._inside(self._show)),
                Route("/events", self._inside(self._events)),
                Route("/row", self._inside(self._row)),
                Route("/ask", self._inside(self._ask)),
                Route("/do", self._do, methods=["POST"]),
                Route("/login", self._login, methods=["GET", "POST"]),
                Route("/logout", self._logout, methods=["POST"]),
                Mount("/static", StaticFiles(directory=STATIC)),
            ],
            middleware=[Middleware(HostFilter, hosts=hosts)],
            exception_handlers={HTTPException: self._fail, Exception: self._fault},
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.feed.start()
        try:
            yield
        finally:
            self.feed.stop()

    # -- drawing ------------------------------------------------------------------------------------------------

    def _page(self, request: Request, template: str, status: int = 200, **values: Any) -> Response:
        session = self._sessions.session(request)
        notice = ""
        if session is not None:
            notice, session.notice = session.notice, ""
        logged_in = session is not None
        text = self._pages.draw(
            template,
            **{"notice": notice, "can_change": self._changes, "logged_in": logged_in, "private": self._private},
            **{"csrf_token": self._sessions.csrf_token(request) if logged_in else "", **values},
        )
        return HTMLResponse(text, status)

    def _refuse(self, request: Request, status: int, message: str) -> Response:
        return self._page(request, "message.html", status, title="This cannot be done", message=clean(message))

    async def _fail(self, request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        messages = {404: "There is no such page.", 405: "This page does not take such a request."}
        return self._refuse(request, exc.status_code, messages.get(exc.status_code, exc.detail))

    async def _fault(self, request: Request, exc: Exception) -> Response:
        return self._refuse(request, 500, f"This is a fault of sqlsem's ({type(exc).__name__}); its log has more.")

    def _inside(self, handler: Handler) -> Handler:
        """Require a session for a page if the dashboard is private."""

        @functools.wraps(handler)
        async def checked(request: Request) -> Response:
            if self._private and self._sessions.session(request) is None:
                return RedirectResponse("/login", 303)
            return await handler(request)

        return checked

    # -- reading ------------------------------------------------------------------------------------------------

    async def _show(self, request: Request) -> Response:
        query = PageQuery.of(request.query_params)
        values = await run_in_threadpool(self._pages.values, self.feed.snapshot, query)
        return self._page(request, "page.html", **values)

    async def _events(self, request: Request) -> Response:
        if is_cross_site(request, strict=False):
            return self._refuse(request, 403, "A page of another site may not listen.")
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        permit = Permit()
        if not self.feed.streams.acquire(permit):  # before the response begins: many requests may arrive at once
            return self._refuse(request, 503, "This page is open too often; close some.")
        query = PageQuery.of(request.query_params)
        stream = self.feed.stream(permit, query.url(), lambda: self._pages.board(self.feed.snapshot, query))
        return StreamingResponse(stream, media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    async def _row(self, request: Request) -> Response:
        query = PageQuery.of(request.query_params)
        result = row_of(self.feed.snapshot, query, request.query_params.get("key", ""))
        if result is None:
            return self._refuse(request, 404, "That row is gone.")
        listing, row = result
        actions = [Action(kind, row.resource, row.position, row.task_id) for kind in row.actions]
        return self._page(request, "row.html", query=query, listing=listing, row=row, actions=actions)

    # -- changing -----------------------------------------------------------------------------------------------

    async def _ask(self, request: Request) -> Response:
        """Show the consequences of an action, with a button that performs it if the browser may."""
        query, action = PageQuery.of(request.query_params), action_of(request.query_params)
        snapshot = self.feed.snapshot
        if action is None or (action.cap or 0) > MAX_INT:
            return self._refuse(request, 400, "There is no such action; a cap is a whole number from 1.")
        if not self._changes:
            return self._refuse(request, 403, ONLY_SHOWS)
        refusal = self._poller.refusal(action)
        if refusal is not None:
            return self._refuse(request, 403, refusal)
        if snapshot.overview is None:
            return self._refuse(request, 503, "The database has not answered yet.")
        result = consequence(snapshot.overview, action)
        return self._page(request, "ask.html", query=query, action=action, consequence=result, snapshot=snapshot)

    async def _do(self, request: Request) -> Response:
        form = await read_form(request)
        if not self._changes:
            return self._refuse(request, 403, ONLY_SHOWS)
        if not self._sessions.may_change(request, form.get("csrf_token", "")):
            message = "Show the token first, and use the buttons of these pages: nothing was changed."
            return self._refuse(request, 403, message)
        action = action_of(form)
        session = self._sessions.session(request)
        assert session is not None
        if action is None or (action.cap or 0) > MAX_INT:
            return self._refuse(request, 400, "There is no such action.")
        try:
            session.notice = await run_in_threadpool(self._poller.perform, action)
        except SqlsemError as exc:
            return self._refuse(request, 409, one_line(exc))
        return RedirectResponse(PageQuery.of(form).url(), 303)

    # -- the token ----------------------------------------------------------------------------------------------

    async def _login(self, request: Request) -> Response:
        if self._sessions.token is None:
            return self._refuse(request, 403, ONLY_SHOWS)
        if request.method != "POST":
            return self._page(request, "login.html", failed="")
        if is_cross_site(request, strict=True):
            return self._refuse(request, 403, "A page of another site may not do this.")
        form = await read_form(request)
        name = self._sessions.log_in(form.get("token", "").strip())
        if name is None:
            status = 429 if self._sessions.too_many_failures() else 403
            return self._page(request, "login.html", status, failed="That is not the token.")
        self._sessions.log_out(request)  # from an earlier session
        answer = RedirectResponse("/", 303)
        secure = request.headers["origin"].startswith("https:")
        answer.set_cookie(cookie_of(request), name, path="/", secure=secure, httponly=True, samesite="strict")
        return answer

    async def _logout(self, request: Request) -> Response:
        form = await read_form(request)
        if self._sessions.may_change(request, form.get("csrf_token", "")):
            self._sessions.log_out(request)
        answer = RedirectResponse("/", 303)
        answer.delete_cookie(cookie_of(request), path="/", httponly=True, samesite="strict")
        return answer
