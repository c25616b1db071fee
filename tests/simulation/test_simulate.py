"""Run sqlsem in virtual time: the search finds no failing schedule, and the former findings are kept as tests."""

import pytest
from support import PATIENCE, until
from support.searches import traces

import sqlsem
import sqlsem.testing
from sqlsem.client.callers import this_thread
from sqlsem.client.client import open_clients
from sqlsem.client.grants import Grant
from sqlsem.client.operations.acquire import Acquisition
from sqlsem.testing import simulate as simulation
from sqlsem.testing.simulate import FAULTS, SimulationFailed, converting, mixed, rated, simulate, travelling
from sqlsem.util.threads import SupervisedThread, log
from sqlsem.values.locks import Request

KINDS = {
    "beacons": {},
    "leases": {"lease": 6.0},
    "threads": {"threads": 2, "processes": 2},
    "a crowd": {"processes": 5, "steps": 400, "most_faults": 6},
    "nothing goes wrong": {"faults": (), "processes": 4},
    "conversions": {"program": converting},
    "rates": {"program": rated},
    "hand-overs": {"program": travelling},
    "hand-overs, leases, threads": {"program": travelling, "lease": 6.0, "threads": 2, "processes": 2},
    "conversions, leases, threads": {"program": converting, "lease": 6.0, "threads": 2, "processes": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_search_finds_nothing(kind):
    before = len(open_clients())
    assert simulate(**{"program": mixed, **KINDS[kind]}, schedules=150, seconds=5, seed=1000).schedules > 0
    assert len(open_clients()) == before


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_long_search_finds_nothing(kind):
    print(simulate(**{"program": mixed, **KINDS[kind]}, schedules=10**9, seconds=240, seed=10**6))


@pytest.mark.parametrize("fault", FAULTS)
def test_search_makes_each_fault(fault):
    """Search with this fault alone, up to eight times in a schedule."""
    simulate(mixed, faults=(fault,), most_faults=8, schedules=40, seconds=5, seed=5000)


def test_orphan_row_is_removed_while_threads_register():
    """While any thread waited to register, no heartbeat removed the row of a call whose answer was lost. So a thread
    waited behind its own row, and got `Deadlock`. (Found by a simulation.)
    """
    simulate(mixed, threads=2, replay="seed=432: 13 run A2; 24 restart 7")
    with sqlsem.testing.memory() as locks:
        client = locks.client
        client.member.call("acquire", lambda session, me: session.register(me, "id", "", "u", [Request("r")], False))
        assert len(locks.admin.entries("r")) == 1
        queues = Acquisition(client, locks.mutex("r").terms, [Request("r")], None, this_thread(), Grant, [])
        steps = queues.run()
        assert next(steps).what == "acquire"
        client.member.heartbeat()
        assert locks.admin.entries("r") == []
        steps.close()


def test_giver_learns_in_time_that_it_lost_the_lock():
    """A call that had put the lock in transit, without an answer, could take longer than the token was valid: others
    were granted, and the giver was not notified of its loss. (Found by a simulation.)
    """
    simulate(travelling, replay="seed=1123: 8 run A.watchdog; 11 slow A 7")


def test_registration_of_several_is_all_or_nothing():
    """The answer to a registration was lost, an operator revoked one of its rows, and the second attempt found the
    other ones: the caller continued as if it had all. (Found by a simulation.)
    """
    simulate(mixed, replay="seed=15181: 2 run C; 7 run B; 14 slow C 7; 15 revoke 0")


# -- findings in users' programs --------------------------------------------------------------------------------------


class Account:
    """A failure of a program under test."""

    def __init__(self):
        self.balance = 0

    def open(self):
        self.balance = 100

    def check(self):
        assert self.balance >= 0, f"overdrawn: {self.balance}"


def test_search_finds_a_read_outside_the_lock():
    account = Account()

    def withdraw(me):
        if account.balance >= 70:
            with me.locks.mutex("account"):
                me.step("withdraws")
                account.balance -= 70

    with pytest.raises(SimulationFailed, match="overdrawn: -40") as failed:
        simulate(withdraw, processes=2, faults=(), begin=account.open, always=account.check)
    assert failed.value.schedule.count(";") <= 1  # it takes one switch
    with pytest.raises(SimulationFailed, match="overdrawn: -40"):
        simulate(
            withdraw, processes=2, faults=(), begin=account.open, always=account.check, replay=failed.value.schedule
        )

    def better(me):
        with me.locks.mutex("account"):
            if account.balance >= 70:
                me.step("withdraws")
                account.balance -= 70

    simulate(better, processes=2, faults=("crash", "cut"), schedules=100, begin=account.open, always=account.check)


def test_program_may_use_the_default_coordinator():
    inside = []

    @sqlsem.limit("etl", 2)
    def load(me):
        inside.append(me.name)
        me.step("loads")
        inside.remove(me.name)

    lock = sqlsem.mutex("nightly")

    def nightly(me):
        load(me)
        lock.acquire()
        me.step("has it")
        lock.release()

    def check():
        assert len(inside) <= 2

    report = simulate(nightly, processes=4, faults=(), schedules=50, always=check, begin=inside.clear)
    assert report.schedules == 50


def test_search_finds_opposite_lock_orders():
    def transfer(me):
        first, second = ("a", "b") if me.number % 2 else ("b", "a")
        with me.locks.mutex(first):
            me.step("has one")
            with me.locks.mutex(second):
                pass

    with pytest.raises(SimulationFailed, match="Deadlock") as failed:
        simulate(transfer, processes=2, faults=())
    assert failed.value.kind == "error"
    assert failed.value.schedules < 100


def test_search_finds_a_lock_that_is_never_released():
    def forgets(me):
        me.locks.mutex("r").acquire()

    with pytest.raises(SimulationFailed) as failed:
        simulate(forgets, processes=2, faults=())
    assert failed.value.kind in ("left", "stuck")


def test_failure_is_readable_and_replays():
    def fails(me):
        with me.locks.mutex("r"):
            if me.name == "B":
                raise ValueError("B is inside")

    texts = []
    for _ in range(2):
        with pytest.raises(SimulationFailed, match="B is inside") as failed:
            simulate(fails, seed=7)
        texts.append([line.split("MainThread")[0] for line in str(failed.value).splitlines()])
    assert texts[0] == texts[1]
    assert "replay='seed=" in str(failed.value)
    assert any("register write on 'r': " in line for line in failed.value.steps)


@pytest.mark.parametrize(
    "options",
    [
        {"replay": "crash B"},
        {"replay": "seed=x: 1 run A"},
        {"faults": ("flood",)},
        {"processes": 0},
        {"database": "oracle"},
        {"jobs": 0},
    ],
)
def test_simulate_refuses_wrong_arguments(options):
    with pytest.raises(sqlsem.ConfigurationError):
        simulate(mixed, **options)


def test_several_processes_search_like_a_single_process():
    assert simulate(mixed, schedules=7, jobs=3).schedules == 7

    def fails(me):
        with me.locks.mutex("r"):
            assert me.world.seed != 5, "the sixth one"

    with pytest.raises(SimulationFailed, match="the sixth one") as failed:
        simulate(fails, schedules=20, jobs=2, faults=())
    assert failed.value.schedules == 6


def test_schedule_repeats_alone_and_after_others():
    options = simulation.Settings(travelling, faults=FAULTS, most_faults=3)
    after_others = traces(simulation.in_memory(), options, range(120))
    for seed in (119, 70, 7):
        assert traces(simulation.in_memory(), options, [seed])[seed] == after_others[seed]


def test_log_of_vital_threads_is_written_in_virtual_time(caplog):
    """Run at once: a thread would belong to one run, and other runs, or the end of the process, would wait for it."""

    def say():
        thread = SupervisedThread("sqlsem-said", lambda _: log.warning("This was said"), vital=True)
        thread.begin()
        thread.join(1)

    for number in range(2):
        say()
        until(lambda number=number: len(caplog.records) == number + 1, "it is written")
        trace = []
        settings = simulation.Settings(lambda me: say(), processes=1, faults=())
        with simulation.in_memory() as make:
            simulation._run(settings, make, 1, None, trace)
        assert sum("This was said" in line for line in trace) == 1
    log.flush(PATIENCE)


def test_shared_state_is_empty_at_the_start_of_a_run():
    def program(me):
        with me.locks.mutex("r"):
            me.shared["count"] = me.shared.get("count", 0) + 1
            assert me.shared["count"] <= 2

    simulate(program, processes=2, schedules=20, faults=())


def test_simulation_refuses_to_run_inside_another():
    with pytest.raises(SimulationFailed, match="virtual time already"):
        simulate(lambda me: simulate(mixed, schedules=1), schedules=1, faults=())


def test_other_coordinators_run_in_real_time():
    with sqlsem.testing.memory() as locks, locks.mutex("r") as grant:
        simulate(mixed, schedules=20, seed=3)
        assert not grant.lost
