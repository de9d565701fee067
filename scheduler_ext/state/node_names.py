"""Names of nodes as rows of the cluster: the C core reads them from a request; strings are made when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt
import orjson

from vcuda._native import ffi, lib

_LEAST_BYTES = 3  # of a name in a JSON array: two quotes and a comma


class OfferedNames(Sequence[str]):
    """The names of a request. `rows`: their rows, -1 for unknown ones, as of `version` of the names of the cluster."""

    def __init__(self, rows: npt.NDArray[np.int64], version: int, text: memoryview) -> None:
        self.rows, self.version = rows, version
        self._text = text  # of the request, which is kept as long: thousands of names are not copied
        self._names: list[str] | None = None

    @property
    def known(self) -> bool:
        """Whether all are rows of the cluster."""
        return bool((self.rows >= 0).all())

    def _made(self) -> list[str]:
        if self._names is None:
            self._names = orjson.loads(self._text)
        return self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._made())

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, position: int) -> str: ...
    @overload
    def __getitem__(self, position: slice) -> list[str]: ...
    def __getitem__(self, position: int | slice) -> str | list[str]:
        return self._made()[position]


class NodeNames:
    """Name → row. Not locked. `version` grows whenever a row gets another name or none."""

    def __init__(self) -> None:
        self.version = 0
        self._rows = np.empty(0, np.int64)  # kept: to get fresh pages for each request costs more than to fill them
        self._at, self._place = ffi.NULL, ffi.new("size_t[2]")  # of those rows; of the names in a request
        self._names = ffi.gc(lib.vc_names_new(), lib.vc_names_free)
        if self._names == ffi.NULL:
            raise MemoryError("no memory for the names of nodes")

    def put(self, name: str, row: int) -> None:
        text = name.encode(errors="surrogatepass")
        if lib.vc_names_put(self._names, text, len(text), row):
            raise MemoryError("no memory for the names of nodes")
        self.version += 1

    def drop(self, name: str) -> None:
        text = name.encode(errors="surrogatepass")
        lib.vc_names_drop(self._names, text, len(text))
        self.version += 1

    def places(self, body: bytes) -> tuple[OfferedNames, int, int] | None:
        """A request's NodeNames, and where they begin and end; None where the JSON has an unusual form."""
        if len(self._rows) <= len(body) // _LEAST_BYTES:
            self._rows = np.empty(len(body), np.int64)
            self._at = ffi.from_buffer("int64_t[]", self._rows)
        place = self._place
        count = lib.vc_names_offered(
            self._names, ffi.from_buffer(body), len(body), self._at, place, place + 1
        )  # fmt: skip
        if count < 0:
            return None
        start, end = place
        return OfferedNames(self._rows[:count].copy(), self.version, memoryview(body)[start:end]), start, end

    def offered(self, body: bytes) -> tuple[bytes, OfferedNames] | None:
        """The body with null in place of its NodeNames, and these; None as above."""
        found = self.places(body)
        if found is None:
            return None
        names, start, end = found
        return b"%bnull%b" % (body[:start], body[end:]), names
