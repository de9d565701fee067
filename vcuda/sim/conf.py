"""The codec of `state/machine.conf`, through which the simulated driver learns its cards.

The grammar is in vcuda/sim/src/core/sim_config.h; keys that libcuda does not know are for libnvidia-ml.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from vcuda.quoted import quoted
from vcuda.sim.cards import DEFAULT_MODEL, KNOBS, MODELS, Card, MigInstance
from vcuda.sim.errors import SimError

_TIMING_KEYS = ("context", "run_to_completion", *KNOBS)


def machine_conf(cards: Sequence[Card], driver_version: str, cuda_version: int, memory_limits: str = "none") -> str:
    """The text of `state/machine.conf`; its grammar is in vcuda/sim/src/core/sim_config.h."""
    lines = [
        "# The simulated machine's cards. Written by vcuda.sim when the machine was made; read by its driver.",
        _line(
            "driver",
            {
                "version": driver_version,
                "cuda": cuda_version,
                "pid_namespace": Path("/proc/self/ns/pid").stat().st_ino,
                "memory_limits": memory_limits,
            },
        ),
    ]
    lines += [_line("card", _card_keys(card)) for card in cards]
    lines += [_line("card", _mig_keys(card, instance)) for card in cards for instance in card.mig]
    return "\n".join(lines) + "\n"


def _card_keys(card: Card) -> dict[str, object]:
    model = card.model
    return {
        "index": card.index,
        "minor": card.minor,
        "uuid": card.uuid,
        "model": card.name,
        "memory": card.memory_bytes,
        "pci": card.bus,
        "numa": card.numa_node,
        "cc": "{}.{}".format(*model.compute_capability),
        "sms": model.multiprocessors,
        "mig": int(card.mig_mode),
        **dict(card.timing),
        "sm_clock": model.sm_clock,
        "memory_clock": model.memory_clock,
        "bus_width": model.bus_width,
        "power_limit": model.power_limit,
        "pci_device": model.pci_device,
        "nvlinks": model.nvlinks,
        "mig_capable": int(model.mig),
        **({"links": ",".join(f"{peer}:{kind}" for peer, kind in card.links)} if card.links else {}),
    }


def _mig_keys(card: Card, instance: MigInstance) -> dict[str, object]:
    return {
        **_card_keys(card),
        "index": instance.index,
        "parent": card.index,
        "profile": instance.profile,
        "caps": ",".join(str(minor) for minor in instance.caps),
        "uuid": instance.uuid,
        "memory": instance.memory_bytes,
        "sms": instance.multiprocessors,
        "mig": 0,
        "gi": instance.gpu_instance,
        "ci": instance.compute_instance,
        "slices": instance.slices,
        "memory_slices": instance.memory_slices,
        "start": instance.start,
    }


def _line(statement: str, keys: Mapping[str, object]) -> str:
    words = (f'{key}="{value}"' if " " in str(value) else f"{key}={value}" for key, value in keys.items())
    return " ".join([statement, *words])


def parse_machine_conf(text: str) -> tuple[str, tuple[Card, ...]]:
    """The driver version and the cards of a machine.conf that this module wrote. Raises SimError naming the line."""
    version = ""
    cards: dict[int, Card] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            statement, *words = shlex.split(line)
            keys = dict(word.split("=", 1) for word in words)
            if statement == "driver":
                version = keys["version"]
            elif "parent" in keys:
                parent = int(keys["parent"])
                cards[parent] = dataclasses.replace(cards[parent], mig=(*cards[parent].mig, _parse_mig(keys)))
            else:
                cards[int(keys["index"])] = _parse_card(keys)
        except (ValueError, KeyError) as error:
            raise SimError(
                f"machine.conf line {number} is damaged ({quoted(error, 80)}); create the machine again"
            ) from error
    if not version or not cards:
        raise SimError("machine.conf names no driver or no card; create the machine again")
    return version, tuple(cards[index] for index in sorted(cards))


def _parse_card(keys: Mapping[str, str]) -> Card:
    links = (pair.split(":") for pair in keys["links"].split(",")) if "links" in keys else ()
    return Card(
        index=int(keys["index"]),
        minor=int(keys["minor"]),
        uuid=keys["uuid"],
        name=keys["model"],
        model=MODELS.get(keys["model"], MODELS[DEFAULT_MODEL]),
        memory_bytes=int(keys["memory"]),
        numa_node=int(keys["numa"]),
        bus=keys["pci"],
        mig_mode=keys["mig"] == "1",
        links=tuple((int(peer), kind) for peer, kind in links),
        timing=tuple((key, _number_or_word(keys[key])) for key in _TIMING_KEYS if key in keys),
    )


def _number_or_word(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _parse_mig(keys: Mapping[str, str]) -> MigInstance:
    first, second = keys["caps"].split(",")
    return MigInstance(
        index=int(keys["index"]),
        uuid=keys["uuid"],
        profile=keys["profile"],
        slices=int(keys["slices"]),
        memory_slices=int(keys["memory_slices"]),
        start=int(keys["start"]),
        gpu_instance=int(keys["gi"]),
        compute_instance=int(keys["ci"]),
        memory_bytes=int(keys["memory"]),
        multiprocessors=int(keys["sms"]),
        caps=(int(first), int(second)),
    )
