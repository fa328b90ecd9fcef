import hashlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_files import flip

from vitscale.data.shards.provenance import (
    PROVENANCE,
    REJECTS,
    fingerprint_algorithm,
    provenance_path,
    read_provenance,
    read_table,
    write_provenance,
    write_tables,
)
from vitscale.ground.errors import DataError


def table(rows=50):
    return pa.Table.from_pylist(
        [
            {
                **{"uid": 100 + i, "key": f"häuser/{i:03d}.jpg", "labels": list(range(i % 4)), "height": 10 + i},
                **{"width": 20 + i, "size": 1000 + i, "crc32c": 2**32 - 1 - i},
                **{"sha256": hashlib.sha256(bytes([i])).digest(), "passed_through": i % 2 == 0},
                **{"pixels": 2**64 - 1 - i, "pdq": hashlib.sha256(bytes([1, i])).digest(), "pdq_quality": i},
                "pdq_trimmed": hashlib.sha256(bytes([2, i])).digest() if i % 3 else None,
            }
            for i in range(rows)
        ],
        PROVENANCE,
    )


def test_paths_and_urls_of_tables():
    assert provenance_path("shard-00003.beton") == "shard-00003.idx.parquet"
    assert provenance_path("s3://bucket/a.beton/shard-00003.beton") == "s3://bucket/a.beton/shard-00003.idx.parquet"
    assert provenance_path(Path("a/shard-00003.beton")) == Path("a/shard-00003.idx.parquet")


def test_writes_and_reads(tmp_path):
    path = tmp_path / "shard-00000.idx.parquet"
    write_provenance(path, table(), "pdq-64-1")
    content = path.read_bytes()
    assert read_provenance(path).equals(table())
    assert pq.read_table(path).equals(table())  # as anybody reads it
    assert pq.read_schema(path).field("labels").nullable is False
    write_provenance(path, table(), "pdq-64-1")
    assert path.read_bytes() == content
    some = read_provenance(path, ["key", "uid"])
    assert sorted(some.column_names) == ["key", "uid"] and some["uid"].to_pylist() == list(range(100, 150))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert fingerprint_algorithm(some) == "pdq-64-1"
    metadata = pq.read_schema(path).metadata
    assert metadata == {b"vitscale.provenance_version": b"2", b"vitscale.fingerprint_algorithm": b"pdq-64-1"}


def test_a_table_of_version_1(tmp_path):
    """As datasets have it that were converted before there were fingerprints."""
    path = tmp_path / "shard-00000.idx.parquet"
    columns = {
        **{"uid": (pa.int64(), [3]), "key": (pa.string(), ["a.jpg"])},
        **{"labels": (pa.list_(pa.field("element", pa.int32(), nullable=False)), [[1]]), "height": (pa.int32(), [10])},
        **{"width": (pa.int32(), [20]), "size": (pa.int64(), [1000]), "crc32c": (pa.uint32(), [2**32 - 1])},
        **{"sha256": (pa.binary(32), [bytes(32)]), "passed_through": (pa.bool_(), [True])},
    }
    schema = pa.schema([pa.field(name, kind, nullable=False) for name, (kind, _) in columns.items()])
    before = pa.table({name: values for name, (_, values) in columns.items()}, schema)
    pq.write_table(before, path, compression="zstd", write_page_checksum=True)
    assert read_provenance(path).equals(before)
    assert fingerprint_algorithm(read_provenance(path)) is None
    assert read_provenance(path, ["pdq", "uid"]).column_names == ["uid"]
    with pytest.raises(ValueError, match=r"(?s)expected uid\b.*\bpdq\b"):
        write_provenance(path, before, "pdq-64-1")


def test_rejects(tmp_path):
    rows = pa.table({"key": ["a.jpg", "b.jpg"], "reason": ["empty file (0 bytes)", "no"]}, REJECTS)
    write_tables(tmp_path / "rejects.parquet", [rows[:1], rows[1:]], REJECTS)
    assert read_table(tmp_path / "rejects.parquet", REJECTS).equals(rows)
    with pytest.raises(DataError, match=r"key, reason.*uid, key"):
        read_provenance(tmp_path / "rejects.parquet")


def test_missing_and_foreign(tmp_path):
    with pytest.raises(DataError, match=r"x\.idx\.parquet"):
        read_provenance(tmp_path / "x.idx.parquet")
    for content in (b"", b"PAR1", b"no parquet at all"):
        (tmp_path / "x.idx.parquet").write_bytes(content)
        with pytest.raises(DataError, match=r"x\.idx\.parquet"):
            read_provenance(tmp_path / "x.idx.parquet")


@pytest.mark.parametrize("step", [31, pytest.param(7, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_found_or_harmless(tmp_path, step):
    path = tmp_path / "shard-00000.idx.parquet"
    original = table()
    write_provenance(path, original, "pdq-64-1")
    size, found = path.stat().st_size, 0
    for position in range(0, size, step):
        flip(path, position, position % 8)
        try:
            assert read_provenance(path).equals(original), position
        except DataError:
            found += 1
        flip(path, position, position % 8)
    assert found > size / step / 2  # the rest are statistics and the like
