"""`kubectl vcuda nodes`: the nodes' cards and what is booked on them, as their daemons publish it; no page is asked."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from typing import Any

from vcuda.kubectl import output
from vcuda.kubectl.cluster import Cluster, ready
from vcuda.printable import printable
from vcuda.spec import bookings, inventory
from vcuda.spec.errors import SpecError
from vcuda.spec.names import NODE_SELECTOR_LABEL, NODE_SELECTOR_VALUE
from vcuda.spec.units import BLOCK_BYTES, CORES_PER_CARD, format_bytes


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("node", nargs="?", metavar="NODE", help="this node alone")


def run(cluster: Cluster, options: argparse.Namespace) -> int:
    nodes = [cluster.node(options.node)] if options.node else cluster.nodes()
    daemons = cluster.daemons()
    rows = [row for node in nodes if (row := _row(cluster, node, daemons)) is not None]
    if options.json:
        output.as_json(rows)
    elif options.node and rows and rows[0]["cards"]:
        _show_cards(rows[0])
    elif rows:
        _show(rows)
    else:
        output.say("no node has cards, or the label nvidia-device-enable=enable that a daemon needs")
    return 0


def _row(cluster: Cluster, node: Mapping[str, Any], daemons: Mapping[str, Any]) -> dict[str, Any] | None:
    metadata = node["metadata"]
    annotations, labels = metadata.get("annotations") or {}, metadata.get("labels") or {}
    name, daemon = metadata["name"], daemons.get(metadata["name"])
    text = annotations.get(cluster.names.inventory)
    if text is None and daemon is None and labels.get(NODE_SELECTOR_LABEL) != NODE_SELECTOR_VALUE:
        return None
    problem, cards = "", list[dict[str, Any]]()
    if daemon is None:
        problem = "no daemon"
    elif not ready(daemon):
        problem = "daemon not ready"
    try:
        cards = _cards(text, annotations.get(cluster.names.bookings))
    except SpecError as error:
        problem = error.message
    return {"node": name, "problem": problem or ("" if cards else "no cards"), "cards": cards}


def _cards(text: str | None, booked: str | None) -> list[dict[str, Any]]:
    used: dict[str, list[int]] = {}
    pods = Counter[str]()
    for uses in bookings.decode(booked).pods.values() if booked else ():
        for uuid, (cores, blocks) in uses.items():
            total = used.setdefault(uuid, [0, 0])
            total[0], total[1] = total[0] + cores, total[1] + blocks
            pods[uuid] += 1
    return [
        {
            "uuid": card.uuid, "minor": card.minor, "model": card.model, "healthy": card.healthy,
            "why": card.why,
            "cores": CORES_PER_CARD, "booked_cores": used.get(card.uuid, [0, 0])[0],
            "memory_bytes": card.memory_bytes, "booked_memory_bytes": used.get(card.uuid, [0, 0])[1] * BLOCK_BYTES,
            "pods": pods[card.uuid],
        }
        for card in (inventory.decode(text) if text else ())
    ]  # fmt: skip


def _show(rows: list[dict[str, Any]]) -> None:
    def line(row: dict[str, Any]) -> list[object]:
        cards = row["cards"]
        well = sum(card["healthy"] for card in cards)
        models = sorted({card["model"] for card in cards})
        cores, memory = _sums(cards)
        return [row["node"], ", ".join(models), f"{well}/{len(cards)}", cores, memory, row["problem"] or "ok"]

    output.table(["node", "model", "cards", "cores", "memory", "state"], [line(row) for row in rows])


def _show_cards(row: dict[str, Any]) -> None:
    output.table(
        ["card", "uuid", "model", "cores", "memory", "pods", "state"],
        [
            [
                card["minor"],
                card["uuid"],
                card["model"],
                *_sums([card]),
                card["pods"],
                "ok" if card["healthy"] else "UNHEALTHY",
            ]
            for card in row["cards"]
        ],
    )
    for card in row["cards"]:
        if card["why"]:
            print(f"card {card['minor']} is unhealthy: {printable(card['why'])}")
    if row["problem"]:
        output.say(f"node {row['node']}: {row['problem']}")


def _sums(cards: list[dict[str, Any]]) -> tuple[str, str]:
    """Booked of what there is: cores, memory."""
    names = ("booked_cores", "cores", "booked_memory_bytes", "memory_bytes")
    cores, all_cores, size, all_size = (sum(card[name] for card in cards) for name in names)
    return f"{cores}/{all_cores}", f"{format_bytes(size)}/{format_bytes(all_size)}"
