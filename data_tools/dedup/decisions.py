"""`dedup.parquet`: every pair of an image and a test image that was removed, or narrowly was not."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_tools.dedup.match import Match
from data_tools.dedup.matching import Matcher
from data_tools.dedup.variants import variant_name
from vitscale.shards.provenance import read_table, write_tables

DECISIONS_NAME = "dedup.parquet"

DECISIONS = pa.schema(
    [
        pa.field("train_uid", pa.int64(), nullable=False),
        pa.field("train_key", pa.string(), nullable=False),
        pa.field("test_set", pa.string(), nullable=False),
        pa.field("test_key", pa.string(), nullable=False),
        pa.field("tier", pa.string(), nullable=False),  # what decided, or would have last: `match.TIERS`
        pa.field("distance", pa.int16()),  # bits; null where the hashes are not near, or not compared
        pa.field("correlation", pa.float64()),
        pa.field("cosine", pa.float64()),  # null without a user's model
        pa.field("variant", pa.string()),  # of the test image, as `variants.variant_name` has it
        pa.field("removed", pa.bool_(), nullable=False),
    ]
)


def decisions(matcher: Matcher, images: Iterable[tuple[int, str]], matches: Sequence[Sequence[Match]]) -> pa.Table:
    """The matches of some images, given as uid and key in the same order, as a table of schema DECISIONS."""
    rows: list[dict[str, Any]] = []
    for (uid, key), of_image in zip(images, matches, strict=True):
        for match in of_image:
            rows.append(
                {
                    "train_uid": uid,
                    "train_key": key,
                    "test_set": matcher.test_sets[match.test_set].name,
                    "test_key": match.key,
                    "tier": match.tier,
                    "distance": match.distance,
                    "correlation": match.correlation,
                    "cosine": match.cosine,
                    "variant": None if match.variant is None else variant_name(match.variant),
                    "removed": match.removed,
                }
            )
    return pa.Table.from_pylist(rows, DECISIONS)


def write_decisions(path: str | Path, tables: Iterable[pa.Table]) -> None:
    """Write tables of schema DECISIONS, one after the other; complete or not at all. Raises OSError."""
    write_tables(path, tables, DECISIONS)


def read_decisions(path: str | Path) -> pa.Table:
    """Read them again. Raises DataError: missing, damaged or of another schema."""
    return read_table(path, DECISIONS)
