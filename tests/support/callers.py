"""Sessions of PostgreSQL that call the routines."""

import threading
import time

import psycopg

from support.patience import PATIENCE


class Caller:
    """A session that uses plain SQL."""

    def __init__(self, url, **options):
        self.connection = psycopg.connect(url, **{"autocommit": True, **options})
        self.pid = self.connection.info.backend_pid
        self.notices = []
        self.connection.add_notice_handler(lambda notice: self.notices.append(notice.message_primary))
        self.done = threading.Event()
        self.answer = self.error = self.entered = self.thread = None

    def call(self, routine, *positional, **named):
        """(code, queue_position, fence)"""
        marks = [*("%s" for _ in positional), *(f"{name} => %({name})s" for name in named)]
        parameters = named or positional
        assert not (positional and named)
        cursor = self.connection.execute(f"CALL sqlsem.{routine}({', '.join(marks)})", parameters)
        return cursor.fetchone() if cursor.description else None

    def acquire(self, resource, **named):
        return self.call("acquire", resource=resource, **named)

    def try_(self, resource, **named):
        return self.call("try", resource=resource, **named)

    def value(self, text, *parameters):
        return self.connection.execute(f"SELECT {text}", parameters).fetchone()[0]

    def release(self, resource, position=None, requesting_id=None):
        return self.value("sqlsem.release(%s, %s, %s)", resource, position, requesting_id)

    def renew(self, resource, position, requesting_id=None, lease=None):
        return self.value("sqlsem.renew(%s, %s, %s, %s)", resource, position, requesting_id, lease)

    def start(self, resource, **named):
        """Start acquire in a thread."""

        def run():
            try:
                self.answer = self.acquire(resource, **named)
                self.entered = time.monotonic()
            except psycopg.Error as exc:
                self.error = exc
            self.done.set()

        self.done.clear()
        self.answer = self.error = self.entered = None
        self.thread = threading.Thread(target=run, daemon=True, name="caller")
        self.thread.start()
        return self

    def waits(self, seconds=0.2):
        return not self.done.wait(seconds)

    def result(self, timeout=PATIENCE):
        """Return the answer to `start`."""
        assert self.done.wait(timeout), "it still waits"
        if self.error is not None:
            raise self.error
        return self.answer

    def granted(self, timeout=PATIENCE):
        code, position, fence = self.result(timeout)
        assert code in (0, 1), code
        assert fence == position
        return position

    def failed(self, timeout=PATIENCE):
        assert self.done.wait(timeout)
        assert self.error is not None, self.answer
        return self.error

    def close(self):
        if self.thread is not None and self.thread.is_alive():
            self.connection.cancel()
            self.thread.join(PATIENCE)
        self.connection.close()
