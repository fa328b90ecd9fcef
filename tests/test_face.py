"""What `import vitscale` offers: answers equal to the commands', torch's own tools, and hostile uses."""

import copy
import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from models.weights.exported import TINY, described, finished_run, valued
from pictures import encoded, make_picture
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file
from small_files import edit_manifest, flip_images
from torch.utils.data import DataLoader, Subset
from typer.testing import CliRunner

import vitscale as vs
from vitscale.cli.main import app
from vitscale.data.shards.generated import CLASS_NAMES, write_generated_dataset
from vitscale.ground.errors import CheckpointError, DataError, MachineError, RecipeError, VitscaleError
from vitscale.recipe import load_recipe
from vitscale.recipe.families import architecture
from vitscale.runs.done import write_done
from vitscale.runs.metrics import MetricsLines

SIZE = 64


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A run with its data, and photos: JPEG, turned JPEG, PNG with alpha, gray of 16 bits."""
    root = tmp_path_factory.mktemp("face")
    write_generated_dataset(root / "data" / "test", [13, 24], seed=2)
    write_generated_dataset(root / "data" / "train", [30, 30], seed=3)
    description = described(TINY, SIZE, len(CLASS_NAMES), list(CLASS_NAMES))
    evaluation = {"validation": "test", "batch": 5}
    block, data = TINY | {"head": "linear"}, {"root": str(root / "data")}
    finished_run(
        root / "run", valued(description), block, names=CLASS_NAMES, data=data, evaluation=evaluation, precision="fp32"
    )
    photos, turned = root / "photos", Image.Exif()
    photos.mkdir()
    turned[0x0112] = 6
    (photos / "0.jpg").write_bytes(encoded(make_picture(0, 90, 120)))
    (photos / "1.jpg").write_bytes(encoded(make_picture(1, 50, 130), exif=turned))
    (photos / "2.png").write_bytes(encoded(make_picture(2, 90, 70).convert("RGBA"), "PNG"))
    gray = np.asarray(make_picture(3, 80, 80).convert("L")).astype(np.uint16) * 257
    Image.fromarray(gray).save(photos / "3.png")
    return root


@pytest.fixture(scope="module")
def model(home) -> vs.Model:
    return vs.load(home / "run")


def command(*arguments: object) -> list:
    """What a command prints as JSON, line by line."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    return [json.loads(line) for line in result.stdout.splitlines()]


def file_of(home: Path, name: str = "0.jpg") -> Path:
    return home / "photos" / name


# ---- Answers ---------------------------------------------------------------------------------------------------------


def test_nothing_is_imported_before_it_is_used_and_no_trainer_for_a_forward_pass(home):
    told = (
        "import sys, vitscale as vs\n"
        "assert not {'torch', 'numpy', 'pydantic', 'PIL'} & sys.modules.keys() and 'load' in dir(vs)\n"
        f"vs.load({str(home / 'run')!r}).predict({str(file_of(home))!r})\n"
        "assert not {'deepspeed', 'pyarrow', 'pandas', 'matplotlib', 'data_tools', 'mlflow'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_answers_are_those_of_the_commands_to_the_bit(home, model, tmp_path):
    files = sorted((home / "photos").iterdir())
    told = command("predict", home / "run", *files, "--json")
    for asked in (files, str(home / "photos"), [file.read_bytes() for file in files]):
        ours = [each.plain()["top"] for each in model.predict(asked)]
        assert ours == [each["top"] for each in told]
    inputs = torch.stack([model.preprocess(file) for file in files])
    best = [each["top"][0]["probability"] for each in told]  # the run was trained with the sigmoid loss
    assert model(inputs).sigmoid().amax(1).tolist() == best
    assert [each.classes for each in model.predict(inputs)] == [each.classes for each in model.predict(files)]
    assert torch.equal(model.features(files), model.features(inputs)) and model.class_names == list(CLASS_NAMES)

    (whole,) = command("evaluate", home / "run", "--json")
    assert vs.evaluate(model).items() <= whole.items()
    (by_data,) = command("evaluate", home / "run", "--data", home / "data/test", "--json")
    assert vs.evaluate(vs.Run(home / "run"), vs.Dataset(home / "data/test")).items() <= by_data.items()
    few = ("--train", home / "data/train", "--test", home / "data/test", "--shots", "2", "--json")
    (fewshot,) = command("fewshot", home / "run", *few)
    ours = vs.fewshot(model, home / "data/train", home / "data/test", shots=[2])
    assert [ours] == list(fewshot["tasks"].values())

    command_out, ours_out = tmp_path / "a.safetensors", model.save(tmp_path / "b.safetensors")
    CliRunner().invoke(app, ["export", str(home / "run"), "--format", "safetensors", "--out", str(command_out)])
    assert ours_out.read_bytes() == command_out.read_bytes()
    assert torch.equal(vs.load(ours_out)(inputs), model(inputs))
    assert vs.load(home / "run", precision="bf16").features(files).dtype == torch.float32


def test_pixels_are_seen_as_they_are(home, model):
    """As raw pixels in a shard would be: no JPEG in between, turned upright, alpha on white."""
    image = make_picture(5, 70, 110)
    pixels = np.asarray(image)
    seen = model.features(image)
    tensor = torch.from_numpy(pixels.copy()).movedim(-1, 0)
    for same in (pixels, pixels[None], tensor, Image.fromarray(pixels), encoded(image, "PNG")):
        if isinstance(same, Image.Image) or not isinstance(same, bytes):
            assert torch.equal(model.features(same), seen)
        else:  # a file is stored as a JPEG
            assert not torch.equal(model.features(same), seen) and torch.allclose(model.features(same), seen, atol=0.2)
    gray = image.convert("L")
    assert torch.equal(model.features(gray), model.features(np.asarray(gray)))
    assert torch.equal(model.features(image.convert("RGBA")), seen)
    turned = Image.open(file_of(home, "1.jpg"))
    assert torch.equal(model.views(turned), model.views(ImageOps.exif_transpose(turned)))
    huge = Image.new("RGB", (1, 60_000), "red")
    assert model.predict(huge)[0].classes and model.features(Image.open(file_of(home, "3.png"))).isfinite().all()


def test_it_is_a_module(model, home):
    """Gradients, copies, modes and other dtypes; what it predicts does not depend on its mode."""
    file, inputs = file_of(home), model.preprocess(file_of(home))[None].requires_grad_()
    model(inputs).sum().backward()
    assert inputs.grad is not None and inputs.grad.abs().sum() > 0
    model.zero_grad()
    other = copy.deepcopy(model).train()
    assert other.predict(file) == model.predict(file) and other.training and other.backbone.training
    with torch.no_grad():
        other.backbone.head.weight.zero_()
    assert other.predict(file) != model.predict(file) == vs.load(home / "run").predict(file)
    assert other.double().features(file).dtype == torch.float32 and other(inputs.detach()).shape == (
        1,
        len(CLASS_NAMES),
    )
    assert model.state_dict().keys() == other.state_dict().keys()
    images = next(iter(vs.Dataset(home / "data/test").loader(4, image_size=SIZE))).images
    assert len(model.predict(images)) == len(model.features(images)) == 4


def test_weights_that_were_rounded_when_they_were_opened_are_saved_whole(home, tmp_path):
    """As `vitscale export` writes them; but those that were changed since, as they are now."""
    stored = load_file(vs.load(home / "run", precision="fp32").save(tmp_path / "whole.safetensors"))
    rounded = vs.load(home / "run", precision="bf16")
    assert rounded.backbone.head.weight.dtype == torch.bfloat16
    found = load_file(rounded.save(tmp_path / "rounded.safetensors"))
    assert found.keys() == stored.keys() and all(torch.equal(found[name], stored[name]) for name in stored)
    with torch.no_grad():
        rounded.backbone.head.bias += 1
    changed = load_file(rounded.save(tmp_path / "changed.safetensors"))
    now = rounded.backbone.head.bias.detach().float()
    assert all(torch.equal(changed[name], now if name == "head.bias" else stored[name]) for name in stored)
    with pytest.warns(UserWarning, match="fp32"):
        rounded.train()


def test_an_architecture_by_name():
    assert "ViT-B/16" in vs.list_models()
    fresh = vs.load("ViT-Ti/16", class_names=["a", "b", "c"], image_size=32)
    assert fresh.predict(Image.new("RGB", (9, 9)), top=1)[0].classes[0][1] == pytest.approx(1 / 3)
    with pytest.raises(RecipeError) as refused:
        vs.load("vit_base_patch16_224")
    assert not any(name in str(refused.value) for name in vs.list_models())
    assert vs.load("ViT-Ti/16", image_size=32)(torch.zeros(2, 3, 32, 32)).shape == (2, 192)
    with pytest.raises(RecipeError):
        vs.load("ViT-Ti/16", image_size=32).predict(Image.new("RGB", (9, 9)))


# ---- Bad input -------------------------------------------------------------------------------------------------------

BAD = {
    "no pictures": [],
    "nothing": None,
    "a number": [3],
    "empty bytes": b"",
    "no image": b"hello",
    "a missing file": "none.jpg",
    "a zero byte": "a\0b.jpg",
    "floats": np.zeros((9, 9, 3)),
    "floats of 0..1": np.random.default_rng(0).random((9, 9, 3), np.float32),
    "two channels": np.zeros((9, 9, 2), np.uint8),
    "no area": np.zeros((0, 9, 3), np.uint8),
    "floating pixels": Image.new("F", (9, 9)),
    "too long a side": Image.new("RGB", (70_000, 2)),
    "another size": torch.zeros(2, 3, 32, 32),
    "channels last": torch.zeros(2, SIZE, SIZE, 3),
    "integers": torch.zeros(2, 3, SIZE, SIZE, dtype=torch.int64),
    "pixels as floats": torch.full((2, 3, SIZE, SIZE), 255.0),
    "not a number": torch.full((2, 3, SIZE, SIZE), torch.nan),
    "pixels of another size": torch.zeros(2, 32, 32, 3, dtype=torch.uint8),
    "no batch": torch.zeros(0, 3, SIZE, SIZE),
    "a scalar": torch.tensor(0.5),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_what_is_no_picture_is_one_clear_error(model, bad, capfd):
    for ask in (model.predict, model.features):
        with pytest.raises(DataError):
            ask(bad)
    if isinstance(bad, torch.Tensor):
        with pytest.raises(DataError):
            model(bad)
    assert capfd.readouterr() == ("", "")


def test_what_is_no_model_is_one_clear_error(home, model, tmp_path, capfd):
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/recipe.yaml").write_bytes((home / "run/recipe.yaml").read_bytes())
    (tmp_path / "zero.safetensors").touch()
    (tmp_path / "no.safetensors").write_bytes(b"hello" * 100)
    saved = model.save(tmp_path / "good.safetensors")
    about = json.dumps({"version": 99})
    save_file(load_file(saved), tmp_path / "later.safetensors", {"vitscale": about})
    for name in ("empty", "begun", "zero.safetensors", "no.safetensors", "later.safetensors"):
        with pytest.raises(CheckpointError, match=name.partition(".")[0]):
            vs.load(tmp_path / name)
    wrong = [{"step": 99}, {"precision": "fp16"}, {"num_classes": 3}, {"image_size": 32}]
    fresh = [{"image_size": 0}, {"image_size": "16"}, {"class_names": "cat"}, {"class_names": [1, 2]}, {"seed": -1}]
    for source, options in [(home / "run", one) for one in wrong] + [("ViT-Ti/16", one) for one in fresh]:
        with pytest.raises(VitscaleError):
            vs.load(source, **options)
    photo = file_of(home)
    for ask in (
        lambda: model.predict(photo, top=0),
        lambda: model.save(tmp_path / "x", "zzz"),
        lambda: vs.inspect(model, photo, count=0),
        lambda: vs.Dataset(home / "data/test").loader(8, image_size=0),
        lambda: vs.Recipe.load("b16_i1k").plan(0, "h100", samples=1000),
        lambda: vs.convert(home / "photos", tmp_path / "out", split={}),
        lambda: vs.convert(home / "photos", tmp_path / "out", workers=0),
        lambda: vs.convert(home / "photos", "a\0b"),
        lambda: vs.convert(home / "photos", tmp_path / "out", split={"test": 0.2}),
        lambda: vs.train("demo", "a\0b"),
        lambda: vs.train("demo", ranks=0),
        lambda: vs.Recipe.load("demo", "seed=1"),
        lambda: vs.Recipe.load("demo").flops(-1),
        lambda: vs.Recipe.load("b16_i1k").plan(8, "h100", price=math.nan),
        lambda: vs.Dataset(home / "data/test").loader(8, stop=-1),
        lambda: vs.inspect(model, home / "photos", show=["nose"]),
        lambda: vs.inspect(model, home / "photos", show="norms"),
        lambda: vs.fewshot(model, home / "data/train", home / "data/test", shots=5),
        lambda: vs.fewshot(model, home / "data/train", home / "data/test", shots=[1.5]),
        lambda: vs.fewshot(model, home / "data/train", home / "data/test", overlap="maybe"),
    ):
        with pytest.raises(RecipeError):
            ask()
    for ask in (vs.load, vs.Run, vs.train, vs.Recipe.load):
        with pytest.raises(RecipeError):
            ask(tmp_path / "none")
    for ask in (
        lambda: vs.Dataset("none/such"),
        *(lambda ask=ask: ask("x" * 5000) for ask in (vs.load, vs.Run, vs.Dataset, model.predict)),
        lambda: vs.convert(home / "photos", tmp_path / ("x" * 5000)),
        lambda: vs.evaluate(model, tmp_path),
        lambda: vs.convert(tmp_path, tmp_path),
    ):
        with pytest.raises(VitscaleError):
            ask()
    write_generated_dataset(tmp_path / "others", [4], seed=1)
    edit_manifest(tmp_path / "others", lambda manifest: manifest["class_names"].__setitem__(0, "another"))
    for ask in (vs.evaluate, lambda model, data: vs.fewshot(model, data, home / "data/test")):
        with pytest.raises(DataError):
            ask(model, tmp_path / "others")
    assert capfd.readouterr().out == ""


def test_the_folder_of_a_checkpoint_opens_that_step(home, tmp_path, monkeypatch):
    folder, photo = home / "run/checkpoints/step-00000002", file_of(home)
    found = vs.load(folder)
    assert found.step == 2 and found.predict(photo) == vs.load(home / "run", 2).predict(photo)
    assert vs.load(folder, 2).step == 2 and vs.load(home / "run").step == 3
    lines = [
        CliRunner().invoke(app, ["export", str(source), "--format", "hf", "--out", str(tmp_path / name), *more])
        for source, name, more in ((folder, "a", ()), (home / "run", "b", ("--step", "2")))
    ]
    assert not any(line.exception for line in lines)
    written = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in "ab"]
    assert written[0] == written[1]
    copied = tmp_path / "elsewhere" / folder.name
    shutil.copytree(folder, copied)
    monkeypatch.chdir(copied)
    assert vs.load(".").predict(photo) == found.predict(photo)
    for source, step in ((folder, 3), (copied.rename(copied.with_name("mine")), None)):
        with pytest.raises(RecipeError):
            vs.load(source, step)
    for name, damage in (("index.json", Path.unlink), ("rank-00000.safetensors", lambda file: os.truncate(file, 999))):
        shutil.rmtree(tmp_path / "elsewhere", ignore_errors=True)
        shutil.copytree(folder, copied)
        damage(copied / name)
        with pytest.raises(CheckpointError):
            vs.load(copied)


def test_a_fifo_of_a_stranger_is_no_picture(model, tmp_path):
    os.mkfifo(tmp_path / "x.jpg")
    for ask in (model.predict, model.features):
        with pytest.raises(DataError):
            ask(tmp_path)


def test_a_model_whose_modules_were_replaced_names_no_classes(home, tmp_path):
    changed = vs.load(home / "run")
    changed.backbone.head = torch.nn.Linear(changed.backbone.head.in_features, 3)
    for ask in (changed.predict, lambda photo: changed.save(tmp_path / "x.safetensors")):
        with pytest.raises(RecipeError):
            ask(file_of(home))
    assert changed(changed.preprocess(file_of(home))[None]).shape == (1, 3)
    assert not (tmp_path / "x.safetensors").exists()


def test_threads_share_a_model_in_training_mode(home):
    dropped = vs.load(home / "run")
    dropped.backbone.register_forward_pre_hook(lambda module, args: time.sleep(0.01) if not module.training else 1 / 0)
    dropped.train()
    threads = [threading.Thread(target=dropped.predict, args=(file_of(home),)) for _ in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        failed: list[object] = []
        patch.setattr(threading, "excepthook", failed.append)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed and dropped.training


# ---- Datasets --------------------------------------------------------------------------------------------------------


def test_a_dataset_is_a_sequence_and_equal_to_the_loader(home, model):
    data = vs.Dataset(home / "data/test")
    assert len(data) == len(list(data)) == 37 and data[-1].uid == data[36].uid == 36 and data[np.int64(3)].uid == 3
    for bad, error in ((37, IndexError), (-38, IndexError), (1.0, TypeError), ("a", TypeError)):
        with pytest.raises(error):
            data[bad]
    data.close()
    again = pickle.loads(pickle.dumps(data))
    assert again[20].image.tobytes() == data[20].image.tobytes()
    prepared = vs.Dataset(home / "data/test", transform=model.preprocess)
    batches = list(data.loader(8, image_size=SIZE))
    for context in ("fork", "spawn"):
        found = list(DataLoader(prepared, batch_size=8, num_workers=2, multiprocessing_context=context))
        assert torch.equal(torch.cat([each.uid for each in found]), torch.cat([b.uids[b.mask] for b in batches]))
        assert torch.equal(model(found[1].image), model.finished.predict(batches[1].images).logits)
    assert [sample.uid for sample in Subset(data, [5, 3])] == [5, 3]
    recipe = vs.Run(home / "run").recipe
    found = vs.inspect(model, data, show=["norms"], count=5).findings  # a dataset's own pictures
    assert found.images == 5
    first, *_ = data.loader(recipe=recipe, training=True, stop=2)
    assert first.images.shape == (8, SIZE, SIZE, 3)
    shares = [next(iter(data.loader(recipe=recipe, training=True, rank=rank, world=2))).images for rank in (0, 1)]
    assert torch.equal(torch.cat(shares), first.images)
    with pytest.raises(RecipeError):
        data.loader(7, world=2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ffcv_reads_the_shards_itself(home, monkeypatch):
    data = vs.Dataset(home / "data/test")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "ffcv.loader", None)
        with pytest.raises(MachineError):
            data.ffcv_loader(4, {})
    monkeypatch.setenv("NUMBA_THREADING_LAYER", "omp")
    decoders = pytest.importorskip("ffcv.fields.decoders")
    image, number = decoders.CenterCropRGBImageDecoder((32, 32), 1), decoders.IntDecoder
    pipelines = {"image": [image], "label": [number()], "uid": [number()]}
    loader = data.ffcv_loader(5, pipelines, num_workers=1, drop_last=False)
    rows = [
        pair for _, labels, uids in loader for pair in zip(uids.ravel().tolist(), labels.ravel().tolist(), strict=True)
    ]
    assert len(loader) == 8 and rows == [(sample.uid, sample.label) for sample in data]


def test_damage_is_found(home, tmp_path):
    write_generated_dataset(tmp_path / "data", [6], seed=1)
    data = vs.Dataset(tmp_path / "data")
    flip_images(data.manifest.shard_path(0), 2)
    assert data[1].image
    with pytest.raises(DataError):
        _ = data[2]


# ---- Runs, recipes, training -----------------------------------------------------------------------------------------


def test_recipes(tmp_path, home):
    recipe = vs.Recipe.load("b16_i1k", {"optimizer.lr": 1e-05, "schedule.duration": {"epochs": 3}})
    assert recipe.dump() == load_recipe("b16_i1k", ["optimizer.lr=1e-05", "schedule.duration={epochs: 3}"]).dump()
    (row,) = json.loads(CliRunner().invoke(app, ["flops", "b16_i1k", "--samples", "1000", "--format", "json"]).stdout)
    assert vs.Recipe.load("b16_i1k").flops(1000).exaflops == row["exaflops"]
    assert vs.Recipe.load("b16_i1k").plan(8, "h100", samples=1_281_167).best is not None
    odd = vs.Recipe.load("b16_i1k", {"data.train": "😀/1e3", "seed": np.int64(3)})
    assert (odd.data.train, odd.seed) == ("😀/1e3", 3)
    whole = load_recipe("demo", ["seed=3"])
    assert (
        vs.Recipe.load(whole.dump()).dump()
        == whole.dump()
        == vs.Recipe.load(whole.dump() | {"seed": 0}, {"seed": 3}).dump()
    )
    with pytest.raises(RecipeError):
        vs.Recipe.load({"optimizer.rl": 1})
    sizes = vs.Recipe.load("demo", {"model": "ViT-S/16"}).model  # demo has a width and depth of its own
    assert sizes.shape() == architecture("ViT-S/16") and sizes.head == whole.model.head
    for overrides in ({"optimizer.rl": 1}, {"optimizer.lr": object()}, {"": 1}):
        with pytest.raises(RecipeError):
            vs.Recipe.load("b16_i1k", overrides)
    evil = tmp_path / "<script>alert(1)<"
    evil.symlink_to(home / "run")
    for shown in (vs.Run(evil), vs.Run(evil).recipe, vs.Dataset(home / "data/test"), vs.Run(evil).plot()):
        assert "<script" not in shown._repr_html_()


def strict(text: str) -> object:
    """What a reader of JSON that knows no NaN finds."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_numbers_that_are_none_break_no_run(home, tmp_path):
    run, told = tmp_path / "run", {"v/a": math.nan, "v/b": math.inf, "v/top1": 0.5}
    shutil.copytree(home / "run", run)
    lines = [
        '{"step": 1, "step_time_s": 1, "exaflops": 1, "loss": NaN, "lr": 1e999, "x": [1], "d": "ab"}',
        f'{{"step": 2, "step_time_s": 1, "exaflops": 1, "loss": {"9" * 400}, "lr": -Infinity}}',
        '{"step": 2, "eval/v/top1": NaN, "eval/v\\u001b": 1}',
    ]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    written = MetricsLines(run / "metrics.jsonl", 2)
    written.training(3, {"step_time_s": 1, "exaflops": 2.0, "loss": math.nan, "lr": 0.5})
    written.evaluation(3, told)
    write_done(run, {"step": 3, "exaflops": math.nan, "evaluation": told})
    for text in ((run / "DONE").read_text(), *(run / "metrics.jsonl").read_text().splitlines()[-2:]):
        assert strict(text)
    found = vs.Run(run)
    assert found.evaluation == {"v/top1": 0.5} and found.cost.exaflops == 2
    assert found.evaluations == [(2, {"v/top1": None}), (3, {"v/a": None, "v/b": None, "v/top1": 0.5})]
    assert np.isnan(found.metrics["loss"]).all() and found.metrics["lr"][-1] == 0.5
    assert "0.5" in found._repr_html_() and "<svg" in found.plot()._repr_html_()
    for key in ("x", "d"):
        with pytest.raises(RecipeError):
            found.plot(key)


def test_training_waits_stops_continues_and_fails_as_the_launch_does(tmp_path, capfd):
    demo = {"name": "demo", "run_dir": tmp_path / "run"}
    found: list[vs.Training] = []
    thread = threading.Thread(
        target=lambda: found.append(vs.train("demo", demo["run_dir"], smoke=True, ranks=1, stop_at=2, wait=False))
    )
    thread.start()
    thread.join()
    (training,) = found
    assert "running" in repr(training)
    run = training.wait()
    assert run.state != "done" and run.checkpoints.steps[-1] == 2 and not training.is_running
    run = vs.train("demo", demo["run_dir"], smoke=True, ranks=1)
    assert run.state == "done" and run.metrics["step"].tolist()[-1] == 4 and run.metrics["loss"].dtype == np.float64
    assert "step" in run.metrics and run.metrics.pandas().loc[4, "loss"] == run.metrics["loss"][-1]
    with pytest.raises(DataError):
        run.metrics["none"]
    assert run.evaluations and run.cost.step == 4 and run.model().step == 4
    run.plot().save(tmp_path / "plot.png")
    assert Image.open(tmp_path / "plot.png").size[0] > 600
    assert "exit code 0" in capfd.readouterr().err
    with pytest.raises(DataError, match="none"):
        vs.train(vs.Recipe.load("demo", {"data.root": str(tmp_path / "none")}), tmp_path / "fails", ranks=1)


def test_ctrl_c_saves(home, tmp_path):
    overrides = {
        **{"data.root": str(home / "data"), "data.train": "train", "evaluation.validation": "test"},
        **{"batch.global": 8, "logging.every": 1, "schedule": {"duration": {"steps": 100_000}, "decay": "cosine"}},
        **{"evaluation.every": {"steps": 50_000}, "checkpoint.every": {"steps": 50_000}},
    }
    recipe, run = f"vs.Recipe.load('demo', {overrides})", tmp_path / "run"
    program = f"import vitscale as vs\nvs.train({recipe}, {str(run)!r}, ranks=1, max_restarts=0)\n"
    # Its own group gets the signal, as a terminal's or a notebook's interrupt does.
    process = subprocess.Popen(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not (run / "metrics.jsonl").exists() and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate()
    assert "KeyboardInterrupt" in told and "passed on to all ranks" in told, told
    assert vs.Run(run).checkpoints.steps and not (run / "DONE").exists()


@pytest.mark.slow
def test_mypy_is_content_with_a_program_that_uses_it(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import vitscale as vs\n\n"
        'model: vs.Model = vs.load("runs/photos", precision="bf16")\n'
        'best: tuple[str, float] = model.predict(["a.jpg"], top=2)[0].classes[0]\n'
        'data: dict[str, vs.Dataset] = vs.convert("photos", "DATA", split={"test": "20%"}, workers=2)\n'
        'whole: vs.Dataset = vs.convert("photos", "DATA")\n'
        'run: vs.Run = vs.train(vs.Recipe.load("demo", {"seed": 1}), "runs/x", ranks=2)\n'
        'training: vs.Training = vs.train("demo", wait=False)\n'
        'label: int = data["test"][0].label\n'
        'top1: float = vs.evaluate(model, whole)["top1"]\n'
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", program],
        **{"capture_output": True, "text": True, "check": False, "cwd": tmp_path},
        env=os.environ | {"MYPYPATH": str(Path(vs.__file__).parent.parent)},
    )
    assert done.returncode == 0, done.stdout
