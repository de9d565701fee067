"""Whether a replica says that it is ready while the API server says nothing."""

from __future__ import annotations

from typing import cast

import pytest

from scheduler_ext.commands.serve import silent_reason
from scheduler_ext.http.app import Probes
from scheduler_ext.http.exchange import Answer, Request
from tests.scheduler_ext.extender_engine import engine_with
from tests.scheduler_ext.extender_support import cards, node
from vcuda.kube.informer import Informer


class Heard:
    def __init__(self, seconds: float) -> None:
        self.unanswered_seconds = lambda: seconds


@pytest.mark.parametrize(("seconds", "status"), [((500.0, 119.0), 200), ((500.0, 121.0), 503)])
@pytest.mark.parametrize("standby", [None, "another one leads"])
def test_while_the_api_server_answers_nothing_a_replica_that_serves_is_not_ready_and_is_not_restarted(
    seconds: tuple[float, ...], status: int, standby: str | None
) -> None:
    engine, _ = engine_with(node("a", cards("a", 1)))
    informers = [cast(Informer, Heard(one)) for one in seconds]
    probes = Probes(engine, standby_reason=lambda: standby, unready_reason=lambda: silent_reason(informers))
    answers = {path: probes.answer(Request("GET", path, "", b"", None)) for path in ("/healthz", "/readyz")}
    ready = cast(Answer, answers["/readyz"])
    assert ready.status == (status if standby is None else 200) and cast(Answer, answers["/healthz"]).status == 200
    assert ready.status == 200 or b"answered nothing for 121 s" in ready.body
