"""The pages, and what is done from them."""

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

from sqlsem.core.permits import Permit
from sqlsem.dashboard.feed import Feed
from sqlsem.dashboard.guarding import Doors, Guard, cookie_of, from_elsewhere, read_form
from sqlsem.dashboard.pages import Asked, Pages, action_of, row_of
from sqlsem.errors import SqlsemError
from sqlsem.hosts import Hosts
from sqlsem.insight.consequences import Action, consequence
from sqlsem.live import Live, in_a_line
from sqlsem.model import MAX_INT
from sqlsem.printable import clean

__all__ = ["Dashboard"]

Handler = Callable[[Request], Awaitable[Response]]
ONLY_SHOWS = "This dashboard only shows; start it with --allow-changes."
STATIC = Path(__file__).parent / "static"


class Dashboard:
    """The application.

    Args:
        live: Looks at the database; started and stopped with the application.
        hosts: The names by which it may be asked for.
        token: What has to be shown; None: nobody has to, and nothing can be changed.
        allow_changes: Whether who has shown it may change anything.
        private: Whether it has to be shown to look, too.
    """

    def __init__(
        self,
        live: Live,
        hosts: Hosts,
        token: str | None = None,
        *,
        allow_changes: bool = False,
        private: bool = False,
    ) -> None:
        self._live = live
        self._doors = Doors(token)
        self._changes = allow_changes and token is not None
        self._private = private
        self._pages = Pages(live.where, live.every)
        self.feed = Feed(live)
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
            middleware=[Middleware(Guard, hosts=hosts)],
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
        session = self._doors.session(request)
        said = ""
        if session is not None:
            said, session.said = session.said, ""
        text = self._pages.draw(
            template,
            **{"said": said, "can_change": self._changes, "entered": session is not None, "private": self._private},
            **{"word": self._doors.word(request) if session is not None else "", **values},
        )
        return HTMLResponse(text, status)

    def _refuse(self, request: Request, status: int, told: str) -> Response:
        return self._page(request, "told.html", status, title="This cannot be done", told=clean(told))

    async def _fail(self, request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        told = {404: "There is no such page.", 405: "This page is not asked for in this way."}
        return self._refuse(request, exc.status_code, told.get(exc.status_code, exc.detail))

    async def _fault(self, request: Request, exc: Exception) -> Response:
        return self._refuse(request, 500, f"This is a fault of sqlsem's ({type(exc).__name__}); its log has more.")

    def _inside(self, handler: Handler) -> Handler:
        """Who only looks needs no token, unless the dashboard is private."""

        @functools.wraps(handler)
        async def checked(request: Request) -> Response:
            if self._private and self._doors.session(request) is None:
                return RedirectResponse("/login", 303)
            return await handler(request)

        return checked

    # -- looking ------------------------------------------------------------------------------------------------

    async def _show(self, request: Request) -> Response:
        asked = Asked.of(request.query_params)
        values = await run_in_threadpool(self._pages.values, self.feed.seen, asked)
        return self._page(request, "page.html", **values)

    async def _events(self, request: Request) -> Response:
        if from_elsewhere(request, strict=False):
            return self._refuse(request, 403, "Another site's page may not listen.")
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        place = Permit()
        if not self.feed.streams.acquire(place):  # before the answer is begun: many may ask at once
            return self._refuse(request, 503, "Too many have this page open; close some.")
        asked = Asked.of(request.query_params)
        stream = self.feed.stream(place, asked.url(), lambda: self._pages.board(self.feed.seen, asked))
        return StreamingResponse(stream, media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    async def _row(self, request: Request) -> Response:
        asked = Asked.of(request.query_params)
        found = row_of(self.feed.seen, asked, request.query_params.get("key", ""))
        if found is None:
            return self._refuse(request, 404, "That row is gone.")
        listing, row = found
        actions = [Action(kind, row.resource, row.position, row.task_id) for kind in row.actions]
        return self._page(request, "row.html", asked=asked, found=listing, row=row, actions=actions)

    # -- changing -----------------------------------------------------------------------------------------------

    async def _ask(self, request: Request) -> Response:
        """What would come of an action; with the button that does it, for those who may."""
        asked, action = Asked.of(request.query_params), action_of(request.query_params)
        seen = self.feed.seen
        if action is None or (action.cap or 0) > MAX_INT:
            return self._refuse(request, 400, "That is nothing that could be done; a cap is a whole number from 1.")
        if not self._changes:
            return self._refuse(request, 403, ONLY_SHOWS)
        refusal = self._live.refusal(action)
        if refusal is not None:
            return self._refuse(request, 403, refusal)
        if seen.overview is None:
            return self._refuse(request, 503, "Nothing has been seen of the database yet.")
        told = consequence(seen.overview, action)
        return self._page(request, "ask.html", asked=asked, action=action, told=told, seen=seen)

    async def _do(self, request: Request) -> Response:
        try:
            form = await read_form(request)
        except ValueError as exc:
            return self._refuse(request, 400, f"{exc}.")
        if not self._changes:
            return self._refuse(request, 403, ONLY_SHOWS)
        if not self._doors.may_change(request, form.get("word", "")):
            told = "Show the token first, and use the buttons of these pages: nothing was changed."
            return self._refuse(request, 403, told)
        action = action_of(form)
        session = self._doors.session(request)
        assert session is not None
        if action is None or (action.cap or 0) > MAX_INT:
            return self._refuse(request, 400, "That is nothing that could be done.")
        try:
            session.said = await run_in_threadpool(self._live.perform, action)
        except SqlsemError as exc:
            return self._refuse(request, 409, in_a_line(exc))
        return RedirectResponse(Asked.of(form).url(), 303)

    # -- the token ----------------------------------------------------------------------------------------------

    async def _login(self, request: Request) -> Response:
        if self._doors.token is None:
            return self._refuse(request, 403, ONLY_SHOWS)
        if request.method != "POST":
            return self._page(request, "login.html", failed="")
        if from_elsewhere(request, strict=True):
            return self._refuse(request, 403, "Another site's page may not do this.")
        try:
            shown = (await read_form(request)).get("token", "")
        except ValueError as exc:
            return self._refuse(request, 400, f"{exc}.")
        name = self._doors.enter(shown.strip())
        if name is None:
            status = 429 if self._doors.too_many_failures() else 403
            return self._page(request, "login.html", status, failed="That is not the token.")
        self._doors.leave(request)  # one that it had before
        answer = RedirectResponse("/", 303)
        secure = request.headers["origin"].startswith("https:")
        answer.set_cookie(cookie_of(request), name, path="/", secure=secure, httponly=True, samesite="strict")
        return answer

    async def _logout(self, request: Request) -> Response:
        try:
            word = (await read_form(request)).get("word", "")
        except ValueError as exc:
            return self._refuse(request, 400, f"{exc}.")
        if self._doors.may_change(request, word):
            self._doors.leave(request)
        answer = RedirectResponse("/", 303)
        answer.delete_cookie(cookie_of(request), path="/", httponly=True, samesite="strict")
        return answer
