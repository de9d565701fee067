"""Kubelet's own list of pods: the one view in which the pod being admitted is always present."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import orjson

from manager.errors import StartError
from manager.httpclient import Endpoint, HttpError
from manager.kube import Pod
from manager.kubeconfig import tls_context, token_file

_ITEMS = b'"items":['
_BETWEEN = b'},{"metadata":{'
_UID = b'"uid":"'
_UID_BYTES = 36
_Role = tuple[bool, bool]


class PodListParser:
    """Parses lists of pods, and each pod only once while its bytes stay the same.

    Kubelet asks us during an admission, when one pod of hundreds is new: parsing the others again would be most of the answer's
    time. Its encoder writes no spaces and begins each pod with its metadata, so the text can be cut between pods. A cut in a wrong
    place leaves pieces that are no JSON; then the whole is parsed, as is any text of another form.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[bytes, _Role, Pod]] = {}
        self._last: tuple[bytes | None, list[Pod]] = (None, [])

    def parse(self, data: bytes) -> list[Pod]:
        """Raises ValueError for what is no list of pods. The pods are shared between calls: read only."""
        if data == self._last[0]:  # kubelet asks for each resource of a container
            return self._last[1]
        try:
            pods = self._by_piece(data)
        except ValueError:
            pods = self._whole(data)
        self._last = (data, pods)
        return pods

    @staticmethod
    def _whole(data: bytes) -> list[Pod]:
        answer = orjson.loads(data)
        pods = answer.get("items", []) if isinstance(answer, dict) else ""
        if pods is None:  # how Go writes an empty list
            return []
        if not isinstance(pods, list) or not all(isinstance(pod, dict) for pod in pods):
            raise ValueError("no list of pods")
        return pods

    def _by_piece(self, data: bytes) -> list[Pod]:
        start, end = data.find(_ITEMS) + len(_ITEMS), data.rfind(b"]")
        if start < len(_ITEMS) or end < start:
            raise ValueError("no items")
        around = orjson.loads(data[:start] + data[end:])
        if not isinstance(around, dict) or around.get("items") != []:
            raise ValueError("the items are not those of the list")
        if start == end:
            return []
        known: dict[bytes, tuple[bytes, _Role, Pod]] = {}
        pods = []
        pieces = data[start:end].split(_BETWEEN)
        last = len(pieces) - 1
        for index, piece in enumerate(pieces):
            # Found again by its UID, for kubelet lists pods in any order; it is the same only if all its bytes are.
            at = piece.find(_UID) + len(_UID)
            uid = piece[at : at + _UID_BYTES]
            role = (index == 0, index == last)  # what the cut has left of a pod's ends
            before = self._known.get(uid)
            if before is None or before[0] != piece or before[1] != role:
                text = (_BETWEEN[2:] if index else b"") + piece + (b"}" if index < last else b"")
                pod = orjson.loads(text)
                if not isinstance(pod, dict):
                    raise ValueError("an item that is no pod")
                before = (piece, role, pod)
            known[uid] = before
            pods.append(before[2])
        self._known = known
        return pods


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
