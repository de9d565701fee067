"""The API server's part that the daemon uses: pods of this node, patches of its node and pods, events."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manager.errors import UnusableSettings
from vcuda.kube import config, events
from vcuda.kube.client import STRATEGIC_MERGE, Client
from vcuda.kube.config import Login
from vcuda.kube.endpoint import Endpoint
from vcuda.kube.errors import ApiError, NoConfiguration
from vcuda.kube.objects import path

COMPONENT = "gpu-manager"

Pod = Mapping[str, Any]


def login(kubeconfig: Path | None, environment: Mapping[str, str]) -> Login | None:
    """Where the API server is, and who we are there; None without any configuration. Raises UnusableSettings."""
    try:
        return config.in_cluster(environment) if kubeconfig is None else config.from_file(kubeconfig)
    except NoConfiguration as error:
        raise UnusableSettings(str(error)) from None


def connect(found: Login | None, node: str) -> Kube | None:
    """None where there is no login: then nothing is told to, or asked of, an API server."""
    return Kube(Client(Endpoint(found, agent=COMPONENT)), node) if found is not None else None


class Kube:
    """Calls for one node. All raise KubeError."""

    def __init__(self, client: Client, node: str) -> None:
        self.client = client
        self.node = node

    @property
    def selector(self) -> str:
        """The field selector of this node's pods."""
        return f"spec.nodeName={self.node}"

    def pods(self, timeout: float) -> list[Pod]:
        """This node's pods."""
        return [pod for items, _ in self.client.pages("pods", "", self.selector, timeout=timeout) for pod in items]

    def claim(self, namespace: str, name: str, timeout: float) -> Mapping[str, Any] | None:
        """A ResourceClaim; None if there is none."""
        return self.client.find("resourceclaims", namespace, name, timeout=timeout)

    def patch_pod(
        self, namespace: str, name: str, uid: str, annotations: Mapping[str, str | None], timeout: float
    ) -> None:
        """Set annotations of exactly this pod (None takes one away): its UID in the patch refuses a namesake (409)."""
        body = {"metadata": {"uid": uid, "annotations": dict(annotations)}}
        self._patch(path("pods", namespace, name), body, timeout)

    def patch_node(self, annotations: Mapping[str, str], labels: Mapping[str, str | None], timeout: float) -> None:
        body = {"metadata": {"annotations": dict(annotations), "labels": dict(labels)}}
        self._patch(path("nodes", "", self.node), body, timeout)

    def _patch(self, where: str, body: object, timeout: float) -> None:
        self.client.call("PATCH", where, body, content_type=STRATEGIC_MERGE, timeout=timeout)

    def evict(self, namespace: str, name: str, uid: str, timeout: float) -> None:
        """Ask for the eviction of exactly this pod; 429: its disruption budget forbids it now."""
        body = {
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": {"preconditions": {"uid": uid}},
        }
        where = path("pods", namespace, name, "eviction")
        try:
            self.client.call("POST", where, {"apiVersion": "policy/v1", **body}, timeout=timeout)
        except ApiError as error:
            if error.status not in (400, 404):
                raise
            # Before 1.22 there is only the beta version, to which a pod that is gone gives the same answer once more.
            self.client.call("POST", where, {"apiVersion": "policy/v1beta1", **body}, timeout=timeout)

    def delete_pod(self, namespace: str, name: str, uid: str, timeout: float) -> None:
        """Delete exactly this pod: a namesake is left alone (409)."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        self.client.call("DELETE", path("pods", namespace, name), body, timeout=timeout)

    def event(self, said: events.Said, correlator: events.Correlator, timeout: float) -> None:
        """Make an event, or raise its count."""
        correlator.send(self.client, {"component": COMPONENT, "host": self.node}, said, timeout)
