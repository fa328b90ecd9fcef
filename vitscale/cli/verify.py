"""`vitscale verify`: the command line of vitscale.about.checks.verifying."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from vitscale.cli.options import DataRoot
from vitscale.ground.errors import DataError

_SHOWN = {True: "ok", False: "BAD", None: "--"}


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
    from vitscale.ground.table import Console

    console, findings = Console(stderr=True), []
    where = None if report is None else str(report)
    asked = Asked(steps, seed, ranks, root, where, not no_shards, not no_evaluations, everything)
    for finding in verify_run(run, asked, lambda line: console.print(line, style="dim", markup=False, highlight=False)):
        line = f"{_SHOWN[finding.is_sound]:<3}  {finding.what}: {finding.detail}"
        print(json.dumps(asdict(finding)) if as_json else line, flush=True)
        findings.append(finding)
    if asked.exit_code(findings):
        unsound = [finding.what for finding in findings if finding.is_sound is False]
        missed = [finding.what for finding in findings if finding.is_sound is None]
        if unsound:
            raise DataError(f"{run} is not what it says: {'; '.join(unsound)}")
        raise DataError(f"--all: not everything of {run} could be looked at: {'; '.join(missed)}")
