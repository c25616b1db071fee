"""Run programs on a real PostgreSQL server, in virtual time: the search finds nothing, except for bugs seeded into the
routines.
"""

from pathlib import Path

import pytest
from support import TESTS, random_name
from support.searches import FOUND, found, traces

import sqlsem
from proof import run_mutants
from sqlsem import sql
from sqlsem.testing import simulate as simulation
from sqlsem.testing.fibers import Fibers
from sqlsem.testing.simulate import converting, mixed, rated, simulate, travelling

pytest.importorskip("psycopg")
from sqlsem.testing import postgres

KINDS = {
    "beacons": {},
    "leases": {"lease": 6.0},
    "conversions": {"program": converting},
    "hand-overs": {"program": travelling},
    "rates": {"program": rated},
    "threads": {"threads": 2, "processes": 2},
}
#: Patches in proof/mutants. Every test run searches for the first one.
BUGS = ("no-gate", "barging")


@pytest.fixture
def url(postgres_server):
    return postgres_server.url()


@pytest.mark.parametrize("kind", ["beacons", "conversions", "hand-overs"])
def test_search_finds_nothing(url, kind):
    options = {"program": mixed, **KINDS[kind]}
    assert simulate(**options, database=url, schedules=6, seconds=300, seed=1000).schedules == 6


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_long_search_finds_nothing(url, kind):
    options = {"program": mixed, **KINDS[kind]}
    print(simulate(**options, database=url, schedules=10**9, seconds=240, seed=10**6))


def test_search_makes_faults(url):
    simulate(mixed, database=url, most_faults=8, schedules=6, seconds=4, seed=5000)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", postgres.PostgresServer.faults)
def test_search_makes_each_fault(url, fault):
    simulate(mixed, database=url, faults=(fault,), most_faults=8, schedules=20, seconds=60, seed=5000)


def test_schedule_repeats_alone_and_after_others(url):
    options = simulation.Settings(mixed, faults=postgres.PostgresServer.faults, most_faults=3)
    alone = traces(postgres.servers(url), options, [7])[7]
    assert not any("for a row" in line for line in alone)  # the host's clock decides how long that may take
    assert alone == traces(postgres.servers(url), options, range(5, 8))[7]


def test_blocked_session_continues_when_unblocked(url):
    """The block may also be at a gate that another session has in an open transaction."""

    def program(me):
        with me.locks.mutex("r"):
            me.step("inside")

    lines = []
    with postgres.servers(url) as make:
        settings = simulation.Settings(program, processes=3)
        for seed in range(6):
            simulation._run(settings, make, seed, None, lines)
    assert any("waits in the server for a lock" in line for line in lines)
    assert any("has got a lock in the server" in line for line in lines)
    assert any("COMMIT of: register" in line for line in lines)


def test_search_leaves_nothing_on_the_server(url):
    psycopg = pytest.importorskip("psycopg")
    with psycopg.connect(url, autocommit=True) as connection:

        def is_there(name):
            return connection.execute("SELECT FROM pg_database WHERE datname = %s", (name,)).fetchone() is not None

        with postgres.servers(url) as make:
            name = psycopg.conninfo.conninfo_to_dict(make(Fibers()).url)["dbname"]
            assert is_there(name)
        assert not is_there(name)
        # No other place replaces the functions of the system.
        assert connection.execute("SELECT FROM pg_proc WHERE proname LIKE '%%_of_the_host'").fetchall() == []


def test_unusable_server_is_refused_with_a_reason(postgres_server):
    psycopg = pytest.importorskip("psycopg")
    with pytest.raises(sqlsem.Unavailable, match="Cannot reach"):
        simulate(mixed, database="postgresql://127.0.0.1:1/none", schedules=1)
    role, word = random_name(), "a word"
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN CREATEDB PASSWORD '{word}'")
        try:
            with pytest.raises(sqlsem.ConfigurationError, match="superuser"):
                simulate(mixed, database=postgres_server.url(user=role, password=word), schedules=1)
        finally:
            connection.execute(f"DROP ROLE {role}")


# -- seeded bugs -----------------------------------------------------------------------------------------------------


def with_bug(patch, name):
    """Install the routines with a patch of proof/mutants."""
    texts = run_mutants.parse(run_mutants.FOLDER / f"postgresql-{name}.patch").mutated(TESTS.parent)
    changed = {Path(file).name: text for file, text in texts.items()}
    real = sql._read
    patch.setattr(
        sql, "_read", lambda engine, file: changed.get(file, real(engine, file)) if engine == "postgresql" else None
    )


@pytest.mark.parametrize(
    "name", [name if number == 0 else pytest.param(name, marks=pytest.mark.soak) for number, name in enumerate(BUGS)]
)
def test_search_finds_a_seeded_bug(url, name, monkeypatch):
    monkeypatch.setattr(simulation, "SHORTEN_SECONDS", 3.0)

    def put_in(patch):
        with_bug(patch, name)

    assert found(put_in, program=mixed, database=url).kind in FOUND
