"""Where the API server is and how to prove who we are: a kubeconfig file, or a pod's service account.

Ours, because the `kubernetes` package costs 20 MB of memory on every node and hides the TLS settings that an event loop
needs.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import datetime
import json
import os
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vcuda import plain_file
from vcuda.addresses import bracketed
from vcuda.kube.errors import ApiUnreachable, NoConfiguration
from vcuda.quoted import quoted
from vcuda.tls import no_password

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_REREAD_SECONDS = 60.0  # projected tokens are replaced long before they expire
_PROGRAM_SECONDS = 30.0

Token = Callable[[], str]
Source = Path | bytes | None  # a PEM file, or its content


def _no_token() -> str:
    return ""


@dataclass(frozen=True)
class Login:
    """One server and our identity there. `token` may read a file or run a program; it raises ApiUnreachable.

    `server_name`: the name that the server's certificate must carry, if it is not the URL's host. `proxy`: URL of an
    HTTP proxy.
    """

    url: str
    token: Token = _no_token
    ca: Source = None
    certificate: Source = None
    key: Source = None
    verify: bool = True
    server_name: str | None = None
    proxy: str | None = None

    def tls(self) -> ssl.SSLContext | None:
        """A context with the certificates as they are now; None for plain HTTP. Raises NoConfiguration."""
        if not self.url.startswith("https:"):
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        elif self.ca is None:
            context.load_default_certs()
        else:
            with _usable("the CA file", self.ca) as file:
                context.load_verify_locations(file)
        if self.certificate is not None:
            with (
                _usable("the client certificate", self.certificate) as chain,
                _usable("the client key", self.key) as key,
            ):
                context.load_cert_chain(chain, key, no_password)
        return context


@contextlib.contextmanager
def _usable(what: str, source: Source) -> Iterator[str]:
    """A file with the PEM, for OpenSSL reads keys from files alone."""
    name = source if isinstance(source, Path) else "in the kubeconfig"
    try:
        if isinstance(source, Path):
            plain_file.read(source)  # OpenSSL would wait for a pipe's end
            yield str(source)
            return
        with tempfile.NamedTemporaryFile() as scratch:
            scratch.write(source or b"")
            scratch.flush()
            yield scratch.name
    except (OSError, ssl.SSLError) as error:
        raise NoConfiguration(f"cannot use {what} {name}: {error}") from error


def token_file(path: Path) -> Token:
    """The token in a file, read again every minute; while the file can't be read, the last one known."""
    token, next_read = "", 0.0

    def read() -> str:
        nonlocal token, next_read
        now = time.monotonic()
        if now >= next_read:
            try:
                token = plain_file.read(path).decode().strip()
                next_read = now + _REREAD_SECONDS
            except (OSError, UnicodeDecodeError) as error:
                if not token:
                    raise ApiUnreachable(f"the token file {path} cannot be read: {error}") from error
                next_read = now + 1.0
        return token

    return read


def _program(where: str, settings: Mapping[str, Any]) -> Token:
    """A credential plugin (client.authentication.k8s.io ExecCredential); its token is used until it expires."""
    command = [str(settings["command"]), *map(str, settings.get("args") or ())]
    environment = {str(one["name"]): str(one["value"]) for one in settings.get("env") or ()}
    request = {
        "apiVersion": settings.get("apiVersion"),
        "kind": "ExecCredential",
        "spec": {"interactive": False},
    }
    token, until = "", 0.0

    def run() -> str:
        nonlocal token, until
        if time.time() >= until:
            try:
                answer = subprocess.run(
                    command, check=True, capture_output=True, timeout=_PROGRAM_SECONDS,
                    env=os.environ | environment | {"KUBERNETES_EXEC_INFO": json.dumps(request)},
                )  # fmt: skip
                status = json.loads(answer.stdout)["status"]
                end = status.get("expirationTimestamp")
                token = str(status["token"])
                until = datetime.datetime.fromisoformat(end).timestamp() - 10 if end else float("inf")
            except (
                OSError,
                subprocess.SubprocessError,
                ValueError,
                KeyError,
                TypeError,
                AttributeError,
            ) as error:
                raise ApiUnreachable(f"{where}: the program {command[0]} gave no token: {error!s:.200}") from error
        return token

    return run


def load(kubeconfig: Path | str | None, environment: Mapping[str, str] = os.environ) -> Login:
    """The login of a kubeconfig file, or of the pod's service account if none is given. Raises NoConfiguration."""
    login = in_cluster(environment) if kubeconfig is None else from_file(Path(kubeconfig))
    if login is None:
        raise NoConfiguration(
            "no --kubeconfig was given and there is no service account: KUBERNETES_SERVICE_HOST is not set, or "
            f"{SERVICE_ACCOUNT / 'token'} does not exist"
        )
    return login


def in_cluster(environment: Mapping[str, str] = os.environ) -> Login | None:
    """The login of this pod's service account; None outside a pod. Raises NoConfiguration."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (SERVICE_ACCOUNT / "token").exists():
        return None
    login = Login(
        f"https://{bracketed(host)}:{port}",
        token_file(SERVICE_ACCOUNT / "token"),
        ca=SERVICE_ACCOUNT / "ca.crt",
    )
    login.tls()
    return login


@dataclass(frozen=True)
class Context:
    """What a context of a kubeconfig stands for. `namespace`: where its user works."""

    login: Login
    namespace: str = "default"


def from_file(path: Path) -> Login:
    """The login of a kubeconfig's current context. Raises NoConfiguration."""
    return context([path]).login


def files(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """The kubeconfig files that kubectl reads where none is named: $KUBECONFIG's that exist, else ~/.kube/config."""
    named = [Path(name) for name in environment.get("KUBECONFIG", "").split(os.pathsep) if name]
    there = [path for path in named if path.exists()]
    return there or named[:1] or [Path.home() / ".kube" / "config"]


def context(paths: Sequence[Path], name: str | None = None) -> Context:
    """The context of that name, else the current one. Of several files the first with an entry counts (as in kubectl).

    Raises NoConfiguration.
    """
    where = f"the kubeconfig {os.pathsep.join(map(str, paths))}"
    entries: dict[str, dict[str, tuple[dict[str, Any], Path]]] = {"context": {}, "cluster": {}, "user": {}}
    try:
        for path in paths:
            data = _document(path)
            name = name or data.get("current-context")
            for kind, known in entries.items():
                for item in data.get(f"{kind}s") or ():
                    known.setdefault(item["name"], (item.get(kind) or {}, path))
        if not name:
            raise NoConfiguration(f"{where} has no current-context; name one")
        chosen, _ = entries["context"][name]
        cluster, beside = entries["cluster"][chosen["cluster"]]
        login = _login(where, cluster, beside, *entries["user"].get(chosen.get("user", ""), ({}, beside)))
        found = Context(login, str(chosen.get("namespace") or "default"))
    except (KeyError, TypeError, AttributeError) as error:
        raise NoConfiguration(f"{where} is incomplete: no {error}") from error
    try:
        login.tls()
    except NoConfiguration as error:
        raise NoConfiguration(f"{where}: {error}") from error
    return found


def _document(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(plain_file.read(path).decode())
    except (OSError, UnicodeDecodeError) as error:
        raise NoConfiguration(f"cannot read the kubeconfig {path}: {error}") from error
    except yaml.YAMLError as error:
        raise NoConfiguration(f"the kubeconfig {path} is not YAML: {str(error).splitlines()[0]}") from error
    except RecursionError as error:
        raise NoConfiguration(f"the kubeconfig {path} is nested too deep") from error
    if not isinstance(data, dict):
        raise NoConfiguration(f"the kubeconfig {path} is incomplete: it is no mapping")
    return data


def _login(
    where: str, cluster: Mapping[str, Any], cluster_file: Path, user: Mapping[str, Any], user_file: Path
) -> Login:
    url = str(cluster["server"]).rstrip("/")
    for unsupported in ("auth-provider", "username"):
        if unsupported in user:
            raise NoConfiguration(f"{where} uses {unsupported!r}; use a certificate, token, tokenFile or exec")
    if not url.startswith(("http://", "https://")):
        raise NoConfiguration(f"{where}: {quoted(url, 120)} is no http:// or https:// URL")
    return Login(
        url, _token(where, user_file, user), _source(where, cluster_file, cluster, "certificate-authority"),
        _source(where, user_file, user, "client-certificate"), _source(where, user_file, user, "client-key"),
        not cluster.get("insecure-skip-tls-verify"), cluster.get("tls-server-name"), cluster.get("proxy-url"),
    )  # fmt: skip


def _token(where: str, path: Path, user: Mapping[str, Any]) -> Token:
    if user.get("tokenFile"):
        return token_file(path.parent / str(user["tokenFile"]))
    if user.get("exec"):
        return _program(where, user["exec"])
    fixed = str(user.get("token") or "")
    return lambda: fixed


def _source(where: str, path: Path, section: Mapping[str, Any], key: str) -> Source:
    data = section.get(f"{key}-data")
    if data:
        try:
            return base64.b64decode(str(data), validate=True)
        except binascii.Error:
            raise NoConfiguration(f"{where}: {key}-data is not base64") from None
    return path.parent / str(section[key]) if section.get(key) else None
