"""A PyTorch program: `memory`, `train`, `graph`, `graph-only`, `workers` or `processes`. Prints one line of JSON; results are told as digests."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what makes cuBLAS give the same result twice

import torch
from torch import nn

MIB = 1 << 20
DEVICE = "cuda"


def digest(*tensors: torch.Tensor) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def model() -> nn.Module:
    torch.manual_seed(7)
    layers = [
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 32 * 32, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    ]
    return nn.Sequential(*layers).to(DEVICE)


def batch(index: int, size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(index)
    return torch.randn(size, 3, 32, 32, generator=chance), torch.randint(0, 10, (size,), generator=chance)


def train(net: nn.Module, batches: Any) -> str:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for inputs, wanted in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(
            net(inputs.to(DEVICE, non_blocking=True)), wanted.to(DEVICE, non_blocking=True)
        )
        loss.backward()
        optimizer.step()
    return digest(*net.parameters())


def fill(step_mib: int = 64) -> tuple[int, bool]:
    """MiB that could be had, and whether the end was PyTorch's own out-of-memory error."""
    held = []
    try:
        while True:
            held.append(torch.ones(step_mib * MIB, dtype=torch.uint8, device=DEVICE))
    except torch.OutOfMemoryError:
        return step_mib * len(held), True


def memory() -> dict[str, Any]:
    free, total = torch.cuda.mem_get_info()
    reached, refused = fill()
    torch.cuda.empty_cache()
    again, _ = fill()
    torch.cuda.empty_cache()
    answer = {"total_mib": total // MIB, "free_mib": free // MIB, "reached_mib": reached, "refused": refused}
    return {**answer, "again_mib": again, "digest": train_plainly()["digest"]}


def train_plainly() -> dict[str, Any]:
    trained = train(model(), [batch(index) for index in range(8)])
    return {"digest": trained, "backend": torch.cuda.get_allocator_backend()}


def graph(until_refused: bool = True) -> dict[str, Any]:
    """A training step captured as a CUDA graph and replayed, side streams and the graph's own memory pool included."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    inputs, wanted = (tensor.to(DEVICE) for tensor in batch(0))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(net(inputs), wanted).backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(captured):
        step()
    for index in range(50):
        fresh, target = batch(index)
        inputs.copy_(fresh)
        wanted.copy_(target)
        captured.replay()
    torch.cuda.synchronize()
    reached, refused = fill() if until_refused else (0, False)
    torch.cuda.empty_cache()
    captured.replay()  # a graph goes on after its neighbour ran out of memory
    torch.cuda.synchronize()
    return {"digest": digest(*net.parameters()), "reached_mib": reached, "refused": refused}


class Samples(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, wanted = batch(index, 1)
        return inputs[0], wanted[0]


def workers() -> dict[str, Any]:
    """Data loaded by forked workers into pinned memory."""
    net = model()  # the card is in use before the workers are forked
    loader = torch.utils.data.DataLoader(Samples(), batch_size=4, num_workers=2, pin_memory=True)
    return {"digest": train(net, loader)}


def child(index: int, tensors: Any, answers: Any, together: Any) -> None:
    shared = tensors.get()
    total = int(shared.sum().item())
    together.wait()
    reached, refused = fill(32)
    answers.put((index, total, reached, refused, torch.cuda.mem_get_info()[1] // MIB))
    together.wait()
    del shared


def processes() -> dict[str, Any]:
    """Two spawned children fill the share at the same time while they hold a tensor of their parent's."""
    import torch.multiprocessing as multiprocessing

    context = multiprocessing.get_context("spawn")
    tensors, answers, together = context.Queue(), context.Queue(), context.Barrier(2)
    mine = torch.ones(8 * MIB, dtype=torch.uint8, device=DEVICE)
    children = [context.Process(target=child, args=(index, tensors, answers, together)) for index in range(2)]
    for process in children:
        process.start()
        tensors.put(mine)
    told = sorted(answers.get(timeout=90) for _ in children)
    for process in children:
        process.join(60)
    return {
        "sums": [row[1] for row in told],
        "reached_mib": sum(row[2] for row in told) + 8,
        "refused": all(row[3] for row in told),
        "total_mib": [row[4] for row in told],
        "ended": [process.exitcode for process in children],
    }


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    parts = {
        "memory": memory,
        "train": train_plainly,
        "graph": graph,
        "graph-only": lambda: graph(until_refused=False),
        "workers": workers,
        "processes": processes,
    }
    print(json.dumps(parts[sys.argv[1]]()))
