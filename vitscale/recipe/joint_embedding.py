"""The `objective` blocks that compare projections of several views, and what is known about them without torch."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from vitscale.ground.operations import Operation, dense, parameters, product
from vitscale.recipe.headless import OfViews, num_views, operations_on_views
from vitscale.recipe.objectives import Context, forward_only

_LEAST = 0.05  # of a spread, or of a difference of cosines, that means something
_MOST_COMPONENTS = 2**26  # of all directions


class JointEmbedding(OfViews):
    """The base of objectives that compare the projections of all views of the images in a group.

    Groups are neighbouring slots of the global batch, or all of it, so that a loss does not depend on the number of
    ranks or on micro-batches. The projection is a dense layer, layer normalisation, ReLU and a dense layer; published
    ones have batch normalisation, whose statistics depend on ranks.
    """

    other_group: ClassVar[str] = "global"
    own: ClassVar[tuple[str, ...]] = tuple(
        f"projection.{layer}.{kind}" for layer in (0, 1, 3) for kind in ("weight", "bias")
    )

    group: Annotated[int, Field(ge=2, le=2**20)] | Literal["global"] = "global"
    """number of images that are compared with one another; batch.global and micro-batches are multiples of it. global:
    all of the global batch, by a forward pass over it before the passes that learn"""
    hidden: int = Field(2048, ge=1, le=2**20, description="width of the projection's hidden layer")
    outputs: int = Field(128, ge=1, le=2**20, description="width of what is compared")

    def check(self, context: Context) -> None:
        super().check(context)
        width = context.model.representation_width  # families that do not say it are refused
        assert width > 0, width

    @property
    def together(self) -> int:
        return 1 if self.group == "global" else self.group

    @property
    def prepares(self) -> Literal["weights", "average"] | None:
        return "weights" if self.group == "global" else None

    def complaint(self, figures: Mapping[str, Any]) -> str | None:
        """As `Objective.complaint`: projections that are all the same, or not more alike for being of one image."""
        spread, cosine = figures.get("spread"), figures.get("view_cosine")
        if spread is None:
            return None
        if spread < _LEAST:
            return (
                f"the projections of all images are nearly the same (spread {spread:.3f}, expected towards 1): the "
                f"model has collapsed; use a lower optimizer.lr or a longer warmup, and watch evaluation.knn"
            )
        if cosine is not None and cosine - (1 - spread**2) < _LEAST:
            return (
                f"views of one image are hardly more alike than those of any two (view_cosine {cosine:.3f}, of all "
                f"{1 - spread**2:.3f}): nothing has been learned; use weaker crops or another optimizer.lr, and watch "
                f"evaluation.knn"
            )
        return None

    def model_operations(self, context: Context, num_classes: int | None) -> Sequence[Operation]:
        return self._and_prepared(operations_on_views(context, num_classes))

    def operations(self, context: Context) -> Sequence[Operation]:
        views, width = num_views(context), context.model.representation_width
        projection = [
            dense("projection", views, width, self.hidden),
            parameters("projection", 2 * self.hidden),
            dense("projection", views, self.hidden, self.outputs),
        ]
        return [*self._and_prepared(projection), self.comparison(context)]

    def comparison(self, context: Context) -> Operation:
        """The products that compare an image's projections with those of its group."""
        raise NotImplementedError

    def _and_prepared(self, operations: list[Operation]) -> list[Operation]:
        return operations if self.prepares is None else [*operations, *forward_only(operations, "prepared")]

    def smoke_form(self) -> Self:
        """As `Objective.smoke_form`: with two images a group, if two divide it, and a small projection."""
        is_even = self.group != "global" and self.group % 2 == 0
        small: dict[str, Any] = {"group": 2 if is_even else "global", "hidden": 16, "outputs": 8}
        return self.model_copy(update=small)


class Contrastive(JointEmbedding):
    """Contrastive learning: views of one image attract each other, and those of other images in their group repel.

    `nt_xent` is SimCLR's (Chen et al., 2020; arXiv:2002.05709); `sup_con` also has images of the same label attract
    each other (Khosla et al., 2020; arXiv:2004.11362, equation 2).
    """

    implementation: ClassVar[str] = "vitscale.objectives.contrastive:Contrastive"

    kind: Literal["contrastive"] = Field(description="chooses this objective")
    loss: Literal["nt_xent", "sup_con"] = "nt_xent"
    """what attracts: nt_xent: views of the same image; sup_con: also images of the same label"""
    temperature: float = Field(0.1, ge=1e-3, le=100, description="divisor of the cosines; SimCLR's is 0.1, CIFAR's 0.5")

    @property
    def needed_views(self) -> int:
        """As `OfViews.needed_views`: one where labels say what attracts."""
        return 1 if self.loss == "sup_con" else 2

    def comparison(self, context: Context) -> Operation:
        """As `JointEmbedding.comparison`: the cosines of all views of a group."""
        group = context.batch.global_size if self.group == "global" else self.group
        return product("similarities", num_views(context) ** 2 * group * self.outputs)


class LeJEPA(JointEmbedding):
    """LeJEPA (Balestriero and LeCun, 2025; arXiv:2511.08544): views of an image agree, and projections are Gaussian.

    The loss is (1 - weight) times the mean square of each view's distance from the mean of the `center` views, plus
    weight times SIGReg: how far the group's projections are, in random directions, from an isotropic Gaussian. SIGReg
    of projections that are not Gaussian grows with the group, so `weight` belongs to a size of it.
    """

    implementation: ClassVar[str] = "vitscale.objectives.lejepa:LeJEPA"

    kind: Literal["lejepa"] = Field(description="chooses this objective")
    weight: float = Field(0.05, gt=0, lt=1, description="of SIGReg; the authors use 0.01 to 0.1")
    directions: int = Field(1024, ge=1, le=2**20, description="random directions of SIGReg, drawn anew for each update")
    outputs: int = Field(64, ge=2, le=2**20, description="width of what is compared")
    center: Annotated[list[str], Field(min_length=1)] | None = None
    """names of the views whose mean is the center; default: all"""

    def check(self, context: Context) -> None:
        super().check(context)
        names = [view.name for view in context.data.views]
        if self.directions * self.outputs > _MOST_COMPONENTS:
            raise ValueError(
                f"objective.directions {self.directions} of {self.outputs} outputs: expected at most "
                f"{_MOST_COMPONENTS:,} numbers"
            )
        if unknown := [name for name in self.center or () if name not in names]:
            raise ValueError(f"objective.center names {unknown[0]}; data.views are {', '.join(names)}")

    def center_views(self, context: Context) -> list[int]:
        """The numbers of the views that belong to the center."""
        names = [view.name for view, _ in context.data.training_views() for _ in range(view.count)]
        return [number for number, name in enumerate(names) if self.center is None or name in self.center]

    def comparison(self, context: Context) -> Operation:
        """As `JointEmbedding.comparison`: the components in all directions."""
        return product("directions", num_views(context) * self.outputs * self.directions)

    def smoke_form(self) -> Self:
        return super().smoke_form().model_copy(update={"directions": 16})
