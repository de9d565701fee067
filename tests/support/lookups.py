"""Our libraries before NVIDIA's genuine ones, which resolve and answer look-ups without a card: what is found, and what of it is ours.

`python -m tests.support.lookups` prints the matrix of docs/clients.md.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.support import genuine
from tests.support import share as shares
from tests.support.share import LIB, MIB, Share
from vcuda import region

SERIES = ["535", "550"]
LIMIT = region.CardLimit("GPU-00000000-0000-0000-0000-000000000000", 0, 256 * MIB, 50, 50)
SECONDS = 120
LIBRARIES = {"libcuda": "cu", "libnvidia-ml": "nvml"}


def before(series: str, folder: Path) -> Share:
    """A share whose real libraries are the genuine ones. Raises genuine.Unavailable."""
    share = shares.lay_out(folder / "share", genuine.libcuda(series), genuine.libnvidia_ml(series))
    share.region_directory.mkdir()
    region.create(share.region_directory, [LIMIT])
    return share


def exports(library: Path, prefix: str) -> list[str]:
    command = ["nm", "-D", "--defined-only", "-P", str(library)]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    names = {line.split()[0].partition("@")[0] for line in lines}
    return sorted(name for name in names if re.match(prefix, name))


# Prints, for each name, whether it resolves, to which of the two libraries.
RESOLVE = """
import ctypes, json, os, sys
shim, alias, flags = sys.argv[1], sys.argv[2], int(sys.argv[3])
library, driver = ctypes.CDLL(shim, mode=flags), ctypes.CDLL(alias)
def address(library, name):
    try:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    except AttributeError:
        return None
names = json.load(sys.stdin)
ours, theirs = ({name: address(one, name) for name in names} for one in (library, driver))
print(json.dumps([sum(value is not None for value in ours.values()), [name for name in names if ours[name] != theirs[name]]]))
"""


@dataclass(frozen=True)
class Found:
    """How many of a genuine library's symbols were asked for and found, and which of them are our hooks."""

    asked: int
    found: int
    ours: list[str]


def symbols(share: Share, library: str, flags: int) -> Found:
    """Every symbol of the genuine library, through the shim, opened with these flags of dlopen."""
    shim, alias = share.lib64 / f"{library}.so.1", share.lib64 / "drv" / f"{library}-driver.so.1"
    names = exports(alias, LIBRARIES[library])
    result = subprocess.run(
        [sys.executable, "-c", RESOLVE, str(shim), str(alias), str(flags)],
        input=json.dumps(names),
        env=share.environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found, ours = json.loads(result.stdout)
    return Found(len(names), found, ours)


LOOK_UPS = """
names = json.loads(sys.stdin.read())
driver = C.CDLL(sys.argv[1])
def address(library, name):
    return C.cast(getattr(library, name), C.c_void_p).value
by_real = {address(driver, name): name for name in names}
bases = sorted({__import__("re").sub(r"(_v[0-9]+|_ptsz|_ptds)+$", "", name) for name in names})
versions = (2000, 3020, 4000, 6050, 7000, 8000, 9000, 10000, 11000, 11010, 11020, 11030, 11040, 11070, 12000, 12020, 12030, 12040, 13000, 99990)
checked, wrong, hooked = 0, [], set()
def look(library, base, version, flags):
    found, status = C.c_void_p(), C.c_int(-7)
    result = library.cuGetProcAddress_v2(base.encode(), C.byref(found), version, u64(flags), C.byref(status))
    old = C.c_void_p()
    return found.value, (result, status.value), library.cuGetProcAddress(base.encode(), C.byref(old), version, u64(flags)), old.value
for base in [*bases, "cuNoSuchFunction", "cuMemAlloc_v2", ""]:
    for version in versions:
        for flags in (0, 1, 2):
            ours, theirs = look(cu, base, version, flags), look(driver, base, version, flags)
            expected = [address(cu, by_real[pointer]) if pointer else None for pointer in (theirs[0], theirs[3])]
            checked += 1
            if [ours[0], ours[3]] != expected or ours[1:3] != theirs[1:3]:
                wrong.append([base, version, flags])
            if ours[0] != theirs[0]:
                hooked.add(by_real[theirs[0]])
answer([checked, wrong[:5], sorted(hooked)])
"""


@dataclass(frozen=True)
class Looked:
    """Look-ups by cuGetProcAddress: how many, the first wrong ones, and the hooks that were answered."""

    asked: int
    wrong: list[object]
    ours: list[str]


def look_ups(share: Share) -> Looked:
    alias = share.lib64 / "drv" / "libcuda-driver.so.1"
    process = share.start(LOOK_UPS, str(alias))
    output, said = process.communicate(json.dumps(exports(alias, "cu")), timeout=SECONDS)
    assert (process.returncode, said) == (0, ""), said
    return Looked(*json.loads(output))


# Names what dlsym and cuGetProcAddress answer: the driver's own by their place in its file, ours by our exports.
NAMED = """
import ctypes as C, json, os, re, sys
table, hooks, preload = json.load(sys.stdin)
driver = C.CDLL("libcuda.so.1")
base = min(int(line.split("-")[0], 16) for line in open("/proc/self/maps") if "libcuda.so" in line)
named = {base + value: name for name, value in sorted(table.items(), reverse=True)}
ours = C.CDLL(preload) if preload else None
if ours:
    named.update({C.cast(getattr(ours, name), C.c_void_p).value: "ours " + name for name in hooks})
symbols = {name: named.get(C.cast(getattr(driver, name), C.c_void_p).value) for name in table}
answers = []
for plain in sorted({re.sub(r"(_v[0-9]+|_ptsz|_ptds)+$", "", name) for name in table} | {"cuNoSuchFunction", "cuMemAlloc_v2", ""}):
    for version in (2000, 3020, 4000, 7000, 9000, 11000, 11040, 12000, 12030, 12040, 13000):
        for flags in (0, 1, 2):
            found, status = C.c_void_p(), C.c_int(-7)
            result = driver.cuGetProcAddress_v2(plain.encode(), C.byref(found), version, C.c_uint64(flags), C.byref(status))
            answers.append([named.get(found.value) if found.value else None, result, status.value])
print(json.dumps([symbols, answers]))
"""


def preloaded(series: str, folder: Path) -> tuple[Found, Looked]:
    """The same questions with the preload library, against the answers without it. Raises genuine.Unavailable."""
    real, preload = genuine.libcuda(series), folder / "preload" / "libvcuda-preload.so"
    preload.parent.mkdir(parents=True)
    shutil.copy(LIB / "preload" / preload.name, preload)
    (folder / "driver").mkdir()
    (folder / "driver" / "libcuda.so.1").symlink_to(real)
    (folder / "vcuda").mkdir()
    region.create(folder / "vcuda", [LIMIT])
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", "-P", str(real)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    ).stdout
    table = {
        row[0].partition("@")[0]: int(row[2], 16)
        for line in listed.splitlines()
        if re.match("cu[A-Z]", (row := line.split())[0])
    }
    hooks = sorted(set(table) & set(exports(preload, "cu")))
    plain, ours = (_named(folder, table, hooks, path) for path in (None, preload))
    right = {name: f"ours {name}" if name in hooks else name for name in table}

    def translated(name: str | None) -> str | None:
        return None if name is None else right[name]

    symbols_right = {name: translated(found) for name, found in plain[0].items()}
    resolved = Found(
        len(table),
        sum(found is not None for found in ours[0].values()),
        [name for name in table if ours[0][name] == f"ours {name}"],
    )
    wrong: list[object] = [[name, found] for name, found in ours[0].items() if found != symbols_right[name]]
    wrong += [
        [mine, theirs]
        for mine, theirs in zip(ours[1], plain[1], strict=True)
        if mine != [translated(theirs[0]), *theirs[1:]]
    ]
    names = [answer[0] for answer in ours[1] if answer[0] is not None]
    answered = sorted({name.removeprefix("ours ") for name in names if name.startswith("ours ")})
    return resolved, Looked(len(ours[1]), wrong[:5], answered)


def _named(
    folder: Path, table: dict[str, int], hooks: list[str], preload: Path | None
) -> tuple[dict[str, str | None], list[list[str | None]]]:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder / "driver")}
    if preload:
        environment["LD_PRELOAD"] = str(preload)
    result = subprocess.run(
        [sys.executable, "-c", NAMED],
        input=json.dumps([table, hooks, str(preload) if preload else None]),
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    found: tuple[dict[str, str | None], list[list[str | None]]] = json.loads(result.stdout)
    return found


def matrix(folder: Path) -> str:
    lines = [
        "| genuine library | through | symbols | found | ours | look-ups | wrong | hooks answered |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for series in SERIES:
        try:
            share = before(series, folder / series)
            for library in LIBRARIES:
                one = symbols(share, library, os.RTLD_NOW)
                row = f"| {library} {series} | shim | {one.asked} | {one.found} | {len(one.ours)} |"
                if library == "libcuda":
                    looked = look_ups(share)
                    lines.append(f"{row} {looked.asked} | {len(looked.wrong)} | {len(looked.ours)} |")
                else:
                    lines.append(f"{row} | | |")
            one, looked = preloaded(series, folder / f"{series}-preload")
            row = f"| libcuda {series} | preload | {one.asked} | {one.found} | {len(one.ours)} |"
            lines.append(f"{row} {looked.asked} | {len(looked.wrong)} | {len(looked.ours)} |")
        except genuine.Unavailable as reason:
            lines.append(f"| {series} | not run: {reason} | | | | | | |")
    return "\n".join(lines)


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="vcuda-lookups-"))
    try:
        print(matrix(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
