"""Connections of the certification: they run statements of certify.sql by name, on sessions like those of clients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sqlsem import sql
from sqlsem.engines.base import Engine
from sqlsem.util.threads import spawn
from sqlsem.values.errors import SqlsemError

__all__ = ["Answer", "Session", "code_of", "later", "server_words"]

T = TypeVar("T")


class Answer(NamedTuple):
    """The result of the routine ``acquire`` or ``try``."""

    code: int
    position: int | None = None
    fence: int | None = None


class Session:
    """One connection in autocommit mode, with nothing set on it. Errors are the driver's own."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.texts = sql.queries(engine.name, engine.options.schema, engine.options.table, "certify")
        self.wire: Any = engine.open_session("look")
        self.closed = False
        self._running: Any = None

    def rows(self, name: str, *parameters: Any, **words: object) -> list[tuple[Any, ...]]:
        """Run a statement of certify.sql, and return the rows of all of its results. Each of ``words`` replaces a word
        ``certify_…``: by a name, or inside quotes by the `Path` of a file.
        """
        text = self.texts[name]
        for word, value in words.items():
            path = str(value).replace("'", "''") if isinstance(value, Path) else None
            text = text.replace(f"certify_{word}", path or sql.check_identifier(word, str(value)))
        return self.run(text, *parameters)

    def run(self, text: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run the text of a statement, and return the rows of all of its results."""
        if hasattr(self.wire, "rows_of_text"):  # (this kind of session opens its connection at the first use)
            return [tuple(row) for row in self.wire.rows_of_text(text, parameters)]
        cursor = self._running = self.wire.connection.cursor()
        try:
            if parameters:
                cursor.execute(text, parameters)
            else:
                cursor.execute(text)
            rows: list[tuple[Any, ...]] = []
            while True:
                if cursor.description is not None:
                    rows += [tuple(row) for row in cursor.fetchall()]
                if not cursor.nextset():
                    return rows
        finally:
            self._running = None
            with contextlib.suppress(
                Exception
            ):  # the connection may be broken, as the error of the statement then says
                cursor.close()

    def has(self, *names: str) -> bool:
        """Return True if this engine has all of these statements."""
        return all(name in self.texts for name in names)

    def value(self, name: str, *parameters: Any, **words: object) -> Any:
        """Run a statement, and return the first value of its first row."""
        return self.rows(name, *parameters, **words)[0][0]

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the block in a transaction, which is rolled back at the end."""
        self.rows("begin")
        try:
            yield
        finally:
            self.rows("rollback")

    @property
    def number(self) -> int:
        """The server's number of this session."""
        return int(self.value("session_number"))

    def cancel(self) -> None:
        """Have the server end the running statement. Called from another thread."""
        running = self._running
        if hasattr(self.wire.connection, "cancel"):
            self.wire.connection.cancel()
        elif running is not None:
            running.cancel()

    def cut(self) -> None:
        """Break the connection without notice to the server, as a network failure does."""
        self.closed = True
        self.wire.interrupt()

    def close(self) -> None:
        """Close the connection; raises nothing."""
        if not self.closed:
            self.closed = True
            self.wire.close()

    # -- the routines for sessions ------------------------------------------------------------------------------

    def acquire(self, resource: str, limit: int = 1, access: str = "write", timeout_ms: int = -1) -> Answer:
        """Call ``acquire``."""
        return Answer(*self.rows("acquire", resource, limit, access, timeout_ms)[0])

    def release(self, resource: str) -> int:
        """Call ``release`` for all rows that this session has on a resource."""
        return int(self.value("release", resource))


def later(call: Callable[..., T], *arguments: Any) -> Future[T]:
    """Make a call in a new thread, and return its future."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as exc:
            future.set_exception(exc)

    spawn(run, "certify")
    return future


def _origin(exc: BaseException) -> BaseException:
    """Return the driver's own error behind an error of sqlsem."""
    while isinstance(exc, SqlsemError) and exc.__cause__ is not None:
        exc = exc.__cause__
    return exc


def server_words(exc: BaseException, engine: Engine) -> str:
    """Return the message of an error (the server's, if there is one) in one line, without secrets."""
    origin = _origin(exc)
    text = " ".join(str(origin).split()) or type(origin).__name__
    hide: Callable[[str], str] = getattr(engine, "clean", str)
    return hide(text if isinstance(origin, SqlsemError) else f"{type(origin).__name__}: {text}")


def code_of(session: Session, exc: BaseException) -> str:
    """Return the server's number of an error (SQL Server) or its SQLSTATE (PostgreSQL); empty if the server raised
    none.
    """
    origin = _origin(exc)
    if hasattr(session.wire, "server_details") and isinstance(origin, Exception):
        return str(session.wire.server_details(origin)[1])
    return str(getattr(origin, "sqlstate", None) or "")
