"""Client programs that a share must not change: they answer the same through the shim as on the simulated driver itself."""

from __future__ import annotations

from typing import Any

from tests.support.share import Share

# The API's structures, a kernel, and a check of what a call that must not succeed answers. Follows a share's own prelude.
PRELUDE = r"""
P, uint = C.c_void_p, C.c_uint
def ref(value):
    return C.byref(value)
def made(name, *arguments, kind=P):
    value = kind()
    ok(name, ref(value), *arguments)
    return value
def ptx(*names):
    return (".version 8.0\n.target sm_80\n.address_size 64\n.visible .global .align 4 .b8 table[4096];\n" + "".join(
        f".visible .entry {name}(.param .u64 a, .param .u32 n) {{ ret; }}\n" for name in names)).encode() + b"\0"
def kernel(name="spin_1us"):
    return made("cuModuleGetFunction", made("cuModuleLoadData", ptx(name)), name.encode())
def read(pointer, count):
    back = (C.c_ubyte * count)()
    ok("cuMemcpyDtoH_v2", back, pointer, size(count))
    return bytes(back)
def filled(value, count):
    pointer = alloc(count)[1]
    ok("cuMemsetD8_v2", pointer, C.c_ubyte(value), size(count))
    ok("cuCtxSynchronize")
    return pointer
class Side(C.Structure):
    _fields_ = [("type", uint), ("host", P), ("device", u64), ("array", P)]
class Copy2D(C.Structure):
    _fields_ = [("x", size), ("y", size), ("source", Side), ("pitch", size),
                ("x2", size), ("y2", size), ("target", Side), ("pitch2", size), ("width", size), ("height", size)]
class Copy3D(C.Structure):
    _fields_ = [("at", size * 4), ("source", Side), ("context", P), ("pitch", size), ("rows", size),
                ("at2", size * 4), ("target", Side), ("context2", P), ("pitch2", size), ("rows2", size),
                ("width", size), ("height", size), ("depth", size)]
def flat_copy(target, source, count):
    return Copy3D(source=Side(2, None, source), pitch=count, rows=1, target=Side(2, None, target), pitch2=count, rows2=1,
                  width=count, height=1, depth=1)
class Kernel(C.Structure):
    _fields_ = [("function", P), ("grid", uint * 3), ("block", uint * 3), ("shared", uint), ("params", C.POINTER(P)),
                ("extra", P), ("kernel", P), ("context", P)]
def launch_of(function, grid=1, params=None):
    return Kernel(function, (grid, 1, 1), (32, 1, 1), 0, params)
class Memset(C.Structure):
    _fields_ = [("target", u64), ("pitch", size), ("value", uint), ("element", uint), ("width", size), ("height", size),
                ("context", P)]
Callback = C.CFUNCTYPE(None, P)
class Host(C.Structure):
    _fields_ = [("function", Callback), ("data", P)]
class PoolProperties(C.Structure):
    _fields_ = [("type", C.c_int), ("handles", C.c_int), ("location", Location), ("security", P), ("most", size),
                ("rest", C.c_ubyte * 56)]
class NodeAlloc(C.Structure):
    _fields_ = [("pool", PoolProperties), ("access", P), ("count", size), ("bytes", size), ("pointer", u64)]
class Node(C.Structure):
    _fields_ = [("type", C.c_int), ("reserved", C.c_int * 3), ("body", C.c_ubyte * 232), ("end", C.c_longlong)]
def node_of(kind, body):
    value = Node(kind)
    C.memmove(value.body, ref(body), C.sizeof(body))
    return value
KERNEL, COPY, SET, HOST, CHILD, EMPTY, WAIT, RECORD, ALLOC, FREE = 0, 1, 2, 3, 4, 5, 6, 7, 10, 11
"""


def answers(share: Share, code: str, *arguments: str) -> Any:
    """What `code` answers in the share; on the driver itself it must answer the same."""
    assert share.machine is not None
    bare = share.run(PRELUDE + code, *arguments, LD_LIBRARY_PATH=share.machine.environment()["LD_LIBRARY_PATH"])
    through = share.run(PRELUDE + code, *arguments)
    assert through == bare
    return through
