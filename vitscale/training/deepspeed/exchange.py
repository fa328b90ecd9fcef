"""Sends gradients and weights between ranks while something is computed (`parallelism.overlap`).

In ZeRO 1 and 2, DeepSpeed's optimizer keeps the state and makes the update; what is summed, and when, is decided here,
because its own way (0.19.8) all-reduces, and on CPUs never sends while it computes. Its groups of parameters are the
buckets: each is one flat tensor of which every rank owns an equal part, so that a bucket's gradients are summed by one
reduce-scatter as soon as the backward pass has made them, and its new weights come by one all-gather, for which only
the module that needs them in the next forward pass waits.

Collectives are asynchronous and wait for what is on their device's stream; nothing here has a stream of its own.
Buckets are sent in one fixed order, whatever the order in which gradients come.

Stage 1 sums micro-batches in fp32 and sends once a step. Stage 2 holds only its own part, so it must send what each
micro-batch adds.

In ZeRO 3, DeepSpeed does all of this itself on CUDA, on streams. Without streams it gathers ahead, but waits for every
sum: `ScatteredSums` sends those instead.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitscale.models import is_compiled
from vitscale.training.deepspeed.config import MOST_UNDER_WAY
from vitscale.training.deepspeed.lean_deepspeed import deepspeed
from vitscale.training.deepspeed.zero_update import Partition, stop_reducing, unfilled


def in_buckets(groups: Iterable[dict[str, Any]], elements: int) -> list[dict[str, Any]]:
    """An optimizer's groups, each cut into groups of at most `elements` elements, or of a single parameter.

    They are filled from the model's end: the rest is small, and comes last, when no computation can hide it.
    """
    cut = []
    for group in groups:
        chunks: list[list[nn.Parameter]] = [[]]
        size = 0
        for parameter in reversed(group["params"]):
            if chunks[-1] and size + parameter.numel() > elements:
                chunks.append([])
                size = 0
            chunks[-1].append(parameter)
            size += parameter.numel()
        cut += [{**group, "params": chunk[::-1]} for chunk in reversed(chunks)]
    return cut


@dataclass(eq=False)
class _Bucket:
    index: int  # in DeepSpeed's lists
    weights: Tensor  # that the model computes with, flat and padded
    part: Tensor  # this rank's, of `weights`
    places: dict[nn.Parameter, int]  # where each begins in `weights`
    awaited: set[nn.Parameter] = field(default_factory=set)  # whose gradients this backward pass has not made yet
    sums: Tensor | None = None  # gradients (elements of `weights`,), until they are sent
    missing: set[nn.Parameter] = field(default_factory=set)  # whose gradients are not in `sums` yet
    streams: set[torch.cuda.Stream] = field(default_factory=set)  # on which gradients were added, on CUDA
    share: Tensor | None = None  # this rank's part of the mean over ranks, in fp32, summed over micro-batches
    gathering: dist.Work | None = None  # the all-gather of the weights, while it is under way


class _ReduceScatter:
    """The sum over ranks of a bucket's gradients (ranks * n,), under way."""

    def __init__(self, values: Tensor, group: dist.ProcessGroup) -> None:
        self._ranks = dist.get_world_size(group)
        self._is_by_parts = dist.get_backend(group) == "gloo"
        self._sent = values  # kept as long as it is read
        if self._is_by_parts:
            # gloo's reduce-scatter is an all-reduce, which sends twice as much.
            self._received = torch.empty_like(values)
            received, sent = self._received.view(torch.uint8), values.view(torch.uint8)  # gloo has not every dtype
            self._work = dist.all_to_all_single(received, sent, group=group, async_op=True)
        else:
            self._received = values.new_empty(len(values) // self._ranks)
            self._work = dist.reduce_scatter_tensor(self._received, values, group=group, async_op=True)

    def mean(self) -> Tensor:
        """Wait for the sum. Returns this rank's part of the mean over ranks, fp32 (n,)."""
        self._work.wait()
        total = self._received
        if self._is_by_parts:
            total = torch.zeros(len(total) // self._ranks, device=total.device)
            for part in self._received.view(self._ranks, -1):  # in the order of ranks, whichever came first
                total.add_(part)
        return total.float().div_(self._ranks)


class Exchange:
    """Sends gradients, in `reduce_dtype`, and weights in place of DeepSpeed's optimizer; every rank makes one."""

    def __init__(self, engine: Any, reduce_dtype: torch.dtype) -> None:
        self._engine, self._optimizer, self._reduce_dtype = engine, engine.optimizer, reduce_dtype
        self._group: dist.ProcessGroup = self._optimizer.dp_process_group
        self._sends_each = self._optimizer.partition_gradients
        self._under_way: deque[tuple[_Bucket, _ReduceScatter]] = deque()
        self._buckets = self._lay_out()
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.places}
        self._is_in_backward = False
        self._complete = 0  # number of buckets, in their order, sent in this backward pass
        # DeepSpeed is to sum nothing, and to gather weights by `gather`.
        optimizer = self._optimizer
        stop_reducing(engine)
        optimizer.backward_epilogue = self._end_backward
        optimizer.update_lp_params = partial(self._refresh, optimizer.update_lp_params)
        optimizer.bit16_groups_flat = _Gathered(optimizer.bit16_groups_flat, self)
        deepspeed.runtime.zero.stage_1_and_2.all_gather_dp_groups = _all_gather
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._add)
        self._wait_before_use()

    def _lay_out(self) -> list[_Bucket]:
        """The buckets in the order in which a backward pass fills them."""
        optimizer, rank = self._optimizer, dist.get_rank(self._group)
        buckets = []
        for index, parameters in enumerate(optimizer.round_robin_bit16_groups):
            places = dict(zip(parameters, optimizer.round_robin_bit16_offsets[index], strict=True))
            parts = optimizer.parallel_partitioned_bit16_groups[index]
            buckets.append(_Bucket(index, optimizer.bit16_groups_flat[index], parts[rank], places))
        order = {parameter: number for number, parameter in enumerate(self._engine.module.parameters())}
        return sorted(buckets, key=lambda bucket: -min(order[parameter] for parameter in bucket.places))

    @property
    def _is_last(self) -> bool:
        """Whether this micro-batch is the last one of the step."""
        return bool(self._engine.is_gradient_accumulation_boundary())

    @torch.no_grad()
    def _add(self, parameter: Tensor) -> None:
        """Called by autograd when a micro-batch's gradient of a parameter is whole."""
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        bucket = self._bucket_of[parameter]
        if not self._is_in_backward:
            self._begin_backward()
        bucket.awaited.remove(parameter)  # a second gradient within one backward pass would come too late
        values = self._sums(bucket).narrow(0, bucket.places[parameter], parameter.numel()).view(parameter.shape)
        if parameter in bucket.missing:
            values.copy_(parameter.grad)
            bucket.missing.remove(parameter)
        else:
            values.add_(parameter.grad)
        parameter.grad = None
        if values.is_cuda:
            bucket.streams.add(torch.cuda.current_stream())
        if self._sends_each or self._is_last:
            while self._complete < len(self._buckets) and not self._buckets[self._complete].awaited:
                self._send(self._buckets[self._complete])

    def _begin_backward(self) -> None:
        self._is_in_backward, self._complete = True, 0
        for bucket in self._buckets:
            bucket.awaited = set(bucket.places)

    def _sums(self, bucket: _Bucket) -> Tensor:
        if bucket.sums is None:
            is_summed = not self._sends_each and self._engine.gradient_accumulation_steps() > 1
            dtype = torch.float32 if is_summed else self._reduce_dtype
            bucket.sums = unfilled(bucket.weights, bucket.places, dtype)
            bucket.missing = set(bucket.places)
        return bucket.sums

    def _send(self, bucket: _Bucket) -> None:
        for stream in bucket.streams:  # autograd may have called hooks on several
            torch.cuda.current_stream().wait_stream(stream)
        bucket.streams.clear()
        sums = self._sums(bucket)
        for parameter in bucket.missing:
            sums.narrow(0, bucket.places[parameter], parameter.numel()).zero_()
        values, bucket.sums = sums.to(self._reduce_dtype), None
        self._under_way.append((bucket, _ReduceScatter(values, self._group)))
        self._complete += 1
        while len(self._under_way) > MOST_UNDER_WAY:
            self._receive()

    def _receive(self) -> None:
        bucket, message = self._under_way.popleft()
        mean = message.mean()
        bucket.share = mean if bucket.share is None else bucket.share.add_(mean)

    @torch.no_grad()
    def _end_backward(self, *_: Any) -> None:
        if not self._is_in_backward:  # nothing that is trained had a part in the loss
            self._begin_backward()
        if self._sends_each or self._is_last:
            for bucket in self._buckets[self._complete :]:  # parameters without a gradient have zeros
                self._send(bucket)
        self._is_in_backward = False
        if self._is_last:
            self.settle()  # modules that had no part in the loss have not waited, and the update overwrites
            while self._under_way:
                self._receive()
            for bucket in self._buckets:
                share, bucket.share = bucket.share, None
                self._optimizer.averaged_gradients[bucket.index] = Partition([share], share)

    def gather(self) -> None:
        """Begin to send every rank's weights to all ranks; readers outside of modules call `settle` first."""
        self.settle()
        for bucket in reversed(self._buckets):  # as the forward pass will need them
            bucket.gathering = dist.all_gather_into_tensor(
                bucket.weights, bucket.part, group=self._group, async_op=True
            )

    def _refresh(self, refresh: Callable[[], None]) -> None:
        """Refresh all weights from the masters: this rank's part must not be overwritten while it is sent."""
        self.settle()
        refresh()

    def settle(self) -> None:
        self._await(self._buckets)

    def _await(self, buckets: Iterable[_Bucket], *_: Any) -> None:
        """Wait for the weights of some buckets; also a hook, which torch gives a module and its arguments."""
        for bucket in buckets:
            if bucket.gathering is not None:
                bucket.gathering.wait()
                bucket.gathering = None

    def _wait_before_use(self) -> None:
        """Have each module wait for its weights; a compiled one for all within it, which have no hooks of their own."""
        compiled = [module for module in self._engine.module.modules() if is_compiled(module)]
        within = {inner for module in compiled for inner in module.modules()}
        for module in compiled + [module for module in self._engine.module.modules() if module not in within]:
            parameters = module.parameters(recurse=module in within)
            buckets = {self._bucket_of[each]: None for each in parameters if each in self._bucket_of}
            if buckets:
                module.register_forward_pre_hook(partial(self._await, buckets))


class ScatteredSums:
    """Sends the gradients of an engine of ZeRO 3 while others are computed, on devices without streams.

    DeepSpeed's optimizer fills the buckets and keeps the sums.
    """

    def __init__(self, engine: Any) -> None:
        self._optimizer = optimizer = engine.optimizer
        self._group: dist.ProcessGroup = optimizer.dp_process_group
        self._under_way: deque[tuple[list[nn.Parameter], _ReduceScatter]] = deque()
        self._keep = optimizer.partition_grads
        self._end_of_deepspeed = optimizer.independent_gradient_partition_epilogue
        optimizer._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads = self._send
        optimizer.partition_grads = self._note
        optimizer.independent_gradient_partition_epilogue = self._end_backward

    def _send(self, parameters: list[nn.Parameter], dtype: torch.dtype) -> _ReduceScatter:
        """Replaces a sum that is waited for: sends a bucket's gradients, each cut into the ranks' parts."""
        ranks = dist.get_world_size(self._group)
        by_rank = []
        for parameter in parameters:
            assert parameter.grad is not None
            values = parameter.grad.reshape(-1).to(dtype)
            by_rank.append(nn.functional.pad(values, (0, -len(values) % ranks)).view(ranks, -1))
        return _ReduceScatter(torch.cat(by_rank, dim=1).view(-1), self._group)

    def _note(self, parameters: list[nn.Parameter], message: _ReduceScatter) -> list[Tensor]:
        """Replaces what keeps the parts of a sum: they have not arrived yet, so the message is noted."""
        for parameter in parameters:
            parameter.grad = None
        self._under_way.append((list(parameters), message))
        while len(self._under_way) > MOST_UNDER_WAY:
            self._receive()
        return []

    def _receive(self) -> None:
        parameters, message = self._under_way.popleft()
        ranks, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        mean = message.mean().to(self._optimizer.gradient_accumulation_dtype)
        parts, begin = [], 0
        for parameter in parameters:
            elements: int = parameter.ds_numel  # type: ignore[attr-defined]
            size = -(-elements // ranks)
            parts.append(mean[begin : begin + max(0, min(size, elements - rank * size))])  # without padding
            begin += size
        self._keep(parameters, parts)

    def _end_backward(self) -> None:
        self._end_of_deepspeed()
        while self._under_way:
            self._receive()


class _Gathered(list[Tensor]):
    """DeepSpeed's list of flat weights, by which `_all_gather` finds the exchange that they belong to."""

    def __init__(self, weights: Iterable[Tensor], exchange: Exchange) -> None:
        super().__init__(weights)
        self.exchange = exchange


_deepspeeds_all_gather = deepspeed.runtime.zero.stage_1_and_2.all_gather_dp_groups


def _all_gather(groups_flat: list[Tensor], **others: Any) -> None:
    """DeepSpeed's function, except for engines with an exchange."""
    if isinstance(groups_flat, _Gathered):
        groups_flat.exchange.gather()
    else:
        _deepspeeds_all_gather(groups_flat=groups_flat, **others)
