"""Reads JSON whose depth somebody else chose, such as a claim's opaque parameters: one object must not hide the others.

Parsers end at about 1,000 levels, json with RecursionError, orjson with ValueError, and then nothing of a list is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

MOST_LEVELS = 100  # of arrays and objects that are kept of a document that no parser takes; Kubernetes' own need 30
# Whatever is no bracket, strings as a whole, then brackets of one direction, or the end. It never goes back, whatever
# the text: the time grows with the length alone.
_NEXT = re.compile(rb'(?:[^\[\]{}"]++|"[^"\\]*+(?:\\.[^"\\]*+)*+"?)*+([\[{]++|[\]}]++|\Z)', re.DOTALL)


def loads(data: bytes, parse: Callable[[bytes], Any]) -> Any:
    """What `parse` reads; in a document too deep for it null stands for what lies deeper than MOST_LEVELS.

    Raises what `parse` raises of any other document.
    """
    try:
        return parse(data)
    except (ValueError, RecursionError):
        shallow = cut(data)
        if shallow is data:
            raise
    return parse(shallow)


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
