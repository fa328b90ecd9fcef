"""`vitscale study`: run a study, list its entries, say what it costs."""

import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.text import Text
from typer import Argument, Exit, Option, Typer
from typer.core import TyperGroup

from vitscale.about.studies.cost import cost_of
from vitscale.about.studies.engine import Engine, LocalEngine, SlurmEngine
from vitscale.about.studies.expansion import Entry, Expansion, expand
from vitscale.about.studies.outcomes import Progress, check_unchanged
from vitscale.about.studies.reading import find_study, list_studies, load_study, study_schema
from vitscale.about.studies.results import RESULTS_FILE, About
from vitscale.about.studies.running import StudyRun
from vitscale.cli.options import Hardware, Json, Mfu, Price, check_numbers
from vitscale.flops.accounting import PUBLISHED_MFU, PUBLISHED_MFU_SOURCE
from vitscale.flops.hardware import find_device
from vitscale.ground.errors import RecipeError
from vitscale.ground.table import Column, Console, ResultTable, Row, hanging, number, render, short
from vitscale.ground.wording import counted, decimals
from vitscale.launch import Pretraining
from vitscale.launch.clusters import Job, launch_command, read_pairs
from vitscale.launch.ends import EXIT_PREEMPTED

_COST_COLUMNS = (
    Column("part", "part", is_text=True),
    Column("entries", "entries", number(0)),
    Column("exaflops", "exaFLOPs", short),
    Column("device_hours", "device-hours", short),
)
_ON_PAPER = (
    "On paper: training alone, without evaluations and interruptions; the time is these device-hours by the number of "
    "devices at work. Whether a recipe fits into memory, `vitscale plan` tells."
)

EngineName = Literal["local", "slurm"]
Study = Annotated[str, Argument(metavar="STUDY", help="A file, or the name of one that comes with vitscale.")]
Settings = Annotated[
    list[str] | None, Option("--set", metavar="KEY=VALUE", help="Override a field of every entry's recipe.")
]


class _RunByDefault(TyperGroup):
    """`vitscale study FILE` is `vitscale study run FILE`; without anything, the studies are listed."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        if not args:
            args = ["list"]
        elif args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = Typer(
    help="Run a study: many runs from one file. Without a command or STUDY, list those that come with vitscale.",
    cls=_RunByDefault,
    add_completion=False,
    rich_markup_mode=None,
)


@app.command("list")
def list_() -> None:
    """List the studies that come with vitscale, as without a command."""
    for stem, title in list_studies().items():
        print(f"{stem:<20}  {hanging(title, 22)}")


@app.command()
def schema() -> None:
    """Print the JSON schema of studies, for editors."""
    print(json.dumps(study_schema(), indent=1))


@app.command()
def run(
    study: Study,
    folder: Annotated[
        Path | None,
        Option("--dir", help="Folder for the run directories, one per entry.", show_default="runs/<study name>"),
    ] = None,
    engine: Annotated[
        EngineName, Option(help="What runs the entries: this machine, or array jobs of Slurm, each on a node.")
    ] = "local",
    slots: Annotated[
        int | None,
        Option(
            min=1, max=65536, help="Entries at a time.", show_default="one per CUDA device; one on CPUs; Slurm: all"
        ),
    ] = None,
    engine_options: Annotated[
        list[str] | None, Option("--engine-option", metavar="KEY=VALUE", help="For slurm: an option of sbatch.")
    ] = None,
    settings: Settings = None,
    dry_run: Annotated[bool, Option("--dry-run", help="List the entries and start nothing.")] = False,
    no_check: Annotated[
        bool, Option("--no-check", help="Start without looking at data and weights that only entries can see.")
    ] = False,
) -> None:
    """Run what is not finished; `vitscale study STUDY` is short for it.

    Repeating it continues. Before the first entry starts, the data sets and initial weights of all are looked at.
    """
    file = find_study(study)
    folder = folder or Path("runs") / file.stem
    expansion = expand(load_study(file), folder, settings or [], file.parent)
    if dry_run:
        _list_entries(expansion, folder)
        return
    check_unchanged(expansion.entries.values(), folder)
    if not no_check:
        from vitscale.about.studies.checking import check_entries  # loads torch, which takes seconds

        check_entries(expansion, folder)
    about = About(file.stem, str(file), engine, settings or [])
    running = StudyRun(expansion, folder, _engine(engine, folder, slots, engine_options or []), about, _Watch().look)
    code = running.run()
    _show_results(running)
    if code == EXIT_PREEMPTED:
        states = [one.state for one in running.progress.values()]
        done = f"{states.count('done'):,} of {len(states):,} entries are done"
        print(f"{done}; repeat the command to continue", file=sys.stderr)
    raise Exit(code)


@app.command()
def plan(
    study: Study,
    hardware: Hardware,
    samples: Annotated[
        int | None, Option(min=1, max=2**53, help="Training samples, if neither a dataset nor the study says.")
    ] = None,
    price: Price = None,
    mfu: Mfu = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Say what a study will cost: exaFLOPs, device-hours, energy, price."""
    check_numbers({"--mfu": mfu, "--price": price})
    device = find_device(hardware)
    file = find_study(study)
    loaded = load_study(file)
    expansion = expand(loaded, Path("runs") / file.stem, settings or [], file.parent)
    cost = cost_of(loaded, expansion, device, mfu or PUBLISHED_MFU, price, samples)
    if as_json:
        print(json.dumps(asdict(cost) | {"study": file.stem, "device": device.name}, indent=1, allow_nan=False))
        return
    print(f"{file.stem}: {counted(len(cost.entries), 'run')} on {device.name}\n")
    rows = []
    for part in loaded.parts:
        of_part = [one for one in cost.entries if expansion.entries[one.name].part == part]
        sums = {key: sum(getattr(one, key) or 0.0 for one in of_part) or None for key in ("exaflops", "device_hours")}
        rows.append({"part": part, "entries": len(of_part), **sums})
    render(ResultTable(_COST_COLUMNS, rows), "table")
    parts = [f"{short(cost.exaflops)} exaFLOPs", f"{cost.device_hours:,.0f} device-hours"]
    if cost.energy_kwh is not None:
        parts.append(f"at most {cost.energy_kwh:,.0f} kWh")
    if cost.cost is not None:
        parts.append(f"price {cost.cost:,.0f}")
    at_least = "at least " if cost.unknown else ""
    print(f"whole study     {at_least}{', '.join(parts)}")
    if cost.branches:
        whole = cost.exaflops + cost.saved_exaflops
        print(
            f"branches        {counted(len(cost.branches), 'run')} from a step of another's, which saves "
            f"{short(cost.saved_exaflops)} exaFLOPs, {cost.saved_exaflops / whole:.1%} of {short(whole)}"
        )
    if cost.unknown:
        first = cost.unknown[0]
        print(f"not counted     {counted(len(cost.unknown), 'run')}, the first {first.name}: {first.problem}")
    source = f", {PUBLISHED_MFU_SOURCE} (--mfu)" if mfu is None else ""
    assumed = f"At {mfu or PUBLISHED_MFU:.0%} MFU of the peak in {device.training_peak[1]}{source}."
    print(f"\n{hanging(f'{assumed} {_ON_PAPER}', 0)}")


def _engine(name: str, folder: Path, slots: int | None, options: list[str]) -> Engine:
    """An engine for a study in a folder. Raises `RecipeError` for options that it does not have."""
    if name == "slurm":
        return SlurmEngine(folder, slots, read_pairs("--engine-option", options))
    if options:
        raise RecipeError(f"--engine-option {options[0]}: --engine local has none")
    return LocalEngine(slots)


def _list_entries(expansion: Expansion, folder: Path) -> None:
    """Print the command of each entry; an entry that waits for a choice has none yet."""
    for entry in expansion.entries.values():
        if entry.choice is not None:
            print(f"# {folder / entry.name}: the winner of {entry.choice}, evaluated on {entry.evaluated_on}")
            continue
        option = entry.options[0]
        print(shlex.join(launch_command(Job(Pretraining(option.source, option.settings, folder / entry.name)))))


class _Watch:
    """Says of a running study whenever an entry begins or ends. `vitscale status --watch` shows the runs themselves."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._shown: dict[str, str] = {}

    def look(self, run: StudyRun) -> None:
        """Print what has changed."""
        lines = {}
        for name, progress in run.progress.items():
            if self._shown.get(name, "waiting") != progress.state:
                self._shown[name] = progress.state
                lines[name] = _line(run.expansion.entries[name], progress)
        for name, winner in run.winners.items():
            if f"choice {name}" not in self._shown:
                self._shown[f"choice {name}"] = str(winner)
                lines[f"choice {name}"] = f"{name}: {_winner(winner)}"
        for line in lines.values():
            self._console.print(Text(f"study: {line}"), soft_wrap=True)


def _winner(label: str | None) -> str:
    return "no candidate is left" if label is None else f"{label or 'the only candidate'} wins"


def _line(entry: Entry, progress: Progress) -> str:
    if progress.state == "done" and progress.outcome is not None:
        metrics = ", ".join(f"{key} {decimals(value)}" for key, value in progress.outcome.metrics.items())
        on = f" on {entry.evaluated_on}" if entry.evaluated_on else ""
        return f"{entry.name} is done{f': {metrics}{on}' if metrics else ''}"
    if progress.state == "failed":
        return f"{entry.name} has failed ({progress.code}): {progress.why}"
    if progress.state == "not run":
        return f"{entry.name} is not run: {progress.why}"
    return f"{entry.name} is {progress.state}"


_SHOWN = "validation/top1"
_COLUMNS = (
    Column("entry", "entry", is_text=True),
    Column("state", "state", is_text=True),
    Column("dataset", "evaluated on", is_text=True),
    Column("metric", "metric", is_text=True),
    Column("value", "value", decimals),
)


def _show_results(run: StudyRun) -> None:
    rows: list[Row] = []
    for name, progress in run.progress.items():
        metrics = progress.outcome.metrics if progress.outcome is not None else {}
        key = _SHOWN if _SHOWN in metrics else next(iter(metrics), None)
        state = progress.state if progress.code is None else f"{progress.state} ({progress.code})"
        dataset, value = run.expansion.entries[name].evaluated_on, None if key is None else metrics[key]
        rows.append({"entry": name, "state": state, "dataset": dataset, "metric": key, "value": value})
    notes = [f"{name}: {_winner(winner)}" for name, winner in run.winners.items()]
    render(ResultTable(_COLUMNS, rows, notes=[*notes, f"Every metric: {run.folder / RESULTS_FILE}"]), "table")
