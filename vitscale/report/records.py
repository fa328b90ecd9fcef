"""What a run directory holds, finished or not, as the report's results.json has it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitscale.errors import DataError, RecipeError
from vitscale.flops.records import Run, read_run
from vitscale.recipe import EvalCrop, Recipe, differences, find_dataset, read_recipe, recipe_sha256
from vitscale.runs.checkpoint_index import CheckpointIndex, data_root, find_path
from vitscale.runs.checkpoints import read_checkpoints
from vitscale.runs.done import verification
from vitscale.runs.metrics import MetricsLog, Row
from vitscale.runs.names import CHECKPOINTS, METRICS_FILE, RECIPE_FILE, checkpoints_root
from vitscale.runs.reading import number
from vitscale.storage import is_url
from vitscale.weight_formats import POSITIONS_RULE

_MOST_POINTS = 300
"""Points of a curve at most, so that the page of a long run stays small."""
_MOST_PARENTS = 20


@dataclass(frozen=True)
class Record:
    """A run as its directory tells it.

    Attributes:
        directory: the run's directory.
        recipe: the recipe in that directory.
        index: the newest checkpoint's index; None without one, and for checkpoints at a URL.
        run: what the run has done and cost; None before its first step.
        log: its metrics.
        parent: the run that it began with; None if it began with none, or with a file of weights.
        notes: what is damaged, missing or contradictory.
    """

    directory: Path
    recipe: Recipe
    index: CheckpointIndex | None
    run: Run | None
    log: MetricsLog
    parent: "Record | None"
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.directory.resolve().name

    @property
    def is_done(self) -> bool:
        """Whether it is finished."""
        return self.run is not None and self.run.is_done

    @property
    def chain(self) -> list["Record"]:
        """This run and those that it goes back to, the newest first."""
        return [self, *(self.parent.chain if self.parent is not None else [])]

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics at the end, or else of the last evaluation so far."""
        if self.run is not None and self.run.is_done:
            return self.run.evaluation
        last = self.log.evaluations[-1][1] if self.log.evaluations else {}
        return {key: value for key, value in last.items() if value is not None}

    @property
    def trunk(self) -> "Record":
        """The run whose first step was step 1: this one, or what a branch continues, if that is still there."""
        return self.parent.trunk if self.recipe.first_step and self.parent is not None else self

    @property
    def begins_with(self) -> str | None:
        """The name of the run, or of the file, whose weights it began with; for a branch, its trunk."""
        init = self.recipe.init
        if init is None:
            return None
        return Path(init.source).name if self.parent is None else self.parent.name

    def place_of(self, dataset: str) -> str:
        """Path or URL of a dataset that the recipe names. Raises `RecipeError` and `DataError`."""
        root = self.recipe.data.root if self.index is None else data_root(self.recipe, self.index)
        return find_dataset(dataset, root)

    @property
    def positions(self) -> str:
        """The rule by which position embeddings were resampled."""
        if self.recipe.init is None:
            return "as trained"
        if self.parent is None:
            return f"of the file; where that is for another resolution, {POSITIONS_RULE}"
        return self.parent.positions if self._grid == self.parent._grid else POSITIONS_RULE

    @property
    def _grid(self) -> object:
        """What positions depend on: the patches, or what a stem makes of images of this size."""
        return self.recipe.model.patches(self.recipe.data.image_size) or self.recipe.data.image_size

    def policy(self, crop: EvalCrop) -> dict[str, Any]:
        """How images become the model's input in an evaluation."""
        data = self.recipe.data
        return {
            "image_size": data.image_size,
            "crop": crop.kind,
            "crop_fraction": crop.fraction,
            "resize": crop.resize,
            "mean": list(data.normalise.mean),
            "std": list(data.normalise.std),
            "positions": self.positions,
        }

    def content(self) -> dict[str, Any]:
        """The run's content of results.json."""
        run, index, recipe = self.run, self.index, self.recipe
        device_seconds = None if run is None else run.device_seconds
        return {
            "name": self.name,
            "directory": str(self.directory),
            "is_done": self.is_done,
            "model": recipe.model.describe(),
            "begins_with": self.begins_with,
            "recipe_sha256": recipe_sha256(recipe.dump()),
            "seed": recipe.seed,
            "train": recipe.data.train,
            "optimizer": recipe.optimizer.name,
            "lr": recipe.optimizer.lr,
            "global_batch": recipe.batch.global_size,
            "training_crop": _in_words(recipe.data.crop.model_dump(exclude_none=True)),
            "flip": recipe.data.flip,
            "step": None if run is None else run.step,
            "total_steps": None if run is None else run.total_steps,
            "best_step": None if run is None else run.best_step,
            "images": None if run is None else run.images,
            "exaflops": None if run is None else run.exaflops,
            "hours": None if run is None else run.seconds / 3600,
            "device_hours": None if device_seconds is None else device_seconds / 3600,
            "images_per_s": None if run is None else run.images_per_s,
            "mfu": None if run is None else run.mfu,
            "world_sizes": [] if run is None else list(run.world_sizes),
            "metrics": self.metrics,
            "versions": {} if index is None else index.versions,
            "training_manifest_sha256": None if index is None else index.data.get("manifest_sha256"),
            "curves": {
                "loss": _points(self.log.rows, "loss"),
                "lr": _points(self.log.rows, "lr"),
                "evaluations": _evaluations(self.log.evaluations),
            },
            "verified": verification(self.directory, checkpoints_root(recipe, self.directory)),
            "notes": list(self.notes),
        }


def read_record(directory: Path, seen: Sequence[Path] = ()) -> Record:
    """Read a run, and those that it goes back to as far as they are still there.

    Raises `RecipeError` if there is no run, `DataError` if its records are broken.
    """
    try:
        known = (directory / RECIPE_FILE).is_file()
    except OSError as error:
        raise RecipeError(f"{str(directory)[:100]}: {error.strerror}") from None
    if not known:
        what = f"there is no {RECIPE_FILE} in it" if directory.is_dir() else "there is no such directory"
        raise RecipeError(f"{directory} is neither a run's directory nor a study's: {what}")
    recipe = read_recipe(directory / RECIPE_FILE)
    log = MetricsLog(directory / METRICS_FILE, whole=True)
    log.refresh()
    notes: list[str] = []
    run = None
    if any(number(row.get("exaflops")) for row in log.rows):
        run = read_run(directory)
        notes += run.notes
    else:
        notes.append("its metrics tell of no training step yet")
    root = checkpoints_root(recipe, directory)
    found = None if is_url(root) else read_checkpoints(Path(root))
    index = None if found is None else found.newest
    if found is None:
        notes.append("its checkpoints are at a URL: versions and the manifest that it trained on are not read there")
    elif index is None:
        notes.append("it has no checkpoint: nothing tells its versions and the manifest that it trained on")
    else:
        changed = differences(index.recipe, recipe.dump())
        notes += [f"{RECIPE_FILE} has been edited since its checkpoint: {'; '.join(changed)}"] if changed else []
    return Record(
        directory, recipe, index, run, log, _parent(directory, recipe, index, [*seen, directory]), tuple(notes)
    )


def _parent(directory: Path, recipe: Recipe, index: CheckpointIndex | None, seen: Sequence[Path]) -> Record | None:
    """The run that `init` names, if it is still there: a checkpoint's folder names its run."""
    if recipe.init is None or len(seen) > _MOST_PARENTS:
        return None
    source = Path(recipe.init.source)
    if source.parent.name == CHECKPOINTS:
        source = source.parent.parent
    place = find_path(str(source), index, directory)
    if not (place / RECIPE_FILE).is_file() or place.resolve() in [each.resolve() for each in seen]:
        return None
    try:
        return read_record(place, seen)
    except (RecipeError, DataError):
        return None


def _points(rows: Sequence[Row], key: str) -> list[list[float]]:
    """[step, value] of a curve, thinned out evenly; the last point is kept."""
    known = [[row["step"], value] for row in rows if (value := number(row.get(key))) is not None]
    every = -(-len(known) // _MOST_POINTS) or 1
    return known[::-1][::every][::-1]


def _evaluations(found: Sequence[tuple[int, dict[str, float | None]]]) -> dict[str, list[list[float]]]:
    curves: dict[str, list[list[float]]] = {}
    for step, values in found:
        for key, value in values.items():
            if value is not None:
                curves.setdefault(key, []).append([step, value])
    return dict(sorted(curves.items()))


def _in_words(fields: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in fields.items())
