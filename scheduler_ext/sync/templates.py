"""Keeps the ResourceClaimTemplates that pods name by what they hold."""

from __future__ import annotations

from scheduler_ext.engine.core import Engine
from scheduler_ext.sync.api import ApiServer
from vcuda.kube.errors import ApiError, BadName, KubeError
from vcuda.kube.objects import path

_KIND = "resourceclaimtemplates"
_NOT_FOUND, _CONFLICT = 404, 409


def keep(api: ApiServer, engine: Engine) -> None:
    """Make what pods name, remove what nobody names any more, once. Raises KubeError for the first that failed."""
    failures: list[KubeError] = []
    for wanted in engine.missing_templates():
        try:
            made = wanted.template.template(wanted.namespace, engine.names)
            engine.see_template(api.client.call("POST", path(_KIND, wanted.namespace), made))
        except BadName:
            pass
        except ApiError as error:
            if error.status != _CONFLICT:  # then the watch shows it soon
                failures.append(error)
    for unused in engine.unused_templates():
        body = {"preconditions": {"uid": unused.uid, "resourceVersion": unused.version}}
        try:
            api.client.call(
                "DELETE",
                path(_KIND, unused.namespace, unused.name),
                {"kind": "DeleteOptions", "apiVersion": "v1", **body},
            )
        except ApiError as error:
            if error.status not in (_NOT_FOUND, _CONFLICT):
                failures.append(error)
    if failures:
        raise failures[0]
