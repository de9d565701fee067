"""Who gets which card: the fullest that fits, never more than a card has, refusals that say who holds what."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcuda.runs import booking, card_choice
from vcuda.runs.booking import Booking, Share
from vcuda.runs.errors import RunError
from vcuda.spec.inventory import Card

GIB = 2**30
CARDS = tuple(Card(f"GPU-{index}aaa", index, "T4", 8 * GIB) for index in range(3))


def held(card: int, cores: int, gib: int, *, user: int = 1, name: str = "run-x", limit: int = 0) -> Booking:
    share = Share(CARDS[card].uuid, card, cores, limit or cores, gib * GIB)
    return Booking(name, user, 4711, 0.0, "python train.py", "/x", (share,))


def wish(cores: int, gib: int | None, **more: Any) -> card_choice.RunRequest:
    return card_choice.RunRequest(cores, more.pop("limit", cores), None if gib is None else gib * GIB, **more)


def chosen(bookings: list[Booking], wanted: card_choice.RunRequest) -> list[int]:
    return [room.index for room in card_choice.choose(card_choice.rooms(CARDS, bookings), wanted)]


def test_the_fullest_card_that_fits_is_taken() -> None:
    bookings = [held(1, 50, 2), held(2, 80, 2)]
    assert chosen([], wish(30, 1)) == [0]
    assert chosen(bookings, wish(20, 1)) == [2]
    assert chosen(bookings, wish(30, 1)) == [1]
    assert chosen(bookings, wish(60, 1)) == [0]
    assert chosen([held(1, 50, 2), held(2, 50, 6)], wish(30, 1)) == [2]


def test_memory_and_cores_must_both_fit_to_the_last_unit() -> None:
    nearly = [held(index, 70, 7) for index in range(3)]
    assert chosen(nearly, wish(30, 1)) == [0]
    for impossible in (wish(31, 1), wish(30, 2)):
        with pytest.raises(RunError):
            chosen(nearly, impossible)


def test_whole_cards_are_untouched_ones() -> None:
    assert chosen([held(1, 1, 1)], wish(100, None, cards=2)) == [0, 2]
    with pytest.raises(RunError, match="fewer than 3 of these cards"):
        chosen([held(1, 1, 1)], wish(100, None, cards=3))
    with pytest.raises(RunError, match=r"^4 cards are asked for.*there are 3:"):
        chosen([], wish(100, None, cards=4))
    room = card_choice.rooms(CARDS, [])[0]
    assert room.share(wish(100, None)) == Share("GPU-0aaa", 0, 100, 100, 8 * GIB, whole=True)


@pytest.mark.parametrize(("name", "index"), [("1", 1), ("GPU-2aaa", 2), ("gpu-2", 2)])
def test_cards_are_named_by_index_or_the_start_of_a_uuid(name: str, index: int) -> None:
    assert chosen([held(0, 50, 1)], wish(10, 1, devices=(name,))) == [index]


@pytest.mark.parametrize("devices", [("3",), ("GPU-",), ("GPU-9",), ("0", "GPU-0"), ("",), ("²",), ("9" * 5000,)])
def test_names_that_do_not_say_one_card_are_refused(devices: tuple[str, ...]) -> None:
    with pytest.raises(RunError, match="--device"):
        chosen([], wish(10, 1, devices=devices))


def test_every_named_card_must_fit() -> None:
    assert chosen([], wish(10, 1, devices=("2", "0"))) == [2, 0]
    with pytest.raises(RunError, match="GPU-2aaa"):
        chosen([held(2, 95, 1)], wish(10, 1, devices=("2", "0")))


def test_a_refusal_says_what_is_free_and_who_holds_the_rest() -> None:
    with pytest.raises(RunError) as caught:
        chosen([held(0, 80, 6), held(1, 90, 1), held(2, 100, 8)], wish(30, 4))
    text = str(caught.value)
    assert "no card has 30 cores and 4 GiB free" in text
    assert "card 0 GPU-0aaa T4: 20 of 100 cores and 2 GiB of 8 GiB free" in text
    assert "pid 4711 of" in text and "90 cores, 1 GiB: python train.py" in text
    assert len(text.splitlines()) == 7


def test_a_card_that_does_not_answer_takes_nothing() -> None:
    sick = card_choice.rooms([Card("GPU-0", 0, "T4", 8 * GIB, healthy=False)], [])
    with pytest.raises(RunError, match="does not answer"):
        card_choice.choose(sick, wish(1, 1))


def test_a_machine_without_cards_says_so() -> None:
    with pytest.raises(RunError, match="no NVIDIA card"):
        card_choice.choose([], wish(1, 1))


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(1, 8)), max_size=30))
def test_no_sequence_of_runs_overbooks_a_card(wishes: list[tuple[int, int]]) -> None:
    bookings: list[Booking] = []
    for cores, gib in wishes:
        try:
            (index,) = chosen(bookings, wish(cores, gib))
        except RunError:
            assert not any(room.takes(wish(cores, gib)) for room in card_choice.rooms(CARDS, bookings))
        else:
            bookings.append(held(index, cores, gib))
    assert all(room.free_cores >= 0 and room.free_bytes >= 0 for room in card_choice.rooms(CARDS, bookings))


def test_limits_lend_to_ones_own_runs_only() -> None:
    mine = held(0, 30, 1, limit=80, name="run-a")
    (alone,) = card_choice.limits(mine, [mine])
    (beside_own,) = card_choice.limits(mine, [mine, held(0, 20, 1, name="run-b")])
    (beside_stranger,) = card_choice.limits(mine, [mine, held(0, 20, 1, name="run-c", user=2)])
    (elsewhere,) = card_choice.limits(mine, [mine, held(1, 20, 1, name="run-d", user=2)])
    assert (alone.core_limit, alone.shared) == (elsewhere.core_limit, elsewhere.shared) == (80, False)
    assert (beside_own.core_limit, beside_own.shared) == (80, True)
    assert (beside_stranger.core_limit, beside_stranger.shared) == (30, True)
    assert alone.cores == 30 and alone.memory_bytes == GIB


texts = st.text(max_size=20)
shares = st.builds(
    lambda uuid, minor, cores, extra, memory, whole: Share(uuid, minor, cores, min(100, cores + extra), memory, whole),
    texts,
    st.integers(-1, 255),
    st.integers(1, 100),
    st.integers(0, 99),
    st.integers(0, 2**63 - 1),
    st.booleans(),
)
bookings = st.builds(
    Booking,
    st.just("run-1"),
    st.just(1000),
    st.integers(1, 2**31 - 1),
    st.floats(0, 2**39),
    texts,
    texts,
    st.lists(shares, min_size=1, max_size=4, unique_by=lambda share: share.uuid).map(tuple),
)


@given(bookings)
def test_a_booking_survives_its_file(entry: Booking) -> None:
    assert booking.decode(booking.encode(entry), "run-1", 1000) == entry


@given(bookings, st.data())
def test_a_damaged_booking_is_refused_with_a_reason(entry: Booking, data: st.DataObject) -> None:
    fields = json.loads(booking.encode(entry))
    key = data.draw(st.sampled_from([*fields, *fields["shares"][0]]))
    target = fields if key in fields else fields["shares"][0]
    target[key] = data.draw(st.sampled_from([None, -5, 2**70, [], {}, "x" * 5000, 1.5, True]))
    try:
        read = booking.decode(json.dumps(fields).encode(), "run-1", 1000)
    except ValueError as error:
        assert 0 < len(str(error)) < 200
    else:
        assert key in ("since", "whole")
        assert read.name == "run-1"


@given(
    st.one_of(
        st.binary(max_size=200),
        st.recursive(st.integers(), st.lists, max_leaves=5).map(lambda x: json.dumps(x).encode()),
    )
)
def test_any_bytes_are_a_booking_or_a_reason(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        booking.decode(raw, "run-1", 1000)
