"""Runs and recipes as a person holds them: what was asked for, what came of it, what it costs."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from vitscale import recipe as recipes
from vitscale.about.status import RunReader
from vitscale.api.shown import facts
from vitscale.flops.estimate import Estimate, estimate
from vitscale.flops.hardware import find_device
from vitscale.flops.reports import check_known
from vitscale.ground.errors import RecipeError, check_numbers
from vitscale.ground.page import SERIES, Plot, Text, fragment
from vitscale.ground.wording import counted
from vitscale.runs import run as runs
from vitscale.runs.reading import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitscale.about.planning import ClusterPlan
    from vitscale.api.model import Model


class Recipe(recipes.Recipe):
    """A recipe, by the fields of its YAML file; from `load`. It does not change: `load` another with overrides."""

    _name: str = "recipe"

    @classmethod
    def load(
        cls, recipe: str | os.PathLike[str] | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
    ) -> Self:
        """Read a recipe.

        Args:
            recipe: a file, the name of a recipe that comes with vitscale, or the mapping that a file would hold.
            overrides: dotted key -> value: {"optimizer.lr": 1e-3}; a mapping as a value is merged key by key.

        Raises `RecipeError` with everything that is wrong.
        """
        settings = _settings(overrides or {}, "overrides")
        if isinstance(recipe, Mapping):
            return cls.of(recipes.override({}, [*_settings(recipe, "recipe"), *settings], "the mapping"), "recipe")
        return cls.of(recipes.load_recipe(os.fspath(recipe), settings), Path(recipe).stem)

    @classmethod
    def of(cls, recipe: recipes.Recipe, name: str) -> Self:
        """The same recipe, under a name for messages and run directories."""
        made = cls.model_validate(recipe.dump())
        made._name = name
        return made

    @property
    def name(self) -> str:
        """The stem of its file, or the name of its run."""
        return self._name

    def flops(self, samples: int | None = None) -> Estimate:
        """What the whole run computes: `exaflops`, `images`, `work` per image and more.

        `samples` is the number of training samples, if the dataset is not here. What cannot be known is None, and
        `problem` says why.
        """
        check_numbers(1, samples=samples)
        return estimate(self._name, self, samples)

    def plan(
        self,
        devices: int,
        hardware: str,
        *,
        nodes: int | None = None,
        samples: int | None = None,
        price: float | None = None,
    ) -> "ClusterPlan":
        """What it needs on a cluster by ZeRO stage and micro-batch, as `vitscale plan` has it; on paper.

        Args:
            devices: the number of devices on all nodes.
            hardware: their name: "h100".
            nodes: the number of nodes.
            samples: the number of training samples, if the dataset is not here.
            price: the price of one device for one hour.

        Raises `RecipeError` for what cannot be planned.
        """
        from vitscale.about.planning import make_cluster, make_plan

        check_numbers(1, devices=devices, nodes=nodes)
        if price is not None and not 0 <= price <= 1e9:
            raise RecipeError(f"price={price}: expected the price of one device-hour from 0 to 1e9")
        estimated = self.flops(samples)
        if estimated.work is None:
            check_known(estimated)
        self.split(devices)
        return make_plan(estimated, make_cluster(find_device(hardware), devices, nodes=nodes, price=price))

    def _repr_html_(self) -> str:
        data, schedule = self.data, self.schedule
        rows = {"recipe": self._name, "model": f"{self.model.describe()}, {data.image_size} pixels"}
        rows |= {"data": data.train, "optimizer": f"{self.optimizer.name}, batch {self.batch.global_size:,}"}
        return fragment([facts(rows | {"duration": str(schedule.duration), "precision": self.precision})])


class Run(runs.Run):
    """A run, finished or under way, by its directory. Each file is read when it is asked for, and once.

    `metrics["loss"]` is a column; `cost`, `checkpoints`, `evaluation` and `parent` are None or empty before there are
    any. Raises `RecipeError` if there is no run; properties raise `DataError` for files that are broken.
    """

    recipe: Recipe

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        super().__init__(os.fspath(directory))
        self.recipe = Recipe.of(self.recipe, self.name)

    @property
    def state(self) -> str:
        """How it is doing, as `vitscale status` says: "running", "done", ..."""
        return RunReader(str(self.directory)).read().state

    @property
    def evaluations(self) -> list[tuple[int, dict[str, float | None]]]:
        """(step, values by evaluator/metric) of all evaluations, oldest first."""
        return self.metrics.evaluations

    def model(self, step: int | None = None, *, precision: Literal["fp32", "bf16"] | None = None) -> "Model":
        """Its model after `step`, by default as the newest checkpoint has it. Raises `CheckpointError` without one."""
        from vitscale.api.model import load

        return load(self, step, precision=precision)

    def plot(self, *keys: str) -> Plot:
        """Columns of the metrics and evaluations over steps: by default the loss, and top-1 accuracies.

        Raises `RecipeError` for a key that there is not.
        """
        columns = {key: self.metrics[key] for key in self.metrics if key != "step"}
        lines = {key: (self.metrics["step"], column) for key, column in columns.items() if column.dtype != object}
        for key in dict.fromkeys(key for _, values in self.evaluations for key in values):
            found = [(step, values[key]) for step, values in self.evaluations if number(values.get(key)) is not None]
            lines |= {key: tuple(zip(*found, strict=True))} if found else {}  # type: ignore[dict-item]
        shown = keys or [key for key in lines if key == "loss" or key.endswith("/top1")]
        if unknown := [key for key in shown if key not in lines]:
            raise RecipeError(
                f"{unknown[0]!r}: {self.directory} has no such column of numbers; it has {', '.join(lines) or 'none'}"
            )

        def put(figure: "Figure") -> None:
            panels = figure.subplots(1, max(len(shown), 1), squeeze=False)[0]
            for panel, key in zip(panels, shown, strict=False):
                panel.plot(*lines[key], color=SERIES[0], marker="." if "/" in key else "")
                panel.set(title=key, xlabel="step")

        return Plot("run", f"{', '.join(shown) or 'nothing'} of {self.name}", "", put, 340 * max(len(shown), 1), 260)

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r})"

    def _repr_html_(self) -> str:
        cost, total = self.cost, self.total_steps
        steps = "none yet" if cost is None else f"{cost.step:,}" + ("" if total is None else f" of {total:,}")
        rows: dict[str, object] = {"run": self.directory, "state": self.state, "model": self.recipe.model.describe()}
        rows |= {"steps": steps, "checkpoints": None if self.checkpoints is None else self.checkpoints.steps}
        if cost is not None:
            rows |= {"exaFLOPs": cost.exaflops, "images/s": cost.images_per_s, "hours": cost.seconds / 3600}
            rows |= {"devices": None if cost.world_size is None else counted(cost.world_size, "device")}
        return fragment([facts(rows | self.evaluation), *(Text(note, "note") for note in self.notes)])


def _settings(values: Mapping[str, Any], what: str) -> list[str]:
    try:
        return [f"{key}={json.dumps(value, default=_plain, ensure_ascii=False)}" for key, value in values.items()]
    except (TypeError, ValueError, AttributeError) as error:
        raise RecipeError(f"{what}: {error}; expected values as a YAML file has them") from None


def _plain(value: Any) -> Any:
    """A number of NumPy's or torch's, or a path, as JSON has it."""
    return value.item() if hasattr(value, "item") else os.fspath(value)
