"""Defaults of a server that would change what statements mean: sessions set their own."""

import pytest
from support import Attempt, Database, until

import sqlsem

pytestmark = pytest.mark.engines("mysql")

DEFAULTS = {
    "sql_mode": "",
    "character_set_server": "latin1",
    "collation_server": "latin1_swedish_ci",
    "default_time_zone": "-11:00",
    "autocommit": "0",
    "transaction_isolation": "SERIALIZABLE",
    "innodb_lock_wait_timeout": "1",
    "lock_wait_timeout": "1",
    "wait_timeout": "1",
    "interactive_timeout": "1",
    "lower_case_table_names": "1",
    "default_storage_engine": "MyISAM",
    "init_connect": "SET sql_safe_updates = 1, sql_select_limit = 2, completion_type = 1, unique_checks = 0",
    "max_allowed_packet": "1M",
    "group_concat_max_len": "4",
}


def test_everything_works_under_hostile_defaults(start_mariadb, name):
    server = start_mariadb(settings=DEFAULTS)
    server.rows("CREATE DATABASE Locks")
    server.rows("COMMIT")
    login = server.create_login("etl", "geheim", database="locks")
    database = Database("mysql", login, {"schema": "Own", "table": "Queue"}, server)
    database.install()
    with database.coordinator() as coordinator, database.coordinator() as other:
        with coordinator.mutex("Straße 🔒", note="O'Brien \\ %") as grant:
            waiter = Attempt(other.mutex("Straße 🔒"))
            until(lambda: len(coordinator.admin.entries("Straße 🔒")) == 2, "it waits")
            with other.mutex("strasse 🔒"):
                pass
            assert abs(coordinator.admin.entries("Straße 🔒")[0].seconds) < 60
            assert waiter.waits(2.5), "its sessions are not cut"
            grant.check()
        waiter.granted()
        waiter.leave()
        queue = coordinator.queue("work")
        numbers = queue.put_many([{"n": number, "text": "ä 🔒 \\ ' %"} for number in range(20)])
        assert queue.put({"big": "x" * 900_000}, unique="k") not in numbers
        found = []
        while (task := queue.try_claim()) is not None:
            with task:
                found.append(task.body.get("n"))
        assert found == [*range(20), None]
        with coordinator.once("daily", "366d") as run:
            assert run is not None
        with coordinator.rate("r", 2, 60):
            pass
        assert coordinator.admin.overview() is not None


def test_text_beyond_the_packet_limit_is_refused_in_words(start_mariadb):
    server = start_mariadb(settings={"max_allowed_packet": "1M"})
    server.rows("CREATE DATABASE locks")
    database = Database("mysql", server.url("locks"), {}, server)
    database.install()
    with database.coordinator(retry=1) as coordinator:
        queue = coordinator.queue("work")
        with pytest.raises(sqlsem.SqlsemError, match="max_allowed_packet"):
            queue.put({"big": "x" * 2_000_000})
        number = queue.put({"small": 1})
        assert [task.task_id for task in queue.tasks()] == [number]
