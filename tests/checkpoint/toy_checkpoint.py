"""Checkpoints of a few numbers, or of many: what a step's state is, and whether it is what was read."""

import hashlib
import itertools
import json
import math
from pathlib import Path

import torch

from vitscale.runs.checkpoint import CheckpointIndex, CheckpointReader, CheckpointStore, Fragment
from vitscale.runs.checkpoint.directory import LocalFiles
from vitscale.runs.checkpoint.format import read_layout
from vitscale.runs.checkpoint_index import read_index
from vitscale.runs.names import step_folder

KINDS = ["master", "exp_avg"]


def shapes(scale: int = 1) -> dict[str, list[int]]:
    return {"a.weight": [7 * scale, 13], "b": [5], "c": [1, 1, 33]}


def values(step: int, scale: int = 1) -> dict[tuple[str, str], torch.Tensor]:
    """The flattened parameters of a step, by kind and name."""
    generator = torch.Generator().manual_seed(step)
    sizes = {name: math.prod(shape) for name, shape in shapes(scale).items()}
    return {(kind, name): torch.randn(size, generator=generator) for kind in KINDS for name, size in sizes.items()}


def unverified(folder: Path) -> CheckpointReader:
    """A reader of the checkpoint in a folder, whose files are not verified. Raises `CheckpointError`."""
    index, files = read_index(folder), LocalFiles(folder)
    return CheckpointReader(files, index, {entry.path: read_layout(files.path(entry)) for entry in index.files})


def fragments(
    step: int, cuts: tuple[int, ...] = (), *, scale: int = 1, rank: int = 0, ranks: int = 1
) -> list[Fragment]:
    """What a rank owns of everything, each parameter cut at the same places."""
    whole = values(step, scale)
    found = []
    for name in shapes(scale):
        length = len(whole["master", name])
        edges = [0, *(cut for cut in cuts if cut < length), length]
        for start, stop in itertools.pairwise(edges):
            found.append(Fragment(name, start, {kind: whole[kind, name][start:stop] for kind in KINDS}))
    return found[rank::ranks]


def index(step: int, scale: int = 1) -> CheckpointIndex:
    return CheckpointIndex(step, 1, shapes(scale), KINDS, optimizer_steps=step, recipe={}, data={}, versions={})


def save(store: CheckpointStore, step: int, cuts: tuple[int, ...] = ()) -> Path:
    """Save a checkpoint; returns its folder."""
    store.save(index(step), fragments(step, cuts))
    return Path(store.root) / step_folder(step)


def holds(reader: CheckpointReader, step: int, scale: int = 1) -> bool:
    """Whether a checkpoint is that of a step, bit for bit."""
    return reader.index.step == step and all(
        torch.equal(reader.parameter(name, kind).flatten(), whole)
        for (kind, name), whole in values(step, scale).items()
    )


def with_checksum(content: dict) -> dict:
    """An index with the checksum that belongs to it."""
    content = {key: value for key, value in content.items() if key != "checksum"}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return content | {"checksum": hashlib.sha256(canonical.encode()).hexdigest()}
