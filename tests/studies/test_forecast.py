"""Forecasts of larger runs by smaller ones: the law against scipy, and a study that writes one down in time."""

import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from studies.tiny import write_study

from vitscale.about.report import gather, page
from vitscale.about.studies.expansion import expand
from vitscale.about.studies.forecast import Law, Point, read_forecasts, student_quantile
from vitscale.about.studies.reading import load_study
from vitscale.about.studies.results import read_results
from vitscale.data.shards.generated import write_generated_dataset
from vitscale.ground.errors import DataError, RecipeError

ROOT = Path(__file__).resolve().parents[2]


def expanded(folder: Path, parts: dict) -> None:
    expand(load_study(write_study(folder, parts)), folder / "out", beside=folder)


def line(points: list[Point], exaflops: float) -> tuple[float, float, float]:
    """The regression of logarithms at a new x with the prediction interval of the textbook, by numpy and scipy."""
    x, y = np.log([one.exaflops for one in points]), np.log([one.loss for one in points])
    design, new = np.stack([np.ones_like(x), x], 1), np.array([1, np.log(exaflops)])
    coefficients, *_ = np.linalg.lstsq(design, y)
    variance = np.sum((y - design @ coefficients) ** 2) / (len(x) - 2)
    error = np.sqrt(variance * (1 + new @ np.linalg.inv(design.T @ design) @ new))
    reach = stats.t.ppf(0.975, len(x) - 2) * error
    return tuple(np.exp(new @ coefficients + np.array([0, -reach, reach])))


def test_the_law_and_its_interval_are_those_of_a_linear_regression():
    random = np.random.default_rng(0)
    for n in (3, 4, 7, 20):
        points = [Point(str(i), 10.0**-i, float(2 * 10 ** (0.1 * i) * random.lognormal(0, 0.05))) for i in range(n)]
        assert Law(points).at(30.0) == pytest.approx(line(points, 30.0), rel=1e-9)
    exact = [Point(str(i), 10.0**i, 3 * 10 ** (-0.2 * i)) for i in range(4)]
    assert Law(exact).exponent == pytest.approx(0.2) and Law(exact).at(1e6) == pytest.approx([3 * 10**-1.2] * 3)
    for freedom in range(1, 40):
        assert student_quantile(0.95, freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-10)
    for few in (exact[:2], [exact[0]] * 3):
        with pytest.raises(RecipeError):
            Law(few)


def test_a_study_forecasts_a_run_before_it_begins(tmp_path):
    for seed, split in enumerate(("train", "dev")):
        write_generated_dataset(tmp_path / "colours" / split, [64], seed=seed)
    data = {"colours": {"train": "colours/train", "dev": "colours/dev"}}
    settings = {"data.root": str(tmp_path), "schedule.duration.steps": 2}
    parts = {
        f"w{width}": {"settings": {"model.width": width, **settings}, "datasets": data} for width in (8, 16, 32, 64)
    }
    parts["w64"]["forecast"] = ["w8", "w16", "w32"]
    study, out = write_study(tmp_path, dict(reversed(parts.items()))), tmp_path / "out"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "vitscale", "study", str(study), "--dir", str(out), "--slots", "2"]
    subprocess.run(command, env=environment, cwd=tmp_path, check=True, capture_output=True)

    content = json.loads((out / "results.json").read_text())
    entries = {entry["name"]: entry for entry in content["entries"]}
    points = [
        Point(name, entries[name]["exaflops"], entries[name]["metrics"]["validation/loss"])
        for name in ("w8-colours", "w16-colours", "w32-colours")
    ]
    (scored,) = content["forecasts"]
    made, measured = scored["forecast"], scored["run"]
    planned = entries["w64-colours"]["exaflops"]  # nothing has stopped it early
    assert (made["name"], made["exaflops"]) == ("w64-colours", pytest.approx(planned))
    expected = pytest.approx(line(points, planned), rel=1e-6)
    assert (made["loss"], made["low"], made["high"]) == (scored["expected"], scored["low"], scored["high"]) == expected
    assert measured["loss"] == entries["w64-colours"]["metrics"]["validation/loss"]
    first = json.loads((out / "w64-colours" / "metrics.jsonl").read_text().splitlines()[0])
    assert datetime.fromisoformat(made["made_at"]) <= datetime.fromisoformat(first["time"])

    written = (out / "forecasts.json").read_bytes()
    subprocess.run(command, env=environment, cwd=tmp_path, check=True, capture_output=True)
    assert (out / "forecasts.json").read_bytes() == written
    report = gather([out])
    assert report.plain()["forecasts"] == content["forecasts"]
    for place, key in (("", "high"), ("forecast", "low"), ("forecast", "exaflops")):
        forged = json.loads((out / "results.json").read_text())
        (one,) = forged["forecasts"]
        (one[place] if place else one)[key] *= 1.01
        (tmp_path / "forged").mkdir(exist_ok=True)
        (tmp_path / "forged" / "results.json").write_text(json.dumps(forged))
        with pytest.raises(DataError, match=r"results\.json"):
            read_results(tmp_path / "forged")
    html = page(report)
    for drawn in ("forecast-0", "compute-0"):  # four models of one number of images
        assert f'id="{drawn}-' in html


POINTS = [{"name": "a", "exaflops": 1.0, "loss": 2.0}, {"name": "b", "exaflops": 2.0, "loss": 1.9}]
FORECAST = {"name": "c", "made_at": "", "exaflops": 3.0, "loss": 1.8, "low": 1.7, "high": 1.9, "exponent": 0.1}


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "[" * 100_000,
        json.dumps({"c": FORECAST}),
        json.dumps({"c": {**FORECAST, "points": POINTS}}),
        json.dumps({"c": {**FORECAST, "points": [POINTS[0]] * 3}}),
        json.dumps({"c": {**FORECAST, "points": [*POINTS, {"name": "d", "exaflops": 4.0, "loss": 1.7}]}}),
        json.dumps({"c": {**FORECAST, "points": [*POINTS, {"name": "d", "exaflops": -1, "loss": 1}]}}),
        json.dumps({"c": {**FORECAST, "points": [*POINTS, POINTS[0]]}}).replace("0.1", "1e999"),
    ],
)
def test_a_damaged_file_of_forecasts_is_told(tmp_path, content):
    (tmp_path / "forecasts.json").write_text(content)
    with pytest.raises(DataError, match=r"forecasts\.json"):
        read_forecasts(tmp_path)


def test_a_file_of_forecasts_that_is_a_pipe_or_has_holes_is_not_read(tmp_path):
    (tmp_path / "holes").mkdir()
    os.truncate(os.open(tmp_path / "holes" / "forecasts.json", os.O_CREAT | os.O_RDWR), (1 << 30) + 1)
    os.mkfifo(tmp_path / "forecasts.json")
    for folder in (tmp_path, tmp_path / "holes"):
        with pytest.raises(DataError, match=r"forecasts\.json"):
            read_forecasts(folder)


def test_no_points_make_numbers_that_cannot_be_written():
    steep = [Point("a", 1.0, 1e-17), Point("b", 1.00001, 1e17), Point("c", 1.00002, 1e17)]
    assert all(0 < value < 1e18 for value in Law(steep).at(1e17))


def test_a_forecast_needs_three_runs_on_the_same_data(tmp_path):
    data = {name: {"train": "a", "dev": "b"} for name in ("cats", "dogs")}
    parts = {"small": {"grid": [{"model.width": [8, 16]}], "datasets": data}, "large": {"forecast": ["small"]}}
    with pytest.raises(RecipeError, match=r"parts\.large\.forecast"):  # it names no data set, so none has been told
        expanded(tmp_path, parts)
    parts["large"] = {"datasets": data, "forecast": ["small"]}
    with pytest.raises(RecipeError, match=r"parts\.large\.forecast.*cats"):
        expanded(tmp_path, parts)
    parts["large"] = {"forecast": ["smal"]}
    with pytest.raises(RecipeError, match=r"parts\.large\.forecast.*'small'"):
        expanded(tmp_path, parts)
    parts["small"] |= {"grid": [{"model.width": [8, 16, 32]}], "forecast": ["large"]}
    parts["large"] = {"datasets": data, "forecast": ["small"]}
    with pytest.raises(RecipeError, match="cycle"):
        expanded(tmp_path, parts)
