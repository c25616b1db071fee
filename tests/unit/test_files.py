"""Only `sqlsem.config.files` reads files with settings."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.projects import STRANGER, as_root, posix

from sqlsem.cli import here
from sqlsem.config import files

PACKAGE = Path(__file__).resolve().parents[2] / "sqlsem"
#: Modules that open or read files themselves, and why the content is no setting, or is checked there. All other
#: modules read by `sqlsem.config.files`.
THEMSELVES = {
    "config/files.py": "this is where it is done",
    "cli/metrics.py": "a file of the package",
    "cli/supervisor.py": "the terminal",
    "config/allowing.py": "writes a file that mkstemp has made",
    "util/sockets.py": "/dev/null",
    "engines/sqlite/beacons.py": "empty files beside the database, judged by their descriptors",
    "engines/sqlite/engine.py": "makes the database's file",
    "engines/sqlite/files.py": "the database's files, to lock bytes of them; compared by their descriptors",
    "engines/sqlite/doctor.py": "/proc/self/mounts",
    "util/tree_killer.py": "/proc",
    "sql/__init__.py": "files of the package",
    "ops/terminal/output.py": "/dev/null, and the standard streams",
}
READERS = {"open", "fdopen", "FileIO", "read_text", "read_bytes", "get_data"}
#: Modules of the standard library that open files by name.
MODULES = {"fileinput", "linecache", "configparser", "shelve", "dbm", "netrc", "runpy", "mmap"}


def readers(name: str, tree: ast.AST) -> Iterator[str]:
    """Yield the places at which a module opens or reads files."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called.rpartition(".")[2] in READERS and called not in ("self.engine.open", "engine.open"):
                yield f"{name}:{node.lineno} {called}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (f"{name}:{node.lineno} {module}" for module in modules if module.partition(".")[0] in MODULES)


def outside_of_testing() -> Iterator[tuple[str, ast.AST]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith("testing/"):
            yield name, ast.parse(path.read_text(encoding="utf-8"))


def test_files_are_read_in_a_single_place() -> None:
    places = [place for name, tree in outside_of_testing() for place in readers(name, tree) if name not in THEMSELVES]
    assert places == []


def test_table_of_readers_is_no_longer_than_need_be() -> None:
    reading = {name for name, tree in outside_of_testing() if any(readers(name, tree))}
    assert set(THEMSELVES) - reading == set()


def test_reader_is_found_wherever_it_hides() -> None:
    text = "open(p)\nos.open(p, 0)\nPath(p).read_text()\np.open()\nimport configparser\nfrom netrc import netrc\n"
    assert len(list(readers("x", ast.parse(text)))) == 6
    assert list(readers("x", ast.parse("self.engine.open()\nfiles.read(p)\nfolder.read('a')"))) == []


def test_settings_are_checked_by_open_descriptor() -> None:
    """The modules of settings judge no path of a file: it may lead to another file later."""
    judging = {"stat", "lstat", "exists", "is_file", "is_symlink", "access", "samefile", "resolve", "realpath"}
    calls = {}
    for path in sorted((PACKAGE / "config").glob("[!f]*.py")):  # all but files.py, which opens and checks them
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in judging:
                calls.setdefault(path.name, set()).add(ast.unparse(node))
    assert calls == {
        "reading.py": {
            "os.stat(os.path.expanduser('~'))",  # where the search ends
            "os.path.realpath(path.parent)",  # of a folder that is then opened
            "path.is_file()",  # to refuse it
        }
    }


# -- who can write ----------------------------------------------------------------------------------------------------


@posix
@pytest.mark.parametrize(
    ("folder", "file", "in_folder", "in_file"),
    [
        (0o755, 0o644, False, False),
        (0o777, 0o644, True, True),
        (0o1777, 0o644, True, False),  # others can add to it, but not replace what is this user's
        (0o755, 0o666, False, True),
        (0o1777, 0o666, True, True),
    ],
)
def test_writers_of_a_folder_and_of_a_file(
    tmp_path: Path, folder: int, file: int, in_folder: bool, in_file: bool
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    path = place / "file"
    path.touch()
    path.chmod(file)
    place.chmod(folder)
    assert (files.writable_by_others(place) is not None) is in_folder
    assert (files.writable_by_others(path) is not None) is in_file
    assert (files.read(path).others is not None) is in_file
    with files.Folder(place) as opened:
        assert (opened.others is not None) is in_folder
        assert (opened.read("file").others is not None) is in_file


@as_root
@pytest.mark.parametrize("changed", ["folder", "file", "group"])
def test_writers_are_owners_and_groups(tmp_path: Path, changed: str) -> None:
    path = tmp_path / "place" / "file"
    path.parent.mkdir()
    path.touch()
    os.chown(path.parent if changed == "folder" else path, 0 if changed == "group" else STRANGER, STRANGER)
    path.chmod(0o664)
    words = f"group {STRANGER} can write to" if changed == "group" else f"belongs to user {STRANGER}"
    assert words in (files.writable_by_others(path) or "")
    assert words in (files.read(path).others or "")


@posix
def test_nothing_is_imported_from_a_folder_like_tmp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Others cannot replace a module there, but they can add one."""
    monkeypatch.chdir(tmp_path)
    assert here.folders_to_import_from() == (str(tmp_path),)
    tmp_path.chmod(0o1777)
    try:
        assert here.folders_to_import_from() == ()
    finally:
        tmp_path.chmod(0o700)
    assert "Nothing is imported from the current folder" in capsys.readouterr().err


# -- reading ----------------------------------------------------------------------------------------------------------


def test_file_of_the_largest_size_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10)
    assert files.read(path, maximum=10).data == b"x" * 10
    with pytest.raises(files.Unfit, match="larger than 9 bytes"):
        files.read(path, maximum=9)


@posix
def test_links_to_a_named_file_are_followed(tmp_path: Path) -> None:
    """As for a secret that Kubernetes mounts."""
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / "secret").write_text("x")
    (tmp_path / "secret").symlink_to("..data/secret")
    content = files.read(tmp_path / "secret")
    assert content.data == b"x"
    assert content.path == tmp_path / "..data" / "secret"
    with files.Folder(tmp_path) as folder, pytest.raises(files.Unfit, match="is a link"):
        folder.read("secret")


@posix
def test_descriptors_are_closed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    os.close(before := os.dup(0))
    for name in ("file", "pipe", "nowhere"):
        try:
            files.read(tmp_path / name, maximum=1)
        except (files.Unfit, OSError):
            assert name != "file"
    os.close(after := os.dup(0))
    assert before == after
