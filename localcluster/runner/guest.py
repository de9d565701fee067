"""One more command in a running container, for `kubectl exec`: a monitor of its own that joins what the container has.

Started by the runtime as `python -S -E -c ... CONFIG`, as the container's own monitor is; commands arrive on stdin as
there. Reports are lines of JSON on standard output. Standard library only.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import termios
from collections.abc import Sequence
from dataclasses import asdict

from localcluster.runner import config as configs
from localcluster.runner import linux
from localcluster.runner.supervisor import Monitor, mirror


class Guest(Monitor):
    """`main` is a process of the container; `streams` become the command's standard ones."""

    def __init__(self, config: configs.ContainerConfig, main: int, streams: Sequence[int], *, terminal: bool) -> None:
        super().__init__(config)
        self._host_main, self._streams, self._terminal = main, streams, terminal

    def _report(self, phase: str, **fields: object) -> None:
        self._state.phase = phase
        for name, value in fields.items():
            setattr(self._state, name, value)
        if phase == "running":  # the command has them now: their other ends must see when it closes them
            for stream in set(self._streams):
                os.close(stream)
        print(json.dumps(asdict(self._state)), flush=True)

    def _prepare(self) -> None:
        """There is no log: the streams are given."""

    def _map_identities(self) -> None:
        """The container's user namespace has its map."""

    def _enter_namespaces(self, ready: int, mapped: int) -> None:
        config = self._config
        kinds = ["user"] if config.isolation is configs.Isolation.USER_AND_MOUNT else []
        kinds += ["uts", *(["pid"] if config.pid_namespace else []), "mnt"] if config.isolation.real_mounts else []
        opened = [os.open(f"/proc/{self._host_main}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in kinds]
        for descriptor in opened:
            linux.setns(descriptor)
            os.close(descriptor)
        if kinds[:1] == ["user"]:
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
        os.write(ready, b"x")
        os.close(ready)
        os.read(mapped, 1)
        os.close(mapped)

    def _execute(self, report: int) -> None:
        if self._config.pid_namespace and self._config.isolation.real_mounts:
            child = os.fork()  # only children are in the namespace that was joined
            if child != 0:
                os.write(report, f"pid {child}\n".encode())
                os.close(report)
                os._exit(mirror(child))
            linux.die_with_parent(signal.SIGKILL)
        self._become_command()

    def _enter_root(self) -> None:
        os.setsid()
        for target, source in enumerate(self._streams):
            os.dup2(source, target)
        if self._terminal:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        if self._config.isolation.real_mounts:
            linux.drop_capabilities()


def main() -> None:
    """Run what the first argument says, as `localcluster.runner.runtime` writes it."""
    order = json.loads(sys.argv[1])
    config = configs.load(order["config"])
    sys.exit(Guest(config, order["main"], order["streams"], terminal=order["terminal"]).run())
