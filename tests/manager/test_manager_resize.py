"""Live resize on the node: what was granted is in force, in the state and in the reports, now or when memory allows; forged, impossible, killed."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from typing import Any

import pytest

from manager.allocations.record import Allocation
from manager.allocations.state_file import StateError, StateFile
from manager.kubelet.records import CHECKPOINT_FILE
from tests.manager.manager_kubelet import Rejected
from tests.manager.manager_pods import NAMES, container, eventually, pod
from tests.manager.manager_support import Node
from vcuda import region
from vcuda.sim import Machine
from vcuda.spec import bookings, placement, resize
from vcuda.spec.placement import CardShare
from vcuda.spec.units import BLOCK_BYTES

MIB = 2**20


@pytest.fixture
def node(make_node: Callable[..., Node], machine: Machine) -> Node:
    made = make_node(machine.root, with_api=True)
    made.kubelet.start()
    made.start(wait=200)
    return made


def admitted(node: Node, item: dict[str, Any]) -> dict[str, Any]:
    assert node.api is not None
    node.api.put("pods", item)
    node.kubelet.admit(item)
    node.kubelet.start_containers(item)
    return item


def grant(node: Node, item: dict[str, Any], name: str = "c", **amounts: Any) -> str:
    """The extender's answer in the pod's status; returns the card. `card`, `limit` may be others than its own."""
    card = str(amounts.get("card") or node.kubelet.cards(item, name)[0])
    target = resize.Target(CardShare(card, amounts["cores"], amounts["blocks"]), amounts.get("limit"))
    grant_all(node, item, {name: target})
    return card


def grant_all(
    node: Node,
    item: dict[str, Any],
    granted: dict[str, resize.Target],
    goal: tuple[int, int] = (100, 10_000),
    number: int = 0,
) -> None:
    """`goal`: what the pod is to have of each card in all. `number`: of the extender's answer."""
    assert node.api is not None
    answer = resize.Answer("…", granted, goal={target.share.uuid: goal for target in granted.values()}, number=number)
    said = resize.condition(answer, NAMES, "2026-01-01T00:00:00Z")
    thing = node.api.find("pods", f"default/{item['metadata']['name']}")
    item["status"] = {**thing.get("status", {}), "conditions": [said]}
    node.api.put("pods", {**thing, "status": item["status"]})


def limits(node: Node, item: dict[str, Any], name: str = "c") -> tuple[int, int, int]:
    (card,) = region.read_limits(node.region(item, name))
    return card.cores, card.memory_bytes // BLOCK_BYTES, card.core_limit


def said(node: Node, reason: str) -> list[str]:
    assert node.api is not None
    return [event["message"] for event in node.api.events if event.get("reason") == reason]


def use(node: Node, monkeypatch: pytest.MonkeyPatch, used: list[int], managed: int = 0) -> None:
    """What the container's processes hold, as the list says, look by look; its last word stays. Of it `managed` bytes as managed memory."""
    assert node.daemon is not None
    regions = node.daemon.allocator._regions

    def look(item: Allocation) -> region.Usage:
        held = used.pop(0) if len(used) > 1 else used[0]
        card = region.CardUsage(uuid=item.shares[0].uuid, memory_used_bytes=held, managed_bytes=managed)
        return region.Usage((card,), ())

    monkeypatch.setattr(regions, "usage", look)


def test_the_cards_of_a_node_that_lost_its_state_hold_no_more_than_they_have(node: Node) -> None:
    """One region says what was granted before the last grant, which the card has no room for: nobody falls back to the amounts of his spec."""
    small = admitted(node, pod("small", container("c", 70, 4), annotations={NAMES.core_limit: "90"}))
    card = grant(node, small, cores=20, blocks=4)
    eventually(lambda: limits(node, small) == (20, 4, 90), "the smaller share")
    big = admitted(node, pod("big", container("c", 10, 4), annotations={NAMES.card_uuid: card}))
    grant(node, big, cores=80, blocks=4)
    eventually(lambda: limits(node, big) == (80, 4, 80), "the larger share")
    grant(node, small, cores=21, blocks=4)
    eventually(lambda: said(node, "ResizeRefused"), "no room")
    node.stop()
    shutil.rmtree(node.directory / "checkpoint")
    node.start(wait=200)
    assert limits(node, small) == (20, 4, 90) and limits(node, big) == (80, 4, 80)
    assert node.booked()[card] == (100, 8 * BLOCK_BYTES)


def test_the_report_says_which_grant_it_follows(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the extender would take the amounts of before a resize for those after the next one, and sell what is held."""
    item = admitted(node, pod("p", container("c", 30, 4)))
    uid, (card,) = item["metadata"]["uid"], node.kubelet.cards(item, "c")

    def answered(blocks: int, number: int) -> None:
        grant_all(node, item, {"c": resize.Target(CardShare(card, 30, blocks))}, number=number)

    def reported() -> tuple[int, int | None]:
        assert node.api is not None
        report = bookings.decode(node.api.node()["annotations"][NAMES.bookings])
        return report.pods.get(uid, {card: (0, 0)})[card][1], (report.resizes or {}).get(uid)

    eventually(lambda: reported() == (4, None), "the first report")
    answered(12, 1)
    eventually(lambda: reported() == (12, 1), "the first grant")
    use(node, monkeypatch, [10 * BLOCK_BYTES])
    answered(4, 2)
    eventually(lambda: said(node, "ResizeWaits"), "it waits: more is in use")
    assert reported() == (12, 1)
    answered(12, 3)
    eventually(lambda: reported() == (12, 3), "the third, which changes nothing")


def test_an_object_that_was_looked_up_is_not_obeyed_after_a_newer_one(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The housekeeping lists the pods, the watch shows another answer meanwhile: the list's is not the last."""
    item = admitted(node, pod("p", container("c", 30, 4)))
    card = node.kubelet.cards(item, "c")[0]

    def shown(blocks: int, number: int) -> dict[str, Any]:
        granted = {"c": resize.Target(CardShare(card, 30, blocks))}
        answer = resize.Answer("…", granted, goal={card: (100, 100)}, number=number)
        return {**item, "status": {"conditions": [resize.condition(answer, NAMES, "")]}}

    assert node.daemon is not None
    resizer = node.daemon._resizer
    watch = threading.Thread(target=resizer.see, args=(shown(12, 2),))

    def listed() -> list[dict[str, Any]]:
        if watch.ident is None:
            watch.start()
            watch.join(0.5)
            return [shown(8, 1)]
        return []

    monkeypatch.setattr(resizer, "_pods", listed)
    resizer.look()
    watch.join()
    assert limits(node, item)[1] == 12 and resizer.carried_out[item["metadata"]["uid"]] == 2


def test_a_forged_number_ends_no_later_resize(node: Node) -> None:
    item = admitted(node, pod("p", container("c", 30, 4)))
    uid, card = item["metadata"]["uid"], node.kubelet.cards(item, "c")[0]
    grant_all(node, item, {"c": resize.Target(CardShare(card, 30, 4))}, number=2**53 - 1)
    assert node.daemon is not None
    resizer = node.daemon._resizer
    eventually(lambda: resizer.carried_out.get(uid) == 2**53 - 1, "the forged answer")
    grant_all(node, item, {"c": resize.Target(CardShare(card, 30, 12))}, number=1)
    eventually(lambda: limits(node, item)[1] == 12 and resizer.carried_out[uid] == 1, "the extender's")


def test_a_grant_is_in_force_saved_told_and_reported(node: Node) -> None:
    item = admitted(node, pod("p", container("c", 30, 4)))
    before = (node.region(item, "c") / "limits").stat().st_ino
    card = grant(node, item, cores=50, blocks=12, limit=80)
    eventually(lambda: limits(node, item) == (50, 12, 80), "the new limits")
    assert (node.region(item, "c") / "limits").stat().st_ino == before, "in place: its processes have it mapped"
    assert eventually(lambda: said(node, "ResizeCompleted"), "the event") == [
        "container c: 30 cores, 4 blocks → 50 cores (up to 80), 12 blocks"
    ]
    (saved,) = StateFile(node.directory / "checkpoint").read().values()
    assert (saved.shares, saved.core_limit, saved.cores) == ((CardShare(card, 50, 12),), 80, 30)
    assert node.booked()[card] == (50, 12 * BLOCK_BYTES)
    assert node.api is not None
    uid = item["metadata"]["uid"]
    eventually(
        lambda: bookings.decode(node.api.node()["annotations"][NAMES.bookings]).pods.get(uid) == {card: (50, 12)},
        "the report",
    )

    def written() -> bool:
        annotations = node.api.find("pods", "default/p")["metadata"]["annotations"]
        return placement.decode(annotations[NAMES.placement]).containers == {"c": saved.shares}

    eventually(written, "the placement")


def test_memory_in_use_is_waited_for_and_nothing_changes_meanwhile(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    item = admitted(node, pod("p", container("c", 30, 8)))
    used = [5 * BLOCK_BYTES]
    use(node, monkeypatch, used)
    grant(node, item, cores=10, blocks=2)
    (message,) = eventually(lambda: said(node, "ResizeWaits"), "the event")
    assert message == "container c uses 768 MiB more than its new limit; it is resized when it has freed them"
    assert limits(node, item) == (30, 8, 30)
    used[0] = 2 * BLOCK_BYTES
    eventually(lambda: limits(node, item) == (10, 2, 10), "the smaller share")
    eventually(lambda: said(node, "ResizeCompleted"), "its event")
    assert len(said(node, "ResizeWaits")) == 1


def test_an_oversold_share_waits_for_what_it_has_on_the_card(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its total stays; what is not managed memory has to fit the smaller share before anybody else gets the rest."""
    item = admitted(node, pod("p", container("c", 30, 8), annotations={NAMES.oversell: "c=16"}))
    used = [10 * BLOCK_BYTES]
    use(node, monkeypatch, used, managed=3 * BLOCK_BYTES)
    grant(node, item, cores=30, blocks=5)
    (message,) = eventually(lambda: said(node, "ResizeWaits"), "the event")
    assert "512 MiB more than its new limit" in message

    def physical() -> int:
        return (region.read_limits(node.region(item, "c"))[0].physical_bytes or 0) // BLOCK_BYTES

    assert physical() == 8
    used[0] = 8 * BLOCK_BYTES
    eventually(lambda: physical() == 5 and limits(node, item) == (30, 16, 30), "the smaller share")


def test_a_resize_oversells_no_more_than_the_node_allows(make_node: Callable[..., Node], machine: Machine) -> None:
    node = make_node(machine.root, with_api=True)
    node.kubelet.start()
    node.start("--oversell-limit=2", wait=200)
    item = admitted(node, pod("p", container("c", 30, 8), annotations={NAMES.oversell: "c=16"}))
    grant(node, item, cores=30, blocks=7)
    (message,) = eventually(lambda: said(node, "ResizeRefused"), "the event")
    assert "16 blocks in all" in message and "--oversell-limit" in message
    grant(node, item, cores=30, blocks=9)
    eventually(lambda: limits(node, item) == (30, 16, 30) and said(node, "ResizeCompleted"), "what grows")


def test_what_is_allocated_while_the_limit_shrinks_takes_it_back(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the use and the new limit: else more would be held than is booked."""
    item = admitted(node, pod("p", container("c", 30, 8)))
    used = [BLOCK_BYTES, 5 * BLOCK_BYTES, 5 * BLOCK_BYTES]
    use(node, monkeypatch, used)
    grant(node, item, cores=30, blocks=2)
    eventually(lambda: said(node, "ResizeWaits"), "the event")
    assert limits(node, item) == (30, 8, 30)
    (saved,) = StateFile(node.directory / "checkpoint").read().values()
    assert saved.shares[0].memory_blocks == 8


def test_an_elastic_share_stays_elastic_and_another_one_is_as_hard_as_before(node: Node) -> None:
    soft = admitted(node, pod("soft", container("c", 20, 4), annotations={NAMES.core_limit: "60"}))
    hard = admitted(node, pod("hard", container("c", 20, 4)))
    for item in (soft, hard):
        grant(node, item, cores=30, blocks=4)
    eventually(lambda: limits(node, soft) == (30, 4, 60) and limits(node, hard) == (30, 4, 30), "both")
    grant(node, soft, cores=40, blocks=4, limit=40)
    eventually(lambda: limits(node, soft) == (40, 4, 40), "the limit that is named")


@pytest.mark.parametrize("cores", [60, 70])
def test_an_elastic_limit_survives_a_share_that_reaches_it(node: Node, cores: int) -> None:
    item = admitted(node, pod("p", container("c", 20, 4), annotations={NAMES.core_limit: "60"}))
    grant(node, item, cores=cores, blocks=4)
    eventually(lambda: limits(node, item) == (cores, 4, cores), "the larger share")
    node.stop()
    node.start(wait=200)
    grant(node, item, cores=10, blocks=4)
    eventually(lambda: limits(node, item) == (10, 4, 60), "the limit that it was promised")


def test_what_nobody_of_ours_grants_is_refused_and_told_once(node: Node) -> None:
    """Only who may write pods' status can forge one; even he gets nothing that the card has not."""

    def refusals() -> list[tuple[str, str]]:
        assert node.api is not None
        return [
            (event["involvedObject"]["name"], event["message"])
            for event in node.api.events
            if event.get("reason") == "ResizeRefused"
        ]

    neighbour = admitted(node, pod("n", container("c", 50, 4)))
    item = admitted(node, pod("p", container("c", 30, 4), init=[container("i", 10, 1)]))
    whole = admitted(node, pod("w", container("c", 100)))
    card = node.kubelet.cards(item, "c")[0]
    assert card == node.kubelet.cards(neighbour, "c")[0]
    other = node.kubelet.cards(whole, "c")[0]
    for name, amounts, why in (
        ("c", {"cores": 51, "blocks": 4}, "has 50 cores beside other pods, and p would need 51"),
        ("c", {"cores": 30, "blocks": 10_000}, "blocks beside other pods, and p would need 10000"),
        ("c", {"cores": 30, "blocks": 4, "card": other}, "container c can't be resized"),
        ("i", {"cores": 5, "blocks": 4}, "container i can't be resized"),
    ):
        grant(node, item, name, **({"limit": None} | amounts))
        eventually(lambda why=why: any(why in text for text in said(node, "ResizeRefused")), why)
    grant(node, whole, cores=50, blocks=4)
    eventually(lambda: any(name == "w" for name, _ in refusals()), "whole")
    assert limits(node, item) == (30, 4, 30) and limits(node, whole)[0] == 100
    grant(node, neighbour, cores=40, blocks=4)
    eventually(lambda: limits(node, neighbour) == (40, 4, 40), "another one")
    assert len(refusals()) == len(set(refusals())) == 5


def test_a_state_that_cannot_be_saved_leaves_everything_as_it_was(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    item = admitted(node, pod("p", container("c", 30, 4)))

    def full(*_: object) -> None:
        raise StateError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(StateFile, "append", full)
        grant(node, item, cores=50, blocks=12)
        (message,) = eventually(lambda: said(node, "ResizeWaits"), "the event")
        assert "when this node can write it down: the disk is full" in message
        # It is tried again and again: the limits are taken back each time that it can't be written down.
        eventually(lambda: limits(node, item) == (30, 4, 30), "the limits as they were")
    eventually(lambda: limits(node, item) == (50, 12, 50), "it once there is room")
    assert eventually(lambda: said(node, "ResizeCompleted"), "the event") and not said(node, "ResizeRefused")


@pytest.mark.parametrize("gone", ["nothing", "state", "checkpoint", "both", "regions", "state and regions"])
def test_what_was_granted_survives_what_is_lost(node: Node, gone: str) -> None:
    item = admitted(node, pod("p", container("c", 30, 4)))
    card = grant(node, item, cores=50, blocks=12, limit=80)
    eventually(lambda: limits(node, item) == (50, 12, 80), "the new limits")
    node.kubelet.stop()
    node.stop()
    if "state" in gone or gone == "both":
        shutil.rmtree(node.directory / "checkpoint")
    if gone in ("checkpoint", "both"):
        (node.kubelet.directory / CHECKPOINT_FILE).unlink()
    if "regions" in gone:
        for name in ("limits", "usage"):
            (node.region(item, "c") / name).unlink()
    node.start()
    node.kubelet.start()
    node.kubelet.wait_devices(200)
    if gone in ("checkpoint", "both"):
        node.kubelet.admit(item)
    node.kubelet.start_containers(item)
    eventually(lambda: limits(node, item) == (50, 12, 80), "the promise")
    eventually(lambda: node.booked()[card] == (50, 12 * BLOCK_BYTES), "the books")
    with pytest.raises(Rejected, match="Insufficient"):
        node.kubelet.admit(pod("too-much", container("c", 51, 1), annotations={NAMES.card_uuid: card}))


def test_whose_share_was_cut_when_all_records_of_it_were_lost_is_told(node: Node) -> None:
    small = admitted(node, pod("small", container("c", 70, 4)))
    card = grant(node, small, cores=20, blocks=4)
    eventually(lambda: limits(node, small)[0] == 20, "the smaller share")
    big = admitted(node, pod("big", container("c", 10, 4), annotations={NAMES.card_uuid: card}))
    grant(node, big, cores=75, blocks=4)
    eventually(lambda: limits(node, big)[0] == 75, "the larger share")
    node.stop()
    shutil.rmtree(node.directory / "checkpoint")
    for name in ("limits", "usage"):
        (node.region(small, "c") / name).unlink()
    node.start(wait=200)
    (message,) = eventually(lambda: said(node, "ShareCut"), "the event")
    assert message.startswith("container c: this node lost its records; the share is rebuilt to 25 cores, 4 blocks")


def test_a_kill_between_limits_and_state_ends_in_what_was_granted(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    item = admitted(node, pod("p", container("c", 30, 4)))
    node.stop()
    (old,) = region.read_limits(node.region(item, "c"))
    region.update(node.region(item, "c"), [region.CardLimit(old.uuid, old.minor, 12 * BLOCK_BYTES, 50, 50)])
    node.start(wait=200)
    eventually(lambda: limits(node, item) == (30, 4, 30), "what the state says")
    grant(node, item, cores=50, blocks=12)
    eventually(lambda: limits(node, item) == (50, 12, 50), "what was granted")


def test_of_one_request_nothing_is_carried_out_before_all_of_it_can_be(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that grows has the memory of the one that shrinks, which still uses it; and the card has no room for both."""
    item = admitted(node, pod("p", container("grows", 50, 4), container("shrinks", 50, 20)))
    (card,) = {node.kubelet.cards(item, name)[0] for name in ("grows", "shrinks")}
    used = {"grows": BLOCK_BYTES, "shrinks": 9 * BLOCK_BYTES}
    assert node.daemon is not None

    def look(one: Allocation) -> region.Usage:
        return region.Usage((region.CardUsage(uuid=card, memory_used_bytes=used[one.container]),), ())

    def both() -> tuple[tuple[int, int, int], ...]:
        return limits(node, item, "grows"), limits(node, item, "shrinks")

    monkeypatch.setattr(node.daemon.allocator._regions, "usage", look)
    granted = {
        "grows": resize.Target(CardShare(card, 70, 16)),
        "shrinks": resize.Target(CardShare(card, 30, 8)),
    }
    grant_all(node, item, granted, (100, 24))
    (message,) = eventually(lambda: said(node, "ResizeWaits"), "the event")
    assert message.startswith("container shrinks uses 256 MiB more than its new limit")
    assert both() == ((50, 4, 50), (50, 20, 50))
    used["shrinks"] = BLOCK_BYTES
    eventually(lambda: both() == ((70, 16, 70), (30, 8, 30)), "all of it")
    assert eventually(lambda: said(node, "ResizeCompleted"), "its event") == [
        "container grows: 50 cores, 4 blocks → 70 cores, 16 blocks; container shrinks: 50 cores, 20 blocks → 30 cores, 8 blocks"
    ]
    assert said(node, "ResizeRefused") == [], "what grows was not tried alone"
    saved = {one.container: one.shares for one in StateFile(node.directory / "checkpoint").read().values()}
    assert saved == {name: (target.share,) for name, target in granted.items()}


def test_what_is_allocated_while_the_limits_of_a_request_change_takes_all_of_them_back(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = admitted(node, pod("p", container("one", 40, 8), container("other", 40, 20)))
    (card,) = {node.kubelet.cards(item, name)[0] for name in ("one", "other")}
    assert node.daemon is not None
    looks = iter([1, 1, 1])

    def look(_: Allocation) -> region.Usage:
        return region.Usage((region.CardUsage(uuid=card, memory_used_bytes=next(looks, 5) * BLOCK_BYTES),), ())

    monkeypatch.setattr(node.daemon.allocator._regions, "usage", look)
    grant_all(node, item, {name: resize.Target(CardShare(card, 20, 4)) for name in ("one", "other")})
    eventually(lambda: said(node, "ResizeWaits"), "the event")
    assert limits(node, item, "one") == (40, 8, 40) and limits(node, item, "other") == (40, 20, 40)
    saved = {one.container: one.shares[0].memory_blocks for one in node.daemon.allocator.allocations}
    assert saved == {"one": 8, "other": 20}


def test_a_pod_gets_no_more_in_all_than_its_grant_says(node: Node) -> None:
    """The grant knew other amounts of the container that it does not name, as whoever edits a placement would have it."""
    item = admitted(node, pod("p", container("x", 10, 1), container("y", 80, 8)))
    (card,) = {node.kubelet.cards(item, name)[0] for name in "xy"}
    granted = {"x": resize.Target(CardShare(card, 20, 9))}
    grant_all(node, item, granted, (30, 10))
    (message,) = eventually(lambda: said(node, "ResizeRefused"), "the event")
    assert f"card {card}" in message and "30 cores, 10 blocks" in message and "100 cores, 17 blocks" in message
    assert limits(node, item, "x") == (10, 1, 10)
    grant_all(node, item, granted, (100, 17))
    eventually(lambda: limits(node, item, "x") == (20, 9, 20), "what was granted in all")
