"""`vitscale vtab`: datasets of VTAB-1k's 19 tasks from local copies, and what is missing for them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from rich.markup import escape
from typer import Argument, Exit, Option, Typer

from data_tools.machine import Machine
from data_tools.vtab.copies import Search
from data_tools.vtab.prepare import DATASETS, IDS_NAME, Ids, Prepared
from data_tools.vtab.prepare import prepare as prepare_task
from data_tools.vtab.tasks import ORIGINS
from vitscale.cli.console import say
from vitscale.cli.options import Workers
from vitscale.ground.errors import DataError, RecipeError, VitscaleError
from vitscale.ground.safe_text import printable
from vitscale.ground.table import Console
from vitscale.ground.vtab import TASKS
from vitscale.ground.wording import counted

app = Typer(
    help="Prepare VTAB-1k from local copies of its datasets.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

Tasks = Annotated[
    list[str] | None,
    Option("--task", metavar="NAME", help="Only this task; those of docs/vtab.md.", show_default="all"),
]


@app.callback()
def _group() -> None:
    """Keeps `prepare` a word of its own."""


@app.command(short_help="Make datasets of all tasks whose images are found.")
def prepare(
    folders: Annotated[
        list[str], Argument(metavar="FOLDER...", help="Folders to search for copies: see docs/vtab.md.")
    ],
    out: Annotated[Path, Option(help="Folder of the tasks' datasets.")],
    tasks: Tasks = None,
    ids: Annotated[
        Path | None,
        Option(help="Take exactly these images: an ids.json, or a folder of TASK/ids.json.", metavar="PATH"),
    ] = None,
    workers: Workers = None,
) -> None:
    """Make datasets of all tasks whose images are found, and say what is missing. Repeat the command to continue.

    A task asked for by --task that is missing, or one that fails, is exit code 3.
    """
    console, errors, tasks = Console(), Console(stderr=True), tasks or []
    asked, places = _known(tasks) or list(TASKS), [Path(folder) for folder in folders]
    if absent := [folder for folder in places if not folder.is_dir()]:
        raise RecipeError(f"{absent[0]}: no such folder")
    pinned = {} if ids is None else _lists(ids, asked)
    if ids is not None:
        if unpinned := [task for task in tasks if task not in pinned]:
            raise RecipeError(f"--ids {ids}: no list for {', '.join(unpinned)}")
        asked = [task for task in asked if task in pinned]
    missing, failed = [], []
    for task in asked:
        try:
            prepared = prepare_task(task, places, out, Machine(workers), console, pinned.get(task))
        except VitscaleError as error:
            failed.append(task)
            errors.print(f"[red]{task}: {escape(str(error))}[/red]", highlight=False, soft_wrap=True)
            continue
        _tell(prepared, out)
        if not prepared.counts:
            missing.append(task)
    done = len(asked) - len(missing) - len(failed)
    rest = f"; missing: {', '.join(missing)}" if missing else ""
    rest += f"; failed: {', '.join(failed)}" if failed else ""
    say(f"prepared in {out}: {done} of {counted(len(asked), 'task')}{rest}")
    if failed or not done or (tasks and missing):
        raise Exit(DataError.exit_code)


def _tell(prepared: Prepared, out: Path) -> None:
    if not prepared.counts:
        assert prepared.search is not None
        lines = _missing(prepared.task, prepared.search)
    else:
        counts = ", ".join(f"{name} {prepared.counts[name]:,}" for name in DATASETS)
        before = " (from before)" if prepared.search is None else ""
        lines = [f"{prepared.task}: {counts}{before} in {out / prepared.task}"]
        if prepared.doubt is not None:
            lines.append(f"  note: these are not the published 1,000 images ({prepared.doubt}); --ids FILE pins them")
    for line in lines:
        say(printable(line))


def _missing(task: str, search: Search) -> list[str]:
    origin, lines = ORIGINS[task], [f"{task}: missing"]
    lines += [f"  cannot be used: {problem}" for problem in search.problems]
    lines += [
        f"  looked for: {', '.join(map(str, search.looked))}",
        f"  get it, TFDS {origin.tfds}:{origin.version}: {origin.get}",
    ]
    return lines


def _known(tasks: Sequence[str]) -> list[str]:
    if unknown := [task for task in tasks if task not in TASKS]:
        raise RecipeError(f"--task {unknown[0]}: no task of VTAB-1k; expected {', '.join(TASKS)}")
    return list(dict.fromkeys(tasks))


def _lists(path: Path, tasks: Sequence[str]) -> dict[str, Ids]:
    """The lists of ids at a path, by task. Raises RecipeError if there is none for any of these tasks."""
    if path.is_dir():
        files = {task: path / task / IDS_NAME for task in tasks}
        found = {task: Ids.read(file) for task, file in files.items() if file.is_file()}
    else:
        ids = Ids.read(path)
        found = {ids.task: ids}
    for task, ids in found.items():
        if ids.task != task:
            raise RecipeError(f"--ids {path}: the list of {task} is one of {ids.task}")
    if not found:
        raise RecipeError(f"--ids {path}: no lists there; expected an ids.json, or TASK/ids.json in a folder")
    return found
