"""`sqlsem certify`: each check passes on a correct database and fails on a faulty one, and leaves nothing behind."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support import PATIENCE, until

from sqlsem import engines, sql
from sqlsem.api.coordinator import Coordinator
from sqlsem.ops.certify import CHECKS, Bench, Check, Report, Result, Wishes, certify, checks, hidden_words
from sqlsem.ops.certify import bench as bench_module
from sqlsem.ops.certify import run as run_check
from sqlsem.ops.certify.checks.calling import RIGHTS
from sqlsem.ops.certify.checks.hammering import overlap
from sqlsem.ops.certify.checks.living import START_SECONDS
from sqlsem.ops.certify.children import Child
from sqlsem.ops.certify.sessions import Session

WISHES = Wishes(seconds=0.3, max_sessions=8)
CERTIFY = [sys.executable, "-m", "sqlsem", "certify"]
#: Further requirements of a check.
WISHES_OF = {1: {"databases": True}, 10: {"long": 5.0}}
#: Checks that need an operator.
NEEDS_MORE = {24}


@pytest.fixture
def bench(database):
    """``bench(seconds=…)`` makes a bench. In the end its objects must be gone."""
    benches = []

    def bench(url=None, **wishes):
        benches.append(Bench(url or database.url, {"grace": 2.0}, Wishes(**{**vars_of(WISHES), **wishes})))
        return benches[-1]

    yield bench
    for created in benches:
        created.remove()
        assert remains(database, created.schema) == []


def environment(database, url=None):
    return {**os.environ, "SQLSEM_URL": database.url if url is None else url, "SQLSEM_CONFIG": ""}


def vars_of(wishes):
    return {name: getattr(wishes, name) for name in wishes.__dataclass_fields__}


def remains(database, schema):
    """Return the remains of a certification: schemas, roles, databases, folders."""
    if database.engine == "sqlite":
        folder = os.path.dirname(database.url.removeprefix("sqlite:///"))
        return [name for name in os.listdir(folder) if "certify" in name]
    if database.engine == "postgresql":
        query = (
            "SELECT nspname FROM pg_namespace WHERE nspname LIKE ? UNION ALL SELECT rolname FROM pg_roles WHERE "
            "rolname LIKE ? UNION ALL SELECT datname FROM pg_database WHERE datname LIKE ?"
        )
    elif database.engine == "mysql":
        query = (
            "SELECT table_name FROM information_schema.tables WHERE table_name LIKE ? UNION ALL SELECT schema_name "
            "FROM information_schema.schemata WHERE schema_name LIKE ? UNION ALL SELECT trigger_name FROM "
            "information_schema.triggers WHERE trigger_name LIKE ?"
        )
    else:
        query = (
            "SELECT name FROM sys.schemas WHERE name LIKE ? UNION ALL SELECT name FROM sys.database_principals WHERE "
            "name LIKE ? UNION ALL SELECT name FROM sys.databases WHERE name LIKE ?"
        )
    return [str(row[0]) for row in database.rows(query, *[f"{schema}%"] * 3)]


# -- what is right passes ---------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", sorted(CHECKS))
def test_check_passes_on_an_installed_schema(bench, database, number):
    report = certify(bench(**WISHES_OF.get(number, {})), [number])
    (result,) = report.results
    assert result.state != "failed", result.detail
    assert result.detail
    possible = CHECKS[number].applies(database.engine) and number not in NEEDS_MORE
    # On SQL Server the result depends on the rights of the login.
    assert database.engine == "mssql" or (result.state == "ok") == possible, result.detail
    assert report.ok
    assert report.left == ""


def test_numbers_of_checks_equal_the_page():
    assert set(CHECKS) <= set(range(1, 26))
    for check in CHECKS.values():
        assert check.title
        everywhere = all(check.applies(engine) for engine in engines.ENGINES)
        assert everywhere or check.elsewhere, f"{check.number}: why not elsewhere?"
        assert check.run.__doc__


def test_page_has_a_line_for_each_check():
    page = (Path(__file__).resolve().parents[2] / "docs" / "howto" / "certify.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^(\d+)\. (.+)$", page, re.MULTILINE))
    assert rows == {str(number): check.title for number, check in CHECKS.items()}


@pytest.mark.engines("postgresql", "mysql")
def test_locks_outlive_a_restart_that_an_operator_makes(request, make_database, database):
    server = request.getfixturevalue(f"own_{'mariadb' if database.engine == 'mysql' else 'postgres'}_server")
    place = make_database(server)
    bench = Bench(place.url, {"grace": 2.0}, Wishes(seconds=0.3, max_sessions=8, restart=PATIENCE))
    messages = []

    def say(words):
        messages.append(words)
        if database.engine == "mysql":  # (two starts within seconds look like one: its times are in whole seconds)
            until(lambda: int(server.rows("SHOW STATUS LIKE 'Uptime'")[0][1]) > 2 * START_SECONDS)
        server.restart("fast")

    bench.say = say
    report = certify(bench, [24])
    assert [result.state for result in report.results] == ["ok"], report.results
    assert "Restart the server now" in messages[0]
    assert report.left == ""


def test_roles_of_the_check_are_all_there_are():
    text = sql.script("postgresql", "permissions")
    assert set(RIGHTS) == set(re.findall(r"'sqlsem_([a-z]+)'", text))


# -- what is not right fails ------------------------------------------------------------------------------------------


def by_sql(**texts):
    """A fault that SQL puts into the installed schema, by engine."""

    def seed(monkeypatch, engine):
        right = Bench.install

        def install(self):
            right(self)
            with contextlib.closing(Session(self.engine)) as session:
                filled = texts[engine].replace("{schema}", self.schema).replace("{table}", self.table)
                for text in filled.split("\nGO\n"):
                    session.run(text)

        monkeypatch.setattr(Bench, "install", install)

    seed.engines = set(texts)
    return seed


def by_code(seed, *names):
    """A fault of sqlsem's own."""
    seed.engines = set(names or engines.ENGINES)
    return seed


def no_deadlocks(monkeypatch, engine):
    monkeypatch.setattr(engines.load(engine).session_class, "find_deadlock", lambda self, member: None)


def losing_installation(monkeypatch, engine):
    right = Bench.reinstall

    def reinstall(self):
        right(self)
        with contextlib.closing(Session(self.engine)) as session:
            session.run(f"DELETE FROM {place(self, 'rows')}")

    monkeypatch.setattr(Bench, "reinstall", reinstall)


def place(bench, kind):
    rows = {"sqlite": "ProcessControl", "postgresql": "{}.ProcessControl", "mssql": "{}.entry", "mysql": "{}_entry"}
    return rows[bench.engine.name].format(bench.schema)


def answering(answer):
    """Let ``answer(session, query, words)`` answer the queries of certify.sql; None: the server does."""

    def seed(monkeypatch, engine):
        right = Session.rows

        def rows(self, query, *parameters, **words):
            instead = answer(self, query, words)
            return right(self, query, *parameters, **words) if instead is None else instead

        monkeypatch.setattr(Session, "rows", rows)

    return seed


def answers(**texts):
    return answering(lambda session, query, words: texts.get(query))


def changing(name, first, then):
    """Let the server answer one query differently from the second time on."""

    def seed(monkeypatch, engine):
        left = [first]
        answering(lambda session, query, words: (left.pop() if left else then) if query == name else None)(
            monkeypatch, engine
        )

    return seed


def measured(name, value):
    """Let a measurement return this value."""

    def seed(monkeypatch, engine):
        monkeypatch.setattr(checks.measuring, name, lambda *arguments: value)

    return seed


def unnoticed_reset(monkeypatch, engine):
    answer = {"same": True, "between": -1, "after": 0, "renewed": 0}
    monkeypatch.setattr(Child, "expect", lambda self, event, *more: answer)


def values_that_change(monkeypatch, engine):
    calls = []

    def values(session, expressions):
        calls.append(expressions)
        return [len(calls)]

    monkeypatch.setattr(checks.calling, "_values", values)


@answering
def lost_guard_in_snapshots(session, query, words):
    if query == "old_snapshot":
        session.rows("unguard")


@answering
def no_role_in_a_role(session, query, words):
    return [] if query == "add_member" and words["user"].endswith("_xg") else None


def endless_installation(monkeypatch, engine):
    right, times = Bench.reinstall, []

    def reinstall(self):
        began = time.monotonic()
        if len(times) == 2:  # the first run makes the schema, and leaves nothing in the way of the second
            time.sleep(2.0 + 5 * max(times))  # (the limit grows with the time of an installation)
        right(self)
        times.append(time.monotonic() - began)

    monkeypatch.setattr(Bench, "reinstall", reinstall)
    monkeypatch.setattr(checks.installing, "INSTALL_SECONDS", 0.5)


def overflowing_age(monkeypatch, engine):
    def adopt(self, token):
        raise ArithmeticError("The datediff function resulted in an overflow (535)")

    monkeypatch.setattr(Coordinator, "adopt", adopt)


def token_that_is_used_twice(monkeypatch, engine):
    monkeypatch.setattr(Coordinator, "adopt", lambda self, token: contextlib.ExitStack())
    monkeypatch.setattr(contextlib.ExitStack, "release", lambda self: None, raising=False)


def no_cancellation(monkeypatch, engine):
    monkeypatch.setattr(Session, "cancel", lambda self: None)


#: By the number of the check, its faults: each must make the check fail. Each engine of a check has at least one.
FAULTS = {
    1: [
        by_sql(
            postgresql="DROP FUNCTION {schema}.take_rate CASCADE",
            mssql="DROP PROCEDURE {schema}.take_rate",
            mysql="DROP TABLE {schema}_rate_window",
        )
    ],
    3: [by_code(answers(is_sql_server=[(1,)], hinted_number=[(1,)]), "mssql")],
    5: [by_code(answers(reset=[]), "postgresql"), by_code(unnoticed_reset, "mssql")],
    6: [by_code(answers(renew=[(0,)]), "postgresql", "mssql")],
    7: [by_code(no_cancellation, "postgresql", "mssql")],
    # Errors of the server's own, now and then.
    12: [
        by_sql(
            sqlite="""
                CREATE TRIGGER certify_fault AFTER INSERT ON ProcessControl WHEN NEW.queue_position % 2 = 0
                BEGIN SELECT RAISE(ABORT, 'something is wrong'); END
            """,
            postgresql="""
                CREATE FUNCTION {schema}.fault() RETURNS trigger LANGUAGE plpgsql AS
                'BEGIN PERFORM 1 / (NEW.queue_position % 2); RETURN NULL; END';
                CREATE TRIGGER fault AFTER INSERT ON {schema}.ProcessControl FOR EACH ROW
                EXECUTE FUNCTION {schema}.fault()
            """,
            mssql="""
                CREATE TRIGGER {schema}.fault ON {schema}.entry AFTER INSERT AS
                IF EXISTS (SELECT 1 FROM inserted WHERE queue_position % 2 = 0) THROW 60000, N'something is wrong', 1
            """,
            mysql="""
                CREATE TRIGGER {schema}_certify_fault AFTER INSERT ON {table} FOR EACH ROW
                BEGIN
                    IF NEW.queue_position % 2 = 0 THEN SIGNAL SQLSTATE '40001' SET MESSAGE_TEXT = 'something is wrong';
                    END IF;
                END
            """,
        )
    ],
    14: [by_code(answers(test_cost=[(9999.0,)], many_locks=[]), "mssql")],
    15: [by_code(answers(lock_names=[("0:[x:a]",), ("0:[x:b]",)]), "mssql")],
    # All logins may do anything.
    16: [
        by_sql(
            postgresql="GRANT EXECUTE ON ALL ROUTINES IN SCHEMA {schema} TO PUBLIC",
            mssql="GRANT EXECUTE ON SCHEMA::{schema} TO public",
        ),
        by_code(no_role_in_a_role, "postgresql", "mssql"),
    ],
    17: [by_code(values_that_change, "postgresql", "mssql")],
    18: [
        by_code(answers(guard=[], unguard=[]), "postgresql", "mssql"),
        by_code(answers(merge_guarded=[]), "postgresql", "mssql"),
        by_code(answers(bulk_guarded=[]), "postgresql", "mssql"),
        by_code(lost_guard_in_snapshots, "postgresql"),
    ],
    19: [by_code(answers(assert_holding=[]), "postgresql", "mssql")],
    20: [by_code(measured("milliseconds", [9999.0, 9999.0]))],
    21: [by_code(measured("pair_milliseconds", [1.0] * 50 + [100.0] * 50))],
    22: [by_code(changing("recompiles", [(0, 1, 0, 0)], [(10**6, 1, 0, 0)]), "mssql")],
    23: [by_code(measured("median", 99999.0))],
    24: [by_code(answers(), "postgresql", "mssql", "mysql")],  # a server that does not start again
    2: [
        by_sql(
            sqlite="DROP TABLE {schema}_rate_window",
            postgresql="DROP FUNCTION {schema}.take_rate CASCADE",
            mssql="DROP PROCEDURE {schema}.take_rate",
            mysql="DROP TABLE {schema}_rate_window",
        )
    ],
    # Rows that stay for ever.
    4: [
        by_sql(
            sqlite="CREATE TRIGGER certify_fault BEFORE DELETE ON ProcessControl BEGIN SELECT RAISE(IGNORE); END",
            postgresql="""
                CREATE FUNCTION {schema}.fault() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
                CREATE TRIGGER fault BEFORE DELETE ON {schema}.ProcessControl FOR EACH ROW
                EXECUTE FUNCTION {schema}.fault()
            """,
            mssql="CREATE TRIGGER {schema}.fault ON {schema}.entry INSTEAD OF DELETE AS RETURN",
            # (A trigger cannot keep the row here: the dead are kept alive instead.)
            mysql="""
                CREATE TRIGGER {schema}_certify_fault BEFORE UPDATE ON {schema}_member FOR EACH ROW
                SET NEW.missing_since = NULL
            """,
        )
    ],
    # Registrations that are not serialized.
    8: [
        by_sql(
            postgresql="""
                CREATE OR REPLACE FUNCTION {schema}.lock_class(p_kind integer) RETURNS integer LANGUAGE sql AS
                'SELECT CASE p_kind WHEN 0 THEN (random() * 1e9)::integer ELSE hashtext(''{schema}'') + p_kind END';
                CREATE FUNCTION {schema}.fault() RETURNS trigger LANGUAGE plpgsql AS
                'BEGIN PERFORM pg_sleep(random() * 0.05); RETURN NULL; END';
                CREATE TRIGGER fault AFTER INSERT ON {schema}.ProcessControl FOR EACH ROW
                EXECUTE FUNCTION {schema}.fault()
            """
        ),
        by_code(changing("positions", [(2,)], [(1,), (2,)])),
    ],
    # Writes that are lost.
    9: [
        by_sql(
            sqlite="""
                CREATE TRIGGER certify_fault AFTER UPDATE ON {schema}_certify_counter WHEN NEW.number % 5 = 0
                BEGIN UPDATE {schema}_certify_counter SET number = OLD.number; END
            """,
            postgresql="""
                CREATE FUNCTION {schema}.fault() RETURNS trigger LANGUAGE plpgsql AS
                'BEGIN NEW.number := NEW.number - (NEW.number % 5 = 0)::integer; RETURN NEW; END';
                CREATE TRIGGER fault BEFORE UPDATE ON {schema}.certify_counter FOR EACH ROW
                EXECUTE FUNCTION {schema}.fault()
            """,
            mssql="""
                CREATE TRIGGER {schema}.fault ON {schema}.certify_counter AFTER UPDATE AS
                UPDATE {schema}.certify_counter SET number = number - 1 WHERE number % 5 = 0
            """,
            mysql="""
                CREATE TRIGGER {schema}_certify_fault BEFORE UPDATE ON {schema}_certify_counter FOR EACH ROW
                SET NEW.number = CASE WHEN NEW.number % 5 = 0 THEN OLD.number ELSE NEW.number END
            """,
        )
    ],
    # Rows of holders that vanish.
    10: [
        by_sql(
            sqlite="""
                CREATE TRIGGER certify_fault AFTER INSERT ON {schema}_certify_inside
                BEGIN DELETE FROM ProcessControl WHERE granted_at IS NOT NULL AND resource_id = NEW.resource_id; END
            """,
            postgresql="""
                CREATE FUNCTION {schema}.fault() RETURNS trigger LANGUAGE plpgsql AS
                'BEGIN DELETE FROM {schema}.ProcessControl AS t WHERE granted_at IS NOT NULL
                AND t.resource_id = NEW.resource_id; RETURN NULL; END';
                CREATE TRIGGER fault AFTER INSERT ON {schema}.certify_inside FOR EACH ROW
                EXECUTE FUNCTION {schema}.fault()
            """,
            mssql="""
                CREATE TRIGGER {schema}.fault ON {schema}.certify_inside AFTER INSERT AS
                DELETE FROM {schema}.entry
                WHERE granted_at IS NOT NULL AND resource_id IN (SELECT resource_id FROM inserted)
            """,
            mysql="""
                CREATE TRIGGER {schema}_certify_fault AFTER INSERT ON {schema}_certify_inside FOR EACH ROW
                DELETE FROM {table} WHERE granted_at IS NOT NULL AND resource_id = NEW.resource_id
            """,
        )
    ],
    11: [by_code(no_deadlocks)],
    13: [by_code(answers(applock_mode=[("Shared",)]), "mssql")],
    25: [
        by_code(losing_installation),
        by_code(endless_installation, "postgresql", "mssql"),
        by_code(overflowing_age),
        by_code(token_that_is_used_twice),
    ],
}


def test_every_check_has_a_fault_on_every_engine():
    assert set(FAULTS) == set(CHECKS)
    for number, check in CHECKS.items():
        applies = {engine for engine in engines.ENGINES if check.applies(engine)}
        assert {engine for fault in FAULTS[number] for engine in fault.engines} >= applies, number


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("number", "fault"),
    [pytest.param(number, fault, id=f"{number}-{at}") for number in FAULTS for at, fault in enumerate(FAULTS[number])],
)
def test_check_fails_on_a_fault(bench, database, monkeypatch, number, fault):
    if not CHECKS[number].applies(database.engine) or database.engine not in fault.engines:
        return
    fault(monkeypatch, database.engine)
    for module in (bench_module, *(getattr(checks, name) for name in checks.__all__)):
        monkeypatch.setattr(module, "PATIENCE", 4.0, raising=False)
    report = certify(bench(**WISHES_OF.get(number, {}), restart=1.0), [number])
    (result,) = report.results
    assert result.state == "failed", result.detail
    assert result.detail
    assert not report.ok


def test_overlap_is_seen_by_the_clock():
    def hold(kind, since, until, who):
        return {"kind": kind, "since": since, "until": until, "who": who}

    assert overlap([hold("mutex", 0, 1, "a"), hold("mutex", 1, 2, "b")]) is None
    assert "together with a" in overlap([hold("mutex", 0, 1.1, "a"), hold("mutex", 1, 2, "b")])
    assert overlap([hold("read", 0, 3, "a"), hold("read", 1, 2, "b")]) is None
    assert overlap([hold("read", 0, 3, "a"), hold("write", 1, 2, "b")]) is not None
    three = [hold("limit", 0, 9, holder) for holder in "abc"]
    assert overlap(three) is None
    assert overlap([*three, hold("limit", 5, 6, "d")]) is not None


def test_failed_installation_quotes_the_server(bench, database, monkeypatch):
    monkeypatch.setattr(engines.load(database.engine), "plan", lambda self, version: [(1, "CREATE TABEL x (a int);")])
    report = certify(bench(), [])
    (result,) = report.results
    assert (result.number, result.state) == (0, "failed")
    assert re.search("syntax|TABEL", result.detail), result.detail


# -- nothing is left behind -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def certifying(database):
    """Yield `sqlsem certify` at the check that hammers, with its schema."""
    process = subprocess.Popen(
        [*CERTIFY, "--seconds", "20", "--max-sessions", "8", "--only", "9"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(database),
    )
    try:
        yield process, re.search(r"sqlsem_certify_[0-9a-f]{8}", process.stdout.readline())[0]
    finally:
        process.kill()
        process.wait()


def in_the_hammer(process):
    """Wait until its own processes are at work."""
    parent = psutil.Process(process.pid)
    until(lambda: len(parent.children()) >= 3 or process.poll() is not None, "the processes of the hammer")
    return parent.children()


def await_ends(children):
    def runs(child):
        try:
            return child.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    until(lambda: not any(map(runs, children)), "the ends of the processes")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signal_leaves_nothing(database, name):
    number = getattr(signal, name, None)
    if number is None or signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{name} ends nothing here")
    with certifying(database) as (process, schema):
        children = in_the_hammer(process)
        process.send_signal(number)
        if name != "SIGINT":
            time.sleep(0.05)
            process.send_signal(number)  # a second one does not interrupt the removal
        output, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 128 + number, output + errors
        assert "Traceback" not in errors
        assert remains(database, schema) == []
        await_ends(children)


def test_child_of_an_ended_certification_is_quiet(bench):
    """As after a certification that was interrupted while it started its processes."""
    ours = bench()
    arguments = {"resource": "r", "kinds": ["mutex"], "seconds": PATIENCE}
    order = {"url": ours.url, "options": ours.options, "job": "hammer", "arguments": arguments}
    words = [sys.executable, "-c", "from sqlsem.ops.certify.worker import main; main()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        process.stdout.close()
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        assert process.wait(PATIENCE) == 0
        assert process.stderr.read() == ""


def test_killed_child_is_a_failure_that_leaves_nothing(database):
    with certifying(database) as (process, schema):
        in_the_hammer(process)[0].kill()
        output, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 1, output + errors
        assert re.search(r"^ 9 failed .*ended before it (was done|said)", output, re.MULTILINE), output
        assert remains(database, schema) == []


def test_children_end_with_a_certification_that_is_killed(database):
    with certifying(database) as (process, schema):
        children = in_the_hammer(process)
    await_ends(children)
    leftover = Bench(database.url, {}, WISHES, schema=schema)
    if database.engine == "sqlite":
        leftover.remove()
        (folder,) = remains(database, schema)
        shutil.rmtree(os.path.join(os.path.dirname(database.url.removeprefix("sqlite:///")), folder))
    else:
        assert leftover.remove() == ""
    assert remains(database, schema) == []


def test_remains_are_named_with_the_command(bench, database, monkeypatch):
    instance = bench()
    instance.install()
    with monkeypatch.context() as patch:
        if database.engine == "sqlite":
            patch.setattr(shutil, "rmtree", lambda *arguments, **options: None)
        else:
            patch.setattr(Session, "run", lambda *arguments: 1 / 0)
        patch.setattr(bench_module, "REMOVAL_PAUSES", (0.0,))
        words = instance.remove()
    assert "Not removed" in words
    assert instance.drop_command in words
    report = Report({}, [Result(1, "x", "ok", "")], left=words)
    assert not report.ok
    assert words in report.summary


@pytest.mark.engines("postgresql", "mssql", "mysql")
def test_removal_is_repeated_when_the_server_refuses_it(bench, database, monkeypatch):
    instance = bench()
    instance.install()
    monkeypatch.setattr(bench_module, "REMOVAL_PAUSES", (0.0, 0.0))
    right, failures = Session.run, [RuntimeError("could not find tuple"), RuntimeError("could not find tuple")]

    def run(self, text, *parameters):
        if "DROP" in text and failures:
            raise failures.pop()
        return right(self, text, *parameters)

    monkeypatch.setattr(Session, "run", run)
    assert instance.remove() == ""
    assert failures == []


@pytest.mark.engines("mysql")
def test_certification_spares_an_existing_installation(bench, database):
    """There are no schemas, so the tables of a certification are in the database of the user's tables."""
    instance = bench()
    with database.coordinator().mutex("ours") as grant:
        instance.install()
        with instance.coordinator().mutex("theirs"):
            resources = {row[0] for row in database.rows("SELECT resource_id FROM ProcessControl")}
            assert "ours" in resources
            assert "theirs" not in resources
        assert instance.remove() == ""
        grant.check()


@pytest.mark.engines("postgresql", "mssql")
def test_remains_come_with_the_statements_that_remove_them(bench, database, monkeypatch):
    instance = bench()
    instance.install()
    with contextlib.closing(Session(instance.engine)) as session:
        session.rows("create_guarded")
        monkeypatch.setattr(bench_module, "REMOVAL_PAUSES", ())
        with monkeypatch.context() as patch:
            right = Session.run

            def run(self, text, *parameters):
                if "certify_inside" in text and "DROP" in text:
                    raise RuntimeError("the disk is full")
                return right(self, text, *parameters)

            patch.setattr(Session, "run", run)
            words = instance.remove()
        schema = instance.schema
        assert f"schema {schema}_own; remove it with DROP" in words
        assert f"DROP SCHEMA {schema}_own" in words
        assert "the server refused: RuntimeError: the disk is full" in words
        session.run(session.texts["drop_guarded"])
    assert instance.remove() == ""


@pytest.mark.engines("postgresql", "mssql", "mysql")
def test_crash_of_the_server_is_told_apart(bench, database):
    """All its connections end, also the idle one."""

    def crash(bench, notes):
        notes.note("so far", figure=7)
        with contextlib.closing(Session(bench.engine)) as session:
            session.rows("kill", bench._idle.number)
        raise RuntimeError("unexpected EOF")

    def fail(bench, notes):
        raise RuntimeError("wrong")

    instance = bench()
    results = [run_check(instance, Check(99, "x", check, (), "")) for check in (crash, fail)]
    assert [result.state for result in results] == ["failed"] * 2
    assert "unexpected EOF" in results[0].detail
    assert "it crashed or was restarted" in results[0].detail
    assert results[0].figures == {"figure": 7}
    assert "crashed" not in results[1].detail


@pytest.mark.engines("postgresql")
def test_refused_change_of_a_database_keeps_the_figures(bench, database, monkeypatch):
    right = sql.queries
    wrong = {"delayed": "ALTER DATABASE certify_database SET nothing = 1", "not_delayed": "SELECT 1"}

    def queries(engine, *arguments, **options):
        more = wrong if "certify" in (*arguments, *options.values()) else {}
        return {**right(engine, *arguments, **options), **more}

    monkeypatch.setattr(sql, "queries", queries)
    report = certify(bench(databases=True), [23])
    (result,) = report.results
    assert result.state == "ok", result.detail
    assert result.figures["library_pair_ms"] > 0
    assert result.figures["not_delayed_library_pair_ms"] > 0
    assert "not possible here: with delayed durability: ALTER DATABASE" in result.detail
    assert 'unrecognized configuration parameter "nothing"' in result.detail
    assert report.left == ""


# -- the command ------------------------------------------------------------------------------------------------------


def run(database, *words, url=None):
    return subprocess.run(
        [*CERTIFY, *words], capture_output=True, text=True, env=environment(database, url), timeout=PATIENCE
    )


def test_document_has_no_secrets_and_no_hosts(database, tmp_path):
    file = tmp_path / "result.json"
    done = run(database, "--only", "13", "--json", "-o", str(file))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert json.loads(file.read_text()) == document
    assert set(document) == {"format", "ok", "facts", "checks", "left"}
    assert document["format"] == 1
    assert document["ok"] is True
    assert {"engine", "server", "version", "driver", "sqlsem", "python", "schema"} <= set(document["facts"])
    (check,) = document["checks"]
    assert set(check) == {"number", "title", "state", "detail", "seconds", "figures"}
    bench = Bench(database.url, {}, WISHES)
    words = hidden_words(bench)
    bench.remove()
    assert words
    for word in words:
        assert word not in done.stdout


def test_words_are_hidden_everywhere_but_with_host(bench, database):
    instance = bench()
    report = certify(instance, [13])
    report.results.append(
        Result(99, "x", "failed", "server db.example.org of etl said no", 0.0, {"a": ["db.example.org"]})
    )
    report.hidden = {"db.example.org": "<server>", "etl": "<login>"}
    text = json.dumps(report.document())
    assert "db.example.org" not in text
    assert "server <server> of <login> said no" in text
    with_host = certify(bench(), [13], with_host=True)
    assert with_host.hidden == {}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--only", "99"], 64),
        (["--only", "x"], 64),
        (["--only", "13", "--skip", "13"], 64),
        (["--max-sessions", "1"], 64),
        (["nowhere://x"], 78),
        (["postgresql://nobody@127.0.0.1:1/x", "--only", "13"], 69),
        (["sqlite:////dev/null/all.db", "--only", "13"], 78),
        (["--admin-url", "memory://x", "--only", "13"], 78),
        (["memory://x"], 78),
    ],
)
@pytest.mark.engines("sqlite")
def test_exit_codes_of_a_refused_certification(database, words, code):
    done = run(database, *words)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


def test_command_tells_each_check_in_a_line(database):
    done = run(database, "--only", "2,13")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert re.match(r" 2 ok                every routine", next(line for line in lines if line.startswith(" 2")))
    assert re.match(r"\d ok, 0 failed, \d not possible here\.", lines[-1])
