"""Locks are taken in the order of docs/architecture.md: a shim that ends its process where one is not, under work of all kinds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.model import model_run
from tests.support.share import LIB
from vcuda._build import gcc, native

ROOT = Path(__file__).resolve().parents[2]
RANKS = ROOT / "tests/native/lock_ranks.h"


ROW = re.compile(r'\{"([^"]+)", ("[^"]+", \d+)\}')


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gcc.Objects]:
    with gcc.Objects(tmp_path_factory.mktemp("objects")) as compiled:
        yield compiled


def built(folder: Path, objects: gcc.Objects, ranks: Path) -> Path:
    """The folder of a shim that asserts the ranks of this header. Sources whose rows are those of RANKS are compiled once for all shims."""
    library = next(library for library in native.LIBRARIES if library.name == "cuda-shim")
    other = {file for file, _ in set(ROW.findall(ranks.read_text())) - set(ROW.findall(RANKS.read_text()))}
    begun = []
    for source in library.sources():
        header = ranks if any(file in str(source) for file in other) else RANKS
        flags = [*native.compile_flags(library), "-O0", "-Wno-unused", f"-include{header}"]
        begun += objects.begin([source], flags, "cannot build the shim")
    made = [each.result() for each in begun]
    gcc.run(native.link_command(library, made, folder / "libcuda.so.1", LIB), "cannot link the shim")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> model_run.Model:
    return model_run.Model(tmp_path_factory.mktemp("model"))


def test_no_lock_is_taken_while_a_later_one_is_held(
    tmp_path: Path, objects: gcc.Objects, model: model_run.Model
) -> None:
    shims = built(tmp_path, objects, RANKS)
    assert model_run.run(model.of(shims), ["equal", "small"], range(1, 5), 600) == []


def test_a_lock_in_the_wrong_order_is_noticed(tmp_path: Path, objects: gcc.Objects, model: model_run.Model) -> None:
    """The region's slow mutex is taken under the meters': as if it came before them."""
    wrong = tmp_path / "ranks.h"
    wrong.write_text(RANKS.read_text().replace('"&region->slow_mutex", 7', '"&region->slow_mutex", 0'))
    assert wrong.read_text() != RANKS.read_text()
    found = model_run.run(model.of(built(tmp_path, objects, wrong)), ["equal"], range(1, 3), 600)
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
