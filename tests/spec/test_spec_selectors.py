"""Selectors (CEL): what can be told of one is true whatever the rest of it says, and nothing in one is ever a fault."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcuda.spec import selectors
from vcuda.spec.device_classes import Whose, device, whose_are
from vcuda.spec.names import Names
from vcuda.spec.selectors import MISSING, UNKNOWN, Device, matches, quantity, read, version

NAMES = Names()
OURS = f"device.driver == '{NAMES.driver}'"
ITS = f"device.attributes['{NAMES.driver}']"
MEMORY = f"device.capacity['{NAMES.driver}'].memory"
KNOWN = {
    "productName": "NVIDIA L4", "type": "gpu", "minor": 3, "driverVersion": version("580.1.2"),
    "memory": quantity("24Gi"), "newer": UNKNOWN,
}  # fmt: skip
CARD = device(NAMES, KNOWN, MISSING)


@pytest.mark.parametrize(
    ("expression", "whose"),
    [
        (f"{OURS} && device.allowMultipleAllocations == true", Whose.OURS),
        (f"{OURS} && device.allowMultipleAllocations", Whose.OURS),
        (f"'{NAMES.driver}' == device.driver // ours", Whose.OURS),
        (f"device.driver in ['{NAMES.driver}']", Whose.OURS),
        (f"!(device.driver != '{NAMES.driver}') && anything(device).more[3]", Whose.OURS),
        (f"{ITS}.type == 'gpu'", Whose.OURS),
        (f"{ITS}.productName.matches('L4')", Whose.OURS),
        (f"({OURS}) || (device.driver == 'nic' && false)", Whose.OURS),
        ("device.driver == 'nic'", Whose.OTHERS),
        ("device.driver in ['nic', 'fpga'] && 1 + 1 == 2", Whose.OTHERS),
        (f"device.driver != '{NAMES.driver}'", Whose.OTHERS),
        ("device.attributes['nic'].speed >= 10", Whose.OTHERS),
        ("device.attributes['nic'].speed.isGreaterThan(semver('1.0.0'))", Whose.OTHERS),
        ("device.allowMultipleAllocations == false", Whose.OTHERS),
        ("has(device.attributes['nic'].speed)", Whose.OTHERS),
        ("'speed' in device.attributes['nic']", Whose.OTHERS),
        (f"device.driver in ['{NAMES.driver}', 'nic']", Whose.UNDECIDED),
        ("device.driver.startsWith('vcuda')", Whose.UNDECIDED),
        ("true", Whose.UNDECIDED),
        ("device.attributes['resource.kubernetes.io'].pcieRoot == 'pci0000:17'", Whose.UNDECIDED),
        (f"cel.bind(its, {ITS}, its.type == 'gpu')", Whose.UNDECIDED),
        (f"{ITS}.?type.orValue('gpu') == 'gpu'", Whose.UNDECIDED),
        (f"{OURS} || unknown()", Whose.UNDECIDED),
        (f"{OURS} ? true : false", Whose.UNDECIDED),
        ("", Whose.UNDECIDED),
    ],
)
def test_whose_devices_a_selector_means(expression: str, whose: Whose) -> None:
    assert whose_are([expression], NAMES) is whose
    assert whose_are(["true", expression], NAMES) is whose
    assert whose_are([OURS, expression], NAMES) is (Whose.OTHERS if whose is Whose.OTHERS else Whose.OURS)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (f"{ITS}.productName == 'NVIDIA L4'", True),
        (f"{ITS}.productName != r'NVIDIA L4'", False),
        (f"{ITS}.productName.startsWith('NVIDIA') && {ITS}.productName.endsWith('L4')", True),
        (f"{ITS}.productName.contains('H100') || {ITS}.type in ['mig', 'gpu',]", True),
        (f"{ITS}.minor > 2 && {ITS}.minor <= 3 && !({ITS}.minor < 3)", True),
        (f"{ITS}.minor == '3'", False),
        (f"{ITS}.minor < '3'", None),
        (f"{ITS}.driverVersion.isGreaterThan(semver('570.10.0'))", True),
        (f"{ITS}.driverVersion.isLessThan(semver('580.1.10'))", True),
        (f"{ITS}.driverVersion == semver('580.1.2')", True),
        (f"{ITS}.driverVersion.isLessThan(semver('580.1.3-rc.1'))", None),
        (f"{ITS}.driverVersion.isLessThan(quantity('1'))", False),
        (f"{MEMORY}.compareTo(quantity('10Gi')) >= 0", True),
        (f"{MEMORY}.isLessThan(quantity('24G'))", False),
        (f"{MEMORY} == quantity('24576Mi')", True),
        (f"{ITS}.parentUUID == 'x'", False),
        (f"!({ITS}.parentUUID == 'x')", False),
        (f"{ITS}.parentUUID == 'x' || true", True),
        (f"has({ITS}.parentUUID)", False),
        (f"!has({ITS}.parentUUID) && has({ITS}.type)", True),
        (f"'type' in {ITS} && !('parentUUID' in {ITS})", True),
        (f"{ITS}.newer == 1", None),
        (f"{ITS}['type'] == 'gpu'", True),
        (f"({ITS}.type == 'gpu') == true", True),
        (f"{ITS}.type", False),
        ("device.attributes['nic'].type == 'gpu'", False),
        ("device.attributes['resource.kubernetes.io'].pcieRoot == 'x'", None),
        ("0x1f == 31", None),
        ("99999999999999999999 == 1", None),
        ("1.5 == 1", None),
        ("'\\x41' == 'A'", None),
        ("-1 == 1", None),
        ("[1, 2] == [1, 2]", None),
        ("{'a': 1}['a'] == 1", None),
        ("null == 3", None),
        ("device.bindsToNode == true", None),
        ("device == device", None),
        ("3 == 3 && 'a' == 'a'", True),
    ],
)
def test_what_is_known_of_a_card_decides(expression: str, expected: bool | None) -> None:
    assert matches([expression], CARD) is expected


@pytest.mark.parametrize(
    "expression",
    [
        "(" * 9000, "[" * 9000, "a" * 20_000, "a" + ".a" * 4000, "a" + "[0]" * 3000, "f(" * 3000, "!" * 10_000,
        "1 == " * 2000 + "1", "true ? " * 1000, "'", "'\\", "[1, 2", "a.", "a.?", "a[", "f(1,", "{1", "{1:", "a b", "&&",
        "=", "a ? b", "\ud800", "\0", "//", "a /* */",
    ],
)  # fmt: skip
def test_what_can_t_be_read_may_mean_anything(expression: str) -> None:
    assert matches([expression], CARD) is None and 0 < len(read(expression).unread) < 100


@pytest.mark.parametrize("expression", ["&&".join(["true"] * 1500), "!" * 9000 + "true", "||".join(["true"] * 1500)])
def test_long_ones_are_read(expression: str) -> None:
    assert matches([expression], CARD) is True and not read(expression).unread


_PARTS = st.sampled_from(
    ["device", ".driver", ".attributes", f"['{NAMES.driver}']", ".type", "(", ")", "[", "]", "{", "}", "==", "!=", "in",
     "&&", "||", "!", "'gpu'", "3", "true", "has", "semver", ".startsWith", "?", ":", ",", "+", "-", " ", "\\", "."]
)  # fmt: skip


@given(st.lists(_PARTS, max_size=25).map("".join) | st.text(max_size=60))
def test_nothing_in_one_is_a_fault_and_its_opposite_is_the_opposite(expression: str) -> None:
    opposite = f"!({expression}\n)"
    for one in (CARD, device(NAMES), Device(selectors.Other("x"), UNKNOWN, {}, selectors.Fields())):
        found = read(expression).may(one)
        assert found <= {True, False, None} and found
        if "//" not in expression and read(opposite).unread == read(expression).unread:
            assert read(opposite).may(one) == {None if item is None else not item for item in found}


@given(st.recursive(
    st.sampled_from(["true", "false", f"{ITS}.none == 1", f"{ITS}.newer == 1"]),
    lambda inner: st.tuples(inner, st.sampled_from(["&&", "||"]), inner).map(" ".join).map("({})".format)
    | inner.map("!{}".format),
    max_leaves=8,
))  # fmt: skip
def test_logic_is_cels(expression: str) -> None:
    """By all values that what is unknown may have: none of them turns out otherwise than is said, and each of a kind."""
    turned = {
        _reference(expression.replace(f"{ITS}.none == 1", "fails").replace(f"{ITS}.newer == 1", value))
        for value in ("true", "false", "fails")
    }
    assert turned <= read(expression).may(CARD)


def _reference(text: str) -> bool | None:
    """The value of an expression of true, false, fails, &&, ||, ! and brackets, by Python; None: an error."""

    class Bit:
        def __init__(self, value: bool | None) -> None:
            self.value = value

        def __and__(self, other: Bit) -> Bit:
            pair = (self.value, other.value)
            return Bit(False if False in pair else None if None in pair else True)

        def __or__(self, other: Bit) -> Bit:
            return ~(~self & ~other)

        def __invert__(self) -> Bit:
            return Bit(None if self.value is None else not self.value)

    known = {"true": Bit(True), "false": Bit(False), "fails": Bit(None)}
    found = eval(text.replace("&&", "&").replace("||", "|").replace("!", "~"), known)
    assert isinstance(found, Bit)
    return found.value
