"""Ranks of a few lines, which start in milliseconds."""

import sys
from pathlib import Path

from vitscale.launch import RankCommand

_PRELUDE = """
import faulthandler, json, os, signal, subprocess, sys, time
from pathlib import Path
rank, here = int(os.environ["RANK"]), Path(os.environ["HERE"])
faulthandler.register(signal.SIGUSR2)
def beat(step, phase="training"):
    line = json.dumps({"step": step, "phase": phase, "phase_s": 0.0}) + "\\n"
    os.write(int(os.environ["VITSCALE_HEARTBEAT_FD"]), line.encode())
def why(message):
    os.write(int(os.environ["VITSCALE_HEARTBEAT_FD"]), (json.dumps({"why": message}) + "\\n").encode())
def note(name, text=""):
    (here / f".{name}").write_text(str(text))
    (here / f".{name}").replace(here / name)
def wait_for(*names):
    while not all((here / name).exists() for name in names):
        time.sleep(0.01)
def checkpoint(step):
    (here / f"checkpoints/step-{step:08d}").mkdir(parents=True)
    (here / f"checkpoints/step-{step:08d}/index.json").touch()
"""


def ranks(here: Path, *bodies: str) -> list[RankCommand]:
    """One rank for each body, which may use the names of the prelude; `here` is where it leaves files."""
    return [
        RankCommand(rank, [sys.executable, "-I", "-S", "-c", _PRELUDE + body], {"RANK": str(rank), "HERE": str(here)})
        for rank, body in enumerate(bodies)
    ]
