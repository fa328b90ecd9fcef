"""Checkpoints: complete or absent, readable in any pieces, never silently wrong."""

import hashlib
import json
import os
import random
import shutil
import subprocess
import textwrap
import tracemalloc
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch
from faulty_calls import run_with_fault
from messages import assert_messages
from safetensors.torch import save_file
from small_files import flip
from toy_checkpoint import KINDS, fragments, holds, index, save, shapes, unverified, values, with_checksum

from vitscale.ground.errors import CheckpointError
from vitscale.runs.checkpoint import CheckpointReader, CheckpointStore, Fragment, LocalDirectory, bytes_needed
from vitscale.runs.checkpoint.format import rank_file, write_rank_file
from vitscale.runs.checkpoint_index import FileEntry, index_text
from vitscale.runs.names import step_folder


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


DAMAGES = {
    "flipped": lambda path: flip(path, path.stat().st_size // 2),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 7),
    "empty": lambda path: os.truncate(path, 0),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("file", ["rank-00000.safetensors", "index.json"])
def test_damage_is_found_and_the_checkpoint_before_is_used(store, damage, file):
    save(store, 1)
    damage(save(store, 2) / file)
    said: list[str] = []
    reader = store.newest(said.append)
    assert reader is not None and reader.index.step == 1
    assert "step 2" in said[0] and file in said[0] and "step 1" in said[-1]


def test_without_a_readable_checkpoint_nothing_starts_over(store):
    for step in (1, 2):
        DAMAGES["flipped"](save(store, step) / "rank-00000.safetensors")
    with pytest.raises(CheckpointError, match=" 2 checkpoints"):
        store.newest(lambda message: None)


def test_no_checkpoint_at_all_is_none(store):
    assert store.newest(lambda message: None) is None


def test_saving_after_a_fallback_replaces_what_was_damaged(store):
    """The damaged ones are newer by number: they must not crowd out what the run goes on from."""
    for step in (10, 20, 30):
        folder = save(store, step)
        if step > 10:
            DAMAGES["flipped"](folder / "rank-00000.safetensors")
    assert store.newest(lambda message: None).index.step == 10
    save(store, 15)
    store.retain(keep=1, best=None)
    assert store.steps() == [15]
    assert sorted(path.name for path in Path(store.root).glob(".unusable-*")) == [
        ".unusable-step-00000020",
        ".unusable-step-00000030",
    ]
    assert store.newest(lambda message: None).index.step == 15


def test_fragments_must_cover_every_parameter_once_in_each_kind(store):
    pieces = [fragment for fragment in fragments(1, cuts=(3,)) if (fragment.name, fragment.start) != ("b", 3)]
    store.save(index(1), pieces)
    folder = Path(store.root) / step_folder(1)
    with pytest.raises(CheckpointError, match=r"master/b .* 0 to 5.* 3"):
        unverified(folder)
    store.save(replace(index(1), kinds=[*KINDS, "ema"]), fragments(1))
    with pytest.raises(CheckpointError, match=r"ema/a\.weight .* 0 to 91.* 0"):
        store.open(1)


def test_a_piece_that_no_file_can_hold_is_refused(store):
    folder = save(store, 1)
    save_file({f"master/b@{10**30}": torch.zeros(5)}, folder / "rank-00000.safetensors")
    with pytest.raises(CheckpointError, match=f"master/b@{10**30}"):
        unverified(folder)


def test_pieces_may_be_empty_and_lie_in_any_order_over_the_files(tmp_path):
    generator = random.Random(0)
    for ranks in (2, 7, 40):
        whole = torch.randn(91, generator=torch.Generator().manual_seed(ranks))
        edges = [0, *sorted(generator.choices(range(92), k=3 * ranks)), 91]  # some are equal
        pieces = [Fragment("a.weight", start, {"master": whole[start:stop]}) for start, stop in pairwise(edges)]
        empty = {piece.start: piece for piece in pieces if piece.tensors["master"].numel() == 0}
        pieces = [piece for piece in pieces if piece.tensors["master"].numel()]
        generator.shuffle(pieces)
        folder = tmp_path / str(ranks)
        folder.mkdir()
        of_ranks = [list(empty.values()), *(pieces[rank::ranks] for rank in range(ranks))]
        files = [write_rank_file(folder / rank_file(rank), own) for rank, own in enumerate(of_ranks)]
        of_all = replace(index(1), shapes={"a.weight": [7, 13]}, kinds=["master"], files=files)
        (folder / "index.json").write_text(index_text(of_all))
        reader = unverified(folder)
        for start, stop in combinations(range(92), 2):
            assert torch.equal(reader.read("master", "a.weight", start, stop - start), whole[start:stop])
        with pytest.raises(CheckpointError):
            reader.read("master", "a.weight", 90, 2)


def test_what_a_reader_keeps_grows_with_the_pieces_and_no_faster(tmp_path):
    """Every rank keeps the pieces of all: a million, if 1,024 ranks have saved ViT-H/14 under ZeRO 3."""
    kept = {}
    for ranks in (500, 2000):
        names = [rank_file(rank) for rank in range(ranks)]
        files = [FileEntry(name, 10**6, "") for name in names]
        of_all = replace(index(1), shapes={"a": [1000 * ranks]}, kinds=["master"], files=files)
        layouts = {name: {f"master/a@{1000 * rank}": 1000} for rank, name in enumerate(names)}
        tracemalloc.start()
        reader = CheckpointReader(LocalDirectory(tmp_path).files(1), of_all, layouts)
        kept[ranks] = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        del reader
    assert kept[2000] < 4.2 * kept[500] and kept[2000] < 64 * 2000


def test_another_model_is_refused_by_name(store):
    save(store, 1)
    with pytest.raises(CheckpointError, match=r"(?s) d.* c.*b .*\[5\].*\[6\]"):
        store.open(1).check_shapes({"a.weight": [7, 13], "b": [6], "d": [1]})


@pytest.mark.parametrize(
    ("best", "keep_every", "tail", "kept"),
    [(2, None, None, [2, 7, 8]), (None, 3, 5, [3, 5, 6, 7, 8]), (1, 4, 7, [1, 4, 7, 8])],
)
def test_the_newest_the_best_and_every_so_many_steps_are_kept(store, best, keep_every, tail, kept):
    for step in range(1, 9):
        save(store, step)
        store.retain(2, best, keep_every, tail)
    assert store.steps() == kept


def test_what_is_no_index_is_said_to_be_none(store):
    folder = save(store, 1)
    whole = json.loads((folder / "index.json").read_text())
    elsewhere = {**whole["files"][0], "path": "../rank-00000.safetensors"}
    endless = {**whole["files"][0], "bytes": 2**63}
    said = {}
    for cause, content, named in (
        ("a list", "[]", "schema_version"),
        ("a later version", '{"schema_version": 9}', "9"),
        ("half an object", "{", "index.json"),
        ("a thousand brackets", "[" * 100_000, "index.json"),
        ("another checksum", json.dumps(whole | {"optimizer_steps": 7}), "index.json"),
        ("a position before the step", json.dumps(with_checksum(whole | {"position": 0})), "position 0"),
        ("a file elsewhere", json.dumps(with_checksum(whole | {"files": [elsewhere]})), "../rank-00000.safetensors"),
        ("a file without end", json.dumps(with_checksum(whole | {"files": [endless]})), "files.0.bytes"),
    ):
        (folder / "index.json").write_text(content)
        with pytest.raises(CheckpointError) as caught:
            unverified(folder)
        said[cause] = str(caught.value)
        assert named in said[cause]
    del said["half an object"], said["a thousand brackets"]  # the words of Python's json
    assert_messages("checkpoint", said, {store.root: "CHECKPOINTS"})


def test_a_checkpoint_of_version_1_is_read(store):
    """Written without any code of ours, as the version was."""
    folder = Path(store.root) / "step-00000007"
    folder.mkdir(parents=True)
    file = folder / "rank-00000.safetensors"
    save_file({f"{kind}/{name}@0": value for (kind, name), value in values(7).items()}, file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    content = {
        **{"schema_version": 1, "step": 7, "world_size": 4, "shapes": shapes(), "kinds": KINDS, "optimizer_steps": 7},
        **{"recipe": {"seed": 3}, "data": {}, "versions": {}, "selection": {"best": 0.5}},
        "files": [{"path": file.name, "bytes": file.stat().st_size, "sha256": digest}],
    }
    (folder / "index.json").write_text(json.dumps(with_checksum(content)))
    reader = store.newest(print)
    assert holds(reader, 7) and reader.index.evaluated_kind == "master"
    assert (reader.index.position, reader.index.anomalies, reader.index.recipe) == (7, {}, {"seed": 3})
    store.amend(7, {"best": 0.75})
    assert holds(store.open(7), 7) and store.open(7).index.selection == {"best": 0.75}
    assert json.loads((folder / "index.json").read_text())["schema_version"] == 2


def test_what_was_skipped_is_part_of_the_checkpoint(store):
    skipped = replace(index(3), position=5, anomalies={"skipped": [[2, 4]], "count": 2})
    store.save(skipped, fragments(3))
    assert replace(store.open(3).index, files=[]) == skipped
    assert index(3).position == 3


def test_state_may_have_another_shape_than_its_parameter_or_not_be_there(store):
    """Factored second moments have a row and a column for a matrix, and a frozen parameter has none at all."""
    row, column, whole = torch.arange(7.0), torch.arange(13.0), values(4)
    pieces = [Fragment(name, 0, {"master": whole["master", name]}) for name in shapes()]
    pieces += [Fragment("a.weight", start, {"row": row[start : start + 4]}) for start in (0, 4)]
    pieces += [Fragment("a.weight", 0, {"column": column}), Fragment("b", 0, {"row": whole["exp_avg", "b"]})]
    factored = replace(
        index(4),
        kinds=["master", "row", "column"],
        state_shapes={"row": {"a.weight": [7], "c": None}, "column": {"a.weight": [13], "b": None, "c": None}},
    )
    store.save(factored, pieces)
    reader = store.open(4)
    assert replace(reader.index, files=[]) == factored
    assert torch.equal(reader.parameter("a.weight", "row"), row)
    assert torch.equal(reader.parameter("a.weight", "column"), column)
    assert torch.equal(reader.parameter("b", "row"), whole["exp_avg", "b"])
    assert torch.equal(reader.parameter("a.weight").flatten(), whole["master", "a.weight"])
    with pytest.raises(CheckpointError, match="row/c"):
        reader.parameter("c", "row")

    store.save(replace(factored, state_shapes=factored.state_shapes | {"row": {"a.weight": [8], "c": None}}), pieces)
    with pytest.raises(CheckpointError, match=r"row/a\.weight .* 0 to 8"):
        store.open(4)
    store.save(factored, [*pieces, Fragment("c", 0, {"row": whole["exp_avg", "c"]})])
    with pytest.raises(CheckpointError, match="row/c"):
        store.open(4)
    with pytest.raises(ValueError, match="shapes"):
        replace(factored, state_shapes={"master": {"c": None}})
    with pytest.raises(ValueError, match="twice"):
        replace(factored, kinds=[*factored.kinds, factored.kinds[0]])


def test_only_an_index_with_other_shapes_needs_the_version_that_has_them(store):
    """Other checkpoints can still be read by the vitscale before."""
    plain = json.loads((save(store, 1) / "index.json").read_text())
    assert plain["schema_version"] == 2 and "state_shapes" not in plain
    pieces = [Fragment(name, 0, {"master": value}) for (kind, name), value in values(2).items() if kind == "master"]
    store.save(replace(index(2), state_shapes={"exp_avg": dict.fromkeys(shapes())}), pieces)
    written = json.loads((Path(store.root) / step_folder(2) / "index.json").read_text())
    assert written["schema_version"] == 3 and written["state_shapes"] == {"exp_avg": dict.fromkeys(shapes())}


@pytest.mark.parametrize("scale", [1, 1000])
def test_the_size_of_a_checkpoint_is_known_before_it_is_written(store, scale):
    store.save(index(1, scale), fragments(1, scale=scale))
    size = (Path(store.root) / step_folder(1) / "rank-00000.safetensors").stat().st_size
    assert size <= bytes_needed(shapes(scale), KINDS) <= size + 1000


def test_what_was_being_deleted_is_deleted_by_the_next_save(store):
    for step in (1, 2):
        save(store, step)
    (Path(store.root) / step_folder(1)).rename(Path(store.root) / ".deleting-step-00000001")
    save(store, 3)
    assert {path.name for path in Path(store.root).iterdir()} == {"step-00000002", "step-00000003", "latest"}


def test_what_a_killed_process_left_is_removed_and_latest_names_the_newest(store):
    root = Path(store.root)
    folders = [save(store, step) for step in (1, 2)]
    (root / "latest").write_text("step-00000001\n")  # killed between the two renames
    left = [root / ".latest.01234567.part", *(folder / ".index.json.89abcdef.part" for folder in folders)]
    for path in left:
        path.touch()
    mine = folders[0] / "notes.part"
    mine.touch()
    LocalDirectory(root).tidy()
    assert not any(path.exists() for path in left) and mine.exists()
    assert (root / "latest").read_text() == "step-00000002\n"


FAILING = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from toy_checkpoint import save
from vitscale.runs.checkpoint import CheckpointStore
from vitscale.ground.errors import CheckpointError
try:
    save(CheckpointStore(Path(sys.argv[1])), 2)
except CheckpointError as error:
    print(error)
"""


def test_a_checkpoint_whose_name_is_not_on_the_disk_is_none(store):
    """The first flush of the folder of checkpoints is that of a checkpoint's final name."""
    save(store, 1)
    here = Path(__file__).parent
    assert "untouched" in run_with_fault("fsync:error=EIO:when=1", FAILING, store.root, here, path=Path(store.root))
    assert store.steps() == [1] and holds(store.open(1), 1)
    assert sorted(path.name for path in Path(store.root).iterdir()) == ["latest", step_folder(1)]
    assert run_with_fault("", FAILING, store.root, here) == "" and holds(store.open(2), 2)


def test_a_checkpoint_under_another_step_s_name_is_refused(store):
    folder = save(store, 3)
    shutil.copytree(folder, folder.with_name("step-00000009"))
    assert store.newest(lambda message: None).index.step == 3


def test_checkpoints_can_be_read_by_whom_their_folder_allows(store):
    folder = save(store, 3)
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert set(modes.values()) == {folder.stat().st_mode & 0o666}


def test_what_the_documentation_says_of_reading_without_vitscale(store):
    """Its commands, run as they stand there."""
    folder = save(store, 4, cuts=(3, 20))
    text = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text().partition("## Without vitscale")[2]
    command, code = (part for part in text.split("\n\n    ", 2)[1:])
    read: dict = {}
    exec(textwrap.dedent("    " + code), read)
    for name, shape in shapes().items():
        assert torch.equal(read["read"](folder, "exp_avg")[name], values(4)["exp_avg", name].view(shape))
    if shutil.which("jq") and shutil.which("sha256sum"):
        done = subprocess.run(["sh", "-c", command.splitlines()[0]], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout == "rank-00000.safetensors: OK\n"
