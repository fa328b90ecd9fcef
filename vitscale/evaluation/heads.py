"""A bank of linear heads on the last blocks of a frozen model, as DINOv2 measures representations (Oquab et al. 2023).

The backbone sees each image once; all heads, one for each learning rate and choice of tokens, are trained on its
outputs. The head that is best on a part of the training samples is trained again on all of them and tested.

Shape legend: N samples, B samples of a batch, D width of a token, K classes, R learning rates, w width of a head's
input.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from vitscale.evaluation.classification import rank_of_label
from vitscale.evaluation.contract import MakeLoader
from vitscale.evaluation.features import Features, extract_features
from vitscale.evaluation.probes import Splits
from vitscale.models import BlockTokens, Outputs

RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
"""DINOv2's learning rates, for a batch of 256."""
BLOCKS = (1, 4)  # the numbers of last blocks that heads read
BATCH = 256
EPOCHS, FEWEST_STEPS = 10, 1250

Kind = TypeVar("Kind")
Values = TypeVar("Values")

_MOMENTUM = 0.9
_INITIAL_STD = 0.01
_CHUNK = 4096


@dataclass(frozen=True)
class Layout:
    """The meaning of the columns of features: the tokens of the last blocks, each D wide, the last block first.

    `has_patches` says whether the mean of the last block's patches comes before the tokens.
    """

    blocks: int
    width: int
    has_patches: bool

    def columns(self, head: "Head") -> slice:
        """The part of the features that a head reads."""
        before = self.width * self.has_patches
        return slice(0 if head.patches else before, before + head.blocks * self.width)


class Head(NamedTuple):
    """One linear head of the bank.

    It reads the tokens of the last `blocks` blocks and, with `patches`, the mean of the last block's patches; `rate` is
    its peak learning rate.
    """

    blocks: int
    patches: bool
    rate: float


def extract_blocks(
    make_loader: MakeLoader, read: Callable[[Tensor, int], BlockTokens], num_samples: int | None = None
) -> tuple[Features | None, Layout]:
    """Features of every sample for `best_of_bank`, on rank 0 (None elsewhere), and the layout of their columns.

    `read` turns images on the host and a number of blocks into the tokens of so many last blocks; `num_samples` is as
    in `extract_features`.
    """
    layouts: set[Layout] = set()

    def predict(images: Tensor) -> Outputs:
        tokens, patches = read(images, max(BLOCKS))
        layouts.add(Layout(tokens.shape[1], tokens.shape[2], has_patches=patches is not None))
        flat = tokens.flatten(1)
        return Outputs(tokens, flat if patches is None else torch.cat([patches, flat], dim=1), None)

    features = extract_features(make_loader, predict, num_samples)
    (layout,) = layouts
    return features, layout


def bank_of(layout: Layout, rates: Sequence[float] = RATES) -> list[Head]:
    """All heads that features allow: on 1 and 4 blocks, or as many as there are, with and without the patches' mean."""
    counts = sorted({min(count, layout.blocks) for count in BLOCKS})
    return [
        Head(count, patches, rate)
        for count in counts
        for patches in ((False, True) if layout.has_patches else (False,))
        for rate in rates
    ]


def best_of_bank(
    splits: Splits, development: Tensor, layout: Layout, *, steps: int | None = None, device: torch.device | str = "cpu"
) -> tuple[Head, float]:
    """The head that is chosen as in `best_on`, and its test accuracy (a fraction); features have `layout`'s columns.

    Between equal accuracies the head that reads less wins, and then the lower learning rate. `steps` is as in
    `train_heads`.
    """
    x, y = splits.train_x, splits.train_y

    def trained(rows: Tensor, heads: Sequence[Head]) -> list[tuple[Tensor, Tensor]]:
        here = (x, y) if len(rows) == len(y) else (x[rows], y[rows])  # no second copy
        return train_heads(*here, splits.num_classes, heads, layout, steps=steps, device=device)

    return best_on(splits, development, bank_of(layout), trained, partial(logits_of, layout), _CHUNK)


def best_on(
    splits: Splits,
    development: Tensor,
    bank: Sequence[Kind],
    trained: Callable[[Tensor, Sequence[Kind]], Sequence[Values]],
    logits: Callable[[Kind, Values, Tensor], Tensor],
    at_once: int,
) -> tuple[Kind, float]:
    """Choose the first of a bank's heads that is best on the development samples, train it on all and test it.

    Args:
        development: which training samples heads are chosen on instead of trained on, bool (N,).
        trained: heads trained on the samples of some rows.
        logits: a head's outputs for the features of `at_once` samples or fewer.
    """
    x, y, test_x, test_y, _ = splits
    fitted, held = ((~development).nonzero()[:, 0], development.nonzero()[:, 0])
    values = trained(fitted, bank)
    scores = [accuracy(partial(logits, *head), x, y, held, at_once) for head in zip(bank, values, strict=True)]
    best = bank[scores.index(max(scores))]
    (final,) = trained(torch.arange(len(y)), [best])
    return best, accuracy(partial(logits, best, final), test_x, test_y, torch.arange(len(test_y)), at_once)


@torch.no_grad()
def train_heads(
    x: Tensor,
    y: Tensor,
    num_classes: int,
    heads: Sequence[Head],
    layout: Layout,
    *,
    steps: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> list[tuple[Tensor, Tensor]]:
    """Train heads by SGD with momentum and a cosine schedule, without weight decay.

    Heads that read the same columns begin with the same values, and all see the same batches, whatever other heads are
    trained with them.

    Args:
        x, y: features, fp32 (N, columns of `layout`), and classes, int64 (N,), in host memory.
        heads: the heads to train; those that read the same columns are next to each other.
        steps: the number of updates; by default that of 10 epochs, at least 1,250.

    Returns:
        The weights (K, w) and biases (K,) of each head, on `device`.
    """
    steps = default_steps(len(x)) if steps is None else steps
    groups = [
        _Group.begin([head.rate for head in same], layout.columns(same[0]), num_classes, seed, device)
        for same in (list(group) for _, group in groupby(heads, key=lambda head: (head.blocks, head.patches)))
    ]
    for step, rows in enumerate(batches_of(len(x), steps, seed)):
        batch_x, batch_y = x[rows].to(device, torch.float32), y[rows].to(device)
        for group in groups:
            group.update(batch_x, batch_y, cosine(step, steps))
    return [values for group in groups for values in zip(group.weight, group.bias, strict=True)]


def logits_of(layout: Layout, head: Head, values: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
    """The outputs (B, K) of a head with these weights (K, w) and biases (K,) for features (B, columns of `layout`)."""
    weight, bias = values
    return x[:, layout.columns(head)].to(weight) @ weight.T + bias


@torch.no_grad()
def accuracy(logits: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, rows: Tensor, at_once: int = BATCH) -> float:
    """The share of some rows of features and classes (N,) for which `logits` are right; NaN outputs are wrong."""
    right = 0
    for at in rows.split(at_once):
        outputs = logits(x[at])
        right += int((rank_of_label(outputs, y[at].to(outputs.device)) < 1).sum())
    return right / len(rows)


@dataclass
class _Group:
    """Heads that read the same columns, trained as one: weights (R, K, w), biases (R, K), and the momentum of both."""

    columns: slice
    rates: Tensor
    weight: Tensor
    bias: Tensor
    weight_momentum: Tensor
    bias_momentum: Tensor

    @classmethod
    def begin(
        cls, rates: Sequence[float], columns: slice, num_classes: int, seed: int, device: torch.device | str
    ) -> "_Group":
        generator = torch.Generator().manual_seed(seed)
        start = torch.randn(num_classes, columns.stop - columns.start, generator=generator) * _INITIAL_STD
        weight = start.to(device).repeat(len(rates), 1, 1)
        bias = torch.zeros(len(rates), num_classes, device=device)
        per_head = torch.tensor(rates, device=device)[:, None]
        return cls(columns, per_head, weight, bias, torch.zeros_like(weight), torch.zeros_like(bias))

    def update(self, x: Tensor, y: Tensor, factor: float) -> None:
        """One update of every head by the mean cross-entropy of a batch: features (B, all columns), classes (B,)."""
        x = x[:, self.columns]
        # (B, R, K): the gradient with respect to a head's logits is its softmax minus the targets.
        gradient = (x @ self.weight.flatten(0, 1).T).view(len(x), *self.bias.shape).add_(self.bias).softmax(dim=2)
        gradient[torch.arange(len(x)), :, y] -= 1
        gradient /= len(x)
        self.weight_momentum.mul_(_MOMENTUM).add_((gradient.flatten(1).T @ x).view_as(self.weight))
        self.bias_momentum.mul_(_MOMENTUM).add_(gradient.sum(dim=0))
        self.weight -= factor * self.rates[:, :, None] * self.weight_momentum
        self.bias -= factor * self.rates * self.bias_momentum


def default_steps(count: int) -> int:
    """The updates of 10 epochs of so many samples, at least 1,250."""
    return max(FEWEST_STEPS, math.ceil(EPOCHS * count / BATCH))


def cosine(step: int, steps: int) -> float:
    """The factor of learning rates at a step."""
    return 0.5 * (1 + math.cos(math.pi * step / steps))


def batches_of(count: int, steps: int, seed: int) -> Iterator[Tensor]:
    """The rows of each step's batch, (256,) or all, from one permutation of `count` samples after another."""
    generator = torch.Generator().manual_seed(seed)
    left, size = torch.empty(0, dtype=torch.int64), min(BATCH, count)
    for _ in range(steps):
        if len(left) < size:
            left = torch.cat([left, torch.randperm(count, generator=generator)])
        yield left[:size]
        left = left[size:]
