"""docs/reference/api.md: it lists every public name, and every public name has a docstring."""

import inspect
import re
from pathlib import Path

import pytest

import sqlsem
import sqlsem.aio
import sqlsem.testing
import sqlsem.values.errors

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
MODULES = (sqlsem.aio, sqlsem.values.errors, sqlsem.testing)


def named(page):
    """Return the names in the directives of the page, as written there."""
    return set(re.findall(r"^\.\. auto(?:function|class|data|module):: ([\w.]+)", page, re.MULTILINE))


def lacking(page):
    present = named(page)
    whole = {name for module in MODULES if module.__name__ in present for name in module.__all__}
    return [name for name in sqlsem.__all__ if name not in present | whole and f"sqlsem.{name}" not in present]


def test_every_public_name_is_there():
    assert lacking(PAGE) == []
    assert {module.__name__ for module in MODULES} <= named(PAGE)


def test_missing_name_is_reported():
    assert lacking(PAGE.replace(".. autofunction:: queue\n", "")) == ["queue"]


def public_classes():
    for module in (sqlsem, *MODULES):
        for name in module.__all__:
            if inspect.isclass(getattr(module, name)):
                yield pytest.param(getattr(module, name), id=f"{module.__name__}.{name}")


@pytest.mark.parametrize("kind", list(public_classes()))
def test_public_members_have_docstrings(kind):
    """(Sphinx silently leaves out names without a docstring.)"""
    silent = [
        name
        for name, member in inspect.getmembers(kind)
        if not name.startswith("_")
        and (inspect.isfunction(member) or isinstance(member, property))
        and not inspect.getdoc(member)
    ]
    assert silent == []


@pytest.mark.parametrize("name", [public for public in sqlsem.__all__ if callable(getattr(sqlsem, public))])
def test_public_names_have_docstrings(name):
    assert inspect.getdoc(getattr(sqlsem, name))
