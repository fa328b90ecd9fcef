"""Runs from their records: time, images/s, MFU and cost; and their points beside Figure 5."""

import json

import pytest
import yaml

from vitscale.errors import DataError, RecipeError
from vitscale.flops import runs
from vitscale.flops.figure5 import draw, points_of
from vitscale.flops.hardware import find_device
from vitscale.flops.runs import read_run, runs_view
from vitscale.recipe import load_recipe

# Steps 1 to 10 took 2 s each, 11 to 15 took 4 s each.
LINES = [
    {"step": 10, "loss": 1.0, "images_per_s": 2048.0, "step_time_s": 2.0, "exaflops": 0.1, "mfu": 0.4},
    {"step": 10, "eval/validation/top1": 0.5},
    {"step": 15, "loss": 1.0, "images_per_s": 1024.0, "step_time_s": 4.0, "exaflops": 0.15, "mfu": 0.2},
]
INDEX = {"step": 15, "world_size": 8, "data": {"num_samples": 100 * 4096, "class_names": ["a", "b"]}}


@pytest.fixture
def run_dir(tmp_path):
    """Of ViT-B/16 on 100 batches of 4096 an epoch, 15 of 700 steps done."""
    recipe = load_recipe("b16_jft", ["model.num_classes=null", "evaluation.validation=imagenet/validation"])
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe.dump()))
    write_metrics(tmp_path, LINES)
    folder = tmp_path / "checkpoints" / "step-00000015"
    folder.mkdir(parents=True)
    (folder / "index.json").write_text(json.dumps(INDEX))
    return tmp_path


def write_metrics(directory, lines):
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def finish(directory, evaluation):
    (directory / "DONE").write_text(json.dumps({"step": 15, "exaflops": 0.15, "evaluation": evaluation}))


def row_of(directory, device=None, count=None, price=None):
    return runs_view([read_run(directory)], device, count, price).rows[0]


def test_what_a_run_under_way_has_cost(run_dir):
    row = row_of(run_dir, find_device("h100"), price=2.0)
    assert (row["step"], row["total_steps"], row["finished"]) == (15, 700, False)
    assert row["images"] == 15 * 4096 and row["images_per_s"] == pytest.approx(15 * 4096 / 40)
    assert row["hours"] == pytest.approx(40 / 3600) and row["device_hours"] == pytest.approx(8 * 40 / 3600)
    assert row["mfu"] == pytest.approx((20 * 0.4 + 20 * 0.2) / 40) and row["exaflops"] == 0.15
    assert row["cost"] == pytest.approx(16 * 40 / 3600) and row["energy_kwh"] == pytest.approx(5.6 * 40 / 3600)
    assert row_of(run_dir, count=4)["device_hours"] == pytest.approx(4 * 40 / 3600)


def test_mfu_of_a_device_that_the_run_did_not_know(run_dir):
    write_metrics(run_dir, [{key: value for key, value in line.items() if key != "mfu"} for line in LINES])
    assert row_of(run_dir)["mfu"] is None
    macs = 196 * 768**2 + 12 * (197 * 12 * 768**2 + 2 * 197**2 * 768) + 768**2 + 768 * 2
    expected = 6 * macs * (15 * 4096 / 40) / (8 * 312e12)
    assert row_of(run_dir, find_device("a100"))["mfu"] == pytest.approx(expected)
    assert row_of(run_dir, find_device("v100"))["mfu"] is None


def test_a_torn_line_is_told_of(run_dir):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "lo')
    view = runs_view([read_run(run_dir)], None, None, None)
    assert view.rows[0]["step"] == 15 and any("damaged lines" in note for note in view.notes)


@pytest.mark.parametrize(
    ("spoil", "error", "word"),
    [
        (lambda run: (run / "recipe.yaml").unlink(), RecipeError, "recipe.yaml"),
        (lambda run: (run / "metrics.jsonl").unlink(), DataError, "no training step yet"),
        (lambda run: (run / "metrics.jsonl").write_text('[1]\n"x"\n'), DataError, "no training step yet"),
        (lambda run: (run / "DONE").write_text("{"), DataError, "DONE"),
        (lambda run: (run / "checkpoints/step-00000015/index.json").write_text("[]"), DataError, "index.json"),
    ],
)
def test_broken_records(run_dir, spoil, error, word):
    spoil(run_dir)
    with pytest.raises(error, match=word):
        read_run(run_dir)


def test_only_finished_runs_with_an_accuracy_are_points(run_dir):
    with pytest.raises(RecipeError, match="not finished"):
        points_of([read_run(run_dir)])
    finish(run_dir, {})
    assert points_of([read_run(run_dir)])[0] == []
    finish(run_dir, {"validation/top1": 0.725})
    ((point,), notes) = points_of([read_run(run_dir)])
    assert (point.exaflops, point.top1, point.is_on_imagenet, notes) == (0.15, 72.5, True, [])


def test_the_figure_in_both_formats(run_dir, tmp_path):
    pytest.importorskip("matplotlib")
    finish(run_dir, {"validation/top1": 0.725})
    points, _ = points_of([read_run(run_dir)])
    draw(tmp_path / "a.png", points)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    draw(tmp_path / "a.svg", points)
    draw(tmp_path / "b.svg", points)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()[:1000]
    with pytest.raises(RecipeError, match="cannot be written"):
        draw(tmp_path / "nowhere" / "a.png", points)


def test_the_records_have_the_trainer_s_names():
    pytest.importorskip("torch")
    from vitscale import checkpoint
    from vitscale.checkpoint.format import INDEX as INDEX_FILE
    from vitscale.training.metrics import METRICS_FILE

    assert (runs.RECIPE_FILE, runs.DONE_FILE) == (checkpoint.RECIPE_FILE, checkpoint.DONE_FILE)
    assert runs.METRICS_FILE == METRICS_FILE
    assert f"{checkpoint.CHECKPOINTS}/step-*/{INDEX_FILE}" == runs.INDEX_FILES
    assert checkpoint.step_folder(15) == "step-00000015"
