"""Verifies a whole dataset: every byte of every shard, every stored image, every table beside them.

A shard's digests reveal any flipped byte. The images' own checksums tell where it is, as does the shard's provenance
table, which holds uids, sizes and labels a second time.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow as pa

from vitscale.data.shards.beton import MODE_JPEG, ShardFile
from vitscale.data.shards.manifest import Manifest, ShardEntry
from vitscale.data.shards.opening import labels_of, local_copy, shard_file
from vitscale.data.shards.provenance import REJECTS, REJECTS_NAME, provenance_path, read_provenance, read_table
from vitscale.data.shards.scan import scan
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.files.digests import FileDigests, file_digests
from vitscale.ground.images import decode as decode_image
from vitscale.ground.storage import base_name, names_in, size_of
from vitscale.ground.wording import counted, listed

_LISTED_SAMPLES = 20  # for each shard and kind of damage
_LISTED_NAMES = 5


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong: the file, what is wrong, and the sample's uid and key if it concerns one sample."""

    path: str
    what: str
    uid: int | None = None
    key: str | None = None


@dataclass
class Verdict:
    """The result of a verification: the numbers of shards, samples and bytes that were checked, and what was found."""

    decoded: bool  # whether images were decoded as well
    shards: int = 0
    samples: int = 0
    bytes: int = 0
    damage: list[Damage] = field(default_factory=list)  # of a shard's samples with the same damage, the first 20
    notes: list[str] = field(default_factory=list)  # what is odd but harmless
    stock: str | None = None  # the version of FFCV by which every image was read as well


@dataclass
class _Finding:
    """The result for one shard. `uids` are its first and highest; None if damaged, so that no other shard is blamed."""

    entry: ShardEntry
    samples: int = 0
    bytes: int = 0
    has_provenance: bool = False
    uids: tuple[int, int] | None = None
    damage: list[Damage] = field(default_factory=list)

    def add(self, what: str) -> None:
        self.damage.append(Damage(self.entry.path, what))

    def add_beside(self, what: str) -> None:
        self.damage.append(Damage(provenance_path(self.entry.path), what))

    def add_samples(self, bad: np.ndarray, what: str, shard: ShardFile, table: pa.Table | None) -> None:
        """Report the slots where `bad`, bool (samples,), holds; `table` is the shard's table of provenance."""
        for slot in np.flatnonzero(bad)[:_LISTED_SAMPLES].tolist():
            key = None if table is None else table["key"][slot].as_py()
            self.damage.append(Damage(self.entry.path, what, int(shard.uid[slot]), key))
        if (more := int(bad.sum()) - _LISTED_SAMPLES) > 0:
            self.add(f"{counted(more, 'more sample')}: {what}")

    def compare(self, found: FileDigests, how: str = "") -> None:
        """Report digests that are not the manifest's."""
        self.bytes = found.bytes
        wrong = [name for name in ("sha256", "xxh3_128") if getattr(found, name) != getattr(self.entry, name)]
        if wrong:
            self.uids = None
            self.add(f"{' and '.join(wrong)} not as the manifest says{how}")


def verify(
    manifest: Manifest,
    *,
    workers: int = 1,
    decode: bool = False,
    stock: "StockReader | None" = None,
    progress: Callable[[int], None] | None = None,
) -> Verdict:
    """Check everything that a dataset consists of; damage never stops it.

    Args:
        manifest: the dataset.
        workers: the number of shards checked at a time. Each takes a page of memory (8 MiB, or more if an image is
            larger) and, for a dataset at a URL, its whole size on this machine's disk.
        decode: decode every image as well, as training will.
        stock: stock FFCV, to read every image of shards that are sound and compare its pixels with ours.
        progress: called after each shard with the number of shards done.

    Raises StorageError if a URL does not answer, which says nothing about what is there, and RecipeError as
    `vitscale.ground.images` does.
    """
    verdict = Verdict(decode, stock=None if stock is None else stock.version)
    last_uid = -1
    without: list[str] = []
    for finding in _in_order(manifest, workers, decode, stock):
        verdict.shards += 1
        verdict.samples += finding.samples
        verdict.bytes += finding.bytes
        if not finding.has_provenance:
            without.append(provenance_path(finding.entry.path))
        if finding.uids is not None:
            first, last = finding.uids
            if first <= last_uid:
                finding.add(f"begins with uid {first}, but an earlier shard goes up to uid {last_uid}")
            last_uid = max(last_uid, last)
        verdict.damage += finding.damage
        if progress is not None:
            progress(verdict.shards)
    if len(without) < len(manifest.shards):
        verdict.damage += [Damage(path, "missing; other shards have theirs") for path in without]
    elif without:
        verdict.notes.append("no shard has a table of provenance (.idx.parquet) beside it, so keys are not known")
    _check_rejects(manifest, verdict)
    known = {base_name(shard.path) for shard in manifest.shards}
    unlisted = [name for name in names_in(manifest.location("")) if name.endswith(".beton") and name not in known]
    if unlisted:
        verdict.notes.append(f"in the folder, but not in the manifest: {listed(unlisted, _LISTED_NAMES)}")
    return verdict


def _in_order(manifest: Manifest, workers: int, decode: bool, stock: "StockReader | None") -> Iterator[_Finding]:
    # Threads suffice: reading, digests and checksums release Python's lock.
    pending: deque[Future[_Finding]] = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        for index in range(len(manifest.shards)):
            pending.append(pool.submit(_verify_shard, manifest, index, decode, stock))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _verify_shard(manifest: Manifest, index: int, decode: bool, stock: "StockReader | None") -> _Finding:
    finding = _Finding(manifest.shards[index])
    try:
        manifest.selected_slots(index)
    except DataError as error:
        finding.add(str(error))
    try:
        where = manifest.location(finding.entry.path)
        table = _read_table(where, finding)
        with local_copy(where, finding.entry.bytes) as path:
            _verify_file(manifest, index, path, table, decode, stock, finding)
    except DataError as error:
        finding.add(str(error))
    except FileNotFoundError:
        finding.add("missing")
    except OSError as error:
        finding.add(f"cannot be read ({error.strerror or error})")
    return finding


def _read_table(where: str, finding: _Finding) -> pa.Table | None:
    """A shard's provenance table; None if there is none or it cannot be read, which is reported."""
    beside = provenance_path(where)
    finding.has_provenance = size_of(beside) is not None
    if not finding.has_provenance:
        return None
    try:
        with local_copy(beside) as path:
            return read_provenance(path)
    except DataError as error:
        finding.add_beside(str(error))
        return None


def _verify_file(
    manifest: Manifest,
    index: int,
    path: Path,
    table: pa.Table | None,
    decode: bool,
    stock: "StockReader | None",
    finding: _Finding,
) -> None:
    """Check a shard's file, on this machine, against manifest and table. Raises OSError if it cannot be read."""
    entry, size, num_classes = finding.entry, path.stat().st_size, len(manifest.class_names)
    if size != entry.bytes:
        finding.add(f"{size:,} bytes; the manifest says {entry.bytes:,}")
    try:
        shard = shard_file(manifest, index, path)
    except DataError as error:
        finding.add(str(error))
        finding.compare(file_digests(path))
        return
    with shard:
        finding.samples, finding.uids = shard.samples, (int(shard.uid[0]), int(shard.uid.max()))
        if shard.samples != entry.samples:
            finding.add(f"{shard.samples:,} samples; the manifest says {entry.samples:,}")
        if shard.uid[0] != entry.first_uid:
            finding.add(f"begins with uid {shard.uid[0]}; the manifest says {entry.first_uid}")
        if np.any(shard.uid[1:] <= shard.uid[:-1]):
            finding.add("uids do not ascend")
        if table is not None and table.num_rows != shard.samples:
            finding.add_beside(f"{table.num_rows:,} rows; the shard has {shard.samples:,} samples")
            table = None

        scanned = scan(shard, decode)
        damaged = scanned.crc != shard.crc
        finding.compare(scanned.digests, "" if damaged.any() else ": damaged outside of the images")
        finding.add_samples(damaged, "the image's bytes do not have their checksum", shard, table)
        other = ~scanned.is_sized & ~damaged
        finding.add_samples(other, "the image is no JPEG of the height and width that the shard states", shard, table)
        if scanned.status is not None:
            unclean = (scanned.status != 0) & ~damaged & ~other
            finding.add_samples(unclean, "the image does not decode cleanly", shard, table)
        if table is not None:
            for name in ("uid", "height", "width", "size", "crc32c"):
                differs = table[name].to_numpy() != getattr(shard, name.removesuffix("32c"))
                finding.add_samples(differs, f"{name} differs from the table of provenance", shard, table)
        _check_labels(shard, num_classes, table, finding)
        if stock is not None and not finding.damage:
            image_field = "image" if entry.adopted is None else entry.adopted.image_field
            differs = stock.differing(path, shard, image_field)
            finding.add_samples(differs, f"FFCV {stock.version} does not decode it to the same pixels", shard, table)


def _check_labels(shard: ShardFile, num_classes: int, table: pa.Table | None, finding: _Finding) -> None:
    beyond = f"a label beyond the manifest's {num_classes:,} classes"
    if table is None and not shard.has_several_labels:  # an adopted file may have millions of samples
        finding.add_samples(shard.label >= num_classes, beyond, shard, table)
        return
    labels = [_labels_of(shard, slot) for slot in range(shard.samples)]
    readable = np.array([of_one is not None for of_one in labels])
    finding.add_samples(~readable, "its labels contradict each other", shard, table)
    finding.add_samples(np.array([max(of_one or [-1]) >= num_classes for of_one in labels]), beyond, shard, table)
    if table is not None:
        pairs = zip(labels, table["labels"].to_pylist(), strict=True)
        differs = np.array([ours != theirs for ours, theirs in pairs]) & readable
        finding.add_samples(differs, "labels differ from the table of provenance", shard, table)


def _labels_of(shard: ShardFile, slot: int) -> list[int] | None:
    """The labels of a slot; None if they are damaged."""
    with suppress(DataError):
        return labels_of(shard, slot)
    return None


def _check_rejects(manifest: Manifest, verdict: Verdict) -> None:
    where = manifest.location(REJECTS_NAME)
    try:
        if size_of(where) is None:
            return
        with local_copy(where) as path:
            rows = read_table(path, REJECTS).num_rows
    except DataError as error:
        verdict.damage.append(Damage(REJECTS_NAME, str(error)))
        return
    if rows != manifest.num_rejected:
        what = f"{counted(rows, 'image')}; the manifest says that {manifest.num_rejected:,} were rejected"
        verdict.damage.append(Damage(REJECTS_NAME, what))


class StockReader:
    """Stock FFCV, the extra `[ffcv]`: its reader of files and pages, and its decoder.

    It believes whatever a damaged file says, so that only shards which were verified before are given to it. Raises
    RecipeError if it cannot be imported.
    """

    def __init__(self) -> None:
        try:
            from ffcv.libffcv import imdecode
            from ffcv.memory_managers import OSCacheManager
            from ffcv.reader import Reader
        except (ImportError, OSError) as error:  # OSError: a library that it was built with is gone
            raise RecipeError(
                f"stock FFCV is not installed here ({error}): pip install '.[ffcv]' in vitscale's clone. It compiles, "
                "which needs g++ pkg-config libopencv-dev libturbojpeg0-dev (Debian's names) and Python's header files"
            ) from None
        self.version = version("ffcv")
        self._reader, self._pages, self._imdecode = Reader, OSCacheManager, imdecode

    def differing(self, path: Path, shard: ShardFile, image_field: str) -> np.ndarray:
        """The slots, bool (samples,), whose image FFCV decodes to other pixels than we do, or not at all.

        `shard` is the sound shard at `path`, open; `image_field` its field of images.
        """
        reader = self._reader(str(path))
        rows = reader.metadata[f"f{reader.field_names.index(image_field)}"]
        pages = self._pages(reader)
        read, differs = pages.compile_reader(), np.ones(shard.samples, bool)
        with pages.schedule_epoch([]) as context:
            for slot, row in enumerate(rows):
                height, width = int(row["height"]), int(row["width"])
                theirs, ours = np.zeros((height, width, 3), np.uint8), shard.read(slot)
                stored = read(row["data_ptr"], context.state)
                if row["mode"] == MODE_JPEG:
                    failed = self._imdecode(stored, theirs, height, width, height, width)
                    status, pixels = decode_image(ours, height, width)
                    differs[slot] = bool(failed or status) or not np.array_equal(theirs, pixels)
                else:
                    differs[slot] = not np.array_equal(stored, np.frombuffer(ours, np.uint8))
        return differs
