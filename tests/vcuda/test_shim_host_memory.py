"""The shim gets no host memory for its record of what the driver gave: the allocation is refused, nothing stays booked or taken."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support import share as shares
from tests.support.share import MIB, Share
from tests.vcuda.test_shim_memory import ALLOCATORS, FILL
from vcuda.sim import Machine, SimCard

LIMIT = 512 * MIB


@pytest.fixture(scope="module")
def failing_memory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("failing") / "failing_memory.so"
    source = Path(__file__).with_name("failing_memory.c")
    words = ["gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", str(source), "-o", str(library)]
    subprocess.run([*words, "-ldl"], check=True)
    return library


@pytest.fixture
def share(tmp_path: Path) -> Share:
    machine = Machine.create(tmp_path / "machine", [SimCard()])
    return shares.simulated(tmp_path / "share", machine, [shares.limit(machine, memory_bytes=LIMIT)])


@pytest.mark.parametrize(
    ("allocator", "failures"),
    [*((each, -1) for each in ALLOCATORS), ("chunk of its own", 1), ("own pool", 1)],
)
def test_an_allocation_without_host_memory_for_its_record_is_refused_and_leaves_nothing(
    share: Share, failing_memory: Path, allocator: str, failures: int
) -> None:
    """Entries that fit in what the record has already are granted; each that is refused must change nothing."""
    assert share.machine
    take, give = ALLOCATORS.get(allocator, ("lambda: alloc(3 * MIB // 2)", ALLOCATORS["small"][1]))
    prelude = FILL.split("rounds = []")[0].format(take=take, give=give)
    process = share.start(
        prelude
        + """
fail = C.CDLL(None).fail_allocations
def settled():
    ok("cuCtxSynchronize")
    return info()[0]
held = [take()[1]]
found = []
while len(found) < 3:
    before = settled()
    fail(int(sys.argv[1]))
    result, pointer = take()
    times = fail(0)
    if result == 0:
        assert times == 0, "granted without a record"
        held.append(pointer)
    else:
        found.append([result, times > 0, pointer.value or 0, min(0, settled() - before)])  # pools may give back more
answer(found)
sys.stdin.readline()
for pointer in held:
    give(pointer)
answer(info() == at_start)
sys.stdin.read()
""",
        str(failures),
        LD_PRELOAD=str(failing_memory),
    )
    assert process.stdin and process.stdout
    line = process.stdout.readline()
    assert line, process.communicate(timeout=60)[1]
    booked = share.usage().cards[0].ledger_bytes
    assert booked >= share.machine.report().cards[0].used_bytes
    process.stdin.write("\n")
    process.stdin.flush()
    end = process.stdout.readline()
    used = share.machine.report().cards[0].used_bytes
    assert shares.beside_refusals(process.communicate("", timeout=60)[1]) == ""
    assert json.loads(line) == [[2, True, 0, 0]] * 3
    assert (end, used) == ("true\n", 64 * MIB)
