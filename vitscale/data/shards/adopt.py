"""Makes a dataset of a `.beton` of FFCV's own writer, without copying it.

OUT/manifest.json      refers to the file where it is
OUT/train.crc.npy      the checksums of its images, which such a file lacks: taken now, they reveal any later damage
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitscale.data.shards.beton import ShardFile
from vitscale.data.shards.foreign import IMAGE, INTEGER, ForeignShard, read_fields
from vitscale.data.shards.manifest import Adopted, Manifest, ShardEntry, StoredChecksums, schema_version_of
from vitscale.data.shards.scan import Scan, scan
from vitscale.ground.errors import DataError, RecipeError, os_errors
from vitscale.ground.files.digests import file_digests
from vitscale.ground.files.durable import new_folder
from vitscale.ground.storage import is_url, without_file_scheme
from vitscale.ground.wording import listed

NO_LABELS = "none"  # --label-field none

_MOST_CLASSES = 10_000_000
_LISTED_SAMPLES = 5


@dataclass(frozen=True)
class Adoption:
    """What was adopted: the new dataset, the fields used and not used, and the number of raw images."""

    manifest: Manifest
    image_field: str
    label_field: str | None
    unused_fields: tuple[str, ...]
    raw: int


def default_out(file: str) -> str:
    """The default folder for a file's dataset: beside the file, with its name less the suffix."""
    return str(Path(without_file_scheme(file)).with_suffix(""))


def adopt(
    file: str,
    out: str,
    *,
    image_field: str | None = None,
    label_field: str | None = None,
    class_names: Sequence[str] | None = None,
    decode: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Adoption:
    """Make a dataset of a file of FFCV's writer, which stays where and as it is.

    The folder appears under its name only once it is complete and on the disk.

    Args:
        file: the `.beton` file, on this machine.
        out: the dataset's folder, new or empty, on this machine.
        image_field, label_field: names of the fields of images and of integer labels to use; None means the only one,
            or the one called `image` or `label`. A label field "none" means that there are no labels.
        class_names: the classes' names, by label; None means "0", "1", ...
        decode: decode every image, as training will. The size that a JPEG states is compared in any case.
        progress: called now and then with the number of bytes read.

    Raises:
        RecipeError: a field is missing or ambiguous, there are too few class names, or `out` cannot be used.
        DataError: the file is damaged or unfinished, has images that training would refuse, or changes meanwhile.
            Nothing is left behind.
    """
    if is_url(file := without_file_scheme(file)):
        raise RecipeError(
            f"FILE {file}: a file is adopted in place, on this machine's disk; expected a path, not a URL"
        )
    if Path(file).exists() and not Path(file).is_file():
        raise RecipeError(f"FILE {file}: is not a file. Expected a .beton")
    with suppress(DataError), ShardFile(file):  # whatever else is wrong with it is reported later
        raise RecipeError(
            f"FILE {file}: is a shard that vitscale wrote, with uids and checksums of its own. It belongs to the "
            f"dataset whose manifest.json lists it: use that"
        )
    fields = read_fields(file)
    image_field = _choose(file, fields, IMAGE, image_field, "image", "--image-field NAME")
    if label_field == NO_LABELS and NO_LABELS not in fields:
        label_field = None
    else:
        flags = f"--label-field NAME, or --label-field {NO_LABELS} for images without labels"
        label_field = _choose(file, fields, INTEGER, label_field, "label", flags)
    with ForeignShard(file, image_field=image_field, label_field=label_field) as shard, new_folder(out) as folder:
        names = _class_names(shard, label_field, class_names)
        scanned = _scan(shard, decode, progress)
        crc = folder / f"{Path(file).stem}.crc.npy"
        np.save(crc, scanned.crc)
        checksums = StoredChecksums(path=crc.name, sha256=file_digests(crc).sha256)
        entry = ShardEntry(
            path=_relative(file, out),
            samples=shard.samples,
            first_uid=0,
            adopted=Adopted(image_field=image_field, label_field=label_field, checksums=checksums),
            **scanned.digests._asdict(),
        )
        Manifest(
            schema_version=schema_version_of([entry]),
            fields=shard.fields,
            num_samples=shard.samples,
            class_names=names,
            shuffle_seed=0,
            options={"adopted": {"image_field": image_field, "label_field": label_field}},
            shards=(entry,),
        ).save(folder)
    unused = tuple(name for name in fields if name not in (image_field, label_field))
    return Adoption(Manifest.load(out), image_field, label_field, unused, int(shard.raw.sum()))


def _choose(file: str, fields: dict[str, str], kind: str, wanted: str | None, usual: str, flags: str) -> str:
    """The name of the field of this kind to use: the wanted one, the usual one, or the only one."""
    candidates = [name for name, of in fields.items() if of == kind]
    if wanted is None and len(candidates) > 1 and usual in candidates:
        wanted = usual
    if wanted is None and len(candidates) == 1:
        wanted = candidates[0]
    if wanted in candidates:
        return wanted
    there = ", ".join(f"{name} ({of})" for name, of in fields.items()) or "none"
    if wanted is not None:
        problem = f"{wanted} is a field of kind {fields[wanted]}" if wanted in fields else f"no field {wanted!r}"
    else:
        problem = f"which field has the {usual}s is not clear" if candidates else f"no field of kind {kind}"
    raise RecipeError(f"FILE {file}: {problem}; its fields: {there}. Say which: {flags}")


def _class_names(shard: ShardFile, label_field: str | None, stated: Sequence[str] | None) -> tuple[str, ...]:
    last = int(np.argmax(shard.label))
    highest = int(shard.label[last])
    if stated is None:
        if highest >= _MOST_CLASSES:
            raise RecipeError(
                f"FILE {shard.path}: the labels in {label_field!r} go up to {highest:,}: are these class numbers? "
                f"Choose another field with --label-field"
            )
        return tuple(map(str, range(highest + 1)))
    if highest >= len(stated):
        raise RecipeError(
            f"FILE {shard.path}: sample {last:,} has label {highest:,}, counted from 0; --classes names "
            f"{len(stated):,} classes"
        )
    return tuple(stated)


def _scan(shard: ShardFile, decode: bool, progress: Callable[[int], None] | None) -> Scan:
    """Read the whole file. Raises DataError for images that training would refuse, or if the file changes meanwhile."""
    before = _state(shard)
    with os_errors(f"{shard.path}: cannot be read"):
        scanned = scan(shard, decode, progress)
    if _state(shard) != before or scanned.digests.bytes != before[0]:
        raise DataError(f"{shard.path}: has changed while it was read. Adopt it when its writer is done")
    bad = {"is no JPEG of the height and width that the file states": ~scanned.is_sized}
    if scanned.status is not None:
        bad["does not decode cleanly"] = scanned.is_sized & (scanned.status != 0)
    for what, where in bad.items():
        if where.any():
            slots = np.flatnonzero(where)
            raise DataError(
                f"{shard.path}: the image of {len(slots):,} of {shard.samples:,} samples {what}: sample "
                f"{listed(slots.tolist(), _LISTED_SAMPLES)}, counted from 0. Training would refuse them: write the "
                "file again without them"
            )
    return scanned


def _state(shard: ShardFile) -> tuple[int, int]:
    status = os.fstat(shard.fd)
    return status.st_size, status.st_mtime_ns


def _relative(file: str, out: str) -> str:
    """The path from the new folder to the file, links resolved, since the system follows links before `..`."""
    above, name = os.path.split(file)
    return Path(os.path.relpath(os.path.realpath(above), os.path.realpath(without_file_scheme(out))), name).as_posix()
