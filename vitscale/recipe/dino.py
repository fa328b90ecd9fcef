"""The `objective` block of self-distillation (DINO, iBOT, KoLeo), and what is known about it without torch."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from vitscale.ground.block import Block
from vitscale.ground.errors import turned
from vitscale.ground.operations import Operation, dense, parameters, product
from vitscale.recipe.durations import Ramp
from vitscale.recipe.headless import OfViews, num_views, operations_on_views, times
from vitscale.recipe.objectives import Context, forward_only

_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 1e-3, 100.0
_TEACHER_TEMPERATURE = Ramp.model_validate({"from": 0.04, "to": 0.07, "over": {"epochs": 30}, "shape": "linear"})
_SINKHORN_PASSES = 4  # over the logits of the whole batch: their maxima, and three sums


class IBOT(Block):
    """Masked patches (iBOT, Zhou et al., 2022): the student sees global views with blocks of patches masked, and
    predicts what the teacher, who sees all of them, makes of the masked ones.

    In each group, so many of the global views are masked; the i-th of n loses the i-th of n equal steps from the lower
    to the upper share of its patches, so that a group always has the same number of masked patches (as in DINOv3).
    """

    weight: float = Field(1.0, gt=0, le=1000, description="factor of its loss")
    prototypes: int | None = Field(None, ge=2, le=2**20)
    """outputs of a head for patches alone, as in DINOv3 (65,536); default: the head for whole images serves both"""
    probability: float = Field(0.5, gt=0, le=1, description="share of the global views that are masked")
    shares: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = Field([0.1, 0.5])
    """lowest and highest share of such a view's patches that are masked"""

    def _contradictions(self) -> Iterator[str]:
        if self.shares[0] > self.shares[1]:
            yield f"shares {self.shares}: expected [low, high] with low at most high"


class Gram(Block):
    """Gram anchoring (DINOv3): the cosines of all pairs of patches of a global view should be those that an earlier
    teacher finds, in the mean of squares. Here that teacher sees the same pixels; DINOv3's sees twice the resolution.

    It begins when the average is first made, where that is a copy.
    """

    weight: Ramp = Ramp.model_validate({"from": 2.0, "to": 2.0})
    """factor of its loss, as it changes with the step of the run"""
    average: str = Field("gram", min_length=1)
    """name of the average that is this teacher, e.g. {name: gram, of: ema, from: {steps: 1000000}, every: {steps:
    10000}}"""


class Dino(OfViews):
    """Self-distillation (DINO, Caron et al., 2021; DINOv2, Oquab et al., 2024; DINOv3, Simeoni et al., 2025).

    The teacher is an average of the model and its heads. It sees the global views of an image, and the student, who
    sees all views, learns to assign them to the same prototypes. Targets use all prototypes equally over the global
    batch (Sinkhorn-Knopp): the teacher sees all of it before the passes that learn, so that targets do not depend on
    the number of ranks or on micro-batches. KoLeo spreads the images of a group apart.
    """

    implementation: ClassVar[str] = "vitscale.objectives.dino:Dino"
    needs_whole_patches: ClassVar[bool] = True
    own: ClassVar[tuple[str, ...]] = ("mask", "dino.", "ibot.")
    prepares: ClassVar[Literal["average"]] = "average"
    _later_keys: ClassVar[tuple[str, ...]] = ("gram",)

    kind: Literal["dino"] = Field(description="chooses this objective")
    global_views: Annotated[list[str], Field(min_length=1)] | None = Field(None, alias="globals")
    """names of the views that the teacher sees, of data.image_size pixels; default: all of that size"""
    prototypes: int = Field(65_536, ge=2, le=2**20, description="outputs of the head for whole images")
    hidden: int = Field(2048, ge=1, le=2**20, description="width of a head's two hidden layers")
    bottleneck: int = Field(
        256, ge=1, le=2**16, description="width of what a head's last layer compares with prototypes"
    )
    ibot: IBOT | None = IBOT()
    koleo: float = Field(0.1, ge=0, le=1000)
    """factor of KoLeo's loss, the sum over global views; 0: without it. It is the greater the smaller the group"""
    group: int = Field(32, ge=2, le=2**20)
    """number of neighbouring images among which KoLeo and masks are drawn; batch.global and micro-batches are multiples
    of it"""
    temperature: float = Field(
        0.1, ge=_LEAST_TEMPERATURE, le=_MOST_TEMPERATURE, description="divisor of the student's logits"
    )
    teacher_temperature: Ramp = _TEACHER_TEMPERATURE
    """divisor of the teacher's logits, as it changes with the step"""
    gram: Gram | None = None

    def _contradictions(self) -> Iterator[str]:
        for key, value in (("from", self.teacher_temperature.start), ("to", self.teacher_temperature.to)):
            if not _LEAST_TEMPERATURE <= value <= _MOST_TEMPERATURE:
                yield (
                    f"teacher_temperature.{key} {value:g}: expected {_LEAST_TEMPERATURE:g} to {_MOST_TEMPERATURE:g}; "
                    f"DINOv2 goes from 0.04 to 0.07"
                )

    def check(self, context: Context) -> None:
        super().check(context)
        data = context.data
        kinds = {view.name: side for view, side in data.training_views()}
        if unknown := [name for name in self.global_views or () if name not in kinds]:
            raise ValueError(f"objective.globals names {unknown[0]}; data.views are {', '.join(kinds)}")
        if other := next((name for name in self.global_views or () if kinds[name] != data.image_size), None):
            raise ValueError(
                f"objective.globals names {other}, of {kinds[other]} pixels; global views have data.image_size, "
                f"{data.image_size}"
            )
        with turned(f"objective.kind: {self.kind}", ValueError, ValueError):
            context.model.check_several_sizes()
        if self.ibot is not None and not sum(self.masked(context)):
            grid = self.patches(context).grid
            raise ValueError(
                f"objective.ibot masks no patch of {self.group} images of {grid} x {grid} patches; use higher shares "
                f"or a higher probability, or set objective.ibot null"
            )

    @property
    def together(self) -> int:
        return self.group

    @property
    def besides(self) -> tuple[str, ...]:
        return () if self.gram is None else (self.gram.average,)

    @property
    def reads(self) -> tuple[str, ...]:
        has_own = self.ibot is not None and self.ibot.prototypes is not None
        return ("dino.last.weight", *(("ibot.last.weight",) if has_own else ()))

    @property
    def courses(self) -> Mapping[str, Ramp]:
        found = {"teacher_temperature": self.teacher_temperature}
        return found if self.gram is None else found | {"gram.weight": self.gram.weight}

    def complaint(self, figures: Mapping[str, Any]) -> str | None:
        """As `Objective.complaint`: targets that tell no images apart."""
        entropy, most = figures["target_entropy"], math.log(self.prototypes)
        if entropy < 0.99 * most:
            return None
        return (
            f"the teacher gives all prototypes to every image (target_entropy {entropy:.3f} of at most {most:.3f}): "
            f"nothing has been learned; use a lower objective.teacher_temperature, a larger batch.global or a longer "
            f"warmup, and watch evaluation.knn"
        )

    def num_globals(self, context: Context) -> int:
        """The number of global views of an image."""
        kinds = context.data.training_views()
        return sum(view.count for (view, _), is_one in zip(kinds, self.are_global(context), strict=True) if is_one)

    def are_global(self, context: Context) -> list[bool]:
        """By kind of views, whether the teacher sees them."""
        data, names = context.data, self.global_views
        return [
            side == data.image_size if names is None else view.name in names for view, side in data.training_views()
        ]

    def masked(self, context: Context) -> list[int]:
        """The numbers of masked patches of the global views in a group, in no order; 0 for views without any."""
        assert self.ibot is not None
        crops = self.group * self.num_globals(context)
        return masked_counts(crops, self.patches(context).grid ** 2, self.ibot.probability, self.ibot.shares)

    def model_operations(self, context: Context, num_classes: int | None) -> Sequence[Operation]:
        """As `Objective.model_operations`: those of all views of an image, and of the teachers on the global ones."""
        taught = times(self.num_globals(context), context.model.operations(context.data.image_size, num_classes))
        taught = forward_only(taught, "teacher")
        return [*operations_on_views(context, num_classes), *taught * (1 + len(self.besides))]

    def operations(self, context: Context) -> Sequence[Operation]:
        """As `Objective.operations`: the heads, the teacher's targets, and what compares; a group's masked patches are
        its images' in equal parts.
        """
        group, seen, width = self.group, self.num_globals(context), context.model.representation_width
        masked = sum(self.masked(context)) if self.ibot is not None else 0
        student, teacher = {"dino": group * num_views(context)}, {"dino": group * seen}
        of_patches = "dino" if self.ibot is None or self.ibot.prototypes is None else "ibot"
        for rows in (student, teacher):
            rows[of_patches] = rows.get(of_patches, 0) + masked
        layers = [(width, self.hidden), (self.hidden, self.hidden), (self.hidden, self.bottleneck)]
        found: list[Operation] = []
        for head in student:
            prototypes = self._prototypes(head)
            for inputs, outputs in layers:
                found += _layer(head, (student[head], teacher[head]), group, inputs, outputs, bias=True)
            found += _layer(head, (student[head], 0), group, self.bottleneck, prototypes, bias=False)
        for head, rows_of_group in teacher.items():  # whose logits are computed anew each time
            macs = rows_of_group * self.bottleneck * self._prototypes(head) * (_SINKHORN_PASSES + 1) // group
            found += forward_only([product("targets", macs)], "teacher")
        compared = product("cross_entropy", num_views(context) * seen * self.prototypes)
        found.append(replace(compared, input_gradient=False))  # targets have no gradient
        if self.ibot is not None:
            found.append(parameters("mask", width))
        if self.koleo:
            cosines = product("koleo", seen * group * width)
            found += [replace(cosines, is_trained=False), replace(cosines, input_gradient=False)]
        if self.gram is not None:
            cosines = product("gram", seen * self.patches(context).grid ** 4 * width)
            found += [cosines, *forward_only([cosines], "teacher")]
        return found

    def _prototypes(self, head: str) -> int:
        own = self.ibot.prototypes if self.ibot is not None and head == "ibot" else None
        return own or self.prototypes

    def smoke_form(self) -> Self:
        small: dict[str, Any] = {"group": 2, "hidden": 16, "bottleneck": 8, "prototypes": 64}
        small |= {"teacher_temperature": self.teacher_temperature.model_copy(update={"over": None})}
        if self.gram is not None:
            weight = self.gram.weight.model_copy(update={"over": None})
            small["gram"] = self.gram.model_copy(update={"weight": weight})
        if self.ibot is not None and self.ibot.prototypes is not None:
            small["ibot"] = self.ibot.model_copy(update={"prototypes": 48})
        return self.model_copy(update=small)


def masked_counts(crops: int, patches: int, probability: float, shares: Sequence[float]) -> list[int]:
    """The number of masked patches of each of so many crops of `patches` patches, in no order."""
    masked, (low, high) = int(crops * probability + 1e-6), shares
    # The added part makes up for rounding: DINOv3's code computes the shares in single precision.
    counts = [int(patches * (low + (high - low) * (index + 1) / masked) + 1e-6) for index in range(masked)]
    return counts + [0] * (crops - masked)


def _layer(
    part: str, rows: tuple[int, int], group: int, inputs: int, outputs: int, *, bias: bool
) -> Iterator[Operation]:
    """A dense layer over so many of the student's and of the teacher's rows of a group."""
    of_student, of_teacher = (
        replace(dense(part, count, inputs, outputs, bias=bias), macs=macs, accounting_macs=macs)
        for count in rows
        for macs in (count * inputs * outputs // group,)
    )
    yield of_student
    if of_teacher.macs:
        yield from forward_only([of_teacher], "teacher")
