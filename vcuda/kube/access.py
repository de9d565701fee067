"""Who may see the pages that name tenants: whom Kubernetes allows (TokenReview, then SubjectAccessReview)."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable
from http import HTTPStatus
from typing import Any

from vcuda.kube.client import Client
from vcuda.kube.errors import KubeError

# The API server takes `Authorization` off what it passes on to a pod: who asks through it names the token so.
TOKEN_HEADER = "X-Vcuda-Token"

_KEPT_S = 30.0
_KEPT = 256
# Whoever reaches the port can make tokens up, and what we ask counts against the rights that our writes have, too.
_ASKED_A_SECOND, _ASKED_AT_ONCE = 10.0, 20.0
_TRUSTED_S = 600.0
_TIMEOUT_S = 3.0
_LONGEST_TOKEN = 8000

log = logging.getLogger(__name__)


class _Kept:
    """The latest answers, each until its time is over."""

    def __init__(self) -> None:
        self._all: OrderedDict[Hashable, tuple[float, HTTPStatus]] = OrderedDict()

    def put(self, key: Hashable, answer: HTTPStatus, until: float) -> None:
        self._all[key] = until, answer
        self._all.move_to_end(key)
        while len(self._all) > _KEPT:
            self._all.popitem(last=False)

    def get(self, key: Hashable, now: float) -> HTTPStatus | None:
        until, answer = self._all.get(key, (-math.inf, None))
        return answer if now < until else None


class Access:
    """Answers of the API server, each believed for half a minute.

    About tokens that were allowed nothing within ten minutes it is asked ten times a second, and twenty at once.
    Rights: `create` on tokenreviews and subjectaccessreviews. Thread-safe.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        # Apart, so that no number of made-up tokens pushes out whom Kubernetes allows.
        self._allowed, self._refused, self._trusted = _Kept(), _Kept(), _Kept()
        self._left, self._left_at = _ASKED_AT_ONCE, time.monotonic()
        self._away = False

    def refusal(self, token: str, path: str) -> HTTPStatus | None:
        """Why the bearer of a token may not get a path; None if it may."""
        if not token or len(token) > _LONGEST_TOKEN:
            return HTTPStatus.UNAUTHORIZED
        digest = hashlib.sha256(token.encode()).digest()
        key, now = (digest, path), time.monotonic()
        with self._lock:
            if self._allowed.get(key, now) is not None:
                return None
            refused = self._refused.get(key, now)
            if refused is not None:
                return refused
            if self._trusted.get(digest, now) is None and not self._may_ask(now):
                return HTTPStatus.TOO_MANY_REQUESTS
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
        now = time.monotonic()
        with self._lock:
            if found is None:
                self._allowed.put(key, HTTPStatus.OK, now + _KEPT_S)
                self._trusted.put(digest, HTTPStatus.OK, now + _TRUSTED_S)
            else:
                self._refused.put(key, found, now + _KEPT_S)
        return found

    def _may_ask(self, now: float) -> bool:
        self._left = min(_ASKED_AT_ONCE, self._left + (now - self._left_at) * _ASKED_A_SECOND)
        self._left_at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True

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
