"""What happens to the extenders in a fault run: replicas that are killed, and a scheduler that asks, repeats, forgets and deletes."""

from __future__ import annotations

import collections
import json
import queue
import random
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import urllib3

from benchmarks._faults_api import NAMES, Api, Object

LEASE = "default/extender"
_LABEL = f"{NAMES.domain}/vcuda-extender-role"
# (cores, blocks, part of all pods)
SHAPES = ((10, 4, 0.2), (30, 10, 0.3), (50, 20, 0.2), (60, 8, 0.1), (100, None, 0.15), (200, None, 0.05))


class Replica:
    """One extender process, started again whenever it has ended."""

    def __init__(self, name: str, arguments: list[str]) -> None:
        self.name, self.url, self.starts = name, "", 0
        self.traces: list[str] = []
        self._arguments = [*arguments, "--pod", f"default/{name}"]
        self._process: subprocess.Popen[str] | None = None
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop:
            self.starts += 1
            command = [sys.executable, "-m", "scheduler_ext.main", "serve", *self._arguments]
            self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            assert self._process.stderr is not None
            trace = False
            for line in self._process.stderr:
                found = re.search(r"serving on (http://[^,]+),", line)
                if found:
                    self.url = found[1]
                if line.startswith("Traceback"):
                    trace = True
                    self.traces.append("")
                elif trace:
                    # The last line of a traceback, its message, is the first that is not indented.
                    trace = line.startswith((" ", "\n"))
                    self.traces[-1] += line
            self._process.wait()

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)

    def end(self) -> None:
        self._stop = True
        if self._process is not None:
            self._process.terminate()
        self._thread.join(20)


class Load:
    """Pods that come, are scheduled through the replicas, and go. `counts` says how often what happened."""

    def __init__(self, api: Api, replicas: list[Replica], seed: int, pods: int, live: int) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.lies: list[str] = []
        self.chaos = True
        self.paused = False  # nobody comes, goes or is evicted
        self._api, self._replicas = api, replicas
        self._dice = random.Random(seed)
        self._pods, self._live = pods, live
        self._names = [node["metadata"]["name"] for node in api.store("nodes").list(None)]
        self._http = urllib3.PoolManager(num_pools=8, maxsize=32, retries=False)
        self._pending: queue.Queue[str] = queue.Queue()
        self._later: list[tuple[float, str]] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._schedule, args=(number,), daemon=True) for number in range(8)]
        self._threads.append(threading.Thread(target=self._come_and_go, daemon=True))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    @property
    def created(self) -> int:
        return self.counts["pods created"]

    def waiting(self) -> int:
        return len(self._api.waiting())

    def make_room(self, part: float) -> None:
        """End some of those that run."""
        bound = [key for key, pod in self._api.pods().items() if pod["spec"].get("nodeName") and "/p" in key]
        for key in self._dice.sample(bound, int(len(bound) * part)):
            self._end(key)

    def take_nominations_back(self) -> None:
        """As kube-scheduler does where evicting did not help: what is kept for such a pod is anybody's room again."""
        for pod in self._api.waiting():
            if pod["status"].pop("nominatedNodeName", None):
                key = f"default/{pod['metadata']['name']}"
                self._api.change(key, lambda one: one["status"].pop("nominatedNodeName", None))

    # --- pods ---

    def _create(self) -> None:
        number = self.created
        dice = self._dice
        cores, blocks = dice.choices([(c, b) for c, b, _ in SHAPES], [part for *_, part in SHAPES])[0]
        size = dice.choice((2, 3, 4)) if dice.random() < 0.05 and number + 4 < self._pods else 1
        priority = dice.choice((0, 0, 0, 10))
        for index in range(size):
            limits = {NAMES.core: str(cores)} | ({NAMES.memory: str(blocks)} if blocks else {})
            annotations = {NAMES.gang: f"g{number}/{size}"} if size > 1 else {}
            if dice.random() < 0.02:
                annotations[NAMES.placement] = '{"version":1,"containers":{"main":[["GPU-forged",1,1]]}}'
            name = f"p{number + index}"
            pod: Object = {
                "metadata": {"name": name, "namespace": "default", "uid": f"u-{name}-{dice.getrandbits(32):x}", "annotations": annotations},
                "spec": {"priority": priority, "containers": [{"name": "main", "resources": {"limits": limits}}]},
                "status": {"phase": "Pending"},
            }  # fmt: skip
            self._api.put("pods", pod)
            self.counts["pods created"] += 1
            self._pending.put(f"default/{name}")

    def _come_and_go(self) -> None:
        """Keeps some pods pending and some running; ends and deletes others, now and then in storms."""
        dice, storm, refused = self._dice, time.monotonic() + 3, 0
        while not self._stop.wait(0.02):
            if self.paused:
                continue
            pods = self._api.pods()
            bound = [key for key, pod in pods.items() if pod["spec"].get("nodeName") and "/p" in key]
            while self.created < self._pods and self._pending.qsize() + len(self._later) < 40:
                self._create()
            surplus = len(bound) - self._live
            # While there is no room, somebody ends, so that all get their turn.
            refused, before = self.counts["filters refused"], refused
            for key in dice.sample(bound, min(len(bound), max(surplus, min(2, refused - before)))):
                self._end(key)
            if self.chaos and time.monotonic() > storm:
                storm = time.monotonic() + dice.uniform(3, 8)
                self.counts["deletion storms"] += 1
                for key in dice.sample(bound, len(bound) // 4):
                    self._delete(key, "pods deleted in a storm")
                for _, key in list(self._later)[: len(self._later) // 3]:
                    self._delete(key, "pods deleted while waiting")

    def _end(self, key: str) -> None:
        if self._dice.random() < 0.5:
            self._api.change(key, lambda pod: pod["status"].update(phase="Succeeded"))
            self.counts["pods finished"] += 1
        self._delete(key, "pods ended")

    def _delete(self, key: str, why: str) -> None:
        """Delete a pod, and those of its gang that wait: a gang that has lost a member can't be complete any more."""
        pod = self._api.pod(key)
        if pod is None:
            return
        gang = pod["metadata"].get("annotations", {}).get(NAMES.gang)
        waiting = [
            other for other, one in self._api.pods().items()
            if gang and one["metadata"].get("annotations", {}).get(NAMES.gang) == gang and not one["spec"].get("nodeName")
        ]  # fmt: skip
        for one in {key, *waiting}:
            self._api.delete("pods", one)
            self.counts[why] += 1

    # --- the scheduler ---

    def _leader(self) -> str:
        """The replica that the Service selects: the one with the leader's label."""
        for replica in self._replicas:
            pod = self._api.pod(f"default/{replica.name}")
            if pod and pod["metadata"].get("labels", {}).get(_LABEL) == "leader" and replica.url:
                return replica.url
        return self._replicas[0].url

    def call(self, verb: str, body: Object, url: str = "") -> Any:
        """POST to the leader; None where no answer came or it was not 200."""
        try:
            answer = self._http.request(
                "POST", f"{url or self._leader()}/scheduler/{verb}", body=json.dumps(body).encode(),
                timeout=urllib3.Timeout(connect=1, read=8), headers={"Content-Type": "application/json"},
            )  # fmt: skip
        except (urllib3.exceptions.HTTPError, OSError, ValueError):
            self.counts["requests without an answer"] += 1
            return None
        if answer.status != 200:
            self.counts[f"requests answered {answer.status}"] += 1
            return None
        return json.loads(answer.data)

    def _schedule(self, number: int) -> None:
        dice = random.Random(number)
        while not self._stop.is_set():
            now = time.monotonic()
            due = [entry for entry in list(self._later) if entry[0] < now] if number == 0 else []
            for entry in due:
                self._later.remove(entry)
                self._pending.put(entry[1])
            try:
                key = self._pending.get(timeout=0.05)
            except queue.Empty:
                continue
            try:
                again = self._try(key, dice)
            except Exception as error:  # noqa: BLE001 - a defect of this program must be seen, not end a thread
                self.lies.append(f"the load itself failed: {error!r}")
                again = True
            if again:
                self._later.append((time.monotonic() + dice.uniform(0.05, 0.5), key))

    def _try(self, key: str, dice: random.Random) -> bool:
        """One attempt to schedule a pod, as hostile as can be. Returns whether it has to be tried again."""
        pod = self._api.pod(key)
        if pod is None or pod["spec"].get("nodeName"):
            return False
        names = self._names if dice.random() < 0.8 else dice.sample(self._names, max(1, len(self._names) // 2))
        answer = self.call("filter", {"Pod": pod, "NodeNames": names})
        if answer is None:
            self._stop.wait(0.1)
            return True
        if not answer["NodeNames"]:
            self.counts["filters refused"] += 1
            if pod["spec"]["priority"] > 0 and not self.paused and dice.random() < 0.3:
                self._preempt(pod, dice)
            return True
        node = answer["NodeNames"][0]
        if self.chaos:
            luck = dice.random()
            if luck < 0.03:
                self.counts["binds that never came"] += 1
                return True
            if luck < 0.05:
                self._delete(key, "pods deleted before bind")
            elif luck < 0.07:
                self._bind(pod, dice.choice(self._names))  # wrong, mostly
                self.counts["binds to another node"] += 1
            elif luck < 0.1:
                threading.Thread(target=self._bind, args=(pod, node), daemon=True).start()
                self.counts["binds sent twice"] += 1
        return not self._bind(pod, node)

    def _bind(self, pod: Object, node: str) -> bool:
        metadata = pod["metadata"]
        args = {
            "PodName": metadata["name"],
            "PodNamespace": "default",
            "PodUID": metadata["uid"],
            "Node": node,
        }
        answer = self.call("bind", args)
        if answer is None or answer["Error"]:
            if answer:
                self.counts[f"bind: {answer['Error'].split(':')[0]}"] += 1
            return False
        now = self._api.pod(f"default/{metadata['name']}")
        if now is not None and now["metadata"]["uid"] == metadata["uid"] and now["spec"].get("nodeName") != node:
            self.lies.append(
                f"bind of {metadata['name']} to {node} was reported done, it is on {now['spec'].get('nodeName')}"
            )
        self.counts["pods bound"] += 1
        return True

    def _preempt(self, pod: Object, dice: random.Random) -> None:
        pods = self._api.pods()
        bound = [one for key, one in pods.items() if one["spec"].get("nodeName") and "/p" in key]
        proposal: dict[str, Any] = {}
        for one in dice.sample(bound, min(8, len(bound))):
            if one["spec"]["priority"] < pod["spec"]["priority"]:
                victims = proposal.setdefault(one["spec"]["nodeName"], {"Pods": [], "NumPDBViolations": 0})
                victims["Pods"].append({"UID": one["metadata"]["uid"]})
        answer = self.call("preempt", {"Pod": pod, "NodeNameToMetaVictims": proposal})
        for node, victims in list((answer or {}).get("NodeNameToMetaVictims", {}).items())[:1]:
            uids = {one["UID"] for one in victims["Pods"]}
            for one in bound:
                if one["metadata"]["uid"] in uids:
                    if one["spec"]["priority"] >= pod["spec"]["priority"]:
                        self.lies.append(f"{one['metadata']['name']} was evicted for a pod of no higher priority")
                    self._delete(f"default/{one['metadata']['name']}", "pods evicted")
            key = f"default/{pod['metadata']['name']}"
            self._api.change(key, lambda thing: thing["status"].update(nominatedNodeName=node))  # noqa: B023
