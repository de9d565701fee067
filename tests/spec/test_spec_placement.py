"""Placements and inventories: codecs are exact, malformed or forged text is refused, init containers free their share."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcuda.spec import bookings, fit, inventory, placement
from vcuda.spec.errors import DoesNotFit, InvalidInventory, InvalidPlacement, Reason, SpecError
from vcuda.spec.names import Names
from vcuda.spec.request import ContainerRequest, Kind, PodRequest

uuids = st.from_regex(r"GPU-[0-9a-f]{8}", fullmatch=True)
shares = st.builds(placement.CardShare, uuids, st.integers(1, 100), st.integers(0, placement.MOST_BLOCKS))
placements = st.builds(
    placement.Placement,
    st.dictionaries(
        st.text(min_size=1, max_size=12),
        st.lists(shares, min_size=1, max_size=4, unique_by=lambda share: share.uuid).map(tuple),
        max_size=4,
    ),
)
cards = st.builds(
    inventory.Card,
    uuids,
    st.integers(0, 255),
    st.text(max_size=12),
    st.integers(0, 2**63 - 1),
    st.one_of(st.none(), st.integers(0, 7)),
    st.booleans(),
    st.dictionaries(uuids, st.integers(0, 9), max_size=3).map(lambda links: tuple(links.items())),
)
JSON_TEXT = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["version", "containers", "cards", "uuid", "minor", "bytes", "links"]),
            inner,
            max_size=5,
        ),
    ),
    max_leaves=20,
).map(json.dumps)


@given(placements)
def test_a_placement_survives_its_annotation_copies_and_pickles(chosen: placement.Placement) -> None:
    twins = [
        placement.decode(placement.encode(chosen)),
        copy.deepcopy(chosen),
        pickle.loads(pickle.dumps(chosen)),
    ]
    assert all(twin == chosen and hash(twin) == hash(chosen) for twin in twins)


@given(st.one_of(st.text(), JSON_TEXT))
def test_any_text_is_a_placement_or_a_refusal(text: str) -> None:
    try:
        assert placement.decode(placement.encode(placement.decode(text))) == placement.decode(text)
    except InvalidPlacement as error:
        assert error.reason is Reason.INVALID_PLACEMENT
        assert len(error.message) < 300


@pytest.mark.parametrize(
    "containers",
    [
        {"a": []},
        {"a": [["GPU-1", 0, 1]]},
        {"a": [["GPU-1", 101, 1]]},
        {"a": [["GPU-1", 30, -1]]},
        {"a": [["GPU-1", 30, 2**60]]},
        {"a": [["GPU-1", True, 1]]},
        {"a": [["", 30, 1]]},
        {"a": [["\ud800", 30, 1]]},  # no message could name it
        {"a": [["GPU-1", 30, 1], ["GPU-1", 30, 1]]},
        {"a": [[f"GPU-{i}", 100, 1] for i in range(17)]},
        {"a": {"GPU-1": 3}},
        {"a": [["GPU-1", 30]]},
        [],
    ],
)
def test_forged_shares_are_refused(containers: Any) -> None:
    with pytest.raises(InvalidPlacement):
        placement.decode(json.dumps({"version": 1, "containers": containers}))


@pytest.mark.parametrize("text", ['{"version":2,"containers":{}}', '{"containers":{}}', "[" * 100_000, "", "null"])
def test_other_versions_and_broken_text_are_refused(text: str) -> None:
    with pytest.raises(InvalidPlacement):
        placement.decode(text)


def ask(name: str, cores: int, blocks: int, kind: Kind = Kind.APP, index: int | None = 0) -> ContainerRequest:
    return ContainerRequest(name, kind, index, cores, blocks, min(cores, 100))


def pod(*containers: ContainerRequest) -> PodRequest:
    return PodRequest("uid", "default", "pod", containers)


def on(card: str, cores: int, blocks: int) -> tuple[placement.CardShare, ...]:
    return (placement.CardShare(card, cores, blocks),)


def test_a_placement_must_give_exactly_what_was_asked() -> None:
    request = pod(ask("a", 30, 4))
    placement.check(placement.Placement({"a": on("GPU-1", 30, 4)}), request)
    wrong: list[dict[str, tuple[placement.CardShare, ...]]] = [
        {},
        {"a": on("GPU-1", 31, 4)},
        {"a": on("GPU-1", 30, 5)},
        {"a": on("GPU-1", 30, 4) + on("GPU-2", 30, 4)},
        {"a": on("GPU-1", 30, 4), "b": on("GPU-1", 30, 4)},
    ]
    for containers in wrong:
        with pytest.raises(InvalidPlacement):
            placement.check(placement.Placement(containers), request)


def test_whole_cards_take_the_cards_own_memory() -> None:
    request = pod(ask("a", 200, 0))
    placement.check(placement.Placement({"a": on("GPU-1", 100, 32) + on("GPU-2", 100, 64)}), request)


def test_bind_writes_old_and_new_annotations() -> None:
    request = pod(ask("setup", 10, 1, Kind.INIT, None), ask("main", 200, 0, index=1))
    chosen = placement.Placement({"setup": on("GPU-1", 10, 1), "main": on("GPU-1", 100, 8) + on("GPU-2", 100, 8)})
    known = {f"GPU-{i}": inventory.Card(f"GPU-{i}", i + 3, "T4", 2**31) for i in (1, 2)}
    written = placement.annotations(chosen, request, known, "node-a", 17, Names())
    assert written == {
        "tencent.com/vcuda-placement": placement.encode(chosen),
        "tencent.com/predicate-time": "17",
        "tencent.com/predicate-node": "node-a",
        "tencent.com/gpu-assigned": "false",
        "tencent.com/predicate-gpu-idx-1": "4,5",
    }
    assert all(Names().written_by_us(name) for name in written)


def test_an_init_containers_share_is_free_again_for_the_rest() -> None:
    request = pod(
        ask("one", 50, 8, Kind.INIT, None),
        ask("side", 10, 1, Kind.SIDECAR, None),
        ask("two", 60, 2, Kind.INIT, None),
        ask("main", 30, 4),
        ask("other", 20, 1, index=1),
    )
    chosen = placement.Placement({c.name: on("GPU-1", c.cores, c.memory_blocks) for c in request.containers})
    # init one: 50/8; init two beside the sidecar: 70/3; then sidecar and both: 60/6
    assert placement.peak_use(request, chosen) == {"GPU-1": (70, 8)}


@given(st.lists(st.tuples(st.sampled_from(list(Kind)), st.integers(1, 100), st.integers(1, 50)), max_size=6))
def test_the_peak_lies_between_the_largest_and_the_sum(rows: list[tuple[Kind, int, int]]) -> None:
    ordered = [r for r in rows if r[0] is not Kind.APP] + [r for r in rows if r[0] is Kind.APP]
    request = pod(*(ask(str(i), cores, blocks, kind, None) for i, (kind, cores, blocks) in enumerate(ordered)))
    chosen = placement.Placement({c.name: on("GPU-1", c.cores, c.memory_blocks) for c in request.containers})
    cores, blocks = placement.peak_use(request, chosen).get("GPU-1", (0, 0))
    assert max((r[1] for r in rows), default=0) <= cores <= sum(r[1] for r in rows)
    assert max((r[2] for r in rows), default=0) <= blocks <= sum(r[2] for r in rows)
    standing = [r for r in rows if r[0] is not Kind.INIT]
    assert cores >= sum(r[1] for r in standing)


@given(st.lists(cards, max_size=5, unique_by=lambda card: card.uuid).map(tuple))
def test_an_inventory_survives_its_annotation(node: tuple[inventory.Card, ...]) -> None:
    assert inventory.decode(inventory.encode(node)) == node


@given(st.one_of(st.text(), JSON_TEXT))
def test_any_text_is_an_inventory_or_a_refusal(text: str) -> None:
    try:
        inventory.decode(text)
    except InvalidInventory as error:
        assert error.reason is Reason.INVALID_INVENTORY


def test_an_inventory_may_gain_fields_but_never_lists_a_card_twice() -> None:
    row = {"uuid": "GPU-1", "minor": 0, "bytes": 2**33, "colour": "green"}
    (card,) = inventory.decode(json.dumps({"version": 2, "cards": [row]}))
    assert (card.memory_blocks, card.healthy, card.model) == (32, True, "")
    with pytest.raises(InvalidInventory, match="twice"):
        inventory.decode(json.dumps({"version": 1, "cards": [row, row]}))


def test_why_a_card_is_unhealthy_travels_and_is_short_text() -> None:
    sick = inventory.Card("GPU-1", 0, "T4", 2**33, healthy=False, why="Xid 79" + "x" * 500)
    (card,) = inventory.decode(inventory.encode((sick,)))
    assert not card.healthy and card.why == ("Xid 79" + "x" * 500)[:200]
    for row in ({"healthy": False, "why": 7}, {"healthy": False}, {"why": "well"}):
        text = json.dumps({"version": 1, "cards": [{"uuid": "GPU-1", "minor": 0, "bytes": 2**33, **row}]})
        assert inventory.decode(text)[0].why == ""


def test_an_inventory_of_more_than_a_node_can_have_is_none() -> None:
    def text(count: int, model: str = "T4") -> str:
        rows = [{"uuid": f"GPU-{number}", "minor": number, "bytes": 2**33, "model": model} for number in range(count)]
        return json.dumps({"version": 1, "cards": rows})

    assert len(inventory.decode(text(inventory.MOST_CARDS))) == inventory.MOST_CARDS
    for far in (text(inventory.MOST_CARDS + 1), text(3000), text(1, "x" * 2**18)):
        with pytest.raises(InvalidInventory, match="at most"):
            inventory.decode(far)


CARD = inventory.Card("GPU-1", 0, "T4", 8 * 2**30)


@pytest.mark.parametrize(
    ("state", "container", "reason"),
    [
        (fit.CardState(CARD, 100, 32), ask("a", 30, 32), None),
        (fit.CardState(CARD, 30, 4), ask("a", 30, 4), None),
        (fit.CardState(CARD, 29, 4), ask("a", 30, 4), Reason.INSUFFICIENT_CORES),
        (fit.CardState(CARD, 30, 3), ask("a", 30, 4), Reason.INSUFFICIENT_MEMORY),
        (fit.CardState(CARD, 100, 32), ask("a", 200, 0), None),
        (fit.CardState(CARD, 99, 32), ask("a", 100, 0), Reason.INSUFFICIENT_WHOLE_CARDS),
        (fit.CardState(CARD, 100, 31), ask("a", 100, 0), Reason.INSUFFICIENT_WHOLE_CARDS),
        (
            fit.CardState(inventory.Card("GPU-1", 0, "T4", 2**33, healthy=False), 100, 32),
            ask("a", 1, 1),
            Reason.UNHEALTHY_CARD,
        ),
    ],
)
def test_the_one_rule_of_fit(state: fit.CardState, container: ContainerRequest, reason: Reason | None) -> None:
    assert fit.why_not(state, container) is reason
    if reason is None:
        fit.require(state, container)
        share = placement.share_of(container, state.card)
        assert share.cores <= state.free_cores and share.memory_blocks <= state.free_blocks
    else:
        with pytest.raises(DoesNotFit, match="GPU-1") as caught:
            fit.require(state, container)
        assert caught.value.reason is reason


@pytest.mark.parametrize("decode", [inventory.decode, bookings.decode, placement.decode])
@pytest.mark.parametrize("text", ["[]", "7", '{"version":1}', '{"version":1,"cards":5,"pods":7,"containers":[]}', "["])
def test_what_is_malformed_is_told_in_words_for_people(decode: Callable[[str], object], text: str) -> None:
    with pytest.raises(SpecError, match="malformed") as refused:
        decode(text)
    assert not re.search(r"object|indices|attribute|NoneType|\('", refused.value.message)
