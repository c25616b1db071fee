"""``./test.sh --shuffle SEED`` runs the tests in another order, by an even seed each on fresh databases."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import support
from support import shuffling
from support.commands import PATIENCE

#: Tests that print what they use.
USERS = """
import pytest

@pytest.mark.parametrize("number", range(5))
@pytest.mark.engines("postgresql")
def test_number(database, number):
    print(f"\\nused: {number} {database.url}")
"""


def items_of(*files):
    return [SimpleNamespace(nodeid=f"{file}::test[{number}]") for file in files for number in range(50)]


def order_of(items, seed):
    items = list(items)
    shuffling.shuffle(items, seed)
    return [item.nodeid for item in items]


def test_order_is_that_of_the_seed_in_each_run():
    items = items_of("a.py", "b.py", "c.py")
    order = order_of(items, 1)
    assert order == order_of(reversed(items), 1)
    assert [id for id in order if "7" in id] == order_of([item for item in items if "7" in item.nodeid], 1)
    assert sorted(order) == sorted(item.nodeid for item in items)
    assert len({tuple(order_of(items, seed)) for seed in range(10)}) == 10


def test_tests_of_a_file_stay_together():
    files = [id.split("::")[0] for id in order_of(items_of("a.py", "b.py", "c.py"), 1)]
    assert sum(file != before for file, before in zip(files[1:], files, strict=False)) == 2


@pytest.mark.skipif(not support.have_postgres(), reason="needs PostgreSQL")
@pytest.mark.parametrize("seed", [3, 4])
def test_shuffled_tests_have_fresh_databases_by_an_even_seed(tmp_path, seed):
    file = tmp_path / "test_users.py"
    file.write_text(USERS)
    words = ["-n", "0", "-q", "-s", "-p", "conftest", "-p", "no:cacheprovider", "--shuffle", str(seed)]
    path = os.pathsep.join([str(support.TESTS.parent), str(support.TESTS), os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *words, str(file)],
        env={**os.environ, "PYTHONPATH": path, "SQLSEM_TEST_ENGINES": "postgresql"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE * 3,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    numbers, urls = zip(*re.findall(r"used: (\d+) (\S+)", process.stdout), strict=True)
    assert sorted(numbers) == list("01234") != list(numbers)
    assert len(set(urls)) == (5 if seed == 4 else 1)
