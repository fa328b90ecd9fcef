"""`vitscale prove`: the command line of vitscale.about.checks.proving."""

import json
from typing import Annotated, Any

from typer import Argument, Option

from vitscale.cli.options import Settings
from vitscale.ground.errors import ProofError

_SHOWN = 10


def prove(
    recipe: Annotated[str, Argument(help="A file, or the stem of a recipe that comes with vitscale.")],
    ranks: Annotated[
        int | None,
        Option("--world", min=1, max=1024, help="Ranks.", show_default="one per CUDA device, or 2 on CPUs"),
    ] = None,
    settings: Settings = None,
    as_json: Annotated[bool, Option("--json", help="Print all that was found as JSON.")] = False,
) -> None:
    """Compare ten updates of a recipe's engine, around a small model of its family, with plain torch.

    Gradients, updates, moments, averages and weights each have a limit, which follows from the number formats.
    """
    from vitscale.about.checks.proving import prove_recipe
    from vitscale.ground.table import Console

    console = Console(stderr=True)
    found = prove_recipe(
        recipe, settings or [], ranks, lambda line: console.print(line, style="dim", markup=False, highlight=False)
    )
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        _print_table(found)
    if not found["is_proven"]:
        findings = found["findings"]
        more = [f"and {len(findings) - _SHOWN:,} more; --json has all"] if len(findings) > _SHOWN else []
        raise ProofError("\n  ".join([f"{recipe}: updates are not those of plain torch:", *findings[:_SHOWN], *more]))


def _print_table(found: dict[str, Any]) -> None:
    from vitscale.ground.table import Column, ResultTable, render
    from vitscale.ground.wording import counted

    aspects = ("gradient", "update", "moments", "average")
    rows = [
        {**dict.fromkeys(aspects), **group, "weights": "OTHERS" if group["weights"]["error"] else "as masters"}
        for group in found["groups"]
    ]
    columns = [
        Column("group", "trained with", is_text=True, folds=True),
        Column("parameters", "tensors", spare=1),
        Column("elements", "elements", "{:,}".format, spare=2),
        *(Column(aspect, aspect, _cell, style=_colour) for aspect in aspects),
        Column("weights", "weights", is_text=True),
    ]
    notes = [
        f"{found['steps']} updates on {counted(found['ranks'], 'rank')} ({found['device']}), "
        f"ZeRO {found['zero_stage']}, {found['precision']}, {found['optimizer']}, {found['objective']}, no dropout",
        f"Micro-batch {found['micro_batch']}, accumulation {found['accumulation']}; the recipe on so many ranks: "
        f"{found['recipe_micro_batch']}, {found['recipe_accumulation']}",
        f"Norm of all gradients: {_cell(found['norm'])}; clipped in {found['clipped_steps']} of the updates",
    ]
    legend = ["Worst error / its limit, relative. Gradients: against fp32; all else: what follows from them."]
    render(ResultTable(columns, rows, legend=legend, notes=notes), "table")


def _cell(worst: dict[str, Any]) -> str:
    error = "not finite" if worst["error"] is None else f"{worst['error']:.1e}"
    return f"{error} / {worst['limit']:.1e}"


def _colour(worst: dict[str, Any] | None) -> str:
    is_within = worst is None or (worst["error"] is not None and worst["error"] <= worst["limit"])
    return "" if is_within else "bold red"
