"""Watching this node's pods at the API server, only to notice at once when one has gone or ended."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import threading
from collections.abc import Callable

from manager.kube.api import Kube, terminal
from manager.kube.http import HttpError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_LIST_TIMEOUT_S = 10.0

log = logging.getLogger(__name__)


class PodWatch:
    """Calls `on_gone` when a pod of this node was deleted or has ended; never more than a hint."""

    def __init__(self, kube: Kube, on_gone: Callable[[], None]) -> None:
        self._kube = kube
        self._on_gone = on_gone
        self._stop = threading.Event()
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="pods", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread.ident is not None:
            self._thread.join(0.5)

    def _opened(self, connection: socket.socket) -> None:
        self._socket = connection

    def _run(self) -> None:
        pause = _FIRST_PAUSE_S
        while not self._stop.is_set():
            try:
                _, version = self._kube.pods(_LIST_TIMEOUT_S)
                self._on_gone()  # whatever went while nobody watched
                pause = _FIRST_PAUSE_S
                for kind, pod in self._kube.watch_pods(version, self._opened):
                    if kind == "DELETED" or terminal(pod):
                        self._on_gone()
                    if self._stop.is_set():
                        return
            except HttpError as error:
                log.debug("watching pods: %s", error)
                self._stop.wait(pause * random.uniform(0.5, 1.0))
                pause = min(pause * 2, _LONGEST_PAUSE_S)
