"""`vitscale export`: weights of a run, a fresh model or a file, in any format that can hold them."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from vitscale.checkpoint import EMA, MASTER
from vitscale.cli.model_block import model_block
from vitscale.errors import RecipeError
from vitscale.families import architecture, nearest
from vitscale.models import initial_value
from vitscale.models.weights import (
    HEAD,
    WHOLE_PICTURE,
    Description,
    Entry,
    Source,
    describe,
    has_head,
    loading_lines,
    open_weights,
    parameters,
    write_weights,
)
from vitscale.recipe import differences
from vitscale.runs.names import RECIPE_FILE
from vitscale.weight_formats import Format

# The options that each kind of source uses; an option that would have no effect is refused.
_OPTIONS = {
    "a run": {"step", "no_ema", "image_size"},
    "a file of weights": {"model", "set", "image_size"},
    "a model's name": {"seed", "num_classes", "image_size", "head"},
}


@dataclass(frozen=True)
class _Weights:
    """The weights to write: parameter's name -> its whole tensor."""

    description: Description
    parameter: Callable[[str], Tensor]
    has_head: bool = True
    is_average: bool = False


def run_export(
    source: str,
    form: Format,
    out: Path,
    *,
    drop_head: bool = False,
    step: int | None = None,
    no_ema: bool = False,
    model: str | None = None,
    settings: Sequence[str] = (),
    seed: int | None = None,
    num_classes: int | None = None,
    image_size: int | None = None,
    head: str | None = None,
) -> None:
    """Write the weights and print one line. Raises `RecipeError` and `CheckpointError`."""
    options = {"step": step, "no_ema": no_ema or None, "model": model, "set": settings or None, "seed": seed}
    options |= {"num_classes": num_classes, "image_size": image_size, "head": head}
    given = {name for name, value in options.items() if value is not None}
    path = Path(source)
    try:
        if _is_there(path / RECIPE_FILE):
            _only("a run", source, given)
            weights = _of_run(path, step, image_size, drop_head, use_average=not no_ema)
        elif _is_there(path):
            _only("a file of weights", source, given)
            weights = _of_file(path, model_block(model, settings), image_size, drop_head)
        else:
            _check_name(source)
            _only("a model's name", source, given)
            block = {"name": source, "head": head or "linear", "num_classes": num_classes}
            weights = _fresh(Description(block, image_size or 224, num_classes), seed or 0, drop_head)
        drop_head = drop_head or not weights.has_head
        count = write_weights(out, form, weights.description, weights.parameter, drop_head)
    except KeyboardInterrupt:
        if not _written(out):
            print("interrupted: nothing was written", file=sys.stderr)
        raise
    what = [weights.description.title]
    what += [f"step {weights.description.step:,}"] if weights.description.step is not None else []
    what += ["average of the weights"] if weights.is_average else []
    what += ["without a head"] if drop_head else []
    size = sum(file.stat().st_size for file in _written(out))
    print(f"wrote {out}: {', '.join(what)} as {form}, {count:,} parameters, {size:,} bytes")
    description = replace(weights.description, num_classes=None if drop_head else weights.description.num_classes)
    if out.is_dir():
        print(_pictures(description))
    if lines := loading_lines(out, form, description):
        print("In Python:", *lines, sep="\n    ")


def _pictures(description: Description) -> str:
    """Describe the exported preprocessing of an image, which for a run is that of its evaluation."""
    crop, size = description.eval_crop or WHOLE_PICTURE, f"{description.image_size} x {description.image_size} pixels"
    if crop.kind == "central":
        shown = f"the central {crop.fraction:g} of the short side, at {size}"
    elif crop.fraction < 1:
        shown = f"the central {crop.fraction:g} of each side, squashed to {size}"
    else:
        shown = f"the whole picture, squashed to {size}"
    if description.eval_crop is None:
        text = f"its preprocessing shows {shown}: the source names no crop"
    else:
        text = f"its preprocessing shows what the source's does: {shown}"
    if description.normalise is None:
        return f"{text}; pixels from -1 to 1: the source does not say how it normalises"
    return f"{text}; normalised by mean {description.normalise.mean} and std {description.normalise.std}"


def _written(out: Path) -> list[Path]:
    if out.is_dir():
        return [*out.iterdir()]
    return [out] if out.is_file() else []


def _is_there(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise RecipeError(f"{str(path)[:100]}: {error.strerror}") from None
    return True


def _check_name(source: str) -> None:
    try:
        architecture(source)
    except ValueError:
        known = "" if Path(source).suffix else f", and no model of this name; the nearest is {nearest(source)!r}"
        raise RecipeError(f"{source}: there is no such run, file or folder{known}") from None


def _only(kind: str, source: str, given: set[str]) -> None:
    if foreign := sorted(given - _OPTIONS[kind]):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in foreign)
        raise RecipeError(
            f"{flags}: {source} is {kind}, where {'this has' if len(foreign) == 1 else 'these have'} no effect"
        )


def _of_run(run_dir: Path, step: int | None, image_size: int | None, drop_head: bool, *, use_average: bool) -> _Weights:
    # Seconds of imports that the other sources do without.
    from vitscale.evaluation.finished import empty_objective, open_run, trained_recipe

    recipe, reader = open_run(run_dir, step)
    trained = trained_recipe(reader)
    block = trained.dump()["model"]
    if edits := differences(block, recipe.dump()["model"], "model."):
        print(f"{run_dir / RECIPE_FILE} was edited ({'; '.join(edits)}); what was trained is exported")
    has_classes = trained.objective.has_classes
    class_names = list(reader.index.data["class_names"]) if has_classes else None
    description = Description(
        block,
        trained.data.image_size,
        len(class_names) if class_names is not None else None,
        class_names,
        reader.index.step,
        recipe.data.eval_crop,
        trained.data.normalise,
    )
    backbone = empty_objective(trained, reader).backbone
    shapes = {name: tuple(parameter.shape) for name, parameter in backbone.named_parameters()}
    kind = reader.index.evaluated_kind if use_average else MASTER
    source = Source(
        run_dir,
        "safetensors",
        {name: Entry(name, shape, partial(reader.parameter, name, kind)) for name, shape in shapes.items()},
    )
    description = replace(description, image_size=image_size or description.image_size)
    readers = parameters(description.build(), source, HEAD if drop_head or not has_classes else ())
    return _Weights(description, lambda name: readers[name](), has_classes, is_average=kind == EMA)


def _of_file(path: Path, block: dict[str, Any] | None, image_size: int | None, drop_head: bool) -> _Weights:
    source = open_weights(path)
    description = describe(source, block, image_size)
    headless = description.num_classes is None and not has_head(source)
    readers = parameters(description.build(), source, HEAD if drop_head or headless else ())
    return _Weights(description, lambda name: readers[name](), not headless)


def _fresh(description: Description, seed: int, drop_head: bool) -> _Weights:
    if description.num_classes is None and not drop_head:
        raise RecipeError(f"{description.title}: fresh weights need --num-classes")
    model = description.build()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return _Weights(description, lambda name: initial_value(model, name, shapes[name], seed))
