"""What the report says of a run, finished or not."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitscale.recipe import EvalCrop, differences, recipe_sha256
from vitscale.runs.done import verification
from vitscale.runs.metrics import Row
from vitscale.runs.names import RECIPE_FILE, checkpoints_root
from vitscale.runs.reading import number
from vitscale.runs.run import Run

_MOST_POINTS = 300  # points of a curve at most, so that the page of a long run stays small


@dataclass(frozen=True)
class Policy:
    """How images become a model's input in an evaluation; `name` is a letter."""

    name: str
    image_size: int
    crop: str
    crop_fraction: float
    resize: str
    mean: list[float]
    std: list[float]
    positions: str


@dataclass(frozen=True)
class Curves:
    """Values over steps, each curve a list of [step, value]; those of evaluations by evaluator/metric."""

    loss: list[list[float]]
    lr: list[list[float]]
    evaluations: dict[str, list[list[float]]]


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a run's directory tells. `step` to `mfu` are None before the first metrics."""

    name: str
    directory: str
    is_done: bool
    model: str
    begins_with: str | None
    recipe_sha256: str
    seed: int
    train: str
    optimizer: str
    lr: float
    global_batch: int
    training_crop: str
    flip: float
    step: int | None = None
    total_steps: int | None = None
    best_step: int | None = None
    images: int | None = None
    exaflops: float | None = None
    hours: float | None = None
    device_hours: float | None = None
    images_per_s: float | None = None
    mfu: float | None = None
    world_sizes: list[int]
    metrics: dict[str, float]
    versions: dict[str, str]
    training_manifest_sha256: str | None
    curves: Curves
    verified: str
    notes: list[str]


def read_run(directory: Path) -> Run:
    """Read a run. Raises `RecipeError` if there is none, `DataError` if its records are broken."""
    run = Run(directory)
    _ = run.metrics, run.done
    return run


def begins_with(run: Run) -> str | None:
    """The name of the run, or of the file, whose weights it began with; for a branch, its trunk."""
    init, parent = run.recipe.init, run.parent
    return None if init is None else Path(init.source).name if parent is None else parent.name


def policy(run: Run, crop: EvalCrop) -> Policy:
    """How images become the model's input in an evaluation; without a name."""
    data = run.recipe.data
    mean, std = list(data.normalise.mean), list(data.normalise.std)
    return Policy("", data.image_size, crop.kind, crop.fraction, crop.resize, mean, std, _positions(run))


def _positions(run: Run) -> str:
    """The rule by which position embeddings were resampled."""
    if run.recipe.init is None:
        return "as trained"
    if run.parent is None:
        return f"of the file; where that is for another resolution, {run.recipe.model.positions_rule}"
    sizes = [(each.recipe.model, each.recipe.data.image_size) for each in (run, run.parent)]
    own, before = (model.positions_of(size) for model, size in sizes)
    return _positions(run.parent) if own == before else run.recipe.model.positions_rule


def record_of(run: Run) -> RunRecord:
    """What the report says of a run."""
    index, recipe, cost, log = run.index, run.recipe, run.cost, run.metrics
    crop = recipe.data.crop.model_dump(exclude_none=True)
    last = log.evaluations[-1][1] if log.evaluations else {}
    spent: dict[str, Any] = {}
    if cost is not None:
        spent = {key: getattr(cost, key) for key in ("step", "images", "exaflops", "images_per_s", "mfu")}
        spent |= {"total_steps": run.total_steps, "best_step": run.best_step, "hours": cost.seconds / 3600}
        spent["device_hours"] = None if cost.device_seconds is None else cost.device_seconds / 3600
    return RunRecord(
        name=run.name,
        directory=str(run.directory),
        is_done=run.is_done,
        model=recipe.model.describe(),
        begins_with=begins_with(run),
        recipe_sha256=recipe_sha256(recipe.dump()),
        seed=recipe.seed,
        train=recipe.data.train,
        optimizer=recipe.optimizer.name,
        lr=recipe.optimizer.lr,
        global_batch=recipe.batch.global_size,
        training_crop=", ".join(f"{key} {value}" for key, value in crop.items()),
        flip=recipe.data.flip,
        **spent,
        world_sizes=[] if cost is None else list(cost.world_sizes),
        metrics=run.evaluation if run.is_done else {key: value for key, value in last.items() if value is not None},
        versions={} if index is None else index.versions,
        training_manifest_sha256=None if index is None else index.data.get("manifest_sha256"),
        curves=Curves(_points(log.rows, "loss"), _points(log.rows, "lr"), _evaluations(log.evaluations)),
        verified=verification(run.directory, checkpoints_root(recipe, run.directory)),
        notes=_notes(run),
    )


def _notes(run: Run) -> list[str]:
    """What is damaged, missing or contradictory."""
    notes, index, cost = [], run.index, run.cost
    if cost is None:
        notes.append("its metrics tell of no training step yet")
    else:
        notes += run.notes
        if len(cost.world_sizes) > 1:
            worlds = " and ".join(f"{world_size:,}" for world_size in cost.world_sizes)
            notes.append(f"its number of devices changed ({worlds}): the same batches, rounded differently")
    if run.checkpoints is None:
        notes.append("its checkpoints are at a URL: versions and the manifest that it trained on are not read there")
    elif index is None:
        notes.append("it has no checkpoint: nothing tells its versions and the manifest that it trained on")
    elif changed := differences(index.recipe, run.recipe.dump()):
        notes.append(f"{RECIPE_FILE} has been edited since its checkpoint: {'; '.join(changed)}")
    return notes


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
