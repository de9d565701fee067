"""While another daemon serves this node, what kubelet asks of us is asked of it.

Kubelet calls the driver that registered last. One that is to follow another registers while that still serves, passes
every call on, and answers by itself from the moment at which it has the node: in between calls wait, none fails.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc

_T = TypeVar("_T")
_PAUSE_S = 0.02
# What is left of a call's time when we answer that nobody is there: kubelet is to hear our words, not its own clock.
_RESERVE_S = 2.0

log = logging.getLogger(__name__)


class Relay:
    """Knows until when calls are another daemon's. `serving`: the socket of that daemon, if one has the node."""

    def __init__(self, serving: Callable[[], Path | None]) -> None:
        self._serving = serving
        self._own = threading.Event()

    def end(self) -> None:
        """This daemon has the node from now on."""
        self._own.set()

    def ask(
        self, path: str, request: Any, answer: type[_T], context: grpc.ServicerContext, budget_s: float
    ) -> _T | None:
        """The other daemon's answer to a call, by its full path; None: this daemon is to give it.

        Calls may be repeated, for all that kubelet asks of a driver may be.
        """
        left = context.time_remaining()
        until = time.monotonic() + (budget_s if left is None else left) - _RESERVE_S
        while not self._own.is_set():
            left = until - time.monotonic()
            if left <= 0 or not context.is_active():
                context.abort(
                    grpc.StatusCode.UNAVAILABLE,
                    "another gpu-manager has this node, and does not answer; kubelet tries again by itself",
                )
            endpoint = self._serving()
            if endpoint is not None:
                with contextlib.suppress(grpc.RpcError):
                    return self._call(endpoint, path, request, answer, left)
            self._own.wait(_PAUSE_S)
        return None

    @staticmethod
    def _call(endpoint: Path, path: str, request: Any, answer: type[_T], timeout_s: float) -> _T:
        with grpc.insecure_channel(f"unix:{endpoint}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            call = channel.unary_unary(
                path,
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=answer.FromString,  # type: ignore[attr-defined]  # generated, untyped
            )
            found: _T = call(request, timeout=timeout_s)
            return found
