"""`vitscale study`: the command line of vitscale.about.studies."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

EngineName = Literal["local", "slurm", "ray"]
Study = Annotated[str, typer.Argument(metavar="STUDY", help="A file, or the stem of one that comes with vitscale.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a field of every entry's recipe.")
]


class _RunByDefault(TyperGroup):
    """`vitscale study FILE` is `vitscale study run FILE`; without anything, the studies are listed."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        if not args:
            args = ["list"]
        elif args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    help="Run a study: many runs from one file.",
    cls=_RunByDefault,
    rich_markup_mode=None,
)


@app.command("list")
def list_() -> None:
    """List the studies that come with vitscale, as without a command."""
    from vitscale.about.studies.reading import list_studies
    from vitscale.ground.table import hanging

    for stem, title in list_studies().items():
        print(f"{stem:<20}  {hanging(title, 22)}")


@app.command()
def schema() -> None:
    """Print the JSON schema of studies, for editors."""
    from vitscale.about.studies.reading import study_schema

    print(json.dumps(study_schema(), indent=1))


@app.command()
def run(
    study: Study,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="Folder for the run directories, one per entry.", show_default="runs/<study stem>"),
    ] = None,
    engine: Annotated[
        EngineName,
        typer.Option(help="What runs the entries: this machine; array jobs of Slurm, each on a node; a Ray cluster."),
    ] = "local",
    slots: Annotated[
        int | None,
        typer.Option(
            min=1, max=65536, help="Entries at a time.", show_default="one per CUDA device; one on CPUs; Slurm: all"
        ),
    ] = None,
    engine_options: Annotated[
        list[str] | None,
        typer.Option(
            "--engine-option",
            metavar="KEY=VALUE",
            help="For slurm: an option of sbatch; for ray: gpus or cpus of each entry.",
        ),
    ] = None,
    settings: Settings = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the entries and start nothing.")] = False,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Start without looking at data and weights that only entries can see.")
    ] = False,
) -> None:
    """Run what is not finished; `vitscale study STUDY` is short for it.

    Repeating it continues. Before the first entry starts, the data sets and initial weights of all are looked at.
    """
    from vitscale.cli.study_output import run_study

    words = engine_options or [], settings or []
    raise typer.Exit(run_study(study, folder, engine, slots, *words, dry_run=dry_run, check=not no_check))


@app.command()
def plan(
    study: Study,
    devices: Annotated[int, typer.Option(min=1, max=2**20, help="Number of devices for all entries.")],
    hardware: Annotated[str, typer.Option(metavar="NAME", help="h100, h200, a100-pcie, ...")],
    slots: Annotated[
        int, typer.Option(min=1, max=2**20, help="Entries at a time; they share the devices equally.")
    ] = 1,
    samples: Annotated[
        int | None,
        typer.Option(min=1, max=2**53, help="Training samples, if neither a dataset nor the study says."),
    ] = None,
    price: Annotated[float | None, typer.Option(min=0, max=1e9, help="Price of one device for one hour.")] = None,
    mfu: Annotated[
        float | None,
        typer.Option(metavar="FRACTION", help="Share of their peak that devices reach while computing."),
    ] = None,
    settings: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a study costs before it starts: exaFLOPs, hours, money."""
    from vitscale.cli.study_plan import show_cost

    show_cost(
        study,
        hardware,
        devices,
        slots,
        samples=samples,
        price=price,
        mfu=mfu,
        settings=settings or [],
        as_json=as_json,
    )
