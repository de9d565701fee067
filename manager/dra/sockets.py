"""The driver's two sockets, its own and the one by which kubelet finds it: served by one thread, anew if one goes."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
from concurrent import futures
from pathlib import Path

import grpc

from manager.dra import server
from manager.dra.server import DraPlugin, Health, Registration
from manager.process.logs import Conditions
from manager.proto import pluginregistration_pb2_grpc
from vcuda.kube.worker import Worker

ENDPOINT = "dra.sock"
# Preparing reads a claim from the API server and waits for a lock: who has begun gets an answer.
GRACE_S = 6.0
_LOOK_S = 1.0
_LONGEST_PATH = 107  # bytes of a socket's address (unix(7))

log = logging.getLogger(__name__)


class Sockets:
    """Keeps both there. Kubelet watches its folder and calls us; a new kubelet looks there by itself."""

    def __init__(self, plugins: Path, registry: Path, driver: str, plugin: DraPlugin, health: Health) -> None:
        self._folder = plugins / driver
        self._endpoint = self._folder / ENDPOINT
        self._registry = registry / f"{driver}-reg.sock"
        self._driver, self._plugin, self._health = driver, plugin, health
        self._registration = Registration(driver, str(self._endpoint))
        self._servers: list[grpc.Server] = []
        self._inodes: dict[Path, int] = {}
        self._lock = -1
        self._stop = threading.Event()
        self._conditions = Conditions(log)
        self.worker = Worker("claims", self._turn)

    @property
    def registered(self) -> bool:
        return bool(self._inodes) and self._registration.registered

    @property
    def registrations(self) -> int:
        return self._registration.registrations

    def start(self) -> None:
        self.worker.start()

    def stop(self) -> None:
        self._stop.set()
        self.worker.stop()
        self.worker.join(1.0)
        self._end()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _turn(self) -> None:
        if not self._intact():
            try:
                self._serve()
            except (OSError, RuntimeError) as error:  # grpc reports an unusable address as RuntimeError
                self._end()
                self._conditions.set("serve", f"the driver {self._driver} can't be served: {error}; trying again")
            else:
                self._conditions.clear("serve", f"the driver {self._driver} is served")
        self._stop.wait(_LOOK_S)

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
        self._folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        self._registry.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        self._claim()
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

    def _claim(self) -> None:
        """Hold the driver's folder: two daemons must not take each other's sockets away. Raises OSError."""
        if self._lock >= 0:
            return
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(folder)
            raise OSError(f"another gpu-manager serves {self._folder}; stop it") from None
        self._lock = folder

    def _end(self) -> None:
        """Registration first, so that kubelet calls nobody who is about to go."""
        for path, inode in reversed(self._inodes.items()):
            with contextlib.suppress(OSError):
                if path.stat().st_ino == inode:
                    path.unlink()
        self._inodes.clear()
        self._health.end()
        stopping = [made.stop(grace=GRACE_S) for made in reversed(self._servers)]
        for event in stopping:
            event.wait(GRACE_S + 0.5)
        self._servers.clear()
