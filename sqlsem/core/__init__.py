"""The client of a database, shared by the APIs for threads, asyncio, work queues and batches.

Nothing here is public, and nothing here imports one of these APIs.
"""
