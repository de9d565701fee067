"""A lease, a clock and replicas that stand for it, without processes: for the tests of who leads."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from scheduler_ext.sync.election import Election, Place
from vcuda.kube.errors import ApiError, ApiUnreachable

LABEL = "tencent.com/vcuda-extender-role"
GIVEN_BACK = {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": "2026-11-27T00:00:00.000000Z"}


class World:
    """Time and a lease, as the replicas see them through calls that may take long, fail, or lose their answers.

    It begins with a lease that the last leader gave back, which nobody saw; `new`: with none.
    """

    def __init__(self, dice: random.Random | None = None, *, new: bool = False) -> None:
        self.now = 100.0
        self.version = 1
        self.found: dict[str, Any] | None = None
        if not new:
            self.edit(GIVEN_BACK)
        self.labels: dict[str, str] = {}
        self.down: set[str] = set()
        self.dice = dice

    def edit(self, spec: Mapping[str, Any]) -> None:
        self.version += 1
        self.found = {"metadata": {"resourceVersion": str(self.version)}, "spec": dict(spec)}

    def call(self, who: str, act: Callable[[], Any]) -> Any:
        if who in self.down:
            raise ApiUnreachable("down")
        if self.dice is None:
            return act()
        self.now += self.dice.choice((0, 0, 0.1, 3, 9))  # on the way there
        fate = self.dice.random()
        if fate < 0.1:
            raise ApiError(500, "injected")
        answer = act()
        self.now += self.dice.choice((0, 0, 0.1, 3))
        if fate < 0.2:
            raise ApiUnreachable("the answer is lost")
        return answer


class Lines:
    """What `Election` uses of an ApiServer, for one replica."""

    def __init__(self, world: World, who: str) -> None:
        self.world, self.who = world, who

    def lease(self, _namespace: str, _name: str) -> dict[str, Any] | None:
        return self.world.call(self.who, lambda: json.loads(json.dumps(self.world.found)))

    def put_lease(self, _namespace: str, _name: str, old: Any, spec: Any) -> None:
        def act() -> None:
            found = self.world.found
            now = int(found["metadata"]["resourceVersion"]) if found else 0
            if now != (int(old["metadata"]["resourceVersion"]) if old else 0):
                raise ApiError(409, "changed")
            self.world.edit(spec)

        self.world.call(self.who, act)

    def label_pod(self, _namespace: str, name: str, labels: dict[str, str]) -> None:
        self.world.call(self.who, lambda: self.world.labels.update({name: labels[LABEL]}))


class Replica:
    def __init__(self, world: World, name: str, **options: Any) -> None:
        self.world = world
        self.events: list[str] = []
        self.ready = True
        self.election = Election(
            Lines(world, name),  # type: ignore[arg-type]
            Place("n", "extender"), f"{name}_1",
            gained=lambda: self.events.append("gained"), lost=lambda: self.events.append("lost"), ready=lambda: self.ready,
            pod=Place("n", name), label=LABEL, clock=lambda: world.now, **options,
        )  # fmt: skip

    def step(self) -> None:
        self.election.step()

    @property
    def serves(self) -> bool:
        return self.election.standby_reason() is None

    def lead(self) -> None:
        """Wait for as long as the lease that it finds may be another's, and take it."""
        self.step()
        self.world.now += self.election._longest + 0.1
        self.step()
        assert self.serves
