"""Memory of runs beyond the ledger and beyond the share: lazily loaded code is measured by the keeper, `--oversell` opts in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.runs import Runner, wait_for
from tests.support.share import PRELUDE
from tests.vcuda.test_shim_oversell import SAID
from vcuda import region, sim

LAZY = """
text = (b".version 8.0\\n.target sm_80\\n.address_size 64\\n.global .align 4 .b8 large[104857600];\\n"
        b".visible .entry spin()\\n{ ret; }\\n\\0")
library, kernel, function, zero = C.c_void_p(), C.c_void_p(), C.c_void_p(), C.c_uint(0)
begin()
ok("cuLibraryLoadData", C.byref(library), text, None, None, zero, None, None, zero)
ok("cuLibraryGetKernel", C.byref(kernel), library, b"spin")
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
    assert done.stderr == SAID


@pytest.mark.parametrize("share", [["--memory", "1GiB", "--oversell", "512MiB"], ["--oversell", "512MiB"]])
def test_an_oversell_below_the_share_is_refused(vcuda: Runner, share: list[str]) -> None:
    core = "100" if share[0] == "--oversell" else "30"
    done = vcuda.call(*vcuda.run("true", share=["--core", core, *share]))
    assert done.returncode == 2 and "--oversell is 512MiB" in done.stderr
    assert vcuda.bookings() == []
