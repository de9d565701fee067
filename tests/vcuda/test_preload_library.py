"""The preload library as a file: what it exports, what it needs, that loading it runs nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.share import LIB

PRELOAD = LIB / "preload" / "libvcuda-preload.so"


def test_exactly_both_shims_hooks_and_the_loaders_functions_are_exported() -> None:
    def exported(path: Path) -> set[str]:
        listed = subprocess.run(
            ["nm", "-D", "--defined-only", "-P", str(path)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        # Without the version nodes themselves.
        return {row[0] for line in listed.splitlines() if (row := line.split())[1] != "A"}

    shims = exported(LIB / "shim/libcuda.so.1") | exported(LIB / "shim/libnvidia-ml.so.1")
    loaders = {
        f"{name}{version}"
        for name, old in {"dlsym": "2.2.5", "dlvsym": "2.2.5", "dlopen": "2.2.5", "dlmopen": "2.3.4"}.items()
        for version in (f"@GLIBC_{old}", "@@GLIBC_2.34")
    }
    assert exported(PRELOAD) == shims | loaders


def test_the_file_needs_libc_only_and_runs_nothing_when_it_is_loaded() -> None:
    dynamic = subprocess.run(
        ["readelf", "-dSW", str(PRELOAD)], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    needed = {line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line}
    assert needed <= {"libc.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2"}
    assert "NODELETE" in dynamic and "BIND_NOW" in dynamic and "TEXTREL" not in dynamic
    rows = [
        line.replace("[ ", "[").split()
        for line in dynamic.splitlines()
        if ".init_array" in line or "INIT_ARRAY " in line
    ]
    sizes = [int(row[5], 16) for row in rows if row[1] == ".init_array"]
    assert sizes == [8]  # the C runtime's own
    undefined = subprocess.run(
        ["nm", "-D", "--undefined-only", "-P", str(PRELOAD)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    names = {line.split()[0].partition("@")[0] for line in undefined.splitlines()}
    assert not names & {
        "sigaction",
        "signal",
        "exit",
        "_exit",
        "abort",
        "getenv",
        "dlsym",
        "dlvsym",
        "dlopen",
    }
