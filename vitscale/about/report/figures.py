"""The report's figures, drawn from its results.json alone."""

import itertools
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vitscale.about.report.paper import TOP1, transfers
from vitscale.flops.published import table_5, table_6
from vitscale.ground.page import SERIES, Drawing, draw
from vitscale.ground.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Content = Mapping[str, Any]
_MOST_LINES = 8
_PRETRAINING = {"imagenet": "ImageNet", "imagenet21k": "ImageNet-21k", "jft300m": "JFT-300M"}
_OWN = "*XPDsv^p"  # marks of the report's own results, beside the paper's dots
_FIVE_SHOT = re.compile(r"fewshot/imagenet[^/]*/5shot")


def glance(content: Content, policy: str) -> Drawing | None:
    """Top-1 by task, with a mark and a deviation for each result under one policy; None for fewer than two."""
    rows = [
        result
        for result in content["results"]
        if result["metric"] == TOP1 and result["split"] != "dev" and result["policy"] == policy and result["task"]
    ]
    if len(rows) < 2:
        return None
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    by_part = [(row["part"], row["begins_with"], row["task"]) for row in rows]
    # What a choice has set differs from task to task, so winners of one part are one series.
    by = "part" if all(row["part"] for row in rows) and len(set(by_part)) == len(rows) else "label"
    labels = list(dict.fromkeys(described(row, by) for row in rows))
    if len(labels) > len(SERIES):
        return None

    def put(figure: "Figure") -> None:
        axes = figure.subplots()
        for number, label in enumerate(labels):
            offset = (number - (len(labels) - 1) / 2) * min(0.18, 0.7 / len(labels))
            own = [row for row in rows if described(row, by) == label]
            axes.errorbar(
                [100 * row["mean"] for row in own],
                [tasks.index(row["task"]) + offset for row in own],
                xerr=[100 * (row["std"] or 0) for row in own],
                fmt="osD^vPXd"[number % 8],
                color=SERIES[number],
                label=label,
                capsize=3,
            )
        axes.set_yticks(range(len(tasks)), tasks)
        axes.set_ylim(len(tasks) - 0.5, -0.5)
        axes.set_xlabel("top-1 (%)")
        figure.legend(loc="outside lower left", ncols=1 if max(map(len, labels)) > 40 else 2)

    height = 90 + len(tasks) * max(34, 16 * len(labels)) + 22 * len(labels)
    caption = f"Top-1 of every finished result under policy {policy}: mean, and standard deviation over seeds."
    alt = "; ".join(f"{row['task']}, {described(row)}: {100 * row['mean']:.2f} %" for row in rows)
    return draw(f"glance-{policy}", f"Top-1 by task. {alt}", put, width=860, height=height, caption=caption)


def described(result: Mapping[str, Any], by: str = "label") -> str:
    """A result's name, or another key of it, and what it begins with, on one line."""
    begins = result["begins_with"]
    return f"{result[by]}: {'from scratch' if begins is None else f'begins with {begins}'}"


def means_over_steps(content: Content) -> Iterator[Drawing]:
    """Top-1 over steps, a figure a task: for each result not on a development split, the mean over seeds as a line."""
    evaluations = {run["name"]: run.get("curves", {}).get("evaluations", {}).get(TOP1, []) for run in content["runs"]}
    lines: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for result in content["results"]:
        if result["metric"] != TOP1 or result["split"] == "dev" or not result["task"]:
            continue
        by_step: dict[float, list[float]] = {}
        for name in result["runs"]:
            for step, value in evaluations.get(name, []):
                by_step.setdefault(step, []).append(100 * value)
        points = [
            (step, statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)
            for step, values in sorted(by_step.items())
            if len(values) == result["n"]
        ]
        lines.setdefault(result["task"], {})[described(result)] = points
    for task, found in lines.items():
        if not 2 <= len(found) <= len(SERIES) or all(len(points) < 2 for points in found.values()):
            continue

        def put(figure: "Figure", found: Mapping[str, list[tuple[float, float, float]]] = found) -> None:
            axes = figure.subplots()
            for number, (label, points) in enumerate(found.items()):
                steps, means, deviations = zip(*points, strict=True) if points else ((), (), ())
                style = "osD^vPXd"[number] + "-"
                axes.errorbar(steps, means, yerr=deviations, fmt=style, color=SERIES[number], label=label, capsize=3)
            axes.set_xlabel("step")
            axes.set_ylabel("top-1 (%)")
            figure.legend(loc="outside lower left", ncols=2)

        ends = "; ".join(f"{label}: {points[-1][1]:.2f} %" for label, points in found.items() if points)
        yield draw(
            f"steps-{task}",
            f"Top-1 of {task} over steps. At the end, {ends}",
            put,
            width=860,
            height=300 + 11 * len(found),
            caption=f"Top-1 of {task} over steps: mean, and standard deviation over seeds.",
        )


def curves(content: Content) -> Iterator[Drawing]:
    """Loss, learning rate and evaluations over steps; runs that differ in their seed alone share a colour."""
    seeds = {name: result["runs"] for result in content["results"] for name in result["runs"]}
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for run in content["runs"]:
        if run.get("curves", {}).get("loss"):
            first, *others = seeds.get(run["name"], [run["name"]])
            groups.setdefault(f"{first} and {counted(len(others), 'other seed')}" if others else first, []).append(run)
    for start in range(0, len(groups), _MOST_LINES):
        chosen = list(groups.items())[start : start + _MOST_LINES]
        shown = ["loss", "lr", *_evaluated([run for _, runs in chosen for run in runs])]
        columns = 2 if max(len(name) for name, _ in chosen) < 45 else 1

        def put(figure: "Figure", chosen: Any = chosen, shown: Sequence[str] = shown, columns: int = columns) -> None:
            panels = figure.subplots(1, len(shown), squeeze=False)[0]
            for axes, what in zip(panels, shown, strict=True):
                for (name, runs), color in zip(chosen, SERIES, strict=False):
                    for run in runs:
                        found = run["curves"]
                        points = found[what] if what in ("loss", "lr") else found["evaluations"].get(what, [])
                        style = ".-" if len(points) < 30 else "-"
                        label = name if axes is panels[0] and run is runs[0] else None
                        axes.plot(*zip(*points, strict=True), style, color=color, label=label) if points else None
                _finish(axes, what)
            figure.legend(loc="outside lower left", ncols=columns)

        rows, names = -(-len(chosen) // columns), ", ".join(name for name, _ in chosen)
        of = f" {start + 1} to {start + len(chosen)} of {len(groups)}" if len(groups) > _MOST_LINES else ""
        yield draw(
            f"curves-{start}",
            f"Curves over steps of {', '.join(shown)} for {names}",
            put,
            width=1080,
            height=290 + 20 * rows,
            caption=f"Runs{of}: {', '.join(_title(what) for what in shown)}, over steps.",
        )


def _evaluated(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """At most two evaluation curves that any run has a point of, top-1 first."""
    keys = sorted({key for run in runs for key in run["curves"]["evaluations"]})
    keys.sort(key=lambda key: (key != TOP1, not key.endswith("shot"), key != "validation/loss"))
    return keys[:2]


def _finish(axes: "Axes", what: str) -> None:
    axes.set_title(_title(what))
    axes.set_xlabel("step")
    axes.ticklabel_format(axis="x", style="plain", useOffset=False)
    axes.margins(x=0.03)
    axes.locator_params(axis="x", nbins=5)


def _title(what: str) -> str:
    return {"loss": "training loss", "lr": "learning rate"}.get(what, what)


# ---- Beside the paper's figures --------------------------------------------------------------------------------------


def figure_3(content: Content) -> Drawing | None:
    """Top-1 on ImageNet after fine-tuning against the pre-training set: Table 5's, and own results with these sets."""
    own = [
        (result, (result["pretraining_data"] or "").partition("/")[0])
        for result in transfers(content["results"])
        if result["task"] == "imagenet"
    ]
    own = [(result, data) for result, data in own if data in _PRETRAINING]
    if not own:
        return None

    def put(figure: "Figure") -> None:
        axes = figure.subplots()
        places = list(_PRETRAINING)
        for index, model in enumerate(dict.fromkeys(row.model for row in table_5())):
            rows = [row for row in table_5() if row.model == model]
            xs = [places.index(row.pretraining) for row in rows]
            axes.plot(
                xs, [row.imagenet for row in rows], "o--", color=SERIES[index], label=f"{model} (Table 5)", alpha=0.7
            )
        for (result, data), mark in zip(own, itertools.cycle(_OWN)):
            label = f"{described(result)}, policy {result['policy']}"
            axes.plot(places.index(data), 100 * result["mean"], mark, color=SERIES[7], markersize=11, label=label)
        axes.set_xticks(range(3), _PRETRAINING.values())
        axes.set_ylabel("ImageNet top-1 (%)")
        figure.legend(loc="outside lower left")  # in the axes it would lie on marks

    caption = "As Figure 3: ImageNet top-1 after fine-tuning, by pre-training data. Large marks: this report's own."
    return draw("figure-3", caption, put, width=760, height=400 + 17 * len(own), caption=caption)


def figure_4(content: Content) -> Drawing | None:
    """5-shot accuracy on ImageNet against pre-training images; the paper prints no numbers for this figure."""
    own = [
        result
        for result in content["results"]
        if _FIVE_SHOT.fullmatch(result["metric"]) and result["pretraining_samples"]
    ]
    lines = list(dict.fromkeys((result["model"], result["policy"]) for result in own))
    if len({result["pretraining_samples"] for result in own}) < 2 or len(lines) > len(SERIES):
        return None

    def put(figure: "Figure") -> None:
        axes = figure.subplots()
        for index, (model, policy) in enumerate(lines):
            points = sorted(
                (r["pretraining_samples"], 100 * r["mean"]) for r in own if (r["model"], r["policy"]) == (model, policy)
            )
            axes.plot(*zip(*points, strict=True), "o-", color=SERIES[index], label=f"{model}, policy {policy}")
        _log(axes, [result["pretraining_samples"] for result in own])
        axes.set_xlabel("pre-training images")
        axes.set_ylabel("ImageNet 5-shot top-1 (%)")
        axes.legend()

    caption = (
        "As Figure 4, which the paper draws without numbers: 5-shot accuracy on ImageNet against pre-training images."
    )
    return draw("figure-4", caption, put, width=760, height=380, caption=caption)


def figure_5(content: Content) -> Drawing | None:
    """Top-1 after fine-tuning against compute: Table 6's on ImageNet, and own results on ImageNet beside them."""
    own = [
        result
        for result in transfers(content["results"])
        if result["task"] == "imagenet" and result["exaflops"] is not None
    ]
    if not own:
        return None

    def put(figure: "Figure") -> None:
        axes = figure.subplots()
        kinds = {"ViT (Table 6)": lambda m: m.startswith("ViT"), "ResNet (Table 6)": lambda m: m.startswith("ResNet")}
        kinds["hybrid (Table 6)"] = lambda m: "+" in m
        for index, (label, is_kind) in enumerate(kinds.items()):
            rows = [
                row for row in table_6() if is_kind(row.model) and (("+" in row.model) == label.startswith("hybrid"))
            ]
            axes.plot([r.exaflops for r in rows], [r.imagenet for r in rows], "o", color=SERIES[index], label=label)
        for result, mark in zip(own, itertools.cycle(_OWN)):
            label = f"{described(result)}, policy {result['policy']}"
            axes.plot(result["exaflops"], 100 * result["mean"], mark, color=SERIES[7], markersize=11, label=label)
        _log(axes, [*(row.exaflops for row in table_6()), *(result["exaflops"] for result in own)])
        axes.set_xlabel("compute (exaFLOPs)")
        axes.set_ylabel("ImageNet top-1 (%)")
        figure.legend(loc="outside lower left")

    caption = (
        "As Figure 5: ImageNet top-1 after fine-tuning against compute. Large marks: this report's own; their "
        "compute is that of pre-training and fine-tuning together."
    )
    return draw("figure-5", caption, put, width=760, height=380 + 17 * len(own), caption=caption)


def against_compute(content: Content) -> Drawing | None:
    """Like Figure 5 for the report's own tasks: top-1 against all compute that went in, task by task."""
    own = [
        result
        for result in content["results"]
        if result["metric"] == TOP1 and result["split"] != "dev" and result["exaflops"] and result["task"]
    ]
    places = {(result["task"], result["policy"]): None for result in own}
    if len({result["exaflops"] for result in own}) < 2 or len(places) > len(SERIES):
        return None

    def put(figure: "Figure") -> None:
        axes = figure.subplots()
        for index, (task, policy) in enumerate(places):
            points = sorted((r["exaflops"], 100 * r["mean"]) for r in own if (r["task"], r["policy"]) == (task, policy))
            axes.plot(*zip(*points, strict=True), "o", color=SERIES[index], label=f"{task}, policy {policy}")
        _log(axes, [result["exaflops"] for result in own])
        axes.set_xlabel("compute, pre-training included (exaFLOPs)")
        axes.set_ylabel("top-1 (%)")
        figure.legend(loc="outside right upper")

    caption = "As Figure 5, on this report's tasks: top-1 against compute, that of the runs begun with included."
    return draw("against-compute", caption, put, width=760, height=340, caption=caption)


def _log(axes: "Axes", values: Sequence[float]) -> None:
    """Make an axis logarithmic, with ticks of plain numbers, if the values are of different magnitudes."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if max(values) < 10 * min(values):
        return
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
