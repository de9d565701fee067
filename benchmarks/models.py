"""A real model's throughput natively and in shares: the whole card, 50, and 30 beside 70 (T4). Needs a card and PyTorch.

A transformer of GPT-2's size is trained and served by an unmodified PyTorch program, and one of fewer, wider layers is trained, which keeps a fast card
busy all the time; all in one run on one card. What NVML says the card was busy stands beside each case: a share's part of a program that needs
less than the card is not its limit. From the
repository's root: `python -m benchmarks.models [--json FILE] [--quick] [--python PYTHON]`. Without a card or PyTorch it says so and ends with status 0.
`--dry-run` runs the same programs, tiny and on the processor, through the same shares of a simulated card: no figure of it means anything.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pynvml

from benchmarks import _clients, _machine, _usable
from benchmarks._pairs import Paired, paired
from vcuda.runs.errors import RunError
from vcuda.sim import Machine

HERE = Path(__file__).resolve().parent
CLIENT = HERE / "_model_client.py"
WORKS = ("wide", "train", "serve")
BUSY_EVERY_S = 0.1  # NVML's utilization is of the last 1/6 s to 1 s
# The cores of the shares side by side; None: no share.
CASES: dict[str, list[int | None]] = {
    "native": [None],
    "50 alone": [50],
    "30 beside 70": [30, 70],
    "two without shares": [None, None],
    "whole card": [100],
    "native again": [None],
}
BESIDE_MIB = 1024  # contexts beside two shares


@dataclass(frozen=True)
class Row:
    """What one program got done: steps (batches, requests) per second, and as part of native alone.

    `busy_percent`: how long some kernel ran on the card meanwhile, by NVML; None where nobody tells.
    """

    work: str
    case: str
    per_second: float
    of_native: float
    p50_ms: float | None
    p99_ms: float | None
    busy_percent: float | None = None


class Busy:
    """What NVML says the card was busy while a program ran, as a mean in percent."""

    def __init__(self, uuid: str | None) -> None:
        self._samples: list[int] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, args=(uuid,)) if uuid else None

    def __enter__(self) -> Busy:
        if self._thread:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread:
            self._thread.join()

    def _sample(self, uuid: str) -> None:
        try:
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            while not self._ended.wait(BUSY_EVERY_S):
                self._samples.append(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        except pynvml.NVMLError as error:
            print(f"NVML does not tell how busy {uuid} is: {error}", file=sys.stderr)

    def percent(self) -> float | None:
        late = self._samples[len(self._samples) // 5 : -2]  # the first look back at the time before
        return statistics.fmean(late) if late else None


@dataclass
class Bench:
    """Runs the client natively and in shares of one card."""

    python: str
    words: list[str]
    environment: dict[str, str]
    folder: Path
    seconds: float
    client: list[str] = field(default_factory=list)
    uuid: str | None = None  # the card, where it is a real one

    def start(self, work: str, cores: int | None, memory_mib: int) -> subprocess.Popen[str]:
        command = [self.python, str(CLIENT), work, str(self.seconds), *self.client]
        environment = {**os.environ, **self.environment}
        if cores is not None:
            share = [
                "--core",
                str(cores),
                "--memory",
                f"{memory_mib}MiB",
                "--ledger",
                str(self.folder / "ledger"),
            ]
            command = [sys.executable, "-m", "vcuda.cli.main", "run", *share, *self.words, "--", *command]
            environment = dict(os.environ)
        return subprocess.Popen(
            command,
            env=environment,
            cwd=HERE.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def together(self, wanted: Sequence[tuple[str, int | None]], memory_mib: int) -> list[dict[str, Any]]:
        """Start all, wait until each is warm, let them go at once; what each of them printed."""
        running = [self.start(work, cores, memory_mib) for work, cores in wanted]
        for process in running:
            if not process.stdout or process.stdout.readline() != "ready\n":
                for other in running:
                    other.kill()
                    other.communicate()
                raise RunError("the PyTorch program ended before it was warm; its message is above")
        with Busy(self.uuid) as busy:
            for process in running:
                if process.stdin:
                    process.stdin.write("go\n")
                    process.stdin.flush()
            answers = [json.loads(process.communicate()[0].splitlines()[-1]) for process in running]
        return [{**answer, "busy_percent": busy.percent()} for answer in answers]


def rate(answer: dict[str, Any]) -> float:
    return float(answer["steps"]) / float(answer["seconds"])


def whole_card(bench: Bench, works: Sequence[str], memory_mib: int, pairs: int) -> list[Paired]:
    """Native and a share of the whole card in turns: what T4 asks."""

    def per_second(work: str, cores: int | None) -> float:
        return rate(bench.together([(work, cores)], memory_mib)[0])

    return [
        paired(work, lambda: per_second(work, None), lambda: per_second(work, 100), pairs)  # noqa: B023
        for work in works
    ]


def rows(bench: Bench, works: Sequence[str], memory_mib: int, end_s: float = math.inf) -> list[Row]:
    """Native first and last: their mean is the base, so that a card that warms up does not favour either.

    Each case is said at once. None is begun that would not have ended at `end_s` (of time.monotonic) if it took as long as the longest before.
    """
    found: list[Row] = []
    longest_s = 0.0
    for work in works:
        cases: list[tuple[str, dict[str, Any]]] = []
        for title, shares in CASES.items():
            begun = time.monotonic()
            if begun + longest_s > end_s:
                break
            answers = bench.together([(work, cores) for cores in shares], memory_mib if shares[0] else 0)
            longest_s = max(longest_s, time.monotonic() - begun)
            names = [title] if len(shares) == 1 else [f"{cores or 'one'} of {title}" for cores in shares]
            cases += zip(names, answers, strict=True)
            for name, answer in zip(names, answers, strict=True):
                print(
                    f"  {work}, {name}: {rate(answer):.2f} per second, card busy {_percent(answer['busy_percent'])}",
                    file=sys.stderr,
                    flush=True,
                )
        natives = [rate(answer) for case, answer in cases if case.startswith("native")]
        for case, answer in cases:
            part = rate(answer) * len(natives) / sum(natives)
            latencies = answer.get("p50_ms"), answer.get("p99_ms")
            found.append(Row(work, case, rate(answer), part, *latencies, answer["busy_percent"]))
    return found


def _percent(value: float | None) -> str:
    return f"{value:.0f} %" if value is not None else "-"


def show(found: list[Row], whole: list[Paired]) -> None:
    print(f"{'':8}{'':28}{'per second':>12}{'of native':>12}{'card busy':>12}{'p50 ms':>10}{'p99 ms':>10}")
    for row in found:
        latencies = "".join(
            f"{value:10.2f}" if value is not None else f"{'-':>10}" for value in (row.p50_ms, row.p99_ms)
        )
        figures = f"{row.per_second:12.2f}{100 * row.of_native:11.1f}%{_percent(row.busy_percent):>12}"
        print(f"{row.work:8}{row.case:28}{figures}{latencies}")
    print("\nthe whole card against native, in turns (T4)")
    for each in whole:
        spread = f"lowest {100 * each.lowest:.2f} %, highest {100 * each.highest:.2f} %"
        print(f"{each.what:8}median {100 * each.of_native:.2f} % of native, {spread}, {each.pairs} pairs")


def python_with_torch(named: str | None) -> str | None:
    """The Python to run the model with: the one that was named, else the first that has PyTorch."""
    for python in [named] if named else _clients.pythons():
        try:
            if subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode == 0:
                return python
        except OSError:
            continue
    return None


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="models", description="A model's throughput natively and in shares.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--quick", action="store_true", help="5 s per figure instead of 20, 2 pairs instead of 6")
    parser.add_argument("--python", help="a Python that has PyTorch")
    parser.add_argument(
        "--within",
        type=float,
        metavar="SECONDS",
        help="leave out pairs of native and whole card that would end later",
    )
    parser.add_argument(
        "--memory", type=int, default=8192, metavar="MIB", help="limit of each share (default %(default)s)"
    )
    parser.add_argument("--works", nargs="+", choices=WORKS, default=WORKS, help="which (default: all)")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the processor, in shares of a simulated card")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {"machine": _machine.describe()}
    python = python_with_torch(options.python)
    skipped = "" if python else _clients.why_none("PyTorch")
    with tempfile.TemporaryDirectory(prefix="vcuda-models-") as temporary:
        folder = Path(temporary)
        words, environment, client = [], {}, []
        if options.dry_run:
            machine = Machine.create(folder / "card")
            words, environment, client = (
                [f"--sim={folder / 'card'}"],
                machine.environment(),
                ["--device", "cpu", "--tiny"],
            )
        elif not skipped:
            try:
                found = _usable.find((2 * options.memory + BESIDE_MIB) * _usable.MIB, alone=True)
                words, environment = ["--device", found.card.uuid], found.environment()
                result["card"] = [found.card.model, *found.remarks]
            except RunError as error:
                skipped = str(error)
        if not skipped and python:
            seconds = 1.0 if options.dry_run else 5.0 if options.quick else 20.0
            uuid = None if options.dry_run else found.card.uuid
            bench = Bench(python, words, environment, folder, seconds, client, uuid)
            begun = time.monotonic()
            measured = rows(bench, options.works, options.memory, begun + (options.within or math.inf))
            result["rows"] = [dataclasses.asdict(row) for row in measured]
            pairs = 2 if options.dry_run or options.quick else 6
            if options.within is not None:  # a pair takes as long as two rows, for each work
                took = time.monotonic() - begun
                pairs = min(
                    pairs,
                    int((options.within - took) / (took / max(1, len(measured)) * 2 * len(options.works))),
                )
            whole = whole_card(bench, options.works, options.memory, pairs) if pairs > 0 else []
            result["whole_card"] = [dataclasses.asdict(each) for each in whole]
            result["dry_run"] = options.dry_run
    print(_machine.line(result["machine"]))
    if skipped:
        result["skipped"] = skipped
        print(f"skipped: {skipped}")
    else:
        if options.dry_run:
            print("Dry run on the processor, tiny: it shows that the programs run, no figure means anything.")
        for said in result.get("card", []):
            print(said)
        show(measured, whole)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
