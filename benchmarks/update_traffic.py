"""Kernels and bytes of memory traffic that a step takes beside the model's own, under plain DeepSpeed and under ours.

    python benchmarks/update_traffic.py [--depth 32] [--json]

ZeRO 1 on one rank, bf16, AdamW, with clipping that takes effect, a ViT with the depth, and so the number of tensors, of
ViT-H but a width of 80. Every operator that PyTorch is asked for is counted as one kernel, and as the bytes of what it
reads and writes; those of the same model's forward and backward passes alone are subtracted. Runs on CPUs: what a GPU
launches for an operator may be more (a foreach operator in several parts), and what it takes from its cache less.
`clipped inside` is the update where torch's fused kernel clips as it reads the gradients, as on CUDA.

Fails where a step of ours takes more than 50 kernels or 52 bytes a parameter without accumulation, or more than 10
bytes a parameter and micro-batch with it.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from rank_engines import build, join
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CLASSES, SIDE, ACCUMULATION = 10, 32, 4
_NOTHING_MOVES = ("empty", "empty_like", "new_empty", "new_empty_strided", "detach", "_unsafe_view", "alias", "set_")
_MAKES_NEW = ("new_full", "new_zeros", "zeros_like", "ones_like", "full_like")
_ONLY_WRITES = ("copy_", "_foreach_copy_", "zero_", "fill_", "_foreach_zero_")


class Traffic(TorchDispatchMode):
    """Counts operators as kernels, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.bytes = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if func.is_view or name in _NOTHING_MOVES:
            return result
        given = list(zip(func._schema.arguments, args, strict=False))
        given += [(one, kwargs[one.name]) for one in func._schema.arguments if one.name in kwargs]
        moved, is_in_place = 0, False
        for argument, value in given:
            size = sum(one.numel() * one.element_size() for one in tree_leaves(value) if torch.is_tensor(one))
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if argument.name == "grads":  # a fused kernel writes gradients only if it changes them
                is_written = kwargs.get("grad_scale") is not None
            is_in_place |= is_written
            moved += size * (is_written + (name not in _MAKES_NEW and not (is_written and name in _ONLY_WRITES)))
        if not is_in_place:
            moved += sum(one.numel() * one.element_size() for one in tree_leaves(result) if torch.is_tensor(one))
        self.kernels, self.bytes = self.kernels + 1, self.bytes + moved
        return result


def recipe_of(depth: int, accumulation: int) -> Any:
    from vitscale.recipe import validate_recipe

    content = {
        "precision": "bf16",
        "model": {"patch_size": 16, "width": 80, "depth": depth, "mlp_dim": 320, "num_heads": 4},
        "data": {"train": "train", "image_size": SIDE},
        "batch": {"global": accumulation, "micro_max": 1},
        "optimizer": {"name": "adamw", "lr": 1e-3, "clip_norm": 1e-3},
        "schedule": {"duration": {"steps": 100}},
        "parallelism": {"zero_stage": 1},
    }
    return validate_recipe(content, "benchmark")


@contextmanager
def by_deepspeed() -> Iterator[None]:
    """Engines that are built inside take, measure and clip their gradients as DeepSpeed does by itself."""
    from vitscale.training.deepspeed import config, engine

    as_on_several: dict[str, Any] = {"is_single": lambda *_: False}
    with (
        mock.patch.multiple(config, **as_on_several),
        mock.patch.multiple(engine, **as_on_several, ZeroUpdate=lambda *_, **__: None),
    ):
        yield


def measure(depth: int, accumulation: int, *, clips_inside: bool = False) -> dict[str, float]:
    """What one step of an engine takes beside its model."""
    ours = build(recipe_of(depth, accumulation), CLASSES, 1)
    engine = ours.deepspeed
    if clips_inside:
        ours.zero_update.clips_inside = True
    for group in engine.optimizer.param_groups:
        group["lr"] = 1e-3
    images, labels = torch.randn(1, SIDE, SIDE, 3).bfloat16(), torch.zeros(1, dtype=torch.int64)

    def model() -> None:
        loss = engine.module(images, labels).per_sample.sum()
        torch.autograd.grad(loss, list(engine.module.parameters()))

    def step() -> None:
        for _ in range(accumulation):
            engine.backward(engine(images, labels).per_sample.sum())
            engine.step()

    def counted(work: Callable[[], None]) -> Traffic:
        with Traffic() as traffic:
            work()
        return traffic

    step()
    whole, own = counted(step), counted(model)
    parameters = sum(one.numel() for one in engine.module.parameters())
    engine.destroy()
    return {
        "kernels": whole.kernels - accumulation * own.kernels,
        "bytes": (whole.bytes - accumulation * own.bytes) / parameters,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from vitscale.ground.machine import free_port

    join(0, 1, int(free_port()))
    rows = {}
    for who in ("DeepSpeed", "ours"):
        with by_deepspeed() if who == "DeepSpeed" else nullcontext():
            steps = {count: measure(options.depth, count) for count in (1, ACCUMULATION, 2 * ACCUMULATION)}
        rows[f"{who}, accumulation 1"] = steps[1]
        rows[f"{who}, accumulation {ACCUMULATION}"] = steps[ACCUMULATION]
        more, fewer = steps[2 * ACCUMULATION], steps[ACCUMULATION]
        rows[f"{who}, one micro-batch more"] = {key: (more[key] - fewer[key]) / ACCUMULATION for key in more}
    rows["ours, accumulation 1, clipped inside"] = measure(options.depth, 1, clips_inside=True)
    if options.json:
        print(json.dumps(rows))
    else:
        print(f"{'':<38}{'kernels':>9}{'of DeepSpeed':>14}{'bytes a parameter':>19}{'of DeepSpeed':>14}")
        for name, row in rows.items():
            base = rows[name.replace("ours", "DeepSpeed").removesuffix(", clipped inside")]
            shares = {key: f"{row[key] / base[key]:.1%}" for key in row}
            kernels = f"{row['kernels']:>9,.0f}{shares['kernels']:>14}"
            print(f"{name:<38}{kernels}{row['bytes']:>19.1f}{shares['bytes']:>14}")
    once, more = rows["ours, accumulation 1"], rows["ours, one micro-batch more"]
    if once["kernels"] > 50 or once["bytes"] > 52 or more["bytes"] > 10.1:
        raise SystemExit("missed: an update takes more kernels or bytes than it may")


if __name__ == "__main__":
    main()
    os._exit(0)
