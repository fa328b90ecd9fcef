"""`vitscale inspect`: look inside finished models; `vitscale inspect speed`: how fast models are on this device."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from vitscale.cli.command_line import HELP, readable_command
from vitscale.cli.looking import ImageSize, MaxMemory, ModelName, NoEma, Precision, Settings, Step

_SPEED = "speed"
_speed_app = typer.Typer(context_settings=HELP, add_completion=False, rich_markup_mode=None)


@_speed_app.command()
def speed(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Models, such as ViT-B/16 and ResNet50x1.")],
    out: Annotated[Path, typer.Option(help="The folder; it does not exist, or is empty.")],
    sizes: Annotated[
        str, typer.Option("--sizes", metavar="PIXELS,...", help="Sides of the images.")
    ] = "64,128,224,384,512",
    precision: Precision = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=3600, help="For each model and size, or with CUDA for each batch size.")
    ] = 10.0,
) -> None:
    """Measure images/s and the largest batch by image size on this device: a table, a figure and its CSV.

    A forward pass, as in appendix D.4, in bf16 with CUDA and in fp32 elsewhere. With CUDA batches grow until memory
    ends; on CPUs until the time is up.
    """
    from vitscale.cli.inspect_output import run_speed

    run_speed(names, out, sizes, precision, seconds)


class InspectCommand(TyperCommand):
    """`inspect SOURCE...`, except for `inspect speed NAME...`, which is a command of its own."""

    def make_context(self, info_name: str | None, args: list[str], *arguments: Any, **named: Any) -> Any:
        if args and args[0] == _SPEED:
            other = readable_command(_speed_app)
            return other.make_context(f"{info_name} {_SPEED}", args[1:], *arguments, **named)
        return super().make_context(info_name, args, *arguments, **named)


def inspect(
    sources: Annotated[
        list[Path], typer.Argument(metavar="SOURCE...", help="Run directories, or weights of any format: side by side.")
    ],
    images: Annotated[
        str, typer.Option(metavar="DIR|DATASET", help="What the models are to see: a folder of images, or a dataset.")
    ],
    out: Annotated[Path, typer.Option(help="The folder; it does not exist, or is empty.")],
    show: Annotated[
        str | None,
        typer.Option(
            metavar="PART,...",
            help="filters, positions, attention, rollout, alignment, norms, colours; default: all that there is.",
        ),
    ] = None,
    count: Annotated[int, typer.Option(min=1, max=10**5, help="Images that are measured.")] = 128,
    pictures: Annotated[int, typer.Option(min=1, max=16, help="How many of these are shown.")] = 6,
    neighbours: Annotated[
        str | None, typer.Option(metavar="DATASET", help="Look in it for pictures that are like those shown.")
    ] = None,
    step: Step = None,
    no_ema: NoEma = False,
    settings: Settings = None,
    model: ModelName = None,
    image_size: ImageSize = None,
    precision: Precision = None,
    max_memory: MaxMemory = None,
) -> None:
    """Look inside models: filters, positions, attention, rollout, layers, norms, colours, neighbours.

    Each figure is a PNG, an SVG and a CSV of its numbers; index.html has them all. `vitscale inspect speed NAME...`
    measures images/s and the largest batch of models by name (a run called speed is ./speed).
    """
    from vitscale.cli.inspect_output import run_inspect

    def options(source: Path) -> Any:
        from vitscale.cli.looking import opened
        from vitscale.runs.checkpoint.opening import is_weights

        of_run: Any = (step, no_ema)
        of_weights: Any = (model, image_size, None, None, precision)
        if len({is_weights(each) for each in sources}) > 1:  # each option is for the sources of its kind
            of_run, of_weights = ((None, False), of_weights) if is_weights(source) else (of_run, (None,) * 5)
        chosen: list[Any] = [*of_run, settings, *of_weights, max_memory]
        return opened(source, *chosen)

    run_inspect(sources, options, images, out, show, count, pictures, neighbours)
