"""Helpers that know nothing of locks, for every module: the clock and the threads, text, secrets, processes.

Nothing here imports another package of sqlsem.
"""
