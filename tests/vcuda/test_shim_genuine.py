"""The shims before NVIDIA's genuine libraries, which answer look-ups without a card: nothing is lost, all is mapped right."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import genuine
from tests.support import share as shares
from tests.support.share import MIB, Share
from vcuda import region

SERIES = ["535", "550"]
LIMIT = region.CardLimit("GPU-00000000-0000-0000-0000-000000000000", 0, 256 * MIB, 50, 50)


def before(series: str, folder: Path) -> Share:
    try:
        share = shares.lay_out(folder / "share", genuine.libcuda(series), genuine.libnvidia_ml(series))
    except genuine.Unavailable as reason:
        pytest.skip(str(reason))
    share.region_directory.mkdir()
    region.create(share.region_directory, [LIMIT])
    return share


def exports(library: Path, prefix: str) -> list[str]:
    command = ["nm", "-D", "--defined-only", "-P", str(library)]
    lines = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True
    ).stdout.splitlines()
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


@pytest.mark.parametrize("flags", [1, 2, 2 | 8], ids=["lazy", "now", "deepbind"])
@pytest.mark.parametrize("series", SERIES)
def test_every_genuine_symbol_resolves_through_the_shims(series: str, flags: int, tmp_path: Path) -> None:
    share = before(series, tmp_path)
    for name, prefix in (("cuda", "cu"), ("nvidia-ml", "nvml")):
        shim, alias = share.lib64 / f"lib{name}.so.1", share.lib64 / "drv" / f"lib{name}-driver.so.1"
        names = exports(alias, prefix)
        assert len(names) > 300
        result = subprocess.run(
            [sys.executable, "-c", RESOLVE, str(shim), str(alias), str(flags)],
            input=json.dumps(names),
            env=share.environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        resolved, differing = json.loads(result.stdout)
        assert resolved == len(names)
        assert differing == sorted(set(names) & set(exports(shim, prefix)))


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


@pytest.mark.parametrize("series", SERIES)
def test_every_look_up_maps_to_the_hook_of_what_the_driver_chose(series: str, tmp_path: Path) -> None:
    share = before(series, tmp_path)
    alias = share.lib64 / "drv" / "libcuda-driver.so.1"
    process = share.start(LOOK_UPS, str(alias))
    names = exports(alias, "cu")
    output, said = process.communicate(json.dumps(names), timeout=60)
    assert (process.returncode, said) == (0, "")
    checked, wrong, hooked = json.loads(output)
    assert checked > 20000
    assert wrong == []
    # Nearly all hooks can be reached by a look-up (the driver leaves out a few old names), and no version of one escapes.
    reachable = set(names) & set(exports(share.lib64 / "libcuda.so.1", "cu"))
    assert set(hooked) <= reachable
    assert len(hooked) > 0.97 * len(reachable)
    assert share.usage().cards[0].unknown_symbols == 0
