"""The driver directory that containers mount: our shims, the real driver behind them, and nvidia-smi.

    driver/<driver version>-<fingerprint>/lib64/        shims as regular files, other driver libraries, SONAME links
                                          lib64/drv/    the real libcuda and libnvidia-ml and their fixed aliases
                                          preload/      the preload library, and the /etc/ld.so.preload that names it
                                          bin/          nvidia-smi when the host has it, and our vcuda
                                          vcuda/limits  link to the container's: where a volume hides those, it leads
                                          nowhere, and
                                                        shims that find limits but can't read them refuse memory
    driver/current                                      link to the newest

A directory is made beside and renamed into place, and never changed afterwards: running pods map its files. Only the
real libraries stand alone in drv/, because the loader's cache indexes SONAMEs and would confuse them with the shims.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from manager.errors import Reason, Refusal
from manager.process import selinux
from manager.process.logs import Conditions
from manager.regions import regions
from vcuda.driver import companions, layout
from vcuda.driver.companions import Source
from vcuda.driver.layout import CUDA, PRELOAD, SHIMS
from vcuda.driver.root import HostRoot

LAYOUT = 6  # part of the fingerprint: raise it when the layout changes
FOLDER = "driver"
CURRENT = "current"
MANIFEST = ".complete"
CONTAINER_PATH = "/usr/local/nvidia"

LIST = "ld.so.preload"
PROGRAMS = ("nvidia-smi",)

log = logging.getLogger(__name__)


class DriverDirError(Exception):
    """No driver directory can be made; the message names the missing or unwritable thing."""


@dataclass(frozen=True)
class DriverDir:
    """A finished driver directory. `directory` is its final path, never the link."""

    directory: Path
    driver_version: str

    @property
    def lib64(self) -> Path:
        return self.directory / "lib64"

    @functools.cached_property
    def loader_files(self) -> tuple[str, ...]:
        """Files of lib64 that are also mounted where the dynamic linker looks; a finished directory keeps them."""
        names = (*SHIMS, *companions.LOADER_COMPANIONS)
        return tuple(name for name in names if (self.lib64 / name).exists())

    @property
    def preload_list(self) -> Path:
        """What containers get as /etc/ld.so.preload for --injection=preload."""
        return self.directory / "preload" / LIST

    @functools.cached_property
    def reals(self) -> tuple[tuple[str, str], ...]:
        """The shims' names and the files of the real libraries, which have these names for --injection=preload."""
        drv = self.lib64 / "drv"
        return tuple((name, str(drv / (drv / alias).readlink())) for name, alias in SHIMS.items())

    @functools.cached_property
    def programs(self) -> tuple[str, ...]:
        """What lies in bin."""
        return tuple(name for name in (*PROGRAMS, layout.MINE) if (self.directory / "bin" / name).exists())


def make(base: Path, root: HostRoot, shims: Path, loaded: str = "") -> DriverDir:
    """The driver directory below `base` for the driver below `root` and the shims in the folder `shims`.

    `loaded`: the version of the kernel's driver by NVML; libraries of it go before those of another that was installed
    since. An existing one is reused. Raises DriverDirError.
    """
    try:
        return _make(base, root, shims, loaded)
    except OSError as error:  # an upgrade of the driver takes files away while we read
        raise DriverDirError(f"cannot make the driver directory below {base / FOLDER}: {error}") from error


def _make(base: Path, root: HostRoot, shims: Path, loaded: str) -> DriverDir:
    for path in layout.ours(shims):
        if not path.is_file():
            raise DriverDirError(f"our own {path.name} is missing in {path.parent}; build it: python -m vcuda._build")
    reals = {shim: _real(root, shim, loaded) for shim in SHIMS}
    version = companions.version_of(reals[CUDA].name)
    beside = tuple(companions.of(root, version, {source.path.parent for source in reals.values()}))
    programs = tuple(path for path in map(root.find_program, PROGRAMS) if path is not None)
    sources = (*reals.values(), *beside)
    name = f"{version}-{_fingerprint(shims, sources, programs)}"
    folder = base / FOLDER
    final = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    if not (final / MANIFEST).exists():
        _build(folder, final, shims, reals, beside, programs)
    _point(folder / CURRENT, name)
    return DriverDir(final, version)


def remove_unused(base: Path, used: Collection[Path]) -> list[Path]:
    """Remove directories of earlier drivers and builds that no running container mounts; return them."""
    folder = base / FOLDER
    keep = {path.name for path in used}
    link = folder / CURRENT
    if link.is_symlink():
        keep.add(link.readlink().name)
    removed = []
    for path in sorted(folder.glob("*")) if folder.is_dir() else []:
        if not path.is_symlink() and path.is_dir() and path.name not in keep:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def _real(root: HostRoot, library: str, loaded: str) -> Source:
    path = root.find_library(library, loaded)
    if path is None:
        raise DriverDirError(
            f"no {library} below {root.path}; is the NVIDIA driver installed there, and --driver-root right?"
        )
    return Source(path, path.name)


def _fingerprint(shims: Path, sources: Collection[Source], programs: Collection[Path]) -> str:
    digest = hashlib.sha256(f"layout {LAYOUT}".encode())
    for path in layout.ours(shims):
        digest.update(path.read_bytes())
    for path, name in (
        *((source.path, source.name) for source in sources),
        *((path, path.name) for path in programs),
    ):
        digest.update(f"{name} {path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()[:12]


def _build(
    folder: Path,
    final: Path,
    shims: Path,
    reals: dict[str, Source],
    beside: Collection[Source],
    programs: Collection[Path],
) -> None:
    temporary = folder / f".new-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    lib64, drv, programs_folder = temporary / "lib64", temporary / "lib64/drv", temporary / "bin"
    layout.lay_out(lib64, shims, {shim: real.name for shim, real in reals.items()})
    for real in reals.values():
        _take(real.path, drv / real.name)
    layout.fit(lib64)
    programs_folder.mkdir()
    layout.copy(layout.mine_of(shims), programs_folder / layout.MINE)
    if layout.HAS_PRELOAD:
        preload = layout.lay_out_preload(temporary, shims)
        (preload.parent / LIST).write_text(f"{CONTAINER_PATH}/preload/{PRELOAD}\n")
    for companion in beside:
        target = lib64 / companion.path.name
        if not target.exists():
            _take(companion.path, target)
        if companion.name != companion.path.name and not (lib64 / companion.name).exists():
            (lib64 / companion.name).symlink_to(companion.path.name)
    for program in programs:
        _take(program, programs_folder / program.name)
    (temporary / "vcuda").mkdir()
    (temporary / "vcuda/limits").symlink_to(f"{regions.CONTAINER_PATH}/limits")
    (temporary / MANIFEST).touch()
    selinux.label((temporary, *temporary.rglob("*")))
    if final.exists():  # without its manifest: an earlier start was interrupted by a power cut
        shutil.rmtree(final)
    try:
        temporary.rename(final)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        if not (final / MANIFEST).exists():  # else another instance made the same one first
            raise


def _take(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or a mount of the host's
        layout.copy(source, target)


def _point(link: Path, name: str) -> None:
    if link.is_symlink() and str(link.readlink()) == name:
        return
    temporary = link.with_name(f".{link.name}-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(name)
    temporary.replace(link)


class DriverDirKeeper:
    """The current driver directory, or the reason why there is none: made in the background, never during a call."""

    def __init__(self, base: Path, root: HostRoot, shims: Path) -> None:
        self._base = base
        self._root = root
        self._shims = shims
        self._lock = threading.Lock()
        self._driver_dir: DriverDir | None = None
        self._made_for = ""
        self._problem = "it has not been made yet"
        self._conditions = Conditions(log)

    def refresh(self, driver_version: str) -> None:
        """Make the directory if the driver is another, or the directory is gone. Called from one background thread."""
        with self._lock:
            if not driver_version:
                self._problem = "there is no driver on this node"
                return
            if self._made_for == driver_version and self._usable():
                return
            try:
                self._driver_dir = make(self._base, self._root, self._shims, driver_version)
            except DriverDirError as error:
                self._problem = str(error)
                self._conditions.set("driver directory", str(error))
                return
            self._made_for = driver_version
            self._conditions.clear("driver directory", "the driver directory can be made again")
            log.info("driver %s is mirrored in %s", self._driver_dir.driver_version, self._driver_dir.directory)

    def _usable(self) -> bool:
        return self._driver_dir is not None and (self._driver_dir.directory / MANIFEST).exists()

    def current(self) -> DriverDir:
        """Raises Refusal."""
        found = self._driver_dir
        if found is None or not self._usable():
            raise Refusal(Reason.DRIVER_UNAVAILABLE, f"no driver directory can be given: {self._problem}")
        return found

    @property
    def ready(self) -> bool:
        return self._usable()

    def remove_unused(self, used: Collection[Path]) -> None:
        for path in remove_unused(self._base, used):
            log.info("removed the driver directory %s, which no container mounts", path)
