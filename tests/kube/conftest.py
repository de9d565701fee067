"""The whole system on a real one-node Kubernetes: cluster, simulated machine, daemon and extender, once per run.

`make test-kube` selects these tests; a plain `pytest` leaves them out, because they take minutes and the machine's ports.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import kubelab
from kube_system import System


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    chosen = "kube" in (config.option.markexpr or "")
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.kube)
            item.add_marker(pytest.mark.timeout(300))
            if not chosen:
                item.add_marker(pytest.mark.skip(reason="real Kubernetes: `make test-kube` runs these"))


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    try:
        kubelab.script()
    except kubelab.Unavailable as error:
        pytest.skip(str(error))
    lab = kubelab.KubeLab.up(
        CPU_MANAGER="static",
        RUNC_OLD="1",
        RECONCILE="3s",
        NODE_LABELS="nvidia-device-enable=enable",
        KUBELET_EXTRA_ARGS="--kube-api-qps=50 --kube-api-burst=100",
    )
    system = System(lab, tmp_path_factory.mktemp("system"))
    try:
        system.start()
        yield system
    finally:
        system.stop()
        lab.down()


@pytest.fixture(scope="session")
def client_image(system: System, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image with nothing but glibc and a CUDA driver-API client that was linked against the stub."""
    root = tmp_path_factory.mktemp("image")
    (root / "bin").mkdir()
    source = Path(__file__).parent / "client" / "hog.c"
    stubs = system.native_folder / "stubs"
    command = ["gcc", "-O2", "-o", str(root / "bin" / "hog"), str(source), f"-L{stubs}", "-lcuda"]
    subprocess.run(command, check=True, timeout=60)
    for library in (
        "/lib/x86_64-linux-gnu/libc.so.6",
        "/lib64/ld-linux-x86-64.so.2",
        "/lib/x86_64-linux-gnu/libpthread.so.0",
        "/lib/x86_64-linux-gnu/libdl.so.2",
        "/lib/x86_64-linux-gnu/libm.so.6",
    ):
        target = root / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(Path(library).read_bytes())
        target.chmod(0o755)
    system.lab.image("vcuda-client:test", root, "/bin/hog")
    return "vcuda-client:test"
