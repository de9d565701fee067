"""The dynamic linker's cache of a host, /etc/ld.so.cache: which file each library name leads to there.

Format (glibc, sysdeps/generic/dl-cache.h): 48 bytes of header, then one entry of 24 bytes per library, whose key and
value are offsets of strings from the header's start. An older table may stand before it; its own entries are the same
libraries.
"""

from __future__ import annotations

import platform
import struct
from pathlib import Path

_MAGIC = b"glibc-ld.so.cache1.1"
_HEADER = struct.Struct("<20sIIB3xI12x")
_ENTRY = struct.Struct("<iIIIQ")
# Flags: the lowest byte says libc6, the next one the architecture.
_LIBC6 = 3
_ARCHITECTURES = {"x86_64": 0x0300, "aarch64": 0x0A00}
_MOST_ENTRIES = 1_000_000


class LdCacheError(Exception):
    """The file is no cache of the known format; the message says what is wrong."""


def parse(data: bytes, machine: str | None = None) -> dict[str, tuple[str, ...]]:
    """Paths by library name, in the cache's own order, of the 64-bit libraries for `machine` (this one's).

    Raises LdCacheError.
    """
    start = data.find(_MAGIC)
    if start < 0:
        raise LdCacheError(f"it does not hold {_MAGIC.decode()!r}")
    data = data[start:]
    try:
        _, count, _, _, _ = _HEADER.unpack_from(data)
    except struct.error:
        raise LdCacheError("its header is cut off") from None
    if count > _MOST_ENTRIES or _HEADER.size + count * _ENTRY.size > len(data):
        raise LdCacheError(f"it says {count} entries and has {len(data)} bytes")
    wanted = _ARCHITECTURES.get(machine or platform.machine(), 0) | _LIBC6
    found: dict[str, list[str]] = {}
    for index in range(count):
        flags, key, value, _, _ = _ENTRY.unpack_from(data, _HEADER.size + index * _ENTRY.size)
        if flags == wanted:
            found.setdefault(_text(data, key), []).append(_text(data, value))
    return {name: tuple(paths) for name, paths in found.items()}


def _text(data: bytes, offset: int) -> str:
    end = data.find(b"\0", offset)
    if offset >= len(data) or end < 0:
        raise LdCacheError(f"a name at {offset} is outside of it")
    return data[offset:end].decode(errors="surrogateescape")


def read(path: Path) -> dict[str, tuple[str, ...]]:
    """Of a file; empty if there is none. Raises LdCacheError."""
    try:
        return parse(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise LdCacheError(f"it can't be read: {error.strerror}") from error
