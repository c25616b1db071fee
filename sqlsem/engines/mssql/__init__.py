"""SQL Server and Azure SQL, through pyodbc or mssql-python."""

from __future__ import annotations

from sqlsem.engines.mssql.engine import SqlServerEngine
from sqlsem.engines.mssql.session import SqlServerSession

__all__ = ["SqlServerEngine", "SqlServerSession", "engine"]

engine = SqlServerEngine
