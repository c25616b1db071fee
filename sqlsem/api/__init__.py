"""The API for threads: locks, rates, leaders, runs once per period, and the coordinator of one database.

`sqlsem` exports all of it; the same for asyncio is in `sqlsem.aio`. An object here holds the terms of
a request, and the client carries it out (`sqlsem.client`). A default database is chosen in `default`.
"""
