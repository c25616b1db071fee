"""The seeded bugs in proof/mutants/ still apply. (``python proof/run_mutants.py`` checks that the tests find them.)"""

import ast
import shlex

import pytest
from support import TESTS

from proof import run_mutants

ROOT = TESTS.parent
MUTANTS = run_mutants.all_mutants()


def test_mutants_are_numerous():
    assert len(MUTANTS) >= 30
    changed = {file.split("/")[2] for mutant in MUTANTS for file in mutant.files if file.startswith("sqlsem/sql/")}
    assert changed == {"postgresql", "mssql", "sqlite", "statements"}
    assert any(file.endswith(".py") for mutant in MUTANTS for file in mutant.files)


def complaints(mutant):
    """Yield what is wrong with a patch, or with its head."""
    try:
        texts = mutant.mutated(ROOT)
        for file, text in texts.items():
            if text == (ROOT / file).read_text(encoding="utf-8"):
                yield f"{mutant.name} changes nothing in {file}"
            if file.endswith(".py"):
                ast.parse(text)
    except (OSError, SyntaxError, ValueError) as exc:
        yield f"{mutant.name}: {exc}"
    if not (mutant.bug and mutant.seen and mutant.needs in ("", "mssql") and mutant.by in ("", "rest")):
        yield f"{mutant.name} needs a head with bug, seen, find; needs: mssql and by: rest, if they apply"
    if (mutant.needs == "mssql") != any("/mssql/" in file for file in mutant.files):
        yield f"{mutant.name} must need mssql just if it patches a file of that"
    files = [word for word in shlex.split(mutant.find) if word.startswith("tests/")]
    for file in files or ["no test"]:
        if not (ROOT / file).exists():
            yield f"{mutant.name} shall be found by {file}, which is not there"


def test_every_patch_applies_and_names_its_test():
    assert [words for mutant in MUTANTS for words in complaints(mutant)] == []


def test_patch_that_does_not_apply_is_reported(tmp_path):
    path = tmp_path / "one.patch"
    path.write_text(
        "bug: b\nseen: s\nfind: tests\n\n"
        "--- a/pyproject.toml\n+++ b/pyproject.toml\n@@ -1,1 +1,1 @@\n-no such line\n+x\n"
    )
    mutant = run_mutants.parse(path)
    with pytest.raises(ValueError, match=r"the lines at pyproject\.toml:1 are in 0 places"):
        mutant.mutated(ROOT)
    assert any("no such line" in words or "0 places" in words for words in complaints(mutant))
