"""The arbiter: one native thread that shares out the GPU time of the cards of all regions given to it.

It groups containers by card UUID, grants leases at millisecond scale, lends idle time up to each container's limit and
takes it back when its owner wants it. Without a living arbiter containers keep to their guaranteed shares.
Further threads only listen to containers at rest.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from vcuda._native import ffi, lib
from vcuda.region import LIMITS_NAME, USAGE_NAME, RegionError

_ERROR_BYTES = 512


@dataclass(frozen=True)
class ArbiterReport:
    """What the arbiter has done so far. `decisions` counts looks at one card, `leases` changes of its holder."""

    decisions: int
    leases: int
    cpu_time_ns: int
    regions: int


class Arbiter:
    """A running arbiter; close it, or use it as a context manager. Any thread may call it.

    At most one arbiter may have a region at a time: it alone writes the grants in `limits`.
    """

    def __init__(self) -> None:
        """Start the thread. Raises RegionError if the machine can't."""
        error = ffi.new("char[]", _ERROR_BYTES)
        self._lock = threading.Lock()
        self._handle: Any = lib.vc_arbiter_start(error, _ERROR_BYTES)
        if self._handle == ffi.NULL:
            raise RegionError(ffi.string(error).decode(errors="replace"))

    def add(self, name: str, directory: Path | str, *, usage_directory: Path | str | None = None) -> None:
        """Take on the region in `directory` under a name of the caller's choice.

        Raises RegionError if it can't be opened, the name is taken, or the arbiter is closed. Whole cards are left
        alone.
        """
        limits = os.fsencode(Path(directory) / LIMITS_NAME)
        usage = os.fsencode(Path(usage_directory if usage_directory is not None else directory) / USAGE_NAME)
        error = ffi.new("char[]", _ERROR_BYTES)
        with self._lock:
            if lib.vc_arbiter_add(self._open(), name.encode(), limits, usage, error, _ERROR_BYTES) != 0:
                raise RegionError(ffi.string(error).decode(errors="replace"))

    def remove(self, name: str) -> None:
        """Let go of a region; its container keeps the guaranteed share. Nothing happens if there is none of that name.

        Raises RegionError if the arbiter is closed.
        """
        with self._lock:
            lib.vc_arbiter_remove(self._open(), name.encode())

    def report(self) -> ArbiterReport:
        """What it has done and what it cost. Raises RegionError if the arbiter is closed."""
        report = ffi.new("struct vc_arbiter_report *")
        with self._lock:
            lib.vc_arbiter_report(self._open(), report)
        return ArbiterReport(report.decisions, report.leases, report.thread_cpu_ns, report.regions)

    def close(self) -> None:
        """End the thread and let go of all regions; a second call does nothing."""
        with self._lock:
            if self._handle is not None:
                lib.vc_arbiter_stop(self._handle)
                self._handle = None

    def _open(self) -> Any:
        if self._handle is None:
            raise RegionError("the arbiter is closed; start another one")
        return self._handle

    def __enter__(self) -> Arbiter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
