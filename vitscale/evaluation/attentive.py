"""A bank of attentive heads on the patches' tokens of a frozen model, as CAPI measures (Darcet et al. 2025).

A learned query attends to the tokens, by heads of 64 numbers; a linear layer on what it sees answers. Keys and values
are linear in the tokens; unlike V-JEPA's attentive probe (Bardes et al. 2024) it has no further norm, projection or
MLP. Tokens come from the model's final norm. One head for each learning rate is trained by Adam (0.9, 0.95); batches,
order, cosine and choice are those of `heads`.

Shape legend: N samples, B samples of a batch, T patches, D width of a token, K classes, R heads of the bank, H heads of
the attention, d width of each.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from vitscale.evaluation.heads import BATCH, RATES, batches_of, best_on, cosine, default_steps
from vitscale.evaluation.probes import Splits
from vitscale.ground.errors import DataError
from vitscale.models import Outputs

_BETAS = (0.9, 0.95)
_INITIAL_STD = 0.02
_HEAD_WIDTH = 64


class AttentiveHead(NamedTuple):
    """Query (H, d), weights of keys and values (H, d, D), biases of values (H, d); the classifier's (K, D) and (K,)."""

    query: Tensor
    key: Tensor
    value: Tensor
    value_bias: Tensor
    weight: Tensor
    bias: Tensor

    @classmethod
    def begin(cls, width: int, num_classes: int, seed: int, device: torch.device | str = "cpu") -> Self:
        """Initial values, the same on every device."""
        heads = next(count for count in range(max(1, width // _HEAD_WIDTH), 0, -1) if width % count == 0)
        each, generator = width // heads, torch.Generator().manual_seed(seed)
        shapes = [(heads, each), (heads, each, width), (heads, each, width), (heads, each), (num_classes, width)]
        drawn = [torch.randn(shape, generator=generator) * _INITIAL_STD for shape in shapes]
        drawn[3].zero_()
        return cls(*(values.to(device).requires_grad_() for values in (*drawn, torch.zeros(num_classes))))


def logits_of(heads: Sequence[AttentiveHead], tokens: Tensor) -> Tensor:
    """The outputs (R, B, K) of heads for tokens (B, T, D)."""
    query, key, value, value_bias, weight, bias = (torch.stack(parts) for parts in zip(*heads, strict=True))
    # As there is one query, weights of keys are multiplied with it, and those of values with the mean token that a head
    # sees: no keys and values of all tokens. A bias of keys would add the same number to all scores of a softmax.
    wanted = torch.einsum("rhd,rhdw->rhw", query, key) * query.shape[-1] ** -0.5
    attention = torch.einsum("btw,rhw->brht", tokens, wanted).softmax(dim=-1)
    seen = torch.einsum("brht,btw->brhw", attention, tokens)
    values = torch.einsum("brhw,rhdw->brhd", seen, value) + value_bias
    return torch.einsum("brw,rkw->rbk", values.flatten(2), weight) + bias[:, None]


@torch.enable_grad()
def train_attentive(
    splits: Splits,
    rows: Tensor,
    rates: Sequence[float],
    *,
    steps: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> list[AttentiveHead]:
    """Train one head for each rate on some rows of the training tokens, fp32 (N, T, D) in host memory.

    All begin with the same values and see the same batches. `steps` is as in `heads.train_heads`.
    """
    steps = default_steps(len(rows)) if steps is None else steps
    x, y = splits.train_x, splits.train_y
    heads = [AttentiveHead.begin(x.shape[-1], splits.num_classes, seed, device) for _ in rates]
    groups = [{"params": [*head], "lr": rate} for head, rate in zip(heads, rates, strict=True)]
    adam = torch.optim.Adam(groups, betas=_BETAS)
    for step, chosen in enumerate(batches_of(len(rows), steps, seed)):
        for group, rate in zip(adam.param_groups, rates, strict=True):
            group["lr"] = rate * cosine(step, steps)
        at = rows[chosen]
        logits, labels = logits_of(heads, x[at].to(device)), y[at].to(device)
        adam.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), labels.repeat(len(heads)), reduction="sum").div(len(at)).backward()
        adam.step()
    return heads


def best_attentive(
    splits: Splits, development: Tensor, *, steps: int | None = None, device: torch.device | str = "cpu"
) -> tuple[float, float]:
    """The learning rate chosen as in `heads.best_on`, and the test accuracy (a fraction) of its head."""

    def logits(rate: float, head: AttentiveHead, tokens: Tensor) -> Tensor:
        return logits_of([head], tokens.to(head.weight))[0]

    trained = partial(train_attentive, splits, steps=steps, device=device)
    return best_on(splits, development, RATES, trained, logits, BATCH)


def patches_of(outputs: Outputs, others: int, what: str, images: int, room: float) -> Outputs:
    """Outputs whose representation are the patches' tokens (B, T, D), those after the first `others`.

    Raises `DataError`, on every rank, if the tokens of all `images`, fp32, take more than `room` bytes.
    """
    patches = outputs.tokens[:, others:]
    each = 4 * patches.shape[1] * patches.shape[2]
    if (size := images * each) > room:
        raise DataError(
            f"{what}: the patches' tokens of {images:,} training and test images take {size / 1e9:.3g} GB of rank 0's "
            f"memory, and {room / 1e9:.3g} GB may be filled: there is room for {math.floor(room / each):,} "
            "images (a part: vitscale shards split)"
        ).on_all_ranks()
    return Outputs(outputs.tokens, patches, None)
