"""How long `vitscale-flops` takes for the whole grid, from a cold start, in processes of its own.

    python benchmarks/flops_grid.py [--repeats N] [--json]

The limit is 2 seconds. The ratio is to a process that imports torch and does nothing else: what the report must not do.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

LIMIT_S = 2.0


def seconds(code: str, repeats: int) -> float:
    """The median time of a process that runs `code`; the first run, which compiles, is not counted."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def main() -> None:
    """Measure, print, and fail above the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    grid = seconds("from vitscale.cli.entry import flops; flops()", options.repeats)
    torch = seconds("import torch", options.repeats)
    result = {"grid_s": round(grid, 3), "limit_s": LIMIT_S, "import_torch_s": round(torch, 3), "ratio": grid / torch}
    if options.json:
        print(json.dumps(result))
    else:
        print(
            f"whole grid {grid:.2f} s (limit {LIMIT_S:g} s); import torch alone {torch:.2f} s; ratio {grid / torch:.2f}"
        )
    sys.exit(grid > LIMIT_S)


if __name__ == "__main__":
    main()
