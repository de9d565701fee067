"""The device plugin of one resource: kubelet's five calls, put to the allocator, and the device list it streams."""

# ruff: noqa: N802, ARG002  (names and parameters are the protocol's)
from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import grpc

from manager.allocate.allocator import Allocator
from manager.cards.feed import SnapshotFeed
from manager.errors import Refusal
from manager.kube.writer import ApiWriter
from manager.kubelet import device_ids
from manager.observe.metrics import Metrics
from manager.process.logs import Conditions
from manager.proto import deviceplugin_pb2 as api
from manager.proto import deviceplugin_pb2_grpc
from vcuda.logs import fields

log = logging.getLogger(__name__)

# How often a stream without news looks whether kubelet is still there.
_STREAM_CHECK_S = 1.0
# Open streams of one resource: kubelet has one, a monitor perhaps another. Each holds a thread of the server's; what is
# left of its THREADS is for kubelet's calls, which come one by one.
_MOST_STREAMS = 4
THREADS = 2 * _MOST_STREAMS + 4  # those of a kubelet that is gone end within moments, beside its successor's


class Plugin(deviceplugin_pb2_grpc.DevicePluginServicer):  # type: ignore[misc]  # generated, untyped
    """One resource, "core" or "memory"."""

    def __init__(
        self,
        resource: str,
        allocator: Allocator,
        device_lists: SnapshotFeed,
        api_writer: ApiWriter,
        metrics: Metrics,
    ) -> None:
        self.resource = resource
        self._allocator = allocator
        self._device_lists = device_lists
        self._api_writer = api_writer
        self._metrics = metrics
        self._streams: dict[grpc.ServicerContext, float] = {}  # when each open one was last free to send
        self._entrance = threading.Lock()
        self._conditions = Conditions(log)
        self._unwatched_since = time.monotonic()

    @property
    def stalled_s(self) -> float:
        """Seconds for which a message to kubelet has been on its way: far above a second means that nobody reads it."""
        beats = list(self._streams.values())
        return time.monotonic() - min(beats) if beats else 0.0

    @property
    def unwatched_s(self) -> float:
        """Seconds since kubelet last had a stream; 0 while it has one."""
        return 0.0 if self._streams else time.monotonic() - self._unwatched_since

    @property
    def options(self) -> api.DevicePluginOptions:
        """Kubelet is to ask which devices we prefer only where that means something: it counts them by NUMA node.

        The question, with the IDs of all free devices, costs its sync loop as much as Allocate.
        """
        snapshot = self._device_lists.snapshot
        nodes = {item.card.numa_node for item in snapshot.cards} if snapshot is not None else set()
        return api.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=len(nodes) > 1)

    def GetDevicePluginOptions(self, request: api.Empty, context: grpc.ServicerContext) -> api.DevicePluginOptions:
        return self.options

    def ListAndWatch(self, request: api.Empty, context: grpc.ServicerContext) -> Iterator[api.ListAndWatchResponse]:
        with self._entrance:
            full = len(self._streams) >= _MOST_STREAMS
            if not full:
                self._streams[context] = time.monotonic()
        if full:
            text = f"{_MOST_STREAMS} watch the {self.resource} devices already; end one of those who are not kubelet"
            self._conditions.set("streams", f"a stream is refused: {text}")
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        try:
            version = 0
            while context.is_active() and context in self._streams and not self._device_lists.closed:
                self._streams[context] = time.monotonic()
                newest, snapshot = self._device_lists.newer_than(version, _STREAM_CHECK_S)
                if snapshot is not None and newest != version:
                    version = newest
                    cards = [item.card for item in snapshot.cards]
                    yield device_ids.device_list(cards, self.resource, all_unhealthy=bool(snapshot.node_problem))
        finally:
            # In this order: a reader in between must not find a stream's absence older than the stream.
            with self._entrance:
                if context in self._streams:
                    self._unwatched_since = time.monotonic()
                    del self._streams[context]
            self._conditions.clear("streams")

    def end_streams(self) -> None:
        """Of a kubelet that is gone: its successor must find room for its own."""
        with self._entrance:
            ended, self._streams = self._streams, {}
            if ended:
                self._unwatched_since = time.monotonic()
        for context in ended:
            context.cancel()

    def GetPreferredAllocation(
        self,
        request: api.PreferredAllocationRequest,
        context: grpc.ServicerContext,
    ) -> api.PreferredAllocationResponse:
        answers = []
        for item in request.container_requests:
            chosen = self._allocator.preferred(
                self.resource, item.available_deviceIDs, item.must_include_deviceIDs, item.allocation_size
            )
            answers.append(api.ContainerPreferredAllocationResponse(deviceIDs=chosen))
        return api.PreferredAllocationResponse(container_responses=answers)

    def Allocate(self, request: api.AllocateRequest, context: grpc.ServicerContext) -> api.AllocateResponse:
        started = time.monotonic()
        answers = []
        try:
            for item in request.container_requests:
                answers.append(self._allocator.allocate(self.resource, item.devices_ids))
        except Refusal as refusal:
            self._metrics.allocated(self.resource, refusal.reason, time.monotonic() - started)
            self._refuse(refusal, context)
        self._metrics.allocated(self.resource, "", time.monotonic() - started)
        return api.AllocateResponse(container_responses=answers)

    def PreStartContainer(
        self, request: api.PreStartContainerRequest, context: grpc.ServicerContext
    ) -> api.PreStartContainerResponse:
        try:
            self._allocator.prestart(self.resource, request.devices_ids)
        except Refusal as refusal:
            self._metrics.refused_start(refusal.reason)
            self._refuse(refusal, context)
        return api.PreStartContainerResponse()

    def _refuse(self, refusal: Refusal, context: grpc.ServicerContext) -> None:
        """Answer with an error, which becomes the pod's message, and put an event on the pods concerned."""
        if not refusal.pods:
            log.warning("refused: %s", refusal, extra=fields(reason=refusal.reason))
        for namespace, name, uid in refusal.pods:
            known = fields(pod=f"{namespace}/{name}", uid=uid, reason=refusal.reason)
            log.warning("refused: %s", refusal, extra=known)
            self._api_writer.pod_event(namespace, name, uid, refusal.reason, refusal.message)
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(refusal))
