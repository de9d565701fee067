"""Quotas: what a namespace may hold, in all or by card models and nodes; read from a ConfigMap, checked per node."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import yaml

from scheduler_ext.scoring import placing
from scheduler_ext.scoring.exact_search import NO_LIMIT
from scheduler_ext.scoring.reported import Amounts, Reported, blocks_of
from scheduler_ext.scoring.scores import Table
from scheduler_ext.state.cluster import Bools, Cluster, Ints
from scheduler_ext.state.pods import PodCache, Record, Source
from vcuda import plain_yaml
from vcuda.printable import told
from vcuda.quoted import quoted
from vcuda.spec.bookings import Use
from vcuda.spec.inventory import Card
from vcuda.spec.units import CORES_PER_CARD

KEY = "quotas"  # of the ConfigMap's data
AMOUNTS = ("cores", "memoryBlocks", "cards")
_FIELDS = {"namespace", "models", "nodes", *AMOUNTS}
_LIFTED = f'to lift all quotas delete it, or write {KEY}: "[]"'
_MOST = 2**40
_MOST_GONE = 1024  # nodes
_AT_ONCE = 128  # pods that are counted in one hold of the lock; a node's own are never parted

_PLAIN = re.compile(r"-?(0|[1-9][0-9]*)")
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")  # RFC 1123, as Kubernetes' names of namespaces
_LABEL = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_LONGEST_NUMBER = 40  # characters; of 4,300 Python makes none
_LONGEST_MODEL = 96  # characters: NVML's NVML_DEVICE_NAME_V2_BUFFER_SIZE

_Key = tuple[str, int]  # namespace and position


class InvalidQuotas(ValueError):
    """The ConfigMap can't be understood; the message names the entry."""

    def __init__(self, message: str) -> None:
        super().__init__(told(message))


class _Loader(plain_yaml.Loader):
    """YAML 1.1 takes 0200 for 128 and 1:40 for 100: nobody means that."""

    def construct_plain_int(self, node: yaml.ScalarNode) -> int:
        text = str(node.value)
        if _PLAIN.fullmatch(text) and len(text) <= _LONGEST_NUMBER:
            return int(text)
        line = node.start_mark.line + 1
        if len(text) > _LONGEST_NUMBER:
            raise InvalidQuotas(f"line {line} of {KEY} has a number of {len(text)} characters")
        value = self.construct_yaml_int(node)
        raise InvalidQuotas(
            f"line {line} of {KEY} has {quoted(text, 40)}, which YAML reads as {value}; write {value} if that is meant"
        )


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_plain_int)


@dataclass(frozen=True)
class Quota:
    """Limits of one namespace: at most `limits` (hundredths of a card, 256 MiB blocks, whole cards; None: no limit).

    `models` (empty: all) and `nodes` (labels, all of which a node must have) say which cards count.
    """

    namespace: str
    limits: tuple[int | None, int | None, int | None]
    models: frozenset[str] = frozenset()
    nodes: Mapping[str, str] = field(default_factory=dict)

    @property
    def scope(self) -> str:
        """Which cards count, for people; "" if all do."""
        parts = [f"models {', '.join(sorted(self.models))}"] if self.models else []
        return " and ".join(parts + [f"nodes with {key}={value}" for key, value in sorted(self.nodes.items())])

    def __str__(self) -> str:
        return f"namespace {self.namespace}" + (f" on {self.scope}" if self.scope else "")


class Standing(NamedTuple):
    """A quota and what is held against it: hundredths of a card, 256 MiB blocks, whole cards."""

    namespace: str
    scope: str
    limits: tuple[int | None, int | None, int | None]
    held: tuple[int, int, int]


def _quota(position: int, entry: object) -> Quota:
    where = f"{KEY}[{position}]"
    if not isinstance(entry, dict) or not isinstance(entry.get("namespace"), str) or not entry["namespace"]:
        raise InvalidQuotas(f"{where} has no namespace")
    if not _NAMESPACE.fullmatch(entry["namespace"]):
        raise InvalidQuotas(f"{where}.namespace is {quoted(entry['namespace'], 80)}, which no namespace can be called")
    unknown = set(entry) - _FIELDS
    if unknown:
        raise InvalidQuotas(f"{where} has unknown fields: {', '.join(sorted(map(str, unknown)))}")
    for name in AMOUNTS:
        value = entry.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
            raise InvalidQuotas(f"{where}.{name} is {quoted(value, 40)}, not a whole number from 0")
    if not any(name in entry for name in AMOUNTS):
        raise InvalidQuotas(f"{where} limits nothing; give {', '.join(AMOUNTS[:-1])} or {AMOUNTS[-1]}")
    models, nodes = entry.get("models", []), entry.get("nodes", {})
    if not isinstance(models, list) or not all(isinstance(model, str) for model in models):
        raise InvalidQuotas(f"{where}.models is not a list of card models")
    for model in models:
        if not (model and model.isprintable() and model == model.strip() and len(model) <= _LONGEST_MODEL):
            raise InvalidQuotas(f"{where}.models has {quoted(model, 120)}, which is no card's")
    if not isinstance(nodes, dict) or not all(isinstance(text, str) for pair in nodes.items() for text in pair):
        raise InvalidQuotas(f"{where}.nodes is not a map of labels to texts")
    for key, value in nodes.items():
        if not (_LABEL.fullmatch(key) and _LABEL_VALUE.fullmatch(value)):
            raise InvalidQuotas(f"{where}.nodes has {quoted(f'{key}: {value}', 120)}, which no node can have as label")
    cores, blocks, cards = (entry.get(name) for name in AMOUNTS)
    return Quota(entry["namespace"], (cores, blocks, cards), frozenset(models), nodes)


def parse(config_map: Mapping[str, Any] | None) -> dict[str, list[Quota]]:
    """Quotas by namespace; none if there is no ConfigMap. Raises InvalidQuotas: a slip must not lift all of them."""
    if config_map is None:
        return {}
    data = config_map.get("data")
    text = data.get(KEY) if isinstance(data, dict) else None
    if not isinstance(text, str):
        raise InvalidQuotas(f"it has no key {KEY} ({_LIFTED})")
    try:
        entries = yaml.load(text, _Loader)
    except InvalidQuotas:
        raise
    except plain_yaml.Repeated as twice:
        said = f"line {twice.line} of {KEY} gives {quoted(twice.name, 40)} again; keep one of them"
        raise InvalidQuotas(said) from None
    except (yaml.YAMLError, ValueError) as error:  # a date that is none is the latter
        raise InvalidQuotas(f"{KEY} is not YAML: {str(error).splitlines()[0]:.100}") from None
    except RecursionError:
        raise InvalidQuotas(f"{KEY} is nested too deep") from None
    if entries is None:
        raise InvalidQuotas(f"{KEY} lists nothing ({_LIFTED})")
    if not isinstance(entries, list):
        raise InvalidQuotas(f"{KEY} is not a list")
    found: dict[str, list[Quota]] = {}
    for position, entry in enumerate(entries):
        quota = _quota(position, entry)
        found.setdefault(quota.namespace, []).append(quota)
    return found


def _amounts(use: Use, sign: int = 1) -> Amounts:
    """The sums of what a pod has of several cards; less than nothing where it has it no more (-1)."""
    cores = blocks = whole = 0
    for its_cores, its_blocks in use.values():
        cores, blocks, whole = cores + its_cores, blocks + its_blocks, whole + (its_cores >= CORES_PER_CARD)
    return Amounts(sign * cores, sign * blocks, sign * whole)


class Quotas:
    """The quotas in force, with running sums of what one book has booked against each.

    What another book has, of cards that are given otherwise, counts too (`beside`). Of what a node's manager says no
    more counts than the node has (Reported). Not locked: the engine's lock covers it.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._pods: PodCache | None = None
        self._beside: Quotas | None = None
        self._fixed: dict[_Key, Ints] = {}  # of a copy: what the other book had
        self._quotas: dict[str, list[Quota]] = {}
        self._labels: dict[str, Mapping[str, str]] = {}
        self._relabelled = 0
        self._cards: dict[str, Mapping[str, int]] = {}  # by node: blocks of those that it had last
        self._gone: dict[str, None] = {}  # nodes of these that are no more
        self._reported = Reported(self._cards)
        self._sums: dict[_Key, Ints] = {}
        self._next: Quotas | None = None  # those that will be in force once all is counted
        self._uncounted: set[str] = set()  # nodes; what is booked on them is in none of the next ones' sums yet

    def beside(self, cluster: Cluster) -> Quotas:
        """The same quotas for another book, whose cluster this is; `pair` makes each count what the other has."""
        other = Quotas(cluster)
        other._labels = self._labels
        return other

    def pair(self, pods: PodCache, other: Quotas, its_pods: PodCache) -> None:
        self._pods, other._pods = pods, its_pods
        self._beside, other._beside = other, self

    def expect(self, quotas: dict[str, list[Quota]]) -> None:
        """Begin to count against other quotas. Those in force stay so until `count_some` has counted all."""
        for one in self._all():
            one._next = Quotas(one._cluster)
            one._next._labels, one._next._quotas = one._labels, quotas
            one._next._cards, one._next._reported = one._cards, Reported(one._cards)
            one._next._sums = {
                (namespace, position): np.zeros(3, np.int64)
                for namespace, its in quotas.items()
                for position in range(len(its))
            }
            one._uncounted = set(one._cluster.nodes()) if quotas else set()

    def count_some(self) -> bool:
        """Count what is booked on a few nodes; whether more is to be done."""
        size = 0
        for one in self._all():
            while one._uncounted and one._next is not None:
                if size >= _AT_ONCE:
                    return True
                node = one._uncounted.pop()
                for record in one._here(node):
                    one._next.count(record, 1)
                    size += 1
                size += 1
        for one in self._all():
            if one._next is not None:
                one._reported = one._next._reported
                one._quotas, one._sums, one._next = one._next._quotas, one._next._sums, None
        return False

    def _all(self) -> list[Quotas]:
        return [self] if self._beside is None else [self, self._beside]

    def _here(self, node: str) -> list[Record]:
        """What is booked on a node."""
        pods = self._pods
        uids = self._cluster.bookings(node) if pods is not None else ()
        return [record for uid in uids if pods is not None and (record := pods.get(uid)) is not None]

    @contextlib.contextmanager
    def recounted(self, node: str) -> Iterator[None]:
        """What a node's labels or cards become meanwhile counts for what is booked there; nothing else is read.

        To sum a whole namespace, of 40,000 pods, would hold up everybody's filters for 40 ms.
        """
        for one in self._all():
            one._count_node(node, -1)
        try:
            yield
        finally:
            for one in self._all():
                one._count_node(node, 1)

    def _count_node(self, node: str, sign: int) -> None:
        if self._sums or self._next is not None:
            for record in self._here(node):
                self.count(record, sign)

    def labels(self, node: str) -> Mapping[str, str]:
        return self._labels.get(node, {})

    def of(self, namespace: str) -> bool:
        """Whether a namespace has any."""
        return namespace in self._quotas

    def describe(self, node: str, labels: Mapping[str, str], cards: tuple[Card, ...]) -> None:
        """Within `recounted`. A node that lists no cards any more is charged for those that it had."""
        if self._labels.get(node) != labels:
            self._labels[node] = labels
            self._relabelled += 1
        self._gone.pop(node, None)
        if cards:
            self._cards[node] = blocks_of(cards)

    def copy(self, cluster: Cluster | None = None) -> Quotas:
        """One that later changes do not reach, for a cluster of its own, on which nothing is booked yet."""
        other = Quotas(cluster or self._cluster)
        other._quotas, other._labels, other._fixed = self._quotas, dict(self._labels), dict(self._fixed)
        other._cards.update(self._cards)
        other._sums = {key: np.zeros(3, np.int64) for key in self._sums}
        if self._beside is not None:
            other._fixed |= {key: amounts.copy() for key, amounts in self._beside._sums.items()}
        return other

    def elsewhere(self, namespace: str, cluster: Cluster, labels: dict[str, Mapping[str, str]] | None = None) -> Quotas:
        """A namespace's quotas with what it holds now, for the nodes of another cluster; without labels, the same."""
        other = Quotas(cluster)
        other._quotas = {namespace: self._quotas.get(namespace, [])}
        other._labels = dict(self._labels) if labels is None else labels
        for position, quota in enumerate(self._quotas.get(namespace, ())):
            other._sums[namespace, position] = self._held(quota, position).copy()
        return other

    def forget_node(self, node: str) -> None:
        """Within `recounted`."""
        self._labels.pop(node, None)
        self._gone[node] = None  # it may come again, with its pods
        if len(self._gone) > _MOST_GONE:
            self._gone.pop(oldest := next(iter(self._gone)))
            self._cards.pop(oldest, None)

    def count(self, record: Record, sign: int) -> None:
        """A record was booked (1) or released (-1)."""
        if self._next is not None and record.node not in self._uncounted:
            self._next.count(record, sign)
        reported = record.source is Source.MANAGER
        for position, quota in enumerate(self._quotas.get(record.namespace, ())):
            key, use = (record.namespace, position), self._counted(quota, record.node, record.usage.cards)
            change = self._reported.count(key, record.node, use, sign) if reported else _amounts(use, sign)
            if any(change):
                self._sums[key] += change

    @contextlib.contextmanager
    def _without(self, namespace: str, uids: Collection[str]) -> Iterator[None]:
        """Meanwhile what some of a namespace's pods have does not count."""
        records = [self._pods.get(uid) for uid in uids] if self._pods is not None else []
        gone = [one for one in records if one is not None and one.namespace == namespace]
        for one in gone:
            self.count(one, -1)
        try:
            yield
        finally:
            for one in gone:
                self.count(one, 1)

    def _covers(self, quota: Quota, node: str) -> bool:
        labels = self._labels.get(node, {})
        return all(labels.get(key) == value for key, value in quota.nodes.items())

    def covering(self, namespace: str, node: str) -> tuple[bool, ...]:
        """Which of a namespace's quotas count what it has on a node."""
        return tuple(self._covers(quota, node) for quota in self._quotas.get(namespace, ()))

    def _counted(self, quota: Quota, node: str, cards: Use) -> Use:
        """What of a use of a node's cards counts against a quota."""
        if quota.nodes and not self._covers(quota, node):
            return {}
        if not quota.models:
            return cards
        row = self._cluster.index.get(node)
        models = {} if row is None else {card.uuid: card.model for card in self._cluster.cards[row]}
        return {uuid: amounts for uuid, amounts in cards.items() if models.get(uuid) in quota.models}

    def _held(self, quota: Quota, position: int) -> Ints:
        """What is booked against a quota in both books."""
        key = quota.namespace, position
        beside = self._fixed.get(key) if self._beside is None else self._beside._sums[key]
        return self._sums[key] if beside is None else self._sums[key] + beside

    def held(self, namespace: str) -> tuple[int, list[tuple[Quota, list[int]]]]:
        """A namespace's quotas with what is booked against each, and how often a label of a node has changed."""
        its = enumerate(self._quotas.get(namespace, ()))
        return self._relabelled, [(quota, self._held(quota, position).tolist()) for position, quota in its]

    def standing(self) -> list[Standing]:
        """Every quota with what is held against it now."""
        found = []
        for namespace, quotas in sorted(self._quotas.items()):
            for position, quota in enumerate(quotas):
                cores, blocks, cards = self._held(quota, position).tolist()
                found.append(Standing(namespace, quota.scope, quota.limits, (cores, blocks, cards)))
        return found

    def over(
        self,
        namespace: str,
        without: Collection[str],
        node: str,
        cards: Mapping[str, tuple[int, int]],
        before: Mapping[str, tuple[int, int]] | None = None,
    ) -> str:
        """Which quota a pod with this use of a node's cards would exceed when the pods in `without` are gone, or "".

        Only amounts that grow over its use `before` count: a quota may be lowered below what is held.
        """
        if not without:
            return self._over(namespace, node, cards, before or {})
        with self._without(namespace, without):
            return self._over(namespace, node, cards, before or {})

    def _over(self, namespace: str, node: str, cards: Use, before: Use) -> str:
        for position, quota in enumerate(self._quotas.get(namespace, ())):
            if quota.nodes and not self._covers(quota, node):
                continue
            used, own = self._held(quota, position), _amounts(self._counted(quota, node, cards))
            had = _amounts(self._counted(quota, node, before))
            for limit, name, held, more, old in zip(quota.limits, AMOUNTS, used, own, had, strict=True):
                if limit is not None and more > old and held + more > limit:
                    return f"{quota} may hold {limit} {name}, the others hold {held}, and this pod would hold {more}"
        return ""

    def rooms(self, namespace: str) -> Ints:
        """[quotas, 3]: the cores, blocks and whole cards that each of a namespace's quotas leaves; below 0 where it was
        lowered.
        """
        quotas = self._quotas.get(namespace, ())
        limits = [[NO_LIMIT if limit is None else limit for limit in quota.limits] for quota in quotas]
        held = [self._held(quota, position) for position, quota in enumerate(quotas)]
        return np.array(limits, np.int64).reshape(-1, 3) - np.array(held, np.int64).reshape(-1, 3)

    def counting(self, namespace: str, rows: Ints) -> Iterator[Bools]:
        """For each of a namespace's quotas, one after the other, which cards of some rows count: [rows, cards]."""
        cluster = self._cluster
        for quota in self._quotas.get(namespace, ()):
            found = np.ones((len(rows), cluster.model.shape[1]), np.bool_)
            if quota.models:
                known = np.array([model in quota.models for model in cluster.models] or [False], np.bool_)
                found &= known[cluster.model[rows]]
            if quota.nodes:
                covered = [self._covers(quota, cluster.names[row]) for row in rows.tolist()]
                found &= np.array(covered, np.bool_)[:, None]
            yield found

    def closed(self, namespace: str, table: Table, rows: Ints) -> tuple[Bools, str]:
        """Which rows, where the pod would fit, a quota closes to it; and which quota, for people."""
        cluster = self._cluster
        closed, said = np.zeros(len(rows), np.bool_), ""
        quotas = self._quotas.get(namespace, ())
        fitting = np.flatnonzero(np.isfinite(table.cost[rows])) if quotas else np.zeros(0, np.int64)
        if not len(fitting):
            return closed, said
        there = rows[fitting]
        cores, blocks = placing.peaks(table.shape, cluster.total_blocks[there], table.picks[there])
        amounts = np.stack((cores, blocks, placing.whole(table.shape, cores, table.picks[there])))
        for position, (quota, counting) in enumerate(zip(quotas, self.counting(namespace, there), strict=True)):
            counts = (cores > 0) & counting
            wanted = np.where(counts, amounts, 0).sum(axis=2)
            used = self._held(quota, position)
            for index, limit in enumerate(quota.limits):
                if limit is None:
                    continue
                over = (wanted[index] > 0) & (used[index] + wanted[index] > limit)
                closed[fitting[over]] = True
                if over.any() and not said:
                    least = int(wanted[index][over].min())
                    said = (
                        f"{quota} may hold {limit} {AMOUNTS[index]}, holds {used[index]}, and the pod would add {least}"
                    )
        return closed, said
