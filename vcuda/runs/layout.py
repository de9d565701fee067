"""The private folder of a run: our shims as regular files, the real driver behind them, the region beside.

FOLDER/lib64/libcuda.so.1         copy of our shim; libcuda.so links to it
FOLDER/lib64/drv/libcuda-driver.so.1   link to the real driver, what the shim loads ($ORIGIN/drv)
FOLDER/vcuda                      the region: what the shim finds at $ORIGIN/../vcuda

With `--injection=preload` instead of lib64:
FOLDER/preload/libvcuda-preload.so     copy of the preload library, which finds the region in the same way
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import vcuda
from vcuda.runs.driver import Driver
from vcuda.runs.errors import RunError

SHIMS = Path(vcuda.__file__).parent / "lib" / "shim"
PRELOAD = Path(vcuda.__file__).parent / "lib" / "preload" / "libvcuda-preload.so"
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
    with _told(folder):
        folder.chmod(0o755)
        (libraries / "drv").mkdir(parents=True)
        for name in _SHIM_NAMES:
            _copy(shims / name, libraries / name)
            (libraries / name.removesuffix(".1")).symlink_to(name)
        (libraries / "drv" / "libcuda-driver.so.1").symlink_to(driver.cuda)
        (libraries / "drv" / "libnvidia-ml-driver.so.1").symlink_to(driver.nvml)
        _link_region(folder, region)
    return libraries


def lay_out_preload(folder: Path, region: Path, library: Path = PRELOAD) -> Path:
    """Fill the folder; return what goes in front of LD_PRELOAD. Raises RunError."""
    target = folder / "preload" / library.name
    with _told(folder):
        folder.chmod(0o755)
        target.parent.mkdir(parents=True)
        _copy(library, target)
        _link_region(folder, region)
    return target


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    target.chmod(0o755)


def _link_region(folder: Path, region: Path) -> None:
    if region.parent != folder:
        (folder / region.name).symlink_to(region)


@contextlib.contextmanager
def _told(folder: Path) -> Iterator[None]:
    """What goes wrong inside becomes a RunError."""
    try:
        yield
    except FileNotFoundError as error:
        raise RunError(
            f"{error.filename} is missing; `python -m vcuda._build` or a new installation makes it"
        ) from error
    except OSError as error:
        raise RunError(f"the libraries of the run can't be laid out in {folder}: {error}") from error
