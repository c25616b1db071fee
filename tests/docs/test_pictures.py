"""The pictures of the terminal say what is shown now. To draw them anew: python docs/pictures.py"""

import importlib.util
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("documentation_pictures", ROOT / "docs" / "pictures.py")
pictures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pictures)


@pytest.fixture(autouse=True)
def _in_utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    if hasattr(time, "tzset"):
        time.tzset()
    yield
    monkeypatch.undo()
    if hasattr(time, "tzset"):
        time.tzset()


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_fresh(name):
    said = pictures.words((ROOT / "docs" / f"{name}.svg").read_text(encoding="utf-8"))
    assert pictures.words(pictures.PICTURES[name]()) == said, "draw it anew: python docs/pictures.py"


def test_other_words_are_seen():
    text = (ROOT / "docs" / "ls.svg").read_text(encoding="utf-8")
    assert pictures.words(text.replace("nightly", "daily")) != pictures.words(text)
