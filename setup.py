"""setuptools takes cffi modules, native libraries and wheels' tags only from here; the rest is in pyproject.toml."""

from __future__ import annotations

import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # PEP 517 builds do not put the project itself on the path

from vcuda._build import ffi, native, tag  # noqa: E402

PACKAGE = ROOT / "vcuda"
PYTHON = "cp311"  # the oldest of requires-python; the cffi module keeps to the limited API


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
            for module in Path(self.build_lib, "vcuda").glob("_native.*.so"):
                native.strip(module, module)


class Wheel(bdist_wheel):
    """Named by what the built files need: any Python from `PYTHON` on, and the glibc that they ask for."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return python, abi, tag.platform(platform, Path(self.bdist_dir).rglob("*.so*"))


setup(
    cffi_modules=["vcuda/_build/ffi.py:ffibuilder"],
    cmdclass={"build_ext": BuildExt, "bdist_wheel": Wheel},
    options={} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"bdist_wheel": {"py_limited_api": PYTHON}},
)
