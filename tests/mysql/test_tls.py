"""TLS: used if the server has it; verified if the URL says so."""

import contextlib
import shutil
import ssl
import subprocess
import tempfile
from pathlib import Path

import pytest

import sqlsem
from sqlsem.util import late

pytestmark = [
    pytest.mark.engines("mysql"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl (on Debian: apt-get install openssl)"),
]


def make_certificate(folder, name):
    """Make a certificate that signs itself, for this host."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    words = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={name} -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*words.split(), "-out", certificate, "-keyout", key], check=True, capture_output=True)
    key.chmod(0o644)  # the server runs as another user
    return certificate, key


@pytest.fixture
def folder():
    path = Path(tempfile.mkdtemp(prefix="sqlsem-test-tls-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def url(start_mariadb, make_database, folder):
    certificate, key = make_certificate(folder, "server")
    server = start_mariadb(settings={"ssl_cert": str(certificate), "ssl_key": str(key)})
    return make_database(server).url


def cipher(url):
    with contextlib.closing(sqlsem.connect(url, retry=1)) as coordinator, coordinator.mutex("a"):
        session = coordinator.client.member.main.session
        return session.execute_text("SHOW STATUS LIKE 'Ssl_cipher'").rows[0][1]


def test_connection_is_encrypted_and_loads_no_certificates(url, monkeypatch):
    """The system's certificates take 50 ms of a processor to load."""
    monkeypatch.setattr(ssl, "create_default_context", lambda *_, **__: pytest.fail("certificates are loaded"))
    assert cipher(url)
    assert not cipher(f"{url}?ssl_disabled=true")


def test_no_fork_begins_while_a_context_is_made(url, folder, monkeypatch):
    """A child would inherit the locks that OpenSSL holds then, and wait for them for ever."""
    made, make = [], ssl.SSLContext.__new__

    def note(*arguments, **options):
        made.append(late.importing._is_owned())
        return make(*arguments, **options)

    monkeypatch.setattr(ssl.SSLContext, "__new__", note)
    assert cipher(url)
    assert made == []
    assert cipher(f"{url}?ssl_ca={folder / 'server.pem'}")
    assert made
    assert all(made)


def test_server_is_verified_by_the_certificate_of_the_url(url, folder):
    other, _ = make_certificate(folder, "other")
    assert cipher(f"{url}?ssl_ca={folder / 'server.pem'}&ssl_verify_identity=true")
    with pytest.raises(sqlsem.SqlsemError, match="certificate"):
        cipher(f"{url}?ssl_ca={other}&ssl_verify_identity=true")
