"""The driver's two sockets, its own and the one by which kubelet finds it: served by one thread, anew if one goes.

Both have this daemon's name in theirs: kubelet takes several instances of a driver, calls the one that registered last,
and none that leaves takes the others' sockets with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import grpc

from manager.dra import server
from manager.dra.server import DraPlugin, Health, Registration
from manager.process.logs import Conditions
from manager.proto import pluginregistration_pb2_grpc
from vcuda.kube.worker import Worker

# Preparing reads a claim from the API server and waits for a lock: who has begun gets an answer.
GRACE_S = 6.0
_LOOK_S = 1.0
_LONGEST_PATH = 107  # bytes of a socket's address (unix(7))

log = logging.getLogger(__name__)


def endpoint_name(instance: str) -> str:
    """The file of an instance's own socket; daemons of earlier versions gave themselves no name."""
    return f"dra-{instance}.sock" if instance else "dra.sock"


def registration_name(driver: str, instance: str) -> str:
    """The file of the socket by which kubelet finds an instance."""
    return f"{driver}-{instance}-reg.sock" if instance else f"{driver}-reg.sock"


class Sockets:
    """Keeps both there. Kubelet watches its folder and calls us; a new kubelet looks there by itself."""

    def __init__(
        self, plugins: Path, registry: Path, driver: str, instance: str, plugin: DraPlugin, health: Health
    ) -> None:
        self._folder = plugins / driver
        self._endpoint = self._folder / endpoint_name(instance)
        self._registry = registry / registration_name(driver, instance)
        self._driver, self._plugin, self._health = driver, plugin, health
        self._registration = Registration(driver, str(self._endpoint))
        self._servers: list[grpc.Server] = []
        self._inodes: dict[Path, int] = {}
        self._lock = -1
        self._begin: Callable[[], None] | None = None
        self._stop, self._wake = threading.Event(), threading.Event()
        self._conditions = Conditions(log)
        self.worker = Worker("claims", self._turn)

    @property
    def registered(self) -> bool:
        return bool(self._inodes) and self._registration.registered

    @property
    def registrations(self) -> int:
        return self._registration.registrations

    def start(self) -> None:
        """Serve beside another daemon that has the node."""
        self.worker.start()

    def own(self, begin: Callable[[], None]) -> None:
        """Serve by oneself: `begin` is called as soon as no other daemon does."""
        self._begin = begin
        self._wake.set()

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()
        self.worker.stop()
        self.worker.join(1.0)
        self._end()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _turn(self) -> None:
        self._wake.clear()
        try:
            if self._begin is not None:
                self._claim()
                self._begin()
            if not self._intact():
                self._serve()
                self._remove_dead()
        except (OSError, RuntimeError) as error:  # grpc reports an unusable address as RuntimeError
            self._end()
            self._conditions.set("serve", f"the driver {self._driver} can't be served: {error}; trying again")
        else:
            self._conditions.clear("serve", f"the driver {self._driver} is served")
        if not self._stop.is_set():
            self._wake.wait(_LOOK_S)

    def _intact(self) -> bool:
        if not self._inodes:
            return False
        try:
            return all(path.stat().st_ino == inode for path, inode in self._inodes.items())
        except OSError:
            return False

    def _serve(self) -> None:
        """Raises OSError, RuntimeError."""
        for path in (self._endpoint, self._registry):
            if len(os.fsencode(path)) > _LONGEST_PATH:
                raise OSError(
                    f"the path of the socket {path} has more than {_LONGEST_PATH} bytes; choose shorter folders"
                )
        self._end()
        self._make_folders()
        self._registration = Registration(self._driver, str(self._endpoint))
        # The driver first: kubelet calls it as soon as it has found the other.
        for path in (self._endpoint, self._registry):
            made = grpc.server(
                futures.ThreadPoolExecutor(server.THREADS, thread_name_prefix=path.name),
                options=[("grpc.so_reuseport", 0)],
            )
            if path == self._endpoint:
                server.add_driver(made, self._plugin, self._health)
            else:
                pluginregistration_pb2_grpc.add_RegistrationServicer_to_server(self._registration, made)
            path.unlink(missing_ok=True)
            made.add_insecure_port(f"unix:{path}")
            made.start()
            self._servers.append(made)
            self._inodes[path] = path.stat().st_ino

    def _make_folders(self) -> None:
        for folder in (self._folder, self._registry.parent):
            folder.mkdir(mode=0o750, parents=True, exist_ok=True)

    def _claim(self) -> None:
        """Hold the driver's folder: who knows nothing of our book must not serve beside us. Raises OSError."""
        if self._lock >= 0:
            return
        self._make_folders()
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(folder)
            raise OSError(f"another gpu-manager serves {self._folder}; stop it") from None
        self._lock = folder

    def _remove_dead(self) -> None:
        """Take away what killed daemons have left: kubelet would dial it for ever."""
        for path in self._of_this_driver():
            if path not in self._inodes and _is_dead(path):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _of_this_driver(self) -> Iterator[Path]:
        named = "(-[0-9a-f]+)?"
        for folder, name in (
            (self._folder, rf"dra{named}\.sock"),
            (self._registry.parent, rf"{re.escape(self._driver)}{named}-reg\.sock"),
        ):
            yield from (path for path in folder.iterdir() if re.fullmatch(name, path.name))

    def _end(self) -> None:
        """Calls that have begun first: kubelet breaks them off when the registration goes."""
        self._health.end()
        for made in self._servers:
            made.stop(grace=GRACE_S).wait(GRACE_S + 0.5)
        self._servers.clear()
        for path, inode in self._inodes.items():
            with contextlib.suppress(OSError):
                if path.stat().st_ino == inode:
                    path.unlink()
        self._inodes.clear()


def _is_dead(path: Path) -> bool:
    """Whether nobody listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
