"""`vitscale export`: from a run, a name or a file to every format, in little memory, with one message on a mistake."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from checkpoint.toy_checkpoint import unverified
from commands import command
from messages import assert_messages
from models.weights.exported import (
    LINEAR,
    NAMES,
    SUFFIX,
    TINY,
    described,
    differing,
    finished_run,
    loaded,
    run_of,
    valued,
    written,
)
from models.weights.test_weights_accounting import NO_WEIGHTS, no_weights
from safetensors.torch import load_file, save_file

from vitscale.cli.export import export
from vitscale.ground.errors import CheckpointError, RecipeError
from vitscale.models import initialise
from vitscale.models.weights import describe, open_weights
from vitscale.runs.names import CHECKPOINTS, RECIPE_FILE


@pytest.mark.parametrize(("layout", "ranks"), [("whole", 1), ("slices", 3), ("slices", 8), ("shares", 5)])
@pytest.mark.parametrize("form", ["safetensors", "npz", "timm", "hf"])
def test_a_run_of_any_stage_and_world(layout, ranks, form, tmp_path, capsys):
    model = valued(described(LINEAR))
    run = finished_run(tmp_path / "run", model, LINEAR, layout, ranks)
    out = tmp_path / f"out{SUFFIX[form]}"
    step = 2 if form == "npz" else 3
    export(str(run), form, out, step=2 if form == "npz" else None)
    count = sum(parameter.numel() for parameter in model.parameters())
    title = "patch_size 8, width 48, depth 2, mlp_dim 96, num_heads 3"
    assert f"wrote {out}: {title}, step {step} as {form}, {count:,} parameters" in capsys.readouterr().out
    assert differing(model, loaded(described(LINEAR), out)) == []
    if form == "hf":
        assert json.loads((out / "config.json").read_text())["id2label"] == {str(i): n for i, n in enumerate(NAMES)}
    if form == "safetensors":
        assert describe(open_weights(out)).class_names == NAMES


def test_a_run_s_mistakes(tmp_path):
    run = run_of(tmp_path / "run", TINY | {"head": "pretrain"})
    with pytest.raises(CheckpointError, match="step 9"):
        export(str(run), "npz", tmp_path / "a.npz", step=9)
    with pytest.raises(RecipeError, match="--drop-head"):
        export(str(run), "timm", tmp_path / "a.safetensors")
    with pytest.raises(RecipeError, match="--num-classes, --seed"):
        export(str(run), "npz", tmp_path / "a.npz", seed=1, num_classes=3)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    export(str(run), "timm", tmp_path / "a.safetensors", drop_head=True)
    assert not {"head.weight", "pre_logits.weight"} & open_weights(tmp_path / "a.safetensors").entries.keys()


def test_a_run_is_what_was_trained(tmp_path, capsys):
    """An edited recipe changes nothing; a damaged newest checkpoint gives an older one, which is told."""
    run = run_of(tmp_path / "run")
    recipe = yaml.safe_load((run / RECIPE_FILE).read_text())
    recipe["model"]["num_heads"] = 6
    (run / RECIPE_FILE).write_text(yaml.safe_dump(recipe))
    export(str(run), "npz", tmp_path / "a.npz")
    assert "model.num_heads: 3 -> 6" in capsys.readouterr().out
    with np.load(tmp_path / "a.npz") as file:
        attention = "Transformer/encoderblock_0/MultiHeadDotProductAttention_1"
        assert file[f"{attention}/query/kernel"].shape == (48, 3, 16)
    newest = run / CHECKPOINTS / "step-00000003"
    reader = unverified(newest)
    (newest / "rank-00000.safetensors").unlink()
    export(str(run), "safetensors", tmp_path / "a.safetensors")
    assert ", step 2 as safetensors" in capsys.readouterr().out.splitlines()[-1]
    assert describe(open_weights(tmp_path / "a.safetensors")).step == 2
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors"):
        reader.parameter("norm.weight")
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors"):
        export(str(newest), "npz", tmp_path / "b.npz")


def test_a_file_of_replaced_dimensions_is_named_by_a_recipe(tmp_path, capsys):
    """`--model` takes a name or a recipe, of a file or of those that come along, and `--set` changes it."""
    block = {"name": "ViT-Ti/16", "depth": 2, "head": "linear"}
    run = run_of(tmp_path / "run", block)
    export(str(run), "npz", tmp_path / "run.npz")
    of_tiny = [f"model.{key}={value}" for key, value in block.items()]
    ways = [("ViT-Ti/16", ["model.depth=2"]), (str(run / RECIPE_FILE), []), ("b16_i21k", of_tiny)]
    for i, (model, settings) in enumerate(ways):
        export(str(tmp_path / "run.npz"), "npz", tmp_path / f"{i}.npz", model=model, settings=settings)
        assert f"{i}.npz: ViT-Ti/16 with depth 2 as npz" in capsys.readouterr().out
        assert (tmp_path / f"{i}.npz").read_bytes() == (tmp_path / "run.npz").read_bytes()
    for words, options in (
        (r"dept:.*'depth'", {"model": "ViT-Ti/16", "settings": ["model.dept=2"]}),
        (r"model\.KEY=VALUE", {"model": "ViT-Ti/16", "settings": ["seed=2"]}),
        (r"--set.*--model", {"settings": ["model.depth=2"]}),
        (r"'ViT-Ti-16'.*'ViT-Ti/16'", {"model": "ViT-Ti-16"}),
    ):
        with pytest.raises(RecipeError, match=words):
            export(str(tmp_path / "run.npz"), "npz", tmp_path / "b.npz", **options)
    export(str(run), "safetensors", tmp_path / "own.safetensors")
    with pytest.raises(RecipeError, match=r"ViT-Ti/16 with depth 2: depth 2, not 12"):
        export(str(tmp_path / "own.safetensors"), "npz", tmp_path / "b.npz", model="ViT-Ti/16")


@pytest.mark.parametrize("form", ["safetensors", "npz", "timm", "hf"])
def test_what_has_no_head_is_passed_on_without_one(form, tmp_path, capsys):
    path, *_ = written(tmp_path, form, {"name": "ViT-Ti/16", "depth": 1}, drop_head=True)
    options = {} if form == "safetensors" else {"model": "ViT-Ti/16", "settings": ["model.depth=1"]}
    export(str(path), "npz", tmp_path / "out.npz", **options)
    assert "ViT-Ti/16 with depth 1, without a head as npz" in capsys.readouterr().out
    assert not [key for key in open_weights(tmp_path / "out.npz").entries if "head" in key]


def test_half_a_head_is_no_missing_head(tmp_path):
    path, *_ = written(tmp_path, "timm", {"name": "ViT-Ti/16", "depth": 1})
    tensors = load_file(path)
    del tensors["head.bias"]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"head\.bias"):
        export(str(path), "npz", tmp_path / "out.npz", model="ViT-Ti/16", settings=["model.depth=1"])


def test_fresh_weights_without_a_head_need_no_classes(tmp_path):
    export("ViT-Ti/16", "npz", tmp_path / "a.npz", drop_head=True, image_size=16)
    assert "head/kernel" not in open_weights(tmp_path / "a.npz").entries


def test_fresh_weights_are_those_that_training_begins_with(tmp_path):
    export("ViT-Ti/16", "timm", tmp_path / "a.safetensors", seed=5, num_classes=3, image_size=32)
    description = described({"name": "ViT-Ti/16"}, 32, 3)
    expected = description.build().to_empty(device="cpu")
    initialise(expected, 5)
    assert differing(expected, loaded(description, tmp_path / "a.safetensors")) == []


def test_any_format_becomes_any_other(tmp_path):
    """Round all formats and back: the bytes that came out first come out last."""
    path, *_ = written(tmp_path, "hf", {"name": "ViT-Ti/16"}, class_names=NAMES)
    files = {}
    for turn in (1, 2):
        for form, suffix in (("npz", ".npz"), ("timm", ".safetensors"), ("safetensors", ".safetensors"), ("hf", "")):
            out = tmp_path / f"{form}-{turn}{suffix}"
            own = path.name.startswith("safetensors")
            export(str(path), form, out, model=None if own else "ViT-Ti/16")
            path = out
            files[form, turn] = (out / "model.safetensors" if form == "hf" else out).read_bytes()
    assert all(files[form, 1] == files[form, 2] for form in ("npz", "timm", "safetensors", "hf"))
    assert files["hf", 1] == (tmp_path / "hf" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("form", "size"), [("timm", 96), ("hf", 72), ("safetensors", 40)])
def test_a_run_at_another_image_size_in_one_step(form, size, tmp_path, capsys):
    """What two steps by way of a file give, and everything else as in training."""
    run = run_of(tmp_path / "run")
    out = tmp_path / f"one{SUFFIX[form]}"
    export(str(run), form, out, image_size=size)
    assert f"pos_embedding resampled from (8, 8) to ({size // 8}, {size // 8})" in capsys.readouterr().out
    export(str(run), "safetensors", tmp_path / "file.safetensors")
    export(str(tmp_path / "file.safetensors"), form, tmp_path / f"two{SUFFIX[form]}", image_size=size)
    assert_same_files(out, tmp_path / f"two{SUFFIX[form]}")


def assert_same_files(a: Path, b: Path) -> None:
    """But for model cards, which know more of a run than of a file."""
    paths = [path for path in sorted(a.rglob("*")) if path.name != "README.md"]
    files = [(path, b / path.relative_to(a)) for path in paths] if a.is_dir() else [(a, b)]
    assert files and all(one.read_bytes() == other.read_bytes() for one, other in files)


@pytest.mark.parametrize(
    "crop",
    [
        {"kind": "central", "fraction": 0.8, "resize": "pil_bicubic"},
        {"kind": "square", "fraction": 1.0, "resize": "pil_bilinear"},
        {"kind": "square", "fraction": 1.0, "resize": "area"},
    ],
)
def test_the_crop_of_a_run_goes_through_every_format_that_can_say_it(crop, tmp_path):
    run = run_of(tmp_path / "run", data={"eval_crop": crop})
    source, own = run, {"model": str(run / RECIPE_FILE)}
    for i, form in enumerate(("safetensors", "hf", "timm", "hf")):
        out = tmp_path / f"{i}{SUFFIX[form] if form == 'safetensors' else ''}"
        export(str(source), form, out, **(own if i > 1 else {}))
        source = out
        found = describe(open_weights(out), None if form == "safetensors" else LINEAR).eval_crop
        # Other libraries have no mean over areas: what they do instead is what such a folder says.
        resize = "pil_bilinear" if crop["resize"] == "area" and i > 0 else crop["resize"]
        assert found is not None and (found.kind, found.resize) == (crop["kind"], resize)
        assert found.fraction == pytest.approx(crop["fraction"])
    for file in ("config.json", "preprocessor_config.json", "model.safetensors"):
        assert (tmp_path / "1" / file).read_bytes() == (tmp_path / "3" / file).read_bytes()


def test_the_command(tmp_path):
    done = command("export", "ViT-Ti/16", "--num-classes", "3", "--format", "hf", "--out", tmp_path / "new" / "hf")
    assert done.returncode == 0, done.stderr
    size = sum(path.stat().st_size for path in (tmp_path / "new" / "hf").iterdir())
    first = f"wrote {tmp_path / 'new' / 'hf'}: ViT-Ti/16 as hf, 5,524,995 parameters, {size:,} bytes"
    assert done.stdout.splitlines()[0] == first
    out = str(tmp_path / "a.npz")
    folder = str(tmp_path / "new" / "hf")
    wrong = {
        (folder, "--model", "ViT-S/16"): "width 192, not 384",
        ("ViT-Ti/16", "--num-classes", str(10**15)): "'--num-classes'",
        ("ViT-Ti/16", "--num-classes", "1", "--image-size", str(10**7)): "'--image-size'",
        ("ViT-Ti/16", "--num-classes", "1", "--seed", str(2**63)): "'--seed'",
    }
    for arguments, words in wrong.items():
        ended = command("export", *arguments, "--format", "npz", "--out", out)
        assert ended.returncode == 2 and words in ended.stderr


# A source, a format, a file, options.
MISTAKES: list[tuple[str, str, str, dict]] = [
    ("ViT-B16", "npz", "a.npz", {"num_classes": 3}),
    ("nowhere.npz", "npz", "a.npz", {"model": "ViT-B/16"}),
    ("ViT-B/16", "npz", "a.npz", {}),
    ("ViT-B/16", "npz", "a.npz", {"num_classes": 3, "step": 3}),
    ("ViT-B/16", "npz", "a.safetensors", {"num_classes": 3}),
    ("ViT-B/16", "hf", "..", {"num_classes": 3}),
    ("ViT-B/16", "npz", "a.npz", {"num_classes": 3, "image_size": 8}),
    ("ViT-B/16", "npz", "a.npz", {"num_classes": 3, "settings": ["model.depth=3"]}),
    ("ResNet50x1", "hf", "a", {"num_classes": 3}),
    ("AxialResNet50", "hf", "a", {"num_classes": 3}),
    ("x" * 5000, "npz", "a.npz", {}),
    ("Axial-ViT-B/16", "timm", "a.safetensors", {"num_classes": 3}),
    ("ViT-B/16", "timm", "a.safetensors", {"num_classes": 3, "head": "pretrain"}),
]


def test_mistakes_leave_nothing_and_end_with_their_messages(tmp_path):
    said = {}
    for source, form, out, options in MISTAKES:
        with pytest.raises(RecipeError) as caught:
            export(source, form, tmp_path / out, **options)
        said[f"export {source[:40]} as {form} to {out} {options or ''}".rstrip()] = str(caught.value)
        assert list(tmp_path.iterdir()) == []
    for cause, (name, *_) in NO_WEIGHTS.items():
        if not name.endswith((".safetensors", ".npz")):  # there, other libraries have the last word
            said[f"{name}: {cause}"] = no_weights(cause, tmp_path)
    assert_messages("weights", said, {tmp_path: "FOLDER"})


def test_a_source_that_may_not_be_read(tmp_path):
    (tmp_path / "closed").mkdir(mode=0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # whom no mode lets in
    try:
        with pytest.raises(RecipeError, match=r"closed/a\.npz/recipe\.yaml"):
            export(str(tmp_path / "closed" / "a.npz"), "npz", tmp_path / "a.npz", model="ViT-B/16")
    finally:
        os.seteuid(user)


MEASURE = """
import resource, sys
from pathlib import Path
from vitscale.cli.export import export

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

out, suffix = Path(sys.argv[1]), {"npz": ".npz", "hf": ""}
for form in ("safetensors", "timm", "npz", "hf"):
    export("ViT-Ti/16", form, out / f"small-{form}{suffix.get(form, '.safetensors')}", num_classes=3)
    export(str(out / f"small-{form}{suffix.get(form, '.safetensors')}"), "npz", out / f"small-of-{form}.npz",
               model="ViT-Ti/16")
before = peak()
for form in ("safetensors", "timm", "npz", "hf"):
    path = out / f"large-{form}{suffix.get(form, '.safetensors')}"
    export("ViT-S/16", form, path, num_classes=1000)
    export(str(path), "timm", out / f"of-{form}.safetensors", model="ViT-S/16")
print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss counts KiB on Linux")
def test_no_format_holds_all_weights_at_once(tmp_path):
    measured = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},
    )
    assert measured.returncode == 0, measured.stderr
    whole = 22_050_664 * 4
    assert int(measured.stdout.split()[-1]) < whole / 2
