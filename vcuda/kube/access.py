"""Who may see the pages that name tenants: whom Kubernetes allows (TokenReview, then SubjectAccessReview)."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from http import HTTPStatus
from typing import Any

from vcuda.kube.client import Client
from vcuda.kube.errors import KubeError

# The API server takes `Authorization` off what it passes on to a pod: who asks through it names the token so.
TOKEN_HEADER = "X-Vcuda-Token"

_KEPT_S = 30.0
_KEPT = 256
_TIMEOUT_S = 3.0
_LONGEST_TOKEN = 8000

log = logging.getLogger(__name__)


class Access:
    """Answers of the API server, each believed for half a minute.

    Rights: `create` on tokenreviews and subjectaccessreviews.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: OrderedDict[tuple[bytes, str], tuple[float, HTTPStatus | None]] = OrderedDict()
        self._away = False

    def refusal(self, token: str, path: str) -> HTTPStatus | None:
        """Why the bearer of a token may not get a path; None if it may."""
        if not token or len(token) > _LONGEST_TOKEN:
            return HTTPStatus.UNAUTHORIZED
        key = hashlib.sha256(token.encode()).digest(), path
        known = self._known.get(key)
        if known is not None and time.monotonic() < known[0]:
            return known[1]
        try:
            found = self._ask(token, path)
        except KubeError as error:
            if not self._away:
                log.warning("nobody can be shown tenants: %s", error)
            self._away = True
            return HTTPStatus.SERVICE_UNAVAILABLE
        if self._away:
            log.info("the API server says again who may see tenants")
        self._away = False
        self._known[key] = time.monotonic() + _KEPT_S, found
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return found

    def _ask(self, token: str, path: str) -> HTTPStatus | None:
        review = self._review("authentication", "TokenReview", {"token": token})
        user = review.get("user") or {}
        if not review.get("authenticated"):
            return HTTPStatus.UNAUTHORIZED
        asked = {
            "user": user.get("username"),
            "uid": user.get("uid"),
            "groups": user.get("groups"),
            "extra": user.get("extra"),
            "nonResourceAttributes": {"path": path, "verb": "get"},
        }
        allowed = self._review("authorization", "SubjectAccessReview", asked).get("allowed")
        return None if allowed else HTTPStatus.FORBIDDEN

    def _review(self, group: str, kind: str, spec: dict[str, object]) -> dict[str, Any]:
        version = f"{group}.k8s.io/v1"
        body = {"apiVersion": version, "kind": kind, "spec": spec}
        answer = self._client.call("POST", f"/apis/{version}/{kind.lower()}s", body, timeout=_TIMEOUT_S)
        status = answer.get("status")
        return status if isinstance(status, dict) else {}
