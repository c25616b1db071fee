"""The workflows that build and publish run only reviewed code: actions by commit, with as few rights as possible."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")
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
    # Text that users choose (a branch's name, a title) comes as an environment variable, never into a script's text.
    for line in text.splitlines():
        if re.search(r"\$\{\{\s*github\.(event\.|head_ref|ref_name)", line):
            assert re.fullmatch(r" +[A-Z_]+: \$\{\{ [\w.]+ \}\}", line), line


def test_publishing_needs_no_stored_password():
    text = (WORKFLOWS / "release.yml").read_text(encoding="utf-8")
    assert "secrets." not in text
    assert "id-token: write" in text
    assert "environment: pypi" in text
    assert "attestations: true" in text


# -- publishing -------------------------------------------------------------------------------------------------------


def jobs(name):
    return yaml.safe_load((WORKFLOWS / f"{name}.yml").read_text(encoding="utf-8"))["jobs"]


def commands(job):
    return "\n".join(step.get("run", "") for step in job["steps"])


def uploads(job):
    return {step["with"]["name"] for step in job["steps"] if "upload-artifact" in step.get("uses", "")}


def downloads(job):
    return {step["with"]["name"] for step in job["steps"] if "download-artifact" in step.get("uses", "")}


def test_published_files_come_from_pinned_tools_only():
    release = jobs("release")
    published = downloads(release["publish"])
    sources = {name: job for name, job in release.items() if uploads(job) & published}
    assert {upload for job in sources.values() for upload in uploads(job)} == published
    for name, job in sources.items():
        ran = commands(job)
        assert "pytest" not in ran, name
        for install in re.findall(r".*\bpip\b.* install .*", ran):
            pinned = re.search(r"--require-hashes .*-r (\S+)$", install)
            # A package that is only inspected does not run: wheels, in an environment of its own.
            looked_at = "/plain/bin/pip" in install and "--only-binary :all:" in install
            assert pinned or looked_at, install
            if pinned:
                assert (WORKFLOWS.parents[1] / pinned[1]).is_file()


def test_wheels_are_published_after_read_only_tests():
    release = jobs("release")
    assert set(release["publish"]["needs"]) == set(release) - {"publish", "keep"}
    (testing,) = [job for job in release.values() if "pytest" in commands(job)]
    assert not uploads(testing)
    assert downloads(testing) == {"dist"}
    built = release["build"]["steps"]
    assert "upload-artifact" in built[-1]["uses"], "nothing runs between the build and its upload"
    assert "--no-isolation" in commands(release["build"]), "what builds is pinned, too"


@pytest.mark.parametrize("path", workflows())
def test_wheels_are_uploaded_before_tests_run(path):
    for job in jobs(path.stem).values():
        steps = job["steps"]
        tested = [number for number, step in enumerate(steps) if "pytest" in step.get("run", "")]
        wheels = [number for number, step in enumerate(steps) if step.get("with", {}).get("path") in ("dist", "dist/")]
        wheels = [number for number in wheels if "upload-artifact" in steps[number]["uses"]]
        assert not (tested and wheels) or max(wheels) < min(tested)


def test_tools_of_releases_are_pinned_by_hashes():
    for file in (WORKFLOWS.parent / "requirements").glob("*.txt"):
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        assert lines
        for requirement, digest in zip(lines[::2], lines[1::2], strict=True):
            assert re.fullmatch(r"[\w.-]+==[\w.]+ \\", requirement), requirement
            assert re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}", digest), digest


def test_sites_are_built_with_warnings_as_errors():
    site = jobs("site")
    assert "python -m sphinx -W " in commands(site["build"])
    assert "id-token" not in site["build"]["permissions"]
    assert site["deploy"]["needs"] == "build"
    assert not commands(site["deploy"])


def test_releases_test_the_package_of_the_wheel():
    ran = commands(jobs("release")["test"])
    removed, unpacked, tested = (
        ran.index(text) for text in ('away/sqlsem"', "zipfile -e dist/*.whl", "pytest -n auto")
    )
    assert removed < unpacked < tested
    assert "support.frozen --check" in ran
    assert "mariadb-server" in ran
    assert "mariadb-server" in commands(jobs("ci")["tests"])


def test_lowest_versions_are_tested():
    job = jobs("ci")["lowest"]
    ran = commands(job)
    (python,) = (step["with"]["python-version"] for step in job["steps"] if "setup-python" in step.get("uses", ""))
    project = (WORKFLOWS.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'requires-python = ">={python}"' in project
    local = (WORKFLOWS.parents[1] / ".ci" / "run").read_text(encoding="utf-8")
    (extras,) = {text for text in re.findall(r"\.\[([\w,]+)\]", ran + local) if "," in text}
    listed = project.split("[project.optional-dependencies]")[1].split("\n[")[0]
    assert set(extras.split(",")) == set(re.findall(r"^(\w+) = ", listed, re.MULTILINE)) - {"mssql"}  # needs a server
    for commands_run in (ran, local):
        assert "python tests/lowest.py" in commands_run
        assert "-c " in commands_run


# -- checks without a run of a workflow --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", workflows())
def test_workflow_conforms_to_its_published_schema(path):
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_workflows_have_no_findings_of_zizmor():
    program = shutil.which("zizmor", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        pytest.skip("zizmor is not installed (pip install --group lint)")
    command = [program, "--offline", "--no-progress", "--color=never", str(WORKFLOWS.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("path", workflows())
def test_scripts_of_steps_are_bash(path):
    for name, job in jobs(path.stem).items():
        for step in job["steps"]:
            script = re.sub(r"\$\{\{.*?\}\}", "x", step.get("run", ""))
            done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{name}: {done.stderr}"


@pytest.mark.parametrize("path", workflows())
def test_expressions_name_known_contexts_and_values(path):
    """Outputs of jobs and values of a matrix exist; contexts have names that GitHub knows."""
    contexts = {"github", "env", "matrix", "job", "runner", "steps", "needs", "inputs", "strategy", "secrets", "vars"}
    for name, job in jobs(path.stem).items():
        for expression in re.findall(r"\$\{\{(.*?)\}\}", str(job)):
            words = re.findall(r"(?<![.\w])([a-z_]+)\.([A-Za-z_-]+)", re.sub(r"'[^']*'", "", expression))
            for context, value in words:
                assert context in contexts, f"{name}: {expression}"
                if context == "matrix":
                    matrix = job["strategy"]["matrix"]
                    included = {key for entry in matrix.get("include", ()) for key in entry}
                    assert value in {*matrix, *included}, f"{name}: {expression}"


def test_images_of_sql_server_are_certified_and_tested():
    (job,) = jobs("sqlserver").values()
    assert job["strategy"]["matrix"]["image"] == [f"{year}-latest" for year in (2017, 2019, 2022, 2025)]
    ran = commands(job)
    assert "sqlsem certify" in ran
    for tests in re.findall(r"tests/\S+", ran):
        assert (WORKFLOWS.parents[1] / tests).exists(), tests
    head = (WORKFLOWS / "sqlserver.yml").read_text(encoding="utf-8").partition("name:")[0]
    assert "has run this" in head
