"""The server understands each statement that clients send."""

import contextlib
import re

import pymysql
import pytest

from sqlsem import sql
from sqlsem.engines.mysql.connection import for_driver
from sqlsem.engines.mysql.session import statements_of

pytestmark = pytest.mark.engines("mysql")

FILES = ("client", "doctor", "certify")
#: Statements that only a cluster has.
CLUSTER = {"wait_for_cluster"}
#: The server's error for a statement that it does not prepare, and the texts with such statements.
NOT_PREPARED = 1295
NOT_PREPARED_HERE = {"kill"}
#: These create the tables of the others.
CREATES = ("create_inside", "create_dead", "create_counter")


@pytest.mark.parametrize("file", FILES)
def test_each_statement_is_understood(database, file):
    texts = sql.queries("mysql", file=file)
    with contextlib.closing(database.session()) as session:
        cursor = session.connection.cursor()
        for name in CREATES if file == "certify" else ():
            cursor.execute(texts[name].replace("CREATE TABLE", "CREATE TEMPORARY TABLE"))
        understood, left_out = set(), {}
        for name, text in texts.items():
            if name in CLUSTER or name in CREATES:
                continue
            text = text if file == "certify" else for_driver(text)  # (certify.sql is written for the driver)
            for statement in statements_of(f"{text.rstrip().removesuffix(';')};\n"):
                marked = re.sub(r"%\(\w+\)s|%s", "?", statement).replace("%%", "%")
                try:
                    cursor.execute("PREPARE one FROM %s", (marked,))
                    understood.add(name)
                except pymysql.MySQLError as exc:
                    left_out[name] = exc.args
    assert {name: error for name, error in left_out.items() if error[0] != NOT_PREPARED} == {}
    assert left_out.keys() <= NOT_PREPARED_HERE
    assert understood | left_out.keys() == texts.keys() - CLUSTER - set(CREATES)
