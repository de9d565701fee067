"""The bypass audit: whose process it is, what is beyond the ledger, what is told and when."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from manager.allocations.record import Allocation
from manager.audit.memory import Auditor, compare
from manager.cards.driver import CardProcess
from tests.manager import manager_pods
from tests.manager.manager_pods import NAMES, container, eventually, pod
from tests.manager.manager_proc import Proc, group
from tests.manager.manager_support import Node
from vcuda.region import CardUsage, ProcessUsage, Usage
from vcuda.sim import Machine
from vcuda.spec.placement import CardShare
from vcuda.spec.units import BLOCK_BYTES

MIB = 2**20
CARD = "GPU-1"
UIDS = [f"{digit}2345678-1234-1234-1234-123456789abc" for digit in "abc"]


def allocation(directory: Path, uid: str, name: str = "c") -> Allocation:
    region = directory / uid / name
    region.mkdir(parents=True)
    (region / "limits").touch()
    return manager_pods.allocation(
        CardShare(CARD, 10, 4), pod_uid=uid, pod_name=uid, container=name, region=str(region)
    )


def ledger(used: int, *processes: ProcessUsage) -> Usage:
    return Usage((CardUsage(uuid=CARD, memory_used_bytes=used, ledger_bytes=used),), processes)


def test_what_processes_hold_is_summed_by_container(tmp_path: Path) -> None:
    one, two, three = (allocation(tmp_path, uid) for uid in UIDS)
    sidecar = allocation(tmp_path, UIDS[2], "sidecar")
    proc = Proc(tmp_path)
    proc.add(10, group(UIDS[0]))
    proc.add(11, group(UIDS[1]))
    proc.add(12, group(UIDS[1], systemd=True))
    proc.add(13, group(UIDS[2]), namespace=7, inner=3)  # two containers: the slot must tell
    proc.add(14, group(UIDS[2]), namespace=8, inner=3)
    held = {CARD: [CardProcess(pid, pid * MIB) for pid in (10, 11, 12, 13, 14, 15)]}
    usages = {item.key: ledger(5 * MIB) for item in (one, two, three)}
    usages[sidecar.key] = ledger(13 * MIB, ProcessUsage(0, 3, True, {}, pid_namespace=7))
    allocations = (one, two, three, sidecar)
    found = compare(allocations, usages, held, proc.owners().among(allocations, usages))
    assert found.beyond == {
        (one.key, CARD): 5 * MIB, (two.key, CARD): 18 * MIB, (three.key, CARD): 0, (sidecar.key, CARD): 0
    }  # fmt: skip
    assert found.others == {CARD: 29 * MIB}  # nobody's slot, and one that has ended


def test_a_card_of_another_container_counts_and_one_that_does_not_say_is_left_out(tmp_path: Path) -> None:
    item = allocation(tmp_path, UIDS[0])
    proc = Proc(tmp_path)
    proc.add(10, group(item.pod_uid))
    usages = {item.key: ledger(0)}
    held = {"GPU-2": [CardProcess(10, MIB), CardProcess(10, None)]}
    found = compare([item], usages, held, proc.owners().among([item], usages))
    assert (found.beyond, found.others) == ({(item.key, "GPU-2"): MIB}, {"GPU-2": 0})
    owners = proc.owners().among([item])
    unreadable = compare([item], {}, {CARD: [CardProcess(10, MIB)]}, owners)  # damaged, perhaps on purpose
    assert unreadable.beyond == {(item.key, CARD): MIB}


@pytest.mark.parametrize(("oversell", "left"), [(0, 6), (8, 2)], ids=["its share", "oversold"])
def test_a_ledgers_managed_memory_is_believed_as_far_as_the_share_goes(
    tmp_path: Path, oversell: int, left: int
) -> None:
    item = replace(allocation(tmp_path, UIDS[0]), oversell_blocks=oversell)
    assert item.shares[0].memory_blocks == 4
    (tmp_path / "p").mkdir()
    proc = Proc(tmp_path / "p")
    proc.add(10, group(item.pod_uid))
    liar = {item.key: Usage((CardUsage(uuid=CARD, managed_bytes=100 << 30),), ())}
    held = {CARD: [CardProcess(10, 10 * BLOCK_BYTES)]}
    found = compare([item], liar, held, proc.owners().among([item]))
    assert found.listed == {(item.key, CARD): left * BLOCK_BYTES}


@pytest.mark.parametrize(("oversell", "beyond"), [(0, 6), (8, 2)], ids=["its share", "oversold"])
def test_a_ledger_is_believed_as_far_as_the_share_goes(tmp_path: Path, oversell: int, beyond: int) -> None:
    """Processes that see other limits, mounted over theirs, count truly what they hold beyond their share: nothing was said."""
    item = replace(allocation(tmp_path, UIDS[0]), oversell_blocks=oversell)
    (tmp_path / "p").mkdir()
    proc = Proc(tmp_path / "p")
    proc.add(10, group(item.pod_uid))
    held = {CARD: [CardProcess(10, 10 * BLOCK_BYTES)]}
    true = {item.key: ledger(10 * BLOCK_BYTES)}
    found = compare([item], true, held, proc.owners().among([item]))
    assert found.beyond == {(item.key, CARD): beyond * BLOCK_BYTES}
    whole = replace(item, cores=100)
    assert compare([whole], true, held, proc.owners().among([whole])).beyond == {(item.key, CARD): 0}


def test_what_lasts_is_told_once(tmp_path: Path) -> None:
    item = allocation(tmp_path, UIDS[0])
    proc = Proc(tmp_path)
    proc.add(10, group(item.pod_uid))
    bytes_now = 100 * MIB
    told: list[str] = []
    auditor = Auditor(
        processes=lambda _: (CardProcess(10, bytes_now),),
        usage=lambda _: ledger(0),
        tell=lambda _, __, text: told.append(text),
        owners=proc.owners(),
    )

    def audits(number: int) -> int:
        for _ in range(number):
            auditor.audit([item], [CARD], 64 * MIB)
        return len(told)

    assert audits(1) == 0
    assert audits(1) == 1 and f"container c holds 100 MiB of card {CARD} beyond" in told[0]
    assert audits(5) == 1
    bytes_now = 64 * MIB
    assert audits(3) == 1
    bytes_now = 65 * MIB
    assert audits(1) == 1 and audits(1) == 2


CLIENT = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
steps = (lambda: cuda.cuInit(0), lambda: cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0),
         lambda: cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(600 << 20)))
print([step() for step in steps], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def bypassing(machine: Machine) -> Iterator[subprocess.Popen[str]]:
    """A process that holds 600 MiB of the first card by the driver itself, without a shim."""
    environment = {**os.environ, **machine.environment()}
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "[0, 0, 0]\n"
    yield client
    client.communicate("", timeout=20)


@pytest.mark.parametrize("policy", ["report", "evict"])
def test_a_pod_that_bypasses_its_limit_is_seen_told_and_by_policy_evicted(
    machine: Machine, make_node: Callable[..., Node], bypassing: subprocess.Popen[str], policy: str
) -> None:
    node = make_node(machine.root, with_api=True)
    node.kubelet.start()
    daemon = node.start(f"--audit-policy={policy}", "--audit-tolerance=500", wait=200)
    assert node.api is not None
    events = node.api.events
    first = machine.report().cards[0].uuid
    item = pod("a", container("c", 30, 10), annotations={NAMES.card_uuid: first})
    node.api.put("pods", item)
    node.kubelet.admit(item)
    share = lambda: json.loads(node.get("/usage")[1])["containers"][0]["cards"][0]  # noqa: E731
    other = lambda: json.loads(node.get("/usage")[1])["cards"][0]["other_memory_bytes"]  # noqa: E731
    eventually(lambda: (other() or 0) >= 600 * MIB and share()["unaccounted_bytes"] == 0, "the process is nobody's")
    proc = Proc(node.directory)
    proc.add(bypassing.pid, group(item["metadata"]["uid"]))
    daemon.owners.proc, daemon.owners.root = str(proc.path), proc.groups
    eventually(lambda: share()["unaccounted_bytes"] >= 600 * MIB, "what is beyond the ledger")
    told = eventually(lambda: [e for e in events if e.get("reason") == "MemoryUnaccounted"], "an event")
    assert len(told) == 1 and told[0]["involvedObject"]["uid"] == item["metadata"]["uid"]
    assert 'vcuda_container_unaccounted_bytes{container="c"' in node.get("/metrics")[1]
    if policy == "evict":
        asked = eventually(lambda: [e for e in events if e.get("kind") == "Eviction"], "an eviction")
        # One for each finding: memory beyond the ledger, and a driver without our library.
        assert [each["deleteOptions"] for each in asked] in (
            [{"preconditions": {"uid": item["metadata"]["uid"]}}] * count for count in (1, 2)
        )
    else:
        assert daemon.api_writer.wait_empty(10) and not [e for e in events if e.get("kind") == "Eviction"]
