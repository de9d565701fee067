"""Paths below the driver root: links as the host resolves them, the driver's libraries, and the runtime's names."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path

from vcuda.driver import ldcache
from vcuda.driver.ldcache import LdCacheError
from vcuda.driver.mounts import is_mount_point

# Where distributions and the driver's installer put libraries, most specific first.
LIBRARY_FOLDERS = (
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "usr/lib",
    "lib/x86_64-linux-gnu",
    "lib64",
    "lib",
    "usr/local/lib",
    "usr/local/nvidia/lib64",
    "opt/nvidia/lib64",
    "home/kubernetes/bin/nvidia/lib64",
    "usr/lib/wsl/lib",
    "run/opengl-driver/lib",
)
PROGRAM_FOLDERS = ("usr/bin", "bin", "usr/local/bin", "usr/local/nvidia/bin", "opt/nvidia/bin")
_MAX_LINKS = 40
# e_machine of 64-bit ELF files, little-endian (elf.h).
_MACHINES = {"x86_64": b"\x3e\x00", "aarch64": b"\xb7\x00"}
_LARGER_THAN_ANY_SHIM = 8 * 2**20

log = logging.getLogger(__name__)


def is_driver(path: Path) -> bool:
    """Whether the file is a library of this architecture and not one of our shims, which would load itself for ever."""
    try:
        with path.open("rb") as file:
            head = file.read(20)
            if head[:5] != b"\x7fELF\x02" or head[18:20] != _MACHINES.get(platform.machine()):
                return False
            # A shim names the real driver's alias as what it needs; no real driver is as small as a shim.
            large = os.fstat(file.fileno()).st_size > _LARGER_THAN_ANY_SHIM
            return large or b"-driver.so.1\0" not in head + file.read()
    except OSError:
        return False


class HostRoot:
    """The driver root `path`, which the container runtime knows as `on_host`."""

    def __init__(self, path: Path, on_host: str = "auto") -> None:
        self.path = path
        if on_host == "auto":
            # A DaemonSet sees the host's root as a mount (/host); a simulated machine's root is an ordinary folder.
            on_host = "/" if is_mount_point(path) else str(path)
        self.on_host = Path(on_host)

    @property
    def is_host(self) -> bool:
        """Whether this is the root of the machine itself, not a folder that stands for one."""
        return self.on_host == Path("/")

    def host_path(self, path: Path) -> str:
        """What the container runtime calls `path`, which is below the root."""
        return str(self.on_host / path.relative_to(self.path))

    def resolve(self, path: str | Path) -> Path | None:
        """The file that `path` (relative to the root) leads to, links taken as under chroot; None if there is none."""
        pending = [part for part in reversed(Path(path).parts) if part != "/"]
        current: list[str] = []
        links = 0
        while pending:
            part = pending.pop()
            if part in ("", "."):
                continue
            if part == "..":
                current = current[:-1]
                continue
            here = self.path.joinpath(*current, part)
            try:
                target = str(here.readlink())
            except OSError:
                if not here.exists():
                    return None
                current.append(part)
                continue
            links += 1
            if links > _MAX_LINKS:
                return None
            if target.startswith("/"):
                current = []
            pending.extend(piece for piece in reversed(Path(target).parts) if piece != "/")
        return self.path.joinpath(*current)

    def library_folders(self) -> Iterator[Path]:
        """Existing library folders, each once although distributions link some of them to each other."""
        seen = set()
        for name in LIBRARY_FOLDERS:
            folder = self.resolve(name)
            if folder is not None and folder.is_dir() and folder not in seen:
                seen.add(folder)
                yield folder

    def find_library(self, soname: str, version: str = "", first: Iterable[Path] = ()) -> Path | None:
        """The regular file of a library such as "libnvidia-ml.so.1"; never one of our shims.

        After what lies in the folders `first` (LD_LIBRARY_PATH's), what the host's own linker would load (its cache),
        then the usual folders, by name and then, where the link is missing, by versioned name. With `version`, such as
        the driver's by NVML, a file of that version goes before all others.
        """
        beside = [(folder / soname).resolve() for folder in first]
        found = [path for path in dict.fromkeys((*beside, *self._libraries(soname))) if is_driver(path)]
        named = [path for path in found if version and path.name.endswith(f".so.{version}")]
        return next(iter(named or found), None)

    def _libraries(self, soname: str) -> Iterator[Path]:
        for name in self._cached().get(soname, ()):
            yield from self._file(name)
        for folder in self.library_folders():
            yield from self._file((folder / soname).relative_to(self.path))
        base = soname.partition(".so")[0]
        for folder in self.library_folders():
            for candidate in sorted(folder.glob(f"{base}.so.*.*"), reverse=True):
                yield from self._file(candidate.relative_to(self.path))

    def _file(self, name: str | Path) -> Iterator[Path]:
        path = self.resolve(name)
        if path is not None and path.is_file():
            yield path

    def _cached(self) -> dict[str, tuple[str, ...]]:
        path = self.resolve("etc/ld.so.cache")
        if path is None:
            return {}
        try:
            return ldcache.read(path)
        except LdCacheError as error:
            log.info("%s is not used: %s", path, error)
            return {}

    def find_program(self, name: str) -> Path | None:
        for folder in PROGRAM_FOLDERS:
            found = self.resolve(f"{folder}/{name}")
            if found is not None and found.is_file():
                return found
        return None
