"""HTTPS and certificates of clients, over real sockets."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from canter.core.errors import ConfigError
from canter.server.args import ServerArgs
from canter.server.tls import make_context
from tests.server.certificates import Authority, Identity, needs_openssl
from tests.server.test_serve import Process, server

pytestmark = needs_openssl


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other"), "theirs")


@pytest.fixture(scope="module")
def identity(authority: Authority) -> Identity:
    return authority.issue("server")


def files(identity: Identity) -> dict[str, str]:
    return {"ssl_certfile": str(identity.certificate), "ssl_keyfile": str(identity.key)}


def serve_tls(identity: Identity, **options):
    return server(ready=False, **files(identity), **options)


def secure_url(process: Process) -> str:
    return process.url.replace("http:", "https:")


def client_of(process: Process, context: ssl.SSLContext) -> httpx.Client:
    return httpx.Client(base_url=secure_url(process), verify=context, timeout=10)


@pytest.fixture(scope="module")
def shared(identity: Identity):
    with serve_tls(identity) as process:
        process.wait_for_line("ready: m")
        yield process


def test_it_serves_and_streams(shared: Process, authority: Authority) -> None:
    with client_of(shared, authority.client_context()) as client:
        assert client.get("/health").status_code == 200
        with client.stream("POST", "/v1/completions", json={"prompt": "ab", "max_tokens": 40, "stream": True}) as response:
            lines = [line for line in response.iter_lines() if line]
    assert len(lines) > 1 and lines[-1] == "data: [DONE]"
    assert any("listening on https://127.0.0.1" in line for line in shared.log)


def test_clients_without_tls_or_trust_are_turned_away(shared: Process, stranger: Authority, authority: Authority) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(shared.url + "/health", timeout=10)
    with client_of(shared, stranger.client_context()) as client, pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        client.get("/health")
    with client_of(shared, authority.client_context()) as client:
        assert client.get("/health").status_code == 200


def test_old_versions_of_tls_are_refused(shared: Process, authority: Authority) -> None:
    old = authority.client_context()
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises(httpx.ConnectError), client_of(shared, old) as client:
        client.get("/health")


def test_http_1_1_is_agreed_upon(shared: Process, authority: Authority) -> None:
    context = authority.client_context()
    context.set_alpn_protocols(["h2", "http/1.1"])
    with socket.create_connection(("127.0.0.1", shared.port)) as plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as secure:
        assert secure.selected_alpn_protocol() == "http/1.1"


def test_silent_handshakes_hold_up_nobody(shared: Process, authority: Authority) -> None:
    silent = [socket.create_connection(("127.0.0.1", shared.port)) for _ in range(64)]
    try:
        silent[0].sendall(b"\x16\x03\x01")  # a hello that never goes on
        with client_of(shared, authority.client_context()) as client:
            assert client.get("/health").status_code == 200
    finally:
        for connection in silent:
            connection.close()


def test_a_silent_handshake_is_ended(identity: Identity, authority: Authority) -> None:
    with serve_tls(identity, constants={"canter.server.serve": {"HANDSHAKE_SECONDS": 0.5}}) as process:
        process.wait_for_line("ready: m")
        with socket.create_connection(("127.0.0.1", process.port), timeout=20) as silent:
            assert silent.recv(1) == b""
        with client_of(process, authority.client_context()) as client:
            assert client.get("/health").status_code == 200


def test_key_and_certificate_may_share_a_file(identity: Identity) -> None:
    assert make_context(ServerArgs.parse(ssl_certfile=str(identity.in_one_file()))) is not None


@pytest.mark.parametrize(
    ("requirement", "accepted"),
    [(0, {"none", "ours", "theirs"}), (1, {"none", "ours"}), (2, {"ours"})],
)
def test_certificates_of_clients(
    identity: Identity, authority: Authority, stranger: Authority, requirement: int, accepted: set[str]
) -> None:
    clients = {"none": None, "ours": authority.issue("client"), "theirs": stranger.issue("client")}
    with serve_tls(identity, ssl_ca_certs=str(authority.certificate), ssl_cert_reqs=requirement) as process:
        process.wait_for_line("ready: m")
        passed = set()
        for name, own in clients.items():
            with client_of(process, authority.client_context(own)) as client:
                try:
                    passed.add(name) if client.get("/health").status_code == 200 else None
                except httpx.TransportError:
                    continue
    assert passed == accepted


def test_a_folder_of_authorities(identity: Identity, authority: Authority, tmp_path: Path) -> None:
    shutil.copy(authority.certificate, tmp_path / "ca.pem")
    subprocess.run(["openssl", "rehash", str(tmp_path)], check=True, capture_output=True)
    with serve_tls(identity, ssl_ca_certs=str(tmp_path), ssl_cert_reqs=2) as process:
        process.wait_for_line("ready: m")
        with client_of(process, authority.client_context(authority.issue("in-folder"))) as client:
            assert client.get("/health").status_code == 200


def test_over_a_unix_socket(identity: Identity, authority: Authority, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with serve_tls(identity, uds=str(path)) as process:
        process.wait_for_line("ready: m")
        context = authority.client_context()
        transport = httpx.HTTPTransport(uds=str(path), verify=context)
        with httpx.Client(transport=transport, base_url="https://127.0.0.1") as client:
            assert client.get("/health").status_code == 200


def serial_of(process: Process, authority: Authority) -> str:
    context = authority.client_context()
    with socket.create_connection(("127.0.0.1", process.port)) as plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as secure:
        return secure.getpeercert()["serialNumber"]


def test_a_renewed_certificate_needs_no_restart(authority: Authority, tmp_path: Path) -> None:
    used, renewed = authority.issue("before"), authority.issue("after")
    with serve_tls(used, enable_ssl_refresh=True, constants={"canter.server.serve": {"REFRESH_SECONDS": 0.1}}) as process:
        process.wait_for_line("ready: m")
        before = serial_of(process, authority)
        with client_of(process, authority.client_context()) as client:
            assert client.get("/health").status_code == 200
            shutil.copy(renewed.certificate, used.certificate)
            process.wait_for_line("the old certificate stays in use: ssl_keyfile")
            assert serial_of(process, authority) == before
            shutil.copy(renewed.key, used.key)
            process.wait_for_line("the certificate was read again")
            assert client.get("/health").status_code == 200  # on the connection that stands
            deadline = time.monotonic() + 10
            while serial_of(process, authority) == before:
                assert time.monotonic() < deadline
        process.signal(15)
        assert process.wait() == 0


def test_several_frontends_share_the_socket(authority: Authority, tmp_path: Path) -> None:
    used, renewed = authority.issue("shared-before"), authority.issue("shared-after")
    with serve_tls(used, api_server_count=2, enable_ssl_refresh=True) as process:
        process.wait_for_line("frontend 0: ready: m")
        process.wait_for_line("frontend 1: ready: m")
        silent = [socket.create_connection(("127.0.0.1", process.port)) for _ in range(16)]
        before = serial_of(process, authority)
        for _ in range(8):
            with client_of(process, authority.client_context()) as client:
                assert client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 4}).json()["choices"][0]["text"] == "abab"
        shutil.copy(renewed.key, used.key)
        shutil.copy(renewed.certificate, used.certificate)
        process.wait_for_line("frontend 0: the certificate was read again")
        process.wait_for_line("frontend 1: the certificate was read again")
        assert all(serial_of(process, authority) != before for _ in range(8))
        process.signal(15)
        assert process.wait() == 0
        for connection in silent:
            connection.close()


def broken_files(authority: Authority, stranger: Authority, folder: Path) -> list[tuple[dict, str]]:
    own, other = authority.issue("own"), stranger.issue("other")
    junk = folder / "junk.pem"
    junk.write_text("not a certificate")
    encrypted = folder / "encrypted.key"
    subprocess.run(["openssl", "ec", "-aes256", "-passout", "pass:x", "-in", str(own.key), "-out", str(encrypted)], check=True,
                   capture_output=True)  # fmt: skip
    good = files(own)
    return [
        ({"ssl_keyfile": str(own.key)}, "ssl_keyfile needs ssl_certfile"),
        ({"ssl_ca_certs": str(own.certificate)}, "ssl_ca_certs needs ssl_certfile"),
        ({"enable_ssl_refresh": True}, "enable_ssl_refresh needs ssl_certfile"),
        ({**good, "ssl_cert_reqs": 2}, "ssl_cert_reqs 2 needs ssl_ca_certs"),
        ({**good, "ssl_cert_reqs": 3}, "ssl_cert_reqs must be one of 0, 1, 2"),
        ({**good, "ssl_certfile": "/nowhere.pem"}, r"ssl_certfile: can't read /nowhere.pem: No such file"),
        ({**good, "ssl_keyfile": "/nowhere.key"}, r"ssl_keyfile: can't read /nowhere.key"),
        ({**good, "ssl_ca_certs": "/nowhere"}, r"ssl_ca_certs: can't read /nowhere"),
        ({**good, "ssl_certfile": str(junk)}, "ssl_certfile: no certificate"),
        ({**good, "ssl_ca_certs": str(junk)}, "ssl_ca_certs: no certificates"),
        ({**good, "ssl_keyfile": str(other.key)}, "ssl_keyfile: the key is not that of"),
        ({"ssl_certfile": str(own.certificate)}, "ssl_certfile: no certificate with its private key"),
        ({**good, "ssl_keyfile": str(encrypted)}, "ssl_keyfile: the private key is encrypted"),
        ({**good, "ssl_ciphers": "NO-SUCH"}, "ssl_ciphers: OpenSSL knows no cipher"),
    ]


def test_mistakes_are_named(authority: Authority, stranger: Authority, tmp_path: Path) -> None:
    for keywords, sentence in broken_files(authority, stranger, tmp_path):
        with pytest.raises(ConfigError, match=sentence):
            make_context(ServerArgs.parse(**keywords))


def test_a_mistake_ends_the_start_with_one_sentence() -> None:
    with server(ready=False, ssl_certfile="/nowhere.pem") as process:
        assert process.wait() == 1
        assert process.log[-1] == "canter: error: ssl_certfile: can't read /nowhere.pem: No such file or directory.\n"
