"""/graph of a node with eight cards in mixed use; `pytest -s` prints it."""

from __future__ import annotations

from collections.abc import Callable

from tests.manager.manager_pods import NAMES, container, eventually, pod
from tests.manager.manager_support import Node
from vcuda.sim import CardLost, Machine, SimCard

GIB = 2**30


def test_eight_cards_with_mixed_shares(make_machine: Callable[..., Machine], make_node: Callable[..., Node]) -> None:
    big, small = "NVIDIA A100-SXM4-80GB", "NVIDIA L4"
    cards = [SimCard(big, 80 * GIB, numa_node=number // 4) for number in range(6)]
    machine = make_machine(*cards, SimCard(small, 24 * GIB, numa_node=1), SimCard(small, 24 * GIB, numa_node=1))
    node = make_node(machine.root)
    node.kubelet.start()
    node.start(wait=800)
    admitted = [
        pod("train", container("worker", 200)),
        pod("notebook", container("jupyter", 30, 40), annotations={NAMES.core_limit: "80"}),
        pod("serve-a", container("model", 50, 80), container("embed", 15, 16)),
        pod("serve-b", container("model", 5, 8)),
        pod("batch", container("main", 100)),
        pod("lab", container("c", 70, 100), annotations={NAMES.policy: "spread"}),
    ]
    for item in admitted:
        node.kubelet.admit(item)
    machine.inject(CardLost(7))
    eventually(lambda: "UNHEALTHY" in node.get("/graph")[1], "the loss of a card")
    text = node.get("/graph")[1]
    print(text)
    lines = text.splitlines()
    assert lines[0].startswith("node-1  driver ")
    assert [line.strip() for line in lines if "NUMA node" in line] == ["NUMA node 0", "NUMA node 1"]
    assert sum(line.startswith("    card ") for line in lines) == 8
    assert sum("UNHEALTHY" in line for line in lines) == 1
    assert sum("booked 100/100 cores" in line for line in lines) == 3
    shares = [line.strip() for line in lines if line.strip().startswith("default/")]
    assert len(shares) == 8
    assert "default/notebook/jupyter: 30 cores (up to 80), 0 B of 10 GiB (shim)" in shares
