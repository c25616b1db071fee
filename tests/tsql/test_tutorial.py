"""docs/tutorials/sql-server.md: the test runs its blocks in their order, in two sessions."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.engines("mssql")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorials" / "sql-server.md"
BLOCK = re.compile(r"```sql\n-- (first|second)\n(.*?)```", re.DOTALL)
#: Return code of each block, as the text after the block names it; None without a code.
CODES = [0, -1, None, None, None, None, None, None]


def test_blocks_run_and_return_the_codes_of_the_page(database, session):
    page = PAGE.read_text(encoding="utf-8")
    blocks = BLOCK.findall(page)
    assert len(blocks) == len(CODES) == page.count("```sql\n"), "each block names its window"
    sessions = {"first": session(), "second": session()}
    answers = [sessions[window].rows(text.replace("sqlsem.", "{s}.")) for window, text in blocks]
    for rows, code, (_, text) in zip(answers, CODES, blocks, strict=True):
        if code is not None:
            assert rows[0][0] == code, text
    assert len(answers[2]) == 1, "status shows the holder"
    assert "holds" in map(str, answers[2][0])
    assert len(answers[7]) == 2, "both tasks are there"
    assert all("finished" in map(str, row) for row in answers[7]), answers[7]
    assert database.queue("nightly") == []
