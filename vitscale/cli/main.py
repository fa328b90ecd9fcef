"""The `vitscale` command. Each subcommand imports what it needs when it runs, so that `--help` is instant."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from vitscale.errors import EXIT_DONE, VitscaleError

app = typer.Typer(
    help="Pre-train Vision Transformers at scale.", no_args_is_help=True, add_completion=False, rich_markup_mode=None
)
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe's field.")]


@app.command()
def recipe(
    name: Annotated[str, typer.Argument(help="A file, or the stem of a recipe that comes with vitscale.")],
    settings: Settings = None,
) -> None:
    """Check a recipe and print it with every default and override."""
    import yaml

    from vitscale.recipe import load_recipe

    print(yaml.safe_dump(load_recipe(name, settings or []).dump(), sort_keys=False), end="")


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="The directory of a run.")],
    step: Annotated[int | None, typer.Option(help="Of the checkpoint; the newest by default.")] = None,
    settings: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Evaluate a checkpoint by the evaluators of its recipe."""
    from vitscale.evaluation.finished import evaluate_run

    at, values = evaluate_run(run, settings or [], step)
    if as_json:
        print(json.dumps({"step": at, **values}))
        return
    print(f"{run}, step {at:,}")
    for metric, value in values.items():
        print(f"  {metric:<24} {value:.4f}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the demo puts its images, shards and run.")] = Path("runs/demo"),
) -> None:
    """Images to accuracy on scanned digits: convert, pre-train with ZeRO-2 on two ranks, resume, evaluate."""
    from vitscale.cli.demo import run_demo

    run_demo(out)


def main() -> None:
    """Entry point: one readable message and an exit code for what a person can mend, a trace for a bug."""
    try:
        app()
    except VitscaleError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(EXIT_DONE)
