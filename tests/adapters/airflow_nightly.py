"""A DAG whose tasks hold locks, run by Airflow's own `dag.test()`; it prints its observations as lines of JSON."""

import json
import threading
import time

from airflow.sdk import DAG, BaseOperator

import sqlsem
from sqlsem.adapters.airflow import Locked

AT_MOST = 60.0


def tell(**fields):
    print("told", json.dumps(fields), flush=True)


def rows(name):
    return [[entry.position, entry.note] for entry in sqlsem.default().admin.entries(name)]


class Work(BaseOperator):
    """Report the held locks during its work."""

    def __init__(self, *, resource, fails=False, **kwargs):
        super().__init__(**kwargs)
        self.resource, self.fails = resource, fails

    def execute(self, context):
        tell(task=self.task_id, rows=rows(self.resource))
        if self.fails:
            raise ValueError("as it was asked to")


class LockedWork(Locked, Work):
    pass


with DAG("nightly", schedule=None) as dag:
    free = LockedWork(task_id="free", resource="free", lock=sqlsem.limit("free", 3, note="mine"))
    busy = LockedWork(task_id="busy", resource="busy", lock=sqlsem.mutex("busy"))
    fails = LockedWork(task_id="fails", resource="fails", lock=sqlsem.mutex("fails"), fails=True)
    free >> busy >> fails


def let_go_when_somebody_waits(grant):
    deadline = time.monotonic() + AT_MOST
    while len(rows("busy")) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    tell(waiting=rows("busy"))
    grant.release()


def main():
    with sqlsem.connect(sqlsem.default_url()) as coordinator:
        holder = coordinator.mutex("busy")
        holder.acquire()
        thread = threading.Thread(target=let_go_when_somebody_waits, args=[holder.grant])
        thread.start()
        run = dag.test()
        thread.join()
        tell(states={instance.task_id: instance.state for instance in run.get_task_instances()})
        tell(left=[*rows("free"), *rows("busy"), *rows("fails")])

        with sqlsem.mutex("busy") as grant:
            used = grant.hand_over()
        sqlsem.adopt(used).release()
        busy.execute_locked({}, {"token": used})
        try:
            LockedWork(task_id="elsewhere", resource="busy", lock=coordinator.mutex("busy"))
        except sqlsem.ConfigurationError as exc:
            tell(refused=str(exc))


if __name__ == "__main__":
    main()
