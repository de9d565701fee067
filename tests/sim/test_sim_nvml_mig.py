"""What GPU and compute instances of the simulated NVML say of themselves, and which profiles a card can be cut into."""

from __future__ import annotations

import pytest

from tests.support import simulated
from vcuda import sim

MIB = 2**20


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> sim.Machine:
    cards = [sim.SimCard(mig=["1g", "2g", "1g"]), sim.SimCard(model="Tesla T4")]
    return sim.Machine.create(tmp_path_factory.mktemp("mig") / "machine", cards)


def test_instances_are_found_by_number_and_lead_back_to_their_card(machine: sim.Machine) -> None:
    (card, _) = machine.cards
    got = simulated.nvml(
        machine,
        f"""
        nvmlInit()
        card = nvmlDeviceGetHandleByIndex(0)
        rows = []
        for number in {[part.gpu_instance for part in card.mig]}:
            instance = nvmlDeviceGetGpuInstanceById(card, number)
            info = nvmlGpuInstanceGetInfo(instance)
            compute = nvmlGpuInstanceGetComputeInstanceById(instance, 0)
            own = nvmlComputeInstanceGetInfo(compute)
            back = nvmlDeviceGetAttributes(instance)
            rows.append([info.id, info.profileId, nvmlDeviceGetUUID(info.device), own.id, own.profileId,
                         nvmlDeviceGetUUID(own.device), back.memorySizeMB, back.gpuInstanceSliceCount])
        def refused(what, *arguments):
            try:
                return what(*arguments)
            except NVMLError as error:
                return error.value
        answer([rows, refused(nvmlDeviceGetGpuInstanceById, card, 77), refused(nvmlGpuInstanceGetInfo, card),
                refused(nvmlGpuInstanceGetComputeInstanceById, instance, 5), refused(nvmlDeviceGetAttributes, card)])
        """,
    )
    rows, *refusals = got
    profiles = {"1": 0, "2": 1}
    assert rows == [
        [part.gpu_instance, profiles[part.profile[0]], card.uuid, 0, profiles[part.profile[0]], card.uuid,
         part.memory_bytes // MIB, int(part.profile[0])]
        for part in card.mig
    ]  # fmt: skip
    not_supported, not_found = 3, 6
    assert refusals == [not_found, not_supported, not_found, not_supported]


def test_instances_are_listed_by_profile(machine: sim.Machine) -> None:
    got = simulated.nvml(
        machine,
        """
        import ctypes
        nvmlInit()
        library = ctypes.CDLL("libnvidia-ml.so.1")
        card, room, count = nvmlDeviceGetHandleByIndex(0), (ctypes.c_void_p * 7)(), ctypes.c_uint()
        counts = []
        for profile in range(5):
            assert library.nvmlDeviceGetGpuInstances(card, profile, room, ctypes.byref(count)) == 0
            counts.append(count.value)
            for instance in room[: count.value]:
                inner = ctypes.c_uint()
                computes = (ctypes.c_void_p * 7)()
                instance = ctypes.c_void_p(instance)
                assert library.nvmlGpuInstanceGetComputeInstances(instance, profile, computes, ctypes.byref(inner)) == 0
                assert inner.value == 1 and computes[0] == instance.value
        plain = library.nvmlDeviceGetGpuInstances(nvmlDeviceGetHandleByIndex(1), 0, room, ctypes.byref(count))
        answer([counts, plain])
        """,
    )
    assert got == [[2, 1, 0, 0, 0], 3]


def test_profiles_are_parts_of_the_card_and_only_of_cards_that_can_be_cut(machine: sim.Machine) -> None:
    (card, _) = machine.cards
    got = simulated.nvml(
        machine,
        """
        nvmlInit()
        rows = []
        for index in (0, 1):
            for profile in (0, 4, 5):
                for version in (1, 2):
                    try:
                        info = nvmlDeviceGetGpuInstanceProfileInfo(nvmlDeviceGetHandleByIndex(index), profile, version)
                        rows.append([info.sliceCount, info.instanceCount, info.memorySizeMB])
                    except NVMLError as error:
                        rows.append(error.value)
        answer(rows)
        """,
    )
    whole = card.memory_bytes // MIB
    not_supported = 3
    assert got == [
        *([[1, 7, whole // 8]] * 2), *([[7, 1, whole]] * 2), *([not_supported] * 8)
    ]  # fmt: skip
