"""All T-SQL of the project before Microsoft's own parser and model: see `tsqlcheck`."""

from __future__ import annotations

import subprocess
import sys

import microsoft
import pytest
import tsqlcheck


def test_nothing_is_found():
    check()


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_nothing_is_found_in_a_part_of_the_features():
    """All objects that a routine refers to exist, with each feature alone."""
    check("--parts")


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_every_fault_would_be_found():
    check("--prove")


def check(*options):
    lacks = microsoft.tsqlcheck_lacks()
    if lacks:
        pytest.skip(f"the check of T-SQL needs {lacks}")
    # In a process of its own, which loads .NET.
    words = [sys.executable, tsqlcheck.__file__, *options]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_all_files_are_looked_at():
    """Also without .NET: each file must be in a checked folder. (Abbreviations are checked in the scripts.)"""
    root = tsqlcheck.ROOT
    files = {file for file, _, _ in tsqlcheck.batches(root, lambda path: path.read_text(encoding="utf-8"))}
    own = {str(script.relative_to(root)) for script in (root / "sqlsem" / "sql" / "mssql").glob("*.sql")}
    own.remove("sqlsem/sql/mssql/abbreviations.sql")
    examples = {str(script.relative_to(root)) for script in (root / "clients" / "tsql").glob("*.sql")}
    assert own
    assert examples
    assert own | examples | {"docs/contributing/write-a-client.md", "docs/howto/ssis.md"} <= files


def test_every_text_to_break_is_there():
    """Also without .NET: the proof that faults are found (`test_every_fault_would_be_found`) breaks these texts."""
    texts = {}

    def read(path):
        text = path.read_text(encoding="utf-8")
        texts[path.name] = texts.get(path.name, "") + text
        return text

    for _ in tsqlcheck.batches(tsqlcheck.ROOT, read):
        pass
    faults = [*tsqlcheck.BROKEN, *tsqlcheck.BROKEN_MORE]
    assert [fault for fault, file, old, *_ in faults if old not in texts.get(file, "")] == []
