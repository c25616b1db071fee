"""Journals: files of several processes, with a line of JSON for each event. A test reads them, and kills the processes.

A kill can tear a line, although it is written by one call: the kernel copies page by page, and looks for signals in
between. And a reader can see the first page of a line before the second one. So each line has a line break before and
after it, and the part that a killed process wrote stays alone. A reader takes a line once it has its end.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Journal:
    """A process's end of a journal, which all its threads may share. Each record has the process's ``pid``."""

    def __init__(self, path: str | Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def note(self, **words: Any) -> None:
        """Append a record."""
        os.write(self._file, f"\n{json.dumps({**words, 'pid': os.getpid()})}\n".encode())


class JournalReader:
    """The reader's end of a journal.

    Attributes:
        torn: The beginnings of records that killed processes left.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("rb")  # noqa: SIM115  (closed with this object)
        self._rest = b""
        self.torn: list[bytes] = []

    def read(self) -> list[dict[str, Any]]:
        """Return the records since the last call."""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        records = []
        for line in filter(None, lines):
            try:
                records.append(json.loads(line))
            except ValueError:
                assert line.startswith(b"{"), f"no beginning of a record: {line!r}"
                self.torn.append(line)
        return records


def records(path: str | Path) -> list[dict[str, Any]]:
    """Return all records of a journal so far; none if it does not exist yet."""
    return JournalReader(path).read() if Path(path).exists() else []
