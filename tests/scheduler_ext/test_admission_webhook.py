"""The webhook as the API server meets it: a process of its own, by TLS, asked with AdmissionReviews."""

from __future__ import annotations

import base64
import collections
import json
import logging
import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import httpx
import pytest

from scheduler_ext.admission import app
from scheduler_ext.admission.rules import Rules
from scheduler_ext.http.exchange import Answer, Request
from scheduler_ext.main import main
from tests.scheduler_ext.extender_claims import ask, claim
from tests.scheduler_ext.extender_support import NAMES, plain_pod, pod
from tests.scheduler_ext.test_extender_writing import certificate
from tests.support import web


class Webhook:
    """The command, its log so far, and a client that trusts its certificate."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.chain, self.key = certificate(folder, "webhook")
        self._asked: collections.deque[float] = collections.deque(maxlen=9)
        command = [
            sys.executable,
            "-m",
            "scheduler_ext.main",
            "webhook",
            "--bind-address=127.0.0.1",
            "--port=0",
        ]
        files = [f"--tls-cert={self.chain}", f"--tls-key={self.key}", "--probe-port=0"]
        self.process = subprocess.Popen([*command, *files, *options], stderr=subprocess.PIPE, text=True)
        self.url = self._told(r"serving on (https://\S+?),")
        self.probes = self._told(r"probes on (http://\S+)")
        self.client = httpx.Client(verify=ssl.create_default_context(cafile=str(self.chain)), timeout=20)

    def _told(self, pattern: str) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(pattern, line):
                return found[1]
        raise AssertionError(f"it ended without {pattern}")

    def ask(self, thing: dict[str, Any], path: str = "", **fields: Any) -> dict[str, Any]:
        request = {
            "uid": "r-1", "kind": {"group": "", "version": "v1", "kind": "Pod"}, "operation": "CREATE", "namespace": "team",
            "userInfo": {"username": "alice"}, "object": thing, "oldObject": None,
        } | fields  # fmt: skip
        review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
        answer = self.client.post(f"{self.url}{path}", json=review)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert (body["apiVersion"], body["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
        assert body["response"]["uid"] == "r-1"
        return dict(body["response"])

    def figures(self) -> dict[str, float]:
        """Ten texts a second are made: whoever asks for more gets an old one."""
        if len(self._asked) == self._asked.maxlen:
            time.sleep(max(0.0, self._asked[0] + 1.1 - time.monotonic()))
        self._asked.append(time.monotonic())
        lines = web.get(f"{self.probes}/metrics", timeout=20).text.splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}

    def results(self) -> dict[str, float]:
        found, names = self.figures(), ("changed", "untouched", "refused", "bad")
        return {name: found[f'vcuda_webhook_reviews_total{{result="{name}"}}'] for name in names}

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.client.close()
        assert self.process.stderr is not None
        self.process.stderr.read()
        return self.process.wait(timeout=20)


@pytest.fixture(scope="module")
def webhook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Webhook]:
    options = ("--scheduler-name=gpu", "--trusted-users=system:manager,other", "--default-priority=low")
    served = Webhook(tmp_path_factory.mktemp("webhook"), *options)
    yield served
    served.stop()


def test_reviews_are_answered_by_tls(webhook: Webhook) -> None:
    before = webhook.results()
    told = webhook.ask(pod("p", annotations={NAMES.placement: "forged"}))
    assert told["allowed"] is True
    assert told["patchType"] == "JSONPatch"
    steps = {(step["op"], step["path"]): step.get("value") for step in json.loads(base64.b64decode(told["patch"]))}
    assert steps == {
        ("remove", "/metadata/annotations/tencent.com~1vcuda-placement"): None,
        ("add", "/metadata/annotations/tencent.com~1vcuda-priority"): "low",
        ("add", "/spec/schedulerName"): "gpu",
    }
    assert told["warnings"] == [
        f"annotation {NAMES.placement} was removed: the scheduler writes it when the pod is placed"
    ]
    assert webhook.ask(plain_pod("p")) == {"uid": "r-1", "allowed": True}
    placed, user = pod("p", annotations={NAMES.placement: "mine"}), {"username": "system:manager"}
    assert webhook.ask(placed, operation="UPDATE", oldObject=pod("p"), userInfo=user) == {
        "uid": "r-1",
        "allowed": True,
    }

    told = webhook.ask(pod("p", 150, 1))
    assert told["allowed"] is False
    assert told["status"]["code"] == 403
    assert told["status"]["message"].startswith(
        "InvalidCores: container 'main' asks for 150 tencent.com/vcuda-core; ask 1 to 99"
    )
    now = webhook.results()
    assert {name: now[name] - before[name] for name in now} == {
        "changed": 1, "untouched": 2, "refused": 1, "bad": 0,
    }  # fmt: skip
    assert webhook.figures()["vcuda_webhook_review_seconds_count"] >= 4


def nested(depth: int) -> Any:
    found: Any = {}
    for _ in range(depth):
        found = {"f": found}
    return found


def test_what_a_pod_carries_beside_costs_nothing(webhook: Webhook) -> None:
    """Copying it took a second and 700 MiB, and a deep one let a forged placement through."""
    thing = pod("p", annotations={NAMES.placement: "forged"})
    thing["metadata"]["managedFields"] = [{"fieldsV1": nested(900)}]
    told = webhook.ask(thing)
    assert "vcuda-placement" in base64.b64decode(told["patch"]).decode()
    thing["metadata"]["managedFields"] = [{} for _ in range(800_000)]
    before = most_resident(webhook)
    assert webhook.ask(thing)["patch"] == told["patch"]
    assert most_resident(webhook) - before < 120, "MiB: the body, and what the parser makes of it"


def most_resident(webhook: Webhook) -> float:
    status = Path(f"/proc/{webhook.process.pid}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024


def test_many_forged_annotations_are_told_in_a_few_words(webhook: Webhook) -> None:
    told = webhook.ask(pod("p", annotations={NAMES.predicate_gpu_index(at): "1" for at in range(7000)}))
    assert len(told["warnings"]) == 9
    assert told["warnings"][-1] == "and 6992 more of this kind"


@pytest.mark.parametrize("refused", [False, True])
def test_what_the_log_says_of_a_namespaces_reviews_is_bounded(refused: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A line came for each review with a forged placement, however many: nine for one with thousands of annotations."""
    application = app.App(Rules(), app.Metrics())
    thing = pod("p", cores=150 if refused else 50, annotations={NAMES.placement: "forged"})
    caplog.set_level(logging.INFO)

    def lines(namespace: str, reviews: int) -> int:
        caplog.clear()
        request = {"uid": "r", "kind": {"kind": "Pod"}, "operation": "CREATE", "namespace": namespace,
                   "userInfo": {"username": "alice"}, "object": thing}  # fmt: skip
        review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
        for _ in range(reviews):
            answer = application.answer(Request("POST", app.PATH, "", json.dumps(review).encode(), None))
            assert isinstance(answer, Answer) and answer.status == 200
        assert all(f"of 'alice' in '{namespace}': " in message for message in caplog.messages)
        return len(caplog.messages)

    assert lines("team", 1000) == 10
    assert lines("others", 3) == 3


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"[]", "not an AdmissionReview of admission.k8s.io/v1"),
        (b'{"apiVersion":"admission.k8s.io/v1beta1","kind":"AdmissionReview"}', "not an AdmissionReview"),
        (b'{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview"}', "request is missing"),
        (b'{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{}}', "request.uid"),
        (b'{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u","kind":{"kind":"Node"}}}', "for pods"),
        (b'{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u","kind":{"kind":"Pod"},"subResource":"status"}}', "for pods"),
        (b'{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u","kind":{"kind":"Pod"},"operation":"CREATE","userInfo":{}}}', "request.object"),
        (b"x" * (9 * 2**20), "at most 8388608 are read"),
    ],
    ids=lambda value: value[-40:].decode() if isinstance(value, bytes) else "",
)  # fmt: skip
def test_what_is_no_review_of_a_pod_gets_a_reason(webhook: Webhook, body: bytes, words: str) -> None:
    before = webhook.results()["bad"]
    answer = webhook.client.post(webhook.url, content=body)
    assert answer.status_code == 400
    assert words in answer.text
    assert webhook.results()["bad"] == before + 1
    assert webhook.client.get(webhook.url).status_code == 405


def test_probes_have_a_port_of_their_own_and_sigterm_ends_it(tmp_path: Path) -> None:
    webhook = Webhook(tmp_path)
    for page in ("healthz", "readyz"):
        assert web.get(f"{webhook.probes}/{page}", timeout=20).text == "ok\n"
    assert web.get(f"{webhook.probes}/version", timeout=20).json()["name"] == "gpu-admission-webhook"
    assert web.post(f"{webhook.probes}/admission/pods", timeout=20).status_code == 404
    assert webhook.stop() == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "the API server speaks to webhooks by TLS only; give --tls-cert and --tls-key"),
        (["--tls-cert=x", "--tls-key=x", "--default-cores=101"], "--default-cores: '101' is not valid (give a whole number from 0 to 100)"),
        (["--tls-cert=x", "--tls-key=x", "--default-priority=urgent"], "--default-priority: 'urgent' is not valid"),
        (["--tls-cert=x", "--tls-key=x", "--resource-domain=a/b"], "--resource-domain: 'a/b' is not valid (write a domain"),
        (["--tls-cert=/nowhere", "--tls-key=/nowhere"], "/nowhere cannot be used as certificate or key: No such file"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = main(["webhook", *options])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert said in capsys.readouterr().err


def test_a_namespace_s_path_makes_claims_of_shares_and_claims_have_one_of_their_own(webhook: Webhook) -> None:
    told = webhook.ask(pod("p"), "/to-claims")
    steps = json.loads(base64.b64decode(told["patch"]))
    assert {"op": "add", "path": "/spec/resourceClaims", "value": [ANY]} in steps
    address = webhook.url.replace("/admission/pods", "/admission/claims")
    request = {
        "uid": "r-2", "kind": {"kind": "ResourceClaim"}, "operation": "CREATE", "namespace": "team", "userInfo": {},
        "object": claim("c", ask(cores=150)),
    }  # fmt: skip
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    answer = webhook.client.post(address, json=review).json()["response"]
    assert not answer["allowed"] and answer["status"]["message"].startswith("InvalidCores: ")
    assert webhook.client.post(webhook.url, json=review).status_code == 400


@pytest.mark.parametrize(("driver", "allowed"), [("other.example.com", True), ("vcuda.tencent.com", False)])
def test_a_claim_with_parameters_deeper_than_a_parser_goes_is_reviewed(
    webhook: Webhook, driver: str, allowed: bool
) -> None:
    """Refused as no JSON, it would pass where the webhook's failures are ignored."""
    thing = claim("c", ask(cores=50))
    parameters = {"apiVersion": "vcuda.tencent.com/v1alpha1", "kind": "ShareConfig", "coreLimit": "DEEP"}
    thing["spec"]["devices"]["config"] = [{"opaque": {"driver": driver, "parameters": parameters}}]
    request = {
        "uid": "r-3", "kind": {"kind": "ResourceClaim"}, "operation": "CREATE", "namespace": "team", "userInfo": {},
        "object": thing,
    }  # fmt: skip
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    body = json.dumps(review).replace('"DEEP"', "[" * 5_000 + "]" * 5_000)
    address = webhook.url.replace("/admission/pods", "/admission/claims")
    answer = webhook.client.post(address, content=body, headers={"Content-Type": "application/json"}).json()["response"]
    assert answer["allowed"] is allowed
    assert allowed or answer["status"]["message"].startswith("InvalidShareConfig: ")
