"""What the tests of the local deployment share: a running API server, clients, and waiting with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from localcluster import api as apis
from localcluster.apiserver.server import Server
from localcluster.kubelet import status, worker
from tests.local.local_kubelet_node import Node, running_node
from tests.support import monitors

DEADLINE_SECONDS = 30.0


def wait_for(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS) -> Any:
    """Poll until the condition gives something true, and return that."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen within {seconds:.0f} s")


@pytest.fixture(scope="session", autouse=True)
def counted_monitors() -> Iterator[None]:
    with monitors.counted():
        yield


@pytest.fixture(name="wait_for")
def wait_for_fixture() -> Callable[..., Any]:
    return wait_for


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    running = Server(tmp_path, kubelet_token="kubelet-secret", history=16)
    running.start()
    yield running
    running.stop()


@pytest.fixture
def api(server: Server) -> apis.Api:
    return apis.Api(server.kubeconfig)


@pytest.fixture
def node(api: apis.Api, tmp_path: Path) -> Iterator[Node]:
    with running_node(api, tmp_path, wait_for) as made:
        yield made


@pytest.fixture
def soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubelet tries again after a tenth of the time: for tests that only wait for it."""
    monkeypatch.setattr(status, "_BACKOFF_FIRST_SECONDS", 0.1)
    monkeypatch.setattr(worker, "_DELETE_AGAIN_SECONDS", 0.1)


@pytest.fixture
def make_pod() -> Callable[..., dict[str, Any]]:
    """A pod manifest: `make_pod("a", core=30, memory=8, command=["sleep", "60"])`."""

    def make(
        name: str,
        *,
        core: int | None = None,
        memory: int | None = None,
        command: list[str] | None = None,
        **spec: Any,
    ) -> dict[str, Any]:
        limits = {"tencent.com/vcuda-core": core, "tencent.com/vcuda-memory": memory}
        container = {
            "name": "main", "image": "anything", "command": command or ["sleep", "600"],
            "resources": {"limits": {resource: str(value) for resource, value in limits.items() if value is not None}},
        }  # fmt: skip
        metadata = {"name": name, "namespace": "default"}
        return {"metadata": metadata, "spec": {"containers": [container], **spec}}

    return make
