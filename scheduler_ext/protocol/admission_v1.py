"""The API server's AdmissionReview v1: reads its requests strictly, writes answers with a JSON patch.

Sources: k8s.io/api/admission/v1 (types.go); RFC 6902 and 6901 for patches and the pointers in them.
"""

from __future__ import annotations

import base64
import gc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from scheduler_ext.protocol import weight
from scheduler_ext.protocol.extender_v1 import BadInput
from vcuda.kube import nesting
from vcuda.printable import told
from vcuda.quoted import quoted

API_VERSION = "admission.k8s.io/v1"
_FORBIDDEN = 403  # kubectl shows no message with 422 (Invalid) unless there is a cause for each field
_WARNING_LENGTH = 256  # the API server cuts longer ones

POD = "Pod"
Patch = dict[str, Any]  # one operation of RFC 6902


@dataclass(frozen=True, slots=True)
class Review:
    """An object of `kind` that somebody wants to create or change.

    `old` is the object as it was, empty for a new one; `user` is who asks.
    """

    uid: str
    operation: str
    namespace: str
    user: str
    thing: Mapping[str, Any]
    old: Mapping[str, Any]
    kind: str = POD


def read(body: bytes, kinds: Collection[str] = (POD,)) -> Review:
    """Read an AdmissionReview of an object of `kinds`. Raises BadInput, which names the field."""
    heavy = weight.too_heavy(body)
    if heavy is not None:
        raise BadInput(f"{heavy}, which is more than a pod or claim needs; let it have fewer fields")
    collects = gc.isenabled()
    gc.disable()  # nothing of it is garbage: to look for some among ever more lists takes ten times as long as to read
    try:
        data = nesting.loads(body, orjson.loads)
    except orjson.JSONDecodeError as error:
        raise BadInput(f"the body is not JSON: {error}") from None
    finally:
        if collects:
            gc.enable()
    if not isinstance(data, dict) or data.get("apiVersion") != API_VERSION or data.get("kind") != "AdmissionReview":
        raise BadInput(f"the body is not an AdmissionReview of {API_VERSION}")
    request = _mapping(data.get("request"), "request")
    uid = request.get("uid")
    if not isinstance(uid, str) or not uid:
        raise BadInput("request.uid is missing")
    kind = _mapping(request.get("kind"), "request.kind").get("kind")
    if kind not in kinds or request.get("subResource"):
        raise BadInput(
            f"request.kind is {quoted(kind, 40)}, subResource {quoted(request.get('subResource'), 40)}; this path is "
            f"for {' and '.join(kind.lower() + ('es' if kind[-1] == 's' else 's') for kind in kinds)}"
        )
    user = _mapping(request.get("userInfo"), "request.userInfo").get("username")
    return Review(
        uid,
        _text(request.get("operation"), "request.operation"),
        _text(request.get("namespace") or "", "request.namespace"),
        _text(user or "", "request.userInfo.username"),
        _mapping(request.get("object"), "request.object"),
        _mapping(request.get("oldObject") or {}, "request.oldObject"),
        str(kind),
    )


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadInput(f"{what} is missing or not an object")
    return value


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise BadInput(f"{what} is missing or not a string")
    return value


def allowed(uid: str, patch: Sequence[Patch], warnings: Sequence[str]) -> bytes:
    """Let the object through, changed by `patch`; kubectl prints the warnings."""
    response: dict[str, Any] = {"uid": uid, "allowed": True}
    if patch:
        response |= {"patchType": "JSONPatch", "patch": base64.b64encode(orjson.dumps(patch)).decode()}
    if warnings:
        response["warnings"] = [told(warning, _WARNING_LENGTH) for warning in warnings]
    return _answer(response)


def refused(uid: str, reason: str, message: str) -> bytes:
    """Refuse the object; `message` is what its creator reads."""
    status = {
        "status": "Failure",
        "code": _FORBIDDEN,
        "reason": "Forbidden",
        "message": f"{reason}: {told(message)}",
    }
    return _answer({"uid": uid, "allowed": False, "status": status})


def _answer(response: dict[str, Any]) -> bytes:
    return orjson.dumps({"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response})


def pointer(*parts: str) -> str:
    """RFC 6901: the path to a field, whatever characters its keys have."""
    return "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in parts)
