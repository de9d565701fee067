"""What a context costs where nobody has told the limits: the first one is measured in the container, beside neighbours that grow."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tests.support import share as shares
from tests.support.share import MIB
from vcuda.sim import Machine, SimCard

GROWS = """
begin()
answer("grows")
import select
while not select.select([sys.stdin], [], [], 0)[0]:
    held = [alloc(64 * MIB)[1] for _ in range(16)]
    for pointer in held: ok("cuMemFree_v2", pointer)
"""

# In a PID namespace of its own: NVML names neither us nor the neighbour as we count.
APART = """
libc = C.CDLL(None, use_errno=True)
if libc.unshare(0x20000000):
    sys.exit("skip")
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("place", ["", APART], ids=["our PIDs", "other PIDs"])
def test_a_neighbour_that_grows_is_no_part_of_the_first_context(place: str, tmp_path: Path) -> None:
    if place and os.geteuid() != 0:
        pytest.skip("only root may make namespaces here")
    machine = Machine.create(tmp_path / "machine", [SimCard()])
    busy = shares.simulated(tmp_path / "busy", machine, [shares.limit(machine, memory_bytes=2048 * MIB)])
    neighbour = busy.start(GROWS)
    assert neighbour.stdout and neighbour.stdout.readline() == '"grows"\n'
    costs = []
    try:
        for number in range(5):
            share = shares.simulated(tmp_path / f"s{number}", machine, [shares.limit(machine, memory_bytes=1024 * MIB)])
            costs.append(share.run(place + "begin(); answer((info()[1] - info()[0]) >> 20)"))
    finally:
        neighbour.communicate("\n", timeout=60)
    print(f"the first context of five containers: {costs} MiB")
    assert costs == [64] * 5


def test_what_the_drivers_list_leaves_out_of_a_context_is_measured_too(tmp_path: Path) -> None:
    machine = Machine.create(tmp_path / "machine", [SimCard(knobs={"unlisted_kib": 3072})])
    share = shares.simulated(tmp_path / "share", machine, [shares.limit(machine, memory_bytes=1024 * MIB)])
    assert share.run("begin(); answer((info()[1] - info()[0]) >> 20)") == 64


def test_processes_that_begin_at_once_never_make_contexts_beside_what_the_first_takes(tmp_path: Path) -> None:
    """A card makes contexts one after another, 100 ms and more each: whoever is first fills the share while the others wait for theirs."""
    machine = Machine.create(tmp_path / "machine", [SimCard(knobs={"context_ms": 200})])
    share = shares.simulated(tmp_path / "share", machine, [shares.limit(machine, memory_bytes=512 * MIB)])
    code = """
        sys.stdin.readline(); ok("cuInit", 0)
        made = call("cuCtxCreate_v2", C.byref(C.c_void_p()), 0, 0)
        answer([made, len(fill(16 * MIB)[1]) if made == 0 else 0]); sys.stdin.readline()
    """
    tenants = [share.start(code) for _ in range(4)]
    peak, answers = 0, []
    for tenant in tenants:
        assert tenant.stdin
        tenant.stdin.write("\n"), tenant.stdin.flush()
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        peak = max(peak, machine.report().cards[0].used_bytes)
    for tenant in tenants:
        answers.append(json.loads(tenant.communicate("\n", timeout=60)[0]))
    print(f"peak {peak / MIB} MiB, contexts and 16 MiB taken: {answers}")
    assert peak <= 512 * MIB
    assert sum(64 * (made == 0) + 16 * taken for made, taken in answers) == 512


@pytest.mark.parametrize(
    "make", ["begin()", 'ok("cuInit", 0); ok("cuDevicePrimaryCtxRetain", C.byref(P), 0); ok("cuCtxSetCurrent", P)']
)
def test_a_context_of_which_nothing_tells_the_cost_is_charged_what_the_card_has_in_use(
    make: str, tmp_path: Path
) -> None:
    """There is no NVML here. A neighbour's 100 MiB count, too: nobody knows that they are his."""
    machine = Machine.create(tmp_path / "machine", [SimCard()])
    busy = shares.simulated(tmp_path / "busy", machine, [shares.limit(machine, memory_bytes=1024 * MIB)])
    share = shares.simulated(tmp_path / "share", machine, [shares.limit(machine, memory_bytes=1024 * MIB)])
    for library in share.lib64.glob("libnvidia-ml*"):
        library.unlink()
    code = f"P = C.c_void_p()\n{make}\nanswer((info()[1] - info()[0]) >> 20)"
    alone = share.run(code)
    neighbour = busy.start("begin(); alloc(36 * MIB); answer(0); sys.stdin.readline()")
    assert neighbour.stdout and neighbour.stdout.readline() == "0\n"
    beside = share.run(code)
    shares.end(neighbour)
    assert [alone, beside] == [64, 164]
