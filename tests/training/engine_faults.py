"""Ways in which DeepSpeed, or a rank, computes an update that is not the batch's: each put into the real engine.

Each is a context manager around a trainer that then runs, as those of rank_faults.py, and begins with the update
`FROM`. Most of them are of the kind that DeepSpeed's issue tracker tells of, by the number named. Others of the same
kind are in proof_ranks.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed.runtime.engine
import torch
from rank_faults import replaced
from torch import Tensor

FROM = 4  # the update that is the first to be wrong; those before are right
REDUCE_AND_SCATTER = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"


def is_on(trainer: Any) -> bool:
    return trainer.state.step + 1 >= FROM


def _stage(trainer: Any) -> int:
    return trainer.recipe.parallelism.zero_stage


@contextmanager
def _buckets(trainer: Any, change: Callable[[int, list[Tensor]], None]) -> Iterator[None]:
    """Each bucket of gradients, numbered within a micro-batch, is changed before it is summed over the ranks."""
    engine = trainer.learner.engine.deepspeed
    optimizer, seen = engine.optimizer, {"micro": -1, "buckets": 0}
    name = REDUCE_AND_SCATTER if _stage(trainer) == 3 else "average_tensor"
    real = getattr(optimizer, name)

    def reduce(given: Any, *arguments: Any) -> Any:
        if seen["micro"] != engine.micro_steps:
            seen.update(micro=engine.micro_steps, buckets=0)
        change(seen["buckets"], [parameter.grad for parameter in given] if isinstance(given, list) else [given])
        seen["buckets"] += 1
        return real(given, *arguments)

    with replaced(optimizer, name, reduce):
        yield


@contextmanager
def skipped_bucket(trainer: Any) -> Iterator[None]:
    """One bucket of gradients never arrives (#7371)."""

    def drop(bucket: int, tensors: list[Tensor]) -> None:
        for tensor in tensors if is_on(trainer) and bucket == 1 else []:
            tensor.zero_()

    with _buckets(trainer, drop):
        yield


@contextmanager
def doubled_bucket(trainer: Any) -> Iterator[None]:
    """One bucket of gradients of one rank is added twice."""

    def double(bucket: int, tensors: list[Tensor]) -> None:
        for tensor in tensors if is_on(trainer) and bucket == 1 and trainer.world.rank == 1 else []:
            tensor.mul_(2)

    with _buckets(trainer, double):
        yield


@contextmanager
def master_not_updated(trainer: Any) -> Iterator[None]:
    """One rank's optimizer leaves out one tensor of masters."""
    optimizer = trainer.learner.engine.deepspeed.optimizer
    step = optimizer._optimizer_step

    def skip(number: int) -> None:
        if not (is_on(trainer) and number == 0 and trainer.world.rank == 1):
            step(number)

    with replaced(optimizer, "_optimizer_step", skip):
        yield


@contextmanager
def moment_left_out(trainer: Any) -> Iterator[None]:
    """What a rank hands over to be saved lacks a moment of one parameter."""
    from vitscale.training.deepspeed.engine import Engine

    owned = Engine.owned

    def without(*arguments: Any) -> list:
        found = owned(*arguments)
        if is_on(trainer) and trainer.world.rank == 1:
            del found[0].tensors["exp_avg"]
        return found

    with replaced(Engine, "owned", without):
        yield


@contextmanager
def dtype_bug(trainer: Any) -> Iterator[None]:
    """No name of a dtype matches: all buckets are dropped, and each rank applies its own gradient (CPUs, < 0.19.8)."""
    split = deepspeed.runtime.engine.split_half_float_double_sparse

    def none(tensors: list[Tensor]) -> Any:
        return ([], []) if is_on(trainer) else split(tensors)

    with replaced(deepspeed.runtime.engine, "split_half_float_double_sparse", none):
        yield


@contextmanager
def used_twice(trainer: Any) -> Iterator[None]:
    """A block that the model calls twice; nothing is wrong with that."""
    with _block_used_twice(trainer, lambda name, gradient: None):
        yield


@contextmanager
def unused(trainer: Any) -> Iterator[None]:
    """A parameter that the model does not use, and has no gradient; nothing is wrong with that."""
    head = trainer.learner.objective.backbone.head
    with replaced(head, "forward", lambda features: torch.nn.functional.linear(features, head.weight)):
        yield


@contextmanager
def use_lost(trainer: Any) -> Iterator[None]:
    """Of a block that is called twice, the gradient of its second use is lost (#8224)."""
    optimizer = trainer.learner.engine.deepspeed.optimizer
    process, lost = optimizer.process_gradients, {}
    block = trainer.learner.objective.backbone.blocks[1]
    names = {parameter: name for name, parameter in block.named_parameters()}

    def lose(parameter: Any, group: int) -> None:
        if is_on(trainer) and parameter in names:
            parameter.grad.sub_(lost[names[parameter]])
        process(parameter, group)

    with _block_used_twice(trainer, lost.__setitem__), replaced(optimizer, "process_gradients", lose):
        yield


@contextmanager
def _block_used_twice(trainer: Any, of_second_use: Callable[[str, Tensor], None]) -> Iterator[None]:
    block = trainer.learner.objective.backbone.blocks[1]
    forward = block.forward

    def twice(tokens: Tensor, *arguments: Any) -> Tensor:
        tokens = forward(tokens, *arguments)
        own = {name: parameter.view_as(parameter) for name, parameter in block.named_parameters()}
        for name, parameter in own.items() if torch.is_grad_enabled() else ():
            parameter.register_hook(lambda gradient, name=name: of_second_use(name, gradient.clone()))
        block.forward = forward
        try:
            return torch.func.functional_call(block, own, (tokens, *arguments))
        finally:
            block.forward = twice

    with replaced(block, "forward", twice):
        yield


@contextmanager
def wrong_norm(trainer: Any) -> Iterator[None]:
    """The norm is that of a rank's own part of the gradient (#7718), and clipping goes by it."""
    optimizer = trainer.learner.engine.deepspeed.optimizer
    name = "_get_norm_groups" if _stage(trainer) == 3 else "scaled_global_norm"
    whole = getattr(optimizer, name)

    def half(*arguments: Any) -> Any:
        norm = whole(*arguments)
        if not is_on(trainer):
            return norm
        return [each / 3 for each in norm] if isinstance(norm, list) else norm / 3

    with replaced(optimizer, name, half):
        yield


@contextmanager
def old_weights(trainer: Any) -> Iterator[None]:
    """One rank does not get the weights that the update has made, and computes with those of before."""
    engine = trainer.learner.engine.deepspeed
    optimizer = engine.optimizer
    step = optimizer.step

    def keep(*arguments: Any, **options: Any) -> Any:
        weights = [p for p in engine.module.parameters() if p.numel() == getattr(p, "ds_numel", p.numel())]
        before = [weight.detach().clone() for weight in weights]
        result = step(*arguments, **options)
        if is_on(trainer) and trainer.world.rank == 1:
            for weight, old in zip(weights, before, strict=True):
                weight.data.copy_(old)
        return result

    with replaced(optimizer, "step", keep):
        yield
