"""Calls that go wrong half-way: refused with the reason and the way out, and booked is what was booked before."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from manager import doctor
from manager.allocate import allocator as allocation_module
from manager.allocate import book as book_module
from manager.allocate.allocator import Allocator
from manager.allocations import state_file
from manager.allocations.state_file import StateError
from manager.errors import Refusal
from manager.kubelet import device_ids
from tests.manager.manager_kubelet import Rejected
from tests.manager.manager_pods import NAMES, container, pod
from tests.manager.manager_support import Node
from vcuda import logs, region

QUIET = ("--health-check-interval=3600", "--allocation-check-period=3600")


@pytest.fixture
def allocator(node: Node) -> Allocator:
    """Of a node where nothing happens by itself."""
    daemon = node.start(*QUIET, wait=200)
    daemon._housekeeping.stop()  # its first turn waits for kubelet to be quiet: it would come in the middle of a test
    assert daemon._housekeeping.worker.join(30)
    return daemon.allocator


def admitted(node: Node) -> dict[str, Any]:
    item = pod("a", container("c", 30, 10))
    node.kubelet.admit(item)
    return item


def full(*_: object) -> None:
    raise StateError("cannot write the state file /x: disk full; make room or make it writable")


def test_a_call_while_another_one_hangs_is_refused_and_goes_well_later(
    node: Node, allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book_module, "LOCK_TIMEOUT_S", 0.01)
    item = pod("a", container("c", 30, 10))
    with (
        allocator.book.lock,
        pytest.raises(Rejected, match="Busy: another call has not ended in time; kubelet may try again"),
    ):
        node.kubelet.admit(item)
    assert allocator.allocations == () and not node.region(item, "c").exists()
    node.kubelet.admit(item)
    assert len(allocator.allocations) == 1


def test_a_second_call_that_can_not_be_saved_leaves_the_first_as_it_was(
    node: Node, allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = pod("a", container("c", 30, 10))
    node.kubelet.pods.append(item)
    node.kubelet.devices.give(item, "c", NAMES.core, 30)
    before = allocator.allocations
    with monkeypatch.context() as patch:
        patch.setattr(allocator.book.state, "append", full)
        with pytest.raises(Rejected, match=r"StateUnwritable: default/a: .*disk full; make room"):
            node.kubelet.devices.give(item, "c", NAMES.memory, 10)
    assert allocator.allocations == before and set(before[0].held) == {"core"}
    assert region.read_limits(node.region(item, "c"))[0].cores == 30
    node.kubelet.devices.give(item, "c", NAMES.memory, 10)
    assert set(allocator.allocations[0].held) == {"core", "memory"}


def test_a_container_that_asks_for_something_else_in_its_second_call_is_refused(
    node: Node, allocator: Allocator
) -> None:
    item = pod("a", container("c", 30, 10))
    node.kubelet.pods.append(item)
    node.kubelet.devices.give(item, "c", NAMES.core, 30)
    changed = copy.deepcopy(item)
    changed["spec"]["containers"][0]["resources"]["limits"][NAMES.memory] = "12"
    node.kubelet.pods[:] = [changed]
    with pytest.raises(
        Rejected,
        match="CallsDisagree: default/a: container 'c' asks for 30 cores and 12 blocks, but 30 and 10 were booked for it; recreate the pod",
    ):
        node.kubelet.devices.give(changed, "c", NAMES.memory, 12)
    assert allocator.allocations[0].memory_blocks == 10 and set(allocator.allocations[0].held) == {"core"}


def test_a_container_whose_card_is_gone_is_not_started(node: Node, allocator: Allocator) -> None:
    item = admitted(node)
    (uuid,) = (share.uuid for share in allocator.allocations[0].shares)
    inventory = allocator._inventory
    left = tuple(card for card in inventory.snapshot.cards if card.card.uuid != uuid)
    inventory._snapshot = dataclasses.replace(inventory.snapshot, cards=left)
    gone = f"CardChanged: default/a.*: card {uuid} is gone from this node; recreate the pod"
    with pytest.raises(Rejected, match=gone):
        node.kubelet.start_containers(item)
    assert len(allocator.allocations) == 1


def test_a_container_whose_driver_directory_is_gone_is_not_started(
    node: Node, allocator: Allocator, caplog: pytest.LogCaptureFixture
) -> None:
    item = admitted(node)
    (mine,) = allocator.allocations
    allocator.book.index[mine.key] = dataclasses.replace(mine, mirror=f"{node.directory}/gone")
    with pytest.raises(
        Rejected,
        match=r"DriverUnavailable: default/a/c: the driver directory .*/gone that this container mounts is gone; recreate the pod",
    ):
        node.kubelet.start_containers(item)
    said = {"pod": "default/a", "uid": mine.pod_uid, "reason": "DriverUnavailable"}
    assert [logs.of(record) for record in caplog.records if "refused" in record.message] == [said]
    allocator.book.index[mine.key] = mine
    node.kubelet.start_containers(item)


def test_ids_are_preferred_even_for_a_call_that_will_be_refused(node: Node, allocator: Allocator) -> None:
    """Kubelet must get as many as it asked for, with those that it insists on."""
    ids = [device.id for device in node.kubelet.listed(NAMES.core) or ()]
    node.kubelet.pods.append(pod("a", container("c", 30)))
    chosen = allocator.preferred("core", ids, ids[7:9], 30)
    assert chosen[:2] == ids[7:9] and len(set(chosen)) == 30 and set(chosen) <= set(ids)


def test_a_long_journal_that_can_not_be_folded_is_said_and_serving_goes_on(
    node: Node, allocator: Allocator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(state_file, "JOURNAL_BYTES", 1)
    with monkeypatch.context() as patch:
        patch.setattr(allocator.book.state, "fold", full)
        first = admitted(node)
        allocator.book.sync()
    assert "disk full; make room" in caplog.text
    allocator.book.sync()
    assert list(allocator.book.state.read()) == [(first["metadata"]["uid"], "c")]


def test_a_static_pod_that_comes_again_while_others_are_cleared_away_keeps_its_region(
    node: Node, allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocation_module, "ABSENT_GRACE_S", 0.0)
    items = [pod(name, container("c", 30, 10)) for name in ("first", "static")]
    for item in items:
        node.kubelet.admit(item)
    first, static = allocator.allocations
    remove = allocator._regions.remove

    def come_again(item: Any) -> None:
        remove(item)
        allocator.book.index[static.key] = static

    monkeypatch.setattr(allocator._regions, "remove", come_again)
    for item in items:
        node.kubelet.remove(item)
    assert [item.key for item in allocator.collect()] == [first.key, static.key]
    assert not Path(first.region).exists() and Path(static.region, "limits").exists()


def test_a_region_that_can_not_be_made_again_at_a_start_is_named_and_the_others_serve(
    node: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.start(*QUIET, wait=200)
    items = [pod(name, container("c", 30, 10)) for name in ("lost", "well")]
    for item in items:
        node.kubelet.admit(item)
    node.stop()
    shutil.rmtree(node.region(items[0], "c").parent, ignore_errors=True)
    make = region.create

    def no_room(directory: Path, *more: Any) -> None:
        if items[0]["metadata"]["uid"] in str(directory):
            raise OSError(28, "No space left on device")
        make(directory, *more)

    monkeypatch.setattr(region, "create", no_room)
    node.start(*QUIET, "--usage-storage=directory", wait=200)
    assert "cannot make the region of default/lost/c: [Errno 28] No space left on device" in caplog.text
    node.kubelet.start_containers(items[1])
    with pytest.raises(Rejected, match="RegionUnavailable: default/lost/c: cannot make the region"):
        node.kubelet.start_containers(items[0])


@pytest.mark.parametrize("name", ["", ".", "..", "a/b"])
def test_a_name_that_leads_elsewhere_gets_no_region(allocator: Allocator, name: str) -> None:
    for pair in ((name, "c"), ("u", name)):
        with pytest.raises(Refusal, match=r"RegionUnavailable: .*can't name a region's folder"):
            allocator._regions.path_for(*pair)


def test_ids_that_kubelet_insists_on_are_taken_whatever_their_card() -> None:
    placed, other = (device_ids.card_key(uuid) for uuid in ("GPU-0", "GPU-1"))
    offered = [f"{key}-{slot}" for slot in range(3) for key in (other, placed)]
    chosen = device_ids.prefer(offered, [f"{other}-0", f"{placed}-1"], 4, {"GPU-0": 3})
    assert chosen == [f"{other}-0", f"{placed}-1", f"{placed}-0", f"{placed}-2"]
    assert device_ids.prefer(offered, [], 4, {"GPU-0": 4}) is None  # kubelet offers three of that card


def test_what_others_wrote_is_told_in_one_clean_line() -> None:
    """A refusal becomes the pod's message and an event; the doctor's lines stand on a terminal."""
    hostile = "\x1b[2J\r\nall well\u202e" * 1000
    lines = [str(Refusal("Busy", hostile)), *doctor.text([doctor.Check("x", doctor.Verdict.OK, hostile)]).splitlines()]
    assert len(lines) == 2 and len(lines[0]) < 1100
    assert all(char.isprintable() for line in lines for char in line)
