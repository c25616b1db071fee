"""The client of one database, which the APIs for threads, asyncio, work queues and batches share.

Nothing in this package is public, and no module in it imports one of these APIs.
"""
