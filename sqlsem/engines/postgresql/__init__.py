"""PostgreSQL, through psycopg 3."""

from __future__ import annotations

from sqlsem.values.errors import ConfigurationError

try:
    import psycopg  # noqa: F401 - first, for a message of our own if it is missing
except ImportError as exc:
    raise ConfigurationError(
        "PostgreSQL needs psycopg 3, which is not installed; get it with: pip install 'sqlsem[postgres]'", code="driver"
    ) from exc

from sqlsem.engines.postgresql.engine import PostgresEngine
from sqlsem.engines.postgresql.session import PostgresSession

__all__ = ["PostgresEngine", "PostgresSession", "engine"]

engine = PostgresEngine
