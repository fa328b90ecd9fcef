"""`vitscale export`: weights of a run, a fresh model or a file, in any format that can hold them."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from vitscale.architectures import architecture
from vitscale.checkpoint import RECIPE_FILE
from vitscale.errors import RecipeError
from vitscale.models import initial_value
from vitscale.models.weights import Description, Format, describe, named, open_weights, parameters, write_weights

# Which options each kind of source understands; an option that would do nothing is refused.
_OPTIONS = {
    "a run": {"step"},
    "a file of weights": {"model", "image_size"},
    "a model's name": {"seed", "num_classes", "image_size", "head"},
}


def run_export(
    source: str,
    form: Format,
    out: Path,
    *,
    drop_head: bool = False,
    step: int | None = None,
    model: str | None = None,
    seed: int | None = None,
    num_classes: int | None = None,
    image_size: int | None = None,
    head: str | None = None,
) -> None:
    """Write the weights and print one line. Raises `RecipeError` and `CheckpointError`."""
    options = {"step": step, "model": model, "seed": seed, "num_classes": num_classes}
    options |= {"image_size": image_size, "head": head}
    given = {name for name, value in options.items() if value is not None}
    path = Path(source)
    if (path / RECIPE_FILE).is_file():
        _only("a run", source, given)
        description, parameter = _of_run(path, step)
    elif path.exists():
        _only("a file of weights", source, given)
        description, parameter = _of_file(path, model, image_size, drop_head)
    else:
        _check_name(source)
        _only("a model's name", source, given)
        description, parameter = _fresh(source, seed or 0, num_classes, image_size or 224, head or "linear")
    count = write_weights(out, form, description, parameter, drop_head)
    files = [out] if out.is_file() else [*out.iterdir()]
    size = sum(file.stat().st_size for file in files)
    print(f"wrote {out}: {description.model.get('name') or source} as {form}, {count:,} parameters, {size:,} bytes")


def _check_name(source: str) -> None:
    try:
        architecture(source)
    except ValueError as error:
        raise RecipeError(f"{source}: there is no such run, file or folder, and as a model: {error}") from None


def _only(kind: str, source: str, given: set[str]) -> None:
    if foreign := sorted(given - _OPTIONS[kind]):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in foreign)
        raise RecipeError(f"{flags}: {source} is {kind}, for which this says nothing")


def _of_run(run_dir: Path, step: int | None) -> tuple[Description, Callable[[str], Tensor]]:
    from vitscale.evaluation.finished import open_run  # seconds of imports that the other sources do without

    recipe, reader = open_run(run_dir, step)
    class_names = list(reader.index.data["class_names"])
    block = recipe.dump()["model"]
    description = Description(block, recipe.data.image_size, len(class_names), class_names)
    shapes = {name: list(parameter.shape) for name, parameter in description.build().named_parameters()}
    reader.check_shapes(shapes)
    return description, reader.parameter


def _of_file(
    path: Path, name: str | None, image_size: int | None, drop_head: bool
) -> tuple[Description, Callable[[str], Tensor]]:
    source = open_weights(path)
    description = describe(source, name, image_size)
    readers = parameters(description.build(), source, drop_head)
    return description, lambda name: readers[name]()


def _fresh(
    name: str, seed: int, num_classes: int | None, image_size: int, head: str
) -> tuple[Description, Callable[[str], Tensor]]:
    if num_classes is None:
        raise RecipeError(f"{name}: fresh weights need --num-classes")
    description = named(name, num_classes, image_size, head)
    model = description.build()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return description, lambda name: initial_value(model, name, shapes[name], seed)
