"""What a context takes of a card is measured once by the daemon, whatever neighbours do meanwhile, and stands in the shares' limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from manager.cards.context_cost import NAME, ContextCosts
from manager.cards.driver import NodeCard
from manager.cards.inventory import Snapshot
from tests.manager.manager_pods import container, eventually, pod
from tests.manager.manager_support import Node
from vcuda import region
from vcuda.driver import context_cost
from vcuda.driver.root import HostRoot
from vcuda.sim import Machine, SimCard
from vcuda.spec.inventory import Card

MIB = 1 << 20
CONTEXT = 64 * MIB  # of a simulated card

NEIGHBOUR = """
import ctypes as C, sys
cu = C.CDLL(sys.argv[1])
context, pointer = C.c_void_p(), C.c_uint64()
assert cu.cuInit(0) == 0 and cu.cuCtxCreate_v2(C.byref(context), 0, 0) == 0
print("grows", flush=True)
while True:
    held = []
    for _ in range(40):
        pointer = C.c_uint64()
        assert cu.cuMemAlloc_v2(C.byref(pointer), C.c_size_t(64 << 20)) == 0
        held.append(pointer)
    for pointer in held:
        cu.cuMemFree_v2(pointer)
"""


@pytest.fixture(autouse=True)
def contexts_known() -> None:
    """Not here: this is measured."""


def libraries(machine: Machine) -> tuple[Path, Path]:
    root = HostRoot(machine.root)
    cuda, nvml = root.find_library("libcuda.so.1"), root.find_library("libnvidia-ml.so.1")
    assert cuda and nvml
    return cuda, nvml


@pytest.mark.parametrize("unlisted_kib", [3072, 8192])
def test_what_the_drivers_list_of_processes_leaves_out_is_part_of_a_context(tmp_path: Path, unlisted_kib: int) -> None:
    machine = Machine.create(tmp_path / "machine", [SimCard(knobs={"unlisted_kib": unlisted_kib})])
    assert context_cost.measure(*libraries(machine), machine.cards[0].uuid, machine.environment()) == CONTEXT


def test_who_measures_ends_with_who_asked(tmp_path: Path) -> None:
    machine = Machine.create(tmp_path / "machine", [SimCard(knobs={"context_ms": 15_000})])
    asks = f"from pathlib import Path; from vcuda.driver.context_cost import measure; measure(*map(Path, {[*map(str, libraries(machine))]}), {machine.cards[0].uuid!r})"
    asker = subprocess.Popen([sys.executable, "-c", asks], env={**os.environ, **machine.environment()})
    measurers = Path(f"/proc/{asker.pid}/task/{asker.pid}/children")
    eventually(lambda: measurers.read_text() != "", "the measuring process")
    time.sleep(0.5)  # it loads its libraries
    measurer = Path("/proc") / measurers.read_text().strip() / "exe"  # of one that has ended nobody can read it
    asker.kill()
    asker.wait()
    eventually(lambda: not measurer.exists(), "its end", 5.0)


def test_what_a_neighbour_did_is_no_part_of_a_context() -> None:
    """The figures of an H100 in MiB, beside neighbours that take and give back."""
    own, first, again = 518 * MIB, 527 * MIB, 524 * MIB
    for rises, cost in (
        ([first, again, again, again], first),
        ([first + 200 * MIB, again, again + 64 * MIB, again + 2 * MIB], again),
        ([first + 20 * MIB, again - 600 * MIB, 2 * again], first + 20 * MIB),
        ([2 * first, 0, -again, 3 * again], own),
        ([first + 100 * MIB, again + 100 * MIB, again + 101 * MIB, 3 * again], again + 100 * MIB),
        ([first + 100 * MIB, again + 100 * MIB, again + 164 * MIB, 3 * again], own),
        ([], own),
    ):
        assert context_cost.whole_cost(own, rises) == cost


def test_a_neighbour_that_grows_meanwhile_is_no_part_of_a_context(machine: Machine) -> None:
    cuda, nvml = libraries(machine)
    uuid = machine.cards[0].uuid
    neighbours = [
        subprocess.Popen([sys.executable, "-c", NEIGHBOUR, str(cuda)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for neighbour in neighbours:
            assert neighbour.stdout and neighbour.stdout.readline() == "grows\n"
        found = [context_cost.measure(cuda, nvml, uuid) for _ in range(3)]
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.communicate()
    print(f"a context beside two neighbours that grow: {[count >> 20 for count in found]} MiB")
    assert found == [CONTEXT] * 3


def test_what_can_not_be_measured_is_not_known(machine: Machine, tmp_path: Path) -> None:
    cuda, nvml = libraries(machine)
    assert context_cost.measure(cuda, nvml, "GPU-that-is-not-there") == 0
    assert context_cost.measure(tmp_path / "none", nvml, machine.cards[0].uuid) == 0


def test_shares_are_told_also_those_that_were_there_before(
    machine: Machine, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    uuid = machine.cards[0].uuid
    first = pod("first", container("c", 10, 4))
    with monkeypatch.context() as patch:
        patch.setattr("manager.cards.context_cost._MOST_ATTEMPTS", 0)  # as on a card that is full
        node.start(wait=200)
        node.kubelet.admit(first)
        node.kubelet.answer(first, "c")
        assert region.read_limits(node.region(first, "c"))[0].context_bytes == 0
    eventually(
        lambda: region.read_limits(node.region(first, "c"))[0].context_bytes == CONTEXT,
        "the running share is told what a context takes",
    )
    assert json.loads((node.directory / "vm" / NAME).read_text())["cards"][uuid] == CONTEXT
    node.stop()
    monkeypatch.setattr("manager.cards.context_cost._MOST_ATTEMPTS", 0)
    node.start(wait=200)  # it remembers
    second = pod("second", container("c", 10, 4))
    node.kubelet.admit(second)
    node.kubelet.answer(second, "c")
    for item in (first, second):
        assert region.read_limits(node.region(item, "c"))[0].context_bytes == CONTEXT


def test_each_card_is_measured_once_per_driver_and_a_failing_one_a_few_times(tmp_path: Path, machine: Machine) -> None:
    asked: list[str] = []
    cards = tuple(NodeCard(Card(f"GPU-{index}", index, "model", 1 << 30), index) for index in range(3))

    def measure(_cuda: Path, _nvml: Path, uuid: str) -> int:
        asked.append(uuid)
        return 0 if uuid == "GPU-1" else 7 * MIB

    (tmp_path / NAME).write_text("{}")
    root = HostRoot(machine.root)
    costs = ContextCosts(tmp_path, root, measure)
    learnt = [costs.look(Snapshot("nvml", "1", cards)) for _ in range(8)]
    assert learnt == ["GPU-0", "", "", "", "GPU-2", "", "", ""]
    assert asked == ["GPU-0", "GPU-1", "GPU-1", "GPU-1", "GPU-2"]
    again = ContextCosts(tmp_path, root, measure)
    assert [again.bytes(f"GPU-{index}") for index in range(3)] == [7 * MIB, 0, 7 * MIB]
    assert again.look(Snapshot("nvml", "2", cards)) == "GPU-0"  # another driver
