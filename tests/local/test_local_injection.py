"""Whether our library is found, by every way that a program may come to the driver, with the daemon's own mounts in a container's root."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from manager.audit.shim_bypass import LASTING_LOOKS, BypassWatch
from manager.cards.driver import CardProcess
from tests.support import groups, injection
from tests.support.injection import Place, Row


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    # Not below pytest's own folder: other users start programs there, and the next pytest that begins closes it to them.
    folder = Path(tempfile.mkdtemp(prefix="vcuda-injection-"))
    try:
        yield injection.make(folder)
    except injection.NoContainers as reason:
        pytest.skip(str(reason))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("row", injection.ROWS, ids=lambda row: row.name)
def test_a_way_to_the_driver_is_limited_or_is_a_known_escape(place: Place, row: Row) -> None:
    found = [place.outcome(row, one) for one in ("shim", "preload")]
    assert found == ["limited" if held else "escapes" for held in (row.shim, row.preload)]


@pytest.mark.parametrize("row", injection.ROWS, ids=lambda row: row.name)
def test_no_way_leads_past_the_driver_s_own_limit(place: Place, row: Row) -> None:
    with groups.made("vcuda-injection") as group:
        if not (row.shim and row.preload):  # as above: the escape, in the same group
            assert "escapes" in [place.outcome(row, one, group) for one in ("shim", "preload")]
        groups.limit(place.machine, group, injection.LIMIT)
        assert [place.outcome(row, one, group) for one in ("shim", "preload")] == ["limited", "limited"]


class Owner:
    """The processes that a container's first process became or started."""

    def __init__(self, key: tuple[str, str], first: int) -> None:
        self.key, self.first = key, first

    def container(self, pid: int, uuid: str = "") -> tuple[str, str] | None:  # noqa: ARG002
        return self.key if pid == self.first else None


@pytest.mark.parametrize(("way", "processes"), [("open $REAL", 1), ("open", 0)], ids=["escape", "in order"])
def test_the_manager_sees_an_escape_by_what_is_mapped(place: Place, way: str, processes: int) -> None:
    container = subprocess.Popen(
        place.words(f"HOLD=1 exec $P {way}", "shim"),
        env={"PATH": os.environ["PATH"]},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert container.stdout and container.stdout.readline() in ("0\n", "2\n")
    told: list[str] = []
    watch = BypassWatch(lambda _, __, message: told.append(message))
    card = place.item.shares[0].uuid
    held = {card: [CardProcess(container.pid, 1)]}
    for _ in range(LASTING_LOOKS):
        counts = watch.look([place.item], Owner(place.item.key, container.pid), held)
    container.communicate("\n", timeout=60)
    assert counts == {(place.item.key, card): processes}
    assert len(told) == processes
    assert all(f"process {container.pid} (probe)" in message for message in told)


def test_nothing_stays_mounted(place: Place) -> None:
    place.run("true", "shim")
    assert str(place.folder) not in Path("/proc/self/mounts").read_text()
