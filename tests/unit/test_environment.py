"""Tests behave the same however they are started: they and their processes have one environment."""

import json
import locale
import os
import signal
import subprocess
import sys
import time

import pytest
from support import TESTS, environment
from support.commands import PATIENCE

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs signals of POSIX")
NOHUP = "SQLSEM_TEST_NOHUP"
#: Prints what a child process inherits: the signals that it ignores, but for those that Python does, and its umask.
INHERITED = (
    "import json, os, signal; "
    "ignored = [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]; "
    "print(json.dumps([ignored, os.umask(0), dict(os.environ)]))"
)
#: An environment in which nothing is as in a developer's terminal.
HOSTILE = {
    "TERM": "dumb",
    "COLUMNS": "40",
    "LINES": "5",
    "FORCE_COLOR": "1",
    "NO_COLOR": "1",
    "LANG": "tr_TR.ISO-8859-9",
    "LC_ALL": "C",
    "TZ": "America/St_Johns",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
    "PYTHONIOENCODING": "ascii",
    "PYTHONUNBUFFERED": "1",
    "PGUSER": "nobody",
    "PGHOST": "192.0.2.1",
    "PGOPTIONS": "-c statement_timeout=1",
    "http_proxy": "http://192.0.2.1:9",
    "GIT_DIR": "/nowhere",
    "SQLSEM_URL": "postgresql://192.0.2.1/nowhere",
    "SQLSEM_PROFILE": "nothing",
    "SQLSEM_REQUIRE_SERVER": "1",
    "XDG_CONFIG_HOME": "/nowhere",
    "CI": "",
}
#: Tests of the kinds that an environment disturbs: output, files of configuration, signals, locales, libpq.
SAMPLE = (
    "unit/test_environment.py",
    "unit/test_config.py",
    "unit/test_cli_run.py::test_ignored_signals_stay_ignored",
    "unit/test_cli_work.py::test_hangup_returns_all_tasks",
    "unit/test_cli_streams.py::test_commands_work_in_any_locale[C as it was]",
    "tui/test_top.py::test_screen_without_colour_has_the_same_text",
    "conformance/test_dead.py::test_history_names_the_revoking_operator",
)


def test_this_process_has_the_environment():
    for name, value in environment.VALUES.items():
        assert os.environ[name] == value
    assert [name for name in os.environ if environment.REMOVED.fullmatch(name) and name not in environment.VALUES] == []
    assert locale.nl_langinfo(locale.CODESET) == "UTF-8"
    assert time.tzname[0] in ("+1245", "CHAST", "UTC")  # the last where the time zones are not installed


def test_children_inherit_the_environment():
    process = subprocess.run([sys.executable, "-c", INHERITED], capture_output=True, check=True)
    ignored, umask, variables = json.loads(process.stdout)
    assert set(ignored) <= environment.BY_PYTHON
    assert umask == 0o022
    assert variables == dict(os.environ)


@pytest.mark.skipif(NOHUP not in os.environ, reason="only where the run itself is to outlive a hangup")
def test_run_outlives_a_hangup():
    os.kill(os.getpid(), signal.SIGHUP)


@pytest.mark.skipif(NOHUP in os.environ, reason="this run is the hostile one")
def test_sample_passes_in_a_hostile_environment():
    words = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", *SAMPLE]
    kept = {name: value for name, value in os.environ.items() if name != "HOME"}
    process = subprocess.run(
        ["sh", "-c", "trap '' HUP INT QUIT TERM USR1 CHLD; umask 077; exec \"$@\"", "sh", *words],
        env={**kept, **HOSTILE, NOHUP: "yes"},
        cwd=TESTS,
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE * 3,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
