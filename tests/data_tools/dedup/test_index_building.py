"""Indexes that cannot be built, and what is left of one that was killed."""

import resource
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from datasets_on_disk import contents
from dedup_data import NAMES, index_of, source_of

from data_tools.dedup import building
from data_tools.dedup.building import build_index
from data_tools.dedup.index import FingerprintIndex
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.files.durable import durable_folder


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_place_that_is_taken_is_left_alone(tmp_path, photos):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    for out in (tmp_path / "out", tmp_path / "out" / "thesis.txt", tmp_path / "out" / "thesis.txt" / "below"):
        with pytest.raises(RecipeError, match="--out"):
            build_index([source_of(photos)], out, workers=1)
    with pytest.raises(RecipeError, match="s3://bucket/index"):
        build_index([source_of(photos)], "s3://bucket/index", workers=1)
    assert contents(tmp_path / "out") == {"thesis.txt": b"years of work"}
    assert names_in(tmp_path) == ["out"]


def test_an_empty_folder_may_be_used_and_so_may_a_link_to_one(inline, tmp_path, photos):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    index_of(tmp_path / "link", [source_of(photos, preset="exact")])
    assert (tmp_path / "link").is_symlink() and (tmp_path / "elsewhere" / "index.json").exists()


def test_two_test_sets_need_two_names(tmp_path, photos):
    with pytest.raises(RecipeError, match="'photos'"):
        build_index([source_of(photos), source_of(photos)], tmp_path / "index", workers=1)
    assert names_in(tmp_path) == []


def test_a_level_that_there_is_not(photos):
    for level in (-1, 4):
        with pytest.raises(RecipeError, match=rf"{level}\b.*\b3\b"):
            source_of(photos, level=level)


def test_a_test_set_without_images(inline, tmp_path, photos):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    with pytest.raises(DataError, match=r"texts\b.*\b1 file"):
        build_index([source_of(photos, "a", level=0), source_of(tmp_path / "texts")], tmp_path / "index", workers=1)
    assert names_in(tmp_path) == ["texts"]


@pytest.mark.parametrize("preset", [None, "photo"])
def test_an_image_that_cannot_be_read_ends_it(inline, tmp_path, photos, preset):
    folder = tmp_path / "photos"
    shutil.copytree(photos, folder)
    (folder / "gone.jpg").symlink_to("nowhere.jpg")
    with pytest.raises(DataError, match=r"'gone\.jpg'.*No such file"):
        build_index([source_of(folder, preset=preset)], tmp_path / "index", workers=1)
    assert names_in(tmp_path) == ["photos"]


def test_a_damaged_archive_ends_it(inline, tmp_path, photos):
    packed = tmp_path / "photos.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        for name in NAMES:
            archive.add(photos / name, name)
    packed.write_bytes(packed.read_bytes()[:-50_000])
    with pytest.raises(DataError, match=r"photos\.tar\.gz"):
        build_index([source_of(packed, preset="photo", level=0)], tmp_path / "index", workers=1)
    assert names_in(tmp_path) == ["photos.tar.gz"]


@pytest.mark.parametrize("piece", [256, 1])  # too large for the disk are the pieces; or what is made of them
def test_a_disk_that_refuses(inline, monkeypatch, tmp_path, photos, piece):
    monkeypatch.setattr(building, "_PIECE", piece)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        with pytest.raises(DataError, match="File too large"):
            build_index([source_of(photos, preset="exact")], tmp_path / "index", workers=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names_in(tmp_path) == []


def test_of_two_builds_of_one_index_the_second_is_refused_at_once(tmp_path, photos):
    with durable_folder(tmp_path / "index"), pytest.raises(RecipeError):
        build_index([source_of(photos)], tmp_path / "index", workers=1, told=lambda _: pytest.fail("it works in vain"))
    assert names_in(tmp_path / "index") == []


def test_a_killed_build_leaves_nothing_under_the_name(tmp_path, photos):
    out = tmp_path / "index"
    program = f"""
import os, signal, sys
from data_tools.dedup import building
from data_tools.sources import SourceOptions, open_source
source = open_source({str(photos)!r}, None, SourceOptions(unlabelled=True))
def hook(event, arguments):
    if event == "shutil.rmtree" and str(arguments[0]).endswith("/pieces"):  # all is written, and nothing has its name
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
building.build_index([building.TestSource("photos", "src", source, "photo", 0)], {str(out)!r}, workers=1)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    assert list(tmp_path.glob(".index.*.part/index/pieces/*.npz"))
    assert not out.exists()
    with pytest.raises(DataError, match=str(out)):
        FingerprintIndex(out)
