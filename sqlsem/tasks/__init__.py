"""The work queue: any program puts tasks, and whichever worker is free runs each of them once.

The open tasks of the lowest order run first, in the order in which they were put; a task of a higher order waits until
all tasks of lower orders have ended. A claim belongs to this process's member: while the process lives, its tasks stay
its own, however long they run; when it dies, they are pending again within ``grace``. So a task runs twice only if its
worker died, or was without the database for longer than ``grace``: write tasks that may be repeated.

>>> q = sqlsem.queue("nightly")  # doctest: +SKIP
>>> q.put(sqlsem.Sql("EXEC load_customers"), order=100)  # doctest: +SKIP
>>> for task in q.claim(wait=30):  # doctest: +SKIP
...     with task:
...         print(task.body)

queues        the API of programs: putting tasks, waiting for them, listing them
claiming      claims and ends of tasks, for programs and workers
task          a task that was claimed
worker        threads that run tasks
schedules     tasks that are put at the times of a cron expression
cron          the times of a cron expression, in any time zone
claim_buffer  the tasks that a worker has claimed but not started, how many it claims at once, ends to be recorded
prefetch      the thread that claims the next group of tasks while one runs
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
