"""The record of an event has the card turn to its context: while a neighbour has the lease it waits, for a while, and not where it is captured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import share
from vcuda.arbiter import Arbiter
from vcuda.sim import Machine, SimCard

# Longer than a thread waits for others' leases, and much less than it takes to pay for the kernel.
LONGEST_MS, WAITS_MS, AT_ONCE_MS = 1000, 20, 10

LOAD = """
context = begin()
module, function, stream, other, event, graph = (C.c_void_p() for _ in range(6))
image = b".version 7.0\\n.target sm_70\\n.address_size 64\\n.visible .entry %s() { ret; }\\n" % sys.argv[1].encode()
ok("cuModuleLoadData", C.byref(module), image)
ok("cuModuleGetFunction", C.byref(function), module, sys.argv[1].encode())
ok("cuStreamCreate", C.byref(stream), 1)
ok("cuStreamCreate", C.byref(other), 1)
ok("cuEventCreate", C.byref(event), 2)
def launch():
    ok("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, stream, None, None)
"""

NEIGHBOUR = (
    LOAD
    + """
launch()
answer("works")
while True:
    launch()
"""
)

CLIENT = (
    LOAD
    + """
launch()
ok("cuStreamSynchronize", stream)
if sys.argv[2] == "captured":
    ok("cuStreamBeginCapture_v2", other, 2)
took = []
for _ in range(5):
    before = time.monotonic()
    if sys.argv[2] == "flags":
        ok("cuEventRecordWithFlags", event, other, 0)
    elif sys.argv[2] == "thread":
        ok("cuEventRecord_ptsz", event, None)
    else:
        ok("cuEventRecord", event, other)
    took.append(1000 * (time.monotonic() - before))
if sys.argv[2] == "captured":
    ok("cuStreamEndCapture", other, C.byref(graph))
answer(took)
"""
)


@pytest.mark.parametrize("how", ["plain", "flags", "thread", "captured"])
def test_a_record_waits_for_its_containers_lease_for_a_while(tmp_path: Path, how: str) -> None:
    machine = Machine.create(tmp_path / "machine", [SimCard()])
    with Arbiter() as arbiter:
        containers = []
        for name, cores in (("neighbour", 90), ("client", 10)):
            limits = [share.limit(machine, 0, cores=cores, core_limit=cores, shared=True)]
            containers.append(share.simulated(tmp_path / name, machine, limits))
            arbiter.add(name, containers[-1].region_directory)
        neighbour = containers[0].start(NEIGHBOUR, "spin_1000us")
        try:
            assert neighbour.stdout is not None and neighbour.stdout.readline()
            client = containers[1].start(CLIENT, "spin_300ms", how)
            took = json.loads(client.communicate(timeout=share.SECONDS)[0])
        finally:
            neighbour.kill()
            neighbour.communicate()
    assert max(took) < LONGEST_MS
    if how == "captured":
        assert min(took) < AT_ONCE_MS
    else:
        # Not each: while a busy machine does not let the neighbour run, nobody has the lease.
        assert sorted(took)[2] > WAITS_MS
