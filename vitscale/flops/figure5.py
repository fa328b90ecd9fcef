"""Figure 5 from the paper's Table 6: transfer accuracy against pre-training compute, beside runs of one's own.

The paper reports top-1 after fine-tuning. A run has something else, the top-1 of its own head on its own validation
data, without fine-tuning. Only on ImageNet are the two comparable, and there a run is in the paper's panel, with a
marker of its own. Runs on other data get a panel of their own: their accuracies compare with no other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitscale.errors import RecipeError
from vitscale.families import model_of
from vitscale.files.durable import durable_file
from vitscale.flops.published import Scaling, table_6
from vitscale.flops.records import Run
from vitscale.page import check_drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg")
# Name, marker, colour and the side of its label: up or down, and slanted, because neighbours are close.
_KINDS = {
    "vit": ("ViT", "o", "tab:blue", -1),
    "resnet": ("ResNet (BiT)", "s", "tab:gray", -1),
    "hybrid": ("Hybrid", "^", "tab:orange", 1),
}
_TOP1 = "validation/top1"
_MOST_IN_LEGEND = 12


@dataclass(frozen=True)
class Point:
    """A finished run: exaFLOPs of all of it, and top-1 in percent on its validation dataset, at the selected step or
    else the last.
    """

    label: str
    exaflops: float
    top1: float
    dataset: str

    @property
    def is_on_imagenet(self) -> bool:
        """Whether it was validated on the dataset named imagenet."""
        return self.dataset.split("/")[0] == "imagenet"


def points_of(runs: Sequence[Run]) -> tuple[list[Point], list[str]]:
    """The runs that can be drawn, and notes on those that cannot.

    Raises `RecipeError` for a run that is not finished.
    """
    points, notes = [], []
    for run in runs:
        if not run.is_done:
            raise RecipeError(f"{run.directory} is not finished (it has no DONE): only finished runs are drawn")
        top1, dataset = run.evaluation.get(_TOP1), run.recipe.evaluation.validation
        if top1 is None or dataset is None:
            of_best = "" if run.best_step is None else f" of step {run.best_step:,}, its best"
            notes.append(f"{run.directory} is not drawn: its records have no {_TOP1}{of_best}")
            continue
        points.append(Point(run.directory.resolve().name, run.exaflops, 100 * top1, dataset))
    return points, notes


def draw(path: Path, points: Sequence[Point]) -> None:
    """Write the figure as PNG or SVG, by the suffix of `path`.

    Raises `RecipeError` for another suffix, without matplotlib, or if the file cannot be written.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise RecipeError(f"--plot {path}: expected a name that ends with {' or '.join(SUFFIXES)}")
    check_drawing("--plot")
    import matplotlib
    from matplotlib.figure import Figure

    others = [point for point in points if not point.is_on_imagenet]
    panels = 3 if others else 2
    figure = Figure(figsize=(5.5 * panels, 4.6), layout="constrained", dpi=150)
    axes: Sequence[Axes] = figure.subplots(1, panels)
    _draw_paper(axes[0], "Average-5", {row: row.average_5 for row in table_6()})
    _draw_paper(axes[1], "ImageNet", {row: row.imagenet for row in table_6()})
    _draw_runs(axes[1], [point for point in points if point.is_on_imagenet])
    if others:
        axes[2].set_title("own runs, each on its own data")
        _draw_runs(axes[2], others)
    for panel in axes:
        panel.set_xscale("log")
        panel.set_xlabel("pre-training compute (exaFLOPs)")
        panel.grid(alpha=0.3)
        panel.legend(loc="lower right", fontsize=8)
    axes[0].set_ylabel("top-1 after fine-tuning (%), Table 6")
    if others:
        axes[2].set_ylim(0, 100)
        axes[2].set_ylabel("validation top-1 (%), not fine-tuned")
    try:
        # A salt and no date, so that equal figures are equal files.
        with durable_file(path) as file, matplotlib.rc_context({"svg.hashsalt": "vitscale"}):
            metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
            figure.savefig(file, format=path.suffix[1:].lower(), metadata=metadata)
    except OSError as error:
        raise RecipeError(f"--plot {path}: cannot be written ({error.strerror})") from None


def _draw_paper(axes: "Axes", title: str, values: dict[Scaling, float]) -> None:
    axes.set_title(title)
    axes.margins(0.1)
    for kind, (label, marker, colour, side) in _KINDS.items():
        rows = [row for row in values if model_of(name=row.model).kind == kind]
        axes.plot([row.exaflops for row in rows], [values[row] for row in rows], marker, color=colour, label=label)
        style: dict[str, Any] = {"ha": "left", "va": "bottom"} if side > 0 else {"ha": "right", "va": "top"}
        for row in rows:
            name = row.model.removeprefix("ViT-").removeprefix("ResNet").replace("R50x1+ViT-", "R50+")
            place, offset = (row.exaflops, values[row]), (2 * side, 3 * side)
            axes.annotate(
                name, place, offset, textcoords="offset points", fontsize=6, color=colour, rotation=30, **style
            )


def _draw_runs(axes: "Axes", points: Sequence[Point]) -> None:
    more = len(points) - _MOST_IN_LEGEND
    for index, point in enumerate(points):
        label = f"{point.label}: top-1 on {point.dataset}, not fine-tuned"
        if index >= _MOST_IN_LEGEND:
            label = f"and {more} more" if index == _MOST_IN_LEGEND else "_"  # a legend leaves that out
        axes.plot(point.exaflops, point.top1, "*", color=f"C{3 + index % 7}", markersize=13, label=label)
