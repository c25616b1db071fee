"""The structure in docs/contributing/architecture.md: directions of imports, private names, sizes of code."""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "sqlsem").rglob("*.py"))
MAX_LINES = 550
MAX_METHODS = 28
MAX_LINES_OF_A_FUNCTION = 80
#: Names with an underscore that their makers document.
FOREIGN = {"_current_frames", "_exit", "_get_running_loop", "_getframe"}


def trees():
    for path in MODULES:
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def is_private(name):
    return name.startswith("_") and not name.endswith("__") and name not in FOREIGN


def test_imports_follow_the_layers():
    """The layers stand in pyproject.toml; imports inside functions and for type checkers count."""
    # (In a process of its own: it sets up logging for the whole process.)
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def defined(tree):
    """Private names that a module defines itself: functions, classes, variables, attributes of its own objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        ):
            yield node.attr


def foreign_private_names(name, tree):
    own = set(defined(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            yield f"{name}:{node.lineno} .{node.attr}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sqlsem"):
            yield from (f"{name}:{node.lineno} {alias.name}" for alias in node.names if is_private(alias.name))


def test_no_private_name_is_used_from_another_module():
    assert [use for name, tree in trees() for use in foreign_private_names(name, tree)] == []


def test_search_for_private_names_finds_them():
    text = (
        "from sqlsem.api.locks import _default\n"
        "class A:\n    def f(self, b): return self._mine, b._theirs\n    _mine = 1"
    )
    assert [use.split()[1] for use in foreign_private_names("x", ast.parse(text))] == ["_default", "._theirs"]


def too_large(name, tree, text):
    if len(text.splitlines()) > MAX_LINES:
        yield f"{name}: {len(text.splitlines())} lines"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) for member in node.body)
            if methods > MAX_METHODS:
                yield f"{name}: class {node.name} has {methods} methods"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > MAX_LINES_OF_A_FUNCTION:
                yield f"{name}: {node.name} has {lines} lines"


def test_every_piece_can_be_seen_whole():
    too_long = [
        finding
        for path in MODULES
        for text in [path.read_text(encoding="utf-8")]
        for finding in too_large(path.relative_to(ROOT).as_posix(), ast.parse(text), text)
    ]
    assert too_long == []


def test_heads_of_packages_list_their_modules():
    """A head that lists modules lists all of them, and no others."""
    wrong, lists = [], 0
    for path in MODULES:
        if path.name != "__init__.py":
            continue
        head = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        listed = {match[1] for match in re.finditer(r"^(\w+)(?:\.py|/)?  +\S", head, re.MULTILINE)}
        if len(listed) > 1:
            lists += 1
            there = {p.stem for p in path.parent.glob("*.py")} | {
                p.parent.name for p in path.parent.glob("*/__init__.py")
            }
            wrong += [f"{path.parent.name}: {name}" for name in sorted(listed ^ (there - {"__init__"}))]
    assert wrong == []
    assert lists >= 3


def test_no_import_hides_in_a_function():
    """A comment beside the import gives the reason: a driver that may be missing, or a module that is slow to load. Or
    it stands in ``with late.importing``, which gives the reason for all of them.
    """
    hidden = []
    for path in MODULES:
        lines = path.read_text(encoding="utf-8").splitlines()
        for function in ast.walk(ast.parse("\n".join(lines))):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            late = {
                node
                for block in ast.walk(function)
                if isinstance(block, ast.With) and ast.unparse(block.items[0]) == "late.importing"
                for node in ast.walk(block)
            }
            for node in ast.walk(function):
                own = (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sqlsem")) or (
                    isinstance(node, ast.Import) and any(name.name.startswith("sqlsem") for name in node.names)
                )
                if own and node not in late and "#" not in lines[node.lineno - 1] and "#" not in lines[node.lineno - 2]:
                    hidden.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert hidden == []


def counted_before_try(function):
    """Yield the places at which an interrupt separates a step from its undo.

    A number is raised, or a lock taken by a call, in the statement right before the 'try' whose 'finally' lowers or
    releases it.
    """

    def targets(nodes, kind):
        steps = [item for node in nodes for item in ast.walk(node) if isinstance(item, ast.AugAssign)]
        return {ast.unparse(step.target) for step in steps if isinstance(step.op, kind)}

    def owners(nodes, method):
        calls = [item.func for node in nodes for item in ast.walk(node) if isinstance(item, ast.Call)]
        return {ast.unparse(call.value) for call in calls if isinstance(call, ast.Attribute) and call.attr == method}

    for node in ast.walk(function):
        for body in (getattr(node, "body", None), getattr(node, "orelse", None), getattr(node, "finalbody", None)):
            for number, after in enumerate(body if isinstance(body, list) else ()):
                if isinstance(after, ast.Try) and after.finalbody:
                    before, undone = body[:number], after.finalbody
                    names = targets(before, ast.Add) & targets(undone, ast.Sub)
                    names |= targets(before, ast.Sub) & targets(undone, ast.Add)
                    names |= owners(before, "acquire") & owners(undone, "release")
                    yield from ((after.lineno, name) for name in names)


def test_no_interrupt_separates_a_step_from_its_undo():
    """Counted holders have a token (util/permits.py), and a lock is taken by 'with' or `runtime.had_within`."""
    gaps = {
        f"{name}:{line} {counter}"
        for name, tree in trees()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for line, counter in counted_before_try(function)
    }
    assert gaps == set()


def test_search_for_interruptible_gaps_finds_them():
    text = (
        "def f(self):\n    with self.lock:\n        self.n += 1\n    try:\n        pass\n    finally:\n"
        "        with self.lock:\n            self.n -= 1\n"
        "def g(lock):\n    if not lock.acquire(timeout=1):\n        return\n    try:\n        pass\n"
        "    finally:\n        lock.release()\n"
        "def h(self):\n    try:\n        self.n += 1\n    finally:\n        self.n -= 2\n"
    )
    assert [counter for statement in ast.parse(text).body for _, counter in counted_before_try(statement)] == [
        "self.n",
        "lock",
    ]


def test_tests_query_only_their_own_part_of_a_server():
    """All workers share one server of a kind: its other waiters and connections may belong to another test."""
    everybodys = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                continue
            tables = r"FROM (?:pg_locks|pg_stat_activity|information_schema\.processlist)\b(.*)"
            query = re.search(tables, node.value, re.DOTALL)
            if query and not re.search(r"\b(pid|datname|database|usename|db|id)\b", query[1]):
                everybodys.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}")
    assert everybodys == []


def test_nothing_waits_for_a_change_in_a_copy():
    """MariaDB and MySQL give the same rows of these tables again and again to those who read every 0.1 s or sooner."""
    copies = re.compile(r"(?i)\b(?:FROM|JOIN)\s+information_schema\.innodb_(?:trx|locks|lock_waits)\b")
    paths = [
        path for folder in ("sqlsem", "tests") for kind in ("*.py", "*.sql") for path in (ROOT / folder).rglob(kind)
    ]
    assert [path for path in paths if copies.search(path.read_text(encoding="utf-8"))] == []


def test_no_module_of_support_replaces_a_name_of_support():
    """The import of a module sets the attribute of its name in its package."""
    package = ROOT / "tests" / "support"
    imports = ast.parse((package / "__init__.py").read_text(encoding="utf-8")).body
    names = {
        name.asname or name.name
        for node in imports
        if isinstance(node, ast.ImportFrom) and node.module != "support"
        for name in node.names
    }
    assert not names & {path.stem for path in package.glob("*.py")}
