"""The drift alarm: charges of GPU time against NVML's utilization, what is told and when, and what is left out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from manager.allocations.record import Allocation
from manager.audit.time_drift import Drift
from manager.cards.driver import CardProcess, DriverError, ProcessUtilization
from manager.cards.nvml import open_driver
from manager.config.reader import parse
from manager.errors import StartError
from tests.manager.manager_pods import NAMES, allocation, container, eventually, pod
from tests.manager.manager_proc import Proc, group
from tests.manager.manager_support import Node
from vcuda import region
from vcuda.driver.root import HostRoot
from vcuda.region import CardUsage, Usage
from vcuda.sim import Machine, SimCard
from vcuda.spec.placement import CardShare

CARD = "GPU-1"
UID = "a2345678-1234-1234-1234-123456789abc"
PID = 10


class World:
    """A container on a card, what it is charged per second, and what NVML says; turns are driven by hand."""

    def __init__(self, directory: Path) -> None:
        folder = directory / UID / "c"
        folder.mkdir(parents=True)
        (folder / "limits").touch()
        self.item = allocation(CardShare(CARD, 30, 4), pod_uid=UID, region=str(folder))
        self.proc = directory / "proc"
        self.now = 1000.0
        self.gpu_ns = 0
        self.charged = 30.0
        self.percent: dict[int, int] | None = {PID: 30}
        self.held: tuple[int, ...] = (PID,)
        self.metered = True
        self.reads = 0
        self.told: list[str] = []
        self.over: list[str] = []
        self.add(PID)
        self.drift = Drift(
            settings=lambda: SimpleNamespace(drift_tolerance=20),
            inventory=SimpleNamespace(utilization=lambda uuid, _: self.samples() if uuid == CARD else None),
            overhead=SimpleNamespace(held=lambda _: tuple(CardProcess(pid, 0) for pid in self.held)),
            regions=SimpleNamespace(
                usage=lambda _: Usage((CardUsage(uuid=CARD, gpu_time_ns=self.gpu_ns),), ()),
                metered=lambda _, uuid: self.metered and uuid == CARD,
            ),
            allocations=lambda: [self.item],
            tell=self.tell,
            owners=Proc(self.proc.parent).owners(),
            clock=lambda: self.now,
        )

    def tell(self, _item: Allocation, reason: str, message: str) -> None:
        (self.told if reason == "GpuTimeDrift" else self.over).append(message)

    def add(self, pid: int) -> None:
        Proc(self.proc.parent).add(pid, group(UID))

    def samples(self) -> tuple[ProcessUtilization, ...] | None:
        self.reads += 1
        if self.percent is None:
            return None
        return tuple(ProcessUtilization(pid, percent) for pid, percent in self.percent.items())

    def turn(self) -> None:
        self.now += 1.0
        self.gpu_ns += int(self.charged * 1e7)
        self.drift.turn()

    def windows(self, number: int) -> None:
        if not self.drift._before:
            self.drift.turn()
        for _ in range(10 * number):
            self.turn()

    @property
    def found(self) -> float | None:
        return self.drift.found.get((self.item.key, CARD))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize("percent", [51, 9])
def test_what_stays_apart_for_two_windows_is_told_once_per_onset(world: World, percent: int) -> None:
    world.percent = {PID: percent}
    world.windows(1)
    assert world.found == pytest.approx(percent - 30) and world.told == []
    world.windows(1)
    (message,) = world.told
    assert f"container c was charged 30 hundredths of card {CARD} over 10 s, and NVML saw {percent}:" in message
    world.windows(3)
    assert len(world.told) == 1
    world.percent = {PID: 50}  # just within the tolerance
    world.windows(1)
    world.percent = {PID: percent}
    world.windows(1)
    assert len(world.told) == 1
    world.windows(1)
    assert len(world.told) == 2


@pytest.mark.parametrize(("percent", "told"), [(95, 1), (51, 1), (50, 0)])
def test_who_stays_above_its_limit_is_told_also_where_it_was_charged_all_of_it(
    world: World, percent: int, told: int
) -> None:
    """Who writes its own credit is charged what it takes: nothing drifts."""
    world.percent, world.charged = {PID: percent}, float(percent)
    world.windows(1)
    assert world.over == []
    world.windows(3)
    assert len(world.over) == told and world.told == []
    if told:
        assert f"may use 30 hundredths of card {CARD}, and NVML saw {percent}" in world.over[0]
    world.percent = {PID: 30}
    world.windows(1)
    world.percent = {PID: percent}
    world.windows(2)
    assert len(world.over) == 2 * told


def test_a_window_apart_between_two_that_agree_is_not_told(world: World) -> None:
    for _ in range(3):
        world.percent = {PID: 90}
        world.windows(1)
        world.percent = {PID: 30}
        world.windows(1)
    assert world.told == []


def test_all_processes_count_also_one_that_ends_within_the_window(world: World) -> None:
    world.add(11)
    world.percent = {PID: 10, 11: 40}
    world.drift.turn()
    for _ in range(5):
        world.turn()
    (world.proc / "11/cgroup").unlink()
    world.percent = {PID: 10}
    for _ in range(5):
        world.turn()
    assert world.found == pytest.approx((10 * 10 + 5 * 40) / 10 - 30)


def test_a_process_that_nvml_does_not_name_was_idle_if_it_names_others(world: World) -> None:
    world.percent = {99: 60}  # of no container with a share
    world.windows(2)
    assert world.found == pytest.approx(-30) and len(world.told) == 1


def _nothing(world: World) -> None:
    world.percent = None


def _nobody(world: World) -> None:
    world.percent = {}


def _uncharged(world: World) -> None:
    world.metered = False


def _unjoined(world: World) -> None:
    world.percent, world.held = {99: 100}, (99,)


def _new_counter(world: World) -> None:
    world.charged = -1.0


@pytest.mark.parametrize("how", [_nothing, _nobody, _uncharged, _unjoined, _new_counter])
def test_what_cannot_be_told_is_left_out(world: World, how: Callable[[World], None]) -> None:
    world.charged = 80.0
    world.windows(1)
    assert world.found == pytest.approx(-50)
    how(world)
    world.windows(3)
    assert world.found is None and world.told == []


def test_a_card_that_rarely_answers_is_left_out(world: World) -> None:
    world.drift.turn()
    for turn in range(10):
        world.percent = {PID: 90} if turn < 4 else None
        world.turn()
    assert world.found is None


def test_a_restarted_container_begins_a_window_of_its_own(world: World) -> None:
    """Not charged at the window's beginning: nothing to compare with at its end."""
    world.windows(1)
    world.item = replace(world.item, container="d")
    world.windows(1)
    assert world.found is None
    world.windows(1)
    assert world.found == pytest.approx(0)


def test_a_card_without_a_process_is_not_read_and_a_newcomer_counts_from_the_next_window(
    world: World,
) -> None:
    world.held = ()
    world.windows(1)
    assert world.reads == 0 and world.found is None
    world.held = (PID,)
    world.charged, world.percent = 30.0, {PID: 90}
    world.windows(1)
    assert world.found == pytest.approx(60)
    world.held = ()  # the window that has begun is brought to its end
    for _ in range(10):
        world.turn()
    assert world.found == pytest.approx(60)
    before = world.reads
    for _ in range(10):
        world.turn()
    assert world.found is None and world.reads == before


@pytest.mark.parametrize("value", ["0", "101", "-5", "a"])
def test_an_impossible_tolerance_ends_the_start(value: str) -> None:
    with pytest.raises(StartError, match="drift-tolerance"):
        parse([f"--drift-tolerance={value}"], {})


# NVML itself, on the simulated driver.

CLIENT = """
import ctypes as C, sys, threading
cuda = C.CDLL("libcuda.so.1")
context, module, function = C.c_void_p(), C.c_void_p(), C.c_void_p()
text = b".version 8.0\\n.target sm_80\\n.address_size 64\\n.visible .entry spin_1000us()\\n{ ret; }\\n\\0"
print([cuda.cuInit(0), cuda.cuCtxCreate_v2(C.byref(context), 0, 0), cuda.cuModuleLoadData(C.byref(module), text),
       cuda.cuModuleGetFunction(C.byref(function), module, b"spin_1000us")], flush=True)
end = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), end.set()), daemon=True).start()
while not end.is_set():
    for _ in range(100):
        cuda.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, None, None, None)
    cuda.cuCtxSynchronize()
"""


@pytest.fixture
def busy(machine: Machine) -> Iterator[subprocess.Popen[str]]:
    """A process that keeps the first card busy, by the driver itself: nothing charges it."""
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT],
        env={**os.environ, **machine.environment()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "[0, 0, 0, 0]\n"
    yield client
    client.communicate("", timeout=20)


def test_nvml_names_the_busy_process(machine: Machine, busy: subprocess.Popen[str]) -> None:
    driver = open_driver(HostRoot(machine.root))
    try:
        driver.probe()
        first, second = (card.uuid for card in machine.report().cards)

        def percents() -> list[int]:
            return [sample.percent for sample in driver.utilization(first, 0) or () if sample.pid == busy.pid]

        eventually(lambda: any(percent > 0 for percent in percents()), "its utilization")
        assert driver.utilization(second, 0) == ()
        assert driver.utilization(first, 2**62) == ()
        assert driver.utilization("GPU-none", 0) is None
    finally:
        driver.close()
    assert driver.utilization(first, 0) is None


def test_an_idle_nodes_comparison_rests_until_somebody_has_looked_at_the_cards(world: World) -> None:
    world.held = ()
    turned = threading.Semaphore(0)
    turns = 0

    def allocations() -> list[Allocation]:
        nonlocal turns
        turns += 1
        turned.release()
        return [world.item]

    world.drift._allocations = allocations
    world.drift.turn_s = 0.0
    world.drift.start()
    for _ in range(3):
        world.drift.looked()
        assert turned.acquire(timeout=10)
    world.drift.stop()
    assert turns == 3
    assert world.reads == 0


def test_a_card_in_mig_mode_says_nothing(make_machine: Callable[..., Machine]) -> None:
    machine = make_machine(SimCard(mig=["1g"]))
    driver = open_driver(HostRoot(machine.root))
    try:
        driver.probe()
        assert driver.utilization(machine.report().cards[0].uuid, 0) is None
    finally:
        driver.close()


def test_a_driver_that_is_gone_says_nothing(machine: Machine, make_node: Callable[..., Node]) -> None:
    node = make_node(machine.root)
    node.kubelet.start()
    daemon = node.start(wait=200)

    def gone(*_: object) -> None:
        raise DriverError("Driver Not Loaded")

    daemon.inventory._driver.utilization = gone  # type: ignore[method-assign, assignment]
    assert daemon.inventory.utilization(CARD, 0) is None


def test_a_pod_whose_work_nobody_charges_is_told(
    machine: Machine, make_node: Callable[..., Node], busy: subprocess.Popen[str]
) -> None:
    node = make_node(machine.root, with_api=True)
    node.kubelet.start()
    daemon = node.start("--drift-tolerance=15", wait=200)
    daemon.drift.turn_s, daemon.drift.window_s = 0.05, 0.5
    assert node.api is not None
    events = node.api.events
    item = pod("a", container("c", 30, 10), annotations={NAMES.card_uuid: machine.report().cards[0].uuid})
    node.api.put("pods", item)
    node.kubelet.admit(item)
    limits = region.read_limits(node.region(item, "c"))
    proc = Proc(node.directory)
    proc.add(busy.pid, group(item["metadata"]["uid"]))
    daemon.drift._whose = proc.owners()  # the measurer of overhead would write limits
    share = lambda: json.loads(node.get("/usage")[1])["containers"][0]["cards"][0]  # noqa: E731
    eventually(lambda: (share()["drift_cores"] or 0) > 15, "the drift")
    told = eventually(lambda: [e for e in events if e.get("reason") == "GpuTimeDrift"], "an event")
    assert told[0]["involvedObject"]["uid"] == item["metadata"]["uid"]
    assert "was charged 0 hundredths" in told[0]["message"]
    assert 'vcuda_container_gpu_time_drift{container="c"' in node.get("/metrics")[1]
    now = region.read_limits(node.region(item, "c"))
    assert [(card.cores, card.core_limit, card.memory_bytes) for card in now] == [
        (card.cores, card.core_limit, card.memory_bytes) for card in limits
    ]
    assert not [e for e in events if e.get("kind") == "Eviction"]
