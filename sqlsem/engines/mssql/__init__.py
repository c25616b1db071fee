"""SQL Server and Azure SQL, through pyodbc or mssql-python."""

from __future__ import annotations

from sqlsem.engines.mssql.engine import SqlServerEngine, SqlServerSession

__all__ = ["SqlServerEngine", "SqlServerSession", "engine"]

engine = SqlServerEngine
