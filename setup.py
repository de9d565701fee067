"""setuptools takes cffi modules and the native libraries only from here; everything else is in pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # PEP 517 builds do not put the project itself on the path

from vcuda._build import native  # noqa: E402


class BuildExt(build_ext):
    """Compile the shims, stubs and the simulated driver beside the cffi module."""

    def run(self) -> None:
        base = ROOT if self.inplace else Path(self.build_lib)
        native.build(base / "vcuda" / "lib")
        super().run()


class BuildPy(build_py):
    """Never copy libraries of an earlier in-place build into a wheel: build_ext makes them afresh."""

    def find_data_files(self, package: str, src_dir: str) -> list[str]:
        return [name for name in super().find_data_files(package, src_dir) if "/vcuda/lib/" not in f"/{name}"]


setup(
    cffi_modules=["vcuda/_build/ffi.py:ffibuilder"],
    cmdclass={"build_ext": BuildExt, "build_py": BuildPy},
)
