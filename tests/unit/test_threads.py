"""The starts of threads and the calls of a program's code: in one module each, or in a table here with a reason.

faults/test_thread_ends.py tests the ends of threads.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "sqlsem"

#: The names of calls that start a thread.
BEGINNERS = {
    "Thread",
    "Timer",
    "_AwaitedThread",
    "_AwaitedTimer",
    "start_new_thread",
    "ThreadPoolExecutor",
    "ProcessPoolExecutor",
    "run_in_executor",
    "run_in_threadpool",
    "to_thread",
    "thread",
    "timer",
}
#: The other places that may start a thread, beside `SupervisedThread`, `Pool` and `spawn`: file and name.
MAY_BEGIN = {
    ("util/runtime.py", "_AwaitedThread"): "what the others are made of",
    ("util/runtime.py", "_AwaitedTimer"): "logs what comes out of a timer",
    ("util/threads.py", "thread"): "the one place",
    ("util/shutdown.py", "start_new_thread"): "in a handler of signals, where threading may wait for itself",
    ("util/termination.py", "start_new_thread"): "interrupts the main thread by a signal",
    ("client/operations/handover.py", "timer"): "nothing of a program's is called",
    ("engines/failures.py", "timer"): "interrupts a session",
    ("engines/mssql/engine.py", "timer"): "shuts a socket",
    ("engines/mssql/session.py", "timer"): "interrupts a session",
    ("engines/mysql/engine.py", "timer"): "shuts a socket",
    ("util/tree_killer.py", "Thread"): "a process of its own, which loads nothing else; each ends one command",
    ("testing/fibers.py", "thread"): "virtual time",
    ("ops/dashboard/app.py", "run_in_threadpool"): "the web server's threads",
    ("ops/dashboard/feed.py", "run_in_threadpool"): "the web server's threads",
}

#: The parameters that take a program's callback.
CALLBACKS = {"on_lost", "on_task", "on_started", "on_stopped", "callback", "on_failed"}
#: The places that call a callback without `call_and_log`: file and function. They raise into the program's own call.
MAY_CALL = {
    ("util/threads.py", "call_and_log"): "the one place",
    ("client/event_bus.py", "_serve"): "in a task of the program's event loop; what it raises is logged",
    ("api/leader.py", "_stop"): "in the thread that leads; when the term is lost, by call_and_log",
    ("api/leader.py", "__enter__"): "in the thread that leads",
    ("aio/leader.py", "_call_on_stopped"): "in a task of the program's event loop",
    ("aio/leader.py", "__aenter__"): "in the task that leads",
    ("batches/declaration.py", "alarm"): "in the thread that leaves the part; what it raises is logged",
}

#: Parameters that sound like a callback and are none, or that are run as a task.
NO_CALLBACKS = {"on_failure", "on_stack", "on_success"}


def trees():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def called(node):
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def calls(tree):
    """Yield (innermost function, name, call) of each call."""

    def walk(node, function):
        for child in ast.iter_child_nodes(node):
            inner = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
            if isinstance(child, ast.Call):
                yield inner, called(child), child
            yield from walk(child, inner)

    return walk(tree, "")


def begun(name, tree):
    return {(name, called) for _, called, _ in calls(tree) if called in BEGINNERS}


def callback_calls(name, tree):
    return {
        (name, function)
        for function, called, _ in calls(tree)
        if called.removeprefix("_") in CALLBACKS or (called.startswith(("on_", "_on_")) and called != "on")
    }


def dropped(tree):
    """Find ``SupervisedThread(…).start()``: no variable keeps the thread, so no code looks after it."""
    return [
        node.lineno
        for _, what, node in calls(tree)
        if what == "start" and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call)
        if called(node.func.value) == "SupervisedThread"
    ]


def test_threads_begin_in_a_single_module():
    assert {place for name, tree in trees() for place in begun(name, tree)} == set(MAY_BEGIN)


def test_every_supervised_thread_is_kept():
    assert [(name, line) for name, tree in trees() for line in dropped(tree)] == []


def test_no_class_but_the_runtimes_is_a_thread():
    bases = {
        ast.unparse(base)
        for name, tree in trees()
        if name != "util/runtime.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
    }
    assert not [base for base in bases if base.split(".")[-1] in ("Thread", "Timer") and "Protocol" not in base]


def test_callbacks_are_called_by_a_single_function():
    uses = {call for name, tree in trees() for call in callback_calls(name, tree)}
    assert uses == set(MAY_CALL)


def parameters(tree):
    """Yield the parameters of functions, and the keys of options, that take a callback."""
    for node in ast.walk(tree):
        annotated = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            annotated = [(argument.arg, argument.annotation) for argument in (*node.args.args, *node.args.kwonlyargs)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            annotated = [(node.target.id, node.annotation)]
        for name, annotation in annotated:
            kinds = {"LostCallback", "Callback", "Listener"}
            names = {part.id for part in ast.walk(annotation or ast.Pass()) if isinstance(part, ast.Name)}
            if kinds & names or name.startswith("on_") or name == "callback":
                yield name


def test_every_callback_of_a_program_is_in_the_table():
    named = {parameter for _, tree in trees() for parameter in parameters(tree)}
    assert named - NO_CALLBACKS <= CALLBACKS
    assert named >= {"on_lost", "on_task", "on_started", "on_stopped", "callback"}


def test_client_logs_by_the_safe_logger():
    """A handler of the log may block: threads that detect losses hand their lines to another thread."""
    modules = {
        name
        for name, tree in trees()
        if name.startswith(("client/", "util/threads"))
        for _, called, _ in calls(tree)
        if called == "getLogger"
    }
    assert modules == {"util/threads.py"}


def test_scan_finds_seeded_faults():
    text = (
        "import threading\nclass A:\n    def f(self, on_done):\n        threading.Thread(target=on_done).start()\n"
        "        self._on_done(1)\n        SupervisedThread('a', f).start()\n"
    )
    tree = ast.parse(text)
    assert begun("x", tree) == {("x", "Thread")}
    assert callback_calls("x", tree) == {("x", "f")}
    assert dropped(tree) == [6]
    assert list(parameters(tree)) == ["on_done"]
