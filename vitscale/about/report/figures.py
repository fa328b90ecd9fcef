"""The report's figures, drawn from its content alone."""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vitscale.about.report.content import Report
from vitscale.about.report.paper import TOP1, transfers
from vitscale.about.report.records import Curves
from vitscale.about.report.results import Result
from vitscale.about.studies.forecast import Law
from vitscale.about.studies.results import Scored
from vitscale.flops.published import table_5, table_6
from vitscale.ground.page import SERIES, Drawing, draw
from vitscale.ground.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_LINES = 8
_PRETRAINING = {"imagenet": "ImageNet", "imagenet21k": "ImageNet-21k", "jft300m": "JFT-300M"}
_OWN = "*XPDsv^p"  # marks of the report's own results, beside the paper's dots
_FIVE_SHOT = re.compile(r"fewshot/imagenet[^/]*/5shot")
_ANY_SHOTS = re.compile(r"fewshot/[^/]+/\d+shot")
_LEAST_MODELS = 3


def curves(report: Report) -> Iterator[Drawing]:
    """Loss, learning rate and evaluations over steps; runs that differ in their seed alone share a colour."""
    seeds = {name: result.runs for result in report.results for name in result.runs}
    groups: dict[str, list[Curves]] = {}
    for run in report.runs:
        if run.record is not None and run.record.curves.loss:
            first, *others = seeds.get(run.name, [run.name])
            title = f"{first} and {counted(len(others), 'other seed')}" if others else first
            groups.setdefault(title, []).append(run.record.curves)
    for start in range(0, len(groups), _MOST_LINES):
        chosen = list(groups.items())[start : start + _MOST_LINES]
        shown = ["loss", "lr", *_evaluated([run for _, runs in chosen for run in runs])]
        columns = 2 if max(len(name) for name, _ in chosen) < 45 else 1

        def put(figure: "Figure", chosen: Any = chosen, shown: Sequence[str] = shown, columns: int = columns) -> None:
            panels = figure.subplots(1, len(shown), squeeze=False)[0]
            for axes, what in zip(panels, shown, strict=True):
                for (name, runs), color in zip(chosen, SERIES, strict=False):
                    for run in runs:
                        points = {"loss": run.loss, "lr": run.lr, **run.evaluations}.get(what, [])
                        style = ".-" if len(points) < 30 else "-"
                        label = name if axes is panels[0] and run is runs[0] else None
                        axes.plot(*zip(*points, strict=True), style, color=color, label=label) if points else None
                axes.set(title=_title(what), xlabel="step")
                axes.ticklabel_format(axis="x", style="plain", useOffset=False)
                axes.margins(x=0.03)
                axes.locator_params(axis="x", nbins=5)
            figure.legend(loc="outside lower left", ncols=columns)

        rows, names = -(-len(chosen) // columns), ", ".join(name for name, _ in chosen)
        of = f" {start + 1} to {start + len(chosen)} of {len(groups)}" if len(groups) > _MOST_LINES else ""
        alt = f"Curves over steps of {', '.join(shown)} for {names}"
        caption = f"Runs{of}: {', '.join(_title(what) for what in shown)}, over steps."
        yield draw(f"curves-{start}", alt, put, width=1080, height=290 + 20 * rows, caption=caption)


def _evaluated(runs: Sequence[Curves]) -> list[str]:
    """At most two evaluation curves that any run has a point of, top-1 first."""
    keys = sorted({key for run in runs for key in run.evaluations})
    keys.sort(key=lambda key: (key != TOP1, not key.endswith("shot"), key != "validation/loss"))
    return keys[:2]


def _title(what: str) -> str:
    return {"loss": "training loss", "lr": "learning rate"}.get(what, what)


def figure_3(report: Report) -> Drawing | None:
    """Top-1 on ImageNet after fine-tuning against the pre-training set: Table 5's, and own results with these sets."""
    places = list(_PRETRAINING)
    tuned = [result for result in transfers(report.results) if result.task == "imagenet"]
    data = [((result.pretraining_data or "").partition("/")[0], result) for result in tuned]
    own = [(places.index(name), result) for name, result in data if name in places]
    if not own:
        return None

    def put(figure: "Figure") -> None:
        axes = figure.subplots()
        for index, model in enumerate(dict.fromkeys(row.model for row in table_5())):
            points = [(places.index(row.pretraining), row.imagenet) for row in table_5() if row.model == model]
            label = f"{model} (Table 5)"
            axes.plot(*zip(*points, strict=True), "o--", color=SERIES[index], label=label, alpha=0.7)
        _put_own(axes, own)
        axes.set_xticks(range(3), _PRETRAINING.values())
        axes.set_ylabel("ImageNet top-1 (%)")
        figure.legend(loc="outside lower left")  # in the axes it would lie on marks

    caption = "As Figure 3: ImageNet top-1 after fine-tuning, by pre-training data. Large marks: this report's own."
    return draw("figure-3", caption, put, width=760, height=400 + 17 * len(own), caption=caption)


def figure_4(report: Report) -> Drawing | None:
    """5-shot accuracy on ImageNet against pre-training images; the paper prints no numbers for this figure."""
    own = [result for result in report.results if _FIVE_SHOT.fullmatch(result.metric)]
    caption = "5-shot accuracy on ImageNet against pre-training images."
    caption = f"As Figure 4, which the paper draws without numbers: {caption}"
    return _over_images("figure-4", own, "ImageNet 5-shot top-1 (%)", caption)


def _over_images(name: str, results: Sequence[Result], what: str, caption: str) -> Drawing | None:
    """An accuracy against pre-training images, a line a model; None for a single number of images, or many models."""
    own = [(result.pretraining_samples, result) for result in results if result.pretraining_samples]
    lines = dict.fromkeys((result.model, result.policy) for _, result in own)
    if len({samples for samples, _ in own}) < 2 or len(lines) > len(SERIES):
        return None

    def put(figure: "Figure") -> None:
        axes = figure.subplots()
        for index, (model, policy) in enumerate(lines):
            of_line = [(x, result) for x, result in own if (result.model, result.policy) == (model, policy)]
            points = sorted((x, 100 * result.mean) for x, result in of_line)
            axes.plot(*zip(*points, strict=True), "o-", color=SERIES[index], label=f"{model}, policy {policy}")
        _log(axes, [samples for samples, _ in own])
        axes.set(xlabel="pre-training images", ylabel=what)
        figure.legend(loc="outside lower left", ncols=3)

    return draw(name, caption, put, width=760, height=400 + 6 * len(lines), caption=caption)


def scaling(report: Report) -> Iterator[Drawing]:
    """Accuracies of runs from scratch against images and compute, where there are three models or more."""
    results = [one for one in report.results if one.begins_with is None and one.exaflops and one.pretraining_samples]
    measures = {one.metric for one in results if one.metric == TOP1 or _ANY_SHOTS.fullmatch(one.metric)}
    for place, metric in enumerate(sorted(measures)):
        own = _one_each(one for one in results if one.metric == metric)
        if len({one.model for one in own}) < _LEAST_MODELS:
            continue
        what = f"{metric} on {', '.join(sorted({one.dataset or '' for one in own}))}"
        over_images = _over_images(f"data-{place}", own, f"{metric} (%)", f"{what}, against training images.")
        if over_images is not None:
            yield over_images
        yield _over_compute(f"compute-{place}", own, metric, f"{what}, against the compute of training.")


def _one_each(results: Iterable[Result]) -> list[Result]:
    """Of a model's results on as many images, which differ in something else: the one no grid varies, or the best."""
    alike: dict[tuple[str, int | None, str | None], list[Result]] = {}
    for one in results:
        alike.setdefault((one.model, one.pretraining_samples, one.policy), []).append(one)
    return [max(each, key=lambda one: (one.label == one.part, one.mean)) for each in alike.values()]


def _over_compute(name: str, own: Sequence[Result], metric: str, caption: str) -> Drawing:
    lines: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for one in own:
        line = lines.setdefault((_kind(one.model), one.pretraining_samples or 0), [])
        line.append((one.exaflops or 0.0, 100 * one.mean))
    kinds, sizes = list(dict.fromkeys(kind for kind, _ in lines)), sorted({size for _, size in lines})

    def put(figure: "Figure") -> None:
        axes = figure.subplots()
        for (kind, size), points in lines.items():
            style, color = f"{_OWN[sizes.index(size) % len(_OWN)]}-", SERIES[kinds.index(kind)]
            axes.plot(*zip(*sorted(points), strict=True), style, color=color, label=f"{kind}, {size:,} images")
        _log(axes, [one.exaflops for one in own if one.exaflops])
        axes.set(xlabel="compute (exaFLOPs)", ylabel=f"{metric} (%)")
        figure.legend(loc="outside lower left", ncols=3)

    return draw(name, caption, put, width=760, height=400 + 6 * len(lines), caption=caption)


def _kind(model: str) -> str:
    return "hybrid" if "+" in model else next((name for name in ("ResNet", "Swin") if model.startswith(name)), "ViT")


def forecast(place: int, scored: Scored) -> Drawing:
    """The runs that a forecast is made from, its law with the interval, and what has come of it."""
    made, law = scored.forecast, Law(scored.forecast.points)

    def put(figure: "Figure") -> None:
        axes = figure.subplots()
        ends = [point.exaflops for point in made.points] + [made.exaflops]
        xs = [min(ends) * (max(ends) / min(ends)) ** (step / 50) for step in range(51)]
        middle, low, high = zip(*map(law.at, xs), strict=True)
        axes.plot(ends[:-1], [one.loss for one in made.points], "o", color=SERIES[0], label="smaller runs")
        axes.plot(xs, middle, "-", color=SERIES[0], label=f"loss ~ compute^-{made.exponent:.3f}")
        axes.fill_between(xs, low, high, color=SERIES[0], alpha=0.15, label="95 % for one run")
        if scored.run is not None:
            axes.plot(scored.run.exaflops, scored.run.loss, "*", color=SERIES[7], markersize=13, label=made.name)
        _log(axes, ends)
        axes.set(yscale="log", xlabel="compute (exaFLOPs)", ylabel="validation loss")
        axes.yaxis.set_minor_formatter("{x:.3g}")
        axes.legend()

    came = "has not ended yet" if scored.run is None else "the star is its loss"
    caption = f"{made.name}: the law of the smaller runs, written down {made.made_at}; {came}."
    return draw(f"forecast-{place}", caption, put, width=760, height=380, caption=caption)


def figure_5(report: Report) -> Drawing | None:
    """Top-1 after fine-tuning against compute: Table 6's on ImageNet, and own results on ImageNet beside them."""
    tuned = [result for result in transfers(report.results) if result.task == "imagenet"]
    own = [(result.exaflops, result) for result in tuned if result.exaflops is not None]
    if not own:
        return None

    def put(figure: "Figure") -> None:
        axes = figure.subplots()
        points: dict[str, list[tuple[float, float]]] = {"ViT": [], "ResNet": [], "hybrid": []}
        for row in table_6():
            points[_kind(row.model)].append((row.exaflops, row.imagenet))
        for index, (kind, of_kind) in enumerate(points.items()):
            axes.plot(*zip(*of_kind, strict=True), "o", color=SERIES[index], label=f"{kind} (Table 6)")
        _put_own(axes, own)
        _log(axes, [*(row.exaflops for row in table_6()), *(exaflops for exaflops, _ in own)])
        axes.set(xlabel="compute (exaFLOPs)", ylabel="ImageNet top-1 (%)")
        figure.legend(loc="outside lower left")

    caption = (
        "As Figure 5: ImageNet top-1 after fine-tuning against compute. Large marks: this report's own; their "
        "compute is that of pre-training and fine-tuning together."
    )
    return draw("figure-5", caption, put, width=760, height=380 + 17 * len(own), caption=caption)


def _put_own(axes: "Axes", own: Sequence[tuple[float, Result]]) -> None:
    for (x, result), mark in zip(own, itertools.cycle(_OWN)):
        label = f"{result.label}: begins with {result.begins_with}, policy {result.policy}"
        axes.plot(x, 100 * result.mean, mark, color=SERIES[7], markersize=11, label=label)


def _log(axes: "Axes", values: Sequence[float]) -> None:
    """Make an axis logarithmic, with ticks of plain numbers, if the values are of different magnitudes."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if max(values) < 10 * min(values):
        return
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
