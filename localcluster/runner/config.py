"""What a container is to the runner: command, environment, mounts, devices. Plain values that travel as JSON."""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


class Isolation(enum.StrEnum):
    """How a container gets its file system view, best first."""

    USER_AND_MOUNT = "user-and-mount-namespaces"
    MOUNT = "mount-namespace"
    HOST_PATHS = "host-paths"

    @property
    def real_mounts(self) -> bool:
        return self is not Isolation.HOST_PATHS


@dataclass(frozen=True)
class Mount:
    """A host file or directory that appears at `container_path`."""

    host_path: str
    container_path: str
    read_only: bool = False


@dataclass(frozen=True)
class Device:
    """A device node (or what stands for one) that appears at `container_path`."""

    host_path: str
    container_path: str


@dataclass(frozen=True)
class ContainerConfig:
    """Everything that is needed to start one container.

    `visible` are host paths that stay visible (read-only) although a private tmpfs covers their parent, such as the
    interpreter of a checkout below /tmp. `directory` belongs to the container and holds its state and log.
    """

    command: tuple[str, ...]
    environment: dict[str, str]
    working_directory: str
    directory: str
    isolation: Isolation
    pid_namespace: bool = False
    mounts: tuple[Mount, ...] = ()
    devices: tuple[Device, ...] = ()
    visible: tuple[str, ...] = ()
    hostname: str = ""

    @property
    def log_path(self) -> Path:
        return Path(self.directory) / "log"

    @property
    def state_path(self) -> Path:
        return Path(self.directory) / "state.json"

    @property
    def root_path(self) -> Path:
        return Path(self.directory) / "root"

    def dump(self) -> str:
        return json.dumps(asdict(self))


def load(text: str) -> ContainerConfig:
    """The inverse of `ContainerConfig.dump`."""
    data: dict[str, Any] = json.loads(text)
    data["command"] = tuple(data["command"])
    data["visible"] = tuple(data["visible"])
    data["isolation"] = Isolation(data["isolation"])
    data["mounts"] = tuple(Mount(**mount) for mount in data["mounts"])
    data["devices"] = tuple(Device(**device) for device in data["devices"])
    return ContainerConfig(**data)


@dataclass
class ContainerState:
    """What the monitor of a container reports in `state.json`. Times are seconds since the epoch."""

    phase: str = "created"  # created, running, exited, failed (never started)
    pid: int = 0
    started_at: float = 0.0
    finished_at: float = 0.0
    exit_code: int = 0
    signal: int = 0
    error: str = ""
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        return self.phase in ("exited", "failed")
