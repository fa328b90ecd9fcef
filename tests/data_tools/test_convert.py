import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from hashlib import sha256
from pathlib import Path

import google_crc32c
import pyarrow.parquet as pq
import pytest
from pictures import encoded, make_picture

from data_tools.convert import convert, read_classes
from data_tools.images import store_image
from vitscale.errors import DataError, RecipeError
from vitscale.shards import Manifest, ShardFile, file_digests


def contents(dataset: Path) -> dict[str, bytes]:
    """Every file of a dataset but its log, the one that may say when and where."""
    assert not [path for path in dataset.iterdir() if path.name.startswith(".")]
    return {path.name: path.read_bytes() for path in dataset.iterdir() if path.name != "convert.log.jsonl"}


def tar_of(folder: Path, path: Path, mode: str) -> Path:
    with tarfile.open(path, mode) as archive:
        archive.add(folder, "train")
    return path


@pytest.fixture(scope="module")
def dataset(image_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("dataset") / "train"
    _, totals = convert(image_folder, out, shard_samples=8, shuffle_seed=5, workers=2)
    assert (totals.samples, totals.passed_through, totals.transcoded, totals.rejected) == (22, 20, 2, 0)
    assert totals.ignored == {"hidden": 1, "no image suffix": 1}
    return out


def test_every_image_is_stored_once_with_its_label(dataset, image_folder):
    manifest = Manifest.load(dataset)
    assert manifest.class_names == ("cat", "dog", "owl")
    assert (manifest.num_samples, manifest.num_rejected, manifest.shuffle_seed) == (22, 0, 5)
    assert [(shard.samples, shard.first_uid) for shard in manifest.shards] == [(8, 0), (8, 8), (6, 16)]
    seen = {}
    for i, entry in enumerate(manifest.shards):
        assert file_digests(manifest.shard_path(i)) == (entry.bytes, entry.sha256, entry.xxh3_128)
        rows = pq.read_table(dataset / f"shard-{i:05d}.idx.parquet").to_pylist()
        with ShardFile(manifest.shard_path(i), entry.bytes) as shard:
            assert shard.uid.tolist() == list(range(entry.first_uid, entry.first_uid + entry.samples))
            for slot, row in enumerate(rows):
                stored = shard.read(slot)
                assert stored == store_image((image_folder / row["key"]).read_bytes()).jpeg
                assert shard.crc[slot] == google_crc32c.value(stored) == row["crc32c"]
                assert (row["uid"], row["label"], row["size"]) == (shard.uid[slot], shard.label[slot], len(stored))
                assert (row["height"], row["width"]) == (shard.height[slot], shard.width[slot])
                assert manifest.class_names[row["label"]] == row["key"].split("/")[0]
                assert row["sha256"] == sha256((image_folder / row["key"]).read_bytes()).digest()
                seen[row["key"]] = row["passed_through"]
    assert len(seen) == 22
    assert sorted(key for key, passed in seen.items() if not passed) == ["dog/turned.JPG", "owl/alpha.png"]


def test_the_order_is_shuffled(dataset):
    labels = [
        label for path in sorted(dataset.glob("*.idx.parquet")) for label in pq.read_table(path)["label"].to_pylist()
    ]
    assert labels != sorted(labels)


@pytest.mark.parametrize("mode", ["w", "w:xz"])
def test_bytes_depend_neither_on_workers_nor_on_the_kind_of_source(dataset, image_folder, tmp_path, mode):
    name = "images.tar.xz" if mode == "w:xz" else "images.tar"
    source = tar_of(image_folder, tmp_path / name, mode)
    convert(source, tmp_path / "out", shard_samples=8, shuffle_seed=5, workers=1)
    assert contents(tmp_path / "out") == contents(dataset)


def test_rejects_are_counted_and_listed(tmp_path, photos):
    source = tmp_path / "images"
    for i in range(12):
        path = source / "cat" / f"{i:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        # With this seed the first shard of two has nothing but rejects: it is left out.
        path.write_bytes(photos[i][: 200 if i % 3 else None])
    keys = sorted(path.name for path in source.rglob("*.jpg"))
    assert len(keys) == 12
    with pytest.raises(DataError, match=r"8 of 12 images \(66\.67%\) cannot be stored; --max-reject-rate 0\.5"):
        convert(source, tmp_path / "out", shard_samples=2, max_reject_rate=0.5, workers=1)
    assert not (tmp_path / "out" / "manifest.json").exists()
    manifest, totals = convert(source, tmp_path / "out", shard_samples=2, max_reject_rate=0.7, workers=1)
    assert manifest.num_samples == totals.samples == 4 and manifest.num_rejected == totals.rejected == 8
    assert 1 <= totals.shards <= 4
    rejects = pq.read_table(tmp_path / "out" / "rejects.parquet").to_pylist()
    assert len(rejects) == 8 and all("truncated" in row["reason"].lower() for row in rejects)
    for i, shard in enumerate(manifest.shards):  # uids keep their gaps
        with ShardFile(manifest.shard_path(i)) as opened:
            plan = int(shard.path.removeprefix("shard-").removesuffix(".beton"))
            assert all(uid // 2 == plan for uid in opened.uid) and opened.uid[0] == shard.first_uid


def test_nothing_but_rejects(tmp_path):
    (tmp_path / "images" / "cat").mkdir(parents=True)
    (tmp_path / "images" / "cat" / "1.jpg").write_bytes(b"")
    with pytest.raises(DataError, match=r"1 of 1 images .*\n  'cat/1.jpg': empty file"):
        convert(tmp_path / "images", tmp_path / "out", max_reject_rate=1.0, workers=1)


def test_class_lists(dataset, tmp_path, image_folder):
    (tmp_path / "classes.txt").write_text("owl\ndog\n\nheron\ncat\n")
    manifest, _ = convert(image_folder, tmp_path / "out", classes=tmp_path / "classes.txt", workers=1)
    assert manifest.class_names == ("owl", "dog", "heron", "cat")
    rows = pq.read_table(tmp_path / "out" / "shard-00000.idx.parquet").to_pylist()
    assert all(manifest.class_names[row["label"]] == row["key"].split("/")[0] for row in rows)
    assert read_classes(dataset) == read_classes(dataset / "manifest.json") == ("cat", "dog", "owl")
    for content, message in (("a\nb\na\n", "names twice: 'a'"), ("\n", "no class names"), (b"\xff\xfe", "UTF-8")):
        (tmp_path / "bad.txt").write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(RecipeError, match=message):
            read_classes(tmp_path / "bad.txt")
    with pytest.raises(RecipeError, match="No such file"):
        read_classes(tmp_path / "absent.txt")


def test_outputs_that_are_refused(dataset, image_folder, tmp_path):
    before = contents(dataset)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("")
    (tmp_path / "foreign" / "shard-00000.beton").write_text("from elsewhere: there is no log of ours")
    (tmp_path / "file").write_text("")
    for out, message in (
        (dataset, "already holds a dataset"),
        (tmp_path / "foreign", r"2 other files: 'shard-00000.beton', 'thesis.tex'"),
        (tmp_path / "file", "is a file"),
        (image_folder / "out", "inside of SRC"),
        (Path("/proc/nowhere"), "cannot be written"),
    ):
        with pytest.raises(RecipeError, match=message):
            convert(image_folder, out, workers=1)
    assert contents(dataset) == before


def test_real_photos(data_root, tmp_path):
    """signdigits: 1,450 real photos, two of them turned."""
    manifest, totals = convert(data_root / "signdigits" / "train.tar.xz", tmp_path / "out", workers=2)
    assert (totals.samples, totals.rejected, totals.transcoded) == (1450, 0, 2)
    assert manifest.class_names == tuple("0123456789")


# ------------------------------------------------------------------------------------------------------- as a command


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "data_tools.convert", *map(str, arguments)]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60)


def test_command(image_folder, dataset, tmp_path):
    done = run(image_folder, tmp_path / "out", "--shard-samples", 8, "--shuffle-seed", 5, "--workers", 1)
    assert (done.returncode, done.stderr) == (0, "")
    for line in ("22 images of 3 classes", "passed through", "1 hidden, 1 no image suffix", "images/s"):
        assert line in done.stdout
    assert contents(tmp_path / "out") == contents(dataset)
    events = [json.loads(line)["event"] for line in (tmp_path / "out" / "convert.log.jsonl").read_text().splitlines()]
    assert events == ["start", "shard", "shard", "shard", "converted"]

    again = run(image_folder, tmp_path / "out")
    assert again.returncode == 2 and again.stderr.startswith("error: OUT") and again.stderr.count("\n") == 1


def test_command_reports_rejects(tmp_path, photos):
    for i in range(10):
        path = tmp_path / "images" / "cat" / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photos[i] if i else b"[red]no image[/red]")
    done = run(tmp_path / "images", tmp_path / "out", "--workers", 1)
    assert done.returncode == 3
    assert "1 of 10 images (10.00%)" in done.stderr and "'cat/0.jpg': not an image" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "out" / "manifest.json").exists()


def workers_of(process: subprocess.Popen) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.parametrize("what", ["worker killed", "interrupted"])
def test_command_never_hangs(tmp_path, what):
    source = tmp_path / "images" / "cat"
    source.mkdir(parents=True)
    big = encoded(make_picture(0, 1500, 1500), "PNG", compress_level=1)
    for i in range(60):  # some seconds of work
        (source / f"{i}.png").write_bytes(big)
    process = subprocess.Popen(
        command(source.parent, tmp_path / "out", "--shard-samples", 30),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 30
    while not list((tmp_path / "out").glob(".shard-*.part")) and time.monotonic() < deadline:
        time.sleep(0.02)
    workers = workers_of(process)
    if what == "worker killed":
        os.kill(workers[0], signal.SIGKILL)
    else:
        os.killpg(process.pid, signal.SIGINT)
    _, message = process.communicate(timeout=20)
    expected = {"worker killed": (3, "a worker died"), "interrupted": (130, "interrupted")}[what]
    assert process.returncode == expected[0] and expected[1] in message and "Traceback" not in message
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["convert.log.jsonl"]
    assert not [worker for worker in workers if Path(f"/proc/{worker}").exists()]
