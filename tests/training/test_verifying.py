"""A run against its own files and its own steps: sound as it is, and each way of tampering is named."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from ranks import STEPS, launch, make_data
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from vitscale.cli.main import app
from vitscale.errors import DataError, RecipeError
from vitscale.runs.checkpoint_index import index_text, read_index

SAVED = 4  # the checkpoint that is tampered with


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run and another of another seed, with checkpoints of all even steps."""
    root = tmp_path_factory.mktemp("verified")
    make_data(root)
    blocks = {"checkpoint": {"every": {"steps": 2}, "keep": 20}, "evaluation": {"validation": "test"}}
    jobs = [
        {"name": "run", "stops": [None], "blocks": [blocks]},
        {"name": "other", "stops": [None], "blocks": [{**blocks, "seed": 7}]},
    ]
    launch(root, jobs, 1)
    return root


@pytest.fixture
def copied(root, tmp_path, monkeypatch) -> Path:
    """The run and its data, to be tampered with; steps are taken again by as many threads as the run had."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shutil.copytree(root / "runs" / "run", tmp_path / "run")
    shutil.copytree(root / "train", tmp_path / "data" / "train")
    shutil.copytree(root / "test", tmp_path / "data" / "test")
    return tmp_path


def verified(folder, run="run", *options):
    """What was found to be unsound, by a command that ends as it should."""
    arguments = ["verify", str(folder / run), "--data-root", str(folder / "data"), "--json", *map(str, options)]
    result = CliRunner().invoke(app, arguments)
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    bad = [row["what"] for row in rows if not row["is_sound"]]
    if bad:
        assert isinstance(result.exception, DataError)
    elif result.exception is not None:
        raise result.exception
    return rows, bad


def edit_line(folder, step, **values):
    path = folder / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["step"] == step and "loss" in line:
            line.update({key: change(line[key]) for key, change in values.items()})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_again(checkpoint, path):
    """Have the index say what the file is now, as somebody who knows the format would."""
    index = read_index(checkpoint)
    content = path.read_bytes()
    entry = replace(index.files[0], bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    (checkpoint / "index.json").write_text(index_text(replace(index, files=[entry])))


def test_that_no_step_was_taken_again_is_said(copied):
    rows, bad = verified(copied, "run", "--steps", 0)
    assert not bad and [row["detail"] for row in rows if row["what"] == "steps"]


@pytest.mark.slow  # takes steps in processes of their own
def test_a_run_as_it_is(copied):
    rows, bad = verified(copied, "run", "--steps", 2 * STEPS)
    assert not bad, rows
    taken = {row["what"]: row["detail"] for row in rows if row["what"].startswith("steps")}
    assert list(taken) == [f"steps {step + 1} to {step + 2}" for step in range(0, STEPS, 2)]
    assert sum("last bit" in row["detail"] for row in rows) == 2 * len(taken)


def test_a_world_that_does_not_divide_the_batch_is_refused_before_anything_is_read(copied):
    with pytest.raises(RecipeError):
        verified(copied, "run", "--world", "7")


def test_one_byte_of_a_shard(copied):
    path = next((copied / "data" / "train").glob("*.beton"))
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)
    assert any(path.name in what for what in verified(copied, "run", "--steps", 0)[1])


def test_one_line_of_metrics(copied):
    edit_line(copied, 3, loss=lambda loss: loss * 0.999)
    assert verified(copied, "run", "--steps", STEPS, "--no-shards")[1] == ["steps 3 to 4"]


def test_a_line_that_is_gone_and_one_with_another_rate(copied):
    path = copied / "run" / "metrics.jsonl"
    lines = [line for line in path.read_text().splitlines() if json.loads(line)["step"] != 2]
    path.write_text("\n".join(lines) + "\n")
    assert verified(copied, "run", "--steps", 0, "--no-shards")[1] == ["metrics.jsonl"]
    shutil.copy(copied / "run" / "metrics.jsonl", copied / "kept")
    edit_line(copied, 4, lr=lambda rate: rate * 2)
    assert verified(copied, "run", "--steps", 0, "--no-shards")[1] == ["metrics.jsonl"]


@pytest.mark.slow  # takes steps in processes of their own
def test_one_weight_and_an_index_that_fits_it(copied):
    checkpoint = copied / "run" / "checkpoints" / f"step-{SAVED:08d}"
    path = checkpoint / "rank-00000.safetensors"
    tensors = load_file(path)
    name = next(key for key in sorted(tensors) if "head" in key and key.startswith("master"))
    tensors[name] = tensors[name].clone()
    tensors[name][0] += 0.01
    save_file(tensors, path)
    assert verified(copied, "run", "--steps", 0, "--no-shards")[1] == [f"checkpoint {SAVED}"]
    write_again(checkpoint, path)
    assert f"checkpoint {SAVED}" in verified(copied, "run", "--steps", STEPS, "--no-shards")[1]


def test_a_checkpoint_of_another_run(root, copied):
    checkpoint = f"step-{SAVED:08d}"
    shutil.rmtree(copied / "run" / "checkpoints" / checkpoint)
    shutil.copytree(root / "runs" / "other" / "checkpoints" / checkpoint, copied / "run" / "checkpoints" / checkpoint)
    assert verified(copied, "run", "--steps", 0, "--no-shards")[1] == [f"checkpoint {SAVED}"]


def test_another_recipe_and_another_end(copied):
    path = copied / "run" / "recipe.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"seed": 9}))
    done = json.loads((copied / "run" / "DONE").read_text())
    done["evaluation"]["validation/top1"] = 1.0
    (copied / "run" / "DONE").write_text(json.dumps(done))
    assert verified(copied, "run", "--steps", 0, "--no-shards")[1] == ["recipe.yaml", "DONE"]
