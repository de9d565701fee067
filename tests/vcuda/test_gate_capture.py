"""What the throttle does while a stream is captured, told with `pytest -s` and checked: no wait, no charge, no event, no error changed.

The same program runs in a share of 10 and without one, on the simulated driver with a counter in front of it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import vcuda
from vcuda import region
from vcuda.sim import Machine

SHIM = Path(vcuda.__file__).parent / "lib" / "shim" / "libcuda.so.1"
CORES, LAUNCHES, KERNEL_MS = 10, 100, 20
# Calls that a capture forbids: the driver's answer is the application's.
CLIENT = """
import ctypes as C, json, sys, time
from pathlib import Path
share = Path(sys.argv[1]) if sys.argv[1:] and sys.argv[1] else None
cuda = C.CDLL("libcuda.so.1")
counter = C.CDLL("libcuda-driver.so.1") if share else cuda
answers = []
def call(name, *arguments):
    answers.append([name, getattr(cuda, name)(*arguments)])
def counted(name):
    return C.c_uint.in_dll(counter, name).value
def usage():
    from vcuda import region
    card = region.read_usage(share).cards[0] if share else None
    return (card.gpu_time_ns / 1e6, card.waited_ns / 1e6) if card else (0, 0)
device, status, nodes = C.c_int(), C.c_int(), C.c_size_t()
context, module, function, stream, event, graph, executable = (C.c_void_p() for _ in range(7))
call("cuInit", 0)
call("cuDeviceGet", C.byref(device), 0)
call("cuCtxCreate_v2", C.byref(context), 0, device)
image = b".version 7.0\\n.target sm_70\\n.address_size 64\\n.visible .entry spin_KERNELms() { ret; }\\n"
call("cuModuleLoadData", C.byref(module), image)
call("cuModuleGetFunction", C.byref(function), module, b"spin_KERNELms")
call("cuStreamCreate", C.byref(stream), 1)
call("cuEventCreate", C.byref(event), 0)
def launch():
    call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, stream, None, None)
launch()  # the bucket is in debt now: outside a capture the next one waits
call("cuCtxSynchronize")
time.sleep(0.1)  # the helper settles
before, events = usage(), counted("capture_events") if share else 0
call("cuStreamBeginCapture_v2", stream, 0)
began = time.monotonic()
for _ in range(LAUNCHES):
    launch()
took_ms = 1000 * (time.monotonic() - began)
call("cuStreamIsCapturing", stream, C.byref(status))
if sys.argv[2:]:
    call("cuStreamSynchronize", stream)  # forbidden: the capture is lost
call("cuStreamEndCapture", stream, C.byref(graph))
during = usage()
call("cuGraphGetNodes", graph, None, C.byref(nodes))
found = {"took_ms": took_ms, "charged_ms": during[0] - before[0], "waited_ms": during[1] - before[1], "nodes": nodes.value,
         "status": status.value}
if share:
    found |= {"events": counted("capture_events") - events, "launches": counted("captured_launches"),
              "other_events": counted("other_events")}
call("cuGraphInstantiateWithFlags", C.byref(executable), graph, 0)
if not sys.argv[2:]:
    call("cuGraphLaunch", executable, stream)
    call("cuCtxSynchronize")
    time.sleep(0.2)
    found["graph_ms"] = usage()[0] - during[0]
print(json.dumps({"answers": answers, "found": found}))
""".replace("KERNELms", f"{KERNEL_MS}ms").replace("LAUNCHES", str(LAUNCHES))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A container's folder: the shim, the counter as its driver, the simulated driver behind that."""
    libraries = tmp_path / "lib64"
    (libraries / "drv").mkdir(parents=True)
    shutil.copyfile(SHIM, libraries / "libcuda.so.1")
    source, compiler = Path(__file__).with_name("gate_capture_driver.c"), ["gcc", "-shared", "-fPIC"]
    behind = tmp_path / "libsimulated-driver.so"
    subprocess.run(
        [*compiler, "-x", "c", "/dev/null", f"-Wl,-soname,{behind.name}", "-o", str(behind)],
        check=True,
        timeout=60,
    )
    output = ["-Wl,-soname,libcuda-driver.so.1", "-o", str(libraries / "drv" / "libcuda-driver.so.1")]
    needed = ["-Wl,--no-as-needed", str(behind), "-Wl,-rpath,$ORIGIN", "-ldl"]
    subprocess.run([*compiler, "-O1", "-Wall", "-Werror", str(source), *output, *needed], check=True, timeout=60)
    return tmp_path


def run(folder: Path, machine: Machine, limited: bool, *spoil: str) -> dict[str, Any]:
    environment = {**os.environ, **machine.environment()}
    words = []
    if limited:
        simulated = folder / "lib64" / "drv" / "libsimulated-driver.so"
        if not simulated.exists():
            simulated.symlink_to(machine.library_folder / "libcuda.so.1")
            (folder / "vcuda").mkdir()
            region.create(folder / "vcuda", [region.CardLimit(machine.cards[0].uuid, 0, 1 << 30, CORES, CORES)])
        environment["LD_LIBRARY_PATH"] = f"{folder / 'lib64'}:{environment['LD_LIBRARY_PATH']}"
        words = [str(folder / "vcuda"), *spoil]
    elif spoil:
        words = ["", *spoil]
    command = [sys.executable, "-c", CLIENT, *words]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer


def test_a_capture_is_left_alone_and_its_graph_is_charged(folder: Path) -> None:
    machine = Machine.create(folder / "machine")
    native, limited = run(folder, machine, False), run(folder, machine, True)
    found = limited["found"]
    uncaptured = LAUNCHES * KERNEL_MS
    print(
        f"\n{LAUNCHES} launches of {KERNEL_MS} ms kernels while their stream is captured, in a share of {CORES} that is in debt"
        f"\n  reached the driver as captured      {found['launches']:8}"
        f"\n  took all together, ms               {found['took_ms']:8.2f}   (run instead: {100 * uncaptured / CORES:.0f} ms at {CORES} %)"
        f"\n  waited at the gate, ms              {found['waited_ms']:8.2f}"
        f"\n  charged, ms                         {found['charged_ms']:8.2f}"
        f"\n  our events on the capturing stream  {found['events']:8}   (on other streams, before and after: {found['other_events']})"
        f"\n  nodes of the graph                  {found['nodes']:8}   (without a share: {native['found']['nodes']})"
        f"\n  answers of the driver's calls       {'the same' if limited['answers'] == native['answers'] else 'different':>8}"
        f"\nthe graph, launched once: charged, ms {found['graph_ms']:8.0f}   (its kernels: {uncaptured} ms)"
    )
    assert limited["answers"] == native["answers"]
    assert found["launches"] == found["nodes"] == native["found"]["nodes"] == LAUNCHES
    assert found["events"] == 0 and found["other_events"] > 0  # the counter does count
    assert found["charged_ms"] == 0 and found["waited_ms"] == 0
    assert found["graph_ms"] == pytest.approx(uncaptured, rel=0.1)


def test_a_capture_that_the_application_spoils_fails_as_without_a_share(folder: Path) -> None:
    machine = Machine.create(folder / "machine")
    native, limited = (run(folder, machine, share, "spoil") for share in (False, True))
    failed = [(name, result) for name, result in limited["answers"] if result]
    print(f"\na synchronised capture fails, with and without a share alike: {failed}")
    assert failed and limited["answers"] == native["answers"]
    assert limited["found"]["events"] == 0 and limited["found"]["charged_ms"] == 0
