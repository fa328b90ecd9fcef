"""`init`: runs that begin with the weights of other runs and of files, on real ranks, of every stage in every other."""

import hashlib
import itertools
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from models.weights.exported import described, finished_run, valued, write
from outcomes import checkpoint, equal, printed
from ranks import BASE, asked, initial_weights, job, launch, make_recipe, quick_of
from safetensors.torch import load_file
from small_recipes import DINO
from torch import Tensor

import vitscale
from vitscale.data.shards.generated import CLASS_NAMES, write_generated_dataset
from vitscale.ground.errors import CheckpointError, RecipeError
from vitscale.models import Model, build_model
from vitscale.models.vit.positions import resample_positions
from vitscale.models.weights import load_weights, open_weights
from vitscale.recipe import Normalise, override
from vitscale.runs.names import step_folder
from vitscale.training.beginning.initial_weights import check_initial_weights, initial_source
from vitscale.training.deepspeed.distributed import World

NAMES = list(CLASS_NAMES)
STAGES = range(4)
WITH_AVERAGE = (1, 3)  # stages whose source run keeps an average
ON_ONE_RANK = (0, 3)  # stages whose source begins a run of one rank, too
LINEAR = {"head": "linear"}
SMALL = 32  # pixels: the side of the runs' images, 4 x 4 patches
LARGE = 48
FORMATS = {"npz": "pretrain", "timm": "linear", "hf": "linear", "safetensors": "pretrain"}  # and the heads they hold


def begins(source: str | Path, *, stage: int = 1, model: dict[str, Any] | None = None, **init: Any) -> dict[str, Any]:
    """A run that begins with these weights. Its first update has learning rate 0, so that it changes none of them."""
    return {
        **{"batch": {"global": 12, "micro_max": 4}, "model": model or {}, "parallelism": {"zero_stage": stage}},
        **{"evaluation": {"validation": None}, "checkpoint": {"keep": 20}, "init": {"from": str(source), **init}},
    }


def trains(stage: int) -> dict[str, Any]:
    content = begins("", stage=stage) | {"ema": {"decay": 0.38} if stage in WITH_AVERAGE else None}
    return {key: value for key, value in content.items() if key != "init"}


def held(folder: Path, kind: str = "master") -> dict[str, Tensor]:
    """Whole flat parameters of a checkpoint, by safetensors and the documented names alone."""
    pieces: dict[str, dict[int, Tensor]] = {}
    for file in folder.glob("*.safetensors"):
        for key, value in load_file(file).items():
            name, _, start = key.removeprefix(f"{kind}/").rpartition("@")
            if key.startswith(f"{kind}/"):
                pieces.setdefault(name, {})[int(start)] = value
    return {name: torch.cat([found[start] for start in sorted(found)]) for name, found in pieces.items()}


def began_with(root: Path, name: str) -> dict[str, Tensor]:
    """The weights that a run has begun with."""
    return held(root / "runs" / name / "checkpoints" / step_folder(1))


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """The parameters that two sets do not have alike to the last bit; their names are to be the same."""
    assert found.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(found[name].flatten(), value.flatten())]


def values(model: Model) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def block(**changes: Any) -> dict[str, Any]:
    return {**BASE["model"], "head": "pretrain", **changes}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Model, Path]]:
    """Weights in every format and of every kind that the runs begin with, and where they are."""
    folder = tmp_path_factory.mktemp("weights")
    found = {}
    for number, (form, head) in enumerate(FORMATS.items()):
        description = described(block(head=head), SMALL)
        model = valued(description, seed=number)
        (folder / form).mkdir()
        found[form] = model, write(model, description, form, folder / form)
    for number, position in enumerate(("1d", "2d")):
        of_run = block(position={"kind": position, "at": "every_layer"})
        model = valued(described(of_run, LARGE), seed=10 + number)
        run = finished_run(folder / position, model, of_run, "shares", 3, names=NAMES, data={"image_size": LARGE})
        found[position] = model, run
    five = described(block(), SMALL, num_classes=5)
    model = valued(five, seed=20)
    (folder / "five").mkdir()
    return {**found, "five": (model, write(model, five, "safetensors", folder / "five"))}


@pytest.fixture(scope="module")
def root(root: Path, request: pytest.FixtureRequest, models: dict[str, tuple[Model, Path]]) -> Path:
    runs, wanted = root / "runs", {params["began"] for params in asked(request) if "began" in params}
    launch(root, [job(f"source-{stage}", trains(stage), 3) for stage in STAGES], 3)
    first = runs / "source-1" / "checkpoints" / step_folder(2)
    launch(root, [job("early", trains(1), 2)], 1)
    shutil.copytree(runs / "early" / "checkpoints" / step_folder(2), first)
    gone = root / "gone.safetensors"
    shutil.copy(models["safetensors"][1], gone)
    five = models["five"][1]
    of_two_ranks = {
        **{
            f"{one}-to-{other}": begins(runs / f"source-{one}", stage=other, head="keep")
            for one, other in itertools.product(STAGES, STAGES)
        },
        **{
            f"{form}-zero{stage}": begins(models[form][1], stage=stage, model={"head": head}, head="keep")
            for form, head in FORMATS.items()
            for stage in (1, 3)
        },
        **{
            f"{kind}-resampled-zero{stage}": begins(models[kind][1], stage=stage, model=every_layer(kind), head="keep")
            for kind in ("1d", "2d")
            for stage in (1, 3)
        },
    }
    heads = {
        "of-step-2": begins(first, stage=3, head="keep"),
        "fine-tuned": begins(five, stage=3, model=LINEAR),
        "zero": begins(five, stage=2),
        "initial": begins(five, stage=3, head="initial"),
        "whole-head-initial": begins(models["timm"][1], stage=0, head="initial"),
        "average": begins(five, stage=3) | {"ema": {"decay": 0.38}},
    }
    jobs = [job(name, content, 1) for name, content in (of_two_ranks | heads).items() if name in wanted | heads.keys()]
    resumed = begins(gone, stage=3, head="keep")
    launch(root, [*jobs, job("whole", resumed), job("cut", resumed, 3)], 2)
    launch(root, [job(f"{one}-to-one-rank", begins(runs / f"source-{one}", head="keep"), 1) for one in ON_ONE_RANK], 1)
    gone.unlink()
    launch(root, [job("resumed", resumed, directory="cut")], 2)
    return root


def every_layer(kind: str) -> dict[str, Any]:
    return {"position": {"kind": kind, "at": "every_layer"}}


# Each stage as that of the source and as that of the run; the checkpoint is read in the same way whatever the pair is.
FROM_RUNS = [f"{one}-to-{other}" for one, other in itertools.product(STAGES, STAGES)]
QUICK_FROM_RUNS = ("0-to-3", "1-to-0", "1-to-3", "2-to-1", "3-to-2", "3-to-3")


@pytest.mark.parametrize(
    "began", [*quick_of(FROM_RUNS, QUICK_FROM_RUNS), *(f"{stage}-to-one-rank" for stage in ON_ONE_RANK)]
)
def test_the_weights_of_a_run_of_any_stage_and_world_at_any_other(root, began):
    one = int(began[0])
    source = root / "runs" / f"source-{one}" / "checkpoints" / step_folder(3)
    kind = "ema" if one in WITH_AVERAGE else "master"
    found = began_with(root, began)
    assert differing(found, held(source, kind)) == []
    if one in WITH_AVERAGE:
        assert len(differing(found, held(source))) > 10, "masters and averages are nearly all different"


def test_the_checkpoint_of_a_step(root):
    early = held(root / "runs" / "early" / "checkpoints" / step_folder(2), "ema")
    assert differing(began_with(root, "of-step-2"), early) == []
    assert re.search(
        r"weights from \S+step-00000002 step 2 \(average\): \d+ tensors taken\n", printed(root, "of-step-2")
    )


# Each format, whole parameters on a rank and parts of them; their readers know nothing of the stage.
OF_FORMATS = [f"{form}-zero{stage}" for form in FORMATS for stage in (1, 3)]


@pytest.mark.parametrize("began", quick_of(OF_FORMATS, ("npz-zero1", "timm-zero3", "hf-zero1", "safetensors-zero3")))
def test_any_format_begins_a_run_as_import_reads_it(root, models, began):
    form = began.partition("-")[0]
    model, path = models[form]
    found = began_with(root, began)
    assert differing(found, values(model)) == []
    imported = build_model(make_recipe(root, model={"head": FORMATS[form]}), 7)
    load_weights(imported, open_weights(path), report=lambda note: None)
    assert differing(found, values(imported)) == []


def test_heads(root, models):
    """The classes differ, so that the output layer begins anew; what it stands on is kept, left out or begun anew."""
    source = values(models["five"][0])
    body = {name: value for name, value in source.items() if not name.startswith(("head", "pre_logits"))}
    layer = {name: source[name] for name in ("pre_logits.weight", "pre_logits.bias")}
    zero = {"head.weight": torch.zeros(7, 32), "head.bias": torch.zeros(7)}
    scratch = {"head.weight": torch.zeros(7, 32), "head.bias": torch.full((7,), -10.0)}
    assert differing(began_with(root, "fine-tuned"), body | zero) == []
    assert differing(began_with(root, "zero"), body | layer | zero) == []
    assert differing(began_with(root, "initial"), body | layer | scratch) == []
    fresh = initial_weights(make_recipe(root))
    layer = {name: fresh[name] for name in layer}
    body = {name: value for name, value in values(models["timm"][0]).items() if not name.startswith("head")}
    assert differing(began_with(root, "whole-head-initial"), body | layer | scratch) == []


def test_one_line_tells_what_became_of_every_tensor(root, models):
    path = models["five"][1]
    all_of_file, all_of_run = (len(values(models[name][0])) for name in ("five", "1d"))
    body = f"weights from {path} (safetensors): {all_of_file - 4} tensors taken"
    lines = {
        "fine-tuned": f"{body}, head zero, left out: head, pre_logits",
        "initial": f"weights from {path} (safetensors): {all_of_file - 2} tensors taken, head initial, left out: head",
        "1d-resampled-zero3": f"weights from {models['1d'][1]} step 3: {all_of_run - 3} tensors taken, 3 resampled",
    }
    for name, line in lines.items():
        assert [said for said in printed(root, name).splitlines() if "weights from" in said] == [line]
    assert "pre_logits initial" in printed(root, "whole-head-initial")


def test_an_average_begins_with_the_weights_that_the_run_begins_with(root, models):
    """Nothing moves in the first step, whose learning rate is 0."""
    folder = root / "runs" / "average" / "checkpoints" / step_folder(1)
    assert differing(held(folder, "ema"), held(folder)) == []
    assert torch.equal(held(folder, "ema")["norm.weight"], models["five"][0].norm.weight)


RESAMPLED = [f"{kind}-resampled-zero{stage}" for kind in ("1d", "2d") for stage in (1, 3)]


@pytest.mark.parametrize("began", quick_of(RESAMPLED, ("1d-resampled-zero3", "2d-resampled-zero1")))
def test_positions_of_another_image_size_are_resampled(root, models, began):
    kind = began.partition("-")[0]
    expected = values(models[kind][0])
    for name in [name for name in expected if "pos_embedding" in name and not name.endswith(".cls")]:
        if kind == "1d":
            expected[name] = resample_positions(expected[name], (6, 6), (4, 4), class_token=True)
        else:
            expected[name] = resample_positions(expected[name][None], (6, 1), (4, 1), class_token=False)[0]
    assert differing(began_with(root, began), expected) == []


def test_a_run_goes_on_without_the_weights_that_it_began_with(root, models):
    assert equal(checkpoint(root, "cut"), checkpoint(root, "whole"))
    assert "weights from" in printed(root, "cut") and "weights from" not in printed(root, "resumed")
    recipe = make_recipe(root, **begins(root / "gone.safetensors", stage=3, head="keep"))
    check_initial_weights(recipe, NAMES, root / "runs" / "cut")
    with pytest.raises(RecipeError, match=r"gone\.safetensors"):
        check_initial_weights(recipe, NAMES, root / "runs" / "another")
    digest = hashlib.sha256(models["safetensors"][1].read_bytes()).hexdigest()
    for step in (3, 6):
        index = checkpoint(root, "cut", step).index
        assert index.data["init"] == {"form": "safetensors", "files": {"gone.safetensors": digest}}
    of_run = checkpoint(root, "1-to-3", 1).index.data["init"]
    folder = root / "runs" / "source-1" / "checkpoints" / step_folder(3)
    assert of_run == {
        "step": 3,
        "kind": "ema",
        "files": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")},
    }
    assert "init" not in checkpoint(root, "source-1", 3).index.data


# ---- What is refused before the ranks meet ---------------------------------------------------------------------------


def refused(root: Path, kind: type[Exception], content: dict[str, Any]) -> str:
    with pytest.raises(kind) as caught:
        check_initial_weights(make_recipe(root, **content), NAMES, root / "runs" / "none")
    return str(caught.value)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    write_generated_dataset(root / "train", [24])
    return root


def test_weights_that_are_not_there(data, tmp_path, models):
    assert "none.npz" in refused(data, RecipeError, begins(tmp_path / "none.npz"))
    assert "step-00000007" in refused(data, RecipeError, begins(models["1d"][1] / "checkpoints" / step_folder(7)))
    assert "no checkpoint yet" in refused(data, CheckpointError, begins(without_checkpoints(models, tmp_path)))
    assert "nothing" in refused(data, CheckpointError, begins(tmp_path / "run" / "checkpoints"))
    copied = shutil.copytree(models["1d"][1] / "checkpoints" / step_folder(3), tmp_path / "best")
    assert "named" in refused(data, RecipeError, begins(copied))
    for url in ("s3://bucket/run", "https://host/weights.npz"):
        with pytest.raises(RecipeError, match=r"init: from .*://"):
            make_recipe(data, **begins(url))


def without_checkpoints(models: dict[str, tuple[Model, Path]], tmp_path: Path) -> Path:
    run = shutil.copytree(models["1d"][1], tmp_path / "run")
    for folder in (run / "checkpoints").glob("step-*"):
        shutil.rmtree(folder)
    (run / "checkpoints" / "latest").unlink()
    return run


def test_damage(data, tmp_path, models):
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(models["safetensors"][1].read_bytes()[:-8])
    assert "damaged" in refused(data, CheckpointError, begins(cut))
    run = shutil.copytree(models["1d"][1], tmp_path / "run")
    newest = run / "checkpoints" / step_folder(3) / "index.json"
    newest.write_text("{")
    usual = begins(run, model=every_layer("1d"), head="keep")
    check_initial_weights(make_recipe(data, **usual), NAMES, tmp_path / "another")  # there is the one of step 2
    (run / "checkpoints" / step_folder(2) / "index.json").write_text("{")
    assert "index.json" in refused(data, CheckpointError, usual)


@pytest.mark.parametrize(("kind", "is_taken"), [("dino", True), ("dino-without-ibot", False), ("mae", False)])
def test_the_mask_of_dinov2_s_authors_is_taken_where_there_is_one(data, tmp_path, kind, is_taken):
    """In their files it is beside the model, whose parameters have timm's names."""
    block = {**BASE["model"], "layer_scale": 1e-5, "mlp": "exact_gelu", "pool": "cls", "head": "linear"}
    description = described(block, SMALL, None)
    model = valued(description)
    tensors = load_file(write(model, description, "timm", tmp_path, drop_head=True))
    mask = tensors["mask_token"] = torch.randn(1, block["width"])
    torch.save(tensors, tmp_path / "dinov2.pth")
    objective = {"kind": "mae", "decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2}
    if kind != "mae":
        objective = {**DINO, "group": 2} | ({"ibot": None} if "without" in kind else {})
    others: dict[str, Any] = {"objective": objective, "data": {"train": "train", "image_size": SMALL}}
    if kind != "mae":
        others |= {"averages": [{"name": "ema", "decay": 0.9}]}
        others["data"] = {"views": [{"name": "global", "count": 2}]}
    recipe = make_recipe(data, **begins(tmp_path / "dinov2.pth", model=block) | others)
    world, said = World(0, 1, torch.device("cpu")), list[str]()
    begun = dict(initial_weights(recipe, 0))
    source, _ = initial_source(
        recipe, [], lambda kind, name, start, length: begun[name].flatten()[start : start + length], world, said.append
    )
    for name, value in model.named_parameters():
        if name.startswith("head."):
            continue
        assert torch.equal(source("master", name, 0, value.numel()), value.detach().flatten()), name
    if "mask" in begun:
        assert torch.equal(source("master", "mask", 0, block["width"]), mask[0]) == is_taken
    assert any("mask_token is not read" in line for line in said) != is_taken
    if is_taken:
        torch.save(tensors | {"mask_token": torch.full_like(mask, torch.nan)}, tmp_path / "damaged.pth")
        damaged = make_recipe(data, **begins(tmp_path / "damaged.pth", model=block) | others)
        source, _ = initial_source(damaged, [], lambda *_: torch.zeros(0), world, said.append)
        with pytest.raises(CheckpointError, match=r"mask of .*damaged\.pth"):
            source("master", "mask", 0, block["width"])


@pytest.mark.parametrize("source", ["safetensors", "run"])
def test_another_model(data, tmp_path, models, source):
    path = models["safetensors"][1]
    if source == "run":
        path = finished_run(tmp_path / "run", models["safetensors"][0], block(), data={"image_size": SMALL})
    of_patches = refused(data, CheckpointError, begins(path, model={"patch_size": 16}))
    assert "embedding.weight has shape (32, 192), the model's is (32, 768)" in of_patches
    assert "missing blocks.3." in refused(data, CheckpointError, begins(path, model={"depth": 4}))
    assert "unexpected cls" in refused(data, CheckpointError, begins(path, model={"pool": "mean"}))
    # What no shape shows.
    heads = refused(data, RecipeError, begins(path, model={"num_heads": 4}))
    assert "model.num_heads 2, the recipe's is 4" in heads
    shared = refused(data, RecipeError, begins(path, model={"position": {"at": "shared"}}))
    assert "model.position.at 'stem', the recipe's is 'shared'" in shared


def test_positions_that_are_to_be_kept(data, models):
    larger = {"data": {**BASE["data"], "image_size": LARGE}}
    message = refused(data, CheckpointError, begins(models["npz"][1], positions="keep") | larger)
    assert all(part in message for part in ("posembed_input/pos_embedding", "(1, 17, 32)", "(1, 37, 32)"))
    check_initial_weights(make_recipe(data, **begins(models["npz"][1]) | larger), NAMES, data / "none")


def test_heads_that_cannot_be_kept(data, tmp_path, models):
    number = refused(data, CheckpointError, begins(models["five"][1], head="keep"))
    assert number.count("has shape") == 2 and "init.head: zero" in number
    # A head that was trained on pre_logits means nothing without it, and pre_logits cannot come from nowhere.
    without = refused(data, CheckpointError, begins(models["safetensors"][1], model=LINEAR, head="keep"))
    assert without.count("unexpected pre_logits") == 2 and "model.head: linear" in without
    for head in ("keep", "zero"):
        message = refused(data, CheckpointError, begins(models["timm"][1], head=head))
        assert message.count("missing pre_logits") == 2 and "model.head: linear" in message
    with pytest.raises(RecipeError, match=r"model\.head_bias.*init\.head"):
        make_recipe(data, **begins("somewhere", model={"head_bias": -5.0}))


@pytest.mark.parametrize("form", ["safetensors", "timm"])
def test_a_run_without_labels_begins_with_weights_that_have_a_head(data, tmp_path, models, form):
    content = begins(models[form][1], model={**LINEAR, "num_classes": None}) | {"objective": {"kind": "mae"}}
    check_initial_weights(make_recipe(data, **content), NAMES, tmp_path / "none")
    content["init"]["head"] = "keep"
    message = refused(data, CheckpointError, content)
    assert "unexpected head.weight" in message and "init.head: zero" in message and "model.head" not in message


@pytest.mark.parametrize("form", ["safetensors", "hf", "npz", "run"])
def test_images_normalised_otherwise(data, tmp_path, form):
    """Weights are trained on with the normalisation that they know, or not at all."""
    described_here = described(block(head="linear"), SMALL)
    model, theirs = valued(described_here), Normalise(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    if form == "npz":  # has one normalisation alone
        theirs = Normalise()
        path = write(model, described_here, form, tmp_path)
    elif form == "run":
        in_run = {"image_size": SMALL, "normalise": theirs.model_dump()}
        path = finished_run(tmp_path / "run", model, described_here.model, data=in_run)
    else:
        path = write(model, replace(described_here, normalise=theirs), form, tmp_path)
    for ours in (Normalise(mean=[0.5, 0.5, 0.4]), Normalise(mean=theirs.mean, std=[0.25, 0.25, 0.25]), theirs):
        content = begins(path, model=LINEAR) | {"data": {**BASE["data"], "normalise": ours.model_dump()}}
        if ours == theirs:
            check_initial_weights(make_recipe(data, **content), NAMES, tmp_path / "none")
        else:
            message = refused(data, RecipeError, content)
            setting = re.search(r"--set '(.*)'", message)
            assert setting is not None
            assert override(make_recipe(data, **content).dump(), [setting[1]], "test").data.normalise == theirs


@pytest.mark.parametrize("form", ["safetensors", "hf", "run"])
def test_classes_of_other_names(data, tmp_path, form):
    for names, fit in ((NAMES, True), ([*NAMES[1:], NAMES[0]], False)):
        description = described(block(head="linear"), SMALL, class_names=names)
        model, folder = valued(description), tmp_path / str(fit)
        folder.mkdir()
        if form == "run":
            path = finished_run(folder / "run", model, description.model, names=names, data={"image_size": SMALL})
        else:
            path = write(model, description, form, folder)
        content = begins(path, model=LINEAR, head="keep")
        if fit:
            check_initial_weights(make_recipe(data, **content), NAMES, tmp_path / "none")
        else:
            message = refused(data, RecipeError, content)
            assert repr(NAMES[0]) in message and repr(NAMES[1]) in message


def test_the_command_ends_before_anything_is_made(data, tmp_path):
    recipe = make_recipe(data, **begins(tmp_path / "none"), precision="fp32")
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe.dump()))
    script = Path(vitscale.__file__).with_name("pretrain.py")
    command = [sys.executable, str(script), "--recipe", str(tmp_path / "r.yaml"), "--run-dir", str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and str(tmp_path / "none") in ended.stderr and "Traceback" not in ended.stderr
    assert not (tmp_path / "run").exists()
