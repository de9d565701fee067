"""Kubelet's own list of pods: the one view in which the pod being admitted is always present."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from manager.errors import StartError
from manager.httpclient import Endpoint, HttpError
from manager.kube import Pod
from manager.kubeconfig import tls_context, token_file


class KubeletPods:
    """`GET /pods` of this node's kubelet (needs nodes/pods, or nodes/proxy on older ones)."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def list(self, timeout: float) -> list[Pod]:
        """Raises HttpError."""
        answer = self._endpoint.json("GET", "/pods", timeout=timeout)
        if not isinstance(answer, dict) or not isinstance(answer.get("items") or [], list):
            raise HttpError(f"{self._endpoint.url}/pods did not answer with a list of pods")
        return list(answer.get("items") or ())


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
