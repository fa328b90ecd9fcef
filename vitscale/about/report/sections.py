"""The page of a report, from its content alone."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from vitscale.about.report import figures
from vitscale.about.report.content import Report, ReportedRun, Spent
from vitscale.about.report.datasets import DatasetRecord, Deduplication
from vitscale.about.report.paper import Compared, PaperTable, VtabTable, is_tested_top1
from vitscale.about.report.records import Policy
from vitscale.about.report.results import Result
from vitscale.about.studies.results import Candidate, Scored, Spread, VtabScore
from vitscale.ground.page import Facts, Folded, Part, Section, Table, Text, check_drawing, page_text
from vitscale.ground.table import Column, ResultTable, number, short
from vitscale.ground.vtab import OVER_GROUPS, OVER_TASKS
from vitscale.ground.wording import counted

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)
_PERCENT = number(2, 0.01)
_IN_PERCENT = ("top1", "top5", "shot")
_SHOWN_CURVES = 4


def page(report: Report) -> str:
    """The HTML document. Raises `RecipeError` without matplotlib."""
    check_drawing("vitscale report")
    sections = [
        Section("Summary", list(_summary(report))),
        Section("Results", list(_results(report))),
        Section("Beside the paper", list(_paper(report))),
        Section("What decided", list(_choices(report))),
        *([Section("Scaling", parts)] if (parts := list(_scaling(report))) else []),
        Section("De-duplication", list(_deduplication(report))),
        Section("Compute", list(_compute(report))),
        Section("Curves", list(_curves(report))),
        Section("Data", list(_data(report))),
        Section("Runs and recipes", [Folded(f"{run.name} ({run.state})", list(_run(run))) for run in report.runs]),
    ]
    study = f"a study ({report.study.study}), " if report.study is not None else ""
    subtitle = f"vitscale report of {study}{counted(sum(report.states.values()), 'run')}"
    return page_text(report.title, subtitle, sections)


@dataclass(frozen=True)
class _Column(Generic[T_contra]):
    """A column: its heading, its value for a row, and how a number is shown; without `show` the value is text."""

    heading: str
    value: Callable[[T_contra], Any]
    show: Callable[[Any], str] | None = None
    folds: bool = False


def _table(rows: Sequence[T], columns: Sequence[_Column[T]], **more: Any) -> ResultTable:
    shown = [
        Column(str(place), column.heading, column.show or str, is_text=column.show is None, folds=column.folds)
        for place, column in enumerate(columns)
    ]
    cells = [{str(place): column.value(row) for place, column in enumerate(columns)} for row in rows]
    return ResultTable(shown, cells, **more)


def _summary(report: Report) -> Iterator[Part]:
    states, spent = report.states, report.compute.all
    unfinished = {state: count for state, count in states.items() if state != "done"}
    if unfinished:
        told = ", ".join(f"{count} {state}" for state, count in unfinished.items())
        below = "What is below is of finished runs unless it says otherwise."
        yield Text(f"Not everything is done: {told}. {below}", "warning")
    missing = [pair for pair in report.deduplication if pair.status != "recorded"]
    if missing:
        pairs = f"{counted(len(missing), 'pair')} of a training and a test set"
        yield Text(f"No de-duplication is recorded for {pairs}: see De-duplication.", "warning")
    elif report.deduplication:
        yield Text("Every training set was compared with every test set: see De-duplication.", "good")
    decided = sorted({name for choice in report.choices for name in choice.decided_by.datasets})
    tested = dict.fromkeys(result.dataset for result in report.results if result.split != "dev" and result.dataset)
    yield Facts(
        [
            ("Runs", ", ".join(f"{count} {state}" for state, count in states.items())),
            ("Compute, all runs", f"{short(spent.exaflops)} exaFLOPs, {short(spent.device_hours)} device-hours"),
            ("Chosen by", ", ".join(decided) + " (development splits)" if decided else "nothing was chosen here"),
            ("Tested on", ", ".join(map(str, tested)) or "no finished run has been tested"),
            ("Made by", ", ".join(f"{name} {version}" for name, version in report.made_by.items())),
            ("Made from", "\n".join(report.sources)),
        ]
    )
    digits = "results.json beside this page holds every number; a pointer over a number shows all its digits."
    yield Text(digits, "note")


def _seeds(result: Result) -> str:
    lacking = result.n_planned - result.n
    return ", ".join(map(str, result.seeds)) + (f" ({lacking} more to come)" if lacking else "")


_WHAT: tuple[_Column[Result], ...] = (
    _Column("task", lambda result: result.task),
    _Column("result", lambda result: result.label),
    _Column("model", lambda result: result.model),
    _Column("begins with", lambda result: result.begins_with or "from scratch"),
)
_RUNS: tuple[_Column[Result], ...] = (
    _Column("runs", lambda result: result.n, str),
    _Column("seeds", _seeds),
    _Column("evaluated on", lambda result: result.dataset),
)
_SAMPLES: _Column[Result] = _Column("images", lambda result: result.samples, number(0))


def _spread(heading: str, show: Callable[[float], str]) -> tuple[_Column[Result], ...]:
    return (
        _Column(heading, lambda result: result.mean, show),
        _Column("95 %\ninterval", lambda one: one.interval and " to ".join(f"{100 * end:.1f}" for end in one.interval)),
        _Column("standard\ndeviation", lambda result: result.std, show),
    )


_TOP1 = _spread("top-1\n(%)", _PERCENT)


def _results(report: Report) -> Iterator[Part]:
    shown = [result for result in report.results if is_tested_top1(result)]
    if not shown:
        yield Text("No finished run has been evaluated by top-1 on anything but a development split yet.")
    for policy in report.policies:
        rows = sorted(
            (result for result in shown if result.policy == policy.name),
            key=lambda result: (result.task or "", result.begins_with or ""),
        )
        if not rows:
            continue
        table = _table(rows, (*_WHAT, *_TOP1, *_RUNS, _SAMPLES), groups=_groups([row.task for row in rows]))
        yield Table(table, f"Policy {policy.name}: {_policy(policy)}")
    if shown:
        yield Text(
            "Mean and sample standard deviation (n - 1) over runs that differ in their seed alone. The interval is "
            "Wilson's, for so many test images. Results of different policies are never in one table.",
            "note",
        )
    others = [result for result in report.results if not is_tested_top1(result)]
    if others:
        yield Folded("Every other metric", list(_other_metrics(report, others)))


def _other_metrics(report: Report, results: Sequence[Result]) -> Iterator[Part]:
    metric: _Column[Result] = _Column("metric", lambda result: result.metric)
    for policy in [*(policy.name for policy in report.policies), None]:
        title = f"Policy {policy}" if policy else "By evaluators that have a policy of their own"
        for in_percent in (True, False):
            rows = [r for r in results if r.policy == policy and r.metric.endswith(_IN_PERCENT) == in_percent]
            spread = _spread("mean (%)", _PERCENT) if in_percent else _spread("mean", number(4))
            if rows:
                yield Table(_table(rows, (metric, *_WHAT, *spread, *_RUNS, _SAMPLES)), title)


def _groups(keys: Sequence[Any]) -> list[int]:
    return [len(list(group)) for _, group in itertools.groupby(keys)]


def _policy(policy: Policy) -> str:
    fraction = f"{policy.crop_fraction:g}"
    crop = {
        ("central", True): "the central square of the whole short side",
        ("central", False): f"the central square of {fraction} of the short side",
        ("square", True): "the whole picture as a square",
        ("square", False): f"the central {fraction} of each side as a square",
    }[policy.crop, policy.crop_fraction == 1]
    size = policy.image_size
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (policy.mean, policy.std))
    return (
        f"{crop}, resized ({policy.resize}) to {size} x {size} pixels; normalised by mean ({mean}) and standard "
        f"deviation ({std}); position embeddings: {policy.positions}"
    )


def _paper(report: Report) -> Iterator[Part]:
    if not report.paper:
        yield Text(
            "No finished run was fine-tuned on a task of the paper's Tables 2, 5, 6 and 9 (ImageNet, CIFAR-10, "
            "CIFAR-100, Pets, Flowers, the 19 of VTAB-1k; by the data set's name): there is nothing to compare."
        )
    for table in report.paper:
        if isinstance(table, VtabTable):
            yield from _of_vtab(table, report.vtab)
        else:
            yield from _of_table(table, repeats=table != report.paper[0])
    for draw in (figures.figure_3, figures.figure_4, figures.figure_5):
        if (drawing := draw(report)) is not None:
            yield drawing


_FORECAST: tuple[_Column[Scored], ...] = (
    _Column("run", lambda one: one.forecast.name),
    _Column("written down", lambda one: one.forecast.made_at),
    _Column("planned\nexaFLOPs", lambda one: one.forecast.exaflops, short),
    _Column("loss", lambda one: one.forecast.loss, number(4)),
    _Column("95 %\ninterval", lambda one: f"{one.forecast.low:.4f} to {one.forecast.high:.4f}"),
    _Column("exaFLOPs", lambda one: one.run and one.run.exaflops, short),
    _Column("expected\nof these", lambda one: one.expected, number(4)),
    _Column("its loss", lambda one: one.run and one.run.loss, number(4)),
    _Column("within", lambda one: {None: "not done", True: "yes", False: "no"}[one.is_within]),
)


def _scaling(report: Report) -> Iterator[Part]:
    """Accuracies against images and compute; what was expected of larger runs, and what came."""
    yield from figures.scaling(report)
    if report.forecasts:
        title = "Forecasts: of a power law of loss over compute, written down before the run began"
        yield Table(_table(report.forecasts, _FORECAST), title)
        yield from itertools.starmap(figures.forecast, enumerate(report.forecasts[:_SHOWN_CURVES]))


_COMPARED: tuple[_Column[Compared], ...] = (
    *_WHAT,
    _Column("policy", lambda result: result.policy),
    *_TOP1,
    *_RUNS[:2],
    _Column("test\nimages", lambda result: result.samples, number(0)),
    _Column("the\npaper's", lambda result: result.test_images_of_the_paper, number(0)),
    _Column("paper, same\nmodel and data (%)", lambda result: result.published, number(2)),
    _Column("difference\n(points)", lambda result: result.difference, lambda value: f"{value:+.2f}"),
)


def _of_key(heading: str, key: str, show: Callable[[Any], str] | None = None) -> _Column[dict[str, Any]]:
    return _Column(heading, lambda row: row.get(key), show)


def _of_table(table: PaperTable, *, repeats: bool) -> Iterator[Part]:
    """Own results and the paper's. If the table `repeats` own results of an earlier one, only if it has their model."""
    is_shown = not repeats or any(result.published is not None for result in table.results)
    for policy in sorted({result.policy or "" for result in table.results}) if is_shown else []:
        rows = [result for result in table.results if result.policy == policy]
        yield Table(_table(rows, _COMPARED), f"Here, policy {policy}, tasks of Table {table.table}")
        other = {row.task or "" for row in rows if row.samples not in (None, row.test_images_of_the_paper)}
        if other:
            yield Text(f"Not the paper's test images, by their number: {', '.join(sorted(other))}.", "warning")
    columns = [_of_key("name", "name"), _of_key("model", "model"), _of_key("pre-trained on", "pretraining")]
    columns.append(_of_key("epochs", "epochs", number(0)))
    for task in table.tasks:
        columns += [_of_key(f"{task}\n(%)", task, number(2)), _of_key("±", f"{task}_std", number(2))]
    columns.append(_of_key("exaFLOPs", "exaflops", number(0)))
    columns.append(_of_key("TPUv3-\ncore-days", "tpuv3_core_days", number(0)))
    models = {result.model for result in table.results}
    marked = frozenset(index for index, row in enumerate(table.rows) if row["model"] in models)
    yield Table(_table(table.rows, columns), f"The paper's Table {table.table}: {table.about}", marked)


def _of_vtab(table: VtabTable, scores: Sequence[VtabScore]) -> Iterator[Part]:
    for title, used in table.policies.items():
        if len(used) > 1:
            yield Text(f"{title}: its tasks are under different policies ({', '.join(used)}).", "warning")
    columns = [_of_key("group", "group"), _of_key("task", "task")]
    columns += [_of_key(title, title, number(2)) for title in table.columns]
    note = f"The paper's score is the {OVER_TASKS}; most later papers print the {OVER_GROUPS}."
    title = "VTAB-1k by group beside the paper's Table 9, top-1 in percent"
    ends = _groups([row["group"] for row in table.by_group])
    yield Table(_table(table.by_group, columns, notes=[note], groups=ends), title)
    rows = [(score, what, spread) for score in scores for what, spread in score.means.items()]
    of_seeds: tuple[_Column[tuple[VtabScore, str, Spread]], ...] = (
        _Column("part", lambda row: row[0].part),
        _Column("begins with", lambda row: row[0].from_),
        _Column("score", lambda row: row[1]),
        _Column("top-1\n(%)", lambda row: row[2].mean, _PERCENT),
        _Column("standard\ndeviation", lambda row: row[2].std, _PERCENT),
        _Column("runs", lambda row: row[2].n, str),
    )
    if rows:
        yield Table(_table(rows, of_seeds), "The score over seeds; the paper's is the mean over 19 tasks")


def _choices(report: Report) -> Iterator[Part]:
    if not report.choices:
        selecting = [run.name for run in report.runs if run.record is not None and run.record.best_step is not None]
        if selecting:
            kept = ", ".join(selecting)
            yield Text(f"Within these runs the best checkpoint was kept, by their recipes' rule: {kept}.")
        yield Text("No hyper-parameter was chosen among these runs: there was no selection.")
        return
    sha = {dataset.name: dataset.manifest_sha256 for dataset in report.datasets}
    yield Text(
        "Choices saw development splits alone: the mean of a metric over a candidate's runs. Marked: the winner."
    )
    for choice in report.choices:
        by = "; ".join(f"{name} (manifest {sha.get(name) or 'not read'})" for name in choice.decided_by.datasets)
        is_percent = choice.metric.endswith(_IN_PERCENT)
        heading, show = f"{choice.metric}{' (%)' if is_percent else ''}", _PERCENT if is_percent else number(4)
        columns: tuple[_Column[Candidate], ...] = (
            _Column("candidate", lambda one: ", ".join(f"{key} {each}" for key, each in one.grid.items()) or one.label),
            _Column(heading, lambda one: one.mean, show),
            _Column("runs", lambda one: ", ".join(one.entries)),
        )
        marked = frozenset(i for i, one in enumerate(choice.candidates) if one.label == choice.winner)
        state = "" if choice.is_decided else "; not decided yet"
        state = "; every candidate has diverged" if choice.is_decided and choice.winner is None else state
        table = _table(choice.candidates, columns, notes=[f"Decided by {by}"])
        rule = "highest" if choice.mode == "max" else "lowest"
        yield Table(table, f"{choice.name}: the {rule} {choice.metric}{state}", marked)


_PAIR: tuple[_Column[Deduplication], ...] = (
    _Column("test set", lambda pair: pair.test),
    _Column("training set", lambda pair: pair.train),
    _Column("role", lambda pair: pair.role),
    _Column("de-duplication", lambda pair: pair.status),
    _Column("left out for\nthis test set", lambda pair: pair.left_out_for_it, number(0)),
    _Column("left out\nin all", lambda pair: pair.left_out_in_all, number(0)),
    _Column("training\nimages left", lambda pair: pair.samples_left, number(0)),
    _Column("index (SHA-256)", lambda pair: pair.index_sha256, folds=True),
)


def _deduplication(report: Report) -> Iterator[Part]:
    rows = report.deduplication
    if not rows:
        yield Text("No run of this report is evaluated on a test set.")
        return
    yield Table(_table(rows, _PAIR, groups=_groups([pair.test for pair in rows])))
    none = [pair for pair in rows if pair.status == "none recorded"]
    if none:
        pairs = "; ".join(f"{pair.train} against {pair.test}" for pair in none)
        yield Text(f"Not recorded: {pairs}. Copies of test images may be among these training images.", "warning")
    yield Text(
        "By the training sets' manifests: vitscale dedup apply and vitscale convert --dedup-against record there "
        "which index of test images was used. A test set of the index is taken for the dataset of its name. The number "
        "left out for one test set is known where dedup.parquet lies beside the manifest; a part cut from such a "
        "dataset has the total alone. A development split is a part of the training set and no test.",
        "note",
    )


_SPENT: tuple[_Column[tuple[str, Spent]], ...] = (
    _Column("", lambda row: row[0]),
    _Column("runs", lambda row: row[1].runs, number(0)),
    _Column("images", lambda row: row[1].images, number(0)),
    _Column("exaFLOPs", lambda row: row[1].exaflops, short),
    _Column("device-\nhours", lambda row: row[1].device_hours, short),
    _Column("runs without\ndevice-hours", lambda row: row[1].runs_without_device_hours, number(0)),
)
_RUN: tuple[_Column[ReportedRun], ...] = (
    _Column("run", lambda run: run.name),
    _Column("model", lambda run: run.record and run.record.model),
    _Column("state", lambda run: run.state),
    _Column("step", lambda run: run.record and run.record.step, number(0)),
    _Column("of", lambda run: run.record and run.record.total_steps, number(0)),
    _Column("images", lambda run: run.record and run.record.images, number(0)),
    _Column("exaFLOPs", lambda run: run.record and run.record.exaflops, short),
    _Column("hours", lambda run: run.record and run.record.hours, short),
    _Column("device-\nhours", lambda run: run.record and run.record.device_hours, short),
    _Column("images/s", lambda run: run.record and run.record.images_per_s, short),
    _Column("MFU\n(%)", lambda run: run.record and run.record.mfu, number(1, 0.01)),
    _Column("devices", lambda run: ", ".join(map(str, run.record.world_sizes)) if run.record else ""),
)


def _compute(report: Report) -> Iterator[Part]:
    spent = report.compute
    rows = [("runs of this report", spent.reported), ("runs that these began with", spent.begun_with)]
    yield Table(_table([*rows, ("all", spent.all)], _SPENT))
    yield Folded(f"Run by run ({len(report.runs)})", [Table(_table(report.runs, _RUN))])
    yield Text(
        "ExaFLOPs: model FLOPs of training, without evaluation. Hours: of training steps. Device-hours: the same times "
        "the devices. MFU: where the peak of the device is known.",
        "note",
    )


def _curves(report: Report) -> Iterator[Part]:
    drawn = list(figures.curves(report))
    yield from drawn[:_SHOWN_CURVES]
    if drawn[_SHOWN_CURVES:]:
        yield Folded(counted(len(drawn) - _SHOWN_CURVES, "more figure"), drawn[_SHOWN_CURVES:])
    if not drawn:
        yield Text("No run has metrics yet.")


_DATASET: tuple[_Column[DatasetRecord], ...] = (
    _Column("dataset", lambda dataset: dataset.name),
    _Column("images", lambda dataset: dataset.samples, number(0)),
    _Column("classes", lambda dataset: dataset.classes, number(0)),
    _Column("not\nreadable", lambda dataset: dataset.rejected, number(0)),
    _Column("left out as\ncopies", lambda dataset: dataset.left_out, number(0)),
    _Column("manifest (SHA-256)", lambda dataset: dataset.manifest_sha256, folds=True),
    _Column("where", lambda dataset: dataset.where or dataset.problem, folds=True),
)


def _data(report: Report) -> Iterator[Part]:
    rows = report.datasets
    yield Table(_table(rows, _DATASET)) if rows else Text("No dataset is named by a run that has begun.")
    now = {None, *(dataset.manifest_sha256 for dataset in rows)}
    changed = [run.name for run in report.runs if run.record and run.record.training_manifest_sha256 not in now]
    if changed:
        names = ", ".join(changed)
        yield Text(f"Trained on a manifest that is not there any more, or was not read: {names}.", "warning")
    yield Text("Manifests as they are now. What a run trained on is in its checkpoints, and listed below.", "note")


def _run(run: ReportedRun) -> Iterator[Part]:
    if run.why:
        yield Text(run.why, "warning")
    record = run.record
    facts: list[tuple[str, str | None]] = [
        ("Role", run.role),
        ("Recipe", run.recipe or "in its directory"),
        ("Settings", "\n".join(run.settings)),
        ("Recipe's SHA-256", record.recipe_sha256 if record is not None else run.recipe_sha256),
    ]
    if record is not None:
        facts += [
            ("Model", record.model),
            ("Begins with", record.begins_with or "random weights"),
            ("Optimizer", f"{record.optimizer}, learning rate {record.lr:g}, batch {record.global_batch}"),
            ("Training crops", f"{record.training_crop}; flipped by {record.flip:g}"),
            ("Seed", str(record.seed)),
            ("Trained on", record.train),
            ("Its manifest's SHA-256", record.training_manifest_sha256),
            ("Versions", ", ".join(f"{name} {version}" for name, version in record.versions.items())),
            ("Verified", record.verified),
            ("Directory", record.directory),
            ("Notes", "\n".join(record.notes)),
        ]
    yield Facts([(name, value) for name, value in facts if value])
    if record is not None and record.metrics:
        at_end = f"at step {record.best_step}, its best" if record.best_step is not None else "at the end"
        rows: list[dict[str, Any]] = [{"metric": key, "value": value} for key, value in record.metrics.items()]
        table = _table(rows, [_of_key("metric", "metric"), _of_key("value", "value", number(4))])
        yield Table(table, f"Metrics, {at_end if run.state == 'done' else 'last known'}")
