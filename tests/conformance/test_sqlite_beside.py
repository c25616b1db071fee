"""Hostile files beside a database: at every name that SQLite or sqlsem opens, follows or deletes there, another kind
of file that another user of the host could have planted.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import PATIENCE, until

import sqlsem
from sqlsem.engines.sqlite import files

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs the files of POSIX")
root_only = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")

#: All names beside a database, by their suffix. `test_only_the_databases_files_are_opened` fails for a further name.
NAMES = ["", "-journal", "-wal", "-shm", "-members"]
#: The number of a user that does not exist.
SOMEBODY = 54321


def link(place, victim):
    place.symlink_to(victim)


def link_to_nothing(place, victim):
    place.symlink_to(victim.with_name("nothing"))


def pipe(place, victim):
    os.mkfifo(place)


def folder(place, victim):
    place.mkdir()


def local_socket(place, victim):
    before = os.getcwd()
    os.chdir(place.parent)  # a socket's name must be short
    try:
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as bound:
            bound.bind(place.name)
    finally:
        os.chdir(before)


def second_name(place, victim):
    os.link(victim, place)


KINDS = [link, link_to_nothing, pipe, folder, local_socket, second_name]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "db" / "locks.db"
    path.parent.mkdir()
    with sqlsem.connect(f"sqlite:///{path}") as coordinator, coordinator.mutex("a"):
        pass
    return path


@pytest.fixture
def victim(tmp_path):
    victim = tmp_path / "outside" / "thesis"
    victim.parent.mkdir()
    victim.write_text("years of work")
    victim.chmod(0o600)
    return victim


def run_cli(*words, timeout=PATIENCE):
    return subprocess.run(
        [sys.executable, "-m", "sqlsem", *map(str, words)], capture_output=True, text=True, timeout=timeout, check=False
    )


def unharmed(victim):
    return victim.read_text() == "years of work" and os.listdir(victim.parent) == [victim.name]


def test_side_file_tables_match_the_engine():
    assert set(files.BESIDE) | {"", "-members"} == set(NAMES)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_side_file_of_another_kind_is_refused(path, victim, name, kind):
    place = Path(f"{path}{name}")
    if place.is_dir():
        place.rmdir()
    place.unlink(missing_ok=True)
    kind(place, victim)
    listing = run_cli("--url", f"sqlite:///{path}", "ls")
    used = run_cli(
        "--url", f"sqlite:///{path}", "--retry", "1s", "run", "--mutex", "m", "--timeout", "1s", "--", "true"
    )
    assert "Traceback" not in listing.stderr + used.stderr
    assert victim.read_text() == "years of work"
    assert name == "" or unharmed(victim)  # (a link at the path itself is followed, and its target created)
    if name != "-members":
        allowed = name == "" and kind in (link, link_to_nothing)  # the user decides where the path itself leads
        refused = f"{path}{name}" in listing.stderr + used.stderr and used.returncode in (69, 78)
        assert refused or allowed, (used.returncode, listing.stderr + used.stderr)
    elif kind is not folder:
        assert used.returncode == 69
        assert "Cannot lock a file in" in used.stderr


def hot_journal(path, names):
    """Return a journal without pages that names a super-journal, which SQLite deletes after its rollback."""
    pages = path.stat().st_size // 1024
    header = bytes.fromhex("d9d505f920a163d7") + struct.pack(">IIIII", 0, 1, pages, 512, 1024)
    name = os.fsencode(names)
    return (
        header.ljust(512, b"\0")
        + struct.pack(">I", 0x40000000 // 1024 + 1)
        + name
        + struct.pack(">II", len(name), sum(name))
        + bytes.fromhex("d9d505f920a163d7")
    )


def test_hot_journal_deletes_the_file_it_names(path, victim):
    """Plain SQLite deletes the file: without that the tests below would prove nothing."""
    Path(f"{path}-journal").write_bytes(hot_journal(path, victim))
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
    assert not victim.exists()


@root_only
def test_journal_of_another_user_is_refused(path, victim):
    journal = Path(f"{path}-journal")
    journal.write_bytes(hot_journal(path, victim))
    os.chown(journal, SOMEBODY, SOMEBODY)
    for words in (["ls"], ["doctor"], ["init"], ["run", "--mutex", "m", "--", "true"]):
        result = run_cli("--url", f"sqlite:///{path}", *words)
        assert result.returncode != 0
        output = "".join((result.stdout + result.stderr).split())  # a table may break the text anywhere
        assert "belongsto54321,whodoesnotownthedatabase" in output
        assert unharmed(victim)


@pytest.mark.skipif(files._SET_LOCK is None, reason="this system has no locks of open file descriptions")
def test_a_journal_that_comes_after_the_look_is_left_alone(path, victim, monkeypatch):
    """A journal that appears between sqlsem's check and SQLite's own check deletes no file."""
    first = files.no_journal

    @contextlib.contextmanager
    def planted(*arguments):
        with first(*arguments):
            Path(f"{path}-journal").write_bytes(hot_journal(path, victim))
            yield
        Path(f"{path}-journal").unlink(missing_ok=True)

    monkeypatch.setattr(files, "no_journal", planted)
    with sqlsem.connect(f"sqlite:///{path}") as coordinator, coordinator.mutex("b"):
        assert unharmed(victim)


def test_database_of_another_user_is_refused(path):
    """The database of another user is refused, as the text of its tasks is code."""
    path.chmod(0o666)
    for words in (["work", "q", "--idle-exit", "0.1s"], ["batch", "resume"]):
        url = ["--url", f"sqlite:///{path}"]
        refused = run_cli(*url, *words)
        assert refused.returncode == 78
        assert f"everybody can write to {path}" in refused.stderr
        assert "--shared" in refused.stderr
        assert run_cli(*url, *words, "--shared").returncode == 0


@root_only
def test_root_does_not_work_for_the_database_of_a_user(path):
    os.chown(path, SOMEBODY, SOMEBODY)
    refused = run_cli("--url", f"sqlite:///{path}", "work", "q", "--idle-exit", "0.1s")
    assert refused.returncode == 78
    assert f"{path} belongs to user 54321" in refused.stderr


def test_signal_ends_a_check_that_hangs(path):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            "ALTER TABLE sqlsem_member RENAME TO old;"
            "DROP TABLE ProcessControl;"
            "CREATE VIEW ProcessControl AS WITH RECURSIVE n(a) AS (SELECT 1 UNION ALL SELECT a + 1 FROM n)"
            " SELECT a AS queue_position, 'x' AS resource_id, 'x' AS requesting_id, 'write' AS access_type,"
            " 1 AS concurrency_limit, 1 AS weight, NULL AS member_id, 'x' AS owner, 'x' AS request_uid,"
            " 0.0 AS requested_at, NULL AS granted_at, NULL AS note, NULL AS revoked_at, NULL AS revoked_by FROM n;"
            "ALTER TABLE old RENAME TO sqlsem_member;"
        )
    program = (
        "import sys\n"
        "from sqlsem.engines import of_url\n"
        "from sqlsem.engines.base import Options\n"
        "session = of_url(sys.argv[1])(sys.argv[1], Options()).connect('look')\n"
        "print('looks', flush=True)\n"
        "session.rows_of_text('SELECT count(*) FROM ProcessControl')\n"
    )
    words = [sys.executable, "-c", program, f"sqlite:///{path}"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "looks\n"
        spent = time.process_time()
        until(lambda: burns(process.pid), "the endless look")
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=PATIENCE)[1]
    assert errors.rstrip().endswith("KeyboardInterrupt"), errors
    assert time.process_time() >= spent


def burns(pid):
    """True if the process has used the processor for a while."""
    if sys.platform != "linux":
        time.sleep(1.0)
        return True
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) > 1.5 * os.sysconf("SC_CLK_TCK")


def test_a_broken_name_is_an_error_of_ours(path):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript("PRAGMA writable_schema = ON")
        connection.execute(
            "UPDATE sqlite_master SET sql = CAST(replace(CAST(sql AS BLOB), 'resource_id', X'72FF') AS TEXT)"
            " WHERE name = 'ProcessControl'"
        )
        connection.commit()
    result = run_cli("--url", f"sqlite:///{path}", "ls")
    assert result.returncode in (69, 78)
    assert "Traceback" not in result.stderr


class Opened:
    """Collects the names that any process opens, creates, removes or renames in a folder, by inotify."""

    ALL = 0x20 | 0x100 | 0x200 | 0x40 | 0x80  # OPEN, CREATE, DELETE, MOVED_FROM, MOVED_TO

    def __init__(self, folder):
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._fd >= 0
        assert self._libc.inotify_add_watch(self._fd, os.fsencode(folder), self.ALL) >= 0

    def names(self):
        names_seen = set()
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._fd, 1 << 16):
                at = 0
                while at < len(data):
                    (length,) = struct.unpack_from("I", data, at + 12)
                    names_seen.add(data[at + 16 : at + 16 + length].rstrip(b"\0").decode())
                    at += 16 + length
        return names_seen

    def close(self):
        os.close(self._fd)


@pytest.mark.skipif(sys.platform != "linux", reason="needs inotify")
def test_only_the_databases_files_are_opened(tmp_path):
    """Only the names of the tables above are opened: add a new kind of file there first."""
    path = tmp_path / "locks.db"
    opened = Opened(tmp_path)
    with contextlib.closing(opened):
        url = f"sqlite:///{path}"
        run_cli("--url", url, "init")
        with sqlsem.connect(url) as coordinator, sqlsem.connect(url) as other:
            with coordinator.mutex("a"), other.limit("b", 2), other.read("c"):
                assert not other.mutex("a").acquire(timeout=0.05)
            queue = coordinator.queue("q")
            queue.put(sqlsem.Sql("SELECT 1"))
            queue.try_claim().finish()
            with coordinator.batch("r", ["p"], window="1h").part("p"):
                pass
            with coordinator.leader("l"), coordinator.once("o", "1h"):
                pass
        for words in (["doctor"], ["ls"], ["reap"], ["history"], ["work", "q", "--idle-exit", "0.1s"]):
            run_cli("--url", url, *words)
        names = opened.names()
    assert names - {""} <= {f"locks.db{name}" for name in NAMES}
    assert {"locks.db", "locks.db-wal", "locks.db-shm", "locks.db-members"} <= names


@root_only
def test_doctor_names_foreign_owner_of_beacons(path):
    os.chown(f"{path}-members", SOMEBODY, SOMEBODY)
    process = run_cli("--url", f"sqlite:///{path}", "doctor", "--json")
    assert process.returncode == 1
    (check,) = [result for result in json.loads(process.stdout)["checks"] if result["name"] == "beacon"]
    assert not check["ok"]
    assert "belongs to 54321, who does not own the database" in check["detail"]


@pytest.mark.parametrize("log_kept", [True, False])
def test_doctor_tells_whether_the_log_is_kept(path, monkeypatch, log_kept):
    if not log_kept:
        monkeypatch.setattr(files, "_SET_LOCK", None)
    elif files._SET_LOCK is None:
        pytest.skip("this system has no locks of open file descriptions")
    session = sqlsem.connect(f"sqlite:///{path}").engine.connect("look")
    with contextlib.closing(session):
        (check,) = [result for result in session.diagnose() if result.name == "journal"]
    assert check.ok
    assert ("no other program can remove the log" in check.detail) == log_kept
