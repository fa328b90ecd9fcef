"""Tables beside a dataset: where its samples came from, which images were rejected, and which removed as copies.

shard-NNNNN.idx.parquet    beside every shard: where each of its samples came from
rejects.parquet            beside the manifest: the images that could not be stored
dedup.parquet              beside the manifest of a dataset that was compared with test sets, and in the folder of
                           `vitscale dedup find`: every pair of a training and a test image of which the former was
                           removed, or nearly was

Training never reads these tables, so only their readers import this module, which loads pyarrow. The fingerprints by
which copies are found are kept only here; each table says which algorithm made them.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from vitscale.ground import storage
from vitscale.ground.errors import DataError
from vitscale.ground.files.durable import durable_file
from vitscale.ground.files.unpacked import CHECKS, read_batches

REJECTS_NAME = "rejects.parquet"
DECISIONS_NAME = "dedup.parquet"

PROVENANCE = pa.schema(
    [
        pa.field("uid", pa.int64(), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("labels", pa.list_(pa.field("element", pa.int32(), nullable=False)), nullable=False),  # [] for none
        pa.field("height", pa.int32(), nullable=False),
        pa.field("width", pa.int32(), nullable=False),
        pa.field("size", pa.int64(), nullable=False),  # bytes as stored
        pa.field("crc32c", pa.uint32(), nullable=False),  # checksum of the bytes as stored
        pa.field("sha256", pa.binary(32), nullable=False),  # digest of the source image's bytes
        pa.field("passed_through", pa.bool_(), nullable=False),
        pa.field("pixels", pa.uint64(), nullable=False),  # digest of the decoded pixels
        pa.field("pdq", pa.binary(32), nullable=False),
        pa.field("pdq_quality", pa.uint8(), nullable=False),
        pa.field("pdq_trimmed", pa.binary(32)),  # PDQ of the picture without uniform borders; null if it has none
    ]
)
FINGERPRINT_COLUMNS = ("pixels", "pdq", "pdq_quality", "pdq_trimmed")
REJECTS = pa.schema([pa.field("key", pa.string(), nullable=False), pa.field("reason", pa.string(), nullable=False)])
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

_VERSION = 2
_VERSION_KEY, _ALGORITHM_KEY = b"vitscale.provenance_version", b"vitscale.fingerprint_algorithm"
_OLDER = [pa.schema([field for field in PROVENANCE if field.name not in FINGERPRINT_COLUMNS])]  # version 1

_GROUP_ROWS = 1 << 17
_PathOrUrl = TypeVar("_PathOrUrl", str, Path)


def provenance_path(shard: _PathOrUrl) -> _PathOrUrl:
    """Path or URL of a shard's table: `a/shard-00000.beton` -> `a/shard-00000.idx.parquet`."""
    if isinstance(shard, Path):
        return shard.with_name(provenance_path(shard.name))
    return f"{shard.removesuffix('.beton')}.idx.parquet"


def write_provenance(path: str | Path, table: pa.Table, algorithm: str) -> None:
    """Write a shard's table, of schema PROVENANCE, one row per sample in slot order; complete or not at all.

    `algorithm` names what made the fingerprints. Equal tables give equal bytes. Raises OSError, or ValueError for
    another schema.
    """
    stated = {_VERSION_KEY: str(_VERSION), _ALGORITHM_KEY: algorithm}
    write_tables(path, [table], PROVENANCE.with_metadata(stated))


def read_provenance(path: str | Path, columns: list[str] | None = None) -> pa.Table:
    """The table of a shard, or some of its columns. Raises DataError: missing, damaged or of another schema.

    A table of version 1 comes without FINGERPRINT_COLUMNS.
    """
    return read_table(path, PROVENANCE, columns, older=_OLDER)


def fingerprint_algorithm(table: pa.Table) -> str | None:
    """The algorithm that made the fingerprints of a table from `read_provenance`; None for a table without any."""
    algorithm = (table.schema.metadata or {}).get(_ALGORITHM_KEY)
    return None if algorithm is None else algorithm.decode("utf-8", "replace")


def write_tables(path: str | Path, tables: Iterable[pa.Table], schema: pa.Schema) -> None:
    """Write tables, all of one schema, as one file, complete or not at all. Raises OSError, ValueError."""
    with (
        durable_file(path) as file,
        pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer,
    ):
        pending: list[pa.Table] = []
        for table in tables:
            if table.schema != schema:
                raise ValueError(f"{path}: a table of {table.schema.to_string()}, expected {schema.to_string()}")
            pending.append(table)
            if sum(one.num_rows for one in pending) >= _GROUP_ROWS:  # each row group costs a kilobyte
                writer.write_table(pa.concat_tables(pending))
                pending = []
        if pending:
            writer.write_table(pa.concat_tables(pending))


def read_table(
    path: str | Path, schema: pa.Schema, columns: list[str] | None = None, older: Sequence[pa.Schema] = ()
) -> pa.Table:
    """Read a table that `write_tables` wrote, or some of its columns; `older` are earlier schemas that are accepted.

    Raises DataError: missing, damaged, another schema.
    """
    try:
        opened = storage.open_stream(str(path))
        with opened, pq.ParquetFile(opened, **CHECKS) as file:
            found = file.schema_arrow
            if found != schema and found not in older:
                raise DataError(f"{path}: a table of {', '.join(found.names)}; expected {', '.join(schema.names)}")
            names = [name for name in columns or found.names if name in found.names]
            chosen = pa.schema([found.field(name) for name in names], found.metadata)
            batches = read_batches(opened, file, str(path), _GROUP_ROWS, columns)
            table = pa.Table.from_batches(batches, chosen).combine_chunks()
            table.validate(full=True)
            # No checksum covers the footer: a row group whose stated length is too short reads without an error.
            if table.num_rows != file.metadata.num_rows:
                raise DataError(f"{path}: damaged: {table.num_rows:,} rows of {file.metadata.num_rows:,}")
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; vitscale-convert writes it with the dataset") from error
    # pyarrow reports damage as any of these.
    except (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: damaged or not readable ({error})") from error
    return table
