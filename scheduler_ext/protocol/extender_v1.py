"""kube-scheduler's extender v1 types: reads its requests strictly, writes its answers with Go's field names.

Source: k8s.io/kube-scheduler/extender/v1. The types carry no JSON tags, so Go writes `NodeNames` and reads any case.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson

from scheduler_ext.protocol import weight
from scheduler_ext.protocol.reasons import CODE_OF, FITS, REFUSALS, ROW_CODES, UNRESOLVABLE, AnyReason, ExtenderReason
from vcuda.kube import nesting
from vcuda.kube.errors import BadName
from vcuda.kube.objects import checked
from vcuda.printable import told

MAX_PRIORITY = 10  # MaxExtenderPriority
EXPLAINED_NODES = 100  # a success with more candidates does not list those that were not chosen: nobody reads them

_LONGEST_NAME = 253  # of a node
_MOST_TIMES = 16  # its bytes, that a large body's objects may take; those of whole nodes take 8
_LABELS = ["" if reason is None else str(reason) for reason in ROW_CODES]
_LABELS[FITS] = str(ExtenderReason.NOT_CHOSEN)

# As Go writes ExtenderBindingArgs of usual names: a fifth of the time that a parser and four checks take.
_SHORT_BINDING = 300  # bytes: no name in it is too long
_DNS = rb"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*"
_BINDING = re.compile(
    rb'\{"PodName":"%b","PodNamespace":"%b","PodUID":"[-0-9A-Za-z]+","Node":"%b"\}' % (_DNS, _DNS, _DNS)
)


class BadInput(Exception):
    """A request can't be understood; the message names the field and what is wrong. Nothing was done."""

    def __init__(self, message: str) -> None:
        super().__init__(told(message))


class ExtenderArgs(NamedTuple):
    """A filter or prioritize request. `nodes` holds the Node objects by name if whole objects were sent, else None."""

    pod: Mapping[str, Any]
    names: Sequence[str]
    nodes: Mapping[str, Mapping[str, Any]] | None

    @property
    def known(self) -> bool:
        """Whether all names are those of nodes that the API server has shown."""
        return bool(getattr(self.names, "known", False))


class BindingArgs(NamedTuple):
    """kube-scheduler's ExtenderBindingArgs: which pod is to be bound to which node."""

    name: str
    namespace: str
    uid: str
    node: str


@dataclass(frozen=True, slots=True)
class Victims:
    """Pods to evict from one node, by UID; how many of them violate a disruption budget."""

    uids: tuple[str, ...]
    violations: int = 0


@dataclass(frozen=True, slots=True)
class PreemptionArgs:
    """A preempt request: the preemptor and, per node, the victims that kube-scheduler proposes."""

    pod: Mapping[str, Any]
    victims: Mapping[str, Victims]


class Verdict(NamedTuple):
    """The decision on a filter request. A tuple, as Decision is.

    `chosen`: the node, or None. `codes`: per requested name why not (see ROW_CODES), or None if not worked out.
    `quota`: which quota closes the nodes that would fit. `whys`: by name what only that node has. `refusal`: one reason
    and message for all nodes; `curable`: whether evicting other pods might help. `passed`: with no node chosen,
    those among which kube-scheduler may choose.
    """

    chosen: str | None = None
    codes: Sequence[int] | None = None
    refusal: tuple[AnyReason, str] | None = None
    curable: bool = False
    quota: str = ""
    whys: Mapping[str, str] = MappingProxyType({})
    passed: Sequence[str] = ()


def check_weight(body: bytes) -> None:
    """Raises BadInput for a body that would become too many objects to be read."""
    heavy = weight.too_heavy(body, max(weight.MOST, _MOST_TIMES * len(body)))
    if heavy is not None:
        raise BadInput(f"{heavy}; no pod and no list of nodes has so many fields")


def _object(body: bytes) -> dict[str, Any]:
    try:
        data = nesting.loads(body, orjson.loads)
    except orjson.JSONDecodeError as error:
        raise BadInput(f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise BadInput(f"the body is a JSON {type(data).__name__}, not an object")
    return {key.lower(): value for key, value in data.items()}


def _whole_nodes(value: object) -> dict[str, Mapping[str, Any]]:
    items = value.get("items", value.get("Items")) if isinstance(value, dict) else None
    if not isinstance(items, list):
        raise BadInput("Nodes is not a NodeList with items")
    nodes = {}
    for position, node in enumerate(items):
        metadata = node.get("metadata") if isinstance(node, dict) else None
        name = metadata.get("name") if isinstance(metadata, dict) else None
        if not isinstance(name, str) or not name:
            raise BadInput(f"Nodes.items[{position}] has no metadata.name")
        nodes[name] = node
    return nodes


def _pod(data: Mapping[str, Any]) -> Mapping[str, Any]:
    pod = data.get("pod")
    if not isinstance(pod, dict):
        raise BadInput("Pod is missing or not an object")
    for field in ("metadata", "spec"):
        if not isinstance(pod.get(field), dict):
            raise BadInput(f"Pod.{field} is missing or not an object")
    for field in ("containers", "initContainers"):
        containers = pod["spec"].get(field)
        if not isinstance(containers, list | None) or not all(isinstance(one, dict) for one in containers or ()):
            raise BadInput(f"Pod.spec.{field} is not a list of containers")
    return pod


def read_args(
    body: bytes, offered: Callable[[bytes], tuple[bytes, Sequence[str]] | None] = lambda _: None
) -> ExtenderArgs:
    """Read ExtenderArgs. Raises BadInput.

    `offered` takes NodeNames out of a body, if it can, and reads them faster.
    """
    found = offered(body)
    data = _object(body if found is None else found[0])
    if found is not None and data.get("nodenames") is not None:
        found, data = None, _object(body)  # given twice, once with an escape in its key
    pod = _pod(data)
    if found is not None:
        return ExtenderArgs(pod, found[1], None)
    names, nodes = data.get("nodenames"), data.get("nodes")
    if names is None and nodes is None:
        raise BadInput("neither NodeNames nor Nodes is given")
    if names is None:
        whole = _whole_nodes(nodes)
        return ExtenderArgs(pod, list(whole), whole)
    # str.join is the fastest check that a list holds nothing but strings.
    try:
        "".join(names)
    except TypeError:
        raise BadInput("NodeNames is not a list of strings") from None
    if not isinstance(names, list):
        raise BadInput("NodeNames is not a list of strings")
    return ExtenderArgs(pod, names, None)


def _is_name(value: str, *, uid: bool) -> bool:
    """Whether a text may name an object in a URL; a UID is no part of one, and has no certain form."""
    if uid:
        return 0 < len(value) <= 253 and "/" not in value
    try:
        checked(value)
    except BadName:
        return False
    return True


def read_binding(body: bytes) -> BindingArgs:
    """Read ExtenderBindingArgs. Raises BadInput."""
    usual = _BINDING.fullmatch(body) if len(body) <= _SHORT_BINDING else None
    if usual is not None:
        return BindingArgs(*usual[0].decode().split('"')[3::4])
    data = _object(body)
    values: list[str] = []
    for field in ("PodName", "PodNamespace", "PodUID", "Node"):
        value = data.get(field.lower())
        named = isinstance(value, str) and _is_name(value, uid=field == "PodUID")
        if not isinstance(value, str) or not named:
            raise BadInput(f"{field} is missing or not a name")
        values.append(value)
    return BindingArgs(*values)


def _victims(where: str, value: object) -> Victims:
    if value is None:
        return Victims(())
    if not isinstance(value, dict):
        raise BadInput(f"{where} is not an object")
    fields = {str(key).lower(): one for key, one in value.items()}
    uids = []
    for position, pod in (
        enumerate(fields.get("pods") or ()) if isinstance(fields.get("pods"), list | None) else [(0, None)]
    ):
        place = f"{where}.Pods[{position}]"
        if not isinstance(pod, dict):
            raise BadInput(f"{place} is not an object")
        # A MetaPod has the UID itself; a whole pod has it in its metadata.
        uid = next((one for key, one in pod.items() if key.lower() == "uid"), None)
        if uid is None and isinstance(pod.get("metadata"), dict):
            uid = pod["metadata"].get("uid")
        if not isinstance(uid, str) or not uid:
            raise BadInput(f"{place} has no UID")
        uids.append(uid)
    violations = fields.get("numpdbviolations") or 0
    if isinstance(violations, bool) or not isinstance(violations, int) or violations < 0:
        raise BadInput(f"{where}.NumPDBViolations is not a number from 0")
    return Victims(tuple(dict.fromkeys(uids)), violations)


def read_preemption(body: bytes) -> PreemptionArgs:
    """Read ExtenderPreemptionArgs, with whole pods or with UIDs only. Raises BadInput."""
    data = _object(body)
    pod = _pod(data)
    found: dict[str, Victims] = {}
    for field in ("NodeNameToVictims", "NodeNameToMetaVictims"):
        value = data.get(field.lower())
        if value is None:
            continue
        if not isinstance(value, dict):
            raise BadInput(f"{field} is not a map of nodes to victims")
        found |= {name: _victims(f"{field}[{name:.60}]", one) for name, one in value.items()}
    return PreemptionArgs(pod, found)


def preemption_answer(victims: Mapping[str, Victims]) -> bytes:
    """ExtenderPreemptionResult: always UIDs only."""
    answer = {
        name: {"Pods": [{"UID": uid} for uid in one.uids], "NumPDBViolations": one.violations}
        for name, one in victims.items()
    }
    return orjson.dumps({"NodeNameToMetaVictims": answer})


def filter_answer(args: ExtenderArgs, verdict: Verdict) -> bytes:
    """ExtenderFilterResult. On success exactly the chosen node; the others with their reasons."""
    failed: dict[str, str] = {}
    hopeless: dict[str, str] = {}
    if verdict.refusal is not None:
        (failed if verdict.curable else hopeless).update(
            dict.fromkeys(args.names, f"{verdict.refusal[0]}: {told(verdict.refusal[1])}")
        )
    elif verdict.codes is not None:
        labels = _LABELS if verdict.chosen is not None else REFUSALS
        if verdict.quota and verdict.chosen is None:
            labels = REFUSALS.copy()
            labels[CODE_OF[ExtenderReason.QUOTA_EXCEEDED]] += f": {told(verdict.quota)}"
        if UNRESOLVABLE.isdisjoint(verdict.codes):
            failed = dict(zip(args.names, map(labels.__getitem__, verdict.codes), strict=True))
        else:
            for name, code in zip(args.names, verdict.codes, strict=True):
                (hopeless if code in UNRESOLVABLE else failed)[name] = labels[code]
        for name, why in verdict.whys.items():
            into = hopeless if name in hopeless else failed
            into[name] = f"{into[name].partition(':')[0]}: {told(why)}"
        if verdict.chosen is not None:
            failed.pop(verdict.chosen, None)
    return _result(args, verdict.passed if verdict.chosen is None else [verdict.chosen], failed, hopeless)


def simulated(args: ExtenderArgs, reasons: Mapping[str, str]) -> bytes:
    """ExtenderFilterResult with all nodes that fit: those without a reason."""
    failed = {name: told(reason) for name, reason in reasons.items() if reason}
    return _result(args, [name for name in args.names if name not in failed], failed, {})


def untouched(args: ExtenderArgs) -> bytes:
    """The answer for a pod that is none of our business: all nodes pass."""
    return _result(args, list(args.names), {}, {})


def _named(failed: dict[str, str]) -> dict[str, str]:
    """With keys that may be shown: one that is no node's name is of no use to kube-scheduler."""
    if max(map(len, failed), default=0) <= _LONGEST_NAME and "".join(failed).isprintable():
        return failed
    return {told(name, _LONGEST_NAME): why for name, why in failed.items()}


def _result(args: ExtenderArgs, passed: Sequence[str], failed: dict[str, str], hopeless: dict[str, str]) -> bytes:
    if (failed or hopeless) and not args.known:
        failed, hopeless = _named(failed), _named(hopeless)
    nodes = None if args.nodes is None else {"metadata": {}, "items": [args.nodes[name] for name in passed]}
    return orjson.dumps(
        {
            "Nodes": nodes,
            "NodeNames": None if args.nodes is not None else passed,
            # Schedulers before 1.21 know FailedNodes only; from 1.21 on a node in both counts as unresolvable.
            "FailedNodes": {**failed, **hopeless} if hopeless else failed,
            "FailedAndUnresolvableNodes": hopeless,
            "Error": "",
        }
    )


def priorities(scores: Sequence[tuple[str, int]]) -> bytes:
    """HostPriorityList."""
    return orjson.dumps([{"Host": name, "Score": score} for name, score in scores])


def binding_answer(error: str) -> bytes:
    """ExtenderBindingResult; empty means bound."""
    return orjson.dumps({"Error": error})
