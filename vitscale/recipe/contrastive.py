"""The `objective` block of contrastive learning, and what is known about it without torch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from vitscale.ground.operations import Operation, dense, parameters, product
from vitscale.recipe.objectives import Context, Objective


class Contrastive(Objective):
    """Contrastive learning: views of one image attract each other, and those of other images in their group repel.

    Groups are neighbouring slots of the global batch, or all of it, so that a loss does not depend on the number of
    ranks or on micro-batches. `nt_xent` is SimCLR's (Chen et al., 2020; arXiv:2002.05709); `sup_con` also has images of
    the same label attract each other (Khosla et al., 2020; arXiv:2004.11362, equation 2). The head is a dense layer,
    layer normalisation, ReLU and a dense layer; published heads have batch normalisation, whose statistics depend on
    ranks.
    """

    implementation: ClassVar[str] = "vitscale.objectives.contrastive:Contrastive"
    has_classes: ClassVar[bool] = False
    compares_views: ClassVar[bool] = True
    own: ClassVar[tuple[str, ...]] = tuple(
        f"projection.{layer}.{kind}" for layer in (0, 1, 3) for kind in ("weight", "bias")
    )

    kind: Literal["contrastive"] = Field(description="chooses this objective")
    loss: Literal["nt_xent", "sup_con"] = "nt_xent"
    """what attracts: nt_xent: views of the same image; sup_con: also images of the same label"""
    group: Annotated[int, Field(ge=2, le=2**20)] | Literal["global"] = "global"
    """number of images that are compared with one another; batch.global and micro-batches are multiples of it. global:
    all of the global batch, by a forward pass over it before the passes that learn"""
    temperature: float = Field(0.1, gt=0, le=100, description="divisor of the cosines; SimCLR's is 0.1, CIFAR's 0.5")
    hidden: int = Field(2048, ge=1, le=2**20, description="width of the projection head's hidden layer")
    outputs: int = Field(128, ge=1, le=2**20, description="width of what is compared")

    def check(self, context: Context) -> None:
        data = context.data
        total = sum(view.count for view in data.views)
        if total < 2 and (self.loss == "nt_xent" or not data.views):
            raise ValueError(
                "data.views: objective.kind: contrastive compares several views of an image, and there are none; set "
                "for example data.views: [{name: global, count: 2}]"
            )
        if other := next((view for view, side in data.training_views() if side != data.image_size), None):
            raise ValueError(
                f"data.views: {other.name} has {other.size} pixels, and objective.kind: contrastive compares views of "
                f"one size; leave its size out"
            )
        if self.group != "global" and context.batch.global_size % self.group:
            near = max(size for size in range(1, self.group) if context.batch.global_size % size == 0)
            raise ValueError(
                f"objective.group {self.group} does not divide batch.global {context.batch.global_size}; use a number "
                f"that does, such as {near}"
            )
        if data.bad_samples == "mask":
            raise ValueError(
                "data.bad_samples: mask leaves a group without one of its images, and objective.kind: contrastive "
                "compares all of them; use substitute"
            )
        for key in ("num_classes", "head_bias"):
            if getattr(context.model, key) is not None:
                raise ValueError(f"model.{key}: with objective.kind: contrastive the model has no head; set it null")

    @property
    def together(self) -> int:
        """As `Objective.together`: a group, unless that is the whole batch."""
        return 1 if self.group == "global" else self.group

    def model_operations(self, context: Context, num_classes: int | None) -> Sequence[Operation]:
        """As `Objective.model_operations`: those of all views of an image, and once more where a pass prepares them."""
        of_view, views = super().model_operations(context, num_classes), _views(context)
        learned = [
            replace(each, macs=views * each.macs, accounting_macs=views * each.accounting_macs) for each in of_view
        ]
        return [*learned, *(self._prepared(learned) if self.group == "global" else ())]

    def _prepared(self, operations: Sequence[Operation]) -> list[Operation]:
        return [replace(each, part="prepared", params=0, is_trained=False, recomputed_in=None) for each in operations]

    def operations(self, context: Context) -> Sequence[Operation]:
        """As `Objective.operations`: the projection head, and the products of all views in a group."""
        views, width = _views(context), context.model.representation_width
        projection = [
            dense("projection", views, width, self.hidden),
            parameters("projection", 2 * self.hidden),
            dense("projection", views, self.hidden, self.outputs),
        ]
        group = context.batch.global_size if self.group == "global" else self.group
        similarities = product("similarities", views * views * group * self.outputs)
        return [*projection, similarities, *(self._prepared(projection) if self.group == "global" else ())]

    def smoke_form(self) -> "Contrastive":
        """As `Objective.smoke_form`: with two images a group and a small head."""
        group = "global" if self.group == "global" else 2
        return self.model_copy(update={"group": group, "hidden": 16, "outputs": 8})


def _views(context: Context) -> int:
    return sum(view.count for view, _ in context.data.training_views())
