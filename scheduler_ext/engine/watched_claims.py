"""What the API server shows of claims, their classes and templates, and of the cards for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from scheduler_ext.engine.watched import Watched
from vcuda.spec import device_classes


def _split(keys: Collection[str]) -> set[tuple[str, str]]:
    """NAMESPACE/NAME of each."""
    parted = (key.partition("/") for key in keys)
    return {(namespace, name) for namespace, _, name in parted}


class WatchedClaims(Watched):
    """What the watches of `resource.k8s.io` feed."""

    def expect_claims(self) -> None:
        """Decide nothing until claims, their classes and the cards for them are known."""
        self.cache.unsynced |= {"deviceclasses", "resourceclaims", "resourceclaimtemplates", "resourceslices"}

    def see_slice(self, data: Mapping[str, Any]) -> str:
        """Take in a ResourceSlice. Returns its name."""
        with self._lock:
            return self._claim_book.see_slice(data)

    def lose_slice(self, name: str) -> None:
        with self._lock:
            self._claim_book.lose_slice(name)

    def keep_slices(self, names: Collection[str]) -> None:
        """A complete list was seen: forget all others."""
        self._lose_others(self._claim_book.slices(), set(names), self._claim_book.lose_slice)

    def see_class(self, data: Mapping[str, Any]) -> str:
        """Take in a DeviceClass. Returns its name; raises ValueError for one without a name."""
        seen = device_classes.parse_class(data, self.names)
        with self._lock:
            self._claim_book.see_class(seen)
        return seen.name

    def lose_class(self, name: str) -> None:
        with self._lock:
            self._claim_book.lose_class(name)

    def keep_classes(self, names: Collection[str]) -> None:
        """A complete list was seen: forget all others."""
        self._lose_others(self._claim_book.classes(), set(names), self._claim_book.lose_class)

    def see_claim(self, data: Mapping[str, Any]) -> str:
        """Take in a ResourceClaim. Returns NAMESPACE/NAME."""
        with self._lock:
            return self._claim_book.see_claim(data)

    def lose_claim(self, namespace: str, name: str) -> None:
        with self._lock:
            self._claim_book.lose_claim(namespace, name)

    def keep_claims(self, keys: Collection[str]) -> None:
        """A complete list was seen: forget all others."""
        self._lose_others(self._claim_book.keys(), _split(keys), lambda key: self._claim_book.lose_claim(*key))

    def see_template(self, data: Mapping[str, Any]) -> str:
        """Take in a ResourceClaimTemplate. Returns NAMESPACE/NAME."""
        with self._lock:
            return self._templates.see(data)

    def lose_template(self, namespace: str, name: str) -> None:
        with self._lock:
            self._templates.lose(namespace, name)

    def keep_templates(self, keys: Collection[str]) -> None:
        """A complete list was seen: forget all others."""
        self._lose_others(self._templates.keys(), _split(keys), lambda key: self._templates.lose(*key))
