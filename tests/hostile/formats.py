"""Every format that a stranger may hand us: a small real file of it, and the reader that commands use."""

import gzip
import io
import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import dedup_data
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch
import yaml
from checkpoint import toy_checkpoint
from pictures import encoded, make_picture
from small_files import tar_bytes
from tensorboard.summary.writer.record_writer import RecordWriter

from data_tools.classes import read_classes
from data_tools.dedup.index import FingerprintIndex
from data_tools.sources import SourceOptions, open_source
from data_tools.sources.label_list import read_label_list
from vitscale.about.studies.expansion import expand
from vitscale.about.studies.reading import load_study, studies_dir
from vitscale.data.shards import Manifest, ShardFile
from vitscale.data.shards.foreign import read_fields
from vitscale.data.shards.generated import write_generated_dataset
from vitscale.data.shards.provenance import REJECTS, read_table, write_tables
from vitscale.data.shards.verify import verify
from vitscale.evaluation.features import read_features
from vitscale.ground.files.digests import file_digests
from vitscale.models.weights.opening import open_weights
from vitscale.recipe import list_recipes, load_recipe
from vitscale.runs.checkpoint_index import index_text, parse_index
from vitscale.runs.done import read_done
from vitscale.runs.launches import read_launches
from vitscale.runs.metrics import MetricsLog
from vitscale.runs.reading import read_object


class Format(NamedTuple):
    """How a real file is written into a folder (the path is what is damaged), read, and given right digests again."""

    make: Callable[[Path], Path]
    read: Callable[[Path], object]
    seal: Callable[[Path], object] = lambda path: None


def one_file(
    name: str, content: Callable[[], bytes | str] | bytes | str, read: Callable[[Path], object] | None = None
) -> Format:
    """A file of this name and content, which is a source unless `read` says otherwise."""

    def make(folder: Path) -> Path:
        found = content() if callable(content) else content
        (folder / name).write_bytes(found.encode() if isinstance(found, str) else found)
        return folder / name

    return Format(make, read or read_source)


def jpeg(seed: int = 0) -> bytes:
    return encoded(make_picture(seed, 8, 8))


def tfrecord(*records: bytes) -> bytes:
    out = io.BytesIO()
    writer = RecordWriter(out)
    for record in records:
        writer.write(record)
    return out.getvalue()


def example(image: bytes, label: int | bytes) -> bytes:
    def field(number: int, data: bytes) -> bytes:
        size, length = len(data), b""
        while size > 127:
            length, size = length + bytes([size & 127 | 128]), size >> 7
        return bytes([number << 3 | 2]) + length + bytes([size]) + data

    features = {
        b"image/encoded": field(1, field(1, image)),
        b"label": field(3, field(1, bytes([label]) if isinstance(label, int) else label)),
    }
    return field(1, b"".join(field(1, field(1, key) + field(2, value)) for key, value in features.items()))


def parquet(folder: Path) -> Path:
    rows = [{"bytes": jpeg(i), "path": f"{i}.jpg"} for i in range(6)]
    pq.write_table(pa.table({"image": rows, "label": [0, 1] * 3, "tags": [["a", "b"]] * 6}), folder / "p.parquet")
    return folder / "p.parquet"


IMAGE_LIST = "image,label\r\n" + "".join(f"{i}.jpg,class {i}\r\n" for i in range(5))
STATE_DICT = {"patch_embed.proj.weight": torch.ones(4, 3, 2, 2), "cls_token": torch.ones(1, 1, 4)}


def torch_file(old: bool = False) -> bytes:
    out = io.BytesIO()
    torch.save(STATE_DICT, out, _use_new_zipfile_serialization=not old)
    return out.getvalue()


def npz(compressed: bool) -> bytes:
    out = io.BytesIO()
    arrays = {"embedding/kernel": np.ones((2, 2, 3, 4), np.float32)}
    arrays["Transformer/encoderblock/LayerNorm_0/scale"] = np.ones((3, 4), np.float32)
    (np.savez_compressed if compressed else np.savez)(out, **arrays)
    return out.getvalue()


def npy(folder: Path) -> Path:
    np.save(folder / "features-00000.npy", np.ones((4, 3), np.float32))
    np.save(folder / "labels.npy", np.arange(4))
    np.save(folder / "uids.npy", np.arange(4))
    seal_features(folder / "labels.npy")
    return folder / "features-00000.npy"


def seal_features(path: Path) -> None:
    digests = {file.name: file_digests(file).sha256 for file in path.parent.glob("*.npy")}
    meta = {"version": 1, "samples": 4, "width": 3, "class_names": [], "policy": {}, "sha256": digests}
    (path.parent / "meta.json").write_text(json.dumps(meta))


def dataset(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        write_generated_dataset(folder / "d", [3, 2])
        return folder / "d" / name

    return make


def verify_dataset(path: Path) -> None:
    verify(Manifest.load(path.parent), workers=1)


def read_shard(path: Path) -> None:
    read_fields(path)
    with ShardFile(path) as shard:
        for slot in range(min(len(shard.uid), 10)):
            shard.read(slot), shard.labels(slot)


def index(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        dedup_data.write_photos(folder / "images", ["0.png", "1.png"])
        dedup_data.index_of(folder / "i", [dedup_data.source_of(folder / "images")])
        return folder / "i" / name

    return make


def read_index(path: Path) -> None:
    found = FingerprintIndex(path.parent)
    found.pictures([0, 1]), found.keys, found.size(0)


def seal_index(path: Path) -> None:
    content = json.loads((path.parent / "index.json").read_text())
    for name in content["files"]:
        digests = file_digests(path.parent / name)
        content["files"][name] = {"bytes": digests.bytes, "sha256": digests.sha256}
    (path.parent / "index.json").write_text(json.dumps(content))


def read_source(path: Path) -> None:
    source = open_source(str(path), None, SourceOptions())
    for part in range(len(source.parts)):
        for item in source.items(part, Counter()):
            with suppress(OSError):  # an image that cannot be read is a reject
                source.streams or source.read(part, item.content)


def read_weights(path: Path) -> None:
    for entry in open_weights(path).entries.values():
        if np.prod(entry.shape, dtype=float) < 1e6:
            entry.read()


def hf_folder(folder: Path) -> Path:
    config = {"model_type": "vit", "hidden_size": 8, "image_size": 16, "patch_size": 8, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 2, "intermediate_size": 8}))
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 16, "width": 16}, "do_resize": 1}))
    safetensors.torch.save_file({"vit.embeddings.cls_token": torch.ones(1, 1, 8)}, folder / "model.safetensors")
    return folder / "config.json"


def rejects(folder: Path) -> Path:
    write_tables(folder / "rejects.parquet", [pa.table({"key": ["a", "b"], "reason": ["x", "x"]}, REJECTS)], REJECTS)
    return folder / "rejects.parquet"


def cifar(folder: Path, name: str) -> Path:
    (folder / "test_batch.bin").write_bytes(b"".join(bytes([label]) + bytes(3072) for label in range(10)))
    (folder / "batches.meta.txt").write_text("".join(f"c{label}\n" for label in range(10)))
    return folder / name


TWO = [("a/1.jpg", jpeg()), ("b/2.jpg", jpeg())]
SHARD = [("1.jpg", jpeg()), ("1.cls", b"1"), ("2.jpg", jpeg()), ("2.cls", b"1")]
FORMATS: dict[str, Format] = {
    "recipe": one_file(
        "r.yaml",
        lambda: yaml.safe_dump(load_recipe(next(iter(list_recipes()))).dump()),
        lambda path: load_recipe(path).dump(),
    ),
    "study": one_file(
        "s.yaml", (studies_dir() / "axial.yaml").read_bytes, lambda path: expand(load_study(path), path.parent)
    ),
    "manifest": Format(dataset("manifest.json"), verify_dataset),
    "shard": Format(dataset("shard-00000.beton"), read_shard),
    "checkpoint index": one_file(
        "index.json", index_text(toy_checkpoint.index(3)), lambda path: parse_index(path.read_bytes(), str(path))
    ),
    "safetensors": one_file("w.safetensors", safetensors.torch.save(STATE_DICT), read_weights),
    "torch": one_file("w.pth", torch_file(), read_weights),
    "torch, old": one_file("w.pth", torch_file(old=True), read_weights),
    "npz": one_file("w.npz", npz(False), read_weights),
    "npz, deflated": one_file("w.npz", npz(True), read_weights),
    "config": Format(hf_folder, lambda path: open_weights(path.parent)),
    "features": Format(npy, lambda path: read_features(path.parent), seal_features),
    "features, meta": Format(lambda f: npy(f).parent / "meta.json", lambda path: read_features(path.parent)),
    "index": Format(index("index.json"), read_index),
    "index, images": Format(index("images.parquet"), read_index, seal_index),
    "index, hashes": Format(index("hashes.npy"), read_index, seal_index),
    "rejects": Format(rejects, lambda path: read_table(path, REJECTS)),
    "parquet": Format(parquet, read_source),
    "cifar": Format(lambda folder: cifar(folder, "test_batch.bin"), lambda path: read_source(path.parent)),
    "cifar, meta": Format(lambda folder: cifar(folder, "batches.meta.txt"), lambda path: read_source(path.parent)),
    "tar": one_file("a.tar", tar_bytes(*TWO)),
    "tar.gz": one_file("a.tar.gz", tar_bytes(*TWO, mode="w:gz")),
    "webdataset": one_file("a.tar", tar_bytes(*SHARD)),
    "tfrecord": one_file("a.tfrecord", tfrecord(example(jpeg(), 1), example(jpeg(1), 0))),
    "tfrecord.gz": one_file("a.tfrecord.gz", gzip.compress(tfrecord(example(jpeg(), 1)))),
    "csv": one_file("a.csv", IMAGE_LIST),
    "jsonl": one_file("a.jsonl", '{"image": "a.jpg", "label": [1, "b"]}\n' * 3),
    "labels": one_file("labels.csv", IMAGE_LIST, lambda path: read_label_list(str(path))),
    "classes": one_file("classes.txt", "cat\ndog\n", read_classes),
    "launches": one_file("launch.jsonl", '{"event": "start", "time": "2026-01-01"}\n' * 3, read_launches),
    "metrics": one_file(
        "metrics.jsonl",
        '{"step": 1, "train/loss": 2.5, "eval/top1": null}\n' * 3,
        lambda path: MetricsLog(path).refresh(),
    ),
    "done": one_file("DONE", '{"step": 3, "validation/top1": 0.5}', lambda path: read_done(path.parent)),
    "results": one_file("results.json", '{"kind": "vitscale report", "runs": []}', read_object),
}
