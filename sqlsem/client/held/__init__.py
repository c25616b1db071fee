"""All that this process holds: the grants of its threads and tasks, and its claims of tasks, parts and callbacks.

A lost lock becomes an event in `registry`.
"""
