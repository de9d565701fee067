"""ResourceClaimTemplates that pods name by what they hold (vcuda/spec/share_templates.py): which to make and remove.

The webhook only writes the name: it has no side effects. Made is what a pod of the namespace names; it holds nothing
but what its name says, so who writes a name by hand gets just that, in his own namespace. Not locked: see the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from scheduler_ext.engine.cache import SchedulerCache
from scheduler_ext.state import claims
from vcuda.kube.objects import ended
from vcuda.spec.share_templates import MANAGED_BY, MANAGER, ShareTemplate

_UNUSED_SECONDS = 600.0  # a Deployment that restarts finds its template again
_MOST_IN_NAMESPACE = 256  # names that pods of one namespace may make us write
_MOST_OF_POD = 64

Key = tuple[str, str]  # namespace and name


class Wanted(NamedTuple):
    """A template to make."""

    namespace: str
    template: ShareTemplate


class Unused(NamedTuple):
    """A template to remove, if it is still that one."""

    namespace: str
    name: str
    uid: str
    version: str


class Templates:
    """Who names which template."""

    def __init__(self, cache: SchedulerCache) -> None:
        self._cache = cache
        self._named: dict[str, tuple[Key, ...]] = {}  # by pod
        self._users: dict[Key, int] = {}
        self._known: dict[Key, tuple[str, str] | None] = {}  # UID and version of ours; None: somebody else's
        self._idle: dict[Key, float] = {}  # since when nobody names one of ours

    def see_pod(self, uid: str, pod: Mapping[str, Any]) -> None:
        if uid in self._named:
            if ended(pod):
                self.lose_pod(uid)
            return
        names = claims.names_of_templates(pod)[:_MOST_OF_POD]
        if not names or ended(pod):
            return
        namespace = str(pod["metadata"].get("namespace") or "")
        keys = tuple((namespace, name) for name in sorted({*names}) if ShareTemplate.named(name) is not None)
        if keys:
            self._named[uid] = keys
        for key in keys:
            self._users[key] = self._users.get(key, 0) + 1
            self._idle.pop(key, None)

    def lose_pod(self, uid: str) -> None:
        for key in self._named.pop(uid, ()):
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._rest(key)

    def users(self) -> list[str]:
        """The pods that name one, by UID."""
        return list(self._named)

    def see(self, data: Mapping[str, Any]) -> str:
        """Take in a template. Returns NAMESPACE/NAME."""
        metadata = data["metadata"]
        key = str(metadata["namespace"]), str(metadata["name"])
        if ShareTemplate.named(key[1]) is not None:
            ours = (metadata.get("labels") or {}).get(MANAGED_BY) == MANAGER
            self._known[key] = (str(metadata["uid"]), str(metadata["resourceVersion"])) if ours else None
            self._rest(key)
        return "/".join(key)

    def lose(self, namespace: str, name: str) -> None:
        self._known.pop((namespace, name), None)
        self._idle.pop((namespace, name), None)

    def keys(self) -> list[Key]:
        """Those that are there."""
        return list(self._known)

    def _rest(self, key: Key) -> None:
        if key not in self._users and self._known.get(key) is not None:
            self._idle.setdefault(key, self._cache.clock())

    def missing(self) -> list[Wanted]:
        """Named by a pod, and not there. A namespace that names ever new ones gets no more than so many."""
        if self._cache.unsynced:
            return []
        wanted = [key for key in self._users if key not in self._known]
        if not wanted:
            return []
        there: dict[str, int] = {}
        for namespace, _ in self._known:
            there[namespace] = there.get(namespace, 0) + 1
        found = []
        for namespace, name in wanted:
            template = ShareTemplate.named(name)
            if template is not None and there.get(namespace, 0) < _MOST_IN_NAMESPACE:
                there[namespace] = there.get(namespace, 0) + 1
                found.append(Wanted(namespace, template))
        return found

    def unused(self) -> list[Unused]:
        """Of ours, those that nobody has named for a while."""
        if self._cache.unsynced:
            return []
        limit = self._cache.clock() - _UNUSED_SECONDS
        return [
            Unused(*key, *known) for key, since in self._idle.items() if since < limit and (known := self._known[key])
        ]
