"""What the ranks send to each other in one step of training, by collective.

Bytes are those that a rank of a ring sends: of a message of n bytes (n: what is there before an all-reduce or a
reduce-scatter, what is there after an all-gather) (W - 1) / W n in an all-gather or a reduce-scatter, twice that in an
all-reduce, W being the number of ranks. NCCL may take other ways; none sends less.

What DeepSpeed 0.19 sends was counted on real ranks, and a test compares. Two things are not as its papers have it:
in stages 1 and 2 gradients are all-reduced, and each rank drops what is not its share; and in stage 2 that happens for
every micro-batch. With `parallelism.overlap`, training/exchange.py sends by reduce-scatter in its place.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from vitscale.planning.memory import ALL_REDUCE_ELEMENTS, elements_in_flight, optimizer_share
from vitscale.planning.parameters import Layer, Parameters
from vitscale.recipe import Recipe

Kind = Literal["all-reduce", "all-gather", "reduce-scatter"]
Phase = Literal["passes", "backward", "update"]
_SHARE = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}
_AGREEMENTS, _AGREEMENT_BYTES = (
    3,
    24,
)  # two numbers of the trainer's, the norm of the gradients, and whether they are finite


@dataclass(frozen=True)
class Collective:
    """Messages of one sort in one step.

    Attributes:
        what: is in them.
        kind: of the collective.
        phase: `passes`: within the forward and backward passes of every micro-batch; `backward`: within the backward
            pass; `update`: at the end of the step.
        elements: all ranks together.
        element_bytes: of one element.
        times: a step.
        messages: into which the elements are cut each time.
    """

    what: str
    kind: Kind
    phase: Phase
    elements: int
    element_bytes: int
    times: int = 1
    messages: int = 1

    def sent(self, world_size: int) -> float:
        """Bytes that each rank sends in one step."""
        message = self.elements * self.element_bytes
        return _SHARE[self.kind] * (world_size - 1) / world_size * message * self.times


def communication(recipe: Recipe, parameters: Parameters, world_size: int, accumulation: int) -> list[Collective]:
    """What the ranks of a world send in one step of a recipe that accumulates over so many micro-batches."""
    stage, is_bf16 = recipe.parallelism.zero_stage, recipe.precision != "fp32"
    weight_bytes = 2 if is_bf16 else 4
    gradient_bytes = 2 if recipe.parallelism.reduce_dtype == "bf16" else 4
    total = optimizer_share(parameters.trained, stage, world_size) * (world_size if stage else 1)  # with padding
    agreements = Collective("agreements", "all-reduce", "update", _AGREEMENT_BYTES, 1, messages=_AGREEMENTS)
    limits = elements_in_flight(recipe)
    buckets = math.ceil(total / (limits["reduce_bucket_size"] if stage else ALL_REDUCE_ELEMENTS))
    if recipe.parallelism.overlap and stage in (1, 2):
        times = accumulation if stage == 2 else 1
        return [
            Collective("gradients", "reduce-scatter", "backward", total, gradient_bytes, times, buckets),
            Collective("new weights", "all-gather", "passes", total, weight_bytes, messages=buckets),
            agreements,
        ]
    if stage < 3:
        times = accumulation if stage == 2 else 1
        gradients = Collective("gradients", "all-reduce", "backward", total, gradient_bytes, times, buckets)
        new_weights = [Collective("new weights", "all-gather", "update", total, weight_bytes)] if stage else []
        return [gradients, *new_weights, agreements]
    small = [size for size in parameters.sizes if size <= limits["stage3_param_persistence_threshold"]]
    gathered, messages = _gathered(recipe, parameters.layers)
    if sum(parameters.sizes) <= limits["stage3_max_live_parameters"] and limits["stage3_prefetch_bucket_size"]:
        # All is read ahead. Elsewhere a layer is, whenever another one is let go of.
        messages = min(messages, math.ceil(gathered / limits["stage3_prefetch_bucket_size"]))
    return [
        Collective("weights for the passes", "all-gather", "passes", gathered, weight_bytes, accumulation, messages),
        Collective("gradients", "reduce-scatter", "backward", total, gradient_bytes, accumulation, buckets),
        # Each by itself.
        Collective("small new weights", "all-gather", "update", sum(small), weight_bytes, messages=max(1, len(small))),
        agreements,
    ]


def _gathered(recipe: Recipe, layers: Sequence[Layer]) -> tuple[int, int]:
    """Elements that ZeRO 3 gathers in the passes of one micro-batch, and how many times it gathers those of a layer.

    DeepSpeed gathers a layer when it is needed and lets go of it behind, unless it is needed again before so many other
    parameters are. Where it reads ahead, it keeps at the turn to the backward pass as much as may be there at one time:
    between the two uses of a layer that is kept, those above it are used twice.
    """
    limits = elements_in_flight(recipe)
    at_the_turn = limits["stage3_max_live_parameters"] if limits["stage3_prefetch_bucket_size"] > 0 else 0
    uses = _uses(layers, recipe.parallelism.activation_checkpointing)
    held: set[int] = set()
    gathered = times = 0
    for place, (layer, is_let_go) in enumerate(uses):
        if layer not in held:
            large = sum(s for s in layers[layer].sizes if s > limits["stage3_param_persistence_threshold"])
            gathered, times = gathered + large, times + (large > 0)
            held.add(layer)
        distance = max(limits["stage3_max_reuse_distance"], 2 * (at_the_turn - sum(layers[layer].sizes)) + 1)
        if is_let_go and not _is_needed_soon(layer, uses[place + 1 :], layers, distance):
            held.remove(layer)
    return gathered, times


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
    """The layers, by their number, as one forward and backward pass needs them, and whether they are let go of then.

    The backward pass of a block's last layer begins with the recomputation of the block, and ends behind it.
    """
    backward: list[tuple[int, bool]] = []
    for block, group in groupby(reversed(list(enumerate(layers))), key=lambda pair: pair[1].block):
        last, *others = [number for number, _ in group]
        if block is not None and recompute_every > 0 and block % recompute_every == 0:
            backward.append((last, False))
            backward += [(number, True) for number in reversed(others)]
        backward += [(number, True) for number in (last, *others)]
    return [*((number, True) for number in range(len(layers))), *backward]
