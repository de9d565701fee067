"""Before a daemon has its node: another one may still serve it, as in an update that starts the new one first.

What takes long is done here: the interpreter has read the program, the driver is open, kubelet has registered our
sockets. Nothing is read or written of what is booked before the lock is ours: the book has one writer.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable
from http import HTTPStatus
from typing import TextIO

from prometheus_client import CONTENT_TYPE_LATEST

from manager.cards.driver import Driver
from manager.config.settings import Settings
from manager.config.values import DRA
from manager.dra.front import Front
from manager.observe import http, metrics
from manager.observe.http import Shown
from manager.process import instance_lock
from vcuda.driver.root import HostRoot
from vcuda.spec.names import Names

log = logging.getLogger(__name__)


class Standby:
    """The place on a node that a daemon takes: its address, its sockets, and at last the node's lock."""

    def __init__(self, settings: Settings, open_driver: Callable[[HostRoot], Driver]) -> None:
        """Raises StartError."""
        self._settings, self._open_driver = settings, open_driver
        self.names = Names(settings.resource_domain)
        self.root = HostRoot(settings.driver_root, settings.driver_root_on_host)
        self._instance = uuid.uuid4().hex[:8]
        self.front = Front(settings, self.names.driver, self._instance)
        self._driver: Driver | None = None
        self._waiting_since: float | None = None
        self._next: TextIO | None = None
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(http.listen(settings.query_addr, settings.query_port))
            self.port = int(listener.getsockname()[1])
            self.web = http.WebServer(self, listener)
            self._stack = stack.pop_all()

    @property
    def waits(self) -> str:
        """For whom, in words."""
        found = instance_lock.holder(self._settings.checkpoint_path)
        lock = instance_lock.path_in(self._settings.checkpoint_path)
        return f"another gpu-manager holds {lock}" + (f" (process {found.pid})" if found is not None else "")

    def take(self) -> bool:
        """Whether the node is this daemon's now. Raises StartError."""
        lock = instance_lock.attempt(self._settings.checkpoint_path, self._instance)
        if lock is None:
            self._queue()
            return False
        self._stack.enter_context(lock)
        if self._waiting_since is not None:
            log.info("the node is free; taking over")
        if self._next is not None:
            self._next.close()
        return True

    def _queue(self) -> None:
        """Be seen by the one that serves, whose metrics and doctor say it; others that wait come later."""
        if self._next is None:
            self._next = instance_lock.attempt(self._settings.checkpoint_path, self._instance, instance_lock.NEXT)
            if self._next is not None:
                self._stack.enter_context(self._next)

    def wait(self) -> None:
        """Be ready to take over at once; returns soon."""
        self._waiting_since = time.monotonic()
        log.warning(
            "%s: standing by until it ends. Else stop it, or give this one its own --checkpoint-path", self.waits
        )
        self._driver = self._open_driver(self.root)
        self.web.start()  # not before: who is ready may be the only one a moment later
        if DRA in self._settings.protocols:
            self.front.start()

    def driver(self, root: HostRoot) -> Driver:
        """The one that was opened while there was time, once; then another."""
        found, self._driver = self._driver, None
        return found if found is not None else self._open_driver(root)

    def close(self) -> None:
        """The lock last: who waits for it finds nothing of ours."""
        self.front.stop()
        self.web.stop()
        if self._driver is not None:
            self._driver.close()
        self._stack.close()

    def page(self, path: str) -> Shown:
        """What a browser or probe is shown: ready means that kubelet's calls are answered, by whomever."""
        status = HTTPStatus.OK
        since = self._waiting_since
        if path in ("/metrics", "/metric") and since is not None:
            series = metrics.while_standing_by(time.monotonic() - since, self._settings.node_name)
            return Shown(status, CONTENT_TYPE_LATEST, series)
        text = self.waits if since is not None else "starting"
        if path not in ("/healthz", "/readyz"):
            status, text = HTTPStatus.SERVICE_UNAVAILABLE, f"{text}; ask that one"
        elif path == "/readyz" and DRA in self._settings.protocols and not self.front.sockets.registered:
            status, text = HTTPStatus.SERVICE_UNAVAILABLE, "not registered with kubelet"
        elif path == "/readyz" and DRA in self._settings.protocols and (silent := self.front.relay.silent()):
            status, text = HTTPStatus.SERVICE_UNAVAILABLE, silent
        return Shown(status, "text/plain; charset=utf-8", f"{text}\n".encode())
