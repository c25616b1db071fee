"""The pictures of the terminal show the present display. To draw them anew: python docs/pictures.py"""

from pathlib import Path

import pytest
from support import docs_modules

pytestmark = pytest.mark.usefixtures("in_utc")

ROOT = Path(__file__).resolve().parents[2]
pictures = docs_modules.load("pictures")


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_each_picture_matches_its_script(name):
    stored = pictures.words((ROOT / "docs" / f"{name}.svg").read_text(encoding="utf-8"))
    assert pictures.words(pictures.PICTURES[name]()) == stored, "draw it anew: python docs/pictures.py"


def test_changed_words_of_a_picture_are_noticed():
    text = (ROOT / "docs" / "ls.svg").read_text(encoding="utf-8")
    assert pictures.words(text.replace("nightly", "daily")) != pictures.words(text)


def test_the_picture_of_the_dashboard_is_fresh():
    """The pixels depend on fonts; the picture's text is stored in it."""
    stored = pictures.words_in((ROOT / "docs" / "dashboard.png").read_bytes())
    assert pictures.words_of_page(pictures.page()) == stored, "draw it anew: python docs/pictures.py dashboard"
    assert "limit 3 full: db1:801 +2" in stored


def test_picture_contains_its_description():
    png = (ROOT / "docs" / "dashboard.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert pictures.words_in(pictures.with_words(png, "other words")) == "other words"
    assert pictures.words_of_page("<title>t</title><p>a  <b>b</b><script>x</script></p>") == "a b"
