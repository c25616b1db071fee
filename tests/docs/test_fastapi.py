"""The service of docs/howto/fastapi.md."""

import re
from pathlib import Path

import pytest

from sqlsem.api.default import configured

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "fastapi.md"
pytestmark = pytest.mark.engines("sqlite", "postgresql")


@pytest.fixture
def client(database):
    testclient = pytest.importorskip("fastapi.testclient", reason="FastAPI is not installed")  # (takes time to import)
    namespace = {}
    exec(re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1], namespace)
    with configured(database.url), testclient.TestClient(namespace["app"]) as client:
        yield client


def test_request_enters_within_the_limit(client, connect):
    assert client.post("/reports/sales").json() == {"report": "sales"}
    assert client.post("/accounts/7").json()["fence"] > 0
    assert connect().admin.entries("reports") == []


def test_request_that_would_wait_gets_503(client, connect):
    others = connect()
    with others.limit("reports", 2), others.limit("reports", 2):
        answer = client.post("/reports/sales")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "10"
