"""Node 0 and a crowd of others, coroutines that speak the protocol by themselves: benchmarks/many_nodes.py."""

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "many_nodes.py"


def crowd(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), "--json", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_more_nodes_than_files_that_may_be_open_meet_and_end_together():
    result = crowd("--nodes", 100, "--open-files", 64, "--doubled", 4, "--slow", 4, "--silence", 10)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["world_size"] == 800 and found["accounts"] == 100 and found["refused"] == 4
    assert found["lost"] >= 1 and found["trouble"]
    assert found["decided"] + found["lost"] >= 99
