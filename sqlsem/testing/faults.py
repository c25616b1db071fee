"""The faults of a simulation, as words that can be recorded and repeated: ``crash B 0``, ``restart 7``."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sqlsem.testing.real import Trouble

if TYPE_CHECKING:
    from sqlsem.testing.world import Actor, World

__all__ = ["FAULTS", "Faults"]

#: All kinds: see `Faults`.
FAULTS = ("crash", "pause", "cut", "slow", "restart", "failover", "clock", "revoke", "hold", "cap", "reap", "stall")


class Faults:
    """Makes things go wrong. Durations are virtual seconds.

    - ``crash B 20``: process B is killed; the server notices after 20 s.
    - ``pause B 7``: process B is stopped for 7 s.
    - ``cut B 1 20``: the second connection of B (number 1) breaks during a call: before the call reaches the server, or
      after its commit. The server notices after 20 s.
    - ``slow B.heartbeat 3``: the present call of this thread takes 3 s, before it has its effect or after that.
    - ``restart 7``: all sessions end, and the server is back after 7 s.
    - ``stall 3``: the server does nothing for 3 s; its sessions stay.
    - ``failover 2 1``: as ``restart 1``, but a standby takes over. It has not received the last two changes of those
      that no client waits for: releases, times of grants, heartbeats.
    - ``clock -30``: the server's clock is set back by 30 s. (It is set forward only while all beacons are held and no
      member has a lease. Otherwise the change would count as time that has passed: see the guarantees.)
    - ``revoke 0``: an operator revokes the first row. ``hold r`` pauses the resource r, ``cap r`` caps it at 1, until
      the calm phase begins; ``reap`` checks all members.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._changed_resources: list[str] = []

    # -- draw ---------------------------------------------------------------------------------------------------------

    def draw(self, chance: random.Random, kind: str) -> str | None:
        """Return a random fault of that kind; None if it cannot happen now."""
        world = self._world
        alive = [actor for actor in world.actors if actor.runs]
        if not alive:
            return None
        actor_name = chance.choice(alive)
        short, long = chance.choice((0.2, 1, 3)), chance.choice((2, 7, 20))
        seconds = chance.choice((short, long))
        if kind == "crash":
            return f"crash {actor_name} {chance.choice((0, 0, long))}" if len(alive) > 1 else None
        if kind == "pause":
            return f"pause {actor_name} {seconds}"
        if kind == "cut":
            return f"cut {actor_name} {chance.choice((0, 0, 0, 1))} {chance.choice((0, 0, seconds))}"
        if kind == "slow":
            calling = [fiber for fiber in world.fibers.all if fiber.ready and fiber.where and fiber.group.runs]
            return f"slow {chance.choice(calling).name} {seconds}" if calling else None
        if kind in ("restart", "stall"):
            return f"{kind} {seconds}"
        if kind == "failover":
            return f"failover {chance.randrange(4)} {seconds}"
        if kind == "clock":
            return f"clock {chance.choice((-30, -3, 3, 3600))}"
        if kind == "revoke":
            return f"revoke {chance.randrange(3)}"
        resources = world.server.resources()
        if kind in ("hold", "cap"):
            return f"{kind} {chance.choice(resources)}" if resources else None
        return kind

    # -- make ---------------------------------------------------------------------------------------------------------

    def make(self, verb: str, rest: Sequence[str]) -> None:
        """Make a fault happen. Raises `Trouble` if it cannot happen now."""
        getattr(self, f"_{verb}")(*rest)

    def undo(self) -> None:
        """Undo the faults that block others: resume resources and stopped processes."""
        server = self._world.server
        for resource in self._changed_resources:
            server.pause(resource, False)
            server.set_cap(resource, None)
        self._changed_resources.clear()
        for actor in self._world.actors:
            actor.paused_until = min(actor.paused_until, self._world.fibers.now)
        server.stalled_until = min(server.stalled_until, self._world.fibers.now)
        self._world.at(0, lambda: None)  # an event, at which the paused processes are checked

    def _actor(self, name: str) -> Actor:
        for actor in self._world.actors:
            if actor.name == name and not actor.dead:
                return actor
        raise Trouble(f"{name} is not alive")

    def _crash(self, name: str, linger: str = "0") -> None:
        actor = self._actor(name)
        if sum(not item.dead for item in self._world.actors) == 1:
            raise Trouble("no process would be left")
        actor.dead = True
        for session in [item for item in self._world.server.sessions if item.owner == name]:
            session.lose()
            self._world.at(float(linger), session.end)
        self._world.run_due_events()

    def _pause(self, name: str, seconds: str) -> None:
        self._actor(name).paused_until = self._world.fibers.now + float(seconds)
        self._world.at(float(seconds), lambda: None)

    def _cut(self, name: str, number: str = "0", linger: str = "0") -> None:
        self._actor(name)
        sessions = [session for session in self._world.server.sessions if session.owner == name and not session.cut]
        if len(sessions) <= int(number):
            raise Trouble("there is no such connection")
        session = sessions[int(number)]
        session.lose()
        self._world.at(float(linger), session.drop)
        self._world.run_due_events()

    def _slow(self, name: str, seconds: str) -> None:
        for fiber in self._world.fibers.all:
            if fiber.name == name and fiber.ready and fiber.where:
                fiber.ready = False
                fiber.deadline = self._world.fibers.now + float(seconds)
                return
        raise Trouble("it makes no call")

    def _restart(self, seconds: str) -> None:
        self._world.server.restart(float(seconds))

    def _stall(self, seconds: str) -> None:
        self._world.server.stall(float(seconds))

    def _failover(self, lost_changes: str, seconds: str) -> None:
        self._world.server.fail_over(int(lost_changes), float(seconds))

    def _clock(self, seconds: str) -> None:
        self._world.server.set_clock(float(seconds))

    def _revoke(self, number: str) -> None:
        rows = self._world.server.rows()
        if not rows:
            raise Trouble("there is no row")
        self._world.server.revoke(rows[int(number) % len(rows)].position)

    def _hold(self, resource: str) -> None:
        self._world.server.pause(resource, True)
        self._changed_resources.append(resource)

    def _cap(self, resource: str) -> None:
        self._world.server.set_cap(resource, 1)
        self._changed_resources.append(resource)

    def _reap(self) -> None:
        self._world.server.reap_all()
