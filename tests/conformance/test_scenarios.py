"""Placeholder."""


def test_database(database, connect, name):
    with connect().mutex(name) as grant:
        assert grant.position > 0
