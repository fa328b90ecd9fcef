"""LeJEPA (Balestriero and LeCun, 2025; arXiv:2511.08544): views of an image agree, and projections are Gaussian.

Shape legend: G images of a group, V views of an image, D width, S directions, T knots.
"""

import math
from collections.abc import Sequence
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from vitscale import recipe as recipes
from vitscale.data.draws import Purpose, hashes, normal
from vitscale.objectives.joint_embedding import JointEmbedding
from vitscale.objectives.objective import Plan
from vitscale.recipe import Recipe

_KNOTS, _LAST_KNOT = 17, 3.0


def sigreg(projected_GD: Tensor, directions_DS: Tensor) -> Tensor:
    """How far projections are from a standard normal distribution: the Epps-Pulley statistic, the mean over directions.

    It is about 1 for samples of that distribution, and for others grows with their number.

    Args:
        projected_GD: fp32.
        directions_DS: columns of length 1.
    """
    knots_T = torch.linspace(0, _LAST_KNOT, _KNOTS, device=projected_GD.device)
    expected_T = torch.exp(-knots_T.square() / 2)
    weights_T = torch.full_like(knots_T, 2 * _LAST_KNOT / (_KNOTS - 1))  # both sides of an even function
    weights_T[0] = weights_T[-1] = _LAST_KNOT / (_KNOTS - 1)
    components_GS = projected_GD @ directions_DS
    # Knot by knot: all at once would take 17 times the memory.
    total = projected_GD.new_zeros(())
    for knot, expected, weight in zip(knots_T, expected_T, weights_T * expected_T, strict=True):
        cosine, sine = (knot * components_GS).cos().mean(dim=0), (knot * components_GS).sin().mean(dim=0)
        total = total + weight * ((cosine - expected).square() + sine.square()).mean()
    return len(projected_GD) * total


class LeJEPA(JointEmbedding):
    """Invariance of views, and SIGReg of the projections of each view."""

    shown: ClassVar[tuple[str, ...]] = ("invariance", "sigreg")

    @classmethod
    def of(cls, recipe: Recipe, num_classes: int) -> Self:
        objective = super().of(recipe, num_classes)
        settings = recipe.objective
        assert isinstance(settings, recipes.LeJEPA)
        objective._seed, objective._center = recipe.seed, settings.center_views(recipe.context)
        return objective

    settings: recipes.LeJEPA
    _seed: int
    _center: Sequence[int]
    _batch: int
    _drawn: Tensor | None

    def plan(self, keys: np.ndarray, step: int) -> Plan:
        """As `Objective.plan`: nothing by row; the directions are those of the planned batch."""
        self._batch, self._drawn = step, None
        return ()

    def directions(self, device: torch.device) -> Tensor:
        """Random directions of the batch, fp32 (D, S), the same on every rank and device."""
        if self._drawn is not None:
            return self._drawn
        shape = self.settings.outputs, self.settings.directions
        keys = hashes(math.prod(shape), self._seed, Purpose.DIRECTION, self._batch)
        drawn = normal(keys, Purpose.DIRECTION).reshape(shape)
        columns = (drawn / np.sqrt((drawn**2).sum(axis=0))).astype(np.float32)
        self._drawn = torch.from_numpy(columns).to(device)
        return self._drawn

    def compare(self, projected_GVD: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """As `JointEmbedding.compare`: the loss, the invariance of the image's views, and SIGReg of the group."""
        directions = self.directions(projected_GVD.device)
        center = projected_GVD[:, self._center].mean(dim=1, keepdim=True)
        invariance = (projected_GVD - center).square().mean(dim=(1, 2))
        of_views = torch.stack([sigreg(view, directions) for view in projected_GVD.unbind(dim=1)])
        gaussian = of_views.mean().expand_as(invariance)
        weight = self.settings.weight
        return (1 - weight) * invariance + weight * gaussian, invariance, gaussian
