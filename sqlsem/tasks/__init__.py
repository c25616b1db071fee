"""The work queue: tasks are put by anybody, and each is carried out once, by whichever worker is free.

Tasks of the lowest order that is open run first, first come first served among themselves; a task of a higher order
waits until all of lower ones have ended. A claim belongs to this process's member: while the process lives nobody takes
its tasks, however long they run; when it dies they are pending again within ``grace``. So a task is run again only
after its worker died or lost the database for longer than that: make tasks that may be repeated.

>>> q = sqlsem.queue("nightly")  # doctest: +SKIP
>>> q.put(sqlsem.Sql("EXEC load_customers"), order=100)  # doctest: +SKIP
>>> for task in q.claim(wait=30):  # doctest: +SKIP
...     with task:
...         print(task.body)

queues    putting, waiting and looking: what programs have
claiming  claiming tasks and ending them, for programs and workers
task      a task that was claimed
worker    threads that carry tasks out
recording ends of tasks that are recorded later
schedules tasks that are put again and again
cron      the times of a cron expression, in any time zone
groups    how short tasks are claimed and ended together
ahead     the thread that claims the next group while one is run
"""

from sqlsem.bodies import Call, Json, Shell, Sql, encode
from sqlsem.tasks.cron import check_cron, next_due
from sqlsem.tasks.queues import Queue, check_put, queue
from sqlsem.tasks.schedules import MISSED
from sqlsem.tasks.task import Task
from sqlsem.tasks.worker import Worker

__all__ = [
    "MISSED",
    "Call",
    "Json",
    "Queue",
    "Shell",
    "Sql",
    "Task",
    "Worker",
    "check_cron",
    "check_put",
    "encode",
    "next_due",
    "queue",
]
