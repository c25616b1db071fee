"""The checks of `sqlsem doctor` on MariaDB and MySQL."""

from __future__ import annotations

import contextlib
import re
import secrets
from typing import Any

import pymysql

from sqlsem.engines.doctor import Doctor, clocks, session_locks
from sqlsem.engines.mysql.connection import CLUSTER_MARGIN, MysqlConnection, for_driver
from sqlsem.engines.protocol import Check
from sqlsem.values.errors import SqlsemError

#: The oldest versions, of MariaDB and of MySQL.
OLDEST = {True: (10, 6), False: (8, 0, 19)}


class MysqlDoctor(Doctor):
    """Checks of a server, a login, a cluster, and proxies in between."""

    def __init__(self, session: MysqlConnection) -> None:
        super().__init__(session.engine)
        self._session = session
        self._engine = session.engine
        self._server = self._ask("server")

    def _ask(self, name: str, *parameters: Any, on: MysqlConnection | None = None) -> Any:
        rows = (on or self._session).execute_text(for_driver(self.texts[name]), parameters).rows
        return rows[0] if rows else None

    def driver(self) -> Check:
        return Check("driver", True, f"PyMySQL {pymysql.__version__}")

    def server(self) -> Check:
        version = str(self._server[0])
        is_mariadb = "MariaDB" in version
        number = tuple(map(int, re.findall(r"\d+", version)[:3]))
        is_new = number >= OLDEST[is_mariadb]
        detail = version if is_mariadb else f"MySQL {version}"
        return Check("server", is_new, detail, "" if is_new else "Use MariaDB 10.6 or MySQL 8.0.19, or later.")

    def primary(self) -> Check:
        _, read_only, _, _, logs, log_format, *_ = self._server
        if read_only:
            return Check("primary", False, "the server is read-only (a replica?)", "Connect to the primary.")
        if logs and log_format == "STATEMENT":
            mend = "Set binlog_format = ROW (or MIXED): the order of statements is not that of their numbers."
            return Check("primary", False, "binlog_format is STATEMENT", mend)
        return Check("primary", True, "writable" + (f", binlog_format is {log_format}" if logs else ""))

    def permission(self) -> Check:
        rights = [str(row[0]) for row in self._session.execute_text(self.texts["permission"]).rows]
        return Check("permission", True, "; ".join(re.sub(r" IDENTIFIED BY .*", "", text) for text in rights))

    def isolation(self) -> Check:
        return Check("isolation", True, "sqlsem's own sessions use READ COMMITTED, whatever the server's default is")

    def durability(self) -> Check:
        _, _, flush, sync, logs, *_ = self._server
        weak = [f"innodb_flush_log_at_trx_commit is {flush}"] if int(flush) != 1 else []
        if logs and int(sync) != 1:
            weak.append(f"sync_binlog is {sync}")
        mend = "A crash of the server can undo what was granted; set it to 1." if weak else ""
        return Check("durability", True, "; ".join(weak) or "each commit is flushed", mend)

    def locks(self) -> Check:
        most = int(self._server[7])
        taken = int(self._ask("connections")[1])
        mend = "Raise max_connections: a full server refuses connections." if 2 * taken > most else ""
        return Check("locks", True, f"{taken} connections of {most}", mend)

    def tls(self) -> Check:
        cipher = str(self._ask("tls")[1])
        options = self._engine.tls_options
        if cipher:
            strict = options.get("ssl_verify_identity")
            mend = "" if strict else "The server's identity is not verified: add ssl_ca=…&ssl_verify_identity=true."
            return Check("tls", True, cipher, mend)
        if self._engine.is_local:
            return Check("tls", True, "on this host; none needed")
        return Check("tls", True, "not encrypted", "Notes can be read on the way: add ?ssl_ca=… to the URL.")

    def keepalive(self) -> Check:
        idle = f"the server ends our sessions that are idle for {self._session.idle} s"
        probes = {str(name): int(number) for name, number in self._session.execute_text(self.texts["keepalive"]).rows}
        if self._engine.is_local or not probes:
            return Check("keepalive", True, idle)
        if not all(probes.values()):
            mend = (
                "For a vanished host set tcp_keepalive_time = 10, tcp_keepalive_interval = 5, tcp_keepalive_probes = 3."
            )
            return Check("keepalive", True, idle, mend)
        silent = probes["tcp_keepalive_time"] + probes["tcp_keepalive_interval"] * probes["tcp_keepalive_probes"]
        return Check("keepalive", True, f"{idle}, and those of a vanished host after {silent} s")

    def clock(self) -> Check:
        return clocks(lambda: float(self._ask("clock")[0]))

    def replication(self) -> Check | None:
        if not self._session.in_cluster:
            return None
        # (A node without a configured address is shown as AUTO.)
        told = [place.strip().rpartition(":") for place in str(self._ask("nodes")[1]).split(",")]
        nodes = {*self._engine.servers, *((host, int(port)) for host, _, port in told if port.isdigit())}
        apart, silent = 0.0, []
        for host, port in sorted(nodes):
            try:
                apart = max(apart, self._difference(host, port))
            except SqlsemError:
                silent.append(f"{host}:{port}")
        if apart > CLUSTER_MARGIN:
            detail = f"the clocks of nodes are {apart:.1f} s apart, and leases allow for {CLUSTER_MARGIN:g} s"
            return Check("replication", False, detail, "Set the clocks of all nodes (chrony, NTP).")
        detail = f"a Galera cluster, whose nodes' clocks are at most {apart:.1f} s apart"
        if silent:
            return Check("replication", True, f"{detail}; not reached: {', '.join(silent)}", "Compare their clocks.")
        return Check("replication", True, detail)

    def _difference(self, host: str, port: int) -> float:
        """Return how far the clock of another node is from this node's at least, in seconds."""
        with contextlib.closing(self._engine.open_connection(host=host, port=port, unix_socket=None)) as connection:
            before = float(self._ask("clock")[0])
            with connection.cursor() as cursor:
                cursor.execute(self.texts["clock"])
                other = float(cursor.fetchone()[0])
            return max(0.0, before - other, other - float(self._ask("clock")[0]))

    def beacon(self) -> Check:
        mend = "Connect past the proxy, or use a lease: sqlsem --lease 30 …, connect(lease=30)."
        name = f"{self._session.lock_prefix}{secrets.token_hex(8)}"
        number, taken = self._ask("beacon_take", name)
        with contextlib.closing(self._engine.connect("look")) as other:
            assert isinstance(other, MysqlConnection)
            other_number, owner = self._ask("beacon_look", name, on=other)
        number_after, _ = self._ask("beacon_look", name)
        self._session.run("give_beacon", (name,))
        kept = number == number_after == owner and number != other_number and bool(taken)
        if self._session.in_cluster:
            return Check(
                "beacon", True, "the nodes of a cluster share no such locks; the lease stands in for the beacon"
            )
        return session_locks(kept, self._engine.options.lease, "a proxy", mend)
