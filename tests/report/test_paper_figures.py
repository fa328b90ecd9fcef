"""Figures 3 to 5 of the report: each mark is where the number in results.json belongs, by the figure's own ticks."""

import json
import re
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np
import pytest
from browser import Read
from report.made_runs import RECIPE, STEPS, write_run

from vitscale.about.report import gather, page
from vitscale.data.shards.generated import write_generated_dataset
from vitscale.flops.published import table_5, table_6

pytest.importorskip("matplotlib")

MODEL = "{name: ViT-B/16, head: linear}"
IMAGES = {"imagenet": 20, "imagenet21k": 160, "jft300m": 1280}
FEWSHOT = {"imagenet": 0.25, "imagenet21k": 0.375, "jft300m": 0.5}
TOP1 = {"imagenet": 0.7625, "imagenet21k": 0.825, "jft300m": 0.85}
EXAFLOPS = {"imagenet": 1.5, "imagenet21k": 15.0, "jft300m": 40.0}  # a step of pre-training; 0.5 of fine-tuning
OWN = "var(--series-8)"  # of the report's own results


@pytest.fixture(scope="module")
def reported(tmp_path_factory) -> tuple[dict, str]:
    """Three runs of pre-training with few-shot evaluations, and each fine-tuned on ImageNet: results.json, the page."""
    root = tmp_path_factory.mktemp("figures")
    for seed, (name, count) in enumerate(IMAGES.items()):
        write_generated_dataset(root / name / "full", [count], seed=seed)
    write_generated_dataset(root / "imagenet" / "test", [16], seed=9)
    recipe = root / "b16.yaml"
    recipe.write_text(re.sub(r"model: \{.*?\}", f"model: {MODEL}", RECIPE).replace("image_size: 16", "image_size: 224"))
    few = "{tasks: [{name: imagenet, train: imagenet/full, test: imagenet/test}], shots: [5]}"
    runs = []
    for name in IMAGES:
        places = [f"data.root={root}", f"data.train={name}/full"]
        before, tuned = root / f"pre-{name}", root / f"tuned-{name}"
        measured = {"fewshot/imagenet/5shot": FEWSHOT[name]}
        write_run(before, [*places, f"evaluation.fewshot={few}"], recipe, metrics=measured, exaflops=EXAFLOPS[name])
        places = [f"data.root={root}", "data.train=imagenet/full", "evaluation.validation=imagenet/test"]
        measured = {"validation/top1": TOP1[name]}
        write_run(tuned, [*places, f"init.from={before}"], recipe, metrics=measured, exaflops=0.5)
        runs += [before, tuned]
    content = gather(runs)
    return json.loads(json.dumps(content.plain(), allow_nan=False)), page(content)


class Marks(NamedTuple):
    """A figure taken apart: colour -> its marks as (x, y) in the units of the axes, and all text in it."""

    by_colour: dict[str, list[tuple[float, float]]]
    text: list[str]


def marks(text: str, name: str, log_x: bool = False) -> Marks:
    """The figure of this name on a page."""
    (svg,) = [svg for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL) if f'id="{name}-' in svg]
    tree = ElementTree.fromstring(svg)
    scales = []
    for axis in "xy":
        ticks = []
        for group in tree.iter("g"):
            words, use = group.find(".//text"), group.find(".//use")
            if re.search(rf"-{axis}tick_\d+$", group.get("id", "")) and words is not None and words.text:
                assert use is not None
                ticks.append((float(use.attrib[axis]), words.text))
        values = [float(word) if re.fullmatch(r"[\d.]+", word) else place for place, (_, word) in enumerate(ticks)]
        values = np.log(values) if log_x and axis == "x" else np.array(values)
        slope, start = np.polyfit([place for place, _ in ticks], values, 1)
        scales.append((slope, start))
    found: dict[str, list[tuple[float, float]]] = {}
    for line in tree.iter("g"):
        if not re.search(r"-line2d_\d+$", line.get("id", "")):
            continue
        for use in line.iter("use"):
            colour = re.search(r"fill: (var\([^)]*\))", use.get("style", ""))
            if colour is not None and line.find(".//g[@clip-path]") is not None:  # in the axes, not in the legend
                x, y = (
                    slope * float(use.attrib[axis]) + start for axis, (slope, start) in zip("xy", scales, strict=True)
                )
                found.setdefault(colour[1], []).append((float(np.exp(x)) if log_x else x, y))
    return Marks(found, [each.text or "" for each in tree.iter("text")])


def close(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    assert np.array(sorted(found)) == pytest.approx(np.array(sorted(expected)), rel=1e-3, abs=1e-2)


def of(content: dict, metric: str) -> dict[str, dict]:
    """Pre-training set -> the result of this metric."""
    chosen = [result for result in content["results"] if result["metric"] == metric]
    runs = {result["runs"][0].partition("-")[2]: result for result in chosen}
    assert runs.keys() == IMAGES.keys()
    return runs


def test_figure_3_is_table_5_and_the_fine_tuned_runs(reported):
    content, text = reported
    results = of(content, "validation/top1")
    assert {name: result["mean"] for name, result in results.items()} == TOP1
    drawn = marks(text, "figure-3")
    places = {row.pretraining: place for place, row in enumerate({row.pretraining: row for row in table_5()}.values())}
    assert list(places) == list(IMAGES)
    close(drawn.by_colour.pop(OWN), [(places[name], 100 * results[name]["mean"]) for name in IMAGES])
    published = [(places[row.pretraining], row.imagenet) for row in table_5() if row.imagenet is not None]
    close([mark for colour in drawn.by_colour.values() for mark in colour], published)
    assert sum("tuned-" in word for word in drawn.text) == 3 and "ViT-H/14 (Table 5)" in drawn.text


def test_figure_4_is_the_five_shot_accuracy_by_images_seen_before(reported):
    content, text = reported
    results = of(content, "fewshot/imagenet/5shot")
    drawn = marks(text, "figure-4", log_x=True)
    expected = [(result["pretraining_samples"], 100 * result["mean"]) for result in results.values()]
    assert expected == [(IMAGES[name], 100 * FEWSHOT[name]) for name in IMAGES]
    (line,) = drawn.by_colour.values()  # one model, one line
    close(line, expected)
    policy = {result["policy"] for result in results.values()}.pop()
    assert f"ViT-B/16, policy {policy}" in drawn.text


def test_figure_5_is_table_6_and_the_compute_of_both_runs_together(reported):
    content, text = reported
    results = of(content, "validation/top1")
    for name, result in results.items():
        assert result["exaflops"] == pytest.approx(STEPS * (EXAFLOPS[name] + 0.5))
    drawn = marks(text, "figure-5", log_x=True)
    close(drawn.by_colour.pop(OWN), [(result["exaflops"], 100 * result["mean"]) for result in results.values()])
    close(
        [mark for colour in drawn.by_colour.values() for mark in colour], [(r.exaflops, r.imagenet) for r in table_6()]
    )


def test_the_page_says_the_difference_from_table_5(reported):
    content, text = reported
    (table,) = [table for table in content["paper"] if table["table"] == "5"]
    published = {row.pretraining: row.imagenet for row in table_5() if row.model == "ViT-B/16"}
    read = Read(text)
    for result in table["results"]:
        name = result["runs"][0].removeprefix("tuned-")
        assert result["published"] == published[name]
        assert result["difference"] == pytest.approx(100 * TOP1[name] - published[name])
        assert any(f"{result['difference']:+.2f}" in row and f"{published[name]:.2f}" in row for row in read.rows), name
    assert all(any(f"As Figure {number}" in word for word in read.words) for number in (3, 4, 5))
    assert read.holes == [] and read.outside == []
    # Flips and crops change what some tasks ask for: each run says its own.
    crops = [word for word in read.words if "area [0.5, 1.0]" in word and word.endswith("flipped by 0.5")]
    assert len(crops) == len(content["runs"]) == 6


def test_a_line_over_compute_goes_through_one_run_of_each_model(tmp_path):
    for name in ("full", "test"):
        write_generated_dataset(tmp_path / "imagenet" / name, [16], seed=len(name))
    recipe, runs = tmp_path / "small.yaml", []
    recipe.write_text(re.sub(r"model: \{.*?\}", f"model: {MODEL}", RECIPE).replace("image_size: 16", "image_size: 224"))
    for depth, kind, top1 in ((1, "1d", 0.25), (2, "1d", 0.375), (2, "none", 0.3125), (3, "1d", 0.5)):
        settings = ["data.train=imagenet/full", "evaluation.validation=imagenet/test", f"model.depth={depth}"]
        settings += [f"data.root={tmp_path}", f"model.position.kind={kind}"]
        run = tmp_path / f"{depth}-{kind}"
        write_run(run, settings, recipe, metrics={"validation/top1": top1}, exaflops=float(depth))
        runs.append(run)
    (points,) = marks(page(gather(runs)), "compute-0").by_colour.values()
    close(points, [(STEPS, 25), (2 * STEPS, 37.5), (3 * STEPS, 50)])
