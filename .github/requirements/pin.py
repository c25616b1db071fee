"""Prints requirements with all that they need, each by version and hash: ``python pin.py build twine > build.txt``.

For the Python and the system of the release job, whatever this runs on. Read what has changed before you commit it.
"""

from __future__ import annotations

import json
import subprocess
import sys

PYTHON = "3.13"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any")


def main(names: list[str]) -> None:
    """Resolve the names, and print what pip would install."""
    target = ["--python-version", PYTHON, "--implementation", "cp", "--only-binary", ":all:", "--target", "unused"]
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    options = ["--quiet", "--dry-run", "--ignore-installed", "--report", "-", *target, *platforms]
    report = subprocess.run(  # noqa: S603 - to resolve what its caller names is the purpose
        [sys.executable, "-m", "pip", "install", *options, *names],
        check=True,
        stdout=subprocess.PIPE,
    ).stdout
    print(f"# python pin.py {' '.join(names)}")
    for item in sorted(json.loads(report)["install"], key=lambda one: one["metadata"]["name"].lower()):
        print(f"{item['metadata']['name']}=={item['metadata']['version']} \\")
        print(f"    --hash=sha256:{item['download_info']['archive_info']['hashes']['sha256']}")


if __name__ == "__main__":
    main(sys.argv[1:])
