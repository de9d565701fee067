"""The cffi module `vcuda._native` (API mode): Python's way into the very C code that tenants run."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import cffi

from vcuda._build import native  # setup.py puts the project on the path

ROOT = native.ROOT
# The region's ABI, then what Python may call; both are read by ffi.cdef verbatim.
CDEF_FILES = ("vcuda/abi/region.abi", "vcuda/abi/native.abi")


def core_sources() -> list[str]:
    """Paths relative to the project's root, as setuptools wants them."""
    folder = ROOT / native.CORE_SOURCE_FOLDER
    return [str(path.relative_to(ROOT)) for path in sorted(folder.glob("*.c"))]


def make_builder() -> cffi.FFI:
    builder = cffi.FFI()
    for name in CDEF_FILES:
        builder.cdef((ROOT / name).read_text())
    builder.set_source(
        "vcuda._native",
        '#include "vc_native.h"\n',
        sources=core_sources(),
        include_dirs=[str(ROOT / folder) for folder in native.CORE_INCLUDES],
        extra_compile_args=[
            "-std=c11",
            "-D_GNU_SOURCE",
            "-O2",
            "-fvisibility=hidden",
            "-fno-strict-aliasing",
        ],
        libraries=["pthread"],
    )
    return builder


ffibuilder = make_builder()


def build_in_place(package: Path) -> list[str]:
    """Rebuild `vcuda/_native*.so` in a checkout if the core changed; return ["native"] if it did."""
    stamp = package / "lib" / ".native.inputs"
    digest = hashlib.sha256()
    folders = [ROOT / folder for folder in native.CORE_INCLUDES]
    for path in sorted({p for f in folders for ext in ("*.c", "*.h", "*.abi", "*.def") for p in f.glob(ext)}):
        digest.update(path.read_bytes())
    if stamp.exists() and stamp.read_text() == digest.hexdigest() and list(package.glob("_native*.so")):
        return []
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "setup.py",
            "-q",
            "build_ext",
            "--build-lib",
            folder,
            "--build-temp",
            f"{folder}/t",
        ]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise native.BuildError(f"cannot build vcuda._native:\n{result.stdout}{result.stderr}")
        for made in Path(folder, "vcuda").glob("_native*.so"):
            temporary = package / f".{made.name}.new"
            shutil.copyfile(made, temporary)
            temporary.replace(package / made.name)  # a running process may have the old file mapped
    stamp.parent.mkdir(exist_ok=True)
    stamp.write_text(digest.hexdigest())
    return ["native"]
