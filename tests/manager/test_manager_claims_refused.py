"""Claims that can't be given what they ask for: a clear error in that claim's answer, nothing half prepared."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.manager.manager_claims import ClaimNode, booked, claim, config, error_of, result, uid_of
from tests.manager.manager_pods import container, eventually, pod
from vcuda.sim import CardLost, Machine


def test_deleted_between_prepare_and_start(claims: ClaimNode) -> None:
    """Kubelet asks again: what was prepared stays until it is unprepared, for a container may run; the answer says why."""
    driver = claims.start()
    item = claim("train", result(claims.cards[0]))
    claims.put(item)
    driver.prepare(item)
    assert claims.node.api is not None
    claims.node.api.remove("resourceclaims", "default/train")
    assert "ClaimChanged" in error_of(claims, item)
    assert not driver.unprepare(item)[uid_of(item)].error
    assert claims.left() == []


def test_allocated_beyond_a_cards_capacity(claims: ClaimNode) -> None:
    assert claims.node.api is not None
    claims.node.api.put("pods", pod("p", container("c", 0), uid="uid-p"))
    driver = claims.start()
    first, second = claim("a", result(claims.cards[0], cores=60)), claim("b", result(claims.cards[0], cores=50))
    third = claim("c", result(claims.cards[0], cores=1, memory="6Gi"))
    claims.put(first, second, third)
    driver.prepare(first)
    said = error_of(claims, second)
    assert "InsufficientCores" in said and "40" in said and "default/a/gpu" in said
    assert "InsufficientMemory" in error_of(claims, third)


@pytest.mark.parametrize("newcomers", [1, 24])
def test_a_newcomer_waits_for_a_claim_whose_pod_is_gone_and_whose_container_still_ends(
    claims: ClaimNode, newcomers: int
) -> None:
    """A pod without a grace period loses its claim at once; kubelet lets go of it seconds later, while others wait."""
    api = claims.node.api
    assert api is not None
    before = pod("before", container("c", 0), uid="uid-before")
    api.put("pods", before)
    driver = claims.start()
    old = claim("old", result(claims.cards[0], cores=90), pods=("before",))
    new = [
        claim(f"new-{number}", result(claims.cards[0], cores=90 // newcomers, memory="256Mi"), pods=(f"p{number}",))
        for number in range(newcomers)
    ]
    claims.put(old, *new)
    assert driver.prepare(old)[uid_of(old)].devices
    api.delete(before)
    api.remove("resourceclaims", "default/old")
    daemon = claims.node.daemon
    assert daemon is not None
    eventually(lambda: daemon._known_pods() == [], "the watch")
    with ThreadPoolExecutor(newcomers) as pool:
        calls = [pool.submit(driver.prepare, item) for item in new]
        if newcomers == 1:  # it waits: as many as there are would not say so in the same moment
            time.sleep(1.0)
            assert not calls[0].done() and booked(claims)[0] == (90, 10), "the old one's container may run"
        assert not driver.unprepare(old)[uid_of(old)].error
        answers = [call.result()[uid_of(item)] for call, item in zip(calls, new, strict=True)]
    assert [answer.error for answer in answers] == [""] * newcomers
    assert booked(claims)[0] == (90 // newcomers * newcomers, newcomers)


def test_a_newcomer_is_refused_where_the_other_one_never_ends(
    claims: ClaimNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manager.dra.claims.ENDING_S", 0.5)
    driver = claims.start()
    old, new = (claim(name, result(claims.cards[0], cores=60), pods=(name,)) for name in ("old", "new"))
    claims.put(old, new)
    assert driver.prepare(old)[uid_of(old)].devices
    assert "InsufficientCores" in error_of(claims, new)


def test_twice_on_one_card_by_one_claim_beyond_its_capacity(claims: ClaimNode) -> None:
    claims.start()
    twice = claim("twice", result(claims.cards[0], cores=60), result(claims.cards[0], cores=60))
    claims.put(twice)
    assert "InsufficientCores" in error_of(claims, twice)


def test_unknown_fields_of_its_configuration(claims: ClaimNode) -> None:
    claims.start()
    item = claim("typo", result(claims.cards[0]), configs=[config(corelimit=50)])
    claims.put(item)
    said = error_of(claims, item)
    assert "InvalidShareConfig" in said and "'corelimit'" in said and "coreLimit, priority, oversell" in said


def test_capacity_that_no_card_has(claims: ClaimNode) -> None:
    claims.start()
    item = claim("huge", result(claims.cards[0], cores=30, memory="100Gi"))
    claims.put(item)
    said = error_of(claims, item)
    assert "InsufficientMemory" in said and "and 32; delete" in said, "nobody is beside it"


def test_a_card_that_this_node_does_not_have(claims: ClaimNode) -> None:
    claims.start()
    item = claim("lost", result("GPU-00000000-0000-0000-0000-000000000000"))
    claims.put(item)
    assert "UnknownCard" in error_of(claims, item)


def test_a_sick_card_takes_no_new_claim_and_keeps_the_old_one(claims: ClaimNode, machine: Machine) -> None:
    driver = claims.start()
    old, new = claim("old", result(claims.cards[0])), claim("new", result(claims.cards[0]))
    claims.put(old, new)
    driver.prepare(old)
    machine.inject(CardLost(0))
    daemon = claims.node.daemon
    assert daemon is not None
    eventually(lambda: daemon.inventory.snapshot.problems, "the loss")
    assert "UnhealthyCard" in error_of(claims, new)
    assert driver.prepare(old)[uid_of(old)].devices


@pytest.mark.parametrize("request_name", ["a\0b", "..", "r" * 300])
def test_a_name_that_is_no_folders(claims: ClaimNode, request_name: str) -> None:
    claims.start()
    item = claim("odd", result(claims.cards[0], "good", 10), result(claims.cards[0], request_name, 10))
    claims.put(item)
    said = error_of(claims, item)
    assert "defect" not in said and len(said) < 300
    assert not (claims.node.directory / "vm/regions" / uid_of(item)).exists()


def test_a_claim_that_is_reserved_for_no_pod(claims: ClaimNode) -> None:
    claims.start()
    item = claim("train", result(claims.cards[0]), pods=())
    claims.put(item)
    assert "reserved for no pod" in error_of(claims, item)


def test_a_container_with_a_share_of_the_device_plugin_besides(claims: ClaimNode) -> None:
    """Its region would be mounted over the place of the claim's. Another container of the pod may have one."""
    driver = claims.start()
    assert claims.node.api is not None and claims.node.daemon is not None
    daemon = claims.node.daemon
    both, apart = (pod(name, container("c", 10, 4), {"name": "d"}, uid=f"uid-{name}") for name in ("both", "apart"))
    for item, index in ((both, 0), (apart, 1)):
        item["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": item["metadata"]["name"]}]
        item["spec"]["containers"][index].setdefault("resources", {})["claims"] = [{"name": "gpu"}]
    claims.node.api.put("pods", both, apart)
    eventually(lambda: len(daemon._known_pods() or ()) == 2, "the pods by the watch")
    refused, given = (claim(name, result(claims.cards[0]), pods=(name,)) for name in ("both", "apart"))
    claims.put(refused, given)
    said = error_of(claims, refused)
    assert "InvalidPod" in said and "container 'c'" in said and "several requests" in said
    assert driver.prepare(given)[uid_of(given)].devices


def test_a_pod_with_a_container_that_is_none_is_refused_in_words(claims: ClaimNode) -> None:
    """It ended in an AttributeError, which says nothing to whoever has to mend the pod."""
    assert claims.node.api is not None
    user = pod("p", container("c", 0), uid="uid-p")
    user["spec"] |= {"resourceClaims": [{"name": "gpu", "resourceClaimName": "train"}]}
    driver = claims.start()
    item = claim("train", result(claims.cards[0]))
    claims.put(item)
    for odd in ({"resources": None}, {"resources": {"limits": [], "claims": [None]}}):
        claims.node.api.put("pods", user | {"spec": user["spec"] | {"containers": [{"name": "c", **odd}]}})
        assert driver.prepare(item)[uid_of(item)].devices
        driver.unprepare(item)
    claims.node.api.put("pods", user | {"spec": user["spec"] | {"containers": [None]}})
    said = ""

    def refused() -> bool:
        nonlocal said
        said = driver.prepare(item)[uid_of(item)].error
        return bool(said)

    eventually(refused, "the odd pod to be seen", 30)
    assert "InvalidPod" in said and "lists a container that is not an object" in said
