"""What the ranks send to each other in one training step, by collective.

Bytes are those that each rank sends in a ring of W ranks: (W - 1) / W n in an all-gather or a reduce-scatter, twice
that in an all-reduce. n is the size of the whole message in bytes: the input of an all-reduce or a reduce-scatter, the
output of an all-gather. NCCL may use other algorithms; none sends less.

What DeepSpeed 0.19 sends was counted on real ranks, and a test compares. It differs from its papers in two ways: in
stages 1 and 2 gradients are all-reduced, and each rank drops what is not its share; and in stage 2 that happens for
every micro-batch. With `parallelism.overlap`, training/exchange.py uses reduce-scatters instead.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from vitscale.recipe import Recipe
from vitscale.training.beginning.memory import ALL_REDUCE_ELEMENTS, optimizer_share
from vitscale.training.beginning.tensors import Layer, Parameters
from vitscale.training.deepspeed.config import elements_in_flight

Kind = Literal["all-reduce", "all-gather", "reduce-scatter"]
Phase = Literal["passes", "backward", "update"]
# How many times the parts of a message travel around a ring: for an all-reduce first as sums, then as results.
PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}
_AGREEMENTS, _AGREEMENT_BYTES = 3, 24  # two numbers of the trainer, the gradients' norm, and whether they are finite


@dataclass(frozen=True)
class Collective:
    """The messages of one kind in one step."""

    what: str
    kind: Kind
    # Sent during the forward and backward passes of every micro-batch, in the backward pass, or at the end of the step.
    phase: Phase
    elements: int  # all ranks together
    element_bytes: int
    times: int = 1  # that they are sent in a step
    messages: int = 1  # that the elements are cut into each time
    group: int | None = None  # the number of ranks that send to each other, those of one node; None for all ranks

    def sent(self, world_size: int) -> float:
        """The bytes that each rank sends in one step."""
        ranks = self.group or world_size
        message = self.elements * self.element_bytes
        return PASSES[self.kind] * (ranks - 1) / ranks * message * self.times


def communication(recipe: Recipe, parameters: Parameters, world_size: int, accumulation: int) -> list[Collective]:
    """What `world_size` ranks send in one step of a recipe that accumulates over `accumulation` micro-batches."""
    stage, is_bf16 = recipe.parallelism.zero_stage, recipe.precision != "fp32"
    weight_bytes = 2 if is_bf16 else 4
    gradient_bytes = 2 if recipe.parallelism.reduce_dtype == "bf16" else 4
    total = optimizer_share(parameters.trained, stage, world_size) * (world_size if stage else 1)  # with padding
    agreements = Collective("agreements", "all-reduce", "update", _AGREEMENT_BYTES, 1, messages=_AGREEMENTS)
    limits = elements_in_flight(recipe)
    # An average that takes the place of the weights for a pass is sent, and then they are again.
    sent = 3 if recipe.objective.prepares == "average" else 1
    buckets = math.ceil(total / (limits["reduce_bucket_size"] if stage else ALL_REDUCE_ELEMENTS))
    if recipe.parallelism.exchanges:
        times = accumulation if stage == 2 else 1
        return [
            Collective("gradients", "reduce-scatter", "backward", total, gradient_bytes, times, buckets),
            Collective("new weights", "all-gather", "passes", total, weight_bytes, sent, buckets),
            agreements,
        ]
    if stage < 3:
        times = accumulation if stage == 2 else 1
        gradients = Collective("gradients", "all-reduce", "backward", total, gradient_bytes, times, buckets)
        new_weights = [Collective("new weights", "all-gather", "update", total, weight_bytes, sent)] if stage else []
        return [gradients, *new_weights, agreements]
    small = [size for size in parameters.sizes if size <= limits["stage3_param_persistence_threshold"]]
    return [
        *_weights_of_passes(recipe, parameters, world_size, weight_bytes, accumulation),
        Collective("gradients", "reduce-scatter", "backward", total, gradient_bytes, accumulation, buckets),
        # One message for each parameter.
        Collective("small new weights", "all-gather", "update", sum(small), weight_bytes, sent, max(1, len(small))),
        agreements,
    ]


def _weights_of_passes(
    recipe: Recipe, parameters: Parameters, world_size: int, weight_bytes: int, accumulation: int
) -> list[Collective]:
    """ZeRO 3's gathers in the passes of a step, of which hpZ leaves all but the first of each layer within nodes."""
    gathered, messages = _gathered(recipe, parameters)
    if not gathered:  # every parameter is small enough to stay on all ranks
        return []
    what, group = "weights for the passes", recipe.parallelism.hpz_ranks(world_size)
    if group == 1:
        return [Collective(what, "all-gather", "passes", gathered, weight_bytes, accumulation, messages)]
    limit = elements_in_flight(recipe)["stage3_param_persistence_threshold"]
    of_layers = [sum(size for size in layer.trained if size > limit) for layer in parameters.layers]
    first = sum(of_layers)  # DeepSpeed forgets the copies of what is trained after each update
    first_messages = min(math.ceil(messages * first / max(1, gathered)), sum(elements > 0 for elements in of_layers))
    found = [Collective(what, "all-gather", "passes", first, weight_bytes, messages=first_messages)]
    if (again := gathered * accumulation - first) > 0:
        count = max(1, messages * accumulation - first_messages)
        inside = f"{what}, within nodes"
        found.append(Collective(inside, "all-gather", "passes", again, weight_bytes, messages=count, group=group))
    return found


def _gathered(recipe: Recipe, parameters: Parameters) -> tuple[int, int]:
    """(elements that ZeRO 3 gathers in the passes of one micro-batch, messages in which it does).

    DeepSpeed gathers a layer when it is needed and releases it afterwards, unless it is needed again within
    `stage3_max_reuse_distance` other parameters. If it prefetches, it keeps, at the turn from the forward to the
    backward pass, as much as may be held at one time: between the two uses of a layer that is kept, the layers above
    it are used twice.
    """
    limits, layers = elements_in_flight(recipe), parameters.layers
    at_the_turn = limits["stage3_max_live_parameters"] if limits["stage3_prefetch_bucket_size"] > 0 else 0
    uses = _uses(layers, recipe.parallelism.activation_checkpointing)
    held: set[int] = set()
    gathered = messages = 0
    for place, (layer, is_let_go) in enumerate(uses):
        if layer not in held:
            large = sum(s for s in layers[layer].sizes if s > limits["stage3_param_persistence_threshold"])
            gathered, messages = gathered + large, messages + (large > 0)
            held.add(layer)
        distance = max(limits["stage3_max_reuse_distance"], 2 * (at_the_turn - sum(layers[layer].sizes)) + 1)
        if is_let_go and not _is_needed_soon(layer, uses[place + 1 :], layers, distance):
            held.remove(layer)
    if sum(parameters.sizes) <= limits["stage3_max_live_parameters"] and limits["stage3_prefetch_bucket_size"]:
        # Everything is prefetched. Otherwise a layer is prefetched whenever another one is released.
        messages = min(messages, math.ceil(gathered / limits["stage3_prefetch_bucket_size"]))
    return gathered, messages


def _is_needed_soon(layer: int, uses: Sequence[tuple[int, bool]], layers: Sequence[Layer], limit: int) -> bool:
    passed = 0
    for later, _ in uses:
        if passed >= limit:
            return False
        if later == layer:
            return True
        passed += sum(layers[later].sizes)
    return False


def _uses(layers: Sequence[Layer], recompute_every: int) -> list[tuple[int, bool]]:
    """(layer's index, whether it is released afterwards) in the order in which a forward and backward pass uses layers.

    The backward pass of a block's last layer begins with the recomputation of the block and ends after it.
    """
    backward: list[tuple[int, bool]] = []
    for block, group in groupby(reversed(list(enumerate(layers))), key=lambda pair: pair[1].block):
        last, *others = [number for number, _ in group]
        if block is not None and recompute_every > 0 and block % recompute_every == 0:
            backward.append((last, False))
            backward += [(number, True) for number in reversed(others)]
        backward += [(number, True) for number in (last, *others)]
    return [*((number, True) for number in range(len(layers))), *backward]
