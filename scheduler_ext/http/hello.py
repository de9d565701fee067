"""How much of a ClientHello is here, in however many records it comes (RFC 8446, 5.1)."""

from __future__ import annotations

_RECORD, _MESSAGE = 5, 4  # bytes of the heads of both
_HANDSHAKE, _CLIENT_HELLO = 22, 1
_MOST_IN_RECORD = 2**14
_MOST_IN_HELLO = 2**14  # its head included: what fits in one record is every client's
_MOST_RECORDS = 64  # each costs OpenSSL as much as a whole one; no library makes them smaller than 512 bytes
FIRST = _RECORD + _MESSAGE  # bytes by which most are known
MOST_BYTES = _MOST_IN_HELLO + _MOST_IN_RECORD + _MOST_RECORDS * _RECORD  # of all records together, and their heads


def lacks(data: bytes) -> int:
    """Of how many bytes from the connection's beginning on more can be said; 0: a whole one is here.

    Raises ValueError if this begins none, or none that we take.
    """
    at = there = 0  # where a record begins; bytes of the message before it
    head = b""
    wanted = _MESSAGE
    for _ in range(_MOST_RECORDS):
        if len(data) < at + _RECORD:
            return max(FIRST, at + _RECORD)
        size = int.from_bytes(data[at + 3 : at + _RECORD], "big")
        if data[at] != _HANDSHAKE or not 0 < size <= _MOST_IN_RECORD:
            raise ValueError("this is no record of a handshake")
        begin, at = at + _RECORD, at + _RECORD + size
        if len(head) < _MESSAGE:
            head += data[begin : min(at, begin + _MESSAGE - len(head))]
            if head[:1] not in (b"", bytes([_CLIENT_HELLO])):
                raise ValueError("this is no ClientHello")
            if len(head) == _MESSAGE:
                wanted = _MESSAGE + int.from_bytes(head[1:], "big")
                if wanted > _MOST_IN_HELLO:
                    raise ValueError(f"a ClientHello of {wanted} bytes")
        there += size
        if there >= wanted:
            break
    else:
        raise ValueError(f"a ClientHello in more than {_MOST_RECORDS} records")
    return 0 if len(data) >= at else at
