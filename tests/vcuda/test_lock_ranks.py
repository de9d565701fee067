"""Locks are taken in the order of docs/architecture.md: a shim that ends its process where one is not, under work of all kinds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.model import model_run
from tests.support.share import LIB
from vcuda._build import gcc, native

ROOT = Path(__file__).resolve().parents[2]
RANKS = ROOT / "tests/native/lock_ranks.h"


def built(folder: Path, ranks: str) -> Path:
    """The folder of a shim that asserts the ranks of this header."""
    (folder / "ranks.h").write_text(ranks)
    library = next(library for library in native.LIBRARIES if library.name == "cuda-shim")
    flags = [*native.compile_flags(library), "-O0", "-Wno-unused", f"-include{folder / 'ranks.h'}"]
    with gcc.Objects(folder) as objects:
        begun = objects.begin(library.sources(), flags, "cannot build the shim")
        made = [each.result() for each in begun]
    gcc.run(native.link_command(library, made, folder / "libcuda.so.1", LIB), "cannot link the shim")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> model_run.Model:
    return model_run.Model(tmp_path_factory.mktemp("model"))


def test_no_lock_is_taken_while_a_later_one_is_held(tmp_path: Path, model: model_run.Model) -> None:
    shims = built(tmp_path, RANKS.read_text())
    assert model_run.run(model.of(shims), ["equal", "small"], range(1, 5), 600) == []


def test_a_lock_in_the_wrong_order_is_noticed(tmp_path: Path, model: model_run.Model) -> None:
    """The region's slow mutex is taken under the meters': as if it came before them."""
    wrong = RANKS.read_text().replace('"&region->slow_mutex", 7', '"&region->slow_mutex", 0')
    assert wrong != RANKS.read_text()
    found = model_run.run(model.of(built(tmp_path, wrong)), ["equal"], range(1, 3), 600)
    assert found


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
