"""Records the projects' files that this user has allowed, each with the digest of its content.

Each allowed file has a record in the folder ``allowed`` of the user's state; its name is the digest of the path.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from sqlsem.config import files
from sqlsem.config.reading import File
from sqlsem.util import late
from sqlsem.values.errors import ConfigurationError

ALLOWED, CHANGED, NOT_ALLOWED = "allowed", "changed since it was allowed", "not allowed"


def _folder() -> Path:
    with late.importing:
        import platformdirs
    return platformdirs.user_state_path("sqlsem") / "allowed"


def _record(path: Path) -> Path:
    with late.importing:
        import hashlib
    return _folder() / hashlib.sha256(os.fsencode(path)).hexdigest()


def _line(path: Path, digest: str) -> bytes:
    return f"sha256:{digest} ".encode() + os.fsencode(path) + b"\n"


def state(file: File) -> str:
    """Return `ALLOWED`, `CHANGED` or `NOT_ALLOWED`."""
    record = _record(file.path)
    try:
        with files.Folder(record.parent) as folder:
            content = folder.read(record.name)
    except (FileNotFoundError, NotADirectoryError):
        return NOT_ALLOWED
    except OSError as exc:
        raise ConfigurationError(f"{record} cannot be read ({exc.strerror}), and may allow {file.path}") from exc
    if content.others is not None:
        raise ConfigurationError(f"{record} allows {file.path}, but {content.others}; remove it: rm {record}")
    return ALLOWED if content.data == _line(file.path, file.digest) else CHANGED


def allow(file: File) -> None:
    """Record that a file is allowed with its present content."""
    folder = _folder()
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        others = files.writable_by_others(folder)
        if others is not None:
            raise ConfigurationError(f"Nothing can be recorded in {folder}, as {others}; close it: chmod 700 {folder}")
        with late.importing:
            import tempfile
        fd, name = tempfile.mkstemp(dir=folder)  # mode 0600
        try:
            with open(fd, "wb") as opened:
                opened.write(_line(file.path, file.digest))
            os.replace(name, _record(file.path))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as exc:
        raise ConfigurationError(f"{folder} cannot be written: {exc.strerror}") from exc


def deny(path: Path) -> bool:
    """Forget that the file at a path is allowed. False if it was not."""
    record = _record(path)
    try:
        record.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as exc:
        raise ConfigurationError(f"{record} cannot be removed: {exc.strerror}") from exc
    return True
