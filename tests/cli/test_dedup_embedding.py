"""`vitscale dedup --embedding` and `vitscale-convert --embedding`: models of every source, one worker and two."""

import hashlib
import json
import pickle
import signal
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from commands import command as ended
from dedup_data import build_here, make_photo, unevenly_lit, write_photos
from messages import refusal
from models.weights.exported import NAMES, TINY, described, finished_run, valued, write
from typer.testing import CliRunner

from data_tools.conversion import convert
from data_tools.dedup.against import open_matcher
from data_tools.dedup.embedding import whitened
from data_tools.dedup.index import FingerprintIndex
from data_tools.request import Request
from data_tools.sources import SourceOptions
from vitscale.cli.convert import app as convert_app
from vitscale.data.shards import Manifest
from vitscale.data.shards.provenance import DECISIONS, DECISIONS_NAME, read_table
from vitscale.evaluation.embedding import Embedder
from vitscale.evaluation.features import extract_features
from vitscale.evaluation.finished import FinishedModel, OfWeights
from vitscale.ground.errors import DataError

DATA = "memory://own-model"  # for this process, which then needs no workers
SETTINGS = ("--preset", "photo", "--level", 0, "--cosine", 0.5)


def command(*arguments: object) -> tuple[int, str]:
    return ended(*arguments).answer


@pytest.fixture(autouse=True)
def process_as_before():
    threads, on_end = torch.get_num_threads(), signal.getsignal(signal.SIGTERM)
    yield
    torch.set_num_threads(threads)
    signal.signal(signal.SIGTERM, on_end)
    open_matcher.cache_clear()


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A model as a run and in three formats, a test set, and training images: one is a test image in another light."""
    root = tmp_path_factory.mktemp("own-model")
    description = described(TINY, 64, len(NAMES), NAMES)
    model = valued(description)
    finished_run(root / "run", model, TINY | {"head": "linear"}, precision="fp32")
    for form in ("timm", "hf", "safetensors"):
        write(model, description, form, root)
    write(valued(description, seed=1), description, "npz", root)
    write_photos(root / "tests", ["a.jpg", "b.jpg", "c.jpg", "d.jpg"])
    write_photos(root / "train", [f"{i}.jpg" for i in range(3)], seed=100)
    unevenly_lit(make_photo(0)).save(root / "train" / "shaded.jpg", quality=95)
    convert(Request(str(root / "train"), source=SourceOptions(unlabelled=True)), f"{DATA}/train")
    fsspec.filesystem("memory").get(f"{DATA}/train/", f"{root / 'data'}/", recursive=True)
    return root


@pytest.fixture
def inline(monkeypatch) -> None:
    build_here(monkeypatch)


def provenance(dataset: str, folder: Path) -> list[dict]:
    """Rows of the only shard of a dataset at a URL."""
    fsspec.filesystem("memory").get(f"{dataset}/shard-00000.idx.parquet", str(folder / "table.parquet"))
    return pq.read_table(folder / "table.parquet", columns=["uid", "key"]).to_pylist()


def index(place: Path, out: Path, source: str, *options: object) -> FingerprintIndex:
    code, text = command(
        *("dedup", "index", place / "tests", "--out", out, "--embedding", place / source), *SETTINGS, *options
    )
    assert (code, "or cosine 0.5" in " ".join(text.split())) == (0, True), text
    return FingerprintIndex(out)


@pytest.mark.parametrize("source", ["run", "safetensors.safetensors", "hf", "timm.safetensors"])
def test_vectors_are_the_features_that_evaluation_sees(place, inline, tmp_path, source):
    """Of the loader of `vitscale features`, over the test set as a converted dataset."""
    url, recipe = f"{DATA}/tests-{source}", place / "run" / "recipe.yaml"
    convert(Request(str(place / "tests"), source=SourceOptions(unlabelled=True)), url)
    names_itself = source in ("run", "safetensors.safetensors")
    made = index(place, tmp_path / "index", source, *([] if names_itself else ["--embedding-model", recipe]))
    model = FinishedModel(place / source, weights=OfWeights(model=None if names_itself else TINY))
    found = extract_features(model.loader(model.dataset(url)), model.predict)
    keys = {row["uid"]: row["key"] for row in provenance(url, tmp_path)}
    vectors = (found.features / found.features.norm(dim=1, keepdim=True)).numpy()
    rows = [made.keys.to_pylist().index(keys[uid]) for uid in found.uids.tolist()]
    assert made.embedding.dimensions == TINY["width"] and sorted(rows) == list(range(len(vectors)))
    np.testing.assert_allclose(made.whitening[0], vectors.mean(0), atol=1e-5)
    np.testing.assert_allclose(made.embeddings[rows], whitened(vectors, made.whitening), atol=1e-4)


@pytest.mark.slow  # four workers load torch and what goes with it
def test_one_worker_and_two_write_the_same(place, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        build_here(patch)
        index(place, tmp_path / "here", "run")
    index(place, tmp_path / "two", "run", "--workers", 2)
    digests = [
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / name).iterdir()}
        for name in ("here", "two")
    ]
    assert digests[0] == digests[1]
    for name, dataset in (("found-here", f"{DATA}/train"), ("found-two", place / "data")):
        code, text = command(
            *("dedup", "find", dataset, tmp_path / "here", "--out", tmp_path / name),
            *("--embedding", place / "run", "--workers", 2, "--json"),
        )
        assert code == 0 and json.loads(text)["removed"] == 1
    here, two = (tmp_path / name / DECISIONS_NAME for name in ("found-here", "found-two"))
    assert here.read_bytes() == two.read_bytes()
    (row,) = [row for row in read_table(two, DECISIONS).to_pylist() if row["removed"]]
    assert (row["train_key"], row["test_key"], row["tier"]) == ("shaded.jpg", "a.jpg", "embedding")


def test_conversion_leaves_out_what_the_model_finds(place, inline, tmp_path):
    made = index(place, tmp_path / "index", "run")
    against = ("--unlabelled", "--dedup-against", str(made.folder))
    arguments = (str(place / "train"), f"{DATA}/kept", *against, "--embedding", str(place / "run"))
    done = CliRunner().invoke(convert_app, arguments)
    assert done.exit_code == 0 and Manifest.load(f"{DATA}/kept").num_removed == 1, done.output
    refused = CliRunner().invoke(convert_app, [str(place / "train"), str(tmp_path / "out"), *against])
    assert refused.exit_code == 2 and "--embedding RUN|WEIGHTS" in " ".join(refused.stderr.split())
    assert not (tmp_path / "out").exists()


def test_an_index_of_other_weights_is_refused(place, inline, tmp_path):
    made = index(place, tmp_path / "index", "run")
    of_recipe = ("--embedding-model", place / "run" / "recipe.yaml")
    for options in ((), ("--embedding", place / "npz.npz", *of_recipe)):
        code, text = command("dedup", "find", place / "data", made.folder, "--out", tmp_path / "found", *options)
        assert code == 2 and "--embedding" in text and not (tmp_path / "found").exists()


def test_weights_that_change_while_a_command_runs_are_noticed(place):
    embedder = Embedder.of(place / "run")
    changed = replace(embedder, sha256="0" * 64)
    pixels = np.asarray(make_photo(0))
    assert embedder(pixels).shape == (TINY["width"],)
    with refusal(DataError, "dedup", "weights that change", {place: "PLACE"}):
        changed(pixels)
    assert hash(pickle.loads(pickle.dumps(embedder))) == hash(embedder)


def test_mistakes(place, inline, tmp_path):
    arguments = ("dedup", "index", place / "tests", "--out", tmp_path / "index")
    (tmp_path / "pickle.bin").write_bytes(pickle.dumps(Path))
    torch.save({"weight": torch.zeros(3)}, tmp_path / "torch.pt")
    (tmp_path / "text.safetensors").write_text("a model, some day")
    torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)).save(str(tmp_path / "script.pt"))
    recipe, timm = place / "run" / "recipe.yaml", place / "timm.safetensors"
    for options, exit_code, words in (
        (("--embedding", tmp_path / "no"), 2, "no such directory"),
        (("--embedding", place / "tests"), 2, "recipe.yaml"),
        (("--embedding", tmp_path / "pickle.bin", "--embedding-model", recipe), None, "pickle.bin"),
        (("--embedding", tmp_path / "torch.pt", "--embedding-model", recipe), None, "torch.pt"),
        (("--embedding", tmp_path / "script.pt", "--embedding-model", recipe), None, "script.pt"),
        (("--embedding", tmp_path / "text.safetensors", "--embedding-model", recipe), None, "text.safetensors"),
        (("--embedding", tmp_path / "torch.pt"), None, "torch.pt"),
        (("--embedding", timm, "--embedding-model", "ViT-B/16"), None, "timm.safetensors"),
        (("--embedding", timm, "--embedding-model", recipe, "--embedding-size", 7), 2, "patch"),
        (("--embedding", place / "run", "--embedding-size", 64), 2, "--embedding-size: "),
        (("--embedding-model", "ViT-B/16"), 2, "--embedding-model: "),
        (("--cosine", 0.5, "--preset", "photo"), 2, "--cosine: "),
    ):
        code, text = command(*arguments, *options)
        assert code in ((2, 3, 4) if exit_code is None else (exit_code,)), (options, code, text)
        assert words in text, (options, text)
    assert not (tmp_path / "index").exists()
