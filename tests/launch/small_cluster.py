"""Launches of several nodes, processes of this machine, whose ranks are those of small_ranks.py."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from processes import started

from vitscale.ground.machine import hold_port

PROGRAM = Path(__file__).with_name("small_launch.py")
ROOT = PROGRAM.parents[2]
FOREVER = "note(f'pid-{rank}-{time.time_ns()}', os.getpid()); time.sleep(100)"
DONE = "note('DONE', '{}')"


class Cluster:
    """The launches of a run's nodes, and what they say."""

    def __init__(self, run_dir: Path, stack: ExitStack, nodes: int = 2) -> None:
        self.run_dir, self._stack, self._nodes = run_dir, stack, nodes
        with hold_port() as holder:
            self.port = holder.getsockname()[1]

    def start(
        self, node: int, *bodies: str, ranks: int = 1, wait: float = 30, nodes: int = 0, before: Sequence[str] = ()
    ):
        arguments = [node, nodes or self._nodes, self.port, self.run_dir, ranks, wait, *bodies]
        command = [*before, sys.executable, str(PROGRAM), *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{PROGRAM.parent}"}
        return self._stack.enter_context(started(command, env=environment, stderr=subprocess.PIPE))

    def pids(self) -> list[int]:
        return [int(path.read_text()) for path in self.run_dir.glob("pid-*")]

    def events(self, kind: str) -> list[dict]:
        lines = [json.loads(line) for line in (self.run_dir / "launch.jsonl").read_text().splitlines()]
        return [line for line in lines if line["event"] == kind]


def ends(*launches: subprocess.Popen, within: float = 30) -> list[tuple[int, str]]:
    """(exit code, what it said) of each."""
    shown = [launch.communicate(timeout=within)[1] for launch in launches]
    print(*shown, sep="\n--\n")
    return [(launch.returncode, text) for launch, text in zip(launches, shown, strict=True)]
