import tarfile
from hashlib import sha256
from pathlib import Path

import google_crc32c
import pyarrow.parquet as pq
import pytest
import xxhash
from datasets_on_disk import contents
from messages import refusal
from pictures import encoded, make_picture
from processes import run_python
from small_files import pack, write_files, write_tar

from data_tools.classes import read_classes
from data_tools.conversion import convert
from data_tools.machine import Machine
from data_tools.request import Request
from vitscale.data.shards import Manifest, ShardFile
from vitscale.data.shards.images import store_image
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.files.digests import file_digests
from vitscale.ground.images import decode

ONE = Machine(workers=1)


@pytest.fixture(scope="module")
def dataset(image_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("dataset") / "train"
    totals = convert(Request(str(image_folder), shard_samples=8, shuffle_seed=5), out, Machine(workers=2)).totals
    assert (totals.samples, totals.passed_through, totals.transcoded, totals.rejected) == (22, 20, 2, 0)
    assert totals.ignored == {"hidden": 1, "no image suffix": 1}
    return out


def test_every_image_is_stored_once_with_its_label(dataset, image_folder):
    manifest = Manifest.load(dataset)
    assert str(image_folder) not in (dataset / "manifest.json").read_text()
    expected = {"image_suffixes", "jpeg_quality", "jpeg_subsampling", "pass_through", "shard_samples"}
    assert manifest.options.keys() == expected and manifest.class_names == ("cat", "dog", "owl")
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
                assert (row["uid"], row["labels"], row["size"]) == (shard.uid[slot], [shard.label[slot]], len(stored))
                assert (row["height"], row["width"]) == (shard.height[slot], shard.width[slot])
                assert manifest.class_names[row["labels"][0]] == row["key"].split("/")[0]
                assert row["pdq_quality"] > 50 and len(set(row["pdq"])) > 8 and row["pdq_trimmed"] is None
                if row["passed_through"]:
                    pixels = decode(stored, row["height"], row["width"])[1]
                    assert row["pixels"] == xxhash.xxh3_64_intdigest(pixels.tobytes(), row["width"])
                assert row["sha256"] == sha256((image_folder / row["key"]).read_bytes()).digest()
                seen[row["key"]] = row["passed_through"]
    assert len(seen) == 22
    assert sorted(key for key, passed in seen.items() if not passed) == ["dog/turned.JPG", "owl/alpha.png"]


@pytest.mark.parametrize("name", ["images.tar", "images.tar.xz"])
def test_bytes_depend_neither_on_workers_nor_on_the_kind_of_source(here, dataset, image_folder, tmp_path, name):
    source = pack(image_folder, tmp_path / name)
    convert(Request(str(source), shard_samples=8, shuffle_seed=5), tmp_path / "out", ONE)
    assert contents(tmp_path / "out") == contents(dataset)


def test_rejects_are_counted_and_listed(here, tmp_path, photos):
    # With this seed the first shard of two has nothing but rejects: it is left out.
    images = ((f"cat/{i:02d}.jpg", photos[i][: 200 if i % 3 else None]) for i in range(12))
    source = write_files(tmp_path / "images", *images)
    with pytest.raises(DataError, match=r"\b8 of 12\b.*66\.67%.*--max-reject-rate 0\.6"):
        convert(Request(str(source), shard_samples=2), tmp_path / "out", Machine(workers=1, max_reject_rate=0.6))
    assert not (tmp_path / "out" / "manifest.json").exists()
    outcome = convert(Request(str(source), shard_samples=2), tmp_path / "out", Machine(workers=1, max_reject_rate=0.7))
    manifest, totals = outcome.manifests[""], outcome.totals
    assert manifest.num_samples == totals.samples == 4 and manifest.num_rejected == totals.rejected == 8
    assert 1 <= totals.shards <= 4
    rejects = pq.read_table(tmp_path / "out" / "rejects.parquet").to_pylist()
    assert len(rejects) == 8 and all("truncated" in row["reason"].lower() for row in rejects)
    for i, shard in enumerate(manifest.shards):  # uids keep their gaps
        with ShardFile(manifest.shard_path(i)) as opened:
            plan = int(shard.path.removeprefix("shard-").removesuffix(".beton"))
            assert all(uid // 2 == plan for uid in opened.uid) and opened.uid[0] == shard.first_uid


@pytest.mark.parametrize("kind", ["folder", "list", "tar"])
def test_a_file_that_is_too_large_is_rejected_unread(here, tmp_path, photos, kind):
    """A hole of 1 TiB: more than any machine holds."""
    source = write_files(tmp_path / "images", ("cat/1.jpg", photos[0]))
    images = source / "cat"
    if kind == "tar":
        source = tmp_path / "images.tar"
        large = tarfile.TarInfo("cat/x.jpg")
        large.size = 1 << 40
        with tarfile.open(source, "w", format=tarfile.GNU_FORMAT) as archive:
            archive.add(images / "1.jpg", "cat/1.jpg")
            archive.fileobj.write(large.tobuf(tarfile.GNU_FORMAT))
            end = archive.fileobj.tell() + large.size
        with source.open("r+b") as file:
            file.truncate(end + 2 * tarfile.BLOCKSIZE)
    else:
        with (images / "x.jpg").open("wb") as file:
            file.truncate(1 << 40)
    if kind == "list":
        source = tmp_path / "list.csv"
        source.write_text("path,label\nimages/cat/1.jpg,cat\nimages/cat/x.jpg,cat\n")
    outcome = convert(Request(str(source)), tmp_path / "out", Machine(workers=1, max_reject_rate=0.5))
    (reject,) = pq.read_table(tmp_path / "out" / "rejects.parquet").to_pylist()
    assert outcome.totals.samples == 1 and f"{1 << 40:,} bytes" in reject["reason"]


def test_nothing_but_rejects(here, tmp_path):
    source = write_files(tmp_path / "images", ("cat/1.jpg", b""))
    with pytest.raises(DataError, match=r"\b1 of 1\b.*\n.*'cat/1\.jpg'"):
        convert(Request(str(source)), tmp_path / "out", Machine(workers=1, max_reject_rate=1.0))


def test_class_lists(here, dataset, tmp_path, image_folder):
    (tmp_path / "classes.txt").write_text("owl\ndog\n\nheron\ncat\n")
    request = Request(str(image_folder), classes=read_classes(tmp_path / "classes.txt"))
    manifest = convert(request, tmp_path / "out", ONE).manifests[""]
    assert manifest.class_names == ("owl", "dog", "heron", "cat")
    rows = pq.read_table(tmp_path / "out" / "shard-00000.idx.parquet").to_pylist()
    assert all(manifest.class_names[row["labels"][0]] == row["key"].split("/")[0] for row in rows)
    assert read_classes(dataset) == read_classes(dataset / "manifest.json") == ("cat", "dog", "owl")
    for content in ("a\nb\na\n", "\n", b"\xff\xfe"):
        (tmp_path / "bad.txt").write_bytes(content if isinstance(content, bytes) else content.encode())
        with refusal(RecipeError, "convert", repr(content), {tmp_path: "FOLDER"}):
            read_classes(tmp_path / "bad.txt")
    with pytest.raises(RecipeError, match="No such file"):
        read_classes(tmp_path / "absent.txt")


def test_outputs_that_are_refused(here, dataset, image_folder, tmp_path):
    before = contents(dataset)
    write_files(tmp_path, "foreign/thesis.tex", "foreign/shard-00000.beton", "file")  # there is no log of ours
    for out in (dataset, tmp_path / "foreign", tmp_path / "file", image_folder / "out", Path("/proc/nowhere")):
        places = {dataset: "DATASET", image_folder: "IMAGES", tmp_path: "FOLDER"}
        with refusal(RecipeError, "convert", str(out), places):
            convert(Request(str(image_folder)), out, ONE)
    assert contents(dataset) == before


MEASURED = """
import resource, sys
from pathlib import Path
from data_tools.conversion import convert
from data_tools.machine import Machine
from data_tools.request import Request
if __name__ == "__main__":
    samples = convert(Request(sys.argv[1], shard_samples=500), sys.argv[2], Machine(workers=2)).totals.samples
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    # Not its own `ru_maxrss`, which begins with that of the process that started it.
    print(samples, status["VmHWM"].split()[0], resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def peaks_of(folder: Path, images: int, mode: str, side: int) -> tuple[int, int]:
    """KiB of the converter, and of its largest worker."""
    source = folder / f"{images}.tar{mode.replace('w', '').replace(':', '.')}"
    contents = [encoded(make_picture(i, side, side), quality=100, subsampling=0) for i in range(50)]
    names = (f"class{i % 10}/some/longer/path/of/an/image-{i:08d}.jpg" for i in range(images))
    write_tar(source, *((name, contents[i % 50]) for i, name in enumerate(names)), mode=mode)
    printed = run_python(MEASURED, source, folder / f"out{images}{mode[-1]}", timeout=500)
    samples, own, worker = map(int, printed.split())
    assert samples == images
    return own, worker


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "side", "few", "many"),
    [("w", 16, 1000, 50_000), ("w:gz", 96, 32_000, 45_000)],  # both of the second fill a run of 256 MiB
)
def test_peak_does_not_grow_with_the_images(tmp_path, mode, side, few, many):
    # 49,000 more images of the first are 50 MB, 13,000 of the second 120 MB.
    for small, large in zip(peaks_of(tmp_path, few, mode, side), peaks_of(tmp_path, many, mode, side), strict=True):
        assert large < small + 32 * 1024
