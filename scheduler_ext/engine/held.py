"""What goes on without a pod: what a node's manager reports, and no pod explains, stays booked there as nobody's.

Only a pod that is booked on that node explains it: by our own write, or by its binding. One that waits or is elsewhere,
as far as we know, may run there all the same: a Binding is carried out late, or the API server went back. A report
that went back with it does not say what came since: what we knew stays held until that manager writes another.

That is derived whenever a report, a deletion or a list comes, in whatever order; a manager's word counts for its own
node alone. It counts against no quota. Of who is deleted by force no report may have come yet: that one is held for as
long as it can take.
"""

from __future__ import annotations

import collections
import itertools
import logging
from collections.abc import Collection, Mapping
from typing import NamedTuple

from scheduler_ext.engine.cache import SchedulerCache
from scheduler_ext.state.cluster import Usage
from scheduler_ext.state.pods import GONE_SECONDS, HELD, Gone, Record, State
from vcuda.logs import fields
from vcuda.spec import resize
from vcuda.spec.bookings import Report, Use

_MOST_GIVING_WAY = 512  # that filter looks at at once; all others stay booked meanwhile
_MOST_DELETED = 8192  # of whose end we know when it was, and their names, until a report names them
_MOST_TOLD = 20  # lines of log of a node at once
_UNDONE_SECONDS = 60.0  # a manager writes its report again within seconds, unless what it would write stands there
_NEVER_GIVEN = (State.NOMINATED, State.ASSUMED)
_log = logging.getLogger(__name__)


def held(node: str, uid: str) -> str:
    """The UID under which something stays booked."""
    return f"{HELD}{node}/{uid}"


class _Deleted(NamedTuple):
    node: str
    name: str
    since: float


class _Undone(NamedTuple):
    """What the API server went back to: a node's report that lets go of nothing. Until when on our clock."""

    report: Report
    until: float


class Held:
    """Not locked: the engine's lock covers it."""

    def __init__(self, cache: SchedulerCache) -> None:
        self._cache = cache
        self._begun = False
        self._on: dict[str, set[str]] = {}  # by node: what is held there
        self._over: dict[str, set[str]] = {}  # by node: who has ended, and is free until a new report names it
        self._deleted: collections.OrderedDict[str, _Deleted] = collections.OrderedDict()
        # Held for less than ten seconds: those whose deletion we saw; what only a report says, which may make up any
        # number; pods that we know not to be there, or that a restored etcd has lost, whose end nobody waits for: these
        # give way to nobody.
        self._young: tuple[dict[str, Gone], dict[str, Gone], dict[str, Gone]] = {}, {}, {}
        self._versions: dict[str, int] = {}  # by node: the last resource version
        self._back: dict[str, _Undone] = {}  # by node
        self._gave_way: dict[str, Gone] = {}  # and are not booked until the newcomer is

    def begin(self) -> None:
        """Nodes and pods were listed: whom a report names now without an object has none."""
        if not self._begun:
            self._begun = True
            for node in self._cache.reports:
                self.look(node, None)

    def went_back(self, node: str, version: int) -> bool:
        """Whether the API server shows a node as it was before it was last seen; 0: it does not say."""
        before, self._versions[node] = self._versions.get(node, 0), version
        return 0 < version < before

    def look(self, node: str, before: Report | None, *, back: bool = False) -> None:
        """A node's report has come, after another one, or it has none any more. `back`: it is of before that one."""
        report = self._cache.reports.get(node)
        named: Mapping[str, Use] = {} if report is None else report.pods
        here = self._on.get(node, set())
        if back and report is not None:
            self._back[node] = _Undone(report, self._cache.clock() + _UNDONE_SECONDS)
            self._nobody_deleted(node)
        elif report is None or (node in self._back and report != self._back[node].report):
            self._back.pop(node, None)
        for uid in [uid for uid in here if not named.get(uid)]:
            # No report has a time: a newer one may have been written before the manager admitted the pod.
            if report is None or (self._cache.gone[uid][node].named and node not in self._back):
                self._let_go(uid, node)
        newer = not here or report != before
        over: Collection[str] = self._over.get(node, ())
        if report != before:  # its manager is alive
            self._over.pop(node, None)
            over = ()
        for uid, use in named.items() if self._begun else ():
            if use and (newer or uid not in here) and uid not in over and not self._explained(node, uid):
                self._hold(uid, node, use)

    def _nobody_deleted(self, node: str) -> None:
        """The API server went back: so whose deletion was seen a moment before may only be of after the backup."""
        deleted, undone = self._young[0], self._young[2]
        for key in [held(node, uid) for uid in self._on.get(node, ())]:
            if key in deleted:
                undone[key] = deleted.pop(key)
                undone[key].named = True

    def _explained(self, node: str, uid: str) -> bool:
        record = self._cache.pods.get(uid)
        return record is not None and record.node == node and record.state not in _NEVER_GIVEN

    def deleted(self, uid: str, record: Record | None, *, by_force: bool = False) -> None:
        """A pod has no object any more. `record`: what was booked for it; a report may be older than that.

        `by_force`: it had a node, and kubelet has not said that its containers have ended.
        """
        nodes = [node for node, uids in self._over.items() if uid in uids]
        if record is not None and record.usage.cards:
            self.know(record)
            nodes.append(record.node)
        for node in nodes if self._begun else ():
            self._over.get(node, set()).discard(uid)
            use = self._cache.reported(node, uid) or {}
            # No more than give way: no quota bounds how many pods of its owner's come and are deleted at once.
            may_be = by_force and node in self._cache.reports and len(self._young[0]) < _MOST_GIVING_WAY
            undone = by_force and node in self._back and record is not None and record.node == node
            if (use or may_be or undone) and (most := self._most(use, node, record)):
                self._hold(uid, node, most, named=bool(use) or undone, undone=undone)

    def _most(self, use: Use, node: str, record: Record | None) -> Use:
        """What a pod has on a node by its report and by its booking, of which either may be the older."""
        if record is None or record.node != node or record.state in _NEVER_GIVEN:
            return use
        return resize.most(use, record.usage.cards)

    def unbound(self, record: Record) -> None:
        """A pod that was bound, and is not booked any more, waits again: the API server went back.

        Its processes go on, whatever a report of before says, or one that has not named it yet.
        """
        node, report = record.node, self._cache.reports.get(record.node)
        if self._begun and record.usage.cards and report is not None:
            if not report.pods.get(record.uid) and node not in self._back:
                self._back[node] = _Undone(report, self._cache.clock() + _UNDONE_SECONDS)
            use = self._most(report.pods.get(record.uid) or {}, node, record)
            self._hold(record.uid, node, use, record=record, undone=True)
        else:
            self.left(record)

    def restored(self, record: Record) -> None:
        """A pod has no object any more, for the API server went back to before it: nobody deleted it."""
        if record.state not in _NEVER_GIVEN:
            self.unbound(record)

    def left(self, record: Record) -> None:
        """A pod is not booked any more as it was."""
        node, uid = record.node, record.uid
        use = self._cache.reported(node, uid)
        if use and self._begun and uid not in self._over.get(node, ()) and not self._explained(node, uid):
            self._hold(uid, node, self._most(use, node, record), record=record)

    def unlisted(self, uids: Collection[str]) -> None:
        """A complete list of pods has come; what is booked is looked at by itself."""
        for uid in set().union(*self._over.values()).difference(uids):
            if self._cache.pods.get(uid) is None:
                self.deleted(uid, None)

    def seen(self, uid: str, node: str) -> None:
        """The API server shows the pod on this node: it went back, or is later than the node's manager."""
        self._deleted.pop(uid, None)
        self._over.get(node, set()).discard(uid)
        if node in self._cache.gone.get(uid, ()):
            self._let_go(uid, node)

    def over(self, record: Record) -> None:
        """A pod has ended, and is free though its manager has not let go: until a new report names it, or its object
        goes.
        """
        if self._cache.reported(record.node, record.uid):
            self.know(record)
            self._over.setdefault(record.node, set()).add(record.uid)

    def know(self, record: Record) -> None:
        """Its end or its deletion was seen, so what its manager reports of it gives way for ten seconds."""
        self._deleted[record.uid] = _Deleted(record.node, f"{record.namespace}/{record.name}", self._cache.clock())
        if len(self._deleted) > _MOST_DELETED:
            self._deleted.popitem(last=False)

    def _hold(
        self, uid: str, node: str, use: Use, *, named: bool = True, record: Record | None = None, undone: bool = False
    ) -> None:
        """`record`: what was booked for it until now. `undone`: the API server went back to before it had that."""
        one = self._cache.gone.setdefault(uid, {}).get(node)
        if one is None:
            known, young = self._deleted.get(uid), self._young[0]
            if known is None or known.node != node:
                pod = record or self._cache.pods.get(uid) or self._cache.waiting.get(uid)
                name = f"{pod.namespace}/{pod.name}" if pod is not None else f"(unknown)/{uid}"
                known, young = _Deleted(node, name, self._cache.clock()), self._young[1 if pod is None else 2]
            young = self._young[2] if undone else young
            one = young[held(node, uid)] = Gone(node, uid, known.name, known.since, use, named)
            self._cache.gone[uid][node] = one
            self._on.setdefault(node, set()).add(uid)
        elif one.use == use:
            one.named |= named
            return
        one.use, one.named = use, one.named or named
        self._book(one)

    def _book(self, one: Gone) -> None:
        usage = Usage(dict(one.use))
        uid, now = held(one.node, one.uid), self._cache.clock()
        self._cache.pods.put(Record(uid, "(held)", one.name, one.node, usage, State.RESERVED, now))

    def _let_go(self, uid: str, node: str) -> None:
        nodes, key = self._cache.gone[uid], held(node, uid)
        del nodes[node]
        if not nodes:
            del self._cache.gone[uid]
        self._on[node].discard(uid)
        if not self._on[node]:
            del self._on[node]
        for ones in (*self._young, self._gave_way):
            ones.pop(key, None)
        self._cache.pods.release(key)

    # --- to whom fits nowhere else ---

    def giving_way(self) -> list[str]:
        """What may, for as long as its manager can be about to let go of it; those first that we saw deleted."""
        limit = self._cache.clock() - GONE_SECONDS
        young = (key for ones in self._young[:2] for key, one in ones.items() if one.since > limit or not one.named)
        return list(itertools.islice(young, _MOST_GIVING_WAY))

    def give_way(self, key: str) -> None:
        """It is not booked until `hold_again`."""
        self._gave_way[key] = next(ones[key] for ones in self._young if key in ones)
        self._cache.pods.release(key)

    def hold_again(self) -> None:
        """Whoever came has its place: it goes on beside it, and the card is closed to all others."""
        for one in self._gave_way.values():
            self._book(one)
        self._gave_way.clear()

    def grow_old(self) -> None:
        """Tell what goes on, and gives way to nobody any more; what no report has named by then never began."""
        now = self._cache.clock()
        for node in [node for node, back in self._back.items() if back.until <= now]:
            if self._back.pop(node).report == self._cache.reports.get(node):
                self.look(node, self._cache.reports.get(node))
        limit = now - GONE_SECONDS
        old: dict[str, list[tuple[Gone, str]]] = {}
        whats = "was deleted or has ended", "was deleted or has ended", "is not bound there"
        for ones, what in zip(self._young, whats, strict=True):
            while ones and (one := next(iter(ones.values()))).since <= limit:
                del ones[held(one.node, one.uid)]
                if one.named and self._cache.reported(one.node, one.uid):
                    old.setdefault(one.node, []).append((one, what))
                elif not one.named:
                    self._let_go(one.uid, one.node)
        for node, gone in old.items():
            for one, what in gone[:_MOST_TOLD]:
                _log.warning(
                    "pod %s %s, and gpu-manager of node %s says that its processes go on: what it holds stays booked "
                    "until they end",
                    one.name, what, node, extra=fields(pod=one.name, uid=one.uid, node=node, uuid=",".join(one.use)),
                )  # fmt: skip
            if (more := len(gone) - _MOST_TOLD) > 0:
                _log.warning("gpu-manager of node %s says the same of %d more", node, more, extra=fields(node=node))
