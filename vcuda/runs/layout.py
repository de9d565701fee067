"""The private folder of a run: our shims as regular files, the real driver behind them, the region beside.

FOLDER/lib64/libcuda.so.1         copy of our shim; libcuda.so links to it
FOLDER/lib64/drv/libcuda-driver.so.1   link to the real driver, what the shim loads ($ORIGIN/drv)
FOLDER/vcuda                      the region: what the shim finds at $ORIGIN/../vcuda
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import vcuda
from vcuda.runs.driver import Driver
from vcuda.runs.errors import RunError

SHIMS = Path(vcuda.__file__).parent / "lib" / "shim"
_SHIM_NAMES = ("libcuda.so.1", "libnvidia-ml.so.1")


def allows_programs(folder: Path) -> bool:
    """Whether code may be mapped from files there (/dev/shm and /tmp are mounted noexec on hardened machines)."""
    try:
        return not os.statvfs(folder).f_flag & os.ST_NOEXEC
    except OSError:
        return False


def other_folder(ledger: Path, elsewhere: Sequence[Path]) -> Path | None:
    """None if libraries can be loaded from the ledger, else a new folder in the first of `elsewhere` that allows it.

    Raises RunError if none does.
    """
    if allows_programs(ledger):
        return None
    for parent in elsewhere:
        if allows_programs(parent):
            with contextlib.suppress(OSError):
                return Path(tempfile.mkdtemp(prefix="vcuda-run-", dir=parent))
    tried = ", ".join(str(path) for path in (ledger, *elsewhere))
    raise RunError(
        f"no folder allows libraries to be loaded (noexec or not writable: {tried}); set TMPDIR to one that does"
    )


def lay_out(folder: Path, region: Path, driver: Driver, shims: Path = SHIMS) -> Path:
    """Fill the folder; return what goes in front of LD_LIBRARY_PATH. Raises RunError."""
    libraries = folder / "lib64"
    try:
        folder.chmod(0o755)
        (libraries / "drv").mkdir(parents=True)
        for name in _SHIM_NAMES:
            shutil.copyfile(shims / name, libraries / name)
            (libraries / name).chmod(0o755)
            (libraries / name.removesuffix(".1")).symlink_to(name)
        (libraries / "drv" / "libcuda-driver.so.1").symlink_to(driver.cuda)
        (libraries / "drv" / "libnvidia-ml-driver.so.1").symlink_to(driver.nvml)
        if region.parent != folder:
            (folder / region.name).symlink_to(region)
    except FileNotFoundError as error:
        raise RunError(
            f"{error.filename} is missing; `python -m vcuda._build` or a new installation makes it"
        ) from error
    except OSError as error:
        raise RunError(f"the libraries of the run can't be laid out in {folder}: {error}") from error
    return libraries
