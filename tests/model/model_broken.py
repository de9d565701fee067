"""Interposers that are broken on purpose: what the reference model must notice."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from tests.support.share import LIB
from vcuda._build import gcc, native

_HEAD = '#include "region/quota.h"\n#define SELDOM(n) ({ static unsigned count; ++count % (n) == 0; })\n'

# By name: the function of the quota that is replaced, and what it does instead.
BREAKS = {
    "forgets that memory was freed": (
        "vc_quota_release",
        """
        void __real_vc_quota_release(struct vc_region *, uint32_t, uint64_t, enum vc_quota_kind);
        void __wrap_vc_quota_release(struct vc_region *r, uint32_t card, uint64_t bytes, enum vc_quota_kind kind)
        { if (!SELDOM(50)) __real_vc_quota_release(r, card, bytes, kind); }
        """,
    ),
    "gives back twice": (
        "vc_quota_release",
        """
        void __real_vc_quota_release(struct vc_region *, uint32_t, uint64_t, enum vc_quota_kind);
        void __wrap_vc_quota_release(struct vc_region *r, uint32_t card, uint64_t bytes, enum vc_quota_kind kind)
        {
            __real_vc_quota_release(r, card, bytes, kind);
            if (SELDOM(50)) __real_vc_quota_release(r, card, bytes, kind);
        }
        """,
    ),
    "does not charge": (
        "vc_quota_commit",
        """
        void __real_vc_quota_commit(struct vc_region *, uint32_t, uint64_t, enum vc_quota_kind);
        void __wrap_vc_quota_commit(struct vc_region *r, uint32_t card, uint64_t bytes, enum vc_quota_kind kind)
        { __real_vc_quota_commit(r, card, SELDOM(50) ? 0 : bytes, kind); }
        """,
    ),
    "refuses what there is": (
        "vc_quota_reserve",
        """
        bool __real_vc_quota_reserve(struct vc_region *, uint32_t, uint64_t);
        bool __wrap_vc_quota_reserve(struct vc_region *r, uint32_t card, uint64_t bytes)
        { return (bytes >> 21) % 5 != 4 && __real_vc_quota_reserve(r, card, bytes); }
        """,
    ),
}


def build(folder: Path, objects: gcc.Objects, begun: Sequence[Future[Path]], flags: Sequence[str]) -> dict[str, Path]:
    """Link the CUDA shim whose objects are compiled with `flags` with each break. Returns the folder of each shim by the break's name."""
    library = next(library for library in native.LIBRARIES if library.name == "cuda-shim")
    shims = {name: folder / f"shim-{number}" for number, name in enumerate(BREAKS)}
    for name, target in shims.items():
        target.mkdir()
        function, code = BREAKS[name]
        source = target / "break.c"
        source.write_text(_HEAD + code)
        broken = objects.begin([source], flags, f"cannot build the shim that {name}")
        made = [each.result() for each in (*begun, *broken)]
        command = native.link_command(library, made, target / "libcuda.so.1", LIB)
        gcc.run([*command, f"-Wl,--wrap={function}"], f"cannot link the shim that {name}")
    return shims
