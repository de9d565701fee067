"""Claims that kubelet forgets to unprepare, or that nobody serves any more: let go once no pod of theirs is here."""

from __future__ import annotations

import pytest

from localcluster.apiserver.faults import Fault
from tests.manager.manager_claims import ClaimNode, booked, claim, error_of, result, uid_of
from tests.manager.manager_pods import container, eventually, pod


def test_what_kubelet_forgets_to_unprepare_is_collected(claims: ClaimNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once none of its pods is here; one whose pods are is kept, also those that came to it later."""
    monkeypatch.setattr("manager.dra.claims.ABSENT_GRACE_S", 0.0)
    assert claims.node.api is not None
    first, later = (pod(name, container("c", 0), uid=f"uid-{name}") for name in ("first", "later"))
    for item in (first, later):
        item["spec"] |= {"resourceClaims": [{"name": "gpu", "resourceClaimName": "shared"}]}
        item["spec"]["containers"][0]["resources"] = {}
    claims.node.api.put("pods", first, later)
    driver = claims.start()
    item = claim("shared", result(claims.cards[0]), pods=("first",))
    claims.put(item)
    driver.prepare(item)
    eventually(lambda: "of pods first, later" in claims.node.get("/graph")[1], "the second pod is noted")
    claims.node.api.delete(first)
    eventually(lambda: "of pods later:" in claims.node.get("/graph")[1], "the first pod is gone")
    assert booked(claims)[0] == (30, 10)
    claims.node.api.delete(later)
    claims.node.api.remove("resourceclaims", "default/shared")
    eventually(lambda: claims.left() == [], "the claim is let go")


@pytest.mark.parametrize("readable", [True, False])
def test_claims_that_nobody_serves_any_more_are_told_and_let_go(
    claims: ClaimNode, monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    """They stayed booked for ever. Without claims in its chart the daemon may not even read them any more."""
    monkeypatch.setattr("manager.dra.claims.ABSENT_GRACE_S", 0.0)
    api = claims.node.api
    assert api is not None
    user = pod("p", container("c", 0), uid="uid-p")
    user["spec"] |= {"resourceClaims": [{"name": "gpu", "resourceClaimName": "train"}]}
    user["spec"]["containers"][0]["resources"] = {}
    api.put("pods", user)
    driver = claims.start()
    item = claim("train", result(claims.cards[0]))
    claims.put(item)
    driver.prepare(item)
    claims.node.stop()
    note = api.hook
    if not readable:
        api.hook = lambda request: Fault(403) if "resourceclaims" in request.path else note(request)
    claims.node.start(f"--cdi-root={claims.cdi}")

    def told() -> list[str]:
        return [event["message"] for event in api.events if event.get("reason") == "ClaimUnserved"]

    (message,) = eventually(told, "the event")
    assert message.startswith("claim train: ") and "--protocols=dra" in message
    assert booked(claims)[0] == (30, 10), "its container may run"
    assert claims.node.daemon is not None
    claims.node.daemon.claims.collect()
    assert booked(claims)[0] == (30, 10)
    api.delete(user)
    eventually(lambda: claims.left() == [] and booked(claims)[0] == (0, 0), "the claim is let go")


@pytest.mark.parametrize("asked", ["asked for", "not asked for"])
def test_a_forgotten_claim_is_let_go_though_another_has_its_name_now(
    claims: ClaimNode, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """Pods that use the new one are no users of the old one, by whose booking it would be refused."""
    if asked == "not asked for":
        monkeypatch.setattr("manager.dra.claims.ABSENT_GRACE_S", 0.0)
    api = claims.node.api
    assert api is not None
    first, second = (pod(name, container("c", 0), uid=f"uid-{name}") for name in ("first", "second"))
    for user in (first, second):
        user["spec"] |= {"resourceClaims": [{"name": "gpu", "resourceClaimName": "shared"}]}
        user["spec"]["containers"][0]["resources"] = {}
    api.put("pods", first)
    driver = claims.start()
    old, new = (claim("shared", result(claims.cards[0], cores=60), pods=(name,)) for name in ("first", "second"))
    claims.put(old)
    assert driver.prepare(old)[uid_of(old)].devices
    if asked == "asked for":
        claims.put(new)
        api.put("pods", second)
        assert "InsufficientCores" in error_of(claims, new), "its pod is here: its container may run"
    api.delete(first)
    api.remove("resourceclaims", "default/shared")
    claims.put(new)
    api.put("pods", second)
    daemon = claims.node.daemon
    assert daemon is not None
    eventually(lambda: [one["metadata"]["name"] for one in daemon._known_pods() or ()] == ["second"], "the watch")
    if asked == "asked for":
        assert driver.prepare(new)[uid_of(new)].devices
        assert booked(claims)[0] == (60, 10) and not claims.region(old).exists()
    else:
        eventually(lambda: claims.left() == [], "the old claim is let go")


def test_a_daemon_that_serves_no_claims_touches_no_files_of_claims(claims: ClaimNode) -> None:
    driver = claims.start()
    item = claim("train", result(claims.cards[0]))
    claims.put(item)
    driver.prepare(item)
    claims.node.stop()
    claims.more = ("--protocols=device-plugin", f"--checkpoint-path={claims.node.directory}/elsewhere")
    claims.node.kubelet.start()
    claims.node.start(*claims.arguments(), wait=200)
    assert claims.spec(item)
