"""How the cost of memory calls grows with what is live: allocations, pools, handles, mappings, tiles of a sparse array.

Each figure is the processor time of one operation in the calling thread, the least of many groups, natively and in a share in turns
on the simulated card: what the share adds is ours, what grows natively is the simulated driver's. From the repository's root:
`python -m benchmarks.memory_growth [--turns N] [--json FILE] [KIND …]`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks import _machine
from benchmarks.memory import HERE, SECONDS, Bench, compile_c

# By the name of what memory_growth.c does beside so many live objects.
COUNTS = {
    "plain": (1, 100_000),
    "info": (1, 100_000),
    "async": (1, 100_000),
    "synchronised": (1, 100_000),
    "pools-plain": (1, 2_000),
    "pools-async": (1, 2_000),
    "pools-synchronised": (1, 2_000),
    "pools": (1, 2_000),
    "handles": (1, 16_000),
    "ipc": (1, 2_000),
    "maps": (1, 16_000),
    "tiles": (1, 16_000),
    "uneven-tiles": (1, 16_000),
}


@dataclass(frozen=True)
class Growth:
    """Nanoseconds of one operation beside `live` objects; `added` is what the share makes of it."""

    kind: str
    live: int
    native_ns: float
    share_ns: float

    @property
    def added_ns(self) -> float:
        return self.share_ns - self.native_ns


def measure(bench: Bench, kinds: list[str], turns: int) -> list[Growth]:
    program = compile_c(
        HERE / "memory_growth.c", bench.folder / "memory_growth", f"-I{HERE.parent / 'vcuda/src/include'}", "-ldl"
    )
    share = bench.share("growth", bench.place.library, 1 << 45)
    found = []
    for kind in kinds:
        for live in COUNTS[kind]:
            least = [float("inf"), float("inf")]
            for _ in range(turns):
                for index, libraries in enumerate((bench.place.library.parent, share / "lib64")):
                    environment = bench.place.environment() | {"LD_LIBRARY_PATH": str(libraries)}
                    done = subprocess.run(
                        [program, kind, str(live)],
                        env=environment,
                        capture_output=True,
                        text=True,
                        timeout=SECONDS,
                        check=False,
                    )
                    if done.returncode:
                        raise RuntimeError(f"memory_growth {kind} {live} ended with {done.returncode}: {done.stderr}")
                    least[index] = min(least[index], float(done.stdout))
            found.append(Growth(kind, live, *least))
    return found


def show(found: list[Growth]) -> None:
    print("Processor time of one operation, ns: the least of all groups\n")
    print("| operation beside live objects | live | natively | in a share | added |")
    print("|---|---:|---:|---:|---:|")
    for row in found:
        print(f"| {row.kind} | {row.live:,} | {row.native_ns:,.0f} | {row.share_ns:,.0f} | {row.added_ns:,.0f} |")


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.memory_growth", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--turns", type=int, default=3, help="runs of each, natively and in a share (default %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures there")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"some of {', '.join(COUNTS)} (default: all)")
    options = parser.parse_args()
    if unknown := [kind for kind in options.kinds if kind not in COUNTS]:
        parser.error(f"no such kind: {', '.join(unknown)}; there are {', '.join(COUNTS)}")
    about = _machine.describe()
    print(f"{_machine.line(about)}\n")
    with tempfile.TemporaryDirectory(prefix="vcuda-memory-growth-") as name:
        found = measure(Bench(Path(name)), options.kinds or list(COUNTS), options.turns)
    show(found)
    if options.json:
        rows = [dataclasses.asdict(row) | {"added_ns": row.added_ns} for row in found]
        options.json.write_text(json.dumps({"machine": about, "growth": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
