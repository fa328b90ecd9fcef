"""Options that several commands have, declared once, and the models that they open."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Context, Exit, Option

from vitscale.ground.errors import RecipeError, VitscaleError, turned
from vitscale.ground.storage import read_text
from vitscale.ground.table import Console

if TYPE_CHECKING:
    from vitscale.evaluation.embedding import Embedder
    from vitscale.evaluation.finished import FinishedModel

Source = Annotated[Path, Argument(help="A run's directory, or weights of any format.")]
Step = Annotated[int | None, Option(help="Step of a run's checkpoint; default: the newest.")]
NoEma = Annotated[bool, Option("--no-ema", help="For a run: use its last weights, not their average.")]
Settings = Annotated[list[str] | None, Option("--set", metavar="KEY=VALUE", help="Override a recipe's field.")]
ModelName = Annotated[str | None, Option(help="Model of weights that do not say it: a name (ViT-B/16), or a recipe.")]
ImageSize = Annotated[
    int | None, Option(min=1, max=8192, help="For weights: image size in pixels; positions are resampled.")
]
DataRoot = Annotated[
    str | None, Option("--data-root", metavar="DIR", help="Where the run's data are, if they were moved.")
]
Json = Annotated[bool, Option("--json", help="Print one JSON object.")]
Dataset = Annotated[str, Argument(help="A dataset's folder or manifest.json, here or at a URL (s3://, gs://).")]
ImageField = Annotated[str | None, Option(help="Column, feature or suffix of the image.", show_default="detected")]
Workers = Annotated[int | None, Option(min=1, help="Processes.", show_default="one per core")]
Hardware = Annotated[str, Option(metavar="NAME", help="h100, h200, a100-pcie, ...")]
Mfu = Annotated[
    float | None,
    Option(metavar="FRACTION", help="Share of their peak FLOP/s that training reaches.", show_default="0.4"),
]
Price = Annotated[float | None, Option(help="Price of one device for one hour.")]
Embedding = Annotated[Path | None, Option(metavar="RUN|WEIGHTS", help="A model whose features judge candidates, too.")]

# Lowest, highest, what it is. Within them every figure is a number that people can read.
_RANGES = {
    "--budget": (1e-9, 1e12, "exaFLOPs"),
    "--mfu": (1e-6, 1, "a fraction"),
    "--memory": (1e-9, 1e9, "gigabytes"),
    "--price": (0, 1e9, "the price of one device-hour"),
}


@dataclass(frozen=True)
class ModelOptions:
    """Which model of a source is opened, and how it computes. What is None or False was not asked for."""

    step: Step = None
    no_ema: NoEma = False
    settings: Settings = None
    model: ModelName = None
    image_size: ImageSize = None
    class_names: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="For weights: a file of class names, one per line, in the order of the outputs; imagenet: its "
            "WordNet ids.",
        ),
    ] = None
    batch: Annotated[
        int | None, Option(min=1, max=2**20, help="For weights: images per batch and process; default 64.")
    ] = None
    precision: Annotated[Literal["fp32", "bf16"] | None, Option(help="For weights: precision; default fp32.")] = None
    max_memory: Annotated[
        float | None, Option(metavar="GB", help="GB of each device for weights; the rest goes to host memory and disk.")
    ] = None

    def refuse(self, why: str, *names: str) -> None:
        """Raise `RecipeError` if any of these options is given, since it has no effect."""
        flags = {name: "--set" if name == "settings" else f"--{name.replace('_', '-')}" for name in names}
        values = {flag: getattr(self, name) for name, flag in flags.items()}
        refuse(why, {flag: None if value is False else value for flag, value in values.items()})

    @contextmanager
    def opened(self, source: Path) -> Iterator["FinishedModel"]:
        """Open the model of a source.

        Raises `RecipeError` for options that have no effect for this source, and as `FinishedModel` does.
        """
        from vitscale.evaluation.finished import FinishedModel, OfWeights
        from vitscale.recipe import model_block
        from vitscale.runs.checkpoint.opening import is_weights

        memory, settings = self.max_memory, self.settings or []
        if memory is not None and not memory > 0:  # a NaN, too
            raise RecipeError(f"--max-memory {memory:g}: expected gigabytes above 0")
        with one_speaks():
            if is_weights(source):
                self.refuse(f"{source} is a file of weights", "step", "no_ema")
                names = None if self.class_names is None else _read_names(self.class_names)
                block = model_block(self.model, settings)
                weights = OfWeights(block, self.image_size, names, self.batch or 64, self.precision or "fp32")
                yield FinishedModel(source, weights=weights, max_memory_gb=memory)
            else:
                self.refuse(f"{source} is a run", "model", "image_size", "class_names")
                in_recipe = f"{source} is a run: --set evaluation.batch=N, --set precision=fp32"
                self.refuse(in_recipe, "batch", "precision")
                yield FinishedModel(source, settings, self.step, use_average=not self.no_ema, max_memory_gb=memory)


def with_model_options(*left_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare `ModelOptions`, except those left out, as options of a command that is given them as `options`."""

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        parameters = [*inspect.signature(command).parameters.values()]
        at = [each.name for each in parameters].index("options")
        fields = [each for each in inspect.signature(ModelOptions).parameters.values() if each.name not in left_out]
        parameters[at : at + 1] = fields

        @wraps(command)
        def called(**values: Any) -> None:
            options = ModelOptions(**{each.name: values.pop(each.name) for each in fields})
            command(options=options, **values)

        named = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
        called.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
        return called

    return decorated


def given_options(context: Context) -> dict[str, str]:
    """Parameter -> flag, or name of an argument, of all that stands on the command line."""
    sources = {each: context.get_parameter_source(str(each.name)) for each in context.command.params}
    return {
        str(each.name): each.opts[0]
        for each, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    }


def refuse(why: str, options: dict[str, Any]) -> None:
    """Raise `RecipeError` if any of these options, flag -> value, is given, since it has no effect."""
    if flags := [flag for flag, value in options.items() if value is not None]:
        raise RecipeError(f"{', '.join(flags)}: no effect, since {why}")


def check_numbers(given: dict[str, float | None]) -> None:
    """Raise `RecipeError` for an option outside its range, NaN included."""
    for option, value in given.items():
        low, high, what = _RANGES[option]
        if value is not None and not low <= value <= high:
            percent = f"; {value:g} % is --mfu {value / 100:g}" if option == "--mfu" and 1 < value <= 100 else ""
            raise RecipeError(f"{option} {value:g}: expected {what} from {low:g} to {high:g}{percent}")


def at_work(finished: "FinishedModel", what: str) -> AbstractContextManager[Any]:
    """What the command is doing, seen on a terminal only."""
    return Console(stderr=True, quiet=not finished.accelerator.is_main_process).status(what)


@contextmanager
def one_speaks() -> Iterator[None]:
    """Let only one process report an error that all raise; always leave the process group at the end."""
    import torch.distributed as dist

    from vitscale.evaluation.placing import is_main

    try:
        yield
    except VitscaleError as error:
        if error.is_on_all_ranks and not is_main():
            raise Exit(error.exit_code) from None
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _read_names(path: Path) -> list[str]:
    from vitscale.evaluation.metrics import imagenet_synsets

    if str(path) == "imagenet" and not path.exists():
        return list(imagenet_synsets())
    with turned(f"--class-names {path}: cannot be read", RecipeError, OSError, ValueError):
        names = read_text(path).splitlines()
    if not names or "" in names or len(set(names)) != len(names):
        raise RecipeError(f"--class-names {path}: expected a name on each line, and none twice")
    return names


def opened_embedder(
    source: Path | None, model: str | None, image_size: int | None, cosine: float | None = None
) -> "Embedder | None":
    """The model of `--embedding`, or None; `cosine` is an error without a model. Raises as `ModelOptions.opened`."""
    of_weights = {"--embedding-model": model, "--embedding-size": image_size}
    given = [flag for flag, value in of_weights.items() if value is not None]
    if source is None:
        if given := given + ["--cosine"] * (cosine is not None):
            raise RecipeError(f"{', '.join(given)}: belongs to an embedding: --embedding RUN|WEIGHTS")
        return None
    from vitscale.evaluation.embedding import Embedder
    from vitscale.evaluation.finished import OfWeights
    from vitscale.recipe import model_block
    from vitscale.runs.checkpoint.opening import is_weights

    if not is_weights(source):
        refuse(f"{source} is a run", of_weights)
        return Embedder.of(source)
    try:
        return Embedder.of(source, OfWeights(model_block(model), image_size))
    except RecipeError as error:  # the message is for commands about a model, whose options have no prefix
        raise RecipeError(str(error).replace("--model", "--embedding-model")) from None
