"""How this process' memory is kept: glibc's choices suit programs that never give any back."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # mallopt(3)


def keep_few_heaps() -> None:
    """Two; else there are up to eight per core, one for every thread that ever parsed something large."""
    _set(_M_ARENA_MAX, 2)


def give_back_what_was_large() -> None:
    """At once, all from 256 KiB on. Else the first 8 MiB that are freed make glibc keep all that is up to as large."""
    _set(_M_MMAP_THRESHOLD, 256 * 1024)
    _set(_M_TRIM_THRESHOLD, 1024 * 1024)


def _set(option: int, value: int) -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(option, value)
