"""Devices and slices: within the API's limits, and the same for the same cards."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcuda.spec import devices
from vcuda.spec.devices import Effect, Taint, Version
from vcuda.spec.inventory import Card
from vcuda.spec.names import Names
from vcuda.spec.units import BLOCK_BYTES, parse_quantity

NAMES = Names()
GIB = 2**30
CARD = Card("GPU-8D2E0000-1111-2222-3333-444455556666", 3, "NVIDIA H100 80GB HBM3", 80 * GIB, 1)


def test_a_card_is_named_by_its_uuid() -> None:
    assert devices.device_name(CARD.uuid) == "gpu-8d2e0000-1111-2222-3333-444455556666"
    old = devices.device_name("MIG-GPU-8d2e/7/0")
    assert old.startswith("gpu-") and old != devices.device_name("MIG-GPU-8d2e/7/1")


def test_a_device_has_what_a_claim_can_ask_for() -> None:
    found = devices.device(CARD, NAMES, {"driverVersion": Version("550.163.01"), "pcie": ""})
    assert found["allowMultipleAllocations"] is True
    assert found["attributes"] == {
        "uuid": {"string": CARD.uuid},
        "productName": {"string": "NVIDIA H100 80GB HBM3"},
        "minor": {"int": 3},
        "numaNode": {"int": 1},
        "driverVersion": {"version": "550.163.1"},
    }
    between = {"min": "256Mi", "max": "80Gi", "step": "256Mi"}
    assert found["capacity"]["memory"] == {"value": "80Gi", "requestPolicy": {"default": "80Gi", "validRange": between}}
    assert found["capacity"]["cores"]["requestPolicy"]["validRange"] == {"min": "1", "max": "100", "step": "1"}
    assert "taints" not in found


def test_a_sick_card_says_why() -> None:
    found = devices.device(CARD, NAMES, {}, [Taint("xid", "Xid 79: has fallen off", Effect.NO_SCHEDULE)])
    key = f"{NAMES.driver}/xid"
    assert found["taints"] == [{"key": key, "value": "Xid-79-has-fallen-off", "effect": "NoSchedule"}]


@given(st.integers(BLOCK_BYTES, 512 * GIB))
def test_the_memorys_policy_is_one_that_the_api_server_takes(memory_bytes: int) -> None:
    """Default and max are whole steps above min, and min + step is no more than the value (validateRequestPolicyRange)."""
    memory = devices.device(Card("GPU-a", 0, "H", memory_bytes), NAMES, {})["capacity"]["memory"]

    def number(text: str) -> int:
        found = parse_quantity(text)
        assert found is not None and found[1] == 1
        return found[0]

    policy = memory["requestPolicy"]
    value, default, between = number(memory["value"]), number(policy["default"]), policy["validRange"]
    assert value <= memory_bytes < value + BLOCK_BYTES
    assert number(between["min"]) <= default == number(between["max"]) == value
    if "step" in between:
        assert (default - number(between["min"])) % number(between["step"]) == 0
        assert number(between["min"]) + number(between["step"]) <= value


@pytest.mark.parametrize(
    ("text", "semver"), [("615.12.0", "615.12.0"), ("580.65.06", "580.65.6"), ("13.0", "13.0.0"), ("", "0.0.0")]
)
def test_versions_without_leading_zeros(text: str, semver: str) -> None:
    assert Version(text).semver == semver


def test_islands_are_what_nvlink_joins() -> None:
    cards = [
        Card("a", 0, "H", GIB, links=(("b", 118), ("c", 30))),
        Card("b", 1, "H", GIB, links=(("d", 112),)),
        Card("c", 2, "H", GIB, links=(("a", 30),)),
        Card("d", 3, "H", GIB),
    ]
    assert devices.islands(cards) == {"a": "a", "b": "a", "d": "a"}


def test_slices_of_a_pool() -> None:
    many = [devices.device(Card(f"GPU-{n}", n, "H", GIB), NAMES, {}) for n in range(65)]
    first, second = devices.slices(NAMES, "node-1", "n-uid", many, 7)
    assert first["metadata"]["name"] == "00-vcuda.tencent.com-node-1-0"
    assert first["metadata"]["ownerReferences"][0]["uid"] == "n-uid"
    assert first["spec"]["pool"] == {"name": "node-1", "generation": 7, "resourceSliceCount": 2}
    assert [len(item["spec"]["devices"]) for item in (first, second)] == [64, 1]
    assert devices.slices(NAMES, "node-1", "", [], 7) == []


def test_a_long_nodes_slice_has_a_name_all_the_same() -> None:
    name = devices.slice_name(NAMES, "n" * 253, 0)
    assert len(name) <= 253 and name != devices.slice_name(NAMES, "m" * 253, 0)
