"""The shims as files: exactly the hooks are exported, the alias is needed, nothing of Python or of the core leaks."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import share as shares
from tests.support.share import LIB
from vcuda.driver import exports
from vcuda.sim import Machine, SimCard

SOURCES = LIB.parent / "src"
SHIMS = {
    "libcuda.so.1": (SOURCES / "cuda" / "driver", "libcuda-driver.so.1"),
    "libnvidia-ml.so.1": (SOURCES / "nvml", "libnvidia-ml-driver.so.1"),
}


def output_of(*command: object) -> str:
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=60, check=True)
    return result.stdout


def intended(folder: Path) -> set[str]:
    """The names of the hook table, by the preprocessor that makes the exports of it."""
    program = "\n".join(
        (
            "#define VC_HOOK(name, parameters, arguments) hook: name;",
            "#define VC_REAL(name, parameters)",
            "#define VC_SETTER(name) hook: name;",
            f'#include "{folder}/hooks.def"',
        )
    )
    expanded = subprocess.run(
        ["gcc", "-E", "-P", "-x", "c", "-"],
        input=program,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    names = [part.split(":")[1].strip() for part in expanded.split(";") if ":" in part]
    assert len(names) == len(set(names)), "a hook is listed twice"
    return set(names)


def exported(path: Path) -> set[str]:
    lines = output_of("nm", "-D", "--defined-only", "-P", path).splitlines()
    return {line.split()[0] for line in lines}


@pytest.mark.parametrize("name", SHIMS)
def test_exactly_the_hooks_are_exported(name: str) -> None:
    assert exported(LIB / "shim" / name) == intended(SHIMS[name][0])


@pytest.mark.parametrize("name", SHIMS)
def test_the_real_driver_is_needed_by_its_alias_and_found_beside_the_shim(name: str) -> None:
    dynamic = output_of("readelf", "-d", LIB / "shim" / name)
    needed = [line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line]
    assert needed[0] == SHIMS[name][1]
    assert not any("python" in library for library in needed)
    assert f"[{name}]" in next(line for line in dynamic.splitlines() if "(SONAME)" in line)
    assert "[$ORIGIN/drv:/usr/local/nvidia/lib64/drv]" in dynamic
    assert "RPATH" not in dynamic
    assert "NODELETE" in dynamic and "BIND_NOW" in dynamic
    assert "TEXTREL" not in dynamic


@pytest.mark.parametrize("name", SHIMS)
def test_no_python_symbols_and_no_constructors_of_ours(name: str) -> None:
    path = LIB / "shim" / name
    undefined = output_of("nm", "-D", "--undefined-only", "-P", path)
    assert "Py" not in undefined
    assert not any(name in undefined.split() for name in ("sigaction", "signal", "exit", "_exit", "abort", "getenv"))
    # One entry each: the C runtime's frame_dummy.
    sections = output_of("readelf", "-SW", path)
    sizes = [int(line.split()[6], 16) for line in sections.replace("[ ", "[").splitlines() if ".init_array" in line]
    assert sizes == [8]


@pytest.mark.parametrize("name", SHIMS)
def test_names_that_the_driver_lacks_are_not_found_in_a_share(name: str, tmp_path: Path) -> None:
    """numba takes cuCtxSynchronize_v2 for granted where the library has that name."""
    machine = Machine.create(tmp_path / "machine", [SimCard()])
    share = shares.simulated(tmp_path / "share", machine, [shares.limit(machine)])
    real = machine.library_folder / f"{name.removesuffix('.so.1')}.so.{machine.driver_version}"
    ours, drivers = intended(SHIMS[name][0]), exported(real)
    found = share.run(f"""
        library = C.CDLL({name!r})
        answer([name for name in {sorted(ours)!r} if hasattr(library, name)])
    """)
    assert found == sorted(ours & drivers) and ours - drivers


def test_a_driver_that_cannot_be_read_takes_no_name_away(tmp_path: Path) -> None:
    for number, content in enumerate((b"", b"no library", b"\x7fELF\x02\x01" + b"\xff" * 100, b"\x7fELF\x02\x01")):
        real, shim = tmp_path / f"real{number}", tmp_path / f"shim{number}"
        real.write_bytes(content)
        shutil.copy(LIB / "shim" / "libcuda.so.1", shim)
        exports.hide_missing(shim, real)
        assert shim.read_bytes() == (LIB / "shim" / "libcuda.so.1").read_bytes()


def test_a_program_links_against_the_stubs(tmp_path: Path) -> None:
    source = tmp_path / "program.c"
    source.write_text(
        "int cuInit(unsigned); int cuMemAlloc_v2(unsigned long long *, unsigned long); int nvmlInit_v2(void);\n"
        "int main(void) { unsigned long long p; return cuInit(0) + cuMemAlloc_v2(&p, 1) + nvmlInit_v2(); }\n"
    )
    output_of("gcc", "-o", tmp_path / "program", source, f"-L{LIB / 'stubs'}", "-lcuda", "-lnvidia-ml")
    dynamic = output_of("readelf", "-d", tmp_path / "program")
    assert "[libcuda.so.1]" in dynamic and "[libnvidia-ml.so.1]" in dynamic


OLDEST_LIBC = (2, 17)
LOADED_INTO_TENANTS = ("shim/libcuda.so.1", "shim/libnvidia-ml.so.1", "preload/libvcuda-preload.so")


@pytest.mark.parametrize("name", LOADED_INTO_TENANTS)
def test_images_with_an_old_c_library_can_load_it(name: str) -> None:
    """Distributions of 2014 and later. The loader refuses a library that needs a version which the image's libc lacks."""
    references = output_of("objdump", "-p", LIB / name).split("Version References:")[1]
    needed = [tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_([0-9.]+)", references)]
    assert max(needed) <= OLDEST_LIBC
    dynamic = output_of("readelf", "-d", LIB / name)
    for holder in ("libdl.so.2", "libpthread.so.0"):  # before glibc 2.34 some of the functions are in there
        assert f"[{holder}]" in dynamic
