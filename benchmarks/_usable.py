"""Which real card of this machine the programs may run on, and what speaks against the others; nothing on a card is changed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pynvml

from vcuda.runs import cards, driver
from vcuda.runs.errors import RunError
from vcuda.spec.inventory import Card

MIB = 1 << 20
PROBE_SECONDS = 120
HIDDEN_BYTES = 1 << 30  # more than a driver keeps for itself
COMPUTE_MODES = {
    1: "exclusive to one thread",
    2: "prohibited",
    3: "exclusive to one process",
}
# Prints the CUresult of the first call that fails (0: none), its name, and the free bytes beside the probe's own context.
PROBE = """
import ctypes, sys
cuda = ctypes.CDLL(sys.argv[1])
free, total, context, device = (ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_void_p(), ctypes.c_int())
result = (
    cuda.cuInit(0)
    or cuda.cuDeviceGet(ctypes.byref(device), 0)
    or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    or cuda.cuCtxSetCurrent(context)
    or cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
)
name = ctypes.c_char_p()
cuda.cuGetErrorName(result, ctypes.byref(name))
print(result, (name.value or b"?").decode(), free.value)
"""


@dataclass(frozen=True)
class Usable:
    """A real card that a program can work on; `context_bytes` is what one context takes of it.

    `others` names the processes that compute on it now, `remarks` what else makes its figures differ from an idle, undivided card's.
    """

    card: Card
    driver: driver.Driver
    version: str
    free_bytes: int
    context_bytes: int
    others: str
    remarks: tuple[str, ...]

    def environment(self) -> dict[str, str]:
        """What leads a native program to this card and no other."""
        return {"CUDA_VISIBLE_DEVICES": self.card.uuid}


def find(needed_bytes: int, *, alone: bool = False) -> Usable:
    """The first card with so much free memory on which several processes can make a context; with `alone`, nobody else computes.

    Raises RunError: why there is none, card by card.
    """
    try:
        found = driver.find(os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    except RunError as error:
        raise RunError("this machine has no NVIDIA driver where the dynamic linker looks") from error
    listed = cards.discover(found.nvml)
    if not listed:
        raise RunError("the driver lists no card")
    refused = []
    for card in listed:
        try:
            return _looked_at(card, found, needed_bytes, alone)
        except RunError as error:
            refused.append(f"{card.model} {card.uuid}: {error}")
    raise RunError("; ".join(refused))


def _looked_at(card: Card, found: driver.Driver, needed_bytes: int, alone: bool) -> Usable:
    """The card if it can be used. Raises RunError: what speaks against it and the way out."""
    if not card.healthy:
        raise RunError("it does not answer; nvidia-smi and the kernel's log tell more")
    try:
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(card.uuid)
            free = int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
            version = str(pynvml.nvmlSystemGetDriverVersion())
            others = _others(handle)
            mode = _told(lambda: pynvml.nvmlDeviceGetComputeMode(handle))
            divided = _told(lambda: pynvml.nvmlDeviceGetMigMode(handle)[0]) == pynvml.NVML_DEVICE_MIG_ENABLE
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise RunError(f"NVML: {error}") from error
    if divided:
        raise RunError("it is in MIG mode without an instance; make one (nvidia-smi mig -cgi) or end MIG mode")
    if mode in COMPUTE_MODES:
        raise RunError(
            f"its compute mode is {COMPUTE_MODES[mode]}, programs side by side need the default one (nvidia-smi -c 0, as root)"
        )
    holders = others or "no process is shown"
    if free < needed_bytes:
        raise RunError(f"{free // MIB} MiB are free and {needed_bytes // MIB} are needed ({holders})")
    if alone and others:
        raise RunError(f"other users are on it ({others}); figures beside them would say nothing")
    left = _probe(card, found)
    remarks = [f"beside us on the card: {others}"] if others else []
    if not others and card.memory_bytes - free > HIDDEN_BYTES:
        used = (card.memory_bytes - free) // MIB
        remarks.append(f"{used} MiB of the card are used by processes that NVML does not show")
    if card.uuid.startswith("MIG-"):
        remarks.append("a MIG instance")
    if mps_is_there():
        remarks.append("an MPS server runs on this machine: time slices are not what the shares expect")
    return Usable(card, found, version, free, max(0, free - left), others, tuple(remarks))


def _probe(card: Card, found: driver.Driver) -> int:
    """Make a context there and tell what is free beside it. Raises RunError with the driver's own word if it can't be."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": card.uuid}
    try:
        ran = subprocess.run(
            [sys.executable, "-c", PROBE, str(found.cuda)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(f"no context could be made within {PROBE_SECONDS} s") from error
    if ran.returncode != 0:
        said = ran.stderr.strip().splitlines() or ["no message"]
        raise RunError(f"a first program ended with {ran.returncode}: {said[-1]}")
    result, name, free = ran.stdout.split()[-3:]
    if result != "0":
        raise RunError(
            f"the driver refuses a context with {name} ({result}); may this user open its device nodes, and is an MPS server another user's?"
        )
    return int(free)


def _others(handle: Any) -> str:
    """The processes that compute on the card, in words; empty without any."""
    running = _told(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
    return ", ".join(f"process {process.pid} with {(process.usedGpuMemory or 0) // MIB} MiB" for process in running)


def _told(question: Any) -> Any:
    """NVML's answer; None where the card does not know the question."""
    try:
        return question()
    except pynvml.NVMLError:
        return None


def mps_is_there() -> bool:
    """Whether an MPS server or its daemon runs on this machine."""
    result = subprocess.run(["ps", "-e", "-o", "comm="], capture_output=True, text=True, check=False)
    return "nvidia-cuda-mps" in result.stdout
