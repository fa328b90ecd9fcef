"""The `optimizer` block of a recipe: how weights are updated, and groups of them with settings of their own."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic_core import SchemaError, SchemaValidator, core_schema

from vitscale.ground.block import Block, has_default
from vitscale.recipe.durations import Duration

_MOST_GROUPS, _LONGEST_PATTERN = 100, 300


@cache
def _compiled(pattern: str) -> SchemaValidator:
    # In Rust's dialect, which takes linear time: Python's may take for ever, and a recipe may be a stranger's. With all
    # of Unicode a \w takes 60 kB.
    pattern = pattern.replace(r"\w", "[0-9A-Za-z_]").replace(r"\W", "[^0-9A-Za-z_]")
    return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern is found anywhere in a parameter's name."""
    return _compiled(pattern).isinstance_python(name)


def _is_pattern(text: str) -> str:
    if len(text) > _LONGEST_PATTERN or any(part in text for part in ("{", r"\p", r"\P")):  # which may be gigabytes
        raise ValueError(f"{text[:20]!r}: expected {_LONGEST_PATTERN} characters at most, no counts in braces, no \\p")
    try:
        _compiled(text)
    except SchemaError as error:
        raise ValueError(f"{text!r} is not a regular expression: {str(error).rpartition('error: ')[2]}") from None
    return text


Pattern = Annotated[str, AfterValidator(_is_pattern)]
"""A regular expression, searched for anywhere in a parameter's name."""


class ParameterGroup(Block):
    """Parameters with training settings of their own; if several groups match one, the first applies."""

    _later_keys: ClassVar[tuple[str, ...]] = ("begin",)

    match: Pattern
    """a regular expression without look-around or counts in braces, searched for in parameter names as in
    checkpoints"""
    lr_factor: float = Field(1.0, gt=0, le=1000, description="multiplies their learning rate")
    weight_decay: float | None = Field(None, ge=0)
    """their weight decay; default: from the optimizer's weight_decay and decay_exclude"""
    frozen: bool = Field(False, description="keep their initial values: no gradient, no moments, no weight decay")
    begin: Duration = Duration(steps=0)
    """until then their learning rate is 0: they keep their values, while moments follow their gradients"""

    def _contradictions(self) -> Iterator[str]:
        for key in ("lr_factor", "weight_decay", "begin"):
            if self.frozen and not has_default(self, key):
                yield f"{key} says how parameters are trained, and those of this group are frozen"


Shape = tuple[int, ...]
Kept = Mapping[str, Shape]
"""An optimizer's state for a parameter: kind, as in checkpoints -> shape."""
Betas = Annotated[
    list[Annotated[float, Field(ge=0, lt=1)]],
    Field(min_length=2, max_length=2, description="decay rates of the running means of gradients and of their squares"),
]


class Optimizer(Block):
    """The base of every `optimizer` block; its keys are the fields of one optimizer."""

    implementation: ClassVar[str]  # `module:class` of the `vitscale.training.optimizers.rule.Rule` that updates by it
    # Whether the update of an element depends on others of its parameter, which may be on another rank.
    needs_whole_tensors: ClassVar[bool] = False

    name: str = Field(description="chooses this optimizer")
    lr: float = Field(gt=0, description="learning rate at the end of the warmup")
    weight_decay: float = Field(0.0, ge=0)
    """each update subtracts this times the learning rate times the weight"""
    decay_exclude: Pattern | None = None
    """a regular expression; parameters with a matching name have no weight decay"""
    clip_norm: float | None = Field(None, gt=0)
    """global gradient norm above which gradients are scaled down to it"""
    groups: list[ParameterGroup] = Field([], max_length=_MOST_GROUPS)
    """parameters with their own learning rate or weight decay, or frozen ones"""
    layer_decay: float | None = Field(None, gt=0, le=1)
    """for Transformers, as in BEiT and MAE: the learning rate of block i of d (from 0) is multiplied by this to the
    power of d - i, that of the embeddings (and a hybrid's stem) to the power of d + 1, in addition to a group's
    lr_factor"""

    @model_serializer(mode="wrap")
    def _in_order(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Name and learning rate first, then the optimizer's own keys, then those that all have."""
        values = dump(self)
        order = [*list(values)[:2], *list(values)[_SHARED_KEYS:], *list(values)[2:_SHARED_KEYS]]
        return {key: values[key] for key in order}

    @property
    def first_momentum(self) -> float:
        """The part of the running mean that an update keeps, before a schedule changes it; 0 without momentum.

        By default it is `momentum`, or else the first of `betas`.
        """
        betas = getattr(self, "betas", (0.0,))
        return float(getattr(self, "momentum", betas[0]))

    @property
    def kept_in_bf16(self) -> frozenset[str]:
        """The kinds of state that are kept in bf16 instead of fp32."""
        return frozenset()

    @property
    def sees_heads(self) -> bool:
        """Whether the heads of attention are an axis of their own in the tensors that it sees."""
        return False

    def kept(self, name: str, shape: Shape) -> Kept:
        """What is kept of a parameter besides its value; by default Adam's two means."""
        return {"exp_avg": shape, "exp_avg_sq": shape}

    def check_parameters(self, shapes: Mapping[str, Shape]) -> None:
        """Raise `ValueError` if a setting fits none of the model's parameters."""

    def workspace(self, largest: int, share: int, is_divided: bool) -> int:
        """Temporary bytes of an update.

        `largest` is the elements of the largest parameter, `share` those that a rank updates, `is_divided` whether
        ranks hold parts of parameters.
        """
        return 0


_SHARED_KEYS = len(Optimizer.model_fields)
_ADAM_AT_ONCE = 1 << 24  # elements that training/optimizers/whole_tensors.py copies at a time


class AdamW(Optimizer):
    """Adam with decoupled weight decay times the current learning rate, as in the authors' code."""

    implementation: ClassVar[str] = "vitscale.training.optimizers.adam:AdamWRule"

    name: Literal["adamw"] = Field("adamw", description="chooses this optimizer")
    betas: Betas = Field([0.9, 0.999])
    eps: float = Field(1e-8, gt=0, description="added to the root of the mean square")


class SGD(Optimizer):
    """Stochastic gradient descent with momentum; weight decay is added to the gradient."""

    implementation: ClassVar[str] = "vitscale.training.optimizers.sgd:SGDRule"

    name: Literal["sgd"] = Field(description="chooses this optimizer")
    weight_decay: float = Field(0.0, ge=0, description="this times each weight is added to its gradient")
    momentum: float = Field(0.9, ge=0, lt=1, description="share of the previous update that is kept")
    momentum_dtype: Literal["fp32", "bf16"] = "fp32"
    """data type of the momentum; bf16, as in the authors' fine-tuning code: 2 bytes per parameter"""

    def _contradictions(self) -> Iterator[str]:
        if self.momentum_dtype == "bf16" and self.momentum == 0:
            yield "momentum_dtype: bf16 says how momentum is kept, and momentum is 0"

    @property
    def kept_in_bf16(self) -> frozenset[str]:
        return frozenset({"momentum_buffer"} if self.momentum_dtype == "bf16" else ())

    def kept(self, name: str, shape: Shape) -> Kept:
        return {"momentum_buffer": shape} if self.momentum else {}


class Lamb(Optimizer):
    """Adam with each parameter's update scaled to the parameter's norm (You et al. 2020), for large batches.

    In the form used by DeiT-III: the weight decay is part of the update, which is not scaled for parameters without
    weight decay.
    """

    implementation: ClassVar[str] = "vitscale.training.optimizers.adam:LambRule"
    needs_whole_tensors: ClassVar[bool] = True

    name: Literal["lamb"] = Field(description="chooses this optimizer")
    weight_decay: float = Field(0.0, ge=0, description="this times each weight is added to its update before scaling")
    betas: Betas = Field([0.9, 0.999])
    eps: float = Field(1e-6, gt=0, description="added to the root of the mean square")

    def workspace(self, largest: int, share: int, is_divided: bool) -> int:
        return 4 * min(largest, _ADAM_AT_ONCE)


class Adafactor(Optimizer):
    """Adam with little memory, as in "Scaling Vision Transformers" (big_vision's): 2 bytes per parameter and masters.

    The mean squares of a matrix are stored as the means of its rows and columns (Shazeer and Stern 2018), the momentum
    in bf16. At update t their decay rate is the smaller of `beta2_cap` and 1 - t^-0.8.
    """

    implementation: ClassVar[str] = "vitscale.training.optimizers.adafactor:AdafactorRule"
    needs_whole_tensors: ClassVar[bool] = True
    kept_in_bf16: ClassVar[frozenset[str]] = frozenset({"exp_avg"})

    name: Literal["adafactor"] = Field(description="chooses this optimizer")
    momentum: float = Field(0.9, gt=0, lt=1, description="share of the running mean of updates kept at each update")
    beta2_cap: float = Field(0.999, gt=0, lt=1, description="upper limit of the decay rate of the mean squares")
    factored_from: int = Field(32, ge=2)
    """tensors whose two longest sides are at least this long are factored; timm uses 16"""
    by_head: bool = True
    """true: the sides are those of big_vision's tensors, so that query, key, value and output of each attention head
    are factored apart, and small patches are not; false: those of matrices as stored, as in timm"""

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_runs(cls, content: Any) -> Any:
        # A run's recipe has every default written out: without this key, it is of a run that factored whole matrices.
        is_earlier = isinstance(content, dict) and content.keys() == cls.model_fields.keys() - {"by_head"}
        return content | {"by_head": False} if is_earlier else content

    @property
    def sees_heads(self) -> bool:
        return self.by_head

    def factored_dims(self, shape: Shape) -> tuple[int, int] | None:
        """(second longest dimension, longest one), a later one counting as longer than an equal one before it.

        None if the tensor is too small to be factored.
        """
        if len(shape) < 2:
            return None
        *_, second, longest = sorted(range(len(shape)), key=lambda side: (shape[side], side))
        return None if shape[second] < self.factored_from else (second, longest)

    def kept(self, name: str, shape: Shape) -> Kept:
        dims = self.factored_dims(shape)
        if dims is None:
            return {"exp_avg": shape, "exp_avg_sq": shape}
        rows, columns = ([1 if side == dim else size for side, size in enumerate(shape)] for dim in reversed(dims))
        return {"exp_avg": shape, "exp_avg_sq_r": tuple(rows), "exp_avg_sq_c": tuple(columns)}

    def workspace(self, largest: int, share: int, is_divided: bool) -> int:
        """A piece of a gradient, its squares, and one of them times its factors."""
        return 12 * min(largest, share)


class Muon(Optimizer):
    """Orthogonalised momentum for the matrices of the blocks, AdamW for everything else (Jordan et al. 2024).

    The update of an m x n matrix is scaled by 0.2 sqrt(max(m, n)), which makes it as large as AdamW's, so that both use
    the same learning rate and weight decay (Liu et al. 2025).
    """

    implementation: ClassVar[str] = "vitscale.training.optimizers.muon:MuonRule"
    needs_whole_tensors: ClassVar[bool] = True

    name: Literal["muon"] = Field(description="chooses this optimizer")
    momentum: float = Field(0.95, ge=0, lt=1)
    """for the matrices: share of the running mean gradient that is kept"""
    matrices: Pattern = r"(^|\.)blocks\.\d+\..*weight$"
    """a regular expression; matching parameters of two or more dimensions are treated as matrices"""
    betas: Betas = Field([0.9, 0.95])
    eps: float = Field(1e-7, gt=0, description="for AdamW, and the smallest norm a matrix is divided by")

    def kept(self, name: str, shape: Shape) -> Kept:
        if len(shape) > 1 and matches(self.matrices, name):
            return {"momentum_buffer": shape}
        return super().kept(name, shape)

    def check_parameters(self, shapes: Mapping[str, Shape]) -> None:
        if not any("momentum_buffer" in self.kept(name, shape) for name, shape in shapes.items()):
            raise ValueError(f"optimizer.matrices: {self.matrices!r} matches no matrix among the model's parameters")

    def workspace(self, largest: int, share: int, is_divided: bool) -> int:
        """In bf16: whole matrices sent and received, and one matrix's intermediate results."""
        return 2 * 4 * (share if is_divided else 0) + 2 * 4 * largest


AnyOptimizer = Annotated[
    SerializeAsAny[AdamW | SGD | Lamb | Adafactor | Muon],
    Field(discriminator="name", description="how weights are updated"),
]


def group_of(optimizer: Optimizer, name: str) -> ParameterGroup | None:
    """The group that a parameter is in; None if it is trained with the optimizer's own settings."""
    return next((group for group in optimizer.groups if matches(group.match, name)), None)


def is_frozen(optimizer: Optimizer, name: str) -> bool:
    """Whether a parameter is never updated."""
    group = group_of(optimizer, name)
    return group is not None and group.frozen
