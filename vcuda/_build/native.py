"""Compile every shared library of the project with gcc into one folder.

The list `LIBRARIES` is the only place that says which C sources make up which library; the cffi module takes
its sources from `NATIVE_FOLDERS` here. Run `python -m vcuda._build` to rebuild what changed in a checkout.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from vcuda._build import gcc

ROOT = Path(__file__).resolve().parents[2]

# What the simulated driver says it is; also the version in its file names.
SIM_DRIVER_VERSION = "550.163.01"
# And one with functions of CUDA 13.3 and of NVML 13.615, for tests of what an older one lacks; the number is none of NVIDIA's.
SIM_NEWER_VERSION = "615.0.0"

C_FLAGS = (
    "-std=c11",
    "-D_GNU_SOURCE",
    "-O2",
    "-g",
    "-fPIC",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
)
LINK_FLAGS = ("-shared", "-Wl,-z,defs", "-Wl,-z,now", "-Wl,-z,nodelete", "-Wl,--build-id=sha1")


@dataclass(frozen=True)
class Library:
    """One shared library: where it goes below the output folder and what it is made of."""

    name: str
    output: str
    source_folders: tuple[str, ...]
    # Beyond the source's own folder. Libraries with the same ones share the objects of the folders that they share.
    include_folders: tuple[str, ...]
    soname: str
    link: tuple[str, ...] = ()
    # Libraries that must exist before this one is linked, by name.
    needs: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = field(default=())
    # Link-time stub: an empty function for every name of this shape that the one library in `needs` exports.
    stub_names: str = ""
    # Header that is included before every source.
    prelude: str = ""
    # Whether it belongs into an installation.
    shipped: bool = True
    # Not a library but a program without any.
    program: bool = False
    # Machines that it can be built for, as the compiler names them (`gcc -dumpmachine`); empty: all.
    machines: tuple[str, ...] = ()

    def sources(self) -> list[Path]:
        return [path for folder in self.source_folders for path in sorted((ROOT / folder).glob("*.c"))]

    def inputs(self) -> list[Path]:
        """Everything whose change makes the library stale."""
        folders = {*self.source_folders, *self.include_folders}
        patterns = ("*.c", "*.h", "*.def", "*.abi", "*.map")
        found = {path for folder in folders for pattern in patterns for path in (ROOT / folder).rglob(pattern)}
        return sorted(found | {Path(__file__)})


# What is loaded into tenants and what a wheel brings ask for old symbol versions only; an old glibc has some of them in these two.
GLIBC_HEADER = "vcuda/src/include/vc_glibc.h"
OLD_LIBC = ("-Wl,--no-as-needed", "-l:libdl.so.2", "-l:libpthread.so.0")

HIDDEN_TABLES = f"-Wl,--version-script={ROOT / 'vcuda/src/include/tables.map'}"

# Every header is included by its path below vcuda/src, so that an include shows which folder it reaches into.
INCLUDES = ("vcuda/src", "vcuda/src/include", "vcuda/abi")
# What a tenant's process needs of its region; the CUDA shim also has the gate.
TENANT_FOLDERS = ("vcuda/src/base", "vcuda/src/region")
CUDA_FOLDERS = (
    "vcuda/src/gate",
    "vcuda/src/cuda/driver",
    "vcuda/src/cuda/memory",
    "vcuda/src/cuda/work",
    "vcuda/src/cuda/context",
    "vcuda/src/cuda",
)
SIM_INCLUDES = ("vcuda/sim/src/include", "vcuda/sim/src/core")

LIBRARIES: tuple[Library, ...] = (
    # Link-time stand-ins for the alias of the real driver: only their SONAME matters (it becomes DT_NEEDED).
    Library(
        "cuda-driver-stub",
        "build/libcuda-driver.so",
        ("vcuda/src/stub",),
        (),
        "libcuda-driver.so.1",
        shipped=False,
    ),
    Library(
        "nvml-driver-stub",
        "build/libnvidia-ml-driver.so",
        ("vcuda/src/stub",),
        (),
        "libnvidia-ml-driver.so.1",
        shipped=False,
    ),
    Library(
        "cuda-shim",
        "shim/libcuda.so.1",
        (*TENANT_FOLDERS, *CUDA_FOLDERS),
        INCLUDES,
        "libcuda.so.1",
        link=(
            "-Wl,--no-as-needed",
            "{out}/build/libcuda-driver.so",
            "-Wl,--as-needed",
            "-Wl,-rpath,$ORIGIN/drv:/usr/local/nvidia/lib64/drv",
            "-Wl,--enable-new-dtags",
            "-Wl,-Bsymbolic-functions",  # see vcuda/driver/exports.py
            HIDDEN_TABLES,
            *OLD_LIBC,
        ),
        prelude=GLIBC_HEADER,
        needs=("cuda-driver-stub",),
    ),
    Library(
        "nvml-shim",
        "shim/libnvidia-ml.so.1",
        (*TENANT_FOLDERS, "vcuda/src/nvml"),
        INCLUDES,
        "libnvidia-ml.so.1",
        link=(
            "-Wl,--no-as-needed",
            "{out}/build/libnvidia-ml-driver.so",
            "-Wl,--as-needed",
            "-Wl,-rpath,$ORIGIN/drv:/usr/local/nvidia/lib64/drv",
            "-Wl,--enable-new-dtags",
            HIDDEN_TABLES,
            *OLD_LIBC,
        ),
        prelude=GLIBC_HEADER,
        needs=("nvml-driver-stub",),
    ),
    # The fallback for places where the real libraries keep their names: both shims in one, and dlsym.
    Library(
        "preload",
        "preload/libvcuda-preload.so",
        (*TENANT_FOLDERS, *CUDA_FOLDERS, "vcuda/src/nvml", "vcuda/src/preload"),
        INCLUDES,
        "libvcuda-preload.so",
        link=(f"-Wl,--version-script={ROOT / 'vcuda/src/preload/preload.map'}", *OLD_LIBC),
        prelude="vcuda/src/preload/names.h",
        machines=("x86_64",),  # its dlsym jumps by that machine's registers
    ),
    # Inside containers whose image knows nothing of us: linked statically, it asks no C library for anything.
    Library(
        "mine",
        "bin/vcuda",
        (*TENANT_FOLDERS, "vcuda/src/report", "vcuda/src/mine"),
        INCLUDES,
        "",
        link=("-static", "-s"),
        program=True,
    ),
    Library(
        "sim-cuda",
        f"sim/libcuda.so.{SIM_DRIVER_VERSION}",
        ("vcuda/sim/src/core", "vcuda/sim/src/cuda"),
        SIM_INCLUDES,
        "libcuda.so.1",
        # As NVIDIA's libcuda: its calls to its own functions never leave it. (NVML's do, there and here.)
        link=("-Wl,-Bsymbolic", *OLD_LIBC),
        prelude=GLIBC_HEADER,
        links=(("libcuda.so.1", f"libcuda.so.{SIM_DRIVER_VERSION}"), ("libcuda.so", "libcuda.so.1")),
    ),
    Library(
        "sim-nvml",
        f"sim/libnvidia-ml.so.{SIM_DRIVER_VERSION}",
        ("vcuda/sim/src/core", "vcuda/sim/src/nvml"),
        SIM_INCLUDES,
        "libnvidia-ml.so.1",
        link=OLD_LIBC,
        prelude=GLIBC_HEADER,
        links=(
            ("libnvidia-ml.so.1", f"libnvidia-ml.so.{SIM_DRIVER_VERSION}"),
            ("libnvidia-ml.so", "libnvidia-ml.so.1"),
        ),
    ),
    Library(
        "sim-cuda-newer",
        f"sim/newer/libcuda.so.{SIM_NEWER_VERSION}",
        ("vcuda/sim/src/core", "vcuda/sim/src/cuda", "vcuda/sim/src/newer"),
        SIM_INCLUDES,
        "libcuda.so.1",
        link=("-Wl,-Bsymbolic", *OLD_LIBC),
        prelude=GLIBC_HEADER,
        shipped=False,
    ),
    Library(
        "sim-nvml-newer",
        f"sim/newer/libnvidia-ml.so.{SIM_NEWER_VERSION}",
        ("vcuda/sim/src/core", "vcuda/sim/src/nvml", "vcuda/sim/src/nvml_newer"),
        SIM_INCLUDES,
        "libnvidia-ml.so.1",
        link=OLD_LIBC,
        prelude=GLIBC_HEADER,
        shipped=False,
    ),
    # For programs built where no driver is: `gcc program.c -L .../stubs -lcuda`. Never loaded.
    Library("cuda-stub", "stubs/libcuda.so", (), (), "libcuda.so.1", needs=("sim-cuda",), stub_names="cu[A-Z]"),
    Library(
        "nvml-stub",
        "stubs/libnvidia-ml.so",
        (),
        (),
        "libnvidia-ml.so.1",
        needs=("sim-nvml",),
        stub_names="nvml[A-Z]",
    ),
)

# The cffi module: the same C code that tenants run; and the arbiter, the extender's loops and what the daemon asks of its host, which no
# tenant loads.
NATIVE_FOLDERS = (
    *TENANT_FOLDERS,
    *(f"vcuda/src/{folder}" for folder in ("report", "gate", "arbiter", "scheduler", "host")),
)


def compile_flags(library: Library) -> list[str]:
    """Everything on the compiler's command line but the source and the object."""
    return [
        *C_FLAGS,
        f'-DVC_SIM_DRIVER_VERSION="{SIM_DRIVER_VERSION}"',
        *(("-include", str(ROOT / library.prelude)) if library.prelude else ()),
        *(f"-I{ROOT / folder}" for folder in library.include_folders),
    ]


def link_command(library: Library, objects: Iterable[Path], output: Path, out: Path) -> list[str]:
    return [
        *gcc.compiler(),
        *(() if library.program else (*LINK_FLAGS, f"-Wl,-soname,{library.soname}")),
        *("-o", str(output)),
        *(str(path) for path in objects),
        *(part.replace("{out}", str(out)) for part in library.link),
    ]


def fingerprint(library: Library, out: Path) -> str:
    """Hash of every input and of the compiler's command line: what decides whether a library is stale. The same in every checkout."""
    words = [*gcc.compiler(), *C_FLAGS, *LINK_FLAGS, *library.link, library.stub_names]
    digest = hashlib.sha256(" ".join(words).replace(str(ROOT), "").encode())
    for path in [*library.inputs(), *(_stubbed(library, out) if library.stub_names else ())]:
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _stubbed(library: Library, out: Path) -> list[Path]:
    return [out / other.output for other in LIBRARIES if other.name in library.needs]


def stub_source(library: Library, out: Path) -> str:
    """C code with an empty function for every export that a program may want to link against."""
    shape = re.compile(library.stub_names)
    lines = ["/* Link-time stub: names only. */"]
    for path in _stubbed(library, out):
        command = [os.environ.get("NM", "nm"), "-D", "-P", "--defined-only", str(path)]
        result = gcc.run(command, f"cannot list the exports of {path}")
        names = {line.split()[0].partition("@")[0] for line in result.stdout.splitlines() if line}
        lines += [
            f'__attribute__((visibility("default"))) void {name}(void);\nvoid {name}(void) {{}}'
            for name in sorted(names)
            if shape.match(name)
        ]
    return "\n".join(lines) + "\n"


def replace_link(path: Path, target: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(path)


def _is_fresh(library: Library, out: Path) -> bool:
    output = out / library.output
    stamp = _stamp(output)
    return output.exists() and stamp.exists() and stamp.read_text() == fingerprint(library, out)


def _stamp(output: Path) -> Path:
    return output.with_name(f".{output.name}.inputs")


def _begin(library: Library, objects: gcc.Objects) -> list[Future[Path]]:
    return objects.begin(library.sources(), compile_flags(library), f"cannot build {library.name}")


def _finish(library: Library, objects: Iterable[Path], out: Path) -> None:
    """Link one library, put it in its place at once (a mapped old file is never overwritten), and note of what it is."""
    output = out / library.output
    wanted = fingerprint(library, out)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as folder:
        made = Path(folder, output.name)
        gcc.run(link_command(library, objects, made, out), f"cannot build {library.name}")
        made.chmod(0o755)
        made.replace(output)
    for link, target in library.links:
        replace_link(output.with_name(link), target)
    for stale in output.parent.glob(f"{output.name.partition('.so.')[0]}.so.*.*.*"):
        if stale != output and not stale.is_symlink():
            stale.unlink()  # of another version; the simulated driver is found by its name
    _stamp(output).write_text(wanted)


def build(out: Path, names: Sequence[str] | None = None) -> list[str]:
    """Build the named libraries (all by default) below `out`; return the names of those that were stale.

    All cores compile. Raises BuildError with the compiler's words, KeyError for an unknown name.
    """
    if not (ROOT / NATIVE_FOLDERS[0]).is_dir():
        raise gcc.BuildError(f"{ROOT} holds no sources: this is an installed copy, whose libraries came with it")
    known = {library.name: library for library in LIBRARIES}
    chosen = [known[name] for name in (known if names is None else with_needs(names, known))]
    ordered = [library for library in chosen if not library.machines or gcc.machine() in library.machines]
    made = []
    with tempfile.TemporaryDirectory(prefix="vcuda-build-") as folder, gcc.Objects(Path(folder)) as objects:
        # What a stub is made of is known when the library that it stands for is there.
        begun = {
            library: _begin(library, objects)
            for library in ordered
            if not library.stub_names and not _is_fresh(library, out)
        }
        for library in ordered:
            if library.stub_names and not _is_fresh(library, out):
                source = Path(folder, f"{library.name}.c")
                source.write_text(stub_source(library, out))
                begun[library] = objects.begin([source], C_FLAGS, f"cannot build {library.name}")
            if library in begun:
                _finish(library, [each.result() for each in begun[library]], out)
                made.append(library.name)
    return made


def install(built: Path, target: Path) -> None:
    """Copy what belongs into an installation from `built` to `target`: no links (a wheel has none), no stamps, nothing for debuggers.

    The build ID stays, by which the same build's library in a checkout explains a core file. Raises BuildError, OSError.
    """
    for library in LIBRARIES:
        if library.shipped and (built / library.output).exists():
            (target / library.output).parent.mkdir(parents=True, exist_ok=True)
            strip(built / library.output, target / library.output)


def strip(library: Path, target: Path) -> None:
    """Write the library to `target` without what only debuggers read. Raises BuildError."""
    command = [os.environ.get("STRIP", "strip"), "--strip-debug", "-o", str(target), str(library)]
    gcc.run(command, f"cannot strip {library}")


def with_needs(names: Iterable[str], known: dict[str, Library]) -> list[str]:
    ordered: list[str] = []
    for name in names:
        for required in (*known[name].needs, name):
            if required not in ordered:
                ordered.append(required)
    return ordered
