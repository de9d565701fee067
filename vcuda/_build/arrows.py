"""Who may include whom in the C code: `python -m vcuda._build.arrows` (a part of `make lint`).

Headers are included by their path below `vcuda/src`, so the includes are the arrows. A folder may reach into the folders
that `FLOORS` lists, a module (`x.c` and `x.h`) never reaches itself again.
"""

from __future__ import annotations

import graphlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "src"

_TENANT = ("base", "region")
# Folder → the folders that it may include beside itself. A folder that is not listed is an error.
FLOORS: Mapping[str, tuple[str, ...]] = {
    "include": (),
    "stub": (),
    "base": (),
    "region": ("base",),
    "gate": _TENANT,
    "report": _TENANT,
    "mine": (*_TENANT, "report"),
    "arbiter": (*_TENANT, "gate", "report"),
    "scheduler": (),
    "host": (),
    "cuda/driver": (*_TENANT, "include"),
    "cuda/memory": (*_TENANT, "include", "cuda/driver"),
    "cuda/work": (*_TENANT, "include", "gate", "cuda/driver", "cuda/memory"),
    "cuda/context": (*_TENANT, "include", "cuda/driver", "cuda/memory", "cuda/work"),
    "cuda": (*_TENANT, "include", "gate", "cuda/driver", "cuda/memory", "cuda/work", "cuda/context"),
    "nvml": (*_TENANT, "include"),
    "preload": ("base", "include", "cuda/driver", "nvml"),
}

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
# Found by -I of their own: the region's layout, and the drivers' declarations.
_ELSEWHERE = {"region.abi": "", "native.abi": "", "scheduler.abi": "", "host.abi": ""}


def _target(sources: Path, file: Path, name: str) -> str:
    """The path of an included file below the sources, or "" for one that lives elsewhere."""
    if name in _ELSEWHERE:
        return ""
    for path in (file.parent / name, sources / name, sources / "include" / name):
        if path.exists():
            return path.resolve().relative_to(sources.resolve()).as_posix()
    raise FileNotFoundError(name)


def _module(path: str) -> str:
    return path if path.endswith(".def") else path.rpartition(".")[0]


def violations(sources: Path = SOURCES, floors: Mapping[str, tuple[str, ...]] = FLOORS) -> list[str]:
    """What is wrong with the includes below `sources`, a line each: file, include, reason."""
    wrong: list[str] = []
    graph: dict[str, set[str]] = {}
    for file in sorted(path for path in sources.rglob("*") if path.suffix in (".c", ".h", ".def")):
        own = file.relative_to(sources).as_posix()
        folder = own.rpartition("/")[0]
        if folder not in floors:
            wrong.append(f"{own}: the folder {folder or '.'} has no floor; add it to {Path(__file__).name}")
            continue
        for name in _INCLUDE.findall(file.read_text()):
            try:
                target = _target(sources, file, name)
            except FileNotFoundError:
                wrong.append(f'{own}: "{name}" does not exist below {sources.name}')
                continue
            reached = target.rpartition("/")[0]
            if target and reached != folder and reached not in floors[folder]:
                wrong.append(
                    f'{own}: "{name}" is in {reached}, which {folder} may not include (only {floors[folder]})'
                )
            if target and _module(target) != _module(own):
                graph.setdefault(_module(own), set()).add(_module(target))
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        wrong.append("these include each other in a circle: " + " → ".join(reversed(error.args[1])))
    return wrong


def main() -> int:
    wrong = violations()
    print("\n".join(wrong) or "C includes: every arrow points downward, no circle")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
