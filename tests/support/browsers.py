"""A browser for the dashboard: Debian's Chromium, driven by Playwright, with axe to look for what some cannot read."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil

__all__ = ["chromium", "lacks"]


def chromium() -> str | None:
    """Where it is: ``$SQLSEM_TEST_CHROMIUM``, or in the path."""
    names = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
    return os.environ.get("SQLSEM_TEST_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


@functools.cache
def lacks() -> str:
    """What is missing for it, in words; nothing is missing where that is empty."""
    parts = [
        name
        for name, module in (("playwright", "playwright"), ("axe-playwright-python", "axe_playwright_python"))
        if importlib.util.find_spec(module) is None
    ]
    if chromium() is None:
        parts.append("chromium (on Debian: apt-get install chromium)")
    return " and ".join(parts)
