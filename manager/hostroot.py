"""Paths below the driver root: resolving links as the host does, finding libraries, and what the runtime calls them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

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
)
PROGRAM_FOLDERS = ("usr/bin", "bin", "usr/local/bin", "usr/local/nvidia/bin", "opt/nvidia/bin")
_MAX_LINKS = 40


class HostRoot:
    """The driver root `path`, which the container runtime knows as `on_host`."""

    def __init__(self, path: Path, on_host: str = "auto") -> None:
        self.path = path
        if on_host == "auto":
            # A DaemonSet sees the host's root as a mount (/host); a simulated machine's root is an ordinary folder.
            on_host = "/" if os.path.ismount(path) else str(path)
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

    def find_library(self, soname: str) -> Path | None:
        """The regular file of a library such as "libnvidia-ml.so.1", or of its versioned name if the link is missing."""
        for folder in self.library_folders():
            found = self.resolve((folder / soname).relative_to(self.path))
            if found is not None and found.is_file():
                return found
        base = soname.partition(".so")[0]
        for folder in self.library_folders():
            for candidate in sorted(folder.glob(f"{base}.so.*.*"), reverse=True):
                found = self.resolve(candidate.relative_to(self.path))
                if found is not None and found.is_file():
                    return found
        return None

    def find_program(self, name: str) -> Path | None:
        for folder in PROGRAM_FOLDERS:
            found = self.resolve(f"{folder}/{name}")
            if found is not None and found.is_file():
                return found
        return None
