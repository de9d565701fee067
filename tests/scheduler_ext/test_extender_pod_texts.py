"""Pods that the C core reads out of their texts are what a parser makes of them, whatever stands there; else nothing is read."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import Any

import orjson
import pytest

from scheduler_ext.engine.bindings import Write
from scheduler_ext.engine.core import Engine
from scheduler_ext.protocol import extender_v1
from scheduler_ext.state.objects import SAFE_TO_EVICT
from scheduler_ext.state.pod_texts import GROUP_LABELS, KnownPod, PodKinds, PodTexts
from tests.scheduler_ext.extender_engine import engine_with
from tests.scheduler_ext.extender_support import NAMES, cards, container, node, pod
from vcuda.spec.request import annotations_read

_OWN = ("uid", "namespace", "name", "resourceVersion", "creationTimestamp", "deletionTimestamp")
_ANNOTATIONS = (*annotations_read(NAMES), NAMES.placement, NAMES.resize, NAMES.movable, SAFE_TO_EVICT)


def _texts() -> PodTexts:
    return PodTexts(NAMES, PodKinds(NAMES), "object")


def _only(value: Any, names: tuple[str, ...]) -> Any:
    return {name: value[name] for name in names if name in value} if isinstance(value, dict) else value


def _kept(pod: Mapping[str, Any]) -> dict[str, Any]:
    """What the extender reads of a pod: the same by a parser."""
    metadata = _only(pod["metadata"], (*_OWN, "annotations", "labels"))
    for name, its in (("annotations", _ANNOTATIONS), ("labels", GROUP_LABELS)):
        if name in metadata:
            metadata[name] = _only(metadata[name], its)
    spec = _only(pod["spec"], ("nodeName", "priority", "overhead", "initContainers", "containers"))
    for name in ("initContainers", "containers"):
        if isinstance(spec.get(name), list):
            spec[name] = [_only(one, ("name", "resources", "restartPolicy")) for one in spec[name]]
    found = {"metadata": metadata, "spec": spec}
    if "status" in pod:
        found["status"] = status = _only(pod["status"], ("phase", "nominatedNodeName", "conditions"))
        if isinstance(status.get("conditions"), list):
            status["conditions"] = [one for one in status["conditions"] if _says(one)]
    return found


def _says(condition: object) -> bool:
    return isinstance(condition, dict) and condition.get("type") == NAMES.resize


def _usual(dice: random.Random, number: int) -> dict[str, Any]:
    """A pod in one of the forms that API servers write."""
    annotations: dict[str, Any] = {"kubectl.kubernetes.io/last-applied-configuration": '{"a":"\\n\\u003c"}'}
    for name, text in (
        (NAMES.placement, '{"version":1,"containers":{"main":[["GPU-a-0",30,10]]}}'), (NAMES.policy, "spread"),
        (NAMES.movable, "false"), (NAMES.resize, "core=50"), (NAMES.gang, "g/2"), (NAMES.core_limit, "80"),
    ):  # fmt: skip
        if dice.random() < 0.3:
            annotations[name] = text
    one = pod(
        f"p{number}", dice.choice((20, "30", 300)), dice.choice((4, "8")), uid=f"u{number}", annotations=annotations
    )
    metadata, spec, status = one["metadata"], one["spec"], one["status"]
    metadata |= {"resourceVersion": str(1000 + number), "creationTimestamp": "2026-01-01T00:00:00Z"}
    metadata["managedFields"] = [{"manager": "k", "fieldsV1": {"f:metadata": {'k:{"uid":"x"}': {".": {}}}}}]
    if dice.random() < 0.3:
        metadata["labels"] = {"app": "x", GROUP_LABELS[0]: "group", "pod-template-hash": "6d4"}
    if dice.random() < 0.2:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    spec["containers"][0] |= {
        "image": "a/b:1",
        "env": [{"name": "uid", "value": "x"}],
        "ports": [{"containerPort": 80}],
    }
    if dice.random() < 0.3:
        spec["initContainers"] = [container("init", None, None, restartPolicy="Always", command=["a", "\t"])]
    if dice.random() < 0.5:
        spec["nodeName"] = dice.choice("ab")
    spec |= {"priority": dice.choice((0, -5, 1000)), "volumes": [{"name": "v", "emptyDir": {}}]}
    status["phase"] = dice.choice(("Pending", "Running"))
    status["conditions"] = [{"type": "Ready", "status": "True", "lastProbeTime": None}]
    if dice.random() < 0.2:
        status["conditions"].append({"type": NAMES.resize, "status": "True", "message": '{"version":1}'})
    if dice.random() < 0.1:
        status["nominatedNodeName"] = "a"
    return one


def _line(one: Mapping[str, Any], event: str = "MODIFIED") -> bytes:
    return orjson.dumps({"type": event, "object": one}) + b"\n"


def _check(texts: PodTexts, line: bytes) -> bool:
    """Whether it was read; then it has to be what a parser makes of it."""
    found = texts.read(line)
    if found is None:
        return False
    event = orjson.loads(line)  # or it is no JSON, and was read
    shown = dict(found[1])
    if isinstance(conditions := shown.get("status", {}).get("conditions"), list):
        shown["status"] = shown["status"] | {"conditions": [one for one in conditions if _says(one)]}
    assert (found[0], shown) == (event.get("type", ""), _kept(event["object"])), line
    return True


def test_usual_pods_are_read_and_are_what_a_parser_makes_of_them() -> None:
    dice, texts = random.Random(1), _texts()
    for number in range(500):
        assert _check(texts, _line(_usual(dice, number)))


def test_every_cut_of_a_text_and_every_changed_byte_is_nothing_or_what_a_parser_makes_of_it() -> None:
    dice, texts = random.Random(2), _texts()
    line = _line(_usual(dice, 1) | {"status": {"phase": "Running", "conditions": [{"type": NAMES.resize}]}})
    for cut in range(len(line) - 1):
        assert not _check(texts, line[:cut])
    read = 0
    pieces = (*b'"\\{}[],:01-.eE \x00\x1f\x7f\x80\xc3\xe9\xff\n', *b"nulltrue", ord("u"))
    for _ in range(60_000):
        changed = bytearray(line)
        for _ in range(dice.choice((1, 1, 2, 4))):
            at = dice.randrange(len(changed))
            if dice.random() < 0.3:
                changed.insert(at, dice.choice(pieces))
            elif dice.random() < 0.5:
                del changed[at]
            else:
                changed[at] = dice.choice(pieces)
        read += _check(texts, bytes(changed))
    assert read > 5_000, "hardly anything was tried"


@pytest.mark.parametrize(
    "said",
    [
        b'"metadata":{"uid":"x","uid":"y"}', b'"metadata":{"uid":"x","u\\u0069d":"y"}', b'"metadata":{"uid":"x"},"metadata":{}',
        b'"metadata":{"uid":"x","labels":{"a":"\xc3\xa9"}}', b'"metadata":{"uid":"x","labels":{"a":"\xff"}}',
        b'"metadata":{"uid":"x","a":"\\ud800"}', b'"metadata":{"uid":"x","a":"\\ud83d\\ude00"}', b'"metadata":{"uid":"\\x"}',
        b'"metadata":{"uid":"x","generation":123456789012345678901234567890}', b'"metadata":{"uid":"x","a":1e999}',
        b'"metadata":{"uid":"x","a":' + 200 * b"[" + 200 * b"]" + b"}", b'"metadata":{"uid":"x","a":' + 100_000 * b"[" + b"}",
        b'"metadata":{"uid":""}', b'"metadata":{"uid":7}', b'"metadata":{}', b'"metadata":null', b'"metadata":{"uid":"x","a":01}',
        b'"metadata":{"uid":"x","annotations":3}', b'"metadata":{"uid":"x","labels":[]}', b'"metadata":{"uid":"x"},"status":3',
        b'"metadata":{"uid":"x"},"status":{"phase":"Failed"}', b'"metadata":{"uid":"x"},"status":{"phase":null}',
        b'"metadata":{"uid":"x",}', b'"metadata":{"uid":"x" "a":1}', b'"metadata":{"uid":"x","a":NaN}', b'"metadata":{"uid":"x\x01"}',
    ],
)  # fmt: skip
def test_what_is_unusual_is_left_to_a_parser(said: bytes) -> None:
    texts = _texts()
    assert texts.read(b'{"type":"ADDED","object":{"spec":{},"metadata":{"uid":"x"}}}') is not None
    assert texts.read(b'{"type":"ADDED","object":{"spec":{},' + said + b"}}") is None


@pytest.mark.parametrize(
    "spec",
    [
        b"{}",
        b'{"containers":[{"name":3}]}',
        b'{"containers":null,"priority":true}',
        b'{"containers":[{"resources":[1]}]}',
    ],
)
def test_odd_but_valid_specs_are_what_a_parser_makes_of_them(spec: bytes) -> None:
    assert _check(_texts(), b'{"type":"ADDED","object":{"spec":' + spec + b',"metadata":{"uid":"x"}}}')


@pytest.mark.parametrize("spec", [b"[]", b'{"containers":[7]}', b'{"containers":{}}', b'{"resourceClaims":[]}', b"3"])
def test_specs_that_are_none_and_pods_with_claims_are_left_to_a_parser(spec: bytes) -> None:
    assert not _check(_texts(), b'{"type":"ADDED","object":{"spec":' + spec + b',"metadata":{"uid":"x"}}}')


def test_a_condition_whose_type_is_escaped_is_kept() -> None:
    escaped = NAMES.resize.replace("/", "\\/").encode()
    line = (
        b'{"type":"ADDED","object":{"metadata":{"uid":"x"},"spec":{},"status":{"conditions":[{"type":"'
        + escaped
        + b'"}]}}}'
    )
    assert _check(_texts(), line)


BODIES = [
    b'{"Pod":%b,"Nodes":null,"NodeNames":["a","b"]}', b' {"NodeNames":["b"] , "Nodes":{"items":[]}, "Pod":%b }',
    b'{"Pod":%b,"NodeNames":["x\\u0041"]}', b'{"pod":%b,"nodenames":["a"]}', b'{"Pod":%b,"Nodes":null}',
    b'{"Pod":%b,"NodeNames":["a"],"pod":{"metadata":{},"spec":{}}}', b'{"Pod":%b,"NodeNames":["a"],"N\\u006fdeNames":["b"]}',
    b'{"Pod":%b,"NodeNames":["a"],"NodeNames":["b"]}', b'{"Pod":%b,"NodeNames":["a"]', b'{"Pod":%b,"NodeNames":["a"]}}',
    b'{"Pod":%b,"NodeNames":["a",3]}', b'{"Pod":%b,"NodeNames":["a"],"Other":1}', b'{"Pod":[%b},"NodeNames":["a"]}',
]  # fmt: skip


@pytest.mark.parametrize("form", BODIES)
def test_a_request_is_what_a_parser_makes_of_it(form: bytes) -> None:
    engine, _ = engine_with(node("a", cards("a")), node("b", cards("b")))
    dice = random.Random(3)
    read = 0
    for number in range(300):
        body = form % orjson.dumps(_usual(dice, number))
        if number % 3:
            body = body.replace(dice.choice((b'"', b"}", b"]", b",", b"1")), dice.choice((b"", b"\\", b"{", b'"')), 1)
        found = engine.asked_for(body)
        if found is not None:
            read += 1
            args = extender_v1.read_args(body)
            shown = {**found.pod, "status": {**found.pod["status"]}}
            wanted = _kept(args.pod)
            for one in (shown, wanted):
                one["status"] = {key: text for key, text in one["status"].items() if key != "conditions"}
            assert (shown, list(found.names), found.nodes) == (wanted, list(args.names), args.nodes)
    assert read >= 100 or form not in BODIES[:2]


def _state(engine: Engine) -> dict[str, Any]:
    cache = engine.cache
    names = ("free_cores", "free_blocks", "free_cpu", "free_memory", "code")
    return {
        "records": {uid: cache.pods.get(uid) for uid in sorted(cache.pods.uids())},
        "waiting": {one.uid: one for one in cache.waiting},
        "resizing": dict(cache.resizing),
        "unanswered": engine.unanswered(),
        "figures": engine.figures(),
        "arrays": {name: getattr(cache.cluster, name).tolist() for name in names},
        "ahead": list(cache.ahead._classes),
        "demand": dict(cache.workload._counts),
        "told": engine.metrics.distrusted._value.get(),
    }


def test_an_engine_that_is_fed_by_texts_knows_what_one_knows_that_is_fed_by_a_parser() -> None:
    """Pods come, are bound by us or past us, are edited, nominated, resized, deleted and end, in any order."""
    dice = random.Random(4)
    nodes = [node(name, cards(name, 4), cpu="640") for name in "ab"]
    (read, _), (parsed, _) = engine_with(*nodes), engine_with(*nodes)
    shown: dict[str, dict[str, Any]] = {}
    taken = 0

    def show(one: dict[str, Any]) -> None:
        nonlocal taken
        shown[one["metadata"]["uid"]] = one
        line = _line(one)
        found = read.event(line)
        taken += found is not None
        read.see_pod(found[1] if found is not None else orjson.loads(line)["object"])
        parsed.see_pod(orjson.loads(line)["object"])

    for number in range(1500):
        what = dice.random()
        one = copy.deepcopy(dice.choice(list(shown.values()))) if shown and what > 0.3 else _usual(dice, number)
        uid = one["metadata"]["uid"]
        if what <= 0.3:
            if dice.random() < 0.6:  # a plain pod, as nearly all are
                one = pod(f"p{number}", 20, 4, uid=f"u{number}")
            show(one)
        elif what < 0.6 and "nodeName" not in one["spec"]:
            body = orjson.dumps({"Pod": one, "NodeNames": ["a", "b"]})
            args = read.asked_for(body)
            verdict = read.filter(args.pod if args is not None else one, ["a", "b"])
            assert verdict == parsed.filter(one, ["a", "b"])
            writes = [engine.begin_bind(uid, verdict.chosen or "a") for engine in (read, parsed)]
            assert str(writes[0]) == str(writes[1]) or isinstance(writes[0], Write)
            if isinstance(writes[0], Write) and isinstance(writes[1], Write):
                assert writes[0] == writes[1]
                annotations = one["metadata"].get("annotations", {}) | dict(writes[0].annotations)
                one["metadata"]["annotations"], one["spec"]["nodeName"] = annotations, writes[0].node
                if dice.random() < 0.9:
                    show(one)
        elif what < 0.9:
            change = dice.randrange(6)
            if change == 0:
                one["status"]["phase"] = dice.choice(("Running", "Succeeded", "Pending"))
            elif change == 1:
                one["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            elif change == 2:
                one["metadata"].setdefault("annotations", {})[NAMES.resize] = f"core={dice.randrange(60)}"
            elif change == 3:
                one["metadata"].setdefault("annotations", {})[NAMES.placement] = dice.choice(("", "{}", "x" * 300))
            elif change == 4 and "nodeName" not in one["spec"]:
                one["status"]["nominatedNodeName"] = "b"
            elif change == 5:
                one["metadata"]["labels"] = {"more": str(number)}
            show(one)
        else:
            del shown[uid]
            read.lose_pod(uid)
            parsed.lose_pod(uid)
        assert _state(read) == _state(parsed), (number, one)
    assert taken > 500, "hardly anything was read by the C core"


def test_kinds_of_pods_that_never_come_again_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_ext.state.pod_texts._MOST_BYTES", 20_000)
    kinds = PodKinds(NAMES)
    texts = PodTexts(NAMES, kinds, "object")
    for number in range(1000):
        found = texts.read(_line(pod("p", 20, 4, uid="u", annotations={NAMES.gang: f"g{number}/2"})))
        assert found is not None and isinstance(found[1], KnownPod)
    assert len(kinds._known) < 100
