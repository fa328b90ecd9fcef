"""Datasets on disk: shards, their manifest and their checksums. Written by `data_tools`, read by `vitscale.data`.

The decoder is in `vitscale.shards.jpeg`, imported where images are decoded: reading a manifest needs no FFCV. Tables of
provenance are in `vitscale.shards.provenance`, which loads pyarrow; training needs none.
"""

from vitscale.shards.beton import (
    DEFAULT_CAPACITY,
    NO_LABEL,
    ShardFile,
    ShardStats,
    StoredSample,
    field_names,
    write_shard,
)
from vitscale.shards.checksums import crc32c, crc32c_of
from vitscale.shards.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSIONS,
    Adopted,
    ExcludedSlots,
    Manifest,
    SelectExclude,
    SelectFirst,
    ShardEntry,
    StoredChecksums,
    schema_version_of,
)

__all__ = [
    "DEFAULT_CAPACITY",
    "MANIFEST_NAME",
    "NO_LABEL",
    "SCHEMA_VERSIONS",
    "Adopted",
    "ExcludedSlots",
    "Manifest",
    "SelectExclude",
    "SelectFirst",
    "ShardEntry",
    "ShardFile",
    "ShardStats",
    "StoredChecksums",
    "StoredSample",
    "crc32c",
    "crc32c_of",
    "field_names",
    "schema_version_of",
    "write_shard",
]
