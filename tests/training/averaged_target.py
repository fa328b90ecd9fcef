"""An objective of another package whose targets are the features of the average, for tests of a first pass."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from vitscale.ground.ranks import Sums
from vitscale.models import Initialiser, build_model, normal
from vitscale.objectives import Agreed, Losses, Objective, Plan, Rows
from vitscale.recipe import Objective as Block
from vitscale.recipe import Ramp, Recipe

KIND = "averaged_target.AveragedTarget"


class AveragedTarget(Block):
    """A guess of what the average of the guess says of the average's features, centred over the global batch."""

    implementation: ClassVar[str] = "averaged_target:Guess"
    has_classes: ClassVar[bool] = False
    own: ClassVar[tuple[str, ...]] = ("guess.weight",)

    by: Literal["weights", "average"] = "average"
    pull: Ramp = Ramp.model_validate({"from": 1.0, "to": 2.0})

    @property
    def prepares(self) -> Literal["weights", "average"]:
        return self.by

    @property
    def reads(self) -> tuple[str, ...]:
        return ("guess.weight",)

    @property
    def courses(self) -> Mapping[str, Ramp]:
        return {"pull": self.pull}


class Guess(Objective):
    """Rows come two samples at a time, what all share has no rows."""

    def __init__(self, backbone: Any, width: int) -> None:
        super().__init__(backbone)
        self.guess = nn.Linear(width, 5, bias=False)

    @classmethod
    def of(cls, recipe: Recipe, num_classes: int) -> Self:
        return cls(build_model(recipe, None), recipe.model.representation_width)

    def features(self, views: Sequence[Tensor]) -> Tensor:
        return self.backbone(views[0][:, 0]).pooled

    def prepare(self, views: Sequence[Tensor], plan: Plan) -> Rows:
        features = torch.tanh(self.features(views).float())
        return features.unflatten(0, (-1, 2)), features.new_full((len(features),), float(self.training))

    def agree(self, rows: Rows, labels: Tensor, sums: Sums, weights: Mapping[str, Tensor]) -> Agreed:
        features, is_training = rows
        features = features.flatten(0, 1)
        count = sums.total(torch.ones_like(features[:, 0]))
        mean = sums.total(part for part in features.split(3)) / count
        centred = (features - mean) / sums.greatest(features.abs().amax(dim=0))
        return Agreed((centred.unflatten(0, (-1, 2)), is_training), (weights["guess.weight"],))

    def losses(self, views: Sequence[Tensor], labels: Tensor, plan: Plan) -> Losses:
        centred, is_training, weight = plan
        target = centred.flatten(0, 1) @ weight.float().T
        guess = self.guess(self.features(views)).float()
        return Losses(
            (guess - target).square().sum(dim=1) * self.scalars["pull"],
            {"target": target.sum(dim=1), "prepared_training": is_training},
        )

    def initialiser(self, name: str) -> Initialiser:
        return normal(0.2) if name == "guess.weight" else super().initialiser(name)
