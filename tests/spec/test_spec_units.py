"""Quantities and bytes: every text either gives one exact number or a refusal with a reason, never a crash."""

from __future__ import annotations

import copy
import pickle
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcuda.spec import units
from vcuda.spec.errors import InvalidRequest, Reason

# What resource.Quantity's grammar allows, as text and as the exact number it stands for.
SUFFIXES = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "e3": 1000,
    "E2": 100,
}


@given(st.integers(0, 2**31), st.sampled_from(sorted(SUFFIXES)))
def test_a_whole_quantity_is_its_number(number: int, suffix: str) -> None:
    assert units.parse_count(f"{number}{suffix}", "x") == number * SUFFIXES[suffix]


@given(st.integers(0, 2**63 - 1))
def test_integers_text_and_milli_notation_agree(number: int) -> None:
    assert units.parse_count(number, "x") == units.parse_count(str(number), "x") == number
    assert units.parse_count(f"{number}000m", "x") == units.parse_count(f"{number}.0", "x") == number


@given(st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), st.text(), st.lists(st.integers())))
def test_any_value_is_a_count_or_a_refusal(value: object) -> None:
    try:
        number = units.parse_count(value, "the amount")
    except InvalidRequest as error:
        assert error.reason is Reason.INVALID_QUANTITY
        assert error.message.startswith("the amount is ")
        assert len(error.message) < 200
    else:
        assert type(number) is int
        assert 0 <= number < 2**63


@pytest.mark.parametrize(
    "value",
    ["", " ", "-1", "1.5", "30m", "1e-1", "3e3k", "0x10", "٣", "1 2", "9223372036854775808", "10E", "--1", "1Zi", ".",
     "9" * 5000, 10**5000, -1, 30.0, True, None, "nan", "inf"],
    ids=lambda value: f"{type(value).__name__}:{str(value)[:20] if not isinstance(value, int) else 'int'}",
)  # fmt: skip
def test_counts_that_do_not_exist_are_refused(value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        units.parse_count(value, "amount")
    assert caught.value.reason is Reason.INVALID_QUANTITY


@pytest.mark.parametrize(
    ("text", "memory_bytes"),
    [
        ("4GiB", 4 * 2**30),
        ("4Gi", 4 * 2**30),
        ("4 gib", 4 * 2**30),
        ("4G", 4 * 10**9),
        ("1.5GB", 1_500_000_000),
        ("1.5GiB", 3 * 2**29),
        ("512m", 512 * 10**6),
        ("1073741824", 2**30),
        ("0.1KiB", 102),
    ],
)
def test_bytes_as_people_write_them(text: str, memory_bytes: int) -> None:
    assert units.parse_bytes(text) == memory_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "4 Gigs", "-4GiB", "4GiBB", "1e9", "٤GiB", "4,5GiB", "9" * 5000, "16EiB", "9000PiB"]
)
def test_bytes_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        units.parse_bytes(text, "--memory")
    assert caught.value.reason is Reason.INVALID_MEMORY
    assert caught.value.message.startswith("--memory is ")


@given(st.decimals(0, 8000, places=3), st.sampled_from(["KiB", "MiB", "GiB", "TiB", "kB", "MB", "GB", "TB"]))
def test_bytes_are_exact_and_rounded_down(number: Decimal, unit: str) -> None:
    base = 1024 if "i" in unit else 1000
    exact = number * base ** (" KMGT".index(unit[0].upper()))
    assert units.parse_bytes(f"{number}{unit}") == int(exact)


@given(st.text(max_size=60))
def test_any_text_is_bytes_or_a_refusal(text: str) -> None:
    try:
        assert 0 <= units.parse_bytes(text) < 2**63
    except InvalidRequest as error:
        assert error.reason is Reason.INVALID_MEMORY


@given(st.integers(0, 2**50))
def test_blocks_never_promise_more_than_the_card_has(memory_bytes: int) -> None:
    sold = units.blocks_on_card(memory_bytes)
    assert sold * units.BLOCK_BYTES <= memory_bytes < (sold + 1) * units.BLOCK_BYTES


@given(st.integers(0, 2**62))
def test_formatted_bytes_read_back_within_rounding(memory_bytes: int) -> None:
    text = units.format_bytes(memory_bytes)
    tolerance = max(memory_bytes * 0.06, 0)
    assert abs(units.parse_bytes(text) - memory_bytes) <= tolerance


def test_refusals_survive_pickling_and_copying() -> None:
    error = InvalidRequest(Reason.INVALID_CORES, "ask less")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(twin), twin.reason, str(twin)) == (
            InvalidRequest,
            Reason.INVALID_CORES,
            "InvalidCores: ask less",
        )
