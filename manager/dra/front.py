"""What kubelet meets of this driver: its sockets and what answers there, before a daemon has its node and after."""

from __future__ import annotations

from collections.abc import Callable

from manager.cards.feed import SnapshotFeed
from manager.config.settings import Settings
from manager.dra.relay import Other, Relay
from manager.dra.server import DraPlugin, Health, PreparerLike
from manager.dra.sockets import Sockets, endpoint_name, registration_name
from manager.process import instance_lock


class Front:
    """At first another daemon gives the answers, if one has the node; `own` makes them this one's."""

    def __init__(self, settings: Settings, driver: str, instance: str) -> None:
        """`instance`: this daemon's name, in the names of its sockets."""
        self._settings, self._driver, self._instance = settings, driver, instance
        self.snapshots = SnapshotFeed()
        self.relay = Relay(self._serving)
        self._plugin = DraPlugin(self.relay)
        health = Health(self.snapshots, settings.node_name)
        self.sockets = Sockets(
            settings.plugins_path, settings.plugins_registry_path, driver, instance, self._plugin, health
        )
        self._started = False

    def _serving(self) -> Other | None:
        """The daemon that has the node, if it is another one."""
        found = instance_lock.holder(self._settings.checkpoint_path)
        if found is None or found.instance == self._instance:
            return None
        return Other(
            found.pid,
            self._settings.plugins_path / self._driver / endpoint_name(found.instance),
            self._settings.plugins_registry_path / registration_name(self._driver, found.instance),
        )

    def start(self) -> None:
        """Serve; what is asked goes to the daemon that has the node."""
        if not self._started:
            self._started = True
            self.sockets.start()

    def own(self, preparer: PreparerLike) -> None:
        """Serve, and answer by this daemon's book."""
        begin: Callable[[], None] = lambda: self._plugin.begin(preparer)  # noqa: E731
        self.sockets.own(begin)
        self.start()

    def stop(self) -> None:
        """Answer the calls that have begun."""
        self.sockets.stop()
        self.snapshots.close()
