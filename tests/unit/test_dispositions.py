"""Tests behave the same in the background and under nohup: their processes have the usual signal dispositions."""

import json
import os
import signal
import subprocess
import sys

import pytest
from support import TESTS, dispositions
from support.commands import PATIENCE

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs signals of POSIX")
NOHUP = "SQLSEM_TEST_NOHUP"
#: Prints the signals that this process ignores, but for those that Python does.
IGNORED = (
    "import json, signal; "
    "print(json.dumps([number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]))"
)


def test_children_ignore_no_signal():
    process = subprocess.run([sys.executable, "-c", IGNORED], capture_output=True, check=True)
    assert set(json.loads(process.stdout)) <= set(dispositions.BY_PYTHON)


@pytest.mark.skipif(NOHUP not in os.environ, reason="only where the run itself is to outlive a hangup")
def test_run_outlives_a_hangup():
    os.kill(os.getpid(), signal.SIGHUP)


def test_children_ignore_no_signal_under_nohup():
    words = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", f"{__file__}"]
    process = subprocess.run(
        ["sh", "-c", "trap '' HUP INT QUIT TERM USR1; exec \"$@\"", "sh", *words, "-k", "not nohup"],
        env={**os.environ, NOHUP: "yes", "CI": ""},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert "2 passed" in process.stdout, process.stdout + process.stderr
