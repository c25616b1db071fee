"""The wheel and the sdist: they have every file that they need and no other, and the wheel works without a checkout."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from support import PATIENCE

import sqlsem

pytest.importorskip("build")
pytest.importorskip("hatchling")
pytest.importorskip("hatch_fancy_pypi_readme")
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    not (ROOT / "sqlsem").is_dir() or not (ROOT / "CHANGELOG.md").is_file(), reason="only in a clone or an sdist"
)
#: The kinds of files of the package.
KINDS = {".py", ".sql", ".md", ".html", ".css", ".js", ".svg", ".json", ".yaml", ".tcss", ".typed"}
#: The names in the top folder of an sdist.
TOP = {
    *(".ci", ".github", ".gitignore", "benchmarks", "clients", "docs", "proof", "sqlsem", "tests", "test.sh"),
    *("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "PKG-INFO", "README.md", "SECURITY.md", "pyproject.toml"),
}
#: Imports every module of the package, and uses a few, with all warnings as errors. Arguments: the wheel's files, a
#: folder that must not serve as a source.
SMOKE = """
import importlib, pathlib, pkgutil, sys
files, checkout = sys.argv[1:]
sys.path[:] = [files, *(path for path in sys.path if pathlib.Path(path).resolve() != pathlib.Path(checkout))]
import sqlsem
assert pathlib.Path(sqlsem.__file__).is_relative_to(files), sqlsem.__file__
for module in pkgutil.walk_packages(sqlsem.__path__, "sqlsem."):
    if module.name in ("sqlsem.__main__", "sqlsem.adapters.airflow", "sqlsem.adapters.django"):
        continue
    try:
        importlib.import_module(module.name)
    except ImportError as exc:
        assert not (exc.name or "").startswith("sqlsem"), exc  # (a driver that is not here)
from sqlsem import engines, sql
for engine in engines.ENGINES:
    for name in ("schema", *sql.rerunnable(engine), "client", "drop"):
        assert sql.script(engine, name)
sqlsem.configure(f"sqlite:///{pathlib.Path('smoke.db').resolve()}")
with sqlsem.limit("etl", 3) as grant:
    grant.check()
queue = sqlsem.queue("nightly")
queue.put({"number": 1})
with queue.try_claim() as task:
    assert task.body == {"number": 1}
outside = [name for name, module in sys.modules.items()
           if name.partition(".")[0] == "sqlsem" and not getattr(module, "__file__", files).startswith(files)]
assert not outside, outside
print("works")
"""
#: Runs the command line of the wheel's files.
COMMAND = """
import pathlib, sys
files, checkout = sys.argv[1:3]
sys.path[:] = [files, *(path for path in sys.path if pathlib.Path(path).resolve() != pathlib.Path(checkout))]
sys.argv[:] = ["sqlsem", *sys.argv[3:]]
from sqlsem.cli import main
main(prog_name="sqlsem")
"""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The folder with the sdist of this checkout, and the wheel that is built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    words = ["--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run([sys.executable, "-m", "build", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(distributions):
    (path,) = distributions.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def sdist(distributions):
    (path,) = distributions.glob("*.tar.gz")
    return path


def metadata(wheel):
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(opened.read(name).decode())


@pytest.mark.kept
def test_wheel_has_the_files_of_the_package_and_no_others(wheel):
    files = {path for path in (ROOT / "sqlsem").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    expected = {path.relative_to(ROOT).as_posix() for path in files if path.suffix in KINDS or path.name == "py.typed"}
    assert expected == {path.relative_to(ROOT).as_posix() for path in files}, "another kind of file"
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
    info = f"sqlsem-{sqlsem.__version__}.dist-info"
    assert {name for name in names if not name.startswith(f"{info}/")} == expected
    assert {name.removeprefix(f"{info}/") for name in names if name.startswith(info)} == {
        *("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"),
    }
    assert wheel.name == f"sqlsem-{sqlsem.__version__}-py3-none-any.whl"


def test_sdist_has_every_tracked_file_and_no_caches(sdist):
    with tarfile.open(sdist) as opened:
        names = [name.partition("/")[2] for name in opened.getnames()]
    assert {name.partition("/")[0] for name in names} == TOP
    litter = re.compile(
        r"(^|/)(__pycache__|\.(venv|hypothesis|\w+_cache)|build|dist)/|^mutants/|\.(pyc|db|log)$|\.egg-info/"
    )
    assert [name for name in names if litter.search(name)] == []
    if not (ROOT / ".git").exists():
        return
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tracked = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    assert tracked - set(names) == set()


def test_metadata_has_version_and_licence_without_local_links(wheel):
    text = metadata(wheel)
    assert text["Version"] == sqlsem.__version__
    assert text["License-Expression"] == "MIT"
    assert not any(line.startswith("License ::") for line in text.get_all("Classifier"))
    body = text.get_payload()
    targets = re.findall(r"\]\(([^)\s]+)\)", body)
    assert targets
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    assert f"/v{sqlsem.__version__}/docs/" in body


def test_changelog_has_the_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[{re.escape(sqlsem.__version__)}\] - \d{{4}}-\d\d-\d\d$", text, re.MULTILINE)


def test_wheel_works_without_a_checkout(wheel, tmp_path):
    files = tmp_path / "files"
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(files)
    place = tmp_path / "place"
    place.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(program, *arguments):
        command = [sys.executable, "-W", "error", "-c", program, str(files), str(ROOT), *arguments]
        done = subprocess.run(
            command, cwd=place, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert run(SMOKE) == "works\n"
    assert sqlsem.__version__ in run(COMMAND, "--version")
    assert "Exit codes" in run(COMMAND, "--help")
    url = f"sqlite:///{place / 'smoke.db'}"
    assert run(COMMAND, "--url", url, "doctor")
    assert (
        run(COMMAND, "--url", url, "run", "--mutex", "etl", "--", sys.executable, "-c", "print('inside')").strip()
        == "inside"
    )
