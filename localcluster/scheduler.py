"""The stand-in scheduler loop: asks the extender as kube-scheduler does, binds, and says why a pod stays pending."""

from __future__ import annotations

import http.client
import json
import logging
import threading
import time
import urllib.parse
from collections import Counter
from dataclasses import dataclass
from typing import Any

from localcluster import api as apis
from localcluster.kubelet.status import timestamp
from vcuda.spec import names, request

JsonObject = dict[str, Any]
_PODS = "/api/v1/pods?fieldSelector=spec.nodeName%3D"
_BACKOFF_FIRST_SECONDS, _BACKOFF_MAX_SECONDS = 1.0, 10.0
_EXTENDER_SECONDS = 10.0
_log = logging.getLogger(__name__)


class ExtenderFailure(Exception):
    """The extender does not answer, or says that it failed."""


@dataclass
class _Attempt:
    """When a pending pod is tried again, and what was last reported about it."""

    retry_at: float = 0.0
    failures: int = 0
    reported: str = ""


class Scheduler:
    """Schedules pods of `scheduler_name`. A pod without our resources is bound to the first ready node directly."""

    def __init__(
        self,
        api: apis.Api,
        extender_url: str,
        *,
        domain: str = names.DEFAULT_DOMAIN,
        name: str = "default-scheduler",
    ) -> None:
        self._api = api
        self._extender = urllib.parse.urlsplit(extender_url)
        self._names = names.Names(domain)
        self._name = name
        self._attempts: dict[str, _Attempt] = {}
        self._changed = threading.Event()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name="scheduler", daemon=True),
            threading.Thread(target=self._follow, args=("/api/v1/pods",), name="scheduler pods", daemon=True),
            threading.Thread(target=self._follow, args=("/api/v1/nodes",), name="scheduler nodes", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._changed.set()
        self._threads[0].join(timeout=15)

    def _follow(self, path: str) -> None:
        """Any change of pods or nodes may make a pending pod fit; what freed room makes all of them try at once."""
        while not self._stopping.is_set():
            try:
                version = self._api.call("GET", path)["metadata"]["resourceVersion"]
                self._changed.set()  # what came before this list is in no event
                for event in self._api.watch(path, version):
                    if self._stopping.is_set():
                        return
                    self._note(event)
            except apis.ApiFailure as error:
                _log.info("%s is listed again: %s", path, error)
                self._stopping.wait(0.5)
            self._changed.set()

    def _note(self, event: JsonObject) -> None:
        item = event["object"]
        freed = event["type"] == "DELETED" or item.get("status", {}).get("phase") in ("Succeeded", "Failed")
        if freed or item["kind"] == "Node":
            for attempt in list(self._attempts.values()):
                attempt.retry_at = min(attempt.retry_at, time.monotonic() + 0.1)
            self._changed.set()
        elif event["type"] == "ADDED":
            self._changed.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._changed.clear()
            try:
                delay = self._round()
            except apis.ApiFailure as error:
                _log.warning("pods are not scheduled now: %s", error)
                delay = _BACKOFF_FIRST_SECONDS
            self._changed.wait(max(0.02, delay))

    def _round(self) -> float:
        """Try every pending pod that is due, oldest first. Returns the seconds until the next one is due."""
        pods = [
            pod for pod in self._api.call("GET", _PODS)["items"]
            if pod["spec"].get("schedulerName") == self._name and "deletionTimestamp" not in pod["metadata"]
            and pod["status"].get("phase") == "Pending"
        ]  # fmt: skip
        present = {pod["metadata"]["uid"] for pod in pods}
        self._attempts = {uid: attempt for uid, attempt in self._attempts.items() if uid in present}
        for pod in sorted(
            pods,
            key=lambda pod: (pod["metadata"]["creationTimestamp"], int(pod["metadata"]["resourceVersion"])),
        ):
            attempt = self._attempts.setdefault(pod["metadata"]["uid"], _Attempt())
            if attempt.retry_at <= time.monotonic() and not self._stopping.is_set():
                self._schedule(pod, attempt)
        due = [attempt.retry_at for uid, attempt in self._attempts.items() if uid in present]
        return min((at - time.monotonic() for at in due), default=_BACKOFF_MAX_SECONDS)

    def _schedule(self, pod: JsonObject, attempt: _Attempt) -> None:
        try:
            refusal = self._place(pod)
        except ExtenderFailure as error:
            refusal = f"0 nodes are available: {error}"
        except apis.ApiFailure as error:
            refusal = "" if error.code in (404, 409) else f"binding rejected: {error}"
        if not refusal:
            attempt.retry_at = time.monotonic() + _BACKOFF_FIRST_SECONDS  # if the next list still shows it unbound
            return
        attempt.failures += 1
        delay = min(_BACKOFF_MAX_SECONDS, _BACKOFF_FIRST_SECONDS * 2 ** (attempt.failures - 1))
        attempt.retry_at = time.monotonic() + delay
        if refusal != attempt.reported:
            attempt.reported = refusal
            self._report(pod, refusal)

    def _place(self, pod: JsonObject) -> str:
        """Bind the pod. Returns an empty string, or why it has to wait."""
        nodes = self._api.call("GET", "/api/v1/nodes")["items"]
        unfit = Counter(filter(None, (_why_not(node, pod) for node in nodes)))
        fit = [node["metadata"]["name"] for node in nodes if _why_not(node, pod) is None]
        if fit and request.asks_for_share(pod, self._names):
            result = self._ask("filter", {"Pod": pod, "Nodes": None, "NodeNames": fit})
            if result.get("Error"):
                raise ExtenderFailure(str(result["Error"]))
            for table in ("FailedNodes", "FailedAndUnresolvableNodes"):
                unfit.update((result.get(table) or {}).values())
            chosen = result.get("NodeNames") or []
            if chosen:
                metadata = pod["metadata"]
                bound = self._ask("bind", {
                    "PodName": metadata["name"], "PodNamespace": metadata["namespace"], "PodUID": metadata["uid"],
                    "Node": chosen[0],
                })  # fmt: skip
                return f"binding rejected: {bound['Error']}" if bound.get("Error") else ""
        elif fit:
            self._bind(pod, fit[0])
            return ""
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(unfit.items())) or "no nodes are registered"
        return f"0/{len(nodes)} nodes are available: {reasons}."

    def _bind(self, pod: JsonObject, node: str) -> None:
        metadata = {"name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": metadata,
            "target": {"kind": "Node", "name": node},
        }
        self._api.call("POST", apis.pod_path(pod, "binding"), binding)

    def _ask(self, verb: str, body: JsonObject) -> JsonObject:
        connection = http.client.HTTPConnection(
            self._extender.hostname or "", self._extender.port, timeout=_EXTENDER_SECONDS
        )
        try:
            connection.request(
                "POST",
                f"{self._extender.path}/{verb}",
                json.dumps(body),
                {"Content-Type": "application/json"},
            )
            response = connection.getresponse()
            text = response.read()
            if response.status != 200:
                raise ExtenderFailure(f"the extender answers {response.status}: {text[:200].decode(errors='replace')}")
            result: JsonObject = json.loads(text)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ExtenderFailure(f"the extender does not answer: {error}") from error
        finally:
            connection.close()
        return result

    def _report(self, pod: JsonObject, message: str) -> None:
        """As kube-scheduler does: an event, and the PodScheduled condition with reason Unschedulable."""
        self._api.event(pod, "Warning", "FailedScheduling", message, self._name)
        conditions = [c for c in pod["status"].get("conditions", []) if c.get("type") != "PodScheduled"]
        conditions.append({
            "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message,
            "lastTransitionTime": timestamp(time.time()),
        })  # fmt: skip
        try:
            self._api.patch(apis.pod_path(pod, "status"), {"status": {"conditions": conditions}})
        except apis.ApiFailure as error:
            _log.info("the condition of pod %s was not written: %s", pod["metadata"]["name"], error)


def _why_not(node: JsonObject, pod: JsonObject) -> str | None:
    """The scheduler's own predicates, as far as a stand-in needs them."""
    if node["spec"].get("unschedulable"):
        return "node(s) were unschedulable"
    conditions = node.get("status", {}).get("conditions", [])
    if not any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions):
        return "node(s) were not ready"
    wanted = pod["spec"].get("nodeSelector") or {}
    labels = node["metadata"].get("labels") or {}
    if any(labels.get(name) != value for name, value in wanted.items()):
        return "node(s) didn't match Pod's node affinity/selector"
    return None
