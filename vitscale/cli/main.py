"""The `vitscale` command. Each subcommand imports what it needs when it runs, so that `--help` is instant."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from vitscale.cli import dedup, looking, shards, study, vtab
from vitscale.cli.command_line import HELP, Version, readable_command, run
from vitscale.cli.doctor import doctor
from vitscale.cli.export import export
from vitscale.cli.inspect import InspectCommand, inspect
from vitscale.cli.launch import launch
from vitscale.cli.looking import Settings
from vitscale.cli.plan import plan
from vitscale.cli.prove import prove
from vitscale.cli.report import report
from vitscale.cli.seen import seen
from vitscale.cli.status import status
from vitscale.cli.verify import verify
from vitscale.cli.without import without
from vitscale.ground.errors import RecipeError

app = typer.Typer(
    help="Pre-train Vision Transformers at scale.",
    no_args_is_help=True,
    context_settings=HELP,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(shards.app, name="shards")
app.add_typer(dedup.app, name="dedup")
app.add_typer(vtab.app, name="vtab")
app.add_typer(study.app, name="study")
ListFormat = Literal["table", "json"]


@app.command(short_help="Check a recipe and print it in full; or list all.")
def recipe(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="A file, or the stem of one that comes with vitscale; --diff: two of them; --explain: a field's key, "
            "for a field of your own package after a recipe that names it.",
        ),
    ] = None,
    settings: Settings = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say what the field (data.flip) or block (data) means; without one, all.")
    ] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Say what two recipes differ in (exit code 1).")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of recipes, for editors.")] = False,
) -> None:
    """Check a recipe and print it in full; without a name, list all."""
    from vitscale.cli import recipe_output

    asked = names or []
    if explain + diff + schema > 1 or (schema and asked) or (settings and (explain or not asked)):
        raise RecipeError(
            "--explain takes a field's key (a recipe may precede it), --diff two recipes, and --schema nothing"
        )
    if diff:
        recipe_output.show_difference(asked, settings or [])
    elif len(asked) > (2 if explain else 1):
        raise RecipeError(
            f"expected one name, not {len(asked)}; --diff takes two recipes, --explain a recipe and a key"
        )
    elif schema:
        recipe_output.show_schema()
    elif explain:
        recipe_output.show_fields(*reversed(asked))
    elif asked:
        recipe_output.show_recipe(asked[0], settings or [])
    else:
        recipe_output.show_recipes()


class _Convert(TyperCommand):
    """The command of data_tools.convert, which takes a second to import and is therefore imported when it is called."""

    def make_context(self, *arguments: Any, **named: Any) -> Any:
        from data_tools.convert import app as convert_app

        return readable_command(convert_app).make_context(*arguments, **named)


class _Flops(TyperCommand):
    """The command of vitscale.flops, imported when it is called."""

    def make_context(self, *arguments: Any, **named: Any) -> Any:
        from vitscale.flops.command import app as flops_app

        return readable_command(flops_app).make_context(*arguments, **named)


@app.callback()
def options(version: Version = False) -> None:
    """What goes before a command."""


@app.command(cls=_Convert, short_help="Turn images into a dataset of shards.")
def convert() -> None:
    """Turn images into a dataset of shards; same as vitscale-convert."""


@app.command(cls=_Flops)
def flops() -> None:
    """Say what recipes and runs cost; same as vitscale-flops."""


app.command()(plan)
app.command()(launch)
app.command("train", short_help="Same as launch.")(launch)
app.command()(status)
app.command()(report)
app.command(short_help="Show what this machine has and what would stop a run.")(doctor)
app.command(short_help="Show when a run saw an image, and how.")(seen)
app.command(short_help="Continue without some images: from which step, at what cost.")(without)
app.command(short_help="Check a run against its files and its own steps.")(verify)
app.command(short_help="Compare a recipe's updates with plain torch.")(prove)


app.command(short_help="Evaluate a run, or any weights on a dataset.")(looking.evaluate)
app.command(short_help="Measure the representation by simple classifiers.")(looking.fewshot)
app.command(short_help="Write the representations of a dataset.")(looking.features)
app.command(short_help="Predict what is in images: classes and probabilities.")(looking.predict)
app.command(cls=InspectCommand, short_help="Look inside models; and how fast they are.")(inspect)


@app.command()
def models(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Such as ViT-B/16; all by default.")] = None,
    form: Annotated[ListFormat, typer.Option("--format", help="What to print.")] = "table",
    image_size: Annotated[int, typer.Option(min=1, max=8192, help="Side of the image in pixels.")] = 224,
    num_classes: Annotated[int, typer.Option(min=1, max=10**9, help="Outputs of the linear head.")] = 1000,
) -> None:
    """List models with their parameters, tokens and multiply-adds."""
    from vitscale.cli.models import list_models

    list_models(names or [], as_json=form == "json", image_size=image_size, num_classes=num_classes)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the demo puts its images, shards and run.")] = Path("runs/demo"),
) -> None:
    """Go from images to accuracy on scanned digits, in minutes."""
    from vitscale.cli.demo import run_demo

    run_demo(out)


app.command(short_help="Write weights for timm, transformers, Google's code or ours.")(export)


def main() -> None:
    """Entry point."""
    run(app)
