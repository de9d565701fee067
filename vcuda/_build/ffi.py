"""The cffi module `vcuda._native` (API mode): Python's way into the very C code that tenants run."""

from __future__ import annotations

import contextlib
import hashlib
import io
import sysconfig
import tempfile
from pathlib import Path

import cffi

from vcuda._build import gcc, native  # setup.py puts the project on the path

ROOT = native.ROOT
STAMP = ".native.inputs"
FLAGS = (
    *("-std=c11", "-D_GNU_SOURCE", "-O2", "-fvisibility=hidden", "-fno-strict-aliasing"),
    *("-include", str(ROOT / native.GLIBC_HEADER)),
)
LINK = (*native.OLD_LIBC, "-lm")
# The region's ABI, then what Python may call; both are read by ffi.cdef verbatim.
CDEF_FILES = tuple(f"vcuda/abi/{name}.abi" for name in ("region", "native", "scheduler", "host"))


def core_sources() -> list[str]:
    """Paths relative to the project's root, as setuptools wants them."""
    folders = [ROOT / folder for folder in native.NATIVE_FOLDERS]
    return [str(path.relative_to(ROOT)) for folder in folders for path in sorted(folder.glob("*.c"))]


def make_builder() -> cffi.FFI:
    builder = cffi.FFI()
    for name in CDEF_FILES:
        builder.cdef((ROOT / name).read_text())
    builder.set_source(
        "vcuda._native",
        '#include "arbiter/native.h"\n#include "scheduler/scheduler.h"\n#include "host/device_probe.h"\n',
        sources=core_sources(),
        include_dirs=[str(ROOT / folder) for folder in native.INCLUDES],
        extra_compile_args=list(FLAGS),
        extra_link_args=list(LINK),
    )
    return builder


ffibuilder = make_builder()


def fingerprint() -> str:
    """Hash of everything that the module is made of, and how."""
    folders = [ROOT / folder for folder in native.INCLUDES]
    patterns = ("*.c", "*.h", "*.abi", "*.def")
    digest = hashlib.sha256(Path(__file__).read_bytes())
    digest.update(repr((core_sources(), LINK)).encode())
    for path in sorted({path for folder in folders for pattern in patterns for path in folder.rglob(pattern)}):
        digest.update(str(path.relative_to(ROOT)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def stamp(package: Path) -> None:
    """Note what the module in a checkout was built from."""
    path = package / "lib" / STAMP
    path.parent.mkdir(exist_ok=True)
    path.write_text(fingerprint())


def build_in_place(package: Path) -> list[str]:
    """Rebuild `vcuda/_native.abi3.so` in a checkout if the core changed; return ["native"] if it did.

    With gcc alone: the setuptools that a fresh virtual environment holds may be missing or too old for pyproject.toml.
    """
    path = package / "lib" / STAMP
    output = package / "_native.abi3.so"
    if path.exists() and path.read_text() == fingerprint() and output.exists():
        return []
    with tempfile.TemporaryDirectory(dir=package, prefix="._native.") as folder:
        generated, made = Path(folder, "_native.c"), Path(folder, output.name)
        with contextlib.redirect_stdout(io.StringIO()):  # it announces each file
            ffibuilder.emit_c_code(str(generated))
        includes = [
            sysconfig.get_paths()["include"],
            *(str(ROOT / include) for include in native.INCLUDES),
        ]
        flags = [*FLAGS, "-fPIC", *(f"-I{include}" for include in includes)]
        what = "cannot build vcuda._native (are Python's headers there? Debian: python3-dev)"
        sources = [generated, *(ROOT / source for source in core_sources())]
        with gcc.Objects(Path(folder)) as objects:
            compiled = [str(each.result()) for each in objects.begin(sources, flags, what)]
        gcc.run([*gcc.compiler(), "-shared", "-o", str(made), *compiled, *LINK], what)
        made.replace(output)  # a running process may have the old file mapped
    stamp(package)
    return ["native"]
