"""What runs cost, from their records: time, images/s and MFU."""

import json
from dataclasses import replace

import pytest
import yaml
from commands import command

from vitscale.cli.flops import app as flops
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


def test_what_a_run_under_way_has_cost(run_dir):
    run = Run(run_dir)
    cost = run.cost
    assert cost is not None and (cost.step, run.total_steps, run.is_done) == (15, 700, False)
    assert cost.images == 15 * 4096 and cost.images_per_s == pytest.approx(15 * 4096 / 40)
    assert cost.seconds == 40 and cost.device_seconds == 8 * 40 and cost.exaflops == 0.15
    assert cost.mfu == pytest.approx((20 * 0.4 + 20 * 0.2) / 40)


def test_the_command_says_it_with_energy_and_price(run_dir):
    said = command("--run", run_dir, "--hardware", "h100", "--price", 3, "--format", "json", app=flops).stdout
    (row,) = json.loads(said)
    assert row["exaflops"] == 0.15 and row["mfu"] == pytest.approx(0.3) and row["devices"] == 8
    assert row["device_hours"] == pytest.approx(8 * 40 / 3600) and row["cost"] == pytest.approx(3 * 8 * 40 / 3600)


@pytest.mark.parametrize("step", ["1e400", "9" * 400, "9" * 5000, "true", '"16"', "[" * 100_000])
def test_lines_that_no_trainer_writes_are_damaged(run_dir, step):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": {step}, "step_time_s": 1.0, "exaflops": 0.2}}\n')
        file.write(f'{{"step": 16, "step_time_s": {step}, "exaflops": 0.2}}\n')
        file.write(f'{{"step": {step}, "eval/validation/top1": 0.25}}\n{{"step": [1], "eval/validation/top1": 0.25}}\n')
        file.write('{"step": 20, "lo')
    run = Run(run_dir)
    assert run.cost.step == 15 and any("damaged lines" in note for note in run.notes)


def test_a_torn_line_is_told_of(run_dir):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "lo')
    run = Run(run_dir)
    assert run.cost.step == 15 and any("damaged lines" in note for note in run.notes)


def test_a_run_that_was_resumed_on_another_number_of_devices(run_dir):
    write_metrics(run_dir, [LINES[0] | {"world_size": 8}, LINES[2] | {"world_size": 2}])
    cost = Run(run_dir).cost
    assert cost.device_seconds == 8 * 20 + 2 * 20 and (cost.world_size, cost.world_sizes) == (2, (2, 8))
    assert cost.mfu == pytest.approx((8 * 20 * 0.4 + 2 * 20 * 0.2) / (10 * 20))


def test_lost_metrics_are_told_of(run_dir):
    pace = {"step_time_s": 2.0, "exaflops": 0.1, "world_size": 8, "mfu": 0.4}
    whole = [{"step": step} | pace for step in (50, 100, 130, 150, 200, 220)]  # stopped once at 130, and at 220
    write_metrics(run_dir, whole)
    assert Run(run_dir).notes == []
    write_metrics(run_dir, [line for line in whole if line["step"] in (100, 220)])
    assert Run(run_dir).cost.seconds == 440
    (note,) = Run(run_dir).notes
    assert "steps 1 to 50, 101 to 200 have no metrics; their pace is assumed" in note


LATER = replace(INDEX, step=20, position=20)
DAMAGED = ["[]", "{", "[" * 100_000, '{"world_size": 2, "data": []}', index_text(LATER).replace(": 8", ": 9")]
DAMAGED += [index_text(replace(LATER, world_size=size)) for size in (None, True, 0, 10**400)]
DAMAGED += [index_text(replace(LATER, data=data)) for data in (None, [])]


@pytest.mark.parametrize("content", DAMAGED)
def test_an_older_index_stands_in_for_a_damaged_one(run_dir, content):
    cost = Run(run_dir).cost
    write_index(run_dir, "step-00000020", content)
    run = Run(run_dir)
    assert run.cost == cost and any("step-00000020/index.json" in note for note in run.notes)
    (run_dir / "checkpoints/step-00000015/index.json").write_text(content)
    run = Run(run_dir)
    assert run.cost == replace(cost, device_seconds=None, world_size=None, world_sizes=()) and run.total_steps is None


def test_the_newest_index_by_its_step(run_dir):
    newest = replace(INDEX, step=100_000_000, position=100_000_000, world_size=3)
    write_index(run_dir, "step-100000000", index_text(newest))
    assert Run(run_dir).cost.world_size == 3


@pytest.mark.parametrize("content", ["{", "[" * 100_000])
def test_broken_records(run_dir, content):
    (run_dir / "DONE").write_text(content)
    with pytest.raises(DataError, match="DONE"):
        _ = Run(run_dir).done
    (run_dir / "recipe.yaml").unlink()
    with pytest.raises(RecipeError, match=r"recipe\.yaml"):
        Run(run_dir)


@pytest.mark.parametrize(
    ("best_step", "top1", "found"),
    [
        *((None, 0.25, 0.25), (10, 0.25, 0.5), (15, 0.25, 0.25)),
        (12, 0.25, None),  # of which there is none
        *((None, no_number, None) for no_number in (None, "0.5", float("nan"), 10**400, [0.5])),
    ],
)
def test_the_evaluation_is_that_of_the_selected_step(run_dir, best_step, top1, found):
    done = {"step": 15, "exaflops": 0.15, "evaluation": {"validation/top1": top1}, "best_step": best_step}
    (run_dir / "DONE").write_text(json.dumps({key: value for key, value in done.items() if value is not None}))
    assert Run(run_dir).evaluation == ({} if found is None else {"validation/top1": found})
