"""What becomes of a pod at admission: completed, corrected, refused with the extender's reason, or left as it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, strategies

from scheduler_ext.admission.rules import Rules, Verdict, decide
from scheduler_ext.protocol.admission_v1 import Review
from tests.scheduler_ext.extender_support import NAMES, container, plain_pod, pod
from vcuda.spec.request import asks_for_share, parse_pod

_PLAIN = Rules()
MANAGER = "system:serviceaccount:vcuda-system:gpu-manager"
FORGED = {
    NAMES.placement: '{"node":"a"}',
    NAMES.predicate_gpu_index(0): "3",
    NAMES.predicate_time: "1",
    NAMES.predicate_node: "a",
    NAMES.gpu_assigned: "true",
}


def applied(thing: Any, patch: tuple[dict[str, Any], ...]) -> Any:
    """RFC 6902's `add` and `remove`, written here once more so that the patch is judged by its meaning."""
    thing = copy.deepcopy(thing)
    for step in patch:
        *where, last = (part.replace("~1", "/").replace("~0", "~") for part in step["path"].split("/")[1:])
        place = thing
        for part in where:
            place = place[int(part)] if isinstance(place, list) else place[part]
        assert isinstance(place, dict)
        if step["op"] == "remove":
            del place[last]
        else:
            assert step["op"] == "add"
            place[last] = step["value"]
    return thing


def review(thing: dict[str, Any], rules: Rules = _PLAIN, **fields: Any) -> tuple[Verdict, dict[str, Any]]:
    asked = {"uid": "r", "operation": "CREATE", "namespace": "team", "user": "alice", "old": {}} | fields
    verdict = decide(Review(thing=thing, **asked), rules)
    return verdict, applied(thing, verdict.patch)


def annotated(**annotations: str) -> dict[str, Any]:
    return pod("p", uid="u", annotations=dict(annotations))


@pytest.mark.parametrize("asks", [True, False])
def test_annotations_that_kubernetes_refuses_make_no_patch_many_times_their_size(asks: bool) -> None:
    forged = {NAMES.predicate_gpu_index(card): "" for card in range(70_000)}
    verdict, _ = review(pod("p", annotations=forged) if asks else plain_pod("p", annotations=forged))
    assert verdict.refusal is not None and verdict.refusal.reason == "InvalidAnnotation" and not verdict.patch
    few = dict(list(forged.items())[:4_000])
    verdict, after = review(pod("p", annotations=few) if asks else plain_pod("p", annotations=few))
    assert verdict.refusal is None and not after["metadata"]["annotations"]


@pytest.mark.parametrize("asks", [True, False])
def test_an_author_s_placement_is_taken_away_from_a_new_pod(asks: bool) -> None:
    mine = {"team/owner": "a", NAMES.core_limit: "80", **FORGED}
    thing = pod("p", annotations=mine) if asks else plain_pod("p", annotations=mine)
    verdict, after = review(thing)
    assert after["metadata"]["annotations"] == {"team/owner": "a", NAMES.core_limit: "80"}
    assert len(verdict.warnings) == len(FORGED)
    assert all("was removed: the scheduler writes it" in warning for warning in verdict.warnings)


def test_a_placement_stays_what_it_was_whoever_edits_the_pod() -> None:
    old = annotated(**{NAMES.placement: "true", NAMES.predicate_time: "1"})
    new = annotated(**{NAMES.placement: "forged", NAMES.gpu_assigned: "true", "team/owner": "b"})
    verdict, after = review(new, operation="UPDATE", old=old)
    assert after["metadata"]["annotations"] == {
        NAMES.placement: "true",
        NAMES.predicate_time: "1",
        "team/owner": "b",
    }
    assert len(verdict.warnings) == 3
    bare = copy.deepcopy(new)
    del bare["metadata"]["annotations"]
    _, after = review(bare, operation="UPDATE", old=old)
    assert after["metadata"]["annotations"] == old["metadata"]["annotations"]


def test_the_manager_s_word_counts() -> None:
    rules = Rules(trusted=frozenset({MANAGER}))
    old, new = annotated(), annotated(**FORGED)
    assert review(new, rules, operation="UPDATE", old=old, user=MANAGER)[0] == Verdict()
    assert review(new, rules, operation="UPDATE", old=old)[1] == old


def test_namespaces_that_are_exempt_pass_as_they_are() -> None:
    rules = Rules(exempt=frozenset({"kube-system"}), scheduler_name="gpu")
    assert review(pod("p", 150, 1, annotations=FORGED), rules, namespace="kube-system")[0] == Verdict()
    assert review(pod("p", 150, 1), rules)[0].refusal is not None


@pytest.mark.parametrize(
    ("cores", "blocks", "reason", "words"),
    [
        (150, 10, "InvalidCores", "multiple of 100"),
        (30, None, "IncompleteRequest", "add memory blocks of 256 MiB"),
        (None, 10, "IncompleteRequest", "add both to its limits"),
        (30, 0, "InvalidMemory", "at least 1 block"),
        ("1.5", 10, "InvalidQuantity", "vcuda-core"),
        (1700, 0, "InvalidCores", "at most 16 cards"),
    ],
)
def test_what_no_card_can_give_is_refused_before_it_is_pending(
    cores: Any, blocks: Any, reason: str, words: str
) -> None:
    refusal = review(pod("p", cores, blocks))[0].refusal
    assert refusal is not None
    assert refusal.reason == reason
    assert words in refusal.message
    assert review(pod("p", cores, blocks), operation="UPDATE")[0] == Verdict(), "it is too late to refuse it"


def test_pods_that_ask_for_no_share_are_nobody_s_business() -> None:
    rules = Rules(scheduler_name="gpu", annotations={NAMES.priority: "low"}, cores=10, memory_blocks=4)
    odd: list[Any] = [plain_pod("p"), {}, {"metadata": None, "spec": None}, {"spec": {"containers": "x"}}]
    odd.append(plain_pod("p", annotations={NAMES.core_limit: "nonsense"}))
    for thing in odd:
        assert review(thing, rules)[0] == Verdict()


@pytest.mark.parametrize(
    ("theirs", "after"),
    [(None, "gpu"), ("", "gpu"), ("default-scheduler", "gpu"), ("their-own", "their-own")],
)
def test_a_pod_with_a_share_goes_to_our_scheduler_unless_it_chose_one(theirs: str | None, after: str) -> None:
    thing = pod("p")
    if theirs is not None:
        thing["spec"]["schedulerName"] = theirs
    assert review(thing, Rules(scheduler_name="gpu"))[1]["spec"]["schedulerName"] == after
    assert review(thing)[1] == thing


def test_a_pod_that_has_a_node_needs_no_scheduler() -> None:
    thing = pod("p", node="a")
    assert review(thing, Rules(scheduler_name="gpu"))[1] == thing


def test_defaults_complete_a_request_and_never_break_one() -> None:
    rules = Rules(annotations={NAMES.core_limit: "50", NAMES.priority: "low"}, cores=20, memory_blocks=4)
    verdict, after = review(pod("p", 30, None), rules)
    assert after["spec"]["containers"][0]["resources"] == {
        "limits": {NAMES.core: 30, NAMES.memory: "4"},
        "requests": {NAMES.memory: "4"},
    }
    assert after["metadata"]["annotations"] == {NAMES.core_limit: "50", NAMES.priority: "low"}
    assert verdict.warnings == (f"spec.containers[0] names no {NAMES.memory}; it gets 4",)
    assert parse_pod(after, NAMES).containers[0].memory_blocks == 4

    _, after = review(pod("p", init=[container("i", None, 8)], containers=[container("m", 100, None)]), rules)
    asked = {one.name: (one.cores, one.memory_blocks) for one in parse_pod(after, NAMES).containers}
    assert asked == {"i": (20, 8), "m": (100, 0)}, "whole cards come with their memory"

    _, after = review(pod("p", 200, None), rules)
    assert after["metadata"]["annotations"] == {NAMES.priority: "low"}, "a whole card has no other limit"

    _, after = review(pod("p", 60, 4, annotations={NAMES.priority: "high"}), rules)
    assert after["metadata"]["annotations"] == {NAMES.priority: "high"}, "a limit of 50 is below its 60"


_VALUES = strategies.recursive(
    strategies.none() | strategies.booleans() | strategies.integers() | strategies.text(max_size=4) | strategies.sampled_from(["1", "200"]),
    lambda inner: strategies.lists(inner, max_size=2) | strategies.dictionaries(
        strategies.sampled_from(["limits", "requests", "resources", "name", NAMES.core, NAMES.memory, "x"]), inner, max_size=3
    ),
    max_leaves=12,
)  # fmt: skip
_PODS = strategies.fixed_dictionaries(
    {
        "metadata": _VALUES
        | strategies.fixed_dictionaries(
            {"annotations": _VALUES | strategies.dictionaries(strategies.sampled_from(sorted(FORGED)), _VALUES)}
        ),
        "spec": _VALUES
        | strategies.fixed_dictionaries(
            {"containers": strategies.lists(_VALUES | strategies.fixed_dictionaries({"resources": _VALUES}), max_size=3)}
        ),
    }
)  # fmt: skip


@given(_PODS, _PODS)
def test_any_pod_is_answered_and_what_passes_is_one_that_the_extender_understands(
    new: dict[str, Any], old: dict[str, Any]
) -> None:
    rules = Rules(scheduler_name="gpu", annotations={NAMES.priority: "low"}, cores=10, memory_blocks=4)
    verdict, after = review(new, rules)
    if verdict.refusal is None:
        if asks_for_share(after, NAMES):
            parse_pod(after, NAMES)
        metadata = after["metadata"] if isinstance(after["metadata"], dict) else {}
        kept = metadata.get("annotations")
        assert not isinstance(kept, dict) or not any(map(NAMES.written_by_us, kept))
        assert review(after, rules)[1] == after, "asked again, as after another webhook's change, it says the same"
    review(new, rules, operation="UPDATE", old=old)
