"""Unmodified PyTorch in a share: every allocator, CUDA graphs, loader workers and several processes, with results as natively."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu import gpu_clients
from tests.gpu.gpu_clients import LIMIT_MIB, Share
from tests.gpu.gpu_place import Place

pytestmark = pytest.mark.gpu
PROGRAM = gpu_clients.client("torch_client.py")
ALLOCATORS = {
    "caching": "",
    "expandable segments": "expandable_segments:True",
    "stream-ordered": "backend:cudaMallocAsync",
}


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_an_allocator_runs_out_of_memory_at_the_limit_and_recovers(
    card: Place,
    share_of: Callable[..., Share],
    python_with: Callable[..., str],
    allocator: str,
    user: int | None,
) -> None:
    python = python_with("torch", user)
    settings = {"PYTORCH_CUDA_ALLOC_CONF": ALLOCATORS[allocator]}
    told = share_of(card, user=user).run(python, PROGRAM, "memory", **settings)
    assert (told["total_mib"], told["refused"]) == (LIMIT_MIB, True)
    assert LIMIT_MIB // 4 < told["reached_mib"] <= told["free_mib"] < LIMIT_MIB
    assert told["again_mib"] >= told["reached_mib"] - 128, "what was given back can be had again"


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("part", ["train", "workers"])
def test_training_gives_the_same_numbers_as_natively(
    card: Place, share_of: Callable[..., Share], python_with: Callable[..., str], allocator: str, part: str
) -> None:
    words = (python_with("torch"), PROGRAM, part)
    settings = {"PYTORCH_CUDA_ALLOC_CONF": ALLOCATORS[allocator]}
    native = gpu_clients.native(card, *words, **settings)
    assert share_of(card).run(*words, **settings) == native


def test_a_captured_step_gives_the_same_numbers_as_natively(
    card: Place, share_of: Callable[..., Share], python_with: Callable[..., str]
) -> None:
    words = (python_with("torch"), PROGRAM, "graph-only")
    native = gpu_clients.native(card, *words)
    assert share_of(card).run(*words) == native


def test_a_captured_graph_survives_that_its_process_runs_out_of_memory(
    card: Place, share_of: Callable[..., Share], python_with: Callable[..., str]
) -> None:
    told = share_of(card).run(python_with("torch"), PROGRAM, "graph")
    assert told["refused"]
    assert 0 < told["reached_mib"] <= LIMIT_MIB


def test_processes_of_one_share_have_one_limit_together(
    card: Place, share_of: Callable[..., Share], python_with: Callable[..., str]
) -> None:
    told = share_of(card).run(python_with("torch"), PROGRAM, "processes")
    assert told["sums"] == [8 << 20] * 2, "both children see their parent's tensor"
    assert (told["refused"], told["ended"], told["total_mib"]) == (True, [0, 0], [LIMIT_MIB] * 2)
    assert told["reached_mib"] <= LIMIT_MIB, "the parent's tensor is counted once, the children's together"
