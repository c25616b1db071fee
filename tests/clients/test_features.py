"""Databases with a part of sqlsem: installed features work, each other feature is refused with the command that adds
it, and adding it disturbs no session. On both servers.
"""

import contextlib
import re

import pytest
from click.testing import CliRunner
from support import Database, next_version, random_name
from support.next_version import NEXT, THIS
from support.parts import made_and_named

import sqlsem
from sqlsem import cli, sql
from sqlsem.sql.features import CORE, FEATURES, chosen, from_setting
from sqlsem.values.errors import ConfigurationError, SchemaError

pytestmark = pytest.mark.engines("postgresql", "mssql")
OTHERS = [name for name in FEATURES if name != CORE]


@pytest.fixture
def empty(engine_name, request):
    """An empty database, or on SQL Server an empty schema."""
    if engine_name == "postgresql":
        import psycopg

        server, name = request.getfixturevalue("postgres_server"), random_name()
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        database = Database("postgresql", server.url(name), {"schema": name}, server)
    else:
        database = Database("mssql", request.getfixturevalue("database").url, {"schema": random_name()})
    yield database
    remove(database)
    if engine_name == "postgresql":
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
            for role in roles_of(database, connection.execute("SELECT rolname FROM pg_roles").fetchall()):
                connection.execute(f"DROP ROLE {name}_{role}")


def remove(database):
    database.rows(sql.script(database.engine, "drop", schema=database.schema))


def roles_of(database, rows):
    return {row[0].removeprefix(f"{database.schema}_") for row in rows if row[0].startswith(f"{database.schema}_")}


def catalogue(database):
    """Return the tables, routines and other objects in the schema of sqlsem, and its roles."""
    if database.engine == "postgresql":
        names = database.rows(
            "SELECT c.relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace "
            "WHERE n.nspname = ? AND c.relkind IN ('r', 'S') UNION "
            "SELECT p.proname FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace WHERE n.nspname = ?",
            *[database.schema] * 2,
        )
        roles = database.rows("SELECT rolname FROM pg_roles")
    else:
        names = database.rows(
            f"SELECT name FROM sys.objects WHERE schema_id = SCHEMA_ID('{database.schema}') "
            f"AND type IN ('U', 'V', 'P', 'FN', 'IF', 'SO', 'TR')"
        )
        roles = database.rows("SELECT name FROM sys.database_principals")
    return {row[0].lower() for row in names}, roles_of(database, roles)


def lower(names):
    return {name.lower() for name in names}


# -- a scenario of each feature, which leaves nothing behind --------------------------------------------------------


def locks(coordinator, other, name, database):
    with coordinator.mutex(name) as grant:
        grant.check()
        assert not other.mutex(name).acquire(timeout=0)
        assert [entry.state for entry in other.admin.entries(name)] == ["holds"]
        with database.raw(autocommit=False) as connection:
            grant.assert_held(connection.cursor())
            connection.rollback()
    with coordinator.read(name), other.read(name):
        pass
    with coordinator.limit(name, 2), other.limit(name, 2):
        assert {row.resource: row.holding for row in coordinator.admin.resources()}[name] == 2
    with coordinator.all_of(coordinator.mutex(name), coordinator.stage(f"{name}-b", 1)):
        pass
    assert len(coordinator.admin.history(name)) == 6


def operate(coordinator, other, name, database):
    coordinator.admin.set_limit(name, 1)
    coordinator.admin.pause(name)
    assert not coordinator.limit(name).acquire(timeout=0)
    coordinator.admin.resume(name)
    with coordinator.limit(name) as grant:
        assert other.admin.overview().entries[0].position == grant.position
        assert not other.admin.revoke(grant.position)
    coordinator.admin.set_limit(name, None)
    assert coordinator.admin.reap() == 0
    assert {"pause", "resume", "revoke"} <= {row.action for row in coordinator.admin.operations()}
    assert database.rows(f"SELECT count(*) FROM {database.beside('resource')}") == [(0,)]


def priorities(coordinator, other, name, database):
    coordinator.admin.set_priorities(name, 60)
    with coordinator.mutex(name, priority=5):
        assert not other.mutex(name, priority=9).acquire(timeout=0.1)
    coordinator.admin.set_priorities(name, None)


def conversions(coordinator, other, name, database):
    with coordinator.read(name) as grant:
        grant.upgrade()
        assert not other.read(name).acquire(timeout=0)
        grant.downgrade()
        assert other.read(name).acquire(timeout=0)
    other.close()


def handovers(coordinator, other, name, database):
    with coordinator.mutex(name) as grant:
        token = grant.hand_over()
    other.adopt(token).release()
    with contextlib.closing(database.raw(autocommit=False)) as connection, coordinator.mutex(name) as grant:
        grant.release_on_commit(connection.cursor())
        connection.commit()
    assert other.mutex(name).acquire()
    other.close()


def guards(coordinator, other, name, database):
    table = f"{'public' if database.engine == 'postgresql' else 'dbo'}.written_{database.schema}"
    database.rows(f"CREATE TABLE {table} (a int)")
    try:
        assert coordinator.admin.guard_table(table, name) == 1
        with pytest.raises(Exception, match="asserted no"):
            database.rows(f"INSERT INTO {table} VALUES (1)")
        with coordinator.mutex(name) as grant, contextlib.closing(database.raw(autocommit=False)) as connection:
            grant.assert_held(connection.cursor())
            connection.cursor().execute(f"INSERT INTO {table} VALUES (1)")
            connection.commit()
        assert [row.resource for row in coordinator.admin.guarded_tables()] == [name]
    finally:
        database.rows(f"DROP TABLE {table}")


def rates(coordinator, other, name, database):
    with coordinator.rate(name, 2, per=3600), other.rate(name, 2, per=3600):
        assert coordinator.rate(name, 2, per=3600).take(timeout=0) is None
    assert [row.used for row in coordinator.admin.rates(name)] == [2]
    coordinator.admin.set_rate(name, 1, 3600)
    assert coordinator.admin.reset_rate(name)
    with coordinator.rate(name, 2, per=3600):
        assert coordinator.rate(name, 2, per=3600).take(timeout=0) is None


def once(coordinator, other, name, database):
    with coordinator.once(name, "366d") as run:
        assert run is not None
    assert other.once(name, "366d").begin() is None
    assert other.once(name, "366d").last() is not None


def queue(coordinator, other, name, database):
    tasks = coordinator.queue(name)
    tasks.put(sqlsem.Sql(f"SELECT 1 AS {name}"))
    tasks.put(sqlsem.Sql(f"SELECT 2 AS {name}"), locks=[coordinator.mutex(name)])
    tasks.set_rate(100, per=1)
    for task in other.queue(name).claim(wait=0):
        with task:
            other.client.run_sql(task.body, lambda session: None)
    assert [task.status for task in coordinator.admin.tasks(name)] == ["finished"] * 2


def batches(coordinator, other, name, database):
    ended = []
    with coordinator.batch(name, ["a", "b"], window="1h").part("a"):
        pass
    with other.batch(name, ["a", "b"], window="1h", on_success=lambda: ended.append(1)).part("b"):
        pass
    assert [batch.status for batch in shown_batches(coordinator)] == ["succeeded"]
    assert ended == [1]


def shown_batches(coordinator):
    return coordinator.client.with_connection(lambda session: session.list_batches(None, None, 10))


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (locks, operate, priorities, conversions, handovers, guards, rates, once, queue, batches)
}


def run(database, feature):
    name = random_name()
    with contextlib.closing(database.coordinator()) as coordinator, contextlib.closing(database.coordinator()) as other:
        SCENARIOS[feature](coordinator, other, name, database)
    assert database.queue("") == [], feature


# -- what a database without a feature says -------------------------------------------------------------------------


def using(coordinator, feature, name):
    """Calls that need a feature."""
    reader = coordinator.read(name)

    def held(call):
        def use():
            with reader as grant:
                call(grant)

        return use

    return {
        "operate": [
            lambda: coordinator.admin.set_limit(name, 3),
            lambda: coordinator.admin.pause(name),
            lambda: coordinator.admin.overview(),
            lambda: coordinator.admin.revoke(1),
            lambda: coordinator.admin.reap(),
        ],
        "priorities": [lambda: coordinator.mutex(name, priority=3).acquire()],
        "conversions": [held(lambda grant: grant.upgrade())],
        "handovers": [held(lambda grant: grant.hand_over()), lambda: coordinator.adopt("sqlsem-" + "x" * 32)],
        "guards": [
            lambda: coordinator.admin.guard_table("some_table", name),
            lambda: coordinator.admin.guarded_tables(),
        ],
        "rates": [
            lambda: coordinator.rate(name, 3, per=1).take(),
            lambda: coordinator.admin.rates(),
            lambda: coordinator.admin.reset_rate(name),
        ],
        "once": [lambda: coordinator.once(name, "1h").begin(), lambda: coordinator.once(name, "1h").last()],
        "queue": [
            lambda: coordinator.queue(name).put(sqlsem.Sql("SELECT 1")),
            lambda: next(coordinator.queue(name).claim(wait=0)),
            lambda: coordinator.admin.queues(),
            lambda: coordinator.admin.tasks(),
            lambda: coordinator.admin.schedules(),
        ],
        "batches": [
            lambda: coordinator.batch(name, ["a"], window="1h").part("a").__enter__(),
            lambda: shown_batches(coordinator),
        ],
    }[feature]


COMMANDS = {
    "operate": ["ls"],
    "guards": ["guard", "--list"],
    "priorities": ["run", "--mutex", "x", "--priority", "3", "--", "true"],
    "rates": ["rates"],
    "once": ["run", "--once-per", "x=1h", "--", "true"],
    "queue": ["tasks"],
    "batches": ["batch"],
}


def command(database, *words):
    return CliRunner().invoke(cli.main, ["--url", database.url, "--schema", database.schema, *words])


def refused(database, feature):
    """Every use of a missing feature names the command that adds it, and leaves nothing behind."""
    pattern = rf"with: sqlsem init --add {feature}( \[feature\])?$"
    name = random_name()
    with contextlib.closing(database.coordinator()) as coordinator:
        for use in using(coordinator, feature, name):
            with pytest.raises(SchemaError, match=pattern):
                use()
        with coordinator.mutex(name):
            pass
    assert database.queue("") == []
    if feature in COMMANDS:
        result = command(database, *COMMANDS[feature])
        assert re.search(pattern, result.output.strip()), result.output
        assert result.exit_code == 78


@pytest.mark.parametrize("feature", FEATURES)
def test_feature_alone_works_and_the_others_are_refused(empty, feature):
    empty.install(only=(feature,))
    installed = chosen([feature])
    objects, roles = catalogue(empty)
    everything, _ = made_and_named(empty.engine, sql.ALL)
    created, _ = made_and_named(empty.engine, installed)
    assert objects & lower(everything) == lower(created) - {"number_bare_row"} | (objects & {"number_bare_row"})
    assert roles - {"locks"} == {role for name in installed for role in FEATURES[name].roles}
    for name in FEATURES:
        if name in installed:
            run(empty, name)
        else:
            refused(empty, name)
    # Every upgrade by `sqlsem init` does this: it keeps the installed features.
    empty.install()
    assert catalogue(empty) == (objects, roles)


@pytest.mark.parametrize("first", ["locks", "operate", "rates"])
def test_features_are_added_while_locks_are_held(empty, first):
    empty.install(only=(first,))
    name = random_name()
    with contextlib.closing(empty.coordinator()) as holder, contextlib.closing(empty.coordinator()) as waiter:
        with pytest.raises(SchemaError):
            holder.queue(name).put(sqlsem.Sql("SELECT 1"))
        with holder.mutex(name) as grant:
            for feature in OTHERS:
                empty.install(add=(feature,))
            grant.check()
            assert not waiter.mutex(name).acquire(timeout=0)
            holder.queue(name).put(sqlsem.Sql("SELECT 1"))  # the same process, after the refusal
            holder.admin.cancel_task(holder.admin.tasks(name)[0].task_id)
    assert settings(empty)["features"] == "all"
    for feature in FEATURES:
        run(empty, feature)
    whole = catalogue(empty)
    remove(empty)
    empty.install()
    assert catalogue(empty) == whole


def settings(database):
    return dict(database.rows(f"SELECT name, value FROM {database.beside('setting')}"))


def test_only_adds_and_never_removes(empty):
    empty.install(only=("locks", "rates"))
    with pytest.raises(ConfigurationError, match=r"also has rates, and init removes nothing.*--only locks,rates,once"):
        empty.install(only=("once",))
    empty.install(only=("once", "rates"))
    assert from_setting(settings(empty)["features"]) == {"locks", "rates", "once"}


def test_nothing_is_added_to_nothing(empty):
    with pytest.raises(ConfigurationError, match=r"nothing to add to.*init --only queue"):
        empty.install(add=("queue",))


def test_commands_name_installed_features(empty):
    dry = command(empty, "init", "--only", "queue", "--dry-run")
    assert "features: locks, rates (for queue), queue; not installed: operate, " in dry.output, dry.output
    assert "tasks.sql" in dry.output
    assert "batches.sql" not in dry.output
    assert command(empty, "init", "--only", "queue").exit_code == 0
    output = command(empty, "init", "--add", "batches,once", "--dry-run").output
    assert "adding: once, batches\n" in output
    assert "schema-1.sql (once, batches), routines.sql" in output
    doctor = " ".join(command(empty, "doctor").output.split())  # lines are as long as the screen is wide
    assert "features locks, rates, queue; not installed: operate, priorities, " in doctor, doctor
    assert command(empty, "init", "--only", "lock").exit_code == 64
    again = command(empty, "init", "--only", "locks")
    assert again.exit_code == 78
    assert "init removes nothing" in again.output


def test_printed_scripts_install_and_add_a_part(empty):
    """The scripts of `sqlsem sql` do the same as `sqlsem init`."""

    def run_printed(*words):
        text = command(empty, "sql", empty.engine, *words).stdout
        with contextlib.closing(empty.raw()) as connection:
            for batch in re.split(r"(?m)^GO$", text) if empty.engine == "mssql" else [text]:
                if batch.strip():
                    connection.cursor().execute(batch)

    run_printed("--only", "locks")
    assert settings(empty)["features"] == "locks"
    run(empty, "locks")
    run_printed("--only", "locks", "--add", "batches")
    assert settings(empty)["features"] == "locks,batches"
    run(empty, "batches")
    refused(empty, "once")


@pytest.mark.engines("postgresql")
def test_upgrade_keeps_to_the_features_there(empty, monkeypatch):
    empty.install(only=("batches",))
    next_version.bring(monkeypatch)
    empty.install()
    assert (settings(empty)["schema_version"], settings(empty)["features"]) == (str(NEXT), "locks,batches")
    assert "task" not in catalogue(empty)[0]
    empty.install(add=("queue",))
    assert empty.rows(f"SELECT colour FROM {empty.beside('task')}") == []
    monkeypatch.setattr(sql, "LATEST", THIS)
