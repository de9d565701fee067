"""Like a training job: memory for a model, then steps of back-to-back kernels, as fast as the card lets it."""

from __future__ import annotations

import argparse

import gpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory-mib", type=int, default=512, help="memory to hold on the card")
    parser.add_argument("--kernel-us", type=int, default=1000, help="time of one kernel")
    parser.add_argument("--kernels-per-step", type=int, default=8)
    arguments = parser.parse_args()
    card = gpu.Gpu(arguments.kernel_us)
    print(card.describe())
    card.allocate(arguments.memory_mib * gpu.MIB)
    pace, steps = gpu.Pace(), 0
    while True:
        for _ in range(arguments.kernels_per_step):
            card.launch(arguments.kernel_us)
        card.synchronize()
        steps += 1
        if pace.due():
            print(f"step {steps}")


if __name__ == "__main__":
    main()
