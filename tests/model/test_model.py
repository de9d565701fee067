"""The reference model's short form: a share as large as the card answers as the driver does, a small one keeps its promises.

Under the same work locks are taken in the order of docs/architecture.md: a shim ends its process where one is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.model import model_broken, model_run
from tests.support.share import LIB
from vcuda._build import gcc, native

STEPS = 1500
SHRINK_SECONDS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> model_run.Model:
    return model_run.Model(tmp_path_factory.mktemp("model"))


def differences(model: model_run.Model, mode: model_run.Mode, seeds: range) -> str:
    """What goes wrong, the first shown by as few steps as were found in some seconds."""
    found = model_run.run(model, [mode], seeds, STEPS)
    lines = [f"{mode} seed {one.seed} step {one.step}: {one.what}\n{one.text}" for one in found]
    if found:
        lines.append(model.show(found[0], model.shrink(found[0], STEPS, seconds=SHRINK_SECONDS)))
    return "\n".join(lines)


def test_a_share_as_large_as_the_card_answers_as_the_driver_and_accounts_for_all(
    model: model_run.Model,
) -> None:
    assert differences(model, "equal", range(1, 9)) == ""


def test_a_small_share_is_never_over_its_limit_and_accounts_for_all(model: model_run.Model) -> None:
    assert differences(model, "small", range(1, 9)) == ""


RANKS = Path(__file__).resolve().parents[1] / "native/lock_ranks.h"
ROW = re.compile(r'\{"([^"]+)", ("[^"]+", \d+)\}')
SHIM = next(library for library in native.LIBRARIES if library.name == "cuda-shim")


def flags(ranks: Path) -> list[str]:
    """Of a shim for one test: soon is better than fast."""
    return [*native.compile_flags(SHIM), "-O0", "-Wno-unused", f"-include{ranks}"]


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gcc.Objects]:
    """Of all shims that are made here; their sources are compiled once, with RANKS."""
    with gcc.Objects(tmp_path_factory.mktemp("objects")) as compiled:
        yield compiled


def built(folder: Path, objects: gcc.Objects, ranks: Path) -> Path:
    """The folder of a shim that asserts the ranks of this header. Sources whose rows are those of RANKS are compiled with that."""
    other = {file for file, _ in set(ROW.findall(ranks.read_text())) - set(ROW.findall(RANKS.read_text()))}
    begun = []
    for source in SHIM.sources():
        header = ranks if any(file in str(source) for file in other) else RANKS
        begun += objects.begin([source], flags(header), "cannot build the shim")
    made = [each.result() for each in begun]
    gcc.run(native.link_command(SHIM, made, folder / "libcuda.so.1", LIB), "cannot link the shim")
    return folder


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


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory, objects: gcc.Objects) -> dict[str, Path]:
    begun = objects.begin(SHIM.sources(), flags(RANKS), "cannot build the shim")
    return model_broken.build(tmp_path_factory.mktemp("broken"), objects, begun, flags(RANKS))


# Steps at which the interposer as it is does nothing wrong: what is found there is the break.
SEEDS, FLAWLESS_STEPS, LEFT_OUT = range(1, 5), 600, "external,taken,imported"


def test_nothing_is_noticed_where_nothing_is_broken(model: model_run.Model) -> None:
    assert model_run.run(model, ["equal"], SEEDS, FLAWLESS_STEPS, LEFT_OUT) == []


@pytest.mark.parametrize("name", model_broken.BREAKS)
def test_a_broken_interposer_is_noticed(broken: dict[str, Path], model: model_run.Model, name: str) -> None:
    found = model_run.run(model.of(broken[name]), ["equal"], SEEDS, FLAWLESS_STEPS, LEFT_OUT)
    print(*found, sep="\n")
    assert found
