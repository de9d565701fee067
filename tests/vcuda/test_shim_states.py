"""Without configuration, with unusable usage, with damaged limits: what still works, what is refused, what is said, once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import share as shares
from tests.support.share import LIB, MIB, Share
from vcuda.sim import Machine, SimCard

LIMIT = 256 * MIB
OUT_OF_MEMORY = 2


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine.create(tmp_path / "machine", [SimCard()])


@pytest.fixture
def share(machine: Machine, tmp_path: Path) -> Share:
    return shares.simulated(tmp_path / "share", machine, [shares.limit(machine)])


TAKE = """
context = begin()
module_free = [alloc(count * MIB)[0] for count in (100, 200)]
stream = C.c_void_p()
ok("cuStreamCreate", C.byref(stream), 0)
ok("cuStreamSynchronize", stream)
answer([module_free, info()[1] // MIB])
"""

START = """
context = C.c_void_p()
ok("cuInit", 0)
answer(call("cuCtxCreate_v2", C.byref(context), 0, 0))
"""


def outcome(share: Share, code: str = TAKE) -> tuple[object, list[str]]:
    """What the program answered, and the lines that it said on stderr; it must say nothing else on stdout."""
    process = share.start(code)
    output, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    lines = output.splitlines()
    assert len(lines) == 1
    return json.loads(lines[0]), said.splitlines()


def test_without_configuration_everything_passes_through(machine: Machine, tmp_path: Path) -> None:
    share = shares.simulated(tmp_path / "bare", machine, None)
    ((results, total), said) = outcome(share)
    assert results == [0, 0]
    assert total == machine.cards[0].memory_bytes // MIB
    assert len(said) == 1
    assert said[0].startswith("vcuda: no share is configured (no limits in /etc/vcuda nor in ")


def test_the_environment_can_not_name_a_region(share: Share, machine: Machine, tmp_path: Path) -> None:
    bare = shares.simulated(tmp_path / "bare", machine, None)
    names = ("VCUDA_REGION", "VCUDA_CONFIG", "VCUDA_DIRECTORY", "VCUDA_DIR")
    pointers = {name: str(share.region_directory) for name in names}
    assert bare.run("begin(); answer(info()[1])", errors=_absent(bare), **pointers) > LIMIT


def _absent(share: Share) -> str:
    return f"vcuda: no share is configured (no limits in /etc/vcuda nor in {share.lib64}/../vcuda): nothing is limited here\n"


def test_the_region_is_found_through_a_relative_library_path(share: Share) -> None:
    code = 'os.chdir("/"); begin(); answer(info()[1])'
    process = share.start(code, LD_LIBRARY_PATH=os.path.relpath(share.lib64))
    output, said = process.communicate(timeout=60)
    assert (output, said) == (f"{LIMIT}\n", "")


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.chmod(0o600)
    os.truncate(path, 100)


def overwrite(path: Path) -> None:
    path.chmod(0o600)
    path.write_bytes(b"\xff" * path.stat().st_size)


def replace_by_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = [remove, truncate, overwrite, replace_by_a_fifo, replace_by_a_folder]


@pytest.mark.parametrize("damage", DAMAGES)
def test_unreadable_limits_refuse_memory_but_not_computing(share: Share, damage: Callable[[Path], None]) -> None:
    damage(share.region_directory / "limits")
    ((results, _), said) = outcome(share)
    assert results == [2, 2]
    assert len(said) == 1
    assert said[0].startswith("vcuda: cannot ") and f"{share.region_directory.name}/limits" in said[0]
    assert said[0].endswith("GPU memory is refused until the container is started with readable limits")


def test_unreadable_limits_refuse_memory_that_may_come_to_any_card(share: Share) -> None:
    """Of a pool of managed memory 100 MiB were given."""
    overwrite(share.region_directory / "limits")
    code = """
begin()
class Pool(C.Structure):
    _fields_ = [("type", C.c_int), ("handles", C.c_int), ("location", Location), ("more", C.c_ubyte * 72)]
pool, pointer = C.c_void_p(), u64()
ok("cuMemPoolCreate", C.byref(pool), C.byref(Pool(2, 0, Location(0, 0))))
taken = call("cuMemAllocFromPoolAsync", C.byref(pointer), size(100 * MIB), pool, None)
answer([taken, alloc(100 * MIB, "cuMemAllocManaged", 1)[0]])
"""
    assert outcome(share, code)[0] == [2, 2]


def test_unreadable_limits_are_counted(share: Share) -> None:
    saved = (share.region_directory / "limits").read_bytes()
    overwrite(share.region_directory / "limits")
    outcome(share)
    (share.region_directory / "limits").write_bytes(saved)
    assert share.usage().limits_unreadable == 1


@pytest.mark.parametrize("damage", DAMAGES)
def test_memory_that_can_not_be_counted_is_refused(
    share: Share, machine: Machine, damage: Callable[[Path], None]
) -> None:
    damage(share.region_directory / "usage")
    (result, said) = outcome(share, START)
    assert result == OUT_OF_MEMORY  # a context is memory, too
    assert len(said) == 1
    assert "/usage" in said[0]
    assert said[0].endswith("GPU memory is refused to this process, and it borrows no idle GPU time")
    assert machine.report().cards[0].used_bytes == 0


def test_usage_of_another_container_is_not_used(share: Share, machine: Machine, tmp_path: Path) -> None:
    other = shares.simulated(tmp_path / "other", machine, [shares.limit(machine)])
    usage = share.region_directory / "usage"
    usage.unlink()
    usage.symlink_to(other.region_directory / "usage")
    (result, said) = outcome(share, START)
    assert result == OUT_OF_MEMORY
    assert said[0].startswith("vcuda: cannot use ") and "it belongs to another container's limits" in said[0]
    assert other.usage().processes == ()


def test_a_closed_or_full_stderr_hurts_nobody(machine: Machine, tmp_path: Path) -> None:
    share = shares.simulated(tmp_path / "bare", machine, None)
    code = """
        if sys.argv[1] == "closed":
            reader, writer = os.pipe()
            os.close(reader)
        else:
            reader, writer = os.pipe()
            os.set_blocking(writer, False)
            try:
                while True: os.write(writer, b"x" * 4096)
            except BlockingIOError:
                os.set_blocking(writer, True)
        os.dup2(writer, 2)
        import signal
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        begin()
        answer("alive")
    """
    for state in ("closed", "full"):
        assert share.run(code, state) == "alive"


def test_the_signal_handlers_of_the_application_stay(share: Share) -> None:
    assert share.run("""
        import signal
        before = [signal.getsignal(number) for number in signal.valid_signals()]
        def handled():
            for line in open("/proc/self/status"):
                if line.startswith(("SigCgt", "SigIgn", "SigBlk")):
                    yield line
        masks = list(handled())
        begin(); alloc(MIB)
        answer(masks == list(handled()))
    """)


def test_there_is_nothing_to_find_in_the_build_folder() -> None:
    """The shims that are built must not carry a region beside them: it would bind every test and tool."""
    assert not (LIB / "vcuda").exists()
