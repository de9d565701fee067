"""The API server's part that the daemon uses: pods of this node, patches of its node and pods, events."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from manager.kube.http import Endpoint, HttpError

COMPONENT = "gpu-manager"
STRATEGIC_MERGE = "application/strategic-merge-patch+json"
# Static pods reach the API server as mirror pods with another UID; this annotation holds kubelet's.
MIRROR_ANNOTATION = "kubernetes.io/config.mirror"
WATCH_SECONDS = 290

Pod = Mapping[str, Any]


def uid_of(pod: Pod) -> str:
    """The UID by which kubelet knows a pod."""
    metadata = pod.get("metadata") or {}
    return str((metadata.get("annotations") or {}).get(MIRROR_ANNOTATION) or metadata.get("uid", ""))


def phase_of(pod: Pod) -> str:
    return str((pod.get("status") or {}).get("phase", ""))


def terminal(pod: Pod) -> bool:
    return phase_of(pod) in ("Succeeded", "Failed")


def event_name(about: str) -> str:
    """A name of its own for an event; as long as a name may be (DNS subdomain, 253 characters), however long its object's is."""
    suffix = f".{time.time_ns():x}"
    return about[: 253 - len(suffix)].rstrip("-.") + suffix


class Kube:
    """Calls for one node. All raise HttpError."""

    def __init__(self, endpoint: Endpoint, node: str) -> None:
        self.endpoint = endpoint
        self.node = node

    def _selector(self) -> dict[str, str]:
        return {"fieldSelector": f"spec.nodeName={self.node}"}

    def pods(self, timeout: float) -> tuple[list[Pod], str]:
        """This node's pods and the resourceVersion to watch from."""
        answer = self.endpoint.json("GET", "/api/v1/pods", query=self._selector(), timeout=timeout)
        return list(answer.get("items") or ()), str((answer.get("metadata") or {}).get("resourceVersion", ""))

    def watch_pods(self, version: str, opened: Callable[[socket.socket], None]) -> Iterator[tuple[str, Pod]]:
        """Changes since `version` as (ADDED, MODIFIED or DELETED, pod). HttpError 410: list again."""
        query = {
            **self._selector(),
            "watch": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        for line in self.endpoint.lines("/api/v1/pods", query, WATCH_SECONDS + 15, opened):
            if not line.strip():
                continue
            try:
                event = json.loads(line)
                kind, item = str(event["type"]), event["object"]
            except (ValueError, KeyError, TypeError) as error:
                raise HttpError(
                    f"the watch of pods sent something else than an event: {line[:80]!r}"
                ) from error
            if kind == "ERROR":
                raise HttpError(
                    f"the watch of pods ended: {item.get('message', '')!s:.120}", item.get("code")
                )
            if kind != "BOOKMARK":
                yield kind, item

    def patch_pod(
        self, namespace: str, name: str, uid: str, annotations: Mapping[str, str], timeout: float
    ) -> None:
        """Set annotations of exactly this pod: with its UID in the patch, a namesake is refused (409)."""
        body = {"metadata": {"uid": uid, "annotations": dict(annotations)}}
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        self.endpoint.json("PATCH", path, body=body, content_type=STRATEGIC_MERGE, timeout=timeout)

    def patch_node(
        self, annotations: Mapping[str, str], labels: Mapping[str, str | None], timeout: float
    ) -> None:
        body = {"metadata": {"annotations": dict(annotations), "labels": dict(labels)}}
        path = f"/api/v1/nodes/{self.node}"
        self.endpoint.json("PATCH", path, body=body, content_type=STRATEGIC_MERGE, timeout=timeout)

    def evict(self, namespace: str, name: str, uid: str, timeout: float) -> None:
        """Ask for the eviction of exactly this pod; 429: its disruption budget forbids it now."""
        body = {
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": {"preconditions": {"uid": uid}},
        }
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/eviction"
        try:
            self.endpoint.json("POST", path, body={"apiVersion": "policy/v1", **body}, timeout=timeout)
        except HttpError as error:
            if error.status not in (400, 404):
                raise
            # Before 1.22 there is only the beta version, to which a pod that is gone gives the same answer once more.
            self.endpoint.json("POST", path, body={"apiVersion": "policy/v1beta1", **body}, timeout=timeout)

    def delete_pod(self, namespace: str, name: str, uid: str, timeout: float) -> None:
        """Delete exactly this pod: a namesake is left alone (409)."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        self.endpoint.json("DELETE", path, body=body, timeout=timeout)

    def event(self, about: Mapping[str, str], kind: str, reason: str, message: str, timeout: float) -> None:
        """`about`: kind, namespace, name, uid of the object; `kind`: Normal or Warning."""
        namespace = about.get("namespace") or "default"
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        body = {
            "metadata": {"name": event_name(about["name"]), "namespace": namespace},
            "involvedObject": {"apiVersion": "v1", **about},
            "type": kind,
            "reason": reason,
            "message": message[:1024],
            "source": {"component": COMPONENT, "host": self.node},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        self.endpoint.json("POST", f"/api/v1/namespaces/{namespace}/events", body=body, timeout=timeout)
