"""What the `objective` blocks share whose model has no head: of views, and of a decoder beside the model."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Self

from vitscale.ground.operations import Operation, block_of, dense, parameters
from vitscale.recipe.families import Patches, ViTShape
from vitscale.recipe.families.vit import axes_by_head
from vitscale.recipe.families.vit_shape import block_operations, norm_parameters
from vitscale.recipe.objectives import Context, Objective

_MLP_RATIO = 4  # of a decoder's width, as in the code of MAE and of I-JEPA


class Headless(Objective):
    """The base of objectives whose model has no head."""

    has_classes: ClassVar[bool] = False

    def check(self, context: Context) -> None:
        for key in ("num_classes", "head_bias"):
            if getattr(context.model, key) is not None:
                raise ValueError(f"model.{key}: with objective.kind: {self.kind} the model has no head; set it null")
        size, patches = context.data.image_size, context.model.patches(context.data.image_size)
        if self.needs_whole_patches and patches is not None and (unseen := size % patches.size):
            fits = [str(side) for side in (size - unseen, size - unseen + patches.size) if side]
            raise ValueError(
                f"data.image_size {size}: objective.kind: {self.kind} needs whole patches, of {patches.size} pixels; "
                f"use {' or '.join(fits)}"
            )

    def patches(self, context: Context) -> Patches:
        """How the model cuts images into patches. Raises `ValueError` for one that does not."""
        patches = context.model.patches(context.data.image_size)
        if patches is None:
            raise ValueError(f"objective.kind: {self.kind} needs a model that cuts the picture itself into patches")
        return patches


class OfViews(Headless):
    """The base of objectives that compare views of the images in a group: neighbouring slots of the global batch."""

    compares_views: ClassVar[bool] = True
    other_group: ClassVar[str] = "another batch.global"  # what is advised besides a divisor of batch.global

    @property
    def needed_views(self) -> int:
        """The fewest views of an image that it can compare."""
        return 2

    def check(self, context: Context) -> None:
        super().check(context)
        data, kind, whole = context.data, f"objective.kind: {self.kind}", context.batch.global_size
        if not data.views or num_views(context) < self.needed_views:
            raise ValueError(
                f"data.views: {kind} compares several views of an image, and there are fewer; set for example "
                f"data.views: [{{name: global, count: 2}}, {{name: local, count: 8, size: 96}}]"
            )
        check_view_sizes(context)
        if data.repeats > 1:
            raise ValueError(
                f"data.repeats {data.repeats}: {kind} takes the repeats of an image for other images; give data.views "
                f"a higher count instead"
            )
        if data.bad_samples == "mask":
            raise ValueError(
                f"data.bad_samples: mask leaves a group without one of its images, and {kind} compares all of them; "
                f"use substitute"
            )
        if whole % self.together:
            sizes = [str(size) for size in range(2, self.together) if whole % size == 0]
            fits = ", or ".join([*sizes[-1:], self.other_group])
            raise ValueError(f"objective.group {self.together} does not divide batch.global {whole}; use {fits}")


def num_views(context: Context) -> int:
    """The number of views of an image, of all kinds."""
    return sum(view.count for view, _ in context.data.training_views())


def check_view_sizes(context: Context) -> None:
    """Raise `ValueError` if views have several sizes, and the model does not take them in one call."""
    model, size = context.model, context.data.image_size
    others = [(view.name, side) for view, side in context.data.training_views() if side != size]
    for name, side in others:
        where = f"data.views: {name} has {side} pixels, and others {size}"
        try:
            model.check_several_sizes()
        except ValueError as error:
            raise ValueError(f"{where}: {error}; leave its size out") from None
        patches = model.patches(side)
        if patches is not None and side % patches.size:
            near = max(side // patches.size, 1) * patches.size
            raise ValueError(f"{where}: expected a multiple of the patch size, {patches.size}; use {near}")


def times(count: int, operations: Iterable[Operation]) -> list[Operation]:
    """Operations on so many images instead of one."""
    return [replace(each, macs=count * each.macs, accounting_macs=count * each.accounting_macs) for each in operations]


def operations_on_views(context: Context, num_classes: int | None) -> list[Operation]:
    """The model's operations on all views of an image, with their parameters."""
    counts: Counter[int] = Counter()
    for view, side in context.data.training_views():
        counts[side] += view.count
    return [
        each if side == context.data.image_size else replace(each, params=0)  # all have the same weights
        for side, count in counts.items()
        for each in times(count, context.model.operations(side, num_classes))
    ]


class WithDecoder(Headless):
    """The base of objectives whose model sees a part of the patches, and a decoder beside it predicts others."""

    needs_whole_patches: ClassVar[bool] = True
    part: ClassVar[str]  # the decoder's name, with which its keys begin: `part`_width, _depth and _heads

    def _contradictions(self) -> Iterator[str]:
        width, heads, unit = self.decoder_shape.width, self.decoder_shape.num_heads, math.lcm(4, self._of_part("heads"))
        if width % unit:
            yield (
                f"{self.part}_width {width}: expected a multiple of 4, for sines and cosines by row and by column, and "
                f"of {self.part}_heads, {heads}; use for example {max(width // unit, 1) * unit}"
            )

    def check(self, context: Context) -> None:
        self.patches(context)
        super().check(context)
        if context.model.pool_or_default() == "map":
            raise ValueError(f"model.pool map: with objective.kind: {self.kind} nothing trains it; use cls or mean")
        self.check_kept(context)
        try:
            self.model_operations(context, None)
        except ValueError as error:
            raise ValueError(f"objective.kind: {self.kind}: {error}") from None

    def check_kept(self, context: Context) -> None:
        """Raise `ValueError` if the model would see no patches, or there would be none to predict."""
        raise NotImplementedError

    def _of_part(self, key: str) -> int:
        value: int = getattr(self, f"{self.part}_{key}")
        return value

    @property
    def decoder_shape(self) -> ViTShape:
        """The dimensions of the decoder's blocks, which are those of its authors."""
        width, depth, heads = (self._of_part(key) for key in ("width", "depth", "heads"))
        return ViTShape(1, width, depth, _MLP_RATIO * width, heads, mlp="exact_gelu")

    def axes(self, parameter: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return axes_by_head(self.decoder_shape, parameter, shape)

    def kept(self, context: Context) -> int:
        raise NotImplementedError

    def model_operations(self, context: Context, num_classes: int | None) -> Sequence[Operation]:
        """As `Objective.model_operations`: only on the patches that the model sees."""
        return context.model.operations_of_part(context.data.image_size, num_classes, self.kept(context))

    def decoder_operations(self, context: Context, predicted: int, outputs: int, sequences: int = 1) -> list[Operation]:
        """The decoder's operations on one image: it predicts so many patches in each of its sequences."""
        patches, shape = self.patches(context), self.decoder_shape
        tokens = context.model.num_tokens(context.data.image_size)
        assert tokens is not None, "a model with patches has tokens"
        seen = tokens - patches.grid**2 + self.kept(context)
        block = block_operations(shape, sequences=sequences, T=seen + predicted, relative=False)
        operations = [dense("", sequences * seen, patches.width, shape.width), parameters("", shape.width)]
        for index in range(shape.depth):
            operations += block_of(block, index, needs_output=False)
        operations.append(parameters("", norm_parameters(shape, shape.width)))
        operations.append(dense("", sequences * predicted, shape.width, outputs))
        return [replace(operation, part=self.part) for operation in operations]

    def smoke_form(self) -> Self:
        small = {"width": 32, "depth": 1, "heads": 2}
        return self.model_copy(update={f"{self.part}_{key}": value for key, value in small.items()})
