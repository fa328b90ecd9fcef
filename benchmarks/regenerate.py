"""Runs the benchmarks of training, loading and looking, and writes what they print into benchmarks/README.md.

    python benchmarks/regenerate.py [--images DIR] [--only NAME ...]

Leave the machine alone meanwhile: about an hour on two cores. --images: for `loader.py` and `feeding.py`, which are
left out without it. With --only the other sections stay as they are.
"""

import argparse
import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
README = HERE / "README.md"
COMMANDS = {
    "train_step": "--models ViT-Ti/16 ViT-B/16",
    "train_step_compiled": "--models ViT-Ti/16 ViT-B/16 --compile --contenders trainer bare timm",
    "trainer_overhead": "",
    "update_traffic": "",
    "zero_stages": "",
    "scaling": "",
    "startup": "",
    "startup_compiled": "--recipe b16_jft --batch 4 --compile",
    "order_scale": "--rounds 1",
    "loader": "",
    "feeding": "",
    "ridge_scale": "",
    "network": "--rounds 4 --steps 3",
    "many_nodes": "--nodes 1000",
    "step_traffic": "",
    "looking_inside": "",
    "looking_inside_h14": "--model ViT-H/14 --image-size 518 --images 16 --rounds 0",
}
_AS_PRE_TRAINED = "--zero 1 --compile --contenders trainer bare timm"
ON_A_GPU = {
    "train_step_gpu": f"--models ViT-B/16 ViT-L/16 --batch 256 {_AS_PRE_TRAINED} fp8",
    "train_step_gpu_h14": f"--models ViT-H/14 --batch 128 {_AS_PRE_TRAINED} fp8",
    "train_step_gpu_h14_mean": f"--models ViT-H/14 --batch 128 --pool mean {_AS_PRE_TRAINED}",
}
WITH_IMAGES = ("loader", "feeding")
MODES = ("_mean", "_h14", "_gpu", "_compiled")
HEADING = """# Benchmarks

Every program prints ratios against a peer, or against itself, measured in one run; `--json` gives one JSON object. A
ratio of speeds is the median over rounds, with its 95 % confidence interval (`paired.py`); a goal is missed where the
whole interval lies beyond it. None of them is a test, and no test looks at a clock. `python benchmarks/NAME.py --help`
says what the figures mean and what the goal is; IMAGES is a folder of photos. What was tried, what moved and what did
not is in [docs/LOG.md](../docs/LOG.md).

`python benchmarks/regenerate.py --images IMAGES` rewrites the sections below. Each is of the code of its date.
"""


def machine() -> str:
    """Processor or device, and versions."""
    with Path("/proc/cpuinfo").open() as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    where = f"{os.cpu_count()} cores of {names[0] if names else platform.machine()}"
    if torch.cuda.is_available():
        where = f"one {torch.cuda.get_device_name()}, {where}"
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "deepspeed", "timm"))
    return f"{where}; Python {platform.python_version()}, {versions}; {datetime.datetime.now(datetime.UTC).date()}"


def section(name: str, arguments: list[str], images: list[str]) -> str:
    """Run one program and show what it printed last, also where it missed its goal."""
    program = name
    for mode in MODES:
        program = program.removesuffix(mode)
    shown = " ".join(["python", f"benchmarks/{program}.py", *(["IMAGES"] if images else []), *arguments])
    print(shown, flush=True)
    command = [sys.executable, str(HERE / f"{program}.py"), *images, *arguments]
    environment = {**os.environ, **({} if name in ON_A_GPU else {"CUDA_VISIBLE_DEVICES": ""})}
    lines = []
    # Told as it comes, also how far a program is (on standard error): the machine may be taken away before the end.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE.parent, env=environment) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if not line.startswith(("preflight", "WARNING", "step ", "done")):  # what a trainer tells
                print(line, end="", flush=True)
                lines.append(line.rstrip("\n"))
    if run.returncode:
        lines.append(f"ended with {run.returncode}")
    return f"## {name}\n\n    $ {shown}\n" + "".join(f"    {line}\n" for line in lines) + f"\n{machine()}\n"


def main() -> None:
    commands = {**COMMANDS, **(ON_A_GPU if torch.cuda.is_available() else {})}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", help="a folder of images, for loader.py and feeding.py")
    parser.add_argument("--only", nargs="+", choices=commands, default=list(commands), metavar="NAME")
    options = parser.parse_args()
    text = README.read_text() if README.exists() else ""
    found = re.split(r"(?m)^## ", text)[1:]
    sections = {part.split("\n", 1)[0]: f"## {part.rstrip()}\n" for part in found}
    for name in options.only:
        if name in WITH_IMAGES and options.images is None:
            continue
        images = [options.images] if name in WITH_IMAGES else []
        sections[name] = section(name, commands[name].split(), images)
        ordered = [sections[name] for name in (*COMMANDS, *ON_A_GPU) if name in sections]
        README.write_text("\n".join([HEADING, *ordered]))


if __name__ == "__main__":
    main()
