"""Small files that would take all memory, or for ever: refused or read within 500 MB and 20 s, each in a process."""

import bz2
import gzip
import io
import json
import lzma
import os
import struct
import sys
import tarfile
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import formats
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from mutate import MEMORY, SECONDS, limit

from data_tools.sources.tf_example import _masked
from vitscale.errors import VitscaleError
from vitscale.recipe import list_recipes
from vitscale.shards.provenance import REJECTS

LARGEST = 100_000
RECIPE = "model: {name: ViT-Ti/16}\ndata: {train: a/b}\nbatch: {global: 8}\noptimizer: {name: adamw, lr: 1.0}\n"
RECIPE += "schedule: {duration: {steps: 1}}\n"


def pickled(*steps: bytes) -> bytes:
    return b"\x80\x02" + b"".join(steps) + b"."


def number(value: int) -> bytes:
    return struct.pack("<I", value)


def nested_lists(levels: int) -> bytes:
    """Ten times the same list in a list, and so on."""
    level = b"](X\x03\x00\x00\x00lol" + b"X\x03\x00\x00\x00lol" * 9 + b"eq\x00"
    for i in range(levels):
        level += b"](" + b"h" + bytes([i]) + (b"h" + bytes([i])) * 9 + b"eq" + bytes([i + 1])
    return level


def tuple_key(levels: int) -> bytes:
    """A dict whose key is a pair of pairs of ..., all shared: hashing it takes 2^levels."""
    return b"})" + b"q\x00" + b"".join(b"h\x00h\x00\x86q\x00" for _ in range(levels)) + b"K\x01s"


def late_lists(levels: int) -> bytes:
    """Empty lists in lists first, which grow afterwards."""
    made = b"".join(b"]q" + bytes([i]) for i in range(levels))
    return (
        made
        + b"".join(b"h%c(%se0" % (i, b"h%c" % (i - 1) * 10) for i in reversed(range(1, levels)))
        + b"h%c" % (levels - 1)
    )


def encoded(times: int) -> bytes:
    """One long text, turned into bytes many times."""
    text = b"X" + number(40_000) + b"a" * 40_000 + b"q\x00X\x06\x00\x00\x00latin1q\x01"
    return b"](" + text + b"c_codecs\nencode\nq\x02" + b"h\x02h\x00h\x01\x86R" * times + b"e"


CIFAR = {
    "memo": b"\x80\x02Nr\xff\xff\xff\x0f.",
    "memo, further": b"\x80\x02Nr\xff\xff\xff\x3f.",
    "memo, in text": b"Np1000000000\n.",
    "lists": pickled(b"}U\x0blabel_names", nested_lists(9), b"s"),
    "lists that grow": pickled(b"}U\x0blabel_names", late_lists(12), b"s"),
    "tuples as key": pickled(tuple_key(60)),
    "tuples in tuples": pickled(b"})", b"\x85" * 90_000, b"K\x01s"),
    "texts encoded": pickled(b"}U\x0blabel_names", encoded(5000), b"s"),
    "doubled": pickled(b"})" + b"2\x86" * 80 + b"K\x01s"),
    "a long number": pickled(b"}U\x0blabel_names\x8b", number(90_000), b"\x7f" * 90_000, b"s"),
    "bytes by name": pickled(b"c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R"),
}


class Attack(NamedTuple):
    """Writes a small file into a folder; and the reader that gets what `make` returns."""

    make: Callable[[Path], Path]
    read: Callable[[Path], object]


def one(name: str, content: Callable[[], bytes | str] | bytes | str, read: Callable[[Path], object]) -> Attack:
    def make(folder: Path) -> Path:
        found = content() if callable(content) else content
        (folder / name).write_bytes(found.encode() if isinstance(found, str) else found)
        return folder / name

    return Attack(make, read)


def cifar(name: str, content: bytes) -> Attack:
    def make(folder: Path) -> Path:
        formats.cifar(folder, name).write_bytes(content)
        return folder

    return Attack(make, formats.read_source)


def aliases(levels: int, key: str = "deepspeed") -> str:
    """Lists of ten of the list before; the first of ten texts."""
    lines = ["deepspeed:", "  a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"  a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels)]
    return RECIPE + "\n".join(lines) + f"\n{key}x: *a{levels - 1}\n"


YAMLS = {
    "aliases": aliases(9),
    "merges": "a0: &a0 {x: 1}\n"
    + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 9)),
    "a long text repeated": f"seed: &a {'x' * 50_000}\ndeepspeed: [{'*a, ' * 10_000}1]\n",
    "itself": "deepspeed: &a [*a, *a]\n",
    "deep": "deepspeed: " + "[" * 90_000,
    "deep blocks": "\n".join(" " * i + "a:" for i in range(400)) + "\n",
    "keys": RECIPE + "".join(f"key{i}: 1\n" for i in range(7000)),
    "a long number": f"seed: {'9' * 90_000}\n",
    "a long number by tag": f"seed: !!int 0x{'f' * 90_000}\n",
    "minutes by tag": f"seed: !!int {'59:' * 30_000}1\n",
    "a long name": RECIPE.replace("ViT-Ti/16", "ViT-" + "B" * 90_000),
    "a large patch": RECIPE.replace("ViT-Ti/16", "ViT-B/" + "9" * 4000),
    "a long path": f"extends: {'x' * 90_000}\n",
    "brackets": RECIPE + "optimizer: {groups: [" + "{pattern: '(((a+)+)+)+$', lr_factor: 1}, " * 1000 + "]}\n",
}
GRID = ", ".join(f"{{seed: [{', '.join(map(str, range(90)))}]}}".replace("seed", f"optimizer.a{i}") for i in range(9))


def zip_of(members: dict[str, bytes], method: int) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def npy(shape: tuple[int, ...], content: bytes = b"", descr: str = "'<f4'") -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape!r}}}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content


STACK = "Transformer/encoderblock/x.npy"
NPZ = {
    "layers of nothing": zip_of({"embedding/kernel.npy": npy((1,), bytes(4)), STACK: npy((10**10, 0))}, 0),
    "zeros": zip_of({STACK: npy((10_000_000, 2), bytes(80_000_000)), "embedding/kernel.npy": npy((1,), bytes(4))}, 8),
    "zeros by bzip2": zip_of({"embedding/kernel.npy": npy((2 * 10**8,), bytes(8 * 10**8))}, zipfile.ZIP_BZIP2),
    "a type of a gigabyte": zip_of({"embedding/kernel.npy": npy((0,), descr="('<f4', (1000000000,))")}, 8),
}


def torch_file(data: bytes, method: int = 0) -> bytes:
    return zip_of({"w/data.pkl": data, "w/version": b"3", "w/byteorder": b"little", "w/data/0": bytes(4)}, method)


def repeated_tensor() -> bytes:
    out = io.BytesIO()
    torch.save({"patch_embed.proj.weight": torch.zeros(1, dtype=torch.half).as_strided((10**10,), (0,))}, out)
    return out.getvalue()


TORCH = {
    "memory by number": torch_file(pickled(b"}U\x01ac__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85Rs")),
    "tuples as key": torch_file(pickled(tuple_key(60))),
    "compressed": torch_file(pickled(b"N0" * 10_000_000, b"N"), zipfile.ZIP_DEFLATED),
    "one number repeated": repeated_tensor(),
    "old, tuples as key": pickled(tuple_key(60)),
}


def images(rows: pa.Array, labels: list | None = None, **options: object) -> Attack:
    def make(folder: Path) -> Path:
        columns = {"image": rows(), "label": labels or pa.array(np.zeros(len(rows()), np.int8))}
        pq.write_table(pa.table(columns), folder / "p.parquet", **{"compression": "zstd", **options})
        return folder / "p.parquet"

    return Attack(make, formats.read_source)


def repeated(value: bytes | str, times: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(times, np.int32)), [value]).cast(
        pa.binary() if isinstance(value, bytes) else pa.string()
    )


ENCODINGS = {"image": "DELTA_BYTE_ARRAY", "label": "PLAIN"}
PARQUET = {
    "a large value in each row": images(lambda: pa.array([bytes(40 << 20)] * 16)),
    "zeros": images(lambda: pa.array([bytes(60 << 20)] * 2), compression="brotli", use_dictionary=False),
    "smaller values, many rows": images(lambda: repeated(bytes(1 << 20), 600)),
    "rows of nothing": images(lambda: repeated(b"", 5_000_000)),
    "labels without end": images(lambda: pa.array([b"a"]), [np.zeros(30_000_000, np.int8)]),
    "prefixes": images(
        lambda: pa.array([b"x" * (1 << 20)] * 200),
        use_dictionary=False,
        column_encoding=ENCODINGS,
    ),
}


def table(folder: Path) -> Path:
    path = formats.rejects(folder)
    rows = {"key": repeated("x" * (1 << 20), 600), "reason": repeated("y", 600)}
    pq.write_table(pa.table(rows, REJECTS), path, compression="zstd")
    return path


def large_tar(size: int, count: int = 1) -> bytes:
    """A tar of images of zeros, in pieces as it is compressed."""
    header = tarfile.TarInfo("a/0.jpg")
    header.size = size
    return (header.tobuf() + bytes(size)) * count + bytes(1024)


def grown(name: str, pack: Callable[[bytes], bytes], size: int) -> Attack:
    return one(name, lambda: pack(large_tar(size)), formats.read_source)


def length(size: int) -> bytes:
    framed = struct.pack("<Q", size)
    return framed + struct.pack("<I", _masked(framed))


def features(shape: tuple[int, ...], samples: int) -> Attack:
    def make(folder: Path) -> Path:
        formats.npy(folder).write_bytes(npy(shape))
        formats.seal_features(folder / "labels.npy")
        meta = json.loads((folder / "meta.json").read_text()) | {"samples": samples}
        (folder / "meta.json").write_text(json.dumps(meta))
        return folder / "labels.npy"

    return Attack(make, formats.FORMATS["features"].read)


weights, recipe = formats.read_weights, formats.FORMATS["recipe"].read
ANY_RECIPE = next(iter(list_recipes()))
source = formats.read_source
ATTACKS = {
    **{f"pickle: {name}": cifar("test_batch", content) for name, content in CIFAR.items()},
    **{f"pickle: {name}, as names": cifar("batches.meta", content) for name, content in CIFAR.items()},
    **{f"YAML: {name}": one("r.yaml", text, recipe) for name, text in YAMLS.items()},
    **{f"npz: {name}": one("w.npz", content, weights) for name, content in NPZ.items()},
    **{f"torch: {name}": one("w.pth", content, weights) for name, content in TORCH.items()},
    **{f"parquet: {name}": attack for name, attack in PARQUET.items()},
    "parquet: a table beside a dataset": Attack(table, formats.FORMATS["rejects"].read),
    "study: grids": one(
        "s.yaml",
        f"parts: {{a: {{recipe: {next(iter(list_recipes()))}, grid: [{GRID}]}}}}",
        formats.FORMATS["study"].read,
    ),
    "tar.gz": grown("a.tar.gz", gzip.compress, 60 << 20),
    "tar.xz": grown("a.tar.xz", lzma.compress, 150 << 20),
    "tar.bz2": grown("a.tar.bz2", bz2.compress, 150 << 20),
    "tar.gz: members": one("a.tar.gz", lambda: gzip.compress(large_tar(0, 40_000)), source),
    "tfrecord: a length": one("a.tfrecord", length((2 << 30) - 1) + b"x", source),
    "tfrecord.gz": one(
        "a.tfrecord.gz", lambda: gzip.compress(formats.tfrecord(formats.example(bytes(60 << 20), 1))), source
    ),
    "csv.gz: a line": one("a.csv.gz", lambda: gzip.compress(b"image,label\n" + b"x" * (60 << 20)), source),
    "features: samples": features((4, 3), 10**12),
    "features: empty rows": features((10**12, 0), 4),
}


def in_a_child(act: Callable[[], object], said: Path) -> None:
    """Run this in a forked process. Fails with what it said unless it ends well, or with an error of ours."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY), sys.stderr.fileno())
        try:
            act()
        except VitscaleError as error:
            print(error)
            os._exit(len(str(error)) > 20_000)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, said.read_text()


@pytest.mark.parametrize("name", ATTACKS)
def test_a_small_file_takes_little_memory_and_time(tmp_path, name):
    (tmp_path / "files").mkdir()
    attack = ATTACKS[name]

    def read() -> None:
        pa.set_memory_pool(pa.system_memory_pool())  # the others reserve gigabytes of addresses
        limit(MEMORY, SECONDS)
        attack.read(place)

    in_a_child(lambda: (tmp_path / "place").write_text(str(attack.make(tmp_path / "files"))), tmp_path / "made")
    place = Path((tmp_path / "place").read_text())
    assert max(file.stat().st_size for file in (tmp_path / "files").rglob("*") if file.is_file()) < LARGEST
    in_a_child(read, tmp_path / "said")
