"""The errors of PostgreSQL connections whose socket is closed."""

from types import SimpleNamespace

import pytest

from sqlsem.engines.base import Disconnected
from sqlsem.values.errors import Unavailable

psycopg = pytest.importorskip("psycopg")


def test_a_closed_socket_is_a_lost_connection():
    """Such a call is repeated on a new connection."""
    from sqlsem.engines.postgresql.connection import PsycopgConnection

    def fileno():
        raise psycopg.OperationalError("the connection is lost")

    error = psycopg.OperationalError("connection socket closed")
    session = SimpleNamespace(
        engine=SimpleNamespace(label="db"), _connection=SimpleNamespace(closed=False, fileno=fileno)
    )
    assert isinstance(PsycopgConnection.translate(session, error), Disconnected)
    session._connection.fileno = lambda: 5
    assert type(PsycopgConnection.translate(session, error)) is Unavailable
