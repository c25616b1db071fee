"""The values that all packages exchange: requests, rows, tasks, rates, events, errors. Immutable, without I/O.

A rule that needs nothing but rows is here as well: whether a request fits (`locks`), and who waits for whom in a circle
(`deadlocks`). Only `sqlsem.util` is below.
"""
