"""Batches: parts that run side by side, each in its own process; the last one to succeed runs a callback, once.

A batch is open from the start of its first part until every part has ended. When all parts have succeeded within the
window, the last of them runs the callback. The database decides which one that is: it serializes all changes of the
batches of one name, so one of several parts that end at the same instant is the last.

A part, and the callback, belongs to this process's member. When the process dies, the part has failed, and another
process runs the callback again. So the callback runs twice only if the process that ran it died or lost the database
for longer than its grace: write a callback that may be repeated.

>>> nightly = sqlsem.batch("nightly", ["sales", "stock"], window="6h", on_success=publish)  # doctest: +SKIP
>>> with nightly.part("sales"):  # doctest: +SKIP
...     load_sales()

batches      the API of programs and operators: declaring a batch, waiting for it, listing, abandoning
part         one run of a part
declaration  the state that the other modules share, and the callback
"""

from sqlsem.batches.batches import Batch, abandon, batch, list_batches, resume
from sqlsem.batches.part import Part

__all__ = ["Batch", "Part", "abandon", "batch", "list_batches", "resume"]
