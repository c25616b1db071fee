"""The Galera clusters of the tests: they form, and their nodes fail and come back as tests need it."""

import psutil
import pymysql
import pytest
from support import random_name, until
from support.mariadb import connect

pytestmark = [pytest.mark.engines("mysql"), pytest.mark.soak]

#: The node is not in a majority.
NOT_READY = 1047


@pytest.fixture
def cluster(galera_cluster, engine_name):
    """The cluster, where MariaDB's tests run."""
    return galera_cluster


@pytest.fixture
def numbers(cluster):
    """A table ``number`` in a database of its own: a function that inserts on a node, and one that reads there."""
    name = random_name()
    cluster.nodes[0].rows(f"CREATE DATABASE {name}")
    cluster.nodes[0].rows(f"CREATE TABLE {name}.numbers (number integer PRIMARY KEY) ENGINE = InnoDB")

    def insert(node, number):
        node.rows(f"INSERT INTO {name}.numbers VALUES (%s)", number)

    def read(node):
        with connect(node.url(name)) as connection:
            connection.execute("SET SESSION wsrep_sync_wait = 1")  # else it might not have the others' writes yet
            return [number for (number,) in connection.execute("SELECT number FROM numbers ORDER BY number").fetchall()]

    return insert, read


def test_write_on_each_node_is_read_on_all(cluster, numbers):
    insert, read = numbers
    for number, node in enumerate(cluster.nodes):
        insert(node, number)
    assert [read(node) for node in cluster.nodes] == [[0, 1, 2]] * 3


def test_isolated_node_refuses_until_it_is_reconnected(cluster, numbers):
    insert, read = numbers
    first, second, third = cluster.nodes
    third.isolate()
    until(lambda: not third.is_primary, "the node knows that it is alone")
    cluster.wait_for_size(2)
    for attempt in (lambda: read(third), lambda: insert(third, 1)):
        with pytest.raises(pymysql.MySQLError) as caught:
            attempt()
        assert caught.value.args[0] == NOT_READY
    insert(first, 2)
    assert read(second) == [2]
    third.reconnect()
    cluster.wait_until_whole()
    assert read(third) == [2]


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_absent_node_gets_the_writes_it_lacks(cluster, numbers, end):
    insert, read = numbers
    first, second, _ = cluster.nodes
    before = second.pid
    getattr(second, end)()
    cluster.wait_for_size(2)
    insert(first, 1)
    second.start()
    assert second.pid != before
    assert second.transfer == "IST"
    assert read(second) == [1]


def test_emptied_node_gets_a_copy_of_all_data(cluster, numbers):
    insert, read = numbers
    first, _, third = cluster.nodes
    insert(first, 1)
    third.kill()
    third.empty()
    assert list(third.data.iterdir()) == []
    third.start()
    assert third.transfer == "SST"
    assert read(third) == [1]


def test_paused_node_is_replaced_by_the_majority(cluster, numbers):
    insert, read = numbers
    first, second, third = cluster.nodes
    second.pause()
    until(lambda: first.cluster_size == third.cluster_size == 2, "the others go on")
    insert(first, 1)
    assert read(third) == [1]
    second.resume()
    cluster.wait_until_whole()
    assert read(second) == [1]


def test_last_node_refuses_after_a_majority_was_killed(cluster, numbers):
    insert, read = numbers
    first, second, third = cluster.nodes
    first.kill()
    second.kill()
    until(lambda: not third.is_primary, "the last node knows that it is no majority")
    with pytest.raises(pymysql.MySQLError) as caught:
        insert(third, 1)
    assert caught.value.args[0] == NOT_READY
    cluster.restore()
    insert(third, 2)
    assert [read(node) for node in cluster.nodes] == [[2]] * 3


def test_killed_cluster_forms_again_with_all_writes(cluster, numbers):
    insert, read = numbers
    for number, node in enumerate(cluster.nodes):
        insert(node, number)
    for node in cluster.nodes:
        node.kill()
    cluster.restore()
    assert [read(node) for node in cluster.nodes] == [[0, 1, 2]] * 3


def test_restore_ends_all_faults_of_nodes(cluster, numbers):
    insert, read = numbers
    first, second, third = cluster.nodes
    second.kill()
    cluster.wait_for_size(2)
    third.isolate()
    until(lambda: not third.is_primary, "the node knows that it is alone")
    first.pause()
    cluster.restore()
    insert(first, 1)
    assert [read(node) for node in cluster.nodes] == [[1]] * 3


def test_nodes_listen_on_loopback_alone(cluster):
    for node in cluster.nodes:
        ends = psutil.Process(node.pid).net_connections("tcp")
        assert {end.laddr.ip for end in ends if end.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
