"""A process under remote control, and the tests' side of it.

Each command names a thread, which starts with its first command and runs its commands in order. A lock is entered and
left as by a ``with`` block. Answers carry monotonic times, which compare across processes.
"""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from typing import Any

import psutil
from support import PATIENCE, Channel, Child, until

import sqlsem

# -- in the child ---------------------------------------------------------------------------------------------------


class Worker(threading.Thread):
    """A thread of the agent."""

    def __init__(self, label: str, channel: Channel, coordinator: sqlsem.Coordinator) -> None:
        super().__init__(name=label, daemon=True)
        self.channel, self.coordinator = channel, coordinator
        self.commands: queue.Queue[dict[str, Any]] = queue.Queue()
        self.held: list[tuple[sqlsem.Lock, sqlsem.Grant]] = []

    def run(self) -> None:
        while True:
            answer(self.channel, self.commands.get(), self)

    def acquire(self, kind: str, args: list[Any], settings: dict[str, Any]) -> dict[str, Any]:
        def on_lost(grant: sqlsem.Grant) -> None:
            self.channel.tell("lost", thread=self.name, lost=grant.lost, set=grant.lost_event.is_set())

        requested = time.monotonic()
        lock = getattr(self.coordinator, kind)(*args, on_lost=on_lost, **settings)
        grant = lock.__enter__()
        got = time.monotonic()
        self.held.append((lock, grant))
        return {"asked": requested, "got": got, "position": grant.position, "fence": grant.fence}

    def release(self) -> dict[str, Any]:
        lock, _ = self.held.pop()
        leaving = time.monotonic()
        lock.__exit__(None, None, None)
        return {"leaving": leaving}

    def check(self) -> dict[str, Any]:
        self.held[-1][1].check()
        return {}

    def lost(self) -> dict[str, Any]:
        grant = self.held[-1][1]
        return {"lost": grant.lost, "set": grant.lost_event.is_set()}

    def close(self) -> dict[str, Any]:
        began = time.monotonic()
        self.coordinator.close()
        return {"seconds": time.monotonic() - began}


def answer(channel: Channel, command: dict[str, Any], worker: Worker) -> None:
    number, began = command.pop("number"), time.monotonic()
    try:
        result = getattr(worker, command.pop("do"))(**command)
    except BaseException as exc:
        result = {"error": type(exc).__name__, "message": str(exc)}
    channel.tell("answer", number=number, began=began, **result)


def agent(channel: Channel, url: str, options: dict[str, Any], settings: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is meant for the test run
    logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(levelname)s %(message)s")
    coordinator = sqlsem.connect(url, **{**options, **settings})
    coordinator.admin.entries("none")  # the driver is loaded, the server answers
    workers: dict[str, Worker] = {}
    channel.tell("ready")
    while True:
        command = channel.ask()
        label = command.pop("thread")
        if label not in workers:
            workers[label] = Worker(label, channel, coordinator)
            workers[label].start()
        workers[label].commands.put(command)


# -- in the test ----------------------------------------------------------------------------------------------------


class RemoteError(Exception):
    """An exception in the agent."""

    def __init__(self, name: str, message: str, at: float, began: float) -> None:
        super().__init__(f"{name}: {message}")
        self.name, self.message, self.at, self.began = name, message, at, began


class Reply:
    """The future result of a command."""

    def __init__(self, agent: Agent, command: str) -> None:
        self._agent, self._what = agent, command
        self._event = threading.Event()
        self._words: dict[str, Any] = {}

    def fulfil(self, words: dict[str, Any]) -> None:
        self._words = words
        self._event.set()

    @property
    def ready(self) -> bool:
        return self._event.is_set()

    def get(self, timeout: float = PATIENCE) -> dict[str, Any]:
        assert self._event.wait(timeout), (
            f"no answer to {self._what!r} within {timeout:g} s\n{self._agent.child.errors()}"
        )
        if "error" in self._words:
            raise RemoteError(*(self._words[key] for key in ("error", "message", "at", "began")))
        return self._words


class Agent:
    """The test's side of an agent."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.events: list[dict[str, Any]] = []
        self._replies: dict[int, Reply] = {}
        self._number = 0
        self._heard = threading.Condition()
        self._ended = False
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while (words := self.child.next(3600)) is not None:
            with self._heard:
                if words["event"] == "answer":
                    self._replies.pop(words["number"]).fulfil(words)
                else:
                    self.events.append(words)
                    self._heard.notify_all()
        with self._heard:
            self._ended = True
            for reply in self._replies.values():
                reply.fulfil({"error": "Ended", "message": "", "at": time.monotonic(), "began": 0.0})
            self._heard.notify_all()

    def event(self, kind: str, timeout: float = PATIENCE) -> dict[str, Any]:
        """Wait for the first event of that kind, and return it."""
        with self._heard:
            self._heard.wait_for(lambda: self._ended or self.told(kind), timeout)
            events = [event for event in self.events if event["event"] == kind]
        assert events, f"no {kind!r} within {timeout:g} s\n{self.child.errors()}"
        return events[0]

    def told(self, kind: str) -> bool:
        return any(event["event"] == kind for event in self.events)

    def call(self, command: str, thread: str = "one", **arguments: Any) -> Reply:
        with self._heard:
            self._number += 1
            number = self._number
            reply = self._replies[number] = Reply(self, command)
        self.child.send(number=number, do=command, thread=thread, **arguments)
        return reply

    def ask(self, kind: str, *args: Any, thread: str = "one", **settings: Any) -> Reply:
        """Begin to acquire; the reply comes with the grant."""
        return self.call("acquire", thread, kind=kind, args=args, settings=settings)

    def hold(self, kind: str, *args: Any, thread: str = "one", **settings: Any) -> dict[str, Any]:
        """Acquire, and wait for the grant."""
        return self.ask(kind, *args, thread=thread, **settings).get()

    def release(self, thread: str = "one") -> dict[str, Any]:
        return self.call("release", thread).get()

    def check(self, thread: str = "one") -> None:
        self.call("check", thread).get()

    def lost(self, thread: str = "one") -> bool:
        return bool(self.call("lost", thread).get()["lost"])

    def kill(self) -> float:
        return self.child.kill()

    def stop(self) -> float:
        """Send SIGSTOP, and return the time when it had stopped."""
        stop(self.child)
        return time.monotonic()

    def resume(self) -> None:
        self.child.resume()


def stop(child: Child) -> None:
    """Send SIGSTOP, and wait until it has stopped."""
    child.pause()
    process = psutil.Process(child.pid)
    until(lambda: process.status() == psutil.STATUS_STOPPED, f"the stop of process {child.pid}")
