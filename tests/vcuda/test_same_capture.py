"""A share changes nothing about stream capture: into which graph, from which stream and thread, and how each misuse is answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import same
from tests.support import share as shares
from tests.support.share import MIB, Share
from vcuda.sim import Machine, SimCard

BEGIN = """
GLOBAL, THREAD, RELAXED = 0, 1, 2
NONE, ACTIVE, INVALIDATED = 0, 1, 2
context = begin()
def stream():
    return made("cuStreamCreate", 1)
def asked_status(which):
    found = C.c_int(9)
    ok("cuStreamIsCapturing", which, ref(found))
    return found.value
def end(which):
    graph = P()
    return call("cuStreamEndCapture", which, ref(graph)), graph
def number(graph):
    count = size()
    ok("cuGraphGetNodes", graph, None, ref(count))
    return count.value
target = filled(0, 64)
def work(which, value=1):
    ok("cuMemsetD8Async", target, C.c_ubyte(value), size(64), which)
def waits(which, for_):
    event = made("cuEventCreate", 2)
    ok("cuEventRecord", event, for_)
    ok("cuStreamWaitEvent", which, event, 0)
"""


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Share:
    folder: Path = tmp_path_factory.mktemp("capture")
    machine = Machine.create(folder / "machine", [SimCard()])
    return shares.simulated(folder / "share", machine, [shares.limit(machine, memory_bytes=256 * MIB)])


def test_a_capture_into_a_graph_that_is_there_adds_to_it(share: Share) -> None:
    got = same.answers(
        share,
        BEGIN
        + """
seen = []
for suffix in ("", "_ptsz"):
    graph = made("cuGraphCreate", 0)
    root = made("cuGraphAddEmptyNode", graph, None, size(0))
    main = stream()
    ok("cuStreamBeginCaptureToGraph" + suffix, main, graph, (P * 1)(root), None, size(1), RELAXED)
    work(main)
    found = P()
    ok("cuStreamEndCapture" + suffix, main, ref(found))
    count = size()
    ok("cuGraphGetEdges", graph, None, None, ref(count))
    seen.append([found.value == graph.value, number(graph), count.value])
wrong = [call("cuStreamBeginCaptureToGraph", main, None, None, None, size(0), RELAXED), call("cuStreamBeginCapture_v2", main, 3),
         call("cuStreamEndCapture", main, None), end(main)[0]]
answer([seen, wrong])
""",
    )
    assert got == [[[True, 2, 1]] * 2, [1, 1, 1, 401]]


@pytest.mark.parametrize("suffix", ["", "_ptsz"])
def test_a_capture_tells_its_graph_and_where_it_stands(share: Share, suffix: str) -> None:
    got = same.answers(
        share,
        BEGIN
        + f"""
suffix = {suffix!r}
"""
        + """
main = stream()
ok("cuStreamBeginCapture" + suffix, main)
again = call("cuStreamBeginCapture_v2" + suffix, main, RELAXED)
work(main)
state, number_, graph, nodes, edges, count = C.c_int(9), u64(), P(), P(), P(5), size()
ok("cuStreamGetCaptureInfo_v3" + suffix, main, ref(state), ref(number_), ref(graph), ref(nodes), ref(edges), ref(count))
seen = [state.value, count.value, edges.value]
id_, graph2 = u64(), P()
ok("cuStreamGetCaptureInfo" + suffix, main, ref(state), ref(id_))
ok("cuStreamGetCaptureInfo_v2" + suffix, main, ref(state), None, ref(graph2), None, None)
seen += [id_.value == number_.value != 0, graph2.value == graph.value]
extra = made("cuGraphAddEmptyNode", graph, None, size(0))
ok("cuStreamUpdateCaptureDependencies" + suffix, main, (P * 1)(extra), size(1), 0)  # beside what it has
ok("cuStreamGetCaptureInfo_v2" + suffix, main, ref(state), None, None, None, ref(count))
both = count.value
work(main)
ok("cuStreamUpdateCaptureDependencies_v2" + suffix, main, (P * 1)(extra), None, size(1), 1)  # instead of it
ok("cuStreamGetCaptureInfo_v2" + suffix, main, ref(state), None, None, None, ref(count))
only = count.value
wrong = [call("cuStreamUpdateCaptureDependencies" + suffix, main, None, size(1), 0),
         call("cuStreamUpdateCaptureDependencies" + suffix, stream(), None, size(0), 0),
         call("cuStreamGetCaptureInfo_v3" + suffix, main, None, None, None, None, None, None), call("cuStreamIsCapturing", main, None)]
found = C.c_int(9)
ok("cuStreamIsCapturing" + suffix, main, ref(found))
ended = P()
result = call("cuStreamEndCapture" + suffix, main, ref(ended))
ok("cuStreamGetCaptureInfo" + suffix, main, ref(state), None)
answer([again, seen, both, only, wrong, found.value, result, state.value])
""",
    )
    # The last work is not led to by what the stream was told to depend on instead: it is left open.
    assert got == [401, [1, 1, None, True, True], 2, 1, [1, 401, 1, 1], 1, 904, 0]


def test_a_capture_is_ended_by_its_own_stream_and_thread(share: Share) -> None:
    got = same.answers(
        share,
        BEGIN
        + """
import threading
main, side = stream(), stream()
ok("cuStreamBeginCapture_v2", main, GLOBAL)
waits(side, main)
joined = [asked_status(side), end(side)[0], asked_status(main), end(main)[0]]
ok("cuStreamBeginCapture_v2", main, THREAD)
said = []
def elsewhere():
    ok("cuCtxSetCurrent", context)
    said.append(end(main)[0])
thread = threading.Thread(target=elsewhere)
thread.start(); thread.join()
said.append(end(main)[0])
ok("cuStreamBeginCapture_v2", main, RELAXED)
thread = threading.Thread(target=elsewhere)
thread.start(); thread.join()
answer([joined, said])
""",
    )
    unmatched, invalidated, wrong_thread = 903, 901, 908
    assert got == [[1, unmatched, 2, invalidated], [wrong_thread, invalidated, 0]]


def test_events_may_not_lead_from_one_capture_into_another_nor_in_from_outside(share: Share) -> None:
    got = same.answers(
        share,
        BEGIN
        + """
one, other = stream(), stream()
event, outside = made("cuEventCreate", 2), made("cuEventCreate", 0)
ok("cuEventRecord", outside, None)
ok("cuStreamBeginCapture_v2", one, RELAXED)
ok("cuStreamBeginCapture_v2", other, RELAXED)
ok("cuEventRecord", event, one)
merged = [call("cuStreamWaitEvent", other, event, 0), end(one)[0], end(other)[0]]
ok("cuStreamBeginCapture_v2", one, RELAXED)
isolated = [call("cuStreamWaitEvent", one, outside, 0), end(one)[0]]
ok("cuStreamBeginCapture_v2", one, RELAXED)
ok("cuStreamWaitEvent", one, outside, 1)  # as an external event it may
ok("cuEventRecord", event, one)
captured = [call("cuEventQuery", event), call("cuEventSynchronize", event), call("cuStreamWaitEvent", P(1), event, 0)]
result, graph = end(one)
late = call("cuStreamWaitEvent", other, event, 0)
answer([merged, isolated, captured, result, number(graph), late])
""",
    )
    merge, isolation, invalidated, implicit, captured_event = 902, 905, 901, 906, 907
    assert got == [
        [merge, invalidated, invalidated],
        [isolation, invalidated],
        [captured_event, captured_event, implicit],
        0,
        1,
        isolation,
    ]


def test_a_stream_destroyed_while_captured_takes_the_capture_with_it(share: Share) -> None:
    got = same.answers(
        share,
        BEGIN
        + """
main, side = stream(), stream()
ok("cuStreamBeginCapture_v2", main, RELAXED)
waits(side, main)
ok("cuStreamDestroy_v2", side)
left = [asked_status(main), end(main)[0]]
ok("cuStreamBeginCapture_v2", main, RELAXED)
side = stream()
waits(side, main)
work(side)
ok("cuStreamDestroy", main)
free = asked_status(side)
work(side, 5)
ok("cuStreamSynchronize", side)
answer([left, free, read(target, 1) == b"\\5"])
""",
    )
    assert got == [[2, 901], 0, True]


def test_work_that_can_not_be_captured_breaks_the_capture_of_its_stream(share: Share) -> None:
    got = same.answers(
        share,
        BEGIN
        + """
main = stream()
said = []
for breaks in (lambda: call("cuStreamSynchronize", main), lambda: call("cuStreamQuery", main)):
    ok("cuStreamBeginCapture_v2", main, RELAXED)
    said.append([breaks(), end(main)[0]])
callback = C.CFUNCTYPE(None, P, C.c_int, P)(lambda stream, result, data: None)
ok("cuStreamBeginCapture_v2", main, RELAXED)
said.append([call("cuStreamAddCallback", main, callback, None, 0), end(main)[0]])
mode = C.c_int(7)
wrong = [call("cuThreadExchangeStreamCaptureMode", ref(mode)), call("cuThreadExchangeStreamCaptureMode", None)]
executable = made("cuGraphInstantiateWithFlags", made("cuGraphCreate", 0), u64(0))
ok("cuStreamBeginCapture_v2", main, RELAXED)
ok("cuGraphLaunch", executable, main)  # becomes a child
result, graph = end(main)
answer([said, wrong, result, number(graph)])
""",
    )
    assert got == [[[900, 901]] * 3, [1, 1], 0, 1]


def test_a_capture_ends_with_the_context_of_its_stream(tmp_path: Path) -> None:
    machine = Machine.create(tmp_path / "machine", [SimCard()])
    share = shares.simulated(tmp_path / "share", machine, [shares.limit(machine, memory_bytes=1024 * MIB)])
    answered = share.run(
        same.PRELUDE
        + BEGIN
        + """
other = P()
ok("cuCtxCreate_v2", ref(other), 0, 0)
ok("cuStreamBeginCapture_v2", stream(), GLOBAL)
ok("cuCtxDestroy_v2", other)
ok("cuCtxSetCurrent", context)
answer([alloc(MIB)[0], call("cuCtxSynchronize")])
"""
    )
    assert answered == [0, 0]
