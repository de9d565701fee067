"""Claims: what was given is read exactly, and what can't be a share is refused with its reason."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcuda.spec import claims, share_config
from vcuda.spec.device_classes import DeviceClass, Whose
from vcuda.spec.devices import device_name
from vcuda.spec.errors import InvalidRequest, Reason
from vcuda.spec.inventory import Card
from vcuda.spec.names import Names
from vcuda.spec.placement import CardShare
from vcuda.spec.request import ContainerRequest, Kind, Priority

NAMES = Names()
GIB = 2**30
CARDS = {device_name(card.uuid): card for card in (Card("GPU-a", 0, "H", 8 * GIB), Card("GPU-b", 1, "H", 4 * GIB))}


def result(device: str, request: str = "gpu", **consumed: str) -> dict[str, Any]:
    found = {"request": request, "driver": NAMES.driver, "pool": "node-1", "device": device}
    return found | ({"consumedCapacity": consumed, "shareID": f"share-{device}"} if consumed else {})


def config(*requests: str, **fields: Any) -> dict[str, Any]:
    parameters = {"apiVersion": NAMES.config_version, "kind": "ShareConfig", **fields}
    return {"requests": list(requests), "opaque": {"driver": NAMES.driver, "parameters": parameters}}


def claim(*results: dict[str, Any], configs: Any = (), pods: Any = ("p",)) -> dict[str, Any]:
    return {
        "metadata": {"namespace": "team", "name": "train", "uid": "c-1"},
        "status": {
            "allocation": {"devices": {"results": list(results), "config": list(configs)}},
            "reservedFor": [{"resource": "pods", "name": name, "uid": f"uid-{name}"} for name in pods],
        },
    }


def shares(*results: dict[str, Any], configs: Any = ()) -> tuple[claims.RequestShares, ...]:
    return claims.shares_of(claims.parse_claim(claim(*results, configs=configs)), "node-1", CARDS)


def refused(*results: dict[str, Any], configs: Any = ()) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        shares(*results, configs=configs)
    assert len(caught.value.message) < 400
    return caught.value


def test_a_share_of_a_card() -> None:
    parsed = claims.parse_claim(claim(result("gpu-a", cores="30", memory="2560Mi")))
    assert (parsed.namespace, parsed.name, parsed.uid, parsed.pods) == ("team", "train", "c-1", (("p", "uid-p"),))
    assert parsed.results == (claims.Result("gpu", "gpu", "node-1", "gpu-a", "share-gpu-a", 30, 10),)
    (found,) = claims.shares_of(parsed, "node-1", CARDS)
    assert found == claims.RequestShares("gpu", (CardShare("GPU-a", 30, 10),), 30, 0, Priority.NORMAL, False)


def test_a_device_that_a_claim_has_alone_is_the_whole_card() -> None:
    """A scheduler without consumable capacity says no amounts."""
    (found,) = shares(result("gpu-b"))
    assert found.shares == (CardShare("GPU-b", 100, 16),) and found.whole


def test_two_results_on_one_card_are_one_share_of_their_sum() -> None:
    """HAMi's driver keeps one of the two by its card's name: the second overwrites the first."""
    (found,) = shares(result("gpu-a", cores="30", memory="1Gi"), result("gpu-a", cores="20", memory="2Gi"))
    assert found.shares == (CardShare("GPU-a", 50, 12),)


def test_requests_and_cards_stay_apart() -> None:
    first, second = shares(
        result("gpu-a", "big", cores="60", memory="4Gi"),
        result("gpu-b", "big", cores="60", memory="4Gi"),
        result("gpu-a", "small", cores="5", memory="256Mi"),
    )
    assert first.shares == (CardShare("GPU-a", 60, 16), CardShare("GPU-b", 60, 16)) and not first.whole
    assert (second.name, second.shares) == ("small", (CardShare("GPU-a", 5, 1),))


def test_all_cores_and_a_part_of_the_memory_are_no_whole_card() -> None:
    """What it did not ask for it must not use: its limit is what it was promised."""
    (found,) = shares(result("gpu-a", cores="100", memory="2Gi"))
    assert found.shares == (CardShare("GPU-a", 100, 8),) and not found.whole


def test_another_drivers_devices_and_configuration_are_none_of_ours() -> None:
    other = {"request": "nic", "driver": "nic.example.com", "pool": "node-1", "device": "eth0"}
    theirs = {"opaque": {"driver": "nic.example.com", "parameters": {"kind": "Nic"}}}
    (found,) = shares(other, result("gpu-a", cores="1", memory="256Mi"), configs=[theirs])
    assert found.name == "gpu"


def test_the_claims_configuration_goes_over_its_classes() -> None:
    """The API lists the class's first; each field is the last word's."""
    given = [
        config(priority="low", coreLimit=40),
        config("gpu", coreLimit=50, oversell="4Gi"),
        config("x", priority="high"),
    ]
    (found,) = shares(result("gpu-a", cores="30", memory="1Gi"), configs=given)
    assert (found.core_limit, found.priority, found.oversell_blocks) == (50, Priority.LOW, 16)


def test_an_alternative_has_its_requests_region_and_its_own_configuration() -> None:
    """Containers name the request, results the alternative that was taken."""
    given = [config("gpu/small", priority="high")]
    (found,) = shares(result("gpu-a", "gpu/small", cores="30", memory="1Gi"), configs=given)
    assert (found.name, found.priority) == ("gpu", Priority.HIGH)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"corelimit": 50}, "unknown field 'corelimit'"),
        ({"coreLimit": "50"}, "a number from 1 to 100"),
        ({"coreLimit": 0}, "a number from 1 to 100"),
        ({"coreLimit": True}, "a number from 1 to 100"),
        ({"coreLimit": 20}, "below the 30 cores of request 'gpu'"),
        ({"priority": "urgent"}, "low, normal, high"),
        ({"oversell": "much"}, "an amount of memory"),
        ({"oversell": "9999999999E"}, "no card has more"),
        ({"oversell": "512Mi"}, "fewer than the 4"),
        ({"apiVersion": "v1"}, "write apiVersion: vcuda.tencent.com/v1"),
        ({"kind": "GpuConfig"}, "kind: ShareConfig"),
    ],
)
def test_a_configuration_that_is_not_understood_is_refused(fields: dict[str, Any], said: str) -> None:
    error = refused(result("gpu-a", cores="30", memory="1Gi"), configs=[config(**fields)])
    assert error.reason == Reason.INVALID_SHARE_CONFIG and said in error.message


@pytest.mark.parametrize("parameters", [None, [], "x", 7])
def test_parameters_of_any_form_are_refused_not_crashed_on(parameters: object) -> None:
    with pytest.raises(InvalidRequest):
        share_config.parse_config(parameters)


FIELDS = (
    "metadata", "status", "allocation", "devices", "results", "config", "opaque", "driver", "request", "requests",
    "exactly", "capacity",
)  # fmt: skip
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=20,
)


@given(ANYTHING)
def test_whatever_a_claim_looks_like_it_is_parsed_or_refused(body: Any) -> None:
    for reader in (claims.parse_claim, claims.demand):
        with contextlib.suppress(InvalidRequest):
            reader(body if isinstance(body, dict) else {"status": body, "devices": body, "metadata": body})


def test_what_this_node_does_not_offer_is_refused() -> None:
    assert refused(result("gpu-z", cores="1", memory="1Gi")).reason == Reason.UNKNOWN_CARD
    elsewhere = result("gpu-a", cores="1", memory="1Gi") | {"pool": "node-2"}
    assert refused(elsewhere).reason == Reason.UNKNOWN_CARD


def test_a_claim_without_an_allocation_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not allocated"):
        claims.parse_claim({"metadata": {"name": "train"}, "status": {}})


def test_a_request_for_administrators_is_refused() -> None:
    why = refused(result("gpu-a") | {"adminAccess": True})
    assert why.reason == Reason.INVALID_CLAIM
    assert "request 'gpu' asks for adminAccess" in why.message and "/metrics" in why.message, "what to do instead"


def asking(*requests: dict[str, Any], configs: Any = ()) -> tuple[ContainerRequest, ...]:
    return claims.demand({"devices": {"requests": list(requests), "config": list(configs)}})


def request(name: str = "gpu", count: int = 1, **amounts: str) -> dict[str, Any]:
    exactly = {"deviceClassName": NAMES.driver, "count": count, "capacity": {"requests": amounts}}
    return {"name": name, "exactly": exactly}


def test_what_a_claim_asks_in_the_words_of_scoring() -> None:
    given = [config(coreLimit=50)]
    assert asking(request(cores="30", memory="2560Mi"), configs=given) == (
        ContainerRequest("gpu", Kind.APP, None, 30, 10, 50),
    )
    assert asking(request()) == (ContainerRequest("gpu", Kind.APP, None, 100, 0, 100),)
    assert asking(request(count=4)) == (ContainerRequest("gpu", Kind.APP, None, 400, 0, 100),)
    assert [item.cores for item in asking(request(count=2, cores="30", memory="1Gi"))] == [30, 30]


def test_amounts_between_the_steps_go_up_as_the_schedulers() -> None:
    (one,) = asking(request(cores="500m", memory="300Mi"))
    assert (one.cores, one.memory_blocks) == (1, 2)


def alternatives(*amounts: dict[str, str], counts: tuple[int, ...] = (1, 1, 1)) -> dict[str, Any]:
    bodies = [
        {"name": f"a{i}", "deviceClassName": NAMES.driver, "count": counts[i], "capacity": {"requests": its}}
        for i, its in enumerate(amounts)
    ]
    return {"name": "gpu", "firstAvailable": bodies}


def test_of_alternatives_the_most_of_each_amount_counts_in_whatever_order() -> None:
    large, small, roomy = (
        {"cores": "80", "memory": "4Gi"},
        {"cores": "20", "memory": "1Gi"},
        {"cores": "10", "memory": "8Gi"},
    )
    for order in itertools.permutations((large, small, roomy)):
        (one,) = asking(alternatives(*order))
        assert (one.name, one.cores, one.memory_blocks) == ("gpu", 80, 32)
    assert [one.cores for one in asking(alternatives(small, large, counts=(3, 1)))] == [80] * 3


def test_an_alternative_that_is_a_whole_card_counts_as_one() -> None:
    """Whether it says so, or names no capacity at all."""
    for whole in ({}, {"cores": "100", "memory": "1Gi"}):
        (one,) = asking(alternatives({"cores": "1", "memory": "256Mi"}, whole, counts=(1, 2)))
        assert one.whole and one.cores == 200


def test_alternatives_of_other_classes_do_not_hide_ours() -> None:
    asked = alternatives({"cores": "1"}, {"cores": "50", "memory": "1Gi"})
    asked["firstAvailable"][0]["deviceClassName"] = "other"
    assert [one.cores for one in asking(asked)] == [50]


@pytest.mark.parametrize("name", [[], {}, [NAMES.driver], 7, None, True])
def test_a_class_that_is_no_text_is_none_of_ours(name: Any) -> None:
    assert asking({"name": "gpu", "exactly": {"deviceClassName": name}}) == ()


def test_requests_of_other_classes_ask_nothing_of_us() -> None:
    assert asking({"name": "nic", "exactly": {"deviceClassName": "nic", "allocationMode": "All"}}) == ()
    own = {"name": "gpu", "exactly": {"deviceClassName": "gold"}}
    assert claims.demand({"devices": {"requests": [own]}}, classes={"gold": DeviceClass("gold", Whose.OURS)})


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (request(cores="130", memory="1Gi"), Reason.INVALID_CORES),
        (request(cores="30"), Reason.INCOMPLETE_REQUEST),
        (request(cores="many", memory="1Gi"), Reason.INVALID_QUANTITY),
        (request(cores="30", memory="-1Gi"), Reason.INVALID_QUANTITY),
        (request(cores="30", memory="1Gi", tensors="7"), Reason.INVALID_CLAIM),
        (request(count=0), Reason.INVALID_CLAIM),
        (request(count=17), Reason.INVALID_CLAIM),
        ({"name": "gpu", "exactly": {"deviceClassName": NAMES.driver, "allocationMode": "All"}}, Reason.INVALID_CLAIM),
        ({"name": "gpu", "exactly": {"deviceClassName": NAMES.driver, "adminAccess": True}}, Reason.INVALID_CLAIM),
    ],
)
def test_what_no_card_can_give_is_refused_before_any_pod_waits(asked: dict[str, Any], reason: Reason) -> None:
    with pytest.raises(InvalidRequest) as caught:
        asking(asked)
    assert caught.value.reason == reason
