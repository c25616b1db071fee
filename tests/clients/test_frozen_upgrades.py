"""Databases that released versions left, upgraded to this version and to one after it: nothing in them is lost.

A frozen version is never made anew. `support.frozen` says what it is, and freezes the next one.
"""

import contextlib
import gzip
import re

import psycopg
import pytest
from support import PATIENCE, Attempt, Database, frozen, next_version, random_name, until

import sqlsem
from sqlsem import sql

#: The hash of each frozen version.
DIGESTS = {"0.1.0": "266580f9eafde0393f679bc79ddbd1a82b5629e6132fdc811fb99565b5230fe8"}
#: The version of the tables in each.
SCHEMA_VERSIONS = {"0.1.0": 1}
pytestmark = pytest.mark.engines("sqlite", "postgresql", "mysql")


@pytest.fixture(params=DIGESTS)
def version(request):
    return request.param


@pytest.fixture
def released(engine_name, version, request, tmp_path):
    """A database as the released version left it."""
    if engine_name == "sqlite":
        database = Database("sqlite", f"sqlite:///{tmp_path / 'released.db'}")
        frozen.load(version, database)
        yield database
        return
    place = random_name()
    server = request.getfixturevalue("postgres_server" if engine_name == "postgresql" else "mariadb_server")
    database = Database(engine_name, server.url(place), {}, server)
    if engine_name == "postgresql":
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {place}")
            frozen.load(version, database)
            yield database
            connection.execute(f"DROP DATABASE {place} WITH (FORCE)")
        return
    server.rows(f"CREATE DATABASE {place}")
    frozen.load(version, database)
    yield database
    server.end_sessions(database=place)
    server.rows(f"DROP DATABASE {place}")


def upgrade_to_next(database):
    process = next_version.start_upgrade(database)
    output, _ = process.communicate(timeout=2 * PATIENCE)
    assert process.returncode == 0, output


UPGRADES = {"present": Database.install, "next": upgrade_to_next}


@pytest.fixture(params=UPGRADES)
def upgrade(request):
    """Upgrade to this version, or to the one of `support.next_version`."""
    return UPGRADES[request.param]


@pytest.fixture
def upgraded(released):
    """The same, upgraded to this version."""
    released.install()
    return released


# -- the frozen files -------------------------------------------------------------------------------------------------


@pytest.mark.engines("sqlite")
def test_frozen_files_are_unchanged(version):
    assert frozen.digest(version) == DIGESTS[version]


@pytest.mark.engines("sqlite")
@pytest.mark.parametrize("file", ["sqlite-rows.sql", "mssql.sql.gz"])
def test_changed_frozen_file_is_noticed(version, tmp_path, monkeypatch, file):
    (tmp_path / version).mkdir()
    for path in (frozen.FOLDER / version).iterdir():
        (tmp_path / version / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(frozen, "FOLDER", tmp_path)
    assert frozen.digest(version) == DIGESTS[version]
    changed = tmp_path / version / file
    data = changed.read_bytes()
    changed.write_bytes(gzip.compress(gzip.decompress(data) + b" ") if file.endswith("gz") else data + b" ")
    assert frozen.digest(version) != DIGESTS[version]


@pytest.mark.engines("sqlite")
@pytest.mark.parametrize("engine", frozen.ENGINES)
def test_schema_scripts_of_releases_are_unchanged(version, engine):
    """A change of the tables goes into the next script: databases have run these."""
    last = SCHEMA_VERSIONS[version]
    present = "\n".join(text for number, text in sql.migrations(engine, 0) if number <= last)
    assert present == frozen.scripts(version, engine)[0], (
        f"the tables changed: write a schema script {last + 1}, or freeze {version} anew if it is not released yet"
    )


PARAMETERS = {
    "postgresql": r"CREATE OR REPLACE (?:FUNCTION|PROCEDURE) sqlsem\.(\w+)\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)",
    "mssql": r"CREATE OR ALTER PROCEDURE sqlsem\.\[?(\w+)\]?(.*?)\bAS\b",
}


def signatures(texts, engine):
    """Return the routines that roles may run: by name the parameters of each, without the values of defaults."""
    text = "\n".join(texts)
    granted = set(re.findall(r"'(\w+)'", texts[-1]))
    result = {}
    for name, parameters in re.findall(PARAMETERS[engine], text, re.DOTALL):
        if name in granted:
            plain = re.sub(r"--[^\n]*", "", parameters)
            plain = re.sub(r"\s*(?:\bDEFAULT\b|=)\s*(?:'[^']*'|[^,\s]+)", "", plain)
            items = [" ".join(item.split()) for item in re.split(r",(?![^()]*\))", plain) if item.strip()]
            result.setdefault(name, []).append(tuple(items))
    return result


@pytest.mark.engines("sqlite")
@pytest.mark.parametrize("engine", PARAMETERS)
def test_routines_of_releases_keep_their_parameters(version, engine):
    """A new parameter comes last."""
    before = signatures(frozen.scripts(version, engine), engine)
    now = signatures(frozen.present_scripts(engine), engine)
    assert {"acquire", "try", "release", "renew", "put", "take", "once_due", "batch_part_start"} <= set(before)
    for name, several in before.items():
        for parameters in several:
            assert any(new[: len(parameters)] == parameters for new in now.get(name, ())), f"{name}{parameters}"


# -- the upgrade ------------------------------------------------------------------------------------------------------


def test_upgrade_keeps_every_row(released, upgrade, version):
    before = frozen.contents(released)
    filled = {table.removeprefix("sqlsem.").removeprefix("sqlsem_").lower() for table, rows in before.items() if rows}
    assert {
        "processcontrol",
        "history",
        "task",
        "task_log",
        "schedule",
        "batch",
        "batch_part",
        "once_run",
        "resource",
    } <= filled
    upgrade(released)
    assert frozen.missing_rows(before, frozen.contents(released)) == []
    settings = dict(released.rows(f"SELECT name, value FROM {released.beside('setting')}"))
    assert int(settings["schema_version"]) >= SCHEMA_VERSIONS[version]


@pytest.mark.parametrize("loss", ["DELETE FROM {schedule}", "UPDATE {task} SET max_attempts = max_attempts + 1"])
def test_upgrade_that_loses_rows_is_noticed(released, monkeypatch, loss):
    """The test above can fail."""
    before = frozen.contents(released)
    table = re.search(r"\{(\w+)\}", loss)[1]
    next_version.bring(monkeypatch, ending=f"\n{loss.replace(f'{{{table}}}', released.beside(table))};\n")
    released.install()
    missing = frozen.missing_rows(before, frozen.contents(released))
    assert {name for name, _ in missing} == {released.beside(table)}


def test_bare_holder_and_waiter_go_on_after_upgrade(upgraded, name):
    with upgraded.coordinator() as coordinator:
        held = [(entry.position, entry.requesting_id) for entry in coordinator.admin.entries("frozen.bare")]
        assert [who for _, who in held] == ["HOST:1", "HOST:2"]
        late = Attempt(coordinator.mutex("frozen.bare"))
        for _, who in held:
            assert late.waits()
            upgraded.rows("DELETE FROM {table} WHERE resource_id = 'frozen.bare' AND requesting_id = ?", who)
        late.granted()
        late.leave()


def test_schedules_go_on_after_upgrade(upgraded):
    with upgraded.coordinator() as coordinator:
        schedules = {schedule.name: schedule for schedule in coordinator.admin.schedules()}
        assert set(schedules) == {"frozen.nightly", "frozen.paused"}
        assert schedules["frozen.nightly"].time_zone == "Europe/Berlin"
        past = upgraded.later("next_due", -7 * 86400)
        upgraded.rows(f"UPDATE {upgraded.beside('schedule')} SET next_due = {past}")
        queue, claimed = coordinator.queue("frozen.timed"), []
        until(lambda: claimed.append(queue.try_claim()) or claimed[-1] is not None)
        with claimed[-1] as task:
            assert task.body == "SELECT 1"
        assert [task.status for task in coordinator.admin.tasks("frozen.timed")] == ["finished"]


def test_tasks_go_on_after_upgrade(upgraded):
    with upgraded.coordinator() as coordinator:
        admin = coordinator.admin
        assert sorted(task.status for task in admin.tasks("frozen.queue")) == [
            *("cancelled", "failed", "finished", "pending", "pending", "pending")
        ]
        queue = coordinator.queue("frozen.queue")
        with queue.try_claim() as task:
            assert task.body == {"number": 3, "text": "it's \\ “quoted”"}
        # The lock of the next one is held by the bare participant.
        assert queue.try_claim() is None
        for who in ("HOST:1", "HOST:2"):
            upgraded.rows("DELETE FROM {table} WHERE resource_id = 'frozen.bare' AND requesting_id = ?", who)
        for number in (4, 5):
            claimed = []
            until(lambda claimed=claimed: claimed.append(queue.try_claim()) or claimed[-1] is not None)
            with claimed[-1] as task:
                assert task.body == {"number": number}
        assert queue.put({"number": 7}) > 6


def test_settings_of_operators_hold_after_upgrade(upgraded):
    with upgraded.coordinator() as coordinator:
        admin = coordinator.admin
        assert not coordinator.mutex("frozen.paused").acquire(timeout=0)
        assert admin.once_runs("frozen.once")
        assert [entry.name for entry in admin.rates("frozen.rate")] == ["frozen.rate"]
        with coordinator.mutex("frozen.finished") as grant:
            assert grant.position > max(past.position for past in admin.history(maximum=100))


@pytest.mark.engines("postgresql")
def test_session_of_released_routines_holds_its_lock(released, upgrade, name, threads):
    """A session that called routines of the released version holds and waits across the upgrade."""
    with released.raw() as session, contextlib.closing(released.raw()) as late:
        code, position, _ = session.execute("CALL sqlsem.acquire(%s)", (name,)).fetchone()
        assert code == 0
        threads.start(late.execute, "CALL sqlsem.acquire(%s)", (name,))
        until(lambda: released.waiting_for("advisory"))
        upgrade(released)
        assert session.execute("SELECT sqlsem.renew(%s, %s)", (name, position)).fetchone() == (0,)
        assert [owner for _, resource, owner in released.queue(name) if resource == name] != []
        assert len(released.queue(name)) == 2
        assert session.execute("SELECT sqlsem.release(%s, %s)", (name, position)).fetchone() == (0,)
        threads.join()
        assert late.execute("SELECT sqlsem.release(%s)", (name,)).fetchone() == (0,)


def test_client_refuses_tables_older_than_it_needs(released, monkeypatch, name):
    next_version.bring(monkeypatch)
    with released.coordinator() as coordinator, pytest.raises(sqlsem.SchemaError, match="sqlsem init"):
        coordinator.mutex(name).acquire(timeout=5)
