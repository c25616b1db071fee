"""The workflows that build and publish run nothing but what was read: actions by commit, as few rights as can be."""

import re
from pathlib import Path

import pytest

WORKFLOWS = Path(__file__).resolve().parents[2] / ".github" / "workflows"
pytestmark = pytest.mark.skipif(not WORKFLOWS.is_dir(), reason="only in a clone: .github is not there")


def workflows():
    return [pytest.param(path, id=path.stem) for path in sorted(WORKFLOWS.glob("*.y*ml"))]


@pytest.mark.parametrize("path", workflows())
def test_actions_are_pinned_to_commits(path):
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    uses = [line for line in lines if re.search(r"\buses\s*:", line)]
    assert uses
    for line in uses:
        assert re.fullmatch(r"(- )?uses: [\w.-]+(/[\w.-]+)+@[0-9a-f]{40} # v[0-9.]+", line), line
    # The same action at the same commit everywhere.
    known = {}
    for line in uses:
        action, commit = line.split("uses: ")[1].split(" ")[0].split("@")
        assert known.setdefault(action, commit) == commit


@pytest.mark.parametrize("path", workflows())
def test_rights_are_few_and_said(path):
    text = path.read_text(encoding="utf-8")
    assert re.search(r"^permissions: \{\}$|^permissions:\n  contents: read$", text, re.MULTILINE)
    assert "pull_request_target" not in text
    assert "workflow_run" not in text
    assert text.count("persist-credentials: false") == text.count("uses: actions/checkout@")
    # What somebody chooses (a branch's name, a title) comes as an environment variable, never into a script's text.
    for line in text.splitlines():
        if re.search(r"\$\{\{\s*github\.(event\.|head_ref|ref_name)", line):
            assert re.fullmatch(r" +[A-Z_]+: \$\{\{ [\w.]+ \}\}", line), line


def test_publishing_needs_no_stored_password():
    text = (WORKFLOWS / "release.yml").read_text(encoding="utf-8")
    assert "secrets." not in text
    assert "id-token: write" in text
    assert "environment: pypi" in text
    assert "attestations: true" in text
