"""The .NET client on .NET Core with System.Data.SqlClient, against a fake server: its handling of the answers.

tests/clients/test_dotnet.py has it with a real queue, where $SQLSEM_TEST_MSSQL_ADO is set.
"""

from __future__ import annotations

import time

import pytest
from tdsserver import COUNT, CUT, DEAF, MORE, SILENT, Later, done, failure, member, result, rows, warning


@pytest.fixture
def agent(converse):
    """Run the client's commands on a server with these answers, and return the server and the events."""
    return converse


ACQUIRE = {"do": "acquire", "name": "books", "timeout": "5"}


def test_it_starts(agent):
    server, events = agent(lambda _: done())
    assert [event["event"] for event in events] == ["ready"]
    assert server.accepted == 1


@pytest.mark.parametrize("before", [b"", warning(8153, "Warning: Null value is eliminated")], ids=["alone", "warned"])
@pytest.mark.parametrize(
    ("number", "text", "error", "words"),
    [
        (2812, "Could not find stored procedure 'sqlsem.register_member'.", "SqlSemSchemaException", "sqlsem init"),
        (
            229,
            "The EXECUTE permission was denied on 'register_member'.",
            "SqlSemConfigurationException",
            "role sqlsem_user",
        ),
        (40613, "Database 'books' is not currently available.", "SqlSemTimeoutException", "not granted within"),
    ],
)
def test_errors(agent, number, text, error, words, before):
    """test_numbers.py tests each number."""

    def answer(said):
        if "register_member" in said.text or "register" in said.text or "acquire" in said.text:
            return before + failure(number, text)
        return result(("",), (0,)) if "SELECT" in said.text else done()

    _, events = agent(answer, {"do": "acquire", "name": "books", "timeout": "1"})
    assert events[1]["event"] == "failed"
    assert events[1]["error"] == error
    assert words in events[1]["message"]


def test_a_cut_line(agent):
    _, events = agent(lambda _: CUT, ACQUIRE)
    assert events[1]["event"] == "failed"
    assert "secret99" not in events[1]["message"]


def test_an_error_after_rows(agent):
    def answer(said):
        del said
        return rows(("a",), (1,)) + done(COUNT | MORE, 1) + failure(50006, "sqlsem: you may not")

    _, events = agent(answer, ACQUIRE)
    assert (events[1]["event"], "you may not" in events[1]["message"]) == ("failed", True)


# -- waits that are cancelled ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("routine", ["register", "wait"])
def test_a_cancelled_statement_is_stopped_and_leaves_no_row(agent, tmp_path, routine):
    marker = tmp_path / "there"

    def silent(_):
        marker.touch()
        return SILENT

    answers = {"register": result(("position", "granted"), (9, 0)), routine: silent}
    answers["cancel"] = result(("cancelled",), (1,))
    server, events = agent(member(**answers), {"do": "acquire", "name": "books", "cancel_when": marker})
    assert events[1]["error"] in ("OperationCanceledException", "TaskCanceledException"), events
    assert server.attentions
    assert len(server.texts(r"\.cancel ")) == 1
    assert ".cancel " in server.said[-1].text, "nothing is asked after the row is gone"


def test_a_token_that_is_cancelled_already_asks_nothing(agent):
    server, events = agent(member(), {"do": "acquire", "name": "books", "cancel": "0"})
    assert events[1]["error"] in ("OperationCanceledException", "TaskCanceledException")
    assert server.said == []


# -- locks that are kept alive ----------------------------------------------------------------------------------------

KEPT = {"do": "acquire", "name": "books", "keep": "1", "watch": "1"}


def naps(seconds):
    return {"do": "sleep", "seconds": str(seconds)}


def pings(server):
    return len(server.texts(r"\.heartbeat "))


def beats(*, good, then, path=None):
    """A database that answers so many heartbeats, and later ones by ``then``; with the times of the answered ones."""
    times = []

    def ping(_):
        if len(times) >= good:
            if path is not None:
                path.touch()
            return then
        times.append(time.monotonic())
        return HELD

    return member(heartbeat=ping), times


HELD = result(("known", "position", "revoked"), (1, 1, 0))
REVOKED = result(("known", "position", "revoked"), (1, 1, 1))


@pytest.mark.parametrize("life", [{"grace": "4"}, {"lease": "4"}], ids=["session", "lease"])
def test_a_kept_lock_sends_heartbeats(agent, tmp_path, life):
    path = tmp_path / "there"
    database, _ = beats(good=3, then=HELD, path=path)
    _, events = agent(database, {**KEPT, **life}, {"do": "await file", "path": path}, {"do": "lost"}, {"do": "release"})
    assert [event["event"] for event in events[1:]] == ["granted", "seen", "looked", "released"]
    assert events[3]["lost"] is False


def test_a_lock_that_is_not_kept_sends_none(agent):
    server, _ = agent(member(), {**KEPT, "keep": "0", "grace": "0.6"}, naps(1), {"do": "release"})
    assert pings(server) == 1  # at its registration


def test_a_timer_ends_with_the_lock(agent):
    server, _ = agent(
        member(), {**KEPT, "grace": "0.6"}, {"do": "release"}, {"do": "execute", "text": "SELECT 'here'"}, naps(1)
    )
    assert server.said[-1].text == "SELECT 'here'"


@pytest.mark.parametrize("then", [REVOKED, CUT, DEAF], ids=["revoked", "cut", "deaf"])
def test_a_loss_is_reported_without_a_question(agent, then):
    """Before other clients may proceed: within the grace after the last answered heartbeat."""
    database, times = beats(good=3, then=then)
    _, all_events = agent(database, {**KEPT, "grace": "6"}, {"do": "await lost"}, {"do": "lost"})
    events = [event for event in all_events[1:] if event["event"] != "trouble"]
    assert [event["event"] for event in events] == ["granted", "lost", "looked"], all_events
    assert events[2]["lost"] is True
    assert events[1]["at"] - times[-1] < 6


def test_a_lost_lock_is_refused_from_then_on(agent):
    database, _ = beats(good=3, then=REVOKED)
    _, all_events = agent(
        database, {**KEPT, "grace": "4"}, {"do": "await lost"}, {"do": "check"}, {"do": "release"}, {"do": "release"}
    )
    events = [event for event in all_events[1:] if event["event"] != "trouble"]
    assert [event.get("error", event["event"]) for event in events] == [
        *("granted", "lost", "SqlSemLostException", "SqlSemLostException", "released"),
    ]


def test_a_closed_connection_is_reported(agent):
    _, events = agent(member(), {**KEPT, "grace": "0"}, {"do": "close"}, {"do": "await lost"})
    assert {event["event"] for event in events[1:]} == {"granted", "closed", "lost"}


def test_a_wait_sends_the_heartbeats_of_held_locks(agent):
    """The connection waits for another lock meanwhile."""
    granted = [result(("position", "granted"), (1, 1)), result(("position", "granted"), (2, 0))]
    answers = {"register": lambda _: granted.pop(0), "wait": Later(0.3, result(("code",), (-1,)))}
    answers["cancel"] = result(("cancelled",), (1,))
    answers["heartbeat"] = result(("known", "position", "revoked"), (1, 1, 0), (1, 2, 0))
    server, events = agent(
        member(**answers),
        {**KEPT, "grace": "4"},
        {"do": "acquire", "name": "other", "timeout": "5", "id": "other"},
        {"do": "release"},
    )
    assert [event["event"] for event in events[1:]] == ["granted", "failed", "released"], events
    waits = [number for number, message in enumerate(server.said) if ".wait " in message.text]
    assert [message for message in server.said[waits[0] : waits[-1]] if ".heartbeat " in message.text]
