"""The files of the image, in two layers: this machine's Python with the libraries that the product requires, and the product.

What `pip install '.[node,extender]'` would put into an image of the same distribution. The C library comes along, so that nothing below is needed.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Collection, Iterator
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("vcuda", "manager", "scheduler_ext")
DISTRIBUTION = "vcuda-gpu-manager"
EXTRAS = ("node", "extender")
PYTHON = "/opt/python"
COMMANDS = {"gpu-manager": "manager.main", "gpu-scheduler-extender": "scheduler_ext.main"}
_NOT_NEEDED = shutil.ignore_patterns(
    "__pycache__", "test", "tests", "idlelib", "tkinter", "ensurepip", "lib2to3", "site-packages", "config-3*",
    "*.a", "turtledemo",
)  # fmt: skip


def _version() -> str:
    return f"python{sysconfig.get_python_version()}"


def site_packages(root: Path) -> Path:
    """Where packages are below an image's root."""
    return root / PYTHON.lstrip("/") / "lib" / _version() / "site-packages"


def runtime(root: Path) -> None:
    """Fill the empty folder `root` with Python, what the product requires, and the shared libraries of both. Raises OSError."""
    home = root / PYTHON.lstrip("/")
    shutil.copytree(sysconfig.get_path("stdlib"), home / "lib" / _version(), ignore=_NOT_NEEDED)
    program = home / "bin" / _version()
    program.parent.mkdir()
    shutil.copy(Path(sys.executable).resolve(), program)
    site = site_packages(root)
    site.mkdir()
    for distribution in needed(importlib.metadata.requires(DISTRIBUTION) or (), EXTRAS):
        copy(distribution, site)
    _libraries(root, [program, *home.rglob("*.so*"), ROOT / "vcuda/_native.abi3.so"])


def product(root: Path) -> None:
    """Fill the empty folder `root` with our packages as they are in this checkout, and the commands. Raises OSError."""
    site = site_packages(root)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, site / package, ignore=shutil.ignore_patterns("__pycache__", "src"))
    commands = root / "usr/local/bin"
    commands.mkdir(parents=True)
    for name, module in COMMANDS.items():
        script = commands / name
        script.write_text(f"#!{PYTHON}/bin/{_version()}\nimport sys\nfrom {module} import main\nsys.exit(main())\n")
        script.chmod(0o755)
    (commands / "python3").symlink_to(f"{PYTHON}/bin/{_version()}")  # for the chart's test


def needed(requirements: Collection[str], extras: Collection[str] = ()) -> Iterator[importlib.metadata.Distribution]:
    """What is installed here of these requirements, as metadata writes them, and of what those require."""
    seen: set[tuple[str, str]] = set()
    names: set[str] = set()
    waiting = [(line, extra) for line in requirements for extra in ("", *extras)]
    while waiting:
        line, extra = waiting.pop()
        requirement = Requirement(line)
        if (line, extra) in seen or (requirement.marker and not requirement.marker.evaluate({"extra": extra})):
            continue
        seen.add((line, extra))
        distribution = importlib.metadata.distribution(requirement.name)
        if requirement.name not in names:
            names.add(requirement.name)
            yield distribution
        waiting += [(more, chosen) for more in distribution.requires or () for chosen in ("", *requirement.extras)]


def copy(distribution: importlib.metadata.Distribution, site: Path) -> None:
    """Copy its files into the folder `site`, without its tests. Raises OSError."""
    for file in distribution.files or ():
        if ".." in file.parts or "__pycache__" in file.parts or "tests" in file.parts:
            continue
        target = site / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(str(distribution.locate_file(file))), target)


def _libraries(root: Path, programs: list[Path]) -> None:
    """Copy the shared libraries of this machine that `programs` need, to where the loader looks by default."""
    wanted = {"/lib64/ld-linux-x86-64.so.2"}
    for program in programs:
        told = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False, timeout=20).stdout
        wanted |= set(re.findall(r"=> (/\S+) \(", told))
    for path in map(Path, wanted):
        if path.is_relative_to(root):
            continue  # brought by a wheel, found by its own run path
        folder = "lib64" if path.name.startswith("ld-linux") else "usr/lib/x86_64-linux-gnu"
        target = root / folder / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy(path, target)
            target.chmod(0o755)
