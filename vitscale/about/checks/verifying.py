"""Checks a run against its own files, by evaluating its checkpoints again, and by repeating some of its steps.

Checkpoints are a chain: each link, the steps from one to the next, is recomputed or it is not. The link that ends in
the result's weights comes first, then links drawn at random. The newest and the best checkpoint are evaluated again.

`vitscale launch` does both in a temporary folder. With the run's versions, hardware and number of ranks everything is
equal to the last bit; otherwise within `_LIMITS`. Where the weights are equal to the last bit, a recorded value that is
not was edited. Nothing less proves that: elsewhere, some losses and norms are equal to the last bit by chance, and on
another number of ranks losses are rounded otherwise even before equal weights.
"""

import math
import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from vitscale.about.checks.recorded import is_far, keys_apart, mistakes_in, tell
from vitscale.about.checks.repeating import bare_recipe, repeated
from vitscale.data.shards import Manifest
from vitscale.data.shards.verify import verify as verify_shards
from vitscale.evaluation.splits import evaluated_splits
from vitscale.flops.accounting import exaflops
from vitscale.flops.work import recipe_work
from vitscale.ground.errors import EXIT_DONE, CheckpointError, DataError, VitscaleError
from vitscale.ground.versions import versions
from vitscale.ground.wording import counted, listed, ranges
from vitscale.launch import count_devices
from vitscale.recipe import Recipe, differences, override
from vitscale.recipe.datasets import find_dataset, is_place
from vitscale.runs.checkpoint import MASTER, CheckpointReader, CheckpointStore, checkpoint_directory, is_weights
from vitscale.runs.checkpoint.opening import trained_recipe
from vitscale.runs.checkpoint_index import CheckpointIndex, data_root, find_path
from vitscale.runs.done import covered_files, read_done, write_verified
from vitscale.runs.metrics import Row
from vitscale.runs.names import DONE_FILE, METRICS_FILE, RECIPE_FILE
from vitscale.runs.reading import count, number, read_object
from vitscale.runs.run import Run
from vitscale.training.beginning.found_weights import digests, find_weights
from vitscale.training.beginning.run_plan import plan_run
from vitscale.training.loop.state import SelectionState

_Values = Mapping[str, float | None]
_RESULTS_FILE = "results.json"  # of a study or a report
_SHAPES = ("shapes", "kinds", "state_shapes")  # of an index: what is stored
_MEANS = {"exp_avg", "momentum_buffer"}  # the optimizers' means of gradients
_WHEN = {"every", "at_start", "batch", "overlap"}  # keys of `evaluation` that change no metric
_OF_A_SUM = 1e-5  # share by which the same losses or squares, summed up by another number of ranks, may differ
_FEW = 0.01  # a smaller share of differing numbers is not rounding, which reaches all numbers of a state in one step


class _Limits(NamedTuple):
    """Shares that other hardware, ranks or versions may change: chosen, not proven (docs/verifying.md)."""

    loss: float  # of losses and norms, over a few steps
    state: float  # of what a link has moved
    answers: float  # of an evaluation's answers, and of its loss, for the same weights


_LIMITS = {"fp32": _Limits(1e-3, 0.01, 1e-3)}
_LIMITS_OF_BF16 = _Limits(5e-2, 0.1, 1e-2)


@dataclass(frozen=True)
class Finding:
    """The result of one comparison: of a checkpoint, a file, a line, some steps."""

    what: str
    is_sound: bool | None  # None if some of it was not looked at
    detail: str


@dataclass(frozen=True)
class Asked:
    """What to look at."""

    steps: int = 50  # at most, to repeat
    seed: int = 0  # for choosing them
    ranks: int | None = None  # by default as many as the run had, if this machine has so many devices or cores, else 1
    root: str | None = None  # where the data are now; by default where the recipe says
    report: str | None = None  # the folder of a report whose results.json is compared, too
    shards: bool = True  # whether to read every byte of the training data
    evaluations: bool = True  # whether to evaluate the newest and the best checkpoint again
    everything: bool = False  # whether to repeat all steps and all evaluations

    def exit_code(self, findings: Sequence[Finding]) -> int:
        """0 if what was asked for was looked at and is sound."""
        unsound = (False, None) if self.everything else (False,)
        return DataError.exit_code if any(finding.is_sound in unsound for finding in findings) else EXIT_DONE


def verify_run(run_dir: Path, asked: Asked, say: Callable[[str], None] = lambda line: None) -> Iterator[Finding]:
    """Check everything about a run, yielding one finding after another; the outcome is written beside the run.

    `say` is called with a line for people when a part begins. Raises `RecipeError`, `CheckpointError`, `DataError` and
    `StorageError` if there is nothing to compare.
    """
    verification, findings = _Verification(run_dir, asked, say), []
    files = covered_files(run_dir, verification.store.root)
    for finding in verification.run():
        findings.append(finding)
        yield finding
    outcome = {"exit_code": asked.exit_code(findings), "findings": [asdict(finding) for finding in findings]}
    try:
        write_verified(run_dir, outcome | {"asked": asdict(asked), "versions": versions(), "files": files})
    except OSError as error:
        say(f"the outcome cannot be written into {run_dir}: {error.strerror}")


class _Verification:
    """One run, and what is known of it."""

    def __init__(self, run_dir: Path, asked: Asked, say: Callable[[str], None]) -> None:
        self.run_dir, self.asked, self.say = run_dir, asked, say
        self.finished, self.done = Run(run_dir), read_done(run_dir)
        self.recipe = self.finished.recipe
        self.store = CheckpointStore(checkpoint_directory(self.recipe, run_dir))
        self.readers: dict[int, CheckpointReader] = {}
        self.recorded: dict[int, list[tuple[str, _Values]]] = defaultdict(list)  # step -> files and their values
        self.states: dict[int, Finding] = {}  # at the ends of the links that were repeated
        self.exact: dict[int, float] = {}  # steps whose state is equal to the last bit -> share that sums may differ by
        self.computed: dict[int, _Values] = {}  # evaluations

    def run(self) -> Iterator[Finding]:
        asked, readers = self.asked, self.readers
        for step in self.store.steps():
            self.say(f"reading the checkpoint of step {step:,}")
            try:
                readers[step] = self.store.open(step)
            except CheckpointError as error:
                yield Finding(f"checkpoint {step}", False, str(error))
        if not readers:
            raise CheckpointError(f"{self.run_dir} has no checkpoint that can be read")
        yield Finding("checkpoints", True, f"{len(readers)} read: every byte is as their indices say")
        self.newest = readers[max(readers)].index
        self.trained = trained = self._here()
        self.limits = _LIMITS.get(trained.precision, _LIMITS_OF_BF16)
        yield from self._same_run()
        manifest = Manifest.load(find_dataset(trained.data.train, trained.data.root))
        is_same = manifest.sha256 == self.newest.data.get("manifest_sha256")
        yield Finding("manifest", is_same, f"{manifest.where} is {'' if is_same else 'not '}the one in the checkpoints")
        if not is_same:
            return
        if asked.ranks is not None:
            trained.split(asked.ranks)  # raises before all the data are read
        self.plan = plan_run(bare_recipe(trained), 0, 1)
        self.macs = recipe_work(trained, self.plan.num_classes).accounting_macs
        self.log = self.finished.metrics
        self.rows = {row["step"]: row for row in self.log.rows}
        yield from self._metrics()
        yield from self._records()
        if asked.shards:
            self.say("reading all training data")
            verdict = verify_shards(manifest, workers=len(os.sched_getaffinity(0)))
            for damage in verdict.damage:
                at = "" if damage.uid is None else f", uid {damage.uid}"
                yield Finding(f"shard {damage.path}{at}", False, damage.what)
            if not verdict.damage:
                yield Finding("shards", True, f"{verdict.samples:,} samples: every byte is that of the manifest")
        else:
            yield Finding("shards", None, "NOT CHECKED, as --no-shards asks")
        best = count(self.newest.selection.get("best_step"))
        results = {"result": self.newest.step} | ({} if best in (None, self.newest.step) else {"best": best})
        links = list(pairwise([trained.first_step, *sorted(readers)]))
        initial = [*self._initial()]
        yield from initial
        possible = links if all(finding.is_sound for finding in initial) else links[1:]
        steps = math.inf if asked.everything else asked.steps
        for first, last in _chosen(possible, list(results.values()), steps, asked.seed):
            self.say(f"taking steps {first + 1:,} to {last:,} again")
            yield from self._again(first, last)
        due = [step for step in readers if step in self.recorded]
        yield from self._evaluated_on(due, best)
        for step in due if asked.evaluations else ():
            if asked.everything or step in (due[-1], best):
                self.say(f"evaluating step {step:,} again")
                self.computed[step] = self._evaluated(step)
        for step in sorted(self.computed.keys() & self.recorded.keys()):
            yield self._compare_evaluation(step)
        yield from self._rests_on(links, possible, results)

    def _here(self) -> Recipe:
        """The recipe of the newest checkpoint, with paths as they are now."""
        index = self.newest
        recipe = trained_recipe(self.readers[index.step])
        settings = [f"data.root={self.asked.root or data_root(recipe, index) or 'null'}"]
        if recipe.init is not None:
            settings.append(f"init.from={find_path(recipe.init.source, index, self.run_dir).absolute()}")
            if (taken := count(_object(index.data, "init").get("step"))) is not None:  # there may be later ones now
                settings.append(f"init.step={taken}")
        return override(recipe.dump(), settings, "the recipe")

    def _initial(self) -> Iterator[Finding]:
        """Check that the weights that the run began with, if its recipe names any, are still there."""
        if (init := self.trained.init) is not None:
            try:
                found = find_weights(init).files or digests(Path(init.source))
                is_same = found == _identity(self.newest)["init"]
                told = f"{init.source} has {'' if is_same else 'NOT '}the weights that the run began with"
                yield Finding("init.from", is_same, told)
            except (VitscaleError, OSError) as error:
                yield Finding("init.from", None, f"NOT CHECKED: {error}")

    # ---- Whether the files agree with each other ---------------------------------------------------------------------

    def _same_run(self) -> Iterator[Finding]:
        """Check that recipe.yaml and all checkpoints belong to the same run."""
        newest, now = self.newest, self.recipe.dump()
        trained = trained_recipe(self.readers[newest.step]).dump()
        wrong = differences(trained, now)
        if self.done is not None:  # the last launch wrote both
            wrong += differences(trained["evaluation"], now["evaluation"], "evaluation.", free=())
        yield Finding(RECIPE_FILE, not wrong, "; ".join(wrong) or "is that of the checkpoints")
        before = None
        for step, reader in self.readers.items():
            index = reader.index
            wrong = differences(trained, trained_recipe(reader).dump())
            wrong += differences(newest.data, index.data, free=("working_directory",))
            wrong += [f"other {key}" for key in _SHAPES if getattr(newest, key) != getattr(index, key)]
            if before is not None and index.position - before.position < step - before.step:
                wrong.append(f"position {index.position:,} in the data; step {before.step:,} had {before.position:,}")
            before = index
            if wrong:
                yield Finding(f"checkpoint {step}", False, "of another run: " + "; ".join(wrong))

    def _evaluated_on(self, due: Sequence[int], best: int | None) -> Iterator[Finding]:
        """Name the datasets of the evaluations, whose bytes a run does not record, and evaluations of other recipes."""
        now = self.recipe.dump()["evaluation"]
        for step in due:  # what a later launch has added is not looked for
            evaluation = trained_recipe(self.readers[step]).dump()["evaluation"]
            own = {key: value for key, value in evaluation.items() if value and key not in _WHEN}
            if wrong := differences(own, {key: now[key] for key in own}, "evaluation.", free=()):
                told = f"not that of {RECIPE_FILE}: {'; '.join(wrong)}"
                yield Finding(f"recipe of evaluation {step}", False if step == best else None, told)
        splits = evaluated_splits(self.trained.evaluation) if self.recorded and self.asked.evaluations else ()
        for dataset in dict.fromkeys(name for _, *names in splits for name in names if name is not None):
            manifest = Manifest.load(self.trained.dataset_path(dataset))
            told = f"{manifest.where} ({manifest.num_samples:,} samples, manifest sha256 {manifest.sha256})"
            is_elsewhere = bool(self.asked.root) and is_place(dataset)
            told += "; NOT CHECKED: the recipe names this place, not --data-root" * is_elsewhere
            yield Finding(f"evaluation set {dataset}", None if is_elsewhere else True, told)

    def _exaflops(self, step: int) -> float:
        return exaflops(self.macs, step * self.trained.batch.global_size)

    def _metrics(self) -> Iterator[Finding]:
        """Check that no line of metrics is missing or too many, and that each has the values of its step."""
        batch, plan, last, before = self.trained.batch.global_size, self.plan, self.newest.step, self.trained.first_step
        wrong = [f"{self.log.damaged} lines cannot be read"] if self.log.damaged else []
        taken, measured = self.rows.keys(), {step for step, _ in self.log.evaluations}
        lines, due, most = set[int](), set[int](), len(self.log.rows) + len(measured) + 1
        for step, reader in self.readers.items():  # saved by a process that also took the steps before
            settings = trained_recipe(reader)
            lines |= _multiples(settings.logging.every, before, step, most)
            evaluation = settings.evaluation
            stride = 0 if evaluation.every is None else evaluation.every.to_steps(plan.manifest.num_samples, batch)
            if evaluation.measures:
                due |= _multiples(stride, before, step, most)
                due |= {plan.total_steps} if before < plan.total_steps <= step else set()
            before = step
        not_yet, end = ({last}, math.inf) if self.done is None else (set(), last)
        for what, found in (
            ("no line", lines - taken),
            ("no evaluation", due - measured - not_yet),
            ("an evaluation that was not due", {step for step in measured if step <= last} - due),
            ("a line after the end", {step for step in taken | measured if step > end}),
        ):
            if found:
                wrong.append(f"{what} of step {listed([f'{step:,}' for step in sorted(found)], 1)}")
        for step, row in self.rows.items():
            follows: dict[str, Any] = {"lr": plan.rates(step - 1).learning_rate, "images_seen": step * batch}
            follows |= {"exaflops": self._exaflops(step), "images_per_s": batch / row["step_time_s"]}
            if step <= self.newest.position == last:  # no batch was left out
                follows["epoch"] = plan.order.epochs(step)
            if step in self.readers:
                follows["world_size"] = self.readers[step].index.world_size
            mistakes = mistakes_in({key: row[key] for key in follows if key in row}, follows, "by the recipe")
            wrong += [f"step {step:,}: {mistake}" for mistake in mistakes]
        told = "; ".join(wrong[:5]) or f"{len(self.rows):,} lines, as the recipe asks; times cannot be checked"
        yield Finding(METRICS_FILE, not wrong, told)

    def _records(self) -> Iterator[Finding]:
        """Check what DONE and results.json repeat, and gather what is recorded of evaluations."""
        done, newest, rule = self.done, self.newest, self.trained.selection
        wrong: dict[str, list[str]] = {}
        said, state, best = dict(self.log.evaluations), SelectionState.of(newest.selection), SelectionState()
        for step, values in self.log.evaluations:
            self.recorded[step].append((METRICS_FILE, values))
        for step in said if newest.selection else ():
            if step <= (newest.step if "evaluated" not in newest.selection else state.evaluated):
                finite = {key: value for key, value in said[step].items() if value is not None}
                best = best.after(rule, step, {rule.metric: math.nan, **finite} if rule else finite)
        if told := mistakes_in(state.state(), best.state() | {"evaluated": state.evaluated}, "by the metrics"):
            is_lost = best.best_step is not None and best.best_step not in self.readers  # as if its save had failed
            yield Finding(f"checkpoint {newest.step}", None if is_lost else False, ", ".join(told))
        if done is not None:
            is_early, total = state.is_out_of_patience(rule), self.plan.total_steps
            known: dict[str, Any] = {"total_steps": total, "stopped_early": is_early, "best_step": state.best_step}
            known |= {"step": newest.step if is_early else total, "exaflops": self._exaflops(newest.step)}
            ended = {key: number(value) for key, value in _object(done, "evaluation").items()}
            wrong[DONE_FILE] = mistakes_in(done, known) + mistakes_in(ended, said.get(newest.step, ended))
            if done.get("step") != newest.step:
                wrong[DONE_FILE].append(f"the newest checkpoint is of step {newest.step:,}")
            if ended:  # else there is nothing to evaluate again
                self.recorded[newest.step].append((DONE_FILE, ended))
        report = None if self.asked.report is None else Path(self.asked.report)
        for folder in {self.run_dir.parent, self.run_dir, report or self.run_dir}:
            where, content = str(folder / _RESULTS_FILE), read_object(folder / _RESULTS_FILE) or {}
            name, entries = self.run_dir.resolve().name, content.get("entries") or content.get("runs") or ()
            entries = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
            found = [entry for entry in entries if entry.get("name") == name and entry.get("state") == "done"]
            if found or folder == report:
                wrong[where] = [] if found and done is not None else [f"{name} is not a finished run"]
            for entry in found:
                run, cost = self.finished, self.finished.cost
                if cost is None:
                    raise DataError(f"{self.run_dir}: {METRICS_FILE} has no training step yet")
                known = {"images": cost.images, "hours": cost.seconds / 3600}
                known |= {"exaflops": cost.exaflops, "step": cost.step}
                if "entries" in content:  # of a study: the step is that of the metrics, the cost with the trunk's
                    known = {"step": run.best_step or cost.step, "exaflops": self._exaflops(cost.step)}
                wrong[where] += mistakes_in(entry, known) + mistakes_in(_object(entry, "metrics"), run.evaluation)
        for where, lines in wrong.items():
            yield Finding(where, not lines, "; ".join(lines[:3]) or f"says what the checkpoints and {METRICS_FILE} say")

    # ---- Steps and evaluations, repeated -----------------------------------------------------------------------------

    def _ranks(self, step: int) -> int:
        of_run = self.readers[min(saved for saved in self.readers if saved >= step)].index.world_size
        room = count_devices() or len(os.sched_getaffinity(0))
        return self.asked.ranks or (of_run if of_run <= room else 1)

    def _again(self, first: int, last: int) -> Iterator[Finding]:
        """Repeat steps (first, last] from the checkpoint of `first`, and compare them with what the run recorded."""
        evaluation = self.trained.dump()["evaluation"] if self.asked.everything and self.asked.evaluations else {}
        once = bare_recipe(self.trained, evaluation)
        with repeated(once, self.readers.get(first), last, self._ranks(last)) as (log, store):
            ours = {row["step"]: row for row in log.rows}
            if last in self.readers:
                self.states[last] = self._compare_state(first, last, store.open(last))
                if last in self.exact:
                    between = {step: values for step, values in log.evaluations if step not in self.readers}
                    self.computed |= between
                    self.exact |= dict.fromkeys(between, self.exact[last])
        yield self._compare_rows(ours, f"steps {first + 1:,} to {last:,}", self.exact.get(last))
        if last in self.states:
            yield self.states[last]

    def _compare_rows(self, ours: dict[int, Row], what: str, exact: float | None) -> Finding:
        rows, common = self.rows, sorted(ours.keys() & self.rows.keys())
        limit = self.limits.loss if exact is None else exact
        apart = {step: keys_apart({"loss": None, "grad_norm": None, **rows[step]}, ours[step]) for step in common}
        wrong = [
            f"step {step:,}: {tell(rows[step], ours[step], far)}"
            for step, keys in apart.items()
            if (far := [key for key in keys if is_far(key, rows[step].get(key), ours[step].get(key), limit)])
        ]
        if wrong:
            edited = f"{counted(len(wrong), 'line')} edited, as all weights are bit-identical: "
            return Finding(what, False, ("" if exact is None else edited) + "; ".join(wrong[:3]))
        if any(apart.values()):
            return Finding(what, True, f"within {limit:g} of the run's, not to the last bit")
        return Finding(what, True, "equal to the last bit" if apart else "taken; the run has logged none of them")

    def _compare_state(self, first: int, last: int, again: CheckpointReader) -> Finding:
        """Compare a checkpoint's weights, moments and average with those of the same step repeated."""
        saved, start = self.readers[last], self.readers.get(first)
        what, index, differing, places, worst = f"checkpoint {last}", saved.index, 0, [], (-1.0, "")
        counts: dict[str, int] = defaultdict(int)  # of the numbers of a parameter's state that moved
        worlds = {count(row.get("world_size")) for step, row in self.rows.items() if first < step <= last}
        is_same_world = {*worlds, index.world_size} == {again.index.world_size}
        if wrong := keys_apart(_identity(index), _identity(again.index)):
            return Finding(what, False, "its index has another " + " and ".join(wrong))
        for kind in index.kinds:
            squared = moved_squared = 0.0
            for name in index.shapes:
                if index.shape_of(kind, name) is None:
                    continue
                ours, theirs = again.parameter(name, kind).double(), saved.parameter(name, kind).double()
                moved = ours if start is None else ours - start.parameter(name, kind).double()
                counts[name] += int((moved != 0).sum())
                moved_squared += float(moved.square().sum())
                if here := int((ours != theirs).sum()):
                    differing += here
                    squared += float((ours - theirs).square().sum())
                    places.append(f"{kind}/{name} ({here:,} of {ours.numel():,})")
            is_finite = math.isfinite(squared + moved_squared)  # max() can lose a NaN
            worst = max(worst, (math.sqrt(squared / (moved_squared or 1e-24)) if is_finite else math.inf, kind))
        if not differing:
            self.exact[last] = 0.0 if is_same_world else _OF_A_SUM
            return Finding(what, True, "every number is equal to the last bit")
        # Weights follow from moments and the average from weights to the last bit, wherever those are equal; so do mean
        # squares from gradients, of which the mean in fp32 has every bit. Ranks of another number may hide that.
        kinds, names = ({place.split()[0].split("/")[at] for place in places} for at in (0, 1))
        total, equal = sum(counts.values()), sum(counts[name] for name in counts.keys() - names)
        weights = set(filter(is_weights, index.kinds))
        is_edited = MASTER not in kinds and not kinds.isdisjoint(weights)
        if not self.trained.optimizer.kept_in_bf16:  # in which small differences come and go
            is_edited |= not kinds & {MASTER, *_MEANS}
            is_edited |= kinds <= weights < set(index.kinds) and len(weights) > 1
            is_edited |= differing < _FEW * total or equal > total / 2
        if is_same_world and is_edited:
            places[3:] = [f"{len(places) - 3:,} more"] if places[3:] else []
            return Finding(what, False, f"was edited: {differing:,} numbers differ, and no others: {', '.join(places)}")
        # A parameter whose gradient is only rounding error, such as a key's bias, is as good as random. So the norm
        # over all parameters is compared, not one parameter by itself.
        limit, of = (self.limits.loss, "its norm") if start is None else (self.limits.state, "its change in the link")
        told = f"{differing / max(total, 1):.0%} of the numbers differ, and {worst[1]} is off by {worst[0]:.2g} of {of}"
        return Finding(what, worst[0] <= limit, f"not to the last bit: {told}; {limit:g} is allowed for rounding")

    def _evaluated(self, step: int) -> _Values:
        reader = self.readers[step]
        changed = {"every": {"steps": step}, "overlap": self.recipe.evaluation.overlap}
        once = bare_recipe(self.trained, trained_recipe(reader).dump()["evaluation"] | changed)
        with repeated(once, reader, step, self._ranks(step)) as (log, _):
            return dict(log.evaluations).get(step, {})

    def _compare_evaluation(self, step: int) -> Finding:
        """Compare an evaluation with what is recorded of it: exactly, if its weights are those recomputed."""
        what, detail, computed = f"evaluation {step}", "equal to the last bit", self.computed[step]
        for where, values in self.recorded[step]:
            apart = keys_apart({**dict.fromkeys(computed), **values}, computed)
            if far := [key for key in apart if self._is_far(key, values, computed, self.exact.get(step))]:
                return Finding(what, False, f"{tell(values, computed, far)} ({where})")
            if apart:
                detail = f"not to the last bit, but within rounding: {tell(values, computed, apart)}"
        return Finding(what, True, detail)

    def _is_far(self, metric: str, values: _Values, computed: _Values, exact: float | None) -> bool:
        """Whether two values of a metric, for the same weights, differ by more than rounding.

        Rounding changes some answers for better and some for worse: a share s of N changes an accuracy by sqrt(s / N),
        as a standard deviation. Three of them are allowed, and one answer at least; none where the loss is the same.
        """
        share, (dataset, _) = self.limits.answers, self.trained.measured_on(metric)
        value, ours, loss = values.get(metric), computed.get(metric), f"{metric.rpartition('/')[0]}/loss"
        if exact is not None or dataset is None or value is None or ours is None or metric == loss:
            return is_far(metric, value, ours, share if exact is None else exact)
        samples = Manifest.load(self.trained.dataset_path(dataset)).num_samples
        is_equal = loss in computed and values.get(loss) == computed[loss]
        return is_equal or abs(value - ours) > max(1.01 / samples, 3 * math.sqrt(share / samples))

    # ---- What it comes to --------------------------------------------------------------------------------------------

    def _rests_on(
        self, links: Sequence[tuple[int, int]], possible: Sequence[tuple[int, int]], results: Mapping[str, int]
    ) -> Iterator[Finding]:
        if others := sorted(self.recorded.keys() - self.computed.keys()):
            kept = sum(step in self.readers for step in others)
            told = f"of {ranges(others)}, {kept:,} of them with a checkpoint; --all takes them again"
            yield Finding("evaluations", None, f"NOT CHECKED: {counted(len(others), 'step')}, {told}")
        share = len(self.states) / len(links)
        told = "" if share == 1 else f"; a single broken link would have been found with {100 * share:.2g} %"
        yield Finding("links", None if told else True, f"recomputed {len(self.states)} of {len(links)}{told}")
        for name, step in results.items():
            first, what = {last: first for first, last in links}.get(step, 0), f"weights of the {name} (step {step})"
            source = self.trained.init and f"the weights in {self.trained.init.source}, which are NOT CHECKED"
            place = f"step {first:,}" if first in self.readers else source or "the beginning"
            if step in self.states:
                sound = self.states[step].is_sound
                yield Finding(what, sound, f"{'' if sound else 'NOT those '}recomputed from {place}")
            elif (first, step) in possible:
                yield Finding(what, None, f"NOT CHECKED; --steps {step - first} recomputes them from {place}")
            else:
                missing = "what the run began with (init.from)" if step in self.readers else "its checkpoint"
                yield Finding(what, None, f"NOT CHECKED: {missing} cannot be found")


def _identity(index: CheckpointIndex) -> dict[str, Any]:
    """What follows from recipe and step, and the digests of the weights that a run began with or learns from."""
    own = {key: getattr(index, key) for key in ("position", "optimizer_steps", *_SHAPES)}
    return own | {key: _object(index.data, key).get("files") for key in ("init", "teacher")}


def _multiples(every: int, before: int, last: int, most: int) -> set[int]:
    """The multiples of `every` in (before, last], `most` of them at most: an index can name any step."""
    return set(islice(range(before - before % every + every, last + 1, every), most)) if every else set()


def _chosen(links: Sequence[tuple[int, int]], results: Sequence[int], steps: float, seed: int) -> list[tuple[int, int]]:
    """The steps (first, last] to repeat: links to the results, random others, and the beginning of one; if they fit."""
    others = [link for link in links if link[1] not in results]
    random.Random(seed).shuffle(others)
    found, rest = [], []
    for first, last in [*sorted((link for link in links if link[1] in results), reverse=True), *others]:
        if last - first <= steps:
            found.append((first, last))
            steps -= last - first
        else:
            rest.append(first)
    return sorted([*found, *((first, first + int(steps)) for first in rest[-1:] if steps)])


def _object(content: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = content.get(key)
    return found if isinstance(found, dict) else {}
