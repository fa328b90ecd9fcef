"""Runs that were never trained, with records by the writers that real runs have; and studies of them."""

import hashlib
import signal
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import yaml
from studies import tiny

from vitscale.about.studies.expansion import expand
from vitscale.about.studies.reading import load_study
from vitscale.about.studies.results import About
from vitscale.about.studies.running import StudyRun
from vitscale.data.shards import Manifest
from vitscale.data.shards.generated import write_generated_dataset
from vitscale.data.shards.provenance import DECISIONS, write_tables
from vitscale.launch import Pretraining
from vitscale.recipe import load_recipe
from vitscale.runs.checkpoint_index import CheckpointIndex, index_text
from vitscale.runs.done import write_done
from vitscale.runs.metrics import MetricsLines

STEPS = 40
RECIPE = tiny.RECIPE.replace("steps: 4", f"steps: {STEPS}")
VERSIONS = {"vitscale": "0.1.0", "torch": "2.13.0"}


def write_data(root: Path, name: str, *, against: Sequence[str] = (), splits: Sequence[str] = ()) -> None:
    """Splits of a dataset; `against` are test sets that `full` and `train` were compared with."""
    for seed, split in enumerate(splits or ("train", "dev", "full", "test")):
        folder = root / name / split
        manifest = write_generated_dataset(folder, [24 + 8 * seed], seed=seed + len(name))
        if against and split in ("train", "full"):
            options = {**manifest.options, "dedup_against": [{"sha256": "ab" * 32, "test_sets": list(against)}]}
            manifest.model_copy(update={"options": options, "num_removed": 3}).save(folder)
        if against and split == "full":
            blank = {"distance": None, "correlation": None, "cosine": None, "variant": None, "tier": "bytes"}
            blank["test_set"] = against[0]
            rows = [
                {**blank, "train_uid": uid, "train_key": f"a{uid}", "test_key": key, "removed": out}
                for uid, key, out in ((1, "x", True), (1, "y", True), (2, "x", True), (5, "x", False))
            ]
            write_tables(folder / "dedup.parquet", [DECISIONS.empty_table().from_pylist(rows, DECISIONS)], DECISIONS)


def write_run(
    directory: Path,
    settings: Sequence[str] = (),
    recipe: str | Path | None = None,
    *,
    until: int = STEPS,
    metrics: Mapping[str, float] | None = None,
    exaflops: float = 1e-3,
) -> None:
    """The directory of a run, finished unless `until` is before its end.

    Its metrics follow from its name unless they are given, its compute is so many `exaflops` a step. Without `recipe`
    it is of RECIPE, which is written beside it.
    """
    directory.mkdir(parents=True)
    if recipe is None:
        recipe = directory.parent / "tiny.yaml"
        recipe.write_text(RECIPE)
    loaded = load_recipe(str(recipe), list(settings))
    (directory / "recipe.yaml").write_text(yaml.safe_dump(loaded.dump(), sort_keys=False))
    top1 = int(hashlib.sha256(directory.name.encode()).hexdigest()[:6], 16) / 16**6
    lines = MetricsLines(directory / "metrics.jsonl", 0)
    for step in range(10, until + 1, 10):
        values = {"loss": 2.0 / step, "lr": 1e-3 * step, "exaflops": exaflops * step}
        lines.training(step, {**values, "step_time_s": 1.5, "world_size": 2})
    evaluation = {"validation/top1": top1, "validation/loss": 1 - top1} if metrics is None else dict(metrics)
    if until > STEPS // 2 and metrics is None:
        lines.evaluation(STEPS // 2, {"validation/top1": top1 / 2, "validation/loss": 1 - top1 / 2})
    lines.evaluation(until, evaluation)
    manifest = Manifest.load(loaded.dataset_path(loaded.data.train))
    data = {"num_samples": manifest.num_samples, "class_names": list(manifest.class_names)}
    data["manifest_sha256"] = manifest.sha256
    index = CheckpointIndex(until, 2, {"w": [1]}, ["master"], until, loaded.dump(), data, VERSIONS)
    folder = directory / "checkpoints" / f"step-{until:08d}"
    folder.mkdir(parents=True)
    (folder / "index.json").write_text(index_text(index))
    if until == STEPS:
        summary = {"step": STEPS, "total_steps": STEPS, "best_step": None, "exaflops": exaflops * STEPS}
        write_done(directory, {**summary, "evaluation": evaluation})


class WritingEngine:
    """Writes the run of every entry at once; some fail, and at one in `halves` the study is told to end."""

    def __init__(self, failing: Collection[str] = (), halves: Collection[str] = ()) -> None:
        self._failing, self._halves = failing, halves
        self._ended: dict[str, int] = {}
        self.running: Collection[str] = ()
        self.room = 100

    def start(self, works: Sequence[Pretraining]) -> None:
        for what in works:
            assert what.run_dir is not None
            name = what.run_dir.name
            self._ended[name] = 0
            if name in self._failing:
                what.run_dir.mkdir(parents=True)
                (what.run_dir / "launch.log").write_text("error: <b>no</b> data\n")
                self._ended[name] = 3
            elif name in self._halves:
                write_run(what.run_dir, what.settings, what.recipe, until=20)
                del self._ended[name]
                signal.raise_signal(signal.SIGTERM)  # as a scheduler does while it runs
            else:
                write_run(what.run_dir, what.settings, what.recipe)

    def ended(self) -> Mapping[str, int]:
        ended, self._ended = self._ended, {}
        return ended

    def tell_to_end(self) -> None:
        self._ended |= dict.fromkeys(self._halves, 85)

    def kill(self) -> None: ...


def write_study(folder: Path, parts: dict, engine: WritingEngine | None = None) -> Path:
    """The folder of a study that has been run."""
    file, out = tiny.write_study(folder, parts, recipe=RECIPE), folder / "out"
    expansion = expand(load_study(file), out, (), folder)
    StudyRun(expansion, out, engine or WritingEngine(), About("study", str(file), "local")).run()
    return out


def part(root: Path, names: Sequence[str], **more: object) -> dict:
    """Two candidates on data sets, of which the winner is run twice more."""
    splits = ("train", "dev", "full", "test")
    return {
        "settings": {"data.root": str(root)},
        "grid": [{"optimizer.lr": [0.001, 0.3]}],
        "datasets": {name.rpartition("/")[2]: {split: f"{name}/{split}" for split in splits} for name in names},
        "selection": {"metric": "dev/top1", "mode": "max"},
        "refit": {"seeds": [0, 1]},
        **more,
    }
