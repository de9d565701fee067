"""Kubelet's own list of pods: the one view in which the pod being admitted is always present."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from manager.errors import StartError
from manager.kube.api import Pod
from manager.kube.config import tls_context, token_file
from manager.kube.http import Endpoint, HttpError
from manager.kubelet.incremental_json import Form, Pieces

_UID = b'"uid":"'
_UID_BYTES = 36
_SPEC = ("nodeName", "initContainers", "containers")
_CONTAINER = ("name", "resources", "restartPolicy")
_STATUS = ("phase", "reason", "message")


def essential(pod: Mapping[str, Any]) -> Pod:
    """What our rules read of a pod; environments, volumes and conditions are most of what kubelet lists, and of the memory they would take.

    What has not the form of a pod is left as it is, for those rules to judge.
    """
    found = dict(pod)
    metadata, spec, status = (pod.get(name) for name in ("metadata", "spec", "status"))
    if isinstance(metadata, dict) and "managedFields" in metadata:
        found["metadata"] = {name: value for name, value in metadata.items() if name != "managedFields"}
    if isinstance(spec, dict):
        found["spec"] = kept = _only(spec, _SPEC)
        for name in _SPEC[1:]:
            if isinstance(kept.get(name), list):
                kept[name] = [
                    _only(item, _CONTAINER) if isinstance(item, dict) else item for item in kept[name]
                ]
    if isinstance(status, dict):
        found["status"] = _only(status, _STATUS)
    return found


def _only(mapping: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: mapping[name] for name in names if name in mapping}


def _uid(data: bytes, place: int) -> bytes:
    at = data.find(_UID, place) + len(_UID)
    return data[at : at + _UID_BYTES]


def _pod(item: Any) -> Pod:
    if not isinstance(item, dict):
        raise ValueError("an item that is no pod")
    return essential(item)


# Kubelet's encoder writes no spaces and begins each pod with its metadata.
_FORM = Form(
    b'"items":[',
    b"]",
    b'},{"metadata":{',
    _uid,
    lambda around: isinstance(around, dict) and around.get("items") == [],
)


class PodListParser:
    """Parses lists of pods, and each pod only once while its bytes stay the same.

    Kubelet asks us during an admission, when one pod of hundreds is new: parsing the others again would be most of the answer's
    time. Texts of another form than kubelet's are parsed as a whole.
    """

    def __init__(self) -> None:
        self._pieces = Pieces(_FORM, _pod)

    def parse(self, data: bytes) -> list[Pod]:
        """The essentials of the pods, in no order: kubelet has none. Raises ValueError for what is no list of pods.

        The pods are shared between calls: read only. While all pods are the same the list is the same object.
        """
        try:
            return self._pieces.parse(data)
        except ValueError:
            return self._whole(data)

    @staticmethod
    def _whole(data: bytes) -> list[Pod]:
        answer = orjson.loads(data)
        pods = answer.get("items", []) if isinstance(answer, dict) else ""
        if pods is None:  # how Go writes an empty list
            return []
        if not isinstance(pods, list) or not all(isinstance(pod, dict) for pod in pods):
            raise ValueError("no list of pods")
        return [essential(pod) for pod in pods]


class KubeletPods:
    """`GET /pods` of this node's kubelet (needs nodes/pods, or nodes/proxy on older ones)."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._parser = PodListParser()

    def list(self, timeout: float) -> list[Pod]:
        """Raises HttpError."""
        status, data = self._endpoint.raw("GET", "/pods", timeout=timeout)
        try:
            return self._parser.parse(data)
        except ValueError:
            raise HttpError(f"{self._endpoint.url}/pods did not answer with a list of pods", status) from None


def connect(
    url: str, token: Path | None, ca: Path | None, api_token: Callable[[], str] | None
) -> KubeletPods | None:
    """The client for `--kubelet-url`; None if it is not set. Raises StartError for an unusable URL or CA."""
    if not url:
        return None
    # Kubelet signs its own certificate unless told otherwise; without a CA there is nothing to verify it with.
    context = tls_context(ca, verify=ca is not None) if url.startswith("https:") else None
    try:
        return KubeletPods(Endpoint(url, context, token_file(token) if token else api_token))
    except ValueError as error:
        raise StartError(f"--kubelet-url: {error}") from None
