"""The journals of tests: a reader beside writers that are killed."""

import json
import os

import pytest
from support.journals import Journal, JournalReader, records


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal"


def write(path, text):
    with path.open("ab") as file:
        file.write(text.encode())


def test_reader_waits_for_the_end_of_a_record(path):
    Journal(path).note(what="first")
    reader = JournalReader(path)
    assert [record["what"] for record in reader.read()] == ["first"]
    record = json.dumps({"what": "second"})
    for part in (f"\n{record[:7]}", record[7:]):
        write(path, part)
        assert reader.read() == []
    write(path, "\n")
    assert reader.read() == [{"what": "second"}]
    assert reader.torn == []


@pytest.mark.parametrize("length", range(19))
def test_record_torn_by_a_kill_harms_no_other(path, length):
    """Whatever part of it was written."""
    journal = Journal(path)
    journal.note(what="before")
    write(path, '\n{"what": "torn"}\n'[:length])
    journal.note(what="after")
    read = [record["what"] for record in records(path)]
    assert read == (["before", "torn", "after"] if length >= 17 else ["before", "after"])


def test_record_has_its_process(path):
    Journal(path).note(at=1.0)
    assert records(path) == [{"at": 1.0, "pid": os.getpid()}]


def test_line_that_begins_no_record_is_refused(path):
    write(path, "nonsense\n")
    with pytest.raises(AssertionError, match="nonsense"):
        records(path)


def test_missing_journal_has_no_records(path):
    assert records(path) == []
