"""Seconds from the command to the end of the first step, phase by phase; twice, as what was compiled is kept.

    python benchmarks/startup.py [--recipe h14_jft] [--batch 1] [--compile] [--set KEY=VALUE ...] [--json]

One rank trains the recipe's model on generated pictures, and is killed when its first step is done. `again` is the
second start by the first. The step's own share is what `step` says: on a CPU it is most of it.

Fails where the second start takes 60 s with its step, or where it compiles (with --compile).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import vitscale
from vitscale.data.shards.generated import write_generated_dataset
from vitscale.ground.heartbeat import HEARTBEAT_VARIABLE
from vitscale.ground.machine import free_port

LIMIT = 60.0


def start(folder: Path, name: str, options: argparse.Namespace) -> dict[str, float]:
    """Phase -> seconds, as the heartbeats tell them, and the total."""
    settings = [f"data.root={folder}", "data.train=train", "model.num_classes=null", f"batch.global={options.batch}"]
    settings += [f"batch.micro_max={options.batch}", f"parallelism.compile={str(options.compile).lower()}"]
    settings += ["checkpoint.background=false", "logging.every=1", *options.settings]
    command = [sys.executable, str(Path(vitscale.__file__).with_name("pretrain.py")), "--recipe", options.recipe]
    command += ["--run-dir", str(folder / name)]
    for setting in settings:
        command += ["--set", setting]
    reading, writing = os.pipe()
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks |= {HEARTBEAT_VARIABLE: str(writing), "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
    began = time.perf_counter()
    process = subprocess.Popen(command, env={**os.environ, **ranks}, pass_fds=[writing], stdout=subprocess.DEVNULL)
    os.close(writing)
    phases: dict[str, float] = {}
    phase, since = "imports", began
    with os.fdopen(reading) as beats:
        for line in beats:
            beat, now = json.loads(line), time.perf_counter()
            if beat["step"] >= 1:
                break
            if beat["phase"] != phase:
                changed = now - beat["phase_s"]
                phases[phase] = phases.get(phase, 0) + changed - since
                phase, since = beat["phase"], changed
        else:
            raise SystemExit(f"the run ended before its first step, with code {process.wait()}")
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    process.kill()
    process.wait()
    step = json.loads(lines[0])["step_time_s"]
    return {**phases, "step": step, "total": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="h14_jft")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_generated_dataset(Path(folder) / "train", [64])
        first, second = (start(Path(folder), name, options) for name in ("first", "second"))
    result: dict[str, Any] = {"recipe": options.recipe, "batch": options.batch, "compile": options.compile}
    result |= {"first_s": first, "second_s": second, "again": second["total"] / first["total"]}
    if options.json:
        print(json.dumps(result))
    else:
        for name, phases in (("first", first), ("second", second)):
            print(f"{name:<7}" + "  ".join(f"{phase} {seconds:.1f} s" for phase, seconds in phases.items()))
        print(f"again  {result['again']:.2f}")
    if second["total"] >= LIMIT:
        raise SystemExit(f"missed: a warm start is to take less than {LIMIT:g} s")
    if options.compile and second["step"] > 0.5 * first["step"]:
        raise SystemExit("missed: the second start is to find what the first one compiled")


if __name__ == "__main__":
    main()
