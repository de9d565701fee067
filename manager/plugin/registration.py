"""Serving both plugins in kubelet's directory and registering them, again whenever kubelet starts anew.

A starting kubelet deletes every socket in the directory and makes its own kubelet.sock: either sign makes new servers.
The directory is watched by inotify; a look once a second catches what a watch can miss (a directory made later).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from pathlib import Path

import grpc
from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

from manager.cards.feed import SnapshotFeed
from manager.plugin.server import THREADS, Plugin
from manager.process.logs import Conditions
from manager.proto import deviceplugin_pb2 as api
from manager.proto import deviceplugin_pb2_grpc
from vcuda.kube.worker import Worker
from vcuda.spec.names import Names

API_VERSION = "v1beta1"
KUBELET_SOCKET = "kubelet.sock"
SOCKETS = {"core": "vcore.sock", "memory": "vmemory.sock"}
REGISTER_TIMEOUT_S = 5.0
# An Allocate that has begun ends with an answer: it takes a lock and what finding its pod may take.
GRACE_S = 6.0
_LOOK_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
# Kubelet dials back within moments; one whose stream broke does not by itself, and takes the devices for unhealthy.
_UNWATCHED_S = 10.0

log = logging.getLogger(__name__)


class _Wake(FileSystemEventHandler):
    """Sets an event for changes of sockets only: reading and writing of checkpoints is kubelet's daily business."""

    def __init__(self, wake: threading.Event) -> None:
        self._wake = wake

    def on_created(self, event: FileSystemEvent) -> None:
        self._look(event)

    def on_deleted(self, event: FileSystemEvent) -> None:
        self._look(event)

    def on_moved(self, event: FileSystemEvent) -> None:
        self._look(event)

    def _look(self, event: FileSystemEvent) -> None:
        if str(event.src_path).endswith(".sock") or str(getattr(event, "dest_path", "")).endswith(".sock"):
            self._wake.set()


class Registrar:
    """Keeps the plugins served and registered, from one thread."""

    def __init__(
        self,
        directory: Path,
        names: Names,
        plugins: Sequence[Plugin],
        device_lists: SnapshotFeed,
        kubelet_restarted: Callable[[], None],
    ) -> None:
        self._directory = directory
        self._names = names
        self._plugins = plugins
        self._device_lists = device_lists
        self._kubelet_restarted = kubelet_restarted
        self._servers: list[grpc.Server] = []
        self._registered_with: tuple[int, int] | None = None
        self._met: tuple[int, int] | None = None  # the kubelet of which we have told, before it could call us
        self._told: list[api.DevicePluginOptions] = []  # by the registration
        self._own_inodes: dict[str, int] = {}
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._conditions = Conditions(log)
        self._observer: BaseObserver | None = None
        self._folder = -1  # open and locked while we serve in it
        self._pause = _FIRST_PAUSE_S
        self.worker = Worker("registration", self._turn)
        self._since = self._last = 0.0
        self.registrations = 0

    @property
    def registered(self) -> bool:
        return self._registered_with is not None

    def unwatched_s(self) -> Mapping[str, float]:
        """Seconds for which the kubelet that took our registration has not watched a resource's devices."""
        if not self.registered:
            return {}
        known = time.monotonic() - self._since
        return {plugin.resource: min(plugin.unwatched_s, known) for plugin in self._plugins}

    def stalled_s(self) -> Mapping[str, float]:
        """Seconds for which kubelet has not read a resource's device list."""
        return {plugin.resource: plugin.stalled_s for plugin in self._plugins}

    def start(self) -> None:
        self.worker.start()

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()
        self.worker.stop()
        self.worker.join(1.0)
        if self._observer is not None:
            self._observer.stop()
        self._stop_servers()
        for name, inode in self._own_inodes.items():
            path = self._directory / name
            with contextlib.suppress(OSError):
                if path.stat().st_ino == inode:
                    path.unlink()
        self._release()

    def _turn(self) -> None:
        if self._stop.is_set():
            return
        self._wake.clear()
        self._observe()
        kubelet = self._kubelet()
        if kubelet is None:
            self._registered_with = None
            self._conditions.set("kubelet", f"waiting for kubelet: there is no {self._directory / KUBELET_SOCKET}")
        elif kubelet != self._registered_with or not self._sockets_intact() or self._outdated():
            if not self._register(kubelet):
                self._stop.wait(self._pause)
                self._pause = min(self._pause * 2, _LONGEST_PAUSE_S)
                return
            self._pause = _FIRST_PAUSE_S
        self._wake.wait(_LOOK_S)

    def _kubelet(self) -> tuple[int, int] | None:
        """What tells one kubelet's socket from its successor's."""
        try:
            status = (self._directory / KUBELET_SOCKET).stat()
        except OSError:
            return None
        return status.st_ino, status.st_ctime_ns

    def _outdated(self) -> bool:
        """Whether kubelet should be told of us again: it has stopped watching, or the cards want other options now."""
        return self._given_up() or self._told != [plugin.options for plugin in self._plugins]

    def _given_up(self) -> bool:
        """Whether kubelet lives but has stopped watching, long enough after it was last told of us."""
        if max(self.unwatched_s().values(), default=0.0) < _UNWATCHED_S:
            return False
        if time.monotonic() - self._last < _UNWATCHED_S:
            return False
        log.warning("kubelet has not watched our devices for %.0f s; registering again", _UNWATCHED_S)
        return True

    def _sockets_intact(self) -> bool:
        if len(self._own_inodes) < len(self._plugins):
            return False
        for name, inode in self._own_inodes.items():
            try:
                if (self._directory / name).stat().st_ino != inode:
                    return False
            except OSError:
                return False
        return True

    def _observe(self) -> None:
        if self._observer is not None and self._observer.is_alive():
            return
        if not self._directory.is_dir():
            return
        observer = Observer()
        try:
            observer.schedule(_Wake(self._wake), str(self._directory))
            observer.start()
        except OSError as error:
            self._conditions.set("watch", f"cannot watch {self._directory} ({error}); looking once a second instead")
            return
        self._observer = observer

    def _register(self, kubelet: tuple[int, int]) -> bool:
        before, self._registered_with = self._registered_with, None
        started = self._last = time.monotonic()
        if kubelet != self._met:
            self._met = kubelet
            self._kubelet_restarted()
            for plugin in self._plugins:
                plugin.end_streams()
        try:
            if not self._claim():
                self._conditions.set(
                    "kubelet",
                    f"another gpu-manager serves {self._directory}; stop it, or give this one another "
                    "--device-plugin-path",
                )
                return False
            self._serve()
            self._told = [plugin.options for plugin in self._plugins]
            with grpc.insecure_channel(f"unix:{self._directory / KUBELET_SOCKET}") as channel:
                stub = deviceplugin_pb2_grpc.RegistrationStub(channel)
                for plugin, options in zip(self._plugins, self._told, strict=True):
                    request = api.RegisterRequest(
                        version=API_VERSION,
                        endpoint=SOCKETS[plugin.resource],
                        resource_name=self._names.core if plugin.resource == "core" else self._names.memory,
                        options=options,
                    )
                    stub.Register(request, timeout=REGISTER_TIMEOUT_S)
        except grpc.RpcError as error:
            self._conditions.set("kubelet", f"kubelet does not take the registration: {error.details()}; trying again")
            return False
        except (OSError, RuntimeError) as error:  # grpc reports an unusable address as RuntimeError
            self._conditions.set("kubelet", f"cannot serve in {self._directory}: {error}; trying again")
            return False
        self._conditions.clear("kubelet", "kubelet is there")
        if kubelet != before:
            self._since = time.monotonic()
        self._registered_with = kubelet
        self.registrations += 1
        log.info("registered with kubelet in %.0f ms", (time.monotonic() - started) * 1000)
        return True

    def _claim(self) -> bool:
        """Whether the folder is ours, by a lock on itself: files in it a starting kubelet removes."""
        if self._folder >= 0 and os.fstat(self._folder).st_ino == self._directory.stat().st_ino:
            return True
        self._release()
        folder = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(folder)
            return False
        self._folder = folder
        return True

    def _release(self) -> None:
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def _serve(self) -> None:
        """New servers on new sockets; streams of the old ones end, which kubelet takes for a restarted plugin."""
        if self._sockets_intact() and self._servers:
            return  # only kubelet is new: it dials the sockets that it left alone
        self._stop_servers()
        self._own_inodes.clear()
        for plugin in self._plugins:
            name = SOCKETS[plugin.resource]
            path = self._directory / name
            path.unlink(missing_ok=True)
            server = grpc.server(
                futures.ThreadPoolExecutor(THREADS, thread_name_prefix=name),
                options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 16 * 1024 * 1024)],
            )
            deviceplugin_pb2_grpc.add_DevicePluginServicer_to_server(plugin, server)
            server.add_insecure_port(f"unix:{path}")
            server.start()
            self._servers.append(server)
            self._own_inodes[name] = path.stat().st_ino

    def _stop_servers(self) -> None:
        stopping = [server.stop(grace=GRACE_S) for server in self._servers]
        for event in stopping:
            event.wait(GRACE_S + 0.5)
        self._servers.clear()
