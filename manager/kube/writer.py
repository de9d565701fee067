"""What the daemon tells the API server: patches and events, sent by one thread, tried again until they arrive.

Nothing that a pod waits for depends on it; while the API server is away the daemon serves on.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from manager.kube.api import Kube
from manager.process.logs import Conditions
from vcuda.kube.errors import BadName, KubeError
from vcuda.kube.events import BETWEEN_REPEATS_S, Correlator
from vcuda.kube.worker import Worker
from vcuda.logs import fields

TIMEOUT_S = 5.0
_KEPT = 2048
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_BETWEEN_FAILURES_S = 0.5
# Answers that trying again can't change: gone, a namesake with another UID, refused or malformed.
_FINAL = (400, 403, 404, 409, 422)
# What nobody waits for is written when kubelet has not called for so long, and after five minutes in any case: in a
# burst it would take the processors from the pods that start, and have kubelet look at those again that run. The more
# there is to say, the longer: when all pods of a burst are admitted, kubelet calls seldom and most are yet to start.
_CALM_S, _MOST_CALM_S, _LONGEST_CALM_S = 1.0, 10.0, 300.0
_AT_ONCE = 20
_NODE = "node"
# Kubelet creates its node seconds after its start, and maybe after us; a wrong --hostname-override never gets one.
_FIRST_NODE_PAUSE_S = 1.0

log = logging.getLogger(__name__)


@dataclass
class _Message:
    """What `send` says; not sent before `at` of the clock, and after a failure `pause` seconds later.

    `until`: before that time of the clock it waits for kubelet to be quiet.
    """

    send: Callable[[Kube], None]
    pause: float
    at: float = float("-inf")
    until: float = float("-inf")
    failed: bool = False

    def postpone(self, now: float) -> None:
        self.at, self.pause, self.failed = now + self.pause, min(self.pause * 2, _LONGEST_PAUSE_S), True


def _is_event(name: str) -> bool:
    return name.startswith("event ")


class ApiWriter:
    """A queue of named messages; a newer one of the same name replaces the older. Without `kube` all is dropped.

    While no server answers all wait; one that is answered with an error waits alone, longer each time. Events come
    last: tenants cause them, and what a node and its pods were given must not wait behind them, or be pushed out.
    """

    def __init__(
        self,
        kube: Kube | None,
        clock: Callable[[], float] = time.monotonic,
        quiet_s: Callable[[], float] = lambda: float("inf"),
    ) -> None:
        """`quiet_s`: seconds since kubelet's last call."""
        self._kube = kube
        self._clock = clock
        self._quiet_s = quiet_s
        self._correlator = Correlator(clock)
        self._pending: OrderedDict[str, _Message] = OrderedDict()
        self._lock = threading.Lock()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._conditions = Conditions(log)
        self._node = Conditions(log)
        self._labels: dict[str, str | None] = {}  # all that were ever said of the node
        self._silent_until = float("-inf")
        self._pause = _FIRST_PAUSE_S
        self.worker = Worker("api_writer", self._turn)

    @property
    def failing(self) -> bool:
        """Whether messages wait because the API server did not take one."""
        return bool(self._conditions.active())

    def start(self) -> None:
        if self._kube is None:
            log.info("no API server is configured: no events, no annotations on node and pods")
            return
        self.worker.start()

    def stop(self) -> None:
        self.worker.stop()
        self._wake.put(None)
        self.worker.join(0.5)

    def _put(
        self, name: str, send: Callable[[Kube], None], at: float = float("-inf"), *, in_calm: bool = False
    ) -> None:
        if self._kube is None:
            return
        with self._lock:
            # At once, also after failures: kubelet may have started, and our node be there now.
            pause, until = _FIRST_NODE_PAUSE_S if name == _NODE else _FIRST_PAUSE_S, float("-inf")
            if in_calm:
                before = self._pending.get(name)
                until = self._clock() + _LONGEST_CALM_S if before is None else before.until
            self._pending[name] = _Message(send, pause, at, until)
            while len(self._pending) > _KEPT:
                events = (key for key in self._pending if _is_event(key))
                del self._pending[next(events, next(iter(self._pending)))]
        self._wake.put(None)

    def annotate_pod(
        self, namespace: str, name: str, uid: str, annotations: Mapping[str, str | None], *, in_calm: bool = False
    ) -> None:
        """`in_calm`: nobody waits for it."""
        self._put(
            f"pod {uid}", lambda kube: kube.patch_pod(namespace, name, uid, annotations, TIMEOUT_S), in_calm=in_calm
        )

    def annotates(self, uid: str) -> bool:
        """Whether an annotation of this pod waits to be written."""
        with self._lock:
            return f"pod {uid}" in self._pending

    def describe_node(self, annotations: Mapping[str, str], labels: Mapping[str, str | None]) -> None:
        """Tried at once. A label that was said before and is not given any more is taken away."""
        self._labels = said = {**dict.fromkeys(self._labels), **labels}
        self._put(_NODE, lambda kube: kube.patch_node(annotations, said, TIMEOUT_S))

    def event(self, about: Mapping[str, str], kind: str, reason: str, message: str) -> None:
        """Said again it raises the count of the event that is there, ten seconds after it was written last."""
        if self._kube is None:
            return
        said = self._correlator.note(about, kind, reason, message)
        self._put(
            f"event {said.key}",
            lambda kube: kube.event(said, self._correlator, TIMEOUT_S),
            said.sent_at + BETWEEN_REPEATS_S,
            in_calm=kind == "Normal",
        )

    def pod_event(self, namespace: str, name: str, uid: str, reason: str, message: str) -> None:
        """A warning on a pod."""
        about = {"kind": "Pod", "namespace": namespace, "name": name, "uid": uid}
        self.event(about, "Warning", reason, message)

    def evict(self, namespace: str, name: str, uid: str) -> None:
        """End a pod, as far as its disruption budget allows; it is asked once."""

        def send(kube: Kube) -> None:
            try:
                kube.evict(namespace, name, uid, TIMEOUT_S)
            except KubeError as error:
                if error.status != 429:
                    raise
                log.warning(
                    "%s/%s is not evicted: %s", namespace, name, error, extra=fields(pod=f"{namespace}/{name}", uid=uid)
                )

        self._put(f"eviction {uid}", send)

    def delete_pod(self, namespace: str, name: str, uid: str) -> None:
        self._put(f"deletion {uid}", lambda kube: kube.delete_pod(namespace, name, uid, TIMEOUT_S))

    def _next(self) -> tuple[str, _Message] | None:
        """The oldest message that may be sent now; an event only where there is no other."""
        with self._lock:
            now = self._clock()
            if now < self._silent_until:
                return None
            waiting = sum(message.until > now for message in self._pending.values())
            noise = now + min(_MOST_CALM_S, _CALM_S * max(1.0, waiting / _AT_ONCE)) - self._quiet_s()
            for message in self._pending.values():
                if message.at <= now < noise:
                    message.at = min(noise, max(message.until, message.at))
            due = [entry for entry in self._pending.items() if entry[1].at <= now]
            return next((entry for entry in due if not _is_event(entry[0])), due[0] if due else None)

    def _rest(self) -> None:
        """Until there is something to send."""
        with self._lock:
            times = [max(message.at, self._silent_until) for message in self._pending.values()]
        left = max(min(times) - self._clock(), 0.0) if times else None
        with contextlib.suppress(queue.Empty):
            self._wake.get(timeout=left)

    def _turn(self) -> None:
        entry = self._next()
        if entry is None or self._kube is None:
            self._rest()
        else:
            self._send(self._kube, *entry)

    def _send(self, kube: Kube, name: str, message: _Message) -> bool:
        """Whether the API server answered, be it with a refusal."""
        try:
            message.send(kube)
        except KubeError as error:
            if isinstance(error, BadName):
                log.warning("%s can't be sent: %s", name.partition(" ")[0], error)
            elif error.status is None:
                self._failing(error)
                self._silent_until = self._clock() + self._pause
                self._pause = min(self._pause * 2, _LONGEST_PAUSE_S)
                return False
            elif error.status == 404 and name == _NODE:
                self._node.set(
                    "node",
                    f"the API server does not have our node: {error}; trying again until kubelet has made it (is "
                    "--hostname-override its name?)",
                )
                message.postpone(self._clock())
                return True
            elif error.status not in _FINAL:
                self._failing(error)
                self._fail(message)
                return False
            else:
                log.warning("%s was refused: %s", name.partition(" ")[0], error)
        except Exception:  # a defect of ours must not stop the others
            log.exception("%s can't be sent", name.partition(" ")[0])
            self._fail(message)
            return False
        self._pause = _FIRST_PAUSE_S
        if name == _NODE:
            self._node.clear("node", "the API server has the node now")
        with self._lock:
            if self._pending.get(name) is message:
                del self._pending[name]
            failing = any(other.failed for key, other in self._pending.items() if key != _NODE)
        if not failing:
            self._conditions.clear("api", "the API server answers again")
        return True

    def _failing(self, error: KubeError) -> None:
        if not self._conditions.active():  # each message fails in words of its own
            self._conditions.set("api", f"the API server takes no messages: {error}; trying again")

    def _fail(self, message: _Message) -> None:
        message.postpone(self._clock())
        self._silent_until = self._clock() + _BETWEEN_FAILURES_S

    def wait_empty(self, timeout_s: float) -> bool:
        """Whether everything was sent in time; for tests and shutdown."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with self._lock:
                if not self._pending:
                    return True
            time.sleep(0.02)
        return False
