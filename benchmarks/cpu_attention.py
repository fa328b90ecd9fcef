"""Attention of a training step in bf16 on one core: torch's kernel by the products of matrices that we use.

    $ python benchmarks/cpu_attention.py

Both take turns, forward and backward, and each round is a ratio of their CPU times. Goal: more than 1 at every length
for which `vitscale.models.layers.attention` leaves torch's kernel.
"""

import argparse
import time

import torch
from paired import median_ratio
from torch.nn import functional as F

from vitscale.models.layers import attention

SHAPES = ((64, 3, 17, 64), (64, 3, 33, 64), (64, 3, 65, 64), (64, 2, 65, 32), (16, 12, 197, 64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for shape in SHAPES:
        torches, ours = [], []
        for _ in range(rounds + 1):
            torches.append(seconds(F.scaled_dot_product_attention, shape))
            ours.append(seconds(attention, shape))
        ratio = median_ratio(torches[1:], ours[1:])
        missed = "" if ratio.is_above(1) else "  missed: more than 1"
        print(f"(B, A, T, d) {shape!s:20} torch's takes {ratio:.2f} times as long{missed}")


def seconds(function, shape) -> float:
    B, A, T, d = shape
    parts = torch.randn(B, T, 3, A, d, dtype=torch.bfloat16).unbind(2)
    query, key, value = (part.transpose(1, 2).detach().requires_grad_() for part in parts)
    slope = torch.randn_like(query)
    begin = time.process_time()
    torch.autograd.grad(function(query, key, value), (query, key, value), slope)
    return time.process_time() - begin


if __name__ == "__main__":
    main()
