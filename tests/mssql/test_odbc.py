"""SQL Server's answers in an outage, and the client's reactions through Microsoft's ODBC driver."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
from support import PATIENCE, until
from tdsserver import (
    COUNT,
    CUT,
    DEAF,
    ERROR,
    MORE,
    NO_TLS,
    SILENT,
    TLS_OFF,
    TLS_ON,
    Later,
    done,
    error,
    failure,
    logged_in,
    member,
    result,
    rows,
    warning,
)

import sqlsem
from sqlsem import ConfigurationError, SchemaError, TaskFailed, Unavailable
from sqlsem.engines.base import Busy, Disconnected, Options
from sqlsem.engines.mssql import SqlServerEngine
from sqlsem.engines.mssql.doctor import SqlServerDoctor
from sqlsem.values.locks import Ticket

EATEN = warning(8153, "Warning: Null value is eliminated by an aggregate or other SET operation.")
ROWS = rows(("a", "b"), (1, "x"), (None, None))


def says(answer, last_error=0):
    """Return the same answer to every statement; to @@ERROR that number."""

    def given(said):
        if "@@ERROR" in said.text:
            return result(("",), (last_error,))
        return answer

    return given


# -- errors of statements -------------------------------------------------------------------------------------------

MEANINGS = {
    50000: ("sqlsem: bad request: x", ConfigurationError),
    50001: ("sqlsem: register must not be called inside an open transaction", ConfigurationError),
    50002: ("sqlsem: busy: another session keeps the gate", Busy),
    50003: ("sqlsem: this connection changed sessions under its member", Disconnected),
    50004: ("sqlsem: not held", Unavailable),
    50005: ("sqlsem: this member is not known here", Disconnected),
    50006: ("sqlsem: this may be done by an operator only", ConfigurationError),
    50007: ("sqlsem: the part is started already", Unavailable),
    1204: ("The instance of the SQL Server Database Engine cannot obtain a LOCK resource at this time.", Busy),
    1205: ("Transaction (Process ID 52) was deadlocked on lock resources with another process.", Busy),
    1222: ("Lock request time out period exceeded.", Busy),
    8645: ("A timeout occurred while waiting for memory resources to execute the query.", Busy),
    208: ("Invalid object name 'sqlsem.setting'.", SchemaError),
    2812: ("Could not find stored procedure 'sqlsem.register'.", SchemaError),
    229: ("The EXECUTE permission was denied on the object 'register'.", ConfigurationError),
    601: ("Could not continue scan with NOLOCK due to data movement.", Busy),
    1202: (
        "The database principal 'sqlsem_locks' does not exist, or user is not a member.",
        ConfigurationError,
    ),
    596: ("Cannot continue the execution because the session is in the kill state.", Disconnected),
    976: ("The target database, 'books', is participating in an availability group", Disconnected),
    983: ("Unable to access availability database 'books'", Disconnected),
    3906: ('Failed to update database "books" because the database is read-only.', Disconnected),
    4060: ('Cannot open database "books" requested by the login. The login failed.', Disconnected),
    10928: ("Resource ID : 1. The request limit for the database is 60 and has been reached.", Disconnected),
    10929: ("The server is currently too busy to support requests greater than 0 for this database.", Disconnected),
    40613: ("Database 'books' on server 'x' is not currently available.", Disconnected),
    40501: ("The service is currently busy. Retry the request after 10 seconds.", Disconnected),
    6005: ("SHUTDOWN is in progress.", Disconnected),
    8134: ("Divide by zero error encountered.", Unavailable),
}


CHANGED = (50003, MEANINGS[50003][0])


def told(session, *parameters):
    with pytest.raises(sqlsem.SqlsemError) as caught:
        session.ask("test", f"EXEC test {', '.join('?' * len(parameters))}", parameters)
    assert "secret99" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("parameters", [(), (5, "x", None)], ids=["plain", "prepared"])
@pytest.mark.parametrize("before", [b"", EATEN, ROWS + done(COUNT | MORE, 2)], ids=["alone", "warned", "rows"])
@pytest.mark.parametrize("number", MEANINGS)
def test_errors(tds, reach, number, before, parameters):
    text, meaning = MEANINGS[number]
    session = reach(tds(says(before + failure(number, text), number)))
    found = told(session, *parameters)
    assert type(found) is meaning, found
    assert str(number) in str(found)
    assert session.usable == (meaning is not Disconnected)


@pytest.mark.parametrize("before", [b"", EATEN], ids=["alone", "warned"])
@pytest.mark.parametrize(
    "name", ["deadlock", "does not exist", "not known here", "permission denied", "x (50005)", "y (1205) (SQLExecute)"]
)
@pytest.mark.parametrize("number", [50000, 50004, 50002])
def test_names_in_our_own_messages_mean_nothing(tds, reach, number, name, before):
    session = reach(
        tds(says(before + failure(number, f"sqlsem: '{name}' is held, closed connection, timeout expired"), number))
    )
    assert type(told(session)) is MEANINGS[number][1]
    assert session.usable


def test_a_warning_alone_is_no_error(tds, reach):
    session = reach(tds(says(EATEN + result(("a",), (1,)))))
    assert session.ask("test", "EXEC test", ()) == [(1,)]
    assert session.ask("test", "EXEC test ?", (5,)) == [(1,)]


def test_a_session_goes_on_after_an_error_behind_a_warning(tds, reach):
    bad = threading.Event()
    bad.set()
    answer = says(EATEN + ROWS + done(COUNT | MORE, 2) + failure(1205, "deadlocked"), 1205)
    session = reach(tds(lambda said: answer(said) if bad.is_set() else result(("a",), (1,))))
    for _ in range(3):
        assert type(told(session)) is Busy
    bad.clear()
    assert session.ask("test", "EXEC test", ()) == [(1,)]


def test_an_error_behind_a_warning_that_the_server_cannot_tell(tds, reach):
    """The connection breaks meanwhile."""
    session = reach(tds(lambda said: CUT if "@@ERROR" in said.text else EATEN + failure(1205, "deadlocked")))
    assert type(told(session)) is Disconnected
    assert not session.usable


def test_rows_before_an_error_are_not_taken_for_the_answer(tds, reach):
    session = reach(tds(says(ROWS + done(COUNT | MORE, 2) + failure(50002, "sqlsem: busy: x"))))
    assert type(told(session)) is Busy


def test_of_several_errors_the_first_counts(tds, reach):
    answer = error(50002, "sqlsem: busy: x") + error(3621, "The statement has been terminated.", 0) + done(ERROR)
    assert type(told(reach(tds(says(answer))))) is Busy


def test_login_without_role_is_told_the_command(tds, reach):
    text = "The database principal 'sqlsem_locks' does not exist, or user is not a member."
    session = reach(tds(says(failure(1202, text), 1202)))
    assert "ALTER ROLE sqlsem_locks ADD MEMBER [someone]" in str(told(session))
    assert session.usable


@pytest.mark.parametrize(("seconds", "meaning"), [(61, Disconnected), (5, ConfigurationError)])
def test_a_changed_session_is_resumed_once(tds, engine_of, monkeypatch, seconds, meaning):
    """A driver that reconnects in silence does so now and then, a pool all the time."""
    engine = engine_of(tds(says(failure(*CHANGED), 50003)))
    first, second = engine.open_session("main"), engine.open_session("main")
    assert type(told(first)) is Disconnected
    assert not first.usable
    engine._session_changed -= seconds
    assert type(told(second)) is meaning
    first.close()
    second.close()


def test_a_member_resumes_where_its_session_changed(tds, url_of):
    whole = member()
    changed, resumed = [failure(*CHANGED)], []

    def answer(said):
        if ".reattach_member" in said.text:
            resumed.append(said.session)
        if ".heartbeat" in said.text and changed:
            return changed.pop()
        return whole(said)

    with sqlsem.connect(url_of(tds(answer)), retry=PATIENCE, grace=1) as coordinator, coordinator.mutex("a") as grant:
        until(lambda: resumed)
        assert not grant.lost
    assert not changed


# -- SQL of users ---------------------------------------------------------------------------------------------------


def works(text_of_user):
    """A worker's session: its own statements succeed."""

    def given(said):
        if said.text == "user":
            return text_of_user
        if "@@TRANCOUNT; IF" in said.text:
            return result(("open",), (1,))
        if "@@ERROR" in said.text:
            return result(("",), (547,))
        return done()

    return given


@pytest.mark.parametrize("number", [1205, 1222, 208, 229, 4060 + 1, 8134])
def test_an_error_of_a_task_is_its_own(tds, reach, number):
    session = reach(tds(works(failure(number, "what the user did"))))
    with pytest.raises(TaskFailed, match=rf"what the user did \({number}\)"):
        session.execute("user")
    assert session.usable


def test_a_task_that_fails_behind_a_warning(tds, reach):
    session = reach(tds(works(EATEN + failure(547, "The INSERT conflicted"))))
    with pytest.raises(TaskFailed, match=r"error 547, .*Null value"):
        session.execute("user")
    assert session.usable


def test_a_task_that_only_warns_succeeds(tds, reach):
    session = reach(tds(works(EATEN + done(COUNT, 3))))
    assert session.execute("user") == "3 rows"


# -- lines that break -----------------------------------------------------------------------------------------------


def test_a_cut_line(tds, reach):
    session = reach(tds(lambda _: CUT))
    assert type(told(session)) is Disconnected
    assert not session.usable
    assert type(told(session)) is Disconnected  # at once: no statement is sent any more


def test_a_line_cut_within_an_answer(tds, reach):
    server = tds(lambda _: Later(0.2, ROWS, then=threading.Timer(0.2, lambda: server.cut()).start))
    assert type(told(reach(server))) is Disconnected


@pytest.mark.parametrize("silence", [SILENT, DEAF], ids=str)
def test_a_server_that_falls_silent(tds, reach, silence):
    server = tds(lambda _: silence)
    session = reach(server)
    timer = threading.Timer(0.5, session.interrupt)
    began = time.monotonic()
    timer.start()
    assert type(told(session)) is Disconnected
    assert 0.4 < time.monotonic() - began < PATIENCE / 2
    until(lambda: server.ended == 1 or silence is DEAF, "the server sees it")


def test_a_cancelled_task_is_stopped_by_an_attention(tds, reach):
    server = tds(lambda said: SILENT if said.text == "user" else works(b"")(said))
    session = reach(server)
    stopper = threading.Thread(target=lambda: until(lambda: server.texts("user")) and session.cancel_running())
    stopper.start()
    with pytest.raises(TaskFailed, match="cancelled"):
        session.execute("user")
    stopper.join()
    assert server.attentions == 1


def test_a_server_deaf_to_the_attention_is_left(tds, reach):
    server = tds(lambda said: DEAF if said.text == "user" else works(b"")(said))
    session = reach(server)
    stopper = threading.Thread(target=lambda: until(lambda: server.texts("user")) and session.cancel_running())
    stopper.start()
    with pytest.raises((TaskFailed, Disconnected)):
        session.execute("user")
    stopper.join()
    assert not session.usable


# -- logins ---------------------------------------------------------------------------------------------------------

REFUSED = error(18456, "Login failed for user 'someone'.", 14) + done(ERROR)
LOGINS = {
    4060: (
        error(4060, 'Cannot open database "books" requested by the login. The login failed.', 11) + REFUSED,
        Disconnected,
    ),
    18401: (
        error(18401, "Login failed for user 'someone'. Reason: Server is in script upgrade mode.", 14) + done(ERROR),
        Disconnected,
    ),
    18456: (REFUSED, ConfigurationError),
    18470: (
        error(18470, "Login failed for user 'someone'. Reason: The account is disabled.", 14) + done(ERROR),
        ConfigurationError,
    ),
    40613: (error(40613, "Database 'books' on server 'x' is not currently available.", 17) + done(ERROR), Disconnected),
    40615: (
        error(40615, "Cannot open server 'x' requested by the login. Client is not allowed to access.", 14)
        + done(ERROR),
        ConfigurationError,
    ),
    976: (
        error(976, "The target database, 'books', is participating in an availability group", 14) + done(ERROR),
        Disconnected,
    ),
    17142: (error(17142, "SQL Server service has been paused.", 14) + done(ERROR), Disconnected),
}


@pytest.mark.parametrize("number", LOGINS)
def test_logins(tds, engine_of, number):
    answer, meaning = LOGINS[number]
    with pytest.raises(sqlsem.SqlsemError) as caught:
        engine_of(tds(login=lambda: answer)).open_session("main")
    assert type(caught.value) is meaning, caught.value
    assert str(number) in str(caught.value)
    assert "secret99" not in str(caught.value)


@pytest.mark.parametrize("number", LOGINS)
def test_logins_once_let_in(tds, engine_of, number):
    """A login that was accepted before is valid, and the server is not ready yet; but an account can be disabled."""
    answers = [logged_in(), LOGINS[number][0]]
    engine = engine_of(tds(login=lambda: answers.pop(0)))
    engine.open_session("main").close()
    with pytest.raises(sqlsem.SqlsemError) as caught:
        engine.open_session("main")
    expected = Disconnected if number == 18456 else LOGINS[number][1]
    assert type(caught.value) is expected, caught.value


def test_a_database_that_recovers_is_waited_for(tds, url_of):
    answers = [LOGINS[4060][0], LOGINS[18401][0], LOGINS[4060][0]]
    server = tds(member(), login=lambda: answers.pop(0) if answers else logged_in())
    with sqlsem.connect(url_of(server), retry=60) as coordinator, coordinator.mutex("a"):
        assert not answers


def test_a_cut_line_at_login(tds, engine_of):
    with pytest.raises(Disconnected):
        engine_of(tds(login=lambda: CUT)).open_session("main")


def test_a_server_that_falls_silent_at_login(tds, engine_of):
    began = time.monotonic()
    with pytest.raises(Disconnected):
        engine_of(tds(login=lambda: SILENT), options={"connect_timeout": 1.0}).open_session("main")
    assert time.monotonic() - began < PATIENCE / 2


def test_a_server_that_falls_silent_just_after_login(tds, engine_of):
    """pyodbc itself sends a query then, once for each connection string. It needs no answer, but waits for it without a
    limit."""
    server = tds(drivers=SILENT)
    session = engine_of(server, options={"connect_timeout": 1.0}).open_session("main")
    assert type(told(session)) is Disconnected


# -- TLS ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tls", [TLS_ON, TLS_OFF])
def test_untrusted_certificate_is_reported(tds, url_of, tls):
    server = tds(member(), tls=tls)
    began = time.monotonic()
    with (
        sqlsem.connect(url_of(server, Encrypt="yes"), retry=PATIENCE / 2) as coordinator,
        pytest.raises(ConfigurationError, match=r"certificate.*TrustServerCertificate=yes"),
        coordinator.mutex("a"),
    ):
        raise AssertionError("let in")
    assert time.monotonic() - began < PATIENCE / 2, "it was tried again"
    assert server.accepted == 1
    trusting = url_of(server, Encrypt="yes", TrustServerCertificate="yes")
    with sqlsem.connect(trusting) as coordinator, coordinator.mutex("a"):
        pass


def test_a_server_without_tls(tds, engine_of):
    server = tds(tls=NO_TLS)
    with pytest.raises(ConfigurationError, match="Encrypt=no"):
        engine_of(server, Encrypt="yes").open_session("main")
    engine_of(server, Encrypt="no").open_session("main").close()


@pytest.mark.parametrize(
    ("words", "answer", "told", "mended"),
    [
        (
            {"Encrypt": "yes", "TrustServerCertificate": "yes"},
            "TRUE",
            "encrypted; the server's certificate is not",
            True,
        ),
        ({"Encrypt": "no"}, "FALSE", "not encrypted", True),
        ({"Encrypt": "no"}, None, "takes VIEW SERVER STATE, or VIEW SERVER SECURITY STATE from 2022 on", True),
    ],
)
def test_the_doctor_tells_of_it(tds, engine_of, monkeypatch, words, answer, told, mended):
    denied = failure(300, "VIEW SERVER STATE permission was denied on object 'server', database 'master'.")
    tls = TLS_ON if words["Encrypt"] == "yes" else NO_TLS
    server = tds(says(denied if answer is None else result(("",), (answer,))), tls=tls)
    engine = engine_of(server, **words)
    session = engine.open_session("look")
    check = SqlServerDoctor(session).encryption()
    assert told in check.detail
    assert check.ok
    assert not check.mend  # it is this host
    monkeypatch.setattr(SqlServerEngine, "here", False)
    assert bool(SqlServerDoctor(session).encryption().mend) is mended
    session.close()


DENIED = failure(300, "VIEW SERVER STATE permission was denied on object 'server', database 'master'.")


@pytest.mark.parametrize(
    ("workers", "waiters", "told", "mend"),
    [
        (512, (100, 7, 3), "512 worker threads; of 7 members 3 wait, and 100 may", ""),
        (60, (100, 7, 3), "60 worker threads", "max_server_waiters to 15"),
        (512, (None, 7, 3), "as many as come may", "max_server_waiters to 128"),
        (512, (100, 300, 120), "120 wait", "refused"),
        (None, (100, 7, 3), "takes VIEW SERVER STATE); of 7 members 3 wait", ""),
        (512, None, "512 worker threads", ""),
        (None, None, "takes VIEW SERVER STATE", ""),
    ],
)
def test_the_doctor_compares_waiters_with_workers(tds, reach, workers, waiters, told, mend):
    def answer(said):
        if "dm_os_sys_info" in said.text:
            return DENIED if workers is None else result(("",), (workers,))
        return DENIED if waiters is None else result(("", "", ""), waiters)

    check = SqlServerDoctor(reach(tds(answer))).workers()
    assert check.ok
    assert told in check.detail
    assert mend in check.mend
    assert bool(mend) == bool(check.mend)


def asks(answers):
    """Return a fake server that gives these answers to waits, the last of them again and again; and its call times."""
    asked = []

    def wait(_):
        asked.append(time.monotonic())
        return result(("code",), (answers[min(len(asked), len(answers)) - 1],))

    return member(wait=wait), asked


def test_a_wait_that_finds_no_slot_pauses_here(tds, reach):
    """The client polls in pauses that grow to a second."""
    answer, asked = asks([2])
    session, began = reach(tds(answer)), time.monotonic()
    assert session.wait(Ticket("x", 1, "r", False), 2.0, threading.Event()) is False
    assert time.monotonic() - began >= 2.0
    assert 3 <= len(asked) <= 6


def test_notice_in_this_process_ends_that_pause(tds, reach, monkeypatch):
    monkeypatch.setattr("sqlsem.engines.mssql.session.FIRST_ELSEWHERE_SECONDS", 2 * PATIENCE)
    answer, asked = asks([2, 0])
    session, nudge, began = reach(tds(answer)), threading.Event(), time.monotonic()
    threading.Timer(0.1, nudge.set).start()
    assert session.wait(Ticket("x", 1, "r", False), PATIENCE, nudge) is True
    assert time.monotonic() - began < 10
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("words", "driver", "checked"),
    [
        ("", "libmsodbcsql-18.6.so.2.1 18.06.0002", True),
        ("", "libmsodbcsql-17.10.so.6.1 17.10.0006", False),
        ("Encrypt=yes", "libmsodbcsql-17.10.so.6.1 17.10.0006", True),
        ("Encrypt=optional", "libmsodbcsql-18.6.so.2.1 18.06.0002", False),
        ("TrustServerCertificate=Yes", "mssql_python 1.16.0", False),
        ("", "mssql_python 1.16.0", True),
        ("", "libtdsodbc.so 1.3", None),
        ("DSN=books", "libmsodbcsql-18.6.so.2.1 18.06.0002", None),
    ],
)
def test_whether_the_driver_checks_certificates(words, driver, checked):
    assert SqlServerEngine(f"Server=db;{words}", Options()).checks_certificate(driver) is checked


# -- what is sent ---------------------------------------------------------------------------------------------------


def test_a_missing_value_costs_no_round_trip(tds, reach):
    server = tds(says(result(("a",), (1,))))
    session = reach(server)
    del server.said[:]
    session.ask("test", "EXEC test ?, ?, ?, ?", (1, None, "x", None))
    assert [(call.rpc, call.text) for call in server.said] == [("sp_prepexec", "EXEC test @P1, NULL, @P2, NULL")]


def test_texts_of_all_lengths_share_a_statement(tds, reach):
    server = tds(says(result(("a",), (1,))))
    session = reach(server)
    for text in ("", "x", "abc" * 100, "ü" * 4000, "\N{GRINNING FACE}" * 2000):
        session.ask("test", "EXEC test ?", (text,))
    assert {call.types for call in server.said if call.types} == {"@P1 nvarchar(4000)"}


def test_coordinator_repeats_no_needless_statement(tds, url_of):
    """The coordinator does not repeat queries for facts that the driver could remember."""
    server = tds(member())
    with sqlsem.connect(url_of(server)) as coordinator:
        for number in range(5):
            with coordinator.mutex(f"{'x' * number}y"):
                pass
    assert not [call for call in server.said if call.rpc == "sp_describe_undeclared_parameters"]
    registered = {(call.text, call.types) for call in server.said if ".register @" in call.text and call.types}
    assert len(registered) == 1


# -- pools ----------------------------------------------------------------------------------------------------------


def test_a_pool_of_the_driver_manager_keeps_no_session(tds, driver, tmp_path):
    """A setting in odbcinst.ini makes unixODBC pool, whatever the program sets. A process reads it once."""
    (tmp_path / "odbcinst.ini").write_text(f"[ODBC]\nPooling=Yes\n[Pooled]\nDriver={driver}\nCPTimeout=600\n")
    server = tds(member())
    url = f"mssql://someone:secret99@127.0.0.1:{server.port}/books?driver=Pooled&Encrypt=no"
    program = f"""if True:
        import sqlsem
        for _ in range(3):
            with sqlsem.connect({url!r}) as coordinator, coordinator.mutex("a"):
                pass
            print("closed", flush=True)
            input()
    """
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "ODBCSYSINI": str(tmp_path)},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        for _ in range(3):
            assert child.stdout.readline() == "closed\n"
            until(lambda: server.ended == server.accepted, "all sessions have ended")
            child.stdin.write("\n")
            child.stdin.flush()
        assert child.wait(PATIENCE) == 0
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize(("code", "ok"), [(0, True), (1, True), (-1, False)])
def test_the_doctor_sees_a_session_that_outlives_its_connection(tds, reach, code, ok):
    """As after the program connected before sqlsem switched pyodbc's pool off."""

    def answer(said):
        return result(("", ""), (said.session, code if "Shared" in said.text else 0))

    server = tds(answer)
    check = SqlServerDoctor(reach(server)).closing()
    assert check.ok is ok
    assert ("pyodbc.pooling = False" in check.mend) is not ok
    assert server.accepted == 2


@pytest.mark.parametrize(
    ("enabled", "options", "detail", "noted"),
    [
        (0, {}, None, False),
        (None, {}, None, False),
        (1, {}, "a member's grace is 5 s", True),
        (1, {"grace": 30.0}, "a member's grace is 30 s", False),
        (1, {"lease": 20.0}, "a member's lease is 20 s", True),
    ],
)
def test_doctor_asks_for_a_grace_that_outlasts_a_failover(tds, engine_of, enabled, options, detail, noted):
    server = tds(says(result(("",), (enabled,))))
    session = engine_of(server, options=options).open_session("look")
    check = SqlServerDoctor(session).failover()
    assert (check.detail.partition("; ")[2] if check else None) == detail
    assert bool(check and check.mend) is noted
    session.close()


def test_a_data_source_does_not_reconnect_in_silence(tds, driver, tmp_path):
    (tmp_path / "odbc.ini").write_text(f"[books]\nDriver={driver}\nEncrypt=no\nConnectRetryCount=5\n")
    server = tds(member())
    program = """if True:
        import sys, time
        from sqlsem.engines.base import Disconnected, Options
        from sqlsem.engines.mssql import SqlServerEngine
        session = SqlServerEngine(sys.argv[1], Options()).open_session("main")
        print(session.settings(), flush=True)
        input()
        try:
            session.settings()
        except Disconnected:
            print("noticed", flush=True)
    """
    text = f"DSN=books;Server=127.0.0.1,{server.port};Database=books;UID=someone;PWD=secret99"
    child = subprocess.Popen(
        [sys.executable, "-c", program, text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "ODBCSYSINI": str(tmp_path), "ODBCINI": str(tmp_path / "odbc.ini")},
    )
    try:
        assert child.stdout is not None
        assert "schema_version" in child.stdout.readline()
        server.cut()
        until(lambda: server.ended == 1)
        assert child.communicate("\n", timeout=PATIENCE)[0] == "noticed\n"
    finally:
        child.kill()
        child.communicate()


# -- through the coordinator ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [b"", EATEN], ids=["alone", "warned"])
@pytest.mark.parametrize("routine", ["register_member", "register", "release", "heartbeat", "settings"])
def test_a_deadlock_between_rows_is_nobodys_business(tds, url_of, routine, before):
    """The call raises neither Deadlock nor Unavailable: it is repeated."""
    whole = member()
    victims = [1]
    asked = []

    def answer(said):
        if "@@ERROR" in said.text:
            return result(("",), (1205,))
        if f".{routine}" in said.text:
            asked.append(said.text)
            if victims:
                victims.pop()
                return before + failure(1205, "Transaction was deadlocked on lock resources", 13)
        return whole(said)

    with sqlsem.connect(url_of(tds(answer)), retry=PATIENCE, grace=1) as coordinator:
        with coordinator.mutex("a"):
            until(lambda: len(asked) >= 2 or routine != "heartbeat")
        assert len(asked) >= 2
