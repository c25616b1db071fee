"""Search for schedules in which locks, or a program that uses them, go wrong: in virtual time, and repeatable.

A *program* is a function that uses locks as any program does. Several simulated processes run it in parallel, on a
database in memory. Locks, membership and retries are the shipped code. But time is virtual, and one thing happens at a
time. A *schedule* says what happens next: which thread goes on, and which fault happens (`FAULTS`). It is drawn at
random from a seed. In its last phase there are no more faults, and every living process must be granted its locks.

>>> def nightly(me):
...     with me.locks.mutex("nightly"):
...         me.step("loads")
>>> simulate(nightly, schedules=20).schedules
20

Needs greenlet: ``pip install 'sqlsem[simulate]'``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import multiprocessing
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from sqlsem.ops.terminal import output
from sqlsem.testing.faults import FAULTS
from sqlsem.testing.fibers import Fibers
from sqlsem.testing.files import FileServer, files
from sqlsem.testing.server import in_memory
from sqlsem.testing.workloads import departing, leading, periodic, queued, ranked
from sqlsem.testing.world import Actor, Choice, MakeServer, Program, Settings, Violation, World, log_to_trace
from sqlsem.util import runtime
from sqlsem.values.errors import ConfigurationError, Deadlock, NotHeld, Timeout
from sqlsem.values.locks import Duration, check_count, check_duration

__all__ = [
    "FAULTS",
    "Actor",
    "Report",
    "SimulationFailed",
    "converting",
    "departing",
    "leading",
    "mixed",
    "periodic",
    "queued",
    "ranked",
    "rated",
    "simulate",
    "travelling",
]

#: The beginnings of PostgreSQL's URLs.
SERVERS = ("postgresql:", "postgres:")
#: Collect garbage after this many new objects during a search.
GARBAGE = 50_000
#: How long the search for a shorter schedule may take.
SHORTEN_SECONDS = 20.0
#: Show at most this many lines of a trace, the last ones.
MAX_LINES = 60
#: The result of a part: the numbers of schedules and steps, and the seed of the schedule that failed, if any did.
Part = tuple[int, int, int | None]
_TEXT = re.compile(r"seed=(\d+):\s*(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Report:
    """The size of a search that found nothing wrong."""

    schedules: int
    steps: int
    seconds: float

    def __str__(self) -> str:
        each = self.steps / max(self.schedules, 1)
        rate = self.schedules / max(self.seconds, 1e-9)
        return f"{self.schedules} schedules of {each:.0f} steps, {rate:.0f} a second: nothing found"


class SimulationFailed(AssertionError):
    """Raised for a schedule in which something goes wrong.

    Attributes:
        kind: 'overlap' (conflicting holders), 'loss' (reported late), 'phantom' (a grant without a row), 'twice' (a
            task that two workers run), 'left' (rows that stay), 'stuck' (a living process that is never granted),
            'error' (the program, or a check, raised); or a kind of finding of ``sqlsem audit``, such as 'order'.
        why: The violation, in words.
        schedules: How many schedules were tried, including this one.
        schedule: The shortened schedule, as text for ``replay=``.
        steps: The steps of the schedule, a line each.
    """

    def __init__(self, violation: Violation, schedules: int, schedule: str, steps: Sequence[str], drawn: int) -> None:
        self.kind = violation.kind
        self.why = violation.words
        self.schedules = schedules
        self.schedule = schedule
        self.steps = tuple(steps)
        shown = self.steps[-MAX_LINES:]
        left_out = [f"({len(self.steps) - len(shown)} lines before)"] if len(shown) < len(self.steps) else []
        shortened = len(_read(schedule)[1])
        super().__init__(
            "\n".join(
                [
                    f"{self.kind}: {self.why}",
                    f"found by schedule {schedules}, shortened from {drawn} choices to {shortened}; to repeat it: "
                    f"replay={schedule!r}",
                    *left_out,
                    *shown,
                ]
            )
        )


def simulate(
    program: Program,
    *,
    processes: int = 3,
    threads: int = 1,
    faults: Sequence[str] = FAULTS,
    most_faults: int = 3,
    schedules: int = 1000,
    seconds: Duration | None = None,
    seed: int = 0,
    steps: int = 200,
    grace: Duration = 5.0,
    lease: Duration | None = None,
    retry: Duration = 10.0,
    begin: Callable[[], object] | None = None,
    always: Callable[[], object] | None = None,
    database: str = "memory",
    jobs: int = 1,
    replay: str | None = None,
) -> Report:
    """Run a program by many schedules, and return the size of the search. Raises `SimulationFailed` for the first
    schedule in which something goes wrong: it has the shortened schedule, and the way to repeat it.

    Args:
        program: The function that each process runs, with its `Actor` as the argument. It makes blocking calls of
            ``me.locks``, a coordinator, which is also the default one. ``me.step()`` lets other processes run in
            between, ``me.sleep(60)`` lets time pass. If the program does not catch a loss (`LockLost`) or an
            unreachable database (`Unavailable`), it begins again, as a job would. It must not use threads or asyncio,
            or wait for anything real.
        processes: The number of processes that run the program.
        threads: The number of threads of each process that run the program.
        faults: The faults that may happen: some of `FAULTS`; none if it is empty. A process is killed (``crash``) or
            stopped for a while (``pause``). A connection breaks during a call (``cut``). One call (``slow``) or all
            calls (``stall``) take seconds. All sessions end (``restart``); a standby lacks the last releases
            (``failover``). The server's clock is set (``clock``). An operator revokes a lock (``revoke``), pauses a
            resource (``hold``), caps it (``cap``) or removes dead members (``reap``).
        most_faults: The greatest number of faults of a schedule.
        schedules: The number of schedules to try.
        seconds: The time after which the search ends in any case, in real time.
        seed: The seed of the first schedule; the next schedule has the next number.
        steps: The greatest number of steps before the last phase, which has no more faults.
        grace: As for `sqlsem.connect`, in virtual seconds; ``lease`` and ``retry``, too.
        begin: Called before each schedule: sets up the state that ``always`` checks.
        always: Called after each step; raises if the state is wrong (``assert balance >= 0``).
        database: ``memory``. Or ``sqlite``: the real engine on temporary files, some ten times slower, without the
            faults of servers. Or ``postgresql://…``: the real engine in a temporary database on that server, which
            needs a superuser; the server is neither restarted nor promoted.
        jobs: The number of processes that search; they are forked from this one.
        replay: The text of a schedule that failed: only this schedule is run.

    Raises:
        SimulationFailed: Something goes wrong: two conflicting holders, a loss that is reported too late, a living
            process that is never granted its locks, a deadlock, another exception of the program or of ``always``.
        ConfigurationError: An invalid argument, or a text that is no schedule.

    >>> simulate(mixed, processes=2, schedules=20, seed=7).schedules
    20
    """
    possible, databases = _database(database)
    settings = Settings(
        program,
        check_count("The number of processes", processes, maximum=100),
        check_count("The number of threads", threads, maximum=100),
        tuple(fault for fault in _known(faults) if fault in possible),
        check_count("The number of faults", most_faults, minimum=0),
        check_count("The number of steps", steps, minimum=11),
        check_duration("grace", grace),
        None if lease is None else check_duration("lease", lease, zero=False),
        check_duration("retry", retry),
        always,
        begin,
        databases,
    )
    check_count("The number of schedules", schedules)
    check_count("The seed", seed, minimum=0)
    if replay is not None:
        return _replay(settings, *_read(replay))
    limit = None if seconds is None else check_duration("seconds", seconds)
    check_count("The number of jobs", jobs, maximum=1000)
    return _search(settings, range(seed, seed + schedules), limit, jobs)


def _known(faults: Sequence[str]) -> Sequence[str]:
    """Return the faults, or raise `ConfigurationError` for an unknown one."""
    for fault in faults:
        if fault not in FAULTS:
            raise ConfigurationError(f"There is no fault {fault!r}; there are {', '.join(FAULTS)}")
    return faults


def _database(name: str) -> tuple[Sequence[str], Callable[[], contextlib.AbstractContextManager[MakeServer]]]:
    """Return the faults that can happen in a database, and the context manager of the function that makes it."""
    if name == "memory":
        return FAULTS, in_memory
    if name == FileServer.name:
        return FileServer.faults, files
    if name.startswith(SERVERS) or f"{name}:" in SERVERS:
        postgres = importlib.import_module("sqlsem.testing.postgres")  # which needs psycopg
        url = name if ":" in name else f"{name}://"
        return postgres.PostgresServer.faults, functools.partial(postgres.servers, url)
    shown = name.partition(":")[0]
    raise ConfigurationError(f"There is no simulation of {shown!r}; there are memory, sqlite and postgresql://…")


def _replay(settings: Settings, seed: int, choices: list[Choice]) -> Report:
    with settings.databases() as make:
        world = _run(settings, make, seed, choices)
        if world.violation is not None:
            raise _failed(settings, make, world.violation, 1, seed, choices, len(choices))
    return Report(1, world.steps, 0.0)


def _search(settings: Settings, seeds: range, seconds: float | None, jobs: int) -> Report:
    began = time.monotonic()
    search = functools.partial(_try, settings, None if seconds is None else began + seconds)
    done, taken, failed = search(seeds) if jobs == 1 else _search_beside(search, seeds, jobs)
    if failed is not None:
        with settings.databases() as make:
            world = _run(settings, make, failed)
            violation = world.violation or Violation("error", "something failed that does not fail again")
            choices = _shortened(settings, make, world) if world.violation else world.made
            raise _failed(settings, make, violation, failed - seeds[0] + 1, failed, choices, len(world.made))
    return Report(done, taken, time.monotonic() - began)


def _try(settings: Settings, until: float | None, seeds: Sequence[int]) -> Part:
    """Run the schedules of these seeds, until one fails or the time is over."""
    done = taken = 0
    with settings.databases() as make, _rare_garbage_collection():
        for seed in seeds:
            if until is not None and time.monotonic() >= until:
                break
            world = _run(settings, make, seed)
            done, taken = done + 1, taken + world.steps
            if world.violation is not None:
                return done, taken, seed
    return done, taken, None


def _search_beside(search: Callable[[Sequence[int]], Part], seeds: range, jobs: int) -> Part:
    """Search with these seeds in ``jobs`` processes, until all seeds are done or a schedule has failed. The processes
    are forked, as a program may not be picklable; raises `ConfigurationError` if the system cannot fork.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        raise ConfigurationError("jobs= needs fork(), which this system lacks; start several searches by hand")
    context = multiprocessing.get_context("fork")
    children = {}
    for job in range(min(jobs, len(seeds))):
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_search_part, args=(search, seeds[job::jobs], sender), daemon=True)
        child.start()
        sender.close()
        children[receiver] = child
    done = steps = 0
    failed: int | None = None
    running = list(children)
    try:
        while running and failed is None:
            for receiver in [connection for connection in running if connection in wait(running)]:
                running.remove(receiver)
                try:
                    part = receiver.recv()
                except EOFError:
                    raise RuntimeError("A process of the search ended without a result; see its output") from None
                done, steps, failed = done + part[0], steps + part[1], part[2] if failed is None else failed
    finally:
        for receiver, child in children.items():
            if receiver in running:
                child.terminate()
            child.join()
            receiver.close()
    return done, steps, failed


def _search_part(search: Callable[[Sequence[int]], Part], seeds: Sequence[int], sender: Connection) -> None:
    sender.send(search(seeds))
    sender.close()


@contextlib.contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """Collect garbage rarely: each schedule leaves thousands of objects in reference cycles."""
    before = gc.get_threshold()
    gc.set_threshold(GARBAGE, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _run(
    settings: Settings,
    make: MakeServer,
    seed: int,
    choices: Sequence[Choice] | None = None,
    trace: list[str] | None = None,
) -> World:
    before = random.getstate()
    fibers = Fibers()
    try:
        with runtime.instead(fibers):
            world = World(settings, fibers, make(fibers), seed, choices, trace)
            with log_to_trace(world):
                world.run()
    finally:
        random.setstate(before)
    return world


def _failed(
    settings: Settings,
    make: MakeServer,
    violation: Violation,
    done: int,
    seed: int,
    choices: Sequence[Choice],
    drawn: int,
) -> SimulationFailed:
    trace: list[str] = []
    again = _run(settings, make, seed, choices, trace).violation
    if again is None:
        trace.append("(It did not happen again: the program depends on more than its schedule.)")
    return SimulationFailed(again or violation, done, _text(seed, choices), trace, drawn)


def _text(seed: int, choices: Sequence[Choice]) -> str:
    return f"seed={seed}: " + "; ".join(f"{step} {words}" for step, words in choices)


def _read(text: str) -> tuple[int, list[Choice]]:
    match = _TEXT.fullmatch(text.strip())
    choices = []
    for part in match[2].split(";") if match is not None and match[2].strip() else ():
        step, _, words = part.strip().partition(" ")
        if not step.isdecimal() or not words.strip():
            match = None
            break
        choices.append((int(step), words.strip()))
    if match is None:
        raise ConfigurationError(f"This is no schedule, as 'seed=7: 12 run B; 30 crash A 0' is one: {text!r}")
    return int(match[1]), sorted(choices, key=lambda choice: choice[0])


def _shortened(settings: Settings, make: MakeServer, world: World) -> list[Choice]:
    """Return fewer choices that violate the same check: leave out larger parts first, then single choices."""
    assert world.violation is not None
    kind, until = world.violation.kind, time.monotonic() + SHORTEN_SECONDS

    def fails(choices: list[Choice]) -> bool:
        violation = _run(settings, make, world.seed, choices).violation
        return violation is not None and violation.kind == kind

    choices = list(world.made)
    if not fails(choices):
        return choices
    size = max(1, len(choices) // 2)
    while time.monotonic() < until:
        at, shorter = 0, False
        while at < len(choices) and time.monotonic() < until:
            fewer = choices[:at] + choices[at + size :]
            if fails(fewer):
                choices, shorter = fewer, True
            else:
                at += size
        if size > 1:
            size //= 2
        elif not shorter:
            break
    return choices


def mixed(me: Actor) -> None:
    """Use all kinds of locks; the default program with which `simulate` tests sqlsem itself."""
    locks, chance = me.locks, me.random
    for _ in range(chance.randrange(1, 3)):
        kind = chance.randrange(8)
        if kind <= 1:
            with locks.mutex("r"):
                me.step("inside")
        elif kind == 2:
            with locks.limit("s", 2, weight=chance.randrange(1, 3)):
                me.step("inside")
        elif kind == 3:
            with locks.read("w"):
                me.step("inside")
        elif kind == 4:
            with locks.write("w"):
                me.step("inside")
                me.sleep(chance.choice((0.0, 3.0, 9.0)))
        elif kind == 5:
            with locks.all_of(locks.mutex("r"), locks.limit("s", 2)):
                me.step("inside")
        else:
            lock = locks.mutex("r") if kind == 6 else locks.stage("g", chance.randrange(2))
            if lock.acquire(timeout=chance.choice((0, 1.0))):
                me.step("inside")
                lock.release()


def converting(me: Actor) -> None:
    """Upgrade readers and downgrade writers, beside other readers and writers."""
    locks, chance = me.locks, me.random
    for _ in range(chance.randrange(1, 3)):
        kind = chance.randrange(4)
        if kind == 0:
            with locks.write("w") as grant:
                me.step("writes")
                grant.downgrade()
                me.step("reads")
        elif kind == 1:
            with locks.read("w"):
                me.sleep(chance.choice((0.0, 3.0)))
        else:
            with locks.read("w") as grant:
                me.step("reads")
                with contextlib.suppress(Deadlock, Timeout):
                    grant.upgrade(timeout=chance.choice((0, 2.0, None)))
                    me.step("writes")
                    if kind == 2:
                        grant.downgrade()
                me.step("goes on")


def travelling(me: Actor) -> None:
    """Hand locks over, and adopt them in any process that has the token: also twice, too late, or never."""
    locks, chance = me.locks, me.random
    tokens = me.shared.setdefault("tokens", [])
    for _ in range(chance.randrange(1, 4)):
        kind = chance.randrange(5)
        if kind == 0:
            with locks.mutex("r") as grant:
                me.step("inside")
                tokens.append(grant.hand_over(ttl=chance.choice((2, 20))))
        elif kind == 1:
            with locks.all_of(locks.read("w"), locks.limit("s", 2)) as grant:
                tokens.append(grant.hand_over(ttl=20))
        elif kind == 2 and tokens:
            token = chance.choice(tokens)
            me.sleep(chance.choice((0.0, 0.0, 2.0)))
            with contextlib.suppress(NotHeld), locks.adopt(token):
                me.step("goes on with it")
        elif kind == 3:
            with locks.write("w"):
                me.step("writes")
        else:
            with locks.mutex("r"):
                me.step("inside")


def rated(me: Actor) -> None:
    """Take from rates, also together with locks, and return a part."""
    locks, chance = me.locks, me.random
    for _ in range(chance.randrange(1, 3)):
        cost = chance.randrange(1, 3)
        kind = chance.randrange(3)
        if kind == 0:
            with locks.rate("api", 3, per="10s", cost=cost) as grant:
                me.step("calls")
                grant.adjust(chance.randrange(4))
        elif kind == 1:
            locks.rate("api", 3, per="10s", cost=cost).take(timeout=chance.choice((0, 2.0, 30.0)))
        else:
            with locks.all_of(locks.mutex("r"), locks.rate("api", 3, per="10s")):
                me.step("calls alone")


PROGRAMS = {
    program.__name__: program
    for program in (mixed, converting, rated, travelling, departing, queued, ranked, leading, periodic)
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Test sqlsem itself: ``python -m sqlsem.testing.simulate --seconds 60``; returns 1 if it finds something."""
    parser = argparse.ArgumentParser(
        prog="python -m sqlsem.testing.simulate", description="Search for schedules in which sqlsem itself fails."
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="real time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lease", type=float)
    parser.add_argument("--program", choices=PROGRAMS, default="mixed")
    parser.add_argument("--database", default="memory", help="memory, sqlite or postgresql://…")
    parser.add_argument("-n", "--jobs", type=int, default=1, help="how many processes search")
    parser.add_argument("--replay")
    options = vars(parser.parse_args(arguments))
    try:
        report = simulate(PROGRAMS[options.pop("program")], schedules=2**31 - 1, **options)
    except SimulationFailed as exc:
        output.echo(*str(exc).splitlines())
        return 1
    output.echo(str(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
