"""Checks a run against its own files, and by repeating some of its steps.

It compares every file of every checkpoint with its digest; the recipe, data and beginning of all checkpoints with each
other; the lines of metrics with what the recipe implies for their steps; DONE with the last line; and every shard with
its manifest. Then, from checkpoints drawn at random, it compares the losses, gradient norms and batches of the steps
that follow, and the weights of the next checkpoint.

`vitscale launch` repeats the steps in a temporary folder. With the run's versions, hardware and number of ranks
everything is equal to the last bit; otherwise within `tolerance`. Once a trajectory has diverged it never returns to
the same bits: a line that differs and is followed by equal ones was edited.
"""

import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import yaml

from vitscale.checkpoint import CheckpointIndex, CheckpointReader, CheckpointStore, checkpoint_directory
from vitscale.errors import CheckpointError, DataError
from vitscale.evaluation.finished import trained_recipe
from vitscale.launch import Pretraining, count_devices
from vitscale.launch.clusters import Job, launch_command
from vitscale.recipe import Recipe, differences, override, validate_recipe
from vitscale.recipe.datasets import find_dataset
from vitscale.runs.checkpoint_index import data_root
from vitscale.runs.directory import recipe_of_run
from vitscale.runs.done import read_done
from vitscale.runs.metrics import MetricsLog, Row
from vitscale.runs.names import CHECKPOINTS, DONE_FILE, METRICS_FILE, RECIPE_FILE, step_folder
from vitscale.shards import Manifest
from vitscale.shards.verify import verify as verify_shards
from vitscale.training.run_plan import RunPlan, plan_run

_COMPARED = ("loss", "grad_norm", "lr", "batch_digest")
_KEPT_FILES = 1_000_000  # no checkpoint of the copy is deleted
_FEW = 0.01  # a smaller share of differing numbers is not rounding, which reaches all numbers of a state in one step
_LEAST = 1e-12
_TAIL = 2000  # characters of a launch's output in a message


@dataclass(frozen=True)
class Finding:
    """The result of one comparison.

    Attributes:
        what: what was compared: a checkpoint, a file, a line, some steps.
        is_sound: whether it is as it should be.
        detail: what was found.
    """

    what: str
    is_sound: bool
    detail: str


def tolerance(precision: str) -> float:
    """The relative difference of losses and norms that other hardware, ranks or versions may make over a few steps."""
    return 1e-3 if precision == "fp32" else 5e-2


def verify_run(
    run_dir: Path,
    *,
    steps: int = 20,
    seed: int = 0,
    ranks: int | None = None,
    root: str | None = None,
    with_shards: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Finding]:
    """Check everything about a run, yielding one finding after another.

    Args:
        run_dir: the run's directory.
        steps: the largest number of steps to repeat.
        seed: the seed for choosing the steps.
        ranks: the number of ranks to repeat them on; by default as many as the run had, if this machine has so many
            devices or cores, else one.
        root: where the data are now; by default where the recipe says.
        with_shards: whether to read every byte of the training data.
        say: called with a line for people when a part begins.

    Raises `RecipeError`, `CheckpointError`, `DataError` and `StorageError` if there is nothing to compare.
    """
    recipe = recipe_of_run(run_dir)
    store = CheckpointStore(checkpoint_directory(recipe, run_dir))
    readers: dict[int, CheckpointReader] = {}
    for step in store.steps():
        say(f"reading the checkpoint of step {step:,}")
        try:
            readers[step] = store.open(step)
        except CheckpointError as error:
            yield Finding(f"checkpoint {step}", False, str(error))
    if not readers:
        raise CheckpointError(f"{run_dir} has no checkpoint that can be read")
    yield Finding("checkpoints", True, f"{len(readers)}: every byte is that of their indices")
    yield from _same_run(recipe, readers)
    newest = readers[max(readers)].index
    trained = trained_recipe(readers[max(readers)])
    trained = override(trained.dump(), [f"data.root={root or data_root(trained, newest) or 'null'}"], "the recipe")
    manifest = Manifest.load(find_dataset(trained.data.train, trained.data.root))
    is_same = manifest.sha256 == newest.data.get("manifest_sha256")
    yield Finding("manifest", is_same, f"{manifest.where}: sha256 {manifest.sha256}" + ("" if is_same else ", another"))
    if not is_same:
        return
    ranks = ranks or _ranks(newest.world_size)
    trained.split(ranks)  # raises before all the data are read
    plan = plan_run(_bare(trained, trained.logging.every), 0, 1)
    log = MetricsLog(run_dir / METRICS_FILE, whole=True)
    log.refresh()
    rows = {row["step"]: row for row in log.rows}
    yield from _metrics(plan, trained, log, rows, newest)
    yield from _done(run_dir, newest, log)
    if with_shards:
        say("reading all training data")
        verdict = verify_shards(manifest, workers=len(os.sched_getaffinity(0)))
        for damage in verdict.damage:
            at = "" if damage.uid is None else f", uid {damage.uid}"
            yield Finding(f"shard {damage.path}{at}", False, damage.what)
        if not verdict.damage:
            yield Finding("shards", True, f"{verdict.samples:,} samples: every byte is that of the manifest")
    segments = _segments([*([0] if trained.init is None else []), *sorted(readers)], steps, seed)
    if not segments:
        why = "none was asked for" if steps == 0 else "they lie between two checkpoints, and it has one"
        yield Finding("steps", True, f"none was taken again: {why}")
    for first, last in segments:
        say(f"taking steps {first + 1:,} to {last:,} again")
        yield from _again(trained, readers, rows, first, last, ranks)


# ---- Whether the files agree with each other -------------------------------------------------------------------------


def _same_run(recipe: Recipe, readers: dict[int, CheckpointReader]) -> Iterator[Finding]:
    """Check that recipe.yaml and all checkpoints belong to the same run."""
    newest = readers[max(readers)].index
    wrong = differences(newest.recipe, recipe.dump())
    yield Finding(RECIPE_FILE, not wrong, "; ".join(wrong) or "is that of the checkpoints")
    for step, reader in readers.items():
        index = reader.index
        wrong = differences(newest.recipe, index.recipe)
        wrong += [
            f"{key}: {newest.data.get(key)!r} -> {index.data.get(key)!r}"
            for key in sorted({*newest.data, *index.data} - {"working_directory"})
            if newest.data.get(key) != index.data.get(key)
        ]
        if wrong:
            yield Finding(f"checkpoint {step}", False, "of another run: " + "; ".join(wrong))


def _metrics(
    plan: RunPlan, recipe: Recipe, log: MetricsLog, rows: dict[int, Row], newest: CheckpointIndex
) -> Iterator[Finding]:
    """Check that no line of metrics is missing, and that each has the values that follow from its step."""
    wrong = [f"{log.damaged} lines cannot be read"] if log.damaged else []
    expected = {step for step in range(recipe.first_step + 1, newest.step + 1) if plan.due(step, newest.step).log}
    missing = sorted(expected - rows.keys())
    if missing:
        wrong.append(f"no line of step {missing[0]:,}" + (f" and {len(missing) - 1:,} more" if missing[1:] else ""))
    global_batch = recipe.batch.global_size
    for step, row in rows.items():
        for key, value in (("lr", plan.rates(step - 1).learning_rate), ("images_seen", step * global_batch)):
            if row.get(key) != value:
                wrong.append(f"step {step:,}: {key} is {row.get(key)!r}; {value!r} follows from the recipe")
    yield Finding(METRICS_FILE, not wrong, "; ".join(wrong[:5]) or f"{len(rows):,} lines, as the recipe has it")


def _done(run_dir: Path, newest: CheckpointIndex, log: MetricsLog) -> Iterator[Finding]:
    """Check that DONE is about the last step and agrees with the metrics."""
    if not (run_dir / DONE_FILE).exists():
        return
    done, wrong = read_done(run_dir) or {}, []
    if done.get("step") != newest.step:
        wrong.append(f"step {done.get('step')!r}; the newest checkpoint is of step {newest.step:,}")
    last = dict(log.evaluations).get(newest.step, {})
    evaluation = done.get("evaluation")
    for key, value in (evaluation if isinstance(evaluation, dict) else {}).items():
        if last and last.get(key) != value:
            wrong.append(f"{key} is {value!r}; the metrics have {last.get(key)!r}")
    yield Finding(DONE_FILE, not wrong, "; ".join(wrong) or "says what the metrics say")


# ---- Steps, repeated -------------------------------------------------------------------------------------------------


def _segments(saved: Sequence[int], steps: int, seed: int) -> list[tuple[int, int]]:
    """The steps (first, last] to repeat: the first ones after randomly chosen checkpoints, at most `steps` in total."""
    stretches = list(pairwise(saved))
    random.Random(seed).shuffle(stretches)
    found = []
    for first, following in stretches:
        if steps > 0:
            found.append((first, min(following, first + steps)))
            steps -= found[-1][1] - first
    return sorted(found)


def _ranks(of_run: int) -> int:
    room = count_devices() or len(os.sched_getaffinity(0))
    return of_run if of_run <= room else 1


def _bare(recipe: Recipe, log_every: int) -> Recipe:
    """The run's recipe without everything that does not affect its steps."""
    content = recipe.dump()
    content["logging"] |= {"every": log_every, "trackers": [], "batch_digest": True}
    content["evaluation"] = {} if recipe.selection is None else content["evaluation"] | {"every": None}
    content["checkpoint"] = {"keep": _KEPT_FILES}
    del content["profile"]
    return validate_recipe(content, "the recipe of the run")


def _again(
    recipe: Recipe, readers: dict[int, CheckpointReader], rows: dict[int, Row], first: int, last: int, ranks: int
) -> Iterator[Finding]:
    """Repeat steps (first, last] from the checkpoint of `first`, and compare them with what the run recorded."""
    with tempfile.TemporaryDirectory(prefix="vitscale-verify-") as temporary:
        copy = Path(temporary, "run")
        copy.mkdir()
        if first:
            readers[first].copy(copy / CHECKPOINTS / step_folder(first))
        (copy / RECIPE_FILE).write_text(yaml.safe_dump(_bare(recipe, 1).dump(), sort_keys=False))
        _launch(Pretraining(str(copy / RECIPE_FILE), run_dir=copy, ranks=ranks, stop_at=last), Path(temporary, "log"))
        found = MetricsLog(copy / METRICS_FILE, whole=True)
        found.refresh()
        yield _compare_rows(recipe, rows, {row["step"]: row for row in found.rows}, first, last)
        if last in readers:
            yield _compare_state(recipe, readers[last], CheckpointStore(copy / CHECKPOINTS).open(last))


def _launch(what: Pretraining, log: Path) -> None:
    """Repeat the steps by a launch. Raises `VitscaleError` if they cannot be taken on this machine."""
    with log.open("wb") as output:
        code = subprocess.run(
            launch_command(Job(what, max_restarts=0), [sys.executable, "-m", "vitscale"]),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    if code:
        raise DataError(
            f"the steps could not be repeated: exit code {code}:\n{log.read_text(errors='replace')[-_TAIL:]}"
        )


def _compare_rows(recipe: Recipe, rows: dict[int, Row], again: dict[int, Row], first: int, last: int) -> Finding:
    what = f"steps {first + 1:,} to {last:,}"
    steps = [step for step in range(first + 1, last + 1) if step in rows and step in again]
    if not steps:
        return Finding(what, True, "taken; the run has logged none of them")
    apart = {step: _apart(rows[step], again[step]) for step in steps}
    last_equal = max((step for step in steps if not apart[step]), default=first)
    edited = [step for step in steps if apart[step] and step < last_equal]
    if edited:
        return Finding(
            what, False, f"line {edited[0]:,} was edited: {_told(rows, again, edited[0], apart)}; later lines are equal"
        )
    if not any(apart.values()):
        return Finding(what, True, "equal to the last bit")
    limit, far = tolerance(recipe.precision), []
    for step in steps:
        far += [
            f"step {step:,}: {_told(rows, again, step, {step: [key]})}"
            for key in apart[step]
            if _far(key, rows[step], again[step], limit)
        ]
    if far:
        return Finding(what, False, "; ".join(far[:3]))
    return Finding(what, True, f"within {limit:g} of the run's, not to the last bit")


def _apart(row: Row, again: Row) -> list[str]:
    return [key for key in _COMPARED if key in row and row[key] != again.get(key)]


def _far(key: str, row: Row, again: Row, limit: float) -> bool:
    value, found = row[key], again.get(key)
    if isinstance(value, float) and isinstance(found, float) and key != "lr":
        return not math.isclose(value, found, rel_tol=limit, abs_tol=1e-6)
    return True


def _told(rows: dict[int, Row], again: dict[int, Row], step: int, apart: dict[int, list[str]]) -> str:
    return ", ".join(f"{key} {rows[step][key]!r}, computed {again[step].get(key)!r}" for key in apart[step])


def _compare_state(recipe: Recipe, saved: CheckpointReader, again: CheckpointReader) -> Finding:
    """Compare the weights and moments of a checkpoint with those of the same step repeated."""
    index = saved.index
    what, total, differing, places, worst = f"checkpoint {index.step}", 0, 0, [], 0.0
    for kind in index.kinds:
        squared = norm_squared = 0.0
        for name in index.shapes:
            if index.shape_of(kind, name) is None:
                continue
            ours, theirs = again.parameter(name, kind).double(), saved.parameter(name, kind).double()
            total += ours.numel()
            norm_squared += float(ours.square().sum())
            if here := int((ours != theirs).sum()):
                differing += here
                squared += float((ours - theirs).square().sum())
                places.append(f"{kind}/{name} ({here:,} of {ours.numel():,})")
        apart = math.sqrt(squared) / max(math.sqrt(norm_squared), _LEAST)
        worst = apart if not apart <= worst else worst  # a NaN is worst of all
    if not differing:
        return Finding(what, True, f"{total:,} numbers are equal to the last bit")
    if differing < _FEW * total:
        return Finding(
            what, False, f"was edited: {differing:,} of {total:,} numbers differ, in {', '.join(places[:3])}"
        )
    # A parameter whose gradient is only rounding error, such as a key's bias, is as good as random. So the norm over
    # all parameters is compared, not one parameter by itself.
    return Finding(what, worst <= tolerance(recipe.precision), f"{worst:.2g} of the norm away, not to the last bit")
