"""`vitscale prove`: the command line of vitscale.proof.proving."""

import json
from typing import Annotated, Any

import typer

from vitscale.cli.looking import Settings
from vitscale.errors import ProofError


def prove(
    recipe: Annotated[str, typer.Argument(help="A file, or the stem of a recipe that comes with vitscale.")],
    ranks: Annotated[
        int | None,
        typer.Option("--world", min=1, max=1024, help="Ranks.", show_default="one a CUDA device, or 2 on CPUs"),
    ] = None,
    settings: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all that was found as JSON.")] = False,
) -> None:
    """Compare ten updates of a recipe's engine, around a small model of its family, with plain torch.

    Gradients, updates, moments, averages and weights each have a limit, which follows from the number formats.
    """
    from vitscale.proof.proving import prove_recipe

    found = prove_recipe(recipe, settings or [], ranks)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        _print_table(found)
    if not found["is_proven"]:
        findings = found["findings"]
        raise ProofError("\n".join([f"{recipe}: updates are not those of plain torch:", *findings]))


def _print_table(found: dict[str, Any]) -> None:
    from vitscale.table import Column, View, render

    rows = [
        {"group": group["group"], "parameters": group["parameters"], "elements": group["elements"]}
        | {aspect: group.get(aspect) for aspect in ("gradient", "update", "moments", "average")}
        | {"weights": "as masters" if not group["weights"]["error"] else "OTHERS"}
        for group in found["groups"]
    ]
    aspects = [
        Column(aspect, aspect, _cell, style=lambda worst: "" if _is_within(worst) else "bold red")
        for aspect in ("gradient", "update", "moments", "average")
    ]
    columns = [
        Column("group", "trained with", is_text=True, folds=True),
        Column("parameters", "tensors", spare=1),
        Column("elements", "elements", "{:,}".format, spare=2),
        *aspects,
        Column("weights", "weights", is_text=True),
    ]
    norm = found["norm"]
    whole = (
        f"the recipe's own on so many ranks: {found['recipe_micro_batch']} x {found['recipe_accumulation']}"
        if (found["recipe_micro_batch"], found["recipe_accumulation"]) != (found["micro_batch"], found["accumulation"])
        else "as the recipe's own"
    )
    notes = [
        f"{found['steps']} updates on {found['ranks']} rank{'s' if found['ranks'] > 1 else ''} ({found['device']}), "
        f"ZeRO {found['zero_stage']}, {found['precision']}, {found['optimizer']}, {found['objective']}; "
        f"micro-batch {found['micro_batch']} x accumulation {found['accumulation']} ({whole}); without dropout",
        f"norm of all gradients: {_cell(norm)}; clipped in {found['clipped_steps']} of {found['steps']} updates",
    ]
    legend = [
        "worst error / its limit, relative; gradient: against fp32; the others: what follows from the applied gradient"
    ]
    render(View(columns, rows, legend=legend, notes=notes), "table")


def _cell(worst: dict[str, Any]) -> str:
    return f"{worst['error']:.1e} / {worst['limit']:.1e}"


def _is_within(worst: dict[str, Any]) -> bool:
    return bool(worst["error"] <= worst["limit"])
