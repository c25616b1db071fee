"""Look at each page of the built site in a browser: no page may scroll sideways, on a telephone or on a screen.

Run as ``python docs/look.py build/docs [FOLDER]``, after Sphinx. With FOLDER it saves a picture of each page there, in
the light and in the dark. Needs Playwright (dependency group ``browser``) and Chromium; without them it prints a line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support import browsers  # noqa: E402

WIDTHS = (360, 1280)
#: Names the elements that reach over the right edge, except in a box of their own that scrolls. The theme hides what is
#: too wide for the whole page (``html``) and scrolls its main part (``.content``), so the widths of these tell nothing.
WIDE = """() => {
    const edge = document.documentElement.clientWidth;
    const scrolls = (element) => {
        for (let box = element.parentElement; box && !box.matches("body, .content"); box = box.parentElement)
            if (["auto", "scroll"].includes(getComputedStyle(box).overflowX)) return true;
        return false;
    };
    const seen = (element) => element.checkVisibility({checkVisibilityCSS: true});
    const wide = [...document.querySelectorAll(".content *, .mobile-header *, footer *")].filter(
        (element) => element.getBoundingClientRect().right > edge + 1 && seen(element) && !scrolls(element));
    return wide.map((element) => `<${element.tagName.toLowerCase()}> ${element.textContent.trim().slice(0, 60)}`);
}"""


def looked_at(browser: Any, pages: list[Path], site: Path, pictures: Path | None) -> Iterator[str]:
    """Yield the pages that are too wide, and their first such element."""
    for width in WIDTHS:
        for scheme in ("light", "dark") if pictures else ("light",):
            context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
            page = context.new_page()
            for path in pages:
                page.goto(path.as_uri())
                name = path.relative_to(site).as_posix()
                for element in page.evaluate(WIDE)[:1]:
                    yield f"{name} is too wide at {width} px: {element}"
                if pictures:
                    file = pictures / f"{name.replace('/', '-')}-{width}-{scheme}.png"
                    page.screenshot(path=file, full_page=True)
            context.close()


def main(site: Path, pictures: Path | None = None) -> int:
    """Print the pages that are too wide; return 1 if there are any."""
    if browsers.lacks():
        print(f"(the pages of the site were not looked at: needs {browsers.lacks()})")
        return 0
    from playwright.sync_api import sync_playwright

    # index.html only leads to the README.
    pages = sorted(
        path for path in site.resolve().rglob("*.html") if "_static" not in path.parts and path.name != "index.html"
    )
    if not pages:
        print(f"there are no pages in {site}")
        return 1
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browsers.chromium())
        wrong = sorted(set(looked_at(browser, pages, site.resolve(), pictures)))
        browser.close()
    print("".join(f"{line}\n" for line in wrong), end="")
    print(f"{len(pages)} pages, {len(wrong) or 'none'} too wide")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:3])))
