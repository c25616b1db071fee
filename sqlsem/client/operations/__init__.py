"""The requests of a program: to acquire, convert, hand over, release on commit. Each operation is a generator.

It does no I/O: it yields effects (`sqlsem.client.effects`), which a thread executes by blocking and an asyncio task by
awaiting. An exception at any ``yield`` rolls it back.
"""
