"""Where the checkpoints of a run are, and what evaluation and export make of them."""

from pathlib import Path

import fsspec
import pytest
import torch
import yaml
from commands import command
from safetensors.torch import load_file
from small_recipes import small_recipe

from vitscale.data.shards.generated import CLASS_NAMES, write_generated_dataset
from vitscale.models import build_model
from vitscale.recipe import Recipe
from vitscale.runs.checkpoint import (
    CheckpointIndex,
    CheckpointStore,
    Fragment,
    LocalDirectory,
    RemoteDirectory,
    checkpoint_directory,
)
from vitscale.runs.names import CHECKPOINTS, RECIPE_FILE


def recipe(data: Path, where: str | None = None) -> Recipe:
    return small_recipe(
        {"name": "ViT-Ti/16", "depth": 1, "head": "linear"},
        data={"train": str(data), "cache": {"dir": str(data.parent / "cache")}},
        evaluation={"validation": str(data)},
        checkpoint={"dir": where},
    )


@pytest.mark.parametrize("where", ["/big/disk", "file:///big/disk/", "s3://bucket/of/runs/"])
def test_checkpoints_elsewhere_have_the_name_of_the_run(where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run in (Path("runs/mine"), tmp_path / "mine", Path("runs/other/../mine/")):
        directory = checkpoint_directory(recipe(tmp_path / "data", where), run)
        if where.startswith("s3"):
            assert isinstance(directory, RemoteDirectory) and directory.root == "s3://bucket/of/runs/mine"
        else:
            assert isinstance(directory, LocalDirectory) and directory.root == "/big/disk/mine"
    assert checkpoint_directory(recipe(tmp_path / "data"), tmp_path / "mine").root == str(
        tmp_path / "mine" / CHECKPOINTS
    )


def weights(recipe: Recipe, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    with torch.device("meta"):
        model = build_model(recipe, len(CLASS_NAMES))
    return {name: torch.randn(parameter.shape) * 0.3 for name, parameter in model.named_parameters()}


def write_run(run_dir: Path, recipe: Recipe, kinds: dict[str, dict[str, torch.Tensor]]) -> None:
    """A run with one checkpoint of these weights, by kind."""
    run_dir.mkdir()
    (run_dir / RECIPE_FILE).write_text(yaml.safe_dump(recipe.dump()))
    names = {name: list(value.shape) for name, value in kinds["master"].items()}
    data = {"class_names": list(CLASS_NAMES)}
    index = CheckpointIndex(3, 1, names, list(kinds), optimizer_steps=3, recipe=recipe.dump(), data=data, versions={})
    pieces = [Fragment(name, 0, {kind: kinds[kind][name].flatten() for kind in kinds}) for name in names]
    CheckpointStore(checkpoint_directory(recipe, run_dir)).save(index, pieces)


def test_the_average_is_evaluated_and_exported_unless_the_last_weights_are_asked_for(tmp_path):
    """Checkpoints elsewhere, one at a URL: of what they are the average makes no difference to where they are."""
    write_generated_dataset(tmp_path / "data", [40], seed=0)
    last, average = (weights(recipe(tmp_path / "data"), seed) for seed in (1, 2))
    both, without = tmp_path / "both", tmp_path / "without"
    try:
        write_run(both, recipe(tmp_path / "data", "memory://elsewhere"), {"master": last, "ema": average})
        write_run(without, recipe(tmp_path / "data", str(tmp_path / "elsewhere")), {"master": average})
        only_last = tmp_path / "last"
        write_run(only_last, recipe(tmp_path / "data"), {"master": last})
        assert not (both / CHECKPOINTS).exists() and not (without / CHECKPOINTS).exists()

        for flags, expected, words in (([], average, ", average of the weights"), (["--no-ema"], last, "step 3 as")):
            out = tmp_path / f"out{len(flags)}.safetensors"
            done = command("export", both, "--format", "safetensors", "--out", out, *flags)
            assert done.returncode == 0 and words in done.stdout, done
            written = load_file(out)
            assert written.keys() == expected.keys()
            assert all(torch.equal(value, expected[name]) for name, value in written.items())
        runs = ((both, ["--no-ema"]), (only_last, []), (both, []), (without, []))
        shown = [command("evaluate", run, "--json", *flags).answer for run, flags in runs]
        assert shown[0] == shown[1] != shown[2] == shown[3] and {code for code, _ in shown} == {0}
    finally:
        fsspec.filesystem("memory").rm("/elsewhere", recursive=True)


def test_only_a_run_has_an_average(tmp_path):
    out = ["--format", "npz", "--out", tmp_path / "a.npz"]
    done = command("export", "ViT-Ti/16", *out, "--num-classes", "3", "--no-ema")
    assert done.returncode != 0 and all(name in done.message for name in ("--no-ema", "ViT-Ti/16"))
