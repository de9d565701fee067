"""How much memory a body would take as Python's objects, which is up to fifty times its bytes, known before it is read.

Who may send a body may have it made for that: of 8 MiB of `{"":[]}` come 313 MiB of objects.
"""

from __future__ import annotations

from vcuda._native import ffi, lib

# That is always taken: a pod and its last version of the largest size that etcd takes (1.5 MiB each) have up to 84 MiB.
MOST = 96 * 2**20
_MIB = 2**20
_MOST_OF_A_BYTE = 1024  # no byte of a text weighs more


def too_heavy(body: bytes, most: int = MOST) -> str | None:
    """What is said of a body whose objects would take more than `most` bytes; None for all others."""
    if len(body) * _MOST_OF_A_BYTE <= most:
        return None
    weight = lib.vc_json_weight(ffi.from_buffer(body), len(body))
    if weight <= most:
        return None
    sizes = f"{-(-weight // _MIB)} MiB; at most {most // _MIB} are read"
    return f"the body's {len(body)} bytes would become objects of up to {sizes}"
