"""Before a daemon has its node: another one may still serve it, as in an update that starts the new one first.

What takes long is done here: the interpreter has read the program, the driver is open, kubelet has registered our
sockets. Nothing is read or written of what is booked before the lock is ours: the book has one writer.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable
from http import HTTPStatus

from manager.cards.driver import Driver
from manager.config.settings import Settings
from manager.config.values import DRA
from manager.dra.front import Front
from manager.observe import http
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
        self._waiting = False
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
            return False
        self._stack.enter_context(lock)
        if self._waiting:
            log.info("the node is free; taking over")
        return True

    def wait(self) -> None:
        """Be ready to take over at once; returns soon."""
        self._waiting = True
        log.warning(
            "%s: standing by until it ends. Else stop it, or give this one its own --checkpoint-path", self.waits
        )
        self.web.start()
        self._driver = self._open_driver(self.root)
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
        text = self.waits if self._waiting else "starting"
        if path not in ("/healthz", "/readyz"):
            status, text = HTTPStatus.SERVICE_UNAVAILABLE, f"{text}; ask that one"
        elif path == "/readyz" and DRA in self._settings.protocols and not self.front.sockets.registered:
            status, text = HTTPStatus.SERVICE_UNAVAILABLE, "not registered with kubelet"
        return Shown(status, "text/plain; charset=utf-8", f"{text}\n".encode())
