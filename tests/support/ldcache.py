"""Files of a driver's host for tests: the linker's cache, and what passes for a library."""

from __future__ import annotations

import struct

# The head of a 64-bit ELF file for x86-64, as text: what a test writes after it tells libraries apart.
ELF = "\x7fELF\x02\x01\x01" + "\0" * 11 + ">\0"
X86_64, I386 = 0x0303, 0x0003


def cache(*entries: tuple[int, str, str], before: bytes = b"") -> bytes:
    """A cache as ldconfig writes it, by the C structures."""
    header, entry = "<17s3sIIB3xI3I", "<iIIIQ"
    size = struct.calcsize(header) + len(entries) * struct.calcsize(entry)
    table, strings = b"", b""
    for flags, name, path in entries:
        key = size + len(strings)
        strings += name.encode() + b"\0"
        value = size + len(strings)
        strings += path.encode() + b"\0"
        table += struct.pack(entry, flags, key, value, 0, 0)
    top = struct.pack(header, b"glibc-ld.so.cache", b"1.1", len(entries), len(strings), 2, 0, 0, 0, 0)
    return before + top + table + strings
