"""An installation that meets other sessions' locks: it waits for moments, and names the blocking session."""

import re

import pytest
from tdsserver import done, failure, result

from sqlsem import sql
from sqlsem.engines.mssql import session
from sqlsem.values.errors import Unavailable

LOCK_TIMEOUT = failure(1222, "Lock request time out period exceeded.")
DENIED = failure(300, "VIEW SERVER STATE permission was denied on object 'server', database 'master'.")
SESSIONS = result(
    ("session", "login", "program", "host", "state", "since"),
    (57, "etl\x1b[2J", "SSMS", "PC7", "idle in a transaction", "2026-01-02 03:04:05"),
    (58, "bi", "", "", "busy", "2026-01-02 03:04:06"),
)


@pytest.fixture
def later(monkeypatch):
    """Let this client bring a newer version than the tables', and make few attempts."""
    monkeypatch.setattr(sql, "LATEST", 2)
    monkeypatch.setattr(session, "INSTALL_SECONDS", 0.4)
    monkeypatch.setattr(session, "FIRST_INSTALL_PAUSE_SECONDS", 0.05)


def plan(installed):
    """The script of version 2, and one that is run each time."""
    return [
        (2, "ALTER TABLE sqlsem.entry ADD colour int\nGO\nSELECT 'second'"),
        (None, "ALTER PROCEDURE sqlsem.x AS RETURN 0"),
    ]


def server_answers(blocked, reply, blockers=SESSIONS):
    """Answer as a server with version 1 whose reply to statements that match ``blocked`` is ``reply()``."""

    def answer(said):
        if re.search(blocked, said.text):
            return reply()
        if "OBJECT_ID" in said.text:
            return result(("there",), (1,))
        if said.text.startswith("SELECT name, value FROM"):
            return result(("name", "value"), ("schema_version", "1"), ("features", "all"))
        if "dm_tran_locks AS l" in said.text:
            return blockers
        if "@@ERROR" in said.text:
            return result(("",), (0,))
        return done()

    return answer


def sent(server):
    """Return the statements of the installation, by a word of each."""
    words = {
        "BEGIN TRANSACTION": "begin",
        "COMMIT TRANSACTION": "commit",
        "ROLLBACK TRANSACTION": "rollback",
        "TABLOCKX": "lock",
        "ALTER TABLE": "table",
        "ALTER PROCEDURE": "procedure",
        "dm_tran_locks AS l": "blockers",
    }
    kinds = [word for text in server.texts() for start, word in words.items() if start in text]
    return kinds[kinds.index("begin") :]


@pytest.mark.parametrize("blocked", ["TABLOCKX", "ALTER TABLE", "ALTER PROCEDURE"])
def test_install_gives_up_and_names_the_sessions_in_the_way(tds, reach, later, blocked):
    server = tds(server_answers(blocked, lambda: LOCK_TIMEOUT))
    with pytest.raises(Unavailable) as caught:
        reach(server).install(plan)
    text = str(caught.value)
    assert "\x1b" not in text
    assert re.search(
        r"session 57 of login etl.*\[2J \(SSMS, PC7\), idle in a transaction since 2026-01-02 03:04:05 UTC", text
    )
    assert "session 58 of login bi (no name), busy since" in text
    assert "nothing was changed" in text
    assert "KILL" in text
    kinds = sent(server)
    assert "commit" not in kinds
    assert kinds.count("begin") == kinds.count("rollback") > 1, "tried again, and nobody was held up in between"
    assert kinds.count("blockers") == kinds.count("begin")


@pytest.mark.parametrize("number", [1222, 1205, 1204])
def test_install_tries_again_when_the_lock_is_free(tds, reach, later, number):
    refused = []

    def reply():
        refused.append(failure(number, "Somebody else was first."))
        return refused[-1] if len(refused) < 3 else done()

    server = tds(server_answers("ALTER TABLE", reply))
    reach(server).install(plan)
    kinds = sent(server)
    assert (kinds.count("rollback"), kinds.count("commit")) == (2, 1)
    assert kinds[-1] == "commit"
    assert kinds[-4:-1] == ["lock", "table", "procedure"]


def test_install_names_the_right_to_see_blocking_sessions(tds, reach, later):
    server = tds(server_answers("TABLOCKX", lambda: LOCK_TIMEOUT, blockers=DENIED))
    with pytest.raises(Unavailable, match=r"VIEW SERVER STATE .*VIEW DATABASE STATE"):
        reach(server).install(plan)


def test_install_does_not_wait_twice_for_another_installer(tds, reach, later):
    busy = failure(50002, "sqlsem: busy: another session has had the lock of installers for 120 s")
    server = tds(server_answers("install.sqlsem", lambda: busy))
    with pytest.raises(Unavailable, match="lock of installers"):
        reach(server).install(plan)
    assert sent(server) == ["begin", "rollback"]


def test_install_waits_for_no_lock_without_a_limit(tds, reach, later):
    server = tds(server_answers("nothing is in the way", done))
    reach(server).install(plan)
    texts = [text for text in server.texts() if "LOCK_TIMEOUT" in text]
    limits = [int(limit) for text in texts for limit in re.findall(r"SET LOCK_TIMEOUT (-?\d+)", text)]
    assert limits
    assert all(0 <= limit <= 5000 for limit in limits), limits
    script = next(number for number, text in enumerate(server.texts()) if "ALTER TABLE" in text)
    assert any("SET LOCK_TIMEOUT" in text for text in server.texts()[:script])
