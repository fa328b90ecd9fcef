"""What runs have left in their directories, for tests that compare them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ranks import STEPS

from vitscale.about.checks.seen import History, Sighting
from vitscale.data.shards import Manifest
from vitscale.data.shards.opening import open_shard
from vitscale.runs.checkpoint import CheckpointReader, CheckpointStore
from vitscale.runs.checkpoint.format import parse_key


def metrics(root: Path, name: str) -> list[dict[str, Any]]:
    """The lines of training, one a step."""
    path = root / "runs" / name / "metrics.jsonl"
    assert path.exists(), error_of(root, name)
    return [line for line in map(json.loads, path.read_text().splitlines()) if "loss" in line]


def column(root: Path, name: str, key: str) -> list[Any]:
    return [line[key] for line in metrics(root, name)]


def evaluations(root: Path, name: str) -> list[dict[str, Any]]:
    """The lines of evaluations, one each, without their times."""
    lines = (root / "runs" / name / "metrics.jsonl").read_text().splitlines()
    rows = [line for line in map(json.loads, lines) if "loss" not in line]
    return [{key: value for key, value in row.items() if key != "time"} for row in rows]


def store(root: Path, name: str) -> CheckpointStore:
    return CheckpointStore(root / "runs" / name / "checkpoints")


def checkpoint(root: Path, name: str, step: int = STEPS) -> CheckpointReader:
    return store(root, name).open(step)


def everything(reader: CheckpointReader) -> dict[str, torch.Tensor]:
    """All masters, moments and averages, whole."""
    index = reader.index
    return {
        f"{kind}/{name}": reader.parameter(name, kind)
        for kind in index.kinds
        for name in index.shapes
        if index.shape_of(kind, name) is not None
    }


def equal(one: CheckpointReader, other: CheckpointReader) -> bool:
    """To the last bit."""
    a, b = everything(one), everything(other)
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def assert_same_run(root: Path, one: str, other: str, step: int = STEPS) -> None:
    """See that two runs have taken the same steps, each once, and ended with the same state, all to the last bit."""
    assert column(root, one, "step") == list(range(1, step + 1))
    for key in ("step", "loss", "lr", "grad_norm", "batch_digest"):
        assert column(root, one, key) == column(root, other, key), key
    assert equal(checkpoint(root, one, step), checkpoint(root, other, step))


def error_of(root: Path, name: str) -> dict[str, Any]:
    """What ended a run: kind, code, message, and the steps that were saved then."""
    return json.loads((root / "runs" / f"{name}.error").read_text())


def printed(root: Path, name: str) -> str:
    """What rank 0 has said during a run."""
    return (root / "runs" / f"{name}.out").read_text()


def uids_of(manifest: Manifest) -> list[int]:
    """Of all samples of a dataset, in the order of its shards."""
    found = []
    for index in range(len(manifest.shards)):
        with open_shard(manifest, index) as shard:
            found += shard.file.uid[shard.slots].tolist()
    return found


def seen_again(history: History, uids: list[int]) -> tuple[dict[int | None, str], list[tuple[int, Sighting]]]:
    """By step the digest of the pixels that a run has seen of these samples, made again; (uid, sighting) of each."""
    digests, found = dict[int | None, int](), []
    for uid, sightings in zip(uids, history.sightings(history.find(uids)), strict=True):
        for sighting in sightings:
            batch = history.pixels(sighting)
            assert batch.uids.tolist() == [uid]
            digests[sighting.step] = (digests.get(sighting.step, 0) + batch.digest) % 2**64
            found.append((uid, sighting))
    return {step: f"{digest:016x}" for step, digest in digests.items()}, found


def stored_bytes(history: History, uid: int) -> bytes:
    """The file of a sample that a run has trained on, as it was converted."""
    (place,) = history.find([uid])
    with open_shard(history.manifest, place.at[0][0]) as shard:
        return bytes(shard.file.read(int(np.flatnonzero(shard.file.uid == uid)[0])))


def put_together(files: Iterable[Path]) -> dict[tuple[str, str], np.ndarray]:
    """(kind, name) -> what the ranks own, a .npz each; every element of every tensor must be there exactly once."""
    pieces: dict[tuple[str, str], dict[int, np.ndarray]] = {}
    for file in files:
        for key, values in np.load(file).items():
            kind, name, begin = parse_key(key)
            assert begin not in pieces.setdefault((kind, name), {})
            pieces[kind, name][begin] = values
    for of_one in pieces.values():
        end = 0
        for begin in sorted(of_one):
            assert begin == end
            end += of_one[begin].size
    return {key: np.concatenate([of_one[begin] for begin in sorted(of_one)]) for key, of_one in pieces.items()}
