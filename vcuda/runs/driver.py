"""Where this machine's NVIDIA driver libraries are: what the dynamic linker would load, our own shims passed over."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vcuda.runs.errors import RunError

CUDA_NAME = "libcuda.so.1"
NVML_NAME = "libnvidia-ml.so.1"
LDCONFIG = ("/sbin/ldconfig", "/usr/sbin/ldconfig", "/run/current-system/sw/bin/ldconfig")
# Where distributions, WSL and NixOS put the driver when the linker's cache does not say.
FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/local/nvidia/lib64",
    "/usr/lib/wsl/lib",
    "/run/opengl-driver/lib",
)
_CACHE_LINE = re.compile(r"\s*(\S+) \(([^)]*)\) => (\S+)")
_MACHINE_X86_64 = b"\x3e\x00"  # e_machine, little-endian
_LARGER_THAN_ANY_SHIM = 8 * 2**20


@dataclass(frozen=True)
class Driver:
    """The real libraries, links resolved."""

    cuda: Path
    nvml: Path


def find(library_path: Sequence[str], folders: Iterable[str] = FOLDERS) -> Driver:
    """Find both libraries as the linker would: `library_path` (LD_LIBRARY_PATH), its cache, well-known folders.

    Raises RunError that says where it looked.
    """
    cached = cache()
    found = {}
    for name in (CUDA_NAME, NVML_NAME):
        places = [*(Path(folder or ".", name) for folder in library_path), *cached.get(name, ())]
        places += [Path(folder, name) for folder in folders]
        found[name] = next((path.resolve() for path in places if is_driver(path)), None)
    cuda, nvml = found[CUDA_NAME], found[NVML_NAME]
    if cuda is None or nvml is None:
        missing = " and ".join(name for name, path in found.items() if path is None)
        raise RunError(
            f"this machine has no {missing} (looked in LD_LIBRARY_PATH, the linker's cache and usual folders); "
            "install the NVIDIA driver, or use --sim for simulated cards"
        )
    return Driver(cuda, nvml)


def cache() -> dict[str, list[Path]]:
    """The linker's cache: 64-bit libraries by name, in its order of preference. Empty where there is no ldconfig."""
    for program in LDCONFIG:
        try:
            result = subprocess.run([program, "-p"], capture_output=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        found: dict[str, list[Path]] = {}
        for line in result.stdout.decode(errors="replace").splitlines():
            if (match := _CACHE_LINE.match(line)) and "x86-64" in match[2]:
                found.setdefault(match[1], []).append(Path(match[3]))
        return found
    return {}


def is_driver(path: Path) -> bool:
    """Whether the file is a 64-bit library and not one of our shims, which would load itself for ever."""
    try:
        with path.open("rb") as file:
            head = file.read(20)
            if head[:5] != b"\x7fELF\x02" or head[18:20] != _MACHINE_X86_64:
                return False
            # A shim names the real driver's alias as what it needs; no real driver is as small as a shim.
            large = os.fstat(file.fileno()).st_size > _LARGER_THAN_ANY_SHIM
            return large or b"-driver.so.1\0" not in head + file.read()
    except OSError:
        return False
