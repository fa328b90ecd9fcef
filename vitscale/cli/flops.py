"""vitscale-flops: what recipes and runs cost, beside what the paper publishes.

One report a call: the grid (by default), --breakdown, --budget, --hardware or --run.
"""

from pathlib import Path
from typing import Annotated

from typer import Argument, Context, Option, Typer

from vitscale.cli.command_line import HELP, Version
from vitscale.cli.options import Price, check_numbers, given_options
from vitscale.flops import reports
from vitscale.flops.estimate import Estimate, estimate
from vitscale.flops.hardware import find_device
from vitscale.flops.published import table_6
from vitscale.ground.errors import RecipeError
from vitscale.ground.table import Form, render
from vitscale.recipe import find_recipe, load_recipe, recipes_dir

# Options that go with the option that chooses the report; the first of these that is given chooses.
_OF_HARDWARE = {"--devices", "--mfu", "--price"}
_COST_OPTIONS = {"--hardware", *_OF_HARDWARE}
_GOES_WITH = {
    "--run": {"--hardware", "--price", "--format"},
    "--breakdown": {"RECIPE", "--set", "--samples", "--format"},
    "--budget": {"RECIPE", "--set", "--samples", "--format", *_COST_OPTIONS},
    "--hardware": {"RECIPE", "--set", "--samples", "--format", *_COST_OPTIONS},
}

_MOST = 2**53  # whole numbers up to here are exact as floats

app = Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(context_settings=HELP)
def command(
    context: Context,
    recipes: Annotated[
        list[str] | None,
        Argument(metavar="RECIPE", help="Files, or names of recipes that come with vitscale; all by default."),
    ] = None,
    settings: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="Override a field of every recipe.")
    ] = None,
    samples: Annotated[
        int | None, Option(min=1, max=_MOST, help="Training samples, where epochs are of other data.")
    ] = None,
    form: Annotated[Form, Option("--format", help="What to print.")] = "table",
    breakdown: Annotated[bool, Option("--breakdown", help="FLOPs and parameters of each part of the models.")] = False,
    budget: Annotated[
        float | None, Option(metavar="EXAFLOPS", help="List what costs at most so much, the paper's best first.")
    ] = None,
    hardware: Annotated[
        str | None,
        Option(metavar="NAME", help="Hours and energy on h200, a100, tpuv3, ...: with --devices and --mfu, or --run."),
    ] = None,
    devices: Annotated[int | None, Option(min=1, max=_MOST, help="Number of devices.")] = None,
    mfu: Annotated[
        float | None, Option(metavar="FRACTION", help="Share of their peak FLOP/s that training reaches, such as 0.45.")
    ] = None,
    price: Price = None,
    runs: Annotated[
        list[Path] | None, Option("--run", metavar="DIR", help="What a run has cost so far; may be repeated.")
    ] = None,
    version: Version = False,
) -> None:
    """What recipes cost: parameters, multiply-adds and exaFLOPs, beside the paper's figures."""
    _check({"RECIPE" if name == "recipes" else flag for name, flag in given_options(context).items()})
    check_numbers({"--budget": budget, "--mfu": mfu, "--price": price})
    device = None if hardware is None else find_device(hardware)
    if runs:
        from vitscale.flops.runs import runs_table
        from vitscale.runs.run import Run

        render(runs_table([Run(run) for run in runs], device, price), form)
        return
    bought = None
    if device is not None:
        if devices is None or mfu is None:
            raise RecipeError(
                "--hardware needs --devices N and --mfu FRACTION. No utilisation is assumed: take that of a run of "
                "yours (vitscale-flops --run DIR), or what the paper's cores reached (Table 2: 0.32 for ViT-H/14, 0.43 "
                "for ViT-L/16)"
            )
        bought = reports.Hardware(device, devices, price)
    estimates = _estimates(recipes or [], settings or [], samples)
    if breakdown:
        table = reports.breakdown_table(estimates)
    elif budget is not None or bought is not None:
        table = reports.purchase_table(estimates, budget, bought, mfu)
    else:
        table = reports.grid_table(estimates)
    render(table, form)


def _check(given: set[str]) -> None:
    report = next((option for option in _GOES_WITH if option in given), None)
    allowed = {"RECIPE", "--set", "--samples", "--format"} if report is None else _GOES_WITH[report]
    foreign = sorted(given - allowed - {report})
    if foreign and report is not None:
        raise RecipeError(f"{', '.join(foreign)} does not go with {report}")
    of_hardware = sorted(given & _OF_HARDWARE)
    if of_hardware and "--hardware" not in given:
        raise RecipeError(f"{', '.join(of_hardware)}: only with --hardware")
    if "--samples" in given and "RECIPE" not in given:
        raise RecipeError("--samples is the size of one training set: name only recipes that train on it")


def _estimates(names: list[str], settings: list[str], samples: int | None) -> list[Estimate]:
    """Estimates of the named recipes in their order, or of all: first Table 6's rows in its order, then by name."""
    if not names:
        files = sorted(recipes_dir().glob("*.yaml"))
        found = [estimate(file.stem, load_recipe(file, settings)) for file in files]
        order = {row: place for place, row in enumerate(table_6())}
        return sorted(found, key=lambda one: len(order) if one.published is None else order[one.published])
    found = []
    for name in names:
        file = find_recipe(name)
        shipped = file.parent.resolve() == recipes_dir().resolve()
        found.append(estimate(file.stem if shipped else str(file), load_recipe(file, settings), samples))
    if len(found) == 1:
        reports.check_known(found[0])
    return found
