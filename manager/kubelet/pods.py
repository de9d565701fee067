"""Kubelet's own list of pods: the one view in which the pod being admitted is always present."""

from __future__ import annotations

import dataclasses
import ssl
from pathlib import Path
from typing import Any

import orjson

from manager.config.settings import Settings
from manager.errors import UnusableSettings
from manager.kube.api import COMPONENT, Pod
from manager.kube.pods import essential
from manager.kubelet.incremental_json import Form, Pieces
from vcuda.addresses import server_url
from vcuda.kube import nesting
from vcuda.kube.config import Login, token_file
from vcuda.kube.endpoint import Endpoint
from vcuda.kube.errors import ApiUnreachable, NoConfiguration
from vcuda.quoted import quoted

_UNVERIFIED = (
    "have kubelet's certificate signed by the cluster (serverTLSBootstrap), name its authority by --kubelet-ca-file, "
    "or send our token to whoever answers there by --kubelet-verify=false"
)
_UID = b'"uid":"'
_UID_BYTES = 36


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

    Kubelet asks us during an admission, when one pod of hundreds is new: parsing the others again would be most of the
    answer's time: of 201 pods of 6 kB, one of them new, 0.4 ms instead of 7 by orjson. Texts of another form than
    kubelet's are parsed as a whole.
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
        answer = nesting.loads(data, orjson.loads)
        pods = answer.get("items", "") if isinstance(answer, dict) else ""
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
        """Raises KubeError."""
        try:
            data = self._endpoint.raw("GET", "/pods", timeout=timeout)
        except ApiUnreachable as error:
            if isinstance(error.__cause__, ssl.SSLCertVerificationError):
                raise ApiUnreachable(f"{error}; {_UNVERIFIED}") from error
            raise
        try:
            return self._parser.parse(data)
        except ValueError:
            raise ApiUnreachable(f"{self._endpoint.url}/pods did not answer with a list of pods") from None


def by_settings(settings: Settings, api: Login | None) -> KubeletPods | None:
    """`connect` as the settings say it."""
    return connect(
        settings.kubelet_url,
        settings.kubelet_token_file,
        settings.kubelet_ca_file,
        api,
        verify=settings.kubelet_verify,
    )


def connect(
    url: str, token: Path | None, ca: Path | None, api: Login | None, *, verify: bool = True
) -> KubeletPods | None:
    """The client for `--kubelet-url`; None if it is not set. Raises UnusableSettings for an unusable URL or CA.

    Its certificate must be signed by `ca`, without one by the API server's authority, unless `verify` is False.
    """
    if not url:
        return None
    try:
        where = server_url(url)
    except ValueError as error:
        raise UnusableSettings(
            f"--kubelet-url: {quoted(url, 120)} is of no use ({error}); write https://HOST:PORT"
        ) from None
    found = Login(where, ca=ca or (api.ca if api is not None else None), verify=verify)
    if token is not None:
        found = dataclasses.replace(found, token=token_file(token))
    elif api is not None:
        found = dataclasses.replace(found, token=api.token)
    try:
        found.tls()
    except NoConfiguration as error:
        raise UnusableSettings(str(error)) from None
    return KubeletPods(Endpoint(found, agent=COMPONENT, who="kubelet"))
