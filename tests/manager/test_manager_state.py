"""What is allocated survives: restarts, a crash, lost state, a reboot; and starts are refused that would break it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from localcluster.kubelet.devices import Held
from manager.allocate import allocator as allocation_module
from manager.allocations import record
from manager.allocations.record import Allocation
from manager.allocations.state_file import StateError, StateFile
from manager.errors import Refusal, StartError
from manager.kubelet.records import Entry, PodResources
from manager.regions.storage import Storage
from tests.manager.manager_kubelet import Rejected
from tests.manager.manager_pods import NAMES, container, eventually, pod
from tests.manager.manager_support import Node, save_state
from vcuda import region
from vcuda.sim import Machine


def test_a_restart_keeps_everything(node: Node) -> None:
    node.start(wait=200)
    pods = [pod("a", container("c", 30, 10)), pod("b", container("c", 100, 1))]
    for item in pods:
        node.kubelet.admit(item)
    booked, inode = node.booked(), (node.region(pods[0], "c") / "usage").stat().st_ino
    node.stop()
    node.start(wait=200)
    assert node.booked() == booked
    assert (node.region(pods[0], "c") / "usage").stat().st_ino == inode  # a running container maps it
    assert len(node.arbiter.regions) == 2
    node.kubelet.start_containers(pods[0])


@pytest.mark.parametrize("how", ["deleted", "truncated", "one call behind"])
def test_lost_state_is_rebuilt_from_kubelets_checkpoint(node: Node, how: str) -> None:
    node.start(wait=200)
    item = pod("a", container("c", 30, 10), annotations={NAMES.core_limit: "50", NAMES.priority: "high"})
    whole = pod("b", container("c", 100))
    node.kubelet.admit(item)
    node.kubelet.admit(whole)
    booked = node.booked()
    before = {item.key: item for item in node.daemon.allocator.allocations} if node.daemon else {}
    node.stop()
    path = node.directory / "checkpoint/state.json"
    if how == "deleted":
        path.unlink()
    elif how == "truncated":
        path.write_text(path.read_text()[:100])
    else:
        document = [entry for entry in StateFile(path.parent).load().values() if entry.pod_name == "a"]
        behind = [Allocation(**{**vars(entry), "held": {}}) for entry in document]
        save_state(StateFile(path.parent), behind)
    daemon = node.start(wait=200)
    assert node.booked() == booked
    for allocation in daemon.allocator.allocations:
        expected = before[allocation.key]
        assert (
            allocation.name,
            allocation.shares,
            allocation.held,
            allocation.core_limit,
            allocation.priority,
        ) == ((expected.name, expected.shares, expected.held, expected.core_limit, expected.priority))
        assert allocation.minors == expected.minors
    assert bool(list(path.parent.glob("state.json.damaged-*"))) == (how == "truncated")
    node.kubelet.start_containers(item)


def test_state_and_regions_lost_together_are_rebuilt_without_the_pods_that_have_ended(node: Node) -> None:
    """Kubelet's records keep ended pods until its next allocation; a region that is gone can't tell its card's minor."""
    daemon = node.start(wait=200)
    running, whole, ended = (
        pod("r", container("c", 30, 10)),
        pod("w", container("c", 100)),
        pod("e", container("c", 9, 1)),
    )
    for item in (running, ended, whole):
        node.kubelet.admit(item)
    before = {item.pod_name: item.minors for item in daemon.allocator.allocations}
    node.stop()
    ended["status"]["phase"] = "Succeeded"
    for item in (running, ended, whole):
        Storage.remove(node.region(item, "c"))
    (node.directory / "checkpoint/state.json").unlink()
    daemon = node.start(wait=200)
    assert {item.pod_name: item.minors for item in daemon.allocator.allocations} == {
        name: before[name] for name in ("r", "w")
    }
    node.kubelet.start_containers(running)


@pytest.mark.parametrize("known_to", ["nobody", "the API server", "the kernel"])
def test_what_kubelet_remembers_of_a_pod_that_is_gone_is_not_booked_at_a_start(
    make_node: Callable[..., Node], machine: Machine, tmp_path: Path, known_to: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Kubelet's checkpoint keeps it until the next pod is admitted, and the share would be in everybody's way."""
    node = make_node(machine.root, with_api=True)
    node.kubelet.start()
    groups = tmp_path / "cgroup/devices"
    groups.mkdir(parents=True)
    (groups / "devices.list").write_text("a *:* rwm\n")
    options = ("--allocation-check-period=3600", f"--cgroup-root={groups.parent}")
    node.start(*options, wait=200)
    assert node.api is not None
    stays, item = (pod(name, container("c", 30, 10)) for name in ("stays", "goes"))
    for each in (stays, item):
        node.api.put("pods", each)
        node.kubelet.admit(each)
    node.kubelet.pods.remove(item)  # its devices are in the checkpoint still
    node.api.delete(item)
    eventually(lambda: not node.region(item, "c").exists(), "the deleted pod's region goes")
    node.stop()
    if known_to == "the API server":
        node.api.put("pods", item)
    elif known_to == "the kernel":
        folder = groups / f"kubepods/burstable/pod{item['metadata']['uid']}/0123"
        folder.mkdir(parents=True)
        (folder / "cgroup.procs").write_text("7\n")
    node.start(*options, wait=200)
    # The next search for pods that are gone may have freed it again.
    assert ("rebuilt from kubelet's records" in caplog.text) == (known_to != "nobody")


def test_a_crash_between_region_and_state_leaves_nothing(node: Node) -> None:
    node.start(wait=200)
    item = pod("a", container("c", 30, 10))
    node.kubelet.admit(item)
    node.stop()
    orphan = node.directory / "vm/regions/other-uid/c"
    orphan.mkdir(parents=True)
    (orphan / "limits").touch()
    empty = node.directory / "vm/regions/uid-of-a-pod-whose-container-had-none-yet"
    empty.mkdir()
    node.start(wait=200)
    assert not orphan.parent.exists() and not empty.exists()
    assert node.region(item, "c").exists()


def test_state_that_cannot_be_saved_is_a_refusal_and_books_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = node.start(wait=200)

    def refuse(*_: object) -> None:
        raise StateError("cannot write the state file: disk full")

    monkeypatch.setattr(daemon.allocator.book.state, "append", refuse)
    item = pod("a", container("c", 30, 10))
    with pytest.raises(Rejected, match="StateUnwritable: default/a: cannot write the state file"):
        node.kubelet.admit(item)
    assert set(node.booked().values()) == {(0, 0)}
    assert not node.region(item, "c").exists() and not node.arbiter.regions


def test_a_start_on_a_full_disk_serves_what_is_there_and_takes_more_when_there_is_room(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    node.start(wait=200)
    node.kubelet.admit(pod("a", container("c", 30, 10)))
    booked = node.booked()
    node.stop()
    with monkeypatch.context() as disk:
        disk.setattr(StateFile, "_written", full)
        disk.setattr(os, "posix_fallocate", full)
        node.start(wait=200)
        assert node.booked() == booked
        status, text = node.get("/readyz")
        assert status == 503 and f"{node.directory}/checkpoint: No space left on device; make room" in text
        with pytest.raises(Rejected, match=r"StateUnwritable: .*No space left on device"):
            node.kubelet.admit(pod("b", container("c", 30, 10)))
        assert node.booked() == booked
    node.kubelet.admit(pod("c", container("c", 30, 10)))
    node.stop()
    node.start(wait=200)
    assert sum(cores for cores, _ in node.booked().values()) == 60


def test_a_pod_that_went_while_nothing_could_be_saved_is_forgotten_later(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = node.start(wait=200)
    item = pod("a", container("c", 30, 10))
    node.kubelet.admit(item)
    monkeypatch.setattr(allocation_module, "ABSENT_GRACE_S", 0.0)

    def refuse(*_: object) -> None:
        raise StateError("cannot write the state file: disk full")

    with monkeypatch.context() as patch:
        patch.setattr(daemon.allocator.book.state, "append", refuse)
        node.kubelet.remove(item)
        with pytest.raises(Refusal, match="disk full"):
            daemon.allocator.collect()
        assert daemon.allocator.allocations and node.region(item, "c").exists()
    daemon.allocator.collect()
    eventually(lambda: not node.region(item, "c").exists(), "the end of the region")
    assert not daemon.allocator.allocations and not daemon.allocator.book.state.load()


def test_after_a_reboot_regions_are_made_again_before_the_container_starts(node: Node) -> None:
    node.start(wait=200)
    item = pod("a", container("c", 30, 10))
    node.kubelet.admit(item)
    Storage.remove(node.region(item, "c"))
    node.kubelet.start_containers(item)
    assert region.read_limits(node.region(item, "c"))[0].cores == 30
    node.stop()
    Storage.remove(node.region(item, "c"))
    node.start(wait=200)
    assert region.read_limits(node.region(item, "c"))[0].cores == 30


def test_a_start_is_refused_when_the_cards_minor_has_changed(node: Node) -> None:
    """Kubelet replays the old answer, which names the old node."""
    daemon = node.start(wait=200)
    item = pod("a", container("c", 30, 10))
    node.kubelet.admit(item)
    ((key, before),) = daemon.allocator.book.index.items()
    moved = dict.fromkeys(before.minors, 7)
    daemon.allocator.book.index[key] = Allocation(**{**vars(before), "minors": moved})
    with pytest.raises(Rejected, match=r"CardChanged: .* was /dev/nvidia7 at admission and is /dev/nvidia\d now"):
        node.kubelet.start_containers(item)


def test_a_start_is_refused_when_kubelet_gave_the_devices_to_another(node: Node) -> None:
    node.start(wait=200)
    item = pod("a", container("c", 30, 10))
    node.kubelet.admit(item)
    uid = item["metadata"]["uid"]
    records = node.kubelet.devices.records
    records["other", "x"] = records.pop((uid, "c"))
    node.kubelet.devices.save()
    other = pod("other", container("x", 30, 10), uid="other")
    with pytest.raises(Rejected, match=r"CallsDisagree: .*kubelet gave these devices to container 'x'"):
        node.kubelet.start_containers(other)


@pytest.mark.parametrize("checkpoint", ["ours", "of another", "without it"])
@pytest.mark.parametrize("pod_resources", ["ours", "of another"])
def test_pod_resources_are_asked_only_where_the_checkpoint_does_not_settle_a_start(
    node: Node, monkeypatch: pytest.MonkeyPatch, checkpoint: str, pod_resources: str
) -> None:
    """Each of their answers lists the whole node; either record that names our container lets it start."""
    node.start(wait=200)
    item, beside = pod("a", container("c", 30, 10)), pod("beside", container("c", 30, 10))
    for one in (beside, item):
        node.kubelet.admit(one)
    devices = node.kubelet.devices
    held = devices.records[item["metadata"]["uid"], "c"]
    owner = "a" if pod_resources == "ours" else "other"
    answer = [
        Entry("c", kind, record.Held.of(held[name].devices), pod=("default", owner))
        for kind, name in (("core", NAMES.core), ("memory", NAMES.memory))
    ]
    asked = []

    def listed(_self: PodResources, timeout: float) -> list[Entry]:
        asked.append(timeout)
        return answer

    monkeypatch.setattr(PodResources, "list", listed)
    if checkpoint != "ours":
        del devices.records[item["metadata"]["uid"], "c"]
    if checkpoint == "of another":
        devices.records["other", "c"] = held
    devices.save()
    devices.records[item["metadata"]["uid"], "c"] = held  # whom kubelet starts
    if "ours" in (checkpoint, pod_resources):
        node.kubelet.start_containers(item)
    else:
        with pytest.raises(Rejected, match=r"CallsDisagree: .*kubelet gave these devices to container 'c' of pod"):
            node.kubelet.start_containers(item)
    assert bool(asked) == (checkpoint != "ours")


def test_a_start_with_devices_that_nobody_was_given_is_refused(node: Node) -> None:
    node.start(wait=200)
    node.kubelet.devices.records["u", "c"] = {NAMES.core: Held(["nothing-1"], b"")}
    with pytest.raises(Rejected, match="NotAllocated: 1 devices for core were never given"):
        node.kubelet.start_containers(pod("p", container("c", 1, 1), uid="u"))


def test_pods_that_end_or_go_free_their_share(make_node: Callable[..., Node], machine: Machine) -> None:
    node = make_node(machine.root, with_api=True)
    node.kubelet.start()
    node.start("--allocation-check-period=3600", wait=200)  # the watch alone must notice
    assert node.api is not None
    pods = [pod(name, container("c", 30, 10)) for name in ("a", "b", "kept")]
    for item in pods:
        node.api.put("pods", item)
        node.kubelet.admit(item)
    node.kubelet.remove(pods[0])
    node.api.delete(pods[0])
    eventually(lambda: not node.region(pods[0], "c").exists(), "the deleted pod's region goes")
    pods[1]["status"]["phase"] = "Failed"
    node.api.delete(pods[1])  # still in kubelet's list, where it has ended
    eventually(lambda: not node.region(pods[1], "c").exists(), "the failed pod's region goes")
    assert node.region(pods[2], "c").exists()
    assert sum(cores for cores, _ in node.booked().values()) == 30


def test_a_restarted_kubelet_with_an_empty_list_frees_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = node.start(wait=200)
    item = pod("a", container("c", 30, 10))
    node.kubelet.admit(item)
    node.kubelet.pods.clear()
    assert daemon.allocator.collect() == []
    assert node.region(item, "c").exists()
    monkeypatch.setattr(allocation_module, "ABSENT_GRACE_S", 0.0)
    eventually(lambda: not node.region(item, "c").exists(), "a pod that stays away goes at last")


def test_two_daemons_never_share_a_node(node: Node) -> None:
    node.start(wait=200)
    first = node.daemon
    with pytest.raises(StartError, match="another gpu-manager holds"):
        node.start()
    node.daemon = first
