"""Bindings sent from the event loop: over TLS and kept connections, and what becomes of them when the server ends."""

from __future__ import annotations

import asyncio
import functools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from localcluster.apiserver.faults import Fault, Request
from localcluster.certificates import Certificate
from scheduler_ext.protocol.extender_v1 import BindingArgs
from scheduler_ext.sync.api import ApiServer, Writer
from scheduler_ext.sync.binder import Binder
from tests.scheduler_ext.conftest import Running
from tests.scheduler_ext.extender_support import FakeApi, cards, node, pod
from vcuda.kube.errors import ApiError, ApiUnreachable


@functools.cache
def _made(name: str, kind: tuple[str, ...]) -> tuple[bytes, bytes]:
    """Once in a process: a key of RSA takes 0.3 s of a processor."""
    with tempfile.TemporaryDirectory() as folder:
        signed, key = Path(folder) / "crt", Path(folder) / "key"
        command = [
            "openssl", "req", "-x509", "-newkey", *kind, "-nodes", "-days", "2", "-subj", f"/CN={name}",
            "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(signed),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        return signed.read_bytes(), key.read_bytes()


def certificate(directory: Path, name: str, *kind: str) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key, `kind` as openssl's -newkey says it (RSA); of a name always the same."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the test certificates, is not installed")
    signed, key = directory / f"{name}.crt", directory / f"{name}.key"
    for path, content in zip((signed, key), _made(name, kind or ("rsa:2048",)), strict=True):
        path.write_bytes(content)
    return signed, key


def serve_tls(api: FakeApi, pair: tuple[Path, Path]) -> None:
    api.serve_tls(Certificate(*pair))


def kubeconfig(api: FakeApi, directory: Path, **cluster: Any) -> str:
    """The fake's kubeconfig for https, with more fields of its cluster."""
    path = Path(api.kubeconfig(directory))
    data = json.loads(path.read_text())
    data["clusters"][0]["cluster"] = {"server": api.url.replace("http:", "https:"), **cluster}
    path.write_text(json.dumps(data))
    return str(path)


def note_requests(api: FakeApi, pause: float = 0.0) -> list[tuple[int, str]]:
    """The client's port and login of every write from now on, which takes `pause` seconds."""
    seen: list[tuple[int, str]] = []
    before = api.hook

    def note(request: Request) -> Fault | None:
        seen.append((request.port, request.headers["Authorization"]))
        time.sleep(pause)
        return before(request)

    api.hook = note
    return seen


def test_bindings_go_over_kept_tls_connections_with_the_login(api: FakeApi, tmp_path: Path) -> None:
    pair = certificate(tmp_path, "server")
    serve_tls(api, pair)
    names = [f"p-{number}" for number in range(6)]
    api.put("pods", *(pod(name, uid=name) for name in names))
    server = ApiServer.connect(kubeconfig(api, tmp_path, **{"certificate-authority": str(pair[0])}))
    seen = note_requests(api)

    async def work() -> None:
        writer = Writer(server)
        for name in names[:3]:
            await writer.bind("default", name, name, "a", {"k": name})
        await asyncio.gather(*(writer.bind("default", name, name, "a", {}) for name in names[3:]))
        with pytest.raises(ApiError, match="404"):
            await writer.bind("default", "ghost", "ghost", "a", {})
        with pytest.raises(ApiError, match=r"409: .* is already assigned"):
            await writer.bind("default", "p-0", "p-0", "b", {})
        await writer.close()

    asyncio.run(work())
    assert [api.find("pods", f"default/{name}")["spec"]["nodeName"] for name in names] == ["a"] * 6
    assert api.find("pods", "default/p-1")["metadata"]["annotations"] == {"k": "p-1"}
    assert len({port for port, _ in seen[:3]}) == 1 and len({port for port, _ in seen}) <= 3
    assert {login for _, login in seen} == {"Bearer secret"}


def test_a_server_without_the_right_certificate_gets_no_binding_until_it_is_renewed(
    api: FakeApi, tmp_path: Path
) -> None:
    pair, other = certificate(tmp_path, "server"), certificate(tmp_path, "other")
    serve_tls(api, pair)
    api.put("pods", pod("p", uid="p"))
    trusted = tmp_path / "trusted.crt"
    trusted.write_bytes(other[0].read_bytes())
    server = ApiServer.connect(kubeconfig(api, tmp_path, **{"certificate-authority": str(trusted)}))

    async def work() -> None:
        writer = Writer(server)
        with pytest.raises(ApiUnreachable, match="certificate verify failed"):
            await writer.bind("default", "p", "p", "a", {})
        trusted.write_bytes(pair[0].read_bytes())
        await writer.bind("default", "p", "p", "a", {})
        await writer.close()

    asyncio.run(work())
    assert len(api.bindings) == 1


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [({"tls-server-name": "elsewhere"}, "mismatch"), ({"insecure-skip-tls-verify": True}, None)],
)
def test_a_kubeconfigs_wishes_about_the_servers_name_hold(
    api: FakeApi, tmp_path: Path, fields: dict[str, Any], wrong: str | None
) -> None:
    pair = certificate(tmp_path, "server")
    serve_tls(api, pair)
    api.put("pods", pod("p", uid="p"))
    trust = {} if "insecure-skip-tls-verify" in fields else {"certificate-authority": str(pair[0])}
    server = ApiServer.connect(kubeconfig(api, tmp_path, **trust, **fields))

    async def work() -> None:
        writer = Writer(server)
        try:
            await writer.bind("default", "p", "p", "a", {})
        finally:
            await writer.close()

    if wrong is None:
        asyncio.run(work())
    else:
        with pytest.raises(ApiUnreachable, match=wrong):
            asyncio.run(work())
    assert len(api.bindings) == (wrong is None)


def test_a_login_that_is_refused_is_renewed(api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api.put("pods", pod("p", uid="p"))
    server = ApiServer.connect(api.kubeconfig(tmp_path), timeout_seconds=3)
    seen = note_requests(api)
    tokens = iter(["Bearer old", "Bearer secret"])
    monkeypatch.setattr(server.client.endpoint, "headers", lambda *_: {"Authorization": next(tokens)})

    async def work() -> None:
        writer = Writer(server)
        with pytest.raises(ApiError, match="401"):
            await writer.bind("default", "p", "p", "a", {})
        await writer.bind("default", "p", "p", "a", {})
        await writer.close()

    asyncio.run(work())
    (first, old), (second, new) = seen
    assert (old, new) == ("Bearer old", "Bearer secret") and first != second


def test_a_server_that_does_not_answer_in_time_leaves_the_result_open(api: FakeApi, tmp_path: Path) -> None:
    api.put("pods", pod("p", uid="p"))
    server = ApiServer.connect(api.kubeconfig(tmp_path), timeout_seconds=0.2)
    note_requests(api, pause=1.0)

    async def work() -> None:
        writer = Writer(server)
        began = time.monotonic()
        with pytest.raises(ApiUnreachable, match="no answer"):
            await writer.bind("default", "p", "p", "a", {})
        assert time.monotonic() - began < 0.8
        await writer.close()

    asyncio.run(work())


def test_the_end_waits_for_a_write_that_has_begun(api: FakeApi, start: Callable[..., Running], tmp_path: Path) -> None:
    api.put("nodes", node("a", cards("a", 1)))
    api.put("pods", wanted := pod("p"))
    extender = start()
    extender.filter(wanted, ["a"])
    note_requests(api, pause=0.5)
    uid = wanted["metadata"]["uid"]

    async def work(executor: ThreadPoolExecutor) -> None:
        server = ApiServer.connect(api.kubeconfig(tmp_path), timeout_seconds=3)
        binder = Binder(server, extender.engine, executor)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(binder.bind(BindingArgs("p", "default", uid, "a")), 0.1)
        await binder.close()
        assert len(api.bindings) == 1 and extender.engine.bound_to(uid) == "a"

    with ThreadPoolExecutor(1) as executor:
        asyncio.run(work(executor))
