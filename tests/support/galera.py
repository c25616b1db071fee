"""Galera clusters of three MariaDB nodes on 127.0.0.1. Tests stop, kill, pause, isolate and empty nodes.

A node that was away rejoins by an incremental state transfer (IST) while the others still have the writes that it
lacks; an empty node gets a copy of all data (SST, by rsync). Tests can hold such a copy in the middle.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from support.databases import Database, random_name
from support.mariadb import MariaDBServer, binary, make_folder, mariadb_lacks
from support.patience import PATIENCE, until
from support.postgres import free_port

PROVIDERS = ("/usr/lib/galera/libgalera_smm.so", "/usr/lib64/galera-4/libgalera_smm.so")
#: Seconds that a cluster may take to change its state.
LIMIT = 4 * PATIENCE
#: The others notice a silent node after two seconds, and the cache has the writes for a node that is away for a while.
#: (If the other timeouts are shorter than usual, a busy machine forms views again and again.)
OPTIONS = {"evs.keepalive_period": "PT0.5S", "evs.suspect_timeout": "PT2S", "gcache.size": "64M"}
#: Programs for the nodes, by name. The state transfer "held" is that by rsync, but its sender (the donor) waits while
#: there is the file "hold" beside the programs, and says so by a file "held". (The server looks for programs in its own
#: folder first, so it would not find a program "rsync" alone.)
_PROGRAMS = {
    "wsrep_sst_held": """#!/bin/sh
PATH="${0%/*}:$PATH" exec wsrep_sst_rsync "$@"
""",
    "rsync": """#!/bin/sh
here=${0%/*}
case " $* " in *" --daemon "*) ;; *)
    if [ -e "$here/hold" ]; then
        : >"$here/held"
        while [ -e "$here/hold" ]; do sleep 0.1; done
    fi
esac
exec REAL "$@"
""",
}


def galera_lacks() -> str | None:
    """Return what is missing to run a cluster; None: nothing."""
    if lacks := mariadb_lacks():
        return lacks
    if binary("mariadbd") is None or binary("mariadb-install-db") is None:
        return "Debian's mariadb-server"
    if not any(Path(path).exists() for path in PROVIDERS):
        return "Debian's galera-4"
    missing = [name for name in ("wsrep_sst_rsync", "rsync", "lsof") if binary(name) is None]
    return f"{', '.join(missing)} (Debian's mariadb-server, rsync and lsof)" if missing else None


def url_of(nodes: Sequence[GaleraNode], database: str) -> str:
    """Return the URL of a database on these nodes, in this order."""
    user = nodes[0].url(database).partition("://")[2].partition("@")[0]
    return f"mysql://{user}@{','.join(f'127.0.0.1:{node.port}' for node in nodes)}/{database}"


class GaleraNode(MariaDBServer):
    """A node of a cluster.

    Attributes:
        name: Its name in the cluster.
        peers: The addresses of all nodes in the network of the cluster.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        group_port: int,
        peers: Sequence[str],
        settings: Mapping[str, str],
        programs: Path,
    ) -> None:
        ports = [free_port() for _ in range(3)]
        options = {
            **OPTIONS,
            "base_port": str(group_port),
            "gmcast.listen_addr": f"tcp://127.0.0.1:{group_port}",
            "ist.recv_addr": f"127.0.0.1:{ports[1]}",
        }
        own = {
            "binlog_format": "ROW",
            "innodb_autoinc_lock_mode": "2",
            "wsrep_cluster_address": f"gcomm://{','.join(peers)}",
            "wsrep_cluster_name": directory.parent.name,
            "wsrep_node_address": f"127.0.0.1:{group_port}",
            "wsrep_node_name": name,
            "wsrep_on": "ON",
            "wsrep_provider": next(path for path in PROVIDERS if Path(path).exists()),
            "wsrep_provider_options": ";".join(f"{option}={value}" for option, value in options.items()),
            "wsrep_slave_threads": "2",
            "wsrep_sst_method": "rsync",
            "wsrep_sst_receive_address": f"127.0.0.1:{ports[2]}",
        }
        path = f"{programs}:{os.environ.get('PATH', os.defpath)}:/usr/bin:/bin:/usr/sbin:/sbin"
        super().__init__(directory, ports[0], None, {**own, **settings}, {"PATH": path})
        self.name = name

    # -- its state in the cluster

    def status(self) -> dict[str, str]:
        """Return its status variables of the cluster, without ``wsrep_``. A node without a majority tells them, too."""
        return {name.removeprefix("wsrep_"): value for name, value in self.rows("SHOW GLOBAL STATUS LIKE 'wsrep%'")}

    @property
    def is_primary(self) -> bool:
        """True if it belongs to a majority of the cluster."""
        return self.status()["cluster_status"] == "Primary"

    @property
    def is_synced(self) -> bool:
        """True if it takes part in the cluster: it has all writes, and answers queries."""
        status = self.status()
        return status["cluster_status"] == "Primary" and status["local_state_comment"] == "Synced"

    @property
    def cluster_size(self) -> int:
        """The number of nodes that it sees, with itself."""
        return int(self.status()["cluster_size"])

    # -- starts and faults

    def start(self, *arguments: str) -> None:
        """Start it, and wait until it takes part in the cluster. After a crash it goes on from its last transaction."""
        self.begin(*arguments)
        self.wait_until_joined()

    def begin(self, *arguments: str) -> None:
        """Start it; `wait_until_joined` waits for the rest."""
        self._end_guard()
        log = self._own / "log.err"
        log.unlink(missing_ok=True)
        position = self._recovered_position()
        self.launch(*arguments, *([f"--wsrep-start-position={position}"] if position else []))

    def wait_until_joined(self) -> None:
        """Wait until it takes part in the cluster."""
        until(self._joined_or_fails, f"{self.name} takes part in the cluster", LIMIT)

    def _joined_or_fails(self) -> bool:
        assert self.runs(), f"{self.name} does not run: {self.log()[-4000:]}"
        return self.answers() and self.is_synced

    def _recovered_position(self) -> str | None:
        """Return the last transaction of its data, if there are any data of a cluster."""
        if not (self.data / "grastate.dat").exists():
            return None
        output = self._own / "tmp" / "recovered"
        words = [f"--{name.replace('_', '-')}={value}" for name, value in self.settings.items()]
        result = subprocess.run(
            [
                *(str(binary("mariadbd")), "--no-defaults", *words, f"--datadir={self.data}", "--wsrep-recover"),
                *(f"--log-error={output}.err", f"--pid-file={output}.pid", f"--socket={output}.socket"),
            ],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            **self._as_user,
        )
        log = Path(f"{output}.err")
        text = log.read_text(errors="replace")
        log.unlink()
        found = re.search(r"Recovered position: (\S+)", text)
        assert found is not None, f"{self.name}: no position recovered ({result.returncode}): {text[-4000:]}"
        return found[1]

    def isolate(self) -> None:
        """Cut its network to the other nodes. Clients still reach it."""
        self._set_option("gmcast.isolate=1")

    def reconnect(self) -> None:
        """End `isolate`."""
        self._set_option("gmcast.isolate=0")

    def _set_option(self, text: str) -> None:
        self.rows(f"SET GLOBAL wsrep_provider_options = '{text}'")

    def empty(self) -> None:
        """Remove all data of this stopped node, so that it gets a copy when it starts."""
        assert not self.runs(), f"{self.name} runs"
        for path in self.data.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    @property
    def transfer(self) -> str | None:
        """The state transfer of its last start: "IST" (the writes it lacked), "SST" (all data), None (it had all)."""
        found = re.search(r"rsync (IST|SST) completed on joiner", self.log())
        return found[1] if found else None


class GaleraCluster:
    """Three nodes."""

    def __init__(self, directory: Path, settings: Mapping[str, str] | None = None, *, size: int = 3) -> None:
        """Create and start a cluster in ``directory`` (which other users must be able to reach)."""
        ports = [free_port() for _ in range(size)]
        peers = [f"127.0.0.1:{port}" for port in ports]
        self.directory = directory
        self._programs = directory / "programs"
        self._make_programs()
        self.nodes = [
            GaleraNode(directory / f"node{number}", f"node{number}", port, peers, settings or {}, self._programs)
            for number, port in enumerate(ports, 1)
        ]
        try:
            self.nodes[0].install()
            self.nodes[0].start("--wsrep-new-cluster")
            for node in self.nodes[1:]:
                node.make_folders()  # (the data come from the first node)
                node.begin()
            self.wait_until_whole()
        except BaseException:
            self.close()
            raise

    def _make_programs(self) -> None:
        make_folder(self._programs)
        for name, text in _PROGRAMS.items():
            program = self._programs / name
            program.write_text(text.replace("REAL", str(binary("rsync"))))
            program.chmod(0o755)

    @contextlib.contextmanager
    def held_transfer(self, joiner: GaleraNode, donor: GaleraNode) -> Iterator[None]:
        """Empty a node that does not run, start it, and hold its copy of the donor's data for the block. Meanwhile the
        donor executes no write, and the node takes no connection. When the block ends, the copy goes on.
        """
        held, hold = self._programs / "held", self._programs / "hold"
        held.unlink(missing_ok=True)
        joiner.empty()
        usual = dict(joiner.settings)
        joiner.settings.update(wsrep_sst_method="held", wsrep_sst_donor=donor.name)
        hold.touch()
        try:
            joiner.begin()
            until(held.exists, f"{donor.name} sends its data to {joiner.name}", LIMIT)
            yield
        finally:
            hold.unlink()
            joiner.settings.clear()
            joiner.settings.update(usual)

    def wait_until_whole(self) -> None:
        """Wait until all nodes take part."""
        for node in self.nodes:
            node.wait_until_joined()
        self.wait_for_size(len(self.nodes))

    def restore(self) -> None:
        """End the faults of all nodes: pauses, isolation, ends.

        If all nodes were killed, they know from their data which nodes belonged to the cluster, and form it again.
        """
        running = [node for node in self.nodes if node.runs()]
        for node in running:
            node.resume()
        for node in running:
            until(node.answers, f"{node.name} answers", LIMIT)
            if not node.is_primary:
                node.reconnect()
        for node in self.nodes:
            if node not in running:
                node.begin()  # (it may answer only after the others have formed the cluster)
        self.wait_until_whole()

    def wait_for_size(self, size: int) -> None:
        """Wait until so many nodes form the cluster, and each of them knows it."""

        def is_formed() -> bool:
            members = [node for node in self.nodes if node.answers() and node.is_synced]
            return len(members) == size and all(node.cluster_size == size for node in members)

        until(is_formed, f"{size} nodes form the cluster", LIMIT)

    def new_database(self, lease: float) -> Database:
        """Create a database with the tables of sqlsem. Its URL names all nodes."""
        name = random_name()
        self.nodes[0].rows(f"CREATE DATABASE {name}")
        database = Database("mysql", url_of(self.nodes, name), {"lease": lease})
        database.install()
        return database

    def close(self) -> None:
        """End all nodes, in whatever state they are."""
        for node in self.nodes:
            node.close()
