"""The report: made from what the programs printed and wrote (kept as JSON beside it, not in git), and from the report before."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import _elsewhere, _plots, _targets

HEAD = """# Benchmarks

Written by `make bench`; do not edit. Every figure below was printed by a program in `benchmarks/` on the machine that it
names, on the **simulated driver** unless a card is named: that proves the logic and our own costs, never accuracy on a real
card. The load average beside a table tells how much else ran on the machine. The raw figures are in `{json}`,
which the run writes and git does not keep: a program's part and verdicts stay as they are until it runs again.
"""
METHOD = """## Method

Each program measures native and shared in one run and prints ratios or both sides. GPU time is judged by the simulated card's own books, on a real card
by the kernels that ended; never by our accounting. What a launch or an allocation costs is measured before a driver that does nothing. `python -m
benchmarks NAME --report docs/benchmarks.md` measures one program again and keeps the others' figures, each under its own date.

On a machine with a card, `make gpu-clients test-gpu bench` is all it takes, for root and for an ordinary user; `bench-gpu` leaves out what has nothing
to do with the card (`BENCH_FLAGS="--quick --minutes 10"` for one that is lent: the worthiest first, each row said at once; `--resume` goes on where such a run ended). One that reaches no registry is given what `make gpu-wheels` fetched elsewhere (the Makefile says how) and uses the PyTorch, CuPy and
others that it has (`GPU_CLIENTS_PYTHON` names their Python). The programs take the first card (or MIG
instance) that has enough free memory, the default compute mode, and nobody else computing on it; they change nothing on a card. Where there is none, each
says what speaks against every card that is there, and measures the simulated card instead. A real card gets besides: allocations before its own driver,
a short stress run, loading time (`memory`); the whole card against native in alternating pairs (`whole_card`; `models` with PyTorch).
`--peer NAME LIBRARY` puts other interposers beside ours in [peers](#peers); their libraries are not part of this repository.
"""


@dataclass(frozen=True)
class Run:
    """One program's last run: when, how, what it printed, what went wrong (empty: nothing), its figures.

    `whole`: nothing went wrong, and no limit of time left rows out.
    `others_percent`: what other programs took of the processors meanwhile; `stolen_percent`: what the host took. None: not known.
    """

    command: str
    date: str
    output: str
    problem: str
    figures: dict[str, Any] | None
    others_percent: float | None = None
    stolen_percent: float | None = None
    whole: bool = False

    def why_none(self) -> str:
        """Why there are no figures: what went wrong, else the program's last words."""
        said = self.output.strip().splitlines() or ["it said nothing"]
        return f"the run {self.problem}" if self.problem else said[-1].removeprefix("not measured: ")

    def busy(self) -> str:
        """A clause that says that the machine was not ours alone; empty if it was, or if nobody knows."""
        said = []
        if (self.others_percent or 0) >= _elsewhere.NOTABLE_PERCENT:
            said.append(f"other programs took {self.others_percent:.0f} % of the processors meanwhile")
        if (self.stolen_percent or 0) >= _elsewhere.NOTABLE_STOLEN_PERCENT:
            said.append(f"the host took {self.stolen_percent:.1f} % of the processors away")
        return ", ".join(said)


class Damaged(Exception):
    """The file of earlier figures can't be read; the message names it, the reason and the way out."""


def load(path: Path) -> dict[str, Run]:
    """What earlier runs left; empty if there is no such file. Raises Damaged."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return {}
    try:
        return {name: Run(**run) for name, run in json.loads(text)["programs"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{path} does not hold earlier figures ({error!r}); delete it and run all programs") from error


def save(path: Path, runs: dict[str, Run]) -> None:
    programs = {name: asdict(runs[name]) for name in sorted(runs)}
    path.write_text(json.dumps({"programs": programs}, indent=1) + "\n")


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def lately(run: Run | None, hours: float) -> bool:
    """Whether a run has all its rows, and is no older."""
    if run is None or not run.whole:
        return False
    date = datetime.datetime.strptime(run.date, "%Y-%m-%d %H:%M UTC").replace(tzinfo=datetime.UTC)
    return datetime.datetime.now(datetime.UTC) - date < datetime.timedelta(hours=hours)


@dataclass(frozen=True)
class Earlier:
    """What an earlier report says of programs whose raw figures are not here: lines of targets and of misses, pictures, sections."""

    targets: dict[str, _targets.Verdict] = field(default_factory=dict)
    misses: dict[str, str] = field(default_factory=dict)
    pictures: dict[str, str] = field(default_factory=dict)  # title by file
    sections: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Earlier:
        if not path.exists():
            return cls()
        text = path.read_text()
        cells = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| T\d", line)]
        return cls(
            {row[0]: _targets.Verdict(*row) for row in cells if len(row) == 5},
            {found[1]: found[0] for found in re.finditer(r"^- (T\d+(?: G)?), .*\. See .*$", text, re.MULTILINE)},
            {file: title for title, file in re.findall(r"^!\[(.*)\]\(images/(.*)\)$", text, re.MULTILINE)},
            {
                found[1]: found[0]
                for found in re.finditer(r"^## (\w+)\n\n`.*?\n```\n.*?^```\n", text, re.MULTILINE | re.DOTALL)
            },
        )

    def date(self, name: str) -> str:
        found = re.search(r"`, (\d{4}-\d\d-\d\d \d\d:\d\d)", self.sections.get(name, ""))
        return found[1] if found else ""


def write(path: Path, runs: dict[str, Run], programs: Collection[str] | None = None) -> None:
    """Write the Markdown, and the pictures into `images` beside it.

    A program of `programs` (None: any) that has no run, or an older one, keeps what the report says of it already.
    """
    earlier = Earlier.read(path)
    runs = {name: run for name, run in runs.items() if run.date >= earlier.date(name)}
    kept = {
        name
        for name in earlier.sections
        if name not in runs and (programs is None or name.removesuffix(_targets.CARD_RUN) in programs)
    }
    figures = {name: run.figures for name, run in runs.items() if run.figures is not None}
    without = {name: {"skipped": run.why_none()} for name, run in runs.items() if run.figures is None}
    verdicts = [
        earlier.targets[row.name] if row.name in earlier.targets and kept & set(row.programs) else row
        for row in _targets.judge({**figures, **without}, kept)
    ]
    lines = [HEAD.format(json=path.with_suffix(".json").name), "## Targets", ""]
    lines += ["| | what | target | measured | verdict |", "|---|---|---|---|---|"]
    lines += [f"| {row.name} | {row.what} | {row.target} | {row.measured} | {row.verdict} |" for row in verdicts]
    counts = {kind: sum(row.verdict == kind for row in verdicts) for kind in ("met", "missed")}
    rest = len(verdicts) - counts["met"] - counts["missed"]
    lines += [
        "",
        f"{counts['met']} met, {counts['missed']} missed (in bold by how much), {rest} without a figure.",
        "",
    ]
    lines += [*_falls_short(verdicts, runs, earlier), METHOD, "## Growth", ""]
    drawn = {file.name: title for title, file in _plots.draw(figures, path.parent / "images")}
    pictures = {**{file: title for file, title in earlier.pictures.items() if kept}, **drawn}
    lines += [f"![{title}](images/{file})" for file, title in pictures.items()] or [
        "No picture: no figures of growth, or no matplotlib."
    ]
    lines.append("")
    for name in sorted({*runs, *kept}):
        if name in kept:
            lines.append(earlier.sections[name])
            continue
        run = runs[name]
        note = f"**This run {run.problem}: what is below is not the whole.**\n\n" if run.problem else ""
        body = "\n".join(line.rstrip() for line in run.output.strip().splitlines())
        when = "; ".join(filter(None, [run.date, run.busy()]))
        lines.append(f"## {name}\n\n`{run.command}`, {when}\n\n{note}```\n{body}\n```\n")
    path.write_text("\n".join(lines))


def _falls_short(verdicts: list[_targets.Verdict], runs: dict[str, Run], earlier: Earlier) -> list[str]:
    """The targets that were missed, with what is known of their runs; and those without a figure, by reason."""
    lines = ["## What falls short", ""]
    for row in verdicts:
        if row.verdict == "missed" and row is earlier.targets.get(row.name):
            lines.append(earlier.misses.get(row.name, f"- {row.name}, {row.what} ({row.target}): {row.measured}."))
        elif row.verdict == "missed":
            where = ", ".join(f"[{name}](#{name})" for name in row.programs)
            busy = ", ".join(f"{name}: {told}" for name in row.programs if (told := runs[name].busy()))
            short = "; ".join(part for part in row.measured.split("; ") if part.startswith("**"))
            lines.append(f"- {row.name}, {row.what} ({row.target}): {short}. See {where}{f'; {busy}' if busy else ''}.")
    if len(lines) == 2:
        lines.append("Nothing of what was measured.")
    without: dict[str, list[str]] = {}
    for row in verdicts:
        if row.verdict not in ("met", "missed"):
            without.setdefault(row.verdict, []).append(row.name)
    lines += ["", *(f"- {', '.join(names)}: {reason}" for reason, names in without.items()), ""]
    return lines
