"""`vitscale inspect`: look inside finished models."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from vitscale.cli.console import progress
from vitscale.cli.options import ModelOptions, with_model_options
from vitscale.ground.errors import RecipeError
from vitscale.ground.files.durable import new_folder
from vitscale.ground.page import check_drawing
from vitscale.ground.table import Console

if TYPE_CHECKING:
    from vitscale.evaluation.inspection.looking import Findings


@with_model_options("class_names", "batch")
def inspect(
    sources: Annotated[
        list[Path], Argument(metavar="SOURCE...", help="Run directories, or weights of any format: side by side.")
    ],
    images: Annotated[
        str, Option(metavar="DIR|DATASET", help="What the models are to see: a folder of images, or a dataset.")
    ],
    out: Annotated[Path, Option(help="The folder; it does not exist, or is empty.")],
    show: Annotated[
        str | None,
        Option(
            metavar="PART,...",
            help="filters, positions, attention, rollout, alignment, norms, colours; default: all that there is.",
        ),
    ] = None,
    count: Annotated[int, Option(min=1, max=10**5, help="Images that are measured.")] = 128,
    pictures: Annotated[int, Option(min=1, max=16, help="How many of these are shown.")] = 6,
    options: ModelOptions = ModelOptions(),
) -> None:
    """Look inside models: filters, positions, attention, rollout, layers, norms, colours.

    Each figure is a PNG, an SVG and a CSV of its numbers; index.html has them all.
    """
    from vitscale.evaluation.inspection.figures import INSPECTION_PAGE, inspection_figures, write_page
    from vitscale.evaluation.inspection.looking import PARTS, inspect_model, pictures_from

    check_drawing("vitscale inspect")
    wanted: list[Any] | None = None if show is None else show.split(",")  # `parts_of` checks them
    names = _names(sources)
    with new_folder(out, "--out") as folder:
        findings: dict[str, Findings] = {}
        facts, notes = [], []
        for source, name in zip(sources, names, strict=True):
            with _for_its_kind(options, source, sources).opened(source) as finished:
                shown = pictures_from(finished, images, count)
                with progress(f"images, {name}", len(shown)) as done:
                    found = inspect_model(finished, shown, wanted, pictures=pictures, seen=done)
                at = "" if finished.step is None else f", step {finished.step:,}"
            findings[name] = found
            facts.append((name, f"{found.title}, {found.image_size} pixels{at}"))
            if wanted is None and (absent := [part for part in PARTS if part not in found.parts]):
                notes.append(f"{name} has no {' and no '.join(absent)}.")
        figures = inspection_figures(findings)
        facts.append(("pictures", f"{', '.join(str(each.images) for each in findings.values())} of {images}"))
        title = "Inside " + " and ".join(names)
        with Console(stderr=True).status("drawing"):  # seen on a terminal only
            write_page(folder, figures, title, ", ".join(each.title for each in findings.values()), facts, notes)
    for figure in figures:
        print(f"{figure.key:<20} {figure.title}")
    print(f"wrote {out / INSPECTION_PAGE}: {len(figures)} figures, each as PNG, SVG and CSV")


def _for_its_kind(options: ModelOptions, source: Path, sources: Sequence[Path]) -> ModelOptions:
    """The options for one of the sources: of a run and of weights side by side, each has those of its kind."""
    from vitscale.runs.checkpoint.opening import is_weights

    if len({is_weights(each) for each in sources}) == 1:
        return options
    if is_weights(source):
        return replace(options, step=None, no_ema=False)
    return replace(options, model=None, image_size=None, precision=None)


def _names(sources: Sequence[Path]) -> list[str]:
    """The models' names in the figures: the shortest ends of their paths that tell them apart."""
    whole = [source.absolute() for source in sources]
    if len(set(whole)) < len(whole):
        raise RecipeError(f"{max(whole, key=whole.count)} is given twice; expected different models")
    for paths in ([path.with_suffix("") if path.is_file() else path for path in whole], whole):
        for length in range(1, max(len(path.parts) for path in paths) + 1):
            names = ["/".join(path.parts[-length:]) for path in paths]
            if len(set(names)) == len(names):
                return names
    raise AssertionError("different paths have different names")
