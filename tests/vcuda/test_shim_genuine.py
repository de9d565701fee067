"""The shims before NVIDIA's genuine libraries, which answer look-ups without a card: nothing is lost, all is mapped right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import genuine, lookups
from tests.support.share import Share


def before(series: str, folder: Path) -> Share:
    try:
        return lookups.before(series, folder)
    except genuine.Unavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("flags", [1, 2, 2 | 8], ids=["lazy", "now", "deepbind"])
@pytest.mark.parametrize("series", lookups.SERIES)
def test_every_genuine_symbol_resolves_through_the_shims(series: str, flags: int, tmp_path: Path) -> None:
    share = before(series, tmp_path)
    for library, prefix in lookups.LIBRARIES.items():
        found = lookups.symbols(share, library, flags)
        assert found.asked > 300 and found.found == found.asked
        names = lookups.exports(share.lib64 / "drv" / f"{library}-driver.so.1", prefix)
        hooks = lookups.exports(share.lib64 / f"{library}.so.1", prefix)
        assert found.ours == sorted(set(names) & set(hooks))


@pytest.mark.parametrize("series", lookups.SERIES)
def test_every_look_up_maps_to_the_hook_of_what_the_driver_chose(series: str, tmp_path: Path) -> None:
    share = before(series, tmp_path)
    looked = lookups.look_ups(share)
    assert looked.asked > 20000
    assert looked.wrong == []
    # Nearly all hooks can be reached by a look-up (the driver leaves out a few old names), and no version of one escapes.
    names = lookups.exports(share.lib64 / "drv" / "libcuda-driver.so.1", "cu")
    reachable = set(names) & set(lookups.exports(share.lib64 / "libcuda.so.1", "cu"))
    assert set(looked.ours) <= reachable
    assert len(looked.ours) > 0.97 * len(reachable)
    assert share.usage().cards[0].unknown_symbols == 0


@pytest.mark.parametrize("series", lookups.SERIES)
def test_the_preload_library_answers_as_the_driver_but_for_the_hooks(series: str, tmp_path: Path) -> None:
    try:
        found, looked = lookups.preloaded(series, tmp_path)
    except genuine.Unavailable as reason:
        pytest.skip(str(reason))
    assert found.asked > 500 and found.found == found.asked
    assert len(found.ours) > 140 and len(looked.ours) > 0.95 * len(found.ours)
    assert looked.asked > 10000
    assert looked.wrong == []
