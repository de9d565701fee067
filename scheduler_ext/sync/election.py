"""Leader and standby: of several extenders exactly one serves, the holder of a coordination.k8s.io Lease.

Clocks are never compared between machines. A standby takes a lease over only after it has watched it unchanged for its
whole duration on its own monotonic clock; who touches anything else of its object delays nobody. The leader counts from
before it sent its last renewal that was taken, by its answer or by what the lease says later, and stops
`margin_seconds` earlier, so that what it has sent by then has arrived before anybody else may serve.

That a lease is not there says nothing: it may have been deleted, or a backup restored, and its leader goes on until it
looks again. Who finds none makes it, which only one can, and serves a whole duration later. One that is marked as given
back is free at once only for who saw its holder have it a moment before: else a backup may have brought it back.
"""

from __future__ import annotations

import datetime
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from scheduler_ext.sync.api import ApiServer
from vcuda.kube.errors import ApiError, KubeError
from vcuda.kube.worker import Worker

_log = logging.getLogger(__name__)
_CONFLICT = 409
_RENEWALS = 6  # per lease duration
_GIVEN_BACK = 1  # the leaseDurationSeconds of a lease that its leader gave back, as in client-go; else it is longer
_TRIES = 6  # of a write that meets others': whoever may touch the lease's object ends no leader
_RECENT = 3  # pauses between two looks: no backup is made, and restored after another has led, within them
_NEVER = float("-inf")


@dataclass(frozen=True)
class Place:
    """A namespaced object's place."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class _Watched(NamedTuple):
    """A lease of a holder as we last read it, or as that holder gave it back; `at`: on our clock, before we asked."""

    uid: str
    transitions: object
    version: int
    at: float


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Election:
    """One replica's part. `step` is called by one thread; the questions may be asked by any.

    `gained` is called once, when this replica first leads; `ready` says whether it can serve then (the role label waits
    for it); `lost` is called when the lease that it led by is not its own any more: another may have served, and what
    is known here is stale for good.
    `pod`: our own pod, whose role label follows; `identity` must differ between all processes.
    """

    def __init__(
        self,
        api: ApiServer,
        lease: Place,
        identity: str,
        *,
        gained: Callable[[], None],
        lost: Callable[[], None],
        ready: Callable[[], bool],
        pod: Place | None = None,
        label: str,
        failed: Callable[[], object] = lambda: None,
        lease_seconds: float = 30.0,
        margin_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api, self._lease, self._identity = api, lease, identity
        self._gained, self._lost, self._ready = gained, lost, ready
        self._pod, self._label = pod, label
        self._seconds, self._margin, self._clock = lease_seconds, margin_seconds, clock
        self._until = _NEVER
        # From when on nobody of before can serve, if the lease is ours; None: that is not known yet.
        self._from: float | None = None
        self._longest = lease_seconds  # of all durations seen: replicas may be set differently during a rollout
        self._has_led = self._over = False
        self._role = self._last_holder = ""
        self._unanswered: dict[str, float] = {}  # renewals, by their time as the lease says it, and when they were sent
        self._seen: Mapping[str, Any] | None = None  # what the lease said
        self._seen_since = 0.0
        self._watched: _Watched | None = None
        self._problem = "the lease has not been read yet"
        self.worker = Worker(
            "election",
            self.step,
            failed=failed,
            pause=lease_seconds / _RENEWALS,
            longest_wait=lease_seconds / _RENEWALS,
        )

    def stop(self) -> None:
        """End the thread, waiting for a call under way."""
        self.worker.stop()
        self.worker.join()

    def standby_reason(self) -> str | None:
        """Why this replica must not serve now, or None if it leads."""
        if not self._over and self._clock() < self._until:
            return None
        return f"this replica stands by: {self._problem}"

    def step(self) -> None:
        """Read the lease; take or renew it, or note who has it; keep the role label right. Nothing once it is over."""
        if self._over:
            return
        try:
            for _ in range(_TRIES):
                if self._try():
                    break
        except KubeError as error:
            self._problem = f"lease {self._lease} could not be read or renewed: {error}"
            _log.warning("%s", self._problem)
        if self._over:
            self._show_role("standby")
        else:
            self._show_role("leader" if self.standby_reason() is None and self._ready() else "standby")

    def _try(self) -> bool:
        """Whether it is done: false where another's write was faster."""
        asked = self._clock()
        found = self._api.lease(self._lease.namespace, self._lease.name)
        spec: Mapping[str, Any] = (found or {}).get("spec") or {}
        holder = str(spec.get("holderIdentity") or "")
        ours = found is not None and holder == self._identity
        if self._has_led and not ours:
            what = "is gone" if found is None else f"has been taken by {holder}" if holder else "has no holder any more"
            self._over = True
            self._problem = f"lease {self._lease} {what}"
            _log.error("%s; this replica's view is stale and it ends", self._problem)
            self._lost()
            return True
        if not ours:
            self._from = None
        elif (sent := self._unanswered.pop(str(spec.get("renewTime")), None)) is not None:
            self._renewed(sent)
        given_back = not holder and spec.get("leaseDurationSeconds") == _GIVEN_BACK
        watched = self._watch(found, given_back=given_back, named=bool(holder) and not ours, asked=asked)
        if found is not None and not ours:
            if not (given_back and watched) and not self._waited_out(spec):
                self._problem = f"{holder or 'nobody'} holds lease {self._lease}"
                if given_back:
                    self._problem += "; whether it was given back just now is not known: its duration has to pass"
                return True
            self._from = _NEVER  # also if the answer to the write is lost: it is by this version, or not at all
        return self._take(found, spec, holder)

    def _watch(self, found: Mapping[str, Any] | None, *, given_back: bool, named: bool, asked: float) -> bool:
        """Note the lease as it is now; whether it is the one that was watched a moment ago, and has only gone on.

        `named`: another holds it.
        """
        before, self._watched = self._watched, None
        if found is None or not (given_back or named):
            return False
        metadata, spec = found["metadata"], found.get("spec") or {}
        version = str(metadata.get("resourceVersion", ""))
        if not version.isdecimal():
            return False
        now = _Watched(str(metadata.get("uid", "")), spec.get("leaseTransitions"), int(version), asked)
        went_on = (
            before is not None
            and now[:2] == before[:2]
            and now.version >= before.version
            and self._clock() - before.at <= self._seconds / _RENEWALS * _RECENT
        )
        if named or went_on:
            self._watched = now
        return went_on

    def _waited_out(self, spec: Mapping[str, Any]) -> bool:
        """Whether the holder has let its whole lease pass before our eyes."""
        duration = spec.get("leaseDurationSeconds")
        if spec != self._seen:
            self._seen, self._seen_since = spec, self._clock()
        self._longest = max(self._longest, float(duration) if isinstance(duration, int) else 0.0)
        return self._clock() - self._seen_since > self._longest

    def _take(self, found: dict[str, Any] | None, spec: Mapping[str, Any], holder: str) -> bool:
        """Write that it is ours; false where another's write was faster."""
        wanted = {
            **spec,
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(_GIVEN_BACK + 1, math.ceil(self._seconds)),
            "renewTime": _now(),
        }
        if holder != self._identity:
            wanted["acquireTime"] = wanted["renewTime"]
            wanted["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + (found is not None)
            self._last_holder = holder
        sent = self._clock()
        self._unanswered = {at: when for at, when in self._unanswered.items() if when > sent - self._seconds}
        self._unanswered[wanted["renewTime"]] = sent
        try:
            self._api.put_lease(self._lease.namespace, self._lease.name, found, wanted)
        except ApiError as error:
            if error.status != _CONFLICT:
                raise
            self._problem = f"another replica was faster with lease {self._lease}"
            return False
        self._renewed(self._unanswered.pop(wanted["renewTime"]))
        return True

    def _renewed(self, sent: float) -> None:
        """The lease is ours by what was sent then."""
        now = self._clock()
        if self._from is None:
            self._from = now + self._longest
            _log.info(
                "there was no lease %s: it is made, and this replica serves in %.0f s; if it was deleted, its leader "
                "has stopped by then", self._lease, self._longest,
            )  # fmt: skip
        if now < self._from:
            self._problem = (
                f"there was no lease {self._lease}; this replica has made it, and serves in {self._from - now:.0f} s: "
                "if it was deleted, its leader has stopped by then"
            )
            return
        self._until = max(self._until, sent + self._seconds - self._margin)
        self._problem = f"its last renewal of lease {self._lease} is too long ago"
        if not self._has_led:
            self._has_led = True
            _log.info("this replica leads: it holds lease %s", self._lease)
            self._demote(self._last_holder)
            self._gained()

    def _demote(self, holder: str) -> None:
        """A holder that hangs can't take its own label off."""
        name = holder.rpartition("_")[0]
        if self._pod is not None and name and name != self._pod.name:
            try:
                self._api.label_pod(self._pod.namespace, name, {self._label: "standby"})
            except KubeError as error:
                _log.info("the label of the last leader's pod %s stays: %s", name, error)

    def _show_role(self, role: str) -> None:
        if self._pod is None or role == self._role:
            return
        try:
            self._api.label_pod(self._pod.namespace, self._pod.name, {self._label: role})
            self._role = role
        except KubeError as error:
            _log.warning("label %s=%s on pod %s: %s; trying again", self._label, role, self._pod, error)

    def release(self) -> None:
        """Give the lease away, after `stop` and after the last answer, so that a standby need not wait for its end."""
        self._until = _NEVER
        if not self._has_led or self._over:
            return
        self._over = True
        try:
            found = self._api.lease(self._lease.namespace, self._lease.name)
            if found is not None and (found.get("spec") or {}).get("holderIdentity") == self._identity:
                spec = {
                    **found["spec"], "holderIdentity": "", "renewTime": _now(), "leaseDurationSeconds": _GIVEN_BACK
                }  # fmt: skip
                self._api.put_lease(self._lease.namespace, self._lease.name, found, spec)
            self._show_role("standby")
        except KubeError as error:
            _log.warning("lease %s was not given back and has to expire: %s", self._lease, error)
