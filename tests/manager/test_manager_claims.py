"""Claims on a node: prepared exactly once whatever is asked how often, gone without a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.manager.manager_claims import ClaimNode, booked, claim, claim_node, config, result, uid_of
from tests.manager.manager_pods import NAMES, eventually
from tests.manager.manager_support import Node
from vcuda import region
from vcuda.sim import Machine
from vcuda.spec import bookings

BLOCK = 2**28


def test_a_claim_gets_a_region_and_a_runtimes_device(claims: ClaimNode) -> None:
    driver = claims.start()
    item = claim("train", result(claims.cards[0]), configs=[config(coreLimit=50, priority="high")])
    claims.put(item)
    (device,) = driver.prepare(item)[uid_of(item)].devices
    share = item["status"]["allocation"]["devices"]["results"][0]
    assert (device.pool_name, device.device_name, device.share_id) == ("node-1", share["device"], share["shareID"])
    assert list(device.request_names) == ["gpu"]
    spec = claims.spec(item)
    assert list(device.cdi_device_ids) == [f"{spec['kind']}={spec['devices'][0]['name']}"]
    edits = spec["devices"][0]["containerEdits"]
    place = f"/etc/vcuda/claims/{uid_of(item)}-gpu"
    assert [(mount["containerPath"], mount["options"][0]) for mount in edits["mounts"]] == [
        (place, "ro"),
        (f"{place}/usage", "rw"),
    ]
    nodes = {node["path"] for node in edits["deviceNodes"]}
    assert {"/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"} <= nodes and "/dev/nvidia1" not in nodes
    mounted = {mount["containerPath"] for mount in spec["containerEdits"]["mounts"]}
    assert "/usr/local/nvidia" in mounted
    assert "NVIDIA_VISIBLE_DEVICES=void" in spec["containerEdits"]["env"]
    (limit,) = region.read_limits(claims.region(item))
    assert (limit.uuid, limit.cores, limit.core_limit, limit.memory_bytes) == (claims.cards[0], 30, 50, 10 * BLOCK)
    assert limit.priority == "high" and not limit.whole
    assert str(claims.region(item)) in claims.node.arbiter.regions
    assert booked(claims) == [(30, 10), (0, 0)]
    eventually(lambda: "default/train/gpu of pods p: 30 cores (up to 50)" in claims.node.get("/graph")[1], "/graph")


def test_it_may_be_asked_any_number_of_times(claims: ClaimNode) -> None:
    driver = claims.start()
    item = claim("train", result(claims.cards[0]))
    claims.put(item)
    first = driver.prepare(item)[uid_of(item)]
    inode = (claims.region(item) / "usage").stat().st_ino
    assert driver.prepare(item)[uid_of(item)] == first
    assert (claims.region(item) / "usage").stat().st_ino == inode
    assert booked(claims)[0] == (30, 10)


def test_unprepared_it_leaves_nothing(claims: ClaimNode) -> None:
    driver = claims.start()
    item, other = claim("train", result(claims.cards[0])), claim("other", result(claims.cards[0]))
    claims.put(item, other)
    driver.prepare(item, other)
    for _ in range(2):
        assert not driver.unprepare(item)[uid_of(item)].error
    assert booked(claims)[0] == (30, 10)
    assert not driver.unprepare(other)[uid_of(other)].error
    assert claims.left() == [] and booked(claims) == [(0, 0), (0, 0)] and not claims.node.arbiter.regions


def test_unprepared_it_leaves_no_file_that_a_kill_left_unfinished(claims: ClaimNode) -> None:
    """The next start leaves it, because it is young and may be another driver's; the claim's own end need not."""
    driver = claims.start()
    item = claim("train", result(claims.cards[0]))
    claims.put(item)
    driver.prepare(item)
    (claims.cdi / f".tencent.com-claim-{uid_of(item)}.json.4711").write_text("{")
    other = claims.cdi / ".tencent.com-claim-others.json.4711"
    other.write_text("{")
    assert not driver.unprepare(item)[uid_of(item)].error
    assert claims.left() == [other.name]


def test_one_that_was_never_prepared_is_unprepared_all_the_same(claims: ClaimNode) -> None:
    driver = claims.start()
    stranger = claim("never", result(claims.cards[0]))
    assert driver.unprepare(stranger)[uid_of(stranger)].error == ""


def test_every_claim_asked_for_gets_its_own_answer(claims: ClaimNode) -> None:
    driver = claims.start()
    good, gone, wrong = (claim(name, result(claims.cards[0])) for name in ("good", "gone", "wrong"))
    claims.put(good, {**wrong, "metadata": {**wrong["metadata"], "uid": "another"}})
    answers = driver.prepare(gone, good, wrong)
    assert set(answers) == {uid_of(item) for item in (good, gone, wrong)}
    assert answers[uid_of(good)].devices and not answers[uid_of(good)].error
    assert "gone from the API server" in answers[uid_of(gone)].error
    assert "deleted and made again" in answers[uid_of(wrong)].error
    assert booked(claims)[0] == (30, 10)


@pytest.mark.parametrize("service", ["v1.DRAPlugin", "v1beta1.DRAPlugin"])
def test_kubelets_of_both_versions_are_served(machine: Machine, make_node: Callable[..., Node], service: str) -> None:
    with claim_node(make_node(machine.root, with_api=True), services=[service]) as claims:
        driver = claims.start()
        item = claim("train", result(claims.cards[0]))
        claims.put(item)
        assert driver.service == service and driver.prepare(item)[uid_of(item)].devices
        assert not driver.unprepare(item)[uid_of(item)].error


def test_a_restart_between_prepare_and_unprepare(claims: ClaimNode) -> None:
    driver = claims.start()
    item, left = claim("train", result(claims.cards[0])), claims.cdi / "tencent.com-claim-nobody.json"
    others = claims.cdi / "tencent.com-claim-others.json"
    claims.put(item)
    answer = driver.prepare(item)[uid_of(item)]
    inode = (claims.region(item) / "usage").stat().st_ino
    claims.node.stop()
    text = next(claims.cdi.glob(f"*{uid_of(item)}.json")).read_text()
    left.write_text(text.replace(uid_of(item), "nobody"))
    others.write_text(text.replace(str(claims.node.directory), "/var/lib/other"))
    driver = claims.start()
    assert not left.exists(), "a file of a claim that nobody knows"
    assert others.exists(), "the folder is all drivers', and this file another daemon's"
    others.unlink()
    assert booked(claims)[0] == (30, 10) and str(claims.region(item)) in claims.node.arbiter.regions
    assert driver.prepare(item)[uid_of(item)] == answer
    assert (claims.region(item) / "usage").stat().st_ino == inode
    assert not driver.unprepare(item)[uid_of(item)].error
    assert claims.left() == []


def test_a_claim_that_is_allocated_anew_gets_the_new_card_alone(claims: ClaimNode) -> None:
    """Kubelet forgot to unprepare it, and the scheduler has given it other devices meanwhile."""
    driver = claims.start()
    first, second = claims.cards
    item = claim("train", result(first))
    claims.put(item)
    driver.prepare(item)
    item["status"]["allocation"]["devices"]["results"] = [result(second, cores=20)]
    claims.put(item)
    (device,) = driver.prepare(item)[uid_of(item)].devices
    assert device.device_name == second.lower()
    assert booked(claims) == [(0, 0), (20, 10)]
    assert region.read_limits(claims.region(item))[0].uuid == second


def test_two_cards_and_two_requests_of_one_claim(claims: ClaimNode) -> None:
    driver = claims.start()
    first, second = claims.cards
    item = claim(
        "many", result(first, "pair", 10), result(second, "pair", 10), result(first, "one", 5), pods=("p", "q")
    )
    claims.put(item)
    devices = driver.prepare(item)[uid_of(item)].devices
    assert [list(device.request_names) for device in devices] == [["pair"], ["pair"], ["one"]]
    named = [name.partition("=")[2] for device in devices for name in device.cdi_device_ids]
    assert named == [f"{uid_of(item)}-pair", f"{uid_of(item)}-one"], "the runtime takes each device once"
    assert [limit.uuid for limit in region.read_limits(claims.region(item, "pair"))] == [first, second]
    assert booked(claims) == [(15, 20), (10, 10)]
    eventually(lambda: "of pods p, q:" in claims.node.get("/graph")[1], "/graph")


def test_what_a_claim_has_is_reported_for_the_extender_to_compare(claims: ClaimNode) -> None:
    def reported() -> Any:
        api = claims.node.api
        text = api.node().get("annotations", {}).get(NAMES.bookings) if api is not None else None
        return bookings.decode(text).claims if text is not None else None

    driver = claims.start()
    eventually(lambda: reported() == {}, "a report without claims", 30)
    first, second = claims.cards
    item = claim("many", result(first, "pair", 10), result(second, "pair", 10), result(first, "one", 5))
    claims.put(item)
    driver.prepare(item)
    has = {uid_of(item): {first: (15, 20), second: (10, 10)}}
    eventually(lambda: reported() == has, "the claim in the report", 30)
    driver.unprepare(item)
    eventually(lambda: reported() == {}, "the claim gone from the report", 30)
