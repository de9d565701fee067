"""The simulated libnvidia-ml through nvidia-ml-py: who uses a card, how much, and what goes wrong on it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support import simulated
from vcuda import sim

GIB, MIB = 2**30, 2**20


@pytest.fixture
def machine(tmp_path: Path) -> sim.Machine:
    return sim.Machine.create(tmp_path / "machine", [sim.SimCard(memory_bytes=8 * GIB)] * 2)


MEMORY = """
    nvmlInit()
    rows = []
    for index in range(nvmlDeviceGetCount()):
        card = nvmlDeviceGetHandleByIndex(index)
        old, new = nvmlDeviceGetMemoryInfo(card), nvmlDeviceGetMemoryInfo(card, version=nvmlMemory_v2)
        assert old.total == old.used + old.free
        assert new.total == new.reserved + new.used + new.free
        processes = nvmlDeviceGetComputeRunningProcesses_v3(card)
        assert [(p.pid, p.usedGpuMemory) for p in nvmlDeviceGetComputeRunningProcesses_v2(card)] == \\
            [(p.pid, p.usedGpuMemory) for p in processes]
        assert nvmlDeviceGetGraphicsRunningProcesses(card) == nvmlDeviceGetMPSComputeRunningProcesses(card) == []
        rows.append([old.used, new.used, [[p.pid, p.usedGpuMemory] for p in processes]])
    answer(rows)
"""


def test_memory_and_processes_are_those_of_the_clients(machine: sim.Machine) -> None:
    with simulated.tenant(machine, card=1, memory_bytes=512 * MIB) as pid:
        idle, used = simulated.nvml(machine, MEMORY)
        truth = machine.report().processes
    assert idle == [0, 0, []]
    assert used[0] == used[1] == truth[0].memory_bytes[machine.cards[1].uuid] > 512 * MIB
    assert used[2] == [[pid, used[0]]] and [process.pid for process in truth] == [pid]
    assert simulated.nvml(machine, MEMORY)[1] == [0, 0, []], "the dead process must have been reaped"


def test_the_first_process_interface_has_its_smaller_structure(machine: sim.Machine) -> None:
    with simulated.tenant(machine, memory_bytes=64 * MIB) as pid:
        got = simulated.nvml(
            machine,
            """
            import ctypes
            class Info(ctypes.Structure):
                _fields_ = [("pid", ctypes.c_uint), ("bytes", ctypes.c_ulonglong)]
            nvmlInit()
            call = ctypes.CDLL("libnvidia-ml.so.1").nvmlDeviceGetComputeRunningProcesses
            card, count, room = nvmlDeviceGetHandleByIndex(0), ctypes.c_uint(0), (Info * 4)()
            short = call(card, ctypes.byref(count), None)
            wanted, count.value = count.value, 4
            answer([short, wanted, call(card, ctypes.byref(count), room), count.value, room[0].pid, room[0].bytes >> 20])
            """,
        )
    assert got[:5] == [7, 1, 0, 1, pid] and got[5] >= 64


def test_pids_are_those_of_the_host_whoever_reads_and_wherever_the_process_is(machine: sim.Machine) -> None:
    """As the genuine NVML: a pod's processes find none of the numbers among their own."""
    inside = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this process may not make a PID namespace")
    with (
        simulated.tenant(machine, memory_bytes=64 * MIB, wrapper=inside) as outer,
        simulated.tenant(machine, card=1, memory_bytes=64 * MIB) as neighbour,
    ):
        (child,) = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
        rows = simulated.nvml(machine, MEMORY)
        assert [row[2][0][0] for row in rows] == [int(child), neighbour]
        assert sorted(process.pid for process in machine.report().processes) == sorted([int(child), neighbour])
        seen_inside = simulated.nvml(machine, MEMORY, wrapper=inside)
        foreign = simulated.nvml(machine, MEMORY, VCUDA_SIM_PIDS="foreign")
        none = simulated.nvml(machine, MEMORY, VCUDA_SIM_PIDS="none")
    assert seen_inside == rows
    assert [row[2][0][0] for row in foreign] == [int(child) + 2**22, neighbour + 2**22]
    assert [row[2] for row in none] == [[], []] and [row[:2] for row in none] == [row[:2] for row in rows]


def test_a_process_in_a_container_does_not_find_itself(machine: sim.Machine) -> None:
    inside = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this process may not make a PID namespace")
    own, seen = simulated.nvml(
        machine,
        """
        import ctypes, os
        cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        assert cuda.cuInit(0) == cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
        nvmlInit()
        answer([os.getpid(), [p.pid for p in nvmlDeviceGetComputeRunningProcesses(nvmlDeviceGetHandleByIndex(0))]])
        """,
        wrapper=inside,
    )
    assert len(seen) == 1 and seen[0] != own


def test_utilization_follows_the_load_with_nvmls_delay(machine: sim.Machine) -> None:
    with simulated.tenant(machine, memory_bytes=GIB, busy=True) as pid:
        got = simulated.nvml(
            machine,
            """
            import time
            nvmlInit()
            busy, idle = nvmlDeviceGetHandleByIndex(0), nvmlDeviceGetHandleByIndex(1)
            until = time.monotonic() + 40
            while nvmlDeviceGetUtilizationRates(busy).gpu < 50 and time.monotonic() < until:
                time.sleep(0.1)
            rates, rest = nvmlDeviceGetUtilizationRates(busy), nvmlDeviceGetUtilizationRates(idle)
            kind, samples = nvmlDeviceGetSamples(busy, NVML_GPU_UTILIZATION_SAMPLES, 0)
            stamps = [sample.timeStamp for sample in samples]
            shares = nvmlDeviceGetProcessUtilization(busy, 0)
            last = max(share.timeStamp for share in shares)
            power = nvmlDeviceGetPowerUsage(busy) > nvmlDeviceGetPowerUsage(idle)
            answer([rates.gpu, rest.gpu, stamps == sorted(set(stamps)), max(s.sampleValue.uiVal for s in samples),
                    [[share.pid, share.smUtil] for share in shares], power, abs(last / 1e6 - time.time()) < 60])
            """,
        )
    assert 50 <= got[0] <= 100 and got[1] == 0
    assert got[2] and got[3] >= 50
    assert [row[0] for row in got[4]] == [pid] and got[4][0][1] >= 40
    assert got[5] and got[6]


def test_an_xid_is_delivered_once_to_those_who_wait_for_its_card(machine: sim.Machine) -> None:
    machine.inject(sim.Xid(0, 13))
    got = simulated.nvml(
        machine,
        f"""
        from vcuda import sim
        machine = sim.Machine({str(machine.directory)!r})
        nvmlInit()
        cards, events = [nvmlDeviceGetHandleByIndex(i) for i in range(2)], nvmlEventSetCreate()
        assert nvmlDeviceGetSupportedEventTypes(cards[0]) & nvmlEventTypeXidCriticalError
        for card in cards:
            nvmlDeviceRegisterEvents(card, nvmlEventTypeXidCriticalError, events)
        rows = []
        def wait(ms):
            try:
                event = nvmlEventSetWait_v2(events, ms)
                rows.append([nvmlDeviceGetIndex(event.device), event.eventType, event.eventData])
            except NVMLError_Timeout:
                rows.append("timeout")
        wait(0)
        machine.inject(sim.Xid(1, 48), sim.Xid(1, 63))
        for _ in range(3):
            wait(50)
        nvmlEventSetFree(events)
        answer(rows)
        """,
        PYTHONPATH=str(Path(sim.__file__).parents[2]),
    )
    assert got == ["timeout", [1, 8, 48], [1, 8, 63], "timeout"]


def test_who_waits_for_events_sleeps_until_there_is_one(machine: sim.Machine) -> None:
    got = simulated.nvml(
        machine,
        f"""
        import resource, threading, time
        from vcuda import sim
        machine = sim.Machine({str(machine.directory)!r})
        nvmlInit()
        card, events = nvmlDeviceGetHandleByIndex(0), nvmlEventSetCreate()
        nvmlDeviceRegisterEvents(card, nvmlEventTypeXidCriticalError, events)
        injected = []
        def inject():
            injected.append(time.monotonic())
            machine.inject(sim.Xid(0, 48))
        threading.Timer(1.0, inject).start()
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        code = nvmlEventSetWait_v2(events, 20000).eventData
        woken = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before
        answer([code, woken, time.monotonic() - injected[0]])
        """,
        PYTHONPATH=str(Path(sim.__file__).parents[2]),
    )
    code, woken, late = got
    assert code == 48 and late < 5
    assert woken < 20  # it would be 50 with a look every 20 ms


def test_a_lost_card_says_so_and_its_neighbour_works(machine: sim.Machine) -> None:
    got = simulated.nvml(
        machine,
        f"""
        from vcuda import sim
        machine = sim.Machine({str(machine.directory)!r})
        nvmlInit()
        cards, events = [nvmlDeviceGetHandleByIndex(i) for i in range(2)], nvmlEventSetCreate()
        nvmlDeviceRegisterEvents(cards[0], nvmlEventTypeXidCriticalError, events)
        rows = []
        def note(call, *arguments):
            try:
                call(*arguments)
                rows.append(0)
            except NVMLError as error:
                rows.append(error.value)
        machine.inject(sim.CardLost(0))
        rows.append(nvmlEventSetWait_v2(events, 5000).eventData)
        note(nvmlEventSetWait_v2, events, 5000)
        note(nvmlDeviceGetMemoryInfo, cards[0])
        note(nvmlDeviceGetHandleByIndex, 0)
        note(nvmlDeviceGetMemoryInfo, cards[1])
        rows.append(nvmlDeviceGetCount())
        machine.inject(sim.CardRecovered(0))
        note(nvmlDeviceGetMemoryInfo, cards[0])
        note(nvmlEventSetWait_v2, events, 10)
        answer(rows)
        """,
        PYTHONPATH=str(Path(sim.__file__).parents[2]),
    )
    lost, timeout = 15, 10
    assert got == [79, lost, lost, lost, 0, 2, 0, timeout]


def test_a_slow_card_makes_calls_slow(machine: sim.Machine) -> None:
    code = """
        import time
        nvmlInit()
        card = nvmlDeviceGetHandleByIndex(0)
        start = time.monotonic()
        nvmlDeviceGetMemoryInfo(card)
        answer(time.monotonic() - start)
    """
    machine.inject(sim.SlowCall(0, 600_000))
    assert simulated.nvml(machine, code) >= 0.6
    machine.inject(sim.Cleared(0))
    assert simulated.nvml(machine, code) < 0.6


def test_figures_are_there_for_monitoring(machine: sim.Machine) -> None:
    got = simulated.nvml(
        machine,
        """
        nvmlInit()
        card = nvmlDeviceGetHandleByIndex(0)
        fields = nvmlDeviceGetFieldValues(card, [NVML_FI_DEV_ECC_CURRENT, NVML_FI_DEV_POWER_INSTANT, 0xFFFF])
        answer([nvmlDeviceGetTemperature(card, NVML_TEMPERATURE_GPU), nvmlDeviceGetEnforcedPowerLimit(card),
                nvmlDeviceGetClockInfo(card, NVML_CLOCK_SM), nvmlDeviceGetMaxClockInfo(card, NVML_CLOCK_MEM),
                nvmlDeviceGetTotalEccErrors(card, 0, 0), list(nvmlDeviceGetEccMode(card)),
                nvmlDeviceGetCurrPcieLinkWidth(card), nvmlDeviceGetBAR1MemoryInfo(card).bar1Total > 0,
                [field.nvmlReturn for field in fields], fields[0].value.uiVal])
        """,
    )
    assert 20 <= got[0] <= 90
    assert got[1:] == [400_000, 1410, 1215, 0, [1, 1], 16, True, [0, 0, 3], 1]


def test_a_process_on_a_mig_instance_counts_for_it_and_for_its_card(tmp_path: Path) -> None:
    machine = sim.Machine.create(tmp_path / "machine", [sim.SimCard(mig=["1g", "2g"])])
    instance, dev = machine.cards[0].mig[1], tmp_path / "dev"
    for name in (
        "nvidiactl",
        "nvidia-uvm",
        "nvidia0",
        *(f"nvidia-caps/nvidia-cap{n}" for n in instance.caps),
    ):
        (dev / name).parent.mkdir(parents=True, exist_ok=True)
        (dev / name).touch()
    with simulated.tenant(machine, memory_bytes=256 * MIB, VCUDA_SIM_DEV=str(dev)) as pid:
        got = simulated.nvml(
            machine,
            """
            nvmlInit()
            card = nvmlDeviceGetHandleByIndex(0)
            devices = [card] + [nvmlDeviceGetMigDeviceHandleByIndex(card, index) for index in range(2)]
            answer([[nvmlDeviceGetMemoryInfo(device).used,
                     [[p.pid, p.usedGpuMemory, p.gpuInstanceId, p.computeInstanceId]
                      for p in nvmlDeviceGetComputeRunningProcesses(device)]] for device in devices])
            """,
        )
        truth = machine.report().card(instance.uuid).used_bytes
    used = [truth, [[pid, truth, instance.gpu_instance, instance.compute_instance]]]
    assert truth > 256 * MIB and got == [used, [0, []], used]
