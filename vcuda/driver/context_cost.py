"""What a CUDA context takes of a card: made in a process of its own, and read from the driver's figure of that process.

So it is the context's alone, whatever neighbours take or give back meanwhile. But that figure leaves some of it out,
which only the card's total shows (an H100, driver 580: 518 of 527 MiB): so it is made a few times, and what the total
rose by counts where a neighbour can't have done it. A process of its own, because a context of the caller's would stay
on the card, and because a driver that crashes must not take the caller along.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

SECONDS = 20.0  # a driver that needs longer has other troubles
_MOST_BYTES = 64 << 30
_ROOM = 1024  # processes on a card
_ROUNDS = 4
_UNLISTED = 16  # at most so much of the process's figure is left out: one part in
_MOST_UNLISTED = 4  # at most so much, where all rises say so
_AGREE = 3  # rises that say the same
_PR_SET_PDEATHSIG = 1  # prctl(2)
_ALIKE = 64  # what differs by less than one part in so many is the same

log = logging.getLogger(__name__)


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t of the _v2 and _v3 calls (nvml.h)."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def measure(cuda: Path, nvml: Path, uuid: str, environment: Mapping[str, str] | None = None) -> int:
    """Bytes of a context on this card or MIG instance; 0 if it can't be told. As slow as making one; never raises.

    `cuda`, `nvml`: the real libraries. `environment`: what clients of this driver need beside their paths.
    """
    command = [sys.executable, "-I", "-S", __file__, str(cuda), str(nvml), uuid]
    try:
        made = subprocess.run(
            command,
            env={**os.environ, **(environment or {}), "CUDA_VISIBLE_DEVICES": uuid},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS,
            text=True,
            check=False,
        )
        found = int(made.stdout) if made.returncode == 0 else 0
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        log.debug("what a context takes of %s can't be measured: %s", uuid, error)
        return 0
    if not found:
        log.debug("what a context takes of %s can't be measured: %s", uuid, made.stderr.strip()[-200:])
    return found if 0 < found < _MOST_BYTES else 0


def _processes(nvml: ctypes.CDLL, card: ctypes.c_void_p) -> dict[int, int]:
    count = ctypes.c_uint(_ROOM)
    array = (_Process * _ROOM)()
    for name in (
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetComputeRunningProcesses_v2",
    ):
        if hasattr(nvml, name):
            if getattr(nvml, name)(card, ctypes.byref(count), array) != 0:
                break
            return {int(item.pid): int(item.used_bytes) for item in array[: count.value]}
    raise SystemExit("NVML names no processes")


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _used(nvml: ctypes.CDLL, card: ctypes.c_void_p) -> int:
    memory = _Memory()
    return int(memory.used) if nvml.nvmlDeviceGetMemoryInfo(card, ctypes.byref(memory)) == 0 else 0


def whole_cost(own: int, rises: list[int]) -> int:
    """Bytes a context takes, by the driver's figure of its process and by what the card's total rose with each.

    The first rise holds what the process itself takes, too. A rise that a neighbour had a part in is none that the
    figure explains.
    """
    likely = [rise for rise in rises if own <= rise <= own + own // _UNLISTED]
    if not likely:
        # A driver that leaves out more: no rise says less, and the least come again. Neighbours seldom grow alike.
        least = sorted(rises)[:_AGREE]
        agree = len(least) == _AGREE and own <= least[0] and least[-1] - least[0] <= own // _ALIKE
        return least[0] if agree and least[0] <= own + own // _MOST_UNLISTED else own
    first = rises[0] if rises[0] in likely and rises[0] <= min(likely) + own // _ALIKE else 0
    return max(first, min(likely))


def _main(cuda_path: str, nvml_path: str, uuid: str) -> None:
    """In the process of its own: print the bytes. It ends with who asked, whose card it would go on to use."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    cuda, nvml = ctypes.CDLL(cuda_path), ctypes.CDLL(nvml_path)
    card, device, context = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_void_p()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(card)):
        raise SystemExit("NVML does not know the card")
    before, rises = _processes(nvml, card), [-_used(nvml, card)]
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        raise SystemExit("CUDA does not know the card")
    if cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        raise SystemExit("the card has no room for a context")
    after = _processes(nvml, card)
    rises[0] += _used(nvml, card)
    for _ in range(_ROUNDS - 1):
        if not hasattr(cuda, "cuDevicePrimaryCtxRelease_v2") or cuda.cuDevicePrimaryCtxRelease_v2(device):
            break
        empty = _used(nvml, card)
        if cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
            break
        rises.append(_used(nvml, card) - empty)
    # Where NVML counts processes as another PID namespace does, ours is the least of those that came: whoever else came
    # has a context too.
    came = [used for pid, used in after.items() if pid not in before and 0 < used < _MOST_BYTES]
    own = after.get(os.getpid(), 0) if os.getpid() not in before else 0
    print(whole_cost(own or min(came, default=0), rises))


if __name__ == "__main__":
    _main(*sys.argv[1:])
