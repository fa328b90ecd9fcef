"""Gives DeepSpeed's optimizer of ZeRO 1 and 2 its gradients, their norm and their clipping, in few kernels.

What remains DeepSpeed's (0.19.8): the flat weights and masters, and `step`, which asks for the norm, drops an update
whose norm is not finite, calls torch's optimizer once for each group, rounds the masters and has the weights gathered;
on several ranks without `parallelism.overlap` the sums over micro-batches and ranks, too, and its BF16_Optimizer whole.
Not used any more: its search of every gradient for infinities, which the norm shows; its norm and its clipping, a few
kernels for each parameter; and on one rank its hooks and buckets, which copy every gradient three times.

The host waits for the norm and for nothing else, and before the update is queued: it prepares the next step while the
device still updates.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitscale.training.deepspeed.lean_deepspeed import deepspeed

# (gradients, flat): what DeepSpeed takes for this rank's part of a group's gradient, the second is what it applies.
Partition = deepspeed.runtime.zero.stage_1_and_2.GradPartitionBufferGroup


class RankGradients:
    """The gradients of a single rank, summed over micro-batches in fp32; a step's sum is `rounded_to` a number format.

    A gradient of several micro-batches is added by one kernel as soon as it is whole, and dropped. Without accumulation
    all are taken at once, when the backward pass is done. A sum is rounded as if it were sent.
    """

    def __init__(self, engine: Any, rounded_to: torch.dtype = torch.float32) -> None:
        self._engine, self._optimizer, self._rounded_to = engine, engine.optimizer, rounded_to
        self._flats: list[Tensor] = []  # (elements of a group,), fp32, from a step's first gradient to its update
        self._views: dict[nn.Parameter, Tensor] = {}  # where each parameter's gradient lies in them
        self._missing: set[nn.Parameter] = set()  # without a gradient in this step
        stop_reducing(engine)
        self._optimizer.backward_epilogue = self._end_backward
        if engine.gradient_accumulation_steps() > 1:
            for parameter in chain(*self._optimizer.round_robin_bit16_groups):
                parameter.register_post_accumulate_grad_hook(self._add)

    def _lay_out(self) -> None:
        optimizer = self._optimizer
        for index, parameters in enumerate(optimizer.round_robin_bit16_groups):
            places = dict(zip(parameters, optimizer.round_robin_bit16_offsets[index], strict=True))
            flat = unfilled(optimizer.bit16_groups_flat[index], places, torch.float32)
            self._flats.append(flat)
            for parameter, place in places.items():
                self._views[parameter] = flat.narrow(0, place, parameter.numel()).view(parameter.shape)
        self._missing = set(self._views)

    @torch.no_grad()
    def _add(self, parameter: Tensor) -> None:
        """Called by autograd when a micro-batch's gradient of a parameter is whole."""
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        if not self._flats:
            self._lay_out()
        if parameter in self._missing:
            self._views[parameter].copy_(parameter.grad)
            self._missing.remove(parameter)
        else:
            self._views[parameter].add_(parameter.grad)
        parameter.grad = None

    @torch.no_grad()
    def _end_backward(self, *_: Any) -> None:
        """Called by the engine after every backward pass; after a step's last one, DeepSpeed is given the gradients."""
        if not self._engine.is_gradient_accumulation_boundary():
            return
        if not self._flats:
            self._lay_out()
        at_once = {each: each.grad for each in self._views if each.grad is not None}
        if at_once:
            torch._foreach_copy_([self._views[parameter] for parameter in at_once], list(at_once.values()))
        for parameter in self._missing.difference(at_once):
            self._views[parameter].zero_()
        for flat in self._flats if self._rounded_to != torch.float32 else ():
            flat.copy_(flat.to(self._rounded_to))
        for index, parameters in enumerate(self._optimizer.round_robin_bit16_groups):
            # The norm is taken of these: of the gradients themselves where they have been taken just now.
            gradients = [at_once.get(parameter, self._views[parameter]) for parameter in parameters]
            self._optimizer.averaged_gradients[index] = Partition(gradients, self._flats[index])
        self._flats, self._views = [], {}


def stop_reducing(engine: Any) -> None:
    """Have DeepSpeed neither take gradients from parameters nor sum them."""
    for hook in engine.optimizer._grad_acc_hooks:
        hook.remove()
    engine.optimizer._grad_acc_hooks.clear()
    engine.enable_backward_allreduce = False


def unfilled(weights: Tensor, places: dict[nn.Parameter, int], dtype: torch.dtype) -> Tensor:
    """A vector for the gradients of flat `weights`, in which only padding is set, to zero; `places` ascend."""
    values = torch.empty_like(weights, dtype=dtype)
    ends = [0, *(place + parameter.numel() for parameter, place in places.items())]
    for end, begin in zip(ends, [*places.values(), len(values)], strict=True):
        if end < begin:
            values[end:begin].zero_()
    return values


class ZeroUpdate:
    """Measures and clips an engine's gradients once they are averaged; its optimizer is a DeepSpeedZeroOptimizer.

    On CUDA all norms are taken in fp32 and together. On CPUs every bit is DeepSpeed's own: norms in fp64 and by group,
    but together in fp32 where its BF16_Optimizer would accumulate.

    Args:
        is_pooled: whether DeepSpeed's groups are mere buckets, whose norms are never taken apart.
        like_bf16: whether one rank accumulates in fp32, in ZeRO 1, what is computed in bf16.
    """

    def __init__(self, engine: Any, *, is_pooled: bool, like_bf16: bool) -> None:
        self._optimizer, self._like_bf16 = engine.optimizer, like_bf16
        is_on_cuda = self._optimizer.bit16_groups_flat[0].is_cuda
        self._is_pooled = is_pooled or like_bf16 or is_on_cuda
        self._dtype = torch.float32 if like_bf16 or is_on_cuda else torch.float64
        # Torch's fused kernels can clip as they read the gradients; on CPUs that would round otherwise.
        self.clips_inside = is_on_cuda and getattr(self._optimizer.optimizer, "_step_supports_amp_scaling", False)
        self._optimizer.check_overflow = lambda **_: None
        self._optimizer.scaled_global_norm = self._norm
        self._optimizer.unscale_and_clip_grads = self._clip

    @torch.no_grad()
    def _norm(self, norm_type: float = 2) -> Tensor:
        """The norm of all ranks' gradients, () on the host, which waits for it; not finite if a gradient is not."""
        optimizer = self._optimizer
        groups = [
            [each for each in optimizer.averaged_gradients[index] if not hasattr(each, "_zero_padding")][: len(here)]
            for index, here in enumerate(optimizer.params_in_partition)  # a rank's end may hold padding only
        ]
        if self._is_pooled:
            groups = [list(chain(*groups))]
        gradients = list(chain(*groups))
        norms = iter(torch._foreach_norm(gradients, norm_type, dtype=self._dtype) if gradients else ())
        totals = []
        for group in groups:
            of_group = [next(norms) for _ in group] or [optimizer.bit16_groups_flat[0].new_zeros((), dtype=self._dtype)]
            square = torch.stack(of_group).square().sum().float()
            if dist.get_world_size(optimizer.dp_process_group) > 1:
                dist.all_reduce(square, group=optimizer.dp_process_group)
            totals.append(square.sqrt())
        return torch.linalg.vector_norm(torch.stack(totals)).cpu()

    @torch.no_grad()
    def _clip(self, flats: Sequence[Tensor], norm: Tensor) -> None:
        """Clip this rank's part of the gradients of a group, or have the optimizer do it in its step, next."""
        limit, optimizer = self._optimizer.clip_grad, self._optimizer.optimizer
        optimizer.grad_scale = None
        if not limit:
            return
        factor = limit / (norm + 1e-6) if self._like_bf16 else 1.0 / ((norm + 1e-6) / limit)
        if factor < 1 and self.clips_inside:
            optimizer.grad_scale = flats[0].new_full((), 1.0 / float(factor))
        for flat in flats if factor < 1 and not self.clips_inside else ():
            flat.mul_(factor)
