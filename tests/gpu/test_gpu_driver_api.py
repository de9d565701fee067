"""Clients of the driver API in a share: the limit is an ordinary out-of-memory error, and what follows it works. Also on a simulated card."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu import gpu_clients
from tests.gpu.gpu_clients import LIMIT_MIB, Share
from tests.gpu.gpu_place import Place

pytestmark = pytest.mark.gpu
OUT_OF_MEMORY = 2


def test_the_share_is_all_that_a_client_sees_and_gets(
    any_card: Place, share_of: Callable[..., Share], python_with: Callable[..., str], user: int | None
) -> None:
    python = python_with("cuda.bindings.driver", user)
    told = share_of(any_card, user=user).run(python, gpu_clients.client("driver_client.py"))
    assert (told["devices"], told["total_mib"], told["device_total_mib"]) == (1, LIMIT_MIB, LIMIT_MIB)
    assert told["free_mib"] < LIMIT_MIB, "the context is counted"
    assert (told["error"], told["again"], told["intact"]) == (OUT_OF_MEMORY, 0, True)
    assert LIMIT_MIB // 2 < told["reached_mib"] <= LIMIT_MIB
    assert told["reached_mib"] <= told["free_mib"], "what was told to be free, no more"


def test_natively_the_same_client_gets_more(any_card: Place, python_with: Callable[..., str]) -> None:
    told = gpu_clients.native(any_card, python_with("cuda.bindings.driver"), gpu_clients.client("driver_client.py"))
    assert told["reached_mib"] > LIMIT_MIB, "else the test of the share proves nothing"


def test_numba_is_refused_at_the_limit_and_goes_on(
    any_card: Place, share_of: Callable[..., Share], python_with: Callable[..., str]
) -> None:
    words = (python_with("numba.cuda"), gpu_clients.client("numba_client.py"), "memory")
    told = share_of(any_card).run(*words)
    assert (told["total_mib"], told["error"], told["intact"]) == (LIMIT_MIB, OUT_OF_MEMORY, True)
    assert LIMIT_MIB // 2 < told["reached_mib"] <= LIMIT_MIB


def test_numba_computes_the_same_as_natively(
    card: Place, share_of: Callable[..., Share], python_with: Callable[..., str]
) -> None:
    words = (python_with("numba.cuda"), gpu_clients.client("numba_client.py"), "kernel")
    native, told = gpu_clients.native(card, *words), share_of(card).run(*words)
    assert told["right"]
    assert told == native
