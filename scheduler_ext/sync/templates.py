"""Keeps the ResourceClaimTemplates that pods name by what they hold."""

from __future__ import annotations

from functools import partial

from scheduler_ext.engine.core import Engine
from scheduler_ext.engine.templates import Unused, Wanted
from scheduler_ext.sync.api import ApiServer
from scheduler_ext.sync.lanes import Lanes, Task
from vcuda.kube.errors import BadName, KubeError
from vcuda.kube.objects import path

_KIND = "resourceclaimtemplates"
_NOT_FOUND, _CONFLICT = 404, 409


def keep(api: ApiServer, engine: Engine, lanes: Lanes) -> None:
    """Begin to make what pods name and to remove what nobody names any more, but not yet what was just refused."""
    tasks = [
        Task(
            one.namespace,
            (one.namespace, one.template.name),
            f"ResourceClaimTemplate {one.namespace}/{one.template.name}",
            partial(_make, api, engine, one),
        )
        for one in engine.missing_templates()
    ]
    tasks += [
        Task(
            one.namespace,
            (one.namespace, one.name),
            f"the removal of ResourceClaimTemplate {one.namespace}/{one.name}",
            partial(_remove, api, one),
        )
        for one in engine.unused_templates()
    ]
    lanes.keep([task.key for task in tasks])
    lanes.offer(tasks)


def _make(api: ApiServer, engine: Engine, wanted: Wanted) -> None:
    made = wanted.template.template(wanted.namespace, engine.names)
    try:
        engine.see_template(api.client.call("POST", path(_KIND, wanted.namespace), made))
    except BadName:
        pass
    except KubeError as error:
        if error.status != _CONFLICT:  # else the watch shows it soon
            raise


def _remove(api: ApiServer, old: Unused) -> None:
    body = {"preconditions": {"uid": old.uid, "resourceVersion": old.version}}
    where = path(_KIND, old.namespace, old.name)
    try:
        api.client.call("DELETE", where, {"kind": "DeleteOptions", "apiVersion": "v1", **body})
    except KubeError as error:
        if error.status not in (_NOT_FOUND, _CONFLICT):
            raise
