"""Engines whose logic runs in the client, as statements of a transaction. SQLite is one; it has no stored routines.

`session.py` has what such an engine provides (`StatementSession`): transactions that are the gate, beacons and a
sleeper. The other modules combine the statements, and know nothing of a driver. They import nothing from an engine's
own package.
"""
