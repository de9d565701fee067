"""Feeds the engine with the nodes, pods and quotas that the API server shows."""

from __future__ import annotations

from collections.abc import Callable, Collection

from scheduler_ext.engine.core import Engine
from scheduler_ext.sync.api import ApiServer
from vcuda.kube.informer import Follow, Handlers, Informer, resting
from vcuda.kube.objects import Object

REST_SECONDS = 0.02  # between two looks at a busy watch: each is a change of threads, or a turn of the loop


def handlers(engine: Engine) -> tuple[Handlers, Handlers]:
    """How the engine takes in nodes and pods."""

    def listed(kind: str, keep: Callable[[], None]) -> None:
        keep()
        engine.metrics.relists.labels(kind).inc()
        engine.synced(kind)

    return (
        Handlers(
            "nodes",
            engine.see_node,
            lambda node: engine.lose_node(str(node["metadata"]["name"])),
            lambda names, _: listed("nodes", lambda: engine.keep_nodes(names)),
        ),
        Handlers(
            "pods",
            engine.see_pod,
            lambda pod: engine.lose_pod(str(pod["metadata"]["uid"]), pod),
            lambda uids, since: listed("pods", lambda: engine.keep_pods(uids, since)),
            read=engine.event,
            relisted=lambda uids, since: listed("pods", lambda: engine.keep_pods(uids, since, restored=True)),
            cut=engine.pods_cut,
            follows=engine.pods_followed,
        ),
    )


def quota_handlers(engine: Engine, namespace: str, name: str) -> Handlers:
    """How the engine takes in its ConfigMap of quotas. None there: no quotas."""

    def seen(config_map: Object) -> str:
        engine.see_quotas(config_map)
        return name

    def listed(keys: Collection[str], _since: float) -> None:
        if not keys:  # a malformed ConfigMap counts as a key without a name
            engine.see_quotas(None)
        engine.metrics.relists.labels("configmaps").inc()

    return Handlers("configmaps", seen, lambda _: engine.see_quotas(None), listed, namespace, f"metadata.name={name}")


def claim_handlers(engine: Engine) -> tuple[Handlers, ...]:
    """How the engine takes in claims, their classes and templates, and the cards that nodes offer for claims."""

    def listed(kind: str, keep: Callable[[Collection[str]], None]) -> Callable[[Collection[str], float], None]:
        def take(keys: Collection[str], _since: float) -> None:
            keep(keys)
            engine.metrics.relists.labels(kind).inc()
            engine.synced(kind)

        return take

    def named(lose: Callable[[str, str], None]) -> Callable[[Object], None]:
        return lambda one: lose(str(one["metadata"]["namespace"]), str(one["metadata"]["name"]))

    return (
        Handlers(
            "deviceclasses",
            engine.see_class,
            lambda one: engine.lose_class(str(one["metadata"]["name"])),
            listed("deviceclasses", engine.keep_classes),
        ),
        Handlers(
            "resourceslices",
            engine.see_slice,
            lambda one: engine.lose_slice(str(one["metadata"]["name"])),
            listed("resourceslices", engine.keep_slices),
        ),
        Handlers(
            "resourceclaims",
            engine.see_claim,
            named(engine.lose_claim),
            listed("resourceclaims", engine.keep_claims),
        ),
        Handlers(
            "resourceclaimtemplates",
            engine.see_template,
            named(engine.lose_template),
            listed("resourceclaimtemplates", engine.keep_templates),
        ),
    )


def informer(
    api: ApiServer, engine: Engine, how: Handlers, *, follow: Follow | None = None, longest_wait: float = 30.0
) -> Informer:
    """The thread that feeds the engine with one kind of objects. `follow`: who takes in its watch; else the thread."""
    failed = engine.metrics.watch_errors.labels(how.kind).inc
    return Informer(api.client, how, failed=failed, longest_wait=longest_wait, follow=follow or resting(REST_SECONDS))
