"""Kubelet's calls of a DRA driver: registration, preparing claims, and the stream of the cards' health."""

# ruff: noqa: N802, ARG002  (names and parameters are the protocols')
from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import grpc

from manager.cards.feed import SnapshotFeed
from manager.cards.inventory import Snapshot
from manager.dra.claims import MOST_WAITING
from manager.dra.relay import NoAnswer, Relay
from manager.errors import Refusal
from manager.process.logs import Conditions
from manager.proto import (
    dra_pb2,
    dra_pb2_grpc,
    drahealth_pb2,
    drahealth_pb2_grpc,
    pluginregistration_pb2,
    pluginregistration_pb2_grpc,
)
from vcuda.logs import fields
from vcuda.quoted import quoted
from vcuda.spec.devices import device_name

# As kubelet names them; the paths of the calls have the packages' full names.
SERVICES = ("v1.DRAPlugin", "v1beta1.DRAPlugin", "v1alpha1.DRAResourceHealth")
_V1 = "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
_V1BETA1 = "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin"
_MOST_STREAMS = 4
THREADS = 8 + MOST_WAITING + _MOST_STREAMS
_STREAM_CHECK_S = 1.0
_REPEAT_S = 10.0  # kubelet takes a device of which it has not heard for 30 s as one of unknown health
_LONGEST_MESSAGE = 1024
# Of kubelet's 45 s for a call: until then a claim of it is begun, which then takes seconds at most.
BUDGET_S = 20.0

_T = TypeVar("_T")
log = logging.getLogger(__name__)


class PreparerLike(Protocol):
    """What is used of `manager.dra.claims.Preparer`. Both raise Refusal. `until`: by the monotonic clock."""

    def prepare(self, namespace: str, name: str, uid: str, until: float) -> list[dra_pb2.Device]: ...
    def unprepare(self, uid: str) -> None: ...


class DraPlugin(dra_pb2_grpc.DRAPluginServicer):  # type: ignore[misc]  # generated, untyped
    """Every claim that kubelet names gets an answer of its own, whatever becomes of the others."""

    def __init__(self, relay: Relay) -> None:
        """Before `begin` calls are the relay's."""
        self._relay = relay
        self._preparer: PreparerLike | None = None
        self._conditions = Conditions(log)

    def begin(self, preparer: PreparerLike) -> None:
        """Answer by this daemon's own book from now on."""
        self._preparer = preparer
        self._relay.end()

    @property
    def _book(self) -> PreparerLike:
        assert self._preparer is not None, "the relay gives all answers before `begin`"
        return self._preparer

    def NodePrepareResources(
        self, request: dra_pb2.NodePrepareResourcesRequest, context: grpc.ServicerContext
    ) -> dra_pb2.NodePrepareResourcesResponse:
        kind = dra_pb2.NodePrepareResourcesResponse
        try:
            given = self._relay.ask(f"/{_V1}/NodePrepareResources", request, kind, context)
        except NoAnswer as silence:
            one = dra_pb2.NodePrepareResourceResponse(error=str(silence))
            return kind(claims={claim.uid: one for claim in request.claims})
        if given is not None:
            return given
        answer = dra_pb2.NodePrepareResourcesResponse()
        left = context.time_remaining()
        until = time.monotonic() + (BUDGET_S if left is None else min(BUDGET_S, left / 2))
        for claim in request.claims:
            call = functools.partial(self._book.prepare, claim.namespace, claim.name, claim.uid, until)
            devices, error = self._answer(claim, "prepared", call)
            answer.claims[claim.uid].CopyFrom(dra_pb2.NodePrepareResourceResponse(devices=devices or (), error=error))
        return answer

    def NodeUnprepareResources(
        self, request: dra_pb2.NodeUnprepareResourcesRequest, context: grpc.ServicerContext
    ) -> dra_pb2.NodeUnprepareResourcesResponse:
        kind = dra_pb2.NodeUnprepareResourcesResponse
        try:
            given = self._relay.ask(f"/{_V1}/NodeUnprepareResources", request, kind, context)
        except NoAnswer as silence:
            one = dra_pb2.NodeUnprepareResourceResponse(error=str(silence))
            return kind(claims={claim.uid: one for claim in request.claims})
        if given is not None:
            return given
        answer = dra_pb2.NodeUnprepareResourcesResponse()
        for claim in request.claims:
            _, error = self._answer(claim, "unprepared", functools.partial(self._book.unprepare, claim.uid))
            answer.claims[claim.uid].CopyFrom(dra_pb2.NodeUnprepareResourceResponse(error=error))
        return answer

    def _answer(self, claim: dra_pb2.Claim, what: str, call: Callable[[], _T]) -> tuple[_T | None, str]:
        """What the call gave, and what went wrong; "" if nothing did."""
        condition, reason = f"{what} {claim.uid}", ""
        known = {"claim": f"{claim.namespace}/{claim.name}", "uid": claim.uid}
        try:
            found = call()
        except Refusal as refusal:
            error, reason = str(refusal), refusal.reason
        except Exception as defect:  # of ours: it must not cost other claims their answers
            log.exception("claim %s/%s can't be %s", claim.namespace, claim.name, what, extra=fields(known))
            error = f"a defect of gpu-manager: {quoted(defect, 200)}; its log says more"
        else:
            self._conditions.clear(condition, f"claim {claim.namespace}/{claim.name} is {what} now", known)
            return found, ""
        self._conditions.set(
            condition, f"claim {claim.namespace}/{claim.name} can't be {what}: {error}", {**known, "reason": reason}
        )
        return None, error

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """Of v1beta1, whose messages are v1's on the wire; v1 itself is added by the generated code."""
        calls = {
            "NodePrepareResources": (self.NodePrepareResources, dra_pb2.NodePrepareResourcesRequest),
            "NodeUnprepareResources": (self.NodeUnprepareResources, dra_pb2.NodeUnprepareResourcesRequest),
        }
        methods: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(
                call,
                request_deserializer=kind.FromString,
                response_serializer=lambda answer: answer.SerializeToString(),
            )
            for name, (call, kind) in calls.items()
        }
        return (grpc.method_handlers_generic_handler(_V1BETA1, methods),)


class Health(drahealth_pb2_grpc.DRAResourceHealthServicer):  # type: ignore[misc]  # generated, untyped
    """Tells kubelet of cards that are ill; it shows that in the status of their pods."""

    def __init__(self, feed: SnapshotFeed, node: str) -> None:
        self._feed, self._node = feed, node
        self._streams = threading.Semaphore(_MOST_STREAMS)
        self._ended = threading.Event()

    def end(self) -> None:
        """Let the streams that are there end within a second: a server waits for them when it stops."""
        ended, self._ended = self._ended, threading.Event()
        ended.set()

    def NodeWatchResources(
        self, request: drahealth_pb2.NodeWatchResourcesRequest, context: grpc.ServicerContext
    ) -> Iterator[drahealth_pb2.NodeWatchResourcesResponse]:
        if not self._streams.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{_MOST_STREAMS} watch already")
        ended = self._ended
        try:
            version, told = 0, float("-inf")
            while context.is_active() and not self._feed.closed and not ended.is_set():
                newest, snapshot = self._feed.newer_than(version, _STREAM_CHECK_S)
                if snapshot is not None and (newest > version or time.monotonic() - told >= _REPEAT_S):
                    version, told = newest, time.monotonic()
                    yield health(snapshot, self._node, int(time.time()))
        finally:
            self._streams.release()


def health(snapshot: Snapshot, node: str, now_s: int) -> drahealth_pb2.NodeWatchResourcesResponse:
    """All cards of a node, also those that no claim has."""
    problems = dict(snapshot.problems)
    devices = []
    for item in snapshot.cards:
        why = problems.get(item.card.uuid) or problems.get("", "")
        devices.append(
            drahealth_pb2.DeviceHealth(
                device=drahealth_pb2.DeviceIdentifier(pool_name=node, device_name=device_name(item.card.uuid)),
                health=drahealth_pb2.UNHEALTHY if why else drahealth_pb2.HEALTHY,
                last_updated_time=now_s,
                message=why[:_LONGEST_MESSAGE],
            )
        )
    return drahealth_pb2.NodeWatchResourcesResponse(devices=devices)


class Registration(pluginregistration_pb2_grpc.RegistrationServicer):  # type: ignore[misc]  # generated, untyped
    """Tells kubelet where the driver is, and hears whether kubelet takes it."""

    def __init__(self, driver: str, endpoint: str) -> None:
        self._info = pluginregistration_pb2.PluginInfo(
            type="DRAPlugin", name=driver, endpoint=endpoint, supported_versions=SERVICES
        )
        self.registered = False
        self.registrations = 0
        self._conditions = Conditions(log)

    def GetInfo(
        self, request: pluginregistration_pb2.InfoRequest, context: grpc.ServicerContext
    ) -> pluginregistration_pb2.PluginInfo:
        return self._info

    def NotifyRegistrationStatus(
        self, request: pluginregistration_pb2.RegistrationStatus, context: grpc.ServicerContext
    ) -> pluginregistration_pb2.RegistrationStatusResponse:
        self.registered = bool(request.plugin_registered)
        if self.registered:
            self.registrations += 1
            self._conditions.clear("kubelet", "kubelet takes the driver now")
            log.info("kubelet has registered the driver %s", self._info.name)
        else:
            self._conditions.set("kubelet", f"kubelet does not take the driver {self._info.name}: {request.error:.300}")
        return pluginregistration_pb2.RegistrationStatusResponse()


def add_driver(server: grpc.Server, plugin: DraPlugin, watched: Health) -> None:
    """The services of the driver's own socket."""
    dra_pb2_grpc.add_DRAPluginServicer_to_server(plugin, server)
    server.add_generic_rpc_handlers(plugin.handlers())
    drahealth_pb2_grpc.add_DRAResourceHealthServicer_to_server(watched, server)
