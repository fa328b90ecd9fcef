"""`dedup.parquet`: every pair of a training image and a test image for which the former was removed, or nearly was.

It is beside the manifest of a dataset that was compared with test sets, and in the folder of `vitscale dedup find`.
"""

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from vitscale.data.shards.provenance import read_table, write_tables

DECISIONS_NAME = "dedup.parquet"

DECISIONS = pa.schema(
    [
        pa.field("train_uid", pa.int64(), nullable=False),
        pa.field("train_key", pa.string(), nullable=False),
        pa.field("test_set", pa.string(), nullable=False),
        pa.field("test_key", pa.string(), nullable=False),
        pa.field("tier", pa.string(), nullable=False),  # what decided or would have: `match.TIERS` of data_tools.dedup
        pa.field("distance", pa.int16()),  # bits; null if the hashes are not near, or were not compared
        pa.field("correlation", pa.float64()),
        pa.field("cosine", pa.float64()),  # null without a user's model
        pa.field("variant", pa.string()),  # the test image's variant: `variant_name` of data_tools.dedup.variants
        pa.field("removed", pa.bool_(), nullable=False),
    ]
)


def write_decisions(path: str | Path, tables: Iterable[pa.Table]) -> None:
    """Write tables of schema DECISIONS as one file, complete or not at all. Raises OSError."""
    write_tables(path, tables, DECISIONS)


def read_decisions(path: str | Path, columns: list[str] | None = None) -> pa.Table:
    """Read the decisions, or some of their columns. Raises DataError: missing, damaged or of another schema."""
    return read_table(path, DECISIONS, columns)
