"""Secrets in URLs and ODBC strings: all keywords with a secret, and every place that must hide it."""

from __future__ import annotations

import ast
import re
import urllib.parse
from pathlib import Path

import pytest
from support.projects import call, posix, user

import sqlsem
from sqlsem import config, engines
from sqlsem.engines.base import Options
from sqlsem.util import credentials

PACKAGE = Path(__file__).resolve().parents[2] / "sqlsem"
SECRET = "hunter2-correct-horse"
#: Keywords of Microsoft's ODBC driver 18 and of FreeTDS (learn.microsoft.com, freetds.org), and of mssql-python.
ODBC_SECRETS = {
    *("PWD", "Password", "AccessToken", "ClientSecret", "KeyStoreSecret", "ClientCertificate", "ClientKey"),
}
ODBC_HARMLESS = {
    *("Addr", "Address", "AnsiNPW", "APP", "ApplicationIntent", "AttachDBFileName", "Authentication", "AutoTranslate"),
    *(
        "ColumnEncryption",
        "ConcatNullYieldsNull",
        "ConnectRetryCount",
        "ConnectRetryInterval",
        "Database",
        "Description",
    ),
    *("Driver", "DSN", "Encrypt", "Failover_Partner", "FailoverPartnerSPN", "FileDSN", "GetDataExtensions"),
    *("HostnameInCertificate", "IpAddressPreference", "KeepAlive", "KeepAliveInterval", "KeyStoreAuthentication"),
    *("KeyStorePrincipalId", "KeyStoreLocation", "Language", "LongAsMax", "MARS_Connection", "MultiSubnetFailover"),
    *(
        "Net",
        "Network",
        "PacketSize",
        "QueryLog_On",
        "QueryLogFile",
        "QueryLogTime",
        "QuotedId",
        "Regional",
        "Replication",
    ),
    *("RetryExec", "SaveFile", "Server", "ServerCertificate", "ServerSPN", "StatsLog_On", "StatsLogFile"),
    *(
        "TransparentNetworkIPResolution",
        "Trusted_Connection",
        "TrustServerCertificate",
        "UID",
        "UseFMTONLY",
        "Vendor",
        "WSID",
    ),
    *("TDS_Version", "Port", "ClientCharset", "Servername", "DumpFile", "DumpFileAppend", "DebugFlags", "Encryption"),
    *("Instance", "TextSize", "Timeout", "User"),
}


def libpq_keywords() -> dict[str, bool]:
    """Return all keywords of libpq, with True for secret ones."""
    conninfo = pytest.importorskip("psycopg.pq").Conninfo
    return {option.keyword.decode(): option.dispchar == b"*" for option in conninfo.get_defaults()}


def test_secrets_of_libpq_are_all_known() -> None:
    keywords = libpq_keywords()
    assert sum(keywords.values()) >= 2
    for keyword, secret in keywords.items():
        assert credentials.is_secret(keyword) is (secret or keyword in ("scram_client_key", "scram_server_key")), (
            keyword
        )


def test_secrets_of_odbc_are_all_known() -> None:
    for keyword in ODBC_SECRETS:
        assert credentials.is_secret(keyword), keyword
        assert credentials.is_secret(keyword.upper())
    assert [keyword for keyword in ODBC_HARMLESS if credentials.is_secret(keyword)] == []


@pytest.mark.parametrize("keyword", ["new_password", "UserPasswd", "api-key", "refresh_token", "Shared Secret"])
def test_secrets_of_keywords_to_come_are_suspected(keyword: str) -> None:
    assert credentials.is_secret(keyword)


#: URLs and strings with a secret; those with KEYWORD are tried with each keyword that holds one.
FORMS = (
    "postgresql://u:SECRET@db/x",
    "postgresql://u:SECRET@db,db2:5433/x?sslmode=require",
    "postgresql://:SECRET@db/x",
    "postgresql+psycopg://u:SECRET@db/x",
    "postgresql://u:a/SECRET@db/x",
    "mssql://u:SECRET@db/x?driver=y",
    "postgresql://db/x?KEYWORD=SECRET",
    "postgresql://db/x?sslmode=require&KEYWORD=SECRET&application_name=a@b",
    "postgresql://u@db?KEYWORD=SECRET",
    "mssql://u@db/x?KEYWORD=SECRET",
    "mssql+pyodbc:///?odbc_connect=Driver%3D%7Bx%7D%3BServer%3Ddb%3BKEYWORD%3DSECRET%3BEncrypt%3Dyes",
    "Driver={x};Server=db;Uid=u;KEYWORD=SECRET",
    "Driver={x};Server=db;KEYWORD = SECRET;Encrypt=yes",
    "Server=db;KEYWORD={a;b}}SECRET};Encrypt=yes",
    "Server=db;KEYWORD={never;SECRET",
    "host=db KEYWORD=SECRET dbname=x",
    "host=db KEYWORD='a \\' SECRET' dbname=x",
)


def with_secrets() -> list[str]:
    keywords = sorted({*ODBC_SECRETS, "password", "sslpassword", "oauth_client_secret", "scram_client_key"})
    return [
        form.replace("KEYWORD", keyword).replace("SECRET", SECRET)
        for form in FORMS
        for keyword in (keywords if "KEYWORD" in form else [""])
    ]


@pytest.mark.parametrize("url", with_secrets())
def test_secret_is_found_hidden_and_withheld(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert credentials.has_secret(url)
    shown = credentials.hide_secrets(url)
    assert SECRET not in shown
    assert credentials.HIDDEN in shown
    assert credentials.hide_secrets(shown) == shown
    monkeypatch.setenv("SQLSEM_URL", url)
    assert config.environment("sqlite:///x.db", hand_on=False)["SQLSEM_URL"] == config.WITHHELD


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u@db/x",
        "postgresql://db:5432/x",
        "postgresql://db/x?passfile=/home/u/.pgpass&sslmode=verify-full&sslkey=/k&oauth_client_id=a",
        "postgresql://db/x?password=",
        "sqlite:////tmp/a:b@c.db",
        "sqlite:///c.db?mode=ro",
        "memory://",
        "mssql://db/x?driver=ODBC+Driver+18+for+SQL+Server&Encrypt=yes&TrustServerCertificate=no",
        "mssql+pyodbc:///?odbc_connect=Driver%3D%7Bx%7D%3BServer%3Ddb",
        "Driver={x};Server=db;Trusted_Connection=yes",
        "Driver={x;PWD};Server=db;UID=u;PWD=;Encrypt=yes",
    ],
)
def test_url_without_a_secret_is_shown_whole(url: str) -> None:
    assert not credentials.has_secret(url)
    assert credentials.hide_secrets(url) in (url, urllib.parse.unquote(url))


def test_messages_of_a_driver_have_no_secrets() -> None:
    for keyword in ODBC_SECRETS:
        engine = engines.load("mssql")(f"Driver=x;Server=db;{keyword}={SECRET}", Options())
        assert engine.clean(f"Login failed ({keyword}={SECRET})") == f"Login failed ({keyword}=…)"
    pytest.importorskip("psycopg")
    from psycopg import OperationalError

    for keyword, secret in libpq_keywords().items():
        if secret:
            postgres = engines.load("postgresql")(f"postgresql://db/x?{keyword}={SECRET}", Options())
            assert SECRET not in str(postgres.unreachable(OperationalError(f"cannot: {SECRET}")))


@posix
@pytest.mark.parametrize("keyword", ["password", "oauth_client_secret"])
def test_secret_in_a_file_is_warned_of_and_never_printed(home: Path, keyword: str) -> None:
    user(home, f'url = "postgresql://127.0.0.1:1/x?{keyword}={SECRET}"', 0o644)
    (warning,) = config.resolve().warnings
    assert "holds a password and can be read by others" in warning
    for command in (["config"], ["config", "--json"], ["-vv", "--retry", "0", "ls"], ["--retry", "0", "doctor"]):
        assert SECRET not in call(*command).output
    (home / "config" / "other").write_text("x")
    user(home, f'url = "postgresql://u@db/x?{keyword}={SECRET}"\npassword_file = "other"')
    with pytest.raises(sqlsem.ConfigurationError, match="one is enough"):
        config.resolve()


def test_secret_keywords_stand_in_a_single_table() -> None:
    """A module with its own list of keywords would miss the next keyword."""
    words = re.compile(r"(?i)^(pwd|passwd|password|sslpassword|access_?token|client_?secret|oauth_client_secret)$")
    allowed = {
        ("engines/mssql/odbc.py", "PWD"),  # builds the pattern for a URL's password
        ("engines/mysql/engine.py", "password"),  # a parameter of the driver
    }
    places = {
        (path.relative_to(PACKAGE).as_posix(), node.value)
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "credentials.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and words.match(node.value)
    }
    assert places == allowed
