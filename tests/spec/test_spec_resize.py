"""Live resize in words: what an owner may write, what is answered, and what comes of a placement by it."""

from __future__ import annotations

from typing import Any

import pytest

from vcuda.spec import resize
from vcuda.spec.errors import InvalidRequest
from vcuda.spec.names import Names
from vcuda.spec.placement import CardShare, Placement
from vcuda.spec.request import parse_pod
from vcuda.spec.resize import Answer, Target

NAMES = Names()


def container(name: str, cores: int, blocks: int = 4) -> dict[str, Any]:
    limits = {NAMES.core: str(cores), NAMES.memory: str(blocks)}
    return {"name": name, "resources": {"limits": limits}}


def pod(*containers: dict[str, Any], init: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    metadata = {"name": "p", "namespace": "default", "uid": "u"}
    return {"metadata": metadata, "spec": {"containers": list(containers), "initContainers": list(init)}}


ONE = parse_pod(pod(container("main", 30), init=(container("prepare", 10),)))
TWO = parse_pod(pod(container("a", 30), container("b", 20), container("whole", 100)))


def test_amounts_are_by_container_and_the_only_one_needs_no_name() -> None:
    assert resize.parse("core=50, memory=12,core-limit=80", ONE, NAMES) == {
        "main": {"core": 50, "memory": 12, "core-limit": 80}
    }
    assert resize.parse("a:core=5; b:memory=1", TWO, NAMES) == {"a": {"core": 5}, "b": {"memory": 1}}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "write it as in"),
        ("core", "core is ''"),
        ("core=", "core is ''"),
        ("core=-1", "core is below 0"),
        ("core=0", "core must be 1 to 99"),
        ("core=100", "core must be 1 to 99"),
        ("core=1.5", "a fraction"),
        ("core=٣", "core is '٣'"),
        ("core=1,core=2", "each once"),
        ("cores=1", "write it as in"),
        ("core-limit=101", "core-limit must be 1 to 100"),
        ("memory=0", "memory must be 1 to"),
        ("memory=9223372036854775807", "memory must be 1 to"),
        ("other:core=1", "no container 'other' of the pod has a share"),
        ("prepare:core=1", "is an init container, which has ended"),
        ("main:core=1;main:core=2", "names container 'main' twice"),
        ("\x00\ud800:core=1", "no container"),
        ("core=1;" * 1000, "twice"),
        ("core=1;" * 10_000, "it may have 8192"),
    ],
)
def test_nonsense_is_refused_with_what_to_write(text: str, why: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        resize.parse(text, ONE, NAMES)
    assert why in error.value.message and error.value.message.startswith(f"annotation {NAMES.resize} is ")
    assert len(error.value.message) < 400


@pytest.mark.parametrize(
    ("text", "why"),
    [("core=1", "name the container"), ("whole:core=1", "whole cards, which have no other size")],
)
def test_of_several_shares_one_is_named_and_whole_cards_keep_their_size(text: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        resize.parse(text, TWO, NAMES)


def test_what_is_not_named_stays_and_a_limit_is_never_below_its_share() -> None:
    share = CardShare("GPU-1", 30, 4)
    assert resize.target({"memory": 9}, share, None, NAMES) == Target(CardShare("GPU-1", 30, 9))
    before = Target(share, 40)
    assert resize.target({"core": 35}, share, before, NAMES) == Target(CardShare("GPU-1", 35, 4), 40)
    assert resize.target({"core": 60}, share, before, NAMES) == Target(CardShare("GPU-1", 60, 4), 60)
    with pytest.raises(InvalidRequest, match="core-limit 50 is below the 60 cores"):
        resize.target({"core": 60, "core-limit": 50}, share, None, NAMES)


def test_an_answer_is_read_as_it_was_written_and_nothing_else_is() -> None:
    answer = Answer(
        "core=50",
        {"main": Target(CardShare("GPU-1", 50, 4), None), "b": Target(CardShare("GPU-2", 5, 1), 9)},
        goal={"GPU-1": (70, 9)},
    )
    written = resize.condition(answer, NAMES, "2026-01-01T00:00:00Z")
    assert (written["status"], written["reason"]) == ("True", "ResizeGranted")
    assert resize.read({"status": {"conditions": [{"type": "Ready"}, written]}}, NAMES) == answer
    refused = resize.condition(Answer("x", {}, "InvalidAnnotation: no"), NAMES, "")
    assert (refused["status"], refused["reason"]) == ("False", "ResizeRefused")
    for message in ("", "[]", "{}", '{"version":2}', written["message"].replace("50,4", "0,4"),
                    written["message"].replace("50,4", "true,4"), written["message"].replace("5,1,9", "5,1,4"),
                    written["message"].replace("70,9", "70"), written["message"].replace("goal", "gaol")):  # fmt: skip
        assert resize.read({"status": {"conditions": [written | {"message": message}]}}, NAMES) is None, message
    for status in (None, [], {"conditions": None}, {"conditions": [None, 1, "x"]}):
        assert resize.read({"status": status}, NAMES) is None


def test_a_placement_with_a_grant_and_without_it_again() -> None:
    request = parse_pod(pod(container("a", 30), container("b", 20)))
    chosen = Placement({"a": (CardShare("GPU-1", 30, 4),), "b": (CardShare("GPU-2", 20, 4),)})
    granted = {"a": Target(CardShare("GPU-1", 50, 8)), "b": Target(CardShare("GPU-9", 99, 99))}
    after = resize.applied(chosen, granted)
    assert after.containers["a"] == (CardShare("GPU-1", 50, 8),)
    assert after.containers["b"] == chosen.containers["b"], "a grant for another card changes nothing"
    assert resize.as_asked(after, request, granted) == chosen
    edited = Placement({**after.containers, "a": (CardShare("GPU-1", 60, 8),)})
    assert resize.as_asked(edited, request, granted) == edited, "only what was granted is taken for it"
