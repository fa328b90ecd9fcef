"""Small files that would take all memory, or for ever: refused or read within 500 MB and 20 s, each in a process."""

import bz2
import gzip
import http.server
import io
import json
import lzma
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import threading
import traceback
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice, product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hostile import formats
from hostile.formats import Format, one_file
from hostile.mutate import MEMORY, SECONDS, limit
from pictures import encoded
from PIL import Image
from small_disk import small_disk
from small_files import edit_manifest

from data_tools.dedup.matches import Match, Pair
from data_tools.dedup.report import pair_sheet
from data_tools.listing import ListingTask
from data_tools.sources import SourceOptions, open_source
from data_tools.tasks import run_inline
from data_tools.vtab.source import with_full_contrast
from vitscale.data.shards import Manifest
from vitscale.data.shards.export import export
from vitscale.data.shards.generated import write_generated_dataset
from vitscale.data.shards.images import Reject, store_image
from vitscale.data.shards.opening import local_copy
from vitscale.ground import storage
from vitscale.ground.errors import DataError, VitscaleError
from vitscale.ground.images import OK, check, read_header
from vitscale.recipe import group_of, list_recipes, load_recipe

LARGEST = 100_000
RECIPE = "model: {name: ViT-Ti/16}\ndata: {train: a/b}\nbatch: {global: 8}\noptimizer: {name: adamw, lr: 1.0}\n"
RECIPE += "schedule: {duration: {steps: 1}}\n"


def pickled(*steps: bytes) -> bytes:
    return b"\x80\x02" + b"".join(steps) + b"."


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
    grown = b"".join(b"h%c(%se0" % (i, b"h%c" % (i - 1) * 10) for i in reversed(range(1, levels)))
    return made + grown + b"h%c" % (levels - 1)


def text_encoded(times: int) -> bytes:
    """One long text, turned into bytes many times."""
    text = b"X" + struct.pack("<I", 40_000) + b"a" * 40_000 + b"q\x00X\x06\x00\x00\x00latin1q\x01"
    return b"](" + text + b"c_codecs\nencode\nq\x02" + b"h\x02h\x00h\x01\x86R" * times + b"e"


PICKLES = {
    "memo": b"\x80\x02Nr\xff\xff\xff\x0f.",
    "memo, further": b"\x80\x02Nr\xff\xff\xff\x3f.",
    "memo, in text": b"Np1000000000\n.",
    "lists": pickled(b"}U\x0blabel_names", nested_lists(9), b"s"),
    "lists that grow": pickled(b"}U\x0blabel_names", late_lists(12), b"s"),
    "tuples as key": pickled(tuple_key(60)),
    "tuples in tuples": pickled(b"})", b"\x85" * 90_000, b"K\x01s"),
    "texts encoded": pickled(b"}U\x0blabel_names", text_encoded(5000), b"s"),
    "doubled": pickled(b"})" + b"2\x86" * 80 + b"K\x01s"),
    "a long number": pickled(b"}U\x0blabel_names\x8b", struct.pack("<I", 90_000), b"\x7f" * 90_000, b"s"),
    "bytes by name": pickled(b"c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R"),
}


def aliases(levels: int, key: str = "deepspeed") -> str:
    """Lists of ten of the list before; the first of ten texts."""
    lines = ["deepspeed:", "  a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"  a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels)]
    return RECIPE + "\n".join(lines) + f"\n{key}x: *a{levels - 1}\n"


NEVER_ENDING = "{match: '((a|a)+)+!', lr_factor: 2}"
YAMLS = {
    "aliases": aliases(9),
    "merges": "\n".join(["a0: &a0 {x: 1}", *(f"a{i}: &a{i} {{<<: [{f'*a{i - 1}, ' * 10}]}}" for i in range(1, 9))]),
    "a long text repeated": f"seed: &a {'x' * 50_000}\ndeepspeed: [{'*a, ' * 10_000}1]\n",
    "itself": "deepspeed: &a [*a, *a]\n",
    "deep": "deepspeed: " + "[" * 20_000,
    "deep blocks": "\n".join(" " * i + "a:" for i in range(400)) + "\n",
    "keys": RECIPE + "".join(f"key{i}: 1\n" for i in range(7000)),
    "a long number": f"seed: {'9' * 90_000}\n",
    "a long number by tag": f"seed: !!int 0x{'f' * 90_000}\n",
    "minutes by tag": f"seed: !!int {'59:' * 30_000}1\n",
    "a long name": RECIPE.replace("ViT-Ti/16", "ViT-" + "B" * 90_000),
    "a large patch": RECIPE.replace("ViT-Ti/16", "ViT-B/" + "9" * 4000),
    "a long path": f"extends: {'x' * 90_000}\n",
    "patterns": RECIPE.replace("lr: 1.0", f"lr: 1.0, groups: [{', '.join([NEVER_ENDING] * 900)}]"),
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


NPY = npy((1,), bytes(4))
STACK = "Transformer/encoderblock/x.npy"
NPZ = {
    "layers of nothing": zip_of({"embedding/kernel.npy": NPY, STACK: npy((10**10, 0))}, 0),
    "zeros": zip_of({STACK: npy((10_000_000, 2), bytes(80_000_000)), "embedding/kernel.npy": NPY}, 8),
    "zeros in each layer": zip_of({STACK: npy((128, 190_000), bytes(97_280_000)), "embedding/kernel.npy": NPY}, 8),
    "zeros by bzip2": zip_of({"embedding/kernel.npy": npy((2 * 10**8,), bytes(8 * 10**8))}, zipfile.ZIP_BZIP2),
    "a type of a gigabyte": zip_of({"embedding/kernel.npy": npy((0,), descr="('<f4', (1000000000,))")}, 8),
}


def torch_file(data: bytes, method: int = 0) -> bytes:
    return zip_of({"w/data.pkl": data, "w/version": b"3", "w/byteorder": b"little", "w/data/0": bytes(4)}, method)


def repeated_tensor() -> bytes:
    out = io.BytesIO()
    torch.save({"patch_embed.proj.weight": torch.zeros(1, dtype=torch.half).as_strided((10**10,), (0,))}, out)
    return out.getvalue()


SLOW = b"X\x08\x00\x00\x00punycode\x86Rs"
BY_NUMBER = torch_file(pickled(b"}U\x01ac__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85Rs"))
TORCH = {
    "memory by number": BY_NUMBER,
    "storage by number": torch_file(pickled(b"}U\x01actorch.storage\nUntypedStorage\nJ\xff\xff\xff\x7f\x85Rs")),
    "in capitals": BY_NUMBER.replace(b"a.pkl", b"A.PKL"),
    "a slow encoding": torch_file(
        pickled(b"}U\x01ac_codecs\nencode\nX", struct.pack("<I", 90_000), b"\xe4\xb8\x80" * 30_000, SLOW)
    ),
    "tuples as key": torch_file(pickled(tuple_key(60))),
    "compressed": torch_file(pickled(b"N0" * 10_000_000, b"N"), zipfile.ZIP_DEFLATED),
    "one number repeated": repeated_tensor(),
    "old, tuples as key": pickled(tuple_key(60)),
}


def write_parquet(columns: dict, path: Path, **options: object) -> Path:
    pq.write_table(pa.table(columns), path, **{"compression": "zstd", "store_schema": False, **options})
    return path


def images(rows: Callable[[], pa.Array], labels: list | None = None, **options: object) -> Format:
    def make(folder: Path) -> Path:
        found = rows()
        columns = {"image": found, "label": labels or pa.array(np.zeros(len(found), np.int8))}
        return write_parquet(columns, folder / "p.parquet", **options)

    return Format(make, formats.read_source)


def repeated(value: bytes | str, times: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(times, np.int32)), [value])


ENCODINGS = {"image": "DELTA_BYTE_ARRAY", "label": "PLAIN"}


def safetensors_file(dtype: str, shape: list[int], size: int) -> bytes:
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}
    header = json.dumps({"patch_embed.proj.weight": entry}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(size)


SAFETENSORS = {
    "a type of half a byte": safetensors_file("F4", [8], 4),
    "nothing of a long shape": safetensors_file("F32", [2**64 - 1, 0], 0),
    "a header of 100 MB": struct.pack("<Q", 100 << 20) + b"{}",
}
PARQUET = {
    "a large value in each row": images(lambda: repeated(bytes(40 << 20), 16)),
    "zeros": images(lambda: pa.array([bytes(60 << 20)] * 2), compression="brotli", use_dictionary=False),
    "smaller values, many rows": images(lambda: repeated(bytes(1 << 20), 600)),
    "rows of nothing": images(lambda: repeated(b"", 5_000_000)),
    "labels without end": images(lambda: pa.array([b"a"]), [np.zeros(30_000_000, np.int8)]),
    "labels of one image": images(
        lambda: pa.array([b"a"]),
        pa.array([np.arange(4_000_000, dtype=np.int32)]),
        use_dictionary=False,
        column_encoding={"image": "PLAIN", "label.list.element": "DELTA_BINARY_PACKED"},
    ),
    "prefixes": images(lambda: pa.array([b"x" * (1 << 20)] * 200), use_dictionary=False, column_encoding=ENCODINGS),
}


def table(folder: Path) -> Path:
    rows = {"key": repeated("x" * (1 << 20), 600), "reason": repeated("y", 600)}
    return write_parquet(rows, formats.rejects(folder))


def large_tar(size: int, count: int = 1) -> bytes:
    """A tar of images of zeros, in pieces as it is compressed."""
    header = tarfile.TarInfo("a/0.jpg")
    header.size = size
    return (header.tobuf() + bytes(size)) * count + bytes(1024)


def grown(name: str, pack: Callable[[bytes], bytes], size: int) -> Format:
    return one_file(name, lambda: pack(large_tar(size)))


def same_folders(folder: Path) -> Path:
    """A dataset whose classes all become the folder `_____________`."""
    write_generated_dataset(folder / "d", [3])
    names = ["".join(name) for name in islice(product("/|", repeat=13), 5000)]
    edit_manifest(folder / "d", lambda data: data.update(class_names=names))
    return folder / "d"


def packed(record: Callable[[], bytes]) -> Format:
    return one_file("a.tfrecord.gz", lambda: gzip.compress(formats.tfrecord(record())))


def length(size: int) -> bytes:
    """The head of a record of so many bytes; its checksum ends a record whose content it is."""
    head = struct.pack("<Q", size)
    return head + formats.tfrecord(head)[-4:]


def features(shape: tuple[int, ...], samples: int) -> Format:
    def make(folder: Path) -> Path:
        formats.npy(folder).write_bytes(npy(shape))
        formats.seal_features(folder / "labels.npy")
        meta = json.loads((folder / "meta.json").read_text()) | {"samples": samples}
        (folder / "meta.json").write_text(json.dumps(meta))
        return folder / "labels.npy"

    return Format(make, formats.FORMATS["features"].read)


def picture(content: Callable[[], bytes]) -> Format:
    """An image of a few bytes, which is converted, drawn beside others and read from a shard."""

    def read(path: Path) -> None:
        data = path.read_bytes()
        found = store_image(data)
        assert isinstance(found, Reject)
        if header := read_header(data) if data.startswith(b"\xff\xd8") else None:
            assert check(data, header.height, header.width) != OK
        assert with_full_contrast(data) == data
        pair = Pair(Match(0, "b", 0, "hash", 0, 0.9), "a", data)
        pair_sheet("test", [(pair, data)], [])

    return one_file("image", content, read)


def large_jpeg() -> bytes:
    """A picture in several scans, said to be a thousand times larger than it is."""
    content = encoded(Image.new("RGB", (16, 16)), progressive=True)
    size_at = content.index(b"\xff\xc2") + 5
    return content[:size_at] + struct.pack(">HH", 9000, 9000) + content[size_at + 4 :]


PICTURES = {
    "webp": lambda: encoded(Image.new("RGBA", (6000, 6000)), "WEBP", lossless=True, method=0),
    "png": lambda: encoded(Image.new("1", (9400, 9400)), "PNG", transparency=0),
    "tiff": lambda: encoded(Image.new("1", (9400, 9400)), "TIFF", compression="group4"),
    "jpeg": large_jpeg,
}


def matched(path: Path) -> None:
    """Read a recipe, and tell the group of a parameter of a long name."""
    group_of(load_recipe(path).optimizer, "a" * 200)


weights, recipe = formats.read_weights, formats.FORMATS["recipe"].read
ATTACKS = {
    **{f"pickle: {name}": one_file("w.pth", content, weights) for name, content in PICKLES.items()},
    **{f"YAML: {name}": one_file("r.yaml", text, recipe) for name, text in YAMLS.items()},
    "YAML: a pattern": one_file("r.yaml", RECIPE.replace("lr: 1.0", f"lr: 1.0, groups: [{NEVER_ENDING}]"), matched),
    **{f"image: {name}": picture(content) for name, content in PICTURES.items()},
    **{f"npz: {name}": one_file("w.npz", content, weights) for name, content in NPZ.items()},
    **{f"torch: {name}": one_file("w.pth", content, weights) for name, content in TORCH.items()},
    **{f"safetensors: {name}": one_file("w.safetensors", content, weights) for name, content in SAFETENSORS.items()},
    **{f"parquet: {name}": attack for name, attack in PARQUET.items()},
    "parquet: a table beside a dataset": Format(table, formats.FORMATS["rejects"].read),
    "study: grids": one_file(
        "s.yaml",
        f"parts: {{a: {{recipe: {next(iter(list_recipes()))}, grid: [{GRID}]}}}}",
        formats.FORMATS["study"].read,
    ),
    "tar.gz": grown("a.tar.gz", gzip.compress, 60 << 20),
    "tar.xz": grown("a.tar.xz", partial(lzma.compress, preset=0), 150 << 20),
    "tar.bz2": grown("a.tar.bz2", bz2.compress, 150 << 20),
    "tar.gz: members": one_file("a.tar.gz", lambda: gzip.compress(large_tar(0, 20_000))),
    "tfrecord: a length": one_file("a.tfrecord", length((2 << 30) - 1) + b"x"),
    "tfrecord.gz": packed(lambda: formats.example(bytes(60 << 20), 1)),
    "tfrecord.gz: labels": packed(lambda: formats.example(b"x", bytes(30 << 20))),
    "tfrecord.gz: entries": packed(lambda: b"\n\xfe\xff\xff\x0e" + b"\n\0" * 15_728_639),
    "csv.gz: a line": one_file("a.csv.gz", lambda: gzip.compress(b"image,label\n" + b"x" * (60 << 20))),
    "csv: brackets": one_file("a.csv", f"image,label\na.jpg,{'[' * 40_000}]\n"),
    "classes of one folder": Format(same_folders, lambda path: export(Manifest.load(path), f"{path}-exported")),
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


# What meets the same limit as another attack, and takes seconds to make.
REPEATS = {"tar.xz", "tar.bz2", "csv.gz: a line", "tfrecord.gz", "parquet: zeros", "YAML: a long text repeated"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in REPEATS else name for name in ATTACKS]
)
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


class _Endless(http.server.BaseHTTPRequestHandler):
    """A server that sends for ever, or a gigabyte of zeros as one megabyte."""

    def do_GET(self) -> None:
        packed = self.path.startswith("/packed")
        self.send_response(200)
        if packed:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        with suppress(OSError):
            while self.command == "GET":
                self.wfile.write(_PACKED if packed else bytes(1 << 20))
                if packed:
                    break

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


_PACKED = gzip.compress(bytes(300 << 20), 1)


FETCHES = {
    "whole": storage.read_bytes,
    "packed": storage.read_bytes,
    "piece": lambda url: next(storage.RemoteFile(url).pieces(64 << 20)),
    "names": storage.names_in,
    "shard": lambda url: local_copy(url, 64 << 20).__enter__(),
}


@pytest.fixture
def endless() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Endless) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(("path", "fetch"), FETCHES.items(), ids=FETCHES)
def test_a_server_fills_no_memory(tmp_path, endless, path, fetch):
    def read() -> None:
        limit(MEMORY, SECONDS)
        with pytest.raises((OSError, DataError)):
            fetch(f"{endless}/{path}")

    in_a_child(read, tmp_path / "said")


def test_a_server_fills_no_disk(tmp_path, endless):
    with small_disk(tmp_path / "disk", "32m") as disk:
        with pytest.raises(OSError, match="fill the disk"):
            storage.get(f"{endless}/shard", disk / "shard")
        assert shutil.disk_usage(disk).free > 1 << 20


CACHES = [f"{kind}://::{{0}}" for kind in ("simplecache", "filecache", "blockcache", "cached")]


@pytest.mark.parametrize(
    "url", ["reference://a::{0}", "zip://a::reference://b::{0}", "DASK://a", "zip://a::{0}", *CACHES]
)
def test_no_url_is_a_program_or_a_cache(tmp_path, url):
    (tmp_path / "r.json").write_text('{"version": 1, "refs": {"a": "b"}, "gen": []}')
    with pytest.raises(VitscaleError):
        storage.read_bytes(url.format(f"file://{tmp_path}/r.json"))


def test_what_is_unpacked_leaves_room_on_the_disk(tmp_path):
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(large_tar(31 << 20)))
    task = ListingTask(open_source(str(tmp_path / "a.tar.gz"), None, SourceOptions()), 0, tmp_path / "disk", 0, "")
    with small_disk(tmp_path / "disk", "32m"):
        with pytest.raises(DataError):
            for _ in run_inline([task], lambda *_: None):
                pass
        assert not [path for path in (tmp_path / "disk").iterdir() if path.stat().st_size]


@pytest.mark.parametrize("count", ["3", pytest.param("30", marks=pytest.mark.slow)])
def test_damaged_files_are_read_or_refused(tmp_path, count):
    command = [sys.executable, str(Path(__file__).with_name("mutate.py")), "--count", count, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=300)
    traces = [path.read_text() for path in tmp_path.glob("*.txt")]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr[-2000:], *traces])
