"""SQLite's files: a hostile writer can break no more than the locks, and other users cannot read the files."""

import contextlib
import json
import logging
import os
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support import PATIENCE, TESTS, Attempt, Database, keep_to_the_permissions

import sqlsem
from sqlsem.engines.sqlite import fork, wal
from sqlsem.engines.sqlite.beacons import Beacons
from sqlsem.engines.sqlite.connection import SqliteConnection
from sqlsem.values.locks import Request

posix = pytest.mark.skipif(os.name != "posix", reason="needs the files of POSIX")


@pytest.fixture
def file(tmp_path):
    """A database without members."""
    database = Database("sqlite", f"sqlite:///{tmp_path}/db/locks.db")
    with database.coordinator() as coordinator, coordinator.mutex("first"):
        pass
    return database


def folder_of(database):
    return Path(database.url.removeprefix("sqlite:///") + "-members")


def plant(database, beacon, resource="a", grace=0):
    """Insert a member with that beacon and a lock, as any process with write access could."""
    with contextlib.closing(database.raw()) as connection:
        member = connection.execute(
            "INSERT INTO sqlsem_member (beacon, host, pid, program, grace_ms) VALUES (?, 'h', 1, 'p', ?)",
            (beacon, grace),
        ).lastrowid
        connection.execute(
            "INSERT INTO ProcessControl (resource_id, requesting_id, concurrency_limit, member_id, request_uid,"
            " granted_at) VALUES (?, 'x', 1, ?, hex(randomblob(8)), 1.0)",
            (resource, member),
        )


def state(root):
    """Return everything below a folder: kind, owner and contents."""
    contents = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) and os.access(path, os.R_OK) else None
        contents[str(path)] = (
            status.st_ino,
            status.st_mode,
            status.st_uid,
            status.st_size,
            status.st_mtime_ns,
            content,
        )
    return contents


# -- hostile rows


def elsewhere(name):
    return lambda outside, folder: str(outside / name)


def link(target):
    def make(outside, folder):
        os.symlink(outside / target, folder / ("a" * 32))
        return "a" * 32

    return make


def fifo(outside, folder):
    os.mkfifo(folder / ("b" * 32))
    return "b" * 32


def directory(outside, folder):
    (folder / ("c" * 32)).mkdir()
    return "c" * 32


def device(outside, folder):
    try:
        os.mknod(folder / ("d" * 32), 0o666 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        os.symlink("/dev/zero", folder / ("d" * 32))  # only root can make devices
    return "d" * 32


def local_socket(outside, folder):
    start = os.open(".", os.O_RDONLY)
    os.chdir(folder)  # the name must be short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("e" * 32)
    finally:
        os.fchdir(start)
        os.close(start)
    return "e" * 32


def full(outside, folder):
    (folder / ("f" * 32)).write_text("a thesis")
    return "f" * 32


def hard_link(outside, folder):
    os.link(outside / "thesis", folder / ("1" * 32))
    return "1" * 32


HOSTILE = {
    "absolute, full": elsewhere("thesis"),
    "absolute, empty": elsewhere("empty"),
    "absolute, a beacon's name": elsewhere("0" * 32),
    "absolute, a folder": elsewhere(""),
    "absolute, a device": lambda outside, folder: "/dev/null",
    "upwards, full": lambda outside, folder: "../../outside/thesis",
    "upwards, empty": lambda outside, folder: "../../outside/empty",
    "upwards, the database": lambda outside, folder: "../locks.db",
    "link to a full file": link("thesis"),
    "link to an empty file": link("empty"),
    "link to a folder": link("."),
    "link to nothing": link("nothing"),
    "pipe": fifo,
    "folder": directory,
    "device": device,
    "socket": local_socket,
    "full file": full,
    "hard link": hard_link,
    "nothing": lambda outside, folder: "2" * 32,
    "empty name": lambda outside, folder: "",
    "dot": lambda outside, folder: ".",
    "upper case": lambda outside, folder: "A" * 32,
    "line end": lambda outside, folder: "a" * 32 + "\n",
    "NUL": lambda outside, folder: "a" * 32 + "\0",
    "long": lambda outside, folder: "a" * 100_000,
    "number": lambda outside, folder: 12,
    "bytes": lambda outside, folder: b"\xff" * 32,
    "no text": lambda outside, folder: b"a" * 32,
}


@posix
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_beacon_is_a_name_and_never_a_path(file, tmp_path, kind):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "thesis").write_text("three years")
    (outside / "empty").touch()
    (outside / ("0" * 32)).touch()
    folder = folder_of(file)
    plant(file, HOSTILE[kind](outside, folder))
    before, planted = state(outside), state(folder)
    began = time.monotonic()
    with file.coordinator() as coordinator:
        coordinator.admin.entries()
        with coordinator.mutex("a", timeout=30):
            pass
        plant(file, HOSTILE["absolute, empty"](outside, folder))
        coordinator.admin.reap()
    assert time.monotonic() - began < 25, "it waited for something"
    assert state(outside) == before
    assert state(folder) == planted, "only beacons are removed"


@posix
def test_a_folder_that_is_a_link_is_not_followed(file, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / ("0" * 32)).touch()
    folder_of(file).rmdir()
    folder_of(file).symlink_to(outside)
    before = state(outside)
    plant(file, "0" * 32)
    with file.coordinator(retry=0.2) as coordinator:
        with pytest.raises(sqlsem.Unavailable, match="links are not followed"):
            coordinator.mutex("a").acquire(timeout=5)
        coordinator.admin.reap()
        assert coordinator.admin.entries() == []
    assert state(outside) == before


def meets_what_it_cannot_test(channel, url, options):
    keep_to_the_permissions()
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("sqlsem").addHandler(handler)
    with sqlsem.connect(url, **options) as coordinator:
        granted = coordinator.mutex("a").acquire(timeout=0.5)
        coordinator.admin.reap()
        channel.tell(
            "tried", granted=granted, rows=[entry.resource for entry in coordinator.admin.entries()], told=messages
        )


@posix
@pytest.mark.engines("sqlite")
def test_untestable_beacon_counts_as_alive(database, spawn):
    folder_of(database).mkdir(exist_ok=True)
    beacon_file = folder_of(database) / ("3" * 32)
    beacon_file.touch(mode=0o000)
    plant(database, "3" * 32)
    tried = spawn(meets_what_it_cannot_test).expect("tried")
    assert (tried["granted"], tried["rows"]) == (False, ["a"])
    assert "believed to live" in tried["told"][0]
    assert beacon_file.exists()


@posix
def test_file_replacing_a_free_beacon_is_kept(tmp_path):
    beacons = Beacons(tmp_path / "locks.db")
    beacons.folder.mkdir()
    place = beacons.folder / ("4" * 32)
    place.touch()
    with beacons.probe("4" * 32) as look:
        assert look.held is False
        place.rename(tmp_path / "moved")
        place.touch()
        look.remove()
    assert place.exists()
    with beacons.probe("4" * 32) as look:
        place.unlink()
        place.symlink_to(tmp_path / "moved")
        look.remove()
    assert place.is_symlink()
    assert (tmp_path / "moved").exists()


# -- beacons


@pytest.mark.parametrize("by_path", [pytest.param(False, marks=posix), True], ids=["by descriptor", "by path"])
def test_beacon_file_follows_its_member(tmp_path, by_path):
    (tmp_path / "locks.db").touch()
    beacons = Beacons(tmp_path / "locks.db", by_path=by_path)
    assert beacons.probe("0" * 32).held is None
    assert beacons.names() == []
    first, second = beacons.create(), beacons.create()
    assert set(beacons.names()) == {first.name, second.name}
    assert first.in_place
    with beacons.probe(first.name) as look, beacons.probe(first.name) as again:
        assert look.held
        assert again.held
        look.remove()
    assert (beacons.folder / first.name).exists(), "what is held stays"
    os.utime(beacons.folder / first.name, (1, 1))
    first.touch()
    with beacons.probe(first.name) as look:
        assert look.seen == pytest.approx(time.time(), abs=60)
    # The state after the death of the beacon's process.
    second.discard()
    if by_path:
        second._lock = None
        del second
        free = "5" * 32
        (beacons.folder / free).touch()
    else:
        free = second.name
    with beacons.probe(free) as look:
        assert look.held is False
        if not by_path:
            with beacons.probe(free) as again:
                assert again.held is False, "a process that tests the beacon is not taken for its holder"
        look.remove()
    assert not (beacons.folder / free).exists()
    first.remove()
    first.remove()
    assert not (beacons.folder / first.name).exists()
    lost = beacons.create()
    (beacons.folder / lost.name).unlink()
    assert not lost.in_place
    (beacons.folder / lost.name).touch()
    assert by_path or not lost.in_place, "another file of that name is not it"
    lost.remove()


@pytest.mark.parametrize("is_busy", [False, True], ids=["free", "busy"])
def test_registration_touches_its_beacon_seldom(file, is_busy):
    with contextlib.closing(file.session()) as session:
        member, eighth = session.register_member("h", 1, "p"), session.options.grace / 8
        beacon_file = folder_of(file) / session.beacon.name
        if is_busy:
            session.register(member, "r", "o", "holder", [Request("q", limit=9)], False)
        for uid, age, is_touched in (("young", eighth / 2, False), ("old", eighth + 1, True)):
            os.utime(beacon_file, (1, 1))
            session.beacon.touched_at = time.monotonic() - age
            (ticket,) = session.register(member, "r", "o", uid, [Request("q", limit=9)], False)
            assert (beacon_file.stat().st_mtime > 1) == is_touched
            session.release(ticket, "released")


def test_reap_removes_orphan_beacons(file):
    folder = folder_of(file)
    with file.coordinator() as coordinator, coordinator.mutex("a"):
        for name in ("6" * 32, "7" * 32, "8" * 32 + ".txt"):
            (folder / name).touch()
        for path in folder.iterdir():
            if path.name != "7" * 32:
                os.utime(path, (1, 1))
        coordinator.admin.reap()
        remaining = {path.name for path in folder.iterdir()}
        assert remaining == {
            "7" * 32,
            "8" * 32 + ".txt",
            *(row[0] for row in file.rows("SELECT beacon FROM sqlsem_member")),
        }


@posix
def test_a_link_to_the_database_leads_to_the_same_beacons(file, tmp_path):
    (tmp_path / "link.db").symlink_to(file.url.removeprefix("sqlite:///"))
    with file.coordinator(grace=0) as holder, sqlsem.connect(f"sqlite:///{tmp_path}/link.db", grace=0) as other:
        with holder.mutex("a"):
            assert other.engine.beacons.folder == folder_of(file)
            assert not other.mutex("a").acquire(timeout=1), "its beacon is found, and held"
    assert not (tmp_path / "link.db-members").exists()


@posix
@pytest.mark.parametrize(
    ("database", "folder", "beacon"), [(0o600, 0o700, 0o600), (0o664, 0o770, 0o660), (0o644, 0o700, 0o600)], ids=oct
)
def test_database_writers_may_test_beacons(tmp_path, database, folder, beacon):
    (tmp_path / "locks.db").touch()
    (tmp_path / "locks.db").chmod(database)
    before = os.umask(0o077)
    try:
        beacons = Beacons(tmp_path / "locks.db")
        created = beacons.create()
    finally:
        os.umask(before)
    assert stat.S_IMODE(beacons.folder.stat().st_mode) == folder
    assert stat.S_IMODE((beacons.folder / created.name).stat().st_mode) == beacon
    created.remove()


@posix
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
def test_root_creates_files_for_the_databases_owner(tmp_path):
    (tmp_path / "locks.db").touch()
    os.chown(tmp_path / "locks.db", 65534, 65534)
    beacons = Beacons(tmp_path / "locks.db")
    beacon = beacons.create()
    for path in (beacons.folder, beacons.folder / beacon.name):
        assert (path.stat().st_uid, path.stat().st_gid) == (65534, 65534)
    beacon.remove()


# -- the default database is private to its user

DEFAULT = """
import json, os, sys
os.umask(int(sys.argv[1], 8))
import sqlsem
try:
    with sqlsem.mutex("a"), sqlsem.mutex("b"):
        entries = len(sqlsem.default().admin.entries())
        path = sqlsem.default().engine.path
        beside = sorted(path.parent.rglob("*"))
        print(json.dumps({str(one): oct(one.stat().st_mode & 0o777) for one in [path.parent, *beside]}))
except sqlsem.SqlsemError as exc:
    print(json.dumps({type(exc).__name__: str(exc)}))
"""


def run_default(home, umask="022"):
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("SQLSEM_URL", "XDG_STATE_HOME")},
        "HOME": str(home),
        "PYTHONPATH": str(TESTS.parent),
    }
    result = subprocess.run(
        [sys.executable, "-c", DEFAULT, umask], env=environment, capture_output=True, text=True, timeout=60, cwd=home
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout), result.stderr


@posix
@pytest.mark.parametrize("umask", ["000", "022"])
def test_the_default_database_is_closed_to_others(tmp_path, umask):
    modes, output = run_default(tmp_path, umask)
    assert len(modes) >= 5, modes  # folder, file, -wal, -shm, -members with a beacon
    for path, mode in modes.items():
        assert mode == ("0o700" if Path(path).is_dir() else "0o600") or "-members/" in path, (path, mode)
    assert [line for line in output.splitlines() if not line.startswith("No database was named")] == []


@posix
def test_a_default_database_that_was_open_is_closed(tmp_path):
    modes, _ = run_default(tmp_path)
    for path in modes:
        with contextlib.suppress(FileNotFoundError):
            os.chmod(path, 0o755 if Path(path).is_dir() else 0o644)
    again, output = run_default(tmp_path)
    assert set(again.values()) == {"0o700", "0o600"}
    assert "was open to other users" in output


@posix
def test_unprotected_default_database_is_reported(tmp_path, monkeypatch, caplog):
    def refused(path, mode):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "sqlsem").mkdir(mode=0o755)
    monkeypatch.setattr(Path, "chmod", refused)
    with sqlsem.connect(f"sqlite:///{tmp_path}/sqlsem/sqlsem.db") as coordinator:
        if not coordinator.engine.private:
            pytest.skip("the default folder is another one on this system")
        with coordinator.mutex("a"):
            pass
    assert "cannot be closed" in caplog.text


@posix
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root to give a folder away")
def test_default_folder_of_another_user_is_refused(tmp_path):
    modes, _ = run_default(tmp_path)
    os.chown(next(iter(modes)), 65534, 65534)
    refused, _ = run_default(tmp_path)
    assert list(refused) == ["ConfigurationError"]
    assert "belongs to" in refused["ConfigurationError"]
    assert "$SQLSEM_URL" in refused["ConfigurationError"]


@posix
def test_doctor_lists_other_writers(file):
    path = Path(file.url.removeprefix("sqlite:///"))
    path.parent.chmod(0o755)

    def told():
        with file.coordinator() as coordinator, contextlib.closing(coordinator.engine.connect("look")) as session:
            return next(check for check in session.diagnose() if check.name == "access")

    path.chmod(0o600)
    assert told().mend == ""
    assert "this user" in told().detail
    path.chmod(0o664)
    assert "group" in told().detail
    assert "who may write it" in told().mend
    path.chmod(0o666)
    assert "everybody" in told().detail
    path.chmod(0o644)
    assert told().mend == ""
    assert "read" in told().detail


# -- read-only access


def test_read_only_command_creates_nothing(tmp_path):
    for url in (f"sqlite:///{tmp_path}/no/such.db?mode=ro", f"sqlite:///{tmp_path}/no/such.db?mode=rw"):
        with sqlsem.connect(url, retry=0.1) as coordinator:
            with pytest.raises(sqlsem.SchemaError, match="is not there; check the path"):
                coordinator.admin.entries()
            with pytest.raises(sqlsem.SchemaError, match="sqlsem init"):
                coordinator.mutex("a").acquire()
    with sqlsem.connect(f"sqlite:///{tmp_path}/no/such.db", retry=0.1) as coordinator:
        coordinator.engine.creates = False
        with pytest.raises(sqlsem.SchemaError, match="is not there"):
            coordinator.admin.entries()
    (tmp_path / "empty.db").touch()
    with sqlsem.connect(f"sqlite:///{tmp_path}/empty.db?mode=rw", retry=0.1) as coordinator:
        with pytest.raises(sqlsem.SchemaError, match="sqlsem init"):
            coordinator.admin.entries()
    assert list(tmp_path.iterdir()) == [tmp_path / "empty.db"]
    assert (tmp_path / "empty.db").stat().st_size == 0


def test_files_have_the_modes_of_the_database(file):
    with sqlsem.connect(f"{file.url}?mode=rw") as coordinator, coordinator.mutex("a"):
        with sqlsem.connect(f"{file.url}?mode=ro", retry=0.1) as reader:
            assert [entry.resource for entry in reader.admin.entries()] == ["a"]
            with pytest.raises(sqlsem.Unavailable, match="read-only"):
                reader.mutex("b").acquire(timeout=1)
    for query in ("mode=no", "mode", "nolock=1", "mode=ro&vfs=unix"):
        with pytest.raises(sqlsem.ConfigurationError, match="mode=ro"):
            sqlsem.connect(f"{file.url}?{query}")
    with pytest.raises(sqlsem.ConfigurationError, match="%00"):
        sqlsem.connect("sqlite:///a%00b.db")


@pytest.mark.parametrize("name", ["a ?%#&=b.db", "x%20y.db", "ünï.db"])
def test_odd_names_of_files(tmp_path, name):
    from urllib.parse import quote

    url = f"sqlite:///{quote(str(tmp_path / name))}"
    with sqlsem.connect(url) as coordinator, coordinator.mutex("a"):
        for mode in ("ro", "rw"):
            with sqlsem.connect(f"{url}?mode={mode}") as other:
                assert len(other.admin.entries()) == 1
    assert (tmp_path / name).exists()


# -- rows written into the file by hand


def test_bytes_that_are_no_text_hide_nothing_else(file):
    """SQLite stores any bytes in any column; views show them, and all other rows."""
    connection = file.raw()
    for number, value in enumerate(("CAST(x'ff41' AS TEXT)", "x'ff41'", "1.5", "'abc'")):
        connection.execute(
            f"INSERT INTO ProcessControl (resource_id, requesting_id, owner, note, request_uid, requested_at,"
            f" granted_at) VALUES ('bad{number}', {value}, {value}, {value}, 'u{number}', {value}, {value})"
        )
        connection.execute(
            f"INSERT INTO sqlsem_history (resource_id, queue_position, requesting_id, access_type, weight, note,"
            f" requested_at, ended_at, outcome) VALUES ('bad', 1, {value}, 'write', 1, {value}, {value}, {value}, 'x')"
        )
        connection.execute(
            f"INSERT INTO sqlsem_task (queue_name, kind, body, note, put_at, error, result)"
            f" VALUES ('bad', 'json', {value}, {value}, {value}, {value}, {value})"
        )
        connection.execute(
            f"INSERT INTO sqlsem_task_log (task_id, attempt, outcome, error, started_at) VALUES (1, {number}, {value},"
            f" {value}, {value})"
        )
        connection.execute(
            f"INSERT INTO sqlsem_batch (batch_name, window_ms, opened_at, callback_error)"
            f" VALUES ('bad', 1, {value}, {value})"
        )
        connection.execute(
            f"INSERT INTO sqlsem_batch_part (batch_id, part, owner, started_at)"
            f" VALUES (last_insert_rowid(), 'p', {value}, {value})"
        )
    connection.execute("INSERT INTO ProcessControl (resource_id, requesting_id) VALUES ('good', 'me')")
    connection.close()
    with file.coordinator() as coordinator:
        assert {entry.resource for entry in coordinator.admin.entries()} == {"bad0", "bad1", "bad2", "bad3", "good"}
        assert len(coordinator.admin.history("bad")) == 4
        with contextlib.closing(coordinator.engine.connect("look")) as session:
            shown = [*session.entries(None), *session.history("bad", 10), *session.list_tasks("bad", None, 10)]
            shown += [*session.task_attempts(1), *session.list_batches("bad", None, 10)]
        assert len(shown) == 5 + 4 + 4 + 4 + 4
        for row in shown:
            json.dumps(row.as_dict())


@pytest.mark.parametrize(
    "columns",
    [
        "grace_ms = 'abc'",
        "grace_ms = x'00'",
        "lease_until = 'abc', lease_ms = 1000",
        "missing_since = 'abc'",
        "missing_since = x'ff'",
        "heartbeat_at = 'abc'",
        "host = x'ff', pid = 'abc', program = x'ff', login = x'ff', beacon = NULL",
    ],
)
def test_invalid_member_row_blocks_no_client(file, columns):
    plant(file, "9" * 32)
    file.rows(f"UPDATE sqlsem_member SET {columns} WHERE beacon = ?", "9" * 32)
    with file.coordinator() as coordinator:
        coordinator.admin.entries()
        with coordinator.mutex("a", timeout=20):
            pass
        coordinator.admin.reap()


def test_uncontended_pair_is_two_statements(file, monkeypatch):
    """An uncontended acquire and release take a statement each; beside other rows both go straight to a transaction."""
    with (
        contextlib.closing(file.session()) as session,
        contextlib.closing(file.session()) as other,
    ):
        member, other_member = session.register_member("h", 1, "p"), other.register_member("h", 1, "p")
        begun, execute = [], session._execute

        def counted(statement, parameters, fetch):
            if not session.connection.in_transaction:
                begun.append(statement.rpartition("\n")[2] or statement)
            return execute(statement, parameters, fetch)

        def done(call):
            begun.clear()
            call()
            return len(begun), begun[-1].startswith("BEGIN")

        tickets = []

        def come():
            tickets.extend(session.register(member, "r", "o", f"uid.{len(tickets)}", [Request("q")], False))

        def leave():
            assert session.release(tickets[-1], "released")

        come(), leave()  # prepares what the routines need
        monkeypatch.setattr(session, "_execute", counted)
        alone, among_others, in_vain = (1, False), (1, True), (2, True)
        for _ in range(2):
            assert (done(come), done(leave)) == (alone, alone)
        (stays,) = other.register(other_member, "r", "o", "stays", [Request("q")], False)
        assert (done(come), done(leave)) == (in_vain, in_vain)
        for _ in range(2):
            assert (done(come), done(leave)) == (among_others, among_others)
        other.release(stays, "released")
        assert (done(come), done(leave)) == (among_others, among_others)
        assert (done(come), done(leave)) == (alone, alone)
        session.deregister_member(member)
        other.deregister_member(other_member)


@pytest.mark.parametrize("value", ["x", "", "1e3", "3.0", "-1", "³"])
@pytest.mark.parametrize("setting", ["schema_version", "oldest_client"])
def test_a_version_that_is_no_number(file, setting, value):
    file.rows("UPDATE sqlsem_setting SET value = ? WHERE name = ?", value, setting)
    with file.coordinator(retry=0.1) as coordinator:
        with pytest.raises(sqlsem.SchemaError, match=f"{setting} = .* no number"):
            coordinator.admin.entries()
        with pytest.raises(sqlsem.SchemaError, match="no number"):
            coordinator.mutex("a").acquire()
    if setting == "schema_version":
        with pytest.raises(sqlsem.SchemaError, match="no number"):
            file.install()


@posix
def test_threads_that_light_and_look_at_once(tmp_path):
    """Probing never takes a beacon from a live member."""
    (tmp_path / "locks.db").touch()
    beacons = Beacons(tmp_path / "locks.db")
    lit = [beacons.create() for _ in range(4)]
    wrong = []
    done = threading.Event()

    def look():
        while not done.is_set():
            for beacon in lit:
                with beacons.probe(beacon.name) as probe:
                    if probe.held is not True:
                        wrong.append(probe.held)
                    probe.remove()

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        beacons.create().remove()
    done.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert all(beacon.in_place for beacon in lit)
    for beacon in lit:
        beacon.remove()
    assert list(beacons.folder.iterdir()) == []


# -- the write-ahead log


@pytest.mark.parametrize(
    ("version", "loses"),
    [
        *(((3, 7, 0), True), ((3, 40, 1), True), ((3, 44, 5), True), ((3, 44, 6), False), ((3, 45, 0), True)),
        *(((3, 50, 6), True), ((3, 50, 7), False), ((3, 51, 0), True), ((3, 51, 2), True), ((3, 51, 3), False)),
        ((3, 53, 0), False),
    ],
)
def test_versions_that_lose_commits_in_checkpoints(version, loses):
    assert wal.may_miss_a_reset(version) is loses


class Watched:
    """A connection that writes the log back, and tests at each step whether another process could commit."""

    def __init__(self, connection, other):
        self.connection, self.other, self.could = connection, other, []

    def execute(self, text):
        with contextlib.suppress(sqlite3.OperationalError):
            self.other.execute("BEGIN IMMEDIATE")
        self.could.append(self.other.in_transaction)
        self.other.rollback()
        return self.connection.execute(text)

    def close(self):
        self.connection.close()


def test_checkpoint_excludes_commits(file, monkeypatch):
    """A commit while the log is restarted would be lost, with the rows of holders."""
    monkeypatch.setattr(wal, "MUST_BE_ALONE", True)
    with file.coordinator() as coordinator, contextlib.closing(file.raw()) as other:
        other.execute("PRAGMA busy_timeout = 0")
        session = coordinator.client.engine.connect("main")
        session._writer_back = watched = Watched(coordinator.client.engine.open(), other)
        with fork.forks_blocked, session.transaction():
            session.run_text("UPDATE sqlsem_setting SET value = value")
        session.write_back(at_once=True)
        assert watched.could == [False]
        session.write_back(at_once=True)
        assert watched.could == [False], "there is nothing new"
        session.close()


def test_no_connection_writes_the_log_back_at_its_own_time(file, monkeypatch):
    monkeypatch.setattr(wal, "MUST_BE_ALONE", True)
    with file.coordinator() as coordinator:
        for session in (coordinator.client.engine.connect("main"), coordinator.client.engine.connect("wait")):
            session.check_schema()
            assert [row[0] for row in session.rows_of_text("PRAGMA wal_autocheckpoint")] == [0]
            session.close()
        with contextlib.closing(coordinator.client.engine.open()) as connection:  # a connection for the SQL of tasks
            assert connection.execute("PRAGMA wal_autocheckpoint").fetchone()[0] == 0


def test_log_stays_short_under_any_load(file, monkeypatch):
    """The log stays short without holders, and so without heartbeats. (Without write-back it would grow to 15 MB.)"""
    monkeypatch.setattr(wal, "MUST_BE_ALONE", True)
    log = Path(file.url.removeprefix("sqlite:///") + "-wal")
    with file.coordinator() as coordinator:
        queue, longest = coordinator.queue("q"), 0
        for _ in range(12):
            queue.put_many([sqlsem.Sql("SELECT 1")] * 5000)
            longest = max(longest, log.stat().st_size)
    assert longest < 6 * 2**20


def test_a_log_that_cannot_be_written_back_is_no_error(file, monkeypatch):
    """The transaction is committed, and a later checkpoint writes the log back."""
    monkeypatch.setattr(wal, "MUST_BE_ALONE", True)
    monkeypatch.setattr(wal, "MAX_ROWS", 0)
    with file.coordinator() as coordinator, contextlib.closing(file.raw()) as other:
        session = coordinator.client.engine.connect("main")
        session.check_schema()
        monkeypatch.setattr(coordinator.client.engine, "open", raise_unavailable)
        with fork.forks_blocked, session.transaction():
            session.run_text("INSERT INTO sqlsem_resource (resource_id, cap) VALUES ('written', 1)")
        assert other.execute("SELECT cap FROM sqlsem_resource WHERE resource_id = 'written'").fetchone()[0] == 1
        session.close()


def raise_unavailable():
    raise sqlsem.Unavailable("too many files are open")


@pytest.mark.parametrize("method", ["assert_held", "release_on_commit"])
def test_a_check_in_a_transaction_waits_for_no_other_thread(tmp_path, monkeypatch, method):
    """Another thread waits for the file's write lock, which the transaction has. The check must not wait for it."""
    waits, checked, in_time = threading.Event(), threading.Event(), []
    real = SqliteConnection._try_again

    def try_again(self, *arguments):
        if not waits.is_set():
            waits.set()
            in_time.append(checked.wait(PATIENCE / 4))
        return real(self, *arguments)

    path = tmp_path / "locks.db"
    with (
        sqlsem.connect(path, grace=PATIENCE) as coordinator,
        contextlib.closing(sqlite3.connect(path, isolation_level=None)) as program,
    ):
        with coordinator.mutex("held") as grant:
            cursor = program.execute("BEGIN IMMEDIATE")
            monkeypatch.setattr(SqliteConnection, "_try_again", try_again)
            waiter = Attempt(coordinator.mutex("other"))
            assert waits.wait(PATIENCE)
            getattr(grant, method)(cursor)
            checked.set()
            cursor.execute("COMMIT")
        waiter.leave()
    assert in_time == [True]
