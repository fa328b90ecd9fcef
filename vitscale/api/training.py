"""Conversion and training from Python: what `vitscale convert` and `vitscale launch` do."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias, TypedDict, Unpack, overload

from data_tools.classes import read_classes
from data_tools.conversion import convert as run_conversion
from data_tools.machine import Machine
from data_tools.request import Request, parse_splits
from data_tools.sources import Kind, SourceOptions
from vitscale.api.dataset import Dataset
from vitscale.api.run import Recipe, Run
from vitscale.data.shards.images import ImageOptions
from vitscale.ground import errors, storage
from vitscale.ground.errors import EXIT_DONE, PreemptedError, RecipeError, VitscaleError, check_numbers
from vitscale.ground.table import Console
from vitscale.recipe import Recipe as AnyRecipe
from vitscale.recipe import find_recipe
from vitscale.recipe.strict_yaml import dump_yaml
from vitscale.runs.metrics import MetricsLog
from vitscale.runs.names import default_run_dir
from vitscale.runs.run import RunFiles

Place: TypeAlias = str | os.PathLike[str]
"""A path or URL."""

_LOOK_EVERY_SECONDS = 0.1
_OUTPUT = "output"
_MOST_LINES = 50


class ConvertOptions(TypedDict, total=False):
    """The options of `convert`."""

    format: Kind | None
    labels: str | None
    classes: Place | None
    unlabelled: bool
    short_side: int | None
    seed: int
    workers: int | None
    progress: bool


class TrainOptions(TypedDict, total=False):
    """The options of `train`."""

    ranks: int | None
    resume: Literal["auto", "never"]
    max_restarts: int
    stop_at: int | None
    time_limit: float | None
    smoke: bool


@overload
def convert(source: Place, out: Place, split: None = None, **options: Unpack[ConvertOptions]) -> Dataset: ...
@overload
def convert(
    source: Place, out: Place, split: Mapping[str, str | int], **options: Unpack[ConvertOptions]
) -> dict[str, Dataset]: ...
def convert(
    source: Place,
    out: Place,
    split: Mapping[str, str | int] | None = None,
    *,
    format: Kind | None = None,
    labels: str | None = None,
    classes: Place | None = None,
    unlabelled: bool = False,
    short_side: int | None = None,
    seed: int = 0,
    workers: int | None = None,
    progress: bool = False,
) -> Dataset | dict[str, Dataset]:
    """Turn images into a dataset of shards, or continue; what is complete already is only opened.

    Args:
        source: a folder of class folders, tars, a list, parquet, TFRecords, or a pattern or URL of them.
        out: the folder or URL of the dataset; new, empty, or an unfinished conversion of the same.
        split: name -> what: {"test": "20%", "train": "rest"}, for several datasets below `out`.
        format: the source's format; by default detected.
        labels: a file of labels, for a source without class folders.
        classes: a file of class names, or a dataset whose classes are taken.
        unlabelled: give no image a label.
        short_side: shrink larger images to this side in pixels.
        seed: the seed of the global shuffle.
        workers: processes; by default one per core.
        progress: show progress.

    Returns the dataset, or with `split` the datasets by name. Raises as `vitscale convert` ends: `RecipeError` for
    options, `DataError` for the source, `StorageError` for a place that does not answer.
    """
    check_numbers(1, workers=workers, short_side=short_side)
    check_numbers(0, seed=seed)
    if split is not None and (not split or any(isinstance(what, float) for what in split.values())):
        raise RecipeError(f"split={split}: expected names and what each takes ('20%', 1000, 'rest'), or None")
    where = _where(out)
    request = Request(
        src=_where(source),
        kind=format,
        source=SourceOptions(labels, unlabelled=unlabelled),
        classes=None if classes is None else read_classes(Path(classes)),
        shuffle_seed=seed,
        images=ImageOptions(short_side),
        splits=parse_splits([f"{name}={what}" for name, what in (split or {}).items()]),
    )
    run_conversion(request, where, Machine(workers), Console(stderr=True, quiet=not progress))
    return Dataset(where) if split is None else {name: Dataset(storage.join(where, name)) for name in split}


class Training:
    """A launch in a process of its own, which restarts ranks that fail. It goes on if this process ends.

    Attributes:
        run_dir: the run's directory.
    """

    def __init__(self, command: Sequence[str], run_dir: Path, folder: Path) -> None:
        self.run_dir, self._folder, self._is_told, self._output = run_dir, folder, False, b""
        with (folder / _OUTPUT).open("wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    @property
    def metrics(self) -> MetricsLog:
        """The metrics so far, read anew: `metrics["loss"]` is a column."""
        return RunFiles(self.run_dir, None).metrics

    @property
    def output(self) -> str:
        """What it has printed so far."""
        self._read()
        return self._output.decode(errors="replace")

    def wait(self) -> Run:
        """Wait for its end, and show what it prints. Ctrl-C saves and ends it; a second one ends it at once.

        Raises the error that it ended with, by its exit code, and KeyboardInterrupt once it has ended.
        """
        interrupt = None
        while True:
            try:
                self._follow()
                break
            except KeyboardInterrupt as error:
                interrupt = error
                self._tell()
        shutil.rmtree(self._folder, ignore_errors=True)
        if interrupt is not None:
            raise interrupt
        code = self._process.returncode
        if code != EXIT_DONE and not (self._is_told and code == PreemptedError.exit_code):
            raise _error_of(code)(f"training in {self.run_dir} ended with exit code {code}: {self._last_words()}")
        return Run(self.run_dir)

    def stop(self) -> Run:
        """Have it save and end, and wait for that. The same `train` continues it. Raises as `wait` does."""
        self._tell()
        return self.wait()

    def _tell(self) -> None:
        self._is_told = True
        if self.is_running:
            self._process.send_signal(signal.SIGTERM)

    def _follow(self) -> None:
        is_running = True
        while is_running:
            is_running = self.is_running  # asked before reading, so that its last lines are read, too
            if new := self._read():
                print(new.decode(errors="replace"), end="", file=sys.stderr, flush=True)
            if is_running:
                time.sleep(_LOOK_EVERY_SECONDS)

    def _read(self) -> bytes:
        with suppress(FileNotFoundError), (self._folder / _OUTPUT).open("rb") as output:
            output.seek(len(self._output))
            new = output.read()
            self._output += new
            return new
        return b""

    def _last_words(self) -> str:
        """The error that it has printed, or else its last line."""
        lines = self.output.splitlines()
        first = next((at for at, line in enumerate(lines) if line.startswith("error: ")), len(lines) - 1)
        words = [line for line in lines[max(first, 0) :] if not line.startswith("launch: ")] or lines[-1:]
        return "\n".join(words[:_MOST_LINES]).removeprefix("error: ")

    def __repr__(self) -> str:
        state = "running" if self.is_running else f"ended with exit code {self._process.returncode}"
        return f"Training({str(self.run_dir)!r}, {state})"


@overload
def train(
    recipe: AnyRecipe | Place,
    run_dir: Place | None = None,
    *,
    wait: Literal[True] = True,
    **options: Unpack[TrainOptions],
) -> Run: ...
@overload
def train(
    recipe: AnyRecipe | Place, run_dir: Place | None = None, *, wait: Literal[False], **options: Unpack[TrainOptions]
) -> Training: ...
def train(
    recipe: AnyRecipe | Place,
    run_dir: Place | None = None,
    *,
    ranks: int | None = None,
    resume: Literal["auto", "never"] = "auto",
    max_restarts: int = 3,
    stop_at: int | None = None,
    time_limit: float | None = None,
    smoke: bool = False,
    wait: bool = True,
) -> Run | Training:
    """Train a recipe on this machine, or continue its run, as `vitscale launch` does.

    Args:
        recipe: a recipe, its file, or its name.
        run_dir: the run's directory; by default runs/NAME.
        ranks: processes; by default one per CUDA device, or one on CPUs.
        resume: "never" to refuse a directory that holds a run.
        max_restarts: the most restarts in a row without a new checkpoint.
        stop_at: save and end after this step.
        time_limit: save and end after so many minutes, which is a `PreemptedError`.
        smoke: a small model of the family, four steps, generated pictures.
        wait: wait for the end and show the launcher's progress; otherwise return at once what can be waited for.

    Raises `VitscaleError`, of the class that the exit code stands for. Ctrl-C saves, ends training, and is raised.
    """
    check_numbers(1, ranks=ranks)
    folder = Path(tempfile.mkdtemp(prefix="vitscale-train-"))
    try:
        if isinstance(recipe, AnyRecipe):
            file = folder / f"{recipe.name if isinstance(recipe, Recipe) else 'recipe'}.yaml"
            file.write_text(dump_yaml(recipe.dump()), encoding="utf-8")
        else:
            file = find_recipe(_where(recipe))
        where = default_run_dir(str(file), smoke=smoke) if run_dir is None else Path(_where(run_dir))
        options: dict[str, object] = {"ranks": ranks, "resume": resume, "max-restarts": max_restarts}
        options |= {"stop-at": stop_at, "time-limit": time_limit}
        command = [sys.executable, "-P", "-m", "vitscale", "launch", str(file), "--run-dir", str(where)]
        command += [f"--{name}={value}" for name, value in options.items() if value is not None]
        training = Training([*command, *(["--smoke"] if smoke else [])], where, folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return training.wait() if wait else training


def _where(place: Place) -> str:
    """A path or URL as text. Raises `RecipeError` for what none can be."""
    text = os.fspath(place)
    if not text or "\0" in text:
        raise RecipeError(f"{text!r}: expected a path or URL")
    return text


def _error_of(code: int) -> type[VitscaleError]:
    """The first class of errors with this exit code."""
    kinds = (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, VitscaleError))
    return next((kind for kind in kinds if kind.exit_code == code), VitscaleError)
