"""Keeps the ResourceClaimTemplates that pods name by what they hold."""

from __future__ import annotations

from scheduler_ext.engine.core import Engine
from scheduler_ext.sync.api import ApiServer
from scheduler_ext.sync.backoff import Backoff
from vcuda.kube.errors import BadName, KubeError
from vcuda.kube.objects import path

_KIND = "resourceclaimtemplates"
_NOT_FOUND, _CONFLICT = 404, 409


def keep(api: ApiServer, engine: Engine, backoff: Backoff) -> None:
    """Make what pods name, remove what nobody names any more, once, but not yet what was just refused.

    After a refusal the rest of that namespace waits for the next call: one that takes nothing (it is going, or gone)
    costs a request each time, however many templates its pods name. Raises KubeError where no answer came.
    """
    missing, unused = engine.missing_templates(), engine.unused_templates()
    backoff.keep(
        [(one.namespace, one.template.name) for one in missing] + [(one.namespace, one.name) for one in unused]
    )
    closed: set[str] = set()
    for wanted in missing:
        key = wanted.namespace, wanted.template.name
        if wanted.namespace in closed or not backoff.due(key):
            continue
        try:
            made = wanted.template.template(wanted.namespace, engine.names)
            engine.see_template(api.client.call("POST", path(_KIND, wanted.namespace), made))
        except BadName:
            pass
        except KubeError as error:
            if error.status == _CONFLICT:  # the watch shows it soon
                continue
            closed.add(wanted.namespace)
            backoff.note(key, f"ResourceClaimTemplate {'/'.join(key)}", error)
    for old in unused:
        key = old.namespace, old.name
        if old.namespace in closed or not backoff.due(key):
            continue
        body = {"preconditions": {"uid": old.uid, "resourceVersion": old.version}}
        try:
            api.client.call("DELETE", path(_KIND, *key), {"kind": "DeleteOptions", "apiVersion": "v1", **body})
        except KubeError as error:
            if error.status in (_NOT_FOUND, _CONFLICT):
                continue
            closed.add(old.namespace)
            backoff.note(key, f"the removal of ResourceClaimTemplate {'/'.join(key)}", error)
