"""Children of `multiprocessing` end by `os._exit`: they leave the database in order all the same."""

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.engines("sqlite", "postgresql")

#: A program that takes the database, the start method and the name of its function.
PROGRAM = textwrap.dedent(
    """
    import concurrent.futures, multiprocessing, sys, threading, time
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

    def terminate(context):
        entered = context.Event()
        child = context.Process(target=hold, args=(URL, entered))
        child.start()
        assert entered.wait(60)
        child.terminate()
        child.join()
        assert child.exitcode == -15, child.exitcode

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
            "terminate": lambda: terminate(context),
            "process": lambda: process(context, keep),
            "thread": lambda: process(context, finish_in_a_thread),
        }[WHAT]()
    """
)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("what", ["pool", "executor", "leave pool", "terminate", "process", "thread"])
def test_child_leaves_no_member_behind(database, connect, tmp_path, name, method, what):
    """With a grace of two minutes no client would notice its death so soon: it has deregistered."""
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
