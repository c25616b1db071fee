"""``sqlsem dashboard``: the pages, the changes made from them, and the refusals."""

import dataclasses
import re
import threading
import time
from html.parser import HTMLParser

import pytest
from starlette.testclient import TestClient
from support import until
from support.overviews import ANSI, BIDI, MARKUP, NOW, FakePoller, a_night, entry, overview, resource

import sqlsem
from sqlsem.insight.board import VIEWS
from sqlsem.insight.consequences import Action
from sqlsem.ops.dashboard import access, feed
from sqlsem.ops.dashboard.app import Dashboard
from sqlsem.ops.dashboard.feed import Feed
from sqlsem.ops.hosts import LOOPBACK, Hosts, is_loopback
from sqlsem.ops.poller import Snapshot

try:
    import httpx2 as httpx
except ImportError:  # on Python 3.10
    import httpx

TOKEN = "correct-horse-battery-staple"
HOME = "http://127.0.0.1:8765"


def client_of(live, *, changes=True, token=TOKEN, **options):
    dashboard = Dashboard(live, Hosts(LOOPBACK), token, allow_changes=changes, **options)
    client = TestClient(dashboard.app, base_url=HOME, follow_redirects=False)
    client.headers["origin"] = HOME
    return client


@pytest.fixture
def client(live):
    return client_of(live)


def enter(client, token=TOKEN):
    return client.post("/login", data={"token": token})


def csrf_token(client):
    """The hidden fields in the forms of this session."""
    return re.search(r'name="csrf_token" value="([0-9a-f]+)"', client.get("/").text)[1]


def do(client, **fields):
    return client.post("/do", data={"csrf_token": csrf_token(client), **fields})


class Text(HTMLParser):
    """The text of a page, and its elements."""

    def __init__(self, html):
        super().__init__()
        self.words, self.tags, self.attributes = [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.extend((tag, name, value) for name, value in attrs)

    def handle_data(self, data):
        self.words.append(data)

    def __str__(self):
        return " ".join(" ".join(self.words).split())


def text(answer):
    return str(Text(answer.text))


# -- pages


@pytest.mark.parametrize("view", VIEWS)
def test_page_shows_each_view(client, view):
    answer = client.get("/", params={"view": view})
    assert answer.status_code == 200
    shown = text(answer)
    assert "PostgreSQL database dwh on db.example:5432" in shown
    assert "3 resources, 5 holding, 3 waiting" in shown
    for column in VIEWS[view].columns:
        if (view, column.key) != ("queues", "resource"):
            assert column.head in shown


def test_page_groups_requests_by_resource(client):
    shown = text(client.get("/"))
    assert "report 1 holding, 1 waiting PAUSED by ann" in shown
    assert "4 waits 16m00s limit 3 db1:804" in shown


def test_page_offers_rates_if_there_are_any(client):
    shown = text(client.get("/?view=rates"))
    assert "7 Rates" in shown
    assert "api 1m00s 100 103 0 12s 0 0.4s 5,210 40 31 mail" in shown
    page = text(client.get("/row", params={"view": "rates", "key": "w60 api"}))
    assert "rate 'api': 103 of 100 used in 1m00s, room in 12s; 0 waiting" in page
    assert "Pause the resource" in page
    assert "Set its limit" not in page
    without = client_of(FakePoller(overview([entry(1, "holds")])))
    assert "Rates" not in text(without.get("/"))
    assert "No rate has been used of late." in text(without.get("/?view=rates"))


def test_page_sorts_and_filters(client):
    shown = text(client.get("/?sort=seconds&q=db2"))
    assert "1 of 9 rows have “db2” in them." in shown
    page = Text(client.get("/?sort=seconds").text)
    assert ("th", "aria-sort", "descending") in page.attributes
    assert "No row has these words in it." in text(client.get("/?q=zzz"))
    assert text(client.get("/?view=nonsense&sort=nonsense")) == text(client.get("/"))


def test_links_keep_sort_and_filter(client):
    page = Text(client.get("/?view=queues&sort=seconds&q=db1 x%26y").text)
    links = [value for tag, name, value in page.attributes if (tag, name) == ("a", "href") and "view=" in value]
    assert links
    assert all("q=db1+x%26y" in link for link in links)


def test_page_shows_a_single_row(client):
    shown = text(client.get("/row?view=queues&key=p4"))
    assert "4 waits etl for 16m00s: limit 3, db1:804, load.py" in shown
    assert "Note: customers" in shown
    assert "Revoke the request" in shown
    missing = client.get("/row?view=queues&key=p99")
    assert missing.status_code == 404
    assert "That row is gone." in text(missing)


def test_page_shows_thousands_of_rows():
    client = client_of(FakePoller(overview(entry(position) for position in range(1, 2501))))
    page = client.get("/")
    assert page.text.count("<tr class=") == 2000
    assert "There are 501 more rows; filter to see them." in text(page)
    assert "2500 waits" in text(client.get("/?q=db1:3300"))


@pytest.mark.parametrize("name", [MARKUP, ANSI, BIDI, '"><img src=x onerror=alert(1)>', "'; alert(1)//", "{{ 7*7 }}"])
def test_page_escapes_names_with_markup(name):
    entries = [
        entry(1, "holds", name, host=name, note=name, program=name, owner=name, requesting_id=name),
        entry(2, "waits", name, limit=1),
    ]
    live = FakePoller(overview(entries, [resource(name, paused=True, paused_by=name)]))
    live.where = f"database {name}"
    client = client_of(live)
    enter(client)
    question = {"kind": "revoke", "position": 1}
    live.failure = sqlsem.NotHeld(name)
    pages = [
        *(client.get("/", params={"view": view, "q": ""}) for view in VIEWS),
        *(
            client.get("/", params={"q": name}),
            client.get("/row?key=p1"),
            client.get("/row", params={"key": f"r{name}"}),
        ),
        *(client.get("/ask", params=question), client.get("/ask", params={"kind": "resume", "resource": name})),
        do(client, **question),
    ]
    own = set(Text(client_of(FakePoller(a_night())).get("/").text).tags) | {"h3", "dl", "dt", "dd", "code", "input"}
    for page in pages:
        document = Text(page.text)
        assert set(document.tags) - {"script"} <= own | {"h2"}
        assert [value for tag, name, value in document.attributes if tag == "script" and name == "src"] in (
            ["/static/dashboard.js"],
            [],
        )
        assert not [name for _, name, _ in document.attributes if name.startswith("on") or name == "style"]
        assert str(document).isprintable()
        # The form must send the name itself, which is not displayed.
        assert all(
            value.isprintable()
            for tag, name, value in document.attributes
            if value and (tag, name) != ("input", "value")
        )
        assert "49" not in str(document).split()
    assert "\\x1b" in pages[0].text or name != ANSI
    assert "\\u202e" in pages[0].text or name != BIDI


def test_page_before_the_first_overview():
    client = client_of(FakePoller(Snapshot(down_since=NOW, trouble="Cannot reach it")))
    shown = text(client.get("/"))
    assert "The database has not answered since 03:12:05; trying again every 2 s. Cannot reach it" in shown
    assert "There is no data yet." in shown
    assert client.get("/row?key=p1").status_code == 404
    enter(client)
    assert client.get("/ask?kind=pause&resource=etl").status_code == 503


def test_page_shows_an_outage_and_the_last_overview(live, client):
    live.snapshot = dataclasses.replace(live.snapshot, down_since=NOW, trouble="connection refused")
    shown = text(client.get("/"))
    assert "The data below is of 03:12:05. connection refused" in shown
    assert "db1:801" in shown


def test_unknown_pages_and_rows_are_not_found(client):
    for path, status in (("/nothing", 404), ("/static/nothing", 404), ("/static/../app.py", 404), ("/do", 405)):
        answer = client.get(path)
        assert answer.status_code == status
        assert "content-security-policy" in answer.headers


def test_internal_error_is_a_page(live):
    class Broken(FakePoller):
        def refusal(self, action):
            raise ZeroDivisionError

    broken = client_of(Broken(a_night()))
    client = TestClient(broken.app, base_url=HOME, raise_server_exceptions=False)
    answer = client.get("/ask?kind=pause&resource=etl")
    assert answer.status_code == 500
    assert "This is a fault of sqlsem's (ZeroDivisionError)" in text(answer)


# -- changes

CHANGES = {
    "pause": ({"kind": "pause", "resource": "etl"}, "Pause 'etl'?", Action("pause", resource="etl")),
    "resume": ({"kind": "resume", "resource": "report"}, "Resume 'report'?", Action("resume", resource="report")),
    "cap": ({"kind": "cap", "resource": "etl", "cap": "5"}, "Limit 'etl' to 5?", Action("cap", resource="etl", cap=5)),
    "uncap": ({"kind": "uncap", "resource": "spare"}, "Remove the limit of 'spare'", Action("uncap", resource="spare")),
    "revoke": ({"kind": "revoke", "position": "1"}, "Revoke 1 of 'etl'", Action("revoke", position=1)),
    "revoke_now": ({"kind": "revoke_now", "position": "1"}, "Revoke at once 1", Action("revoke_now", position=1)),
    "retry": ({"kind": "retry", "task_id": "17"}, "Retry task 17?", Action("retry", task_id=17)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_is_confirmed_with_its_consequence(live, client, name):
    fields, question, action = CHANGES[name]
    before = client.get("/ask", params=fields)
    assert question in text(before)
    assert "Yes, do it" not in text(before), "the token has not been shown"
    assert enter(client).status_code == 303
    form = client.get("/ask", params=fields)
    assert question in text(form)
    assert f"The same as: {action.command}" in text(form)
    assert live.done == []
    answer = do(client, **fields, view="queues", q="db1")
    assert (answer.status_code, answer.headers["location"]) == (303, "/?view=queues&q=db1")
    assert live.done == [action]
    assert f"done: {action.command}" in text(client.get("/"))
    assert "done:" not in text(client.get("/")), "it is said once"


def test_impossible_change_has_no_button(client):
    enter(client)
    shown = text(client.get("/ask?kind=revoke&position=99"))
    assert "Position 99 is gone already" in shown
    assert "Yes, do it" not in shown


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kind": "drop", "resource": "etl"},
        {"kind": "pause"},
        {"kind": "cap", "resource": "etl"},
        *(
            {"kind": "cap", "resource": "etl", "cap": cap}
            for cap in ("0", "-1", "x", "1e3", "9" * 30, "2147483648", "²")
        ),
        {"kind": "revoke", "position": "1; DROP TABLE"},
        {"kind": "retry"},
    ],
)
def test_invalid_change_is_refused(live, client, fields):
    enter(client)
    assert client.get("/ask", params=fields).status_code == 400
    assert do(client, **fields).status_code == 400
    assert live.done == []


def test_failed_action_shows_its_error(live, client):
    enter(client)
    live.failure = sqlsem.NotHeld("There is no row at position 1")
    answer = do(client, kind="revoke", position="1")
    assert answer.status_code == 409
    assert "There is no row at position 1" in text(answer)


def test_reader_sees_missing_rights_beforehand():
    client = client_of(FakePoller(a_night(), rights=()))
    enter(client)
    answer = client.get("/ask?kind=pause&resource=etl")
    assert answer.status_code == 403
    assert "This login may only read" in text(answer)


def test_readonly_dashboard_names_commands_and_changes_nothing(live):
    client = client_of(live, changes=False, token=None)
    assert "read-only" in text(client.get("/"))
    page = text(client.get("/row?key=p6"))
    assert "What can be done Revoke the request sqlsem revoke 6 " in page
    assert "Resume the resource sqlsem resume report Set its limit sqlsem set report --limit N" in page
    assert client.get("/ask?kind=pause&resource=etl").status_code == 403
    assert client.post("/do", data={"kind": "pause", "resource": "etl"}).status_code == 403
    assert client.get("/login").status_code == 403
    assert live.done == []


def test_private_readonly_dashboard(live):
    client = client_of(live, changes=False, private=True)
    assert enter(client).status_code == 303
    assert "db1:801" in text(client.get("/"))
    assert do(client, kind="pause", resource="etl").status_code == 403
    assert live.done == []


# -- refusals


def refused(live, client, **request):
    """Send a change that is valid except for the modification by ``request``."""
    enter(client)
    fields = {"kind": "pause", "resource": "etl", "csrf_token": csrf_token(client)}
    headers = request.pop("headers", {})
    if request.pop("without_cookie", False):
        client.cookies.clear()
    answer = client.post("/do", data={**fields, **request}, headers=headers)
    assert live.done == []
    return answer.status_code


def test_change_requires_the_token(live, client):
    assert client.post("/do", data={"kind": "pause", "resource": "etl"}).status_code == 403
    for wrong in ("", "wrong", TOKEN[:-1], f"{TOKEN}x", "ä", "\x00"):
        answer = enter(client, wrong)
        assert answer.status_code == 403
        assert "set-cookie" not in answer.headers
        assert wrong == "" or wrong not in answer.text
    assert client.post("/do", data={"kind": "pause", "resource": "etl", "csrf_token": "0" * 64}).status_code == 403
    assert live.done == []


def test_change_requires_cookie_and_form_token(live):
    assert refused(live, client_of(live), without_cookie=True) == 403
    assert refused(live, client_of(live), csrf_token="") == 403
    assert refused(live, client_of(live), csrf_token="0" * 64) == 403
    assert refused(live, client_of(live), csrf_token="ä") == 403
    # Of another session.
    other = client_of(live)
    enter(other)
    assert refused(live, client_of(live), csrf_token=csrf_token(other)) == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "http://127.0.0.1:8765.evil.example"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"content-type": "text/plain"},
        {"content-type": "application/json"},
        {"content-type": "multipart/form-data; boundary=x"},
    ],
)
def test_change_from_another_origin_is_refused(live, headers):
    assert refused(live, client_of(live), headers=headers) in (400, 403)


def test_change_without_an_origin_is_refused(live):
    client = client_of(live)
    enter(client)
    fields = {"kind": "pause", "resource": "etl", "csrf_token": csrf_token(client)}
    del client.headers["origin"]
    assert client.post("/do", data=fields).status_code == 403
    assert client.post("/login", data={"token": TOKEN}).status_code == 403
    assert live.done == []


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8765", "127.0.0.1.evil.example", "localhost.evil.example:8765", "", "["),
        *("127.0.0.1:x", "user@127.0.0.1", "127.0.0.1/x", "127.0.0.2", "0.0.0.0:8765"),
    ],
)
def test_foreign_host_names_are_refused(live, client, host):
    """A foreign name that resolves to this host (DNS rebinding)."""
    for path in ("/", "/events", "/row?key=p4", "/static/dashboard.js", "/login"):
        answer = client.get(path, headers={"host": host})
        assert answer.status_code == 421, path
        assert "db1" not in answer.text
    assert client.post("/do", headers={"host": host, "origin": f"http://{host}"}).status_code == 421
    assert live.done == []


@pytest.mark.parametrize("host", ["127.0.0.1:8765", "localhost:8765", "LOCALHOST", "[::1]:8765"])
def test_own_host_names_are_accepted(client, host):
    assert client.get("/", headers={"host": host}).status_code == 200


def test_several_host_headers_are_refused(client):
    answer = client.get("/", headers=[("host", "127.0.0.1:8765"), ("host", "evil.example")])
    assert answer.status_code == 421


def test_head_of_the_stream_opens_no_stream(client):
    answer = client.head("/events")
    assert (answer.status_code, answer.content) == (200, b"")


def test_stream_refuses_other_origins(client):
    for headers in ({"sec-fetch-site": "cross-site"}, {"origin": "http://evil.example"}):
        assert client.get("/events", headers=headers).status_code == 403


def test_private_dashboard_requires_the_token(live):
    client = client_of(live, private=True)
    for path in ("/", "/events", "/row?key=p4", "/ask?kind=pause&resource=etl"):
        answer = client.get(path)
        assert (answer.status_code, answer.headers["location"]) == (303, "/login")
        assert "db1" not in answer.text
    assert "before anything is shown" in text(client.get("/login"))
    enter(client)
    assert "db1:801" in text(client.get("/"))


def test_security_headers(client):
    for path in ("/", "/login", "/static/dashboard.js", "/static/dashboard.css", "/nothing"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "*" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert headers["referrer-policy"] == "same-origin"


def test_cookie_is_httponly_and_samesite(client):
    cookie = enter(client).headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "path=/" in cookie
    assert TOKEN not in cookie
    assert "secure" not in cookie
    behind = client.post("/login", data={"token": TOKEN}, headers={"origin": HOME.replace("http", "https")})
    assert "secure" in behind.headers["set-cookie"].lower()


def test_logout_ends_the_session(live, client):
    enter(client)
    own_token = csrf_token(client)
    cookie = client.cookies["sqlsem-8765"]
    assert client.post("/logout", data={"csrf_token": "0"}).status_code == 303
    client.cookies.set("sqlsem-8765", cookie)
    assert client.post("/logout", data={"csrf_token": own_token}).status_code == 303
    client.cookies.set("sqlsem-8765", cookie, domain="127.0.0.1")
    assert client.post("/do", data={"kind": "pause", "resource": "etl", "csrf_token": own_token}).status_code == 403
    assert live.done == []


def test_wrong_tokens_do_not_lock_out_the_owner(client, caplog):
    for _ in range(access.MAX_FAILURES):
        assert enter(client, "wrong").status_code == 403
    for _ in range(50):
        answer = enter(client, "wrong")
        assert answer.status_code == 429
        assert "That is not the token." in text(answer)
    assert enter(client).status_code == 303
    assert [record.levelname for record in caplog.records] == ["WARNING"], "it is logged once"


def test_session_expires(live, client, monkeypatch):
    enter(client)
    fields = {"kind": "pause", "resource": "etl", "csrf_token": csrf_token(client)}
    now = time.monotonic() + access.SESSION_SECONDS + 1
    monkeypatch.setattr(access.time, "monotonic", lambda: now)
    assert client.post("/do", data=fields).status_code == 403
    assert live.done == []


def test_sessions_are_limited():
    sessions = access.Sessions(TOKEN)
    names = [sessions.log_in(TOKEN) for _ in range(access.MAX_SESSIONS + 5)]
    assert len(set(names)) == len(names)
    assert len(sessions._sessions) == access.MAX_SESSIONS


@pytest.mark.parametrize("token", ["short", "ä" * 20, ""])
def test_weak_tokens_are_refused(token):
    with pytest.raises(sqlsem.ConfigurationError, match="at least 16") as caught:
        access.Sessions(token)
    assert not token or token not in str(caught.value)


@pytest.mark.parametrize("body", [b"x" * 20_000, b"\xff\xfe", b"&".join(b"a=1" for _ in range(100))])
def test_malformed_forms_are_refused(live, client, body):
    enter(client)
    answer = client.post("/do", content=body, headers={"content-type": "application/x-www-form-urlencoded"})
    assert answer.status_code == 400
    assert live.done == []


# -- a real server


def events(url, path="/events", **options):
    """Yield server-sent events."""
    with httpx.Client(timeout=30) as client, client.stream("GET", url + path, **options) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        block = []
        for line in answer.iter_lines():
            if line:
                block.append(line)
            elif block:
                yield "\n".join(line.removeprefix("data: ") for line in block if line.startswith("data: "))
                block = []


def test_stream_sends_changes_at_once(live, serve):
    url = serve(live)
    stream = events(url, "/events?view=queues&q=db1")
    assert "db1:801" in next(stream)
    live.see(Snapshot(overview([entry(7, "holds")]), NOW))
    assert "db1:807" in next(stream)
    live.see(dataclasses.replace(live.snapshot, down_since=NOW, trouble="gone"))
    message = next(stream)
    assert "The database has not answered since 03:12:05" in str(Text(message))
    assert "db1:807" in message
    live.see(Snapshot(a_night(), NOW))
    assert "has not answered" not in next(stream)
    stream.close()


def test_equal_views_are_rendered_once(live, serve, monkeypatch):
    drawn = []
    from sqlsem.ops.dashboard.pages import Pages

    original = Pages.board
    monkeypatch.setattr(Pages, "board", lambda *arguments: drawn.append(1) or original(*arguments))
    url = serve(live)
    streams = [events(url) for _ in range(5)]
    for stream in streams:
        next(stream)
    assert len(drawn) == 1
    for stream in streams:
        stream.close()


def test_streams_are_limited(live, serve, monkeypatch):
    monkeypatch.setattr(feed, "MAX_STREAMS", 1)
    url = serve(live)
    stream = events(url)
    next(stream)
    assert httpx.get(f"{url}/events").status_code == 503
    stream.close()
    until(lambda: _first_status(f"{url}/events") == 200, "its place is free")


def _first_status(url):
    with httpx.stream("GET", url, timeout=30) as answer:
        return answer.status_code


def test_server_stops_while_pages_are_open(live, serve, monkeypatch):
    ended = []
    original = Feed.stop
    monkeypatch.setattr(Feed, "stop", lambda self: ended.append(1) or original(self))
    url = serve(live)
    stream = events(url)
    next(stream)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("Thread-")]
    assert threads
    rest = []
    reader = threading.Thread(target=lambda: rest.extend(stream))
    reader.start()
    serve.end()
    reader.join(20)
    assert not reader.is_alive(), "the stream ends"
    assert ended


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("127.example.org", False),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
    ],
)
def test_loopback_addresses_are_recognized(host: str, local: bool) -> None:
    assert is_loopback(host) is local
