"""Checks of `sqlsem certify` that only SQL Server can make, against sessions that answer as a test wants."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from sqlsem import sql
from sqlsem.ops.certify.bench import Bench, of_words
from sqlsem.ops.certify.checks import calling
from sqlsem.ops.certify.results import Failed, Notes, NotPossible
from sqlsem.ops.certify.sessions import Answer

TEXTS = sql.queries("mssql", file="certify")
#: The right codes of a session's calls: granted, not within the time, released, granted, released.
RIGHT = (0, -1, 0, 0, 0)
GUARDED = RuntimeError("sqlsem: writing to this table needs the lock 'certify-guarded'")


class Scripted:
    """A session. ``answers``: rows by the statement's name, or an error; ``codes``: of acquire and release in turn."""

    texts = TEXTS

    def __init__(self, codes=RIGHT, **answers):
        self.codes, self.answers, self.ran = list(codes), answers, []
        self.wire = SimpleNamespace(connection=self)

    def rows(self, name, *parameters, **words):
        self.ran.append(name)
        answer = self.answers.get(name, [])
        if isinstance(answer, list) and answer and isinstance(answer[0], (Exception, list)):
            answer = answer.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def value(self, name, *parameters):
        return self.rows(name, *parameters)[0][0]

    def run(self, text, *parameters):
        return [(len(text),)] if text.startswith("SELECT") else []

    def has(self, *names):
        return set(names) <= set(TEXTS)

    def acquire(self, resource, **options):
        code = self.codes.pop(0)
        if isinstance(code, Exception):
            raise code
        return Answer(code, 1, 1)

    def release(self, resource):
        return self.codes.pop(0)

    # As a connection of a driver, and as its cursor.

    def cursor(self):
        return self

    def execute(self, text):
        if "execute" in self.answers:
            raise self.answers["execute"]

    def fetchone(self):
        return ("a", "b")

    def close(self):
        pass


class ScriptedBench:
    """A bench that lends these sessions in turn; the last one again and again."""

    engine = SimpleNamespace(name="mssql")
    until = Bench.until

    def __init__(self, *sessions):
        self.sessions = list(sessions)

    def session(self, **words):
        return self.sessions.pop(0) if len(self.sessions) > 1 else self.sessions[0]

    admin_session = session

    def name(self):
        return "r"

    @contextlib.contextmanager
    def database(self, options, *changes):
        raise NotPossible("none may be created")
        yield


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr("sqlsem.ops.certify.bench.PATIENCE", 0.1)


def mars(caller, looking=None):
    notes = Notes()
    calling._mars(ScriptedBench(caller, looking or Scripted()), notes, "held", [])
    return notes


def test_driver_without_several_results_is_not_possible():
    notes = mars(Scripted(execute=RuntimeError("Connection is busy with results for another command")))
    assert notes.words == []
    assert "Connection is busy" in notes.skipped[0]


def test_call_beside_a_result_is_answered_or_refused():
    assert "request is answered with 0" in mars(Scripted(codes=(0, 0, *RIGHT))).detail
    words = "New transaction is not allowed because there are other threads running in the session (3988)"
    assert "refused (RuntimeError: New transaction" in mars(Scripted(codes=(RuntimeError(words), *RIGHT))).detail


@pytest.mark.parametrize(
    ("caller", "looking", "words"),
    [
        (Scripted(codes=(-1, *RIGHT)), None, "a free lock was answered with -1"),
        (Scripted(codes=(RuntimeError("3988"), *RIGHT)), Scripted(positions=[(1,)]), "the end of a request's row"),
        (Scripted(codes=(0, 0, 0, 0, 0, 0, 0)), None, "the answers were"),
    ],
    ids=["not granted", "a row is left", "granted twice"],
)
def test_wrong_answer_with_several_results_is_a_failure(caller, looking, words):
    with pytest.raises(Failed, match=words):
        mars(caller, looking)


def test_agents_session_must_be_answered_as_any_other():
    notes = Notes()
    calling._agent(ScriptedBench(Scripted(agent_setting=[("SET TEXTSIZE 1024",)])), notes, "held", [])
    assert "SQL Server Agent" in notes.detail
    with pytest.raises(Failed, match="after SET TEXTSIZE 1024"):
        wrong = Scripted(codes=(0, 0, 0, 0, 0), agent_setting=[("SET TEXTSIZE 1024",)])
        calling._agent(ScriptedBench(wrong), Notes(), "held", [])


def test_expression_that_the_server_lacks_is_not_compared():
    class Lacking(Scripted):
        def run(self, text, *parameters):
            if "TEXTSIZE" in text:
                raise RuntimeError("function sys.textsize() does not exist")
            return super().run(text)

    notes = Notes()
    session = Lacking(shown_settings=[("@@OPTIONS",), ("@@TEXTSIZE",)])
    assert calling._shown_here(ScriptedBench(session), notes) == ["@@OPTIONS"]
    assert "@@TEXTSIZE" in notes.skipped[0]


# -- groups -----------------------------------------------------------------------------------------------------------


def group(*answers):
    notes, sessions = Notes(), [Scripted(**answer) for answer in answers]
    try:
        calling._group(ScriptedBench(*sessions), notes, "229")
    finally:
        notes.ran = [name for session in sessions for name in session.ran]
    return notes


def test_login_of_no_group_is_not_possible():
    notes = group({"groups": []}, {})
    assert notes.words == []
    assert "log in by such a group" in notes.skipped[0]
    refused = group({"groups": [("DOMAIN\\etl",)]}, {"join_group": RuntimeError("Cannot alter the role (15151)")})
    assert "15151" in refused.skipped[0]


def test_member_of_a_group_is_let_in():
    notes = group({"groups": [("DOMAIN\\etl",)]}, {}, {"is_user": [(1,)]})
    assert notes.words == ["a Windows or Entra group"]
    assert "leave_group" in notes.ran


@pytest.mark.parametrize(
    ("member", "words"),
    [
        ({"is_user": [(0,)]}, "IS_MEMBER does not know"),
        ({"is_user": [(1,)], "acquire_as": RuntimeError("The EXECUTE permission was denied")}, "was refused"),
    ],
    ids=["IS_MEMBER", "EXECUTE"],
)
def test_member_of_a_group_that_is_refused_is_a_failure(member, words):
    with pytest.raises(Failed, match=words):
        group({"groups": [("DOMAIN\\etl",)]}, {}, member)


# -- guards -----------------------------------------------------------------------------------------------------------


def snapshot(session):
    notes = Notes()
    calling._guard_in_snapshot(ScriptedBench(session), notes)
    return notes


def test_guard_in_a_snapshot_refuses_and_lets_write():
    session = Scripted(codes=(0,), insert_guarded=[GUARDED, []])
    assert snapshot(session).words == ["SNAPSHOT isolation"]
    words = snapshot(Scripted(codes=(0,), read_counter=RuntimeError("not allowed (3952)"))).skipped[0]
    assert "none may be created" in words


@pytest.mark.parametrize(
    ("inserts", "words"),
    [([[], []], "without the lock: done"), ([GUARDED, GUARDED], "with the lock: RuntimeError")],
    ids=["without", "with"],
)
def test_guard_in_a_snapshot_that_is_wrong_is_a_failure(inserts, words):
    with pytest.raises(Failed, match=words):
        snapshot(Scripted(codes=(0,), insert_guarded=inserts))


def past_guard(tmp_path, **answers):
    notes, session = Notes(), Scripted(**answers)
    calling._past_guard(ScriptedBench(session), notes, session, tmp_path)
    return notes


def test_certificate_lists_writes_a_guard_cannot_see(tmp_path):
    notes = past_guard(tmp_path, insert_guarded=GUARDED)
    assert [words.partition(" ")[0] for words in notes.words] == ["switch", "bulk"]
    notes = past_guard(tmp_path, insert_guarded=GUARDED, bulk_past_guard=RuntimeError("could not be opened (4861)"))
    assert "4861" in notes.skipped[0]


def test_write_allowed_after_a_switch_is_a_failure(tmp_path):
    with pytest.raises(Failed, match="after switch: done"):
        past_guard(tmp_path)


def test_words_are_added_to_a_connection_string():
    assert of_words("mssql://u@h/d", {"APP": "SQL Agent"}) == "mssql://u@h/d?APP=SQL+Agent"
    assert of_words("mssql://h/d?a=b", {"MARS_Connection": "yes"}) == "mssql://h/d?a=b&MARS_Connection=yes"
    assert of_words("Server=h;", {"APP": "x"}) == "Server=h;APP=x"
