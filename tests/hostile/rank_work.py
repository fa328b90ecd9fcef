"""What two real ranks do in test_foreign_code.py."""

import contextlib
import json
import math
import os
import pickle
import random
import struct
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

OBJECT_COLLECTIVES = (
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)


def forbid_pickles() -> list[str]:
    """What is written down from now on: objects that torch.distributed sends, classes that it makes from bytes."""
    found: list[str] = []

    def hook(event: str, arguments: tuple) -> None:
        if event == "pickle.find_class" and any(
            "torch/distributed" in one.filename for one in traceback.extract_stack()
        ):
            found.append(str(arguments))

    def written_down(name: str, collective: Callable) -> Callable:
        def call(*given: Any, **named: Any) -> Any:
            found.append(name)
            return collective(*given, **named)

        return call

    sys.addaudithook(hook)
    for name in OBJECT_COLLECTIVES:
        setattr(dist, name, written_down(name, getattr(dist, name)))
    return found


def train_and_prove(rank: int, world_size: int, port: int, root: Path, work: Any) -> None:
    """Entry point of a rank: a run with evaluators and checkpoints that is continued, and a proof."""
    from training.ranks import join, make_recipe, train

    found = forbid_pickles()
    world = join(rank, world_size, port)

    from vitscale.about.checks.proving import small_form
    from vitscale.about.checks.rank import Prover
    from vitscale.data.shards.generated import write_generated_dataset
    from vitscale.recipe import load_recipe
    from vitscale.recipe.smoke import TRAIN

    fewshot = {"tasks": [{"name": "toy", "train": "train", "test": "test"}], "shots": [1], "seeds": 2}
    blocks = {
        "evaluation": {"validation": "test", "batch": 5, "every": {"steps": 3}, "fewshot": fewshot, "overlap": "allow"},
        "check": {"audit_every": 2, "replicas_every": 2},
        "parallelism": {"zero_stage": 2},
    }
    recipe = make_recipe(root, **blocks)
    train(recipe, root / "run", world, stop_at=3)
    train(recipe, root / "run", world)
    if rank == 0:
        write_generated_dataset(root / TRAIN, [96])
    dist.barrier()
    prover = Prover(small_form(load_recipe("b16_jft", ["precision=fp32"]), root, world_size), world, root)
    proof = prover.run(2)
    (root / f"found-{rank}.json").write_text(json.dumps([found, proof and proof["is_proven"]]))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def floats(count: int = 2000) -> list[float]:
    """Any bits: subnormal, infinite, negative zero, not a number."""
    drawn = random.Random(5)
    return [struct.unpack("d", drawn.randbytes(8))[0] for _ in range(count)] + [0.1, -0.0, 5e-324, math.inf, math.nan]


def bits(values: list[float]) -> list[bytes]:
    return [b"nan" if math.isnan(value) else struct.pack("d", value) for value in values]


def exchange(rank: int, world_size: int, port: int, root: Path, work: Any) -> None:
    """Entry point of a rank: values and errors, from each rank to the others."""
    from training.ranks import join

    join(rank, world_size, port)
    from vitscale.ground.errors import MachineError, VitscaleError
    from vitscale.ground.ranks import from_rank_zero, gather, on_rank_zero

    class OwnError(MachineError):
        """Of a class that other ranks need not have."""

    group = dist.new_group(backend="gloo")
    values = [rank, floats(), 2**64 + rank, "\udcff\u2028\0 é", None, True, {"a": [[], {}]}, "x" * (1 << 20) * rank]
    for where in (None, group):
        for other, found in enumerate(gather(values, where)):
            assert found[0] == other and found[2] == 2**64 + other and found[3:7] == values[3:7]
            assert bits(found[1]) == bits(floats()) and len(found[7]) == other << 20
        assert from_rank_zero(values, where)[0] == 0
        assert on_rank_zero(lambda: values)[0] == 0

    def fails(error: Exception | None) -> set:
        """By the error, or else because no JSON holds a set."""
        if error is not None:
            raise error
        return {1, 2}

    told = []
    errors = (
        MachineError("no device"),
        OwnError("two\nlines \udcff"),
        ZeroDivisionError("a bug"),
        None,
        VitscaleError(),
    )
    for each in errors:
        try:
            on_rank_zero(partial(fails, each))
        except Exception as error:
            told.append([type(error).__name__, str(error), getattr(error, "is_on_all_ranks", None)])
    (root / f"told-{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    os._exit(0)


class Code:
    """A pickle that leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self._path}",)


def be_attacked(rank: int, world_size: int, port: int, root: Path, work: str) -> None:
    """Entry point of a rank: rank 1 has been taken over, and sends what torch's own collectives would send."""
    from training.ranks import join

    join(rank, world_size, port)
    from vitscale.ground.errors import PeerLostError
    from vitscale.ground.ranks import from_rank_zero, gather

    attacker = 0 if work == "broadcast" else 1
    store = dist.distributed_c10d._get_default_store()
    if rank == attacker:
        code = Code(root / "ran")
        store.set("of a stranger", pickle.dumps(code))
        with contextlib.suppress(Exception):  # what comes back is no pickle
            if work == "broadcast":
                dist.broadcast_object_list([code], src=0)
            elif work == "gather":
                dist.all_gather_object([None, None], code)
            else:
                sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
                dist.all_gather(sizes, torch.tensor([int(work)]))
        with contextlib.suppress(dist.DistError):  # it has gone
            store.wait(["told"])
    else:
        try:
            from_rank_zero(None) if work == "broadcast" else gather("mine")
        except PeerLostError:
            (root / "outcome").write_text("PeerLostError")
        store.set("told", "x")
    os._exit(0)
