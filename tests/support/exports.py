"""Clients that share memory: an exporter and an importer, in one container or two, judged by the card's own books."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support import share as shares
from tests.support.share import MIB, Share
from vcuda.sim import Machine, SimCard

LIMIT = 1024 * MIB

# The exporter is a child that was forked before CUDA was initialised, and does what it is told by a byte.
CLIENT = """
import array, signal, socket
def export(ours, child_code):
    here, there = socket.socketpair()
    child = os.fork()
    if child:
        there.close()
        return child, here
    here.close()
    exec(child_code)
    os._exit(0)
def exporter(there, count=300):
    begin()
    handle, shared = u64(), C.c_int()
    ok("cuMemCreate", C.byref(handle), size(count * MIB), C.byref(Properties(1, 1, Location(1, 0))), u64(0))
    ok("cuMemExportToShareableHandle", C.byref(shared), handle, 1, u64(0))
    socket.send_fds(there, [b"x"], [shared.value])
    return handle, shared.value
def taken(here):
    return socket.recv_fds(here, 1, 1)[1][0]
def imported(descriptor):
    handle = u64()
    return call("cuMemImportFromShareableHandle", C.byref(handle), C.c_void_p(descriptor), 1), handle
def killed(child):
    os.kill(child, signal.SIGKILL); os.waitpid(child, 0)
def ended(child, here):
    here.send(b"e"); os.waitpid(child, 0)
def free():
    return info()[0] // MIB
def show(*values):
    print(json.dumps([free(), *values]), flush=True)
    sys.stdin.readline()
CHILD = "exporter(there); there.recv(1)"
RELEASES = '''
handle, shared = exporter(there)
there.recv(1)
ok("cuMemRelease", handle); os.close(shared)
there.send(b"r"); there.recv(1)
'''
EXECS = '''
exporter(there); there.recv(1)
os.execv("/bin/sleep", ["sleep", "30"])
'''
"""

# Memory that is given by IPC handle, and imported as another interface's.
IPC = """
import fcntl, resource, struct
class Ipc(C.Structure):
    _fields_ = [("reserved", C.c_char * 64)]
cu.cuIpcOpenMemHandle_v2.argtypes = [C.c_void_p, Ipc, C.c_uint]
def give_ipc(there, count):
    pointer = alloc(count * MIB)[1]
    handle = Ipc()
    ok("cuIpcGetMemHandle", C.byref(handle), pointer)
    there.send(bytes(handle))
    return pointer
def open_ipc(here):
    pointer = u64()
    return cu.cuIpcOpenMemHandle_v2(C.byref(pointer), Ipc.from_buffer_copy(here.recv(64)), 1), pointer
MAKER = '''
begin()
pointer = give_ipc(there, 300)
there.recv(1)
ok("cuMemFree_v2", pointer); there.send(b"f")
there.recv(1)
info(); there.send(b"i"); there.recv(1)
'''
TWO = "begin(); exported_two(there); there.recv(1)"
def exported_two(there):
    made = []
    for count in (200, 300):
        handle, shared = u64(), C.c_int()
        ok("cuMemCreate", C.byref(handle), size(count * MIB), C.byref(Properties(1, 1, Location(1, 0))), u64(0))
        for _ in range(3 if count == 200 else 1):
            ok("cuMemExportToShareableHandle", C.byref(shared), handle, 1, u64(0))
        made.append(shared.value)
    socket.send_fds(there, [b"x"], made[:1])
class External(C.Structure):
    _fields_ = [("type", C.c_int), ("pad", C.c_int), ("fd", C.c_int), ("pad2", C.c_int), ("more", u64), ("size", u64), ("flags", C.c_uint * 17)]
def external(descriptor):
    given, memory = External(type=1, fd=descriptor, size=2 * MIB), C.c_void_p()
    return call("cuImportExternalMemory", C.byref(memory), C.byref(given)), memory
def reopened(descriptor):
    other = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR); os.close(descriptor)
    return other
def unlock(descriptor):
    fcntl.fcntl(descriptor, 37, struct.pack("hhqqi4x", fcntl.F_UNLCK, 0, 0, 0, 0))
"""


def share_of(tmp_path: Path) -> Share:
    machine = Machine.create(tmp_path / "machine", [SimCard()])
    return shares.simulated(tmp_path / "share", machine, [shares.limit(machine, memory_bytes=LIMIT)])


def shown(share: Share, code: str) -> list[list[int]]:
    """What the client shows; never is less charged than the card holds, or more held than the limit."""
    assert share.machine
    process = share.start(CLIENT + code)
    assert process.stdin and process.stdout
    found = []
    while line := process.stdout.readline():
        books = share.machine.report().cards[0].used_bytes
        assert books <= share.usage().cards[0].ledger_bytes, (line, books // MIB)
        assert books <= LIMIT
        found.append(json.loads(line))
        process.stdin.write("\n")
        process.stdin.flush()
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 0, errors
    return found


def across(share: Share, tmp_path: Path, maker_bytes: int, maker: str, code: str, **limit: bool) -> Any:
    """The answer of `code` in the share; `here` leads to `there`, `maker`'s in a container with such a limit."""
    assert share.machine
    other = shares.simulated(
        tmp_path / "other", share.machine, [shares.limit(share.machine, memory_bytes=maker_bytes, **limit)]
    )
    address = str(tmp_path / "s")
    making = other.start(
        f"""
{CLIENT + IPC}
listener = socket.socket(socket.AF_UNIX); listener.bind(os.environ["SOCKET"]); listener.listen()
answer("ready")
there = listener.accept()[0]
{maker}
""",
        SOCKET=address,
    )
    assert making.stdout and making.stdout.readline() == '"ready"\n'
    try:
        return share.run(
            f"""
{CLIENT + IPC}
here = socket.socket(socket.AF_UNIX); here.connect(os.environ["SOCKET"])
{code}
""",
            SOCKET=address,
        )
    finally:
        making.kill()
        making.communicate(timeout=60)
