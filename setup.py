"""setuptools takes cffi modules and the native libraries only from here; everything else is in pyproject.toml."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # PEP 517 builds do not put the project itself on the path

from vcuda._build import ffi, native  # noqa: E402

PACKAGE = ROOT / "vcuda"


class BuildExt(build_ext):
    """Compile the shims, stubs and the simulated driver beside the cffi module."""

    def run(self) -> None:
        in_place = self.inplace  # a checkout, editable: `python -m vcuda._build` keeps it fresh from here on
        folder = PACKAGE / "lib" if in_place else Path(self.build_temp).absolute() / "native"
        with ThreadPoolExecutor(1) as beside:  # setuptools compiles the module's sources one after the other
            built = beside.submit(native.build, folder)
            super().run()
            built.result()
        if in_place:
            ffi.stamp(PACKAGE)
        else:
            native.install(folder, Path(self.build_lib) / "vcuda" / "lib")


setup(
    cffi_modules=["vcuda/_build/ffi.py:ffibuilder"],
    cmdclass={"build_ext": BuildExt},
)
