"""The `vitscale` command. Each subcommand is a module here, imported when it is called, so that `--help` is instant."""

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand

from vitscale.cli.command_line import HELP, Version, readable_command

app = typer.Typer(
    help="Pre-train Vision Transformers at scale.",
    no_args_is_help=True,
    context_settings=HELP,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# Name -> its function or app, in a module of this package; what is said of it here.
COMMANDS = {
    "recipe": ("recipe:recipe", "Check a recipe and print it in full; or list all."),
    "convert": ("convert:app", "Turn images into a dataset of shards."),
    "flops": ("flops:app", "Count FLOPs, time and price of recipes and runs (vitscale-flops)."),
    "plan": ("plan:plan", "Say what a recipe needs on a cluster: memory, time, price."),
    "launch": ("launch:launch", "Train what a recipe says, and restart it when something fails."),
    "train": ("launch:launch", "Same as launch."),
    "status": ("status:status", "Say how runs are doing: step, loss, speed, time left."),
    "report": ("report:report", "Put the results of runs or a study on one page."),
    "doctor": ("doctor:doctor", "Show what this machine has and what would stop a run."),
    "seen": ("samples:seen", "Show at which steps a run saw an image, and with which crop."),
    "without": ("samples:without", "Continue without some images: from which step, at what cost."),
    "verify": ("checks:verify", "Check a run: its files, and some of its steps taken again."),
    "prove": ("checks:prove", "Compare a recipe's updates with plain torch."),
    "evaluate": ("looking:evaluate", "Evaluate a run, or any weights on a dataset."),
    "fewshot": ("fewshot:fewshot", "Measure representations: few-shot, k-NN, linear probes."),
    "features": ("looking:features", "Write the representations (embeddings) of a dataset."),
    "predict": ("looking:predict", "Predict what is in images: classes and probabilities."),
    "inspect": ("inspect:inspect", "Draw what is inside models: filters, attention, layers."),
    "models": ("models:models", "List models with their parameters, tokens and multiply-adds."),
    "demo": ("demo:demo", "Go from images to accuracy on scanned digits, in minutes."),
    "export": ("export:export", "Write weights for timm, transformers, Google's code or vitscale."),
    "shards": ("shards:app", "Show, check, split, export, adopt data."),
    "dedup": ("dedup:app", "Keep test images out of training data."),
    "vtab": ("vtab:app", "Prepare VTAB-1k from local copies of its datasets."),
    "study": ("study:app", "Run a study: many runs from one file."),
}


class LaterCommand(TyperCommand):
    """One of `COMMANDS`, imported when it is called."""

    def load(self) -> Any:
        """The command itself, or the group of commands."""
        module, _, name = COMMANDS[str(self.name)][0].partition(":")
        found = getattr(import_module(f"vitscale.cli.{module}"), name)
        if not isinstance(found, typer.Typer):
            function, found = found, typer.Typer(add_completion=False, rich_markup_mode=None)
            found.command()(function)
        return readable_command(found)

    def make_context(self, *arguments: Any, **named: Any) -> Any:
        """The loaded command's own context, in which it is then called."""
        return self.load().make_context(*arguments, **named)


@app.callback()
def options(version: Version = False) -> None:
    """What goes before a command."""


def _imported_later() -> None:
    """Stands for the function of a command."""


for _name, (_, _help) in COMMANDS.items():
    app.command(_name, cls=LaterCommand, short_help=_help)(_imported_later)
