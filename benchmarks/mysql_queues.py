"""The peers of the work queues on MariaDB and MySQL, for `benchmarks.queues`: how each is prepared, filled and worked.

``url`` is a database with no tables yet. Queues that delete a task when they claim it keep no account of what was done,
so the number that was put is noted beside them.
"""

from __future__ import annotations

import importlib.util
import threading
import urllib.parse
from collections.abc import Callable
from contextlib import closing
from typing import Any

QUEUE = "bench"


def connection_parameters(url: str) -> dict[str, Any]:
    """Return the parameters of `pymysql.connect` for a URL."""
    parts = urllib.parse.urlsplit(url)
    return {
        "host": parts.hostname or "localhost",
        "port": parts.port or 3306,
        "user": urllib.parse.unquote(parts.username or ""),
        "password": urllib.parse.unquote(parts.password or ""),
        "database": parts.path.lstrip("/") or None,
        **dict(urllib.parse.parse_qsl(parts.query)),
    }


def rows(url: str, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
    """Run a statement in a connection of its own; return its rows."""
    import pymysql

    with closing(pymysql.connect(autocommit=True, **connection_parameters(url))) as connection:
        cursor = connection.cursor()
        cursor.execute(statement, parameters or None)
        return list(cursor.fetchall())


def _note(number: int) -> None:
    from benchmarks.queues import note

    note(number)


def in_threads(number: int, work: Callable[[], None]) -> None:
    """Run ``work`` in so many threads, and raise what one of them raised."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=run) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _note_put(url: str, number: int) -> None:
    rows(url, "CREATE TABLE bench_put (number integer)")
    rows(url, "INSERT INTO bench_put VALUES (%s)", number)


def _done_of(table: str) -> Callable[[str], tuple[int, float | None]]:
    def done(url: str) -> tuple[int, float | None]:
        ((number,),) = rows(url, f"SELECT (SELECT number FROM bench_put) - (SELECT count(*) FROM {table})")
        return int(number), None

    return done


# -- SELECT … FOR UPDATE SKIP LOCKED ----------------------------------------------------------------------------------


def raw_prepare(url: str) -> None:
    rows(url, "CREATE TABLE raw_task (id bigint PRIMARY KEY AUTO_INCREMENT, number integer NOT NULL) ENGINE = InnoDB")


def raw_put(url: str, number: int) -> None:
    import pymysql

    with closing(pymysql.connect(**connection_parameters(url))) as connection:
        connection.cursor().executemany(
            "INSERT INTO raw_task (number) VALUES (%s)", [(each,) for each in range(number)]
        )
        connection.commit()
    _note_put(url, number)


def raw_work(url: str, at_once: int, gate: Callable[[], None]) -> None:
    """Claim, run and delete one task in a transaction."""
    import pymysql

    session = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"
    connections = [pymysql.connect(init_command=session, **connection_parameters(url)) for _ in range(at_once)]
    unused = iter(connections)

    def work() -> None:
        connection = next(unused)
        cursor = connection.cursor()
        while True:
            cursor.execute("SELECT id, number FROM raw_task ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED")
            task = cursor.fetchone()
            if task is None:
                return
            _note(task[1])
            cursor.execute("DELETE FROM raw_task WHERE id = %s", (task[0],))
            connection.commit()

    gate()
    in_threads(at_once, work)
    for connection in connections:
        connection.close()


raw_done = _done_of("raw_task")


# -- huey -------------------------------------------------------------------------------------------------------------


def _huey(url: str) -> Any:
    import peewee
    from huey.contrib.sql_huey import SqlHuey  # type: ignore[import-untyped]

    parameters = connection_parameters(url)
    database = peewee.MySQLDatabase(parameters.pop("database"), **parameters)
    huey = SqlHuey(QUEUE, database=database, results=False)
    return huey, huey.task(name="note")(_note)


def huey_prepare(url: str) -> None:
    _huey(url)


def huey_put(url: str, number: int) -> None:
    huey, task = _huey(url)
    with huey.storage.database.atomic():  # one transaction
        for each in range(number):
            task(each)
    _note_put(url, number)


def huey_work(url: str, at_once: int, gate: Callable[[], None]) -> None:
    """Do as the workers of its consumer do, without their pauses."""
    huey, _ = _huey(url)

    def work() -> None:
        while (task := huey.dequeue()) is not None:
            huey.execute(task)
        huey.storage.database.close()

    gate()
    in_threads(at_once, work)


huey_done = _done_of("task")


# -- firm-queue -------------------------------------------------------------------------------------------------------


def _firm(url: str) -> Any:
    import firm.queue

    runtime = firm.queue.configure(database_url=url.replace("mysql://", "mysql+pymysql://", 1), default_queue=QUEUE)
    return runtime, firm.queue.job(queue=QUEUE)(_note)


def firm_prepare(url: str) -> None:
    from firm.queue import schema

    runtime, _ = _firm(url)
    schema.create_all(runtime.engine)
    runtime.engine.dispose()


def firm_put(url: str, number: int) -> None:
    runtime, job = _firm(url)
    for each in range(number):  # (it has no call for several)
        job.enqueue(each)
    runtime.engine.dispose()


def firm_work(url: str, at_once: int, gate: Callable[[], None]) -> None:
    """Claim ten tasks at a time and run them, as its command ``drain`` does: its workers pause after each claim."""
    from firm.queue.worker import run_ready
    from sqlalchemy.exc import OperationalError

    runtime, _ = _firm(url)

    def work() -> None:
        while True:
            try:
                if not run_ready(runtime):
                    return
            except OperationalError as exc:  # (a claim; its workers go on after a deadlock, too)
                if exc.orig is None or exc.orig.args[0] != 1213:
                    raise

    gate()
    in_threads(at_once, work)
    runtime.engine.dispose()


def firm_done(url: str) -> tuple[int, float | None]:
    ((number,),) = rows(url, "SELECT count(*) FROM firm_queue_jobs WHERE finished_at IS NOT NULL AND attempts <= 1")
    return int(number), None


# -- django-tasks-db --------------------------------------------------------------------------------------------------


def _django(url: str) -> Any:
    import django
    import pymysql
    from django.conf import settings

    pymysql.install_as_MySQLdb()
    parameters = connection_parameters(url)
    socket = {"unix_socket": parameters["unix_socket"]} if "unix_socket" in parameters else {}
    own = [] if importlib.util.find_spec("django.tasks") else ["django_tasks"]  # Django has them from its version 6 on
    if not settings.configured:
        settings.configure(
            DATABASES={
                "default": {
                    "ENGINE": "django.db.backends.mysql",
                    "NAME": parameters["database"],
                    "USER": parameters["user"],
                    "PASSWORD": parameters["password"],
                    "HOST": "" if socket else parameters["host"],
                    "PORT": "" if socket else str(parameters["port"]),
                    "OPTIONS": socket,
                    "CONN_MAX_AGE": None,
                }
            },
            DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
            INSTALLED_APPS=[*own, "django_tasks_db"],
            LOGGING_CONFIG=None,
            TASKS={"default": {"BACKEND": "django_tasks_db.DatabaseBackend", "QUEUES": []}},
            USE_TZ=True,
        )
        django.setup()
    else:  # another database of the same process
        from django.db import connections

        connections["default"].close()
        connections["default"].settings_dict["NAME"] = parameters["database"]
    return importlib.import_module("benchmarks.django_task").note_task


def django_prepare(url: str) -> None:
    from django.core.management import call_command

    _django(url)
    call_command("migrate", verbosity=0)


def django_put(url: str, number: int) -> None:
    from django.db import connections, transaction

    task = _django(url)
    with transaction.atomic():
        for each in range(number):
            task.enqueue(each)
    connections.close_all()


def django_work(url: str, _: int, gate: Callable[[], None]) -> None:
    """Work as its command ``db_worker --batch`` does."""
    _django(url)
    from django_tasks_db.management.commands.db_worker import Worker

    worker = Worker(
        queue_names=["*"],
        interval=0,
        batch=True,
        backend_name="default",
        startup_delay=False,
        max_tasks=None,
        worker_id=str(threading.get_native_id()),
        excluded_queue_names=[],
    )
    gate()
    worker.run()


def django_done(url: str) -> tuple[int, float | None]:
    ((number,),) = rows(url, "SELECT count(*) FROM django_tasks_database_dbtaskresult WHERE status = 'SUCCESSFUL'")
    return int(number), None
