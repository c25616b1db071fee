"""This process in a database: what its faces (threads, asyncio, the work queue, batches) have in common.

Nothing here is public, and nothing here imports a face.
"""
