"""Keeps the ResourceClaimTemplates that pods name by what they hold."""

from __future__ import annotations

from functools import partial

from scheduler_ext.engine.core import Engine
from scheduler_ext.engine.templates import Unused, Wanted
from scheduler_ext.sync.api import ApiServer
from scheduler_ext.sync.backoff import Backoff
from scheduler_ext.sync.lanes import Lanes, Task
from vcuda.kube.errors import BadName, KubeError
from vcuda.kube.objects import path

_KIND = "resourceclaimtemplates"
_NOT_FOUND, _CONFLICT = 404, 409


def keep(api: ApiServer, engine: Engine, backoff: Backoff, lanes: Lanes) -> None:
    """Begin to make what pods name and to remove what nobody names any more, once, but not yet what was just refused.

    After a refusal the rest of that namespace waits for the next call: one that takes nothing (it is going, or gone)
    costs a request each time, however many templates its pods name.
    """
    missing, unused = engine.missing_templates(), engine.unused_templates()
    backoff.keep(
        [(one.namespace, one.template.name) for one in missing] + [(one.namespace, one.name) for one in unused]
    )
    by_namespace: dict[str, tuple[list[Wanted], list[Unused]]] = {}
    for wanted in missing:
        if backoff.due((wanted.namespace, wanted.template.name)):
            by_namespace.setdefault(wanted.namespace, ([], []))[0].append(wanted)
    for old in unused:
        if backoff.due((old.namespace, old.name)):
            by_namespace.setdefault(old.namespace, ([], []))[1].append(old)
    lanes.offer(
        [
            Task(namespace, namespace, f"the templates of {namespace}", partial(_keep, api, engine, backoff, *these))
            for namespace, these in by_namespace.items()
        ]
    )


def _keep(api: ApiServer, engine: Engine, backoff: Backoff, missing: list[Wanted], unused: list[Unused]) -> None:
    """Those of one namespace, up to the first that is refused. Raises KubeError where no answer came."""
    for wanted in missing:
        key = wanted.namespace, wanted.template.name
        try:
            made = wanted.template.template(wanted.namespace, engine.names)
            engine.see_template(api.client.call("POST", path(_KIND, wanted.namespace), made))
        except BadName:
            pass
        except KubeError as error:
            if error.status == _CONFLICT:  # the watch shows it soon
                continue
            backoff.note(key, f"ResourceClaimTemplate {'/'.join(key)}", error)
            return
    for old in unused:
        key = old.namespace, old.name
        body = {"preconditions": {"uid": old.uid, "resourceVersion": old.version}}
        try:
            api.client.call("DELETE", path(_KIND, *key), {"kind": "DeleteOptions", "apiVersion": "v1", **body})
        except KubeError as error:
            if error.status in (_NOT_FOUND, _CONFLICT):
                continue
            backoff.note(key, f"the removal of ResourceClaimTemplate {'/'.join(key)}", error)
            return
