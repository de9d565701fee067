"""The reference model's short form: a share as large as the card answers as the driver does, a small one keeps its promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model import model_broken, model_run

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


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return model_broken.build(tmp_path_factory.mktemp("broken"))


# Steps at which the interposer as it is does nothing wrong: what is found there is the break.
SEEDS, FLAWLESS_STEPS, LEFT_OUT = range(1, 5), 600, "external,taken,imported"


def test_nothing_is_noticed_where_nothing_is_broken(model: model_run.Model) -> None:
    assert model_run.run(model, ["equal"], SEEDS, FLAWLESS_STEPS, LEFT_OUT) == []


@pytest.mark.parametrize("name", model_broken.BREAKS)
def test_a_broken_interposer_is_noticed(broken: dict[str, Path], model: model_run.Model, name: str) -> None:
    found = model_run.run(model.of(broken[name]), ["equal"], SEEDS, FLAWLESS_STEPS, LEFT_OUT)
    print(*found, sep="\n")
    assert found
