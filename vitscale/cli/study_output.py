"""What `vitscale study` does and prints."""

import shlex
import sys
import time
from collections import Counter
from pathlib import Path

from rich.live import Live
from rich.table import Table
from rich.text import Text

from vitscale.about.status import RunReader, RunStatus
from vitscale.about.studies.engine import Engine
from vitscale.about.studies.expansion import Entry, Expansion, expand
from vitscale.about.studies.local import LocalEngine
from vitscale.about.studies.outcomes import check_unchanged
from vitscale.about.studies.ray import RayEngine
from vitscale.about.studies.reading import find_study, load_study
from vitscale.about.studies.results import RESULTS_FILE, About
from vitscale.about.studies.running import Progress, StudyRun
from vitscale.about.studies.slurm import SlurmEngine
from vitscale.ground.errors import EXIT_DONE, RecipeError, VitscaleError
from vitscale.ground.table import Column, Console, ResultTable, Row, render
from vitscale.launch import Pretraining
from vitscale.launch.clusters import Job, launch_command, read_pairs
from vitscale.launch.ends import EXIT_PREEMPTED

_LOOK_EVERY_SECONDS = 2.0


def make_engine(name: str, folder: Path, slots: int | None, options: list[str]) -> Engine:
    """An engine for a study in a folder. Raises `RecipeError` for options that it does not have."""
    if name == "slurm":
        return SlurmEngine(folder, slots, read_pairs("--engine-option", options))
    if name == "ray":
        return RayEngine(slots, read_pairs("--engine-option", options))
    if options:
        raise RecipeError(f"--engine-option {options[0]}: --engine local has none")
    return LocalEngine(slots)


def run_study(
    study: str,
    folder: Path | None,
    engine: str,
    slots: int | None,
    engine_options: list[str],
    settings: list[str],
    *,
    dry_run: bool,
    check: bool,
) -> int:
    """Run a study, or list its entries; returns the exit code. Raises `VitscaleError`."""
    file = find_study(study)
    folder = folder or Path("runs") / file.stem
    expansion = expand(load_study(file), folder, settings, file.parent)
    if dry_run:
        _list_entries(expansion, folder)
        return EXIT_DONE
    check_unchanged(expansion.entries.values(), folder)
    if check:
        from vitscale.about.studies.checking import check_entries  # loads torch, which takes seconds

        check_entries(expansion, folder)
    about = About(file.stem, str(file), engine, settings)
    with _Watch() as watch:
        run = StudyRun(expansion, folder, make_engine(engine, folder, slots, engine_options), about, watch.look)
        code = run.run()
    _show_results(run)
    if code == EXIT_PREEMPTED:
        print(f"{_done(run)} are done; repeat the command to continue", file=sys.stderr)
    return code


def _done(run: StudyRun) -> str:
    count = sum(one.state == "done" for one in run.progress.values())
    return f"{count:,} of {len(run.progress):,} entries"


def _list_entries(expansion: Expansion, folder: Path) -> None:
    """Print the command of each entry; an entry that waits for a choice has none yet."""
    for entry in expansion.entries.values():
        if entry.choice is not None:
            print(f"# {folder / entry.name}: the winner of {entry.choice}, evaluated on {entry.evaluated_on}")
            continue
        option = entry.options[0]
        print(shlex.join(launch_command(Job(Pretraining(option.source, option.settings, folder / entry.name)))))


# ---- While it runs ---------------------------------------------------------------------------------------------------


class _Watch:
    """Shows a running study: a live table on a terminal, else a line whenever an entry begins or ends."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._live = (
            Live(console=self._console, auto_refresh=False, transient=True) if self._console.is_terminal else None
        )
        self._readers: dict[str, RunReader] = {}
        self._shown: dict[str, str] = {}
        self._looked_at = 0.0

    def __enter__(self) -> "_Watch":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def look(self, run: StudyRun) -> None:
        """Show what has changed."""
        if self._live is None:
            for name, progress in run.progress.items():
                if self._shown.get(name, "waiting") != progress.state:
                    self._shown[name] = progress.state
                    self._say(_line(run.expansion.entries[name], progress))
            for name, winner in run.winners.items():
                if f"choice {name}" not in self._shown:
                    self._shown[f"choice {name}"] = str(winner)
                    self._say(f"{name}: {_winner(winner)}")
        elif time.monotonic() - self._looked_at > _LOOK_EVERY_SECONDS:
            self._looked_at = time.monotonic()
            self._live.update(self._table(run), refresh=True)

    def _say(self, line: str) -> None:
        self._console.print(Text(f"study: {line}"), soft_wrap=True)

    def _table(self, run: StudyRun) -> Table:
        """A table of the entries that are running or have failed, and the number of the others."""
        table = Table(box=None, pad_edge=False)
        for title in ("entry", "state", "step", "loss", "left"):
            table.add_column(title, justify="left" if title in ("entry", "state") else "right")
        left: list[float | None] = []
        for name, progress in run.progress.items():
            if progress.state == "running":
                status = self._status(run, name)
                left.append(None if status is None else status.left_s)
                table.add_row(name, "running", *_figures(status))
            elif progress.state == "failed":
                table.add_row(name, f"failed ({progress.code})", "", "", "")
        states = Counter(one.state for one in run.progress.values())
        counts = ", ".join(f"{count} {state}" for state, count in states.items())
        remaining = time_left(run, left)
        table.caption = counts + ("" if remaining is None else f"; {duration(remaining)} left")
        table.caption_justify = "left"
        return table

    def _status(self, run: StudyRun, name: str) -> RunStatus | None:
        reader = self._readers.setdefault(name, RunReader(str(run.folder / name)))
        try:
            return reader.read()
        except VitscaleError:  # the entry has written nothing yet
            return None


def _winner(label: str | None) -> str:
    return "no candidate is left" if label is None else f"{label or 'the only candidate'} wins"


def _line(entry: Entry, progress: Progress) -> str:
    if progress.state == "done" and progress.outcome is not None:
        metrics = ", ".join(f"{key} {value:.4f}" for key, value in progress.outcome.metrics.items())
        on = f" on {entry.evaluated_on}" if entry.evaluated_on else ""
        return f"{entry.name} is done{f': {metrics}{on}' if metrics else ''}"
    if progress.state == "failed":
        return f"{entry.name} has failed ({progress.code}): {progress.why}"
    if progress.state == "not run":
        return f"{entry.name} is not run: {progress.why}"
    return f"{entry.name} is {progress.state}"


def _figures(status: RunStatus | None) -> tuple[str, str, str]:
    if status is None or status.step is None:
        return "", "", ""
    total = "" if status.total_steps is None else f" of {status.total_steps:,}"
    loss = "" if status.loss is None else f"{status.loss:.4g}"
    return f"{status.step:,}{total}", loss, "" if status.left_s is None else duration(status.left_s)


def time_left(run: StudyRun, running: list[float | None]) -> float | None:
    """The estimated seconds until the study is done, from the mean time of finished entries; None before one is."""
    taken = [one.seconds for one in run.progress.values() if one.state == "done" and one.seconds is not None]
    if not taken:
        return None
    mean = sum(taken) / len(taken)
    waiting = sum(one.state == "waiting" for one in run.progress.values())
    work = sum(mean / 2 if left is None else left for left in running) + waiting * mean
    return work / max(1, len(running))


def duration(seconds: float) -> str:
    """Seconds as text: `1:02:03`, or from 48 hours on `2 d 02:03`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours // 24} d {hours % 24:02}:{minutes:02}" if hours >= 48 else f"{hours}:{minutes:02}:{rest:02}"


# ---- At the end ------------------------------------------------------------------------------------------------------

_SHOWN = "validation/top1"
_COLUMNS = (
    Column("entry", "entry", is_text=True),
    Column("state", "state", is_text=True),
    Column("dataset", "evaluated on", is_text=True),
    Column("metric", "metric", is_text=True),
    Column("value", "value", lambda value: f"{value:.4f}"),
)


def _show_results(run: StudyRun) -> None:
    rows: list[Row] = []
    for name, progress in run.progress.items():
        metrics = progress.outcome.metrics if progress.outcome is not None else {}
        key = _SHOWN if _SHOWN in metrics else next(iter(metrics), None)
        rows.append(
            {
                "entry": name,
                "state": progress.state if progress.code is None else f"{progress.state} ({progress.code})",
                "dataset": run.expansion.entries[name].evaluated_on,
                "metric": key,
                "value": None if key is None else metrics[key],
            }
        )
    notes = [f"{name}: {_winner(winner)}" for name, winner in run.winners.items()]
    render(ResultTable(_COLUMNS, rows, notes=[*notes, f"Every metric: {run.folder / RESULTS_FILE}"]), "table")
