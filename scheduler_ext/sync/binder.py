"""Bind: one write per pod, its result always known before the pod may be decided again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar

from scheduler_ext.engine.bindings import Refused, Write
from scheduler_ext.engine.core import Engine
from scheduler_ext.protocol.extender_v1 import BindingArgs
from scheduler_ext.protocol.reasons import ExtenderReason
from scheduler_ext.state import objects
from scheduler_ext.state.pods import Record, State
from scheduler_ext.sync.api import ApiServer, Writer
from scheduler_ext.sync.lanes import Lanes, Task
from scheduler_ext.sync.late import LateWrites
from scheduler_ext.sync.turns import Closed, Turns
from vcuda.kube.errors import ApiError, KubeError
from vcuda.logs import fields
from vcuda.spec import request

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_NOT_FOUND, _CONFLICT, _SERVER_ERROR = 404, 409, 500
# Writes under way; of one namespace half as many. The others wait here, where what must not be sent any more is not.
_AT_ONCE = 128
_BEYOND = 256  # of those that take long: as many of slow namespaces, and so many more of who was not known to be
_READS = 8  # the same of reads; each is a thread of the executor's
_ENDS = "this extender ends, and had not begun to bind the pod"


class Binder:
    """Binds pods. `bind` may be called any number of times for a pod; at most one write is under way for each.

    `bind` and `close` belong to one event loop, `settle` to any thread. Reads, which are rare, go through `executor`.
    """

    def __init__(
        self,
        api: ApiServer,
        engine: Engine,
        executor: Executor,
        standby_reason: Callable[[], str | None] = lambda: None,
        *,
        gang_wait_seconds: float = 3.0,
        late_seconds: float = 11.0,
        writer: Writer | None = None,
        asking: Lanes | None = None,
    ) -> None:
        """`standby_reason` says why nothing may be written now, or None; it is asked right before each write.

        A member of an incomplete gang waits `gang_wait_seconds` for the others, which must be less than kube-scheduler
        waits for us. `late_seconds`: after it was begun a write without an answer may still be carried out.
        """
        self._gang_wait = gang_wait_seconds
        self._api, self._engine, self._executor = api, engine, executor
        self._standby_reason = standby_reason
        self._writer = writer or Writer(api)
        self._asking = asking or Lanes()
        self._turns, self._reading = Turns(_AT_ONCE, beyond=_BEYOND), Turns(_READS)
        self._running: dict[BindingArgs, asyncio.Future[Refused | None]] = {}
        self._late: set[asyncio.Task[Refused | None]] = set()
        self._closed = False
        self._unanswered = LateWrites(late_seconds, is_over=lambda uid: engine.bound_to(uid) is not None)

    async def bind(self, args: BindingArgs) -> Refused | None:
        """Bind a pod; None means that it is bound to the node. Equal calls at the same time share one write."""
        waits = await self._gang(args.uid)
        if waits is not None:
            return Refused(ExtenderReason.GANG_INCOMPLETE, waits)
        running = self._running.get(args)
        if running is None and self._closed:
            return Refused(ExtenderReason.NOT_LEADER, _ENDS)
        if running is None:
            running = self._running[args] = asyncio.create_task(self._bind(args))
            running.add_done_callback(lambda _: self._running.pop(args, None))
        return await asyncio.shield(running)

    def begin(self, args: BindingArgs, done: Callable[[Refused | None], None]) -> bool:
        """Bind a pod as `bind` does, where nothing has to be waited for before the write: nearly always.

        `done` is called once, now or later from the loop. False: nothing was done. No task is made until something
        goes wrong: each is one more turn of the loop.
        """
        if self._closed or args in self._running or self._engine.gang_waits(args.uid) is not None:
            return False
        if not self._turns.take(args.namespace):
            return False
        begun = self._engine.begin_bind(args.uid, args.node, (args.namespace, args.name))
        if not isinstance(begun, Write):
            self._turns.give_back(args.namespace)
        if begun is None:
            return False
        if not isinstance(begun, Write):
            done(begun if isinstance(begun, Refused) else None)
            return True
        running = self._running[args] = asyncio.get_running_loop().create_future()
        sent = time.monotonic()

        def end(refused: Refused | None) -> None:
            del self._running[args]
            running.set_result(refused)
            done(refused)

        def later(coming: Coroutine[Any, Any, Refused | None]) -> None:
            task = asyncio.create_task(coming)
            self._late.add(task)
            task.add_done_callback(self._late.discard)
            task.add_done_callback(lambda task: end(task.result()))

        def written(problem: KubeError | None) -> None:
            self._turns.give_back(args.namespace)
            if problem is None:
                self._engine.end_bind(args.uid, State.BOUND)
                end(None)
            else:
                later(self._failed(args, problem, sent))

        try:
            if self._standby_reason() is None and self._writer.begin(*self._of(args, begun), written):
                self._engine.metrics.writes.inc()
            else:
                later(self._write(args, begun))
        except Exception as error:  # noqa: BLE001 - as in `_write`
            self._turns.give_back(args.namespace)
            later(self._failed(args, error, sent))
        return True

    async def close(self) -> None:
        """Wait for all writes that have begun, each at most for the API server's time; then disconnect.

        None is begun from then on: a member of a gang may have waited for the others. Nor is what waits for its turn:
        dozens of looks at pods would take longer than anybody waits for our end.
        """
        self._closed = True
        self._turns.close()
        self._reading.close()
        while self._running:
            await asyncio.wait(self._running.values())
        await self._writer.close()

    async def outlive(self) -> None:
        """Wait until no write that failed without a word of its result can be carried out any more."""
        await self._unanswered.outlive()

    async def _gang(self, uid: str) -> str | None:
        """Wait a little for the rest of the pod's gang. Returns why it must not be bound now, or None."""
        loop = asyncio.get_running_loop()
        until, pause = loop.time() + self._gang_wait, 0.01
        while (waits := self._engine.gang_waits(uid)) is not None and loop.time() < until:
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.2)
        return waits

    def settle(self) -> None:
        """Begin to find out what became of writes with an unknown result, as far as the API server answers now."""
        self._asking.offer(
            [
                Task(
                    one.namespace, one.uid, f"the question for pod {one.namespace}/{one.name}", partial(self._ask, one)
                )
                for one in self._engine.uncertain()
            ]
        )

    def _ask(self, record: Record) -> None:
        try:
            pod = self._api.pod(record.namespace, record.name)
        except ApiError as error:
            if error.status == _NOT_FOUND:
                self._engine.lose_pod(record.uid)
            return
        if objects.uid(pod) != record.uid:
            self._engine.lose_pod(record.uid)
        elif objects.place(pod):
            self._engine.read_pod(pod)
        elif objects.leaving(pod):  # no Binding of it is carried out any more
            self._engine.see_pod(pod)
        else:
            self._engine.end_bind(record.uid, State.ASSUMED)

    async def _bind(self, args: BindingArgs) -> Refused | None:
        try:
            return await self._bind_in_turn(args)
        except Closed:
            return Refused(ExtenderReason.NOT_LEADER, _ENDS)

    async def _bind_in_turn(self, args: BindingArgs) -> Refused | None:
        await self._turns.wait(args.namespace)
        begun = self._engine.begin_bind(args.uid, args.node, (args.namespace, args.name))
        if isinstance(begun, Write):
            return await self._write(args, begun)
        self._turns.give_back(args.namespace)
        if begun is None:
            await self._reading.wait(args.namespace)
            try:
                answer = await self._in_thread(self._recover, args)
            finally:
                self._reading.give_back(args.namespace)
            if not isinstance(answer, Write):
                return answer
            try:
                await self._turns.wait(args.namespace)
            except Closed:
                self._engine.end_bind(args.uid, State.ASSUMED)
                raise
            return await self._write(args, answer)
        return begun if isinstance(begun, Refused) else None

    async def _in_thread(self, work: Callable[..., _T], *args: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *args)

    def _recover(self, args: BindingArgs) -> Write | Refused | None:
        """Nothing is assumed for the pod (we restarted, or the assumption expired): look at it and decide again."""
        try:
            pod = self._api.pod(args.namespace, args.name)
        except ApiError as error:
            if error.status == _NOT_FOUND:
                return Refused(ExtenderReason.NO_SUCH_POD, f"pod {args.namespace}/{args.name} does not exist")
            return Refused(ExtenderReason.BIND_FAILED, str(error))
        except KubeError as error:
            return Refused(ExtenderReason.BIND_FAILED, str(error))
        if objects.uid(pod) != args.uid:
            return Refused(
                ExtenderReason.OTHER_POD, f"pod {args.namespace}/{args.name} is now another one of that name"
            )
        place = objects.place(pod)
        if place:
            self._engine.read_pod(pod)
            return (
                None if place == args.node else Refused(ExtenderReason.OTHER_NODE, f"the pod is bound to node {place}")
            )
        if objects.leaving(pod):
            self._engine.see_pod(pod)
            return Refused(ExtenderReason.NO_SUCH_POD, f"pod {args.namespace}/{args.name} is being deleted")
        if not request.asks_for_share(pod, self._engine.names):
            return Write(args.node, {})
        refused = self._engine.decide_for(pod, args.node)
        if refused is not None:
            return refused
        begun = self._engine.begin_bind(args.uid, args.node)
        if isinstance(begun, Write | Refused):
            return begun
        return Refused(ExtenderReason.BIND_UNCERTAIN, "the pod changed while it was being bound; retry")

    async def _write(self, args: BindingArgs, write: Write) -> Refused | None:
        """In its namespace's turn, which it gives back."""
        problem = self._standby_reason()
        if problem is not None:
            self._turns.give_back(args.namespace)
            self._engine.end_bind(args.uid, State.ASSUMED)
            return Refused(ExtenderReason.NOT_LEADER, problem)
        self._engine.metrics.writes.inc()
        sent = time.monotonic()
        try:
            try:
                await self._writer.bind(*self._of(args, write))
            finally:
                self._turns.give_back(args.namespace)
        except Exception as error:  # noqa: BLE001 - whatever it is, a booking must not stay in BINDING for ever
            return await self._failed(args, error, sent)
        self._engine.end_bind(args.uid, State.BOUND)
        return None

    @staticmethod
    def _of(args: BindingArgs, write: Write) -> tuple[str, str, str, str, Mapping[str, str]]:
        return args.namespace, args.name, args.uid, write.node, write.annotations

    async def _failed(self, args: BindingArgs, error: Exception, sent: float) -> Refused | None:
        if isinstance(error, ApiError):
            if error.status == _NOT_FOUND:
                self._engine.end_bind(args.uid, None)
                return Refused(ExtenderReason.NO_SUCH_POD, f"pod {args.namespace}/{args.name} does not exist")
            if error.status != _CONFLICT and error.status < _SERVER_ERROR:
                self._engine.end_bind(args.uid, State.ASSUMED)
                return Refused(ExtenderReason.BIND_FAILED, str(error))
        if not isinstance(error, ApiError) or error.status != _CONFLICT:
            self._unanswered.add(args.uid, sent)
        problem = str(error) or type(error).__name__
        self._doubt(args, problem)
        if self._reading.take(args.namespace):  # else `settle` looks
            try:
                await self._in_thread(self._look, args)
            finally:
                self._reading.give_back(args.namespace)
        if self._engine.bound_to(args.uid) == args.node:
            return None
        return Refused(ExtenderReason.BIND_FAILED, problem)

    def _doubt(self, args: BindingArgs, problem: str) -> None:
        """The write may have taken effect, or somebody else bound the pod: look, never write again."""
        known = fields(pod=f"{args.namespace}/{args.name}", uid=args.uid, node=args.node)
        _log.warning("binding %s/%s to %s: %s", args.namespace, args.name, args.node, problem, extra=known)
        self._engine.end_bind(args.uid, State.UNCERTAIN)

    def _look(self, args: BindingArgs) -> None:
        for record in self._engine.uncertain():
            if record.uid == args.uid:
                with contextlib.suppress(KubeError):  # `settle` looks again
                    self._ask(record)
