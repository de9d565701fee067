"""What of the driver programs load beside libcuda: its other libraries, by the names that they are looked up by."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from vcuda.driver.root import HostRoot

# What compute and video workloads load beside libcuda; OpenGL, EGL and X11 libraries belong to graphics stacks.
_COMPANIONS = (
    "libnvidia-ptxjitcompiler",
    "libnvidia-nvvm",
    "libnvidia-gpucomp",
    "libcudadebugger",
    "libnvidia-opencl",
    "libnvidia-fatbinaryloader",
    "libnvidia-compiler",
    "libnvidia-cfg",
    "libnvidia-allocator",
    "libnvidia-nscq",
    "libnvidia-encode",
    "libnvidia-opticalflow",
    "libnvcuvid",
    "libnvoptix",
    "libnvidia-rtcore",
)
# libcuda opens these by SONAME: containers have them where the dynamic linker looks, too.
LOADER_COMPANIONS = ("libnvidia-ptxjitcompiler.so.1", "libnvidia-nvvm.so.4")
_VERSION = re.compile(r"\.so\.(\d+\.\d+(?:\.\d+)?)$")


@dataclass(frozen=True)
class Source:
    """A driver library on the host: its own file and the name that it is looked up by."""

    path: Path
    name: str


def version_of(name: str) -> str:
    """The driver's version in a file's name; "unknown" without one."""
    match = _VERSION.search(name)
    return match[1] if match else "unknown"


def of(root: HostRoot, version: str, beside: Collection[Path]) -> Iterator[Source]:
    """The companions of a driver's version below a root, those in the folders `beside` first."""
    seen = set()
    for folder in dict.fromkeys((*sorted(beside), *root.library_folders())):
        for library in _COMPANIONS:
            for path in sorted(folder.glob(f"{library}.so.*")):
                found = root.resolve(path.relative_to(root.path))
                if found is None or not found.is_file() or path.name in seen:
                    continue
                if version_of(found.name) not in (version, "unknown"):
                    continue  # left over from another driver
                seen.add(path.name)
                yield Source(found, path.name)
