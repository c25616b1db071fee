"""The bench of a certification: its schema, the connections and processes of its checks, and their removal."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import secrets
import shutil
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from sqlsem import engines, sql
from sqlsem.api.coordinator import Coordinator, connect
from sqlsem.engines.base import Engine, Options
from sqlsem.engines.protocol import Capability
from sqlsem.ops.certify.children import Child
from sqlsem.ops.certify.results import Failed, NotPossible
from sqlsem.ops.certify.sessions import Session, server_words
from sqlsem.values.errors import ConfigurationError, Unavailable

__all__ = ["PATIENCE", "Bench", "Wishes"]

T = TypeVar("T")

#: The timeout of everything that needs only work, in seconds: servers and hosts are slow at times.
PATIENCE = 60.0
#: How long the removal waits for a server that is restarting.
RETURN_SECONDS = 30.0
#: The pause between two checks of a condition.
LOOK_SECONDS = 0.02
#: The pauses between attempts to remove an object, in seconds.
REMOVAL_PAUSES = (0.5, 2.0, 5.0)


@dataclasses.dataclass(frozen=True)
class Wishes:
    """The options of the operator."""

    #: The duration of each check that runs for a time, in seconds.
    seconds: float = 5.0
    #: The duration of the soak test with kills, in seconds; None: no soak test.
    long: float | None = None
    #: The greatest number of sessions at the same time.
    max_sessions: int = 20
    #: True if databases of other collations and settings may be created, and dropped.
    databases: bool = False
    #: A login that may create databases and users, and end sessions.
    admin_url: str | None = None
    #: How long to wait for the operator to restart the server or to fail it over, in seconds; None: no such check.
    restart: float | None = None


class Bench:
    """The schema of a certification, with its open connections and processes. `close_opened` ends those of a check, and
    `remove` removes everything.
    """

    def __init__(self, url: str, options: dict[str, Any], wishes: Wishes, schema: str | None = None) -> None:
        self.wishes = wishes
        self.schema = schema or f"sqlsem_certify_{secrets.token_hex(4)}"
        self.folder: Path | None = None
        self.url = engines.plain(url)
        kind = engines.of_url(self.url)
        self.named: Engine = kind(self.url, Options())
        self.named.require(Capability.TABLES, "sqlsem certify")
        if self.named.local_file is not None:
            # A new file in the same file system: many writers in the named file would block its users.
            place = self.named.local_file.parent
            try:
                self.folder = Path(tempfile.mkdtemp(prefix=f"{self.schema}-", dir=place))
            except OSError as exc:
                raise ConfigurationError(f"No folder can be made in {place}: {exc.strerror}") from exc
            self.url = f"sqlite:///{urllib.parse.quote(str(self.folder / 'certify.db'))}"
        if wishes.admin_url is not None and engines.of_url(engines.plain(wishes.admin_url)) is not kind:
            raise ConfigurationError("--admin-url names another kind of database than the one to certify")
        #: The name of the queue. (Without schemas, the database's own installation has the usual name.)
        self.table = Options().table if kind.has_schemas or self.folder is not None else f"{self.schema}_entry"
        self.options = {**options, "schema": self.schema, "table": self.table}
        self.engine: Engine = kind(self.url, self._names)
        self._opened = contextlib.ExitStack()
        self._numbers = itertools.count(1)
        self._made: list[
            tuple[str, str]
        ] = []  # for each object that a check made: the statement that removes it, its name
        self._idle: Session | None = None
        #: True during `remove`, which a signal must not interrupt.
        self.removing = False
        #: Prints a request to the operator.
        self.say: Callable[[str], object] = lambda words: None

    @property
    def _names(self) -> Options:
        return Options(schema=self.schema, table=self.table)

    # -- the schema ---------------------------------------------------------------------------------------------

    def reinstall(self) -> None:
        """Install as ``sqlsem init`` does."""
        with contextlib.closing(self.engine.connect("look")) as session:
            session.install(self.engine.plan)

    def install(self) -> None:
        """Install, and create the tables of certify.sql."""
        self.reinstall()
        with contextlib.closing(Session(self.engine)) as own:
            for name in ("create_inside", "create_dead", "create_counter", "begin_counter"):
                own.rows(name)

    @property
    def drop_command(self) -> str:
        """The command by which an operator removes the schema or the folder."""
        if self.folder is not None:
            return f"rm -r {self.folder}"
        table = "" if self.engine.has_schemas else f" --table {self.table}"
        return f"sqlsem --schema {self.schema}{table} sql {self.engine.name} drop"

    def remove(self) -> str:
        """Remove everything. Return a text about what remains, with the statements that remove it; empty if nothing
        does.
        """
        self.removing = True
        failures: list[str] = []
        with contextlib.suppress(Exception):
            self.close_opened()
        if self._idle is not None:
            self._idle.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            if self.folder.exists():
                failures.append(f"folder {self.folder}")
        else:
            try:
                self._connect_patiently().close()
                failures += self._drop()
            except Exception as exc:
                failures.append(f"schema {self.schema} ({server_words(exc, self.engine)})")
        if not failures:
            return ""
        how = "Remove it with" if self.folder is not None else "Run what this prints"
        return f"Not removed: {'; '.join(failures)}. {how}: {self.drop_command}"

    def _connect_patiently(self) -> Session:
        """Return a connection; wait up to `RETURN_SECONDS` for a server that is restarting."""
        return _patiently(lambda: Session(self.engine), Unavailable, RETURN_SECONDS)

    def _drop(self) -> Iterator[str]:
        """Remove everything. Yield each object that remains, and the statement that removes it."""
        for statement, what in reversed(self._made):
            words = _run_repeatedly(self.admin, statement)
            if words is not None:
                yield f"{what} ({words}); remove it with {statement}"
        texts = sql.queries(self.engine.name, self.schema, self.engine.options.table, "certify")
        drop = sql.script(self.engine.name, "drop", schema=self.schema, table=self.engine.options.table)
        refusals = []
        for text in (texts.get("drop_own"), drop, texts.get("drop_roles")):
            words = None if text is None else _run_repeatedly(self.engine, text)
            if words is not None:
                refusals.append(words)
        try:
            with contextlib.closing(Session(self.engine)) as session:
                rows = session.rows("remains")
        except Exception as exc:
            refusals.append(server_words(exc, self.engine))
            rows = [(f"schema {self.schema}", None)]
        for what, statement in rows:
            yield f"{what}; remove it with {statement}" if statement else str(what)
        if rows and refusals:
            yield f"the server refused: {' / '.join(dict.fromkeys(refusals))}"

    def made(self, statement: str, what: str) -> None:
        """Record the statement that removes an object which a check is about to make."""
        self._made.append((statement, what))

    # -- the server's own crashes -------------------------------------------------------------------------------

    def open_idle(self) -> None:
        """Open the idle connection, which does nothing during a check; wait for a server that is restarting."""
        if self.folder is None and (self._idle is None or self.idle_has_ended()):
            self._idle = self._connect_patiently()

    def idle_has_ended(self) -> bool:
        """Return True if the idle connection has ended. No check ends it, so the server must have ended all
        connections.
        """
        if self._idle is None:
            return False
        try:
            self._idle.rows("session_number")
        except Exception:
            self._idle.close()
            self._idle = None
            return True
        return False

    # -- what checks open ---------------------------------------------------------------------------------------

    def name(self, word: str = "r") -> str:
        """Return the name of a resource that no other check uses."""
        return f"{word}-{next(self._numbers)}"

    def session(self, **words: str) -> Session:
        """Return a new connection without settings; it is closed after the check. ``words`` are added to its URL."""
        engine = self.engine
        if words:
            url = of_words(self.url, words)
            engine = type(engine)(url, self._names)
        return self._opened.enter_context(contextlib.closing(Session(engine)))

    @property
    def has_routines(self) -> bool:
        """True if there are routines for sessions."""
        return "acquire" in sql.queries(self.engine.name, file="certify")

    def coordinator(self, **options: Any) -> Coordinator:
        """Return a coordinator of this process; it is closed after the check."""
        return self._opened.enter_context(connect(self.url, **{**self.options, **options}))

    def child(self, job: str, **arguments: Any) -> Child:
        """Start a process that does a job of `sqlsem.ops.certify.worker`; it is ended after the check."""
        order = {"url": self.url, "options": self.options, "job": job, "arguments": arguments}
        return self._opened.enter_context(contextlib.closing(Child(order)))

    def close_opened(self) -> None:
        """Close the connections and end the processes of a check."""
        opened, self._opened = self._opened, contextlib.ExitStack()
        opened.close()

    def until(self, condition: Callable[[], object], what: str, seconds: float | None = None) -> float:
        """Wait for a condition, and return the seconds that took. Raises `Failed` if it is not true in time."""
        began = time.monotonic()
        seconds = PATIENCE if seconds is None else seconds
        while not condition():
            if time.monotonic() - began > seconds:
                raise Failed(f"{what}: not within {seconds:g} s")
            time.sleep(LOOK_SECONDS)
        return time.monotonic() - began

    def until_queued(self, observer: Session, resource: str) -> None:
        """Wait until a request is behind the holder of a resource."""
        self.until(lambda: len(observer.rows("positions", resource)) == 2, "a request in the queue")

    @property
    def admin(self) -> Engine:
        """The engine with an administrator's rights: that of ``--admin-url``, else the one that is certified."""
        if self.wishes.admin_url is None:
            return self.engine
        url = engines.plain(self.wishes.admin_url)
        return engines.of_url(url)(url, self._names)

    def admin_session(self) -> Session:
        """Return a connection of the administrator; it is closed after the check."""
        return self._opened.enter_context(contextlib.closing(Session(self.admin)))

    @contextlib.contextmanager
    def database(self, options: str, *changes: str) -> Iterator[Bench]:
        """Create a database, with these options of CREATE DATABASE and changed by these statements; install in it, and
        give its bench. The database is dropped at the end. Raises `NotPossible` if databases must not or cannot be
        created.
        """
        if not self.wishes.databases:
            raise NotPossible("databases are created only with --databases, or for the login of --admin-url")
        name = f"{self.schema}_{next(self._numbers)}"
        admin = self.admin_session()
        create = admin.texts["create_database"].replace("certify_database", name)
        drop = admin.texts["drop_database"].replace("certify_database", name)
        try:
            admin.run(f"{create} {options}")
        except Exception as exc:
            raise NotPossible(f"{create} {options}: {server_words(exc, self.engine)}") from exc
        self.made(drop, f"database {name}")
        for change in changes:
            try:
                admin.rows(change, database=name)
            except Exception as exc:  # (the database goes in the end)
                words = admin.texts[change].replace("certify_database", name)
                raise NotPossible(f"{words}: {server_words(exc, self.engine)}") from exc
        wishes = dataclasses.replace(self.wishes, seconds=min(self.wishes.seconds, 2.0), long=None, databases=False)
        other = Bench(of_database(self.wishes.admin_url or self.url, name), self.options, wishes)
        try:
            other.install()
            yield other
        finally:
            other.close_opened()
            # The server may still be ending the sessions of this process there.
            _patiently(lambda: admin.run(drop), Exception, PATIENCE)
            self._made.remove((drop, f"database {name}"))
            # PostgreSQL's roles belong to the whole server.
            if admin.has("drop_roles"):
                admin.run(sql.queries(self.engine.name, other.schema, file="certify")["drop_roles"])

    def kill(self, number: int) -> None:
        """End a session of this certification by its number. Raises `NotPossible` if this login may not."""
        try:
            self.admin_session().rows("kill", number)
        except Exception as exc:
            raise NotPossible(
                f"this login may not end sessions ({server_words(exc, self.engine)}); name one that may with "
                f"--admin-url"
            ) from exc


def of_database(url: str, name: str) -> str:
    """Return a URL or an ODBC string for another database of the same server and login."""
    if "://" in url:
        parts = urllib.parse.urlsplit(url)
        return urllib.parse.urlunsplit((parts.scheme, parts.netloc, f"/{name}", parts.query, ""))
    if re.search(r"(?i)(^|;)\s*database\s*=", url):
        return re.sub(r"(?i)((?:^|;)\s*database\s*=)[^;]*", rf"\g<1>{name}", url)
    return f"{url.rstrip(';')};Database={name}"


def of_words(url: str, words: Mapping[str, str]) -> str:
    """Return a URL or an ODBC string with more keywords."""
    if "://" in url:
        return f"{url}{'&' if '?' in url else '?'}{urllib.parse.urlencode(words)}"
    return ";".join((url.rstrip(";"), *(f"{key}={value}" for key, value in words.items())))


def _patiently(call: Callable[[], T], error: type[Exception], seconds: float) -> T:
    """Make a call; repeat it for some seconds if it raises this error."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return call()
        except error:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def _run_repeatedly(engine: Engine, text: str) -> str | None:
    """Run a statement that removes an object; repeat it if it fails. Return the last error's text; None if it
    succeeded.
    """
    for pause in (*REMOVAL_PAUSES, None):
        try:
            with contextlib.closing(Session(engine)) as session:
                session.run(text)
            return None
        except Exception as exc:
            words = server_words(exc, engine)
        if pause is not None:
            time.sleep(pause)
    return words
