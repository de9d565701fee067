"""How our libraries stand before the driver's, in a container and in a run alike.

LIB64/libcuda.so.1                   our shim as a regular file, with no name that the real one lacks; libcuda.so: link
LIB64/drv/libcuda-driver.so.1        link to the real library: what the shim loads ($ORIGIN/drv)
FOLDER/preload/libvcuda-preload.so   the preload library, for whoever loads the driver by a path of his own
FOLDER/bin/vcuda                     in containers: shows the share in images that know nothing of us
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Mapping
from pathlib import Path

import vcuda
from vcuda.driver import exports

LIB = Path(vcuda.__file__).parent / "lib"
SHIMS_FOLDER = LIB / "shim"
CUDA, NVML = "libcuda.so.1", "libnvidia-ml.so.1"
# Shim -> the alias of the real library that the shim's DT_NEEDED names.
SHIMS = {CUDA: "libcuda-driver.so.1", NVML: "libnvidia-ml-driver.so.1"}
# Where containers' dynamic linkers look without any configuration (Debian and its like; Red Hat and its like).
LOADER_FOLDERS = (f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/lib64")
PRELOAD = "libvcuda-preload.so"
MINE = "vcuda"  # shows a container its share, in any image
# Its dlsym jumps by x86-64's registers (vcuda/src/preload/jump.c); on other machines the shims are all there is.
HAS_PRELOAD = platform.machine() == "x86_64"


def preload_of(shims: Path) -> Path:
    """The preload library that was built with the shims in a folder."""
    return shims.parent / "preload" / PRELOAD


def mine_of(shims: Path) -> Path:
    """The program for containers that was built with the shims in a folder."""
    return shims.parent / "bin" / MINE


def lay_out(lib64: Path, shims: Path, reals: Mapping[str, str | Path]) -> None:
    """Fill a new folder. `reals`: where the link of each real library leads, by the shim's name. Raises OSError."""
    (lib64 / "drv").mkdir(parents=True)
    for name, alias in SHIMS.items():
        copy(shims / name, lib64 / name)
        (lib64 / name.removesuffix(".1")).symlink_to(name)
        (lib64 / "drv" / alias).symlink_to(reals[name])


def fit(lib64: Path) -> None:
    """Fit the shims to the real libraries, which lie where their links lead by now. Raises OSError."""
    for name, alias in SHIMS.items():
        exports.hide_missing(lib64 / name, lib64 / "drv" / alias)


def ours(shims: Path) -> tuple[Path, ...]:
    """All of our files that belong into a driver directory on this machine."""
    return (*(shims / name for name in SHIMS), mine_of(shims), *((preload_of(shims),) if HAS_PRELOAD else ()))


def lay_out_preload(folder: Path, shims: Path) -> Path:
    """Copy the preload library below a new folder; where it is there. Raises OSError."""
    target = folder / "preload" / PRELOAD
    target.parent.mkdir(parents=True)
    copy(preload_of(shims), target)
    return target


def copy(source: Path, target: Path) -> None:
    """A copy, never a link: a rebuild of ours may rewrite the source, and ldconfig replaces links by SONAME."""
    shutil.copyfile(source, target)
    target.chmod(0o755)
