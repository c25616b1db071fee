"""The main thread has ended, and others go on: Python ends a process after its last non-daemon thread."""

import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
import asyncio, sys, threading
import sqlsem

url, name = sys.argv[1:]
coordinator, other = sqlsem.connect(url, grace=30), sqlsem.connect(url, grace=30)
began = threading.Event()


async def work():
    async with coordinator.mutex(name):  # entered before, left after the end of the main thread
        began.set()
        while threading.main_thread().is_alive():
            await asyncio.sleep(0.01)
    for number in range(3):
        async with coordinator.mutex(name) as grant:
            await grant.check()
    async with coordinator.mutex(name):
        assert not await other.aio.mutex(name).acquire(timeout=0.2)  # waits in the database
        waiting = asyncio.create_task(other.aio.mutex(name).acquire(timeout=60))
        await asyncio.sleep(0.2)
    assert await waiting
    async with coordinator.aio.leader(name + "-leader", handle_sigterm=False):
        assert (await other.aio.leader(name + "-leader").current()) is not None
    async with coordinator.aio.once(name + "-once", "1h"):
        pass
    assert (await coordinator.aio.once(name + "-once", "1h").last()) is not None
    await other.aio.close()
    await coordinator.aio.close()
    print("done")


thread = threading.Thread(target=lambda: asyncio.run(work()))
thread.start()
began.wait()
"""


@pytest.mark.engines("sqlite", "postgresql")
def test_locks_of_asyncio_work_after_main_thread(database, name):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), database.url, str(name)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "done\n", done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 0
