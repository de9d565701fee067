"""Selectors of devices (CEL), as far as can be told of them without a CEL: whose devices one means, and which cards.

Read are the logical operators, comparisons, `in`, and of a device its driver, attributes and capacities. Whatever else
stands in one may have any value: what follows in spite of that is known, the rest is not. A selector that reads an
attribute that a device does not have ends in an error, and selects nothing.

Source: Kubernetes' API resource.k8s.io/v1 (CELDeviceSelector) and the CEL specification.
"""

from __future__ import annotations

import enum
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vcuda.spec.units import parse_quantity

LONGEST = 10 * 1024  # characters of an expression (CELSelectorExpressionMaxLength)
_LONGEST_KEPT = 1000  # characters; one that is read takes up to 150 times its length
_DEEPEST = 24  # levels of brackets, each of which takes frames of Python
_LONGEST_CHAIN = 16  # of names, calls and indices behind each other
_MOST_OPERANDS = 64


class Gap(enum.Enum):
    """What is no value."""

    UNKNOWN = enum.auto()
    MISSING = enum.auto()


UNKNOWN, MISSING = Gap.UNKNOWN, Gap.MISSING


class Other(NamedTuple):
    """Any text but this one."""

    text: str


class Ordered(NamedTuple):
    """A version or a quantity, which CEL compares by functions. `value`: of one `kind` they have an order."""

    kind: str
    value: Any


@dataclass(frozen=True)
class Fields:
    """Attributes or capacities of one domain. `rest`: what those are that are not `known`: UNKNOWN or MISSING."""

    known: Mapping[str, Any] = field(default_factory=dict)
    rest: Gap = UNKNOWN

    def get(self, name: str) -> Any:
        return self.known.get(name, self.rest)


@dataclass(frozen=True)
class Device:
    """What is known of a device. `domains`: of attributes and capacities; `rest`: what others hold."""

    driver: str | Other
    shareable: bool | Gap
    domains: Mapping[str, Fields]
    rest: Fields

    def get(self, name: str) -> Any:
        if name == "driver":
            return self.driver
        if name == "allowMultipleAllocations":
            return self.shareable
        return self if name in ("attributes", "capacity") else UNKNOWN


_Outcomes = frozenset[Any]  # of True, False and None, an error: how something may turn out
_Value = Callable[[Device], Any]
_YES, _NO, _FAILS = frozenset([True]), frozenset([False]), frozenset([None])
_ANY = _YES | _NO | _FAILS


class Selector(NamedTuple):
    """`may`: how it may turn out for a device. `unread`: what in it is not read, "" where all is."""

    may: Callable[[Device], _Outcomes]
    unread: str


def matches(expressions: Iterable[str], device: Device) -> bool | None:
    """Whether all of some selectors select a device; None: that can't be told."""
    found = [read(one).may(device) for one in expressions]
    if any(True not in one for one in found):
        return False
    return True if all(one == _YES for one in found) else None


def read(expression: str) -> Selector:
    """Never raises: what can't be read may turn out any way."""
    return _known(expression) if len(expression) <= _LONGEST_KEPT else _read(expression)


@functools.lru_cache(maxsize=256)
def _known(expression: str) -> Selector:
    return _read(expression)


def _read(expression: str) -> Selector:
    try:
        if len(expression) > LONGEST:
            raise _Unread(f"more than {LONGEST} characters")
        parser = _Parser(expression)
        value = parser.whole()
    except _Unread as why:
        return Selector(lambda _device: _ANY, str(why))
    return Selector(lambda device: _outcomes(value(device)), parser.unread)


def version(text: str) -> Ordered | Gap:
    """Three numbers; versions with more than that have an order of their own, which is not known here."""
    parts = text.split(".")
    plain = len(parts) == 3 and all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts)
    return Ordered("semver", tuple(map(int, parts))) if plain else UNKNOWN


def quantity(text: object) -> Ordered | Gap:
    found = parse_quantity(text)
    # Quantities of devices are whole but for parts of bytes, which no card has.
    return UNKNOWN if found is None or found[0] % found[1] else Ordered("quantity", found[0] // found[1])


class _Unread(Exception):
    """The expression, or a whole of it, has a form that is not read; the message says which."""


def _outcomes(value: Any) -> _Outcomes:
    if isinstance(value, frozenset):
        return value
    if value is UNKNOWN:
        return _ANY
    return _FAILS if type(value) is not bool else _YES if value else _NO


def _plain(value: Any) -> Any:
    """A value that others compare: of outcomes the only one."""
    if not isinstance(value, frozenset):
        return value
    if len(value) > 1:
        return UNKNOWN
    (only,) = value
    return MISSING if only is None else only


def _not(of: _Outcomes) -> _Outcomes:
    return frozenset(None if one is None else not one for one in of)


def _both(left: _Outcomes, right: _Outcomes) -> _Outcomes:
    """False with an error is False: the order of the two does not matter in CEL."""
    pairs = itertools.product(left, right)
    return frozenset(False if False in pair else None if None in pair else True for pair in pairs)


def _equal(left: Any, right: Any) -> _Outcomes:
    left, right = _plain(left), _plain(right)
    if MISSING in (left, right):
        return _FAILS
    if UNKNOWN in (left, right) or isinstance(left, Fields | Device) or isinstance(right, Fields | Device):
        return _ANY
    for one, than in ((left, right), (right, left)):
        if isinstance(one, Other):
            return _NO if than == one.text else _YES | _NO
    if isinstance(left, list) or isinstance(right, list):
        return _ANY
    return _YES if _kind(left) == _kind(right) and left == right else _NO


def _kind(value: Any) -> Any:
    return value.kind if isinstance(value, Ordered) else type(value)


def _among(left: Any, right: Any) -> _Outcomes:
    left, right = _plain(left), _plain(right)
    if MISSING in (left, right):
        return _FAILS
    if isinstance(right, Fields):
        return _there(right.get(left) if isinstance(left, str) else UNKNOWN)
    if not isinstance(right, list):
        return _ANY
    found = _NO
    for one in right:
        found = _not(_both(_not(found), _not(_equal(left, one))))
    return found


_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "<": lambda a, b: a < b, "<=": lambda a, b: a <= b, ">": lambda a, b: a > b, ">=": lambda a, b: a >= b,
}  # fmt: skip


def _compared(how: str, left: Any, right: Any) -> _Outcomes:
    if how == "==":
        return _equal(left, right)
    if how == "!=":
        return _not(_equal(left, right))
    if how == "in":
        return _among(left, right)
    left, right = _plain(left), _plain(right)
    if MISSING in (left, right):
        return _FAILS
    if not (type(left) is int and type(right) is int) and not (isinstance(left, str) and isinstance(right, str)):
        return _ANY
    return _YES if _ORDER[how](left, right) else _NO


_TEXT_METHODS: dict[str, Callable[[str, str], bool]] = {
    "startsWith": str.startswith,
    "endsWith": str.endswith,
    "contains": str.__contains__,
}
_ORDERED_METHODS: dict[str, Callable[[Any, Any], Any]] = {
    "isGreaterThan": lambda a, b: a > b,
    "isLessThan": lambda a, b: a < b,
    "compareTo": lambda a, b: (a > b) - (a < b),
}
METHODS = (*_TEXT_METHODS, *_ORDERED_METHODS)


def _called(name: str, on: Any, argument: Any) -> Any:
    on, argument = _plain(on), _plain(argument)
    if MISSING in (on, argument):
        return MISSING
    if name in _TEXT_METHODS and isinstance(on, str) and isinstance(argument, str):
        return _TEXT_METHODS[name](on, argument)
    if name in _ORDERED_METHODS and isinstance(on, Ordered) and isinstance(argument, Ordered):
        return _ORDERED_METHODS[name](on.value, argument.value) if on.kind == argument.kind else MISSING
    return UNKNOWN


def _of(value: Any, name: str | None) -> Any:
    """A field of a device or of a domain's attributes; None: something of them that is not read."""
    if isinstance(value, Device | Fields) and name is not None:
        return value.get(name)
    return MISSING if _plain(value) is MISSING else UNKNOWN


def _at(value: Any, index: Any) -> Any:
    value, index = _plain(value), _plain(index)
    if isinstance(value, Device):  # its attributes or capacities, by domain
        return value.domains.get(index, value.rest) if isinstance(index, str) else UNKNOWN
    return _of(value, index if isinstance(index, str) else None)


_TOKEN = re.compile(
    r"""(?:\s|//[^\n]*+)*+(?:
    (?P<text>[rR]?(?:"(?:[^"\\\n]|\\.)*+"|'(?:[^'\\\n]|\\.)*+'))
    |(?P<number>[0-9]{1,18}+(?![0-9.A-Za-z]))
    |(?P<odd>[0-9][0-9.A-Za-z]*+)
    |(?P<name>[A-Za-z_][A-Za-z0-9_]*+)
    |(?P<mark>&&|\|\||[<>=!]=|[-+*/%!<>?:.,()\[\]{}])
    |(?P<end>\Z))""",
    re.VERBOSE,
)
_RELATIONS = ("==", "!=", "<", "<=", ">", ">=", "in")


class _Parser:
    """One expression. `unread`: the first thing in it that has no meaning here."""

    def __init__(self, expression: str) -> None:
        self.unread = ""
        self._tokens: list[tuple[str, str]] = []  # kind and text
        self._at = self._depth = 0
        at, kind = 0, ""
        while kind != "end":
            found = _TOKEN.match(expression, at)
            if found is None:
                raise _Unread(f"{expression[at : at + 20].strip()!r}")
            kind, at = str(found.lastgroup), found.end()
            self._tokens.append((kind, found[kind]))

    def whole(self) -> _Value:
        value = self._expression()
        if self._tokens[self._at][0] != "end":
            raise _Unread(f"{self._tokens[self._at][1]!r}")
        return value

    def _accept(self, *texts: str) -> str:
        kind, text = self._tokens[self._at]
        if kind in ("mark", "name") and text in texts:
            self._at += 1
            return text
        return ""

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            raise _Unread(f"{self._tokens[self._at][1]!r}")

    def _any(self, what: str) -> _Value:
        """Something that may have any value."""
        self.unread = self.unread or what
        return lambda _device: UNKNOWN

    def _expression(self) -> _Value:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _Unread(f"more than {_DEEPEST} levels of brackets")
        value = self._either()
        if self._accept("?"):
            self._either()
            self._expect(":")
            self._expression()
            value = self._any("? :")
        self._depth -= 1
        return value

    def _parts(self, part: Callable[[], _Value], *marks: str) -> list[_Value]:
        found = [part()]
        while self._accept(*marks):
            found.append(part())
        return found

    def _either(self) -> _Value:
        parts = self._parts(self._all, "||")
        if len(parts) == 1:
            return parts[0]
        return lambda device: _not(functools.reduce(_both, (_not(_outcomes(one(device))) for one in parts)))

    def _all(self) -> _Value:
        parts = self._parts(self._relation, "&&")
        if len(parts) == 1:
            return parts[0]
        return lambda device: functools.reduce(_both, (_outcomes(one(device)) for one in parts))

    def _relation(self) -> _Value:
        value = self._sum()
        for _ in range(_MOST_OPERANDS):
            how = self._accept(*_RELATIONS)
            if not how:
                return value
            value = self._comparison(how, value, self._sum())
        raise _Unread(f"more than {_MOST_OPERANDS} comparisons in one")

    @staticmethod
    def _comparison(how: str, left: _Value, right: _Value) -> _Value:
        return lambda device: _compared(how, left(device), right(device))

    def _sum(self) -> _Value:
        parts = self._parts(self._signed, "+", "-", "*", "/", "%")
        return parts[0] if len(parts) == 1 else self._any("arithmetic")

    def _signed(self) -> _Value:
        odd, minus = False, False
        while mark := self._accept("!", "-"):
            odd, minus = odd ^ (mark == "!"), minus or mark == "-"
        value = self._member()
        if minus:
            return self._any("-")
        return (lambda device: _not(_outcomes(value(device)))) if odd else value

    def _member(self) -> _Value:
        value = self._primary()
        for _ in range(_LONGEST_CHAIN):
            if self._accept("."):
                value = self._field(value)
            elif self._accept("["):
                value = self._index(value)
            else:
                return value
        raise _Unread(f"more than {_LONGEST_CHAIN} fields of fields")

    def _field(self, value: _Value) -> _Value:
        optional = self._accept("?")
        kind, name = self._tokens[self._at]
        if kind != "name":
            raise _Unread(f"{name!r}")
        self._at += 1
        if self._accept("("):
            arguments = self._list(")")
            if name not in METHODS or len(arguments) != 1:
                self._any(f"{name}()")
                return lambda device: _of(value(device), None)
            return lambda device: _called(name, value(device), arguments[0](device))
        return self._any(".?") if optional else lambda device: _of(value(device), name)

    def _index(self, value: _Value) -> _Value:
        optional = self._accept("?")
        index = self._expression()
        self._expect("]")
        return self._any("[?]") if optional else lambda device: _at(value(device), index(device))

    def _list(self, end: str) -> list[_Value]:
        found: list[_Value] = []
        while not self._accept(end):
            if found:
                self._expect(",")
                if self._accept(end):
                    break
            found.append(self._expression())
        return found

    def _primary(self) -> _Value:
        kind, text = self._tokens[self._at]
        self._at += 1
        if kind == "text":
            return self._literal(text)
        if kind == "number":
            number = int(text)
            return lambda _device: number
        if kind == "odd":
            return self._any(text[:20])
        if kind == "name":
            return self._named(text)
        if text == "(":
            value = self._expression()
            self._expect(")")
            return value
        if text == "[":
            items = self._list("]")
            return lambda device: [one(device) for one in items]
        if text == "{":
            while not self._accept("}"):
                self._expression()
                self._expect(":")
                self._expression()
                if not self._accept(","):
                    self._expect("}")
                    break
            return self._any("{}")
        raise _Unread(f"{text!r}" if text else "its early end")

    def _literal(self, text: str) -> _Value:
        if "\\" in text:
            return self._any("\\")
        said = text[2:-1] if text[0] in "rR" else text[1:-1]
        return lambda _device: said

    def _named(self, name: str) -> _Value:
        if name in ("true", "false"):
            return lambda _device: name == "true"
        if name == "device":
            return lambda device: device
        if not self._accept("("):
            return self._any(name)
        if name == "has":
            value = self._expression()
            self._expect(")")
            return lambda device: _there(value(device))
        arguments = self._list(")")
        if name not in ("semver", "quantity") or len(arguments) != 1:
            return self._any(f"{name}()")
        make = version if name == "semver" else quantity
        return lambda device: make(text) if isinstance(text := arguments[0](device), str) else UNKNOWN


def _there(value: Any) -> _Outcomes:
    return _ANY if value is UNKNOWN else _NO if value is MISSING else _YES
