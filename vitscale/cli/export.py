"""`vitscale export`: weights of a run, a fresh model or a file, in any format that can hold them."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from vitscale.cli.options import ModelName, NoEma, Step, refuse
from vitscale.ground.errors import RecipeError
from vitscale.ground.weight_formats import Format

# The options that each kind of source uses; an option that would have no effect is refused.
_OPTIONS = {
    "a run": {"step", "no-ema", "average", "image-size"},
    "a file of weights": {"model", "set", "image-size"},
    "a model's name": {"seed", "num-classes", "image-size", "head"},
}


def export(
    source: Annotated[str, Argument(help="A run's directory, a model's name, or weights of any format.")],
    form: Annotated[Format, Option("--format", help="What to write.")],
    out: Annotated[Path, Option(help="The file, or for hf and timm the folder; nothing is overwritten.")],
    step: Step = None,
    no_ema: NoEma = False,
    average: Annotated[str | None, Option(metavar="NAME", help="The run's average of this name; default ema.")] = None,
    model: ModelName = None,
    settings: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="Field of --model, e.g. model.depth=8.")
    ] = None,
    seed: Annotated[
        int | None, Option(min=0, max=2**63 - 1, help="Seed of a named model's fresh weights; default 0.")
    ] = None,
    num_classes: Annotated[int | None, Option(min=1, max=10**9, help="Classes of a named model.")] = None,
    image_size: Annotated[
        int | None,
        Option(min=1, max=8192, help="Size in pixels: of a named model (default 224), or to resample positions to."),
    ] = None,
    head: Annotated[Literal["linear", "pretrain"] | None, Option(help="Head of a named model; default linear.")] = None,
    drop_head: Annotated[bool, Option("--drop-head", help="Leave out output layer and pre_logits.")] = False,
    backbone: Annotated[
        bool, Option("--backbone", help="For hf: as one of transformers' backbones: feature maps, without a head.")
    ] = False,
    licence: Annotated[
        str | None, Option("--license", metavar="ID", help="The hub's name of a licence, for a folder's README.md.")
    ] = None,
) -> None:
    """Write weights for timm, transformers or Google's code, or ours.

    They are those of a run, of a fresh model or of a file in any of these formats.
    """
    from vitscale.about.report.card import model_card
    from vitscale.models.weights import HEAD, loading_lines, write_weights
    from vitscale.recipe import model_block
    from vitscale.runs.checkpoint import EMA, MASTER, weight_kinds
    from vitscale.runs.checkpoint.opening import kind_of, open_model, run_directory
    from vitscale.runs.run import Run

    options: dict[str, Any] = {"step": step, "no-ema": no_ema or None, "average": average, "model": model}
    options |= {"set": settings or None, "seed": seed, "num-classes": num_classes}
    options |= {"image-size": image_size, "head": head}
    try:
        kind = kind_of(source)
        idle = {f"--{name}": value for name, value in sorted(options.items()) if name not in _OPTIONS[kind]}
        refuse(f"{source} is {kind}", idle)
        if no_ema:
            refuse("--no-ema takes the weights themselves", {"--average": average})
        is_fresh = kind == "a model's name"
        drop_head = drop_head or backbone
        if is_fresh and num_classes is None and not drop_head:
            raise RecipeError(f"{source}: fresh weights need --num-classes")
        block = model_block(model, settings or [])
        fresh: Any = {"image_size": image_size, "num_classes": num_classes, "head": head or "linear", "seed": seed or 0}
        weights = open_model(source, step, use_average=not no_ema, average=average, **fresh)
        stored = weights.facts.get("kind", MASTER)
        report = (lambda note: None) if is_fresh else print  # a fresh head of zeros is no news
        description, _, values = weights.fit(block, image_size, drop_head=drop_head, report=report)
        drop_head = values.keys().isdisjoint(HEAD)
        written = replace(description, num_classes=None, class_names=None) if drop_head else description

        def card() -> str:
            kinds = [MASTER] if weights.recipe is None else weight_kinds(weights.recipe)
            is_as_evaluated = image_size is None and stored == (EMA if EMA in kinds else MASTER)
            place = run_directory(Path(source))
            lines = loading_lines(Path("PATH"), form, written, as_backbone=backbone)
            run = None if weights.recipe is None or place is None else Run(place)
            return model_card(written, form, lines, run, is_as_evaluated=is_as_evaluated, licence=licence)

        count = write_weights(
            out, form, description, lambda name: values[name](), drop_head, readme=card, as_backbone=backbone
        )
    except KeyboardInterrupt:
        if not _written(out):
            print("interrupted: nothing was written", file=sys.stderr)
        raise
    what = [description.title]
    what += [f"step {description.step:,}"] if description.step is not None else []
    what += [] if stored == MASTER else ["average of the weights" if average is None else f"average {average}"]
    what += ["without a head"] if drop_head else []
    size = sum(file.stat().st_size for file in _written(out))
    print(f"wrote {out}: {', '.join(what)} as {form}, {count:,} parameters, {size:,} bytes")
    if out.is_dir():
        print(description.pictures)
    if lines := loading_lines(out, form, written, as_backbone=backbone):
        print("In Python:", *lines, sep="\n    ")


def _written(out: Path) -> list[Path]:
    if out.is_dir():
        return [*out.iterdir()]
    return [out] if out.is_file() else []
