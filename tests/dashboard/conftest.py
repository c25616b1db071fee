"""A dashboard of the overviews in `support.overviews`, with and without a server; and a browser, if one is found."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import until
from support.overviews import FakePoller, a_night

from sqlsem.ops.dashboard import server
from sqlsem.ops.dashboard.app import Dashboard
from sqlsem.ops.hosts import LOOPBACK, Hosts


@pytest.fixture
def live() -> FakePoller:
    return FakePoller(a_night())


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """``serve(live, …)`` serves a dashboard in a thread of this process; returns its URL."""
    with contextlib.ExitStack() as ended:

        def serve(live: Any, **options: Any) -> str:
            dashboard = Dashboard(live, Hosts(LOOPBACK), **options)
            place = server.listen("127.0.0.1", 0)
            running = server.Server(dashboard, lambda: None)
            serve.servers.append(running)  # type: ignore[attr-defined]
            thread = threading.Thread(target=running.run, kwargs={"sockets": [place]})
            thread.start()
            ended.callback(thread.join)
            ended.callback(setattr, running, "should_exit", True)
            until(lambda: running.started, "the server answers")
            return f"http://127.0.0.1:{place.getsockname()[1]}"

        serve.servers = []  # type: ignore[attr-defined]
        serve.end = ended.close  # type: ignore[attr-defined]
        yield serve
