"""Which cards a share gets, what is booked on them, who has neighbours there, and which of kubelet's IDs stand for them."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager.allocate import choose_cards
from manager.allocations import accounting
from manager.allocations.accounting import AllocationIndex
from manager.allocations.record import Allocation, Held
from manager.kubelet import device_ids
from manager.regions.regions import Neighbours
from tests.manager.manager_pods import allocation
from vcuda.spec.errors import DoesNotFit
from vcuda.spec.fit import CardState
from vcuda.spec.inventory import Card
from vcuda.spec.placement import CardShare
from vcuda.spec.request import CardFilter, ContainerRequest, Kind, PodRequest, Policy

GIB = 2**30


def request(policy: Policy | None = None, models: CardFilter | None = None) -> PodRequest:
    return PodRequest("u", "n", "p", (), policy=policy, models=models or CardFilter())


def asks(cores: int, blocks: int) -> ContainerRequest:
    return ContainerRequest("c", Kind.APP, 0, cores, blocks, min(cores, 100))


def card(number: int, *, links: dict[int, int] | None = None, model: str = "m", numa: int = 0) -> Card:
    pairs = tuple((f"GPU-{peer}", rank) for peer, rank in (links or {}).items())
    return Card(f"GPU-{number}", number, model, 8 * GIB, numa, True, pairs)


def chosen(states: list[CardState], container: ContainerRequest, asked: PodRequest | None = None) -> list[int]:
    return [
        int(share.uuid.removeprefix("GPU-"))
        for share in choose_cards.choose(request() if asked is None else asked, container, states)
    ]


def test_a_share_goes_to_the_fullest_card_that_fits_or_the_emptiest() -> None:
    states = [CardState(card(0), 100, 32), CardState(card(1), 40, 20), CardState(card(2), 20, 32)]
    assert chosen(states, asks(30, 10)) == [1]
    assert chosen(states, asks(10, 10)) == [2]
    assert chosen(states, asks(30, 25)) == [0]
    assert chosen(states, asks(10, 10), request(Policy.SPREAD)) == [0]


def test_two_whole_cards_are_the_best_linked_pair() -> None:
    cards = [card(0, links={1: 30}), card(1), card(2), card(3, links={2: 110})]
    assert chosen([CardState(item, 100, 32) for item in cards], asks(200, 0)) == [2, 3]


def test_one_whole_card_tears_no_pair_apart() -> None:
    cards = [card(0, links={1: 110}), card(1), card(2)]
    assert chosen([CardState(item, 100, 32) for item in cards], asks(100, 0)) == [2]


def test_cards_without_links_and_a_single_card_are_ordinary() -> None:
    assert chosen([CardState(card(0), 100, 32)], asks(100, 0)) == [0]
    states = [CardState(card(number, numa=number % 2), 100, 32) for number in range(4)]
    assert chosen(states, asks(200, 0)) == [0, 2]  # the same NUMA node


@pytest.mark.parametrize(
    ("states", "container", "asked", "reason"),
    [
        ([], asks(10, 1), request(), "NoCards"),
        ([CardState(card(0), 5, 32)], asks(10, 1), request(), "InsufficientCores"),
        ([CardState(card(0), 50, 0)], asks(10, 1), request(), "InsufficientMemory"),
        ([CardState(card(0), 50, 32)], asks(100, 0), request(), "InsufficientWholeCards"),
        ([CardState(card(0), 100, 32)], asks(200, 0), request(), "InsufficientWholeCards"),
        (
            [CardState(card(0), 100, 32)],
            asks(1, 1),
            request(models=CardFilter(frozenset("x"))),
            "CardNotAllowed",
        ),
        (
            [CardState(dataclasses.replace(card(0), healthy=False), 100, 32)],
            asks(1, 1),
            request(),
            "UnhealthyCard",
        ),
    ],
)
def test_the_reason_for_no_place(
    states: list[CardState], container: ContainerRequest, asked: PodRequest, reason: str
) -> None:
    with pytest.raises(DoesNotFit) as error:
        choose_cards.choose(asked, container, states)
    assert error.value.reason == reason


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from([Kind.APP, Kind.INIT, Kind.SIDECAR]), st.integers(1, 60)),
        max_size=30,
    )
)
def test_booking_never_exceeds_a_card(pods: list[tuple[int, Kind, int]]) -> None:
    """Whatever comes in which order: what fits is placed, and the sum of the pods' peaks stays within each card."""
    cards = [card(0), card(1)]
    allocations = AllocationIndex()
    for number, (pod_number, kind, cores) in enumerate(sorted(pods, key=lambda item: (item[0], item[1] == Kind.APP))):
        container = ContainerRequest(f"c{number}", kind, None, cores, 1, cores)
        uid = str(pod_number)
        others, beside = allocations.booked_by_others(uid), allocations.of_pod(uid)
        states = accounting.states_for(cards, others, beside, container)
        try:
            shares = choose_cards.choose(request(), container, states)
        except DoesNotFit:
            continue
        allocations[uid, container.name] = allocation(
            *shares, pod_uid=uid, container=container.name, kind=kind, cores=cores, memory_blocks=1
        )
    for cores, blocks in accounting.booked(allocations.values()).values():
        assert cores <= 100 and blocks <= 32


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from("abc"),
            st.sampled_from([Kind.APP, Kind.INIT, Kind.SIDECAR]),
            st.sets(st.sampled_from("ABC"), min_size=1),
            st.integers(1, 60),
            st.sets(st.sampled_from(["core", "memory"])),
            st.booleans(),
        ),
        max_size=20,
    )
)
def test_the_index_says_what_counting_anew_says(
    steps: list[tuple[int, str, Kind, set[str], int, set[str], bool]],
) -> None:
    index = AllocationIndex()
    plain: dict[tuple[str, str], Allocation] = {}
    for number, name, kind, cards, cores, held, goes in steps:
        uid = str(number)
        if goes and (uid, name) in plain:
            del index[uid, name], plain[uid, name]
        else:
            shares = tuple(CardShare(uuid, cores, 2) for uuid in sorted(cards))
            item = allocation(*shares, pod_uid=uid, container=name, kind=kind)
            for resource in held:
                item = item.with_held(resource, Held(cores, ""))
            index[uid, name] = plain[uid, name] = item
        assert index.snapshot == tuple(plain.values()) and list(index) == list(plain)
        assert index.holdings == {key: item.held.keys() for key, item in plain.items()}
        assert set(index.pods) == {key[0] for key in plain}
        for uuid in "ABC":
            on_card = [item for item in plain.values() if any(share.uuid == uuid for share in item.shares)]
            assert sorted(item.key for item in index.on_cards([uuid])) == sorted(item.key for item in on_card)
        for other in map(str, range(5)):
            mine = tuple(item for item in plain.values() if item.pod_uid == other)
            assert index.of_pod(other) == mine
            counted = accounting.booked(item for item in plain.values() if item.pod_uid != other)
            kept = {uuid: use for uuid, use in index.booked_by_others(other).items() if use != (0, 0)}
            assert kept == counted


def test_who_has_company_on_a_card() -> None:
    def at(pod_uid: str, name: str, kind: Kind, *uuids: str) -> Allocation:
        shares = tuple(CardShare(uuid, 10, 1) for uuid in uuids)
        return allocation(*shares, pod_uid=pod_uid, container=name, kind=kind)

    prepare, app = at("1", "prepare", Kind.INIT, "A"), at("1", "app", Kind.APP, "A")
    assert not Neighbours([prepare, app]).shared(prepare) and not Neighbours([prepare, app]).shared(app)
    side = at("1", "side", Kind.SIDECAR, "A")
    assert Neighbours([prepare, side]).shared(prepare) == Neighbours([prepare, side]).shared(side) == {"A"}
    assert Neighbours([app, side]).shared(app) == {"A"}
    other = at("2", "c", Kind.INIT, "A", "B")
    assert Neighbours([app, other]).shared(other) == Neighbours([app, other]).shared(app) == {"A"}
    assert Neighbours([other]).shared(app) == {"A"}  # asked before it is booked


def test_preferred_ids_are_of_the_placed_card() -> None:
    first, second = device_ids.card_key("GPU-1"), device_ids.card_key("GPU-2")
    available = [f"{key}-{slot}" for slot in range(3) for key in (first, second)]
    assert device_ids.prefer(available, [], 2, {"GPU-2": 2}) == [f"{second}-0", f"{second}-1"]
    assert device_ids.prefer(available, [f"{second}-2"], 2, {"GPU-2": 2}) == [f"{second}-2", f"{second}-0"]
    assert device_ids.prefer(available, [], 4, {"GPU-2": 4}) is None
