"""Oversell through the daemon: the annotation reaches the region, survives a restart, and a bad one is refused with its name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.manager.manager_kubelet import Rejected
from tests.manager.manager_pods import NAMES, container, pod
from tests.manager.manager_support import Node
from vcuda import region
from vcuda.sim import Machine
from vcuda.spec.units import BLOCK_BYTES


def test_an_oversold_container_has_its_share_and_its_quota(machine: Machine, make_node: Callable[..., Node]) -> None:
    node = make_node(machine.root)
    node.kubelet.start()
    node.start(wait=200)
    item = pod("a", container("c", 30, 4), container("d", 30, 4), annotations={NAMES.oversell: "c=10"})
    node.kubelet.admit(item)

    def limits() -> list[tuple[int, int | None]]:
        cards = [region.read_limits(node.region(item, name))[0] for name in "cd"]
        return [
            (card.memory_bytes // BLOCK_BYTES, card.physical_bytes and card.physical_bytes // BLOCK_BYTES)
            for card in cards
        ]

    assert limits() == [(10, 4), (4, None)]
    node.stop()
    daemon = node.start(wait=200)
    assert [item.oversell_blocks for item in daemon.allocator.allocations] == [10, 0]
    other = pod("b", container("c", 30, 4))
    node.kubelet.admit(other)  # tells the first ones that they have neighbours
    assert limits() == [(10, 4), (4, None)]


def test_an_oversell_below_the_share_is_refused(machine: Machine, make_node: Callable[..., Node]) -> None:
    node = make_node(machine.root)
    node.kubelet.start()
    daemon = node.start(wait=200)
    with pytest.raises(Rejected, match="vcuda-oversell gives container 'c' 2 blocks in all, fewer than the 4"):
        node.kubelet.admit(pod("a", container("c", 30, 4), annotations={NAMES.oversell: "c=2"}))
    assert daemon.allocator.allocations == ()
