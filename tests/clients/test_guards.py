"""Guarded tables of PostgreSQL: partitions, statements of its own, isolation, savepoints, forgery, roles, dumps."""

import contextlib

import psycopg
import pytest
from psycopg import errors, sql
from support import pinned, until
from support.databases import name_of_login

import sqlsem
from sqlsem.values.locks import Request

pytestmark = pytest.mark.engines("postgresql")
LEVELS = psycopg.IsolationLevel


def write(connection, table, value=1):
    connection.execute(f"INSERT INTO {table} VALUES ({value})")


def values(database, table):
    return sorted(row[0] for row in database.rows(f"SELECT a FROM {table}"))


def copy_in(connection, table):
    with connection.cursor().copy(f"COPY {table} FROM STDIN") as copy:
        copy.write("7\n")


@pytest.mark.parametrize(
    "statement",
    [
        "TRUNCATE {}",
        "WITH moved AS (DELETE FROM {} RETURNING a) SELECT * FROM moved",
        "INSERT INTO {} VALUES (1) ON CONFLICT DO NOTHING",
        "DO $$ BEGIN INSERT INTO {} VALUES (1); END $$",
        "CREATE RULE r AS ON INSERT TO {0} DO ALSO DELETE FROM {0}; INSERT INTO {0} VALUES (1)",
        copy_in,
    ],
)
def test_every_statement_that_writes(connect, guarded, writer, refusal, name, statement):
    def run(connection):
        if callable(statement):
            statement(connection, guarded)
        else:
            connection.execute(statement.format(guarded))

    connection = writer()
    with refusal(name):
        run(connection)
    connection.rollback()
    with connect().mutex(name) as grant:
        grant.assert_held(connection.cursor())
        run(connection)
        connection.rollback()


def test_guard_sees_writes_through_views_and_keys(database, connect, guarded, writer, refusal, name):
    """Views that can be written, and the actions of a foreign key."""
    database.rows(f"ALTER TABLE {guarded} ADD CONSTRAINT k{name} PRIMARY KEY (a)")
    owner, child = connect(), f"public.child{name}"
    database.rows(f"CREATE VIEW v{name} AS SELECT * FROM {guarded}")
    database.rows(f"CREATE TABLE {child} (a integer REFERENCES {guarded} (a) ON DELETE CASCADE)")
    connection = writer()
    try:
        owner.admin.guard_table(child, name("child"))
        with owner.mutex(name) as grant, owner.mutex(name("child")) as both:
            grant.assert_held(connection.cursor())
            write(connection, f"v{name}")
            both.assert_held(connection.cursor())
            write(connection, child)
            connection.commit()
            with refusal(guarded.split('"')[1][:10]):
                write(connection, f"v{name}", 2)
            connection.rollback()
            grant.assert_held(connection.cursor())
            with refusal(f"child{name}"):
                connection.execute(f"DELETE FROM {guarded}")
            connection.rollback()
    finally:
        database.rows(f"DROP TABLE {child}")
        database.rows(f"DROP VIEW v{name}")


# -- partitions -----------------------------------------------------------------------------------------------------


@pytest.fixture
def partitioned(database, name):
    """A partitioned table with a partition that has partitions itself."""
    top = f'public."{name} Parts"'
    for text in (
        f"CREATE TABLE {top} (a integer) PARTITION BY RANGE (a)",
        f"CREATE TABLE {name}_1 PARTITION OF {top} FOR VALUES FROM (0) TO (10)",
        f"CREATE TABLE {name}_2 PARTITION OF {top} FOR VALUES FROM (10) TO (20) PARTITION BY RANGE (a)",
        f"CREATE TABLE {name}_21 PARTITION OF {name}_2 FOR VALUES FROM (10) TO (15)",
    ):
        database.rows(text)
    yield top
    database.rows(f"DROP TABLE {top}")


def test_a_partitioned_table(database, connect, partitioned, writer, refusal, name):
    coordinator, connection = connect(), writer()
    with pytest.raises(sqlsem.ConfigurationError, match=r"belongs to .*guard that"):
        coordinator.admin.guard_table(f"public.{name}_21", name)
    assert coordinator.admin.guard_table(partitioned, name) == 4
    assert coordinator.admin.guard_table(partitioned, name) == 0
    for part, value in ((partitioned, 1), (f"{name}_1", 1), (f"{name}_2", 12), (f"{name}_21", 12)):
        with refusal(name):
            write(connection, part, value)
        connection.rollback()
        with coordinator.mutex(name) as grant:
            grant.assert_held(connection.cursor())
            write(connection, part, value)
            connection.commit()

    def mine():
        return [
            (table.table, table.problem) for table in coordinator.admin.guarded_tables() if table.table.startswith(name)
        ]

    assert mine() == [(f"{name} Parts", None)]
    database.rows(f"CREATE TABLE {name}_22 PARTITION OF {name}_2 FOR VALUES FROM (15) TO (20)")
    ((_, problem),) = mine()
    assert f"{name}_22 can be written directly" in problem
    assert coordinator.admin.guard_table(partitioned, name) == 1
    assert mine() == [(f"{name} Parts", None)]
    with pytest.raises(sqlsem.ConfigurationError, match="guarded as a part of"):
        coordinator.admin.unguard_table(f"public.{name}_1")
    assert coordinator.admin.unguard_table(partitioned) == 5
    assert mine() == []
    write(connection, f"{name}_22", 16)


def test_a_guarded_table_that_becomes_a_partition(database, connect, partitioned, guarded, name):
    coordinator = connect()
    database.rows(f"ALTER TABLE {partitioned} ATTACH PARTITION {guarded} FOR VALUES FROM (20) TO (30)")
    try:
        (table_found,) = [table for table in coordinator.admin.guarded_tables() if table.table in guarded]
        assert "it can be written through" in table_found.problem
        assert coordinator.admin.guard_table(partitioned, name) == 4
        (table_found,) = [table for table in coordinator.admin.guarded_tables() if table.table.startswith(name)]
        assert (table_found.table, table_found.problem) == (f"{name} Parts", None)
    finally:
        database.rows(f"ALTER TABLE {partitioned} DETACH PARTITION {guarded}")


def test_a_temporary_table_in_the_way_of_the_name(connect, database, table, writer, refusal, name):
    """The guard looks a name up as its own login: a writer's object of that name makes no difference."""
    text = table()
    connect().admin.guard_table(text, name)
    connection = writer()
    bare = text.removeprefix("public.")
    connection.execute(f"CREATE TEMP TABLE {bare} (a integer)")
    write(connection, bare)
    with refusal(name):
        write(connection, text)


# -- transactions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [LEVELS.READ_COMMITTED, LEVELS.REPEATABLE_READ, LEVELS.SERIALIZABLE])
def test_guard_works_at_each_isolation_level(database, connect, guarded, writer, refusal, name, level):
    lock = connect().mutex(name)
    lock.acquire()
    connection = writer()
    connection.isolation_level = level
    connection.execute("SELECT 1")
    lock.grant.assert_held(connection.cursor())
    write(connection, guarded)
    connection.commit()
    with lock.grant.session(connection):
        connection.execute(f"SELECT count(*) FROM {guarded}")  # the snapshot
        write(connection, guarded, 2)
        connection.commit()
        connection.execute(f"SELECT count(*) FROM {guarded}")
        database.rows("DELETE FROM {table} WHERE queue_position = ?", lock.grant.position)
        with pytest.raises((errors.ObjectNotInPrerequisiteState, errors.SerializationFailure)):
            write(connection, guarded, 3)
        connection.rollback()
        with refusal(name):
            write(connection, guarded, 3)
        connection.rollback()
    assert values(database, guarded) == [1, 2]
    with pytest.raises(sqlsem.LockLost):
        lock.release()


def test_a_transaction_that_only_reads(connect, guarded, writer, name):
    connection = writer()
    connection.read_only = True
    with connect().mutex(name) as grant, grant.session(connection):
        connection.execute(f"SELECT * FROM {guarded}")
        with pytest.raises(errors.ReadOnlySqlTransaction):
            write(connection, guarded)
        connection.rollback()


def test_guard_follows_savepoints(connect, guarded, writer, refusal, name):
    connection = writer()
    with connect().mutex(name) as grant:
        with connection.transaction(force_rollback=True):
            with contextlib.suppress(psycopg.Rollback), connection.transaction(force_rollback=True):
                grant.assert_held(connection.cursor())
                write(connection, guarded)
            with refusal("which has asserted no"), connection.transaction():
                write(connection, guarded)
            grant.assert_held(connection.cursor())
            with connection.transaction(force_rollback=True):
                write(connection, guarded)
            write(connection, guarded)
            with connection.transaction():
                write(connection, guarded)
            inner = f"BEGIN INSERT INTO {guarded} VALUES (1); EXCEPTION WHEN OTHERS THEN RAISE; END"
            connection.execute(f"DO $$ {inner} $$")


def test_a_note_that_is_put_back_after_a_savepoint_was_undone(database, connect, guarded, writer, refusal, name):
    """A note that the server itself sealed does not keep the row: the guard checks the row again."""
    connection = writer()
    lock = connect().mutex(name)
    lock.acquire()
    connection.execute("SAVEPOINT s")
    lock.grant.assert_held(connection.cursor())
    (note,) = connection.execute("SELECT current_setting('sqlsem.sqlsem_pinned')").fetchone()
    connection.execute("ROLLBACK TO SAVEPOINT s")
    database.rows("DELETE FROM {table} WHERE queue_position = ?", lock.grant.position)
    connection.execute("SELECT set_config('sqlsem.sqlsem_pinned', %s, true)", (note,))
    with refusal("is no grant of it that is (still) held"):
        write(connection, guarded)
    with pytest.raises(sqlsem.LockLost):
        lock.release()


def test_a_procedure_that_commits(database, connect, guarded, writer, refusal, name):
    connection = writer(autocommit=True)
    with connect().mutex(name) as grant:
        requester = database.queue(name)[0][2]
        text = "DO $$ BEGIN CALL sqlsem.assert_holding({}, {}, {}); INSERT INTO {} VALUES (1); {} END $$"
        words = [sql.Literal(word) for word in (name, grant.position, requester)]
        connection.execute(sql.SQL(text).format(*words, sql.SQL(guarded), sql.SQL("")))
        with refusal("which has asserted no"):
            more = sql.SQL("COMMIT; INSERT INTO {} VALUES (2);").format(sql.SQL(guarded))
            connection.execute(sql.SQL(text).format(*words, sql.SQL(guarded), more))
    assert values(database, guarded) == [1, 1]


def test_a_prepared_transaction_keeps_the_lock(database, connect, guarded, writer, name):
    owner, connection = connect(), writer()
    lock = owner.mutex(name)
    lock.acquire()
    position = lock.grant.position
    lock.grant.assert_held(connection.cursor())
    write(connection, guarded)
    connection.execute(sql.SQL("PREPARE TRANSACTION {}").format(sql.Literal(name)))
    connection.rollback()
    other = connect(retry=0.3)
    with pytest.raises(sqlsem.Unavailable, match="kept"):
        other.admin.revoke(position, force=True)
    connection.autocommit = True
    connection.execute(sql.SQL("COMMIT PREPARED {}").format(sql.Literal(name)))
    assert other.admin.revoke(position, force=True)
    with pytest.raises(sqlsem.LockLost):
        lock.release()
    assert values(database, guarded) == [1]


# -- forgeries, and roles -------------------------------------------------------------------------------------------

FORGED = [
    "x",
    "1",
    "{position}",
    "0 {position}:" + "0" * 32,
    "{number} {position}:" + "0" * 32,
    "{number} {position}",
    "{position}:0",
    "9" * 40,
    "{position}:{member}",
]


@pytest.mark.parametrize("text", FORGED)
def test_another_logins_grant_cannot_be_named(database, guarded, user, login, name, text):
    """With any settings a login can only use a grant of its own login, which it may use anyway."""
    other = login("sqlsem_user")
    with user.raw() as connection, other.raw(autocommit=False) as other_connection, database.raw() as owner:
        owner.execute(f"GRANT ALL ON {guarded} TO PUBLIC")
        position = connection.execute("CALL sqlsem.acquire(%s, requesting_id => 'me')", (name,)).fetchone()[1]
        (member,) = owner.execute(
            "SELECT member_id FROM sqlsem.ProcessControl WHERE queue_position = %s", (position,)
        ).fetchone()
        for setting in ("sqlsem.sqlsem_pinned", "sqlsem.sqlsem_session"):
            (number,) = other_connection.execute("SELECT pg_current_xact_id()::text").fetchone()
            forged = text.format(position=position, number=number, member=member)
            other_connection.execute("SELECT set_config(%s, %s, true)", (setting, forged))
            with pytest.raises(errors.ObjectNotInPrerequisiteState, match="needs the lock"):
                write(other_connection, guarded)
            other_connection.rollback()
        with pytest.raises(errors.InsufficientPrivilege):
            other_connection.execute("SELECT sqlsem.pin(%s, %s, 'me')", (name, position))


def test_a_dead_owners_row_cannot_be_named_by_another_login(database, guarded, user, login, name):
    other = login("sqlsem_user")
    with database.raw() as owner:
        owner.execute(f"GRANT ALL ON {guarded} TO PUBLIC")
    with user.raw(autocommit=False) as connection, other.raw(autocommit=False) as other_connection:
        session = user.session(grace=0.1)

        member = session.register_member("host", 1, "test")
        (ticket,) = session.register(member, "me", "me", f"{name}-uid", [Request(name)], False)
        assert pinned(user.make_engine(), connection.cursor(), ticket)
        session.close()
        with contextlib.closing(database.coordinator()) as operator:
            members = f"SELECT 1 FROM sqlsem.member WHERE member_id = {member}"
            until(lambda: operator.admin.reap() is not None and not database.rows(members), "the member is removed")
        write(connection, guarded)
        (note,) = connection.execute("SELECT current_setting('sqlsem.sqlsem_pinned')").fetchone()
        other_connection.execute("SELECT sqlsem.pin(%s, %s, 'me')", (name, ticket.position))
        (number,) = other_connection.execute("SELECT pg_current_xact_id()::text").fetchone()
        other_connection.execute(
            "SELECT set_config('sqlsem.sqlsem_pinned', %s, true)", (f"{number} {note.partition(' ')[2]}",)
        )
        with pytest.raises(errors.ObjectNotInPrerequisiteState, match="needs the lock"):
            write(other_connection, guarded)


def test_the_seals_secret_is_the_owners(user, login):
    for client in (user, login("sqlsem_operator"), login("sqlsem_reader")):
        with client.raw() as connection:
            with pytest.raises(errors.InsufficientPrivilege):
                connection.execute("SELECT secret FROM sqlsem.guard_key")
            with pytest.raises(errors.InsufficientPrivilege):
                connection.execute("SELECT sqlsem.pin_seal(1, 1)")


def test_guarding_needs_owner_and_user_role(database, user, login, name):
    """The owner of the table needs the role of a user; a refused writer needs no role."""
    stranger = login()
    schema = f"s{name}"
    with database.raw() as owner:
        owner.execute(f"CREATE SCHEMA {schema} AUTHORIZATION {name_of_login(user)}")
    with user.raw() as owners, stranger.raw() as strangers, contextlib.closing(user.coordinator()) as coordinator:
        owners.execute(f"CREATE TABLE {schema}.ledger (a integer)")
        owners.execute(f"GRANT USAGE ON SCHEMA {schema} TO PUBLIC")
        owners.execute(f"GRANT INSERT ON {schema}.ledger TO PUBLIC")
        with login("sqlsem_operator").raw() as operator:
            with pytest.raises(errors.InsufficientPrivilege, match="ledger"):
                operator.execute(f"SELECT sqlsem.guard_table('{schema}.ledger', %s)", (name,))
        assert coordinator.admin.guard_table(f"{schema}.ledger", name) == 1
        with pytest.raises(errors.ObjectNotInPrerequisiteState, match="needs the lock"):
            write(strangers, f"{schema}.ledger")
        with coordinator.mutex(name) as grant, grant.session(owners):
            write(owners, f"{schema}.ledger")
            assert owners.execute("SELECT count(*) FROM sqlsem.guarded_tables()").fetchone()[0] >= 1
        with pytest.raises(sqlsem.ConfigurationError, match="cannot be guarded"):
            coordinator.admin.guard_table("sqlsem.member", name)
        with contextlib.closing(stranger.coordinator()) as no_users:
            with pytest.raises(sqlsem.ConfigurationError, match="permission denied"):
                no_users.admin.guard_table(f"{schema}.ledger", name)


def test_guard_trigger_ignores_the_writers_search_path(database, connect, guarded, user, name):
    """The trigger's names mean the system's objects under any search_path of the writer."""
    schema = f"s{name}"
    with database.raw() as owner:
        owner.execute(f"CREATE SCHEMA {schema} AUTHORIZATION {name_of_login(user)}")
        owner.execute(f"GRANT ALL ON {guarded} TO PUBLIC")
    with user.raw() as connection:
        connection.execute(f"SET search_path = {schema}, pg_catalog")
        for text in (
            "current_setting(text, boolean) RETURNS text",
            "split_part(text, text, integer) RETURNS text",
            "pg_current_xact_id() RETURNS xid8",
            "may_pin(name) RETURNS boolean",
        ):
            connection.execute(
                f"CREATE FUNCTION {schema}.{text} LANGUAGE plpgsql AS "
                f"$$ BEGIN RAISE EXCEPTION 'trapped as %', current_user; END $$"
            )
        with pytest.raises(errors.ObjectNotInPrerequisiteState, match="needs the lock"):
            write(connection, guarded)


# -- poolers, drivers, dumps ----------------------------------------------------------------------------------------


def test_sqlalchemy_and_django(database, connect, guarded, refusal, name):
    sqlalchemy = pytest.importorskip("sqlalchemy")
    from sqlalchemy import orm

    engine = sqlalchemy.create_engine(database.url.replace("postgresql://", "postgresql+psycopg://"))
    text = sqlalchemy.text(f"INSERT INTO {guarded} VALUES (1)".replace(":", "\\:"))
    with contextlib.closing(engine.raw_connection()), connect().mutex(name) as grant:
        with engine.connect() as connection:
            with grant.session(connection):
                for _ in range(2):
                    connection.execute(text)
                    connection.commit()
                with connection.begin():
                    connection.execute(text)
            with pytest.raises(sqlalchemy.exc.DBAPIError, match="which has asserted no"):
                connection.execute(text)
            with pytest.raises(sqlsem.ConfigurationError, match="in the middle"), grant.session(connection):
                raise AssertionError("entered")
        with orm.Session(engine) as session:
            with pytest.raises(sqlsem.ConfigurationError, match="another connection in each"), grant.session(session):
                raise AssertionError("entered")
            with pytest.raises(sqlsem.ConfigurationError, match="another connection in each"), grant.session(engine):
                raise AssertionError("entered")
            grant.assert_held(session)
            session.execute(text)
            session.commit()
    engine.dispose()
    assert values(database, guarded) == [1, 1, 1, 1]


def test_a_dump_restores_the_guard(make_database, postgres_server, name):
    """A dump contains the guard with the table; in the copy, no session holds the locks."""
    first, second = make_database(postgres_server), make_database(postgres_server)
    first.rows("CREATE TABLE ledger (a integer)")
    first.rows("INSERT INTO ledger VALUES (1)")
    with contextlib.closing(first.coordinator()) as coordinator:
        assert coordinator.admin.guard_table("public.ledger", name) == 1
    first.server.restore(first.server.dump(first.url), second.url)
    with contextlib.closing(second.coordinator()) as coordinator, second.raw() as connection:
        assert [(table.table, table.resource) for table in coordinator.admin.guarded_tables()] == [("ledger", name)]
        with pytest.raises(errors.ObjectNotInPrerequisiteState, match="needs the lock"):
            write(connection, "ledger", 2)
        with coordinator.mutex(name) as grant, grant.session(connection):
            write(connection, "ledger", 3)
        assert values(second, "ledger") == [1, 3]


def test_writes_past_a_guard_match_the_page(database, connect, guarded, writer, name):
    """The writes that a guard cannot see, as the page lists them."""
    connection = writer()
    connection.execute("SET LOCAL session_replication_role = replica")
    write(connection, guarded)
    connection.rollback()


def test_seal_is_valid_for_a_single_owner(database, guarded, user, login, name):
    """A former owner cannot write by an old note, not even while the row is in transit."""
    other = login("sqlsem_user")
    with database.raw() as owner:
        owner.execute(f"GRANT ALL ON {guarded} TO PUBLIC")
    token = "sqlsem-" + "x" * 40
    first, second = user.session(), other.session(grace=0)
    with user.raw(autocommit=False) as connection, other.raw(autocommit=False) as other_connection:
        giver, taker = first.register_member("host", 1, "giver"), second.register_member("host", 2, "taker")
        (ticket,) = first.register(giver, "giver", "giver", f"{name}-uid", [Request(name)], False)
        assert pinned(user.make_engine(), connection.cursor(), ticket)
        (note,) = connection.execute("SELECT current_setting('sqlsem.sqlsem_pinned')").fetchone()
        connection.rollback()
        to = other_connection.execute("SELECT session_user::text").fetchone()[0]
        assert first.hand_over(giver, [ticket], token, 60.0, to)
        ((_, adopted),) = second.adopt(taker, "taker", "taker", f"{name}-other", token)
        assert pinned(other.make_engine(), other_connection.cursor(), adopted)
        write(other_connection, guarded)
        second.close()  # its process dies, and its transaction goes on
        with contextlib.closing(database.coordinator()) as operator:
            members = f"SELECT 1 FROM sqlsem.member WHERE member_id = {taker}"
            until(lambda: operator.admin.reap() is not None and not database.rows(members), "the member is removed")
        (number,) = connection.execute("SELECT pg_current_xact_id()::text").fetchone()
        connection.execute(
            "SELECT set_config('sqlsem.sqlsem_pinned', %s, true)", (f"{number} {note.partition(' ')[2]}",)
        )
        with pytest.raises(errors.ObjectNotInPrerequisiteState, match="needs the lock"):
            write(connection, guarded)
    first.close()
