"""The `optimizer` block of a recipe: how weights are updated, and which of them in a way of their own."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from vitscale.block import Block


def _is_pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from None
    return text


Pattern = Annotated[str, AfterValidator(_is_pattern)]
"""A regular expression, looked for anywhere in a parameter's name."""


class ParameterGroup(Block):
    """Parameters that are trained in a way of their own; where several groups match one, the first of them counts."""

    match: Pattern = Field(
        description="a regular expression; the group is of the parameters whose name, as in checkpoints, it finds"
    )
    lr_factor: float = Field(1.0, gt=0, description="multiplies their learning rate")
    weight_decay: float | None = Field(
        None, ge=0, description="theirs; default: what the optimizer's weight_decay and decay_exclude say"
    )
    frozen: bool = Field(
        False, description="they keep the values that the run begins with: no gradient, no moments, no weight decay"
    )

    @model_validator(mode="after")
    def _frozen_alone(self) -> "ParameterGroup":
        for key in ("lr_factor", "weight_decay"):
            # A dumped recipe sets every field, so that a default is no sign of intent.
            if self.frozen and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} says how parameters are trained, and those of this group are frozen")
        return self


LearningRate = Annotated[float, Field(gt=0, description="learning rate at the end of the warmup")]
DecayExclude = Annotated[
    Pattern | None, Field(description="a regular expression; parameters whose name it finds are not decayed")
]
ClipNorm = Annotated[float | None, Field(gt=0, description="global gradient norm above which gradients are scaled")]
Groups = Annotated[
    list[ParameterGroup],
    Field(description="parameters with another learning rate or weight decay, or that are not trained at all"),
]
LayerDecay = Annotated[
    float | None,
    Field(
        gt=0,
        le=1,
        description="of Transformers, as in BEiT and MAE: the learning rate of block i of d, from 0, is multiplied by "
        "this to the power of d - i, that of the embeddings (and a hybrid's stem) to the power of d + 1, besides a "
        "group's lr_factor",
    ),
]


class AdamW(Block):
    """Adam with decoupled weight decay times the current learning rate, as in the authors' code."""

    name: Literal["adamw"] = Field("adamw", description="chooses this optimizer")
    lr: LearningRate
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        [0.9, 0.999], min_length=2, max_length=2, description="decay of the mean of gradients, and of their squares"
    )
    eps: float = Field(1e-8, gt=0, description="added to the root of the mean square")
    weight_decay: float = Field(0.0, ge=0, description="times the learning rate, taken off each weight at each update")
    decay_exclude: DecayExclude = None
    clip_norm: ClipNorm = None
    groups: Groups = Field([])
    layer_decay: LayerDecay = None

    @property
    def first_momentum(self) -> float:
        """The part of the mean gradient that an update keeps, before a schedule changes it."""
        return self.betas[0]


class SGD(Block):
    """Stochastic gradient descent with momentum; weight decay is added to the gradient."""

    name: Literal["sgd"] = Field(description="chooses this optimizer")
    lr: LearningRate
    momentum: float = Field(0.9, ge=0, lt=1, description="part of the last update that is kept")
    momentum_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="in which momentum is kept; bf16, as the authors' fine-tuning code: 2 bytes a parameter"
    )
    weight_decay: float = Field(0.0, ge=0, description="times each weight, added to its gradient")
    decay_exclude: DecayExclude = None
    clip_norm: ClipNorm = None
    groups: Groups = Field([])
    layer_decay: LayerDecay = None

    @model_validator(mode="after")
    def _something_to_keep(self) -> "SGD":
        if self.momentum_dtype == "bf16" and self.momentum == 0:
            raise ValueError("momentum_dtype: bf16 says how momentum is kept, and momentum is 0")
        return self

    @property
    def first_momentum(self) -> float:
        """The part of the last update that is kept, before a schedule changes it."""
        return self.momentum


Optimizer = AdamW | SGD


def group_of(optimizer: Optimizer, name: str) -> ParameterGroup | None:
    """The group that a parameter is in; None where it is trained by the optimizer's own fields."""
    return next((group for group in optimizer.groups if re.search(group.match, name)), None)


def is_frozen(optimizer: Optimizer, name: str) -> bool:
    """Whether a parameter is never updated."""
    group = group_of(optimizer, name)
    return group is not None and group.frozen
