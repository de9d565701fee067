"""Builds a container's root: the host's directories read-only, private /dev, /tmp and /run, and the extra mounts.

Mount points that the host lacks need a directory that can be written: such a directory is *split*, that is made anew on
the root's tmpfs with its subdirectories bound and its files linked to a hidden bind of the original. That works in a
user namespace on any kernel, leaves the host untouched, and needs few mounts.
"""

from __future__ import annotations

import os
from pathlib import Path

from localcluster.runner import linux
from localcluster.runner.config import ContainerConfig

_PRIVATE = ("/tmp", "/run", "/var/tmp")
_SPECIAL = ("/dev", "/proc", "/sys", *_PRIVATE)
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_HIDDEN = ".host"


def _below(path: str, parent: str) -> bool:
    return path == parent or path.startswith(parent.rstrip("/") + "/")


class RootBuilder:
    """Lays out one container's root below `config.root_path`, in the calling process's own mount namespace."""

    def __init__(self, config: ContainerConfig) -> None:
        self._config = config
        self._root = str(config.root_path)
        self._hidden = 0
        wanted = [mount.container_path for mount in config.mounts]
        # A mount point is looked up as the container will: links of the host's tree are followed.
        self._targets = {path: self._resolve(path) for path in wanted}
        self._missing = [
            path
            for path in self._targets.values()
            if not any(_below(path, special) for special in _SPECIAL) and not os.path.lexists(path)
        ]

    @staticmethod
    def _resolve(path: str) -> str:
        normal = os.path.normpath(path)
        return normal if any(_below(normal, special) for special in _SPECIAL) else os.path.realpath(normal)

    def build(self) -> None:
        """Make everything and leave the root ready for pivot_root. Raises OSError that names the failing mount."""
        linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
        Path(self._root).mkdir(exist_ok=True)
        linux.mount("tmpfs", self._root, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=755")
        self._populate("/")
        for path in _PRIVATE:
            self._tmpfs(path, "mode=1777")
        for path in self._config.visible:
            if any(_below(path, private) for private in _PRIVATE):
                self._bind(path, path, read_only=True)
        self._devices()
        for source, target in (("/proc", "/proc"), ("/sys", "/sys")):
            self._bind(source, target, read_only=source == "/sys")
        # Parents before children, or a later mount would cover an earlier one.
        for mount in sorted(self._config.mounts, key=lambda mount: self._targets[mount.container_path].count("/")):
            self._bind(mount.host_path, self._targets[mount.container_path], read_only=mount.read_only)
        for device in self._config.devices:
            self._bind(device.host_path, device.container_path, read_only=False)

    def _populate(self, directory: str) -> None:
        hidden = ""
        with os.scandir(directory) as entries:
            for entry in entries:
                new = self._root + entry.path
                if entry.path in _SPECIAL:
                    Path(new).mkdir()
                elif entry.is_symlink():
                    Path(new).symlink_to(Path(entry.path).readlink())
                elif not entry.is_dir():
                    hidden = hidden or self._hide(directory)
                    Path(new).symlink_to(f"{hidden}/{entry.name}")
                elif self._must_split(entry.path):
                    Path(new).mkdir()
                    self._populate(entry.path)
                else:
                    Path(new).mkdir()
                    linux.bind(entry.path, new, read_only=True)

    def _must_split(self, directory: str) -> bool:
        inside = [*self._missing, *(path for path in _SPECIAL if path.count("/") > 1)]
        return any(path != directory and _below(path, directory) for path in inside)

    def _hide(self, directory: str) -> str:
        """Bind a split directory where its files can be linked from. The root itself holds nothing worth linking."""
        hidden = f"/{_HIDDEN}/{self._hidden}"
        self._hidden += 1
        Path(self._root + hidden).mkdir(parents=True)
        if directory != "/":
            linux.bind(directory, self._root + hidden, read_only=True)
        return hidden

    def _tmpfs(self, path: str, options: str) -> None:
        Path(self._root + path).mkdir(parents=True, exist_ok=True)
        linux.mount("tmpfs", self._root + path, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, options)

    def _devices(self) -> None:
        self._tmpfs("/dev", "mode=755")
        self._tmpfs("/dev/shm", "mode=1777")
        for name in _DEVICES:
            self._bind(f"/dev/{name}", f"/dev/{name}", read_only=False)
        self._bind("/dev/pts", "/dev/pts", read_only=False)
        for name, target in (
            ("fd", "/proc/self/fd"),
            ("stdin", "/proc/self/fd/0"),
            ("stdout", "/proc/self/fd/1"),
            ("stderr", "/proc/self/fd/2"),
            ("ptmx", "pts/ptmx"),
        ):
            Path(f"{self._root}/dev/{name}").symlink_to(target)

    def _bind(self, source: str, target: str, *, read_only: bool) -> None:
        place = Path(self._root + target)
        if place.is_symlink():
            place.unlink()  # a file of a split directory
        if not place.exists():
            if Path(source).is_dir():
                place.mkdir(parents=True)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.touch()
        linux.bind(source, str(place), read_only=read_only)
