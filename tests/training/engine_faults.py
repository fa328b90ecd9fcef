"""Twelve ways in which DeepSpeed, or a rank, computes an update that is not the batch's: each put into the real engine.

Each is a context manager around a trainer that then runs, as those of rank_faults.py, and begins with the update
`FROM`. Most of them are of the kind that DeepSpeed's issue tracker tells of, by the number named.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed.runtime.engine
import torch
import torch.distributed as dist
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
def stale_buffer(trainer: Any) -> Iterator[None]:
    """One rank sends what was in a bucket the time before (#7188, #8061)."""
    sent: list[Tensor] = []

    def repeat(bucket: int, tensors: list[Tensor]) -> None:
        if bucket == 0 and trainer.world.rank == 0:
            now = [tensor.clone() for tensor in tensors]
            for tensor, before in zip(tensors, sent, strict=True) if is_on(trainer) else ():
                tensor.copy_(before)
            sent[:] = now

    with _buckets(trainer, repeat):
        yield


@contextmanager
def divided_by_65536(trainer: Any) -> Iterator[None]:
    """The loss scale of fp16 is taken off gradients that it was never put on (#7839)."""
    optimizer = trainer.learner.engine.deepspeed.optimizer
    if _stage(trainer) == 0:
        scale = optimizer.unscale_and_clip_grads

        def unscale(*arguments: Any, **options: Any) -> Any:
            if is_on(trainer):
                for group in optimizer.fp32_groups:
                    for parameter in group:
                        parameter.grad.div_(65536)
            return scale(*arguments, **options)

        with replaced(optimizer, "unscale_and_clip_grads", unscale):
            yield
        return

    def divide(_bucket: int, tensors: list[Tensor]) -> None:
        for tensor in tensors if is_on(trainer) else []:
            tensor.div_(65536)

    with _buckets(trainer, divide):
        yield


@contextmanager
def wrong_partition(trainer: Any) -> Iterator[None]:
    """Each rank applies the part of the gradient that is another's."""
    optimizer = trainer.learner.engine.deepspeed.optimizer
    clip = optimizer.unscale_and_clip_grads

    def exchange(first: Any, norm: Any) -> None:
        if is_on(trainer):
            own = optimizer.fp32_partitioned_groups_flat[first].grad if _stage(trainer) == 3 else first[0]
            parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, own)
            own.copy_(parts[trainer.world.rank - 1])
        clip(first, norm)

    with replaced(optimizer, "unscale_and_clip_grads", exchange):
        yield


@contextmanager
def dropped_micro_batch(trainer: Any) -> Iterator[None]:
    """The first micro-batch of one rank is not accumulated."""
    engine = trainer.learner.engine.deepspeed

    def is_dropped() -> bool:
        return is_on(trainer) and trainer.world.rank == 1 and not engine.is_gradient_accumulation_boundary()

    if _stage(trainer) == 3:

        def forget(_bucket: int, tensors: list[Tensor]) -> None:
            for tensor in tensors if is_dropped() else []:
                tensor.zero_()

        with _buckets(trainer, forget):
            yield
        return
    optimizer = engine.optimizer
    process = optimizer.process_gradients

    def drop(parameter: Any, group: int) -> None:
        if is_dropped():
            parameter.grad.zero_()
        process(parameter, group)

    with replaced(optimizer, "process_gradients", drop):
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
def moment_not_saved(trainer: Any) -> Iterator[None]:
    """The moments that a checkpoint would hold are not those that were updated: a copy that is never written back."""
    optimizer = trainer.learner.engine.deepspeed.optimizer
    step = optimizer._optimizer_step
    masters = optimizer.fp32_partitioned_groups_flat if _stage(trainer) == 3 else None
    masters = masters if masters is not None else optimizer.single_partition_of_fp32_groups

    def keep(number: int) -> None:
        state = optimizer.optimizer.state[masters[number]]
        before = state["exp_avg_sq"].clone()
        step(number)
        if is_on(trainer) and trainer.world.rank == 0:
            state["exp_avg_sq"] = before

    with replaced(optimizer, "_optimizer_step", keep):
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


@contextmanager
def old_parts_gathered(trainer: Any) -> Iterator[None]:
    """What one rank gathers on the way forward is not what the others have: one block's weights of ZeRO 3."""
    block = trainer.learner.objective.backbone.blocks[1].mlp.fc1

    def age(module: Any, _inputs: Any) -> None:
        if is_on(trainer) and trainer.world.rank == 1:
            module.weight.data.mul_(0.99)

    hook = block.register_forward_pre_hook(age)
    try:
        yield
    finally:
        hook.remove()
