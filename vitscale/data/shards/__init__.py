"""Datasets on disk: shards, their manifest and their checksums. Written by `data_tools`, read by `vitscale.data`.

Provenance tables are in `vitscale.data.shards.provenance`, which loads pyarrow; training does not need them.
"""

from vitscale.data.shards.beton import DEFAULT_CAPACITY, ShardFile, StoredSample, field_names, write_shard
from vitscale.data.shards.manifest import MANIFEST_NAME, ExcludedSlots, Manifest, SelectExclude, SelectFirst, ShardEntry
