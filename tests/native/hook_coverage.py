"""Check that every function of NVIDIA's <cuda.h> and <nvml.h> is in our tables, hooked or passed through; make the pages of it.

`python -m tests.native.hook_coverage` takes the newest headers from PyPI; `--header FOLDER` those that are there already.
The headers are needed for this check only, never to build.
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

from vcuda._build import gcc, native

REFUSED = "refused with NO_PERMISSION"
SECONDS = 120


@dataclass(frozen=True)
class Interface:
    """One of the driver's two interfaces: its header and where that comes from, our table and the page made of it."""

    name: str
    header: str
    package: str
    shape: str
    folder: Path
    page: Path
    # Macros that make the preprocessor show further names.
    faces: tuple[str, ...] = ("",)


INTERFACES = (
    # Today's names, per-thread default stream, and the names of former versions.
    Interface(
        "CUDA driver",
        "cuda.h",
        "nvidia-cuda-runtime",
        "cu[A-Z]",
        native.ROOT / "vcuda/src/cuda/driver",
        native.ROOT / "docs/hook-coverage.md",
        ("", "-DCUDA_API_PER_THREAD_DEFAULT_STREAM", "-D__CUDA_API_VERSION_INTERNAL"),
    ),
    Interface(
        "NVML",
        "nvml.h",
        "nvidia-nvml-dev",
        "nvml[A-Z]",
        native.ROOT / "vcuda/src/nvml",
        native.ROOT / "docs/nvml-coverage.md",
        ("-DNVML_NO_UNVERSIONED_FUNC_DEFS",),
    ),
)


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


def read_table(folder: Path = INTERFACES[0].folder) -> Table:
    hooked = {
        name: path.name if kind == "HOOK" else REFUSED
        for path in sorted(folder.glob("*.def"))
        for kind, name in re.findall(r"^VC_(HOOK|SETTER)(?:_WORK|_LAUNCH)?\((\w+)", path.read_text(), re.MULTILINE)
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


def declared(interface: Interface, folder: Path) -> set[str]:
    """All functions that the header in this folder declares. Raises CoverageError if gcc can't read it."""
    names: set[str] = set()
    for face in interface.faces:
        flags = [f"-I{folder}", *([face] if face else [])]
        command = [*gcc.compiler(), "-E", "-P", *flags, "-x", "c", "-"]
        result = subprocess.run(
            command,
            input=f'#include "{interface.header}"\n',
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        if result.returncode != 0:
            raise CoverageError(f"cannot read {interface.header} in {folder}: {result.stderr.strip()[:300]}")
        names |= set(re.findall(rf"\b({interface.shape}\w*)\s*\(", result.stdout))
    return names


def download(interface: Interface, folder: Path) -> Path:
    """The folder of the header, from its PyPI package, unpacked below `folder`. Raises CoverageError with pip's words."""
    package = interface.package
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), package]
    result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    if result.returncode != 0:
        raise CoverageError(
            f"{package} can't be downloaded: {result.stderr.strip()[-300:]}; give a folder with --header"
        )
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    found = next(folder.rglob(interface.header), None)
    if found is None:
        raise CoverageError(f"{package} holds no {interface.header}: look for the package that has it now")
    return found.parent


def page(interface: Interface, table: Table) -> str:
    """The page of an interface: what stands before the driver, and why everything else does not."""
    by_file: dict[str, list[str]] = {}
    for name, file in table.hooked.items():
        by_file.setdefault(file, []).append(name)
    by_reason: dict[str, list[str]] = {}
    for name, reason in table.passed.items():
        by_reason.setdefault(reason, []).append(name)
    variants = " (with their per-thread-default-stream variants)" if len(interface.faces) > 1 else ""
    lines = [
        "<!-- Made by `python -m tests.native.hook_coverage --write`; do not edit. -->",
        f"# Which {interface.name} functions we stand before",
        "",
        f"{len(table.hooked)} entry points are hooked; {len(table.passed)} names{variants} are",
        f"passed through, each reviewed. The table is `{interface.folder.relative_to(native.ROOT)}/*.def`; "
        "`python -m tests.native.hook_coverage` compares it with the",
        f"newest public `<{interface.header}>` and fails on a function that is in neither half.",
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


def check(interface: Interface, header: Path | None, write: bool) -> list[str]:
    """What is wrong with one interface's table and page, after telling how many functions there are. Raises CoverageError."""
    table = read_table(interface.folder)
    with tempfile.TemporaryDirectory() as folder:
        names = declared(interface, header or download(interface, Path(folder)))
    problems = table.problems(names)
    if write:
        interface.page.write_text(page(interface, table))
    elif not interface.page.exists() or interface.page.read_text() != page(interface, table):
        problems.append(f"{interface.page} is not what the table makes: run this with --write")
    if not problems:
        print(
            f"{interface.header}: {len(names)} entry points: {len(names & table.hooked.keys())} hooked, "
            "the others passed through with a reason"
        )
    return problems


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.native.hook_coverage", description=__doc__)
    parser.add_argument(
        "--header",
        type=Path,
        metavar="FOLDER",
        help="where cuda.h or nvml.h is, and check only that; else both, the newest from PyPI",
    )
    parser.add_argument("--write", action="store_true", help="make the pages in docs/ anew")
    options = parser.parse_args(arguments)
    folder = options.header
    chosen = [one for one in INTERFACES if folder is None or (folder / one.header).exists()]
    try:
        if not chosen:
            raise CoverageError(f"{folder} holds neither cuda.h nor nvml.h")
        problems = [problem for one in chosen for problem in check(one, folder, options.write)]
    except CoverageError as error:
        print(f"coverage: {error}", file=sys.stderr)
        return 2
    for problem in problems:
        print(f"coverage: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
