"""The URLs of MariaDB and MySQL databases."""

import contextlib

import pytest
from support import random_name

import sqlsem
from sqlsem import engines
from sqlsem.engines.base import Disconnected, Options

pytestmark = pytest.mark.engines("mysql")


def engine_of(url):
    return engines.of_url(url)(url, Options())


def test_any_character_may_be_in_a_password(mariadb_server, engine_name):
    with contextlib.ExitStack() as stack:
        login = random_name()[-20:]
        url = mariadb_server.create_login(login, "Käse: 100%/@?#'\"\\ 猫", database="mysql")
        stack.callback(mariadb_server.drop_login, login)
        engine_of(url).open_connection().close()


def test_servers_of_a_url_are_tried_in_turn(mariadb_server, engine_name):
    url = mariadb_server.url("mysql").replace("@127.0.0.1", "@127.0.0.1:1,127.0.0.1")
    engine = engine_of(url)
    engine.open_connection().close()
    assert "127.0.0.1:1, 127.0.0.1:" in engine.label
    with pytest.raises(Disconnected, match="Cannot reach"):
        engine_of("mysql://root@127.0.0.1:1,localhost:1/a").open_connection()


#: Parameters of a connection by which the server refuses it, and a part of its message.
REFUSED = {
    "database": ({"database": "no_such_database"}, "no_such_database"),
    "login": ({"user": "nobody_here"}, "nobody_here"),
}


def refusing(engine, monkeypatch, refusing_servers, parameters):
    """Let some servers of an engine refuse its connections, as those without its database or login."""
    open_on_server = engine._open_on_server

    def open_it(**other):
        return open_on_server(**other, **(parameters if engine.next_server in refusing_servers else {}))

    monkeypatch.setattr(engine, "_open_on_server", open_it)


@pytest.mark.parametrize("why", REFUSED)
@pytest.mark.parametrize("refusing_count", [1, 2])
@pytest.mark.parametrize("third", ["works", "is away", "is not there"])
def test_server_that_refuses_is_passed_over(mariadb_server, engine_name, monkeypatch, why, refusing_count, third):
    """An empty node of a cluster has neither the database nor the login. The other nodes serve."""
    parameters, word = REFUSED[why]
    url = mariadb_server.url("mysql")
    port = url.rpartition("/")[0].rpartition(":")[2]
    servers = [f"{host}:{port}" for host in ("127.0.0.1", "localhost")][:refusing_count]
    others = {"works": [f"127.1:{port}"], "is away": ["127.0.0.1:1"], "is not there": []}[third]
    engine = engine_of(url.replace(f"127.0.0.1:{port}", ",".join([*servers, *others])))
    refusing(engine, monkeypatch, servers, parameters)
    if third == "works":
        engine.open_connection().close()
        assert engine.next_server == others[0], "later connections begin there"
        return
    # (One that is away may come back, so the call is retried; its end names all reasons.)
    expected = Disconnected if third == "is away" else sqlsem.ConfigurationError
    with pytest.raises(expected) as caught:
        engine.open_connection()
    assert type(caught.value) is expected
    assert str(caught.value).count(word) == refusing_count
    assert ("Cannot reach" in str(caught.value)) is (third == "is away")


@pytest.mark.parametrize(
    "url",
    [
        "mysql://u@h",
        "mysql://u@h/",
        "mysql://u:secret@h:x/a",
        "mysql://u:secret@h/a?ssl=1",
        "mysql://h/a?ssl_disabled=1",
    ],
)
def test_wrong_urls_are_refused_without_the_password(url, engine_name):
    with pytest.raises(sqlsem.ConfigurationError) as caught:
        engine_of(url)
    assert "secret" not in str(caught.value)


def test_missing_certificates_are_named(mariadb_server, engine_name, tmp_path):
    url = f"{mariadb_server.url('mysql')}?ssl_ca={tmp_path / 'none.pem'}"
    with pytest.raises(sqlsem.ConfigurationError, match="ssl_ca"):
        engine_of(url).open_connection()
