"""The names of a database: a URL (SQLAlchemy's too), a path, an engine of SQLAlchemy; and refused names."""

import urllib.parse

import pytest

import sqlsem
from sqlsem import engines


def with_driver(database):
    names = {
        "postgresql": "postgresql+psycopg",
        "mssql": "mssql+pyodbc",
        "sqlite": "sqlite+pysqlite",
        "mysql": "mysql+pymysql",
    }
    scheme, _, rest = database.url.partition("://")
    if not rest:
        return f"mssql+pyodbc:///?odbc_connect={urllib.parse.quote_plus(scheme)}"
    return f"{names[database.engine]}://{rest}"


def test_sqlalchemy_url_is_accepted(database, name):
    with sqlsem.connect(with_driver(database), **database.options) as coordinator, coordinator.mutex(name):
        assert len(database.queue(name)) == 1


@pytest.mark.engines("sqlite", "postgresql", "mysql")
def test_sqlalchemy_engine_is_accepted(database, name):
    sqlalchemy = pytest.importorskip("sqlalchemy")
    engine = sqlalchemy.create_engine(with_driver(database), pool_size=1, max_overflow=0)
    try:
        with sqlsem.connect(engine) as coordinator:
            with coordinator.mutex(name), sqlsem.connect(engine) as other:
                assert not other.mutex(name).acquire(blocking=False)
                with engine.connect() as connection:  # sqlsem took its connections out of the engine's pool
                    assert connection.execute(sqlalchemy.text("SELECT 1")).scalar() == 1
                assert len(database.queue(name)) == 1
        if database.engine == "postgresql":
            with sqlsem.connect("postgresql://", creator=engine.raw_connection) as other, other.mutex(name):
                assert len(database.queue(name)) == 1
            assert engine.pool.checkedout() == 0
    finally:
        engine.dispose()


@pytest.mark.engines("mysql")
def test_sqlalchemy_engine_for_mysql_gives_its_url(database, name):
    sqlalchemy = pytest.importorskip("sqlalchemy")
    engine = sqlalchemy.create_engine(f"{with_driver(database)}?charset=utf8mb4")
    with sqlsem.connect(engine) as coordinator, coordinator.mutex(name) as grant, engine.begin() as connection:
        grant.assert_held(connection)
        assert len(database.queue(name)) == 1
    engine.dispose()


@pytest.mark.engines("postgresql", "mysql")
def test_async_sqlalchemy_engine_is_accepted(database, name):
    """Connections of an asyncio engine must be awaited, so sqlsem opens its own."""
    sqlalchemy = pytest.importorskip("sqlalchemy")
    engine = sqlalchemy.create_engine(with_driver(database))

    class Awaited:  # stands for AsyncEngine, which needs greenlet
        url, dialect, sync_engine = engine.url, engine.dialect, engine

        async def raw_connection(self):
            raise AssertionError("its connections are not for us")

    with sqlsem.connect(Awaited()) as coordinator, coordinator.mutex(name):
        assert len(database.queue(name)) == 1


@pytest.mark.engines("postgresql", "mysql")
def test_sqlalchemy_engine_of_another_driver_is_accepted(database, name):
    """The engine gives the URL, and sqlsem connects there with its own driver."""
    other = {"postgresql": "psycopg2", "mysql": "mysqldb"}[database.engine]

    class Url:
        def render_as_string(self, hide_password):
            assert hide_password is False
            return database.url.replace("://", f"+{other}://")

    class Dialect:
        name, driver = database.engine, other

    class Engine:
        url, dialect = Url(), Dialect()

        def raw_connection(self):
            raise AssertionError("its connections are not for us")

    with sqlsem.connect(Engine()) as coordinator, coordinator.mutex(name):
        assert len(database.queue(name)) == 1


def test_a_path(tmp_path):
    for folder in ("plain", "with blank %20 #1?"):
        path = tmp_path / folder / "locks.db"
        with sqlsem.connect(path) as coordinator, coordinator.mutex("a"):
            assert path.exists()
            assert coordinator.engine.path == path


class Other:
    """An engine of a database that sqlsem does not support."""

    class dialect:
        name, driver = "oracle", "oracledb"

    def raw_connection(self):
        raise AssertionError


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (None, "not by NoneType"),
        (5, "not by int"),
        (b"sqlite:///x.db", "not by bytes"),
        ("", "has no scheme"),
        ("locks.db", "has no scheme"),
        ("oracle+oracledb://u:secret@h/d", r"Unknown scheme 'oracle\+oracledb'"),
        (Other(), r"oracle\+oracledb cannot be used"),
    ],
)
def test_invalid_database_url_is_refused(url, words):
    for use in (sqlsem.connect, *([sqlsem.configure] if url is not None else [])):
        with pytest.raises(sqlsem.ConfigurationError, match=words) as caught:
            use(url)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "plain"),
    [
        ("postgresql+psycopg://u@h/d?x=1", "postgresql://u@h/d?x=1"),
        ("postgres+psycopg2://h/d", "postgres://h/d"),
        ("mssql+pyodbc://u:p@h/d?driver=X+1", "mssql://u:p@h/d?driver=X+1"),
        ("mssql+pyodbc:///?odbc_connect=Driver%3D%7BX%7D%3BServer%3Dh", "Driver={X};Server=h"),
        ("mysql+pymysql://u:p@h/d?charset=utf8mb4", "mysql://u:p@h/d?charset=utf8mb4"),
        ("mariadb+mariadbconnector://u:p@h/d", "mariadb://u:p@h/d"),
        ("sqlite+pysqlite:////tmp/x+y.db", "sqlite:////tmp/x+y.db"),
        ("postgresql://u+v@h/d", "postgresql://u+v@h/d"),
        ("Driver={a+b};Server=x://y", "Driver={a+b};Server=x://y"),
    ],
)
def test_missing_driver_names_the_extra(url, plain):
    assert engines.plain(url) == plain
