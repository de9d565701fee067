"""The private folder of a run: our shims as regular files, the real driver behind them, the region beside.

FOLDER/lib64 or, with `--injection=preload`, FOLDER/preload: as `vcuda.driver.layout` says
FOLDER/vcuda: the region, what either finds at $ORIGIN/../vcuda
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from vcuda.driver import layout
from vcuda.driver.layout import CUDA, NVML
from vcuda.runs.driver import Driver
from vcuda.runs.errors import RunError


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


def lay_out(folder: Path, region: Path, driver: Driver, shims: Path = layout.SHIMS_FOLDER) -> Path:
    """Fill the folder; return what goes in front of LD_LIBRARY_PATH. Raises RunError."""
    libraries = folder / "lib64"
    with _told(folder):
        folder.chmod(0o755)
        layout.lay_out(libraries, shims, {CUDA: driver.cuda, NVML: driver.nvml})
        layout.fit(libraries)
        _link_region(folder, region)
    return libraries


def lay_out_preload(folder: Path, region: Path, shims: Path = layout.SHIMS_FOLDER) -> Path:
    """Fill the folder; return what goes in front of LD_PRELOAD. Raises RunError."""
    with _told(folder):
        folder.chmod(0o755)
        target = layout.lay_out_preload(folder, shims)
        _link_region(folder, region)
    return target


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
