"""A browser for the dashboard: Debian's Chromium, driven by Playwright. axe finds barriers to accessibility."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil

__all__ = ["chromium", "lacks"]


def chromium() -> str | None:
    """Return the path of Chromium: ``$SQLSEM_TEST_CHROMIUM``, or the first that PATH has."""
    names = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
    return os.environ.get("SQLSEM_TEST_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


@functools.cache
def lacks() -> str:
    """Return the names of the packages that the browser tests lack; empty if none is missing."""
    parts = [
        name
        for name, module in (("playwright", "playwright"), ("axe-playwright-python", "axe_playwright_python"))
        if importlib.util.find_spec(module) is None
    ]
    if chromium() is None:
        parts.append("chromium (on Debian: apt-get install chromium)")
    return " and ".join(parts)
