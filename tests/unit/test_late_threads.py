"""``./test.sh --late`` delays the threads of sqlsem, and no others."""

import inspect
import threading

import pytest
from support import late_threads

import sqlsem.testing
from sqlsem.client.connection.main import MainConnection


@pytest.mark.parametrize(("name", "is_delayed"), [("sqlsem-commit", True), ("job", False)])
def test_threads_of_sqlsem_are_delayed(monkeypatch, name, is_delayed):
    pauses = []
    monkeypatch.setattr(MainConnection, "try_once", inspect.unwrap(MainConnection.try_once))  # (also with --late)
    monkeypatch.setattr(late_threads, "SHARE", 1.0)
    monkeypatch.setattr(
        late_threads, "sleep", lambda seconds: pauses.append((threading.current_thread().name, seconds))
    )
    assert not late_threads.is_late()
    late_threads.delay_threads()
    assert late_threads.is_late()
    with sqlsem.testing.memory() as locks:
        thread = threading.Thread(target=lambda: locks.mutex("a").acquire() and None, name=name)
        thread.start()
        thread.join()
    seconds = [seconds for thread, seconds in pauses if thread == name]
    assert bool(seconds) == is_delayed
    assert all(0 <= pause <= late_threads.MOST_SECONDS for pause in seconds)
