"""Chooses cards for one class of pods on many nodes, and says what each choice costs: the C core's typed face."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_ext.protocol.reasons import CODE_OF, FITS
from scheduler_ext.scoring import exact_search
from scheduler_ext.scoring.typical_pods import Typical
from scheduler_ext.state.cluster import Bools, Cluster, Floats, Ints, View
from scheduler_ext.state.shape import Shape
from vcuda._native import ffi, lib
from vcuda.spec.errors import Reason
from vcuda.spec.request import Policy
from vcuda.spec.units import CORES_PER_CARD

_POLICIES = {
    Policy.FGD: lib.VC_FGD,
    Policy.BINPACK: lib.VC_BINPACK,
    Policy.SPREAD: lib.VC_SPREAD,
    Policy.TOPOLOGY: lib.VC_TOPOLOGY,
}
_REASONS = (
    Reason.UNHEALTHY_CARD, Reason.CARD_NOT_ALLOWED, Reason.INSUFFICIENT_WHOLE_CARDS, Reason.INSUFFICIENT_CORES,
    Reason.INSUFFICIENT_MEMORY,
)  # fmt: skip
_CODES = ffi.new("struct vc_codes *", [CODE_OF[reason] for reason in _REASONS])
_TYPE = {"l": "int64_t[]", "d": "double[]", "?": "uint8_t[]", "B": "uint8_t[]"}


class _Struct:
    """A struct of the core, and what keeps the arrays that it points to alive."""

    def __init__(self, kind: str, **fields: Any) -> None:
        self._held = [_pointer(value) if isinstance(value, np.ndarray) else value for value in fields.values()]
        self.pointer = ffi.new(f"struct {kind} *", dict(zip(fields, self._held, strict=True)))
        self.changed: Any = None  # of a cluster's nodes


def _pointer(array: npt.NDArray[Any]) -> Any:
    return ffi.from_buffer(_TYPE[array.dtype.char], array)


_NODE_FIELDS = (
    "free_cores", "free_blocks", "total_blocks", "model", "size", "usable", "links", "free_cpu", "free_memory",
)  # fmt: skip


def _nodes(arrays: Cluster | View) -> _Struct:
    found = {name: np.ascontiguousarray(getattr(arrays, name)) for name in _NODE_FIELDS}
    if isinstance(arrays, Cluster):
        found["code"] = arrays.code
    return _Struct("vc_nodes", columns=arrays.free_cores.shape[1], **found)


def _of_cluster(cluster: Cluster) -> _Struct:
    """Made anew only when the cluster has got new arrays."""
    if cluster.native is None:
        cluster.native = _nodes(cluster)
        cluster.native.changed = _pointer(cluster.changed)
    found: _Struct = cluster.native
    return found


@functools.lru_cache(maxsize=4)
def _typical(typical: Typical) -> _Struct:
    names = ("cores", "blocks", "cards", "whole", "cpu_milli", "memory_bytes", "weight", "values", "rent")
    arrays = {name: np.ascontiguousarray(getattr(typical, name)) for name in names}
    if typical.allowed is not None:
        arrays["allowed"] = np.ascontiguousarray(typical.allowed)
    return _Struct(
        "vc_typical", count=len(typical.cores), sizes=len(typical.rent), models=typical.rent.shape[1],
        cpu_per_card=typical.cpu_per_card, memory_per_card=typical.memory_per_card, **arrays,
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _wish(shape: Shape) -> _Struct:
    steps = ffi.new(
        "struct vc_step[]",
        [(one.cores, one.blocks, one.cards, one.whole, one.init, one.sidecars_before) for one in shape.steps],
    )
    return _Struct(
        "vc_wish", steps=steps, count=len(shape.steps), columns=shape.columns, cpu_milli=shape.cpu_milli,
        memory_bytes=shape.memory_bytes, node_policy=_POLICIES[shape.policy],
        card_policy=_POLICIES[shape.card_policy] if shape.card_policy else lib.VC_NO_POLICY,
    )  # fmt: skip


def reads_workload(shape: Shape) -> bool:
    """Whether a shape's costs change when the typical pods do."""
    return Policy.FGD in (shape.policy, shape.card_policy)


class Plan(NamedTuple):
    """For each of k nodes: its cost (inf: impossible), the reason code (0: fits), the picked columns in step order."""

    cost: Floats
    code: Ints
    picks: Ints

    @classmethod
    def empty(cls, count: int, columns: int) -> Plan:
        return cls(np.full(count, np.inf), np.zeros(count, np.int64), np.zeros((count, columns), np.int64))


def plan(
    shape: Shape, view: View, allowed: Bools | None, typical: Typical,
    budgets: exact_search.Budget | Sequence[exact_search.Budget] | None = None,
) -> Plan:  # fmt: skip
    """Choose cards on every node of `view`. `allowed` [k, cards]: cards that the pod accepts (None: all).

    `budgets`: of the exact search, one for all or one for each node; None: a request's for all.
    """
    rows = np.arange(len(view.rows))
    found = Plan.empty(len(rows), shape.columns)
    _place(shape, view, _nodes(view), allowed, typical, rows, found, budgets or exact_search.Budget(), at_rows=False)
    return found


def plan_rows(
    shape: Shape, cluster: Cluster, rows: Ints, allowed: Bools | None, typical: Typical, plan: Plan,
    budget: exact_search.Budget,
) -> list[int]:  # fmt: skip
    """The same for some rows of the cluster, into the rows of `plan`; what closes a node to all pods counts here.

    Returns rows that are refused only because the budget was over before they were searched.
    """
    return _place(shape, cluster, _of_cluster(cluster), allowed, typical, rows, plan, budget, at_rows=True)


class Places:
    """Where a table's arrays and its shape are, for the core: made anew only when the table has got new arrays."""

    def __init__(self, shape: Shape, planned: Ints, plan: Plan) -> None:
        """`planned`: the cluster's clock when each row was."""
        self.plan = plan
        self._held = [_pointer(array) for array in plan]  # keeps the arrays alive
        self.wish, self.planned = _wish(shape), _pointer(planned)
        self.plans = ffi.new("struct vc_plans *", self._held)


def refresh(places: Places, cluster: Cluster, typical: Typical) -> None:
    """Plan the rows that changed since they were planned (cluster's clock), for a shape of one step, unfiltered."""
    nodes, pods = _of_cluster(cluster), _typical(typical).pointer
    if lib.vc_refresh(
        nodes.pointer, pods, places.wish.pointer, _CODES, nodes.changed, places.planned, len(cluster), cluster.clock,
        places.plans[0],
    ):  # fmt: skip
        raise MemoryError("no memory to plan in")


def _place(
    shape: Shape, arrays: Cluster | View, nodes: _Struct, allowed: Bools | None, typical: Typical, rows: Ints,
    plan: Plan, budget: exact_search.Budget | Sequence[exact_search.Budget], *, at_rows: bool,
) -> list[int]:  # fmt: skip
    accepted = ffi.NULL if allowed is None else _pointer(allowed)
    plans = [_pointer(array) for array in plan]
    wish, pods = _wish(shape).pointer, _typical(typical).pointer
    if lib.vc_place(nodes.pointer, pods, wish, _CODES, accepted, _pointer(rows), len(rows), at_rows, plans):
        raise MemoryError("no memory to plan in")
    unsure = list[int]()
    if len(shape.steps) == 1:
        return unsure
    for place, row in enumerate(rows.tolist()):
        at = row if at_rows else place
        if plan.code[at] == FITS or (isinstance(arrays, Cluster) and arrays.code[row] != FITS):
            continue
        usable = arrays.usable[row] if allowed is None else arrays.usable[row] & allowed[place]
        if usable.any():
            own = budget if isinstance(budget, exact_search.Budget) else budget[place]
            if not _second_look(shape, arrays, row, usable, own, plan, at, (nodes.pointer, pods, wish)):
                unsure.append(at)
    return unsure


def _second_look(
    shape: Shape, arrays: Cluster | View, row: int, usable: Bools, budget: exact_search.Budget, plan: Plan, at: int,
    structs: Iterable[Any],
) -> bool:  # fmt: skip
    """Search on a row that greed refused, and put what is found into the plan. False: the budget was over before."""
    free = (np.maximum(arrays.free_cores[row], 0), np.maximum(arrays.free_blocks[row], 0))
    amounts = (*free, arrays.total_blocks[row])
    cards = list(zip(*(np.where(usable, amount, 0).tolist() for amount in amounts), strict=True))
    found, sure = exact_search.search(shape, cards, budget)
    if found is None:
        return sure
    cores, blocks = peaks(shape, arrays.total_blocks[row : row + 1], np.array([found], np.int64))
    cost = lib.vc_cost_of(*structs, row, _pointer(cores), _pointer(blocks))
    plan.cost[at], plan.code[at], plan.picks[at] = cost, FITS, found
    return True


def cost_of(shape: Shape, cluster: Cluster, row: int, picks: Sequence[int], typical: Typical) -> float:
    """What these picks cost on a row of the cluster."""
    cores, blocks = peaks(shape, cluster.total_blocks[row : row + 1], np.array([picks], np.int64))
    structs = _of_cluster(cluster).pointer, _typical(typical).pointer, _wish(shape).pointer
    cost: float = lib.vc_cost_of(*structs, row, _pointer(cores), _pointer(blocks))
    return cost


def fragmentation(view: View, typical: Typical) -> Floats:
    """[rows]: how many cards' worth of each node's free cards the expected typical pod can't use."""
    rows = np.arange(len(view.rows))
    found = np.zeros(len(rows))
    if lib.vc_fragmentation(
        _nodes(view).pointer, _typical(typical).pointer, _pointer(rows), len(rows), _pointer(found)
    ):
        raise MemoryError("no memory to look at fragments in")
    return found


def cheapest(costs: Floats, order: Ints, rows: Ints) -> int | None:
    """The row of least cost among `rows`, of equals the first by `order`; None if none is finite.

    Rows of -1 do not count.
    """
    row = lib.vc_cheapest(_pointer(costs), _pointer(order), _pointer(rows), len(rows))
    return None if row < 0 else row


def peaks(shape: Shape, totals: Ints, picks: Ints) -> tuple[Ints, Ints]:
    """(cores, blocks) that a shape books per card, [k, cards], with these picks: the peak over its phases."""
    rows = np.arange(len(picks))[:, None]
    zero = np.zeros_like(totals)
    peak_cores, peak_blocks = zero.copy(), zero.copy()
    phases = [(zero, zero)]
    column = 0
    for step in shape.steps:
        taken = picks[:, column : column + step.cards]
        column += step.cards
        standing = phases[step.sidecars_before] if step.init else phases[-1]
        cores, blocks = standing[0].copy(), standing[1].copy()
        cores[rows, taken] += step.cores
        blocks[rows, taken] += totals[rows, taken] if step.whole else step.blocks
        peak_cores, peak_blocks = np.maximum(peak_cores, cores), np.maximum(peak_blocks, blocks)
        if not step.init:
            phases.append((cores, blocks))
    return peak_cores, peak_blocks


def whole(shape: Shape, cores: Ints, picks: Ints) -> Ints:
    """1 per card, [k, cards], of which a pod with these peaks and picks has all cores; of claims, how many have."""
    if not shape.parts:
        return (cores >= CORES_PER_CARD).astype(np.int64)
    found, first, rows, zero = np.zeros_like(cores), 0, np.arange(len(picks))[:, None], np.zeros_like(cores)
    column = 0
    for count in shape.parts:
        own = zero.copy()
        for step in shape.steps[first : first + count]:
            own[rows, picks[:, column : column + step.cards]] += step.cores
            column += step.cards
        first += count
        found += own >= CORES_PER_CARD
    return found
