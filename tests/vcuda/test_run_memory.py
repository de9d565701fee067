"""Memory of runs beyond the ledger and beyond the share: lazily loaded code is measured by the supervisor, `--oversell` opts in."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.runs import Runner, wait_for
from tests.support.share import PRELUDE, beside_refusals
from tests.vcuda.test_shim_oversell import SAID
from vcuda import region, sim
from vcuda.runs.context_costs import ContextCosts

LAZY = """
text = (b".version 8.0\\n.target sm_80\\n.address_size 64\\n.global .align 4 .b8 large[104857600];\\n"
        b".visible .entry spin()\\n{ ret; }\\n\\0")
library, kernel, function, zero = C.c_void_p(), C.c_void_p(), C.c_void_p(), C.c_uint(0)
begin()
context = C.c_void_p()
ok("cuCtxGetCurrent", C.byref(context))
ok("cuCtxSetCurrent", None)  # a library that no context asked for: nobody knows where it will be used
ok("cuLibraryLoadData", C.byref(library), text, None, None, zero, None, None, zero)
ok("cuCtxSetCurrent", context)
ok("cuLibraryEnumerateKernels", C.byref(kernel), 1, library)
ok("cuKernelGetFunction", C.byref(function), kernel)
answer(info()[0] // MIB)
ok("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, None, None, None)
ok("cuCtxSynchronize")
sys.stdin.readline()
answer(info()[0] // MIB)
"""


@pytest.fixture
def vcuda(tmp_path: Path) -> Iterator[Runner]:
    sim.Machine.create(tmp_path / "machine", [sim.SimCard(memory_bytes=8 * 2**30)])
    runner = Runner(tmp_path / "machine")
    yield runner
    wait_for("the end of every booking", lambda: not runner.bookings())


def test_lazily_loaded_code_of_a_run_is_in_its_limit(vcuda: Runner) -> None:
    front = vcuda.start(*vcuda.run(sys.executable, "-c", PRELUDE + LAZY), stdin=subprocess.PIPE)
    assert front.stdout is not None
    line = front.stdout.readline()
    assert line, front.communicate(timeout=60)[1]
    assert int(line) == 1024 - 64
    folder = vcuda.ledger / vcuda.bookings()[0].name / "vcuda"
    wait_for("the code's memory", lambda: region.read_limits(folder)[0].overhead_bytes >= 100 << 20)
    output, said = front.communicate("\n", timeout=60)
    assert (int(output), said) == (1024 - 64 - 101, "")


def test_an_oversold_run_may_hold_more_than_its_share_and_is_told(vcuda: Runner) -> None:
    code = "begin(); before = info(); answer([before, [alloc(900 << 20)[0], alloc(900 << 20)[0], alloc(900 << 20)[0]]])"
    share = ["--core", "30", "--memory", "1GiB", "--oversell", "2GiB"]
    done = vcuda.call(*vcuda.run(sys.executable, "-c", PRELUDE + code, share=share))
    assert done.stdout == f"[[{(2048 - 64) << 20}, {2048 << 20}], [0, 0, 2]]\n", done.stderr
    assert beside_refusals(done.stderr) == SAID


@pytest.mark.parametrize("share", [["--memory", "1GiB", "--oversell", "512MiB"], ["--oversell", "512MiB"]])
def test_an_oversell_below_the_share_is_refused(vcuda: Runner, share: list[str]) -> None:
    core = "100" if share[0] == "--oversell" else "30"
    done = vcuda.call(*vcuda.run("true", share=["--core", core, *share]))
    assert done.returncode == 2 and "--oversell is 512MiB" in done.stderr
    assert vcuda.bookings() == []


GROWING = """
context = begin()
answer("grows")
for _ in range(1000000):
    held = [alloc(64 << 20)[1] for _ in range(16)]
    for pointer in held: ok("cuMemFree_v2", pointer)
"""


def test_a_context_costs_what_it_takes_whatever_a_neighbour_takes_meanwhile(vcuda: Runner) -> None:
    """Measured once, by `vcuda run` itself; the supervisor, which writes the limits anew, leaves it."""
    costs = vcuda.ledger / f"context-{os.geteuid()}"
    share = ["--core", "30", "--memory", "2GiB"]
    neighbour = vcuda.start(*vcuda.run(sys.executable, "-c", PRELUDE + GROWING, share=share))
    try:
        assert neighbour.stdout and neighbour.stdout.readline() == '"grows"\n'
        costs.unlink()  # as if the neighbour were another user's
        code = "begin(); answer(info()[0] >> 20)"
        first = vcuda.call(*vcuda.run(sys.executable, "-c", PRELUDE + code))
        written = costs.stat().st_mtime_ns
        second = vcuda.start(
            *vcuda.run(sys.executable, "-c", PRELUDE + code + "; sys.stdin.read()"), stdin=subprocess.PIPE
        )
        assert second.stdout and int(second.stdout.readline()) == 1024 - 64
        names = [entry.name for entry in vcuda.bookings()]
        limits = [region.read_limits(vcuda.ledger / name / "vcuda")[0] for name in names]
        assert second.communicate("", timeout=60)[1] == ""
    finally:
        neighbour.terminate()
        neighbour.communicate(timeout=60)
    assert first.stdout == f"{1024 - 64}\n", first.stderr
    assert [limit.context_bytes for limit in limits] == [64 << 20] * 2
    assert costs.stat().st_mtime_ns == written


def test_another_users_figures_are_not_believed(tmp_path: Path) -> None:
    costs = ContextCosts(tmp_path)
    path = tmp_path / f"context-{os.geteuid()}"
    limits = [region.CardLimit("GPU-0", 0, 1 << 30, 10, 10)]
    path.write_text('{"driver": "", "cards": {"GPU-0": 7}}')
    assert costs.fill(limits)[0].context_bytes == 7
    for text in (
        "",
        "[]",
        "{",
        '{"cards": []}',
        '{"cards": {"GPU-0": -1}}',
        '{"cards": {"GPU-0": "1"}}',
        "[" * 60000,
    ):
        path.write_text(text)
        assert costs.fill(limits)[0].context_bytes == 0
    path.write_text('{"driver": "", "cards": {"GPU-0": 7}}')
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
        assert costs.fill(limits)[0].context_bytes == 0
    path.unlink()
    path.symlink_to("/etc/passwd")
    assert costs.fill(limits)[0].context_bytes == 0
