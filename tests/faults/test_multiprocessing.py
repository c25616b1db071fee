"""Children of `multiprocessing` end by `os._exit`: they leave the database in order all the same."""

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.engines("sqlite", "postgresql")

#: A program that takes the database, the start method and the name of its function.
PROGRAM = textwrap.dedent(
    """
    import concurrent.futures, multiprocessing, pathlib, signal, sys, threading, time
    import sqlsem

    URL, METHOD, WHAT, NAME = sys.argv[1:]
    GRACE = 120.0

    def begin(url):
        sqlsem.configure(url, grace=GRACE)

    def take(number):
        with sqlsem.limit(NAME, 2):
            return number

    def keep(url):
        begin(url)
        sqlsem.mutex(NAME).acquire()

    def finish_in_a_thread(url):
        begin(url)
        entered = threading.Event()

        def work():
            with sqlsem.mutex(NAME) as grant:
                entered.set()
                time.sleep(1)
                grant.check()
                print("checked", flush=True)

        threading.Thread(target=work).start()
        entered.wait()

    def pool(context):
        with_it = context.Pool(3, begin, (URL,))
        assert with_it.map(take, range(12), chunksize=1) == list(range(12))
        with_it.close()
        with_it.join()

    def executor(context):
        with concurrent.futures.ProcessPoolExecutor(2, mp_context=context, initializer=begin, initargs=(URL,)) as run:
            assert list(run.map(take, range(8))) == list(range(8))

    def leave_pool(context):
        with context.Pool(3, begin, (URL,)) as with_it:  # its end terminates the workers
            assert with_it.map(take, range(12), chunksize=1) == list(range(12))

    def hold(url, entered):
        begin(url)
        with sqlsem.mutex(NAME):
            entered.set()
            time.sleep(600)

    def terminate(context, target):
        entered = context.Event()
        child = context.Process(target=target, args=(URL, entered))
        child.start()
        assert entered.wait(60)
        if target is hold:
            child.terminate()
        child.join(30)
        code = child.exitcode
        child.kill()
        assert code == -15, code

    def hold_in_a_call(url, entered):
        begin(url)
        main, never = threading.main_thread(), threading.Lock()

        def terminate():
            looks = 0
            while looks < 20:
                state = pathlib.Path(f"/proc/self/task/{main.native_id}/stat").read_text().rpartition(")")[2].split()[0]
                looks = looks + 1 if state == "S" else 0
                time.sleep(0.01)
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

        with sqlsem.mutex(NAME), never:
            threading.Thread(target=terminate, daemon=True).start()
            entered.set()
            never.acquire()

    def hold_in_a_fork(url):
        begin(url)
        with sqlsem.mutex(NAME + "-parent"):
            terminate(multiprocessing.get_context("fork"), hold_in_a_call)

    def process(context, target):
        child = context.Process(target=target, args=(URL,))
        child.start()
        child.join()
        assert child.exitcode == 0

    if __name__ == "__main__":
        context = multiprocessing.get_context(METHOD)
        begin(URL)
        if METHOD == "fork":
            take(0)  # what the parent has must not confuse its children
        {
            "pool": lambda: pool(context),
            "executor": lambda: executor(context),
            "leave pool": lambda: leave_pool(context),
            "terminate": lambda: terminate(context, hold),
            "terminate in a call": lambda: terminate(context, hold_in_a_call),
            "terminate in a fork": lambda: process(context, hold_in_a_fork),
            "process": lambda: process(context, keep),
            "thread": lambda: process(context, finish_in_a_thread),
        }[WHAT]()
    """
)


WAYS = (
    "pool",
    "executor",
    "leave pool",
    "terminate",
    "terminate in a call",
    "terminate in a fork",
    "process",
    "thread",
)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("what", WAYS)
def test_child_leaves_no_member_behind(database, connect, tmp_path, name, method, what):
    """With a grace of two minutes no client would notice its death so soon: it has deregistered.

    "In a call": SIGTERM goes to another thread, so it interrupts no call of the main thread, like one that arrives just
    before a call. "In a fork": that happens to the child of a child, which has inherited its parent's handler.
    """
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    before = {member.member_id for member in connect().admin.overview().members}
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", program, database.url, method, what, str(name)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == ("checked\n" if what == "thread" else "")
    coordinator = connect()
    assert {
        member.member_id for member in coordinator.admin.overview().members if member.program == "program.py"
    } <= before
    assert {hold.outcome for hold in coordinator.admin.history(name)} == {"released"}
