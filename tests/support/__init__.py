"""Helpers that the tests share; ``from support import …`` works in every test."""

from support import browsers
from support.children import Channel, Child, child_main, keep_to_the_permissions, make_lock, require_no_crash, session
from support.costs import cost_of_next_ready, cost_of_turns, pages, processor_seconds, without_collector
from support.databases import Database, MemoryDatabase, forget_engine, odbc_of_url, pinned, random_name, with_database
from support.forks import TESTS
from support.histories import Recorder, Stay, check_history, overlap
from support.mariadb import MariaDBServer, MariaDBSession, mariadb_lacks
from support.patience import AMPLE, PATIENCE, STEADY, Standstills, drained, promptly, remains, slack, until
from support.postgres import PostgresServer, free_port, have_postgres
from support.threads import Attempt, Threads, started_since
