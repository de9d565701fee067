"""HPACK (RFC 7541): heads of HTTP/2 requests are read, and of answers the plainest form is written.

Ours: the one library in Python takes 0.1 ms for a head, a third of what a scheduled pod may cost.
"""

from __future__ import annotations

import functools

Field = tuple[bytes, bytes]

_NAMES = (
    ":authority", ":method GET", ":method POST", ":path /", ":path /index.html", ":scheme http", ":scheme https",
    ":status 200", ":status 204", ":status 206", ":status 304", ":status 400", ":status 404", ":status 500",
    "accept-charset", "accept-encoding gzip, deflate", "accept-language", "accept-ranges", "accept",
    "access-control-allow-origin", "age", "allow", "authorization", "cache-control", "content-disposition",
    "content-encoding", "content-language", "content-length", "content-location", "content-range", "content-type",
    "cookie", "date", "etag", "expect", "expires", "from", "host", "if-match", "if-modified-since", "if-none-match",
    "if-range", "if-unmodified-since", "last-modified", "link", "location", "max-forwards", "proxy-authenticate",
    "proxy-authorization", "range", "referer", "refresh", "retry-after", "server", "set-cookie",
    "strict-transport-security", "transfer-encoding", "user-agent", "vary", "via", "www-authenticate",
)  # fmt: skip
_STATIC: list[Field] = [(name.encode(), value.encode()) for name, _, value in (one.partition(" ") for one in _NAMES)]
_AT = {name: number for number, (name, _) in reversed(list(enumerate(_STATIC, 1)))}
_INDEXED = {field: number for number, field in enumerate(_STATIC, 1)}
# Bits of each byte's code, and of the end's, which is none of a text; the codes follow from them (appendix B).
_LENGTHS = (
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28,
    28, 28, 28, 28, 6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6, 5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6,
    12, 10, 13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6, 15, 5,
    6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5, 6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15, 11, 14, 13, 28, 20, 22, 20, 20, 22,
    22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23, 24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24, 22,
    21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23, 21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23,
    22, 22, 23, 26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25, 19, 21, 26, 27, 27, 26, 27, 24, 21,
    21, 26, 26, 28, 27, 27, 27, 20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23, 26, 27, 26, 26, 27,
    27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26, 30,
)  # fmt: skip
_END = 256
_TABLE_BYTES = 4096  # of fields that the peer may refer to: the protocol's default, which we leave as it is
_FIELD_BYTES = 32  # that a field counts beside its text
_LONGEST_REMEMBERED = 128  # bytes of a packed text that is kept with its meaning
_MOST_SIZES = 2  # changes of the table's size in a head: the least that it had, and what it has (RFC 7541, 4.2)
_INTEGER_BITS = 28  # more is no length of anything here


class BadHead(ValueError):
    """This is no HPACK, or more than is read."""


def _tree() -> tuple[list[list[int]], set[int]]:
    """Numbers of nodes: of each its two children, a leaf as -1 - its byte; and the nodes where a text may end."""
    nodes = [[0, 0]]
    code = before = 0
    ends = {0}
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(_LENGTHS)):
        code <<= length - before
        before, node = length, 0
        for bit in range(length - 1, 0, -1):
            branch = code >> bit & 1
            if nodes[node][branch] == 0:
                nodes[node][branch] = len(nodes)
                nodes.append([0, 0])
            node = nodes[node][branch]
            if symbol == _END and length - bit <= 7:  # what fills the last byte is the beginning of this code
                ends.add(node)
        nodes[node][code & 1] = -1 - symbol
        code += 1
    return nodes, ends


@functools.cache
def _steps() -> tuple[list[list[tuple[int, bytes]]], set[int]]:
    """From each node by each four bits: the next node, -1 if there is none, and the byte that they end."""
    nodes, ends = _tree()
    steps = []
    for start in range(len(nodes)):
        row = []
        for nibble in range(16):
            node, found = start, b""
            for bit in (8, 4, 2, 1):
                if node < 0:
                    break
                node = nodes[node][1 if nibble & bit else 0]
                if node < 0:
                    symbol = -1 - node
                    node, found = (-1, b"") if symbol == _END else (0, bytes([symbol]))
            row.append((node, found))
        steps.append(row)
    return steps, ends


def _unpacked(text: bytes) -> bytes:
    """A text in Huffman's code."""
    return _remembered(text) if len(text) <= _LONGEST_REMEMBERED else _read(text)


def _read(text: bytes) -> bytes:
    steps, ends = _steps()
    node, found = 0, []
    for byte in text:
        for nibble in (byte >> 4, byte & 15):
            node, symbol = steps[node][nibble]
            if node < 0:
                raise BadHead("the end is within a text")
            if symbol:
                found.append(symbol)
    if node not in ends:
        raise BadHead("a text ends within a byte's code")
    return b"".join(found)


_remembered = functools.lru_cache(maxsize=512)(_read)


class Decoder:
    """Reads the heads of one connection, in their order. Fields of one head may have `most` bytes, as they count."""

    def __init__(self, most: int) -> None:
        self._most_list = most
        self._table: list[Field] = []  # the newest last
        self._size, self._most = 0, _TABLE_BYTES
        self.version = 0  # changes with what later heads mean

    def decode(self, block: bytes) -> list[Field]:
        """The fields. Raises BadHead, after which nothing can be read of the connection."""
        found: list[Field] = []
        at, end, size, sizes = 0, len(block), 0, 0
        while at < end:
            first = block[at]
            if first >= 0x80:
                number, at = (first & 0x7F, at + 1) if first != 0xFF else self._integer(block, at, 0x7F)
                field = self._field(number)
            elif first >= 0x40:
                field, at = self._literal(block, at, 0x3F)
                self._add(field)
            elif first >= 0x20:
                sizes += 1
                if found or sizes > _MOST_SIZES:
                    raise BadHead("the table's size changes within a head, or too often")
                most, at = self._integer(block, at, 0x1F)
                if most > _TABLE_BYTES:
                    raise BadHead("the table becomes too large")
                self._most = most
                self._shrink()
                self.version += 1
                continue
            else:
                field, at = self._literal(block, at, 0x0F)
            size += len(field[0]) + len(field[1]) + _FIELD_BYTES
            if size > self._most_list:
                raise BadHead(f"the head has more than {self._most_list} bytes")
            found.append(field)
        return found

    def _field(self, number: int) -> Field:
        if 1 <= number <= len(_STATIC):
            return _STATIC[number - 1]
        at = number - len(_STATIC)
        if not 1 <= at <= len(self._table):
            raise BadHead(f"there is no field {number}")
        return self._table[-at]

    def _literal(self, block: bytes, at: int, mask: int) -> tuple[Field, int]:
        number, at = self._integer(block, at, mask)
        if number:
            name = self._field(number)[0]
        else:
            name, at = self._text(block, at)
        value, at = self._text(block, at)
        return (name, value), at

    def _add(self, field: Field) -> None:
        self._table.append(field)
        self._size += len(field[0]) + len(field[1]) + _FIELD_BYTES
        self._shrink()
        self.version += 1

    def _shrink(self) -> None:
        gone = 0
        while self._size > self._most:
            name, value = self._table[gone]
            self._size -= len(name) + len(value) + _FIELD_BYTES
            gone += 1
        del self._table[:gone]

    @staticmethod
    def _integer(block: bytes, at: int, mask: int) -> tuple[int, int]:
        try:
            value = block[at] & mask
            at += 1
            if value < mask:
                return value, at
            shift = 0
            while True:
                byte = block[at]
                at += 1
                value += (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    return value, at
                if shift >= _INTEGER_BITS:
                    raise BadHead("a number is too large")
        except IndexError as error:
            raise BadHead("a head ends within a number") from error

    def _text(self, block: bytes, at: int) -> tuple[bytes, int]:
        packed = at < len(block) and block[at] >= 0x80
        length, at = self._integer(block, at, 0x7F)
        text = block[at : at + length]
        if len(text) < length:
            raise BadHead("a head ends within a text")
        return _unpacked(text) if packed else text, at + length


def _written(value: int, mask: int, first: int) -> bytes:
    if value < mask:
        return bytes([first | value])
    parts, value = [first | mask], value - mask
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def encoded(name: bytes, value: bytes) -> bytes:
    """A field that no later head refers to; its name in small letters."""
    number = _INDEXED.get((name, value))
    if number is not None:
        return _written(number, 0x7F, 0x80)
    named = _AT.get(name)
    begins = b"\0" + _written(len(name), 0x7F, 0) + name if named is None else _written(named, 0x0F, 0)
    return begins + _written(len(value), 0x7F, 0) + value
