"""What a tenant with the whole card gets, against the same program without any share (T4), on whichever card is there.

Native and share take turns and the turn's order changes, so that a card that warms up or slows down favours neither; each pair gives one
ratio. No PyTorch is needed: benchmarks/models.py does the same with a model. From the repository's root:
`python -m benchmarks.whole_card [--driver auto|real|simulated] [--json FILE] [--quick]`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import _machine
from benchmarks._card import Options
from benchmarks._pairs import Paired, paired
from benchmarks._throttle_bench import Bench, Load, answer_of
from vcuda.runs.errors import RunError

KERNELS: dict[str, Options] = {
    "kernels of 10 us": {"kernel": "spin_10us", "sync": 100},
    "kernels of 1 ms": {"kernel": "spin_1000us", "sync": 20},
    "a graph of 20 x 100 us": {"kernel": "spin_100us", "graph": 20, "sync": 5},
}


def measured(bench: Bench, title: str, options: Options, count: int, seconds: float) -> Paired:
    """Launches per second of a greedy program in a share of the whole card, as parts of native."""
    bench.card.prepare(options)
    _, whole = bench.share(Load(100), False)

    def rate(environment: dict[str, str]) -> float:
        answer = answer_of(bench.start(environment, {**options, "seconds": seconds}))
        return float(answer["launches"]) / float(answer["seconds"])

    return paired(title, lambda: rate(bench.native_environment()), lambda: rate(whole), count)


def show(result: dict[str, Any]) -> None:
    print(_machine.line(result["machine"]))
    if result["machine"]["card"] == "simulated":
        print("On the simulated card: it shows that the method works, the target is for a real one.")
    print(f"\n{'':26}{'native, launches/s':>20}{'of native':>12}{'lowest':>10}{'highest':>10}{'pairs':>7}")
    for row in result["rows"]:
        parts = "".join(f"{100 * row[name]:9.2f}%" for name in ("lowest", "highest"))
        print(
            f"{row['what']:26}{row['native_per_second']:20,.0f}{100 * row['of_native']:11.2f}%{parts}{row['pairs']:7}"
        )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="whole_card", description="A tenant with the whole card.")
    parser.add_argument("--driver", choices=("auto", "real", "simulated"), default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--quick", action="store_true", help="3 pairs of 1 s instead of 10 of 4 s")
    options = parser.parse_args(arguments)
    count, seconds = (3, 1.0) if options.quick else (10, 4.0)
    with tempfile.TemporaryDirectory(prefix="vcuda-whole-card-") as folder:
        try:
            bench = Bench(Path(folder), options.driver)
            rows = [measured(bench, title, each, count, seconds) for title, each in KERNELS.items()]
        except (RunError, RuntimeError) as error:
            print(f"whole_card: {error}", file=sys.stderr)
            return 1
        result: dict[str, Any] = {
            "machine": {**_machine.describe(), "card": bench.card.name},
            "rows": [dataclasses.asdict(row) for row in rows],
        }
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
