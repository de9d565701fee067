"""Every lock of the shim has a rank; that they are taken in that order shows tests/model/test_model.py."""

from __future__ import annotations

import re
from pathlib import Path

from vcuda._build import native

ROOT = Path(__file__).resolve().parents[2]
RANKS = ROOT / "tests/native/lock_ranks.h"


def test_every_lock_of_the_shim_has_a_rank() -> None:
    rows = re.findall(r'\{"([^"]+)", "([^"]+)", \d+\}', RANKS.read_text())
    library = next(library for library in native.LIBRARIES if library.name == "cuda-shim")
    taken = {
        (str(path), lock)
        for path in library.sources()
        for lock in re.findall(r"pthread_mutex_(?:try)?lock\((.*?)\)", path.read_text())
    }
    assert taken
    assert [one for one in taken if not any(file in one[0] and lock == one[1] for file, lock in rows)] == []
