"""Like an inference server: a short request every so often, with its latency measured."""

from __future__ import annotations

import argparse
import statistics
import time

import gpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory-mib", type=int, default=512, help="memory to hold on the card")
    parser.add_argument("--period-ms", type=float, default=50.0, help="time between two requests")
    parser.add_argument("--kernels", type=int, default=5, help="kernels of 1 ms per request")
    arguments = parser.parse_args()
    card = gpu.Gpu(1000)
    print(card.describe())
    card.allocate(arguments.memory_mib * gpu.MIB)
    pace, latencies = gpu.Pace(), []
    due = time.monotonic()
    while True:
        due = max(due + arguments.period_ms / 1000, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
        start = time.monotonic()
        for _ in range(arguments.kernels):
            card.launch(1000)
        card.synchronize()
        latencies.append(1000 * (time.monotonic() - start))
        if pace.due():
            median = statistics.median(latencies)
            print(f"{len(latencies)} requests, median {median:.1f} ms, worst {max(latencies):.1f} ms")
            latencies.clear()


if __name__ == "__main__":
    main()
