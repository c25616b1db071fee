"""``from sqlsem import *`` shadows nothing that a program is likely to use."""

import builtins
import subprocess
import sys

import sqlsem

#: Modules of the standard library that programs beside a database import.
WORDS = """
abc argparse array ast asyncio atexit base64 bisect calendar collections contextlib copy csv ctypes
dataclasses datetime decimal difflib email enum errno fnmatch fractions functools gc getpass glob gzip hashlib
heapq html http importlib inspect io itertools json locale logging math multiprocessing operator os pathlib
pickle platform pprint random re sched secrets select shlex shutil signal socket sqlite3 ssl stat statistics
string struct subprocess sys tempfile textwrap threading time timeit traceback types typing unittest urllib
uuid warnings weakref zipfile
"""
COMMON_MODULES = {*WORDS.split()}
#: The library's names that are modules of the standard library as well. `queue` stays: it is the usual word for a
#: work queue, and a program with a work queue has no use for the module.
KNOWN = {"queue"}


def test_star_import_shadows_no_builtin():
    assert {*sqlsem.__all__} & {*dir(builtins)} == set()


def test_star_import_shadows_no_module_in_common_use():
    assert {*sqlsem.__all__} & COMMON_MODULES == set()
    assert {*sqlsem.__all__} & {*sys.stdlib_module_names} <= KNOWN


def test_star_import_leaves_the_namespace_alone():
    """Names that a program used before mean the same afterwards."""
    program = (
        "import builtins\n"
        "before = {name: eval(name) for name in dir(builtins) if name.isidentifier() and not name.startswith('__')}\n"
        "from sqlsem import *\n"
        "print(sorted(name for name, value in before.items() if eval(name) is not value))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"
