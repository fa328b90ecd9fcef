"""Checks a run against its own files, by evaluating its checkpoints again, and by repeating some of its steps.

It compares every file of every checkpoint with its digest; the recipe, data and beginning of all checkpoints with each
other; the lines of metrics with what the recipe implies for their steps; DONE and results.json with the metrics; and
every shard with its manifest.

Checkpoints are a chain: each link, the steps from one to the next, is recomputed or it is not. The link that ends in
the result's weights comes first, then links drawn at random. The newest and the best checkpoint are evaluated again.

`vitscale launch` does both in a temporary folder. With the run's versions, hardware and number of ranks everything is
equal to the last bit; otherwise within `tolerance` and `rounding`. Where the weights are equal to the last bit, a
recorded value that is not was edited. So was a line that differs and is followed by equal ones: once a trajectory has
diverged it never returns to the same bits.
"""

import math
import os
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from vitscale.checkpoint import CheckpointIndex, CheckpointReader, CheckpointStore, checkpoint_directory
from vitscale.errors import EXIT_DONE, CheckpointError, DataError
from vitscale.evaluation.finished import trained_recipe
from vitscale.files.durable import write_text
from vitscale.launch import Pretraining, count_devices
from vitscale.launch.clusters import Job, launch_command
from vitscale.recipe import Recipe, differences, override, validate_recipe
from vitscale.recipe.datasets import find_dataset
from vitscale.runs.checkpoint_index import data_root, find_path, index_text
from vitscale.runs.directory import recipe_of_run
from vitscale.runs.done import covered_files, read_done, write_verified
from vitscale.runs.metrics import MetricsLog, Row
from vitscale.runs.names import CHECKPOINTS, DONE_FILE, INDEX_FILE, METRICS_FILE, RECIPE_FILE, step_folder
from vitscale.runs.reading import count, number, read_object
from vitscale.shards import Manifest
from vitscale.shards.verify import verify as verify_shards
from vitscale.training.run_plan import RunPlan, plan_run
from vitscale.training.selection import Selection
from vitscale.versions import versions
from vitscale.wording import counted, ranges

_Values = Mapping[str, float | None]
_RESULTS_FILE = "results.json"  # of a study or a report
# Columns of the metrics that say how fast and where, not what was computed.
_OF_THE_MACHINE = {
    *("time", "images_per_s", "data_wait", "data_wait_s", "step_time_s", "world_size", "peak_memory_bytes", "mfu"),
    *("slowest_rank", "slowest_rank_s", "median_rank_s", "checkpoint_stall_s", "bad_samples"),
}
_OF_THE_STEP = ("epoch", "images_seen", "lr")  # exact on every machine
_KEPT_FILES = 1_000_000  # no checkpoint of the copy is deleted
_FEW = 0.01  # a smaller share of differing numbers is not rounding, which reaches all numbers of a state in one step
_LEAST = 1e-12
_TAIL = 2000  # characters of a launch's output in a message


@dataclass(frozen=True)
class Finding:
    """The result of one comparison.

    Attributes:
        what: what was compared: a checkpoint, a file, a line, some steps.
        is_sound: whether it is as it should be; None if something of it was not looked at.
        detail: what was found.
    """

    what: str
    is_sound: bool | None
    detail: str


@dataclass(frozen=True)
class Asked:
    """What to look at.

    Attributes:
        steps: the largest number of steps to repeat.
        seed: the seed for choosing them.
        ranks: the number of ranks to repeat them on; by default as many as the run had, if this machine has so many
            devices or cores, else one.
        root: where the data are now; by default where the recipe says.
        report: the folder of a report whose results.json is compared, too.
        shards: whether to read every byte of the training data.
        evaluations: whether to evaluate the newest and the best checkpoint again.
        everything: whether to repeat all steps and all evaluations.
    """

    steps: int = 50
    seed: int = 0
    ranks: int | None = None
    root: str | None = None
    report: str | None = None
    shards: bool = True
    evaluations: bool = True
    everything: bool = False

    def exit_code(self, findings: Sequence[Finding]) -> int:
        """0 if what was asked for was looked at and is sound."""
        wrong = [finding for finding in findings if finding.is_sound is False]
        missed = [finding for finding in findings if finding.is_sound is None and self.everything]
        return DataError.exit_code if wrong or missed else EXIT_DONE


@dataclass
class _Recomputed:
    """What was computed again: the state at the end of each link, the ends that are equal to the bit, evaluations."""

    states: dict[int, Finding]
    exact: set[int]
    evaluations: dict[int, _Values]


def tolerance(precision: str) -> float:
    """The relative difference of losses and norms that other hardware, ranks or versions may make over a few steps."""
    return 1e-3 if precision == "fp32" else 5e-2


def drift(precision: str) -> float:
    """How far the end of a link may be from the recomputed one elsewhere, as a share of what the link has moved it."""
    return 0.05 if precision == "fp32" else 0.3


def rounding(precision: str) -> float:
    """The share of answers that other hardware, ranks or versions may change by rounding, for the same weights."""
    return 1e-3 if precision == "fp32" else 1e-2


def verify_run(run_dir: Path, asked: Asked, say: Callable[[str], None] = lambda line: None) -> Iterator[Finding]:
    """Check everything about a run, yielding one finding after another; the outcome is written beside the run.

    Args:
        run_dir: the run's directory.
        asked: what to look at.
        say: called with a line for people when a part begins.

    Raises `RecipeError`, `CheckpointError`, `DataError` and `StorageError` if there is nothing to compare.
    """
    recipe = recipe_of_run(run_dir)
    store = CheckpointStore(checkpoint_directory(recipe, run_dir))
    files, findings = covered_files(run_dir, store.root), []
    for finding in _verify(run_dir, recipe, store, asked, say):
        findings.append(finding)
        yield finding
    outcome = {"exit_code": asked.exit_code(findings), "findings": [asdict(finding) for finding in findings]}
    try:
        write_verified(run_dir, outcome | {"asked": asdict(asked), "versions": versions(), "files": files})
    except OSError as error:
        say(f"the outcome cannot be written into {run_dir}: {error.strerror}")


def _verify(
    run_dir: Path, recipe: Recipe, store: CheckpointStore, asked: Asked, say: Callable[[str], None]
) -> Iterator[Finding]:
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
    done = read_done(run_dir)
    yield from _same_run(recipe, readers, is_done=done is not None)
    newest = readers[max(readers)].index
    trained = _here(readers[newest.step], asked.root, run_dir)
    manifest = Manifest.load(find_dataset(trained.data.train, trained.data.root))
    is_same = manifest.sha256 == newest.data.get("manifest_sha256")
    which = "the one that the checkpoints name" if is_same else "another than the checkpoints name"
    yield Finding("manifest", is_same, f"{manifest.where}: {which}")
    if not is_same:
        return
    if asked.ranks is not None:
        trained.split(asked.ranks)  # raises before all the data are read
    plan = plan_run(_bare(trained, trained.logging.every), 0, 1)
    log = MetricsLog(run_dir / METRICS_FILE, whole=True)
    log.refresh()
    rows = {row["step"]: row for row in log.rows}
    yield from _metrics(plan, trained, log, rows, readers, is_done=done is not None)
    recorded = _recorded(run_dir, log, done, asked.report)
    yield from _done(plan, trained, log, newest, done)
    yield from _same_values(recorded)
    if asked.shards:
        say("reading all training data")
        verdict = verify_shards(manifest, workers=len(os.sched_getaffinity(0)))
        for damage in verdict.damage:
            at = "" if damage.uid is None else f", uid {damage.uid}"
            yield Finding(f"shard {damage.path}{at}", False, damage.what)
        if not verdict.damage:
            yield Finding("shards", True, f"{verdict.samples:,} samples: every byte is that of the manifest")
    results = {"result": newest.step, "best": count(newest.selection.get("best_step"))}
    links = list(pairwise([trained.first_step, *sorted(readers)]))
    can_begin = trained.init is None or Path(trained.init.source).exists()
    possible = links if can_begin else links[1:]
    chosen = possible if asked.everything else _chosen(possible, list(results.values()), asked.steps, asked.seed)
    again = _Recomputed({}, set(), {})
    for first, last in chosen:
        say(f"taking steps {first + 1:,} to {last:,} again")
        yield from _again(trained, readers, rows, first, last, asked, again)
    due = sorted(step for step in readers if step in recorded)
    if not asked.everything:
        due = sorted({*due[-1:], *(step for step in due if step == results["best"])})
    for step in due if asked.evaluations else ():
        say(f"evaluating step {step:,} again")
        again.evaluations[step] = _evaluated(_here(readers[step], asked.root, run_dir), readers[step], asked.ranks)
    again.evaluations = {step: values for step, values in sorted(again.evaluations.items()) if step in recorded}
    for step, values in again.evaluations.items():
        is_exact = step not in readers or step in again.exact
        yield _compare_evaluation(trained, step, recorded[step], values, is_exact=is_exact)
    yield from _rests_on(links, possible, recorded, results, readers, again)


def _here(reader: CheckpointReader, root: str | None, run_dir: Path) -> Recipe:
    """A checkpoint's recipe, with paths as they are now."""
    recipe, index = trained_recipe(reader), reader.index
    settings = [f"data.root={root or data_root(recipe, index) or 'null'}"]
    if recipe.init is not None:
        settings.append(f"init.from={find_path(recipe.init.source, index, run_dir).absolute()}")
    return override(recipe.dump(), settings, "the recipe")


# ---- Whether the files agree with each other -------------------------------------------------------------------------


def _same_run(recipe: Recipe, readers: dict[int, CheckpointReader], *, is_done: bool) -> Iterator[Finding]:
    """Check that recipe.yaml and all checkpoints belong to the same run."""
    newest, trained = readers[max(readers)].index, trained_recipe(readers[max(readers)]).dump()
    wrong = differences(trained, recipe.dump())
    if is_done:  # the last launch wrote both
        wrong += differences(trained["evaluation"], recipe.dump()["evaluation"], "evaluation.", free=())
    yield Finding(RECIPE_FILE, not wrong, "; ".join(wrong) or "is that of the checkpoints")
    before = None
    for step, reader in readers.items():
        index = reader.index
        wrong = differences(trained, trained_recipe(reader).dump())
        wrong += [
            f"{key}: {newest.data.get(key)!r} -> {index.data.get(key)!r}"
            for key in sorted({*newest.data, *index.data} - {"working_directory"})
            if newest.data.get(key) != index.data.get(key)
        ]
        wrong += [f"other {key}" for key in ("shapes", "kinds") if getattr(newest, key) != getattr(index, key)]
        if before is not None and index.position - before.position < index.step - before.step:
            wrong.append(f"position {index.position:,} in the data; step {before.step:,} had {before.position:,}")
        before = index
        if wrong:
            yield Finding(f"checkpoint {step}", False, "of another run: " + "; ".join(wrong))


def _metrics(
    plan: RunPlan,
    recipe: Recipe,
    log: MetricsLog,
    rows: dict[int, Row],
    readers: dict[int, CheckpointReader],
    *,
    is_done: bool,
) -> Iterator[Finding]:
    """Check that no line of metrics is missing or too many, and that each has the values that follow from its step."""
    wrong = [f"{log.damaged} lines cannot be read"] if log.damaged else []
    last = max(readers)

    def missing(what: str, steps: Iterable[int]) -> None:
        if found := sorted(steps):
            wrong.append(f"{what} of step {found[0]:,}" + (f" and {len(found) - 1:,} more" if found[1:] else ""))

    expected = {step for step in range(recipe.first_step + 1, last + 1) if plan.due(step, last).log}
    missing("no line", expected - rows.keys())
    measured = {step for step, _ in log.evaluations if step <= last}
    due, before = set(), recipe.first_step
    for step, reader in readers.items():  # saved by a process that also took the steps before
        settings = trained_recipe(reader).evaluation
        every = settings.every and settings.every.to_steps(plan.manifest.num_samples, recipe.batch.global_size)
        if settings.validation or settings.fewshot or settings.evaluators:
            due |= {at for at in range(before + 1, step + 1) if at == plan.total_steps or (every and at % every == 0)}
        before = step
    missing("no evaluation", due - measured - (set() if is_done else {last}))
    missing("an evaluation that was not due", measured - due)
    global_batch = recipe.batch.global_size
    for step, row in rows.items():
        for key, value in (("lr", plan.rates(step - 1).learning_rate), ("images_seen", step * global_batch)):
            if row.get(key) != value:
                wrong.append(f"step {step:,}: {key} is {row.get(key)!r}; {value!r} follows from the recipe")
    yield Finding(METRICS_FILE, not wrong, "; ".join(wrong[:5]) or f"{len(rows):,} lines, as the recipe has it")


def _done(
    plan: RunPlan, recipe: Recipe, log: MetricsLog, newest: CheckpointIndex, done: dict[str, Any] | None
) -> Iterator[Finding]:
    """Check that DONE is about the last step, and that it and the checkpoint name the step that is best."""
    rule, state, wrong = recipe.selection, newest.selection, []
    if done is not None:
        for key, value in (("step", newest.step), ("total_steps", plan.total_steps)):
            if done.get(key) != value:
                wrong.append(f"{key} {done.get(key)!r}; {value:,} follows from the newest checkpoint and its recipe")
        if done.get("best_step") != state.get("best_step"):
            wrong.append(f"best_step {done.get('best_step')!r}; the newest checkpoint has {state.get('best_step')!r}")
    if rule is not None and state:
        best, evaluated = Selection(), Selection.of(state).evaluated or newest.step
        for step, values in dict(log.evaluations).items():
            if step <= evaluated:
                value = values.get(rule.metric)
                best = best.after(rule, step, {rule.metric: math.nan if value is None else value})
        if (best.best_step, best.best) != (state.get("best_step"), state.get("best")):
            wrong.append(
                f"the newest checkpoint has step {state.get('best_step')!r} as the best, with {state.get('best')!r}; "
                f"by the metrics it is {best.best_step!r}, with {best.best!r}"
            )
    if done is not None or wrong:
        what = f"checkpoint {newest.step}" if done is None else DONE_FILE
        yield Finding(what, not wrong, "; ".join(wrong) or "is about the newest checkpoint")


_Recorded = dict[int, list[tuple[str, _Values]]]
"""Step -> the values of its evaluation, and the file that has them; metrics.jsonl first."""


def _recorded(run_dir: Path, log: MetricsLog, done: dict[str, Any] | None, report: str | None) -> _Recorded:
    recorded: _Recorded = defaultdict(list)

    def note(where: str, step: object, values: object) -> None:
        if isinstance(values, dict) and values and count(step) is not None:
            recorded[count(step) or 0].append((where, {key: number(value) for key, value in values.items()}))

    for step, values in log.evaluations:
        note(METRICS_FILE, step, values)
    if done is not None:
        note(DONE_FILE, done.get("step"), done.get("evaluation"))
    for folder in (run_dir.parent, run_dir, *([Path(report)] if report else [])):
        content = read_object(folder / _RESULTS_FILE) or {}
        for entry in content.get("entries") or content.get("runs") or ():
            if entry.get("name") == run_dir.resolve().name and entry.get("state") == "done":
                step = entry.get("best_step") or entry.get("step")
                note(str(folder / _RESULTS_FILE), step, entry.get("metrics"))
    return dict(recorded)


def _same_values(recorded: _Recorded) -> Iterator[Finding]:
    """Compare the values of evaluations that DONE and results.json repeat with the metrics."""
    wrong: dict[str, list[str]] = {}
    for step, ((first, values), *others) in recorded.items():
        for where, repeated in others:
            if where != METRICS_FILE:
                told = _told(
                    repeated, values, [key for key in repeated | values if repeated.get(key) != values.get(key)]
                )
                wrong.setdefault(where, []).extend([f"step {step:,}: {told} in {first}"] if told else [])
    for where, lines in wrong.items():
        yield Finding(where, not lines, "; ".join(lines[:3]) or f"says what {METRICS_FILE} says")


# ---- Steps and evaluations, repeated ---------------------------------------------------------------------------------


def _chosen(
    links: Sequence[tuple[int, int]], results: Sequence[int | None], steps: int, seed: int
) -> list[tuple[int, int]]:
    """The steps (first, last] to repeat: links to the results, random others, and the beginning of one; if they fit."""
    others = [link for link in links if link[1] not in results]
    random.Random(seed).shuffle(others)
    found, rest = [], []
    for link in [*(link for step in results for link in links if link[1] == step), *others]:
        if link[1] - link[0] <= steps and link not in found:
            found.append(link)
            steps -= link[1] - link[0]
        elif link not in found:
            rest.append(link)
    return sorted([*found, *((first, first + steps) for first, _ in rest[-1:] if steps)])


def _ranks(of_run: int) -> int:
    room = count_devices() or len(os.sched_getaffinity(0))
    return of_run if of_run <= room else 1


def _bare(recipe: Recipe, log_every: int, evaluation: Mapping[str, Any] | None = None) -> Recipe:
    """The run's recipe without everything that does not affect its steps; with this `evaluation`, if any."""
    content = recipe.dump()
    content["logging"] |= {"every": log_every, "trackers": [], "batch_digest": True}
    content["evaluation"] = {} if evaluation is None else {**evaluation, "inspect": None}
    content["selection"] = None
    content["checkpoint"] = {"keep": _KEPT_FILES, "tail": None}
    del content["profile"]
    return validate_recipe(content, "the recipe of the run")


@contextmanager
def _copy(
    recipe: Recipe, start: CheckpointReader | None, last: int, ranks: int
) -> Iterator[tuple[MetricsLog, CheckpointStore]]:
    """Continue a run from a checkpoint, or from its beginning, to step `last` in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="vitscale-verify-") as temporary:
        copy = Path(temporary, "run")
        copy.mkdir()
        if start is not None:
            folder = copy / CHECKPOINTS / step_folder(start.index.step)
            start.copy(folder)
            index = replace(start.index, recipe=recipe.dump(), selection={})
            write_text(folder / INDEX_FILE, index_text(index))
        (copy / RECIPE_FILE).write_text(yaml.safe_dump(recipe.dump(), sort_keys=False))
        _launch(Pretraining(str(copy / RECIPE_FILE), run_dir=copy, ranks=ranks, stop_at=last), Path(temporary, "log"))
        log = MetricsLog(copy / METRICS_FILE, whole=True)
        log.refresh()
        yield log, CheckpointStore(copy / CHECKPOINTS)


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
            f"what the run did could not be repeated: exit code {code}:\n{log.read_text(errors='replace')[-_TAIL:]}"
        )


def _again(
    recipe: Recipe,
    readers: dict[int, CheckpointReader],
    rows: dict[int, Row],
    first: int,
    last: int,
    asked: Asked,
    again: _Recomputed,
) -> Iterator[Finding]:
    """Repeat steps (first, last] from the checkpoint of `first`, and compare them with what the run recorded."""
    evaluation = recipe.dump()["evaluation"] if asked.everything and asked.evaluations else None
    ranks = asked.ranks or _ranks(readers[min(step for step in readers if step >= last)].index.world_size)
    with _copy(_bare(recipe, 1, evaluation), readers.get(first), last, ranks) as (log, store):
        ours = {row["step"]: row for row in log.rows}
        apart = {
            step: _apart(rows[step], ours[step]) for step in range(first + 1, last + 1) if step in rows and step in ours
        }
        if last in readers:
            is_exact = not any(apart.values()) and last in apart
            state = _compare_state(recipe, readers.get(first), readers[last], store.open(last), is_exact=is_exact)
            again.states[last], equal = state
            if equal:
                again.exact.add(last)
                again.evaluations |= {step: values for step, values in log.evaluations if step not in readers}
    yield _compare_rows(recipe, rows, ours, apart, f"steps {first + 1:,} to {last:,}", last in again.exact)
    if last in again.states:
        yield again.states[last]


def _apart(row: Row, ours: Row) -> list[str]:
    keys = dict.fromkeys(["loss", "grad_norm", *row])
    return [key for key in keys if key not in _OF_THE_MACHINE and row.get(key) != ours.get(key)]


def _compare_rows(
    recipe: Recipe, rows: dict[int, Row], ours: dict[int, Row], apart: dict[int, list[str]], what: str, is_exact: bool
) -> Finding:
    if not apart:
        return Finding(what, True, "taken; the run has logged none of them")
    # Everywhere but on the run's machine, all figures soon differ.
    is_exact |= len(apart) > 2 and any(all(key not in keys for keys in apart.values()) for key in ("loss", "grad_norm"))
    last_equal = max((step for step, keys in apart.items() if is_exact or not keys), default=0)
    edited = [step for step, keys in apart.items() if keys and step <= last_equal]
    if edited:
        told, why = (
            _told(rows[edited[0]], ours[edited[0]], apart[edited[0]]),
            "the state" if is_exact else "later lines",
        )
        more = f" and {len(edited) - 1:,} more" if edited[1:] else ""
        return Finding(
            what, False, f"line {edited[0]:,} was edited: {told}{more}; {why} to the last bit is as computed"
        )
    if not any(apart.values()):
        return Finding(what, True, "equal to the last bit")
    limit, far = tolerance(recipe.precision), []
    for step, keys in apart.items():
        if wrong := [key for key in keys if _far(key, rows[step], ours[step], limit)]:
            far.append(f"step {step:,}: {_told(rows[step], ours[step], wrong)}")
    if far:
        return Finding(what, False, "; ".join(far[:3]))
    return Finding(what, True, f"within {limit:g} of the run's, not to the last bit")


def _far(key: str, row: Row, ours: Row, limit: float) -> bool:
    value, found = row.get(key), ours.get(key)
    if isinstance(value, float) and isinstance(found, float) and key not in _OF_THE_STEP:
        return not math.isclose(value, found, rel_tol=limit, abs_tol=1e-6)
    return True


def _told(recorded: Mapping[str, Any], computed: Mapping[str, Any], keys: Sequence[str]) -> str:
    """`loss 2.3020, computed 2.3030`, with as many digits as it takes."""
    told = []
    for key in keys:
        if key == "batch_digest":
            told.append("its images are not those of this step")
            continue
        pair = [recorded.get(key), computed.get(key)]
        short = [f"{value:.4f}" if isinstance(value, float) else repr(value) for value in pair]
        told.append("{} {}, computed {}".format(key, *(short if short[0] != short[1] else map(repr, pair))))
    return ", ".join(told)


def _compare_state(
    recipe: Recipe,
    start: CheckpointReader | None,
    saved: CheckpointReader,
    again: CheckpointReader,
    *,
    is_exact: bool,
) -> tuple[Finding, bool]:
    """Compare a checkpoint with the same step repeated: its weights, moments and average; and whether all are equal.

    Args:
        start: the checkpoint that both began from.
        is_exact: whether everything else was equal to the last bit.
    """
    index = saved.index
    what, total, differing, places, worst, worst_kind = f"checkpoint {index.step}", 0, 0, [], -1.0, ""
    wrong = [key for key in ("position", "optimizer_steps") if getattr(index, key) != getattr(again.index, key)]
    moved_numbers = 0
    for kind in index.kinds:
        squared = moved_squared = 0.0
        for name in index.shapes:
            if index.shape_of(kind, name) is None:
                continue
            ours, theirs = again.parameter(name, kind).double(), saved.parameter(name, kind).double()
            moved = ours if start is None else ours - start.parameter(name, kind).double()
            total += ours.numel()
            moved_numbers += int((moved != 0).sum())
            moved_squared += float(moved.square().sum())
            if here := int((ours != theirs).sum()):
                differing += here
                squared += float((ours - theirs).square().sum())
                places.append(f"{kind}/{name} ({here:,} of {ours.numel():,})")
        apart = math.sqrt(squared) / max(math.sqrt(moved_squared), _LEAST)
        if not apart <= worst:  # a NaN is worst of all
            worst, worst_kind = apart, kind
    if wrong:
        return Finding(what, False, "its index has another " + " and ".join(wrong)), False
    if not differing:
        return Finding(what, True, f"{total:,} numbers are equal to the last bit"), True
    if is_exact or differing < _FEW * moved_numbers:
        where = f"{differing:,} of {total:,} numbers differ, in {', '.join(places[:3])}"
        why = "; the lines that lead to it are equal to the last bit" if is_exact else ""
        return Finding(what, False, f"was edited: {where}{why}"), False
    # A parameter whose gradient is only rounding error, such as a key's bias, is as good as random. So the norm over
    # all parameters is compared, not one parameter by itself.
    limit = tolerance(recipe.precision) if start is None else drift(recipe.precision)
    of = "its norm" if start is None else "what these steps moved it"
    detail = f"not to the last bit: {worst_kind} is off by {worst:.2g} of {of}; rounding makes at most {limit:g}"
    return Finding(what, worst <= limit, detail), False


def _evaluated(recipe: Recipe, reader: CheckpointReader, ranks: int | None) -> _Values:
    """Evaluate a checkpoint as the run did."""
    step = reader.index.step
    once = _bare(recipe, 1, recipe.dump()["evaluation"] | {"every": {"steps": step}})
    with _copy(once, reader, step, ranks or _ranks(reader.index.world_size)) as (log, _):
        return dict(log.evaluations).get(step, {})


def _compare_evaluation(
    recipe: Recipe, step: int, recorded: Sequence[tuple[str, _Values]], computed: _Values, *, is_exact: bool
) -> Finding:
    """Compare an evaluation with the recorded ones; `is_exact`: the weights are recomputed ones to the last bit."""
    what, detail = f"evaluation {step}", "equal to the last bit"
    for where, values in recorded:
        apart = [key for key in dict.fromkeys([*values, *computed]) if values.get(key) != computed.get(key)]
        far = [key for key in apart if is_exact or _is_far(recipe, key, values.get(key), computed.get(key))]
        if far:
            return Finding(what, False, f"{_told(values, computed, far)} ({where})")
        if apart:
            detail = f"not to the last bit, within rounding: {_told(values, computed, apart)}"
    return Finding(what, True, detail)


def _is_far(recipe: Recipe, metric: str, value: float | None, computed: float | None) -> bool:
    """Whether two values of a metric for the same weights differ by more than rounding.

    Rounding changes some answers for better and some for worse: a share s of N changes an accuracy by sqrt(s / N), as a
    standard deviation, of which three are allowed, and one answer at least.
    """
    if value is None or computed is None:
        return True
    share, (dataset, _) = rounding(recipe.precision), recipe.measured_on(metric)
    if dataset is None or metric.endswith("/loss"):
        return not math.isclose(value, computed, rel_tol=share)
    samples = Manifest.load(recipe.dataset_path(dataset)).num_samples
    return abs(value - computed) > max(1.01 / samples, 3 * math.sqrt(share / samples))


# ---- What it comes to ------------------------------------------------------------------------------------------------


def _rests_on(
    links: Sequence[tuple[int, int]],
    possible: Sequence[tuple[int, int]],
    recorded: _Recorded,
    results: Mapping[str, int | None],
    readers: dict[int, CheckpointReader],
    again: _Recomputed,
) -> Iterator[Finding]:
    """Say what the result rests on, and what was not looked at."""
    others = sorted(recorded.keys() - again.evaluations.keys())
    if recorded:
        told = f"{len(again.evaluations)} of {len(recorded)} computed again"
        if others:
            kept = [step for step in others if step in readers]
            told += f"; NOT CHECKED: {counted(len(others), 'step')} ({ranges(others)}), "
            told += f"{len(kept)} of them with a checkpoint" + (", which --all evaluates" if kept else "")
        yield Finding("evaluations", None if others else True, told)
    ends = again.states.keys()
    told = f"recomputed {len(ends)} of {len(links)}"
    if len(ends) < len(links):
        told += f"; a single broken link would have been found with {100 * len(ends) / len(links):.2g} %"
    yield Finding("links", True if len(ends) == len(links) else None, told)
    for name, step in results.items():
        link = next((link for link in links if link[1] == step), None)
        if link is None or (name == "best" and step == results["result"]):
            continue
        what, first = f"weights of the {name} (step {step:,})", f"step {link[0]:,}" if link[0] else "the beginning"
        if link[1] in ends:
            sound = again.states[link[1]].is_sound
            yield Finding(what, sound, f"{'recomputed' if sound else 'NOT those recomputed'} from {first}")
        elif link in possible:
            yield Finding(what, None, f"NOT CHECKED; --steps {link[1] - link[0]} recomputes them from {first}")
        else:
            yield Finding(what, None, "NOT CHECKED: the weights that the run began with (init.from) are not here")
