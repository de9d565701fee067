"""CuPy, JAX, Triton and programs of nvcc in a share: limit, out of memory, results as natively."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu import gpu_clients
from tests.gpu.gpu_clients import LIMIT_MIB, Share
from tests.gpu.gpu_place import Place

pytestmark = pytest.mark.gpu
OUT_OF_MEMORY = 2


@pytest.mark.parametrize("allocator", ["plain", "pool", "async", "managed"])
def test_cupy(card: Place, share_of: Callable[..., Share], python_with: Callable[..., str], allocator: str) -> None:
    words = (python_with("cupy"), gpu_clients.client("cupy_client.py"), allocator)
    told = share_of(card).run(*words)
    assert (told["total_mib"], told["refused"]) == (LIMIT_MIB, True)
    assert LIMIT_MIB // 4 < told["reached_mib"] <= LIMIT_MIB
    whole = share_of(card, cores=100, memory_mib=2 * LIMIT_MIB).run(*words)
    assert told["digest"] == whole["digest"]


@pytest.mark.parametrize("preallocate", ["true", "false"])
def test_jax(card: Place, share_of: Callable[..., Share], python_with: Callable[..., str], preallocate: str) -> None:
    words = (python_with("jax_cuda13_plugin"), gpu_clients.client("jax_client.py"))
    native = gpu_clients.native(card, *words, XLA_PYTHON_CLIENT_MEM_FRACTION="0.05")
    # XLA preallocates 75 % of the share's memory, whatever is free of it, and aborts later if that was not to be had.
    limit_mib = 2 * LIMIT_MIB
    told = share_of(card, memory_mib=limit_mib).run(*words, XLA_PYTHON_CLIENT_PREALLOCATE=preallocate)
    assert told["refused"]
    assert 0 < told["reached_mib"] <= limit_mib
    assert told["bytes_limit_mib"] <= limit_mib, "XLA sizes its pool by the share"
    assert told["digest"] == native["digest"]


def test_triton(card: Place, share_of: Callable[..., Share], python_with: Callable[..., str]) -> None:
    words = (python_with("triton"), gpu_clients.client("triton_client.py"))
    native, told = gpu_clients.native(card, *words), share_of(card).run(*words)
    assert told["right"]
    assert told == native


@pytest.fixture(scope="module", params=["static", "shared"])
def runtime_program(request: pytest.FixtureRequest, outside: Path) -> Path:
    """The program of the CUDA runtime, built by nvcc with that kind of cudart."""
    compiler, why_not = gpu_clients.nvcc()
    if compiler is None:
        pytest.skip(why_not)
    return gpu_clients.build_runtime_client(compiler, outside, request.param)


def test_programs_of_the_cuda_runtime_are_built_and_end_with_an_error_where_there_is_no_real_driver(
    any_card: Place, share_of: Callable[..., Share], runtime_program: Path
) -> None:
    if any_card.real:
        pytest.skip("a real card is here: the next test runs the program on it")
    with pytest.raises(AssertionError, match=r"status 1\n+cudaMemGetInfo: "):
        share_of(any_card).run(str(runtime_program))


def test_a_program_of_the_cuda_runtime(card: Place, share_of: Callable[..., Share], runtime_program: Path) -> None:
    told = share_of(card).run(str(runtime_program))
    assert (told["total_mib"], told["errors"], told["right"]) == (LIMIT_MIB, [OUT_OF_MEMORY] * 3, True)
    for allocator in ("plain_mib", "managed_mib", "pool_mib"):
        assert LIMIT_MIB // 4 < told[allocator] <= LIMIT_MIB
