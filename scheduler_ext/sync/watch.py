"""Keeps the engine up to date with nodes and pods: list, then watch; list again when the watch can't go on."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeVar

import tenacity

from scheduler_ext.engine.engine import Engine
from scheduler_ext.sync.apiserver import ApiError, ApiServer, ApiUnreachable

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_LONGEST_WAIT = 30.0
_PAUSE = 0.1  # between two watches: a server that ends them at once must not make us spin
_GONE = 410


class Handlers(NamedTuple):
    """What to do with the objects of one resource; with `name`, with that one object."""

    resource: str
    seen: Callable[[Mapping[str, Any]], str]  # returns the object's key
    lost: Callable[[Mapping[str, Any]], None]
    keep: Callable[
        [Collection[str], float], None
    ]  # all keys of a complete list, and when it began (monotonic)
    name: str = ""


def handlers(engine: Engine) -> tuple[Handlers, Handlers]:
    """How the engine takes in nodes and pods."""
    return (
        Handlers(
            "nodes",
            engine.see_node,
            lambda node: engine.lose_node(str(node["metadata"]["name"])),
            lambda names, _since: engine.keep_nodes(names),
        ),
        Handlers(
            "pods", engine.see_pod, lambda pod: engine.lose_pod(str(pod["metadata"]["uid"])), engine.keep_pods
        ),
    )


def quota_handlers(engine: Engine, namespace: str, name: str) -> Handlers:
    """How the engine takes in its ConfigMap of quotas. None there: no quotas."""

    def seen(config_map: Mapping[str, Any]) -> str:
        engine.see_quotas(config_map)
        return name

    def keep(keys: Collection[str], _since: float) -> None:
        if not keys:  # a malformed ConfigMap counts as a key without a name
            engine.see_quotas(None)

    return Handlers(f"namespaces/{namespace}/configmaps", seen, lambda _: engine.see_quotas(None), keep, name)


class Watcher:
    """One thread that follows one resource until it is stopped."""

    def __init__(
        self, api: ApiServer, engine: Engine, how: Handlers, *, longest_wait: float = _LONGEST_WAIT
    ) -> None:
        self._api, self._engine, self._how = api, engine, how
        self._longest_wait = longest_wait
        self._stop = threading.Event()
        self._version = ""
        self._thread = threading.Thread(target=self._run, name=f"watch-{how.resource}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether the thread ended although nobody asked it to: a defect, cured only by a restart."""
        return self._thread.ident is not None and not self._thread.is_alive() and not self._stop.is_set()

    @property
    def resource(self) -> str:
        return self._how.resource

    def stop(self) -> None:
        """Ask the thread to end; it may still wait for the API server, so nobody joins it."""
        self._stop.set()

    def _run(self) -> None:
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((ApiError, ApiUnreachable)),
            wait=tenacity.wait_exponential_jitter(multiplier=0.2, max=self._longest_wait, jitter=0.2),
            sleep=tenacity.sleep_using_event(self._stop),
            stop=tenacity.stop_when_event_set(self._stop),
            before_sleep=self._report,
            reraise=True,
        )
        while not self._stop.is_set():
            # One call ends after each success, so that the waiting time starts small again; with an error only at the end.
            with contextlib.suppress(ApiError, ApiUnreachable):
                retrying(self._once)
                self._stop.wait(_PAUSE)

    def _report(self, state: tenacity.RetryCallState) -> None:
        self._engine.metrics.watch_errors.labels(self._how.resource).inc()
        error = state.outcome.exception() if state.outcome else None
        _log.warning("%s: %s; trying again in %.1f s", self._how.resource, error, state.upcoming_sleep)

    def _once(self) -> None:
        if not self._version:
            self._list()
        try:
            self._follow()
        except ApiError as error:
            if error.status != _GONE:
                raise
            _log.info("%s: the watch is too old, listing again", self._how.resource)
            self._version = ""

    def _list(self) -> None:
        began = time.monotonic()
        keys: set[str] = set()
        version = ""
        for items, version in self._api.pages(self._how.resource, self._how.name):  # noqa: B007 - the last page's version counts
            keys.update(self._take(self._how.seen, item) or "" for item in items)
        self._how.keep(keys, began)
        self._version = version
        self._engine.metrics.relists.labels(self._how.resource).inc()
        self._engine.synced(self._how.resource)
        _log.info("%s: listed %d at version %s", self._how.resource, len(keys), version)

    def _follow(self) -> None:
        for event in self._api.watch(self._how.resource, self._version, self._how.name):
            if self._stop.is_set():
                return
            kind, thing = event.get("type"), event.get("object")
            if not isinstance(thing, dict):
                raise ApiUnreachable(f"a watch event without an object: {event!s:.100}")
            if kind == "ERROR":
                raise ApiError(int(thing.get("code") or 500), str(thing.get("message", "")))
            metadata = thing.get("metadata")
            if not isinstance(metadata, dict):
                raise ApiUnreachable(f"a watch event without metadata: {event!s:.100}")
            if kind == "DELETED":
                self._take(self._how.lost, thing)
            elif kind in ("ADDED", "MODIFIED"):
                self._take(self._how.seen, thing)
            self._version = str(metadata.get("resourceVersion") or self._version)

    def _take(self, handle: Callable[[Mapping[str, Any]], _T], thing: Mapping[str, Any]) -> _T | None:
        """One malformed object must not end the watch of all others."""
        try:
            return handle(thing)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            self._engine.metrics.watch_errors.labels(self._how.resource).inc()
            _log.warning("%s: an object was skipped: %r in %.200s", self._how.resource, error, thing)
            return None
