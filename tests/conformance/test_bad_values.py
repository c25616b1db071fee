"""Bad values of every parameter of every public function and method, in both APIs.

Functions, methods and parameters are enumerated, not listed. `VALID` has a valid value for each parameter that must be
given, by name. A new parameter is covered by itself, or its test fails until it has a line there.
"""

import asyncio
import contextlib
import inspect

import pytest

import sqlsem
from sqlsem import aio, tasks
from sqlsem.aio import AsyncLocks
from sqlsem.api.coordinator import Coordinator
from sqlsem.batches.part import Part
from sqlsem.client import options
from sqlsem.tasks.task import Task

pytestmark = pytest.mark.engines("sqlite", "postgresql")

#: Seconds after which a call that was given a bad value has hung.
PATIENCE = 60.0

BAD = {
    "half a surrogate pair": "a\ud800",
    "NUL": "a\0b",
    "escape": "a\x1b[2J",
    "100 kB": "x" * 100_000,
    "empty": "",
    "blank": " ",
    "bytes": b"x",
    "NaN": float("nan"),
    "infinity": float("inf"),
    "-infinity": float("-inf"),
    "2^31": 2**31,
    "2^63": 2**63,
    "10^400": 10**400,
    "-1": -1,
    "-2^63-1": -(2**63) - 1,
    "half": 0.5,
    "true": True,
    "None": None,
    "object": object(),
    "list": [],
    "list of it": [object()],
    "dict": {},
    "dict of it": {"a\ud800": object()},
    "text": "x",
}


def nothing(*_):
    """A callback, and the function of a leader."""


async def nothing_async(*_):
    """The same callback for asyncio."""


#: Values of required parameters, by parameter name, or by class, function and name if the name is ambiguous.
VALID = {
    "name": lambda bench: bench.name("named"),
    "resource": lambda bench: bench.name("resource"),
    "limit": 3,
    "per": "1h",
    "order": 100,
    "token": "0123456789abcdef0123456789abcdef",
    "task_id": 1,
    "position": 1,
    "parts": ["a", "b"],
    "window": "1h",
    "url": lambda bench: bench.database.url,
    "seconds": "1h",
    "table": "public.nowhere",
    "kind": "lost",
    "command": "true",
    "statement": "SELECT 1",
    "text": "SELECT 1",
    "body": {"a": 1},
    "bodies": [{"a": 1}],
    "cron": "0 2 * * *",
    "key": "k",
    "weight": 2,
    "what": nothing,
    "error": "mended",
    "actual": 1,
    "cursor": object(),
    "connection": object(),
    "function": nothing,
    "queue": lambda bench: bench.coordinator.queue(bench.name("queue")),
    "several": lambda bench: bench.coordinator.mutex(bench.name("several")),
    "locks": lambda bench: bench.coordinator.mutex(bench.name("locks")),
    "result": None,
    "Batch.wait.timeout": 0.01,
    ("aio.Leader", "run", "function"): nothing_async,
    "sqlsem.Call.function": "os:getpid",
    "sqlsem.Call.args": 1,
    "tasks.Call.function": "os:getpid",
    "tasks.Call.args": 1,
}
#: Functions that this test does not call, with the reason.
NOT_CALLED = {
    ("sqlsem", "default"): "changes what this process has by default",
    ("sqlsem", "configure"): "changes what this process has by default",
    ("Worker", "run"): "runs until it is stopped",
    ("aio.Grant", "arm"): "for the package",
    ("aio.Grant", "disarm"): "for the package",
    **dict.fromkeys([("RateGrant", "made_by"), ("aio.RateGrant", "made_by")], "for the package"),
    **dict.fromkeys([("tasks", name) for name in ("check_cron", "check_put", "encode", "next_due")], "for the package"),
    **dict.fromkeys([("Part", name) for name in ("end_by", "opened")], "for the package"),
    **dict.fromkeys(
        [("Task", name) for name in ("all_of", "end_by", "ended_with", "hold", "make_end", "opened", "stop")],
        "for the package",
    ),
}
#: Classes that programs instantiate directly.
CONSTRUCTED = (tasks.Worker, tasks.Sql, tasks.Shell, tasks.Call)
#: Parameters that accept any value.
ANYTHING = {
    ("Queue", "put", "body"),
    ("Task", "finish", "result"),
    ("sqlsem", "Call", "args"),
    ("tasks", "Call", "args"),
}
#: Parameters whose None means: wait without a timeout.
FOR_EVER = {("Queue", "claim", "wait"), ("Batch", "wait", "timeout")}


class Bench:
    """The database, coordinator and new names that a call is tested with."""

    def __init__(self, database, coordinator, name):
        self.database, self.coordinator, self.names = database, coordinator, name
        self.count = 0

    def name(self, prefix):
        return self.names(f"{prefix}{self.count}")


@contextlib.contextmanager
def ended(subject, *ends):
    """Yield the object, then release all that the call left held."""
    try:
        yield subject
    finally:
        for end in ends:
            with contextlib.suppress(sqlsem.SqlsemError):
                end()


@contextlib.contextmanager
def a_lock(bench):
    lock = bench.coordinator.limit(bench.name("lock"), 3)
    with ended(lock, lock.release):
        yield lock


@contextlib.contextmanager
def a_grant(bench):
    lock = bench.coordinator.read(bench.name("grant"))
    lock.acquire()
    with ended(lock.grant, lock.release):
        yield lock.grant


@contextlib.contextmanager
def a_task(bench):
    queue = bench.coordinator.queue(bench.name("task"))
    queue.put({"a": 1})
    task = queue.try_claim()
    with ended(task, task.release):
        yield task


@contextlib.contextmanager
def a_worker(bench):
    yield tasks.Worker(bench.coordinator.queue(bench.name("worker")), 1, idle_exit=0.01)


@contextlib.contextmanager
def a_run(bench):
    run = bench.coordinator.once(bench.name("run"), "1h").begin()
    with ended(run, run.fail):
        yield run


@contextlib.contextmanager
def a_part(bench):
    part = bench.coordinator.batch(bench.name("part"), ["a", "b"], window="1h").part("a")
    part.start()
    with ended(part, part.finish):
        yield part


@contextlib.contextmanager
def a_term(bench):
    terms = []
    bench.coordinator.leader(bench.name("term"), handle_sigterm=False).run(terms.append)
    yield terms[0]


def plainly(make):
    """Return a maker of objects that need no cleanup."""

    @contextlib.contextmanager
    def making(bench):
        yield make(bench)

    return making


#: Class and maker of each subject. The class is None for functions of a module.
SUBJECTS = {
    "Coordinator": (Coordinator, plainly(lambda bench: bench.coordinator)),
    "Admin": (sqlsem.Admin, plainly(lambda bench: bench.coordinator.admin)),
    "Lock": (sqlsem.Lock, a_lock),
    "Grant": (sqlsem.Grant, a_grant),
    "Queue": (sqlsem.tasks.Queue, plainly(lambda bench: bench.coordinator.queue(bench.name("queue")))),
    "Task": (Task, a_task),
    "Worker": (tasks.Worker, a_worker),
    "Rate": (sqlsem.Rate, plainly(lambda bench: bench.coordinator.rate(bench.name("rate"), 3, "1h"))),
    "RateGrant": (
        sqlsem.RateGrant,
        plainly(lambda bench: bench.coordinator.rate(bench.name("rate"), 3, "1h").take()),
    ),
    "Leader": (
        sqlsem.Leader,
        plainly(lambda bench: bench.coordinator.leader(bench.name("lead"), handle_sigterm=False)),
    ),
    "Term": (sqlsem.Term, a_term),
    "Once": (sqlsem.Once, plainly(lambda bench: bench.coordinator.once(bench.name("once"), "1h"))),
    "Run": (sqlsem.Run, a_run),
    "Batch": (sqlsem.Batch, plainly(lambda bench: bench.coordinator.batch(bench.name("r"), ["a", "b"], window="1h"))),
    "Part": (Part, a_part),
    "aio.AsyncLocks": (AsyncLocks, plainly(lambda bench: bench.coordinator.aio)),
    "aio.Lock": (aio.Lock, plainly(lambda bench: bench.coordinator.aio.limit(bench.name("lock"), 3))),
    "aio.Grant": (aio.Grant, None),
    "aio.Rate": (aio.Rate, plainly(lambda bench: bench.coordinator.aio.rate(bench.name("rate"), 3, "1h"))),
    "aio.RateGrant": (aio.RateGrant, None),
    "aio.Leader": (
        aio.Leader,
        plainly(lambda bench: bench.coordinator.aio.leader(bench.name("lead"), handle_sigterm=False)),
    ),
    "aio.Once": (aio.Once, plainly(lambda bench: bench.coordinator.aio.once(bench.name("once"), "1h"))),
    "aio.Run": (aio.Run, None),
    "aio.Term": (aio.Term, None),
}


@contextlib.asynccontextmanager
async def held_async(bench, class_name):
    """Objects that exist only within a block of asyncio."""
    if class_name == "aio.Grant":
        async with bench.coordinator.aio.read(bench.name("grant")) as grant:
            yield grant
    elif class_name == "aio.RateGrant":
        yield await bench.coordinator.aio.rate(bench.name("rate"), 3, "1h").take()
    elif class_name == "aio.Run":
        run = await bench.coordinator.aio.once(bench.name("run"), "1h").begin()
        yield run
        with contextlib.suppress(sqlsem.SqlsemError):
            await run.fail()
    else:
        terms = asyncio.get_running_loop().create_future()

        async def lead(term):
            terms.set_result(term)

        await bench.coordinator.aio.leader(bench.name("term"), handle_sigterm=False).run(lead)
        yield terms.result()


def functions(owner):
    """The public functions of a class, or of the package, by name."""
    names = owner.__all__ if inspect.ismodule(owner) else [name for name in dir(owner) if not name.startswith("_")]
    members = {}
    for name in names:
        function = getattr(owner, name) if inspect.ismodule(owner) else inspect.getattr_static(owner, name)
        if isinstance(function, (staticmethod, classmethod)) or inspect.isroutine(function) or function in CONSTRUCTED:
            members[name] = getattr(owner, name)
    return members


def parameters(function):
    """Return the names of a function's parameters and options; True for required ones."""
    required = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.VAR_KEYWORD and parameter.annotation == "Any":
            continue  # the arguments of a function that a task calls
        if parameter.kind is parameter.VAR_KEYWORD:
            kind = getattr(options, parameter.annotation.removeprefix("Unpack[").removesuffix("]"))
            required |= dict.fromkeys(kind.__annotations__, False)
            for base in getattr(kind, "__orig_bases__", ()):
                required |= dict.fromkeys(getattr(base, "__annotations__", ()), False)
            required |= dict.fromkeys(kind.__optional_keys__, False)
        else:
            required[parameter.name] = parameter.default is parameter.empty
    return required


def owners():
    yield "sqlsem", sqlsem
    yield "aio", aio
    yield "tasks", tasks
    for class_name, (owner, _) in SUBJECTS.items():
        yield class_name, owner


def public_functions():
    for class_name, owner in owners():
        for name, function in functions(owner).items():
            if getattr(function, "__module__", "").startswith("sqlsem"):
                yield class_name, name, function


def value(bench, class_name, name, parameter):
    """Return a valid value for a parameter that is not under test."""
    for key in ((class_name, name, parameter), f"{class_name}.{name}.{parameter}", parameter):
        if key in VALID:
            valid = VALID[key]
            return valid(bench) if callable(valid) and getattr(valid, "__name__", "") == "<lambda>" else valid
    raise AssertionError(f"{class_name}.{name}() must be given {parameter!r}: add a line to VALID")


def words(bench, class_name, name, function, tested, bad):
    """Return the positional and named arguments of a call."""
    positional, named = [], {}
    kinds = {argument.name: argument.kind for argument in inspect.signature(function).parameters.values()}
    for parameter, required in parameters(function).items():
        given = bad if parameter == tested else None
        if parameter != tested:
            if parameter == "coordinator":
                given = bench.coordinator
            elif required or f"{class_name}.{name}.{parameter}" in VALID:
                given = value(bench, class_name, name, parameter)
            else:
                continue
        if kinds.get(parameter) in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            positional.append(given)
        else:
            named[parameter] = given
    return positional, named


def called(bench, class_name, name, function, tested, bad):
    """Call the function, and describe what is wrong with its outcome."""

    async def call_async(subject):
        positional, named = words(bench, class_name, name, function, tested, bad)
        result = (getattr(subject, name) if subject is not None else function)(*positional, **named)
        if inspect.isawaitable(result):
            await asyncio.wait_for(result, PATIENCE)

    async def within():
        async with held_async(bench, class_name) as subject:
            await call_async(subject)

    maker = SUBJECTS[class_name][1] if class_name in SUBJECTS else None
    try:
        if class_name.startswith("aio") and maker is None and class_name != "aio":
            asyncio.run(within())
        elif maker is None:
            asyncio.run(call_async(None))
        else:
            with maker(bench) as subject:
                if class_name.startswith("aio"):
                    asyncio.run(call_async(subject))
                else:
                    positional, named = words(bench, class_name, name, function, tested, bad)
                    result = getattr(subject, name)(*positional, **named)
                    if inspect.isgenerator(result):
                        next(result, None)
                        result.close()
                    elif hasattr(result, "__enter__") and name == "session":
                        with result:
                            pass
    except sqlsem.SqlsemError:
        return None
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"[:200]
    is_callback = tested.startswith("on_") and tested != "on_failure"
    return f"{tested}={type(bad).__name__} is accepted" if is_callback and bad is not None else None


CASES = [(what, name) for what, name, _ in public_functions() if (what, name) not in NOT_CALLED]


@pytest.fixture
def bench(database, name):
    with database.coordinator(retry=5) as coordinator:
        coordinator.admin.resources()
        yield Bench(database, coordinator, name)


@pytest.mark.leaves_rows
@pytest.mark.parametrize(("class_name", "function_name"), CASES, ids=lambda value: value)
def test_bad_values_are_refused_by_our_errors(class_name, function_name, bench):
    function = functions(dict(owners())[class_name])[function_name]
    wrong = {}
    for parameter in parameters(function):
        for label, bad in BAD.items():
            bench.count += 1
            case = (class_name, function_name, parameter)
            if case not in ANYTHING and not (bad is None and case in FOR_EVER):
                outcome = called(bench, class_name, function_name, function, parameter, bad)
                if outcome is not None:
                    wrong[parameter, label] = outcome
    assert wrong == {}


def test_everything_public_is_enumerated():
    """Every public class has a maker, and every exception from the rule still exists."""
    known = {(class_name, name) for class_name, name, _ in public_functions()}
    assert set(NOT_CALLED) <= known, "not there any more"
    classes = {
        member
        for module in (sqlsem, aio, tasks)
        for member in (getattr(module, name) for name in module.__all__)
        if inspect.isclass(member) and not issubclass(member, BaseException) and functions(member)
    }
    made_of = {owner for owner, _ in SUBJECTS.values()}
    assert {class_.__name__ for class_ in classes - made_of} <= {
        *(constructed.__name__ for constructed in CONSTRUCTED),
        "Subscription",
    }
