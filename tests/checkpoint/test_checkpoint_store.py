"""Checkpoints: complete or absent, readable in any pieces, never silently wrong."""

import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from vitscale.checkpoint import CheckpointReader, CheckpointStore, Fragment, Index, step_folder
from vitscale.errors import CheckpointError

SHAPES = {"a.weight": [7, 13], "b": [5], "c": [1, 1, 33]}
KINDS = ["master", "exp_avg"]


def values(step: int) -> dict[tuple[str, str], torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    sizes = {name: int(torch.tensor(shape).prod()) for name, shape in SHAPES.items()}
    return {(kind, name): torch.randn(size, generator=generator) for kind in KINDS for name, size in sizes.items()}


def fragments(step: int, cuts: tuple[int, ...]) -> list[Fragment]:
    """Everything, each parameter cut at the same places."""
    whole = values(step)
    found = []
    for name in SHAPES:
        length = len(whole["master", name])
        edges = [0, *(cut for cut in cuts if cut < length), length]
        for start, stop in itertools.pairwise(edges):
            found.append(Fragment(name, start, {kind: whole[kind, name][start:stop] for kind in KINDS}))
    return found


def index(step: int) -> Index:
    return Index(
        step=step, world_size=1, shapes=SHAPES, kinds=KINDS, optimizer_steps=step, recipe={}, data={}, versions={}
    )


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def save(store: CheckpointStore, step: int, cuts: tuple[int, ...] = ()) -> Path:
    """Save a checkpoint; returns its folder."""
    store.save(index(step), fragments(step, cuts))
    return Path(store.root) / step_folder(step)


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "flipped":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif how == "truncated":
        path.write_bytes(content[:-7])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()


def test_any_piece_can_be_read_whatever_the_cuts_were(store):
    save(store, 1, cuts=(3, 20, 21))
    reader = store.open(1)
    for (kind, name), whole in values(1).items():
        assert torch.equal(reader.parameter(name, kind), whole.view(SHAPES[name]))
        for start, stop in ((0, 1), (2, 5), (3, 5), (0, len(whole))):
            assert torch.equal(reader.read(kind, name, start, stop - start), whole[start:stop])


def test_the_files_are_plain_safetensors_with_the_decided_keys(store):
    folder = save(store, 12, cuts=(20,))
    assert folder.name == "step-00000012"
    with safe_open(folder / "rank-00000.safetensors", framework="pt") as file:
        assert set(file.keys()) == {
            f"{kind}/{place}" for kind in KINDS for place in ("a.weight@0", "a.weight@20", "b@0", "c@0", "c@20")
        }
    listed = json.loads((folder / "index.json").read_text())
    assert [entry["path"] for entry in listed["files"]] == ["rank-00000.safetensors"]
    assert listed["files"][0]["bytes"] == (folder / "rank-00000.safetensors").stat().st_size


@pytest.mark.parametrize("how", ["flipped", "truncated", "empty", "missing"])
@pytest.mark.parametrize("file", ["rank-00000.safetensors", "index.json"])
def test_damage_is_found_and_the_checkpoint_before_is_used(store, how, file):
    save(store, 1)
    newest = save(store, 2)
    damage(newest / file, how)
    said: list[str] = []
    reader = store.newest(said.append)
    assert reader is not None and reader.index.step == 1
    assert "step 2" in said[0] and file in said[0] and "step 1" in said[-1]


def test_without_a_readable_checkpoint_nothing_starts_over(store):
    for step in (1, 2):
        damage(save(store, step) / "rank-00000.safetensors", "flipped")
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints can be read"):
        store.newest(lambda message: None)


def test_no_checkpoint_at_all_is_none(store):
    assert store.newest(lambda message: None) is None


def test_saving_after_a_fallback_replaces_what_was_damaged(store):
    """The damaged ones are newer by number: they must not crowd out what the run goes on from."""
    for step in (10, 20, 30):
        folder = save(store, step)
        if step > 10:
            damage(folder / "rank-00000.safetensors", "flipped")
    assert store.newest(lambda message: None).index.step == 10
    save(store, 15)
    store.retain(keep=1, best=None)
    assert store.steps() == [15]
    assert sorted(path.name for path in Path(store.root).glob(".unusable-*")) == [
        ".unusable-step-00000020",
        ".unusable-step-00000030",
    ]
    assert store.newest(lambda message: None).index.step == 15


def test_fragments_must_cover_every_parameter_once(store):
    pieces = [fragment for fragment in fragments(1, cuts=(3,)) if (fragment.name, fragment.start) != ("b", 3)]
    store.save(index(1), pieces)
    folder = Path(store.root) / step_folder(1)
    with pytest.raises(CheckpointError, match=r"master/b should be covered exactly once from 0 to 5.*break off at 3"):
        CheckpointReader.of_folder(folder)


def test_another_model_is_refused_by_name(store):
    save(store, 1)
    with pytest.raises(CheckpointError, match=r"(?s)missing d.*unexpected c.*b has shape \[5\], the model's is \[6\]"):
        store.open(1).check_shapes({"a.weight": [7, 13], "b": [6], "d": [1]})


def test_the_newest_and_the_best_are_kept(store):
    for step in (1, 2, 3, 4, 5):
        save(store, step)
        store.retain(keep=2, best=2)
    assert store.steps() == [2, 4, 5]


def test_a_full_disk_leaves_the_older_checkpoint_alone(store):
    save(store, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))  # every file ends there, as on a disk that is full
    try:
        with pytest.raises(CheckpointError, match="saving step 2 failed; earlier checkpoints are untouched"):
            save(store, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.steps() == [1]
    assert store.newest(lambda message: None).index.step == 1


def test_what_is_no_index_is_said_to_be_none(store):
    folder = save(store, 1)
    whole = json.loads((folder / "index.json").read_text())
    for content, words in (
        ("[]", "schema_version"),
        ('{"schema_version": 9}', "is 9"),
        ("{", "cannot be"),
        ("[" * 100_000, "cannot be"),
        (json.dumps(whole | {"optimizer_steps": 7}), "damaged or was edited"),
    ):
        (folder / "index.json").write_text(content)
        with pytest.raises(CheckpointError, match=words):
            CheckpointReader.of_folder(folder)


SAVER = """
import sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_checkpoint_store import save
from vitscale.checkpoint import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]))
step = max(store.steps(), default=0)
print("ready", flush=True)
while True:
    step += 1
    save(store, step, cuts=(2,))
    store.retain(keep=3, best=None)
"""


def test_a_checkpoint_under_another_step_s_name_is_refused(store):
    folder = save(store, 3)
    shutil.copytree(folder, folder.with_name("step-00000009"))
    assert store.newest(lambda message: None).index.step == 3


def test_the_selection_is_amended_without_touching_the_rest(store):
    save(store, 3)
    store.amend(3, {"best": 0.5})
    reader = store.open(3)
    assert reader.index.selection == {"best": 0.5}
    assert torch.equal(reader.parameter("b"), values(3)["master", "b"])


def test_checkpoints_can_be_read_by_whom_their_folder_allows(store):
    folder = save(store, 3)
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert set(modes.values()) == {folder.stat().st_mode & 0o666}


@pytest.mark.parametrize("kills", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_a_process_killed_while_saving_leaves_complete_checkpoints_only(store, kills):
    """kill -9 at random moments of a process that does nothing but save."""
    random.seed(4)
    here = str(Path(__file__).parent)
    for _ in range(kills):
        process = subprocess.Popen([sys.executable, "-c", SAVER, store.root, here], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(0.2 + random.random() * 0.2)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert store.steps(), "nothing was saved before the kill"
        for step in store.steps():
            assert torch.equal(store.open(step).parameter("b"), values(step)["master", "b"])
