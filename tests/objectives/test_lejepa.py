"""LeJEPA's statistic against its formula in double precision and measured values, and its loss in parts."""

import math

import pytest
import torch
from objectives.updates import assert_near, update
from small_recipes import SMALL, small_recipe, with_initial_values

from vitscale.objectives import build_objective
from vitscale.objectives.lejepa import sigreg

OBJECTIVE = {"kind": "lejepa", "hidden": 24, "outputs": 6, "directions": 32, "center": ["global"]}
MODEL = SMALL | {"patch_size": 16, "width": 32, "depth": 1, "mlp_dim": 48, "head": "linear"}
VIEWS = [{"name": "global", "count": 2}, {"name": "local"}]


def directions(width, count):
    drawn = torch.randn(width, count, generator=torch.Generator().manual_seed(1))
    return drawn / drawn.norm(dim=0)


def by_the_formula(rows, to):
    """n times the integral over [-3, 3] of the squared error of the characteristic function, by trapezoids, weighted by
    the normal one."""
    total = 0.0
    for direction in to.double().T:
        component = rows.double() @ direction
        for knot in range(-16, 17):
            t = knot * 3 / 16
            normal, width = math.exp(-t * t / 2), 3 / 16 * (0.5 if abs(knot) == 16 else 1)
            error = (torch.exp(1j * t * component).mean() - normal).abs() ** 2
            total += width * normal * float(error)
    return len(rows) * total / to.shape[1]


def test_the_statistic_is_that_of_the_formula():
    rows = 0.7 * torch.randn(40, 5, generator=torch.Generator().manual_seed(0)) + 0.2
    assert sigreg(rows, directions(5, 7)).item() == pytest.approx(by_the_formula(rows, directions(5, 7)), rel=1e-5)


@pytest.mark.parametrize(("count", "collapsed", "narrow"), [(32, 12.9, 5.3), (512, 206, 78), (2048, 823, 310)])
def test_it_has_the_values_measured_of_the_authors_code(count, collapsed, narrow):
    """Collapsed to a point, with a standard deviation of 1 / 2, and of the right distribution."""
    rows, to = torch.randn(count, 16, generator=torch.Generator().manual_seed(0)), directions(16, 256)
    assert sigreg(torch.zeros(count, 16), to).item() == pytest.approx(collapsed, rel=5e-3)
    assert sigreg(rows / 2, to).item() == pytest.approx(narrow, rel=0.1)
    assert sigreg(rows, to).item() == pytest.approx(1.0, abs=0.5)


def test_in_parts_loss_and_gradients_are_those_of_the_whole_batch():
    recipe = small_recipe(MODEL, data={"views": VIEWS}, objective=OBJECTIVE)
    objective = with_initial_values(build_objective(recipe, 0))
    generator = torch.Generator().manual_seed(0)
    views = [torch.randn(8, count, 32, 32, 3, generator=generator) for count in (2, 1)]
    projected = objective.projection(objective.backbone(torch.cat(views, dim=1).flatten(0, 1)).pooled).view(8, 3, 6)
    objective.plan(torch.arange(8).numpy(), 4)
    others = objective.directions(torch.device("cpu"))
    objective.plan(torch.arange(8).numpy(), 3)
    to = objective.directions(torch.device("cpu"))
    torch.testing.assert_close(to.norm(dim=0), torch.ones(32))
    assert not torch.equal(to, others)
    invariance = (projected - projected[:, :2].mean(dim=1, keepdim=True)).square().mean()
    gaussian = sum(sigreg(projected[:, view], to) for view in range(3)) / 3
    expected = 0.95 * invariance + 0.05 * gaussian
    gradients = torch.autograd.grad(expected, list(objective.parameters()))
    losses, _ = update(recipe, objective, views, torch.zeros(8, dtype=torch.int64), size=2, step=3)
    assert losses.per_sample.mean().item() == pytest.approx(expected.item(), rel=1e-6)
    assert_near(objective.parameters(), gradients)
