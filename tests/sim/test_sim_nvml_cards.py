"""The simulated libnvidia-ml through nvidia-ml-py: which cards there are, what they are, how they are connected."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import simulated
from vcuda import sim

GIB = 2**30


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> sim.Machine:
    return sim.Machine.create(
        tmp_path_factory.mktemp("nvml") / "machine",
        [
            sim.SimCard(memory_bytes=8 * GIB, links={1: "NV4"}),
            sim.SimCard(memory_bytes=8 * GIB, links={2: "PIX"}),
            sim.SimCard(model="Tesla T4", numa_node=1, minor=6),
            sim.SimCard(mig=["1g", "2g"]),
        ],
    )


def test_cards_are_found_by_every_name_they_have(machine: sim.Machine) -> None:
    got = simulated.nvml(
        machine,
        """
        nvmlInit()
        rows = []
        for index in range(nvmlDeviceGetCount()):
            card = nvmlDeviceGetHandleByIndex(index)
            uuid, serial, pci = nvmlDeviceGetUUID(card), nvmlDeviceGetSerial(card), nvmlDeviceGetPciInfo(card)
            same = {nvmlDeviceGetIndex(other) for other in (
                nvmlDeviceGetHandleByUUID(uuid), nvmlDeviceGetHandleBySerial(serial),
                nvmlDeviceGetHandleByPciBusId(pci.busId), nvmlDeviceGetHandleByPciBusId(pci.busIdLegacy))}
            rows.append([index, sorted(same), uuid, nvmlDeviceGetName(card), nvmlDeviceGetMinorNumber(card),
                         nvmlDeviceGetMemoryInfo(card).total, list(nvmlDeviceGetCudaComputeCapability(card)),
                         nvmlDeviceGetArchitecture(card)])
        answer(rows)
        """,
    )
    assert got == [
        [card.index, [card.index], card.uuid, card.name, card.minor, card.memory_bytes,
         list(card.model.compute_capability), 6 if "T4" in card.name else 7]
        for card in machine.cards
    ]  # fmt: skip


def test_versions_are_those_of_the_machine(machine: sim.Machine) -> None:
    got = simulated.nvml(
        machine,
        """
        nvmlInit()
        answer([nvmlSystemGetDriverVersion(), nvmlSystemGetNVMLVersion(), nvmlSystemGetCudaDriverVersion()])
        """,
    )
    assert got == [machine.driver_version, f"12.{machine.driver_version}", 12040]


def test_wrong_calls_get_nvmls_own_errors(machine: sim.Machine) -> None:
    got = simulated.nvml(
        machine,
        """
        import ctypes
        def why(call, *arguments):
            try:
                call(*arguments)
            except NVMLError as error:
                return error.value
            return 0
        rows = [why(nvmlDeviceGetCount)]
        nvmlInit()
        card = nvmlDeviceGetHandleByIndex(0)
        library = ctypes.CDLL("libnvidia-ml.so.1")
        small = ctypes.create_string_buffer(4)
        rows += [why(nvmlDeviceGetHandleByIndex, 99), why(nvmlDeviceGetHandleByUUID, "GPU-nobody"),
                 why(nvmlDeviceGetName, ctypes.c_void_p(8)), why(nvmlDeviceSetPersistenceMode, card, 1),
                 why(nvmlDeviceGetGpuInstanceId, card), library.nvmlDeviceGetUUID(card, small, 4),
                 library.nvmlDeviceGetUUID(card, None, 96), why(nvmlGpmQueryDeviceSupport, card)]
        nvmlShutdown()
        rows += [why(nvmlShutdown), why(nvmlDeviceGetName, card)]
        try:
            nvmlInit()
            nvmlDeviceGetRepairStatus(card)  # newer than the 550 library
        except NVMLError as error:
            rows.append(error.value)
        answer(rows)
        """,
    )
    assert got == [1, 2, 6, 2, 3, 3, 7, 2, 3, 1, 1, 13]


def test_connections_are_those_the_machine_was_made_with(machine: sim.Machine) -> None:
    got = simulated.nvml(
        machine,
        """
        nvmlInit()
        cards = [nvmlDeviceGetHandleByIndex(index) for index in range(4)]
        levels = [[nvmlDeviceGetTopologyCommonAncestor(a, b) for b in cards if b is not a] for a in cards[:3]]
        links = [[nvmlDeviceGetNvLinkState(card, link) for link in range(6)] for card in cards[:2]]
        peer = nvmlDeviceGetNvLinkRemotePciInfo(cards[0], 3).busId
        near = [nvmlDeviceGetIndex(card) for card in nvmlDeviceGetTopologyNearestGpus(cards[1], NVML_TOPOLOGY_SINGLE)]
        p2p = [nvmlDeviceGetP2PStatus(cards[0], cards[1], NVML_P2P_CAPS_INDEX_NVLINK),
               nvmlDeviceGetP2PStatus(cards[0], cards[3], NVML_P2P_CAPS_INDEX_NVLINK)]
        numa = [nvmlDeviceGetNumaNodeId(card) for card in cards] + list(nvmlDeviceGetMemoryAffinity(cards[2], 1, 0))
        try:
            nvmlDeviceGetNvLinkState(cards[2], 0)
        except NVMLError as error:
            numa.append(error.value)
        answer([levels, links, peer, near, p2p, numa])
        """,
    )
    node, system, single = 40, 50, 10
    assert got[0] == [[node, system, node], [node, single, node], [system, single, system]]
    assert got[1] == [[1, 1, 1, 1, 0, 0]] * 2
    assert got[2] == "00000000:02:00.0"
    assert got[3] == [2]
    assert got[4] == [0, 5]
    assert got[5] == [0, 0, 1, 0, 2, 3]


def test_mig_instances_are_devices_of_their_card(machine: sim.Machine) -> None:
    got = simulated.nvml(
        machine,
        """
        nvmlInit()
        card = nvmlDeviceGetHandleByIndex(3)
        rows = [nvmlDeviceGetMigMode(card), nvmlDeviceGetMaxMigDeviceCount(card)]
        for index in range(7):
            try:
                part = nvmlDeviceGetMigDeviceHandleByIndex(card, index)
            except NVMLError_NotFound:
                break
            attributes = nvmlDeviceGetAttributes(part)
            rows.append([nvmlDeviceGetUUID(part), nvmlDeviceGetMemoryInfo(part).total, bool(nvmlDeviceIsMigDeviceHandle(part)),
                         nvmlDeviceGetGpuInstanceId(part), nvmlDeviceGetComputeInstanceId(part), nvmlDeviceGetName(part),
                         nvmlDeviceGetUUID(nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)),
                         attributes.gpuInstanceSliceCount, attributes.memorySizeMB, attributes.multiprocessorCount,
                         nvmlDeviceGetUUID(nvmlDeviceGetHandleByUUID(nvmlDeviceGetUUID(part)))])
        try:
            nvmlDeviceGetMigMode(nvmlDeviceGetHandleByIndex(2))
        except NVMLError as error:
            rows.append(error.value)
        answer(rows)
        """,
    )
    card = machine.cards[3]
    assert got[:2] == [[1, 1], 7]
    assert got[2:4] == [
        [part.uuid, part.memory_bytes, True, part.gpu_instance, 0, f"{card.name} MIG {part.profile}", card.uuid,
         part.slices, part.memory_bytes >> 20, part.multiprocessors, part.uuid]
        for part in card.mig
    ]  # fmt: skip
    assert got[4:] == [3]


COUNT = """
    try:
        nvmlInit()
        answer([nvmlDeviceGetMinorNumber(nvmlDeviceGetHandleByIndex(i)) for i in range(nvmlDeviceGetCount())])
    except NVMLError as error:
        answer(str(error))
"""


def test_a_process_sees_the_cards_whose_nodes_it_has(machine: sim.Machine, tmp_path: Path) -> None:
    for name in ("nvidiactl", "nvidia1", "nvidia6"):
        (tmp_path / name).touch()
    assert simulated.nvml(machine, COUNT, VCUDA_SIM_DEV=str(tmp_path)) == [1, 6]
    (tmp_path / "nvidia1").unlink()
    assert simulated.nvml(machine, COUNT, VCUDA_SIM_DEV=str(tmp_path)) == [6]
    (tmp_path / "nvidiactl").unlink()
    assert simulated.nvml(machine, COUNT, VCUDA_SIM_DEV=str(tmp_path)) == "Driver Not Loaded"


def test_a_mig_instance_needs_its_capability_nodes(machine: sim.Machine, tmp_path: Path) -> None:
    card = machine.cards[3]
    for name in (
        "nvidiactl",
        f"nvidia{card.minor}",
        *(f"nvidia-caps/nvidia-cap{n}" for n in card.mig[1].caps),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    code = """
        nvmlInit()
        card, found = nvmlDeviceGetHandleByIndex(0), []
        for index in range(7):
            try:
                found.append(nvmlDeviceGetUUID(nvmlDeviceGetMigDeviceHandleByIndex(card, index)))
            except NVMLError_NotFound:
                pass
        answer(found)
    """
    assert simulated.nvml(machine, code, VCUDA_SIM_DEV=str(tmp_path)) == [card.mig[1].uuid]


def test_without_a_driver_or_a_machine_nvml_says_so(machine: sim.Machine, tmp_path: Path) -> None:
    other = sim.Machine.create(tmp_path / "other")
    other.unload_driver()
    assert simulated.nvml(other, COUNT) == "Driver Not Loaded"
    other.load_driver()
    assert simulated.nvml(other, COUNT) == [0]
    assert simulated.nvml(machine, COUNT, VCUDA_SIM_DIR=str(tmp_path / "nothing")) == "Driver Not Loaded"
