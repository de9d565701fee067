"""The reference model: random steps on all kinds of CUDA objects, natively and in a share; whatever differs is an error.

python -m tests.model.model_run                        20,000 steps of each of 50 seeds, in both modes
python -m tests.model.model_run --seeds 7 --steps 500 --mode equal --shrink
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.support import share as shares
from tests.support.share import LIB, MIB, Share
from vcuda import region
from vcuda._build import native
from vcuda.sim import Machine, SimCard

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
CARDS = 2
CARD_BYTES = 64 << 30
SMALL_BYTES = 768 * MIB
SECONDS = 600

Mode = Literal["equal", "small"]


@dataclass(frozen=True)
class Finding:
    """What first went wrong in one run: `what` tells findings of one cause from others, `text` shows it."""

    seed: int
    mode: Mode
    what: str
    text: str
    step: int

    @property
    def cause(self) -> str:
        """`what`, whatever step it was noticed at: a promise that is broken earlier may be hidden for a while."""
        return self.what.split(" at ")[0] if not self.what.startswith("another") else self.what


def compile_client(folder: Path) -> Path:
    """Build the client against the link-time stubs. Returns its path."""
    client = folder / "model_client"
    includes = ("vcuda/src/include", "vcuda/src", "vcuda/abi", "vcuda/sim/src/core")
    command = ["gcc", "-O2", "-g", "-std=gnu11", "-Wall", "-Wextra", "-Werror"]
    command += [f"-I{ROOT / include}" for include in includes]
    command += [str(path) for path in sorted(HERE.glob("*.c"))]
    subprocess.run([*command, "-o", str(client), f"-L{LIB / 'stubs'}", "-lcuda"], check=True)
    return client


class Model:
    """A simulated machine, the client, and runs of it, in shares with the shims of `shims`."""

    def __init__(self, folder: Path, shims: Path = LIB / "shim") -> None:
        self.folder = folder
        self.shims = shims
        self.client = compile_client(folder)
        cards = [SimCard(memory_bytes=CARD_BYTES) for _ in range(CARDS)]
        self.machine = Machine.create(folder / "machine", cards)
        self._numbers = itertools.count()

    def of(self, shims: Path) -> Model:
        """The same machine and client with other shims."""
        other = copy.copy(self)
        other.shims = shims
        return other

    def _run(
        self,
        share: Share | None,
        limit_bytes: int,
        seed: int,
        steps: int | Sequence[int],
        without: str,
    ) -> tuple[list[str], int]:
        """The trace and the exit status of one run; natively without a share."""
        environment = share.environment() if share else {**os.environ, **self.machine.environment()}
        if seed % 2:  # pools that grow and fragment in another way, for every other seed
            environment["VCUDA_SIM_POOLS"] = f"ragged:{seed}"
        usage = str(share.region_directory / "usage") if share else "-"
        driver = LIB / "sim" / f"libcuda.so.{native.SIM_DRIVER_VERSION}"
        state = self.machine.directory / "state" / "shared"
        self.machine.report()  # so that the machine is there, and nothing of those that ended before
        how = str(steps) if isinstance(steps, int) else "-"
        if limit_bytes != SMALL_BYTES:
            without += ",most"  # whether a pool of limited size is full depends on the time
        words = (state, usage, limit_bytes, limit_bytes, driver, seed, how, without)
        given = None if isinstance(steps, int) else "\n".join(map(str, steps))
        with tempfile.TemporaryFile() as output:
            done = subprocess.run(
                [str(self.client), *map(str, words)],
                env=environment,
                input=given,
                text=True,
                stdout=output,
                check=False,
                timeout=SECONDS,
            )
            output.seek(0)
            return output.read().decode().splitlines(), done.returncode

    def _share(self, limit_bytes: int) -> Share:
        folder = self.folder / f"share-{next(self._numbers)}"
        limits = [shares.limit(self.machine, index, limit_bytes, cores=100, core_limit=100) for index in range(CARDS)]
        share = shares.simulated(folder, self.machine, limits)
        shutil.copy(self.shims / "libcuda.so.1", share.lib64)
        return share

    def check(self, mode: Mode, seed: int, steps: int | Sequence[int], without: str = "") -> Finding | None:
        """Run the steps in a share (mode `equal`: as large as the card, and natively too); what first went wrong."""
        limit_bytes = CARD_BYTES if mode == "equal" else SMALL_BYTES
        share = self._share(limit_bytes)
        through, status = self._run(share, limit_bytes, seed, steps, without)
        found = _promise(through, status)
        if mode == "equal":
            bare, bare_status = self._run(None, 0, seed, steps, without)
            natively = _promise(bare, bare_status)
            if natively:
                return Finding(seed, mode, f"natively: {natively[1]}", natively[2], natively[0])
            other = _difference(bare, through)
            found = other if other and (not found or other[0] < found[0]) else found
        used = [card.used_bytes for card in self.machine.report().cards]
        left = [card.memory_used_bytes for card in region.read_usage(share.region_directory).cards]
        if not found and (any(used) or any(left)):
            found = (len(through), "left behind", f"books {used}, ledger {left}")
        return Finding(seed, mode, found[1], found[2], found[0]) if found else None

    def shrink(self, finding: Finding, last: int, without: str = "", seconds: float = 60) -> list[int]:
        """Leave out steps as long as the same goes wrong (or `seconds` are over). Returns the numbers of those left."""
        steps = list(range(1, min(last, finding.step + 1) + 1))
        end = time.monotonic() + seconds
        size = max(1, len(steps) // 2)
        while time.monotonic() < end:
            shorter, at = False, 0
            while at < len(steps) and time.monotonic() < end:
                rest = steps[:at] + steps[at + size :]
                again = self.check(finding.mode, finding.seed, rest, without)
                if again and again.cause == finding.cause:
                    steps, shorter = rest, True
                else:
                    at += size
            if size == 1 and not shorter:
                break
            size = max(1, size // 2)
        return steps

    def show(self, finding: Finding, steps: Sequence[int], without: str = "") -> str:
        """The two traces of the steps, side by side where they differ."""
        limit_bytes = CARD_BYTES if finding.mode == "equal" else SMALL_BYTES
        through, _ = self._run(self._share(limit_bytes), limit_bytes, finding.seed, steps, without)
        if finding.mode == "small":
            return "\n".join(through)
        bare, _ = self._run(None, 0, finding.seed, steps, without)
        lines = []
        for a, b in itertools.zip_longest(bare, through, fillvalue="(nothing)"):
            lines += [f"  {a}"] if a == b else [f"- native: {a}", f"+ share:  {b}"]
        return "\n".join(lines)


Place = tuple[int, str, str]  # of what went wrong: line, what, text


def _kind(line: str) -> str:
    words = line.split()
    return words[2].rstrip(":") if len(words) > 2 and words[0].isdigit() else words[0] if words else "end"


def _promise(trace: Sequence[str], status: int) -> Place | None:
    """The first line that says that a promise is broken."""
    for number, line in enumerate(trace):
        if "!" in line:
            broken = re.search(r"!(\S+)", line)
            return number, f"{broken[1] if broken else '!'} at {_kind(line)}", line
    if status:
        return (
            len(trace),
            f"ended with {status} after {_kind(trace[-1]) if trace else 'nothing'}",
            "".join(trace[-1:]),
        )
    return None


def _difference(bare: Sequence[str], through: Sequence[str]) -> Place | None:
    """The first line that is not the same, what was said of broken promises aside."""
    if bare == through:
        return None
    for number, (a, b) in enumerate(itertools.zip_longest(bare, through, fillvalue="(nothing)")):
        if a != b:
            calls = re.sub(r"\d+", "#", a)[:40] if a.split(":")[0] == b.split(":")[0] else ""
            return number, f"another answer at {_kind(a)} {calls}", f"native: {a}\nshare:  {b}"
    return None


def run(model: Model, modes: Iterable[Mode], seeds: Iterable[int], steps: int, without: str = "") -> list[Finding]:
    """All seeds in all modes; what first went wrong in each."""
    checks = ((mode, seed) for mode in modes for seed in seeds)
    return [found for mode, seed in checks if (found := model.check(mode, seed, steps, without))]


def _numbers(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.model.model_run", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seeds", type=_numbers, default=_numbers("1-50"), metavar="FIRST-LAST")
    parser.add_argument("--mode", choices=("equal", "small", "both"), default="both")
    parser.add_argument("--without", default="", metavar="KIND,…", help="leave out these kinds of steps")
    parser.add_argument("--shrink", action="store_true", help="show the shortest program found, once per cause")
    parser.add_argument("--seconds", type=float, default=60, help="most that shrinking one may take")
    parser.add_argument("--shims", type=Path, default=LIB / "shim", help="folder of the shims under test")
    options = parser.parse_args()
    modes: tuple[Mode, ...] = ("equal", "small") if options.mode == "both" else (options.mode,)
    began = time.monotonic()
    seen: dict[str, Finding] = {}
    count = 0
    with tempfile.TemporaryDirectory(prefix="vcuda-model-") as name:
        model = Model(Path(name), options.shims)
        for mode, seed in itertools.product(modes, options.seeds):
            found = model.check(mode, seed, options.steps, options.without)
            if not found:
                continue
            count += 1
            print(f"{mode} seed {seed} step {found.step}: {found.what}\n    {found.text}", flush=True)
            if found.what not in seen and options.shrink:
                steps = model.shrink(found, options.steps, options.without, options.seconds)
                print(
                    f"  {len(steps)} steps: {steps}\n{model.show(found, steps, options.without)}\n",
                    flush=True,
                )
            seen.setdefault(found.what, found)
    runs = len(modes) * len(options.seeds)
    print(
        f"{runs} runs of {options.steps} steps: {count} with a difference, of {len(seen)} kinds; "
        f"{time.monotonic() - began:.0f} s"
    )
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
