"""Every format that a stranger may hand us: a small real file of it, and the reader that commands use."""

import csv
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
import toy_checkpoint
import yaml
from PIL import Image
from small_files import tar_bytes

from data_tools.classes import read_classes
from data_tools.dedup.index import FingerprintIndex
from data_tools.sources import SourceOptions, open_source
from data_tools.sources.label_list import read_label_list
from data_tools.sources.tfrecord import _masked
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


def jpeg(seed: int = 0) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)).save(out, "JPEG")
    return out.getvalue()


def _file(name: str, content: Callable[[], bytes | str]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        found = content()
        (folder / name).write_bytes(found if isinstance(found, bytes) else found.encode())
        return folder / name

    return make


def _tar(mode: str, *names: str) -> bytes:
    return tar_bytes(*((name, b"1" if name.endswith(".cls") else jpeg()) for name in names), mode=mode)


def tfrecord(*records: bytes) -> bytes:
    def framed(data: bytes) -> bytes:
        return data + _masked(data).to_bytes(4, "little")

    return b"".join(framed(len(record).to_bytes(8, "little")) + framed(record) for record in records)


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


def image_list() -> str:
    out = io.StringIO()
    csv.writer(out).writerows([["image", "label"], *([f"{i}.jpg", f"class {i}"] for i in range(5))])
    return out.getvalue()


def state_dict() -> dict[str, torch.Tensor]:
    return {"patch_embed.proj.weight": torch.ones(4, 3, 2, 2), "cls_token": torch.ones(1, 1, 4)}


def torch_file(old: bool = False) -> bytes:
    out = io.BytesIO()
    torch.save(state_dict(), out, _use_new_zipfile_serialization=not old)
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
        (folder / "images").mkdir()
        for i in range(2):
            dedup_data.make_photo(i).save(folder / "images" / f"{i}.png")
        images = str(folder / "images")
        dedup_data.index_of(folder / "i", [dedup_data.source_of(images)])
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


def checkpoint_index() -> str:
    return index_text(toy_checkpoint.index(3))


def cifar(folder: Path, name: str) -> Path:
    (folder / "test_batch.bin").write_bytes(b"".join(bytes([label]) + bytes(3072) for label in range(10)))
    (folder / "batches.meta.txt").write_text("".join(f"c{label}\n" for label in range(10)))
    return folder / name


def recipe() -> str:
    return yaml.safe_dump(load_recipe(next(iter(list_recipes()))).dump())


FORMATS: dict[str, Format] = {
    "recipe": Format(_file("r.yaml", recipe), lambda path: load_recipe(path).dump()),
    "study": Format(
        _file("s.yaml", (studies_dir() / "axial.yaml").read_bytes), lambda path: expand(load_study(path), path.parent)
    ),
    "manifest": Format(dataset("manifest.json"), verify_dataset),
    "shard": Format(dataset("shard-00000.beton"), read_shard),
    "checkpoint index": Format(_file("index.json", checkpoint_index), lambda p: parse_index(p.read_bytes(), str(p))),
    "safetensors": Format(_file("w.safetensors", lambda: safetensors.torch.save(state_dict())), read_weights),
    "torch": Format(_file("w.pth", torch_file), read_weights),
    "torch, old": Format(_file("w.pth", lambda: torch_file(old=True)), read_weights),
    "npz": Format(_file("w.npz", lambda: npz(False)), read_weights),
    "npz, deflated": Format(_file("w.npz", lambda: npz(True)), read_weights),
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
    "tar": Format(_file("a.tar", lambda: _tar("w", "a/1.jpg", "b/2.jpg")), read_source),
    "tar.gz": Format(_file("a.tar.gz", lambda: _tar("w:gz", "a/1.jpg", "b/2.jpg")), read_source),
    "webdataset": Format(_file("a.tar", lambda: _tar("w", "1.jpg", "1.cls", "2.jpg", "2.cls")), read_source),
    "tfrecord": Format(_file("a.tfrecord", lambda: tfrecord(example(jpeg(), 1), example(jpeg(1), 0))), read_source),
    "tfrecord.gz": Format(_file("a.tfrecord.gz", lambda: gzip.compress(tfrecord(example(jpeg(), 1)))), read_source),
    "csv": Format(_file("a.csv", image_list), read_source),
    "jsonl": Format(_file("a.jsonl", lambda: '{"image": "a.jpg", "label": [1, "b"]}\n' * 3), read_source),
    "labels": Format(_file("labels.csv", image_list), lambda path: read_label_list(str(path))),
    "classes": Format(_file("classes.txt", lambda: "cat\ndog\n"), read_classes),
    "launches": Format(_file("launch.jsonl", lambda: '{"event": "start", "time": "2026-01-01"}\n' * 3), read_launches),
    "metrics": Format(
        _file("metrics.jsonl", lambda: '{"step": 1, "train/loss": 2.5, "eval/top1": null}\n' * 3),
        lambda path: MetricsLog(path).refresh(),
    ),
    "done": Format(_file("DONE", lambda: '{"step": 3, "validation/top1": 0.5}'), lambda path: read_done(path.parent)),
    "results": Format(_file("results.json", lambda: '{"kind": "vitscale report", "runs": []}'), read_object),
}
