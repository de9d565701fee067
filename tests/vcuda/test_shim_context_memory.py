"""What contexts take of the card as they are used: local memory of kernels, stacks, streams. Judged by the card's own books.

The figures are those of an H100 (driver 580): local memory for every thread that can be resident, taken with the limit or at the first launch.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import same
from tests.support import share as shares
from tests.support.share import MIB, Share
from vcuda.sim import Machine, SimCard

LIMIT = 1024 * MIB
# 108 processors with 2048 threads: 216 MiB for each KiB beyond the first, which is part of what a context costs.
TOOLS = """
def framed(kibibytes, name="k"):
    return (".version 8.0\\n.target sm_80\\n.address_size 64\\n.visible .entry %s(.param .u64 a)\\n{ .local .align 8 .b8 frame[%d]; ret; }\\n"
            % (name, kibibytes << 10)).encode() + b"\\0"
def function(kibibytes):
    return made("cuModuleGetFunction", made("cuModuleLoadData", framed(kibibytes)), b"k")
def library(kibibytes):
    return made("cuLibraryGetKernel", made("cuLibraryLoadData", framed(kibibytes), None, None, 0, None, None, 0), b"k")
def launch(function, stream=None):
    return call("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, stream, None, None)
def free():
    return -(-info()[0] // MIB)  # code takes some 64 KiB
"""


def share_of(tmp_path: Path, *, memory_bytes: int = LIMIT, cores: int = 50, newer: bool = False, **knobs: int) -> Share:
    machine = Machine.create(tmp_path / "machine", [SimCard(knobs=knobs)], newer=newer)
    limits = shares.limit(machine, memory_bytes=memory_bytes, cores=cores, core_limit=cores)
    return shares.simulated(tmp_path / "share", machine, [limits])


def most_held(share: Share, code: str) -> tuple[object, int]:
    """What the client answers, and the most MiB that it ever held of the card."""
    process = share.start(same.PRELUDE + TOOLS + code + "\nsys.stdin.readline()\n")
    assert process.stdin and process.stdout and share.machine
    said = process.stdout.readline()
    peaks = [one.peak_bytes // MIB for one in share.machine.report().cards[0].processes]
    errors = process.communicate("\n", timeout=60)[1]
    assert process.returncode == 0 and said, errors
    return said.strip(), max(peaks)


@pytest.mark.parametrize("cores", [50, 100])
@pytest.mark.parametrize(
    "launching",
    [
        "launch(function(16))",
        "launch(library(16))",
        'launch(function(16), made("cuStreamCreate", 1))',
        'call("cuGraphInstantiateWithFlags", ref(P()), graph_of(function(16)), u64(0))',
        "updated(function(16))",
        "child_changed(function(16))",
        "in_body(ADD[0], function(16))",
        "in_body(ADD[1], library(16))",
        "in_body(ADD[2], function(16))",
        "in_body(ADD[3], function(16))",
        "in_body(CHANGE[0], function(16))",
        "in_body(CHANGE[1], function(16))",
        "in_body(CHANGE[2], function(16))",
        "in_body(ADD[4], function(16))",
        "in_body(CHANGE[3], function(16))",
    ],
)
def test_a_kernel_whose_frame_does_not_fit_is_not_launched(tmp_path: Path, launching: str, cores: int) -> None:
    answered, most = most_held(
        share_of(tmp_path, cores=cores, newer="ADD[4]" in launching or "CHANGE[3]" in launching),
        f"""
def graph_of(kernel):  # by a function that the interposer does not know
    graph, driver = made("cuGraphCreate", 0), C.CDLL("libcuda-driver.so.1")
    assert not driver.cuGraphAddKernelNode_v2(ref(P()), graph, None, size(0), ref(launch_of(kernel)))
    return graph
def updated(kernel):
    graph = made("cuGraphCreate", 0)
    node = made("cuGraphAddKernelNode_v2", graph, None, size(0), ref(launch_of(function(1))))
    executable = made("cuGraphInstantiateWithFlags", graph, u64(0))
    return call("cuGraphExecKernelNodeSetParams_v2", executable, node, ref(launch_of(kernel)))
def child_changed(kernel):
    graph = made("cuGraphCreate", 0)
    node = made("cuGraphAddChildGraphNode", graph, None, size(0), graph_of(function(1)))
    executable = made("cuGraphInstantiateWithFlags", graph, u64(0))
    return call("cuGraphExecChildGraphNodeSetParams", executable, node, graph_of(kernel))
class Node(C.Structure):
    _fields_ = [("type", C.c_int), ("reserved", C.c_int * 3), ("body", u64 * 30)]
def any_node(kernel):
    node, body = Node(0), launch_of(kernel)
    C.memmove(C.addressof(node) + Node.body.offset, ref(body), C.sizeof(body))
    return node
def begins(kernel):  # the first version of the parameters is a prefix of the second
    return ref(launch_of(kernel))
ADD = [lambda graph, kernel, node: call("cuGraphAddKernelNode", ref(node), graph, None, size(0), begins(kernel)),
       lambda graph, kernel, node: call("cuGraphAddKernelNode_v2", ref(node), graph, None, size(0), ref(launch_of(kernel))),
       lambda graph, kernel, node: call("cuGraphAddNode", ref(node), graph, None, size(0), ref(any_node(kernel))),
       lambda graph, kernel, node: call("cuGraphAddNode_v2", ref(node), graph, None, None, size(0), ref(any_node(kernel))),
       lambda graph, kernel, node: call("cuGraphAddNode_v3", ref(node), graph, None, None, size(0), ref(any_node(kernel)))]
def changed_by(change):
    return lambda graph, kernel, node: ADD[1](graph, function(1), node) or change(node, kernel)
CHANGE = [changed_by(lambda node, kernel: call("cuGraphKernelNodeSetParams", node, begins(kernel))),
          changed_by(lambda node, kernel: call("cuGraphKernelNodeSetParams_v2", node, ref(launch_of(kernel)))),
          changed_by(lambda node, kernel: call("cuGraphNodeSetParams", node, ref(any_node(kernel)))),
          changed_by(lambda node, kernel: call("cuGraphNodeSetParams_v2", node, ref(any_node(kernel))))]
def in_body(put, kernel):
    '''Launch a graph with the kernel in the body of a conditional node: the first error of it.'''
    graph, handle, executable = made("cuGraphCreate", 0), u64(), P()
    ok("cuGraphConditionalHandleCreate", ref(handle), graph, None, uint(1), uint(1))
    choice = Node(13)
    choice.body[0], choice.body[1] = handle.value, 1 << 32  # IF with one body
    ok("cuGraphAddNode", ref(P()), graph, None, size(0), ref(choice))
    body = P(P.from_address(choice.body[2]).value)
    return (put(body, kernel, P()) or call("cuGraphInstantiateWithFlags", ref(executable), graph, u64(0))
            or call("cuGraphLaunch", executable, None) or call("cuCtxSynchronize"))
begin()
answer([{launching}, launch(function(1)), free()])
""",
    )
    assert (answered, most <= 1024) == (f"[2, 0, {958 if 'Stream' in launching else 960}]", True)


def test_a_frame_is_charged_once_for_the_largest_and_until_the_context_ends(tmp_path: Path) -> None:
    share = share_of(tmp_path, cores=100)
    answered, most = most_held(
        share,
        """
context = begin()
figures = [free()]
for kibibytes in (1, 2, 3, 2):
    one = function(kibibytes)
    figures += [launch(one), launch(one), free()]
ok("cuCtxSetLimit", 0, size(2048)); figures.append(free())
ok("cuCtxSetLimit", 0, size(4096)); figures.append(free())
figures += [call("cuCtxSetLimit", 0, size(8192)), free()]
ok("cuCtxDestroy_v2", context); begin()
answer([*figures, free()])
""",
    )
    assert answered == "[960, 0, 0, 960, 0, 0, 744, 0, 0, 528, 0, 0, 528, 528, 312, 2, 312, 960]"
    assert most <= 1024


def test_a_frame_that_the_stacks_limit_covered_counts_when_that_is_lowered(tmp_path: Path) -> None:
    answered, most = most_held(
        share_of(tmp_path),
        """
begin()
ok("cuCtxSetLimit", 0, size(3 << 10)); figures = [free()]
figures += [launch(function(2)), free()]
ok("cuCtxSetLimit", 0, size(1 << 10))
answer([*figures, free()])
""",
    )
    assert answered == "[528, 0, 528, 744]" and most <= 1024


def test_a_librarys_kernel_is_charged_in_each_context_that_launches_it(tmp_path: Path) -> None:
    answered, most = most_held(
        share_of(tmp_path, cores=100),
        """
begin()
kernel = library(3)
figures = [launch(kernel), free()]
begin()
answer([*figures, free(), launch(kernel), launch(kernel), free()])
""",
    )
    assert answered == "[0, 528, 464, 0, 0, 32]" and most <= 1024


def test_a_stack_that_does_not_fit_never_comes_onto_the_card(tmp_path: Path) -> None:
    answered, most = most_held(
        share_of(tmp_path),
        """
begin()
answer([call("cuCtxSetLimit", 0, size(64 << 10)), call("cuCtxSetLimit", 0, size(1 << 30)), free()])
""",
    )
    assert answered == "[2, 1, 960]" and most <= 1024


@pytest.mark.parametrize("measures", [False, True])
def test_streams_are_charged_what_they_take(tmp_path: Path, measures: bool) -> None:
    """Also beside the one of ours that measures what kernels take."""
    share = share_of(tmp_path, memory_bytes=128 * MIB, stream_kib=560)
    answered, most = most_held(
        share,
        f"""
begin()
if {measures}:
    ok("cuLaunchKernel", kernel("spin_1us"), 1, 1, 1, 32, 1, 1, 0, None, None, None); ok("cuCtxSynchronize"); time.sleep(0.1)
held, results = [], []
while True:
    stream = P()
    result = call("cuStreamCreate", ref(stream), 1)
    if result:
        break
    held.append(stream)
for stream in held:
    ok("cuStreamDestroy_v2", stream)
left = free()
again = [call("cuStreamCreate", ref(P()), 1) for _ in held]
answer([result, 100 < len(held) < 120, left <= 2, set(again) == {{0}}])
""",
    )
    assert answered == "[2, true, true, true]" and most <= 128


def test_streams_cost_the_same_whatever_other_threads_do(tmp_path: Path) -> None:
    """What the card's free memory falls by is not only the stream's: neighbours and threads take of it and give back at any time."""
    answered, _ = most_held(
        share_of(tmp_path),
        """
import threading
context, over = begin(), threading.Event()
held = [made("cuStreamCreate", 1)]
def work():
    ok("cuCtxSetCurrent", context)
    one = held[0]
    while not over.is_set():
        pointer = u64()
        ok("cuMemAllocAsync", ref(pointer), size(40 * MIB), one)
        ok("cuMemFreeAsync", pointer, one)
        ok("cuStreamSynchronize", one)
threads = [threading.Thread(target=work) for _ in range(3)]
[thread.start() for thread in threads]
for _ in range(49):
    held.append(made("cuStreamCreateWithPriority", 1, 0))
    time.sleep(0.002)
over.set()
[thread.join() for thread in threads]
ok("cuCtxSynchronize")
answer(free())
""",
    )
    assert answered == str(960 - 30)


def test_a_librarys_code_is_charged_in_each_context_that_launches_its_kernels(tmp_path: Path) -> None:
    share = share_of(tmp_path, memory_bytes=256 * MIB)
    answered, most = most_held(
        share,
        """
image = framed(1)[:-1] + b"//" + b"." * (8 * MIB - 4096) + b"\\0"
begin()
kernel = made("cuLibraryGetKernel", made("cuLibraryLoadData", image, None, None, 0, None, None, 0), b"k")
figures = [free(), launch(kernel), free()]
begin()
answer([*figures, free(), launch(kernel), launch(kernel), free()])
""",
    )
    assert answered == "[184, 0, 184, 120, 0, 0, 112]" and most <= 256 - 112


THREADS = """
import threading
context, spin = begin(), kernel("spin_1us")
def on_own(number):
    results, ready = [], threading.Barrier(number)
    def work():
        ok("cuCtxSetCurrent", context)
        results.append(call("cuLaunchKernel_ptsz", spin, 1, 1, 1, 32, 1, 1, 0, None, None, None))
        if results[-1] == 0:
            ok("cuStreamSynchronize_ptsz", None)
        ready.wait()
    threads = [threading.Thread(target=work) for _ in range(number)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return results
"""


@pytest.mark.parametrize("cores", [50, 100])
def test_threads_own_default_streams_are_charged_like_streams(tmp_path: Path, cores: int) -> None:
    """And used again by the streams of other threads once those have ended."""
    answered, most = most_held(
        share_of(tmp_path, memory_bytes=128 * MIB, cores=cores, stream_kib=560),
        THREADS
        + """
first = on_own(40); left = free()
later = [on_own(1)[0] for _ in range(60)]
answer([set(first) == {0}, left, set(later) == {0}, free(), len(fill(2 * MIB)[1])])
""",
    )
    assert answered == "[true, 40, true, 40, 19]" and most <= 128


@pytest.mark.parametrize("cores", [50, 100])
def test_a_launch_for_whose_threads_stream_there_is_no_room_is_refused(tmp_path: Path, cores: int) -> None:
    """Also of a kernel that another thread has launched before."""
    answered, most = most_held(
        share_of(tmp_path, memory_bytes=128 * MIB, cores=cores, stream_kib=560),
        THREADS
        + """
on_own(1)
fill(2 * MIB)
results = on_own(8)
answer([results.count(2) > 0, set(results) <= {0, 2}])
""",
    )
    assert answered == "[true, true]" and most <= 128
