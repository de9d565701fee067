"""Which device nodes a process of a control group may open, where only trying shows it (control groups v2)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from vcuda._native import ffi, lib

_TIMEOUT_MS = 500


def closed(group: Path, nodes: Sequence[Path]) -> list[bool]:
    """For each node, whether a process in the group `group` may not read and write it; nothing is opened.

    At most 64 nodes. Raises OSError: FileNotFoundError for a group that is gone, TimeoutError for a frozen one,
    BlockingIOError (EAGAIN) where the group may hold no further process, EBUSY where its processes are in the groups
    below it.
    """
    paths = [ffi.new("char[]", os.fsencode(node)) for node in nodes]
    answer = ffi.new("uint64_t *")
    descriptor = os.open(group, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        error = lib.vc_devices_closed(descriptor, ffi.new("char *[]", paths), len(paths), _TIMEOUT_MS, answer)
    finally:
        os.close(descriptor)
    if error:
        raise OSError(error, os.strerror(error), str(group))
    return [bool(answer[0] >> index & 1) for index in range(len(paths))]
