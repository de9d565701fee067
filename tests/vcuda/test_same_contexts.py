"""A share changes nothing about contexts, streams and events: every version of the calls, asked and set, and each misuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import same
from tests.support import share as shares
from tests.support.share import MIB, Share
from vcuda.sim import Machine, SimCard

CONTEXT = 64 * MIB


@pytest.fixture
def share(tmp_path: Path) -> Share:
    machine = Machine.create(tmp_path / "machine", [SimCard()])
    return shares.simulated(tmp_path / "share", machine, [shares.limit(machine, memory_bytes=256 * MIB)])


def test_contexts_of_every_version_are_made_stacked_and_destroyed(share: Share) -> None:
    got = same.answers(
        share,
        """
ok("cuInit", 0)
one = made("cuCtxCreate", 0, 0)
two = made("cuCtxCreate_v2", 4, 0)
three = made("cuCtxCreate_v3", None, 0, 0, 0)
def current():
    found = P()
    ok("cuCtxGetCurrent", ref(found))
    return [one.value, two.value, three.value, None].index(found.value)
seen = [current()]
found = P()
ok("cuCtxPopCurrent", ref(found)); seen.append([found.value == three.value, current()])
ok("cuCtxPopCurrent_v2", None); seen.append(current())
ok("cuCtxPushCurrent", two); seen.append(current())
ok("cuCtxPushCurrent_v2", one); seen.append(current())
ok("cuCtxSetCurrent", None); seen.append(current())
ok("cuCtxDestroy", three)
gone = [call("cuCtxPushCurrent", three), call("cuCtxSetCurrent", three), call("cuCtxDestroy_v2", three)]
wrong = [call("cuCtxCreate", None, 0, 0), call("cuCtxCreate_v2", ref(found), 3, 0), call("cuCtxCreate_v2", ref(found), 0, 99),
         call("cuCtxCreate_v3", ref(found), ref(found), 1, 0, 0), call("cuCtxDestroy", None), call("cuCtxPushCurrent", None),
         call("cuCtxGetCurrent", None), call("cuCtxAttach", ref(found), 1)]
answer([seen, gone, wrong])
""",
    )
    assert got == [[2, [True, 1], 0, 1, 0, 1], [709, 709, 709], [1, 1, 101, 801, 201, 201, 1, 1]]


def test_a_context_made_by_an_old_call_is_charged_and_refused_like_any(share: Share) -> None:
    got = share.run(
        same.PRELUDE
        + """
ok("cuInit", 0)
def left():
    return info()[0] // MIB
steps, contexts = [], []
for name, arguments in (("cuCtxCreate", (0, 0)), ("cuCtxCreate_v3", (None, 0, 0, 0)), ("cuCtxCreate_v2", (0, 0))):
    contexts.append(made(name, *arguments)); steps.append(left())
found = P()
made("cuDevicePrimaryCtxRetain", 0); steps.append(left())
full = [call("cuCtxCreate", ref(found), 0, 0), call("cuCtxCreate_v3", ref(found), None, 0, 0, 0), found.value]
ok("cuDevicePrimaryCtxReset", 0); steps.append(left())  # empties it, and releases nothing
ok("cuDevicePrimaryCtxReset_v2", 0); steps.append(left())
ok("cuDevicePrimaryCtxRelease", 0); steps.append(left())
ok("cuCtxSetCurrent", contexts[0])
assert alloc(20 * MIB)[0] == 0; steps.append(left())
ok("cuCtxAttach", ref(found), 0)
ok("cuCtxDetach", contexts[0]); steps.append(left())  # it was attached once more: it stays
ok("cuCtxSetCurrent", contexts[1])
ok("cuCtxDetach", contexts[0]); steps.append(left())
ok("cuCtxDestroy", contexts[2]); steps.append(left())
answer([full, steps, call("cuCtxDetach", contexts[0]) != 0])
"""
    )
    assert got == [[2, 2, None], [192, 128, 64, 0, 0, 0, 64, 44, 44, 128, 192], True]
    assert share.machine is not None and share.machine.report().cards[0].used_bytes == 0


def test_a_driver_that_fails_to_make_a_context_leaves_nothing_charged(share: Share) -> None:
    got = share.run(
        same.PRELUDE
        + """
context, found = begin(), P()
before = info()
said = [call("cuCtxCreate", ref(found), 3, 0), call("cuCtxCreate_v2", ref(found), 3, 0), call("cuCtxCreate_v3", ref(found), None, 0, 3, 0),
        call("cuCtxCreate_v3", ref(found), ref(found), 1, 0, 0), call("cuDevicePrimaryCtxRetain", None, 0)]
answer([said, info() == before])
"""
    )
    assert got == [[1, 1, 1, 801, 1], True]


def test_settings_of_a_context_are_kept(share: Share) -> None:
    got = same.answers(
        share,
        """
ok("cuInit", 0)
ok("cuDevicePrimaryCtxSetFlags", 0, 2)
context = made("cuDevicePrimaryCtxRetain", 0)
active = call("cuDevicePrimaryCtxSetFlags", 0, 1)
ok("cuCtxSetCurrent", context)
flags, number = uint(9), C.c_int(9)
def asked(name, value):
    ok(name, ref(value))
    return value.value
seen = [asked("cuCtxGetFlags", flags)]
ok("cuDevicePrimaryCtxSetFlags_v2", 0, 1)
seen.append(asked("cuCtxGetFlags", flags))
ok("cuCtxSetFlags", 4)
seen.append(asked("cuCtxGetFlags", flags))
state = C.c_int(9)
ok("cuDevicePrimaryCtxGetState", 0, ref(flags), ref(state))
seen.append([flags.value, state.value])
for setter, getter, value in (("cuCtxSetCacheConfig", "cuCtxGetCacheConfig", 2), ("cuCtxSetSharedMemConfig", "cuCtxGetSharedMemConfig", 2)):
    ok(setter, value)
    seen.append(asked(getter, number))
done = [call("cuCtxResetPersistingL2Cache"), call("cuProfilerStart"), call("cuProfilerStop"), call("cuFlushGPUDirectRDMAWrites", 0, 100)]
wrong = [call("cuCtxGetFlags", None), call("cuCtxGetCacheConfig", None), call("cuCtxGetSharedMemConfig", None),
         call("cuDevicePrimaryCtxSetFlags_v2", 0, 0x100), call("cuCtxGetApiVersion", context, None), call("cuCtxGetDevice", None),
         call("cuCtxGetLimit", None, 0)]
ok("cuDevicePrimaryCtxReset_v2", 0)
ok("cuCtxSynchronize")
ok("cuDevicePrimaryCtxRelease", 0)
none = [call("cuCtxGetFlags", ref(flags)), call("cuCtxSetSharedMemConfig", 1), call("cuCtxSynchronize"), call("cuDevicePrimaryCtxRelease", 0)]
answer([active, seen, done, wrong, none])
""",
    )
    active, destroyed, no_context = 708, 709, 201
    assert got == [
        active,
        [2, 1, 4, [1, 1], 2, 2],
        [0] * 4,
        [1] * 7,
        [destroyed, destroyed, destroyed, no_context],
    ]


@pytest.mark.parametrize("suffix", ["", "_ptsz"])
def test_a_stream_tells_what_it_is(share: Share, suffix: str) -> None:
    got = same.answers(
        share,
        f"""
suffix = {suffix!r}
"""
        + """
context = begin()
streams = [made("cuStreamCreateWithPriority", 1, -2), made("cuStreamCreate", 0)]
priority, flags, ids, owner = C.c_int(9), uint(9), [], P()
seen = []
for stream in (*streams, None):
    number = u64()
    ok("cuStreamGetPriority" + suffix, stream, ref(priority))
    ok("cuStreamGetFlags" + suffix, stream, ref(flags))
    ok("cuStreamGetId" + suffix, stream, ref(number))
    ok("cuStreamGetCtx" + suffix, stream, ref(owner))
    value = (C.c_int * 16)(*[7] * 16)
    ok("cuStreamGetAttribute" + suffix, stream, 8, value)
    ok("cuStreamSetAttribute" + suffix, stream, 8, value)
    ids.append(number.value)
    seen.append([priority.value, flags.value, owner.value == context.value, value[0] == priority.value])
ok("cuStreamCopyAttributes" + suffix, streams[0], streams[1])
memory = made("cuMemAllocManaged", size(4096), 1, kind=u64)
attached = [call("cuStreamAttachMemAsync" + suffix, streams[0], memory, size(0), 4), call("cuStreamQuery" + suffix, streams[0])]
wrong = [call("cuStreamGetPriority" + suffix, streams[0], None), call("cuStreamGetFlags" + suffix, streams[0], None),
         call("cuStreamGetId" + suffix, streams[0], None), call("cuStreamGetCtx" + suffix, streams[0], None),
         call("cuStreamGetAttribute" + suffix, streams[0], 8, None), call("cuStreamSetAttribute" + suffix, streams[0], 8, None),
         call("cuStreamAttachMemAsync" + suffix, streams[0], u64(0), size(0), 4), call("cuStreamCreate", None, 0)]
answer([len(set(ids)), seen, attached, wrong])
""",
    )
    assert got == [3, [[-2, 1, True, True], [0, 0, True, True], [0, 0, True, True]], [0, 0], [1] * 8]


@pytest.mark.parametrize("suffix", ["", "_ptsz"])
def test_host_functions_and_events_follow_the_work_of_their_stream(share: Share, suffix: str) -> None:
    got = same.answers(
        share,
        f"""
suffix = {suffix!r}
"""
        + """
context = begin()
called = []
function = Callback(lambda data: called.append(data))
old = C.CFUNCTYPE(None, P, C.c_int, P)(lambda stream, result, data: called.append([result, data]))
ok("cuStreamAddCallback" + suffix, None, old, P(1), 0)
ok("cuLaunchHostFunc" + suffix, None, function, P(2))
events = [made("cuEventCreate", 0) for _ in range(2)]
ok("cuEventRecordWithFlags" + suffix, events[0], None, 0)
ok("cuStreamWaitEvent" + suffix, None, events[0], 0)
ok("cuEventRecord" + suffix, events[1], None)
ok("cuEventSynchronize", events[1])
ok("cuStreamSynchronize" + suffix, None)
elapsed = C.c_float(-1)
ok("cuEventElapsedTime", ref(elapsed), *events)
untimed, never = made("cuEventCreate", 2), made("cuEventCreate", 0)
ok("cuEventRecord", untimed, None)
wrong = [call("cuEventElapsedTime", ref(elapsed), events[0], untimed), call("cuEventElapsedTime", ref(elapsed), events[0], never),
         call("cuEventElapsedTime", None, *events), call("cuEventCreate", None, 0), call("cuEventCreate", ref(P()), 8),
         call("cuEventCreate", ref(P()), 4), call("cuEventRecordWithFlags", events[0], None, 2),
         call("cuStreamWaitEvent", None, events[0], 2), call("cuEventQuery", None), call("cuStreamAddCallback", None, old, None, 1),
         call("cuLaunchHostFunc", None, None, None)]
never_recorded = [call("cuEventQuery", never), call("cuEventSynchronize", never)]
ok("cuEventDestroy", events[0]); ok("cuEventDestroy_v2", events[1])
answer([called, elapsed.value >= 0, wrong, never_recorded])
""",
    )
    assert got == [[[0, 1], 2], True, [400, 400, 1, 1, 1, 1, 1, 1, 400, 1, 1], [0, 0]]


def test_errors_have_names_and_texts(share: Share) -> None:
    got = same.answers(
        share,
        """
name, text = C.c_char_p(), C.c_char_p()
seen = []
for code in (0, 2, 700):
    ok("cuGetErrorName", code, ref(name)); ok("cuGetErrorString", code, ref(text))
    seen.append([name.value.decode(), bool(text.value)])
unknown = [call("cuGetErrorName", 12345, ref(name)), name.value, call("cuGetErrorString", 12345, ref(text)), text.value,
           call("cuGetErrorName", 0, None)]
answer([seen, unknown])
""",
    )
    assert got == [
        [["CUDA_SUCCESS", True], ["CUDA_ERROR_OUT_OF_MEMORY", True], ["CUDA_ERROR_ILLEGAL_ADDRESS", True]],
        [1, None, 1, None, 1],
    ]
