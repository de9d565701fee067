"""Kubelet's own list: whoever answers at its address gets our token only if its certificate is kubelet's."""

from __future__ import annotations

import contextlib
import http.server
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from localcluster import certificates
from localcluster.certificates import Certificate
from manager.errors import StartError
from manager.kubelet import pods
from vcuda.kube.config import Login
from vcuda.kube.errors import KubeError


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    made = certificates.make(tmp_path)
    if made is None:
        pytest.skip("there is no openssl to make a certificate")
    return made


@contextlib.contextmanager
def answering(certificate: Certificate | None, address: str = "127.0.0.1") -> Iterator[tuple[int, list[str]]]:
    """Something at kubelet's place: its port, and the tokens that it was sent."""
    tokens: list[str] = []

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            tokens.append(self.headers.get("Authorization", ""))
            self.send_response(200)
            self.send_header("Content-Length", "12")
            self.end_headers()
            self.wfile.write(b'{"items":[]}')

        def log_message(self, *_: object) -> None:
            return

    class Server(http.server.ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET

    server = Server((address, 0), Answer)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.certificate, certificate.key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1], tokens
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def token(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("ours\n")
    return tmp_path / "token"


def test_a_stranger_at_kubelets_port_is_not_sent_our_token(certificate: Certificate, token: Path) -> None:
    with answering(certificate) as (port, tokens):
        found = pods.connect(f"https://127.0.0.1:{port}", token, None, None)
        assert found is not None
        with pytest.raises(KubeError, match=r"certificate.*--kubelet-ca-file.*--kubelet-verify=false"):
            found.list(5.0)
    assert tokens == []


def test_kubelets_certificate_is_checked_by_the_api_servers_authority_or_the_one_that_is_named(
    certificate: Certificate, token: Path
) -> None:
    api = Login("https://10.0.0.1:6443", ca=certificate.certificate)
    with answering(certificate) as (port, tokens):
        for ca, login in ((None, api), (certificate.certificate, None)):
            found = pods.connect(f"https://127.0.0.1:{port}", token, ca, login)
            assert found is not None and found.list(5.0) == []
        unchecked = pods.connect(f"https://127.0.0.1:{port}", token, None, None, verify=False)
        assert unchecked is not None and unchecked.list(5.0) == []
    assert tokens == ["Bearer ours"] * 3


@pytest.mark.parametrize("host", ["[::1]", "::1"])
def test_a_node_that_has_ipv6_alone_is_asked_with_and_without_brackets(host: str, token: Path) -> None:
    """A manifest writes https://$(NODE_IP):10250, and can put no brackets around an address that needs them."""
    with answering(None, "::1") as (port, tokens):
        found = pods.connect(f"http://{host}:{port}", token, None, None)
        assert found is not None and found.list(5.0) == []
    assert tokens == ["Bearer ours"]


@pytest.mark.parametrize(
    "url",
    ["ftp://x:1", "https://", "https://node", "https://a:b@node:10250", "https://node:10250/x?y=", "https://node:0x1", "https://:10250",
     "https://no de:10250", "https://node:10250\nX: y", "https://[::1:10250"],
)  # fmt: skip
def test_what_is_no_host_and_port_is_refused_at_the_start(url: str, token: Path) -> None:
    with pytest.raises(StartError, match=r"--kubelet-url: .* write https://HOST:PORT") as refused:
        pods.connect(url, token, None, None)
    assert "\n" not in str(refused.value)
