"""Runs from their records: time, images/s, MFU and cost."""

import json
from dataclasses import replace

import pytest
import yaml

from vitscale.flops.hardware import find_device
from vitscale.flops.runs import runs_table
from vitscale.ground.errors import DataError, RecipeError
from vitscale.recipe import load_recipe
from vitscale.runs.checkpoint_index import CheckpointIndex, index_text
from vitscale.runs.run import Run

# Steps 1 to 10 took 2 s each, 11 to 15 took 4 s each.
LINES = [
    {"step": 10, "loss": 1.0, "images_per_s": 2048.0, "step_time_s": 2.0, "exaflops": 0.1, "mfu": 0.4},
    {"step": 10, "eval/validation/top1": 0.5},
    {"step": 15, "loss": 1.0, "images_per_s": 1024.0, "step_time_s": 4.0, "exaflops": 0.15, "mfu": 0.2},
]
_DATA = {"num_samples": 100 * 4096, "class_names": ["a", "b"]}
INDEX = CheckpointIndex(15, 8, {"w": [1]}, ["master"], 15, {}, _DATA, {})

_OF_A_RUN = ["precision=bf16", "model.num_classes=null"]


@pytest.fixture
def run_dir(tmp_path):
    """Of ViT-B/16 on 100 batches of 4096 an epoch, 15 of 700 steps done."""
    recipe = load_recipe("b16_jft", [*_OF_A_RUN, "evaluation.validation=imagenet/validation"])
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe.dump()))
    write_metrics(tmp_path, LINES)
    write_index(tmp_path, "step-00000015", index_text(INDEX))
    return tmp_path


def write_index(directory, checkpoint, content):
    folder = directory / "checkpoints" / checkpoint
    folder.mkdir(parents=True)
    (folder / "index.json").write_text(content)


def write_metrics(directory, lines):
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def finish(directory, evaluation, **more):
    (directory / "DONE").write_text(json.dumps({"step": 15, "exaflops": 0.15, "evaluation": evaluation} | more))


def view_of(directory, device=None, count=None, price=None):
    return runs_table([Run(directory)], device, count, price)


def row_of(directory, device=None, count=None, price=None):
    return view_of(directory, device, count, price).rows[0]


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
    view = view_of(run_dir)
    assert view.rows[0]["step"] == 15 and any("damaged lines" in note for note in view.notes)


@pytest.mark.parametrize("step", ["1e400", "9" * 400, "9" * 5000, "true", '"16"', "[" * 100_000])
def test_lines_that_no_trainer_writes_are_damaged(run_dir, step):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": {step}, "step_time_s": 1.0, "exaflops": 0.2}}\n')
        file.write(f'{{"step": 16, "step_time_s": {step}, "exaflops": 0.2}}\n')
        file.write(f'{{"step": {step}, "eval/validation/top1": 0.25}}\n{{"step": [1], "eval/validation/top1": 0.25}}\n')
    assert row_of(run_dir)["step"] == 15


def test_a_run_that_was_resumed_on_another_number_of_devices(run_dir):
    write_metrics(run_dir, [LINES[0] | {"world_size": 8}, LINES[2] | {"world_size": 2}])
    view = view_of(run_dir, price=2.0)
    row, of_devices = view.rows[0], (8 * 20 + 2 * 20) / 3600
    assert row["device_hours"] == pytest.approx(of_devices) and row["cost"] == pytest.approx(2 * of_devices)
    assert row["devices"] == 2 and row["mfu"] == pytest.approx((8 * 20 * 0.4 + 2 * 20 * 0.2) / (10 * 20))
    assert any("ran on 2 and 8 devices" in note for note in view.notes) and len(view.notes) == 1
    assert row_of(run_dir, count=4)["device_hours"] == pytest.approx(4 * 40 / 3600)


def test_mfu_from_all_device_seconds_where_the_metrics_have_none(run_dir):
    paces = [{key: value for key, value in line.items() if key != "mfu"} for line in (LINES[0], LINES[2])]
    write_metrics(run_dir, [paces[0] | {"world_size": 8}, paces[1] | {"world_size": 8}])
    even = row_of(run_dir, find_device("a100"))["mfu"]
    write_metrics(run_dir, [paces[0] | {"world_size": 8}, paces[1] | {"world_size": 2}])
    assert row_of(run_dir, find_device("a100"))["mfu"] == pytest.approx(even * (8 + 8) / (8 + 2))


def test_metrics_that_do_not_tell_the_world_size(run_dir):
    assert any("as the newest checkpoint says" in note for note in view_of(run_dir).notes)
    assert not any("checkpoint says" in note for note in view_of(run_dir, count=4).notes)


def test_lost_metrics_are_told_of(run_dir):
    pace = {"step_time_s": 2.0, "exaflops": 0.1, "world_size": 8, "mfu": 0.4}
    whole = [{"step": step} | pace for step in (50, 100, 130, 150, 200, 220)]  # stopped once at 130, and at 220
    write_metrics(run_dir, whole)
    assert view_of(run_dir).notes == []
    write_metrics(run_dir, [line for line in whole if line["step"] in (100, 220)])
    view = view_of(run_dir)
    assert view.rows[0]["hours"] == pytest.approx(440 / 3600)
    (note,) = view.notes
    assert "steps 1 to 50, 101 to 200 have no metrics; their pace is assumed" in note


LATER = replace(INDEX, step=20, position=20)
DAMAGED = ["[]", "{", "[" * 100_000, '{"world_size": 2, "data": []}', index_text(LATER).replace(": 8", ": 9")]
DAMAGED += [index_text(replace(LATER, world_size=size)) for size in (None, True, 0, 10**400)]
DAMAGED += [index_text(replace(LATER, data=data)) for data in (None, [])]


@pytest.mark.parametrize("content", DAMAGED)
def test_an_older_index_stands_in_for_a_damaged_one(run_dir, content):
    row = row_of(run_dir)
    write_index(run_dir, "step-00000020", content)
    view = view_of(run_dir)
    assert view.rows[0] == row and any("step-00000020/index.json" in note for note in view.notes)
    (run_dir / "checkpoints/step-00000015/index.json").write_text(content)
    view = view_of(run_dir)
    assert view.rows[0] == row | {"devices": None, "device_hours": None, "total_steps": None}
    assert any("say --devices N" in note for note in view.notes)


def test_the_newest_index_by_its_step(run_dir):
    newest = replace(INDEX, step=100_000_000, position=100_000_000, world_size=3)
    write_index(run_dir, "step-100000000", index_text(newest))
    assert row_of(run_dir)["devices"] == 3


def test_a_small_utilisation_is_not_none():
    from vitscale.ground.table import percent

    assert [percent(1)(value) for value in (0.4567, 0.0005, 0.000123, 0)] == ["45.7 %", "0.05 %", "0.0123 %", "0 %"]


@pytest.mark.parametrize(
    ("spoil", "error", "word"),
    [
        (lambda run: (run / "recipe.yaml").unlink(), RecipeError, "recipe.yaml"),
        (lambda run: (run / "metrics.jsonl").unlink(), DataError, "metrics.jsonl"),
        (lambda run: (run / "metrics.jsonl").write_text('[1]\n"x"\n'), DataError, "metrics.jsonl"),
        (lambda run: (run / "DONE").write_text("{"), DataError, "DONE"),
        (lambda run: (run / "DONE").write_text("[" * 100_000), DataError, "DONE"),
    ],
)
def test_broken_records(run_dir, spoil, error, word):
    spoil(run_dir)
    with pytest.raises(error, match=word):
        view_of(run_dir)


@pytest.mark.parametrize(("best_step", "top1"), [(None, 0.25), (10, 0.5), (15, 0.25), (12, None)])
def test_the_evaluation_is_that_of_the_selected_step(run_dir, best_step, top1):
    """Of step 12 there is none."""
    finish(run_dir, {"validation/top1": 0.25}, **({} if best_step is None else {"best_step": best_step}))
    assert Run(run_dir).evaluation.get("validation/top1") == top1


@pytest.mark.parametrize("top1", [None, "0.5", float("nan"), 10**400, [0.5]])
def test_what_is_no_number_is_no_evaluation(run_dir, top1):
    finish(run_dir, {"validation/top1": top1})
    assert Run(run_dir).evaluation == {}
