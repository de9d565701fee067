"""What a library exports, read from its file; and a copy of a shim that exports no more than the driver below it.

Applications look names up to learn what a driver can do (numba takes `cuCtxSynchronize_v2` where there is one), and the
shims have every name that any driver has. A symbol of value 0 is none to the dynamic linker; the shims' own use of it
needs none (-Bsymbolic-functions).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

_DYNSYM = 11  # SHT_DYNSYM (elf.h)
_SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
_SYMBOL = struct.Struct("<IBBHQQ")  # Elf64_Sym
_VALUE = 8  # where st_value lies in it


def _symbols(data: bytes | mmap.mmap) -> Iterator[tuple[str, int]]:
    """Names that are defined, and where in the file their symbols lie.

    Raises ValueError for what is no ELF file of 64 bits.
    """
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("no ELF file of 64 bits")
    try:
        (table,) = struct.unpack_from("<Q", data, 40)
        _, count = struct.unpack_from("<HH", data, 58)
        sections = [_SECTION.unpack_from(data, table + index * _SECTION.size) for index in range(count)]
        for section in sections:
            if section[1] != _DYNSYM:
                continue
            names = sections[section[6]][4]
            for place in range(section[4], section[4] + section[5], _SYMBOL.size):
                name, _, _, where, value, _ = _SYMBOL.unpack_from(data, place)
                if where and value:
                    start = names + name
                    yield data[start : data.find(b"\0", start)].decode(), place
    except (struct.error, IndexError, OverflowError, UnicodeDecodeError) as error:
        raise ValueError(f"no usable table of dynamic symbols: {error}") from error


def of(library: Path) -> frozenset[str]:
    """The names that a library defines. Raises OSError, ValueError."""
    if library.stat().st_size == 0:
        raise ValueError("empty")
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return frozenset(name for name, _ in _symbols(data))


def hide_missing(shim: Path, real: Path) -> None:
    """Take away from a copy of a shim what the library below it lacks; a library that can't be read takes nothing away.

    Raises OSError.
    """
    try:
        known = of(real)
        data = bytearray(shim.read_bytes())
        for name, place in list(_symbols(bytes(data))):
            if name not in known:
                data[place + _VALUE : place + _VALUE + 8] = bytes(8)
    except ValueError:
        return
    if known:
        shim.write_bytes(data)
