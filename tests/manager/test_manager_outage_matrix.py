"""The outage matrix, a row each: what may be away, lost, full, slow or wrong: during each, refusals are true; after each, nothing is doubled, lost or leaked."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from manager.allocations import state_file
from manager.kubelet.records import CHECKPOINT_FILE
from manager.proto import podresources_pb2 as resources_api
from manager.proto import podresources_pb2_grpc
from tests.manager.manager_kubelet import Rejected
from tests.manager.manager_pods import NAMES, container, eventually, pod
from tests.manager.manager_support import Node
from vcuda.sim import Machine
from vcuda.spec import units

CORES = 200  # of the node's two cards
Patch = pytest.MonkeyPatch
Outage = Callable[[Node, Patch], "contextlib.AbstractContextManager[str]"]


@contextlib.contextmanager
def api_server_away(node: Node, patch: Patch) -> Iterator[str]:
    """For ten minutes by the clock that all waiting goes by."""
    assert node.api is not None
    node.api.failing = True
    real = time.monotonic
    patch.setattr(time, "monotonic", lambda: real() + 600)
    yield ""
    node.api.failing = False


def _restarted(node: Node, *, checkpoint_gone: bool, state_gone: bool) -> None:
    node.kubelet.stop()
    node.stop()
    if checkpoint_gone:
        (node.kubelet.directory / CHECKPOINT_FILE).unlink()
    if state_gone:
        shutil.rmtree(node.directory / "checkpoint")
    node.start()
    node.kubelet.start()
    node.kubelet.wait_devices(CORES)
    if checkpoint_gone:  # it admits its running pods anew, and kills whom we refuse
        for item in sorted(node.kubelet.pods, key=lambda item: str(item["metadata"]["creationTimestamp"])):
            node.kubelet.admit(item)


@contextlib.contextmanager
def kubelets_checkpoint_gone(node: Node, _: Patch) -> Iterator[str]:
    _restarted(node, checkpoint_gone=True, state_gone=False)
    yield ""


@contextlib.contextmanager
def our_state_gone(node: Node, _: Patch) -> Iterator[str]:
    _restarted(node, checkpoint_gone=False, state_gone=True)
    yield ""


@contextlib.contextmanager
def both_gone(node: Node, _: Patch) -> Iterator[str]:
    _restarted(node, checkpoint_gone=True, state_gone=True)
    yield ""


@contextlib.contextmanager
def disk_full(node: Node, patch: Patch) -> Iterator[str]:
    daemon, write = node.daemon, os.write
    assert daemon is not None

    def full(descriptor: int, data: bytes) -> int:
        if descriptor == daemon._state._descriptor:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    patch.setattr(state_file.os, "write", full)
    yield "StateUnwritable: .*No space left on device; make room"
    patch.setattr(state_file.os, "write", write)


@contextlib.contextmanager
def disk_slow(_: Node, patch: Patch) -> Iterator[str]:
    """Every word of the disk takes five seconds, or as long as this lasts."""
    ended = threading.Event()
    for name in ("fsync", "fdatasync"):
        real = getattr(os, name)
        patch.setattr(state_file.os, name, lambda descriptor, real=real: (ended.wait(5), real(descriptor))[1])
    patch.setattr(state_file, "JOURNAL_BYTES", 1)  # and each turn has something to bring there
    yield ""
    ended.set()


class Stepped:
    """The module `time` with another wall clock: gRPC's deadlines, which this process's kubelet waits for, go by the true one."""

    def __init__(self, step_s: float) -> None:
        self.time = lambda: time.time() + step_s
        self.time_ns = lambda: time.time_ns() + int(step_s * 1e9)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def _clock(step_s: float) -> Outage:
    @contextlib.contextmanager
    def stepped(_: Node, patch: Patch) -> Iterator[str]:
        ours = [module for name, module in sys.modules.items() if name.startswith(("manager.", "vcuda."))]
        with patch.context() as step:
            for module in ours:
                if getattr(module, "time", None) is time:
                    step.setattr(module, "time", Stepped(step_s))
            yield ""

    return stepped


@contextlib.contextmanager
def kubelet_restarted_20_times(node: Node, _: Patch) -> Iterator[str]:
    for _turn in range(20):
        node.kubelet.restart()
    node.kubelet.wait_devices(CORES)
    yield ""


class _Silent(podresources_pb2_grpc.PodResourcesListerServicer):
    """Takes every question, and answers none while the test runs."""

    def __init__(self) -> None:
        self.asked, self.ended = 0, threading.Event()

    def List(self, *_: object) -> resources_api.ListPodResourcesResponse:
        self.asked += 1
        self.ended.wait(60)
        return resources_api.ListPodResourcesResponse()


@contextlib.contextmanager
def pod_resources_silent(node: Node, _: Patch) -> Iterator[str]:
    """Also while we start, and when a restarted kubelet's records are wanted for every call."""
    silent, server = _Silent(), grpc.server(futures.ThreadPoolExecutor(8))
    podresources_pb2_grpc.add_PodResourcesListerServicer_to_server(silent, server)
    server.add_insecure_port(f"unix:{node.directory}/none.sock")
    server.start()
    try:
        _restarted(node, checkpoint_gone=False, state_gone=False)
        yield ""
        assert silent.asked
    finally:
        silent.ended.set()
        server.stop(0).wait()
        (node.directory / "none.sock").unlink(missing_ok=True)


OUTAGES: dict[str, Outage] = {
    "API server away 10 min": api_server_away,
    "kubelet's checkpoint gone": kubelets_checkpoint_gone,
    "our state gone": our_state_gone,
    "both gone": both_gone,
    "disk full": disk_full,
    "disk slow": disk_slow,
    "PodResources silent": pod_resources_silent,
    "clock 1 h ahead": _clock(3600.0),
    "clock 1 h back": _clock(-3600.0),
    "kubelet restarted 20 times": kubelet_restarted_20_times,
}  # few descriptors: test_half_open_requests_with_few_descriptors_cost_neither_probes_nor_admissions


class Tenants:
    """Pods on the node, what was promised to each, and whether it still holds."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._promised: dict[str, tuple[dict[str, Any], list[str], int]] = {}

    def admit(self, item: dict[str, Any]) -> None:
        """Raises Rejected; then nothing of the pod may be left."""
        item["metadata"]["creationTimestamp"] = f"2026-01-01T00:00:{len(self._promised):02d}Z"
        assert self.node.api is not None
        self.node.api.put("pods", item)
        try:
            self.node.kubelet.admit(item)
        except Rejected:
            self._gone(item)
            raise
        name = item["spec"]["containers"][0]["name"]
        usage = (self.node.region(item, name) / "usage").stat().st_ino
        self._promised[item["metadata"]["name"]] = (item, self.node.kubelet.cards(item, name), usage)

    def _gone(self, item: dict[str, Any]) -> None:
        assert self.node.api is not None
        self.node.kubelet.remove(item)
        self.node.api.remove("pods", f"default/{item['metadata']['name']}")

    def edit(self, annotations: dict[str, str]) -> None:
        """As their owners may, while they run."""
        assert self.node.api is not None
        for item, _, _ in self._promised.values():
            item["metadata"]["annotations"].update(annotations)
            self.node.api.put("pods", item)

    def check(self) -> None:
        """All run in the regions that they map, on their cards; the books are the sum of them."""
        for item, cards, usage in self._promised.values():
            name = item["spec"]["containers"][0]["name"]
            self.node.kubelet.start_containers(item)
            assert (self.node.region(item, name) / "usage").stat().st_ino == usage
            assert self.node.kubelet.cards(item, name) == cards
        wanted: dict[str, int] = {}
        for item, cards, _ in self._promised.values():
            limits = [each["resources"]["limits"] for each in item["spec"]["containers"]]
            share = sum(int(limit[NAMES.core]) for limit in limits) // len(cards)
            for card in cards:
                wanted[card] = wanted.get(card, 0) + share
        assert all(cores <= 100 for cores in wanted.values())
        eventually(lambda: self._booked() == wanted, f"the books are {self._booked()}, that they say {wanted}", 5)

    def _booked(self) -> dict[str, int]:
        return {card: cores for card, (cores, _) in self.node.booked().items() if cores}

    def end(self) -> None:
        for item, _, _ in self._promised.values():
            self._gone(item)
        eventually(lambda: not any(cores for cores, _ in self.node.booked().values()), "all shares back")
        regions = self.node.directory / "vm/regions"
        eventually(lambda: not any(regions.iterdir()), "the end of all regions")


@pytest.fixture
def tenants(make_node: Callable[..., Node], machine: Machine) -> Tenants:
    """Three kinds of pods on a node of their own."""
    node = make_node(machine.root, with_api=True)
    node.kubelet.start()
    node.start(wait=CORES)
    made = Tenants(node)
    made.admit(pod("plain", container("c", 30, 4)))
    made.admit(pod("prepared", container("c", 20, 4), init=[container("i", 20, 2)]))
    made.admit(pod("whole", container("c", 100)))
    return made


def refuse_too_much(tenants: Tenants, machine: Machine) -> None:
    with pytest.raises(Rejected, match="InsufficientMemory"):
        tenants.admit(pod("too-much", container("c", 10, machine.cards[0].memory_bytes // units.BLOCK_BYTES)))


@pytest.mark.parametrize("name", OUTAGES)
def test_an_outage_doubles_loses_and_leaks_nothing(
    tenants: Tenants, machine: Machine, monkeypatch: Patch, name: str
) -> None:
    tenants.check()
    with OUTAGES[name](tenants.node, monkeypatch) as refusal:
        tenants.check()
        if refusal:
            with pytest.raises(Rejected, match=refusal):
                tenants.admit(pod("during", container("c", 10, 1)))
        else:
            tenants.admit(pod("during", container("c", 10, 1)))
        refuse_too_much(tenants, machine)
        tenants.check()
    tenants.admit(pod("after", container("c", 10, 1)))
    tenants.check()
    tenants.end()


@pytest.mark.parametrize("name", ["kubelet's checkpoint gone", "our state gone", "both gone"])
def test_what_owners_edit_on_running_pods_costs_them_nothing_in_an_outage(
    tenants: Tenants, machine: Machine, monkeypatch: Patch, name: str
) -> None:
    tenants.edit({NAMES.core_limit: "banana"})
    with OUTAGES[name](tenants.node, monkeypatch):
        tenants.check()
        refuse_too_much(tenants, machine)
        tenants.admit(pod("during", container("c", 50, 1)))
    tenants.check()
    tenants.end()
