"""`benchmarks/inference_speed.py` as a program, and its search for the largest batch."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from inference_speed import largest_between

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "inference_speed.py"


def test_speed_is_measured_until_the_time_is_up(tmp_path):
    pytest.importorskip("matplotlib")
    names, out = ("ViT-Ti/16", "R+ViT-Ti/16"), tmp_path / "out"
    command = [sys.executable, PROGRAM, *names, "--sizes", "8,32", "--seconds", "0.2", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "ViT-Ti/16" in done.stdout, done.stderr
    assert {path.name for path in out.iterdir()} == {*(f"speed.{kind}" for kind in ("png", "svg", "csv")), "index.html"}
    with (out / "speed.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [(row["model"], row["image_size"]) for row in found] == [
        (name, size) for name in names for size in ("8", "32")
    ]
    for row in found:
        is_possible = row["image_size"] == "32"
        assert bool(row["problem"]) != is_possible and row["largest_batch"] == ""
        assert not is_possible or (float(row["images_per_s"]) > 0 and int(row["batch"]) >= 1)


@pytest.mark.parametrize("limit", [1, 7, 96, 1000, 4097])
def test_the_largest_batch_is_found_to_one_part_in_sixteen(limit):
    fits = 2 ** (limit.bit_length() - 1)
    tried: list[int] = []
    found = largest_between(fits, 2 * fits, lambda count: not tried.append(count) and count <= limit)
    assert limit - max(1, limit // 16) <= found <= limit and len(tried) <= 5
