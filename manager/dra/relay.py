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
from typing import Any, NamedTuple, TypeVar

import grpc

from manager.proto import pluginregistration_pb2

_T = TypeVar("_T")
_PAUSE_S = 0.02
# Of kubelet's 45 s for a call: so long another daemon is waited for. Kubelet is to hear our words, not its own clock,
# also where as many calls as we have threads wait before this one.
LIMIT_S = 20.0
_RESERVE_S = 2.0
# A probe of readiness has 5 s.
_PROBE_S = 2.0
_GET_INFO = "/pluginregistration.Registration/GetInfo"

log = logging.getLogger(__name__)


class Other(NamedTuple):
    """The daemon that has the node: its process, its driver's socket and the one by which kubelet finds that."""

    pid: int
    endpoint: Path
    registration: Path


class NoAnswer(Exception):
    """The daemon that has the node gave none; the message says which, and what to do."""


class Relay:
    """Knows until when calls are another daemon's. `serving`: that daemon, if one has the node."""

    def __init__(self, serving: Callable[[], Other | None]) -> None:
        self._serving = serving
        self._own = threading.Event()

    def end(self) -> None:
        """This daemon has the node from now on."""
        self._own.set()

    def silent(self) -> str:
        """Why calls would get no answer now: the daemon that has the node gives none; "" if it does, or none has it."""
        other = self._serving()
        if other is None:
            return ""
        asked, answer = pluginregistration_pb2.InfoRequest(), pluginregistration_pb2.PluginInfo
        try:
            self._call(other.registration, _GET_INFO, asked, answer, _PROBE_S)
        except grpc.RpcError as error:
            # Without such a socket it may serve no claims, as before an update that turns them on.
            return _silence(other) if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else ""
        return ""

    def ask(self, path: str, request: Any, answer: type[_T], context: grpc.ServicerContext) -> _T | None:
        """The other daemon's answer to a call, by its full path; None: this daemon is to give it.

        Calls may be repeated, for all that kubelet asks of a driver may be. Raises NoAnswer.
        """
        left = context.time_remaining()
        until = time.monotonic() + (LIMIT_S if left is None else min(LIMIT_S, left - _RESERVE_S))
        while not self._own.is_set():
            left = until - time.monotonic()
            if left <= 0 or not context.is_active():
                raise NoAnswer(f"{_silence(self._serving())}; kubelet tries again by itself")
            other = self._serving()
            if other is not None:
                with contextlib.suppress(grpc.RpcError):
                    return self._call(other.endpoint, path, request, answer, left)
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


def _silence(other: Other | None) -> str:
    if other is None:
        return "no gpu-manager has this node yet"
    return (
        f"the gpu-manager that serves this node (pid {other.pid}) does not answer; if that lasts, end it: another one "
        "takes over"
    )
