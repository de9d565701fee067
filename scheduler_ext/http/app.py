"""The HTTP face: the routes of the extender protocol, pages for people, and probes."""

from __future__ import annotations

import asyncio
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any

import orjson

from scheduler_ext.engine.bindings import Refused
from scheduler_ext.engine.claims import NotScored
from scheduler_ext.engine.core import Engine
from scheduler_ext.engine.gangs import Plan, PlannedRefusal
from scheduler_ext.engine.intake import MOST_LIGHT
from scheduler_ext.http.exchange import Answer, Later, Request, error
from scheduler_ext.http.overview import OverviewData, html
from scheduler_ext.http.pages import TEXT, MetricsPage, Page, Pages
from scheduler_ext.planning import defrag, explain
from scheduler_ext.protocol import extender_v1
from scheduler_ext.protocol.extender_v1 import BadInput, BindingArgs, ExtenderArgs, Verdict
from scheduler_ext.protocol.reasons import ExtenderReason
from scheduler_ext.state.pace import Pace
from scheduler_ext.state.pod_texts import KnownPod
from scheduler_ext.sync.binder import Binder
from vcuda.quoted import quoted
from vcuda.spec import gang
from vcuda.spec import request as pod_request

_OPEN = ("/healthz", "/readyz", "/version", "/scheduler/version")  # to clients without a certificate

_UNSEEN_SECONDS, _UNSEEN_PAUSE = 2.0, 0.01  # for a claim that kube-scheduler knows and we do not
_MOST_IN_VAIN = 1024  # names of classes and resources
# Of the time, and seconds at once, in which filters of a namespace may wait in vain: kube-scheduler asks nothing else
# meanwhile. Those of all together four times that.
_VAIN_PART, _VAIN_AHEAD = 0.05, 4.0

Verb = Callable[[bytes], bytes | Awaitable[bytes] | Later[bytes]]
Observe = Callable[[float], None]
Reason = Callable[[], str | None]
Guard = Callable[[str, str], HTTPStatus | None]


class NotReady(Exception):
    """Nothing can be decided yet; the message says why."""


class Extender:
    """The verbs: each turns a request body into an answer, or raises BadInput or NotReady."""

    def __init__(self, engine: Engine, binder: Binder) -> None:
        self._engine, self._binder = engine, binder
        self._scoring = asyncio.Lock()
        self._in_vain: dict[tuple[str, str], None] = {}  # what was waited for and not shown, the oldest first
        self._vain, self._vain_of_all = (
            Pace(time.monotonic, part=times * _VAIN_PART, ahead_seconds=times * _VAIN_AHEAD) for times in (1, 4)
        )
        count = engine.metrics.verdicts.labels
        self._untouched, self._chosen, self._refused = count("untouched"), count("chosen"), count("refused")
        self._bound_ones = engine.metrics.binds.labels("bound")

    def _asks(self, pod: Mapping[str, Any]) -> bool:
        """Whether a pod is our business; then it must have a UID, and we must be ready."""
        if isinstance(pod, KnownPod):  # which has a UID
            if not pod.kind.asks:
                return False
        elif not pod_request.asks_for_share(pod, self._engine.names):
            return False
        else:
            self._require_uid(pod)
        self._require_ready()
        return True

    @staticmethod
    def _require_uid(pod: Mapping[str, Any]) -> None:
        uid = pod["metadata"].get("uid")
        if not isinstance(uid, str) or not uid:
            raise BadInput("Pod.metadata.uid is missing; a placement is kept by UID")

    def _require_ready(self) -> None:
        problem = self._engine.not_ready()
        if problem is not None:
            raise NotReady(f"{ExtenderReason.NOT_SYNCED}: {problem}")

    def filter(self, body: bytes) -> bytes | Awaitable[bytes]:
        args = self._engine.asked_for(body) or extender_v1.read_args(body, self._engine.offered)
        if not self._asks(args.pod):
            self._untouched.inc()
            return extender_v1.untouched(args)
        containers, alone = self._of(args.pod)
        if (containers > MOST_LIGHT or not alone) and self._engine.leaves(args.pod):  # there is no plan to make
            return self._answer(args, self._engine.filter(args.pod, args.names))
        if containers > MOST_LIGHT:
            return self._heavy_filter(args)
        if not alone:
            return self._gang_filter(args)
        verdict = self._engine.filter_briefly(args.pod, args.names)
        return self._scored_filter(args) if verdict is None else self._answer(args, verdict)

    def _of(self, pod: Mapping[str, Any]) -> tuple[int, bool]:
        """How many containers a pod has, and whether it is in no gang."""
        if isinstance(pod, KnownPod):
            return pod.kind.containers, pod.kind.alone
        spec = pod["spec"]
        containers = len(spec.get("containers") or ()) + len(spec.get("initContainers") or ())
        return containers, not gang.may_name(pod, self._engine.names)

    def filter_claims(self, body: bytes) -> bytes | Awaitable[bytes]:
        args = extender_v1.read_args(body, self._engine.offered)
        if not args.pod["spec"].get("resourceClaims") and not self._engine.asks_as_extended(args.pod, args.names):
            return extender_v1.untouched(args)
        self._require_uid(args.pod)
        self._require_ready()
        unseen = self._engine.claims_unseen(args.pod, args.names)
        # What was waited for in vain, as another extender's resource, wakes its pods when it is there.
        new = bool(unseen) and not unseen <= self._in_vain.keys()
        return self._claims_later(args) if new and self._may_wait(args) else self._claims_soon(args)

    def _may_wait(self, args: ExtenderArgs) -> bool:
        """Whether neither its namespace nor all have waited for too long in vain: names may be ever new."""
        return self._vain.may(str(args.pod["metadata"].get("namespace") or "")) and self._vain_of_all.may("")

    def _claims_soon(self, args: ExtenderArgs) -> bytes | Awaitable[bytes]:
        try:
            return self._claims_answer(args, self._engine.filter_claims(args.pod, args.names, briefly=True))
        except NotScored:
            return self._claims_scored(args)

    async def _claims_later(self, args: ExtenderArgs) -> bytes:
        """kube-scheduler's watch was faster than ours."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _UNSEEN_SECONDS
        while (unseen := self._engine.claims_unseen(args.pod, args.names)) and loop.time() < until:
            await asyncio.sleep(_UNSEEN_PAUSE)
        if unseen:
            self._vain.forget_idle()
            self._vain.charge(str(args.pod["metadata"].get("namespace") or ""), _UNSEEN_SECONDS)
            self._vain_of_all.charge("", _UNSEEN_SECONDS)
        # A claim has another name each time.
        self._in_vain |= dict.fromkeys(one for one in unseen if one[0] != "claim")
        while len(self._in_vain) > _MOST_IN_VAIN:
            del self._in_vain[next(iter(self._in_vain))]
        answer = self._claims_soon(args)
        return answer if isinstance(answer, bytes) else await answer

    async def _claims_scored(self, args: ExtenderArgs) -> bytes:
        """As _scored_filter."""
        async with self._scoring:
            while self._engine.score_claims(args.pod):
                await asyncio.sleep(0)
            verdict = None
            for found in self._engine.deciding_claims(args.pod, args.names):
                verdict = found
                await asyncio.sleep(0)
            return self._claims_answer(args, verdict)

    @staticmethod
    def _claims_answer(args: ExtenderArgs, verdict: Verdict | None) -> bytes:
        return extender_v1.untouched(args) if verdict is None else extender_v1.filter_answer(args, verdict)

    async def _heavy_filter(self, args: ExtenderArgs) -> bytes:
        refused = await asyncio.to_thread(self._engine.refused_gang, args.pod, args.names)
        if refused is not None:
            return self._answer(args, self._engine.filter(args.pod, args.names, refused))
        await asyncio.to_thread(self._engine.prepare, args.pod)
        return await self._gang_filter(args)

    async def _gang_filter(self, args: ExtenderArgs) -> bytes:
        plan = await asyncio.to_thread(self._engine.plan_gang, args.pod, args.names)
        if plan is None:
            async with self._scoring:
                await self._score(args)
                verdict = self._engine.filter_briefly(args.pod, args.names)
            if verdict is not None:
                return self._answer(args, verdict)
            plan = await asyncio.to_thread(self._engine.plan_gang, args.pod, args.names, small=True)
        return await self._scored_filter(args, plan)

    async def _score(self, args: ExtenderArgs) -> None:
        while self._engine.score_some(args.pod):
            await asyncio.sleep(0)

    async def _scored_filter(self, args: ExtenderArgs, plan: Plan | PlannedRefusal | None = None) -> bytes:
        """Nobody has scored its class ahead, or all scores are old: a few nodes at a time, others come between."""
        async with self._scoring:
            await self._score(args)
            # Before the next one's turn: with very many classes its scores would push these out again.
            return self._answer(args, self._engine.filter(args.pod, args.names, plan))

    def _answer(self, args: ExtenderArgs, verdict: Verdict) -> bytes:
        (self._refused if verdict.chosen is None else self._chosen).inc()
        return extender_v1.filter_answer(args, verdict)

    def prioritize(self, body: bytes) -> bytes:
        args = extender_v1.read_args(body)
        self._asks(args.pod)
        scores = self._engine.prioritize(args.pod, args.names)
        return extender_v1.priorities(list(zip(args.names, scores, strict=True)))

    def prioritize_cpu_only(self, body: bytes) -> bytes:
        args = extender_v1.read_args(body)
        if self._asks(args.pod):
            scores = [0] * len(args.names)
        else:
            self._require_ready()
            scores = self._engine.prioritize_cpu_only(args.names)
        return extender_v1.priorities(list(zip(args.names, scores, strict=True)))

    async def preempt(self, body: bytes) -> bytes:
        args = extender_v1.read_preemption(body)
        if not self._asks(args.pod):
            return extender_v1.preemption_answer(args.victims)
        # The search may take long; it works on a copy.
        found = await asyncio.to_thread(self._engine.preempt, args.pod, args.victims)
        return extender_v1.preemption_answer(found)

    async def simulate(self, body: bytes) -> bytes:
        args = extender_v1.read_args(body)
        if not self._asks(args.pod):
            return extender_v1.untouched(args)
        found = await asyncio.to_thread(self._engine.simulate, args.pod, args.names, args.nodes or {})
        return extender_v1.simulated(args, found)

    def bind(self, body: bytes) -> Awaitable[bytes] | Later[bytes]:
        args = extender_v1.read_binding(body)
        self._require_ready()
        later: Later[bytes] = Later()  # what is written in brackets behind a class costs as much as to make it
        begun = self._binder.begin(args, lambda refused: later.give(self._bound(refused)))
        return later if begun else self._bind_later(args)

    async def _bind_later(self, args: BindingArgs) -> bytes:
        return self._bound(await self._binder.bind(args))

    def _bound(self, refused: Refused | None) -> bytes:
        (self._bound_ones if refused is None else self._engine.metrics.binds.labels(str(refused.reason))).inc()
        return extender_v1.binding_answer("" if refused is None else str(refused))


def _well() -> None:
    return None


class Probes(Pages):
    """What is open to all: probes, metrics and the version; on a port of its own if there is one.

    `refusal`: why the bearer of a token may not get a path, as a status; whom it allows gets explanations and the
    page's data there too. The page itself names nobody. `unready_reason`: why one that leads is not ready, for /readyz.
    """

    def __init__(
        self,
        engine: Engine,
        unhealthy_reason: Reason = _well,
        standby_reason: Reason = _well,
        refusal: Guard | None = None,
        *,
        unready_reason: Reason = _well,
    ) -> None:
        super().__init__("gpu-scheduler-extender")
        self._unready_reason = unready_reason
        self._engine, self._refusal = engine, refusal
        self._unhealthy_reason, self._standby_reason = unhealthy_reason, standby_reason
        self._overview = OverviewData(engine)
        self._explaining = asyncio.Lock()
        self.gets |= {
            "/scheduler/version": self.gets["/version"], "/healthz": self._healthz, "/readyz": self._readyz,
            "/metrics": MetricsPage(engine.metrics.render),
        }  # fmt: skip
        if refusal is not None:
            self.gets["/"] = html

    def bad(self) -> None:
        self._engine.metrics.bad_input.inc()

    def _healthz(self, _: Request) -> Answer:
        problem = self._unhealthy_reason()
        return Answer(200 if problem is None else 500, f"{problem or 'ok'}\n".encode(), TEXT)

    def _readyz(self, _: Request) -> Answer:
        idle = self._standby_reason()
        if idle is not None:
            return Answer(200, f"ok: {idle}\n".encode(), TEXT)
        problem = self._engine.not_ready() or self._unready_reason()
        return Answer(200 if problem is None else 503, f"{problem or 'ok'}\n".encode(), TEXT)

    def page(self, path: str) -> Page | None:
        found = super().page(path)
        if found is not None or self._refusal is None:
            return found
        shown = self._naming_tenants(path)
        return None if shown is None else partial(self._to_bearer, shown)

    def _naming_tenants(self, path: str) -> Callable[[Request], Awaitable[Answer]] | None:
        if path == "/cluster":
            return self._cluster
        return self._explained if _explains(path) else None

    async def _to_bearer(self, shown: Callable[[Request], Awaitable[Answer]], request: Request) -> Answer:
        assert self._refusal is not None
        path = request.path.removeprefix("/scheduler")
        status = await asyncio.to_thread(self._refusal, request.token, path)
        if status is None:
            return await shown(request)
        return error(status, f"{status.phrase.lower()}: Kubernetes is asked about GET of {path:.300}; see --query-auth")

    async def _cluster(self, request: Request) -> Answer:
        idle, problem = self._standby_reason(), self._engine.not_ready()
        if idle is not None or problem is not None:
            reason = ExtenderReason.NOT_LEADER if idle is not None else ExtenderReason.NOT_SYNCED
            return error(503, f"{reason}: {idle or problem}")
        return await self._overview.answer(request)

    async def _explained(self, request: Request) -> Answer:
        idle = self._standby_reason()
        if idle is not None:
            return error(503, f"{ExtenderReason.NOT_LEADER}: {idle}")
        where = _asked_for(request.path)
        named = {"uid": where[0]} if len(where) == 1 else dict(zip(("namespace", "name"), where, strict=True))
        # One at a time: the threads are there for gangs and preemptions, too.
        async with self._explaining:
            found = await asyncio.to_thread(lambda: explain.explanation(self._engine.evidence(**named)))
        if found is not None:
            return Answer(200, orjson.dumps(found))
        pod = quoted("/".join(where), 200)
        missing = f"nothing is known about pod {pod}: kube-scheduler has not asked about it lately"
        return error(404, f"{missing}; see its events (kubectl describe pod)")


class App(Probes):
    """Everything: kube-scheduler's verbs, explanations, plans, probes. Malformed requests get 400 and do nothing.

    `authenticate`: whoever has shown no certificate (of `client_name`, if one is given) gets 403 before anything of his
    is read, except for the probes. `unhealthy_reason` says why only a restart can help, for /healthz. `standby_reason`
    says why another replica has to be asked: then every verb gets 503, and nothing is decided.
    """

    larger = " (--body-mib); with nodeCacheCapable: true kube-scheduler sends names instead of whole nodes"
    slower = " (--body-seconds)"

    def __init__(
        self, engine: Engine, binder: Binder, *, body_bytes: int, body_seconds: float, unhealthy_reason: Reason = _well,
        standby_reason: Reason = _well, unready_reason: Reason = _well,
        authenticate: bool = False, client_name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(engine, unhealthy_reason, standby_reason, unready_reason=unready_reason)
        self.body_bytes, self.body_seconds = body_bytes, body_seconds
        self._authenticate, self._client_name = authenticate, client_name
        self._planning = asyncio.Lock()
        extender = Extender(engine, binder)
        verbs: dict[str, tuple[str, Verb]] = {
            "/scheduler/filter": ("filter", extender.filter),
            "/scheduler/predicates": ("filter", extender.filter),  # the old system's route
            "/scheduler/claims/filter": ("claims-filter", extender.filter_claims),
            "/scheduler/prioritize": ("prioritize", extender.prioritize),
            "/scheduler/cpu/prioritize": ("cpu-prioritize", extender.prioritize_cpu_only),
            "/scheduler/preempt": ("preempt", extender.preempt),
            "/scheduler/simulate": ("simulate", extender.simulate),
            "/scheduler/bind": ("bind", extender.bind),
        }
        for path, (name, verb) in verbs.items():
            self.posts[path] = partial(self._verb, engine.metrics.requests.labels(name).observe, verb)
        self.gets |= {"/": html, "/defrag": self._defragmentation, "/scheduler/defrag": self._defragmentation}

    def page(self, path: str) -> Page | None:
        return super().page(path) or self._naming_tenants(path)

    def refuse(self, method: str, path: str, client: str | None) -> Answer | None:
        if self._authenticate and path not in _OPEN and (client is None or self._client_name not in (None, client)):
            self._engine.metrics.strangers.inc()
            shown = (
                "no client certificate was sent" if client is None else f"the certificate is of {quoted(client, 80)}"
            )
            way_out = "kube-scheduler sends its own by tlsConfig.certFile and keyFile"
            return error(403, f"{ExtenderReason.UNAUTHENTICATED}: {shown}; {way_out}", close=True)
        return super().refuse(method, path, client)

    def _verb(self, observe: Observe, verb: Verb, request: Request) -> Answer | Awaitable[Answer] | Later[Answer]:
        idle = self._standby_reason()
        if idle is not None:
            return error(503, f"{ExtenderReason.NOT_LEADER}: {idle}")
        began = time.perf_counter()
        try:
            extender_v1.check_weight(request.body)
            result = verb(request.body)
        except (BadInput, NotReady) as problem:
            return self._problem(problem)
        if isinstance(result, bytes):
            observe(time.perf_counter() - began)
            return Answer(200, result)
        if not isinstance(result, Later):
            return self._later(result, observe, began)
        later: Later[Answer] = Later()

        def told(body: bytes) -> None:
            observe(time.perf_counter() - began)
            later.give(Answer(200, body))

        result.then(told)
        return later

    async def _later(self, coming: Awaitable[bytes], observe: Observe, began: float) -> Answer:
        try:
            result = await coming
        except (BadInput, NotReady) as problem:
            return self._problem(problem)
        observe(time.perf_counter() - began)
        return Answer(200, result)

    def _problem(self, problem: BadInput | NotReady) -> Answer:
        if isinstance(problem, NotReady):
            return error(503, str(problem))
        self.bad()
        return error(400, str(problem), close=True)

    # --- what people ask ---

    async def _defragmentation(self, request: Request) -> Answer:
        idle, problem = self._standby_reason(), self._engine.not_ready()
        if idle is not None or problem is not None:
            reason = ExtenderReason.NOT_LEADER if idle is not None else ExtenderReason.NOT_SYNCED
            return error(503, f"{reason}: {idle or problem}")
        text = dict(urllib.parse.parse_qsl(request.query)).get("moves", str(defrag.DEFAULT_MOVES))
        if not (text.isascii() and text.isdigit() and len(text) <= 6 and 1 <= int(text) <= defrag.MOST_MOVES):
            return error(400, f"moves is {quoted(text, 40)}, not a number from 1 to {defrag.MOST_MOVES}")
        if self._planning.locked():
            return error(503, "a plan is being made; ask again when it is done")
        async with self._planning:
            found = await asyncio.to_thread(lambda: defrag.plan(self._engine.snapshot(), int(text)))
        return Answer(200, orjson.dumps(found.as_json(), option=orjson.OPT_NON_STR_KEYS))


def _explains(path: str) -> bool:
    return path.removeprefix("/scheduler").startswith("/explain/") and 1 <= len(_asked_for(path)) <= 2


def _asked_for(path: str) -> list[str]:
    """UID, or namespace and name, in the path of an explanation."""
    return path.removeprefix("/scheduler").removeprefix("/explain/").split("/")
