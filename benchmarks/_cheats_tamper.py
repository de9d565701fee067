"""Containers that write into their own usage file: each a small program that does so until it is ended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vcuda._native import ffi, lib

CARD = "struct vc_card_usage"
# Read by the child: where the words are, and what goes into them every `period` seconds. Values are taken modulo 2^64.
WRITER = """
import mmap, os, struct, sys, time
path, period, script = sys.argv[1], float(sys.argv[2]), sys.argv[3]
file = os.open(path, os.O_RDWR)
page = mmap.mmap(file, os.fstat(file).st_size)
def get(at): return struct.unpack_from("=Q", page, at)[0]
def put(at, value): struct.pack_into("=Q", page, at, value % (1 << 64))
def ring(at): struct.pack_into("=I", page, at, (struct.unpack_from("=I", page, at)[0] + 1) % (1 << 32))
code = compile(script, "tampering", "exec")
started = time.monotonic()
while True:
    now = time.monotonic_ns()
    exec(code)
    if period:
        time.sleep(period)
"""


def _at(field: str, card: int = 0) -> int:
    cards = int(ffi.offsetof("struct vc_usage", "cards"))
    return cards + card * int(ffi.sizeof(CARD)) + int(ffi.offsetof(CARD, field))


def _slots() -> dict[str, int]:
    """Where slots' words for the first card are: the first slot's, the next one's distance, and what is in it."""
    of_card = int(ffi.offsetof("struct vc_slot", "cards"))
    return {
        "slots": int(ffi.offsetof("struct vc_usage", "slots")),
        "slot_bytes": int(ffi.sizeof("struct vc_slot")),
        "finish": of_card + int(ffi.offsetof("struct vc_slot_card", "predicted_finish_ns")),
        "others": of_card + int(ffi.offsetof("struct vc_slot_card", "others_then_ns")),
        "usage_bytes": int(lib.VC_USAGE_FILE_BYTES),
    }


@dataclass(frozen=True)
class Tampering:
    """What is written (Python statements on `get`, `put`, `ring`; {field} is a word's place), and how often."""

    name: str
    script: str
    period_s: float = 0.001
    pattern: str = "steady"  # what the container runs meanwhile

    @contextmanager
    def run(self, usage: Path) -> Iterator[None]:
        fields = {name: _at(name) for name, _ in ffi.typeof(CARD).fields}
        script = self.script.format(**fields, **_slots())
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(usage), str(self.period_s), script])
        try:
            yield
        finally:
            process.kill()
            process.wait(timeout=30)


ALL_OF_IT = (
    "put({credit_ns}, 10_000_000); put({gpu_ns}, 0); put({predicted_finish_ns}, 0); "
    "put({waiting_until_ns}, now + 10_000_000); put({credit_updated_ns}, now)"
)

# Whoever stands still or ended left nothing behind, and whoever works began just now.
NOTHING_LEFT = (
    "put({open_slots}, 0); put({open_slots} + 8, 0); put({predicted_finish_ns}, 0); put({left_ns}, 0); "
    "put({gpu_ns}, 0); put({credit_ns}, 10_000_000); put({credit_updated_ns}, now)"
)

# The same but for the bits: each that has work on the card has paid for all that it may have.
PAID_FOR = (
    "[(put({slots} + i * {slot_bytes} + {finish}, now + 1_000_000_000), put({slots} + i * {slot_bytes} + {others}, -1)) "
    "for i in range(100)]"
)
# Slots that nobody has say that they have work, and nobody else does.
DUMMIES = (
    "import fcntl; lock = lambda at: fcntl.fcntl(file, 37, struct.pack('hhqqi', fcntl.F_WRLCK, 0, at, 1, 0)); "
    "[lock({usage_bytes} + i) for i in range(100, 120)]; "
    "put({open_slots}, 0); put({open_slots} + 8, (1 << 20) - 1 << 36); "
    "put({credit_ns}, 10_000_000); put({credit_updated_ns}, now)"
)

# As on a card that runs every kernel to its end, behind others' long ones.
WAITS_LONG = (
    "since = now - now % 30_000_000; put({began_ns}, since + (1 << 63) if now < since + 20_000_000 else now - 100_000)"
)

# What all of the container's processes found together.
NOTHING_FOUND = (
    "[put(at, 0) for at in ({doubt}, {unpaid_ns}, {all_until_ns}, {all_for_ns}, {surprises}, {beyond_ns})]; "
    "put({credit_ns}, 10_000_000); put({credit_updated_ns}, now)"
)

TAMPERINGS = (
    Tampering("credit", "put({credit_ns}, 10_000_000)"),
    Tampering("credit without bound", "put({credit_ns}, (1 << 63) - 1)"),
    Tampering("the fill clock in the past", "put({credit_updated_ns}, 0)"),
    Tampering("the fill clock in the future", "put({credit_updated_ns}, now + 900_000_000)"),
    Tampering("no charges", "put({gpu_ns}, 0)"),
    Tampering("negative charges", "put({gpu_ns}, get({gpu_ns}) - 5_000_000)"),
    Tampering("siblings that did it", "put({gpu_ns}, now % 100_000_000 * 2)", pattern="long_kernels"),
    Tampering("nothing on the card", "put({predicted_finish_ns}, 0)"),
    Tampering("work until the end of time", "put({predicted_finish_ns}, (1 << 64) - 1)"),
    Tampering("waits for ever", "put({waiting_until_ns}, (1 << 64) - 1); put({refill_ns}, 0)"),
    Tampering("has left", "put({refill_ns}, (1 << 64) - 2)", pattern="long_kernels"),  # with work on the card
    Tampering("begins in the future", "put({began_ns}, now + 10_000_000_000)"),
    Tampering("never begins", "put({began_ns}, (1 << 64) - 1)"),
    Tampering("waits as if nothing were cut", WAITS_LONG, 0.0005, pattern="long_kernels"),
    Tampering("garbage turns", "put({turn}, now * 0x9E3779B97F4A7C15)"),
    Tampering("bells without end", "ring({wake_futex}); page.flush()", 0.00002),
    Tampering("all of it", ALL_OF_IT),
    Tampering("all of it, 2 processes", ALL_OF_IT, pattern="processes_2"),
    Tampering("all of it, 8 processes", ALL_OF_IT, pattern="processes_8"),
    Tampering("nothing left by stopped ones", NOTHING_LEFT, pattern="stopped_for_good"),
    Tampering("all paid for by the killed", PAID_FOR, pattern="killed_soon"),
    Tampering("nothing left by the killed", "put({left_ns}, 0)", 0.0002, pattern="killed_soon"),
    Tampering("dummies that have work", DUMMIES, 0.0002, pattern="killed_soon"),
    Tampering("nothing found by the young", NOTHING_FOUND, 0.0002, pattern="long_behind_a_short_one_by_the_young"),
    Tampering("a file that shrinks", "os.truncate(path, 4096 if int(now / 1e8) % 2 else 393216)", 0.01),
)
