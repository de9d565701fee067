"""Where a region's files live: a small tmpfs per container, or a plain directory.

The tenant may grow its `usage` file; on a tmpfs of fixed size that harms nobody, on a plain directory it can fill the
disk.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from manager.errors import UnusableSettings

# limits (16 KiB) and usage (384 KiB) with room for a later minor version of either.
TMPFS_BYTES = 640 * 1024
_FILES_BYTES, _FOLDER_BYTES = 400 * 1024, 4096
_MNT_DETACH = 2
_MS_NOSUID_NODEV_NOEXEC = 2 | 4 | 8

_libc = ctypes.CDLL(None, use_errno=True)


def _mount_tmpfs(path: Path) -> None:
    options = f"size={TMPFS_BYTES},nr_inodes=16,mode=0755".encode()
    if _libc.mount(b"vcuda", os.fsencode(path), b"tmpfs", _MS_NOSUID_NODEV_NOEXEC, options) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))


def _unmount(path: Path) -> None:
    if _libc.umount2(os.fsencode(path), _MNT_DETACH) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))


@dataclass(frozen=True)
class Storage:
    """How region directories are made. `why` says what decided it, for the log."""

    tmpfs: bool
    why: str

    @property
    def needed_bytes(self) -> int:
        """What one more region takes of the disk below it."""
        return _FOLDER_BYTES if self.tmpfs else _FILES_BYTES

    def make(self, directory: Path) -> None:
        """Make an empty directory; one that is left over goes first. Raises OSError."""
        self.remove(directory)
        directory.mkdir(parents=True)
        if self.tmpfs:
            _mount_tmpfs(directory)

    @staticmethod
    def remove(directory: Path) -> None:
        """Remove a directory of either sort; processes that still map its files keep them. Raises OSError."""
        while os.path.ismount(directory):
            _unmount(directory)
        if directory.exists():
            shutil.rmtree(directory)


def choose(base: Path, wanted: str) -> Storage:
    """Decide for `--usage-storage` and check that `base` is writable. Raises UnusableSettings."""
    probe = base / ".probe"
    try:
        Storage(False, "").make(probe)
        probe.rmdir()
    except OSError as error:
        raise UnusableSettings(
            f"cannot write to {base} ({error.strerror}); make it writable or point --virtual-manager-path elsewhere"
        ) from None
    if wanted == "directory":
        return Storage(False, "--usage-storage=directory")
    try:
        Storage(True, "").make(probe)
        Storage.remove(probe)
    except OSError as error:
        if wanted == "tmpfs":
            raise UnusableSettings(
                f"cannot mount a tmpfs below {base} ({error.strerror}); run as root, or use --usage-storage=directory"
            ) from None
        return Storage(False, f"mounting is not permitted ({error.strerror})")
    if wanted == "auto" and not reaches_host(base, Path("/proc/self/mountinfo").read_text()):
        return Storage(False, f"a mount below {base} would not reach the host; use mountPropagation: Bidirectional")
    return Storage(True, "mounting is permitted")


def reaches_host(base: Path, mountinfo: str) -> bool:
    """Whether the container runtime would see a mount made below `base`.

    In a container only shared mounts propagate; on the host itself every mount does. A root on an overlay is a
    container's. Fields of mountinfo: proc(5).
    """
    found = ""
    shared = False
    overlay_root = False
    for line in mountinfo.splitlines():
        fields = line.split(" ")
        point, options = fields[4], fields[6 : fields.index("-")]
        if point == "/":
            overlay_root = fields[fields.index("-") + 1] == "overlay"
        inside = point == "/" or str(base) == point or str(base).startswith(f"{point}/")
        if inside and len(point) >= len(found):
            found, shared = point, any(option.startswith("shared:") for option in options)
    return shared or not overlay_root
