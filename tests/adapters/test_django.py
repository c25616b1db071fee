"""The adapter for Django, with real Django."""

import urllib.parse

import pytest

django = pytest.importorskip("django", reason="Django is not installed")

from django.conf import settings  # noqa: E402
from django.db import connections, transaction  # noqa: E402
from support import PATIENCE  # noqa: E402

import sqlsem  # noqa: E402
from sqlsem.adapters import django as adapter  # noqa: E402
from sqlsem.values.errors import ConfigurationError, NotHeld  # noqa: E402

pytestmark = pytest.mark.engines("sqlite", "postgresql")
NOTHING = {"ENGINE": "django.db.backends.dummy"}


@pytest.fixture
def alias(database, name):
    """Return the name of the test's database in Django's settings."""
    if not settings.configured:
        settings.configure(DATABASES={"default": NOTHING}, USE_TZ=True)
        django.setup()
    parts = urllib.parse.urlsplit(database.url)
    place = {"ENGINE": "django.db.backends.sqlite3", "NAME": parts.path[1:]}
    if parts.scheme == "postgresql":
        place = {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": parts.path[1:],
            "USER": parts.username,
            "HOST": parts.hostname,
            "PORT": parts.port,
        }
    connections.settings[name] = {**connections.settings["default"], **place}
    yield str(name)
    adapter.coordinator(name).close()
    connections[name].close()
    del connections.settings[name]


def test_locks_are_in_the_database_of_the_settings(alias, connect, name):
    coordinator = adapter.coordinator(alias)
    assert adapter.coordinator(alias) is coordinator
    with coordinator.mutex(name, note="from Django"):
        assert [entry.note for entry in connect().admin.entries(name)] == ["from Django"]
        connections[alias].close()  # as Django does after a request
        assert connect().mutex(name).locked()


def test_closed_coordinator_is_recreated(alias, name):
    adapter.coordinator(alias).close()
    with adapter.coordinator(alias).mutex(name):
        pass


def test_the_lock_ends_after_the_commit(alias, connect, name):
    states = []
    with adapter.atomic(adapter.coordinator(alias).mutex(name), alias) as grant:
        assert connections[alias].in_atomic_block
        transaction.on_commit(lambda: states.append(connect().admin.entries(name)[0].state), using=alias)
        assert grant.resource == name
    assert states == ["holds"]
    assert not connect().mutex(name).locked()


def test_nested_transaction_is_refused(alias, connect, name):
    with transaction.atomic(alias):
        with pytest.raises(RuntimeError, match="durable"):
            with adapter.atomic(adapter.coordinator(alias).mutex(name), alias):
                pytest.fail("it went in")
    assert not connect().mutex(name).locked()


def test_writes_after_a_loss_are_rolled_back(alias, connect, name):
    if connections[alias].vendor == "postgresql":
        with connections[alias].cursor() as cursor:
            cursor.execute("CREATE TABLE IF NOT EXISTS written (what text)")
    lock = adapter.coordinator(alias).mutex(name)
    with pytest.raises(sqlsem.LockLost):
        with lock as grant:
            connect().admin.revoke(grant.position, force=True)
            with transaction.atomic(alias):
                with connections[alias].cursor() as cursor:
                    grant.assert_held(cursor)
                pytest.fail("it did not notice")


def test_other_databases_are_refused(alias):
    with pytest.raises(sqlsem.ConfigurationError, match=r"'default' of Django's settings is unknown.*sqlsem\.connect"):
        adapter.coordinator("default")


def test_a_lock_goes_with_djangos_transaction(alias, connect, name):
    coordinator = adapter.coordinator(alias)
    with coordinator.mutex(name) as grant:
        with pytest.raises(ZeroDivisionError), transaction.atomic(using=alias):
            with connections[alias].cursor() as cursor:
                grant.release_on_commit(cursor)
            raise ZeroDivisionError
        grant.check()
        with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
            grant.release_on_commit(cursor)
        assert connect().mutex(name).acquire(timeout=PATIENCE)
        with pytest.raises(NotHeld):
            grant.check()


def test_djangos_autocommit_is_refused(alias, name):
    with adapter.coordinator(alias).mutex(name) as grant, connections[alias].cursor() as cursor:
        with pytest.raises(ConfigurationError, match="transaction"):
            grant.release_on_commit(cursor)
