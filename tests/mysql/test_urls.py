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
