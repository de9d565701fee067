"""Check that every entry point of NVIDIA's <cuda.h> is in our table, hooked or passed through; make docs/hook-coverage.md.

`python -m vcuda._build.coverage` takes the newest header from PyPI; `--header FOLDER` one that is there already.
The header is needed for this check only, never to build.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vcuda._build import native

PACKAGE = "nvidia-cuda-runtime"
TABLE = native.ROOT / "vcuda/src/cuda"
PAGE = native.ROOT / "docs/hook-coverage.md"
# The three faces of <cuda.h>: today's names, per-thread default stream, and the names of former versions.
VARIANTS = ("", "-DCUDA_API_PER_THREAD_DEFAULT_STREAM", "-D__CUDA_API_VERSION_INTERNAL")
SECONDS = 120


class CoverageError(Exception):
    """The header can't be had or read; the message names it and the reason."""


@dataclass(frozen=True)
class Table:
    """The hooks by the file that lists them, and the passed names with the reason of each."""

    hooked: Mapping[str, str]
    passed: Mapping[str, str]

    def problems(self, names: set[str]) -> list[str]:
        """What is wrong with the table, given the names that a header declares: one sentence each."""
        both = sorted(self.hooked.keys() & self.passed.keys())
        unknown = sorted(name for name in names - self.hooked.keys() if self.reason(name) is None)
        return [
            *(f"{name} is hooked: take it out of passed.def" for name in both),
            *(f"{name} is new: hook it, or list it in passed.def with the reason" for name in unknown),
        ]

    def reason(self, name: str) -> str | None:
        """Why a function is passed through; a per-thread variant of a hooked one has no reason of its own."""
        plain = re.sub(r"_pt[sd][sz]$", "", name)
        return None if plain in self.hooked else self.passed.get(plain)


def read_table(folder: Path = TABLE) -> Table:
    hooked = {
        name: path.name
        for path in sorted(folder.glob("*.def"))
        for name in re.findall(r"^VC_HOOK\((\w+)", path.read_text(), re.MULTILINE)
    }
    passed = {}
    for reason, names in re.findall(
        r'^VC_PASSED\("([^"]+)",([^)]*)\)', (folder / "passed.def").read_text(), re.MULTILINE
    ):
        for name in names.split():
            if name in passed:
                raise CoverageError(f"{name} is listed twice in {folder / 'passed.def'}: keep one of them")
            passed[name] = reason
    return Table(hooked, passed)


def declared(folder: Path) -> set[str]:
    """All entry points that <cuda.h> in this folder declares. Raises CoverageError if gcc can't read it."""
    names: set[str] = set()
    for variant in VARIANTS:
        flags = [f"-I{folder}", *([variant] if variant else [])]
        command = [*native.compiler(), "-E", "-P", *flags, "-x", "c", "-"]
        result = subprocess.run(
            command, input='#include "cuda.h"\n', capture_output=True, text=True, timeout=SECONDS, check=False
        )
        if result.returncode != 0:
            raise CoverageError(f"cannot read cuda.h in {folder}: {result.stderr.strip()[:300]}")
        names |= set(re.findall(r"\b(cu[A-Z]\w*)\s*\(", result.stdout))
    return names


def download(package: str, folder: Path) -> Path:
    """The folder of cuda.h from a PyPI package, unpacked below `folder`. Raises CoverageError with pip's words."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), package]
    result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    if result.returncode != 0:
        raise CoverageError(
            f"{package} can't be downloaded: {result.stderr.strip()[-300:]}; give a folder with --header"
        )
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    found = next(folder.rglob("cuda.h"), None)
    if found is None:
        raise CoverageError(f"{package} holds no cuda.h: look for the package that has it now")
    return found.parent


def page(table: Table) -> str:
    """docs/hook-coverage.md: what stands before the driver, and why everything else does not."""
    by_file: dict[str, list[str]] = {}
    for name, file in table.hooked.items():
        by_file.setdefault(file, []).append(name)
    by_reason: dict[str, list[str]] = {}
    for name, reason in table.passed.items():
        by_reason.setdefault(reason, []).append(name)
    lines = [
        "<!-- Made by `python -m vcuda._build.coverage --write`; do not edit. -->",
        "# Which CUDA driver functions we stand before",
        "",
        f"{len(table.hooked)} entry points are hooked; {len(table.passed)} names (with their per-thread-default-stream variants) are",
        "passed through, each reviewed. The table is `vcuda/src/cuda/*.def`; `python -m vcuda._build.coverage` compares it with the",
        "newest public `<cuda.h>` and fails on a function that is in neither half.",
        "",
        "## Hooked",
    ]
    for file, names in sorted(by_file.items()):
        lines += ["", f"**{file}**: {', '.join(f'`{name}`' for name in sorted(names))}"]
    lines += ["", "## Passed through"]
    for reason, names in by_reason.items():
        lines += [
            "",
            f"**{reason[0].upper()}{reason[1:]}.** {', '.join(f'`{name}`' for name in sorted(names))}",
        ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m vcuda._build.coverage", description=__doc__)
    parser.add_argument(
        "--header", type=Path, metavar="FOLDER", help="where cuda.h is; else the newest from PyPI"
    )
    parser.add_argument("--write", action="store_true", help=f"make {PAGE.relative_to(native.ROOT)} anew")
    options = parser.parse_args(arguments)
    try:
        table = read_table()
        with tempfile.TemporaryDirectory() as folder:
            names = declared(options.header or download(PACKAGE, Path(folder)))
    except CoverageError as error:
        print(f"coverage: {error}", file=sys.stderr)
        return 2
    problems = table.problems(names)
    if options.write:
        PAGE.write_text(page(table))
    elif PAGE.read_text() != page(table):
        problems.append(f"{PAGE} is not what the table makes: run this with --write")
    for problem in problems:
        print(f"coverage: {problem}", file=sys.stderr)
    if not problems:
        print(
            f"{len(names)} entry points: {len(names & table.hooked.keys())} hooked, the others passed through with a reason"
        )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
