"""Datasets on disk: shards, their manifest and their checksums. Written by `data_tools`, read by `vitscale.data`.

Provenance tables are in `vitscale.data.shards.provenance`, which loads pyarrow; training does not need them.
"""

from vitscale.data.shards.beton import (
    DEFAULT_CAPACITY,
    NO_LABEL,
    ShardFile,
    ShardStats,
    StoredSample,
    field_names,
    write_shard,
)
from vitscale.data.shards.manifest import (
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
    "field_names",
    "schema_version_of",
    "write_shard",
]
