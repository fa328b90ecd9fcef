"""`vitscale verify`: the command line of vitscale.replay.verifying."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from vitscale.errors import DataError


def verify(
    run: Annotated[Path, typer.Argument(help="A run's directory.")],
    steps: Annotated[int, typer.Option(min=0, max=10**9, help="Number of steps to take again, at most.")] = 20,
    seed: Annotated[int, typer.Option(min=0, max=2**32, help="Seed for choosing the steps.")] = 0,
    ranks: Annotated[
        int | None, typer.Option("--world", min=1, max=1024, help="Ranks.", show_default="the run's, or 1")
    ] = None,
    root: Annotated[
        str | None, typer.Option("--data-root", metavar="DIR", help="Where the run's data are, if they were moved.")
    ] = None,
    no_shards: Annotated[bool, typer.Option("--no-shards", help="Do not read all of the training data.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per finding.")] = False,
) -> None:
    """Check a run against its own files, and by taking some of its steps again."""
    from vitscale.replay.verifying import verify_run
    from vitscale.table import Console

    console, unsound = Console(stderr=True), []
    for finding in verify_run(
        run,
        steps=steps,
        seed=seed,
        ranks=ranks,
        root=root,
        with_shards=not no_shards,
        say=lambda line: console.print(line, style="dim", markup=False, highlight=False),
    ):
        print(
            json.dumps(asdict(finding))
            if as_json
            else f"{'ok ' if finding.is_sound else 'BAD'}  {finding.what}: {finding.detail}"
        )
        unsound += [] if finding.is_sound else [finding.what]
    if unsound:
        raise DataError(f"{run} is not what it says: {'; '.join(unsound)}")
