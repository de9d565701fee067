"""The incidents that a node daemon can cause or prevent: each once with our protection taken away, which shows the failure, and once with it.

`pytest tests/manager/test_manager_incidents.py -s` prints what a container gets in either case. What the interposer does for I4, I6 and I7 is
tested beside it (tests/vcuda); I1 with the real runc and kubelet in tests/kube.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from manager.allocate.decide import Decider
from manager.allocate.find_pod import PodFinder
from manager.allocate.matcher import Candidate
from manager.allocations.record import Allocation
from manager.cards import device_nodes
from manager.cgroups.devices import missing
from manager.container import driver_dir, response
from manager.process import sdnotify
from tests.manager.manager_kubelet import Rejected
from tests.manager.manager_pods import NAMES, container, pod
from tests.manager.manager_support import Node
from tests.support.ldcache import ELF
from vcuda import region
from vcuda.sim import Machine, SimCard
from vcuda.spec import placement
from vcuda.spec.placement import CardShare, Placement

BLOCK = 256 * 2**20
BEFORE, OURS = "before", "ours"
both = pytest.mark.parametrize("which", [BEFORE, OURS])


def show(incident: str, which: str, what: object) -> None:
    print(f"\n{incident} {which:6}: {what}")


@both
def test_i1_an_update_of_the_container_keeps_its_devices(
    node: Node, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """runc rewrites the device cgroup from the container's own configuration. Before: a prestart hook added the card behind its back."""
    daemon = node.start(wait=200)
    if which == BEFORE:
        build = response.build

        def by_hook(*arguments: Any) -> Any:
            answer = build(*arguments)
            del answer.devices[:]
            return answer

        monkeypatch.setattr(response, "build", by_hook)
    item = pod("a", container("c", 30, 10))
    node.kubelet.admit(item)
    (allocation,) = daemon.allocator.allocations
    needed = daemon._device_numbers(allocation)
    configured = [spec.container_path for spec in node.kubelet.answer(item, "c").devices]
    after_update = "".join(
        f"c {needed[path][0]}:{needed[path][1]} rwm\n" for path in configured
    )  # as `runc update` leaves it
    lost = missing(after_update, needed)
    show("I1", which, f"after an update the container can no longer open {', '.join(lost) or 'nothing'}")
    assert bool(lost) == (which == BEFORE)
    assert {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0"} <= set(needed)


@both
@pytest.mark.skipif(os.geteuid() != 0, reason="making device nodes needs root")
def test_i2_a_node_that_came_late_is_given(
    node: Node, machine: Machine, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/nvidia-uvm is not there when the daemon starts. Before: looked at once, at start, and left out ever after."""
    machine.remove_node("nvidia-uvm")
    if which == BEFORE:
        seen = [name for name in ("nvidiactl", "nvidia-uvm", "nvidia0") if (machine.root / "dev" / name).exists()]
        once = tuple(device_nodes.DeviceNode(f"/dev/{name}", str(machine.root / "dev" / name)) for name in seen)
        monkeypatch.setattr(device_nodes, "full_set", lambda *_: once)
    node.start(wait=200)
    item = pod("a", container("c", 30, 10))
    node.kubelet.admit(item)
    given = {spec.container_path for spec in node.kubelet.answer(item, "c").devices}
    show("I2", which, f"given {', '.join(sorted(given))}")
    assert ("/dev/nvidia-uvm" in given) == (which == OURS)


@both
def test_i3_an_upgrade_leaves_running_containers_alone(
    tmp_path: Path, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running container maps the shim. Before: the new one was written over it in place."""
    host = tmp_path / "host/usr/lib64"
    host.mkdir(parents=True)
    for name in ("libcuda", "libnvidia-ml"):
        (host / f"{name}.so.535.1.2").write_text(ELF)
        (host / f"{name}.so.1").symlink_to(f"{name}.so.535.1.2")
    shims = tmp_path / "shims"
    beside = (tmp_path / "preload" / driver_dir.PRELOAD, tmp_path / "bin/vcuda")
    for path in (*(shims / name for name in driver_dir.SHIMS), *beside):
        path.parent.mkdir(exist_ok=True)
        path.write_text("the old shim")
    root = driver_dir.HostRoot(tmp_path / "host")
    first = driver_dir.make(tmp_path / "vm", root, shims)
    with (first.lib64 / "libcuda.so.1").open() as mapped:
        for name in driver_dir.SHIMS:
            (shims / name).write_text("the new shim")
        if which == BEFORE:
            (first.lib64 / "libcuda.so.1").write_text((shims / "libcuda.so.1").read_text())
        second = driver_dir.make(tmp_path / "vm", root, shims)
        found = mapped.read()
    show("I3", which, f"the running container now maps {found!r}, new ones get {second.directory.name}")
    assert found == ("the new shim" if which == BEFORE else "the old shim")
    assert (second.lib64 / "libcuda.so.1").read_text() == "the new shim"
    assert second.directory != first.directory


def test_i3_restarts_of_daemon_and_kubelet_leave_running_containers_alone(node: Node) -> None:
    """The file that a running container maps is the same one, and so is its answer; new pods are served."""
    node.start(wait=200)
    item = pod("a", container("c", 30, 10))
    node.kubelet.admit(item)
    usage = (node.region(item, "c") / "usage").stat()
    for restart in ("the daemon", "kubelet", "both"):
        if restart != "kubelet":
            node.stop()
            node.start()
        if restart != "the daemon":
            node.kubelet.restart()
        node.kubelet.wait_devices(200)
        node.kubelet.start_containers(item)
        assert (node.region(item, "c") / "usage").stat().st_ino == usage.st_ino
        node.kubelet.admit(pod(restart.replace(" ", "-"), container("c", 5, 1)))
    show(
        "I3",
        OURS,
        "three restarts, the running container's region is the same file, three new pods were served",
    )


def test_i5_a_single_card_and_no_systemd_frighten_nobody(
    make_machine: Callable[..., Machine], make_node: Callable[..., Node], caplog: pytest.LogCaptureFixture
) -> None:
    """One card has no topology, a container no systemd: neither is worth a warning."""
    node = make_node(make_machine(SimCard(numa_node=-1)).root)
    node.kubelet.start()
    with caplog.at_level(logging.DEBUG):
        node.start(wait=100)
        sdnotify.notify(None, "READY=1")
        node.kubelet.admit(pod("whole", container("c", 100)))
    told = [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and "PodResources" not in record.getMessage()
    ]
    show("I5", OURS, f"warnings: {told}")
    assert told == []
    assert "no NUMA node" in node.get("/graph")[1]


@both
def test_i8_every_pod_gets_its_own_limits(
    make_machine: Callable[..., Machine],
    make_node: Callable[..., Node],
    which: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal cores, different memory, bound at once, admitted in any order. Before: the oldest pod of this size was taken."""
    pods = [pod(f"p{number}", container("c", 5, 1 + number)) for number in range(20)]
    if which == BEFORE:

        def by_size_and_time(
            self: PodFinder,
            resource: str,
            _count: int,
            allocations: Mapping[tuple[str, str], Allocation],
            *_: object,
        ) -> tuple[Candidate, list[Any]]:
            for item in pods:
                held = allocations.get((item["metadata"]["uid"], "c"))
                if held is None or resource not in held.held:
                    return Candidate(item, "c"), []
            raise AssertionError("nobody waits")

        monkeypatch.setattr(PodFinder, "find", by_size_and_time)
    node = make_node(make_machine(*(SimCard() for _ in range(4))).root)
    node.kubelet.start()
    node.start(wait=400)
    order = random.Random(7).sample(pods, len(pods))
    wrong = 0
    for item in order:
        node.kubelet.admit(item, start=False)
        given = int(node.kubelet.answer(item, "c").annotations[NAMES.memory]) // BLOCK
        wrong += given != int(item["spec"]["containers"][0]["resources"]["limits"][NAMES.memory])
    show("I8", which, f"{wrong} of {len(pods)} pods run under another pod's limit")
    if which == BEFORE:
        assert wrong > len(pods) // 2
    else:
        assert wrong == 0
        limits = [region.read_limits(node.region(item, "c"))[0].memory_bytes for item in pods]
        assert limits == [(1 + number) * BLOCK for number in range(len(pods))]


@both
def test_i9_the_schedulers_card_or_a_refusal(
    node: Node, machine: Machine, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extender said the second card. Before: the daemon chose by itself, or filled up a card that was full already."""
    if which == BEFORE:
        decide = Decider.decide

        def by_itself(self: Decider, candidate: Candidate, *more: Any) -> Allocation:
            metadata = {**candidate.pod["metadata"], "annotations": {}}
            return decide(self, dataclasses.replace(candidate, pod={**candidate.pod, "metadata": metadata}), *more)

        monkeypatch.setattr(Decider, "decide", by_itself)
    node.start(wait=200)
    node.kubelet.admit(pod("other", container("c", 10, 1)))
    second = machine.cards[1].uuid

    def placed(name: str, cores: int) -> dict[str, Any]:
        written = placement.encode(Placement({"c": (CardShare(second, cores, 1),)}))
        return pod(name, container("c", cores, 1), annotations={NAMES.placement: written})

    first = placed("first", 60)
    node.kubelet.admit(first)
    (card,) = node.kubelet.cards(first, "c")
    show("I9", which, f"the extender said card {second[-4:]}, the container got {card[-4:]}")
    assert (card == second) == (which == OURS)
    try:
        node.kubelet.admit(placed("second", 60))  # the card has 40 left
        outcome = "given another card, silently"
    except Rejected as refused:
        outcome = f"refused: {refused}"
    show("I9", which, f"a placement on a full card is {outcome}")
    if which == OURS:
        assert "InsufficientCores" in outcome
