"""Builds the site from the repository's Markdown: ``python -m sphinx -W --keep-going -c docs . build/docs``.

The source folder is the root of the repository, so a link from one file to another is the same on a code host and on
the site. The order of the pages is in ``_toc.yml``, so no page has to hold it.
"""

from __future__ import annotations

import builtins
import contextlib
import datetime
import inspect
import pkgutil
import sys
import threading
import typing
from pathlib import Path
from typing import Any

import click
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import scripts

import sqlsem
import sqlsem.aio
import sqlsem.cli
import sqlsem.client.options
import sqlsem.values.locks

project = "sqlsem"
author = "The sqlsem authors"
project_copyright = author
release = sqlsem.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",  # "Args:" and "Raises:" of the docstrings
    "sphinx_copybutton",
    "sphinx_external_toc",
]
include_patterns = ["*.md", "docs/**.md", "proof/README.md", "sqlsem/sql/README.md"]
exclude_patterns = [".*", "build", "dist", "benchmarks", "clients", "tests"]
external_toc_path = "docs/_toc.yml"
templates_path = ["templates"]
html_static_path = ["static"]
html_css_files = ["site.css"]

myst_heading_anchors = 4  # as code hosts make them
copybutton_prompt_text = "$ "
highlight_language = "text"  # a block without a language is what a program prints

html_theme = "furo"
html_title = f"sqlsem {release}"
html_additional_pages = {"index": "index.html"}  # leads to the README
html_copy_source = False
html_show_sourcelink = False

default_role = "any"  # docstrings name things in single backticks
smartquotes = False  # they would join the hyphens of --help, and change the quotes of SQL
nitpicky = True
autodoc_mock_imports = ["airflow"]  # takes minutes to install
nitpick_ignore_regex = [("py:.*", r"airflow\..*")]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# Not preserve_defaults: it reads the arguments of the source, and the public signatures are computed.
napoleon_numpy_docstring = False
napoleon_use_ivar = True
suppress_warnings = ["misc.highlighting_failure"]  # examples with "…" in them are no whole programs


def public_names() -> None:
    """Let everything public be of the module that programs import it from, wherever it is written."""
    for module in (sqlsem, sqlsem.aio):
        for name in module.__all__:
            found = getattr(module, name)
            if not inspect.ismethod(found) and getattr(found, "__module__", "").startswith("sqlsem."):
                found.__module__ = module.__name__


def exists(name: str) -> bool:
    """True if a name in a docstring belongs to Python, its standard library, or a part of sqlsem without a page."""
    first, _, rest = name.partition(".")
    places = [builtins, datetime, threading, typing]
    places += [module for where, module in sys.modules.items() if where.partition(".")[0] == "sqlsem"]
    if not rest:
        return any(hasattr(place, first) for place in places)
    for start in (name, f"sqlsem.{name}"):
        with contextlib.suppress(ImportError, AttributeError):
            pkgutil.resolve_name(start)
            return True
    return first in sys.stdlib_module_names


def plain(app: Sphinx, env: Any, node: Any, contnode: nodes.Element) -> nodes.Element | None:
    """A name without a page of its own stays plain; one that does not exist at all is a warning, and so an error."""
    return contnode if exists(node.get("reftarget", "")) else None


def internal(app: Sphinx, what: str, name: str, found: Any, skip: bool, options: Any) -> bool | None:
    """Leave out what says that programs have no use for it."""
    text = inspect.getdoc(found) or ""  # that of a base class, if it has none itself
    return True if "For the package" in " ".join(text.split()) else None


class CommandHelp(SphinxDirective):
    """The text of ``--help`` of each command and its subcommands, as a terminal shows it.

    (Packages that render the commands of click read these texts as reStructuredText, which they are not.)
    """

    def run(self) -> list[nodes.Node]:
        """Return a section for each command."""
        root = click.Context(sqlsem.cli.main, info_name="sqlsem", terminal_width=88, **sqlsem.cli.main.context_settings)
        return [self.section(root), *self.sections(root, "", sqlsem.cli.main)]

    def sections(self, root: click.Context, prefix: str, group: click.Group) -> list[nodes.Node]:
        """Return the sections of the commands of a group."""
        found: list[nodes.Node] = []
        for name, command in group.commands.items():
            if not command.hidden:
                context = click.Context(command, info_name=f"{prefix}{name}", parent=root, **command.context_settings)
                found.append(self.section(context))
                if isinstance(command, click.Group):
                    found += self.sections(root, f"{prefix}{name} ", command)
        return found

    def section(self, context: click.Context) -> nodes.section:
        """Return the section of one command."""
        path = f"{context.command_path} --help"
        text = context.command.get_help(context)
        section = nodes.section("", nodes.title(path, path), ids=[nodes.make_id(path)], names=[path])
        section += nodes.literal_block(text, text, language="text")
        return section


def sql_section(title: str, name: str, text: str) -> nodes.section:
    """Return a section with a definition of SQL."""
    section = nodes.section("", nodes.title("", title), ids=[nodes.make_id(name)], names=[name])
    section += nodes.literal_block(text, text, language="sql")
    return section


class SqlTables(SphinxDirective):
    """The tables that a page names, as the script of the schema defines them."""

    def run(self) -> list[nodes.Node]:
        """Return a section for each table."""
        return [sql_section(name, f"table-{name}", text) for name, text in scripts.tables().items()]


class SqlRoutines(SphinxDirective):
    """The public SQL routines of an engine: the signature, the comment and the roles of each (docs/scripts.py)."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return a section for each routine."""
        (engine,) = self.content
        found = scripts.installed(engine)
        return [self.section(engine, found[name]) for name in scripts.public()]

    def section(self, engine: str, routine: scripts.Routine) -> nodes.section:
        """Return the section of one routine."""
        section = sql_section(routine.name, f"{engine}-{routine.name}", routine.signature)
        for block in [*routine.comment, f"Roles: {', '.join(routine.roles)}."]:
            section += self.paragraph(block) if isinstance(block, str) else self.items(block)
        return section

    def paragraph(self, text: str) -> nodes.paragraph:
        """Return a paragraph, with the words in backticks as literals."""
        parts = text.split("`")
        return nodes.paragraph(
            "", "", *(nodes.literal("", part) if n % 2 else nodes.Text(part) for n, part in enumerate(parts))
        )

    def items(self, texts: list[str]) -> nodes.bullet_list:
        """Return a list of paragraphs."""
        return nodes.bullet_list("", *(nodes.list_item("", self.paragraph(text)) for text in texts))


public_names()


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.add_directive("command-help", CommandHelp)
    app.add_directive("sql-routines", SqlRoutines)
    app.add_directive("sql-tables", SqlTables)
    app.connect("missing-reference", plain)
    app.connect("autodoc-skip-member", internal)
