"""Pod requests: what users of the old system wrote is understood, everything else is refused with its reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcuda.spec import request
from vcuda.spec.errors import InvalidRequest, Reason
from vcuda.spec.names import Names

NAMES = Names()


def container(name: str = "main", cores: object = None, memory: object = None, **more: Any) -> dict[str, Any]:
    limits = {NAMES.core: cores, NAMES.memory: memory}
    return {"name": name, "resources": {"limits": {k: v for k, v in limits.items() if v is not None}}, **more}


def pod(*containers: Any, init: Any = (), **annotations: Any) -> dict[str, Any]:
    metadata = {"uid": "u-1", "namespace": "team", "name": "job", "annotations": annotations}
    return {"metadata": metadata, "spec": {"containers": list(containers), "initContainers": list(init)}}


def annotated(cores: int, **annotations: Any) -> dict[str, Any]:
    return pod(
        container(cores=cores, memory=4),
        **{f"{NAMES.domain}/{key}": value for key, value in annotations.items()},
    )


def reason_for(candidate: dict[str, Any]) -> Reason:
    with pytest.raises(InvalidRequest) as caught:
        request.parse_pod(candidate)
    assert len(caught.value.message) < 400
    return caught.value.reason


def test_the_pod_of_the_users_docs() -> None:
    parsed = request.parse_pod(pod(container(cores="30", memory="10"), **{"tencent.com/vcuda-core-limit": "50"}))
    assert (parsed.uid, parsed.namespace, parsed.name) == ("u-1", "team", "job")
    assert parsed.containers == (request.ContainerRequest("main", request.Kind.APP, 0, 30, 10, 50),)
    assert parsed and not parsed.containers[0].whole


@given(st.integers(1, 99), st.integers(1, 10_000))
def test_every_share_is_hard_at_its_request_without_an_annotation(cores: int, blocks: int) -> None:
    (parsed,) = request.parse_pod(pod(container(cores=str(cores), memory=str(blocks)))).containers
    assert (parsed.cores, parsed.memory_blocks, parsed.core_limit) == (cores, blocks, cores)
    assert (parsed.card_count, parsed.cores_per_card) == (1, cores)


@given(st.integers(1, request.MAX_CARDS_PER_CONTAINER), st.one_of(st.none(), st.integers(0, 500)))
def test_whole_cards_need_no_memory(cards: int, blocks: int | None) -> None:
    (parsed,) = request.parse_pod(pod(container(cores=cards * 100, memory=blocks))).containers
    assert parsed.whole
    assert (parsed.card_count, parsed.cores_per_card, parsed.core_limit) == (cards, 100, 100)


@given(st.integers(101, 10**20).filter(lambda cores: cores % 100 or cores > 1600))
def test_fractions_of_several_cards_are_refused(cores: int) -> None:
    expected = {Reason.INVALID_CORES} if cores < 2**63 else {Reason.INVALID_QUANTITY}
    assert reason_for(pod(container(cores=cores, memory=1))) in expected


@pytest.mark.parametrize(
    ("cores", "memory", "reason"),
    [
        (150, 4, Reason.INVALID_CORES),
        (1700, None, Reason.INVALID_CORES),
        (0, None, Reason.INVALID_CORES),
        (30, None, Reason.INCOMPLETE_REQUEST),
        (None, 4, Reason.INCOMPLETE_REQUEST),
        (0, 4, Reason.INCOMPLETE_REQUEST),
        (30, 0, Reason.INVALID_MEMORY),
        ("-30", 4, Reason.INVALID_QUANTITY),
        ("thirty", 4, Reason.INVALID_QUANTITY),
        ("0.5", 4, Reason.INVALID_QUANTITY),
        (30, "2.5", Reason.INVALID_QUANTITY),
        ([30], 4, Reason.INVALID_QUANTITY),
    ],
)
def test_impossible_amounts(cores: object, memory: object, reason: Reason) -> None:
    assert reason_for(pod(container(cores=cores, memory=memory))) is reason


def test_a_refusal_names_the_container_the_amount_and_the_way_out() -> None:
    with pytest.raises(InvalidRequest, match=r"'trainer'.*150 tencent.com/vcuda-core.*multiple of 100"):
        request.parse_pod(pod(container("trainer", 150, 4)))


def test_explicit_zeros_are_no_request() -> None:
    assert not request.parse_pod(pod(container(cores=0, memory=0)))


def test_init_containers_sidecars_and_indices() -> None:
    parsed = request.parse_pod(
        pod(
            container("plain"),
            container("app", 10, 1),
            init=(container("first", 20, 2), container("side", 30, 3, restartPolicy="Always")),
        )
    )
    assert [(c.name, c.kind, c.index) for c in parsed.containers] == [
        ("first", request.Kind.INIT, None),
        ("side", request.Kind.SIDECAR, None),
        ("app", request.Kind.APP, 1),
    ]
    assert parsed.container("side") is parsed.containers[1]
    assert parsed.container("plain") is None


@pytest.mark.parametrize("containers", ["main", {"name": "main"}, ["main"]])
def test_containers_that_are_no_list_of_objects_are_refused(containers: object) -> None:
    manifest = pod(container("a", 10, 1))
    manifest["spec"]["initContainers"] = containers
    with pytest.raises(InvalidRequest, match=r"spec\.initContainers is not a list of containers") as caught:
        request.parse_pod(manifest)
    assert caught.value.reason is Reason.INVALID_POD


def test_one_pod_has_only_so_many_shares() -> None:
    most = request.MAX_CONTAINERS_PER_POD
    many = [container(f"c{number}", 1, 1) for number in range(most + 1)]
    assert len(request.parse_pod(pod(*many[:most])).containers) == most
    with pytest.raises(InvalidRequest, match=f"more than {most} containers ask for a share; one pod may have {most}"):
        request.parse_pod(pod(*many))


def test_two_containers_of_one_name_are_refused() -> None:
    assert reason_for(pod(container("a", 10, 1), init=(container("a", 10, 1),))) is Reason.INVALID_POD


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vcuda-core-limit", "0"),
        ("vcuda-core-limit", "101"),
        ("vcuda-core-limit", "29"),
        ("vcuda-core-limit", "-1"),
        ("vcuda-core-limit", "half"),
        ("vcuda-priority", "urgent"),
        ("vcuda-policy", "random"),
        ("vcuda-policy", "node=spread"),
        ("vcuda-policy", "node=spread,card=random"),
        ("vcuda-policy", "node=spread,card=binpack,"),
        ("vcuda-oversell", "maybe"),
        ("vcuda-oversell", "1"),
        ("vcuda-oversell", "-8"),
        ("vcuda-oversell", "other=8"),
        ("vcuda-oversell", "main=1"),
        ("vcuda-oversell", "main=8,"),
        ("vcuda-oversell", "main=20" + " " * request.MAX_ANNOTATION_CHARS),
        ("vcuda-policy", "spread" + " " * request.MAX_ANNOTATION_CHARS),
        ("vcuda-card-uuid", "u" * (request.MAX_ANNOTATION_CHARS + 1)),
        ("vcuda-card-uuid", ",".join(map(str, range(request.MAX_FILTER_ITEMS + 1)))),
        ("vcuda-card-model", ",".join(f"!{number}" for number in range(request.MAX_FILTER_ITEMS + 1))),
    ],
)
def test_bad_annotations_are_refused_by_name(key: str, value: str) -> None:
    with pytest.raises(InvalidRequest, match=f"tencent.com/{key}") as caught:
        request.parse_pod(annotated(30, **{key: value}))
    assert caught.value.reason is Reason.INVALID_ANNOTATION


def test_good_annotations() -> None:
    parsed = request.parse_pod(
        annotated(
            30,
            **{
                "vcuda-priority": "high",
                "vcuda-policy": "spread",
                "vcuda-card-model": "T4, !A100 ,",
                "vcuda-card-uuid": "!GPU-1",
            },
        )
    )
    assert (parsed.priority, parsed.policy) == (request.Priority.HIGH, request.Policy.SPREAD)
    assert parsed.models.allows("T4")
    assert not parsed.models.allows("A100") and not parsed.models.allows("V100")
    assert parsed.uuids.allows("GPU-2") and not parsed.uuids.allows("GPU-1")


def test_node_and_card_may_be_chosen_by_different_policies() -> None:
    parsed = request.parse_pod(annotated(30, **{"vcuda-policy": "card=binpack, node=spread"}))
    assert (parsed.policy, parsed.card_policy) == (request.Policy.SPREAD, request.Policy.BINPACK)


@pytest.mark.parametrize(
    ("value", "blocks"),
    [("False", 0), ("True", 8), ("10", 10), ("main=10", 10), ("12, main=6", 6), ("4", 0), ("0", 0)],
)
def test_oversell_is_blocks_in_all_of_each_share_or_of_the_named_one(value: str, blocks: int) -> None:
    (found,) = request.parse_pod(annotated(30, **{"vcuda-oversell": value})).containers
    assert (found.memory_blocks, found.oversell_blocks) == (4, blocks)


def test_whole_cards_are_not_oversold() -> None:
    assert request.parse_pod(annotated(100, **{"vcuda-oversell": "true"})).containers[0].oversell_blocks == 0
    assert reason_for(annotated(100, **{"vcuda-oversell": "main=8"})) is Reason.INVALID_ANNOTATION


def test_annotations_of_pods_without_a_share_are_not_our_business() -> None:
    assert not request.parse_pod(pod(container(), **{NAMES.core_limit: "nonsense"}))


def test_another_domain_is_another_product() -> None:
    other = Names("example.com")
    assert not request.parse_pod(pod(container(cores=30, memory=4)), other)
    named = pod(
        {
            "name": "a",
            "resources": {"limits": {"example.com/vcuda-core": "30", "example.com/vcuda-memory": "1"}},
        }
    )
    assert request.parse_pod(named, other).containers[0].cores == 30


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                ["metadata", "spec", "containers", "initContainers", "name", "resources", "limits", "annotations",
                 "restartPolicy", NAMES.core, NAMES.memory, NAMES.core_limit, NAMES.policy]
            ),
            inner,
            max_size=5,
        ),
    ),
    max_leaves=25,
)  # fmt: skip


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "metadata": JSON,
            "spec": st.one_of(JSON, st.fixed_dictionaries({"containers": JSON, "initContainers": JSON})),
        },
    )
)
def test_any_json_object_is_a_request_or_a_refusal(candidate: dict[str, Any]) -> None:
    asked = request.asks_for_share(candidate, NAMES)
    try:
        parsed = request.parse_pod(candidate)
    except InvalidRequest as error:
        assert str(error).startswith(f"{error.reason}: ")
    else:
        assert asked or not parsed


def test_names_that_are_ours_to_write() -> None:
    ours = [
        NAMES.placement,
        NAMES.predicate_gpu_index(3),
        NAMES.predicate_time,
        NAMES.predicate_node,
        NAMES.gpu_assigned,
    ]
    assert all(NAMES.written_by_us(name) for name in ours)
    assert not any(NAMES.written_by_us(name) for name in (NAMES.core_limit, NAMES.priority, NAMES.card_uuid, "other/x"))
