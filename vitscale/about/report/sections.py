"""The page of a report, from its results.json and the drawings of inspections, whose numbers are in it too."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vitscale.about.report import figures
from vitscale.about.report.paper import TOP1
from vitscale.ground.page import Facts, Figures, Folded, Part, Section, Table, Text, check_drawing, page_text
from vitscale.ground.table import Column, ResultTable, Row, number, short
from vitscale.ground.vtab import OVER_GROUPS, OVER_TASKS
from vitscale.ground.wording import counted

Content = Mapping[str, Any]
_PERCENT = number(2, 0.01)
_IN_PERCENT = ("top1", "top5", "shot")
_SHOWN_CURVES = 4


def page(content: Content, inspected: Sequence[Figures] = ()) -> str:
    """The HTML document. Raises `RecipeError` without matplotlib.

    Args:
        content: the content of results.json.
        inspected: the inspections in it, with their drawings.
    """
    check_drawing("vitscale report")
    sections = [
        Section("Summary", list(_summary(content))),
        Section("Results", list(_results(content))),
        Section("Beside the paper", list(_paper(content))),
        Section("What decided", list(_choices(content))),
        Section("De-duplication", list(_deduplication(content))),
        Section("Compute", list(_compute(content))),
        Section("Curves", list(_curves(content))),
        *([Section("Inside the models", list(_inside(content, inspected)))] if inspected else []),
        Section("Data", list(_data(content))),
        Section("Runs and recipes", list(_runs(content))),
    ]
    return page_text(str(content["title"]), _subtitle(content), sections)


def _text(key: str, heading: str, *, folds: bool = False) -> Column:
    return Column(key, heading, is_text=True, folds=folds)


def _table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], **more: Any) -> ResultTable:
    return ResultTable(columns, [{column.key: row.get(column.key) for column in columns} for row in rows], **more)


def _subtitle(content: Content) -> str:
    study = f"a study ({content['study']['study']}), " if content["study"] else ""
    runs = counted(sum(content["states"].values()), "run")
    return f"vitscale report of {study}{runs}"


# ---- Summary ---------------------------------------------------------------------------------------------------------


def _summary(content: Content) -> Iterator[Part]:
    states, compute = content["states"], content["compute"]
    unfinished = {state: count for state, count in states.items() if state != "done"}
    if unfinished:
        told = ", ".join(f"{count} {state}" for state, count in unfinished.items())
        yield Text(
            f"Not everything is done: {told}. What is below is of finished runs unless it says otherwise.", "warning"
        )
    missing = [row for row in content["deduplication"] if row["status"] != "recorded"]
    if missing:
        yield Text(
            f"No de-duplication is recorded for {counted(len(missing), 'pair')} of a training and a test set: see "
            f"De-duplication.",
            "warning",
        )
    elif content["deduplication"]:
        yield Text("Every training set was compared with every test set: see De-duplication.", "good")
    spent = compute["all"]
    decided = sorted({name for choice in content["choices"] for name in choice["decided_by"]["datasets"]})
    rows = [("Runs", ", ".join(f"{count} {state}" for state, count in states.items()))]
    rows.append(
        ("Compute, all runs", f"{short(spent['exaflops'])} exaFLOPs, {short(spent['device_hours'])} device-hours")
    )
    rows.append(("Chosen by", ", ".join(decided) + " (development splits)" if decided else "nothing was chosen here"))
    rows.append(("Tested on", ", ".join(_tested(content)) or "no finished run has been tested"))
    rows.append(("Made by", ", ".join(f"{name} {version}" for name, version in content["made_by"].items())))
    rows.append(("Made from", "\n".join(content["sources"])))
    yield Facts(rows)
    yield Text(
        "results.json beside this page holds every number; a pointer over a number shows all its digits.", "note"
    )


def _tested(content: Content) -> list[str]:
    found = [r["dataset"] for r in content["results"] if r["split"] != "dev" and r["dataset"]]
    return list(dict.fromkeys(found))


# ---- Results ---------------------------------------------------------------------------------------------------------

_RESULT = (
    _text("task", "task"),
    _text("what", "result"),
    _text("model", "model"),
    _text("begins", "begins with"),
    Column("mean", "top-1\n(%)", _PERCENT),
    _text("within", "95 %\ninterval"),
    Column("std", "standard\ndeviation", _PERCENT),
    Column("n", "runs", str),
    _text("seeds_told", "seeds"),
    _text("dataset", "evaluated on"),
    Column("samples", "images", number(0)),
)


def _row(result: Mapping[str, Any]) -> Row:
    lacking = result["n_planned"] - result["n"]
    return {
        **result,
        "what": result["label"],
        "begins": result["begins_with"] or "from scratch",
        "within": result["interval"] and " to ".join(f"{100 * end:.1f}" for end in result["interval"]),
        "seeds_told": ", ".join(str(seed) for seed in result["seeds"])
        + (f" ({lacking} more to come)" if lacking else ""),
    }


def _results(content: Content) -> Iterator[Part]:
    shown = [r for r in content["results"] if r["metric"] == TOP1 and r["split"] != "dev"]
    if not shown:
        yield Text("No finished run has been evaluated by top-1 on anything but a development split yet.")
    for policy in content["policies"]:
        rows = sorted(
            (r for r in shown if r["policy"] == policy["name"]), key=lambda r: (r["task"], r["begins_with"] or "")
        )
        if not rows:
            continue
        yield Table(
            _table(_RESULT, [_row(r) for r in rows], groups=_groups([r["task"] for r in rows])),
            f"Policy {policy['name']}: {_policy(policy)}",
        )
        drawing = figures.glance(content, policy["name"])
        if drawing is not None:
            yield drawing
    if shown:
        yield Text(
            "Mean and sample standard deviation (n - 1) over runs that differ in their seed alone. The interval is "
            "Wilson's, for so many test images. Results of different policies are never in one table.",
            "note",
        )
    others = [r for r in content["results"] if not (r["metric"] == TOP1 and r["split"] != "dev")]
    if others:
        yield Folded("Every other metric", list(_other_metrics(content, others)))


def _other_metrics(content: Content, results: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
    names = [policy["name"] for policy in content["policies"]]
    for policy in [*names, None]:
        rows = [r for r in results if r["policy"] == policy]
        for in_percent in (True, False):
            chosen = [r for r in rows if r["metric"].endswith(_IN_PERCENT) == in_percent]
            show = _PERCENT if in_percent else number(4)
            columns = (
                _text("metric", "metric"),
                *_RESULT[:4],
                Column("mean", "mean (%)" if in_percent else "mean", show),
                _RESULT[5],
                Column("std", "standard\ndeviation", show),
                *_RESULT[7:],
            )
            title = f"Policy {policy}" if policy else "By evaluators that have a policy of their own"
            if chosen:
                yield Table(_table(columns, [_row(r) for r in chosen]), title)


def _groups(keys: Sequence[Any]) -> list[int]:
    lengths: list[int] = []
    for before, key in zip([None, *keys], keys, strict=False):
        if lengths and before == key:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths


def _policy(policy: Mapping[str, Any]) -> str:
    fraction = f"{policy['crop_fraction']:g}"
    crop = {
        ("central", True): "the central square of the whole short side",
        ("central", False): f"the central square of {fraction} of the short side",
        ("square", True): "the whole picture as a square",
        ("square", False): f"the central {fraction} of each side as a square",
    }[policy["crop"], policy["crop_fraction"] == 1]
    size = policy["image_size"]
    mean, std = (", ".join(f"{value:g}" for value in policy[key]) for key in ("mean", "std"))
    return (
        f"{crop}, resized ({policy['resize']}) to {size} x {size} pixels; normalised by mean ({mean}) and standard "
        f"deviation ({std}); position embeddings: {policy['positions']}"
    )


# ---- The paper -------------------------------------------------------------------------------------------------------


def _paper(content: Content) -> Iterator[Part]:
    tables = content["paper"]
    if not tables:
        yield Text(
            "No finished run was fine-tuned on a task of the paper's Tables 2, 5, 6 and 9 (ImageNet, CIFAR-10, "
            "CIFAR-100, Pets, Flowers, the 19 of VTAB-1k; by the data set's name): there is nothing to compare."
        )
    for table in tables:
        yield from _of_vtab(content, table) if table["table"] == "9" else _of_table(table, repeats=table != tables[0])
    drawings: list[Callable[[Content], Any]] = [
        figures.figure_3,
        figures.figure_4,
        figures.figure_5,
        figures.against_compute,
    ]
    yield from (drawing for draw in drawings if (drawing := draw(content)) is not None)


_COMPARED = (
    *_RESULT[:4],
    _text("policy", "policy"),
    *_RESULT[4:9],
    Column("samples", "test\nimages", number(0)),
    Column("test_images_of_the_paper", "the\npaper's", number(0)),
    Column("published", "paper, same\nmodel and data (%)", number(2)),
    Column("difference", "difference\n(points)", lambda value: f"{value:+.2f}"),
)


def _of_table(table: Mapping[str, Any], *, repeats: bool) -> Iterator[Part]:
    """Own results and the paper's. If the table `repeats` own results of an earlier one, only if it has their model."""
    is_shown = not repeats or any(r["published"] is not None for r in table["results"])
    for policy in sorted({r["policy"] for r in table["results"]}) if is_shown else []:
        rows = [_row(r) for r in table["results"] if r["policy"] == policy]
        yield Table(_table(_COMPARED, rows), f"Here, policy {policy}, tasks of Table {table['table']}")
        other = sorted({r["task"] for r in rows if r["samples"] not in (None, r["test_images_of_the_paper"])})
        if other:
            yield Text(f"Not the paper's test images, by their number: {', '.join(other)}.", "warning")
    columns = [
        _text("name", "name"),
        _text("model", "model"),
        _text("pretraining", "pre-trained on"),
        Column("epochs", "epochs", number(0)),
    ]
    for task in table["tasks"]:
        columns += [Column(task, f"{task}\n(%)", number(2)), Column(f"{task}_std", "±", number(2))]
    columns += [
        Column("exaflops", "exaFLOPs", number(0)),
        Column("tpuv3_core_days", "TPUv3-\ncore-days", number(0)),
    ]
    models = {r["model"] for r in table["results"]}
    marked = frozenset(index for index, row in enumerate(table["rows"]) if row["model"] in models)
    yield Table(_table(columns, table["rows"]), f"The paper's Table {table['table']}: {table['about']}", marked)


def _of_vtab(content: Content, table: Mapping[str, Any]) -> Iterator[Part]:
    for title, used in table["policies"].items():
        if len(used) > 1:
            yield Text(f"{title}: its tasks are under different policies ({', '.join(used)}).", "warning")
    columns = [_text("group", "group"), _text("task", "task")]
    columns += [Column(title, title, number(2)) for title in table["columns"]]
    note = f"The paper's score is the {OVER_TASKS}; most later papers print the {OVER_GROUPS}."
    title = "VTAB-1k by group beside the paper's Table 9, top-1 in percent"
    ends = _groups([row["group"] for row in table["by_group"]])
    yield Table(_table(columns, table["by_group"], notes=[note], groups=ends), title)
    rows = [
        {"what": what, "part": score["part"], "from": score["from"], "label": score["label"], **values}
        for score in content["vtab"]
        for what, values in score["means"].items()
    ]
    scores = (
        _text("part", "part"),
        _text("from", "begins with"),
        _text("what", "score"),
        Column("mean", "top-1\n(%)", _PERCENT),
        Column("std", "standard\ndeviation", _PERCENT),
        Column("n", "runs", str),
    )
    if rows:
        yield Table(_table(scores, rows), "The score over seeds; the paper's is the mean over 19 tasks")


# ---- What decided ----------------------------------------------------------------------------------------------------


def _choices(content: Content) -> Iterator[Part]:
    choices = content["choices"]
    if not choices:
        selecting = [run["name"] for run in content["runs"] if run.get("best_step") is not None]
        if selecting:
            yield Text(
                f"Within these runs the best checkpoint was kept, by their recipes' rule: {', '.join(selecting)}."
            )
        yield Text("No hyper-parameter was chosen among these runs: there was no selection.")
        return
    sha = {one["name"]: one["manifest_sha256"] for one in content["datasets"]}
    yield Text(
        "Choices saw development splits alone: the mean of a metric over a candidate's runs. Marked: the winner."
    )
    for choice in choices:
        by = "; ".join(f"{name} (manifest {sha.get(name) or 'not read'})" for name in choice["decided_by"]["datasets"])
        is_percent = choice["metric"].endswith(_IN_PERCENT)
        columns = (
            _text("told", "candidate"),
            Column("mean", f"{choice['metric']}{' (%)' if is_percent else ''}", _PERCENT if is_percent else number(4)),
            _text("runs", "runs"),
        )
        rows = [
            {
                "told": ", ".join(f"{key} {value}" for key, value in one["grid"].items()) or one["label"],
                "mean": one["mean"],
                "runs": ", ".join(one["entries"]),
            }
            for one in choice["candidates"]
        ]
        marked = frozenset(i for i, one in enumerate(choice["candidates"]) if one["label"] == choice["winner"])
        state = "" if choice["is_decided"] else "; not decided yet"
        state = "; every candidate has diverged" if choice["is_decided"] and choice["winner"] is None else state
        rule = "highest" if choice["mode"] == "max" else "lowest"
        title = f"{choice['name']}: the {rule} {choice['metric']}{state}"
        yield Table(_table(columns, rows, notes=[f"Decided by {by}"]), title, marked)


# ---- De-duplication --------------------------------------------------------------------------------------------------


def _deduplication(content: Content) -> Iterator[Part]:
    rows = content["deduplication"]
    if not rows:
        yield Text("No run of this report is evaluated on a test set.")
        return
    columns = (
        _text("test", "test set"),
        _text("train", "training set"),
        _text("role", "role"),
        _text("status", "de-duplication"),
        Column("left_out_for_it", "left out for\nthis test set", number(0)),
        Column("left_out_in_all", "left out\nin all", number(0)),
        Column("samples_left", "training\nimages left", number(0)),
        _text("index_sha256", "index (SHA-256)", folds=True),
    )
    yield Table(_table(columns, rows, groups=_groups([row["test"] for row in rows])))
    none = [row for row in rows if row["status"] == "none recorded"]
    if none:
        pairs = "; ".join(f"{row['train']} against {row['test']}" for row in none)
        yield Text(f"Not recorded: {pairs}. Copies of test images may be among these training images.", "warning")
    yield Text(
        "By the training sets' manifests: vitscale dedup apply and vitscale convert --dedup-against record there "
        "which index of test images was used. A test set of the index is taken for the dataset of its name. The number "
        "left out for one test set is known where dedup.parquet lies beside the manifest; a part cut from such a "
        "dataset has the total alone. A development split is a part of the training set and no test.",
        "note",
    )


# ---- Compute ---------------------------------------------------------------------------------------------------------


def _compute(content: Content) -> Iterator[Part]:
    names = {"reported": "runs of this report", "begun_with": "runs that these began with", "all": "all"}
    columns = (
        _text("what", ""),
        Column("runs", "runs", number(0)),
        Column("images", "images", number(0)),
        Column("exaflops", "exaFLOPs", short),
        Column("device_hours", "device-\nhours", short),
        Column("runs_without_device_hours", "runs without\ndevice-hours", number(0)),
    )
    rows = [{"what": names[key], **values} for key, values in content["compute"].items()]
    yield Table(_table(columns, rows))
    of_runs = (
        _text("name", "run"),
        _text("model", "model"),
        _text("state", "state"),
        Column("step", "step", number(0)),
        Column("total_steps", "of", number(0)),
        Column("images", "images", number(0)),
        Column("exaflops", "exaFLOPs", short),
        Column("hours", "hours", short),
        Column("device_hours", "device-\nhours", short),
        Column("images_per_s", "images/s", short),
        Column("mfu", "MFU\n(%)", number(1, 0.01)),
        _text("worlds", "devices"),
    )
    rows = [{**run, "worlds": ", ".join(map(str, run.get("world_sizes", [])))} for run in content["runs"]]
    yield Folded(f"Run by run ({len(rows)})", [Table(_table(of_runs, rows))])
    yield Text(
        "ExaFLOPs: model FLOPs of training, without evaluation. Hours: of training steps. Device-hours: the same times "
        "the devices. MFU: where the peak of the device is known.",
        "note",
    )


def _curves(content: Content) -> Iterator[Part]:
    drawn = [*figures.means_over_steps(content), *figures.curves(content)]
    yield from drawn[:_SHOWN_CURVES]
    if drawn[_SHOWN_CURVES:]:
        yield Folded(counted(len(drawn) - _SHOWN_CURVES, "more figure"), drawn[_SHOWN_CURVES:])
    if not drawn:
        yield Text("No run has metrics yet.")


# ---- Inside the models -----------------------------------------------------------------------------------------------


def _inside(content: Content, inspected: Sequence[Figures]) -> Iterator[Part]:
    yield Text(
        "Drawn by vitscale inspect beforehand; that these are the weights of the runs above is not checked. The "
        "numbers of each figure are in results.json.",
        "note",
    )
    for place, (told, drawn) in enumerate(zip(content["inspections"], inspected, strict=True), start=1):
        yield Facts([("Inspection", f"{drawn.title} ({told['folder']})"), *drawn.facts])
        yield from (Text(note, "note") for note in drawn.notes)
        yield from (Folded(each.title, [each.under(f"i{place}").drawing]) for each in drawn.figures)


# ---- Data and runs ---------------------------------------------------------------------------------------------------


def _data(content: Content) -> Iterator[Part]:
    columns = (
        _text("name", "dataset"),
        Column("samples", "images", number(0)),
        Column("classes", "classes", number(0)),
        Column("rejected", "not\nreadable", number(0)),
        Column("left_out", "left out as\ncopies", number(0)),
        _text("manifest_sha256", "manifest (SHA-256)", folds=True),
        _text("where_or_why", "where", folds=True),
    )
    rows = [{**one, "where_or_why": one["where"] or one["problem"]} for one in content["datasets"]]
    yield Table(_table(columns, rows)) if rows else Text("No dataset is named by a run that has begun.")
    now = {one["manifest_sha256"] for one in content["datasets"]}
    changed = [run["name"] for run in content["runs"] if run.get("training_manifest_sha256") not in (None, *now)]
    if changed:
        yield Text(
            f"Trained on a manifest that is not there any more, or was not read: {', '.join(changed)}.", "warning"
        )
    yield Text("Manifests as they are now. What a run trained on is in its checkpoints, and listed below.", "note")


def _runs(content: Content) -> Iterator[Part]:
    for run in content["runs"]:
        yield Folded(f"{run['name']} ({run['state']})", list(_run(run)))


def _run(run: Mapping[str, Any]) -> Iterator[Part]:
    if run["why"]:
        yield Text(run["why"], "warning")
    facts = [
        ("Role", run["role"]),
        ("Recipe", run.get("recipe") or "in its directory"),
        ("Settings", "\n".join(run.get("settings") or [])),
        ("Recipe's SHA-256", run.get("recipe_sha256")),
        ("Model", run.get("model")),
        ("Begins with", run.get("begins_with") or ("random weights" if "model" in run else None)),
        (
            "Optimizer",
            f"{run['optimizer']}, learning rate {run['lr']:g}, batch {run['global_batch']}" if "lr" in run else None,
        ),
        ("Training crops", f"{run['training_crop']}; flipped by {run['flip']:g}" if "flip" in run else None),
        ("Seed", str(run["seed"]) if "seed" in run else None),
        ("Trained on", run.get("train")),
        ("Its manifest's SHA-256", run.get("training_manifest_sha256")),
        ("Versions", ", ".join(f"{name} {version}" for name, version in run.get("versions", {}).items())),
        ("Verified", run.get("verified")),
        ("Directory", run.get("directory")),
        ("Notes", "\n".join(run.get("notes", []))),
    ]
    yield Facts([(name, value) for name, value in facts if value])
    metrics = [{"metric": key, "value": value} for key, value in run.get("metrics", {}).items()]
    if metrics:
        of = f"at step {run['best_step']}, its best" if run.get("best_step") is not None else "at the end"
        of = of if run["state"] == "done" else "last known"
        columns = (_text("metric", "metric"), Column("value", "value", number(4)))
        yield Table(_table(columns, metrics), f"Metrics, {of}")
