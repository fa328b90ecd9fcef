"""`vitscale inspect` as people type it: files, pages, and bad input."""

import csv
import shutil
from pathlib import Path

import pytest
import torch
from browser import Read, open_page
from commands import command
from messages import assert_messages
from models.weights.exported import TINY, described, finished_run, valued, write
from pictures import encoded, make_picture

from vitscale.data.shards.generated import CLASS_NAMES, write_generated_dataset

pytest.importorskip("matplotlib")
OF_ATTENTION = {"attention_distance", "attention_entropy", "attention_maps", "attention_rollout"}
OF_ALL = {"filters", "layer_alignment", "token_norms", "token_norm_maps", "patch_colours"}
OF_VITS = OF_ALL | OF_ATTENTION | {"position_similarity"}
RESNET = {"blocks": [1, 1], "width_factor": 1}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A run, its weights in two formats under one name, those of a ResNet, a dataset, and a folder of pictures."""
    root = tmp_path_factory.mktemp("inspect")
    write_generated_dataset(root / "data" / "test", [13, 24], seed=2)
    description = described(TINY, 64, len(CLASS_NAMES), list(CLASS_NAMES))
    model = valued(description)
    where = {"root": str(root / "data")}
    finished_run(root / "run", model, TINY | {"head": "linear"}, names=CLASS_NAMES, data=where, precision="fp32")
    for form, folder in (("safetensors", "ours"), ("npz", "google")):
        (root / folder).mkdir()
        write(model, description, form, root).rename(root / folder / f"model.{form}")
    of_resnet = described(RESNET, 64)
    write(valued(of_resnet), of_resnet, "safetensors", root).rename(root / "resnet.safetensors")
    for at in range(9):
        (root / "pictures" / str(at % 2)).mkdir(parents=True, exist_ok=True)
        (root / "pictures" / str(at % 2) / f"{at}.png").write_bytes(encoded(make_picture(at, 70, 90), "PNG"))
    return root


def inspect(home: Path, out: Path, *arguments: object, images: str = "pictures") -> tuple[int, str]:
    return command("inspect", *arguments, "--images", home / images, "--out", out).answer


def figures(out: Path) -> set[str]:
    """The figures of a folder, each of which is there in three forms."""
    kinds = {kind: {path.stem for path in out.glob(f"*.{kind}")} for kind in ("png", "svg", "csv")}
    assert kinds["png"] == kinds["svg"] == kinds["csv"]
    return kinds["csv"]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_another_format_and_a_model_spread_over_memory_and_disk_give_equal_bytes(home, tmp_path):
    block, source = home / "run" / "recipe.yaml", home / "ours" / "model.safetensors"
    assert inspect(home, tmp_path / "ours", source)[0] == 0
    assert inspect(home, tmp_path / "google", home / "google" / "model.npz", "--model", block)[0] == 0
    assert inspect(home, tmp_path / "spread", source, "--max-memory", 1e-4)[0] == 0
    assert figures(tmp_path / "ours") == OF_VITS
    for path in (tmp_path / "ours").iterdir():
        for other in ("google", "spread"):
            assert path.read_bytes() == (tmp_path / other / path.name).read_bytes(), (other, path.name)


def test_names_tell_models_apart(home, tmp_path):
    files = [tmp_path / name for name in ("a/model.safetensors", "a/model.pt.safetensors", "b/model.safetensors")]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        shutil.copy(home / "ours" / "model.safetensors", file)
    assert inspect(home, tmp_path / "out", *files, "--show", "filters", "--count", 1)[0] == 0
    named = {row["model"] for row in rows(tmp_path / "out" / "filters.csv")}
    assert named == {"a/model", "a/model.pt", "b/model"}


@pytest.mark.slow
def test_a_model_beside_itself_on_a_page(home, tmp_path):
    out = tmp_path / "out"
    sources = (home / "ours" / "model.safetensors", tmp_path / "again.safetensors")
    shutil.copy(*sources)
    code, said = inspect(home, out, *sources, images="data/test")
    assert code == 0 and figures(out) == OF_VITS, said
    assert all(key in said for key in OF_VITS)
    page = Read((out / "index.html").read_text())
    assert page.outside == [] and page.holes == []
    assert {"Attention distance", "again", "model"} <= set(page.words)
    opened = open_page(out / "index.html", tmp_path / "browser")
    assert opened.console == [] and opened.document.count("<svg") == len(OF_VITS)
    distances = rows(out / "attention_distance.csv")
    assert [(row["model"], row["layer"], row["head"]) for row in distances] == [
        (model, layer, head) for model in ("model", "again") for layer in "12" for head in "123"
    ]
    assert [row["distance_px"] for row in distances[:6]] == [row["distance_px"] for row in distances[6:]]
    of_two = [row for row in rows(out / "layer_alignment.csv") if row["model"] != row["other_model"]]
    assert all(
        float(row["alignment"]) == pytest.approx(1, abs=1e-5) for row in of_two if row["layer"] == row["other_layer"]
    )


def test_resnets_have_no_attention_and_show_the_rest(home, tmp_path):
    code, _ = inspect(home, tmp_path / "all", home / "resnet.safetensors")
    assert code == 0 and figures(tmp_path / "all") == OF_ALL
    assert "has no positions and no attention and no rollout" in (tmp_path / "all" / "index.html").read_text()
    code, message = inspect(home, tmp_path / "some", home / "resnet.safetensors", "--show", "filters,attention")
    assert code == 2 and "--show attention" in message and "filters, alignment" in message
    assert not (tmp_path / "some").exists()


def test_only_what_is_asked_for_is_shown(home, tmp_path):
    arguments = ("--show", "rollout,filters", "--count", 3, "--pictures", 2)
    assert inspect(home, tmp_path / "out", home / "run", *arguments)[0] == 0
    assert figures(tmp_path / "out") == {"filters", "attention_rollout", "attention_maps"}
    of_pictures = rows(tmp_path / "out" / "attention_rollout.csv")
    assert len(of_pictures) == 2 and all(len(row) == 2 + 64 for row in of_pictures)


def test_bad_input_is_told_and_leaves_nothing(home, tmp_path):
    out, run = tmp_path / "out", home / "run"
    (tmp_path / "empty").mkdir()
    shutil.copytree(home / "pictures", tmp_path / "damaged")
    (tmp_path / "damaged" / "0" / "no.jpg").write_text("no picture")
    torch.save({"model": torch.nn.Linear(2, 2)}, tmp_path / "pickle.pth")
    cases = [
        (3, str(tmp_path / "empty"), inspect(tmp_path, out, run, images="empty")),
        (3, "no.jpg", inspect(tmp_path, out, run, images="damaged")),
        (3, "nowhere", inspect(tmp_path, out, run, images="nowhere")),
        (2, "filters", inspect(home, out, run, "--show", "attentoin")),
        (3, "pickle.pth", inspect(home, out, tmp_path / "pickle.pth", "--model", run / "recipe.yaml")),
        (2, "4 x 4", inspect(home, out, home / "ours/model.safetensors", "--image-size", 4)),
        (2, str(tmp_path / "empty"), inspect(home, out, tmp_path / "empty")),
        (2, str(run), inspect(home, out, run, run)),
        (2, str(home / "pictures"), inspect(home, home / "pictures", run)),
    ]
    for expected, words, (code, message) in cases:
        assert code == expected and words in message, (words, code, message)
    ours = {number: message for number, (code, _, (_, message)) in enumerate(cases) if code == 2}
    places = {tmp_path: "FOLDER", home: "HOME"}
    assert_messages("inspection", {f"case {number}": message for number, message in ours.items()}, places)
    assert not out.exists() and not list(tmp_path.glob(".out*"))
