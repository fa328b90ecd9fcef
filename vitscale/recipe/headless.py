"""What the `objective` blocks share whose model has no head, and those among them that compare views."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

from vitscale.ground.operations import Operation
from vitscale.recipe.families import Patches
from vitscale.recipe.objectives import Context, Objective


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
