"""What the benchmark on a real kubelet says about the shares that pods hold: read where the container sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import _kube_shares
from vcuda import region
from vcuda.spec.names import Names
from vcuda.spec.units import BLOCK_BYTES

NAMES = Names()
UIDS = [f"0000000{number}-aaaa-bbbb-cccc-123456789abc" for number in range(4)]


def process(proc: Path, pid: int, cgroup: str, blocks: int | None) -> None:
    (proc / str(pid)).mkdir(parents=True)
    (proc / str(pid) / "cgroup").write_text(f"0::{cgroup}\n")
    folder = proc / str(pid) / "root/etc/vcuda"
    folder.mkdir(parents=True)
    if blocks is not None:
        region.create(folder, [region.CardLimit("GPU-1", 0, blocks * BLOCK_BYTES, 3, 3)])


def pod(number: int, blocks: int) -> dict[str, Any]:
    limits = {NAMES.core: "3", NAMES.memory: str(blocks)}
    return {
        "metadata": {"name": f"p{number}", "uid": UIDS[number]},
        "spec": {"containers": [{"resources": {"limits": limits}}]},
    }


def test_each_pods_limits_are_found_in_its_own_root(tmp_path: Path) -> None:
    underscored = UIDS[1].replace("-", "_")
    process(tmp_path, 10, f"/kubepods/besteffort/pod{UIDS[0]}/abc", 5)
    process(tmp_path, 11, f"/kubepods.slice/kubepods-besteffort-pod{underscored}.slice/cri-abc.scope", 6)
    process(tmp_path, 12, f"/kubepods/besteffort/pod{UIDS[2]}/pause", None)
    process(tmp_path, 13, "/system.slice/other", 7)
    (tmp_path / "14").mkdir()  # a process that has just ended
    assert _kube_shares.mounted(tmp_path) == {UIDS[0]: 5 * BLOCK_BYTES, UIDS[1]: 6 * BLOCK_BYTES}


def test_a_pod_with_anothers_share_or_none_is_a_mismatch() -> None:
    held = {UIDS[0]: 5 * BLOCK_BYTES, UIDS[1]: 5 * BLOCK_BYTES, UIDS[3]: BLOCK_BYTES}
    wrong = _kube_shares.mismatches([pod(0, 5), pod(1, 6), pod(2, 7)], held, NAMES)
    assert wrong == [
        f"p1: asked for {6 * BLOCK_BYTES} bytes, holds {5 * BLOCK_BYTES}",
        f"p2: asked for {7 * BLOCK_BYTES} bytes, holds None",
    ]
