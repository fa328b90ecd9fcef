"""The objectives of training, as a recipe says them: one block for each kind, chosen by `kind`.

A block holds what is known without torch; `implementation` names the class that computes it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from vitscale.ground.block import Block, has_default
from vitscale.ground.errors import turned
from vitscale.ground.operations import Operation
from vitscale.ground.storage import is_url
from vitscale.recipe.data import Batch, Data, Normalise
from vitscale.recipe.durations import Ramp
from vitscale.recipe.evaluation import Evaluation
from vitscale.recipe.families import Model, ModelBlock
from vitscale.recipe.shares import by_largest_remainder

DEFAULT_KIND = "classification"


def forward_only(operations: Iterable[Operation], part: str) -> list[Operation]:
    """Operations of a pass without gradients, by parameters that are counted elsewhere or are not the model's."""
    return [replace(each, part=part, params=0, is_trained=False, recomputed_in=None) for each in operations]


class Mixing(Block):
    """Mixup (Zhang et al., 2018) and CutMix (Yun et al., 2019): slots 2k and 2k + 1 of a global batch are mixed.

    Images and targets are mixed with a weight drawn from Beta(alpha, alpha): mixup blends all pixels, CutMix replaces a
    box of that share of the area. A box that extends beyond the border is cut, and its weight is that of the remaining
    area.
    """

    _later_keys: ClassVar[tuple[str, ...]] = ("cutmix_sides",)

    mixup: float = Field(0.0, ge=0, le=1000, description="alpha of mixup; 0: no mixup")
    cutmix: float = Field(0.0, ge=0, le=1000, description="alpha of CutMix; 0: no CutMix")
    cutmix_sides: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=2, max_length=2)] | None = None
    """shortest and longest side of the CutMix box as shares of the image's, instead of an area drawn by alpha, which
    must be 1: height and width are drawn independently, and the box lies within the image (timm's cutmix_minmax)"""
    probability: float = Field(1.0, gt=0, le=1, description="probability of mixing")
    cutmix_share: float = Field(0.5, gt=0, lt=1, description="if both are on: probability of CutMix when mixing")
    per: Literal["batch", "pair", "element"] = "batch"
    """unit of a draw: a global batch, a pair, or each image (timm's batch, pair, elem)"""

    def _contradictions(self) -> Iterator[str]:
        if self.mixup == self.cutmix == 0:
            yield "give mixup, cutmix or both an alpha above 0, e.g. {mixup: 0.8, cutmix: 1.0}"
        if not has_default(self, "cutmix_share") and not (self.mixup and self.cutmix):
            yield "cutmix_share belongs to mixup and cutmix together, and one of them is 0"
        if self.cutmix_sides is not None:
            if self.cutmix != 1:
                yield "cutmix_sides goes with cutmix: 1, whose alpha plays no part then"
            low, high = self.cutmix_sides
            if low >= high:
                yield f"cutmix_sides must be [low, high] with 0 <= low < high <= 1, not {[low, high]}"

    def sides(self, image_size: int) -> tuple[int, int] | None:
        """The range [low, high) of a box's sides in pixels; None if an area is drawn instead.

        Raises `ValueError` if the range is empty.
        """
        if self.cutmix_sides is None:
            return None
        low, high = (int(image_size * part) for part in self.cutmix_sides)
        if low == high:
            raise ValueError(
                f"objective.mixing.cutmix_sides {self.cutmix_sides}: of {image_size} pixels both are {low}; set them "
                f"farther apart"
            )
        return low, high


@dataclass(frozen=True)
class Context:
    """The blocks of a recipe that an objective's block may look at; none of them knows of objectives."""

    model: Model
    data: Data
    batch: Batch
    evaluation: Evaluation


class Objective(Block):
    """The base of every `objective` block; its keys are the fields of one kind."""

    implementation: ClassVar[str]  # `module:class` of the `vitscale.objectives.Objective` that computes it
    has_classes: ClassVar[bool]  # whether the model has an output for each class of the training data
    needs_whole_patches: ClassVar[bool] = False  # whether patches have to cover the image
    # The parameters that are the objective's, and no part of the model that is exported: names, and where they end in a
    # dot, prefixes (`decoder.`).
    own: ClassVar[tuple[str, ...]] = ()
    compares_views: ClassVar[bool] = False  # whether it looks at all of `data.views`

    kind: str = Field(description="chooses this objective")

    def owns(self, parameter: str) -> bool:
        """Whether the parameter that checkpoints call by this name is in `own`."""
        return any(parameter.startswith(name) if name.endswith(".") else parameter == name for name in self.own)

    def axes(self, parameter: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """As `Model.axes`, for a parameter that the objective owns."""
        return shape

    def check(self, context: Context) -> None:
        """Raise `ValueError` if the context does not fit this objective."""

    def operations(self, context: Context) -> Sequence[Operation]:
        """The operations on one image besides the model's: heads and decoders, with their parameters."""
        return ()

    def model_operations(self, context: Context, num_classes: int | None) -> Sequence[Operation]:
        """The model's operations on one image in training, with their parameters."""
        return context.model.operations(context.data.image_size, num_classes)

    def complaint(self, figures: Mapping[str, Any]) -> str | None:
        """What a line of `metrics.jsonl` says of a run that learns nothing, a tenth of its steps done; None if nothing.

        Training warns of it once.
        """
        return None

    def smoke_form(self) -> Self:
        """A form of it that runs in seconds on any machine; by default itself."""
        return self

    def kept(self, context: Context) -> int | None:
        """The number of patches of each image that the model sees in training, rounded; None for all."""
        return None

    @property
    def together(self) -> int:
        """The number of slots of the global batch computed together: micro-batches are multiples of it."""
        return 1

    def partner(self, slot: int) -> int | None:
        """The slot of the global batch with whose sample that of `slot` is mixed; None if it is not."""
        return None

    @property
    def prepares(self) -> Literal["weights", "average"] | None:
        """What a pass without gradients over the whole global batch computes with before the losses: the weights, or in
        their place the average named `ema`, in evaluation mode; None for no such pass.
        """
        return None

    @property
    def besides(self) -> tuple[str, ...]:
        """Names of other averages with each of which a pass like that of `prepares` follows, once it has been made."""
        return ()

    @property
    def reads(self) -> tuple[str, ...]:
        """The parameters, as checkpoints call them, that `agree` gets whole after that pass."""
        return ()

    @property
    def courses(self) -> Mapping[str, Ramp]:
        """What of the losses changes with the step, such as temperatures: the torch objective's `scalars`."""
        return {}

    @property
    def learns_from(self) -> "Teacher | None":
        """The model beside its own whose outputs it learns from, which never changes."""
        return None


class Classification(Objective):
    """Cross-entropy over the classes; `on` and `off` are the target values of the true and the other classes.

    `label_smoothing` s sets them as torch and timm do, with K classes: 1 - s + s / K and s / K.
    """

    implementation: ClassVar[str] = "vitscale.objectives.classification:Classification"
    has_classes: ClassVar[bool] = True

    kind: Literal["classification"] = Field("classification", description="chooses this objective")
    loss: Literal["sigmoid", "softmax", "bce"] = "sigmoid"
    """sigmoid: binary cross-entropy summed over classes, as the paper pre-trains; softmax: one class per image; bce: as
    sigmoid, but the mean over classes, as in timm and DeiT-III"""
    on: float = Field(1.0, ge=0, le=1, description="target of the true class")
    off: float = Field(0.0, ge=0, le=1, description="target of the others; above 0 with on below 1: label smoothing")
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """share of the target spread evenly over all classes, instead of on and off"""
    threshold: float | None = Field(None, ge=0, lt=1)
    """for sigmoid and bce: targets above it become 1, all others 0, after smoothing and mixing (timm's
    bce_target_thresh)"""
    mixing: Mixing | None = None
    keep: float = Field(1.0, gt=0, le=1)
    """share of each image's patches that a Transformer sees in training, drawn per sample; class token and registers
    are kept (PatchDropout)"""

    def _contradictions(self) -> Iterator[str]:
        if self.on <= self.off:
            yield f"on ({self.on}) must be greater than off ({self.off})"
        if self.label_smoothing and (self.on, self.off) != (1.0, 0.0):
            yield "label_smoothing says what on and off say; give one of the two"
        if self.threshold is not None:
            if self.loss == "softmax":
                yield "threshold belongs to loss: sigmoid and bce, and loss is softmax"
            if not self.off <= self.threshold < self.on:
                yield f"threshold {self.threshold}: expected at least off ({self.off}) and less than on ({self.on})"

    def check(self, context: Context) -> None:
        if self.keep < 1:
            if context.model.patches(context.data.image_size) is None:
                raise ValueError("objective.keep needs a model that cuts the picture itself into patches")
            if self.kept(context) == 0:
                raise ValueError(f"objective.keep {self.keep:g}: no patch of an image would be kept")
            with turned(f"objective.keep {self.keep:g}", ValueError, ValueError):
                self.model_operations(context, None)
        if self.mixing is None:
            return
        self.mixing.sides(context.data.image_size)
        if context.batch.global_size % 2:
            raise ValueError(
                f"batch.global {context.batch.global_size}: objective.mixing mixes images in pairs; use an even number"
            )
        if context.data.bad_samples == "mask":
            raise ValueError(
                "data.bad_samples: mask leaves the partner of a damaged image without one to be mixed with, and "
                "objective.mixing is on; use substitute"
            )

    def kept(self, context: Context) -> int | None:
        patches = context.model.patches(context.data.image_size)
        if self.keep == 1 or patches is None:
            return None
        return by_largest_remainder(patches.grid**2, (self.keep, 1 - self.keep))[0]

    def model_operations(self, context: Context, num_classes: int | None) -> Sequence[Operation]:
        """As `Objective.model_operations`: only on the patches that are kept."""
        kept = self.kept(context)
        if kept is None:
            return super().model_operations(context, num_classes)
        return context.model.operations_of_part(context.data.image_size, num_classes, kept)

    @property
    def together(self) -> int:
        return 1 if self.mixing is None else 2

    def partner(self, slot: int) -> int | None:
        return None if self.mixing is None else slot ^ 1


class Teacher(Block):
    """The teacher model: never updated, and not part of checkpoints or exports."""

    key: ClassVar[str] = "objective.teacher"  # where a recipe has it

    # `from` is a Python keyword, hence the alias.
    source: Annotated[str | None, Field(alias="from", min_length=1)] = None
    """its weights, with their head: a run's directory, the folder of one checkpoint, or weights in any format that
    `vitscale export` reads; default: initial values, for trials such as smoke forms"""
    step: int | None = Field(None, ge=1, lt=2**53, description="step of the run's checkpoint; default: its newest")
    model: ModelBlock = Field(description="its architecture, as `model`")
    normalise: Normalise | None = None
    """normalisation of its input; default: as data.normalise, which is that of the model itself"""

    def _contradictions(self) -> Iterator[str]:
        if self.source is not None and is_url(self.source):
            yield f"from {self.source!r}: expected a path; fetch the weights first"
        if self.step is not None and self.source is None:
            yield "step is of the run that from names, and there is no from"


class Distillation(Classification):
    """Classification, plus a teacher: the distillation token's head learns the teacher's most probable class.

    The loss is the mean of the class token's loss, on labels, and of the cross-entropy of the other head (Touvron et
    al., 2021; hard-label distillation). The teacher sees the same pixels, mixed too.
    """

    implementation: ClassVar[str] = "vitscale.objectives.distillation:Distillation"
    prepares: ClassVar[Literal["weights"]] = "weights"

    kind: Literal["distillation"] = Field(description="chooses this objective")  # type: ignore[assignment]
    loss: Literal["softmax"] = "softmax"
    """loss of the class token's head; the other head's is also softmax"""
    teacher: Teacher

    @property
    def learns_from(self) -> Teacher:
        return self.teacher

    def check(self, context: Context) -> None:
        super().check(context)
        if not getattr(context.model.shape(), "distilled", False):
            raise ValueError(
                "objective.kind: distillation needs a model with a distillation token: set model.distilled true"
            )
        with turned(f"objective.teacher.model and data.image_size {context.data.image_size}", ValueError, ValueError):
            self.teacher.model.check_image_size(context.data.image_size)

    def model_operations(self, context: Context, num_classes: int | None) -> Sequence[Operation]:
        """As `Objective.model_operations`, and the teacher's forward pass, whose parameters are not the model's."""
        of_teacher = self.teacher.model.operations(context.data.image_size, num_classes)
        return [*super().model_operations(context, num_classes), *forward_only(of_teacher, "teacher")]

    def smoke_form(self) -> Self:
        """As `Objective.smoke_form`: with a small teacher that has initial weights."""
        small, _ = self.teacher.model.small()
        block = self.teacher.model
        small_model = type(block).model_validate(block.model_dump(by_alias=True) | small | {"num_classes": None})
        return self.model_copy(update={"teacher": Teacher(model=small_model, normalise=self.teacher.normalise)})


def with_kind(objective: Any) -> Any:
    """Plain data of an `objective` block with its kind added: classification if it names none."""
    return {"kind": DEFAULT_KIND} | objective if isinstance(objective, dict) else objective
