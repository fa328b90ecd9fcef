"""A run directory as training leaves it, and what `vitscale status` says of it."""

import json
from pathlib import Path

import torch
import torch_free
import yaml
from commands import command

from vitscale.recipe import load_recipe
from vitscale.runs.checkpoint import CheckpointIndex, CheckpointStore, Fragment

COMMAND = torch_free.command("vitscale")
NOW = 1_700_000_000.0

# Steps 1 to 10 took 2 s each on 4 devices, 11 to 20 took 3 s each on 8.
LINE = {"loss": 2.0, "lr": 1e-3, "images_per_s": 2048.0, "data_wait": 0.5, "peak_memory_bytes": 5e9}
LINES = [
    {"step": 10, **LINE, "step_time_s": 2.0, "world_size": 4, "exaflops": 0.1},
    {"step": 10, "eval/validation/top1": 0.75, "eval/validation/loss": 1.0},
    {"step": 20, **LINE, "step_time_s": 3.0, "world_size": 8, "exaflops": 0.2},
    {"step": 20, "eval/validation/top1": 0.5, "eval/validation/loss": None},
]


def status(*arguments: str | Path) -> list[dict]:
    return [json.loads(line) for line in shown("--json", *arguments).splitlines()]


def shown(*arguments: str | Path) -> str:
    ended = command("status", *arguments)
    assert ended.returncode == 0, ended
    return ended.stdout


def write_metrics(run_dir: Path, lines: list[dict]) -> None:
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def write_recipe(run_dir: Path, *settings: str) -> None:
    of_run = ["precision=bf16", "model.num_classes=1000", "model.head=linear", "schedule.duration.steps=100"]
    of_run += ["logging.every=10", "evaluation.fewshot=null", "evaluation.every=null"]
    recipe = load_recipe("b16_jft", [*of_run, *settings])
    (run_dir / "recipe.yaml").write_text(yaml.safe_dump(recipe.dump()))


def save_checkpoint(root: Path, step: int, **more) -> None:
    data = {"num_samples": 4096 * 50, "class_names": ["a", "b"]}
    index = CheckpointIndex(step, 1, {"w": [1000]}, ["master"], step, {}, data, {}, **more)
    CheckpointStore(root).save(index, [Fragment("w", 0, {"master": torch.zeros(1000)})])
