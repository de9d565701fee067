"""A PyTorch program for benchmarks/models.py: trains or serves a decoder-only transformer. Needs nothing of this project.

`_model_client.py WORK SECONDS [--device cpu] [--tiny]`: prints `ready` when it is warm, waits for a line on stdin, works for SECONDS, and prints
one line of JSON: steps, seconds, and for `serve` the p50 and p99 of one request in ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Shape:
    """A decoder's size, and the batch of one step."""

    width: int
    heads: int
    layers: int
    words: int
    tokens: int
    batch: int


SHAPES = {
    # GPT-2's size: on a fast card bound by the host, which launches its kernels.
    "train": Shape(768, 12, 12, 50257, 128, 16),
    # Trained too, with more parameters in a third of the kernels: bound by the card.
    "wide": Shape(2048, 16, 4, 8192, 512, 16),
    "serve": Shape(768, 12, 12, 50257, 128, 1),
}
TINY = Shape(64, 2, 2, 512, 16, 2)  # what a processor trains in a blink


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, heads, layers = shape.width, shape.heads, shape.layers
        self.words, self.tokens = shape.words, shape.tokens
        self.embedding = nn.Embedding(self.words, width)
        self.position = nn.Parameter(torch.zeros(self.tokens, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(self.tokens))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.embedding(tokens) + self.position, mask=self.mask, is_causal=True)
        return hidden @ self.embedding.weight.T


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=tuple(SHAPES))
    parser.add_argument("seconds", type=float)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(1)
    shape = TINY if options.tiny else SHAPES[options.work]
    net = Decoder(shape).to(options.device)
    tokens = torch.randint(0, net.words, (shape.batch, net.tokens), device=options.device)
    precision = torch.bfloat16

    def wait() -> None:
        if options.device == "cuda":
            torch.cuda.synchronize()

    if options.work != "serve":
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(options.device, precision):
                logits = net(tokens)
            nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
    else:
        net.eval()

        def step() -> None:
            with torch.inference_mode(), torch.autocast(options.device, precision):
                net(tokens).argmax(-1).cpu()

    for _ in range(10):
        step()
    wait()
    print("ready", flush=True)
    sys.stdin.readline()
    begun, times = time.monotonic(), []
    while time.monotonic() - begun < options.seconds:
        before = time.monotonic()
        step()
        if options.work == "serve":
            times.append(1e3 * (time.monotonic() - before))
        elif len(times) % 8 == 7:  # a training loop looks at its loss now and then
            wait()
            times.append(0)
        else:
            times.append(0)
    wait()
    answer = {"steps": len(times), "seconds": time.monotonic() - begun}
    if options.work == "serve" and len(times) > 1:
        answer |= {"p50_ms": statistics.median(times), "p99_ms": statistics.quantiles(times, n=100)[98]}
    print(json.dumps(answer), flush=True)


main()
