"""De-duplication against what people have judged: CIFAR-10's near-duplicates, and hand signs that only look alike.

    python benchmarks/dedup_judged.py OUT [--embedding RUN|WEIGHTS] [--data FOLDER]

FOLDER holds cifar10 (with half of ciFAIR's list: Barz and Denzler, "Do We Train on Test Data?", 2020) and signdigits;
VITSCALE_TEST_DATA names it, too. The training set of each is converted against its test set, as people would do it,
into OUT. There, `cifar10-unlisted.png` shows what was removed and is not in the list, `cifar10-missed.png` what is in
the list and was not removed, `signdigits/dedup/*.png` the hand signs.
"""

import csv
import os
import tarfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
from photos import photos_parser

from data_tools.conversion import convert
from data_tools.dedup.against import name_indexes
from data_tools.dedup.building import TestSource, build_index
from data_tools.dedup.embedding import Embedder
from data_tools.dedup.fingerprint import fingerprint
from data_tools.dedup.index import FingerprintIndex
from data_tools.dedup.matches import Match, Pair, Tier
from data_tools.dedup.matching import BITS, correlation, near_pairs, words
from data_tools.dedup.queries import small_picture
from data_tools.dedup.report import pair_sheet
from data_tools.dedup.variants import window_of
from data_tools.machine import Machine
from data_tools.request import Request
from data_tools.sources import SourceOptions, open_source
from vitscale.cli.options import opened_embedder
from vitscale.data.shards.images import StoredImage, store_image
from vitscale.data.shards.provenance import DECISIONS, DECISIONS_NAME, read_table

DRAWN = 48  # pairs of a sheet


@dataclass(frozen=True)
class Judged:
    """What a de-duplication came to.

    Attributes:
        images, removed: of the training set.
        test_images, flagged: of the test set; flagged are those that have a copy.
        removed_pairs: training and test image, by key -> tier, distance and correlation.
        index: of the test set.
    """

    images: int
    removed: int
    test_images: int
    flagged: int
    removed_pairs: dict[tuple[str, str], tuple[Tier, int, float]]
    index: FingerprintIndex

    def nearest(self, train_file: bytes, test_key: str) -> tuple[Tier, int, float]:
        """How far a pair is that was not removed: distance of the nearest hashes, and correlation from there."""
        stored = store_image(train_file)
        assert isinstance(stored, StoredImage)
        made, image = fingerprint(stored.pixels), self.index.keys.to_pylist().index(test_key)
        query = words(np.frombuffer(made.pdq, np.uint8)[None])
        first, end = np.searchsorted(self.index.owners, [image, image + 1]).tolist()
        _, hashes, distances = near_pairs(query, self.index.hashes, BITS, first, end)
        variant = int(self.index.variants[hashes[distances.argmin()]])
        window = window_of(variant, *self.index.size(image))
        reached = correlation(made.luma, self.index.thumbnails[image], window, mirrored=variant % 2 == 1)
        return "correlation", int(distances.min()), reached


def deduplicate(name: str, test: Path, train: Path, out: Path, embedder: Embedder | None = None) -> Judged:
    """Convert a training set against a test set with nothing but defaults, and a model if there is one."""
    workers = len(os.sched_getaffinity(0))
    index = out / f"{name}.index"
    source = TestSource(name, str(test), open_source(str(test), None, SourceOptions()))
    build_index([source], index, workers=workers, embedder=embedder)
    named = name_indexes([str(index)], embedder=embedder)
    outcome = convert(Request(str(train), dedup=named), out / name, Machine(workers))
    rows = read_table(out / name / DECISIONS_NAME, DECISIONS).filter(pc.field("removed")).to_pylist()
    manifest = outcome.manifests[""]
    return Judged(
        images=manifest.num_samples + manifest.num_removed,
        removed=manifest.num_removed,
        test_images=sum(1 for _ in _files(test)),
        flagged=len({row["test_key"] for row in rows}),
        removed_pairs={
            (row["train_key"], row["test_key"]): (row["tier"], row["distance"], row["correlation"]) for row in rows
        },
        index=FingerprintIndex(index),
    )


def listed_pairs(data: Path) -> dict[tuple[str, str], str]:
    """CIFAR-10's judged pairs of a training and a test image, by their keys -> the judgement."""
    with (data / "cifar10" / "near_duplicates.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["image_b"].startswith("train/")]
    return {(_key(row["image_b"]), row["image_a"]): row["judgment"] for row in rows}


def _key(path: str) -> str:
    """Of a training image: conversion leaves out the folder that all images share."""
    return path.removeprefix("train/")


def _files(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as tar:
        return {
            member.name: file.read()
            for member in tar
            if member.name.lower().endswith(".jpg") and (file := tar.extractfile(member)) is not None
        }


def draw(path: Path, title: str, judged: Judged, pairs: list[tuple[str, str]], train: Path, test: Path) -> None:
    """A sheet of some pairs, removed or missed."""
    train_files, test_files = _files(train), _files(test)

    def picture(content: bytes) -> bytes:
        stored = store_image(content)
        assert isinstance(stored, StoredImage)
        return small_picture(stored.pixels)

    drawn = []
    for train_key, test_key in pairs[:DRAWN]:
        removed = (train_key, test_key) in judged.removed_pairs
        train_file = train_files[f"train/{train_key}"]
        facts = judged.removed_pairs[train_key, test_key] if removed else judged.nearest(train_file, test_key)
        pair = Pair(Match(0, test_key, 0, *facts, removed=removed), train_key, picture(train_file))
        drawn.append((pair, picture(test_files[test_key])))
    pair_sheet(title, *((drawn, []) if drawn and drawn[0][0].match.removed else ([], drawn))).save(path)


def main() -> None:
    """Print what was found, and draw what people should look at."""
    parser = photos_parser(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--embedding", type=Path)
    options = parser.parse_args()
    cifar, signs = options.data / "cifar10", options.data / "signdigits"

    test, train = cifar / "test_dev.tar.xz", cifar / "train.tar.xz"
    embedder = opened_embedder(options.embedding, None, None)
    judged, listed = deduplicate("cifar10", test, train, options.out, embedder), listed_pairs(options.data)
    found = [pair for pair in listed if pair in judged.removed_pairs]
    missed = [pair for pair in listed if pair not in judged.removed_pairs]
    unlisted = sorted(judged.removed_pairs.keys() - listed.keys(), key=lambda pair: judged.removed_pairs[pair][2])
    print(f"cifar10: {judged.removed:,} of {judged.images:,} training images removed")
    print(f"  {judged.flagged:,} of {judged.test_images:,} test images have a copy")
    print(f"  {len(found)} of {len(listed)} listed pairs found ({len(found) / len(listed):.1%})")
    print(f"  found by judgement {dict(Counter(listed[pair] for pair in found))}")
    print(f"  missed by judgement {dict(Counter(listed[pair] for pair in missed))}")
    print(f"  {len(unlisted)} pairs removed that are not listed (half of the list is not public here)")
    draw(options.out / "cifar10-unlisted.png", "removed, not listed", judged, unlisted, train, test)
    draw(options.out / "cifar10-missed.png", "listed, not removed", judged, missed, train, test)

    test, train = signs / "test_dev.tar.xz", signs / "train.tar.xz"
    judged = deduplicate("signdigits", test, train, options.out, embedder)
    print(f"signdigits: {judged.removed:,} of {judged.images:,} training images removed")
    print(f"  {judged.flagged:,} of {judged.test_images:,} test images have a copy")
    for (train_key, test_key), facts in list(judged.removed_pairs.items())[:20]:
        print(f"  {train_key} = {test_key}: {facts}")


if __name__ == "__main__":
    main()
