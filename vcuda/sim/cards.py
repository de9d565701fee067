"""What a simulated machine is made of: card models, cards, MIG instances, and how they are linked."""

from __future__ import annotations

import re
import uuid as uuids
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vcuda.quoted import quoted
from vcuda.sim.errors import SimError

GIB = 2**30
MAX_CARDS = 32  # SIM_MAX_CARDS of vcuda/sim/src/core/sim_config.h; MIG instances count
# Minors of major 195 from here on are nvidia-modeset (254), nvidiactl (255) and room the driver keeps.
FIRST_RESERVED_MINOR = 247
MIG_MEMORY_SLICES = 8
MIG_COMPUTE_SLICES = 7
# Memory slices of eight that a GPU instance of N compute slices gets (NVIDIA MIG user guide, A100 and H100 profiles).
MIG_PROFILES = {1: 1, 2: 2, 3: 4, 4: 4, 7: 8}
# How the caps driver numbers its nodes: 2 fixed ones, then per card 15 GPU instances with 8 compute instances each.
_CAP_FIRST, _CAP_PER_INSTANCE, _CAP_INSTANCES = 3, 9, 15

# Numbers, but for `pools`. The grammar and the meaning are in vcuda/sim/src/core/sim_config.h.
KNOBS = (
    "pools", "pool_seed", "context_ms", "unlisted_kib", "stream_kib", "texels", "slice_us", "slice_spread_us",
    "switch_us", "switch_spread_us", "cold_us", "cold_ppm", "drag_ppm", "gap_ns", "gap_spread_ns", "call_ns",
    "reach_ns", "event_step_ns", "event_jitter_ns", "kernel_jitter_ppm", "timing_seed",
)  # fmt: skip
# A card whose time goes otherwise than the default one's in all that a client might lean on (docs/simulated-driver.md).
SECOND_TIMING: Mapping[str, int | str] = {
    "slice_us": 1300, "slice_spread_us": 1400, "switch_us": 40, "switch_spread_us": 160, "cold_us": 100,
    "cold_ppm": 300_000, "drag_ppm": 150_000, "gap_ns": 2000, "gap_spread_ns": 6000, "event_step_ns": 500,
    "event_jitter_ns": 700, "kernel_jitter_ppm": 30_000, "timing_seed": 1,
}  # fmt: skip
# What `python -m benchmarks.card_facts` and launches timed by the host found on an H100 80GB HBM3 with driver
# 580.159.04.
H100_TIMING: Mapping[str, int | str] = {
    "slice_us": 2130, "switch_us": 137, "gap_ns": 500, "call_ns": 2500, "reach_ns": 6000,
}  # fmt: skip

_NAME = re.compile(r"[ -~]{0,62}[!-~]")
_UUID = re.compile(r"GPU-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_PROFILE = re.compile(r"(?P<slices>[12347])g(?:\.(?P<gigabytes>\d+)gb)?")
_LINK = re.compile(r"NV(?P<count>[1-9]|1[0-8])|PIX|PXB|PHB|NODE|SYS")


@dataclass(frozen=True)
class CardModel:
    """Public figures of one product, so that clients see a card they know. Clocks in MHz, power in watts."""

    name: str
    memory_bytes: int
    multiprocessors: int
    compute_capability: tuple[int, int]
    sm_clock: int
    memory_clock: int
    bus_width: int
    power_limit: int
    pci_device: int
    nvlinks: int = 0
    mig: bool = False


MODELS: dict[str, CardModel] = {
    model.name: model
    for model in (
        CardModel("NVIDIA A100-SXM4-40GB", 40 * GIB, 108, (8, 0), 1410, 1215, 5120, 400, 0x20B0, 12, True),
        CardModel("NVIDIA A100-SXM4-80GB", 80 * GIB, 108, (8, 0), 1410, 1593, 5120, 400, 0x20B2, 12, True),
        CardModel("NVIDIA H100 80GB HBM3", 80 * GIB, 132, (9, 0), 1980, 2619, 5120, 700, 0x2330, 18, True),
        CardModel("NVIDIA H200", 141 * GIB, 132, (9, 0), 1980, 3201, 6144, 700, 0x2335, 18, True),
        CardModel("NVIDIA A10", 24 * GIB, 72, (8, 6), 1695, 6251, 384, 150, 0x2236),
        CardModel("NVIDIA L4", 24 * GIB, 58, (8, 9), 2040, 6251, 192, 72, 0x27B8),
        CardModel("Tesla T4", 16 * GIB, 40, (7, 5), 1590, 5001, 256, 70, 0x1EB8),
        CardModel("Tesla V100-SXM2-16GB", 16 * GIB, 80, (7, 0), 1530, 877, 4096, 300, 0x1DB1, 6),
    )
}
DEFAULT_MODEL = "NVIDIA A100-SXM4-40GB"


@dataclass(frozen=True)
class SimCard:
    """One card to simulate.

    `model` is a name from MODELS, or any other text (then with the default model's figures); `memory_bytes` defaults to
    the model's. `uuid` and `minor` are chosen by the machine when not given. `links` maps the position of another
    card of the machine to how nvidia-smi would name the connection: "NV1".."NV18", "PIX", "PXB", "PHB", "NODE", "SYS".
    `mig` lists GPU instances by profile, for instance ("1g", "3g") or with the gigabytes, ("1g.5gb",).
    `context_bytes` is what a context costs; `slice_ns` how long one keeps the card while others wait and `switch_ns`
    what changing it costs; with `run_to_completion` a running operation is never cut at the end of its slice.
    `knobs` choose the models of what a driver is free to do, by their names in machine.conf (KNOBS), for instance
    {"pools": "ragged", "pool_seed": 7}; docs/simulated-driver.md says what each does.
    """

    model: str = DEFAULT_MODEL
    memory_bytes: int | None = None
    uuid: str | None = None
    minor: int | None = None
    numa_node: int = 0
    links: Mapping[int, str] = field(default_factory=dict)
    mig: Sequence[str] = ()
    context_bytes: int | None = None
    slice_ns: int | None = None
    switch_ns: int | None = None
    run_to_completion: bool = False
    knobs: Mapping[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class MigInstance:
    """A GPU instance with one compute instance that spans it; `caps` are the minors of its two capability nodes.

    `index` is its place in the machine, where instances come after all cards.
    """

    index: int
    uuid: str
    profile: str
    slices: int
    memory_slices: int
    start: int
    gpu_instance: int
    compute_instance: int
    memory_bytes: int
    multiprocessors: int
    caps: tuple[int, int]


@dataclass(frozen=True)
class Card:
    """A card as the machine has it: everything decided. `bus` is the PCI address in sysfs form (0000:01:00.0).

    `mig_mode` says whether the card is in MIG mode, which hides its own compute; `links` has both directions.
    """

    index: int
    minor: int
    uuid: str
    name: str
    model: CardModel
    memory_bytes: int
    numa_node: int
    bus: str
    mig_mode: bool = False
    mig: tuple[MigInstance, ...] = ()
    links: tuple[tuple[int, str], ...] = ()
    timing: tuple[tuple[str, int | str], ...] = ()


def capability_minor(card_minor: int, gpu_instance: int, compute_instance: int | None = None) -> int:
    """Minor of a MIG capability node, numbered as in `/proc/driver/nvidia-caps/mig-minors` of the genuine driver."""
    base = _CAP_FIRST + (card_minor * _CAP_INSTANCES + gpu_instance) * _CAP_PER_INSTANCE
    return base if compute_instance is None else base + 1 + compute_instance


def resolve(directory: Path, cards: Sequence[SimCard]) -> tuple[Card, ...]:
    """Decide what the caller left open. Raises SimError, naming the card, for what no machine could have.

    Chosen UUIDs follow from the directory and the position, so that a machine created again is the same machine.
    """
    places = len(cards) + sum(len(card.mig) for card in cards)
    if not cards or places > MAX_CARDS:
        raise SimError(f"a simulated machine has 1 to {MAX_CARDS} cards and MIG instances, not {places}")
    taken = {card.minor for card in cards if card.minor is not None}
    spare = iter(minor for minor in range(MAX_CARDS + len(taken)) if minor not in taken)
    links = _links(cards)
    resolved: list[Card] = []
    place = len(cards)
    for index, card in enumerate(cards):
        minor = next(spare) if card.minor is None else card.minor
        resolved.append(_card(directory, index, card, minor, links[index], place))
        place += len(card.mig)
    for what, values in (
        ("minor", [str(card.minor) for card in resolved]),
        ("UUID", [card.uuid for card in resolved]),
    ):
        twice = {value for value in values if values.count(value) > 1}
        if twice:
            raise SimError(f"two cards have the {what} {', '.join(sorted(twice))}; give each its own")
    return tuple(resolved)


def _card(directory: Path, index: int, card: SimCard, minor: int, links: Mapping[int, str], place: int) -> Card:
    where = f"card {index} ({quoted(card.model, 70)})"
    if not _NAME.fullmatch(card.model) or '"' in card.model:
        raise SimError(f"{where}: a model name has 1 to 63 printable ASCII characters and no double quote")
    model = MODELS.get(card.model, MODELS[DEFAULT_MODEL])
    memory = model.memory_bytes if card.memory_bytes is None else card.memory_bytes
    if not 0 < memory < 2**50:
        raise SimError(f"{where}: {memory} bytes of memory; it must be more than 0 and below 1 PiB")
    if not 0 <= minor < FIRST_RESERVED_MINOR:
        raise SimError(f"{where}: minor {minor}; it must be between 0 and {FIRST_RESERVED_MINOR - 1}")
    if not -1 <= card.numa_node < 1024:
        raise SimError(f"{where}: NUMA node {card.numa_node}; it must be between 0 and 1023, or -1 for none")
    unknown = [name for name in card.knobs if name not in KNOBS]
    if unknown:
        raise SimError(f"{where}: no knob is called {quoted(unknown[0], 40)}; there are {', '.join(KNOBS)}")
    for key, value in (*timing_of(card), ("context_bytes", card.context_bytes or 0)):
        if isinstance(value, int) and value < 0:
            raise SimError(f"{where}: {key} is {value}; it can't be negative")
    made = card.uuid or "GPU-" + str(uuids.uuid5(uuids.NAMESPACE_URL, f"vcuda-sim:{directory}:{index}"))
    if not _UUID.fullmatch(made):
        raise SimError(f"{where}: the UUID {quoted(made)} does not look like GPU-00000000-0000-0000-0000-000000000000")
    return Card(
        index=index,
        minor=minor,
        uuid=made,
        name=card.model,
        model=model,
        memory_bytes=memory,
        numa_node=card.numa_node,
        bus=f"0000:{index + 1:02x}:00.0",
        mig_mode=bool(card.mig),
        mig=_mig(where, made, minor, memory, card.mig, model, place),
        links=tuple(sorted(links.items())),
        timing=timing_of(card),
    )


def timing_of(card: SimCard) -> tuple[tuple[str, int | str], ...]:
    """What the caller said about contexts, slices and models, under the names of machine.conf."""
    said: dict[str, int | str | None] = {
        "context": card.context_bytes,
        "slice_us": None if card.slice_ns is None else card.slice_ns // 1000,
        "switch_us": None if card.switch_ns is None else card.switch_ns // 1000,
        "run_to_completion": 1 if card.run_to_completion else None,
        **card.knobs,
    }
    return tuple((key, value) for key, value in said.items() if value is not None)


def _mig(
    where: str, card_uuid: str, minor: int, memory: int, profiles: Sequence[str], model: CardModel, place: int
) -> tuple[MigInstance, ...]:
    if profiles and not model.mig:
        raise SimError(f"{where}: this model can't be cut into MIG instances; take for instance {DEFAULT_MODEL}")
    made: list[MigInstance] = []
    compute = used = 0
    for text in profiles:
        match = _PROFILE.fullmatch(text)
        slices = int(match["slices"]) if match else 0
        if match is None or text not in (f"{slices}g", _profile_name(slices, memory)):
            known = ", ".join(_profile_name(count, memory) for count in MIG_PROFILES)
            raise SimError(f"{where}: no MIG profile {quoted(text, 40)}; this card has {known}")
        instance, memory_slices = len(made) + 1, MIG_PROFILES[slices]
        made.append(
            MigInstance(
                index=place + len(made),
                uuid="MIG-" + str(uuids.uuid5(uuids.NAMESPACE_URL, f"{card_uuid}:{instance}")),
                profile=_profile_name(slices, memory),
                slices=slices,
                memory_slices=memory_slices,
                start=used,
                gpu_instance=instance,
                compute_instance=0,
                memory_bytes=memory * memory_slices // MIG_MEMORY_SLICES,
                multiprocessors=model.multiprocessors // 15 * 2 * slices,  # 14 of an A100's 108, 16 of 132
                caps=(capability_minor(minor, instance), capability_minor(minor, instance, 0)),
            )
        )
        compute, used = compute + slices, used + memory_slices
    if compute > MIG_COMPUTE_SLICES or used > MIG_MEMORY_SLICES:
        raise SimError(
            f"{where}: MIG instances {', '.join(profiles)} need {compute} of {MIG_COMPUTE_SLICES} compute and "
            f"{used} of {MIG_MEMORY_SLICES} memory slices; leave some out"
        )
    return tuple(made)


def _profile_name(slices: int, memory: int) -> str:
    return f"{slices}g.{max(1, memory * MIG_PROFILES[slices] // MIG_MEMORY_SLICES // GIB)}gb"


def _links(cards: Sequence[SimCard]) -> list[dict[int, str]]:
    """Each card's connections, both directions. Raises SimError for one that is unknown or contradicts itself."""
    found: list[dict[int, str]] = [{} for _ in cards]
    for index, card in enumerate(cards):
        for peer, kind in card.links.items():
            if not 0 <= peer < len(cards) or peer == index:
                raise SimError(f"card {index} is linked to card {peer}, which is not another card of this machine")
            if not _LINK.fullmatch(kind):
                raise SimError(
                    f"card {index}: no connection {quoted(kind, 40)}; known: NV1 to NV18, PIX, PXB, PHB, NODE, SYS"
                )
            if found[index].setdefault(peer, kind) != kind or found[peer].setdefault(index, kind) != kind:
                raise SimError(f"cards {index} and {peer} are linked in two ways, one is {kind}; say one")
    return found
