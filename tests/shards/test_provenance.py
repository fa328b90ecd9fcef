import hashlib
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vitscale.errors import DataError
from vitscale.shards.provenance import (
    PROVENANCE,
    REJECTS,
    provenance_path,
    read_provenance,
    read_rejects,
    write_provenance,
    write_rejects,
)


def table(rows=50):
    return pa.Table.from_pylist(
        [
            {
                "uid": 100 + i,
                "key": f"häuser/{i:03d}.jpg",
                "labels": list(range(i % 4)),
                "height": 10 + i,
                "width": 20 + i,
                "size": 1000 + i,
                "crc32c": 2**32 - 1 - i,
                "sha256": hashlib.sha256(bytes([i])).digest(),
                "passed_through": i % 2 == 0,
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
    write_provenance(path, table())
    content = path.read_bytes()
    assert read_provenance(path).equals(table())
    assert pq.read_table(path).equals(table())  # as anybody reads it
    assert pq.read_schema(path).field("labels").nullable is False
    write_provenance(path, table())
    assert path.read_bytes() == content
    some = read_provenance(path, ["key", "uid"])
    assert sorted(some.column_names) == ["key", "uid"] and some["uid"].to_pylist() == list(range(100, 150))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_rejects(tmp_path):
    rows = pa.table({"key": ["a.jpg", "b.jpg"], "reason": ["empty file (0 bytes)", "no"]}, REJECTS)
    write_rejects(tmp_path / "rejects.parquet", [rows[:1], rows[1:]])
    assert read_rejects(tmp_path / "rejects.parquet").equals(rows)
    with pytest.raises(DataError, match="a table of key, reason; expected uid, key"):
        read_provenance(tmp_path / "rejects.parquet")


def test_another_schema_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="expected uid"):
        write_provenance(tmp_path / "x.idx.parquet", table().drop_columns(["labels"]))
    assert not list(tmp_path.iterdir())


def test_missing_and_foreign(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_provenance(tmp_path / "x.idx.parquet")
    for content in (b"", b"PAR1", b"no parquet at all"):
        (tmp_path / "x.idx.parquet").write_bytes(content)
        with pytest.raises(DataError, match=r"x\.idx\.parquet: damaged"):
            read_provenance(tmp_path / "x.idx.parquet")


def test_a_flipped_bit_is_found_or_harmless(tmp_path):
    path = tmp_path / "shard-00000.idx.parquet"
    original = table()
    write_provenance(path, original)
    content = path.read_bytes()
    found = 0
    for position in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        try:
            assert read_provenance(path).equals(original), position
        except DataError:
            found += 1
    assert found > len(content) / 3 / 2  # the rest are statistics and the like


def test_shards_come_without_pyarrow():
    code = "import sys, vitscale.shards, vitscale.cli.main; assert not {'pyarrow', 'PIL', 'torch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
