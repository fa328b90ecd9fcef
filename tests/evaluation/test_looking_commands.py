"""`vitscale features`, `fewshot`, `predict` and `evaluate --data`, as people type them."""

import csv
import hashlib
import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import command, on_processes
from messages import assert_messages
from scipy.stats import binomtest

import vitscale as vs
from data_tools.views import write_subset
from vitscale.cli.fewshot import table_of
from vitscale.data.shards import Manifest
from vitscale.data.shards.generated import CLASS_NAMES
from vitscale.data.shards.opening import open_shard
from vitscale.evaluation.finished import FinishedModel

SAMPLES = 37  # of the test set: no number of processes divides it
BOTH = ["--train", "train", "--test", "test"]


def assert_refused(*cases: tuple[list[object], int, str]) -> None:
    """Commands, their exit codes, and words of their messages."""
    for arguments, exit_code, word in cases:
        code, message = command(*arguments).answer
        assert code == exit_code and word in message, (arguments, code, message)


def of_folders(place: Path) -> list[object]:
    return ["--train", place / "train", "--test", place / "test"]


def commands_of(home: Path, place: Path) -> dict[str, list[object]]:
    """Commands that answer the same by any number of processes; `place` has folders of features and of photos."""
    run, batch = home / "run", ["--set", "evaluation.batch=5"]
    return {
        "fewshot": ["fewshot", run, *BOTH, "--shots", "1,5,20,all", "--json"],
        "heads": ["fewshot", run, *BOTH, "--method", "heads", "--json"],
        "folders": ["fewshot", *of_folders(place), "--json"],
        "data": ["evaluate", run, "--data", "test", *batch, "--json"],
        "by the recipe": ["evaluate", run, *batch, "--json"],
        "predict": ["predict", run, place / "photos", "--json", "--top", 7],
    }


@pytest.fixture(scope="module")
def place(home, tmp_path_factory) -> Path:
    """Features of both datasets, and the stored JPEGs of the test set as files that are called by their uids."""
    place = tmp_path_factory.mktemp("place")
    for name in ("train", "test"):
        command("features", home / "run", name, "--out", place / name, "--view", "fewshot")
    (place / "photos").mkdir()
    for index in range(2):
        with open_shard(Manifest.load(home / "data" / "test"), index) as shard:
            for slot in shard.slots:
                (place / "photos" / f"{int(shard.file.uid[slot]):03d}.jpg").write_bytes(shard.image(slot))
    return place


@pytest.fixture(scope="module")
def on_two(home, place) -> dict[str, str]:
    """What two processes print for the commands above, one of which also writes its answers, and for `features`."""
    commands = commands_of(home, place)
    commands["data"] += ["--out", place / "answers of two"]
    commands["features"] = ["features", home / "run", "test", "--out", place / "features of two", "--view", "fewshot"]
    return dict(zip(commands, on_processes(2, *commands.values()), strict=True))


def assert_same_answers(alone: str, shared: str) -> None:
    """Line by line; losses are sums in another order, probabilities of other batches."""
    pairs = zip(alone.splitlines(), shared.splitlines(), strict=True)
    for one, other in ((json.loads(a), json.loads(b)) for a, b in pairs):
        for loss in {"nll", "ece", "validation/loss"} & one.keys():
            assert other.pop(loss) == pytest.approx(one.pop(loss), rel=1e-6)
        tops = [{each["class"]: each["probability"] for each in of.pop("top", [])} for of in (one, other)]
        assert tops[0] == pytest.approx(tops[1], abs=1e-5) and one == other


def test_two_processes_answer_as_one_does(home, place, on_two):
    for name, arguments in commands_of(home, place).items():
        assert_same_answers(command(*arguments).stdout, on_two[name])
    assert json.loads(on_two["data"])["samples"] == Manifest.load(home / "data" / "test").num_samples == SAMPLES
    assert set(json.loads(on_two["by the recipe"])["intervals"]) == {"validation/top1", "validation/top5"}


def test_two_processes_write_the_features_that_one_has(home, place, on_two, tmp_path):
    assert f"{SAMPLES} samples" in on_two["features"]
    alone, both = place / "test", place / "features of two"
    for name in ("features-00000", "labels", "uids"):
        np.testing.assert_allclose(np.load(both / f"{name}.npy"), np.load(alone / f"{name}.npy"), atol=1e-5)
    meta = json.loads((both / "meta.json").read_text())
    assert meta["samples"] == SAMPLES and meta["policy"] == json.loads((alone / "meta.json").read_text())["policy"]
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in both.glob("*.npy")} == meta["sha256"]
    code, message = command("features", home / "run", "test", "--out", both).answer
    assert code == 2
    assert_messages("evaluation", {"features in a folder that is there": message}, {both: "FOLDER/1"})


def test_fewshot_says_mean_deviation_and_which_classes_are_scarce(on_two):
    task = json.loads(on_two["fewshot"])["tasks"]["train"]
    assert task["train_samples"] == 71 and task["test_samples"] == SAMPLES
    assert task["5shot"]["draws"] == 3 and task["5shot"]["l2"] == 1024 and "scarce_classes" not in task["5shot"]
    assert task["20shot"]["scarce_classes"] == len(CLASS_NAMES)
    assert task["all"]["draws"] == 1 and task["all"]["mean"] == task["20shot"]["mean"]
    assert json.loads(on_two["fewshot"])["policy"]["crop"] == "square"


def test_the_chosen_head_is_reported(on_two):
    found = json.loads(on_two["heads"])
    assert found["method"] == "heads"
    chosen = found["tasks"]["train"]["all"]
    # The tiny model has two blocks: both, or the last one.
    assert chosen["blocks"] in (1, 2) and chosen["lr"] <= 0.1 and chosen["mean"] > 0.5
    assert f"lr {chosen['lr']:g}, blocks {chosen['blocks']}" in table_of(found)


def test_what_is_answered_sample_by_sample_and_class_by_class(home, place, on_two, tmp_path):
    """On one process and on two: files of the same bytes, that agree with the model and with SciPy's intervals."""
    written = ["per_class.csv", "confusion.csv", "predictions.csv"]
    arguments = [*commands_of(home, place)["data"], "--out", tmp_path / "1"]
    printed = json.loads(command(*arguments).stdout)
    of_two = place / "answers of two"
    assert all((tmp_path / "1" / name).read_bytes() == (of_two / name).read_bytes() for name in written)
    stored = json.loads((tmp_path / "1" / "evaluation.json").read_text())
    assert stored == {key: value for key, value in printed.items() if key != "step"}
    classes, pairs, predictions = ([*csv.DictReader((tmp_path / "1" / name).open(newline=""))] for name in written)
    model = FinishedModel(home / "run")
    manifest = model.dataset("test")
    answers: dict[int, int] = {}
    for batch in model.loader(manifest)():
        found = model.predict(batch.images).logits.argmax(dim=1)[batch.mask]
        answers |= dict(zip(batch.uids[batch.mask].tolist(), found.tolist(), strict=True))
    assert {int(row["uid"]): CLASS_NAMES.index(row["predicted"]) for row in predictions} == answers
    assert len(predictions) == printed["samples"] and all(0 < float(row["probability"]) <= 1 for row in predictions)
    counted = Counter((row["class"], row["predicted"]) for row in predictions)
    assert {(row["class"], row["predicted"]): int(row["samples"]) for row in pairs} == counted
    assert [row["class"] for row in classes] == list(CLASS_NAMES)
    right = sum(count for (label, answer), count in counted.items() if label == answer)
    assert printed["top1"] == right / SAMPLES and set(printed["intervals"]) == {"top1", "top5"}
    shares = [(right, SAMPLES, printed["intervals"]["top1"])]
    for row in classes:
        name, count = row["class"], sum(row["class"] == label["class"] for label in predictions)
        assert (int(row["samples"]), int(row["right"])) == (count, counted[name, name])
        assert int(row["predicted"]) == sum(answer["predicted"] == name for answer in predictions)
        shares += [(counted[name, name], count, [float(row["low"]), float(row["high"])])] if count else []
    for hits, count, found in shares:
        assert found == pytest.approx([*binomtest(hits, count).proportion_ci(method="wilson")], abs=1e-12)
    code, message = command(*arguments).answer
    assert code == 2 and "--out" in message


def test_names_of_strangers_are_text_to_a_spreadsheet_and_a_terminal(home, tmp_path):
    names = ["=HYPERLINK(1)", "+1", "-1", "@SUM(1)", "\x1b[31m", "\uff1d1", 'a,b"c']
    shutil.copytree(home / "data" / "test", tmp_path / "data")
    Manifest.load(tmp_path / "data").model_copy(update={"class_names": tuple(names)}).save(tmp_path / "data")
    weights = [home / "npz.npz", "--model", home / "run" / "recipe.yaml"]
    out = tmp_path / "out"
    assert command("evaluate", *weights, "--data", tmp_path / "data", "--out", out).returncode == 0
    with (out / "per_class.csv").open(newline="") as file:
        found = [row["class"] for row in csv.DictReader(file)]
    assert found == [*(f"'{name}" for name in names[:4]), "\\x1b[31m", f"'{names[5]}", names[6]]
    assert "\x1b" not in (out / "predictions.csv").read_text() + (out / "confusion.csv").read_text()


def test_folders_of_features_give_what_the_model_does(home, place):
    folders, datasets = [*of_folders(place), "--json"], [*BOTH, "--json"]
    for method, shots in (("ridge", "1,5,all"), ("knn", "all"), ("logistic", "all")):
        options = ["--method", method, "--shots", shots]
        found = json.loads(command("fewshot", *folders, *options).stdout)
        expected = json.loads(command("fewshot", home / "run", *datasets, *options).stdout)
        task = found["tasks"][str(place / "train")]
        assert task == expected["tasks"]["train"] and found["policy"] == expected["policy"]
        of_all = [key for key in task if key.startswith("all")]
        assert of_all == (["all/10nn", "all/20nn"] if method == "knn" else ["all"])
        assert all(task[key]["mean"] > 0.5 for key in of_all)
        assert command("fewshot", home / "run", *BOTH, *options).returncode == 0
    answer = json.loads(command("fewshot", *folders, "--method", "heads").stdout)
    heads = answer["tasks"][str(place / "train")]["all"]
    assert heads["blocks"] == 1 and not heads["patches"] and heads["mean"] > 0.5


def test_folders_of_features_that_do_not_serve(home, tmp_path):
    train, test, other = tmp_path / "train", tmp_path / "test", tmp_path / "other"
    for out, name, view in ((train, "train", "fewshot"), (test, "test", "fewshot"), (other, "test", "evaluation")):
        command("features", home / "run", name, "--out", out, "--view", view)
    assert_refused(
        (["fewshot", "--train", train, "--test", home / "data/test"], 3, "vitscale features"),
        (["fewshot", "--train", train, "--test", other], 3, "crop"),
        (["fewshot", "--train", train, "--test", test, "--batch", 3], 2, "--batch"),
    )
    content = (test / "labels.npy").read_bytes()
    (test / "labels.npy").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    code, message = command("fewshot", "--train", train, "--test", test).answer
    assert code == 3 and "labels.npy" in message and "sha256" in message
    (test / "meta.json").write_text("{}")
    assert command("fewshot", "--train", train, "--test", test).returncode == 3


def test_test_samples_among_the_training_samples_are_refused(home, tmp_path):
    """By a run, by weights and by folders of features; `--overlap allow` tells how many, and goes on."""
    weights = [home / "timm.safetensors", "--model", home / "run" / "recipe.yaml"]
    train, test, part = (home / "data" / name for name in ("train", "test", "part"))
    write_subset(str(train), str(part), 20)
    for name in (train, test, part):
        command("features", home / "run", name, "--out", tmp_path / name.name, "--view", "fewshot")
    shots = ["--shots", "1", "--seeds", "1"]
    for source, place in (([home / "run"], home / "data"), (weights, home / "data"), ([], tmp_path)):
        common = ["--train", place / "train", "--test", place / "part"]
        code, message = command("fewshot", *source, *common, *shots).answer
        assert code == 3 and "20 of the 20" in message and "--overlap allow" in message, (source, message)
        # One task of two is enough.
        two = ["--train", place / "part", "--test", place / "test", *common]
        assert command("fewshot", *source, *two, *shots).returncode == 3
        assert command("fewshot", *source, *common, *shots, "--overlap", "allow").returncode == 0
    allowed = ["--train", train, "--test", part, *shots, "--set", "evaluation.overlap=allow"]
    assert command("fewshot", home / "run", *allowed).returncode == 0
    assert command("fewshot", home / "run", *allowed, "--overlap", "refuse").returncode == 3
    # Folders whose data have gone are still compared where they are of one dataset.
    meta = json.loads((tmp_path / "train" / "meta.json").read_text()) | {"dataset": "gone"}
    (tmp_path / "train" / "meta.json").write_text(json.dumps(meta))
    assert command("fewshot", "--train", tmp_path / "train", "--test", tmp_path / "train", *shots).returncode == 3
    assert command("fewshot", "--train", tmp_path / "train", "--test", tmp_path / "test", *shots).returncode == 0


def test_a_shared_strength_is_chosen_on_all_tasks_or_on_the_others(home):
    data = [*BOTH, "--train", "test", "--test", "train"]
    for l2 in ("shared", "others"):
        shown = command("fewshot", home / "run", *data, "--shots", "1", "--l2", l2, "--json")
        tasks = json.loads(shown.stdout)["tasks"]
        assert list(tasks) == ["train", "test"]
        strengths = {task["1shot"]["l2"] for task in tasks.values()}
        assert len(strengths) == 1 or l2 == "others"


def test_predict_agrees_with_evaluation(home, place, on_two):
    """The stored JPEGs of the test set, as files: the most probable classes make evaluation's accuracy."""
    stored = vs.Dataset(home / "data" / "test")
    labels = {str(place / "photos" / f"{each.uid:03d}.jpg"): CLASS_NAMES[each.label] for each in stored}
    lines = [json.loads(line) for line in on_two["predict"].splitlines()]
    assert [line["file"] for line in lines] == sorted(labels)
    right = sum(line["top"][0]["class"] == labels[line["file"]] for line in lines)
    values = json.loads(command("evaluate", home / "run", "--data", "test", "--json").stdout)
    assert values["samples"] == SAMPLES and values["top1"] == right / SAMPLES
    assert values["policy"]["classes"] == "same" and values["policy"]["dataset"] == stored.manifest.sha256
    # The run was trained by the sigmoid loss, which has every class by itself.
    model = FinishedModel(home / "run")
    batch = next(iter(model.loader(stored.manifest)()))
    expected = model.predict(batch.images).logits[0].sigmoid()
    first = next(line for line in lines if line["file"].endswith(f"{int(batch.uids[0]):03d}.jpg"))
    found = {entry["class"]: entry["probability"] for entry in first["top"]}
    torch.testing.assert_close(torch.tensor([found[name] for name in CLASS_NAMES]), expected.cpu(), atol=1e-5, rtol=0)
    of_weights = command("predict", home / "npz.npz", next(iter(labels)), "--model", home / "run/recipe.yaml")
    assert of_weights.returncode == 0 and "class " in of_weights.stdout
    refused, said = command("predict", home / "run", home / "data" / "test").answer
    assert refused == 3 and "vitscale evaluate" in said


def test_what_is_no_image_is_told_and_the_others_are_answered(home, tmp_path):
    with open_shard(Manifest.load(home / "data" / "test"), 0) as shard:
        (tmp_path / "good.jpg").write_bytes(shard.image(0))
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "text.png").write_text("no picture")
    result = command("predict", home / "run", tmp_path, "--json")
    found = {Path(line["file"]).name: line for line in map(json.loads, result.stdout.splitlines())}
    assert "top" in found["good.jpg"] and "error" in found["empty.jpg"] and "error" in found["text.png"]
    assert result.returncode == 3


def test_bad_input(home, tmp_path):
    run, timm, bare, recipe = home / "run", home / "timm.safetensors", home / "npz.npz", home / "run" / "recipe.yaml"
    names = tmp_path / "names.txt"
    names.write_text("a\nb\nc\nd\ne\nf\ng\n")
    assert_refused(
        (["evaluate", run, "--out", tmp_path / "out"], 2, "--data"),
        (["evaluate", run, "--data", "test", "--real", "timm"], 2, "1,000 classes"),
        (["evaluate", run, "--data", "tset"], 3, "test"),
        (["evaluate", timm, "--model", recipe, "--class-names", names, "--data", home / "data/test"], 3, "classes"),
        (["fewshot", run, *BOTH, "--shots", "0"], 2, "--shots"),
        (["fewshot", run, *BOTH, "--l2", "-1"], 2, "--l2"),
        (["fewshot", run, *BOTH, "--l2", "others"], 2, "one"),
        (["fewshot", run, *BOTH, "--l2", "2", "--method", "knn"], 2, "ridge"),
        (["fewshot", run, "--train", "train", "--train", "test", "--test", "test"], 2, "--test"),
        (["predict", run, tmp_path / "nothing.jpg"], 3, "nothing.jpg"),
        (["evaluate", bare], 2, "--model"),
        (["evaluate", bare, "--model", "ViT-B/16"], 3, "another model"),
        (["evaluate", bare, "--model", "ViT-B/16", "--step", 3], 2, "--step"),
        (["evaluate", home / "safetensors.safetensors"], 2, "--data"),
        (["evaluate", run, "--model", "ViT-B/16"], 2, "--model"),
        (["evaluate", run, "--batch", 3], 2, "evaluation.batch"),
        (["evaluate", run, "--max-memory", 0], 2, "--max-memory"),
        (["evaluate", run, "--max-memory", 1e-6], 2, "0.00 GB"),
        (["evaluate", tmp_path / "nothing"], 2, "nothing"),
        (["evaluate", tmp_path], 2, "recipe.yaml"),
    )
