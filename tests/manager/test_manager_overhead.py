"""The daemon feeds overhead: code that a pod's process loads lazily is in its limit, at the pod's own question and by itself."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from manager.allocations.record import Allocation
from manager.audit import overhead
from manager.audit.overhead import Overhead
from manager.audit.owners import Owners
from manager.cards.driver import CardProcess
from tests.manager.manager_pods import allocation, container, eventually, pod
from tests.manager.manager_proc import Proc, group
from tests.manager.manager_support import Node
from tests.support.share import MIB, Share, lay_out
from vcuda import region
from vcuda._build import native
from vcuda.sim import Machine
from vcuda.spec.placement import CardShare

GIB = 1 << 30
UID = "a2345678-1234-1234-1234-123456789abc"

# A library whose variables take 100 MiB of the card with the first use of one of its kernels.
LAZY = """
text = (b".version 8.0\\n.target sm_80\\n.address_size 64\\n.global .align 4 .b8 large[104857600];\\n"
        b".visible .entry spin()\\n{ ret; }\\n\\0")
library, kernel, function, zero = C.c_void_p(), C.c_void_p(), C.c_void_p(), C.c_uint(0)
def load():
    context = C.c_void_p()
    ok("cuCtxGetCurrent", C.byref(context))
    ok("cuCtxSetCurrent", None)  # a library that no context asked for: nobody knows where it will be used
    ok("cuLibraryLoadData", C.byref(library), text, None, None, zero, None, None, zero)
    ok("cuCtxSetCurrent", context)
    ok("cuLibraryEnumerateKernels", C.byref(kernel), 1, library)
    ok("cuKernelGetFunction", C.byref(function), kernel)
def launch():
    ok("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, None, None, None)
    ok("cuCtxSynchronize")
"""


def inside(node: Node, machine: Machine, item: dict[str, object], directory: Path) -> Share:
    """The share of a pod's container as its processes see it."""
    version = native.SIM_DRIVER_VERSION
    share = lay_out(
        directory,
        machine.library_folder / f"libcuda.so.{version}",
        machine.library_folder / f"libnvidia-ml.so.{version}",
        machine,
    )
    share.region_directory.symlink_to(node.region(item, "c"))
    return share


def test_lazily_loaded_code_is_in_the_limit_of_the_pod(
    machine: Machine, make_node: Callable[..., Node], tmp_path: Path
) -> None:
    node = make_node(machine.root)
    node.kubelet.start()
    daemon = node.start(wait=200)
    item = pod("a", container("c", 30, 4))
    node.kubelet.admit(item)
    share = inside(node, machine, item, tmp_path / "share")
    eventually(lambda: daemon.overhead._questions._watched, "a watch on the container's file")
    process = share.start(
        LAZY
        + """
begin(); load()
answer(info()[0] // MIB)
launch()
sys.stdin.readline()
answer(info()[0] // MIB)
held = fill(10 * MIB)[1]
answer(len(held))
sys.stdin.readline()
ok("cuLibraryUnload", library)
answer("unloaded")
sys.stdin.read()
"""
    )
    assert process.stdin and process.stdout
    line = process.stdout.readline()
    assert line, process.communicate(timeout=60)[1]
    assert int(line) == 1024 - 64
    shown = lambda: json.loads(node.get("/usage")[1])["containers"][0]["cards"][0]  # noqa: E731
    eventually(lambda: shown()["overhead_bytes"] >= 100 * MIB, "the code that the first launch has loaded")
    process.stdin.write("\n")
    process.stdin.flush()
    assert int(process.stdout.readline()) == 1024 - 64 - 101  # the image rounds it up
    # Its allocations and its code together: not more than the share, by the card's own books.
    assert int(process.stdout.readline()) == (1024 - 64 - 101) // 10
    assert machine.report().cards[0].used_bytes <= GIB
    assert shown()["unaccounted_bytes"] >= 100 * MIB  # the audit still judges by the ledger
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == '"unloaded"\n'
    eventually(lambda: shown()["overhead_bytes"] < MIB, "nothing is left of unloaded code")
    process.communicate("", timeout=60)


def test_a_question_is_answered_before_the_next_round(
    machine: Machine, make_node: Callable[..., Node], tmp_path: Path
) -> None:
    node = make_node(machine.root)
    node.kubelet.start()
    daemon = node.start("--health-check-interval=3600", "--allocation-check-period=3600", wait=200)
    item = pod("a", container("c", 30, 4))
    node.kubelet.admit(item)
    share = inside(node, machine, item, tmp_path / "share")
    eventually(lambda: daemon.overhead._questions._watched, "a watch on the container's file")
    region.write_overhead(node.region(item, "c"), [0])  # the first round, of which there are none now
    # The wait for an answer is short; on a busy machine a later question gets it.
    free = share.run(
        LAZY
        + """
begin(); load(); launch()
for _ in range(100):
    free = info()[0] // MIB
    if free < 1024 - 64:
        break
    time.sleep(0.11)
    launch()
answer(free)
"""
    )
    assert free == 1024 - 64 - 101


ZEROES_ITS_LEDGER = """
begin(); alloc(900 * MIB)
answer("holds")
sys.stdin.readline()
descriptor = os.open(sys.argv[1], os.O_RDWR)
os.pwrite(descriptor, bytes(2048), 128 + 16 * 256 + 128)
sys.stdin.readline()
answer([alloc(2 * MIB)[0], info()[0]])
"""


@pytest.mark.parametrize("policy", ["report", "refuse"])
def test_a_container_that_damages_its_account_is_measured_and_audited_within_seconds(
    policy: str, machine: Machine, make_node: Callable[..., Node], tmp_path: Path
) -> None:
    node = make_node(machine.root)
    node.kubelet.start()
    daemon = node.start(
        "--health-check-interval=3600", "--allocation-check-period=3600", f"--audit-policy={policy}", wait=200
    )
    item = pod("a", container("c", 30, 4))
    node.kubelet.admit(item)
    share = inside(node, machine, item, tmp_path / "share")
    path = node.region(item, "c")
    eventually(lambda: daemon.overhead._questions._watched, "a watch on the container's file")
    process = share.start(ZEROES_ITS_LEDGER, str(path / "usage"))
    assert process.stdout and process.stdin and process.stdout.readline() == '"holds"\n'
    began = time.monotonic()
    process.stdin.write("\n")
    process.stdin.flush()
    try:
        eventually(lambda: region.read_limits(path)[0].overhead_bytes >= 900 * MIB, "the memory counts")
        held_s = time.monotonic() - began
        eventually(lambda: any(daemon.auditor.finding.beyond.values()), "the audit")
        refused = lambda: region.read_usage(path).refused  # noqa: E731
        if policy == "refuse":
            eventually(refused, "no more memory")
        told_s = time.monotonic() - began
        assert refused() == (policy == "refuse")
        # Another process, which has not seen the account before.
        other = share.run(
            'context = C.c_void_p(); ok("cuInit", 0); answer(call("cuCtxCreate_v2", C.byref(context), 0, 0))'
        )
    finally:
        output = process.communicate("\n", timeout=60)[0]
    print(f"{policy}: counted after {held_s:.1f} s, audited after {told_s:.1f} s")
    assert other == 2
    assert json.loads(output)[0] == 2
    assert told_s < 10


@pytest.fixture
def item(tmp_path: Path) -> Allocation:
    directory = tmp_path / "region"
    directory.mkdir()
    region.create(directory, [region.CardLimit("GPU-1", 0, GIB, 30, 30)])
    return allocation(CardShare("GPU-1", 30, 4), pod_uid=UID, pod_name="a", region=str(directory))


def test_a_card_that_does_not_say_leaves_the_last_figure(item: Allocation, tmp_path: Path) -> None:
    held: list[CardProcess] | None = [CardProcess(10, 70 * MIB)]
    proc = Proc(tmp_path)
    proc.add(10, group(item.pod_uid))

    def read_usage(directory: str) -> region.Usage | None:
        try:
            return region.read_usage(directory)
        except region.RegionError:
            return None

    def written() -> int:
        for _ in range(3):
            overhead.sample([item], ["GPU-1"])
        return region.read_limits(item.region)[0].overhead_bytes

    overhead = Overhead(
        processes=lambda _: held,
        usage=lambda _: read_usage(item.region),
        allocations=lambda: [item],
        owners=proc.owners(),
    )
    assert written() == 70 * MIB
    assert overhead.held("GPU-1") == held
    held = None
    assert written() == 70 * MIB
    assert overhead.held("GPU-1") is None
    held = [CardProcess(10, None)]
    assert written() == 70 * MIB
    held = []
    assert written() == 0
    (Path(item.region) / "usage").unlink()  # the tenant's doing: what can't be read counts nothing
    held = [CardProcess(10, 70 * MIB)]
    assert written() == 70 * MIB
    overhead.stop()


def test_files_are_looked_for_when_somebody_came_or_a_file_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not every second: that would be most of an idle node's work."""
    monkeypatch.setattr(overhead, "_FOLLOW_S", 0.02)
    items = [allocation(pod_uid=f"u{number}", region=str(tmp_path / f"{number}")) for number in range(2)]
    for item in items:
        Path(item.region).mkdir()
        (Path(item.region) / "usage").touch()
    present = items[:1]
    followed: list[set[str]] = []
    measurer = Overhead(
        processes=lambda _: None,
        usage=lambda _: None,
        allocations=lambda: tuple(present),
        owners=Owners(tmp_path / "proc"),
    )
    follow = measurer._questions.follow
    monkeypatch.setattr(measurer._questions, "follow", lambda files: (followed.append(set(files)), follow(files)))
    measurer.start()
    try:
        eventually(lambda: followed == [{"u0/c"}], "the first look")
        time.sleep(0.3)
        assert followed == [{"u0/c"}]
        present.append(items[1])
        eventually(lambda: followed == [{"u0/c"}, {"u0/c", "u1/c"}], "a look for the newcomer")
        (Path(items[0].region) / "usage").unlink()
        eventually(lambda: len(followed) > 2, "a look for the file that went")
        (Path(items[0].region) / "usage").touch()
        eventually(lambda: measurer._questions.followed == 2, "a watch on the new file")
    finally:
        started = time.monotonic()
        measurer.stop()
    assert time.monotonic() - started < 0.5
