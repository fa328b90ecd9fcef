"""`vitscale prove` and `verify`: a recipe's updates beside plain torch, and a run against its own files."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from vitscale.cli.options import DataRoot, Settings
from vitscale.ground.errors import DataError, ProofError
from vitscale.ground.table import Column, Console, ResultTable, render
from vitscale.ground.wording import counted

_SHOWN = 10  # findings of a proof
_VERDICTS = {True: "ok", False: "BAD", None: "--"}


def prove(
    recipe: Annotated[str, Argument(help="A file, or the name of a recipe that comes with vitscale.")],
    ranks: Annotated[
        int | None, Option("--world", min=1, max=1024, help="Ranks.", show_default="one per CUDA device, or 2 on CPUs")
    ] = None,
    settings: Settings = None,
    as_json: Annotated[bool, Option("--json", help="Print all that was found as JSON.")] = False,
) -> None:
    """Compare ten updates of a recipe's engine, around a small model of its family, with plain torch.

    Gradients, updates, moments, averages and weights each have a limit, which follows from the number formats.
    """
    from vitscale.about.checks.proving import prove_recipe

    found = prove_recipe(recipe, settings or [], ranks, _tell)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        _print_table(found)
    if not found["is_proven"]:
        findings = found["findings"]
        more = [f"and {len(findings) - _SHOWN:,} more; --json has all"] if len(findings) > _SHOWN else []
        raise ProofError("\n  ".join([f"{recipe}: updates are not those of plain torch:", *findings[:_SHOWN], *more]))


def _print_table(found: dict[str, Any]) -> None:
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


def _tell(line: str) -> None:
    Console(stderr=True).print(line, style="dim", markup=False, highlight=False)


def verify(
    run: Annotated[Path, Argument(help="A run's directory.")],
    steps: Annotated[int, Option(min=0, max=10**9, help="Number of steps to take again, at most.")] = 50,
    seed: Annotated[int, Option(min=0, max=2**32, help="Seed for choosing the steps.")] = 0,
    ranks: Annotated[
        int | None, Option("--world", min=1, max=1024, help="Ranks.", show_default="the run's, or 1")
    ] = None,
    root: DataRoot = None,
    report: Annotated[
        Path | None, Option(metavar="FOLDER", help="A report whose results.json is compared, too.")
    ] = None,
    everything: Annotated[bool, Option("--all", help="Take all steps and evaluations again.")] = False,
    no_shards: Annotated[bool, Option("--no-shards", help="Do not read all of the training data.")] = False,
    no_evaluations: Annotated[bool, Option("--no-evaluations", help="Do not evaluate again.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object per finding.")] = False,
) -> None:
    """Check a run against its own files, by evaluating it again, and by taking some of its steps again."""
    from vitscale.about.checks.verifying import Asked, verify_run

    findings, where = [], None if report is None else str(report)
    asked = Asked(steps, seed, ranks, root, where, not no_shards, not no_evaluations, everything)
    for finding in verify_run(run, asked, _tell):
        line = f"{_VERDICTS[finding.is_sound]:<3}  {finding.what}: {finding.detail}"
        print(json.dumps(asdict(finding)) if as_json else line, flush=True)
        findings.append(finding)
    if asked.exit_code(findings):
        unsound = [finding.what for finding in findings if finding.is_sound is False]
        missed = [finding.what for finding in findings if finding.is_sound is None]
        if unsound:
            raise DataError(f"{run} is not what it says: {'; '.join(unsound)}")
        raise DataError(f"--all: not everything of {run} could be looked at: {'; '.join(missed)}")
