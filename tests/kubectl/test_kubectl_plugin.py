"""`kubectl vcuda` against the stand-in API server, a real daemon and a real extender, all through the API server."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from tests.kubectl.conftest import SYSTEM, Cluster, program_pod
from tests.manager.manager_pods import NAMES, container, eventually, pod
from tests.scheduler_ext.extender_support import Served
from vcuda.kubectl import cluster as view
from vcuda.kubectl import complete, output
from vcuda.kubectl import main as plugin
from vcuda.kubectl.errors import PluginError
from vcuda.spec import resize
from vcuda.spec.placement import CardShare


def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_top_shows_shares_through_the_api_server_with_a_readers_token(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user's own login never reaches a pod: the daemon sees a token of the one ServiceAccount that it believes."""
    assert cluster.vcuda("top", "--interval=0.1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["POD", "CONTAINER", "NODE", "CARD", "CORES", "USED", "MEMORY"]
    assert re.fullmatch(r"p +c +node-1 +[01] +30 +\S+ +0 B/1 GiB", lines[1].strip()) and len(lines) == 2
    assert cluster.tokens_made == 1
    assert cluster.vcuda("top", "--json", "-A", "--interval=0") == 0
    (row,) = printed(capsys)
    assert (row["cores"], row["memory_limit_bytes"], row["node"]) == (30, 2**30, "node-1")
    assert cluster.vcuda("top", "-n", "other") == 0
    assert "no pod with a share runs in namespace other" in capsys.readouterr().err


def test_used_cores_are_gpu_time_by_the_nodes_own_clock() -> None:
    from vcuda.kubectl import top

    def report(at_s: float, time_ns: int | None, percent: int | None = None) -> dict[str, Any]:
        share = {
            "uuid": "GPU-a", "minor": 0, "cores": 30, "core_limit": 80, "gpu_time_ns": time_ns, "card_percent": percent,
            "memory_used_bytes": 0, "memory_limit_bytes": 0,
        }  # fmt: skip
        at = {
            "namespace": "default",
            "pod_name": "p",
            "pod_uid": "u",
            "container": "c",
            "processes": 1,
            "cards": [share],
        }
        return {"at_s": at_s, "containers": [at]}

    def used(before: dict[str, Any] | None, now: dict[str, Any]) -> Any:
        return top._rows("n", before, now)[0]["used_cores"]

    assert used(report(100.0, 10**9), report(102.0, 2 * 10**9)) == 50.0
    assert used(report(100.0, 10**9), report(100.0, 10**9)) is None  # the daemon has given the same report again
    assert used(None, report(102.0, 10**9)) is None
    assert used(report(100.0, None), report(102.0, None, 73)) == 73.0


def test_nodes_reads_annotations_alone(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.refused.append("/proxy/")
    eventually(lambda: NAMES.bookings in cluster.api.find("nodes", "node-1")["metadata"]["annotations"], "the bookings")
    eventually(
        lambda: '"GPU' in cluster.api.find("nodes", "node-1")["metadata"]["annotations"][NAMES.bookings], "the booking"
    )
    assert cluster.vcuda("nodes") == 0
    heading, line = capsys.readouterr().out.splitlines()
    assert heading.split() == ["NODE", "MODEL", "CARDS", "CORES", "MEMORY", "STATE"]
    assert (
        line.split()[0] == "node-1"
        and "2/2" in line
        and "30/200" in line
        and "1 GiB/16 GiB" in line
        and line.strip().endswith("ok")
    )
    assert cluster.vcuda("nodes", "node-1", "--json") == 0
    (row,) = printed(capsys)
    assert sorted(card["booked_cores"] for card in row["cards"]) == [0, 30]
    cluster.api.remove("pods", f"{SYSTEM}/gpu-manager-x")
    assert cluster.vcuda("nodes") == 0
    assert "no daemon" in capsys.readouterr().out


def test_explain_says_what_a_pod_has_and_what_the_extender_knows(
    cluster: Cluster, extender: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    eventually(
        lambda: NAMES.placement in (cluster.api.find("pods", "default/p")["metadata"].get("annotations") or {}),
        "the placement",
    )
    eventually(lambda: cluster.vcuda("explain", "p", "--json") == 0, "the extender knows the pod")
    capsys.readouterr()
    assert cluster.vcuda("explain", "p") == 0
    said = capsys.readouterr().out
    assert "pod default/p: " in said and " on node node-1" in said
    assert "c asks for 30 cores, 1 GiB" in said and re.search(r"c has 30 cores, 1 GiB of card GPU-", said)
    assert "; its memory is held by shim\n" in said
    assert "the extender says:" in said and "runs on node node-1" in said
    assert cluster.tokens_made >= 1
    cluster.refused.append("/proxy/usage$")
    assert cluster.vcuda("explain", "p") == 0
    assert "of card GPU-" in (without := capsys.readouterr().out) and "held by" not in without


def test_explain_says_all_else_where_the_extender_cant_be_asked(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cluster.vcuda("explain", "p") == 1
    told = capsys.readouterr()
    assert "c asks for 30 cores" in told.out
    assert (
        "no replica of gpu-scheduler-extender serves in namespace vcuda-system" in told.err
        and "--system-namespace" in told.err
    )


def test_events_of_newer_components_have_their_time(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """kube-scheduler of today writes `eventTime` and a null `lastTimestamp`, which was printed as None."""
    about = {"name": "p", "namespace": "default", "uid": cluster.api.find("pods", "default/p")["metadata"]["uid"]}
    event = {
        "metadata": {"name": "p.1", "namespace": "default"}, "involvedObject": about, "type": "Warning",
        "reason": "FailedScheduling", "message": "no room", "lastTimestamp": None, "eventTime": "2026-01-01T00:00:00.000000Z",
    }  # fmt: skip
    cluster.api.put("events", event)
    cluster.vcuda("explain", "p")
    assert "  2026-01-01T00:00:00.000000Z FailedScheduling: no room" in capsys.readouterr().out


def test_explain_of_a_pod_that_no_card_can_hold_or_that_asks_for_none(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, cores in (("wrong", 150), ("none", None)):
        item = pod(name, container("c", cores or 30, 4))
        if cores is None:
            item["spec"]["containers"][0]["resources"] = {}
        del item["spec"]["nodeName"]
        cluster.api.put("pods", item)
    assert cluster.vcuda("explain", "wrong") == 1
    assert "InvalidCores: container 'c' asks for 150" in capsys.readouterr().out
    assert cluster.vcuda("explain", "none") == 0
    assert "it asks for no share" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "refused", "message"),
    [
        (("explain", "nobody"), "", "there is no pod nobody in namespace default; .*-n names the namespace"),
        (("resize", "nobody", "core=5"), "", "there is no pod nobody"),
        (("doctor", "node-9"), "", "there is no node node-9; `kubectl get nodes`"),
        (("top", "--node", "node-9"), "", "there is no node node-9"),
        (("top",), "GET .*/vcuda-system/pods$", "answered 403: User .*; ask the cluster's administrator"),
        (
            ("top",),
            "/token$",
            "no token of the ServiceAccount vcuda-system/vcuda-reader can be had.*create rolebinding .*--role=vcuda-user",
        ),
        (("top",), "/proxy/usage$", "gpu-manager-x on node node-1 can't be asked: .*--role=vcuda-user"),
        (("resize", "p", "core=500"), "", "core must be 1 to 99"),
        (("resize", "p", "core=5"), "PATCH ", "answered 403"),
        (
            ("top", "--system-namespace", "elsewhere"),
            "",
            "no gpu-manager runs in namespace elsewhere; .*--system-namespace",
        ),
        (("top", "--context", "none"), "", "is incomplete: no 'none'; name a kubeconfig"),
    ],
)
def test_what_fails_is_one_line_that_names_the_thing_the_reason_and_the_way_out(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], refused: str, message: str
) -> None:
    if refused:
        cluster.refused.append(refused)
    assert cluster.vcuda(*words) in (1, 2)
    told = capsys.readouterr()
    assert re.search(message, told.err) and told.err.count("\n") == 1 and told.out in ("", "[]\n"), told


def test_a_node_without_a_daemon_says_why(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.api.put(
        "nodes",
        {"metadata": {"name": "bare"}},
        {"metadata": {"name": "labelled", "labels": {"nvidia-device-enable": "enable"}}},
    )
    for name, why in (
        ("bare", "it has no label nvidia-device-enable=enable; `kubectl label node bare"),
        ("labelled", "describe daemonset"),
    ):
        assert cluster.vcuda("top", "--node", name) == 1
        assert why in capsys.readouterr().err


def test_a_daemon_of_an_older_version_or_one_that_is_away(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = view.Cluster._read
    monkeypatch.setattr(view.Cluster, "_read", lambda self, where: read(self, where.replace("/doctor", "/new")))
    assert cluster.vcuda("doctor", "node-1") == 1
    assert "has no page /doctor: it is of an older version; upgrade it" in capsys.readouterr().out
    thing = cluster.api.find("pods", f"{SYSTEM}/gpu-manager-x")
    thing["spec"]["containers"][0]["ports"][0]["containerPort"] = 1
    cluster.api.put("pods", thing)
    assert cluster.vcuda("top") == 1
    assert re.search("gpu-manager-x on node node-1 does not answer: .*NetworkPolicy", capsys.readouterr().err)


def test_of_two_daemons_in_an_update_the_one_that_serves_is_asked(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """The new one is ready, and stands by until the old one has been told to end."""

    daemon = cluster.node.daemon
    assert daemon is not None

    def there(name: str, minute: int, **more: str) -> None:
        made = program_pod(name, "gpu-manager", "metrics", daemon.port if name == "old" else 1)
        made["metadata"] |= {"creationTimestamp": f"2026-01-01T00:{minute:02}:00Z", **more}
        cluster.api.put("pods", made)

    cluster.api.remove("pods", f"{SYSTEM}/gpu-manager-x")
    there("new", 5)
    there("old", 1)
    assert cluster.vcuda("top", "--interval=0") == 0
    capsys.readouterr()
    there("old", 1, deletionTimestamp="2026-01-01T00:06:00Z")
    assert cluster.vcuda("top", "--interval=0") == 1
    assert "new on node node-1 does not answer" in capsys.readouterr().err


def test_doctor_goes_from_the_node_object_to_what_the_daemon_finds(
    cluster: Cluster, extender: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    """The daemon of these tests is no process of its own, so its page is another command's answer here."""
    daemon = cluster.node.daemon
    assert daemon is not None
    object.__setattr__(
        daemon._web._pages, "doctor", lambda: b'[{"what": "driver", "verdict": "FAIL", "details": "none"}]'
    )
    assert cluster.vcuda("doctor", "node-1", "--json") == 1
    found = {check["what"]: check["verdict"] for check in printed(capsys)}
    assert found == {
        "kubelet": "ok", NAMES.core: "ok", NAMES.memory: "ok", "inventory": "ok", "daemon": "ok", "driver": "FAIL", "extender": "ok",
    }  # fmt: skip
    thing = cluster.api.find("nodes", "node-1")
    thing["status"]["allocatable"] = {}
    thing["metadata"]["annotations"].pop(NAMES.inventory)
    thing["spec"] = {"unschedulable": True}
    cluster.api.put("nodes", thing)
    assert cluster.vcuda("doctor", "node-1") == 1
    said = capsys.readouterr().out
    assert "it is cordoned" in said and "no daemon has registered with kubelet" in said and "no annotation" in said


def test_a_resize_waits_for_extender_and_node(
    cluster: Cluster, extender: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    eventually(
        lambda: NAMES.placement in (cluster.api.find("pods", "default/p")["metadata"].get("annotations") or {}),
        "the placement",
    )
    assert cluster.vcuda("resize", "p", "core=50,memory=12", "--timeout=30") == 0, capsys.readouterr()
    assert re.fullmatch(r"p/c: 50 cores, 3 GiB of card GPU-\S+\n", capsys.readouterr().out)
    assert cluster.vcuda("resize", "p", "memory=4000", "--timeout=30", "--json") == 1
    told = printed(capsys)
    assert told["state"] == "refused" and "InsufficientMemory" in told["message"]
    assert told["shares"]["c"][0]["memory_blocks"] == 12


def test_a_resize_that_nobody_answers_says_so(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert cluster.vcuda("resize", "p", "core=50", "--timeout=0.3") == 1
    assert "pod p: asked: the extender has not answered yet; not done within 0.3 s" in capsys.readouterr().err
    assert cluster.vcuda("resize", "p", "core=50", "--timeout=0") == 0
    # A condition that answers another request is no answer to this one, and a grant that the node has not carried out is not done.
    for asked, state in (("core=7", "asked"), ("core=50", "granted")):
        thing = cluster.api.find("pods", "default/p")
        answer = resize.Answer(asked, {"c": resize.Target(CardShare("GPU-x", 50, 4))}, goal={"GPU-x": (50, 4)})
        thing["status"]["conditions"] = [resize.condition(answer, NAMES, "2026-01-01T00:00:00Z")]
        cluster.api.put("pods", thing)
        capsys.readouterr()
        assert cluster.vcuda("resize", "p", "core=50", "--timeout=0.3", "--json") == 1
        assert printed(capsys)["state"] == state


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([""], ["doctor", "explain", "nodes", "resize", "top"]),
        (["re"], ["resize"]),
        (["explain", ""], ["p"]),
        (["explain", "-n", "vcuda"], [SYSTEM]),
        (["explain", "-n", SYSTEM, ""], ["gpu-manager-x"]),
        (["doctor", "no"], ["node-1"]),
        (["resize", "p", "co"], ["core-limit=", "core="]),
        (["top", "--al"], ["--all-namespaces"]),
        (["doctor", "node-1", ""], []),
        (["nothing", ""], []),
    ],
)
def test_the_shell_completes_commands_objects_and_options(
    cluster: Cluster,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    found: list[str],
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    assert complete.main(words) == 0
    *names, directive = capsys.readouterr().out.splitlines()
    assert [name for name in names if name] == sorted(found) and directive == ":4"


def test_a_completion_that_fails_completes_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert complete.main(["explain", ""]) == 0
    told = capsys.readouterr()
    assert told.out.split() == [":4"] and told.err == ""


def test_tables_fit_eighty_columns(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    for words in (("top", "-A", "--interval=0"), ("nodes",), ("nodes", "node-1"), ("doctor", "node-1")):
        cluster.vcuda(*words)
    output.table(["pod", "details"], [["x" * 60, "word " * 40]])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 10 and max(len(line) for line in lines) <= 80


def test_every_command_has_help_in_eighty_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in plugin.COMMANDS:
        with pytest.raises(SystemExit) as ended:
            plugin.main([command, "--help"])
        assert ended.value.code == 0
        said = capsys.readouterr().out
        assert "kubectl vcuda" in said and max(len(line) for line in said.splitlines()) <= 80


class Answers:
    """A client of something that answers everything with one thing."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def get(self, *_: str) -> Any:
        return self._thing

    def pages(self, *_: str) -> Any:
        return [([self._thing], "1")]

    def call(self, *_: str, **__: Any) -> Any:
        return {"items": [self._thing]}


@pytest.mark.parametrize(
    "thing",
    [
        None, 7, [], {}, {"metadata": None}, {"metadata": {"name": 5}}, {"metadata": {"name": "n", "annotations": []}},
        {"metadata": {"name": "n"}, "status": "up"},
    ],
)  # fmt: skip
def test_what_is_no_object_is_told_in_a_line(thing: Any) -> None:
    asked = view.Cluster(cast("Any", Answers(thing)), "default", SYSTEM, NAMES)
    for ask in (lambda: asked.pod("p"), lambda: asked.node("n"), asked.nodes, asked.daemons, asked.leader):
        with pytest.raises(PluginError, match="no Kubernetes object"):
            ask()


def test_a_completion_gives_the_terminal_no_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(complete, "candidates", lambda _: ["good", "bad\x1b[31m", "bad\u202e"])
    assert complete.main(["nodes", ""]) == 0 and capsys.readouterr().out == "good\n:4\n"


@pytest.mark.parametrize(
    "body",
    [
        "7", "[3]", '"text"', '{"containers": 7, "pod": {}}', '{"containers": [{"cards": 5}], "pod": 3}',
        '{"containers": [null], "pod": {"namespace": "default", "name": "p", "uid": "u"}}', "[" * 100_000,
    ],
)  # fmt: skip
def test_a_page_of_another_form_is_told_in_a_line(
    cluster: Cluster, body: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    role = {NAMES.role_label: "leader"}
    cluster.api.put("pods", program_pod("extender-y", "gpu-scheduler-extender", "probes", 1, **role))
    monkeypatch.setattr(view.Cluster, "_read", lambda *_: body.encode())
    for words, where in (
        (("top",), "/usage"),
        (("doctor", "node-1"), "/doctor"),
        (("explain", "p"), "/explain/default/p"),
    ):
        assert cluster.vcuda(*words) == 1
        said = capsys.readouterr()
        assert re.search(f"answered {where} with .*: is it of our version", said.out + said.err), words


def test_a_node_whose_conditions_are_none_is_told_so(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    thing = cluster.api.find("nodes", "node-1")
    thing["status"]["conditions"] = [None]
    cluster.api.put("nodes", thing)
    assert cluster.vcuda("doctor", "node-1") == 1
    assert "the node is not Ready: it says nothing" in capsys.readouterr().out
