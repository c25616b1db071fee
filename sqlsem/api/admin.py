"""The API of operators: read all queues, tasks and members of a database, and change what others own."""

from __future__ import annotations

from sqlsem.client.admin import BaseAdmin
from sqlsem.client.leader import LeaderEntry, leaders_in
from sqlsem.client.once import once_name
from sqlsem.engines.base import Session
from sqlsem.engines.protocol import Capability
from sqlsem.util import late
from sqlsem.values.errors import NotHeld
from sqlsem.values.locks import OnceEntry, check_name, check_some
from sqlsem.values.tasks import Schedule


class Admin(BaseAdmin):
    """The calls of operators in one database: ``coordinator.admin``.

    No call joins the database as a member, so that operators can work where locks cannot. The database checks the role
    of the login: readers may read, operators may change.

    >>> with sqlsem.connect("postgresql://ops@db/dwh") as coordinator:  # doctest: +SKIP
    ...     coordinator.admin.pause("etl")
    """

    def leaders(self, name: str | None = None) -> list[LeaderEntry]:
        """Return the present leader of a name, or of all names (see `sqlsem.leader`), by name. A leader is the holder
        of a mutex, so the holders of all other mutexes are among them.

        >>> [(leader.name, leader.info) for leader in coordinator.admin.leaders()]  # doctest: +SKIP
        """
        return leaders_in(self.entries(name))

    def step_down(self, name: str) -> bool:
        """Make the present leader of a name end its term, as `revoke` does: a live leader is notified, and has its
        grace to stop. Return True if it leads no more. Raises `NotHeld` if there is no leader.

        >>> coordinator.admin.step_down("scheduler")  # doctest: +SKIP
        """
        leaders = self.leaders(check_name("The leader's name", name))
        if not leaders:
            raise NotHeld(f"There is no leader of {name!r}; see: sqlsem leader ls")
        return self.revoke(leaders[0].fence)

    def once_runs(self, name: str | None = None) -> list[OnceEntry]:
        """Return the last successful run of a name, or of each name (see `sqlsem.once`), by name.

        >>> [(run.name, run.done_at) for run in coordinator.admin.once_runs()]  # doctest: +SKIP
        """
        known = None if name is None else once_name(name)
        return self.client.with_connection(lambda session: session.once_runs(known), Capability.PERIODS)

    def forget_once(self, name: str) -> bool:
        """Delete the record of the last run of a name, as `Once.forget`: the job may run again in this period. Return
        False if there was none.
        """
        known = once_name(name)
        return self.client.with_connection(lambda session: session.once_forget(known), Capability.PERIODS)

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

        with late.importing:
            from sqlsem.tasks.cron import next_due

        def change(session: Session) -> bool:
            due = None
            if action == "resume":
                schedules = session.list_schedules(name, None)
                if not schedules:
                    return False
                due = next_due(schedules[0].cron, schedules[0].time_zone, schedules[0].taken_at)
            return session.set_schedule(name, action, due)

        if not self.client.with_connection(change, Capability.SCHEDULES):
            raise NotHeld(f"There is no schedule {name!r} that you may {action}; see: sqlsem schedules", code="task")
