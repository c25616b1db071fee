"""The seeded bugs in proof/mutants/ still apply. (``python proof/run_mutants.py`` checks that the tests find them.)"""

import ast
import re
import shlex

import pytest
from support import TESTS

from proof import run_mutants

ROOT = TESTS.parent
MUTANTS = run_mutants.all_mutants()


def test_mutants_are_numerous():
    assert len(MUTANTS) >= 30
    changed = {file.split("/")[2] for mutant in MUTANTS for file in mutant.files if file.startswith("sqlsem/sql/")}
    assert changed == {"postgresql", "mssql", "sqlite"}
    assert any(file.endswith(".py") for mutant in MUTANTS for file in mutant.files)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda value: value.name)
def test_a_patch_applies_and_leaves_a_program(mutant):
    texts = mutant.mutated(ROOT)
    for file, text in texts.items():
        assert text != (ROOT / file).read_text(encoding="utf-8")
        if file.endswith(".py"):
            ast.parse(text)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda value: value.name)
def test_patch_names_the_test_that_finds_it(mutant):
    assert mutant.bug
    assert mutant.seen
    assert mutant.needs in ("", "mssql")
    assert (mutant.needs == "mssql") == any("/mssql/" in file for file in mutant.files)
    files = [word for word in shlex.split(mutant.find) if word.startswith("tests/")]
    assert files
    for file in files:
        assert (ROOT / file).exists(), f"{mutant.name} shall be found by {file}, which is not there"


def test_guarantees_page_lists_every_mutant():
    page = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE)) == [mutant.name for mutant in MUTANTS]


def test_patch_that_does_not_apply_is_reported(tmp_path):
    path = tmp_path / "one.patch"
    path.write_text(
        "bug: b\nseen: s\nfind: tests\n\n"
        "--- a/pyproject.toml\n+++ b/pyproject.toml\n@@ -1,1 +1,1 @@\n-no such line\n+x\n"
    )
    with pytest.raises(ValueError, match=r"the lines at pyproject\.toml:1 are in 0 places"):
        run_mutants.parse(path).mutated(ROOT)
