"""The API of operators: read all queues, tasks and members of a database, and change what others own."""

from __future__ import annotations

from sqlsem import tasks
from sqlsem.client.admin import BaseAdmin
from sqlsem.engines.base import Session
from sqlsem.engines.protocol import Capability
from sqlsem.values.errors import NotHeld
from sqlsem.values.locks import Schedule, check_name, check_some

__all__ = ["Admin"]


class Admin(BaseAdmin):
    """The calls of operators in one database: ``coordinator.admin``.

    No call joins the database as a member, so that operators can work where locks cannot. The database checks the role
    of the login: readers may read, operators may change.

    >>> with sqlsem.connect("postgresql://ops@db/dwh") as coordinator:  # doctest: +SKIP
    ...     coordinator.admin.pause("etl")
    """

    def schedules(self, queue: str | None = None) -> list[Schedule]:
        """Return the schedules of one queue, or of all, by name; see `Queue.schedule`."""
        check_some("The queue's name", queue)
        return self.client.with_connection(lambda session: session.list_schedules(None, queue), Capability.SCHEDULES)

    def pause_schedule(self, name: str) -> None:
        """Put no tasks of a schedule until `resume_schedule`. Raises `NotHeld` if there is no such schedule."""
        self._set_schedule(name, "pause")

    def resume_schedule(self, name: str) -> None:
        """Undo `pause_schedule`; the due times since then are left out. Errors as for `pause_schedule`."""
        self._set_schedule(name, "resume")

    def remove_schedule(self, name: str) -> None:
        """Remove a schedule; tasks that it has put stay. Errors as for `pause_schedule`."""
        self._set_schedule(name, "remove")

    def _set_schedule(self, name: str, action: str) -> None:
        check_name("The schedule's name", name)

        def change(session: Session) -> bool:
            due = None
            if action == "resume":
                schedules = session.list_schedules(name, None)
                if not schedules:
                    return False
                due = tasks.next_due(schedules[0].cron, schedules[0].time_zone, schedules[0].taken_at)
            return session.set_schedule(name, action, due)

        if not self.client.with_connection(change, Capability.SCHEDULES):
            raise NotHeld(f"There is no schedule {name!r} that you may {action}; see: sqlsem schedules")
