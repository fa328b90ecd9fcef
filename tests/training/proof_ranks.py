"""Proofs on real ranks, many in one launch; in some of them something about DeepSpeed or the learner is broken."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rank_faults import Wrapped, replaced
from ranks import groups_ended
from torch import Tensor

from vitscale.data.shards.generated import write_generated_dataset
from vitscale.recipe import load_recipe

Fault = Callable[[Any], contextlib.AbstractContextManager[None]]
"""Breaks something while the prover that it is given takes its updates."""


def prove_all(world: Any, root: Path, cases: dict[str, Any]) -> None:
    """A case is (recipe, settings, updates, fault or None), and leaves `<case>-<world>.json`."""
    from vitscale.about.checks.proving import small_form
    from vitscale.about.checks.rank import Prover

    for case, (stem, settings, updates, fault) in cases.items():
        data = root / f"data-{case}-{world.size}"
        small = small_form(load_recipe(stem, settings), data, world.size)
        write_generated_dataset(data / small.data.train, [max(96, small.batch.global_size)])
        with groups_ended():
            prover = Prover(small, world, root)
            with contextlib.nullcontext() if fault is None else fault(prover):
                found = prover.run(updates)
            prover.learner.engine.deepspeed.destroy()
        assert (found is not None) == world.is_main, "an oracle on each rank costs memory, and says the same"
        if world.is_main:
            (root / f"{case}-{world.size}.json").write_text(json.dumps(found))


@contextlib.contextmanager
def bucket(prover: Any, how: str, divisor: float = 65_536.0) -> Iterator[None]:
    """Something is wrong with how DeepSpeed sums the first bucket of gradients of every update over the ranks."""
    import deepspeed.comm as comm

    calls, last = 0, []

    def begin() -> None:
        nonlocal calls
        calls = 0

    def wrong(real: Callable[..., Any]) -> Callable[..., Any]:
        def reduce(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += tensor.numel() > 1
            if calls != 1 or tensor.numel() == 1:  # a norm, or whether it is finite
                return real(tensor, *arguments, **named)
            if how == "skipped":
                return tensor.zero_() if real.__name__ == "reduce_scatter_fn" else None
            result = real(tensor, *arguments, **named)
            fresh = tensor.clone()
            match how:
                case "doubled":
                    tensor.mul_(2)
                case "divided":
                    tensor.div_(divisor)
                case "of another rank":
                    tensor.copy_(tensor.roll(tensor.numel() // 2))
                case "stale":
                    tensor.copy_(last[0] if last else torch.zeros_like(tensor))
            last[:] = [fresh]
            return result

        return reduce

    with contextlib.ExitStack() as stack:
        stack.enter_context(_around_updates(prover, begin, lambda: None))
        for name in ("all_reduce", "reduce_scatter_fn"):
            stack.enter_context(replaced(comm, name, wrong(getattr(comm, name))))
        yield


@contextlib.contextmanager
def overlapped_bucket(prover: Any, how: str) -> Iterator[None]:
    """Something is wrong with how the first bucket of gradients of every update is sent while others are computed."""
    calls, last = 0, []

    def begin() -> None:
        nonlocal calls
        calls = 0

    def wrong(received: Tensor, values: Tensor, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1 and how == "of the step before":
            fresh, values = values, (last[0] if last else torch.zeros_like(values))
            last[:] = [fresh.clone()]
        if calls == 1 and how == "read too early":
            received.zero_()
            landing = torch.empty_like(received)
            return real(landing, values, **named)
        if calls == 1 and how == "sent too early":
            values = values.clone()
            values[len(values) // 2 :] = 0
        return real(received, values, **named)

    real = torch.distributed.all_to_all_single
    with _around_updates(prover, begin, lambda: None), replaced(torch.distributed, "all_to_all_single", wrong):
        yield


@contextlib.contextmanager
def late_weights(prover: Any) -> Iterator[None]:
    """Rank 1 does not wait for the new weights of the first block, and computes with those before."""
    exchange = prover.learner.engine.exchange
    real, kept = exchange.settle, {}

    def restore() -> None:
        real()
        if torch.distributed.get_rank() == 1:
            for name, weight in prover.learner.engine.module.named_parameters():
                if "blocks.0." in name:
                    new = weight.detach().clone()
                    weight.data.copy_(kept.get(name, new))
                    kept[name] = new

    with _around_updates(prover, restore, lambda: None):
        yield


@contextlib.contextmanager
def dropped_micro_batch(prover: Any) -> Iterator[None]:
    """The third micro-batch of every update has no gradient."""
    engine, calls = prover.learner.engine.deepspeed, 0

    def backward(loss: Tensor) -> None:
        nonlocal calls
        calls += 1
        real(loss * (0.0 if calls % 4 == 3 else 1.0))

    real = engine.backward
    with replaced(engine, "backward", backward):
        yield


@contextlib.contextmanager
def wrong_norm(prover: Any) -> Iterator[None]:
    """ZeRO 1 and 2 clip by a norm that is too large."""
    optimizer = prover.learner.engine.deepspeed.optimizer
    real = optimizer.scaled_global_norm
    with replaced(optimizer, "scaled_global_norm", lambda *arguments, **named: 1.5 * real(*arguments, **named)):
        yield


@contextlib.contextmanager
def _around_updates(prover: Any, before: Callable[[], None], after: Callable[[], None]) -> Iterator[None]:
    learner = prover.learner

    def update(*arguments: Any) -> Any:
        before()
        done = learner.update(*arguments)
        after()
        return done

    with replaced(prover, "learner", Wrapped(learner, update=update)):
        yield


@contextlib.contextmanager
def stuck(prover: Any, kind: str, name: str) -> Iterator[None]:
    """What one rank holds of a parameter's master, moment or average is after each update what it was before."""
    kept: list[Tensor] = []

    def held() -> list[Tensor]:
        pieces = [each for each in prover.learner.fragments() if each.name == name and kind in each.tensors]
        return [each.tensors[kind] for each in pieces]

    def keep() -> None:
        kept[:] = [tensor.detach().clone() for tensor in held()]

    def put_back() -> None:
        for tensor, value in zip(held(), kept, strict=True):
            tensor.detach().copy_(value)

    with _around_updates(prover, keep, put_back):
        yield


@contextlib.contextmanager
def old_weights(prover: Any) -> Iterator[None]:
    """Rank 1 computes every update with the weights that the run began with."""
    weights = list(prover.learner.engine.module.parameters())
    first = [weight.detach().clone() for weight in weights]

    def restore() -> None:
        for weight, value in zip(weights, first, strict=True):
            if torch.distributed.get_rank() == 1:
                weight.data.copy_(value)

    with _around_updates(prover, restore, lambda: None):
        yield


@contextlib.contextmanager
def old_copies(prover: Any) -> Iterator[None]:
    """The copies that ranks of a node keep of the weights are not forgotten when weights change."""
    with replaced(prover.learner.engine.deepspeed.optimizer, "invalidate_secondary_tensor", lambda: None):
        yield


@contextlib.contextmanager
def decay_of_all(prover: Any) -> Iterator[None]:
    """Weight decay reaches what the recipe excludes from it."""
    groups = prover.learner.engine.deepspeed.optimizer.param_groups
    for group in groups:
        group["weight_decay"] = max(group["weight_decay"] for group in groups)
    yield
