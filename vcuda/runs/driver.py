"""The real driver of this machine, which `vcuda run` puts behind our libraries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vcuda.driver.layout import CUDA, NVML
from vcuda.driver.root import HostRoot
from vcuda.runs.errors import RunError


@dataclass(frozen=True)
class Driver:
    """The real libraries, links resolved."""

    cuda: Path
    nvml: Path


def find(library_path: Sequence[str], root: Path = Path("/")) -> Driver:
    """Find both libraries as the linker would: `library_path` (LD_LIBRARY_PATH), its cache, well-known folders.

    Raises RunError that says where it looked.
    """
    host = HostRoot(root)
    first = [Path(folder or ".") for folder in library_path]
    cuda, nvml = host.find_library(CUDA, first=first), host.find_library(NVML, first=first)
    if cuda is None or nvml is None:
        missing = " and ".join(name for name, path in ((CUDA, cuda), (NVML, nvml)) if path is None)
        raise RunError(
            f"this machine has no {missing} (looked in LD_LIBRARY_PATH, the linker's cache and usual folders); "
            "install the NVIDIA driver, or use --sim for simulated cards"
        )
    return Driver(cuda, nvml)
