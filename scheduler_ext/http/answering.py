"""How an application's answer begins and ends, in both versions of HTTP."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from scheduler_ext.http.exchange import Answer, Application, Later, Request, error

_log = logging.getLogger(__name__)

Pending = asyncio.Task[None] | Later[Answer]  # an answer that comes later


def begin(application: Application, request: Request, told: Callable[..., None], *of: Any) -> Answer | Pending:
    """The answer, or what it waits for: then `told(*of, answer)` is called with it, once, from the loop."""
    try:
        answer = application.answer(request)
    except Exception:  # noqa: BLE001 - one request must not end the server
        return _failed(request)
    if isinstance(answer, Answer):
        return answer
    if isinstance(answer, Later):
        if answer.given is not None:
            return answer.given
        answer.then(functools.partial(told, *of))
        return answer
    task = asyncio.get_running_loop().create_task(_finish(request, answer, functools.partial(told, *of)))
    if asyncio.iscoroutine(answer):
        # One that is cancelled before its first turn, with its connection, never comes to it: Python would warn.
        task.add_done_callback(functools.partial(_close, answer))
    return task


def _close(coming: Coroutine[Any, Any, Answer], _task: asyncio.Task[None]) -> None:
    coming.close()


async def _finish(request: Request, coming: Awaitable[Answer], told: Callable[[Answer], None]) -> None:
    try:
        answer = await coming
    except Exception:  # noqa: BLE001 - as above
        answer = _failed(request)
    told(answer)


def _failed(request: Request) -> Answer:
    _log.exception("%s %s failed", request.method, request.path)
    return error(500, "an error of ours; see the extender's log")
