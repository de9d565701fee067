"""The few calls to the API server that the extender makes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from vcuda.kube import config
from vcuda.kube.aio import AsyncClient
from vcuda.kube.client import MERGE, Client
from vcuda.kube.endpoint import Endpoint
from vcuda.kube.errors import KubeError
from vcuda.kube.objects import path


class ApiServer:
    """Thread-safe. Calls raise KubeError; nothing is retried here."""

    def __init__(self, client: Client) -> None:
        self.client = client

    @classmethod
    def connect(cls, kubeconfig: str | None, timeout_seconds: float = 10.0) -> ApiServer:
        """Log in by a kubeconfig file, or by the pod's service account if none is given. Raises NoConfiguration."""
        endpoint = Endpoint(config.load(kubeconfig), agent="gpu-scheduler-extender")
        return cls(Client(endpoint, timeout=timeout_seconds, parse=orjson.loads))

    @property
    def address(self) -> str:
        return self.client.endpoint.url

    @property
    def deadline(self) -> str:
        """Behind the path of a write that books something.

        The API server gives up what it has not done by then (apiserver filters/request_deadline.go), also when we are
        gone: whoever comes after us knows how long to wait for what we wrote.
        """
        return f"?timeout={math.ceil(self.client.timeout * 1000)}ms"

    def pod(self, namespace: str, name: str) -> dict[str, Any]:
        return self.client.get("pods", namespace, name)

    def lease(self, namespace: str, name: str) -> dict[str, Any] | None:
        """Read a Lease; None if there is none."""
        return self.client.find("leases", namespace, name)

    def put_lease(self, namespace: str, name: str, old: Mapping[str, Any] | None, spec: Mapping[str, Any]) -> None:
        """Write a Lease in place of `old`, or a new one. ApiError 409 if it has changed since `old` was read."""
        new = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": dict(spec)}
        if old is None:
            new["metadata"] = {"namespace": namespace, "name": name}
            self.client.call("POST", path("leases", namespace), new)
        else:
            new["metadata"] = old["metadata"]
            self.client.call("PUT", path("leases", namespace, name), new)

    def label_pod(self, namespace: str, name: str, labels: Mapping[str, str]) -> None:
        """Set labels of a pod."""
        patch = {"metadata": {"labels": dict(labels)}}
        self.client.call("PATCH", path("pods", namespace, name), patch, content_type=MERGE)


class Writer:
    """Sends Bindings. Used by one event loop; calls raise KubeError, and nothing is sent twice."""

    def __init__(self, api: ApiServer) -> None:
        self._client = AsyncClient(api.client.endpoint, timeout=api.client.timeout)
        self._deadline = api.deadline
        self.close = self._client.close

    async def bind(self, namespace: str, name: str, uid: str, node: str, annotations: Mapping[str, str]) -> None:
        """Create the pod's Binding. The API server copies its annotations to the pod in the same write."""
        await self._client.post(*self._request(namespace, name, uid, node, annotations))

    def begin(
        self, namespace: str, name: str, uid: str, node: str, annotations: Mapping[str, str],
        done: Callable[[KubeError | None], None],
    ) -> bool:  # fmt: skip
        """The same at once, if a connection is at hand: then `done` is called later; else nothing was done: False."""
        return self._client.begin(*self._request(namespace, name, uid, node, annotations), done)

    def _request(
        self, namespace: str, name: str, uid: str, node: str, annotations: Mapping[str, str]
    ) -> tuple[str, bytes]:
        metadata: dict[str, object] = {"namespace": namespace, "name": name, "uid": uid}
        if annotations:
            metadata["annotations"] = dict(annotations)
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": metadata,
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        return path("pods", namespace, name, "binding") + self._deadline, orjson.dumps(binding)
