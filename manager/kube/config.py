"""Where the API server is and how to prove who we are: a kubeconfig file, or a pod's service account."""

from __future__ import annotations

import base64
import binascii
import ssl
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from manager.errors import StartError
from manager.kube.http import Endpoint

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TOKEN_REREAD_S = 60.0  # projected tokens are replaced long before they expire


def token_file(path: Path) -> Callable[[], str]:
    """The token in `path`, read again every minute; an unreadable file gives the last one known."""
    token = ""
    next_read = 0.0

    def read() -> str:
        nonlocal token, next_read
        now = time.monotonic()
        if now >= next_read:
            try:
                token = path.read_text().strip()
                next_read = now + _TOKEN_REREAD_S
            except OSError:
                next_read = now + 1.0
        return token

    return read


def tls_context(ca_file: Path | None, *, verify: bool) -> ssl.SSLContext:
    """Raises StartError if the CA file is unusable."""
    if not verify:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    try:
        return ssl.create_default_context(cafile=str(ca_file) if ca_file else None)
    except (OSError, ssl.SSLError) as error:
        raise StartError(f"cannot use the CA file {ca_file}: {error}") from None


def api_server(
    kubeconfig: Path | None, environment: Mapping[str, str]
) -> tuple[Endpoint, Callable[[], str]] | None:
    """The API server's endpoint and our token; None if there is no configuration at all. Raises StartError."""
    if kubeconfig is not None:
        return _from_file(kubeconfig)
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (SERVICE_ACCOUNT / "token").exists():
        return None
    token = token_file(SERVICE_ACCOUNT / "token")
    name = f"[{host}]" if ":" in host else host
    return Endpoint(
        f"https://{name}:{port}", tls_context(SERVICE_ACCOUNT / "ca.crt", verify=True), token
    ), token


def _from_file(path: Path) -> tuple[Endpoint, Callable[[], str]]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"cannot read the kubeconfig {path}: {error}") from None
    except yaml.YAMLError as error:
        raise StartError(f"the kubeconfig {path} is not YAML: {str(error).splitlines()[0]}") from None
    try:
        contexts = {item["name"]: item["context"] for item in data["contexts"]}
        clusters = {item["name"]: item["cluster"] for item in data["clusters"]}
        users = {item["name"]: item.get("user") or {} for item in data.get("users") or ()}
        context = contexts[data["current-context"]]
        cluster = clusters[context["cluster"]]
        user = users.get(context.get("user"), {})
        server = str(cluster["server"])
    except (KeyError, TypeError, AttributeError) as error:
        raise StartError(f"the kubeconfig {path} is incomplete: no {error}") from None
    for unsupported in ("exec", "auth-provider", "username"):
        if unsupported in user:
            raise StartError(
                f"the kubeconfig {path} uses {unsupported!r}; use a certificate, token or tokenFile"
            )
    with tempfile.TemporaryDirectory() as scratch:
        tls = _tls(path, cluster, user, Path(scratch)) if server.startswith("https:") else None
    token = _token(path, user)
    try:
        return Endpoint(server, tls, token), token
    except ValueError as error:
        raise StartError(f"the kubeconfig {path}: {error}") from None


def _token(path: Path, user: Mapping[str, Any]) -> Callable[[], str]:
    if user.get("tokenFile"):
        return token_file(path.parent / str(user["tokenFile"]))
    fixed = str(user.get("token") or "")
    return lambda: fixed


def _tls(path: Path, cluster: Mapping[str, Any], user: Mapping[str, Any], scratch: Path) -> ssl.SSLContext:
    def file_of(section: Mapping[str, Any], key: str) -> Path | None:
        data = section.get(f"{key}-data")
        if data:
            try:
                content = base64.b64decode(str(data), validate=True)
            except binascii.Error:
                raise StartError(f"the kubeconfig {path}: {key}-data is not base64") from None
            target = scratch / key
            target.touch(mode=0o600)
            target.write_bytes(content)
            return target
        return path.parent / str(section[key]) if section.get(key) else None

    context = tls_context(
        file_of(cluster, "certificate-authority"), verify=not cluster.get("insecure-skip-tls-verify")
    )
    certificate, key = file_of(user, "client-certificate"), file_of(user, "client-key")
    if certificate is not None:
        try:
            context.load_cert_chain(certificate, key)
        except (OSError, ssl.SSLError) as error:
            raise StartError(f"the kubeconfig {path}: cannot use the client certificate: {error}") from None
    return context
