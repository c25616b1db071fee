"""SQLite's files are deleted, replaced or unlocked under a process that holds locks in them.

Every way that leaves two processes with different open files, times every kind of grant that a process can have. The
files and their locks are real, and the other client is another process.
"""

import contextlib
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import AMPLE, PATIENCE, until

import sqlsem
from sqlsem.engines.sqlite import files

pytestmark = [
    pytest.mark.sampled(4),
    pytest.mark.engines("sqlite"),
    pytest.mark.skipif(os.name != "posix", reason="a file that is open cannot be replaced on Windows"),
]

LONG = "366d"
#: A process that opens the database and closes it again, without sqlsem.
OTHER_PROGRAM = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("SELECT 1 FROM sqlite_master").fetchall()
connection.close()
"""

# -- the ways ------------------------------------------------------------------------------------------------------
# Each function gets the path of the database, after a lock was acquired in it.


def deleted(path):
    path.unlink()


def renamed(path):
    path.rename(f"{path}.old")


def replaced_by_a_copy(path):
    shutil.copy(path, f"{path}.new")
    Path(f"{path}.new").rename(path)


def replaced_by_a_folder(path):
    path.unlink()
    path.mkdir()


def truncated(path):
    os.truncate(path, 0)


def log_removed(path):
    Path(f"{path}-wal").unlink()


def index_removed(path):
    Path(f"{path}-shm").unlink()


def log_and_index_removed(path):
    log_removed(path)
    index_removed(path)


def all_three_removed(path):
    log_and_index_removed(path)
    path.unlink()


def everything_removed(path):
    all_three_removed(path)
    shutil.rmtree(f"{path}-members")


def folder_renamed(path):
    path.parent.rename(f"{path.parent}.old")


def folder_replaced_by_a_copy(path):
    shutil.copytree(path.parent, f"{path.parent}.new")
    folder_renamed(path)
    Path(f"{path.parent}.new").rename(path.parent)


def link_led_elsewhere(path):
    """The path is a link, see `place`."""
    shutil.copytree(path.resolve().parent, path.parent / "elsewhere")
    path.unlink()
    path.symlink_to(path.parent / "elsewhere" / path.name)


DIVIDING = [
    deleted,
    renamed,
    replaced_by_a_copy,
    replaced_by_a_folder,
    truncated,
    log_removed,
    index_removed,
    log_and_index_removed,
    all_three_removed,
    everything_removed,
    folder_renamed,
    folder_replaced_by_a_copy,
    link_led_elsewhere,
]
#: After these the path leads to a database, or to nothing.
USABLE = [way for way in DIVIDING if way is not replaced_by_a_folder]
#: After these the database is made anew, beside the beacons of those that have the old one.
MADE_ANEW = [deleted, renamed, truncated, all_three_removed]


def read_whole(path):
    path.read_bytes()


def file_copied(path):
    shutil.copy(path, f"{path}.backup")


def folder_copied(path):
    shutil.copytree(path.parent, f"{path.parent}.backup")


def own_connection_closed(path):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchall()


def own_coordinator_closed(path):
    with sqlsem.connect(f"sqlite:///{path}") as coordinator, coordinator.mutex("own"):
        pass


def second_name_made(path):
    os.link(path, f"{path}.second")


#: Operations of a process on its own open files. (A close drops its POSIX locks.)
UNLOCKING = [read_whole, file_copied, folder_copied, own_connection_closed, own_coordinator_closed]


def place(tmp_path, way):
    """Return the path of the database."""
    folder = tmp_path / "own" / "db"
    folder.mkdir(parents=True)
    if way is not link_led_elsewhere:
        return folder / "locks.db"
    link = tmp_path / "own" / "locks.db"
    (folder / "locks.db").touch()
    link.symlink_to(folder / "locks.db")
    return link


def by_name(name):
    return globals()[name]


# -- the states ----------------------------------------------------------------------------------------------------
# Each acquires something, and returns two functions: one uses it (and raises after a loss), the other tells if the
# loss is known.


def holding(coordinator):
    grant = acquired(coordinator.mutex("holding"))
    return grant.check, lambda: grant.lost


def releasing(coordinator):
    grant = acquired(coordinator.mutex("releasing"))
    return grant.release, lambda: grant.lost


def reading(coordinator):
    grant = acquired(coordinator.read("reading"))
    return grant.check, lambda: grant.lost


def upgrading(coordinator):
    grant = acquired(coordinator.read("upgrading"))
    return grant.upgrade, lambda: grant.lost


def handing_over(coordinator):
    grant = acquired(coordinator.mutex("handing over"))
    return grant.hand_over, None  # no client can adopt it


def asserting(coordinator, opened_before=False):
    grant = acquired(coordinator.mutex("asserting"))

    def connect():
        connection = sqlite3.connect(coordinator.engine.path, isolation_level=None)
        connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
        return connection

    before = connect() if opened_before else None

    def use():
        with contextlib.closing(before or connect()) as connection:
            connection.execute("BEGIN IMMEDIATE")
            grant.assert_held(connection.cursor())

    # (Where the database cannot even be opened, no statement was sent.)
    return use, (lambda: grant.lost) if opened_before else None


def asserting_as_before(coordinator):
    return asserting(coordinator, opened_before=True)


def leading(coordinator):
    # (The block does not end, so it must not handle signals.)
    term = coordinator.leader("leading", handle_sigterm=False).__enter__()
    return term.check, lambda: term.lost


def running_once(coordinator):
    run = coordinator.once("running once", LONG).begin()
    return run.finish, lambda: run.grant.lost


def task_claimed(coordinator):
    queue = coordinator.queue("tasks")
    queue.put(sqlsem.Sql("SELECT 1"))
    task = queue.try_claim()
    return task.finish, lambda: task.lost


def part_started(coordinator):
    part = coordinator.batch("batch", ["a", "b"], window="1d").part("a").start()
    return part.finish, None  # it learns at its end what has become of it


STATES = [
    holding,
    releasing,
    reading,
    upgrading,
    handing_over,
    asserting,
    leading,
    running_once,
    task_claimed,
    part_started,
]


def acquired(lock):
    assert lock.acquire()
    return lock.grant


def uses(coordinator):
    return {state.__name__: state(coordinator) for state in STATES}


def had_of(coordinator):
    """Return what another process can acquire of all that."""
    part = coordinator.batch("batch", ["a", "b"], window="1d").part("a")
    tries = {
        "holding": lambda: coordinator.mutex("holding").acquire(timeout=0),
        "releasing": lambda: coordinator.mutex("releasing").acquire(timeout=0),
        "reading": lambda: coordinator.write("reading").acquire(timeout=0),
        "upgrading": lambda: coordinator.write("upgrading").acquire(timeout=0),
        "handing_over": lambda: coordinator.mutex("handing over").acquire(timeout=0),
        "asserting": lambda: coordinator.mutex("asserting").acquire(timeout=0),
        "leading": lambda: coordinator.mutex("leading").acquire(timeout=0),
        "running_once": lambda: coordinator.once("running once", LONG).begin(blocking=False) is not None,
        "task_claimed": lambda: coordinator.queue("tasks").try_claim() is not None,
        "part_started": lambda: part.start() is not None,
    }
    outcomes = {}
    for state, attempt in tries.items():
        try:
            outcomes[state] = attempt()
        except (sqlsem.SqlsemError, ValueError) as exc:
            outcomes[state] = type(exc).__name__
    return outcomes


# -- the processes -------------------------------------------------------------------------------------------------


def has_all(channel, url, options, place, keeps, way, grace):
    """Acquire one of each kind, replace the files itself, and report the losses that it learns without a call."""
    logging.disable()
    if not keeps:
        files._SET_LOCK = None
    path = Path(place)
    coordinator = sqlsem.connect(f"sqlite:///{path}", grace=grace, retry=AMPLE["retry"])
    known = uses(coordinator)
    lost_at, called = [], []
    lock = coordinator.mutex("told", on_lost=called.append)
    lock.acquire()
    # Called as the grant is marked as lost; `on_lost` follows, in another thread.
    lock.grant.state.loss_callbacks.append(lambda: lost_at.append(time.monotonic()))
    channel.tell("has all")
    channel.ask()
    by_name(way)(path)
    channel.tell("done")
    while (command := channel.ask())["do"] != "end":
        if command["do"] == "await loss":
            until(lambda: called and all(is_lost() for _, is_lost in known.values() if is_lost))
            channel.tell("lost", told=lost_at[0])
        if command["do"] == "acquire more":
            channel.tell("more", had=had(coordinator))
        if command["do"] == "use":
            channel.tell("used", lost=[name for name, (use, is_lost) in known.items() if fails(use)])
    os._exit(0)


def fails(use):
    try:
        use()
    except (sqlsem.SqlsemError, sqlite3.Error):
        return True
    return False


def tries_all(channel, url, options, place, patience=0):
    """The other process."""
    logging.disable()
    with sqlsem.connect(f"sqlite:///{place}", **AMPLE) as coordinator:
        granted = coordinator.mutex("told").acquire(timeout=patience)
        channel.tell("tried", told=granted, when=time.monotonic(), had=had_of(coordinator))
        channel.ask()
        channel.tell("more", had=had(coordinator))


def had(coordinator):
    """Return whether one more lock was acquired, or the error."""
    try:
        return coordinator.mutex("more").acquire(timeout=1.0)
    except sqlsem.Unavailable as exc:
        return str(exc)


# -- divided -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", DIVIDING, ids=lambda way: way.__name__)
def test_a_ping_tells_the_loss_of_everything(spawn, tmp_path, way):
    path = place(tmp_path, way)
    # (Let another process come before the next heartbeat, where it can.)
    grace = 6.0 if way in MADE_ANEW else 1.0
    holder = spawn(has_all, place=str(path), keeps=True, way=way.__name__, grace=grace)
    holder.expect("has all")
    holder.call("done", do="go")
    patience = PATIENCE if way in MADE_ANEW else 0
    other = spawn(tries_all, place=str(path), patience=patience) if way in USABLE else None
    lost = holder.call("lost", do="await loss")
    assert set(holder.call("used", do="use")["lost"]) == {state.__name__ for state in STATES}
    if other is not None:
        tried = other.expect("tried")
        if way in MADE_ANEW:
            assert tried["told"]
            assert lost["told"] <= tried["when"], "another process got the lock before its holder was told"


@pytest.mark.parametrize("way", DIVIDING, ids=lambda way: way.__name__)
def test_a_holder_is_granted_nothing_more(spawn, tmp_path, way):
    path = place(tmp_path, way)
    holder = spawn(has_all, place=str(path), keeps=True, way=way.__name__, grace=AMPLE["grace"])
    holder.expect("has all")
    holder.call("done", do="go")
    for _ in range(2):
        assert "was replaced, truncated or moved while it was in use" in str(
            holder.call("more", do="acquire more")["had"]
        )
    holder.call("lost", do="await loss")


def idle(channel, url, options, place, way):
    """A process that held a lock, and holds none when the files are replaced."""
    logging.disable()
    path = Path(place)
    coordinator = sqlsem.connect(f"sqlite:///{path}", grace=AMPLE["grace"])
    with coordinator.mutex("before"):
        pass
    by_name(way)(path)
    channel.tell("more", had=had(coordinator), same=same_file(coordinator, path))
    channel.ask()
    os._exit(0)


def same_file(coordinator, path):
    """True if the row is in the file that other processes find."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT count(*) FROM ProcessControl WHERE resource_id = 'more'").fetchone()[0] == 1


@pytest.mark.parametrize("way", USABLE, ids=lambda way: way.__name__)
def test_a_process_with_nothing_goes_on_in_the_new_file(spawn, tmp_path, way):
    path = place(tmp_path, way)
    answer = spawn(idle, place=str(path), way=way.__name__).expect("more")
    assert (answer["had"], answer["same"]) == (True, True)
    other = spawn(tries_all, place=str(path))
    other.expect("tried")
    assert other.call("more", do="acquire more")["had"] is False


def uses_each_first(channel, url, options, folder, way):
    """Acquire one kind at a time, in files that are then replaced, without a heartbeat in between."""
    logging.disable()
    believed = []
    for state in [*STATES, asserting_as_before]:
        own = Path(folder) / state.__name__
        own.mkdir()
        path = place(own, by_name(way))
        coordinator = sqlsem.connect(f"sqlite:///{path}", grace=AMPLE["grace"], retry=0.5)
        use, is_lost = state(coordinator)
        by_name(way)(path)
        if not (fails(use) and (is_lost is None or is_lost())):
            believed.append(state.__name__)
    channel.tell("used", believed=believed)
    os._exit(0)


@pytest.mark.parametrize("way", DIVIDING, ids=lambda way: way.__name__)
def test_the_first_use_of_anything_tells_its_loss(spawn, tmp_path, way):
    child = spawn(uses_each_first, folder=str(tmp_path), way=way.__name__)
    assert child.expect("used")["believed"] == []


@pytest.mark.parametrize("way", [way for way in DIVIDING if way is not truncated], ids=lambda way: way.__name__)
def test_a_change_of_a_settled_folder_is_seen(tmp_path, way):
    """A folder without changes for long is compared by its own times alone."""
    path = place(tmp_path, way)
    with contextlib.closing(sqlsem.connect(f"sqlite:///{path}", **AMPLE)) as coordinator:
        grant = acquired(coordinator.mutex("a"))
        known = coordinator.client.member.main.session.files
        if way is not link_led_elsewhere:
            until(lambda: known.compare() or known._folder_when_compared is not None)
        known.require_in_place()
        way(path)
        with pytest.raises(sqlsem.LockLost):
            grant.release()


def test_comparison_of_files_keeps_the_times_of_a_settled_folder(tmp_path):
    """A busy process compares file by file each time that it writes the log back, and else by the folder's times."""
    with sqlsem.connect(f"sqlite:///{tmp_path}/a.db", **AMPLE) as coordinator:
        with coordinator.mutex("a"):
            pass
        session = coordinator.client.member.main.session
        until(lambda: session.files.compare() or session.files._folder_when_compared is not None)
        settled = session.files._folder_when_compared
        session.require_in_place(file_by_file=True)
        assert session.files._folder_when_compared == settled
        (tmp_path / "other").touch()
        session.require_in_place(file_by_file=True)
        assert session.files._folder_when_compared is None


def test_a_busy_folder_is_looked_at_file_by_file(tmp_path, monkeypatch):
    compared = []
    compare = files.OpenFiles.compare
    monkeypatch.setattr(files.OpenFiles, "compare", lambda self: compared.append(self) or compare(self))
    with sqlsem.connect(f"sqlite:///{tmp_path}/a.db", **AMPLE) as coordinator:
        with coordinator.mutex("a"):
            pass
        compared.clear()
        (tmp_path / "other").touch()
        with coordinator.mutex("a"):
            pass
        assert len(compared) >= 2


def waits(channel, url, options, place):
    logging.disable()
    coordinator = sqlsem.connect(f"sqlite:///{place}", grace=AMPLE["grace"], retry=5.0)
    channel.tell("waits")
    try:
        channel.tell("granted" if coordinator.mutex("holding").acquire(timeout=60) else "timeout")
    except sqlsem.SqlsemError as exc:
        channel.tell("told", is_lost=isinstance(exc, (sqlsem.LockLost, sqlsem.Unavailable)), error=repr(exc))
    channel.ask()
    os._exit(0)


@pytest.mark.parametrize("way", USABLE, ids=lambda way: way.__name__)
def test_a_waiter_is_told_and_never_granted_beside_another(spawn, tmp_path, way):
    path = place(tmp_path, way)
    holder = spawn(has_all, place=str(path), keeps=True, way=way.__name__, grace=1.0)
    holder.expect("has all")
    waiter = spawn(waits, place=str(path))
    waiter.expect("waits")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        ask = "SELECT count(*) FROM ProcessControl WHERE resource_id = 'holding'"
        until(lambda: connection.execute(ask).fetchone()[0] == 2)
    holder.call("done", do="go")
    lost = holder.call("lost", do="await loss")
    answer = waiter.next()
    if answer["event"] == "granted":  # its request was just being written, and was written again in the new files
        assert lost["told"] <= answer["at"] or way not in MADE_ANEW
        tried = spawn(tries_all, place=str(path)).expect("tried")
        assert tried["had"]["holding"] is False
    else:
        assert answer["is_lost"], answer


# -- unlocked ------------------------------------------------------------------------------------------------------


def names_of_descriptors():
    """Return the open files of this process, once for each descriptor."""
    files = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            files.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return files


linux = pytest.mark.skipif(files._SET_LOCK is None, reason="this system has no locks of open file descriptions")


@linux
def test_no_descriptor_is_left_after_the_last_connection(tmp_path):
    path = tmp_path / "a.db"
    for _ in range(3):
        with (
            sqlsem.connect(f"sqlite:///{path}", **AMPLE) as coordinator,
            sqlsem.connect(f"sqlite:///{path}", **AMPLE) as second,
        ):
            with coordinator.mutex("a"), second.mutex("b"):
                assert f"{path}-shm" in names_of_descriptors()
    assert [name for name in names_of_descriptors() if str(tmp_path) in name] == []
    assert not Path(f"{path}-wal").exists(), "the last connection did not clean up"


@linux
def test_descriptors_stay_open_under_program_connections(tmp_path):
    """To close one would drop the locks of the program's own connection, and another program would remove the log."""
    path = tmp_path / "a.db"
    with sqlsem.connect(f"sqlite:///{path}", **AMPLE) as coordinator, coordinator.mutex("a"):
        own = sqlite3.connect(path)
        own.execute("SELECT count(*) FROM sqlite_master").fetchall()
    others_come_and_go(path)
    assert Path(f"{path}-wal").exists()
    own.close()
    with sqlsem.connect(f"sqlite:///{path}", **AMPLE) as coordinator, coordinator.mutex("a"):
        pass
    assert [name for name in names_of_descriptors() if str(tmp_path) in name] == []


def test_a_database_with_two_names_is_refused(spawn, tmp_path):
    """Each name has its own log. Earlier holders stay exclusive."""
    path = place(tmp_path, second_name_made)
    holder = spawn(has_all, place=str(path), keeps=True, way=second_name_made.__name__, grace=1.0)
    holder.expect("has all")
    holder.call("done", do="go")
    for name in (path, Path(f"{path}.second")):
        with (
            pytest.raises(sqlsem.ConfigurationError, match=r"has 2 names \(hard links\)"),
            sqlsem.connect(f"sqlite:///{name}") as coordinator,
        ):
            coordinator.mutex("more").acquire(timeout=0)
    assert holder.call("more", do="acquire more")["had"] is True
    assert holder.call("used", do="use")["lost"] == []


def others_come_and_go(path):
    for _ in range(2):
        subprocess.run([sys.executable, "-c", OTHER_PROGRAM, str(path)], check=True)


@linux
@pytest.mark.parametrize("way", UNLOCKING, ids=lambda way: way.__name__)
def test_the_files_stay_where_their_locks_were_dropped(spawn, tmp_path, way):
    path = place(tmp_path, way)
    holder = spawn(has_all, place=str(path), keeps=True, way=way.__name__, grace=1.0)
    holder.expect("has all")
    before = {name: os.stat(f"{path}{name}").st_ino for name in ("", "-wal", "-shm")}
    holder.call("done", do="go")
    others_come_and_go(path)
    assert holder.call("more", do="acquire more")["had"] is True
    other = spawn(tries_all, place=str(path))
    tried = other.expect("tried")
    assert not tried["told"]
    assert {state for state, outcome in tried["had"].items() if outcome is True} == set()
    assert other.call("more", do="acquire more")["had"] is False
    assert {name: os.stat(f"{path}{name}").st_ino for name in before} == before
    assert holder.call("used", do="use")["lost"] == []


@pytest.mark.parametrize("way", UNLOCKING, ids=lambda way: way.__name__)
def test_where_they_cannot_be_kept_the_loss_is_told(spawn, tmp_path, way):
    path = place(tmp_path, way)
    holder = spawn(has_all, place=str(path), keeps=False, way=way.__name__, grace=1.0)
    holder.expect("has all")
    before = [os.stat(f"{path}{name}").st_ino for name in ("", "-wal", "-shm")]
    holder.call("done", do="go")
    holder.pause()  # the other program truncates the -shm for a moment; a read there would end the holder (SIGBUS)
    others_come_and_go(path)
    holder.resume()
    try:
        same = [os.stat(f"{path}{name}").st_ino for name in ("", "-wal", "-shm")] == before
    except FileNotFoundError:
        same = False
    if not same:
        holder.call("lost", do="await loss")
    assert (holder.call("more", do="acquire more")["had"] is True) == same
    other = spawn(tries_all, place=str(path))
    other.expect("tried")
    assert (other.call("more", do="acquire more")["had"] is True) != same
