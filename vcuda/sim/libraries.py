"""The compiled simulated driver: where it is, what version it says, and its control functions through ctypes."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

from vcuda.sim.errors import SimError

BUILT = Path(__file__).resolve().parents[1] / "lib" / "sim"
NAMES = ("libcuda", "libnvidia-ml")
CUDA_VERSION = 12040  # what a 550 driver says: CUDA 12.4
NEWER_CUDA_VERSION = 13030
_FIRST_BUFFER = 64 * 1024


def version() -> str:
    """The driver version in the built libraries' names. Raises SimError when they are not built."""
    versions = [sorted(path.name.split(".so.")[1] for path in BUILT.glob(f"{name}.so.*.*")) for name in NAMES]
    if not all(versions) or versions[0] != versions[1] or len(versions[0]) != 1:
        raise SimError(
            f"{BUILT} holds no simulated driver ({versions[0]} of libcuda, {versions[1]} of libnvidia-ml); in a "
            "checkout `python -m vcuda._build` builds it"
        )
    return versions[0][0]


def newer_version() -> str:
    """The version of the newer driver's libcuda, which a checkout builds. Raises SimError where it is not."""
    found = [path.name.split(".so.")[1] for path in (BUILT / "newer").glob("libcuda.so.*.*")]
    if len(found) != 1:
        raise SimError(f"{BUILT / 'newer'} holds no newer driver; in a checkout `python -m vcuda._build` builds it")
    return found[0]


def install(folder: Path, number: str) -> None:
    """Copy the built libraries into `folder` with the links that the genuine driver's packages make.

    `number` is the version that they get: version()'s, or newer_version()'s with its libcuda.
    """
    old = version()
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        target = folder / f"{name}.so.{number}"
        newer = BUILT / "newer" / target.name
        shutil.copyfile(newer if number != old and newer.exists() else BUILT / f"{name}.so.{old}", target)
        target.chmod(0o755)
        (folder / f"{name}.so.1").symlink_to(target.name)
        (folder / f"{name}.so").symlink_to(f"{name}.so.1")


class Control:
    """simReport, simInject and simWatch of one machine, through its own copy of libcuda.

    Its own copy, because a process that is a client of the machine as well then has the library only once: POSIX record
    locks, by which clients are known to live, are a process's, not a library's.
    """

    def __init__(self, directory: Path, library: Path) -> None:
        self._directory = bytes(directory)
        try:
            self._library = ctypes.CDLL(str(library))
        except OSError as error:
            raise SimError(
                f"the machine's driver {library} can't be loaded: {error}; create the machine again"
            ) from error
        self._library.simReport.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
        self._library.simInject.argtypes = [
            ctypes.c_char_p,
            ctypes.c_char_p,
            ctypes.c_char_p,
            ctypes.c_size_t,
        ]

        self._library.simWatch.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t]

    def report(self) -> bytes:
        """The machine's JSON. Raises SimError with the driver's words."""
        size = _FIRST_BUFFER
        while True:
            buffer = ctypes.create_string_buffer(size)
            needed = int(self._library.simReport(self._directory, buffer, size))
            if needed < 0:
                raise SimError(f"the machine {self._directory.decode(errors='replace')}: {_text(buffer)}")
            if needed < size:
                return buffer.value
            size = needed + _FIRST_BUFFER  # more processes may come before the next try

    def inject(self, command: str) -> None:
        """Raises SimError with the driver's words, for instance for a card that the machine does not have."""
        buffer = ctypes.create_string_buffer(1024)
        if self._library.simInject(self._directory, command.encode(), buffer, len(buffer)) != 0:
            raise SimError(f"fault {command!r} refused: {_text(buffer)}")

    def watch(self, seconds: float) -> None:
        """Miss dead clients as they end, for so long. Raises SimError with the driver's words."""
        buffer = ctypes.create_string_buffer(1024)
        if self._library.simWatch(self._directory, int(seconds * 1e9), buffer, len(buffer)) != 0:
            raise SimError(f"the machine {self._directory.decode(errors='replace')}: {_text(buffer)}")


def _text(buffer: ctypes.Array[ctypes.c_char]) -> str:
    return buffer.value.decode(errors="replace")
