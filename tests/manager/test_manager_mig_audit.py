"""MIG instances in the bypass audit: who is on which instance, by the driver and by what its processes have open."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from manager.audit.shim_bypass import BypassWatch
from manager.cards.driver import CardProcess
from manager.cards.nvml import open_driver
from tests.manager.manager_pods import NAMES, allocation, container, eventually, pod
from tests.manager.manager_proc import Proc, group
from tests.manager.manager_support import Node
from vcuda.driver.root import HostRoot
from vcuda.sim import Machine, SimCard
from vcuda.spec.placement import CardShare

MIB = 2**20
CLIENT = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
cuda.cuInit(0)
cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0)
print(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(600 << 20)), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def machine(make_machine: Callable[..., Machine]) -> Machine:
    return make_machine(SimCard(mig=("3g", "2g")), SimCard())


@contextmanager
def client_on(machine: Machine, uuid: str) -> Iterator[int]:
    """A process that holds 600 MiB of an instance by the driver itself, without a shim."""
    environment = {**os.environ, **machine.environment(), "CUDA_VISIBLE_DEVICES": uuid}
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == "0\n"
        yield client.pid
    finally:
        client.communicate("", timeout=60)


def test_each_instance_lists_its_own_processes_and_the_card_all_of_them(machine: Machine) -> None:
    first, second = (instance.uuid for instance in machine.cards[0].mig)
    driver = open_driver(HostRoot(machine.root))
    try:
        with client_on(machine, first) as one, client_on(machine, second) as two:
            driver.probe()
            on = {
                uuid: {item.pid: item.memory_bytes or 0 for item in driver.processes(uuid) or ()}
                for uuid in (first, second, machine.cards[0].uuid, machine.cards[1].uuid)
            }
    finally:
        driver.close()
    assert [set(pids) for pids in on.values()] == [{one}, {two}, {one, two}, set()]
    assert on[first][one] >= 600 * MIB


def test_an_instance_tells_its_memory_and_leaves_its_utilization_open(
    machine: Machine, make_node: Callable[..., Node]
) -> None:
    first, second = (instance.uuid for instance in machine.cards[0].mig)
    node = make_node(machine.root)
    node.start()

    def used() -> dict[str, float]:
        lines = node.get("/metrics")[1].splitlines()
        rows = [line for line in lines if line.startswith("vcuda_card_memory_used_bytes{")]
        return {line.split('uuid="')[1].split('"')[0]: float(line.split()[-1]) for line in rows}

    with client_on(machine, first):
        eventually(lambda: used()[first] >= 600 * MIB, "the memory of the instance")
        metrics, graph = node.get("/metrics")[1], node.get("/graph")[1]
    assert used()[second] < 600 * MIB
    utilization = [line for line in metrics.splitlines() if line.startswith("vcuda_card_utilization_ratio{")]
    assert len(utilization) == 1 and machine.cards[1].uuid in utilization[0]
    assert "in use ? %, " in graph and "in use 0 %, " in graph


def test_a_process_on_an_instance_without_our_library_is_told_to_the_instances_pod(
    machine: Machine, make_node: Callable[..., Node]
) -> None:
    node = make_node(machine.root, with_api=True)
    node.kubelet.start()
    daemon = node.start("--audit-tolerance=500", wait=300)
    assert node.api is not None
    events = node.api.events
    first, second = (instance.uuid for instance in machine.cards[0].mig)
    pods = [pod(name, container("c", 30, 10), annotations={NAMES.card_uuid: first}) for name in ("a", "b")]
    for item in pods:
        node.api.put("pods", item)
        node.kubelet.admit(item)
    with client_on(machine, first) as pid:
        proc = Proc(node.directory)
        stand_in = proc.add(pid, group(pods[0]["metadata"]["uid"]))
        for name in ("maps", "map_files"):
            (stand_in / name).symlink_to(f"/proc/{pid}/{name}")
        assert daemon.auditor._bypass is not None
        daemon.owners.proc, daemon.owners.root = str(proc.path), proc.groups
        daemon.auditor._bypass._proc = str(proc.path)
        told = eventually(
            lambda: [
                item["involvedObject"]["name"]
                for item in events
                if item.get("reason") in ("DriverWithoutShim", "MemoryUnaccounted")
            ][:2],
            "an event",
        )

        def figures() -> dict[str, tuple[int, bool]]:
            report = json.loads(node.get("/usage")[1])
            cards = {item["pod_name"]: item["cards"][0] for item in report["containers"]}
            return {
                name: (card["bypassing_processes"], card["unaccounted_bytes"] >= 600 * MIB)
                for name, card in cards.items()
            }

        eventually(lambda: figures() == {"a": (1, True), "b": (0, False)}, "the figures")
        assert daemon.auditor.finding.others == {first: 0, second: 0, machine.cards[1].uuid: 0}
    assert set(told) == {"a"}


def test_a_process_counts_on_the_instance_that_the_driver_names_and_else_on_all_that_share_its_node(
    tmp_path: Path,
) -> None:
    uuids = ("MIG-1", "MIG-2")
    shares = tuple(CardShare(uuid, 10, 4) for uuid in uuids)
    driver = tmp_path / "driver"
    (driver / "lib64").mkdir(parents=True)
    (driver / "lib64/libcuda.so.1").touch()
    item = allocation(*shares, minors=dict.fromkeys(uuids, 3), mirror=str(driver))
    process = tmp_path / "proc/5"
    (process / "fd").mkdir(parents=True)
    (process / "fd/3").symlink_to("/dev/nvidia3")
    (process / "maps").write_text("1000-2000 r--p 00000000 00:2a 7   /lib/libcuda.so.550\n")
    (process / "comm").write_text("guest\n")

    class Owner:
        def container(self, _: int, _uuid: str = "") -> tuple[str, str]:
            return item.key

    watch = BypassWatch(lambda *_: None, tmp_path / "proc")
    listed = {"MIG-1": (), "MIG-2": (CardProcess(5, MIB),)}
    for _ in range(2):
        counts = watch.look([item], Owner(), listed)
    assert counts == {(item.key, "MIG-1"): 0, (item.key, "MIG-2"): 1}
    for _ in range(2):
        counts = watch.look([item], Owner(), {})
    assert counts == {(item.key, "MIG-1"): 1, (item.key, "MIG-2"): 1}
