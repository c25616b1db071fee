"""Bad values of every option and argument of every command: wrong usage, never an internal error.

Commands and their parameters are enumerated; `support.command_line` has the other arguments of a command. So a new
option is covered by itself, and a new command fails until it has a line there.
"""

import click
import pytest
from click.testing import CliRunner
from support import command_line

import sqlsem
from sqlsem import cli

BAD = {
    "half a surrogate pair": "a\udce4",
    "NUL": "a\0b",
    "escape": "a\x1b[2J\x1b]0;x\x07",
    "line break": "a\nb",
    "direction": "a\u202eb",
    "100 kB": "x" * 100_000,
    "empty": "",
    "blank": " ",
    "nan": "nan",
    "inf": "inf",
    "2^31": str(2**31),
    "2^63": str(2**63),
    "10^400": "1" + "0" * 400,
    "10^5000": "1" + "0" * 5000,
    "-1": "-1",
    "surrogate=2^63": f"a\udce4={2**63}",
    "name=10^400": "a=1" + "0" * 400,
    "rate": f"a={2**63}/1{'0' * 400}s:{2**63}",
    "period": f"a=1{'0' * 400}d",
    "json": "[" * 5000,
}
#: The exit codes of a command; see docs/reference/cli.md. Not 70, which means an internal error.
CODES = {0, 1, 64, 69, 75, 76, 78, 126, 127}
#: Further arguments that let a command end.
ENDING = {
    ("metrics",): ("--once",),
    ("run",): ("--mutex", "m", "--timeout", "0", "--", "true"),
    ("tasks", "wait"): ("q", "--timeout", "0"),
}
#: Options that go with any argument, for those that would wait.
WAITING = {("work",): ("--idle-exit", "1ms"), ("tasks", "wait"): ("--timeout", "0")}
#: It takes seconds where its values are good; `test_demo_refuses_bad_values` has its own.
SKIPPED = {("demo",)}


@pytest.fixture
def url(url, tmp_path, monkeypatch):
    monkeypatch.setenv("SQLSEM_TOKEN", "x")
    monkeypatch.chdir(tmp_path)
    from sqlsem.ops.dashboard import server

    monkeypatch.setattr(server, "serve", lambda *_: None)
    with sqlsem.connect(url, retry=1) as coordinator:
        coordinator.queue("q").put({"a": 1})
        with coordinator.mutex("a"):
            pass
    return url


def judge(words, wrong):
    """Run a command line, and append its faults to ``wrong``."""
    result = CliRunner().invoke(cli.main, words, input="")
    raised = result.exception is not None and not isinstance(result.exception, SystemExit)
    printed = result.output.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    hostile = [character for character in printed if not character.isprintable() and character not in "\n\u00a0"]
    if raised or result.exit_code not in CODES or "Traceback" in printed or hostile:
        shown = [word if len(word) < 40 else f"{word[:40]}…" for word in words]
        wrong.append((ascii(shown), result.exit_code, repr(result.exception)[:200], printed[-300:], hostile[:3]))


def needed(path, folder):
    """Return the example arguments that a command needs."""
    words_given = command_line.examples()[path]
    words = [word.format(folder=folder, port=0) for word in ENDING.get(path, words_given)]
    if path == ("work",):
        words = ["q", "--idle-exit", "1ms", "--kinds", "sql"]
    return words


def parameters():
    for path, command in command_line.commands():
        if path not in SKIPPED:
            yield pytest.param(path, command, id="-".join(path))


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("path", "command"), list(parameters()))
def test_options_with_bad_values_are_wrong_usage(path, command, url, tmp_path):
    wrong = []
    for parameter in command.params:
        for bad in BAD.values():
            example = needed(path, tmp_path)
            if isinstance(parameter.type, click.Path) and "\0" in bad:
                continue  # click looks at the file first; no argument of a program has one in it
            if not isinstance(parameter, click.Option):
                words = [*path, bad] if path in (("run",), ("put",)) else [*path, *WAITING.get(path, ()), "--", bad]
            elif parameter.is_flag or parameter.count:
                break
            else:  # the last one counts; the command of `run` stays behind its --
                at = example.index("--") if "--" in example else len(example)
                words = [*path, *example[:at], f"{parameter.opts[-1]}={bad}", *example[at:]]
            judge(words, wrong)
    assert wrong == []


def test_options_before_commands_with_bad_values_are_wrong_usage(url):
    wrong = []
    for parameter in cli.main.params:
        if isinstance(parameter, click.Option) and not (parameter.is_flag or parameter.count):
            for bad in BAD.values():
                judge([f"{parameter.opts[-1]}={bad}", "ls"], wrong)
    assert wrong == []


@pytest.mark.parametrize("options", [["--seconds"], ["--workers"], ["--limit"]])
def test_demo_refuses_bad_values(options, url):
    wrong = []
    for bad in BAD.values():
        judge(["demo", f"{options[0]}={bad}"], wrong)
        assert wrong == []


@pytest.mark.parametrize("name", ["SQLSEM_URL", "SQLSEM_PROFILE", "SQLSEM_TOKEN", "SQLSEM_DASHBOARD_TOKEN"])
def test_variables_with_bad_values_are_wrong_configuration(name, url, monkeypatch):
    wrong = []
    for bad in BAD.values():
        if "\0" not in bad:
            monkeypatch.setenv(name, bad)
            for words in (["ls"], ["run", "--adopt", "--", "true"], ["dashboard", "--private", "--port", "0"]):
                judge(words, wrong)
    assert wrong == []
