"""Reads JSON whose form somebody else chose, such as a claim's opaque parameters: one object must not hide the others.

Parsers end at about 1,000 levels, json with RecursionError, orjson with ValueError, and then nothing of a list is read.
Nor does orjson take halves of surrogate pairs or bytes that are no UTF-8, which the API server keeps in such parameters
as they were sent (Go reads U+FFFD for both); json takes the halves, which then nobody can write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

MOST_LEVELS = 100  # of arrays and objects that are kept of a document that no parser takes; Kubernetes' own need 30
# Whatever is no bracket, strings as a whole, then brackets of one direction, or the end. It never goes back, whatever
# the text: the time grows with the length alone.
_NEXT = re.compile(rb'(?:[^\[\]{}"]++|"[^"\\]*+(?:\\.[^"\\]*+)*+"?)*+([\[{]++|[\]}]++|\Z)', re.DOTALL)
# Up to an escaped half of a surrogate pair without its other half, or the end. It never goes back either.
_HALF = re.compile(
    rb"((?:[^\\]++|\\(?:[^u]|u(?![dD][89a-fA-F])|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))*+)"
    rb"(?:(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\Z)",
    re.DOTALL,
)


def loads(data: bytes, parse: Callable[[bytes], Any]) -> Any:
    """What `parse` reads; in a document too deep for it null stands for what lies deeper than MOST_LEVELS.

    U+FFFD stands for what is no text. Raises what `parse` raises of any other document.
    """
    try:
        return parse(as_text(data) if parse is json.loads else data)
    except (ValueError, RecursionError):
        mended = cut(as_text(data))
        if mended is data:
            raise
    return parse(mended)


def as_text(data: bytes) -> bytes:
    """The document with U+FFFD for bytes that are no UTF-8 and halves of pairs; the same object if all is text."""
    try:
        data.decode()
    except UnicodeDecodeError:
        data = data.decode(errors="replace").encode()
    if b"\\ud" not in data and b"\\uD" not in data:
        return data
    text = _HALF.sub(lambda found: found[1] + (b"\\ufffd" if found[2] else b""), data)
    return data if text == data else text


def cut(data: bytes, levels: int = MOST_LEVELS) -> bytes:
    """Valid JSON with null for each array and object below `levels` others; the same object if there are none."""
    kept, begin, depth = [], 0, 0
    for found in _NEXT.finditer(data):
        many = len(found[1])
        if found[1][:1] in b"[{":
            if depth <= levels < depth + many:
                kept += [data[begin : found.start(1) + levels - depth], b"null"]
            depth += many
        else:
            if depth - many <= levels < depth:
                begin = found.start(1) + depth - levels
            depth -= many
    return b"".join([*kept, data[begin:]]) if kept else data
