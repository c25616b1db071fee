"""Batches: parts that run side by side, each in a process of its own; the last one out starts what comes next, once.

A batch is open from the start of its first part until every part has ended. When all of them have succeeded within the
window, exactly one of them, the last, is told so, and runs the callback. Everything about the batches of one name
is decided in the database, one decision after the other, so that parts that end at the same instant are told apart.

A part, and the callback, belongs to this process's member. When the process dies the part has failed, and the
callback is done again by the next one who looks. So it is run again only after the process that ran it died
or lost the database for longer than its grace: make it one that may be repeated.

>>> nightly = sqlsem.batch("nightly", ["sales", "stock"], window="6h", on_success=publish)  # doctest: +SKIP
>>> with nightly.part("sales"):  # doctest: +SKIP
...     load_sales()

batches        declaring a batch, waiting for it, looking
part          one run of a part
callback  what comes after a batch, claimed and run
declaration   what these have in common
"""

from sqlsem.batches.batches import Batch, abandon, batch, list_batches, resume
from sqlsem.batches.part import Part

__all__ = ["Batch", "Part", "abandon", "batch", "list_batches", "resume"]
