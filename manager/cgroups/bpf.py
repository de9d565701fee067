"""The device programs of a control group (v2): making one that also allows a device, by bpf(2).

A group's programs must all say yes, so none can be added that allows more: each is replaced by itself with a few
instructions in front. (A tail call into the old one would need a map that is emptied when the daemon ends; the
container would lose all its devices then.) Sources: linux/bpf.h (commands, attributes, instructions), kernel
documentation "cgroup-v2, Device controller". No library that is kept and small speaks bpf(2) from Python; what is
needed are five commands and seven instructions for each device.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

Number = tuple[int, int]  # major and minor of a character device

_SYSCALL = {"x86_64": 321, "aarch64": 280}
_PROG_LOAD, _PROG_ATTACH, _PROG_FD_BY_ID, _INFO_BY_FD, _PROG_QUERY = 5, 8, 13, 15, 16
_PROG_CGROUP_DEVICE, _ATTACH_CGROUP_DEVICE = 15, 6
_ALLOW_MULTI, _REPLACE = 2, 4
_MOST_PROGRAMS = 64  # BPF_CGROUP_MAX_PROGS
_CALL, _CONSTANT = 0x85, 0x18  # a helper's or a function's; 64 bits, of a map if a source is given
_CHARACTER, _MKNOD = 2, 1  # BPF_DEVCG_DEV_CHAR, BPF_DEVCG_ACC_MKNOD
_MOST_BYTES = 8 * 4096
_INFO = struct.Struct("<II8sIIQQ")  # the first fields of struct bpf_prog_info
_libc = ctypes.CDLL(None, use_errno=True)


def _bpf(command: int, attributes: bytes) -> tuple[int, bytes]:
    """Returns the result and the attributes as the kernel left them. Raises OSError."""
    number = _SYSCALL.get(os.uname().machine)
    if number is None:
        raise OSError(f"bpf(2) has no known number on {os.uname().machine}")
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    result = _libc.syscall(number, command, buffer, len(attributes))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result, buffer.raw


def _instruction(code: int, target: int = 0, source: int = 0, offset: int = 0, value: int = 0) -> bytes:
    return struct.pack("<BBhi", code, target | source << 4, offset, value)


def _load(register: int, offset: int) -> bytes:
    return _instruction(0x61, register, 1, offset)  # a word of the context, which register 1 points to


def _skip_unless(register: int, value: int, instructions: int) -> bytes:
    return _instruction(0x55, register, offset=instructions, value=value)


def answer(value: int) -> bytes:
    """A program that returns `value`: 1 allows the access, 0 refuses it."""
    return _instruction(0xB7, 0, value=value) + _instruction(0x95)


def allowing(numbers: Iterable[Number]) -> bytes:
    """Yes to reading and writing these devices; then goes on to what follows, with register 1 as it was.

    The context is struct bpf_cgroup_dev_ctx: kind and access in one word, major, minor.
    """
    code = (
        _load(2, 0) + _load(3, 4) + _load(4, 8)
        + _instruction(0x57, 2, value=0xFFFF | _MKNOD << 16)  # and: the kind, and whether a node is to be made
    )  # fmt: skip
    for major, minor in numbers:
        code += _skip_unless(2, _CHARACTER, 4) + _skip_unless(3, major, 3) + _skip_unless(4, minor, 2) + answer(1)
    return code


def _code(program: int) -> bytes:
    """The instructions of a loaded program, as they can be loaded again. Raises OSError."""
    instructions = ctypes.create_string_buffer(_MOST_BYTES)
    info = ctypes.create_string_buffer(_INFO.pack(0, 0, b"", 0, _MOST_BYTES, 0, ctypes.addressof(instructions)))
    _bpf(_INFO_BY_FD, struct.pack("<IIQ", program, _INFO.size, ctypes.addressof(info)))
    *_, size, _, shown = _INFO.unpack(info.raw[: _INFO.size])
    if not shown or size > _MOST_BYTES:
        raise OSError("the kernel does not show the group's device program")
    code = instructions.raw[:size]
    for place in range(0, size, 8):
        if code[place] == _CALL or (code[place] == _CONSTANT and code[place + 1] >> 4):
            raise OSError("the group's device program is no plain list of devices: it calls functions or reads maps")
    return code


def load(code: bytes) -> int:
    """A descriptor of the loaded program. Raises OSError."""
    instructions = ctypes.create_string_buffer(code, len(code))
    license_ = ctypes.create_string_buffer(b"Apache-2.0")
    attributes = struct.pack(
        "<IIQQIIQII16sII",
        _PROG_CGROUP_DEVICE, len(code) // 8, ctypes.addressof(instructions), ctypes.addressof(license_),
        0, 0, 0, 0, 0, b"vcuda_devices", 0, _ATTACH_CGROUP_DEVICE,
    )  # fmt: skip
    return _bpf(_PROG_LOAD, attributes)[0]


def attach(group: int, program: int, replaced: int | None = None) -> None:
    """Let `program` decide in the group behind the descriptor, too, or instead of `replaced`. Raises OSError."""
    flags = _ALLOW_MULTI if replaced is None else _ALLOW_MULTI | _REPLACE
    _bpf(_PROG_ATTACH, struct.pack("<IIIII", group, program, _ATTACH_CGROUP_DEVICE, flags, replaced or 0))


def attached(group: int) -> tuple[list[int], bool]:
    """IDs of the programs attached to this very group, and whether one can be replaced among several.

    Raises OSError.
    """
    ids = (ctypes.c_uint32 * _MOST_PROGRAMS)()
    asked = struct.pack("<IIIIQII", group, _ATTACH_CGROUP_DEVICE, 0, 0, ctypes.addressof(ids), _MOST_PROGRAMS, 0)
    _, told = _bpf(_PROG_QUERY, asked)
    *_, flags, _, count, _ = struct.unpack("<IIIIQII", told)
    return list(ids[:count]), bool(flags & _ALLOW_MULTI)


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def allow(group: Path, numbers: Collection[Number]) -> None:
    """Let the group's processes read and write these devices, whatever its programs say; groups above still count.

    Each program stays in force for every other device. Raises OSError, with words where the kernel has none.
    """
    with _closing(os.open(group, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as folder:
        programs, several = attached(folder)
        if not programs:
            raise OSError("the group itself forbids nothing; a group above it does")
        if not several:
            raise OSError("its device program can't be replaced (it was attached without BPF_F_ALLOW_MULTI)")
        for program in programs:
            with (
                _closing(_bpf(_PROG_FD_BY_ID, struct.pack("<III", program, 0, 0))[0]) as old,
                _closing(load(allowing(numbers) + _code(old))) as new,
            ):
                attach(folder, new, old)
