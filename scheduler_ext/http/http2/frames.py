"""Frames: their numbers (RFC 9113), how ours are written, and what breaks the protocol."""

from __future__ import annotations

import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD = struct.Struct(">BHBBI")  # of a frame: length in two parts, kind, flags, stream
HEAD_BYTES = 9
MOST_BYTES = 16384  # of a payload: the protocol's default, which we leave as it is
MOST_WINDOW = 2**31 - 1
FIRST_WINDOW = 65535  # bytes that may be sent before anything is said of it
LEAST_PART = 256  # bytes of a body in a frame that brings something

DATA, HEADERS, PRIORITY, RESET, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED, FRAME_SIZE_ERROR = 0, 1, 3, 5, 6
REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM, HTTP_1_1_REQUIRED = 7, 8, 9, 11, 13
SET_PUSH, SET_STREAMS, SET_WINDOW, SET_FRAME, SET_LIST = 2, 3, 4, 5, 6


class Broken(Exception):
    """The peer does not keep to the protocol: the connection ends with this code."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, number) + payload


def reset(number: int, code: int) -> bytes:
    return frame(RESET, 0, number, struct.pack(">I", code))


def window(more: int) -> bytes:
    """Of all streams together."""
    return frame(WINDOW, 0, 0, struct.pack(">I", more))


def settings(values: dict[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", name, value) for name, value in values.items()))


def farewell(last: int, code: int = NO_ERROR, why: str = "") -> bytes:
    """`last`: the newest stream that we have looked at."""
    return frame(GOAWAY, 0, 0, struct.pack(">II", last, code) + why.encode()[:100])


def whole_body(data: bytes, at: int, end: int, number: int, size: int) -> tuple[list[bytes], int] | None:
    """The parts of a body of `size` bytes whose frames begin at `at`, and where the last one ends.

    None unless all are here, one behind the other, plain and no crumbs.
    """
    parts: list[bytes] = []
    flags = 0
    while not flags:
        if end - at < HEAD_BYTES:
            return None
        high, low, kind, flags, other = HEAD.unpack_from(data, at)
        start = at + HEAD_BYTES
        at = start + (high << 16 | low)
        size -= at - start
        if (
            kind != DATA
            or flags > END_STREAM
            or other != number
            or at > end
            or size < 0
            or at - start > MOST_BYTES
            or (at - start < LEAST_PART and not flags)
        ):
            return None
        parts.append(data[start:at])
    return None if size else (parts, at)


def within(flags: int, data: bytes, start: int, end: int) -> tuple[int, int]:
    """Where what counts of a payload begins and ends."""
    padding = 0
    if flags & PADDED:
        if start == end:
            raise Broken(FRAME_SIZE_ERROR, "a frame is too short")
        padding, start = data[start], start + 1
    if flags & WITH_PRIORITY:
        start += 5
    if start + padding > end:
        raise Broken(PROTOCOL_ERROR, "a frame has more padding than bytes")
    return start, end - padding
