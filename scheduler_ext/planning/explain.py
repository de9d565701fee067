"""Says why a pod waits or where it is, from evidence: as data for programs, each part with a sentence for people."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from scheduler_ext.planning import remedies
from scheduler_ext.planning.evidence import CandidateNodes, ClaimStatus, Evidence
from scheduler_ext.planning.remedies import Remedy
from scheduler_ext.protocol.reasons import CODE_OF, FITS, ExtenderReason
from scheduler_ext.scoring.exact_search import MOST_STEPS, Budget
from scheduler_ext.state.cluster import Ints
from scheduler_ext.state.decisions import Decision, counted
from scheduler_ext.state.pods import ENDED_SECONDS, State
from vcuda.printable import told
from vcuda.spec.errors import Reason
from vcuda.spec.request import PodRequest

_MOST_NAMES = 5
_MOST_SUMMARY = 8192  # characters: what many pods are named in, or many claims
_UNHEALTHY = CODE_OF[Reason.UNHEALTHY_CARD]


def _when(nanoseconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(nanoseconds / 1e9))


def _asked(asked: PodRequest) -> list[dict[str, Any]]:
    return [
        {"container": one.name, "kind": str(one.kind), "cores": one.cores, "memory_blocks": one.memory_blocks}
        for one in asked.containers
    ]


def _decision(one: Decision) -> dict[str, Any]:
    data: dict[str, Any] = {"at": _when(one.at_ns), "candidates": one.candidates, "node": one.node}
    if one.refusal is not None:
        data |= {"reason": str(one.refusal[0]), "message": one.refusal[1]}
    if one.asked is not None and one.shape is not None:
        shape = one.shape
        data |= {
            "asked": _asked(one.asked), "policy": str(shape.policy), "priority": str(one.asked.priority),
            "cpu_milli": shape.cpu_milli, "memory_bytes": shape.memory_bytes,
        }  # fmt: skip
        if shape.card_policy is not None:
            data["card_policy"] = str(shape.card_policy)
        for key, cards in (("models", shape.models), ("uuids", shape.uuids)):
            if cards.include or cards.exclude:
                data[key] = {"include": sorted(cards.include), "exclude": sorted(cards.exclude)}
    if one.counts is not None:
        data["reasons"] = {str(reason): count for reason, count in one.counts.items()}
    return data


def _remedy(one: Remedy) -> dict[str, Any]:
    data: dict[str, Any] = {"text": one.text, "node": one.node}
    if len(one.less) == 1:
        data |= {"container": one.less[0][0], "less": dict(one.less[0][1])}
    elif one.less:
        data["containers"] = {name: dict(less) for name, less in one.less}
    if one.instead is not None:
        data["instead"] = dict(zip(("core", "block"), one.instead, strict=True))
    if one.pods:
        data["pods"] = list(one.pods)
    if one.cut_off:
        data["cut_off"] = True
    return data


def _claim(one: ClaimStatus) -> dict[str, Any]:
    more = {"problem": one.problem, "difference": one.difference}
    said = {key: text for key, text in more.items() if text}
    return {"name": one.name, "state": one.state, "node": one.node, "cards": _cards(one.cards)} | said


def _cards(use: Mapping[str, tuple[int, int]]) -> dict[str, dict[str, int]]:
    return {uuid: {"cores": cores, "memory_blocks": blocks} for uuid, (cores, blocks) in use.items()}


def _waiting(evidence: Evidence) -> dict[str, Any]:
    last, candidates = evidence.decisions[0], evidence.candidates
    if last.refusal is not None:
        return {"state": "refused", "summary": f"{last.refusal[0]}: {last.refusal[1]}"}
    if last.node is not None and any(one.state == "assumed" for one in evidence.claims):
        return {"state": "assumed", "summary": f"is expected on node {last.node}, which kube-scheduler decides"}
    given = [one for one in evidence.claims if one.state == "allocated"]
    if given:
        return {"state": "allocated", "summary": f"waits to be bound to node {given[0].node} by kube-scheduler"}
    if last.node is not None:
        return {
            "state": "released",
            "summary": f"node {last.node} was chosen, but the pod was not bound in time, has ended or was deleted",
        }
    if evidence.claims and last.counts is not None:
        why = ", ".join(f"{reason} on {count}" for reason, count in last.counts.items())
        known = f"no card is known to be free for its claims ({why})"
        if any(one.state == "undecided" for one in evidence.claims):
            known = "nobody knows here whether its claims ask for cards of ours"
        summary = f"{known}; all nodes were left to kube-scheduler"
        return {"state": "waiting", "summary": summary}
    if candidates is None or not candidates.nodes or last.asked is None:
        return {"state": "waiting", "summary": "kube-scheduler offered no node that is known here"}
    # On each node as far as any search goes there: 1 s for 5,000 where all of them need that.
    whole = Budget(MOST_STEPS * len(candidates.nodes))
    codes = candidates.codes_with(np.arange(len(candidates.nodes)), None, budgets=whole)
    counts = counted(codes)
    fitting = [candidates.nodes[position] for position in np.flatnonzero(codes == FITS).tolist()]
    data: dict[str, Any] = {"state": "waiting", "would_fit": []}
    if fitting and last.quota:
        # The quota is of the time of the decision; kube-scheduler asks again when pods end.
        data["summary"] = f"{ExtenderReason.QUOTA_EXCEEDED}: {last.quota}"
        return data
    if fitting:
        data["fits_now_on"] = fitting[:_MOST_NAMES]
        data["summary"] = f"fits now on node {fitting[0]}; kube-scheduler will ask again"
        return data
    data["reasons_now"] = {str(reason): count for reason, count in counts.items()}
    ways = remedies.ways_out(candidates, last.asked, codes)
    data["would_fit"] = [_remedy(way) for way in ways]
    if sick := _unhealthy(candidates, codes):
        data["unhealthy"] = sick
    of = f"0 of {len(candidates.nodes)} nodes that kube-scheduler offered fit"
    why = ", ".join(f"{reason} on {count}" for reason, count in counts.items())
    told = "".join(f"; {one['why']} (node {one['node']})" for one in sick)
    data["summary"] = f"{of}: {why}{told}" if why else of
    if candidates.cuts and not ways:
        data["summary"] += "; the search for what would let it in was cut off before it found anything"
    return data


def _unhealthy(candidates: CandidateNodes, codes: Ints) -> list[dict[str, str]]:
    """Why some nodes' cards are unhealthy: one node for each reason."""
    found: dict[str, str] = {}
    for position in np.flatnonzero(codes == _UNHEALTHY).tolist():
        for card in candidates.cards[position]:
            if card.why:
                found.setdefault(card.why, candidates.nodes[position])
    return [{"why": why, "node": node} for why, node in list(found.items())[:_MOST_NAMES]]


def explanation(evidence: Evidence) -> dict[str, Any] | None:
    """What is known about a pod; None if nothing is. Uses the evidence up."""
    record, decisions = evidence.record, evidence.decisions
    if record is not None:
        identity = (record.uid, record.namespace, record.name)
        cards = _cards(record.usage.cards)
        if evidence.waits_for:
            summary = f"cards of node {record.node} are kept for it until the end of {', '.join(evidence.waits_for)}"
        elif record.state is State.NOMINATED:
            summary = f"cards of node {record.node} are kept for it; kube-scheduler will ask again"
        else:
            what = "runs" if record.state is State.CONFIRMED else f"is {record.state.value}"
            summary = f"{what} on node {record.node}"
        found: dict[str, Any] = {
            "state": record.state.value, "node": record.node, "cards": cards,
            "booked_from": record.source.value, "summary": summary,
        }  # fmt: skip
        if evidence.ended:
            found["ended"] = True
            found["summary"] += (
                f"; it has ended, and gpu-manager of node {record.node} still reports its share: free once that does "
                "not, and, unless that says anew that its processes go on, where a pod fits nowhere else and after "
                f"{ENDED_SECONDS:g} s"
            )
        if evidence.difference is not None:
            found["difference"] = evidence.difference
            found["summary"] += f"; {evidence.difference}"
    elif decisions:
        identity = (decisions[0].uid, decisions[0].namespace, decisions[0].name)
        found = _waiting(evidence)
    else:
        return None
    if evidence.gang is not None:
        found["gang"] = asdict(evidence.gang)
        if record is None or record.state is not State.CONFIRMED:
            found["summary"] += f"; {evidence.gang}"
    if evidence.claims:
        found["claims"] = [_claim(one) for one in evidence.claims]
        found["summary"] += f"; {'; '.join(map(str, evidence.claims))}"
    if evidence.waits_for:
        found["waits_for"] = list(evidence.waits_for)
    if evidence.candidates is not None:
        evidence.candidates.let_go()
    pod = dict(zip(("uid", "namespace", "name"), identity, strict=True))
    whole: dict[str, Any] = _clean({"pod": pod} | found | {"decisions": [_decision(one) for one in decisions]})
    return whole


def _clean(data: Any) -> Any:
    """The same with every text fit to be shown: names and annotations are their authors'."""
    if isinstance(data, str):
        return told(data, _MOST_SUMMARY)
    if isinstance(data, Mapping):
        return {_clean(key): _clean(value) for key, value in data.items()}
    return [_clean(one) for one in data] if isinstance(data, list | tuple) else data
