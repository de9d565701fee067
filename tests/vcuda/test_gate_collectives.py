"""Tenants whose work waits for other cards: each has a rank on two cards, and neither rank runs ahead of the other."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support import share
from vcuda.arbiter import Arbiter
from vcuda.sim import Machine, SimCard

# One step is a kernel on both cards, each followed by a wait for the other card's: an all-reduce without the data.
RANKS = """
ok("cuInit", 0)
image = b".version 7.0\\n.target sm_70\\n.address_size 64\\n.visible .entry spin_1000us() { ret; }\\n"
ranks = []
for device in range(2):
    context, module, function, stream, event = (C.c_void_p() for _ in range(5))
    ok("cuCtxCreate_v2", C.byref(context), 0, device)
    ok("cuModuleLoadData", C.byref(module), image)
    ok("cuModuleGetFunction", C.byref(function), module, b"spin_1000us")
    ok("cuStreamCreate", C.byref(stream), 1)
    ok("cuEventCreate", C.byref(event), 2)
    ranks.append((context, function, stream, event))
steps, longest = 0, 0.0
before = time.monotonic()
end = before + float(sys.argv[1])
while before < end:
    for context, function, stream, event in ranks:
        ok("cuCtxSetCurrent", context)
        ok("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, stream, None, None)
        ok("cuEventRecord", event, stream)
    for rank, other in zip(ranks, reversed(ranks)):
        ok("cuCtxSetCurrent", rank[0])
        ok("cuStreamWaitEvent", rank[2], other[3], 0)
    steps += 1
    if steps % 4 == 0:
        for context, _, stream, _ in ranks:
            ok("cuCtxSetCurrent", context)
            ok("cuStreamSynchronize", stream)
    now = time.monotonic()
    longest = max(longest, now - before)
    before = now
answer([steps, longest])
"""
SECONDS = 2.5


def steps_of(folder: Path, machine: Machine, tenants: int) -> list[tuple[int, float]]:
    """Run so many tenants side by side on both cards: each one's steps and its longest one, in seconds."""
    part = 100 // tenants
    with Arbiter() as arbiter:
        processes = []
        for index in range(tenants):
            limits = [share.limit(machine, card, cores=part, core_limit=part, shared=tenants > 1) for card in range(2)]
            container = share.simulated(folder / f"{tenants}-{index}", machine, limits)
            arbiter.add(str(index), container.region_directory)
            processes.append(container.start(RANKS, str(SECONDS)))
        said = [process.communicate(timeout=share.SECONDS) for process in processes]
    return [tuple(json.loads(output)) for output, _ in said]


def test_tenants_that_wait_across_cards_neither_lock_nor_convoy(tmp_path: Path) -> None:
    machine = Machine.create(tmp_path / "machine", [SimCard(), SimCard()])
    [(alone, _)] = steps_of(tmp_path, machine, 1)
    both = steps_of(tmp_path, machine, 2)
    assert sum(steps for steps, _ in both) >= 0.7 * alone  # a convoy would leave the cards idle by turns
    for steps, longest in both:
        assert steps >= 0.25 * alone
        assert longest < 1  # and nobody waits for good: what is held back goes after 50 ms without progress
