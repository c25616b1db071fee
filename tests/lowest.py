"""Print the lowest versions that the project allows, as constraints for pip.

``python tests/lowest.py > lowest.txt; pip install -c lowest.txt '.[dashboard]'``
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[[\w,]+\])?>=(?P<version>[\d.]+)(?:;.*)?")


def floors(*, groups: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the names and lowest versions of users' dependencies; with ``groups``, of developers' too."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))
    lists = [project["project"]["dependencies"], *project["project"]["optional-dependencies"].values()]
    if groups:
        lists += project["dependency-groups"].values()
    for requirement in (requirement for several in lists for requirement in several if isinstance(requirement, str)):
        match = REQUIREMENT.fullmatch(requirement.replace(" ", ""))
        if match is None:
            raise ValueError(f"{requirement!r} has no lowest version")
        yield match["name"].lower(), match["version"]


if __name__ == "__main__":
    for name, version in dict(floors()).items():
        print(f"{name}=={version}")
